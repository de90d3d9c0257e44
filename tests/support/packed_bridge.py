"""What the packed route gathers from real Megatron-Core + Bridge ranks over gloo: `packed_bridge.py MODE FOLDER CASE…`.

values   each case's tensors, bucket by bucket, beside Bridge's own export; writes FOLDER/CASE.json
stale    what kept conversion tasks give after a framework moved things, and what the check makes of it; FOLDER/CASE.json
unchecked  one case in which nobody looks, alone in its processes since they may end of it; FOLDER/CASE.json, if they do not
fused    gpt-oss, whose checkpoint has all experts of a layer in one tensor and Megatron one parameter each; FOLDER/fused.json
cost     what the check costs in a gather where nothing changed; FOLDER/cost.json

The assertions are in tests/functional/test_packed_bridge.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from unittest import mock

from examples.common import megatron_cpu, toy

megatron_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from examples.common.train_loop import Trainer  # noqa: E402
from tests.support.packed_tensors import placed  # noqa: E402
from xfer.errors import RebindError  # noqa: E402
from xfer.packed import agree  # noqa: E402
from xfer.packed.source import PackedSource  # noqa: E402
from xfer.trainers.bridge_stream import BridgeStream  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402
from xfer.trainers.traced_stream import TracedStream  # noqa: E402

PLAIN = dict(distopt=False, overlap=False)
SMALL = dict(num_hidden_layers=2)
LORA = dict(lora=dict(dim=4, alpha=6, lora_B_init_method="xavier"))
CASES: dict[str, tuple[str, dict, dict]] = {
    "qwen3-tp2-pp2": ("qwen3", SMALL, dict(tp=2, pp=2, distopt=True)),
    "qwen3-tp2-pp2-lora": ("qwen3", SMALL, dict(tp=2, pp=2, **PLAIN, **LORA)),
    "qwen3_tied-tp2-pp2": ("qwen3_tied", SMALL, dict(tp=2, pp=2, **PLAIN)),
    "qwen3_moe-tp2-ep2-etp2": ("qwen3_moe", SMALL, dict(tp=2, ep=2, etp=2, **PLAIN)),
    "qwen3_moe-tp2-pp2-ep2-etp1": ("qwen3_moe", SMALL, dict(tp=2, pp=2, ep=2, etp=1, **PLAIN)),
    "deepseek_v3-tp2-pp2-ep2-etp1": ("deepseek_v3", SMALL, dict(tp=2, pp=2, ep=2, etp=1, distopt=True)),
    "deepseek_v3-pp2-ep2": ("deepseek_v3", SMALL, dict(pp=2, ep=2, **PLAIN)),
    "qwen3-padded-vpp2": (
        "qwen3",
        dict(vocab_size=250, num_hidden_layers=4),
        dict(tp=2, pp=2, vpp=2, **PLAIN, should_pad_vocab=True, make_vocab_size_divisible_by=40, load=False),
    ),
}
LIMIT = 48 << 10


def gathered(source: PackedSource, begin=None) -> dict[str, torch.Tensor]:
    plan, out = (begin or source.begin)(), {}
    for group in plan.groups:
        if not source.go_on(False):
            raise RuntimeError("told to stop")
        for name, tensor in source.tensors(group):
            out[name] = tensor.detach().clone()
    return out


def made(trainer: Trainer, **how) -> PackedSource:
    source = PackedSource(BridgeStream(MegatronTrainer(trainer.chunks, trainer.bridge), **how), LIMIT)
    source.read()
    return source


def wrong(got: dict[str, torch.Tensor], trainer: Trainer) -> list[str]:
    """Names that are not, bit for bit, what a fresh export gives; a padded vocabulary is exported padded."""
    want, rows = trainer.exported(), trainer.bridge.hf_pretrained.config.vocab_size
    tied = trainer.bridge.hf_pretrained.config.tie_word_embeddings
    bad = sorted((want.keys() ^ got.keys()) - ({"lm_head.weight"} if tied else set()))
    for name in want.keys() & got.keys():
        a, b = want[name], got[name]
        if a.shape[0] > b.shape[0] == rows:
            a = a[:rows]
        same = a.dtype == b.dtype and a.shape == b.shape
        same = same and torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        )
        bad += [] if same else [name]
    return bad


def values(folder: Path, names: list[str]) -> None:
    for name in names:
        family, model, layout = CASES[name]
        toy.write_checkpoint(family, folder / name, **model) if dist.get_rank() == 0 else None
        dist.barrier()
        with Trainer(folder / name, **layout) as trainer:
            source = made(trainer)
            trainer.step()
            source.drain()
            first = wrong(gathered(source), trainer)
            few = source.stream.collectives
            trainer.step()
            source.drain()
            state = source.check()
            second = wrong(gathered(source), trainer)
            plain = made(trainer, together=False)
            alone = wrong(gathered(plain), trainer)
            parts = traced(trainer)
            plan = source.plan
            seen = dict(
                first=first, second=second, alone=alone, parts=parts, state=state, built=source.built, collectives=few,
                groups=len(plan.groups), messages=plan.messages, longest=plan.buffer_bytes, tensors=len(plan.groups[-1].tensors),
                limit=LIMIT, dtypes=sorted({t.dtype for g in plan.groups for t in g.tensors}),
            )  # fmt: skip
        told(folder / f"{name}.json", seen)


def traced(trainer: Trainer) -> dict:
    """What is put together from the boxes of a trace, on ranks 0 and 2: in buffers, in short rounds, and as tensors; with
    another step's weights each time."""
    source = PackedSource(TracedStream(MegatronTrainer(trainer.chunks, trainer.bridge)), LIMIT)
    source.read()
    source.begin()
    if not source.writes:
        return dict(why=source.stream.why, wrong=[wrong(gathered(source), trainer)])
    source.assemble(dist.get_rank() in (0, 2))
    bad = []
    for step, rounds in enumerate((1 << 20, 1000, 1 << 20)):
        trainer.step()
        source.drain()
        state = source.check()
        source.stream.round_bytes = rounds
        source.forget()  # and found again
        source.check()
        got, _ = placed(source) if step < 2 else gathered_somewhere(source)
        said = wrong(got, trainer)  # on all ranks: it exports
        bad.append(said if source.stream.assembles else ["tensors where none belong"] * bool(got))
    return dict(
        why=source.stream.why, wrong=bad, state=state, longest=source.plan.buffer_bytes, groups=len(source.plan.groups)
    )


