"""What the packed route gathers from real Megatron-Core + Bridge ranks over gloo is what Bridge exports, bit for bit, and conversion
tasks that went stale are noticed on all ranks: they keep parameter objects, and shapes and dtypes of all pipeline stages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

from examples.common import megatron_cpu, toy

megatron_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from examples.common.train_loop import Trainer  # noqa: E402
from tests.support.packed_tensors import gathered, in_rounds_of, placed  # noqa: E402
from tests.support.proc import obey  # noqa: E402
from xfer.packed.source import PackedSource  # noqa: E402
from xfer.trainers.bridge_stream import BridgeStream  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402
from xfer.trainers.traced_stream import TracedStream  # noqa: E402

PLAIN = dict(distopt=False, overlap=False)
SMALL = dict(num_hidden_layers=2)
LORA = dict(dim=4, alpha=6, lora_B_init_method="xavier")
CASES: dict[str, tuple[str, dict, dict]] = {
    "qwen3-tp2-pp2": ("qwen3", SMALL, dict(tp=2, pp=2, distopt=True)),
    "qwen3-tp2-pp2-lora": ("qwen3", SMALL, dict(tp=2, pp=2, **PLAIN, lora=LORA)),
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


def made(trainer: Trainer, stream: type = BridgeStream) -> PackedSource:
    source = PackedSource(stream(MegatronTrainer(trainer.chunks, trainer.bridge)), LIMIT)
    source.read()
    return source


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def wrong(got: dict[str, torch.Tensor], trainer: Trainer) -> list[str]:
    """Names that are not, bit for bit, what a fresh export gives; a padded vocabulary is exported padded."""
    want, config = trainer.exported(), trainer.bridge.hf_pretrained.config
    bad = (want.keys() ^ got.keys()) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    for name in want.keys() & got.keys():
        a, b = want[name], got[name]
        a = a[: config.vocab_size] if a.shape[0] > b.shape[0] == config.vocab_size else a
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            bad.add(name)
    return sorted(bad)


def checkpoint(family: str, folder: Path, **model) -> Path:
    if dist.get_rank() == 0:
        toy.write_checkpoint(family, folder, **model)
    dist.barrier()
    return folder


# ---- values


def values(folder: str) -> None:
    for name, (family, model, layout) in CASES.items():
        with Trainer(checkpoint(family, Path(folder, name), **model), **layout) as trainer:
            source = made(trainer)
            for _ in range(2):
                trainer.step()
                source.drain()
                state = source.check()
                assert (bad := wrong(gathered(source)[0], trainer)) == [], (name, bad)
            assert state == "same" and source.built == 1, "an optimizer step changes values, not tasks"
            plan = source.plan
            assert len(plan.messages) >= len(plan.groups) > 3 and plan.buffer_bytes <= LIMIT, name
            assert source.stream.collectives <= 10, "one group's collectives are run together"
            if family == "deepseek_v3":
                assert "float32" in {t.dtype for g in plan.groups for t in g.tensors}, "the router's bias stays fp32"
            traced(trainer, name)


def traced(trainer: Trainer, name: str) -> None:
    """What is assembled from the boxes of a trace, on ranks 0 and 2: in buffers, in short rounds, and as tensors; with
    another step's weights each time. What is computed goes by Bridge's export."""
    source = made(trainer, TracedStream)
    plan = source.begin()
    assert source.writes == ("lora" not in name), source.stream.why
    if not source.writes:
        assert (bad := wrong(gathered(source)[0], trainer)) == [], (name, bad)
        return
    assert len(plan.groups) > 3 and plan.buffer_bytes <= LIMIT * 7 // 8, name
    source.assemble(dist.get_rank() in (0, 2))
    for rounds, gather in ((1 << 20, placed), (1000, placed), (1 << 20, gathered)):
        trainer.step()
        source.drain()
        source.check()
        in_rounds_of(source, rounds)
        got, _ = gather(source)
        bad = wrong(got, trainer)  # on all ranks: it exports
        assert bad == [] if source.assembly.here else got == {}, (name, rounds, bad)


# ---- what frameworks do to parameters


def refilled(trainer: Trainer, value: float) -> None:
    """Other values everywhere, so that old ones show."""
    with torch.no_grad():
        for chunk in trainer.chunks:
            for p in chunk.parameters():
                p.add_(value)


def replaced(trainer: Trainer) -> None:
    """One parameter object, on one stage alone: the other must be told."""
    if dist.get_rank() == 1:
        named = ((path, m) for chunk in trainer.chunks for path, m in chunk.named_modules())
        module = next(m for path, m in named if "linear_proj" in path and m._parameters.get("weight") is not None)
        module._parameters["weight"] = torch.nn.Parameter(module.weight.detach().clone() + 1)


def regrouped(trainer: Trainer) -> None:
    """Not a parameter is another one, but all process groups are."""
    trainer.ungroup()
    trainer.regroup()
    refilled(trainer, 0.5)


def adapted(trainer: Trainer) -> None:
    """Add trained LoRA adapters to a model that has been synced without them."""
    from megatron.bridge.peft.lora import LoRA

    trainer.chunks = LoRA(**LORA)(trainer.chunks, training=True)


def offloaded(trainer: Trainer) -> None:
    """Away and back, elsewhere, with other values; what is written meanwhile where the parameters lay must not be sent."""
    if dist.get_rank() == 1:
        for p in (p for chunk in trainer.chunks for p in chunk.parameters()):
            old, p.data = p.data, p.data + 1
            old.fill_(float("nan"))


def routers(trainer: Trainer) -> list[torch.nn.Module]:
    modules = (m for chunk in trainer.chunks for m in chunk.modules())
    return [m for m in modules if getattr(m, "expert_bias", None) is not None]


def flipped(trainer: Trainer) -> None:
    """What Megatron's router does to its bias on its first forward, bf16 to fp32 under the same buffer; and a step."""
    for router in routers(trainer):
        router._maintain_float32_expert_bias()
        router.expert_bias.data.add_(0.25)


