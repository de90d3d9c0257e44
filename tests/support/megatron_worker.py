"""One rank of a Megatron trainer under test. A case (proc.obey) asserts what must be true on every rank. One case for each start: models
are never freed, nor process groups, whose threads wake again and again, so each further case would take longer than the one before.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from examples.common import megatron_cpu, toy

megatron_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from examples.common.train_loop import Trainer  # noqa: E402
from tests.support.layouts import differing, left_out, region  # noqa: E402
from tests.support.proc import obey  # noqa: E402
from tests.support.pulled_marks import Pair  # noqa: E402
from xfer.api import fence_before  # noqa: E402
from xfer.errors import XferError  # noqa: E402
from xfer.participants.refit import begin_drain  # noqa: E402
from xfer.trace.traced import TrainerLayout  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402

Pieces = list[tuple[str, tuple, torch.Tensor]]


# ---- a layout against Bridge's export


def held(layout: TrainerLayout) -> Pieces:
    """(tensor, origin, values now) of every fragment of this rank."""
    return [(f.tensor, f.origin, region(layout.tensors[f.root], f).detach().clone()) for f in layout.traced.fragments]


def truth(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Bridge's export, cut to the config's vocabulary (Bridge exports padding rows)."""
    rows = trainer.bridge.hf_pretrained.config.vocab_size
    vocab = ("model.embed_tokens.weight", "lm_head.weight")
    return {n: t[:rows] if n in vocab else t for n, t in trainer.exported().items()}


def wrong(pieces: Pieces, want: dict[str, torch.Tensor]) -> list[str]:
    """On rank 0: tensors of which all ranks' pieces have other bits than `want`, or lack an element. On other ranks nothing."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(pieces, everyone, dst=0)
    if everyone is None:
        return []
    seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in want.items()}
    bad = set()
    for name, origin, values in (p for part in everyone for p in part):
        box = tuple(slice(o, o + n) for o, n in zip(origin, values.shape))
        if name not in want or want[name].dtype != values.dtype or want[name][box].shape != values.shape:
            bad.add(name)
            continue
        seen[name][box] = True
        if not torch.equal(want[name][box].contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)):
            bad.add(name)
    return sorted(bad | {n for n, s in seen.items() if not bool(s.all())})


def right(source: MegatronTrainer, layout: TrainerLayout, trainer: Trainer) -> int:
    """Checks that fragments, scratch included, are what Bridge exports now. Returns how many tensors that are."""
    assert source.check() == "same"
    want = truth(trainer)
    assert not (bad := wrong(held(layout), want)), bad
    return len(want)


def gathered(mine: object) -> list:
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    return out


def adapter(trainer: Trainer, **keywords) -> MegatronTrainer:
    return MegatronTrainer(trainer.chunks, trainer.bridge, **keywords)


def checkpoint(folder: str, family: str, config: Mapping = {}) -> None:
    if dist.get_rank() == 0:
        toy.write_checkpoint(family, Path(folder), **config)
    dist.barrier()


def refusal(what: Callable[[], object]) -> str:
    """The error of a call that must be refused, "" if it is not."""
    try:
        what()
    except (XferError, KeyError) as e:  # torch's, of a group that is not there
        return f"{type(e).__name__}: {e}"
    return ""


# ---- layouts, gathers, probes, marks


def values(folder: str, family: str, config: dict, excused: list[str], **keywords) -> None:
    """Fragments hold what Bridge exports before training and, through the very same views, after two optimizer steps. `excused`: parts of
    names of parameters that are in no fragment: a tied copy, which the stage that embeds exports, and padding."""
    checkpoint(folder, family, config)
    cfg = json.loads(Path(folder, "config.json").read_text())
    on_disk = {n: (s, str(d).removeprefix("torch.")) for n, s, d in toy.specs(cfg)}
    with Trainer(folder, **keywords) as trainer:
        source = adapter(trainer)
        source.drain()
        layout = source.read()
        assert right(source, layout, trainer) > 40
        left = left_out(trainer.chunks, layout)
        assert not [n for n in left if not any(x in n for x in excused)], left
        assert any(gathered(left)) == bool(excused), "the excuse is not needed any more"
        before, fenced = [values.clone() for _, _, values in held(layout)], []
        look = lambda: fenced.append(all(map(torch.equal, before, (v for _, _, v in held(layout)))))  # noqa: E731
        fence_before(trainer.optimizer, look)
        source.fence_before(look)
        losses = [trainer.step(), trainer.step()]
        assert losses[1] < losses[0], "the second look sees the weights of the first"
        assert fenced[0] and not fenced[-1], "the fence comes before the first weight changes, and in each step"
        source.drain()
        right(source, layout, trainer)
        again = source.read()
        assert again.traced.fragments == layout.traced.fragments and again.roots == layout.roots
        assert all(on_disk[s.name] == (s.shape, s.dtype) for s in layout.traced.specs)
        assert not layout.traced.recipes
        names = set().union(*gathered({s.name for s in layout.traced.specs}))
        frozen = names.difference(*gathered(layout.trained))
        assert all(n.endswith("e_score_correction_bias") for n in frozen), frozen


def drains(folder: str, family: str, **keywords) -> None:
    """A refit without drain is stale, with it right, and training goes on as if nothing had been drained. A rank that drains alone waits
    for its peers, not beyond its deadline; nothing interrupts a gather, so it goes on until they call too."""
    if keywords.pop("layerwise", False):
        overlapped = overlaps_layerwise()
        keywords |= dict(distopt=False, optimizer=layerwise, ddp=dict(overlap_param_gather=overlapped))
    else:
        overlapped = keywords.get("overlap", True)
    checkpoint(folder, family)
    with Trainer(folder, **keywords) as trainer:
        undisturbed = [trainer.step() for _ in range(4)]
    with Trainer(folder, **keywords) as trainer:
        source = adapter(trainer)
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
        right(source, layout, trainer)
        assert losses == undisturbed
        trainer.step()
        ended = ends_alone(source)
        assert dist.get_rank() or ended != overlapped
        right(source, layout, trainer)
    with Trainer(folder, **keywords) as trainer:
        for _ in range(2):
            trainer.step()
        want = truth(trainer)
        assert not (bad := wrong(drained, want)), bad
        stale = wrong(raw, want)
        assert dist.get_rank() or bool(stale) == overlapped, "nothing was on its way: this proves nothing"


def overlaps_layerwise() -> bool:
    """Whether Megatron's own layer-wise optimizer can leave its gathers to the next forward, as of Megatron-Core 0.19."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    return hasattr(LayerWiseDistributedOptimizer, "set_bucket_layerwise_params_list")


