"""One rank of a Megatron trainer under test: `python megatron_worker.py GROUP FOLDER CASE`, started on every rank by
megatron_launch.py.

Rank 0 writes what was seen to FOLDER/<case>.json. One case a launch: Megatron's models are never freed, nor their process
groups, whose threads wake again and again, so that each further case would take longer than the one before. The assertions are
in the test files; here is only what they need to know.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from examples.common import megatron_cpu, toy

megatron_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from examples.common.train_loop import Trainer  # noqa: E402
from xfer.errors import XferError  # noqa: E402
from xfer.participants.refit import begin_drain  # noqa: E402
from xfer.trace.traced import TrainerLayout  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402

Json = dict[str, object]

# (case, family, config overrides, Trainer keywords). Four ranks each.
VALUES = [
    ("qwen3-tp2-pp2", "qwen3", {}, dict(tp=2, pp=2)),
    ("qwen3-tp2-pp2-vpp2", "qwen3", {}, dict(tp=2, pp=2, vpp=2)),
    ("qwen3_tied-tp2-pp2", "qwen3_tied", {}, dict(tp=2, pp=2)),
    ("qwen3-tp4", "qwen3", {}, dict(tp=4)),
    ("qwen3-tp2-dp2", "qwen3", {}, dict(tp=2)),
    ("qwen3-tp2-dp2-no-distopt", "qwen3", {}, dict(tp=2, distopt=False, overlap=False)),
    ("qwen3-pp2-uneven", "qwen3", {}, dict(pp=2, num_layers_in_first_pipeline_stage=1)),
    ("qwen3-tp2-cp2", "qwen3", {}, dict(tp=2, cp=2)),
    ("qwen3-pp2-cp2-no-distopt", "qwen3", {}, dict(pp=2, cp=2, distopt=False)),
    ("qwen3_moe-ep2-cp2", "qwen3_moe", {}, dict(tp=2, ep=2, etp=1, cp=2)),
    ("deepseek_v3-tp2-cp2", "deepseek_v3", {}, dict(tp=2, cp=2)),
    ("qwen3_moe-tp2-pp2-ep2-etp1", "qwen3_moe", {}, dict(tp=2, pp=2, ep=2, etp=1)),
    ("qwen3_moe-tp2-ep2-etp2", "qwen3_moe", {}, dict(tp=2, ep=2, etp=2)),
    ("qwen3_moe-ep4", "qwen3_moe", {}, dict(ep=4)),
    ("qwen3_moe-ep2-dp", "qwen3_moe", {}, dict(ep=2)),
    ("deepseek_v3-tp2-pp2-ep2-etp1", "deepseek_v3", {}, dict(tp=2, pp=2, ep=2, etp=1)),
    ("deepseek_v3-ep2-no-distopt", "deepseek_v3", {}, dict(tp=2, ep=2, etp=1, distopt=False)),
    (
        "qwen3-padded-vocab",
        "qwen3",
        {"vocab_size": 150},
        dict(tp=4, should_pad_vocab=True, make_vocab_size_divisible_by=64, load=False),
    ),
]
DRAIN = [
    ("qwen3-dp4", "qwen3", dict()),
    ("qwen3-pp2-vpp2-align", "qwen3", dict(pp=2, vpp=2, align_param_gather=True)),
    ("qwen3_moe-ep2", "qwen3_moe", dict(ep=2)),
    ("qwen3_moe-pp2-no-overlap", "qwen3_moe", dict(pp=2, overlap=False)),
]


PROBE = [
    ("qwen3-tp2-pp2", "qwen3", dict(tp=2, pp=2)),
    ("qwen3_moe-tp2-pp2-ep2-etp1", "qwen3_moe", dict(tp=2, pp=2, ep=2, etp=1)),
    ("deepseek_v3-tp2-ep2", "deepseek_v3", dict(tp=2, ep=2, etp=1)),
]


# -- reading a layout back ---------------------------------------------------------------------------------------------


def region(layout: TrainerLayout, f) -> torch.Tensor:
    """The live elements of a fragment, as a view of its storage."""
    dtype = getattr(torch, f.dtype)
    flat = layout.tensors[f.root].view(dtype)
    return flat.as_strided(f.extent, tuple(s // dtype.itemsize for s in f.strides), f.offset // dtype.itemsize)


def held(layout: TrainerLayout) -> list[tuple[str, tuple, torch.Tensor]]:
    """(tensor, origin, values now) of every fragment of this rank."""
    return [(f.tensor, f.origin, region(layout, f).detach().clone()) for f in layout.traced.fragments]


def compare(pieces: list, want: dict[str, torch.Tensor]) -> Json | None:
    """On rank 0: all ranks' pieces against the full tensors. `wrong`: pieces whose bits differ; `missing`: tensors with
    an element that nobody holds; `unknown`: tensors that the export does not have."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(pieces, everyone, dst=0)
    if everyone is None:
        return None
    seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in want.items()}
    wrong, unknown = set(), set()
    for name, origin, values in (p for part in everyone for p in part):
        if name not in want:
            unknown.add(name)
            continue
        box = tuple(slice(o, o + n) for o, n in zip(origin, values.shape))
        seen[name][box] = True
        theirs = want[name][box]
        same = theirs.shape == values.shape and theirs.dtype == values.dtype
        if not same or not torch.equal(theirs.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)):
            wrong.add(name)
    missing = [n for n, s in seen.items() if not bool(s.all())]
    return dict(tensors=len(want), wrong=sorted(wrong), missing=missing, unknown=sorted(unknown))