def gathered_somewhere(source: PackedSource) -> tuple[dict[str, torch.Tensor], int]:
    plan = source.begin()
    pairs = [(n, t.clone()) for g in plan.groups for n, t in source.tensors(g) if t is not None]
    return dict(pairs), len(pairs)


def told(path: Path, mine: dict) -> None:
    """All ranks' in one file, in rank order."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(every))


def owned(trainer: Trainer):
    """(module, key, parameter) of the first linear parameter of this rank's first layer."""
    for chunk in trainer.chunks:
        for path, module in chunk.named_modules():
            if "linear_proj" in path and "weight" in module._parameters and module._parameters["weight"] is not None:
                return module, "weight", module._parameters["weight"]
    raise RuntimeError("no linear layer here")


def refilled(trainer: Trainer, value: float) -> None:
    """Other values everywhere, so that whatever is old shows."""
    with torch.no_grad():
        for chunk in trainer.chunks:
            for p in chunk.parameters():
                p.add_(value)


def replaced(trainer: Trainer) -> None:
    if dist.get_rank() == 1:  # one stage alone: the other must hear of it
        module, key, p = owned(trainer)
        module._parameters[key] = torch.nn.Parameter(p.detach().clone() + 1)


def offloaded(trainer: Trainer) -> None:
    """Away and back, elsewhere, as the memory savers of RL loops do it, with a step's worth of change between; where the
    parameters lay, somebody else has written."""
    if dist.get_rank() == 1:
        for chunk in trainer.chunks:
            for p in chunk.parameters():
                old, p.data = p.data, p.data + 1
                old.fill_(float("nan"))


def away(trainer: Trainer) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Without bytes, as while offloaded; what brings them back."""
    if dist.get_rank() != 1:
        return []
    kept = [(p, p.data) for chunk in trainer.chunks for p in chunk.parameters()]
    for p, data in kept:
        p.data = torch.empty(0, dtype=data.dtype)
    return kept


def with_new_tensors(trainer: Trainer) -> None:
    """`_apply` gives a module new parameter and buffer objects."""
    for chunk in trainer.chunks:
        for module in chunk.modules():
            for table in (module._parameters, module._buffers):
                for key, t in list(table.items()):
                    if t is not None:
                        new = t.detach().clone() + (1 if t.is_floating_point() else 0)
                        same = torch.nn.Parameter(new, t.requires_grad) if table is module._parameters else new
                        same.__dict__.update(t.__dict__)
                        table[key] = same


def flipped(trainer: Trainer) -> bool:
    """What Megatron's router does to its bias on its first forward, bf16 to fp32 under the same buffer; and a step."""
    found = False
    for chunk in trainer.chunks:
        for module in chunk.modules():
            bias = getattr(module, "expert_bias", None)
            if bias is not None and hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()
                module.expert_bias.data.add_(0.25)
                found = True
    return found