def layerwise(chunks: list[torch.nn.Module]):
    """Megatron's own layer-wise optimizer, of Adam."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    overlap = chunks[0].ddp_config.overlap_param_gather
    groups = [
        {"params": some, "is_expert_parallel": expert, "is_decoupled_lr": False, "wd_mult": 1.0, "lr_mult": 1.0}
        for expert in (False, True)
        if (some := [p for c in chunks for p in c.parameters() if getattr(p, "allreduce", True) != expert])
    ]
    bf16 = get_model_config(chunks[0]).bf16
    config = OptimizerConfig(lr=1e-2, clip_grad=1.0, bf16=bf16, overlap_param_gather=overlap)
    more = dict(model_chunks=chunks) if overlap else {}
    inner, ours = [torch.optim.AdamW(groups, lr=1e-2)], ProcessGroupCollection.use_mpu_process_groups()
    return LayerWiseDistributedOptimizer(inner, config, ours, **more)


def ends_alone(source: MegatronTrainer) -> bool:
    """Rank 0 drains and the others do not; then they do. Whether rank 0 was done before."""
    alone = begin_drain(source, f"trainer {source.rank}") if source.rank == 0 else None
    ended = alone is not None and alone.wait(time.monotonic() + 1.0, lambda: False, 0.0)
    dist.barrier()  # not of the group that gathers
    drain = alone or begin_drain(source, f"trainer {source.rank}")
    assert drain.wait(time.monotonic() + 60.0, lambda: False, 0.0), "gathers do not end although all ranks have called"
    dist.barrier()
    return ended


def probes(folder: str, family: str, **keywords) -> None:
    """Numbers sent through Bridge's real collectives say the same as the trace, stand in where it cannot follow, and are not fooled by
    arithmetic."""
    from megatron.bridge.models.conversion import param_mapping

    checkpoint(folder, family)
    original = param_mapping.RowParallelMapping.megatron_to_hf

    def through_numpy(self, weights, module):
        """Needs real values: nothing that a trace could follow."""
        if weights is not None:
            weights = torch.from_numpy(weights.detach().float().numpy().copy()).to(weights.dtype)
        return original(self, weights, module)

    def doubled(self, weights, module):
        return {k: v * 2 for k, v in through_numpy(self, weights, module).items()}

    with Trainer(folder, **keywords) as trainer:
        traced = adapter(trainer, probe=False).read().traced

        def agrees(probe: bool | str) -> None:
            probed = adapter(trainer, probe=probe).read().traced
            assert not differing(probed, traced) and probed.specs == traced.specs

        agrees("all")
        with mock.patch.object(param_mapping.RowParallelMapping, "megatron_to_hf", through_numpy):
            refused = refusal(adapter(trainer, probe=False).read)
            assert "linear_proj.weight" in refused and "numpy" in refused
            agrees(True)
        with mock.patch.object(param_mapping.RowParallelMapping, "megatron_to_hf", doubled):
            assert "o_proj.weight" in refusal(adapter(trainer, probe=True).read)


def marks(folder: str, family: str, seed: int, **keywords) -> None:
    """Whatever writes the weights between refits, those who pull what is marked have this rank's bytes. What the distributed optimizer
    writes of them has no copies: all of a rank's weights if it has no data-parallel peers, else its part; the rest comes by gathers."""
    checkpoint(folder, family)
    rng = random.Random(seed)  # the same on all ranks
    with Trainer(folder, lr=2e-6, **keywords) as trainer:
        source, pair = adapter(trainer), Pair()
        for _ in range(2):
            source.mark_writes(trainer.optimizer)
        params = [p for chunk in trainer.chunks for p in chunk.parameters()]

        def parts(of: str) -> list[torch.Tensor]:
            """Of parameters, that Megatron's distributed optimizers have in these groups."""
            return [p for inner in trainer.optimizer.chained_optimizers for group in getattr(inner, of) for p in group]

        def storages() -> list[torch.Tensor]:
            source.drain()
            layout = source.read()
            return [layout.tensors[r.name] for r in layout.roots]

        events: dict[str, Callable[[], object]] = {
            "step": trainer.step,
            "one value": lambda: rng.choice(params).data.view(-1)[:1].add_(1.0),
            "a buffer of many": lambda: trainer.chunks[0].buffers[0].param_data.mul_(1.5),
            "a rank's own part and its masters": lambda: [
                m.data.mul_(2.0) for m in parts("shard_fp32_from_float16_groups")
            ],
            "masters anew": trainer.optimizer.reload_model_params,
        }
        whole, owned = sum(r.numel() for r in storages()), sum(t.nbytes for t in parts("shard_float16_groups"))
        pair.refit(storages(), "")
        kept = sum(t.numel() for t in pair.last._copies)
        assert 0 < owned and kept <= whole - owned + 2048 * len(params), (whole, owned, kept)
        for _ in range(2):
            trainer.step()
            moved = pair.refit(storages(), "")
            assert 0 < moved < whole / 3, (moved, whole)
        for _ in range(12):
            for what in rng.choices(list(events), [4, 1, 1, 1, 1], k=rng.randint(1, 3)):
                events[what]()
                source.drain()
            pair.refit(storages(), rng.choice(["", "", "", "one fails", "all fail", "sent, too", "interrupted"]))


