"""One process, many small disasters: `python megatron_hazards.py FOLDER` writes FOLDER/hazards.json, {case: what was
seen}.

What goes wrong silently when conversion tasks or addresses are kept, and which layouts are refused before a byte moves.
The assertions are in test_megatron_hazards.py.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from pathlib import Path

from examples.common import megatron_cpu, toy

megatron_cpu.install()

import torch  # noqa: E402

from examples.common.train_loop import Trainer, build_chunks  # noqa: E402
from tests.functional.megatron_worker import region  # noqa: E402
from xfer.errors import XferError  # noqa: E402
from xfer.mesh.box import Box, whole  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402

CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


class _Quantized(torch.Tensor):
    """Stands for TransformerEngine's Float8Tensor."""


def checkpoint(folder: Path, family: str, **override) -> Path:
    toy.write_checkpoint(family, folder, **override)
    return folder


def error(f) -> dict:
    try:
        f()
    except XferError as e:
        return dict(kind=type(e).__name__, violations=list(e.violations), text=str(e))
    return dict(kind=None, violations=[], text="")


def same_as_export(trainer: Trainer, source: MegatronTrainer, layout, tensors) -> bool:
    """Values through `tensors`, one rank: equal to Bridge's export."""
    want, ok = trainer.exported(), True
    layout = type(layout)(layout.traced, layout.roots, tensors)
    for f in layout.traced.fragments:
        box = tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))
        ok &= torch.equal(region(layout, f), want[f.tensor][box])
    return ok


def first_of(trainer: Trainer, kind: str) -> torch.nn.Module:
    return next(m for chunk in trainer.chunks for m in chunk.modules() if type(m).__name__ == kind)


# -- storages and objects that are swapped -----------------------------------------------------------------------------


def _swap(folder: Path, swap, **keywords) -> dict:
    with Trainer(checkpoint(folder, "qwen3"), **keywords) as trainer:
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        layout = source.read()
        quiet = source.check()
        swap(trainer)
        seen = dict(quiet=quiet)
        bad = error(lambda: seen.update(state=source.check()))
        if bad["kind"]:
            return seen | dict(error=bad)
        if seen["state"] == "moved":
            seen["stale"] = not same_as_export(trainer, source, layout, layout.tensors)
            seen["right"] = same_as_export(trainer, source, layout, source.rebind())
        else:
            again = source.read()
            seen["right"] = same_as_export(trainer, source, again, again.tensors)
        return seen | dict(settled=source.check())


@case
def replaced_parameter(folder):
    def swap(trainer):
        layer = first_of(trainer, "TERowParallelLinear")
        layer.weight = torch.nn.Parameter(layer.weight.detach() + 1)

    return _swap(folder, swap, distopt=False, overlap=False)


@case
def repointed_data(folder):
    def swap(trainer):
        layer = first_of(trainer, "TERowParallelLinear")
        layer.weight.data = layer.weight.data + 1

    return _swap(folder, swap, distopt=False, overlap=False)


@case
def repointed_out_of_the_buffer(folder):
    def swap(trainer):
        layer = first_of(trainer, "TERowParallelLinear")
        layer.weight.data = layer.weight.data + 1

    return _swap(folder, swap, distopt=True)


@case
def other_strides(folder):
    def swap(trainer):
        layer = first_of(trainer, "TERowParallelLinear")
        layer.weight.data = (layer.weight.data + 1).t().contiguous().t()

    return _swap(folder, swap, distopt=False, overlap=False)


@case
def replaced_module(folder):
    def swap(trainer):
        mlp = first_of(trainer, "TransformerBlock").layers[1].mlp
        other = copy.copy(mlp.linear_fc2)
        other._parameters = {**other._parameters, "weight": torch.nn.Parameter(other.weight.detach() + 1)}
        mlp.linear_fc2 = other

    return _swap(folder, swap, distopt=False, overlap=False)


@case
def offloaded_storage(folder):
    def swap(trainer):
        first_of(trainer, "TERowParallelLinear").weight.untyped_storage().resize_(0)

    return _swap(folder, swap, distopt=False, overlap=False)