STALE = dict(replaced=replaced, regrouped=regrouped, lora=adapted, offloaded=offloaded, flipped=flipped)


def stale(folder: str, cases: list[str]) -> None:
    for name in cases:
        family = "qwen3" if name == "lora" else "deepseek_v3"
        with Trainer(checkpoint(family, Path(folder, name), **SMALL), pp=2, **PLAIN) as trainer:
            went_stale(trainer, name)


def went_stale(trainer: Trainer, name: str) -> None:
    """By Bridge's kept tasks and, if that is how messages are assembled, by the places that a trace found."""

    def dtypes() -> list[str]:
        return sorted({t.dtype for g in sources[0].plan.groups for t in g.tensors})

    for router in routers(trainer) if name == "flipped" else ():
        router.expert_bias = router.expert_bias.bfloat16()
    sources = [made(trainer), *([made(trainer, TracedStream)] if name == "offloaded" else [])]
    for source in sources:
        assert outcome(source, trainer) == []
        source.check()
    before, rank = dtypes(), dist.get_rank()
    STALE[name](trainer)
    # Where a dtype changed, kept tasks have ranks disagree on the length of a broadcast: it hangs.
    without = [] if name == "flipped" else [outcome(s, trainer) for s in sources]
    states = [s.check() for s in sources]
    for source, state in zip(sources, states, strict=True):
        if state == "changed":
            source.read()
    assert (bad := [outcome(s, trainer) for s in sources]) == [[] for _ in sources], (name, bad)
    assert {s.built for s in sources} == {2}, "all ranks build anew when one has to"
    if name == "offloaded":  # tasks follow parameter objects; places that were kept do not
        assert states == (["moved"] * 2 if rank else ["same"] * 2) and sources[1].writes
        assert without[0] == [] and (rank or without[1]), "what was written there would have been sent"
    elif name == "replaced":
        assert states == ["moved" if rank else "same"], "only the stage that owns it can see it"
        assert len(without[0]) == 1, "old weights on both stages"
    elif name == "flipped":
        assert (before, dtypes()) == (["bfloat16"], ["bfloat16", "float32"])
    else:
        assert states != ["same"] and without[0], "old weights without the check"
        assert name != "regrouped" or "is not registered" in without[0][0], "mappings keep the groups of their making"


def outcome(source: PackedSource, trainer: Trainer) -> list[str]:
    try:
        got, _ = gathered(source)
    except Exception as e:
        return [f"{type(e).__name__}: {e}"[:200]]
    found = wrong(got, trainer)  # on all ranks: it exports
    return found if got else []


# ---- experts that a checkpoint fuses


def ran_short(source: PackedSource) -> str:
    """A gather in which trainer 0 has no memory to stack the last of the experts that Bridge has kept for a tensor."""
    failed = []

    def short(real):
        def joined(*args, **kwargs):
            caller = sys._getframe(1).f_globals["__name__"]
            if caller.endswith(("gpt_oss_bridge", "model_bridge")) and not failed and dist.get_rank() == 0:
                failed.append(1)
                raise torch.OutOfMemoryError("tried to allocate")
            return real(*args, **kwargs)

        return joined

    # Bridge 0.3 joins them in the model's own module, 0.6 where it exports any model.
    with mock.patch.multiple(torch, cat=short(torch.cat), stack=short(torch.stack)):
        try:
            gathered(source)
        except (torch.OutOfMemoryError, RuntimeError) as e:
            return str(e)
        finally:
            if failed:
                source.go_on(True)
    return ""


def fused(folder: str) -> None:
    model_folder = Path(folder, "model")
    if dist.get_rank() == 0:
        from transformers import AutoConfig, AutoModelForCausalLM

        from tests.support.families import FAMILIES

        config = json.dumps(next(f for f in FAMILIES if f.name == "gpt-oss").config)
        model_folder.mkdir()
        (model_folder / "config.json").write_text(config)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
        model.to(torch.bfloat16).save_pretrained(model_folder)
        (model_folder / "config.json").write_text(config)
    dist.barrier()
    with Trainer(model_folder, ep=dist.get_world_size(), load=False, **PLAIN) as trainer:
        for i, p in enumerate(p for chunk in trainer.chunks for p in chunk.parameters()):
            torch.manual_seed(1000 * i + dist.get_rank())
            p.data.normal_()
        source = made(trainer)
        for short in (False, False, True, False):
            refilled(trainer, 0.5)
            if short:
                assert ran_short(source) == ("told to stop" if dist.get_rank() else "tried to allocate")
            else:
                assert (bad := wrong(gathered(source)[0], trainer)) == [], bad
        units, tasks = [set(g.positions) for g in source.plan.groups], list(source.stream._by_position.values())
        keyed = [{t.position for t in tasks if t.key == key} for key in {t.key for t in tasks} - {None}]
        assert len(units) > 3 and len(keyed) == 8, "weights and biases of two projections in two layers"
        assert all(any(k <= u for u in units) for k in keyed), "each is whole in a group"
        assert sum(not t.tensors for t in tasks if t.key is not None) >= len(keyed)


if __name__ == "__main__":
    megatron_cpu.init_world()
    obey(values, stale, fused)