# ---- LoRA


ADAPTERS = dict(dim=4, alpha=6, lora_B_init_method="xavier")
PLAIN = dict(distopt=False, overlap=False)


def adapted(trainer: Trainer) -> list[torch.nn.Module]:
    return [m for c in trainer.chunks for m in c.modules() if hasattr(m, "linear_out")]


def merged(
    folder: str, family: str, tensors: int, changes: int, biases: int = 0, targets=None, canonical=False, **layout
) -> None:
    """Fragments are Bridge's own merged export after each of two steps. `tensors`: how many Bridge exports; `changes`: how many a step
    changes; `biases`: those of them that balance experts, and are no weights."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    how = ADAPTERS if targets is None else dict(ADAPTERS, target_modules=targets)
    checkpoint(folder, family)
    with Trainer(folder, lora=(lambda: CanonicalLoRA(**how)) if canonical else how, **layout) as trainer:
        source = adapter(trainer)
        layout, was = source.read(), {}
        for _ in range(2):
            trainer.step()
            source.drain()
            source.compute()
            assert right(source, layout, trainer) == tensors
            now = truth(trainer)
            changed = {n for n, t in now.items() if n in was and not torch.equal(t, was[n])}
            was = now
        assert len(changed) == changes, "training did not change what it should have, so the second look says little"
        trained = set().union(*gathered(layout.trained))
        assert len(trained) == changes - biases, "what requires grad, merged, is what changed"
        keeps_its_share(trainer, source)
        replaced_or_rescaled(trainer, source)


def keeps_its_share(trainer: Trainer, source: MegatronTrainer) -> None:
    """Bridge gathers every weight whole. What is computed here is no more than what this rank has of the weights."""
    computed, local = source.computed, sum(p.nbytes for c in trainer.chunks for p in c.parameters())
    assert 0 < computed.nbytes <= local * 1.02
    assert computed.gathered_bytes < local // 2, "factors, not weights"
    ops = {op for r in source.read().traced.recipes for op in r.ops}
    assert ops == {"aten.add.Tensor", "aten.mm.default", "aten.mul.Tensor"}
    need = computed.nbytes + computed.gathered_bytes
    refused = refusal(adapter(trainer, scratch_bytes=need - 1).read)
    assert refused.startswith("Unsupported") and f"takes {need} bytes" in refused
    assert not refusal(adapter(trainer, scratch_bytes=need).read)


def replaced_or_rescaled(trainer: Trainer, source: MegatronTrainer) -> None:
    """Either is noticed. The scale is a constant of the recipes; what is read after it was changed is again what Bridge merges."""
    first = adapted(trainer)[0]
    first.linear_out.weight = torch.nn.Parameter(first.linear_out.weight.detach().clone())
    assert source.check() in ("moved", "changed"), "in a storage of its own, or no longer in the optimizer's"
    source = adapter(trainer)
    source.read()
    for m in adapted(trainer):
        m.alpha *= 2
    assert source.check() == "changed"
    layout = source.read()
    source.compute()
    right(source, layout, trainer)


def regrouped(folder: str) -> None:
    """Factors are gathered over groups that Megatron has destroyed and made again. Not a parameter has changed, and every later refit
    would have failed; none may begin while there are no groups."""
    checkpoint(folder, "qwen3")
    with Trainer(folder, tp=2, pp=2, lora=ADAPTERS, **PLAIN) as trainer:
        source = adapter(trainer)
        source.read()
        source.compute()
        assert source.check() == "same"
        trainer.ungroup()
        without = refusal(source.check)
        assert without.startswith("RebindError") and "initialize_model_parallel()" in without
        trainer.regroup()
        with torch.no_grad():
            for p in (p for c in trainer.chunks for p in c.parameters()):
                p.mul_(0.5)
        assert refusal(source.compute).startswith("KeyError"), "without a look"
        assert source.check() == "changed"
        layout = source.read()
        source.compute()
        right(source, layout, trainer)
    with Trainer(folder, lora=ADAPTERS, **PLAIN) as trainer:  # whole factors on each rank: nothing is gathered
        source = adapter(trainer)
        source.read()
        trainer.ungroup()
        assert not refusal(source.compute) and source.check() == "same"
        trainer.regroup()


def ungrouped(folder: str) -> None:
    """Models with process groups of their own, while Megatron-Core has none. Bridge then merges no adapters."""
    from megatron.bridge.models.conversion import model_bridge
    from megatron.core.utils import unwrap_model

    checkpoint(folder, "qwen3_moe")
    with Trainer(folder, tp=2, pp=2, ep=2, etp=1, **PLAIN) as trainer:
        now = truth(trainer)
        trainer.close()
        if not hasattr(model_bridge, "_get_pg_collection_from_model"):  # Bridge 0.3 asks Megatron-Core alone
            assert "no process groups of Megatron" in refusal(lambda: adapter(trainer))
            return
        with torch.no_grad():
            how = dict(cpu=True, show_progress=False, merge_adapter_weights=False)
            for n, t in trainer.bridge.export_hf_weights(trainer.chunks, **how):
                assert torch.equal(t[: len(now[n])], now[n]), "Bridge's own export needs no other groups"
        assert not (bad := wrong(held(adapter(trainer).read()), now)), bad
        for chunk in map(unwrap_model, trainer.chunks):
            chunk.pg_collection = None
        assert "no process groups of Megatron" in refusal(lambda: adapter(trainer))
    with Trainer(folder, tp=2, lora=ADAPTERS, **PLAIN) as trainer:
        trainer.close()
        refused = refusal(adapter(trainer).read)
        assert refused.startswith("LayoutError") and "only after initialize_model_parallel()" in refused, refused


def dora(folder: str) -> None:
    """Bridge's export knows nothing of DoRA's magnitudes, and would leave them out without a word."""
    from megatron.bridge.peft.dora import DoRA

    checkpoint(folder, "qwen3")
    with Trainer(folder, tp=2, pp=2, lora=lambda: DoRA(dim=4, alpha=6)) as trainer:
        refused = refusal(adapter(trainer).read)
        assert "trained tensors that would never reach an engine" in refused and "weight_magnitude" in refused


if __name__ == "__main__":
    megatron_cpu.import_bridge()
    megatron_cpu.init_world()
    obey(values, drains, marks, probes, merged, regrouped, ungrouped, dora)