@case
def router_bias_turns_fp32(folder):
    """`module.bfloat16()` replaces the buffer objects; the router's next forward gives the bias a new fp32 storage."""
    with Trainer(checkpoint(folder, "deepseek_v3"), distopt=False, overlap=False) as trainer:
        source = MegatronTrainer(trainer.chunks, trainer.bridge)
        states = []

        def dtypes(layout):
            return sorted({f.dtype for f in layout.traced.fragments if f.tensor.endswith("correction_bias")})

        seen = [dtypes(source.read())]
        for chunk in trainer.chunks:
            chunk.bfloat16()
        states.append(source.check())
        seen.append(dtypes(source.read()))
        trainer.step()
        states.append(source.check())
        layout = source.read()
        seen.append(dtypes(layout))
        spec = {s.dtype for s in layout.traced.specs if s.name.endswith("correction_bias")}
        return dict(
            states=states,
            dtypes=seen,
            canonical=sorted(spec),
            right=same_as_export(trainer, source, layout, layout.tensors),
        )


# -- what is refused ---------------------------------------------------------------------------------------------------


@case
def sequential_experts(folder):
    from megatron.bridge.models.gpt_provider import local_layer_spec

    checkpoint(folder, "qwen3_moe")
    with Trainer(folder, load=False, moe_grouped_gemm=False, transformer_layer_spec=local_layer_spec) as trainer:
        return error(MegatronTrainer(trainer.chunks, trainer.bridge).read)


@case
def interleaved_gate_and_up(folder):
    """Megatron-Core 0.19 has these settings; an older one carries them as any other attribute."""
    from megatron.core.utils import get_model_config

    with Trainer(checkpoint(folder, "qwen3_moe"), distopt=False, overlap=False) as trainer:
        config = get_model_config(trainer.chunks[0])
        config.moe_mlp_glu_interleave_size, config.moe_shared_expert_glu_interleave_size = 32, 32
        config.gtp_weight_remat_size = 2
        return error(MegatronTrainer(trainer.chunks, trainer.bridge).read)


@case
def tied_with_virtual_stages(folder):
    checkpoint(folder, "qwen3_tied")
    return fake_read(folder, 1, 2, dict(pp=2, vpp=2), load=False)


@case
def quantized_parameters(folder):
    with Trainer(checkpoint(folder, "qwen3"), distopt=False, overlap=False) as trainer:
        for module in trainer.chunks[0].modules():
            if type(module).__name__ == "TERowParallelLinear":
                module._parameters["weight"] = module.weight.detach().as_subclass(_Quantized)
        return error(MegatronTrainer(trainer.chunks, trainer.bridge).read)


@case
def checkpoint_lacks_gate_and_up(folder):
    with Trainer(checkpoint(folder, "qwen3"), distopt=False, overlap=False) as trainer:
        names = [n for n, _, _ in toy.specs(toy.config("qwen3"))]
        lack = {"model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.gate_proj.weight"}
        return error(MegatronTrainer(trainer.chunks, trainer.bridge, hf_names=set(names) - lack).read)


@case
def another_checkpoint(folder):
    """The checkpoint on disk is not the model that is trained."""
    with Trainer(checkpoint(folder, "qwen3"), distopt=False, overlap=False) as trainer:
        toy.write_checkpoint("qwen3", folder, intermediate_size=160)
        return error(MegatronTrainer(trainer.chunks, trainer.bridge).read)


# -- what is accepted --------------------------------------------------------------------------------------------------


@case
def config_alone(folder):
    """A bridge without a checkpoint: refused without names; with names the same layout as with the checkpoint."""
    from transformers import AutoConfig

    with Trainer(checkpoint(folder, "qwen3"), distopt=False, overlap=False) as trainer:
        bare = megatron_cpu.import_bridge().from_hf_config(AutoConfig.from_pretrained(folder))
        names = [n for n, _, _ in toy.specs(toy.config("qwen3"))]
        with_names = MegatronTrainer(trainer.chunks, bare, hf_names=names).read()
        full = MegatronTrainer(trainer.chunks, trainer.bridge).read()
        return error(MegatronTrainer(trainer.chunks, bare).read) | dict(same=with_names.traced == full.traced)


