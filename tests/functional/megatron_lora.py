"""One rank of LoRA trainers under test, started on every rank by megatron_launch.py: `python megatron_lora.py FOLDER`.

As in megatron_worker.py, one launch runs all cases and rank 0 writes what was seen to FOLDER/<case>.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from examples.common import megatron_cpu

megatron_cpu.install()
megatron_cpu.import_bridge()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.bridge.peft.canonical_lora import CanonicalLoRA  # noqa: E402
from megatron.bridge.peft.dora import DoRA  # noqa: E402

from examples.common.train_loop import Trainer  # noqa: E402
from tests.functional.megatron_worker import Json, checkpoint, compare, gathered, held, run, truth  # noqa: E402
from xfer.errors import XferError  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402

ADAPTERS = dict(dim=4, alpha=6, lora_B_init_method="xavier")
MLA = ["linear_proj", "linear_fc1", "linear_fc2", "linear_q_down_proj", "linear_kv_up_proj"]
PLAIN = dict(distopt=False, overlap=False)
CASES: list[tuple[str, str, dict]] = [
    ("tp2-pp2-vpp2", "qwen3", dict(tp=2, pp=2, vpp=2)),
    ("tp4", "qwen3", dict(tp=4)),
    ("tp2-dp2-no-distopt", "qwen3", dict(tp=2, **PLAIN)),
    ("canonical-tp2-pp2", "qwen3", dict(tp=2, pp=2, lora=lambda: CanonicalLoRA(**ADAPTERS))),
    # Adapters on some modules only: what has none is sent from where it lies.
    ("some-tp2", "qwen3", dict(tp=2, lora=dict(ADAPTERS, target_modules=["*.layers.1.*.linear_qkv", "linear_fc2"]))),
    # One adapter for all experts of a rank; with overlap, Megatron's DDP misses gradients of it and asserts.
    ("moe-tp2-ep2-etp2", "qwen3_moe", dict(tp=2, ep=2, etp=2, **PLAIN)),
    ("moe-tp2-pp2-ep2-etp1", "qwen3_moe", dict(tp=2, pp=2, ep=2, etp=1, **PLAIN)),
    ("moe-ep4", "qwen3_moe", dict(ep=4, **PLAIN)),
    ("mla-tp2-ep2", "deepseek_v3", dict(tp=2, ep=2, etp=1, lora=dict(ADAPTERS, target_modules=MLA), **PLAIN)),
]


def merged(folder: Path, family: str, keywords: Json) -> Json | None:
    """Fragments, scratch included, against Bridge's own merged export, after each of two steps."""
    checkpoint(folder, family, {})
    with Trainer(folder, **{"lora": ADAPTERS, **keywords}) as trainer:
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        layout, steps, was = source.read(), [], {}
        for _ in range(2):
            loss = trainer.step()
            source.drain()
            state = source.check()
            source.compute()
            now = truth(trainer)
            changed = [n for n, t in now.items() if n in was and not torch.equal(t, was[n])]
            steps.append(dict(loss=loss, state=state, changed=len(changed), compared=compare(held(layout), now)))
            was = now
        computed, local = source.computed, sum(p.nbytes for c in trainer.chunks for p in c.parameters())
        facts = gathered(dict(
            recipes=len(layout.traced.recipes), scratch=computed.nbytes, gathered=computed.gathered_bytes, local=local,
            ops=sorted({op for r in layout.traced.recipes for op in r.ops}),
            digests=[x.digest() for x in computed.exchanges], trained=sorted(layout.trained),
        ))  # fmt: skip
        need = computed.nbytes + computed.gathered_bytes
        refused = refusal(MegatronTrainer(trainer.chunks, trainer.bridge, scratch_bytes=need - 1).read)
        fits = refusal(MegatronTrainer(trainer.chunks, trainer.bridge, scratch_bytes=need).read)
        adapter = next(m for c in trainer.chunks for m in c.modules() if hasattr(m, "linear_out"))
        adapter.linear_out.weight = torch.nn.Parameter(adapter.linear_out.weight.detach().clone())
        replaced = source.check()
        limits = gathered((refused, fits, replaced))
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        source.read()
        for m in (m for c in trainer.chunks for m in c.modules() if hasattr(m, "linear_out")):
            m.alpha *= 2
        state, layout = source.check(), source.read()
        source.compute()
        rescaled = dict(states=gathered((state, source.check())), compared=compare(held(layout), truth(trainer)))
    if dist.get_rank():
        return None
    return dict(steps=steps, ranks=facts, limits=limits, rescaled=rescaled)


def refusal(what: Callable[[], object]) -> str:
    try:
        what()
    except (XferError, KeyError) as e:  # torch's, of a group that is not there
        return f"{type(e).__name__}: {e}"
    return ""


def regrouped(folder: Path) -> Json | None:
    """Factors are gathered over groups that Megatron has destroyed and made again."""
    checkpoint(folder, "qwen3", {})
    with Trainer(folder, tp=2, pp=2, lora=ADAPTERS, **PLAIN) as trainer:
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        source.read()
        source.compute()
        before = source.check()
        trainer.ungroup()
        without = refusal(source.check)
        trainer.regroup()
        with torch.no_grad():
            for p in (p for c in trainer.chunks for p in c.parameters()):
                p.mul_(0.5)
        stale = refusal(source.compute)  # nobody looked
        states = [before, source.check()]
        layout = source.read()
        source.compute()
        states.append(source.check())
        found = dict(ranks=gathered((without, stale, states)), compared=compare(held(layout), truth(trainer)))
    with Trainer(folder, lora=ADAPTERS, **PLAIN) as trainer:  # whole factors on each rank
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        source.read()
        trainer.ungroup()
        found["alone"] = gathered(refusal(source.compute) or source.check())
        trainer.regroup()
    return None if dist.get_rank() else found


def dora(folder: Path) -> Json | None:
    """Bridge's export knows nothing of DoRA's magnitudes, and would leave them out without a word."""
    checkpoint(folder, "qwen3", {})
    with Trainer(folder, tp=2, pp=2, lora=lambda: DoRA(dim=4, alpha=6)) as trainer:
        seen = gathered(refusal(MegatronTrainer(trainer.chunks, trainer.bridge).read))
    return dict(refused=seen)


def main(folder: Path) -> None:
    megatron_cpu.init_world()
    for name, family, keywords in CASES:
        run(name, folder, lambda f, a=(family, keywords): merged(f, *a))
    run("regrouped", folder, regrouped)
    run("dora", folder, dora)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        import os
        import traceback

        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # peers may wait in a collective for this rank; do not wait for them
