"""What the packed route makes of a vLLM worker's model, without vLLM: which parameters its loader has reached, told by the
names that it answers with; what it refuses, and what it lets pass.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from xfer.engines.live import LiveSlot
from xfer.engines.offload import refuse_offloaded
from xfer.engines.vllm_loader import PackedModel, reached_by
from xfer.errors import LayoutError, Unsupported, out_of_memory


def slots(*names: str) -> dict[str, LiveSlot]:
    return {n: LiveSlot(n, True, f"storage of {n}", 0, (2,), (2,), torch.bfloat16) for n in names}


def test_names_as_vllm_0_25_answers_them():
    """Its runner of experts leaves out the part that holds them; seen on GPUs, where the whole refit was refused."""
    held = slots("layers.0.mlp.experts.routed_experts.w13_weight", "layers.0.mlp.gate.weight", "norm.weight")
    said = {"layers.0.mlp.experts.w13_weight", "norm.weight"}
    assert reached_by(said, held) == {
        "storage of layers.0.mlp.experts.routed_experts.w13_weight",
        "storage of norm.weight",
    }


def test_an_answer_that_may_mean_two_parameters_counts_for_neither():
    held = slots("layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight")
    assert reached_by({"layers.0.weight", "weight", "other.weight"}, held) == set()


@pytest.mark.parametrize(
    "left_out, said", [(None, ""), *((n, f"{n}: ") for n in ("a.weight", "a.bias", "a.attention.q_scale"))]
)
def test_what_processing_makes_is_not_asked_for_and_what_it_replaces_is(monkeypatch, left_out, said):
    """As vLLM quantizes: `weight` becomes something else of that name with a scale beside it, `bias` is packed under another. And
    attention has a scale only while a checkpoint is loaded, in case that it has one: asked for where an earlier one brought its own."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("_q_scale", torch.tensor(0.5 if left_out == "a.attention.q_scale" else 1.0))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))

        def process(self):
            self.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
            self.weight_scale = torch.nn.Parameter(torch.ones(1))
            del self.bias
            self.packed = torch.nn.Parameter(torch.zeros(4))

    def opened(model):
        model.a.attention.q_scale = torch.nn.Parameter(torch.zeros((), device="meta"))
        del model.a.weight_scale, model.a.packed
        model.a.weight, model.a.bias = (torch.nn.Parameter(torch.zeros(s, device="meta")) for s in ((2, 2), (2,)))

    root = torch.nn.Module()
    root.a = Layer()
    root.a.attention = Attention()
    root.a.process()
    root.load_weights = lambda weights: {n for n, _ in weights}
    model = PackedModel(Engine())
    model.engine.model, model.engine._lock, model._layerwise = root, None, True
    monkeypatch.setattr(PackedModel, "_inside", lambda self: contextlib.nullcontext())

    def closed(self):
        root.a.process()
        del root.a.attention.q_scale

    monkeypatch.setattr(PackedModel, "_close_layers", closed)
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = opened
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    attention = ModuleType("vllm.model_executor.layers.attention_layer_base")
    attention.AttentionLayerBase = Attention
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    for above in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, above, sys.modules.get(above) or ModuleType(above))
    model.begin([])
    model.load([(n, torch.zeros(2)) for n in ("a.weight", "a.bias") if n != left_out])
    if left_out is None:
        model.finish()
        return
    with pytest.raises(LayoutError, match="no tensor of the trainers reached") as e:
        model.finish()
    assert [v.startswith(said) for v in e.value.violations] == [True]


class Engine:
    """As much of an EngineModel as is asked here. `asleep`, `fails`: what it does when it is looked at, and loaded."""

    device, drop, asleep = torch.device("cpu"), (), False

    def __init__(self, fails=None):
        self.model = SimpleNamespace(load_weights=fails)

    def _refuse_asleep(self, live) -> None:
        if self.asleep:
            raise Unsupported("this engine sleeps")


def test_a_refit_into_a_sleeping_engine_is_refused_on_entry():
    model = PackedModel(Engine())
    model._live = object()
    assert model.check() == "same"
    model.engine.asleep = True
    with pytest.raises(Unsupported, match="sleeps"):
        model.check()


def test_memory_that_a_loader_runs_out_of_is_told_from_what_it_refuses(monkeypatch):
    def huge(weights):
        torch.empty(1 << 60)

    def refuses(weights):
        raise KeyError("a")

    monkeypatch.setattr(PackedModel, "_inside", lambda self: contextlib.nullcontext())
    for fails, told in ((huge, True), (refuses, False)):
        model = PackedModel(Engine(fails))
        model._dropped = set()
        with pytest.raises(RuntimeError if told else LayoutError) as e:
            model.load([("a", torch.zeros(2))])
        assert out_of_memory(e.value) == told


def offload(backend="auto", gb=0.0, group=0):
    return SimpleNamespace(
        offload_config=SimpleNamespace(
            offload_backend=backend,
            uva=SimpleNamespace(cpu_offload_gb=gb),
            prefetch=SimpleNamespace(offload_group_size=group),
        )
    )


def test_engines_that_offload_weights_are_told_by_what_vllm_will_do_and_all_settings_are_named():
    old = SimpleNamespace(cache_config=SimpleNamespace(cpu_offload_gb=4))
    for config, names in (
        (offload(), []),
        (offload(gb=0.5), ["cpu_offload_gb"]),
        (offload(group=8), ["offload_group_size"]),
        (offload(gb=4, group=8), ["cpu_offload_gb", "offload_group_size"]),
        (offload("uva", group=8), []),
        (offload("prefetch", gb=4), []),
        (old, ["cpu_offload_gb"]),
        (SimpleNamespace(cache_config=SimpleNamespace()), []),
    ):
        if not names:
            refuse_offloaded(config)
            continue
        with pytest.raises(Unsupported, match="weight offloading") as e:
            refuse_offloaded(config)
        assert [v.split("=")[0] for v in e.value.violations] == names


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 1 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
)
def test_every_way_in_which_memory_runs_out_is_known(error):
    assert out_of_memory(error) and not out_of_memory(RuntimeError("something else"))
