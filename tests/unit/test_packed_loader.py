"""What the packed route does with a vLLM worker's model, without vLLM: which parameters its loader has reached, what the loader of an
engine in block FP8 with scales from a checkpoint gets, and what is refused."""

from __future__ import annotations

import contextlib
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.support import block_fp8
from xfer.engines import processed, vllm_loader
from xfer.engines.live import LiveSlot
from xfer.engines.settings import refuse_offloaded
from xfer.engines.vllm_layout import EngineModel
from xfer.engines.vllm_loader import PackedModel, reached_by
from xfer.engines.weights import LiveWeights
from xfer.errors import LayoutError, Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec

EXPERTS = "layers.0.mlp.experts.routed_experts.w13_weight"
LAYER = ["layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight"]


@pytest.fixture(autouse=True)
def outside(monkeypatch) -> None:
    """Loaders run outside of vLLM's configuration, and all of them share the names that they dropped."""
    monkeypatch.setattr(PackedModel, "_inside", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(PackedModel, "_dropped", set(), raising=False)


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


class Attention(nn.Module):
    def __init__(self, scale: float, cache: str):
        super().__init__()
        self.kv_cache_dtype = cache
        self.register_buffer("_q_scale", torch.tensor(scale))


class Quantized(nn.Module):
    """As vLLM quantizes: `weight` becomes something else of that name with a scale beside it, `bias` is packed under another name.
    Attention has a scale only while a checkpoint is loaded."""

    def __init__(self, *attention):
        super().__init__()
        self.attention = Attention(*attention)
        self.weight, self.bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
        self.process()

    def process(self) -> None:
        self.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
        self.weight_scale, self.packed = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(4))
        del self.bias
        self.attention._parameters.pop("q_scale", None)

    def open(self) -> None:
        self.attention.q_scale = nn.Parameter(torch.zeros((), device="meta"))
        del self.weight_scale, self.packed
        self.weight, self.bias = (nn.Parameter(torch.zeros(s, device="meta")) for s in ((2, 2), (2,)))


READ, UNREAD, OLD = (1.0, "fp8"), (0.5, "auto"), (0.5, "fp8")


@pytest.mark.parametrize(
    "left_out, attention",
    [(None, READ), (None, UNREAD), ("a.weight", READ), ("a.bias", READ), ("a.attention.q_scale", OLD)],
)
def test_parameters_made_by_processing_need_not_be_loaded_and_those_it_replaces_must(monkeypatch, left_out, attention):
    """A scale of attention must come if an earlier checkpoint brought its own: the buffer is then not 1. Not if nothing reads it."""
    root = nn.Module()
    root.a = Quantized(*attention)
    root.load_weights = lambda weights: {n for n, _ in weights}
    model = PackedModel(SimpleNamespace(weights=LiveWeights(torch.device("cpu"), list), drop=(), model=root))
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


# ---- engines in block FP8

SIZES = {"a": (128, 200), "b": (128, 200)}
DTYPES = {"a": "bfloat16", "b": "float32"}
DEEP_GEMM, TRITON = "DeepGemmFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"