def unowned_bytes(trainer: Trainer, layout: TrainerLayout) -> list[str]:
    """Storage-side witness, from the modules alone: parameters with a byte that no fragment reads, or that two read."""
    painted = {root: torch.zeros(t.numel(), dtype=torch.int8) for root, t in layout.tensors.items()}
    for f in layout.traced.fragments:
        size = getattr(torch, f.dtype).itemsize
        for byte in range(size):
            painted[f.root].as_strided(f.extent, f.strides, f.offset + byte).add_(1)
    by_address = {t.data_ptr(): painted[root] for root, t in layout.tensors.items()}
    bad = []
    for chunk in trainer.chunks:
        for name, p in chunk.named_parameters():
            base = p.untyped_storage().data_ptr()
            if base not in by_address:
                bad.append(f"{name}: not in any root")
                continue
            start = p.data_ptr() - base
            counts = by_address[base][start : start + p.numel() * p.element_size()]
            if not bool((counts == 1).all()):
                bad.append(f"{name}: {int((counts != 1).sum())} bytes of {counts.numel()}")
    return bad


def truth(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Bridge's export, cut to the config's vocabulary (Bridge exports padding rows)."""
    rows = trainer.bridge.hf_pretrained.config.vocab_size
    vocab = ("model.embed_tokens.weight", "lm_head.weight")
    return {n: t[:rows] if n in vocab else t for n, t in trainer.exported().items()}


# -- groups ------------------------------------------------------------------------------------------------------------


def values(folder: Path, family: str, override: Json, keywords: Json) -> Json | None:
    """Fragments read from live storages against Bridge's export: before training, and after two steps with the same
    layout."""
    checkpoint(folder, family, override)
    with Trainer(folder, **keywords) as trainer:
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        source.drain()
        layout = source.read()
        before = compare(held(layout), truth(trainer))
        unowned = gathered(unowned_bytes(trainer, layout))
        losses = [trainer.step(), trainer.step()]
        source.drain()
        state = source.check()
        after = compare(held(layout), truth(trainer))
        again = source.read()
        fragments = gathered(len(layout.traced.fragments))
        stable = gathered(again.traced.fragments == layout.traced.fragments and again.roots == layout.roots)
        specs = gathered({s.name: [list(s.shape), s.dtype] for s in layout.traced.specs})
        trained = gathered(layout.trained)
        known = [s.name for s in layout.traced.specs if s.name in on_disk(folder)]
        agree = gathered(all(on_disk(folder)[s.name] == (s.shape, s.dtype) for s in layout.traced.specs))
    if before is None:
        return None
    return dict(
        before=before,
        after=after,
        losses=losses,
        unowned=unowned,
        frozen=sorted({n for part in specs for n in part}.difference(*trained)),
        state=state,
        stable=stable,
        fragments=fragments,
        roots=len(layout.roots),
        specs_as_on_disk=agree,
        specs=len({n for part in specs for n in part}),
        known=len(known),
        recipes=len(layout.traced.recipes),
    )


def drains(folder: Path, family: str, keywords: Json) -> Json | None:
    """Is a refit without drain stale, with it right, and does training go on as if nothing had been drained?"""
    checkpoint(folder, family, {})
    with Trainer(folder, **keywords) as trainer:
        undisturbed = [trainer.step() for _ in range(4)]
    with Trainer(folder, **keywords) as trainer:
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        layout = source.read()
        losses = [trainer.step(), trainer.step()]
        raw = held(layout)
        source.drain()
        drained = held(layout)
        source.drain()  # a second refit at once: nothing is pending, nothing may break
        losses += [trainer.step()]
        source.drain()
        losses += [trainer.step()]
        source.drain()
        last = held(layout)
        want_last = truth(trainer)
        trainer.step()
        ended_alone = drain_late(source)
        late, want_late = held(layout), truth(trainer)
    with Trainer(folder, **keywords) as trainer:
        for _ in range(2):
            trainer.step()
        want = truth(trainer)
        without, with_drain, at_end = compare(raw, want), compare(drained, want), compare(last, want_last)
        late = compare(late, want_late)
    if without is None:
        return None
    return dict(
        undisturbed=undisturbed,
        losses=losses,
        without=without,
        drained=with_drain,
        at_end=at_end,
        ended_alone=ended_alone,
        late=late,
    )


def drain_late(source: MegatronTrainer) -> bool:
    """Rank 0 drains and the others do not; then they do. Whether rank 0 was done before."""
    alone = begin_drain(source, f"trainer {source.rank}") if source.rank == 0 else None
    ended = alone is not None and alone.wait(time.monotonic() + 1.0, lambda: False, 0.0)
    dist.barrier()  # not of the group that gathers
    if not (alone or begin_drain(source, f"trainer {source.rank}")).wait(time.monotonic() + 60.0, lambda: False, 0.0):
        raise RuntimeError("gathers do not end although all ranks have called")
    dist.barrier()
    return ended


def painted(layout: TrainerLayout) -> dict[str, torch.Tensor]:
    """Per checkpoint tensor int64 [shape]: which byte of which root each element begins at, -1 where another rank holds
    it. Two layouts that say the same in other boxes paint the same."""
    number = {root.name: i for i, root in enumerate(layout.roots)}
    out = {s.name: torch.full(s.shape, -1, dtype=torch.int64) for s in layout.traced.specs}
    for f in layout.traced.fragments:
        at = torch.full(f.extent, (number[f.root] << 40) + f.offset, dtype=torch.int64)
        for d, (n, stride) in enumerate(zip(f.extent, f.strides)):
            at += (torch.arange(n) * stride).view([n if k == d else 1 for k in range(len(f.extent))])
        out[f.tensor][tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))] = at
    return out


def probes(folder: Path, family: str, keywords: Json) -> Json | None:
    """Symbolic trace against numbers sent through Bridge's real collectives; then a conversion that cannot be
    traced."""
    from megatron.bridge.models.conversion import param_mapping

    checkpoint(folder, family, {})
    with Trainer(folder, **keywords) as trainer:
        plain = MegatronTrainer(trainer.chunks, trainer.bridge)
        traced = plain.read()
        every = MegatronTrainer(trainer.chunks, trainer.bridge, probe="all").read()
        same = paints_equal(traced, every)

        original = param_mapping.RowParallelMapping.megatron_to_hf

        def through_numpy(self, weights, module):
            """Real values are needed here: nothing that a trace could follow."""
            if weights is not None:
                weights = torch.from_numpy(weights.detach().float().numpy().copy()).to(weights.dtype)
            return original(self, weights, module)

        param_mapping.RowParallelMapping.megatron_to_hf = through_numpy
        try:
            refused = ""
            try:
                plain.read()
            except XferError as e:
                refused = str(e)
            fallback = paints_equal(traced, MegatronTrainer(trainer.chunks, trainer.bridge, probe=True).read())

            def doubled(self, weights, module):
                out = through_numpy(self, weights, module)
                return {k: v * 2 for k, v in out.items()}

            param_mapping.RowParallelMapping.megatron_to_hf = doubled
            computed = ""
            try:
                MegatronTrainer(trainer.chunks, trainer.bridge, probe=True).read()
            except XferError as e:
                computed = str(e)
        finally:
            param_mapping.RowParallelMapping.megatron_to_hf = original
        seen = gathered((same, fallback, refused, computed))
    return dict(same=[s[0] for s in seen], fallback=[s[1] for s in seen], refused=refused, computed=computed)


def paints_equal(a: TrainerLayout, b: TrainerLayout) -> bool:
    x, y = painted(a), painted(b)
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) and a.traced.specs == b.traced.specs


def context_parallel(folder: Path, family: str) -> Json | None:
    """Losses of three steps in fp32, with the sequence cut over two ranks and with the same batches uncut."""
    checkpoint(folder, family, {})
    losses = []
    for layout in (dict(tp=2, cp=2), dict(tp=2, pp=2)):
        with Trainer(folder, **layout, params_dtype=torch.float32, bf16=False) as trainer:
            losses.append([trainer.step() for _ in range(3)])
    return dict(cut=losses[0], whole=losses[1])


def learns(folder: Path) -> Json | None:
    """The combination that was not tried before: bf16, fp32 masters, distributed Adam, both overlaps, tp2 pp2 ep2
    etp1."""
    checkpoint(folder, "qwen3_moe", {})
    with Trainer(folder, tp=2, pp=2, ep=2, etp=1) as trainer:
        dtypes = sorted({str(p.dtype) for c in trainer.chunks for p in c.parameters()})
        overlapped = all(c.ddp_config.overlap_param_gather and c.ddp_config.overlap_grad_reduce for c in trainer.chunks)
        losses = [trainer.step() for _ in range(10)]
        trainer.export(folder / "exported")
    return dict(losses=losses, dtypes=dtypes, overlapped=overlapped)


# -- harness -----------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, family: str, override: Json) -> None:
    if dist.get_rank() == 0:
        toy.write_checkpoint(family, folder, **override)
    dist.barrier()


def on_disk(folder: Path) -> dict[str, tuple]:
    cfg = json.loads((folder / "config.json").read_text())
    return {n: (s, str(d).removeprefix("torch.")) for n, s, d in toy.specs(cfg)}


def gathered(mine: object) -> list:
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    return out


def run(name: str, folder: Path, case: Callable[[Path], Json | None]) -> None:
    try:
        seen = case(folder / name)
    except XferError as e:
        seen = dict(error=type(e).__name__, text=str(e))
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(seen))
    dist.barrier()


def cases(group: str) -> dict[str, Callable[[Path], Json | None]]:
    if group == "values":
        return {name: partial(values, family=f, override=o, keywords=k) for name, f, o, k in VALUES}
    if group == "probes":
        return {name: partial(probes, family=f, keywords=k) for name, f, k in PROBE}
    both = {f"{f}-context-parallel": partial(context_parallel, family=f) for f in ("qwen3", "deepseek_v3")}
    return {name: partial(drains, family=f, keywords=k) for name, f, k in DRAIN} | {"learns": learns} | both


def main() -> None:
    group, folder, name = sys.argv[1:]
    megatron_cpu.import_bridge()
    megatron_cpu.init_world()
    run(name, Path(folder), cases(group)[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        import os

        os._exit(1)  # peers may wait in a collective for this rank; do not wait for them
