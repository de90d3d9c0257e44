"""What the packed route does with a vLLM worker's model, without vLLM: which parameters its loader has reached, what it refuses."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn import Parameter

from xfer.engines.live import LiveSlot, LiveStorages
from xfer.engines.settings import refuse_offloaded
from xfer.engines.vllm_loader import PackedModel, reached_by
from xfer.engines.weights import LiveWeights
from xfer.errors import LayoutError, Unsupported, out_of_memory

EXPERTS = "layers.0.mlp.experts.routed_experts.w13_weight"


LAYER = ["layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight"]


@pytest.mark.parametrize(
    "names, told, reached",
    [
        ([EXPERTS, "norm.weight"], ["layers.0.mlp.experts.w13_weight", "norm.weight"], [EXPERTS, "norm.weight"]),
        (LAYER, ["layers.0.weight", "weight", "no.weight"], []),
    ],
    ids=["vLLM 0.25 leaves out the part that holds experts", "a name that may mean two parameters counts for neither"],
)
def test_which_parameters_a_loaders_answer_means(names, told, reached):
    slots = {n: LiveSlot(n, True, f"storage of {n}", 0, (2,), (2,), torch.bfloat16) for n in names}
    assert reached_by(told, slots) == {f"storage of {n}" for n in reached}


@pytest.fixture
def model(monkeypatch):
    """A PackedModel around `model.engine.model`, outside of vLLM's configuration."""
    monkeypatch.setattr(PackedModel, "_inside", lambda self: contextlib.nullcontext())
    weights = LiveWeights(torch.device("cpu"), list)
    made = PackedModel(SimpleNamespace(weights=weights, drop=(), model=None))
    made._dropped = set()
    return made


class Attention(torch.nn.Module):
    def __init__(self, scale: float, cache: str):
        super().__init__()
        self.kv_cache_dtype = cache
        self.register_buffer("_q_scale", torch.tensor(scale))


class Quantized(torch.nn.Module):
    """As vLLM quantizes: `weight` becomes something else of that name with a scale beside it, `bias` is packed under another name.
    Attention has a scale only while a checkpoint is loaded."""

    def __init__(self, *attention):
        super().__init__()
        self.attention = Attention(*attention)
        self.weight, self.bias = Parameter(torch.zeros(2, 2)), Parameter(torch.zeros(2))
        self.process()

    def process(self) -> None:
        self.weight = Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
        self.weight_scale, self.packed = Parameter(torch.ones(1)), Parameter(torch.zeros(4))
        del self.bias
        self.attention._parameters.pop("q_scale", None)

    def open(self) -> None:
        self.attention.q_scale = Parameter(torch.zeros((), device="meta"))
        del self.weight_scale, self.packed
        self.weight, self.bias = (Parameter(torch.zeros(s, device="meta")) for s in ((2, 2), (2,)))


READ, UNREAD, OLD = (1.0, "fp8"), (0.5, "auto"), (0.5, "fp8")


@pytest.mark.parametrize(
    "left_out, attention",
    [(None, READ), (None, UNREAD), ("a.weight", READ), ("a.bias", READ), ("a.attention.q_scale", OLD)],
)
def test_parameters_made_by_processing_need_not_be_loaded_and_those_it_replaces_must(
    monkeypatch, model, left_out, attention
):
    """A scale of attention must come if an earlier checkpoint brought its own: the buffer is then not 1. Not if nothing reads it."""
    root = model.engine.model = torch.nn.Module()
    root.a = Quantized(*attention)
    root.load_weights = lambda weights: {n for n, _ in weights}
    model._layerwise = True
    monkeypatch.setattr(PackedModel, "_close_layers", lambda self: root.a.process())
    loader, layers = "vllm.model_executor.model_loader", "vllm.model_executor.layers"
    for name, parts in {
        "vllm": {}, "vllm.model_executor": {}, loader: {}, layers: {},
        f"{loader}.reload": dict(initialize_layerwise_reload=lambda m: m.a.open()),
        f"{layers}.attention_layer_base": dict(AttentionLayerBase=Attention),
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        vars(module).update(parts)
    model.begin([])
    model.load([(n, torch.zeros(2)) for n in ("a.weight", "a.bias") if n != left_out])
    if left_out is None:
        model.finish()
        return
    with pytest.raises(LayoutError, match="no tensor of the trainers reached") as e:
        model.finish()
    assert [v.startswith(f"{left_out}: ") for v in e.value.violations] == [True]


def test_a_refit_into_a_sleeping_engine_is_refused_on_entry(model):
    model.weights.watch(LiveStorages(torch.nn.Linear(2, 2)), ())
    model.engine.refuse_asleep = Mock()
    model.check()
    model.engine.refuse_asleep.side_effect = Unsupported("this engine sleeps")
    with pytest.raises(Unsupported, match="sleeps"):
        model.check()


@pytest.mark.parametrize(
    "fails, kind", [(lambda _: torch.empty(1 << 60), RuntimeError), (lambda _: {}["a"], LayoutError)]
)
def test_memory_that_a_loader_runs_out_of_is_told_from_what_it_refuses(model, fails, kind):
    model.engine.model = SimpleNamespace(load_weights=fails)
    with pytest.raises(kind) as e:
        model.load([("a", torch.zeros(2))])
    assert out_of_memory(e.value) == (kind is RuntimeError)
    assert all(map(out_of_memory, (torch.OutOfMemoryError("tried to allocate 1 GiB"), MemoryError())))


def offload(backend="auto", gb=0.0, group=0):
    uva, prefetch = SimpleNamespace(cpu_offload_gb=gb), SimpleNamespace(offload_group_size=group)
    return SimpleNamespace(offload_config=SimpleNamespace(offload_backend=backend, uva=uva, prefetch=prefetch))


@pytest.mark.parametrize(
    "config, names",
    [
        (offload(), []),
        (offload(gb=0.5), ["cpu_offload_gb"]),
        (offload(group=8), ["offload_group_size"]),
        (offload(gb=4, group=8), ["cpu_offload_gb", "offload_group_size"]),
        (offload("uva", group=8), []),
        (offload("prefetch", gb=4), []),
        (SimpleNamespace(cache_config=SimpleNamespace(cpu_offload_gb=4)), ["cpu_offload_gb"]),
        (SimpleNamespace(cache_config=SimpleNamespace()), []),
    ],
)
def test_engines_that_offload_weights_are_told_by_what_vllm_will_do_and_all_settings_are_named(config, names):
    with pytest.raises(Unsupported, match="weight offloading") if names else contextlib.nullcontext() as e:
        refuse_offloaded(config)
    assert not names or [v.split("=")[0] for v in e.value.violations] == names