def regrouped(trainer: Trainer) -> None:
    """Not a parameter is another one, but all process groups are."""
    trainer.ungroup()
    trainer.regroup()
    refilled(trainer, 0.5)


def half(trainer: Trainer) -> None:
    for chunk in trainer.chunks:
        for module in chunk.modules():
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias = module.expert_bias.bfloat16()


def stale(folder: Path, cases: list[str]) -> None:
    for name in cases:
        family = "qwen3" if name == "lora" else "deepseek_v3"
        toy.write_checkpoint(family, folder / "model", **SMALL) if dist.get_rank() == 0 else None
        dist.barrier()
        told(folder / f"{name}.json", _swapped(folder, SWAPS[name]) if name in SWAPS else globals()[f"_{name}"](folder))


def _swapped(folder: Path, change) -> dict:
    with Trainer(folder / "model", pp=2, **PLAIN) as trainer:
        source = made(trainer)
        gathered(source)
        source.check()
        change(trainer)
        without = _outcome(source, trainer)  # nobody looked: tasks are kept
        state = source.check()
        if state == "changed":
            source.read()
        with_check = wrong(gathered(source), trainer)
        return dict(without=without, state=state, right=with_check, built=source.built)


SWAPS = {"replaced": replaced, "applied": with_new_tensors, "regrouped": regrouped}


def _offloaded(folder: Path) -> dict:
    """By Bridge's kept tasks, and by the places that a trace found."""
    with Trainer(folder / "model", pp=2, **PLAIN) as trainer:
        source = made(trainer)
        parts = PackedSource(TracedStream(MegatronTrainer(trainer.chunks, trainer.bridge)), LIMIT)
        parts.read()
        seen = []
        for what in ("before", "without", "right"):
            if what == "without":
                offloaded(trainer)
            else:
                states = [x.check() for x in (source, parts)]
            by_tasks, by_places = gathered(source), placed(parts)[0]
            said = wrong(by_places, trainer)  # on all ranks: it exports
            seen.append(dict(tasks=wrong(by_tasks, trainer), places=said if by_places else []))
        before, without, right = seen
        return dict(
            before=before,
            without=without,
            right=right,
            states=states,
            writes=parts.writes,
            built=[source.built, parts.built],
        )


def unchecked(folder: Path, cases: list[str]) -> None:
    (name,) = cases
    toy.write_checkpoint("deepseek_v3", folder / "model", **SMALL) if dist.get_rank() == 0 else None
    dist.barrier()
    with Trainer(folder / "model", pp=2, **PLAIN) as trainer:
        half(trainer)
        source = made(trainer)
        before = gathered(source)
        (folder / f"began{dist.get_rank()}").write_text(json.dumps(wrong(before, trainer)))
        source.check()
        kept = {"flipped": flipped, "away": away}[name](trainer)
        dist.barrier()
        got = gathered(source)
        (folder / f"ended{dist.get_rank()}").touch()
        for p, data in kept if name == "away" else ():
            p.data = data
        told(folder / f"{name}.json", dict(without=wrong(got, trainer)))


def _flipped(folder: Path) -> dict:
    with Trainer(folder / "model", pp=2, **PLAIN) as trainer:
        half(trainer)
        source = made(trainer)
        before = {t.dtype for g in source.begin().groups for t in g.tensors}
        gathered(source)
        has = flipped(trainer)
        state = source.check()
        if state == "changed":
            source.read()
        right = wrong(gathered(source), trainer)
        after = {t.dtype for g in source.plan.groups for t in g.tensors}
        return dict(has=has, state=state, right=right, before=sorted(before), after=sorted(after), built=source.built)


def _empty(folder: Path) -> dict:
    with Trainer(folder / "model", pp=2, **PLAIN) as trainer:
        source = made(trainer)
        gathered(source)
        kept = away(trainer)
        try:
            source.check()
            error = ""
        except RebindError as e:
            error = str(e)
        for p, data in kept:
            p.data = data
        source.check()
        return dict(error=error, right=wrong(gathered(source), trainer), built=source.built)


def _lora(folder: Path) -> dict:
    with Trainer(folder / "model", pp=2, **PLAIN) as trainer:
        source = made(trainer)
        gathered(source)
        source.check()
        _attach(trainer)
        without = _outcome(source, trainer)
        state = source.check()
        if state == "changed":
            source.read()
        return dict(without=without, state=state, right=wrong(gathered(source), trainer), built=source.built)


