"""Many small disasters in one process (proc.obey). Running Megatron on a CPU patches the process, so this is not pytest's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from examples.common import megatron_cpu, toy
from examples.common.train_loop import Trainer, build_chunks, megatron_names
from tests.support.layouts import region
from tests.support.megatron_worker import PLAIN, adapter
from tests.support.proc import obey
from xfer.errors import LayoutError, RebindError, Unsupported, XferError
from xfer.trainers.megatron import MegatronTrainer


class _Quantized(torch.Tensor):
    """Stands for TransformerEngine's Float8Tensor."""


def built(folder: Path, family: str = "qwen3", config: Mapping = {}, **keywords) -> Trainer:
    toy.write_checkpoint(family, folder, **config)
    return Trainer(folder, **{**PLAIN, **keywords})


def names() -> list[str]:
    """Tensors of an untied Qwen3 checkpoint."""
    return [n for n, _, _ in toy.specs(toy.config("qwen3"))]


def refused(kind: type[XferError], call: Callable[[], object]) -> XferError:
    return pytest.raises(kind, call).value


def same_as_export(trainer: Trainer, layout, tensors) -> bool:
    """Whether values through `tensors`, of one rank, are those that Bridge exports."""
    want = trainer.exported()
    return all(torch.equal(region(tensors[f.root], f), want[f.tensor][f.index]) for f in layout.traced.fragments)


def first_of(trainer: Trainer, kind: str) -> torch.nn.Module:
    return next(m for chunk in trainer.chunks for m in chunk.modules() if type(m).__name__ == kind)


# ---- before there is a world