@case
def padded_vocabulary_without_headers(folder):
    """The config's vocab_size alone says where the padding begins."""
    checkpoint(folder, "qwen3", vocab_size=150)
    padding = dict(should_pad_vocab=True, make_vocab_size_divisible_by=64)
    with Trainer(folder, load=False, distopt=False, overlap=False, **padding) as trainer:
        names = [n for n, _, _ in toy.specs(toy.config("qwen3"))]
        layout = MegatronTrainer(trainer.chunks, trainer.bridge, hf_names=names).read()
        rows = {s.name: s.shape[0] for s in layout.traced.specs}
        return dict(rows=[rows["model.embed_tokens.weight"], rows["lm_head.weight"]])


@case
def tied_checkpoint_that_lists_a_head(folder):
    with Trainer(checkpoint(folder, "qwen3_tied"), distopt=False, overlap=False) as trainer:
        names = [n for n, _, _ in toy.specs(toy.config("qwen3"))]  # untied: with lm_head.weight
        layout = MegatronTrainer(trainer.chunks, trainer.bridge, hf_names=names).read()
        return dict(names=[s.name for s in layout.traced.specs if s.shape[0] == 160])


@case
def fp32_trainer(folder):
    with Trainer(
        checkpoint(folder, "qwen3"), distopt=False, overlap=False, params_dtype=torch.float32, bf16=False
    ) as t:
        layout = MegatronTrainer(t.chunks, t.bridge).read()
        return dict(
            canonical=sorted({s.dtype for s in layout.traced.specs}),
            live=sorted({f.dtype for f in layout.traced.fragments}),
        )


# -- bigger worlds, one rank at a time ---------------------------------------------------------------------------------


def fake_read(folder: Path, rank: int, world: int, layout: dict, **build) -> dict:
    sizes = dict(zip(("tp", "pp", "vpp", "ep", "etp"), _PROVIDER))
    with megatron_cpu.fake_world(rank, world, **layout):
        bridge = megatron_cpu.import_bridge().from_hf_pretrained(str(folder))
        chunks = build_chunks(bridge, **{sizes[k]: v for k, v in layout.items()}, **build)
        out: dict = {}
        bad = error(lambda: out.update(layout=MegatronTrainer(chunks, bridge).read()))
        return bad if bad["kind"] else out


_PROVIDER = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _eight_ranks(folder: Path, family: str, layout: dict) -> dict:
    """Boxes of all ranks of a world of eight: is every element of every tensor held, and equally often?"""
    checkpoint(folder, family)
    count = {n: torch.zeros(s, dtype=torch.int8) for n, s, _ in toy.specs(toy.config(family))}
    outside = []
    for rank in range(8):
        seen = fake_read(folder, rank, 8, layout, load=False)
        if "layout" not in seen:
            return seen
        for f in seen["layout"].traced.fragments:
            box = Box(f.origin, f.extent)
            if box.intersect(whole(tuple(count[f.tensor].shape))) != box:
                outside.append(f.tensor)
            count[f.tensor][tuple(slice(o, e) for o, e in zip(box.origin, box.end))] += 1
    uneven = [n for n, c in count.items() if int(c.min()) != int(c.max())]
    return dict(
        missing=[n for n, c in count.items() if int(c.min()) == 0],
        uneven=uneven,
        outside=outside,
        holders=sorted({int(c.max()) for c in count.values()}),
    )


@case
def eight_ranks_qwen3_moe(folder):
    return _eight_ranks(folder, "qwen3_moe", dict(tp=2, pp=2, ep=2, etp=2))


@case
def eight_ranks_deepseek(folder):
    return _eight_ranks(folder, "deepseek_v3", dict(tp=4, pp=2, ep=4, etp=1))


def main() -> None:
    folder, seen = Path(sys.argv[1]), {}
    only = sys.argv[2:]
    megatron_cpu.import_bridge()
    fakes = [n for n in CASES if n.startswith("eight_ranks") or n == "tied_with_virtual_stages"]
    for name in sorted(CASES, key=lambda n: n not in fakes):  # fake worlds before the real one
        if only and name not in only:
            continue
        if name not in fakes:
            megatron_cpu.init_world()
        try:
            seen[name] = CASES[name](folder / name)
        except Exception:
            seen[name] = dict(crash=traceback.format_exc())
    (folder / "hazards.json").write_text(json.dumps(seen, default=str))


if __name__ == "__main__":
    main()