class Net(nn.Module):
    """Two matrices in one parameter in FP8, with scales beside it, and a vector. `twice`: the first one is an embedding too. `looks`: at
    the values of a tensor."""

    def __init__(self, suffix="_scale_inv", kernel=TRITON, scale=(2, 2), takes=True, twice=False, looks=False):
        super().__init__()
        self.suffix, self.takes, self.twice, self.looks = suffix, takes, twice, looks
        self.layer, self.norm = nn.Module(), nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
        self.layer.weight = nn.Parameter(torch.zeros(256, 200, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.layer.register_parameter(f"weight{suffix}", nn.Parameter(torch.zeros(scale), requires_grad=False))
        self.layer.quant_method = type("Fp8LinearMethod", (), {"weight_block_size": [128, 128]})()
        self.layer.quant_method.fp8_linear = type(kernel, (), {})()
        if twice:
            self.embed = nn.Parameter(torch.zeros(SIZES["a"], dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> set[str]:
        loaded = set()
        for name, t in weights:
            scales = self.suffix if name.endswith(self.suffix) else ""
            if scales and not self.takes:
                continue
            into = self.norm
            if name == "norm":
                assert not self.looks or float(t[0])
            else:
                n = len(whole := getattr(self.layer, f"weight{scales}")) // 2
                into = whole[n * (name[0] == "b") :][:n]
            into.copy_(t)
            loaded.add("norm" if name == "norm" else f"layer.weight{scales}")
            if self.twice and name == "a":
                self.embed.copy_(t)
        return loaded


class Engine(EngineModel):
    def __init__(self, **how):
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(enable_eplb=False),
            model_config=SimpleNamespace(hf_config=None, model="toy", enable_sleep_mode=False),
            load_config=None,
            cache_config=None,
        )
        super().__init__(config, Net(**how), torch.device("cpu"))
        self._how = how

    def _twin(self, watch) -> nn.Module:
        with torch.device("meta"):
            return Net(**self._how)


@pytest.fixture
def joined(monkeypatch):
    """Makes the loader of an engine of `Net`, and has it accept tensors of these dtypes and shapes."""
    monkeypatch.setattr(vllm_loader, "specs_of_config", lambda config: None)
    monkeypatch.setattr(processed, "_requantizes", lambda: True)

    def join(dtypes=DTYPES, more=(), **how) -> PackedModel:
        specs = [TensorSpec(n, SIZES[n], dtype) for n, dtype in dtypes.items()]
        specs += [TensorSpec("norm", (64,), "bfloat16"), *more]
        model = PackedModel(Engine(**how))
        model.accept(Catalog(tuple(sorted(specs))))
        return model

    return join


@pytest.mark.parametrize(
    ("suffix", "kernel", "rule"), [("_scale_inv", TRITON, ScaleRule.IEEE), ("_scale", DEEP_GEMM, ScaleRule.POW2)]
)
def test_values_and_scales_are_those_of_a_quantized_checkpoint(joined, suffix, kernel, rule):
    """By the rule of the direct route: weights are quantized again, or not. A NaN and an infinity show."""
    model, made = joined(suffix=suffix, kernel=kernel), torch.Generator().manual_seed(0)
    weights = {n: torch.randn(SIZES[n], generator=made).to(getattr(torch, DTYPES[n])) for n in SIZES}
    weights["a"][3, 5], weights["b"][100, 199] = torch.nan, torch.inf
    norm, before = torch.ones(64, dtype=torch.bfloat16), {n: t.clone() for n, t in weights.items()}
    assert model._layerwise, "vLLM has to process the layer again"
    model.load([("b", weights["b"])])
    model.load([("norm", norm), ("a", weights["a"])])
    model.finish()
    layer = model.engine.model.layer
    for i, (name, weight) in enumerate(weights.items()):
        assert torch.equal(weight.nan_to_num(7), before[name].nan_to_num(7))
        codes, scales, _ = block_fp8.quantized(weight.float().numpy(), rule)
        got = layer.weight[i * 128 : (i + 1) * 128].view(torch.uint8)
        assert torch.equal(got, torch.from_numpy(codes))
        got = getattr(layer, f"weight{suffix}")[i : i + 1]
        assert torch.equal(got.view(torch.int32), torch.from_numpy(scales).view(torch.int32))
    assert torch.equal(model.engine.model.norm, norm)


def scales_sent(*names: str) -> list[TensorSpec]:
    return [TensorSpec(f"{n}_scale_inv", (1, 2), "float32") for n in names]


def test_what_trainers_send_with_its_scales_is_loaded_as_it_came(joined):
    model = joined({"a": "float8_e4m3fn", "b": "bfloat16"}, scales_sent("a"))
    codes = torch.arange(128 * 200).remainder(0x7F).to(torch.uint8).view(128, 200).view(torch.float8_e4m3fn)
    model.load([("a", codes), ("a_scale_inv", torch.tensor([[2.0, 3.0]])), ("b", torch.ones(128, 200).bfloat16())])
    layer = model.engine.model.layer
    assert torch.equal(layer.weight[:128].view(torch.uint8), codes.view(torch.uint8))
    assert layer.weight_scale_inv.tolist() == [[2.0, 3.0], [pytest.approx(1 / 448)] * 2]


def test_a_refit_into_a_sleeping_engine_is_refused_on_entry(joined):
    model = joined()
    model.check()
    model.engine.refuse_asleep = Mock(side_effect=Unsupported("this engine sleeps"))
    with pytest.raises(Unsupported, match="sleeps"):
        model.check()


def test_a_model_that_makes_tensors_of_its_weights_once_all_are_loaded_is_refused(joined, monkeypatch):
    """As vLLM's vision experts in FP8: nothing loads these tensors, and refits would leave them as they were."""
    monkeypatch.setattr(
        Net, "process_weights_after_loading", lambda net: net.register_buffer("made", 2 * net.norm), raising=False
    )
    with pytest.raises(Unsupported) as e:
        joined()
    (line,) = e.value.violations
    assert line.startswith("Net makes tensors of its weights") and "direct route" in line


@pytest.mark.parametrize(
    ("dtypes", "more", "how", "said"),
    [
        (DTYPES, (), dict(looks=True), "layer.weight: is FP8 with scales in weight_scale_inv, .*the values of weights"),
        (DTYPES, (), dict(takes=False), "layer.weight: is FP8 with scales .*its loader took no scale"),
        (DTYPES, (), dict(twice=True), "layer.weight: is FP8 with scales .*elsewhere as they are: a: embed"),
        (DTYPES, (), dict(suffix="_scale", scale=(2, 1)), "layer.weight: is FP8 with scales in weight_scale, and"),
        ({"a": "float8_e4m3fn", "b": "float32"}, (), {}, "a: is float8_e4m3fn and comes without a_scale_inv"),
        ({"a": "float8_e4m3fn", "b": "float8_e4m3fn"}, scales_sent("b"), {}, "a: is float8_e4m3fn and comes without"),
        ({"a": "float16", "b": "float32"}, (), {}, "a: is float16 and comes without a_scale_inv; send that too, or"),
    ],
    ids=["untraceable", "takes no scales", "in two forms", "per channel", "FP8", "scales of another", "fp16"],
)
def test_a_weight_in_fp8_without_scales_is_refused(joined, dtypes, more, how, said):
    with pytest.raises(Unsupported, match="the packed route cannot refit this engine") as e:
        joined(dtypes, more, **how)
    (line,) = e.value.violations
    assert re.search(said, line), line