def process_groups_must_exist(folder):
    from megatron.core import parallel_state

    class Bridge:
        """The part of an AutoBridge that is used before a layout is read."""

        _model_bridge = hf_pretrained = None

    net = torch.nn.Linear(2, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (line,) = refused(Unsupported, lambda: MegatronTrainer([net], Bridge())).violations
    assert line.startswith("no process groups of Megatron:") and "initialize_model_parallel()" in line
    parallel_state.initialize_model_parallel()
    for model in (net, [net], torch.nn.ModuleList([net])):
        assert MegatronTrainer(model, Bridge()).chunks == [net]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def tied_with_virtual_stages(folder):
    toy.write_checkpoint("qwen3_tied", folder)
    layout = dict(pp=2, vpp=2)
    with megatron_cpu.fake_world(1, 2, **layout):
        bridge = megatron_cpu.import_bridge().from_hf_pretrained(str(folder))
        source = MegatronTrainer(build_chunks(bridge, **megatron_names(layout), load=False), bridge)
        assert "virtual" in refused(Unsupported, source.read).violations[0]


# ---- storages and objects that are swapped


def _replaced_module(layer, trainer):
    mlp = first_of(trainer, "TransformerBlock").layers[1].mlp
    other = copy.copy(mlp.linear_fc2)
    other._parameters = {**other._parameters, "weight": torch.nn.Parameter(other.weight.detach() + 1)}
    mlp.linear_fc2 = other


SWAPS = (
    ("moved", PLAIN, lambda layer, _: setattr(layer, "weight", torch.nn.Parameter(layer.weight.detach() + 1))),
    ("moved", PLAIN, lambda layer, _: setattr(layer.weight, "data", layer.weight.data + 1)),
    ("changed", {}, lambda layer, _: setattr(layer.weight, "data", layer.weight.data + 1)),  # out of the buffer
    ("changed", PLAIN, lambda layer, _: setattr(layer.weight, "data", (layer.weight.data + 1).t().contiguous().t())),
    ("changed", PLAIN, _replaced_module),
)
"""What is told, the trainer, and the change. "moved": only addresses are new; "changed": the layout has to be read again."""


def storages_and_objects_that_are_swapped_and_then_offloaded(folder):
    for number, (state, how, swap) in enumerate(SWAPS):
        toy.write_checkpoint("qwen3", folder / str(number))
        with Trainer(folder / str(number), **how) as trainer:
            source = adapter(trainer)
            layout = source.read()
            assert source.check() == "same"
            swap(first_of(trainer, "TERowParallelLinear"), trainer)
            assert source.check() == state
            if state == "moved":
                assert not same_as_export(trainer, layout, layout.tensors), "this proves nothing"
                now = source.rebind()
            else:
                layout = source.read()
                now = layout.tensors
            assert same_as_export(trainer, layout, now)
            assert source.check() == "same"
            first_of(trainer, "TERowParallelLinear").weight.untyped_storage().resize_(0)  # offloaded
            (line,) = refused(RebindError, source.check).violations
            assert "linear_proj.weight" in line


def router_bias_turns_fp32(folder):
    """`module.bfloat16()` replaces the buffer objects; the router's next forward gives the bias a new fp32 storage."""
    with built(folder, "deepseek_v3") as trainer:
        source = adapter(trainer)

        def bias_is(dtype: str) -> None:
            layout = source.read()
            assert {f.dtype for f in layout.traced.fragments if f.tensor.endswith("correction_bias")} == {dtype}
            canonical = {s.dtype for s in layout.traced.specs if s.name.endswith("correction_bias")}
            assert canonical == {"float32"}, "the checkpoint's, whatever the parameter is at the moment"
            assert same_as_export(trainer, layout, layout.tensors) or dtype == "bfloat16"

        bias_is("float32")
        for chunk in trainer.chunks:
            chunk.bfloat16()
        assert source.check() == "changed"
        bias_is("bfloat16")
        trainer.step()
        assert source.check() == "changed"
        bias_is("float32")


# ---- what is refused by name


def sequential_experts(folder):
    from megatron.bridge.models.gpt_provider import local_layer_spec

    spec = dict(load=False, moe_grouped_gemm=False, transformer_layer_spec=local_layer_spec)
    with built(folder, "qwen3_moe", distopt=True, overlap=True, **spec) as trainer:
        lines = refused(Unsupported, adapter(trainer).read).violations
        assert len(lines) == 4 and all("SequentialMLP" in v and "moe_grouped_gemm" in v for v in lines)


def settings_that_rearrange_live_weights(folder):
    """Megatron-Core 0.19 has them; an older config carries them as any other attribute."""
    from megatron.core.utils import get_model_config

    settings = dict(
        moe_mlp_glu_interleave_size=32, moe_shared_expert_glu_interleave_size=32, moe_single_grouped_weight=True,
        moe_single_grouped_bias=True, gtp_weight_remat_size=2, expert_gtp_weight_remat_size=2,
    )  # fmt: skip
    with built(folder, "qwen3_moe") as trainer:
        vars(get_model_config(trainer.chunks[0])).update(settings)
        lines = refused(Unsupported, adapter(trainer).read).violations
        assert [v.split(": ")[1] for v in lines] == [f"{name}={value}" for name, value in settings.items()]


def megatron_fsdp(folder):
    """By Megatron-Core's option, and by the wrapper of its package. The wrapper itself can be built on GPUs alone."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP

    with built(folder, distopt=True, overlap=True) as trainer:
        chunk = trainer.chunks[0]
        wrapper = MegatronFSDP.__new__(MegatronFSDP)
        torch.nn.Module.__init__(wrapper)
        wrapper.module = chunk
        assert "Megatron-FSDP" in str(refused(Unsupported, MegatronTrainer([wrapper], trainer.bridge).read))
        chunk.ddp_config.use_megatron_fsdp = True
        assert "Megatron-FSDP" in str(refused(Unsupported, adapter(trainer).read))


def quantized_parameters_all_at_once(folder):
    with built(folder) as trainer:
        for module in trainer.chunks[0].modules():
            if type(module).__name__ == "TERowParallelLinear":
                module._parameters["weight"] = module.weight.detach().as_subclass(_Quantized)
        lines = refused(Unsupported, adapter(trainer).read).violations
        assert len(lines) == 8 and all("_Quantized" in v for v in lines)


def a_checkpoint_that_is_not_the_models(folder):
    with built(folder) as trainer:
        # Bridge exports neither, and only logs it.
        lack = {"model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.gate_proj.weight"}
        lines = refused(LayoutError, adapter(trainer, hf_names=set(names()) - lack).read).violations
        assert [v.partition(".mlp")[0] for v in lines] == ["0:decoder.layers.1", "0:decoder.layers.2"]
        bare = megatron_cpu.import_bridge().from_hf_config(AutoConfig.from_pretrained(folder))
        assert "hf_names" in str(refused(LayoutError, MegatronTrainer(trainer.chunks, bare).read))
        with_names = MegatronTrainer(trainer.chunks, bare, hf_names=names()).read()
        assert with_names.traced == adapter(trainer).read().traced
        toy.write_checkpoint("qwen3", folder, intermediate_size=160)
        lines = refused(LayoutError, adapter(trainer).read).violations
        assert len(lines) == 12 and all("192" in v and "160" in v for v in lines)


# ---- what is accepted


def padding_of_a_vocabulary_without_headers_is_in_no_fragment(folder):
    """The config's vocab_size alone says where the padding begins."""
    padding = dict(load=False, should_pad_vocab=True, make_vocab_size_divisible_by=64)
    with built(folder, config={"vocab_size": 150}, **padding) as trainer:
        rows = {s.name: s.shape[0] for s in adapter(trainer, hf_names=names()).read().traced.specs}
        assert rows["model.embed_tokens.weight"] == rows["lm_head.weight"] == 150


def a_tied_head_that_the_checkpoint_lists_is_one_tensor(folder):
    with built(folder, "qwen3_tied") as trainer:
        specs = adapter(trainer, hf_names=names()).read().traced.specs
        assert [s.name for s in specs if s.shape[0] == 160] == ["model.embed_tokens.weight"]


def an_fp32_trainer_keeps_the_checkpoints_dtypes(folder):
    with built(folder, params_dtype=torch.float32, bf16=False) as trainer:
        traced = adapter(trainer).read().traced
        assert {s.dtype for s in traced.specs} == {"bfloat16"} and {f.dtype for f in traced.fragments} == {"float32"}


def a_router_and_a_head_in_fp32_are_read_as_they_are(folder):
    """Frameworks keep these two in float32 for RL; the checkpoint stays in bfloat16."""
    with built(folder, "qwen3_moe") as trainer:
        wide = {"TopKRouter", "ColumnParallelLinear"}
        for module in trainer.chunks[0].modules():
            if type(module).__name__ in wide:
                module.weight.data = module.weight.data.float() + 2**-12
        layout = adapter(trainer).read()
        dtypes = {f.tensor: f.dtype for f in layout.traced.fragments}
        in_fp32 = {name for name, kind in dtypes.items() if kind == "float32"}
        assert in_fp32 == {n for n in dtypes if n == "lm_head.weight" or n.endswith("mlp.gate.weight")}
        assert {s.dtype for s in layout.traced.specs} == {"bfloat16"}
        assert same_as_export(trainer, layout, layout.tensors)


def hazard(name: str, folder: str) -> None:
    """Cases with a world of their own come before the real one."""
    if name not in ("process_groups_must_exist", "tied_with_virtual_stages"):
        megatron_cpu.init_world()
    globals()[name](Path(folder))


if __name__ == "__main__":
    megatron_cpu.import_bridge()
    obey(hazard)