def _attach(trainer: Trainer) -> None:
    """Adapters come to a model that has been synced without them, and have learnt something."""
    from megatron.bridge.peft.lora import LoRA

    trainer.chunks = LoRA(dim=4, alpha=6, lora_B_init_method="xavier")(trainer.chunks, training=True)


def _outcome(source: PackedSource, trainer: Trainer) -> list[str]:
    try:
        return wrong(gathered(source), trainer)
    except Exception as e:
        return [f"{type(e).__name__}: {e}"[:200]]


def ran_short(source: PackedSource) -> str:
    """A gather in which trainer 0 has no memory to stack the last of the experts that Bridge has kept for a tensor."""
    real, failed = torch.cat, []

    def cat(*args, **kwargs):
        if sys._getframe(1).f_globals["__name__"].endswith("gpt_oss_bridge") and not failed and dist.get_rank() == 0:
            failed.append(1)
            raise torch.OutOfMemoryError("tried to allocate")
        return real(*args, **kwargs)

    with mock.patch.object(torch, "cat", cat):
        try:
            gathered(source)
        except (torch.OutOfMemoryError, RuntimeError) as e:
            return str(e)
        finally:
            if failed:
                source.go_on(True)
    return ""


def fused(folder: Path) -> None:
    if dist.get_rank() == 0:
        from transformers import AutoConfig, AutoModelForCausalLM

        from tests.support.families import FAMILIES

        told_config = next(f for f in FAMILIES if f.name == "gpt-oss").config
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(told_config))
        config = AutoConfig.from_pretrained(folder / "model")
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(told_config))
    dist.barrier()
    with Trainer(folder / "model", ep=dist.get_world_size(), load=False, **PLAIN) as trainer:
        for chunk in trainer.chunks:
            for i, p in enumerate(chunk.parameters()):
                torch.manual_seed(1000 * i + dist.get_rank())
                p.data.normal_()
        source = made(trainer)
        refilled(trainer, 0.5)
        got = wrong(gathered(source), trainer)
        again = wrong(gathered(source), trainer)
        short = ran_short(source)
        refilled(trainer, 0.5)
        after = wrong(gathered(source), trainer)
        alone = wrong(gathered(made(trainer, together=False)), trainer)
        units = [g.positions for g in source.plan.groups]
        tasks = [t for t in source.stream._by_position.values() if t.key is not None]
        together = sum(
            any({t.position for t in tasks if t.key == k} <= set(u) for u in units) for k in {t.key for t in tasks}
        )
        told(
            folder / "fused.json",
            dict(
                wrong=got, again=again, short=short, after=after, alone=alone,
                keys=len({t.key for t in tasks}), together=together, groups=len(units),
                silent=sum(not t.tensors for t in tasks), collectives=source.stream.collectives,
            ),
        )  # fmt: skip


COST_TIMES = 15


def cost(folder: Path) -> None:
    """Gathers with the look of all ranks and without, one after the other. `waited`: of those with it, how long ranks took to agree, which
    is mostly waiting for who begins late; without it they wait in the first collective of the gather. Not the smallest toy: of two layers
    a gather takes as long as processes wait for each other anyway."""
    toy.write_checkpoint("deepseek_v3", folder / "model", num_hidden_layers=16) if dist.get_rank() == 0 else None
    dist.barrier()
    with Trainer(folder / "model", pp=2, **PLAIN) as trainer:
        source, agreed = made(trainer), agree.any_rank
        gathered(source)

        def unasked():
            agree.any_rank = lambda flag, fingerprint, device: flag
            try:
                return source.begin()
            finally:
                agree.any_rank = agreed

        seconds: dict[str, list[float]] = {"check": [], "with": [], "without": [], "waited": []}
        for k in range(2 * COST_TIMES):
            looks = k % 2 == 0
            dist.barrier()
            began = time.perf_counter()
            if looks:
                source.check()
                seconds["check"].append(time.perf_counter() - began)
            gathered(source, None if looks else unasked)
            dist.barrier()  # until the last rank is done, as an engine is
            seconds["with" if looks else "without"].append(time.perf_counter() - began)
            if looks:
                seconds["waited"].append(source.agreed_s)
        told(folder / "cost.json", dict(seconds, built=source.built))


if __name__ == "__main__":
    megatron_cpu.init_world()
    mode, where, *rest = sys.argv[1:]
    {"values": values, "stale": stale, "unchecked": unchecked}.get(mode, lambda folder, _: globals()[mode](folder))(
        Path(where), rest
    )
    dist.barrier()
    dist.destroy_process_group()
