"""Layouts of engine models, read with torch alone. Small modules stand in for vLLM's; each is built on meta and for real."""

import abc
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.examples import EXAMPLES
from tests.support.replay import load
from xfer.engines import live as lv
from xfer.engines import processed, vllm_cpu
from xfer.engines.asleep import LeftAlone
from xfer.engines.layout import joined, read_layout, refuse_kept_in_vain, renamed, run_recipes
from xfer.engines.live import LiveStorages
from xfer.engines.lock import candidates
from xfer.engines.processed import Processed, Relaid, read_processed, without_scales
from xfer.engines.quantized import with_quantized
from xfer.engines.relaid import makers
from xfer.engines.vllm_layout import EmptyIsZero
from xfer.engines.weights import LiveWeights
from xfer.errors import LayoutError, RebindError, Unsupported, XferError
from xfer.kernels.block_fp8 import ScaleRule
from xfer.plan.inventory import SCRATCH
from xfer.trace.fragment import TensorSpec
from xfer.trace.loader import trace_loader

CPU = torch.device("cpu")


class Net(nn.Module):
    """Fused projections, vocabulary padding, a tie, a rotary table and a loader: what a vLLM model has, eight wide."""

    def __init__(self, tied=False, arithmetic=False):
        super().__init__()
        self.embed = nn.Parameter(torch.empty(12, 8))
        self.head = self.embed if tied else nn.Parameter(torch.empty(12, 8))
        self.qkv = nn.Parameter(torch.empty(16, 8))
        self.norm = nn.Parameter(torch.empty(8))
        self.inner_norm = nn.Parameter(torch.empty(4))
        if arithmetic:
            self.decay = nn.Parameter(torch.empty(4))
        self.register_buffer("rope", torch.arange(32.0).to(self.embed.device).reshape(4, 8), persistent=False)

    @torch.no_grad()
    def load_weights(self, weights):
        for name, w in weights:
            if name in ("embed", "head"):
                p = getattr(self, name)
                p[: w.shape[0]].copy_(w)
                p[w.shape[0] :].fill_(0)
            elif name in ("q", "k", "v"):
                rows = {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16)}[name]
                self.qkv[rows].copy_(w)
            elif name == "decay":
                self.decay.copy_(-torch.exp(w))
            else:
                getattr(self, name).copy_(w)

    def forward(self, tokens):
        x = self.embed[tokens]
        return [(x @ self.qkv[:8]) * self.norm]


SHAPES = {"embed": (10, 8), "head": (10, 8), "q": (8, 8), "k": (4, 8), "v": (4, 8), "norm": (8,), "inner_norm": (4,)}


def specs(*leave, **extra):
    shapes = {**{n: s for n, s in SHAPES.items() if n not in leave}, **extra}
    return tuple(TensorSpec(n, s, "float32") for n, s in sorted(shapes.items()))


def built(**kw):
    with torch.device("meta"):
        twin = Net(**kw)
    torch.manual_seed(0)
    net = Net(**kw)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape))
    return net, twin


def read(net, twin, sent=None, keep=()):
    traced = trace_loader(twin, specs() if sent is None else sent)
    return read_layout(LiveStorages(net), LiveStorages(twin), traced, keep=keep, device=CPU)


def checkpoint(sent):
    g = torch.Generator().manual_seed(1)
    return {s.name: torch.randn(s.shape, generator=g) for s in sent}


PARAMETERS = ("embed", "head", "qkv", "norm", "inner_norm")


@given(
    st.sets(st.sampled_from(sorted(SHAPES)), max_size=3),
    st.sets(st.sampled_from(PARAMETERS)),
    st.sampled_from(["", "as built", "after loading"]),
)
@settings(max_examples=max(1, EXAMPLES // 2))
@example(set(), set(), "")
@example({"k", "v"}, {"qkv"}, "")  # trainers whose layers share keys and values send q alone
@example(set(), {"head"}, "as built")  # one storage, two names: it is written for the name that nobody keeps
@example(set(), set(), "after loading")  # the live one decides
@example({"norm"}, {"qkv"}, "")
@example({"head"}, set(), "")
def test_each_byte_is_written_as_the_loader_writes_it_or_kept_by_request_or_refused_by_name(leave, keep, tie):
    """keep= leaves alone what the trainers send whole or not at all. The judge is the loader's own load into NaN."""
    (net, twin), (reference, _) = (built(tied=tie == "as built") for _ in range(2))
    if tie:
        net.head, leave = net.embed, leave | {"head"}
    tensors = checkpoint(sent := specs(*leave))
    for p in reference.parameters():
        p.data.fill_(float("nan"))
    reference.load_weights(tensors.items())
    names = {n: {"embed", "head"} if tie and n in ("embed", "head") else {n} for n in PARAMETERS}
    want = {n: net.get_parameter(n).detach().clone() for n in PARAMETERS}
    rest = {n: torch.ones_like(t, dtype=torch.bool) for n, t in want.items()}
    for n in PARAMETERS:
        loaded = reference.get_parameter(n).detach()
        came, asked = ~loaded.isnan(), keep >= (names[n] if tie == "as built" else {n})
        for other in names[n] if not asked or came.any() and not came.all() else ():
            want[other][came], rest[other][came] = loaded[came], False
    missing = {n: 4 * int(t.sum()) for n, t in rest.items() if t.any()}
    if refused := [n for n in missing if not names[n] & keep]:
        with pytest.raises(LayoutError) as error:
            read(net, twin, sent, sorted(keep))
        half = f", the others by {', '.join(n for n in 'kqv' if n in tensors)}; send what is missing ("
        for n, said in zip(sorted(refused), sorted(error.value.violations), strict=True):
            start = f"{n}: {missing[n]} of its {4 * rest[n].numel()} bytes are written by no tensor of the trainers' checkpoint"
            keeps = rest[n].all()  # nobody is told to keep what is half sent
            assert said.startswith(start + ("; send them, or name it in keep= if it is frozen" if keeps else half))
            assert ("keep=" in said) == keeps
        return
    layout = read(net, twin, sent, sorted(keep))
    assert [r.name for r in layout.roots] == sorted({"rope", *(min(names[n]) for n in PARAMETERS)})
    assert layout.bytes_of(layout.footprint) == sum(t.numel() for t in layout.tensors.values())
    stays = {r.name: torch.zeros(r.nbytes, dtype=torch.bool) for r in layout.roots}
    for k in layout.kept:
        stays[k.root][k.start : k.stop] = True
    assert layout.bytes_of(layout.kept) == sum(int(t.sum()) for t in stays.values()) and stays.pop("rope").all()
    assert [n for n, t in stays.items() if not torch.equal(t, rest[n].flatten().repeat_interleave(4))] == []
    assert set(layout.traced.reads) == tensors.keys(), "trainers would be told that nobody takes what they send"
    load(layout.traced, tensors, layout.tensors)
    assert [n for n in PARAMETERS if not torch.equal(net.get_parameter(n), want[n])] == []


def test_the_reason_why_bytes_stay_says_what_the_trainers_send_of_them(caplog):
    net, twin = built()
    for sent, but in ((specs("k", "v"), ", all but q"), (specs(), ", though the trainers send k, q, v")):
        kept = {k.root: k.reason for k in read(net, twin, sent, ("no*", "qkv")).kept}
        assert kept["qkv"] == f"qkv{but}: kept by request (qkv)" and "request" not in kept["rope"]
    assert "holds back 2 tensors that the trainers send, such as norm" in caplog.text


@pytest.mark.parametrize(
    ("keep", "leave", "whole", "refused", "told"),
    [
        (("q",), (), True, r"q: the trainers send q, .*; did you mean qkv\? It also holds k, v\s\(XF201\)$", 0),
        (("[qv]", "qkv", "k"), (), True, r"\[qv\]: the trainers send q, .*\n.*k: the trainers send k, ", 0),
        (("q",), ("k", "v"), True, r"q: .*it lies in qkv, of which the trainers send a part, and .* is written\s\(XF201\)$", 0),
        (("q",), (), False, "", 1),
        (("visaul.*",), (), True, "", 1),
        (("qkv", "*norm", "draft.*", "head"), (), True, "", 0),
    ],
)  # fmt: skip
def test_what_is_to_be_kept_under_the_checkpoints_names_is_refused_where_the_engine_has_others(
    keep, leave, whole, refused, told, caplog
):
    """Each refit would write them without a word."""
    net, twin = built()
    live, traced = LiveStorages(net).slots, trace_loader(twin, specs(*leave))
    ask = dict(own=live, twin=LiveStorages(twin), traced=traced, whole=whole)
    if refused:
        with pytest.raises(LayoutError) as error:
            refuse_kept_in_vain(keep, **ask)
        assert re.search(refused, str(error.value)) and len(error.value.violations) == len(refused.split(r"\n"))
    else:
        refuse_kept_in_vain(keep, **ask)
    assert [repr(keep[0]) in r.getMessage() for r in caplog.records] == [True] * told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_bytes_that_a_sleep_took_are_seen_and_what_refits_or_vllm_restore_is_not(dtype):
    """vLLM saves and restores the buffers of the model that it serves, and not those of a drafter."""
    (net, twin), (draft, its_twin) = (tuple(n.to(dtype) for n in built()) for _ in range(2))
    draft.register_buffer("shared", net.rope[:4])
    its_twin.register_buffer("shared", twin.rope[:4])
    sent = [TensorSpec(s.name, s.shape, str(dtype).removeprefix("torch.")) for s in specs()]
    live, both = LiveStorages(net, draft=draft), LiveStorages(twin, draft=its_twin)
    traced = joined(trace_loader(twin, sent), renamed(trace_loader(its_twin, sent), lv.DRAFT))
    layout = read_layout(live, both, traced, keep=("no*", "inner_norm", "qkv"), device=CPU)
    kept = LeftAlone(live, layout.kept)
    watched = {"inner_norm": net.inner_norm, "norm": net.norm, "qkv": net.qkv, "draft.rope": draft.rope}
    saved = {n: t.detach().clone() for n, t in watched.items()}
    load(layout.traced, checkpoint(sent), layout.tensors)
    kept.check(live)
    for tensor in (*net.parameters(), *net.buffers(), *draft.parameters(), *draft.buffers()):
        tensor.data.zero_()
    with pytest.raises(Unsupported, match="level 2") as lost:
        kept.check(live)
    assert sorted(lost.value.violations[:-1]) == sorted(watched) and "level 1" in lost.value.violations[-1]
    for name, tensor in watched.items():
        tensor.data.copy_(saved[name])
    kept.check(live)


def test_views_made_after_loading_are_left_alone_and_copies_are_refused():
    net, twin = built()
    net.absorbed = nn.Parameter(net.qkv.detach().view(4, 4, 8).permute(1, 2, 0)[:2], requires_grad=False)
    assert "absorbed" not in read(net, twin).tensors
    net.absorbed = nn.Parameter(net.qkv.detach().clone())
    with pytest.raises(LayoutError, match="absorbed: made after loading"):
        read(net, twin)
    read(net, twin, keep=("absorbed",))
    net, twin = built()
    net.register_buffer("quantized", torch.zeros(8))
    with pytest.raises(LayoutError, match="quantized"):
        read(net, twin)


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda n: setattr(n, "qkv", nn.Parameter(torch.empty(0))), "XFER_CPU_RESIDENT=1"),
        (lambda n: setattr(n, "qkv", nn.Parameter(torch.empty(8, 16))), "laid out anew"),
        (lambda n: setattr(n, "qkv", nn.Parameter(torch.empty(8, 16).t())), "strides"),
        (lambda n: setattr(n, "qkv", nn.Parameter(torch.empty(16, 8).half())), "float16"),
        (lambda n: delattr(n, "qkv"), "not in the live model"),
    ],
)
def test_a_live_tensor_that_does_not_lie_as_built_is_refused_beside_all_others(spoil, said):
    net, twin = built()
    spoil(net)
    net.norm = nn.Parameter(torch.empty(0))
    with pytest.raises(LayoutError) as error:
        read(net, twin)
    assert any(v.startswith("qkv") and said in v for v in error.value.violations)
    assert any(v.startswith("norm") for v in error.value.violations)


def test_views_that_the_class_makes_must_share_their_storage_alive_too():
    class Views(Net):
        def __init__(self):
            nn.Module.__init__(self)
            flat = torch.empty(8)
            self.low, self.high = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:])

    with torch.device("meta"):
        twin = Views()
    net, sent = Views(), (TensorSpec("high", (4,), "float32"), TensorSpec("low", (2, 2), "float32"))
    assert [r.name for r in read(net, twin, sent).roots] in (["high"], ["low"])
    big = torch.empty(100)
    net.low, net.high = nn.Parameter(big[10:14].view(2, 2)), nn.Parameter(big[14:18])  # moved together
    layout = read(net, twin, sent)
    assert sorted(f.offset for f in layout.traced.fragments) == [40, 56] and layout.bytes_of(layout.footprint) == 32
    net.high = nn.Parameter(torch.empty(4))
    with pytest.raises(LayoutError, match="lies elsewhere"):
        read(net, twin, sent)


def test_loader_arithmetic_runs_from_scratch():
    net, twin = built(arithmetic=True)
    layout = read(net, twin, specs(decay=(4,)))
    scratch = [r for r in layout.roots if r.name.startswith(SCRATCH)]
    assert [(r.name, r.nbytes) for r in scratch] == [(SCRATCH + "decay", 16)]
    assert {s.root for s in layout.staged} == {"decay"} and all(
        not s.root.startswith(SCRATCH) for s in layout.footprint
    )
    layout.tensors[SCRATCH + "decay"].view(torch.float32).copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    run_recipes(layout, layout.tensors)
    assert torch.equal(net.decay, -torch.exp(torch.tensor([0.0, 1.0, 2.0, 3.0])))


def layer(kind: str, **attributes) -> nn.Module:
    """A module whose quant_method is of a class of this name."""
    made = nn.Module()
    made.quant_method = type(kind, (), attributes)()
    return made


BLOCKS = dict(weight_block_size=[128, 128])


@pytest.mark.parametrize(
    ("kind", "own", "said"),
    [
        ("UnquantizedLinearMethod", {}, None),
        ("UnquantizedFusedMoEMethod", dict(bf16="TRITON"), None),
        ("UnquantizedFusedMoEMethod", dict(bf16="FLASHINFER_CUTLASS"), "FLASHINFER_CUTLASS"),
        ("UnquantizedFusedMoEMethod", dict(bf16="CPU"), "experts packed for the CPU; set XFER_CPU_RESIDENT=1"),
        ("UnquantizedFusedMoEMethod", dict(bf16="CPU", resident=True), None),
        ("Fp8LinearMethod", dict(BLOCKS, kernel="CutlassFp8BlockScaledMMKernel"), ScaleRule.IEEE),
        ("Fp8LinearMethod", dict(BLOCKS, kernel="TritonFp8BlockScaledMMKernel"), ScaleRule.IEEE),
        ("Fp8MoEMethod", dict(BLOCKS, backend="TRITON"), ScaleRule.IEEE),
        ("CompressedTensorsW8A8Fp8MoEMethod", dict(BLOCKS, backend="VLLM_CUTLASS"), ScaleRule.IEEE),
        ("CompressedTensorsLinearMethod", dict(BLOCKS, kernel="CutlassFp8BlockScaledMMKernel"), ScaleRule.IEEE),
        ("Fp8KVCacheMethod", {}, None),
        ("Fp8MoEMethod", dict(BLOCKS, backend="FLASHINFER_CUTLASS"), "FLASHINFER_CUTLASS"),
        # DeepGEMM: by what it is set to, and by the GPU.
        ("Fp8LinearMethod", dict(BLOCKS, kernel="DeepGemmFp8BlockScaledMMKernel"), ScaleRule.IEEE),
        ("Fp8LinearMethod", dict(BLOCKS, kernel="DeepGemmFp8BlockScaledMMKernel", e8m0=True), ScaleRule.POW2),
        ("Fp8MoEMethod", dict(BLOCKS, backend="DEEPGEMM", e8m0=True), ScaleRule.POW2),
        ("Fp8MoEMethod", dict(BLOCKS, backend="DEEPGEMM", gpu=10), "scales are packed four to an int32 on this GPU"),
        # What is no block FP8, or lies otherwise than it was loaded.
        ("Fp8LinearMethod", dict(kernel="CutlassFP8ScaledMMLinearKernel"), "scales per tensor or per channel"),
        ("Fp8LinearMethod", dict(weight_block_size=[64, 128], kernel="x"), "blocks of [64, 128]; xfer moves block FP8 [128, 128] only"),
        ("Fp8LinearMethod", dict(BLOCKS, kernel="MarlinFP8ScaledMMLinearKernel"), "repacks FP8 weights; start vLLM with linear_backend="),
        ("Fp8LinearMethod", dict(BLOCKS, kernel="OfTomorrow"), "OfTomorrow repacks FP8 weights"),
        ("Fp8LinearMethod", dict(BLOCKS, kernel="CPUFp8BlockScaledMMKernel"), "packed for the CPU; set XFER_CPU_RESIDENT=1"),
        ("Fp8LinearMethod", dict(BLOCKS, kernel="CPUFp8BlockScaledMMKernel", resident=True), ScaleRule.IEEE),
        ("Fp8MoEMethod", dict(BLOCKS, backend="TRITON", weight_scale_refine=(2, 2)), "scales of finer blocks"),
        ("Fp8PerBlockOnlineLinearMethod", BLOCKS, "need scales and layouts that xfer does not move"),
        ("CompressedTensorsLinearMethod", dict(kernel="CutlassFP8ScaledMMLinearKernel"), "scales per tensor or per channel"),
        ("CompressedTensorsW8A8Fp8MoEMethod", dict(backend="TRITON"), "scales per tensor or per channel"),
        *((kind, {}, "it moves bf16, and block FP8 [128, 128] as a checkpoint has it") for kind in (
            "ModelOptMxFp8LinearMethod", "ModelOptNvFp4LinearMethod", "ModelOptFp8LinearMethod", "Fp8PerTensorOnlineLinearMethod")),
    ],
)  # fmt: skip
def test_bf16_and_block_fp8_are_taken_as_they_were_loaded_and_nothing_else_is(monkeypatch, kind, own, said):
    """By method, kernel and GPU: the rule by which trainers quantize, the backend of experts whose own code says what it did to them
    (test_engine_relaid.py), or what to do."""
    own = dict(own)
    monkeypatch.setattr(processed, "_requantizes", lambda: own.get("e8m0", False))
    monkeypatch.setattr(vllm_cpu, "_installed", "resident" in own)
    if gpu := own.get("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (gpu, 0))
    what = {k: v for k, v in own.items() if k.startswith("weight")}
    if "kernel" in own:
        what["fp8_linear"] = type(own["kernel"], (), {})()
    for key, name in (("backend", "fp8_backend"), ("bf16", "unquantized_backend")):
        if key in own:
            what[name] = SimpleNamespace(name=own[key])
    names = ("first", "last")
    net = nn.ModuleDict({name: layer(kind, **what) for name in names})
    if kind == "CompressedTensorsLinearMethod":
        for made in net.values():
            made.scheme, made.quant_method = made.quant_method, layer(kind).quant_method
    net["sound"] = layer("UnquantizedLinearMethod")
    if isinstance(said, str) and " " in said:
        with pytest.raises(Unsupported) as error:
            read_processed(net, "draft.")
        for name, line in zip(names, error.value.violations, strict=True):
            assert line.startswith(f"draft.{name}: ") and said in line
            assert ("XFER_CPU_RESIDENT=1" in line) != ("connect(route=xfer.Packed())" in line)
    else:
        relaid = tuple(Relaid(name, said, fp8="backend" in own) for name in names) if isinstance(said, str) else ()
        assert read_processed(net) == Processed(
            said if not relaid else ScaleRule.IEEE if "backend" in own else None, relaid
        )


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_a_checkpoint_without_scales_is_refused_where_a_loader_would_keep_old_ones(suffix):
    """An engine that quantizes while it loads needs none."""
    net = nn.ModuleDict()
    for name, kind in (("served", "Fp8LinearMethod"), ("online", "Fp8PerBlockOnlineLinearMethod")):
        net[name] = layer(kind)
        net[name].weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), requires_grad=False)
        net[name].register_parameter(f"weight{suffix}", nn.Parameter(torch.ones(1, 1)))
    (line,) = without_scales(net, ["served.weight", "online.weight"])
    assert line.startswith(f"served.weight: is FP8 with scales in weight{suffix}, and trainers send none; use connect(")
    assert without_scales(net, ["served.weight", f"served.weight{suffix}", "online.weight"]) == []


class Fp8Net(nn.Module):
    """A fused pair of matrices in FP8, of which this rank has 128 rows each, with scales, and an embedding that is also the first one."""

    def __init__(self, computes: bool = False):
        super().__init__()
        self.computes = computes
        self.fused = nn.Parameter(torch.zeros(256, 200, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.fused_scale = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(256, 200, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, t in weights:
            i = "ab".index(name[0])
            if name.endswith("_scale"):
                self.fused_scale[i : i + 1].copy_(t[1:2] / 2 if self.computes and i == 1 else t[1:2])
                continue
            self.fused[i * 128 : (i + 1) * 128].copy_(t[128:256])
            if i == 0:
                self.embed.copy_(t)

    def process_weights_after_loading(self) -> None:
        self.made = nn.Parameter(self.fused.float() * self.fused_scale.sum(), requires_grad=False)


def traced_fp8(**options):
    def twin():
        with torch.device("meta"):
            return Fp8Net(**options)

    pair, first = tuple(TensorSpec(n, (256, 200), "bfloat16") for n in "ab"), twin()
    again = lambda specs, names: trace_loader(twin(), specs, names=names)  # noqa: E731
    return with_quantized(trace_loader(first, pair), first, again, ScaleRule.IEEE)


def test_what_a_loader_puts_into_fp8_is_wanted_so_and_its_scales_where_it_puts_or_computes_them():
    """And in bf16 as well, where it puts it there too. The name of the scales is the engine's own."""
    found = {(f.tensor, f.origin, f.extent, f.root, f.offset, f.dtype) for f in traced_fp8().fragments}
    assert found == {
        ("a", (0, 0), (256, 200), "embed", 0, "bfloat16"),
        ("a|fp8-ieee", (128, 0), (128, 200), "fused", 0, "float8_e4m3fn"),
        ("b|fp8-ieee", (128, 0), (128, 200), "fused", 128 * 200, "float8_e4m3fn"),
        ("a|fp8-ieee-scales", (1, 0), (1, 2), "fused_scale", 0, "float32"),
        ("b|fp8-ieee-scales", (1, 0), (1, 2), "fused_scale", 8, "float32"),
    }
    assert traced_fp8().reads == ("a", "b")
    (recipe,) = traced_fp8(computes=True).recipes
    assert recipe.target == "fused_scale" and recipe.sources == ("b|fp8-ieee-scales",)


def test_modules_that_made_tensors_of_fp8_after_loading_are_found_by_path():
    """test_vllm_layout.py: that each refit makes these anew, by torch's own operators or not at all."""
    live, twin = Fp8Net(), Fp8Net()
    assert makers(LiveStorages(live), twin) == []
    live.process_weights_after_loading()
    drafted = LiveStorages(nn.Module(), draft=nn.ModuleDict({"net": live}))
    assert makers(LiveStorages(live), twin) == [""] and makers(drafted, twin) == []
    assert makers(drafted, nn.ModuleDict({"net": twin}), lv.DRAFT) == ["net"]


def test_a_loader_that_takes_no_scales_is_refused_by_the_names_that_it_was_offered(monkeypatch):
    load = Fp8Net.load_weights
    monkeypatch.setattr(
        Fp8Net, "load_weights", lambda net, weights: load(net, (w for w in weights if not w[0].endswith("_scale")))
    )
    with pytest.raises(LayoutError) as error:
        traced_fp8()
    lines = [f"{n} is FP8 in the engine, and its loader took no scale offered as {n}_scale" for n in "ab"]
    assert list(error.value.violations) == lines


def test_a_stack_of_matrices_that_is_one_tensor_of_the_checkpoint_is_refused_by_its_name():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.zeros(2, 128, 256, dtype=torch.float8_e4m3fn), requires_grad=False)
            self.experts_scale = nn.Parameter(torch.zeros(2, 1, 2), requires_grad=False)

        def load_weights(self, weights) -> None:
            for _, t in weights:
                self.experts.copy_(t)

    with torch.device("meta"):
        twin = Stack()
    first = trace_loader(twin, (TensorSpec("up", (2, 128, 256), "bfloat16"),))
    with pytest.raises(Unsupported, match="this engine wants tensors in block FP8 that are no matrices") as error:
        with_quantized(first, twin, lambda _: pytest.fail("traced again"), ScaleRule.IEEE)
    assert error.value.violations == ("up: [2, 128, 256]",)


def test_one_layer_that_requantizes_makes_the_rule_for_all(monkeypatch):
    monkeypatch.setattr(processed, "_requantizes", lambda: True)
    kernels = {"a": "TritonFp8BlockScaledMMKernel", "b": "DeepGemmFp8BlockScaledMMKernel"}
    net = nn.ModuleDict({"c": nn.Module()})
    for name, kernel in kernels.items():
        net[name] = layer("Fp8LinearMethod", **BLOCKS, fp8_linear=type(kernel, (), {})())
    assert read_processed(net).rule is ScaleRule.POW2
    assert read_processed(net["c"]).rule is None


def test_what_attention_computed_for_itself_is_refused_and_what_it_shares_is_not():
    """FlashInfer keeps `sinks` in fp32 outside of all modules; a refit of the parameter would not reach it."""

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def forward(self): ...

        def process_weights_after_loading(self, dtype):
            return None

    class Plain(Abstract):
        def forward(self): ...

    class Keeps(Plain):
        def process_weights_after_loading(self, dtype): ...

    net = nn.ModuleDict({n: nn.Module() for n in ("plain", "shares", "copies")})
    sinks = net["shares"].sinks = nn.Parameter(torch.zeros(8))
    held = {"plain": (Plain(), torch.ones(8)), "shares": (Keeps(), sinks.data[:4]), "copies": (Keeps(), sinks.double())}
    for name, (impl, tensor) in held.items():
        net[name].impl, impl.sinks = impl, tensor
    with pytest.raises(Unsupported) as error:
        read_processed(net)
    assert [v.split(":")[0] for v in error.value.violations] == ["copies"] and "sinks" in error.value.violations[0]


def test_a_storage_that_moves_is_rebound_and_a_layout_that_changes_is_not():
    """What counts as moved and as changed is a table of test_trace_slots.py."""
    net, twin = built(tied=True)
    live = LiveStorages(net)
    net.norm.data = net.norm.data.clone()
    now = live.rebound()
    assert now.check() == "same" and now.tensors["norm"].data_ptr() == net.norm.data_ptr()
    net.norm, net.extra = nn.Parameter(torch.empty(8).half()), nn.Parameter(torch.empty(3))
    del net.inner_norm
    assert now.check() == "changed"
    with pytest.raises(RebindError) as error:
        now.rebound()
    assert [v.split(":")[0] for v in error.value.violations] == ["extra", "inner_norm", "norm"]
    assert error.value.violations[2] == "norm: was (8,) float32 at byte 0 of norm, now (8,) float16 at byte 0 of norm"


def locked(net, twin, agree=lambda verdict, about: verdict):
    live, tokens = LiveStorages(net), torch.arange(5)
    weights = LiveWeights(torch.device("cpu"), lambda: net(tokens), agree)
    weights.bind(read(net, twin), live)
    return weights, weights.choose_lock()


@given(st.lists(st.sampled_from(["engage", "write", "release", "rebind", "moved: rebind", "moved: bind"]), max_size=8))
@settings(max_examples=max(1, EXAMPLES // 2))
@example(["engage", "rebind", "write", "engage", "release", "moved: rebind", "engage", "moved: bind"])
@example(["engage", "moved: rebind", "write", "release"])
def test_a_model_answers_nan_from_the_lock_to_the_commit_wherever_its_storages_lie(steps):
    """A refit writes the lock's scratch, which is also what checksums read, and never the live storage."""
    net, twin = built()
    weights, root = locked(net, twin)
    assert root == "norm"  # inner_norm is later in the tree and smaller, but no token passes through it
    scratch, value, open_ = weights.rebind()["norm"], net.norm.detach().clone(), False
    for number, step in enumerate(steps):
        if step == "engage":  # a second time, after an attempt that was aborted: the NaN is not taken for the value
            weights.engage_lock()
            open_ = True
        elif step == "release":
            weights.release_lock()
            open_ = False
        elif step == "write" and open_:
            value = torch.full((8,), float(number))
            weights.tensors["norm"].view(torch.float32).copy_(value)
        elif step.startswith("moved"):
            net.norm = nn.Parameter(torch.ones(8) if open_ else value.clone())
            assert weights.check() == "moved"
        if step.endswith("rebind"):
            weights.rebind()
        elif step.endswith(": bind"):
            layout = weights.bind(read(net, twin), LiveStorages(net))
            assert weights.choose_lock() == "norm", "without a forward, which would answer NaN"
            assert layout.tensors["norm"] is scratch
        assert weights.check() == "same" and weights.holds == ("mix" if open_ else "whole")
        assert weights.tensors["norm"] is scratch and torch.equal(scratch.view(torch.float32), value)
        assert weights.tensors["head"].data_ptr() == net.head.data_ptr()
        assert net(torch.arange(5))[0].isnan().all() == net.norm.isnan().all() == open_
        assert open_ or torch.equal(net.norm, value)


def test_choosing_a_lock_restores_every_candidate_and_stops_where_all_ranks_agree():
    net, twin = built()
    before = [p.detach().clone() for p in net.parameters()]
    asked = []
    with pytest.raises(XferError, match="could not be told"):
        locked(net, twin, lambda said, about: asked.append((about, said)) or (len(asked) == 1 and said))
    assert asked == [("inner_norm norm", True), ("inner_norm", False), ("norm", True)]
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    net.embed.data.fill_(float("nan"))
    with pytest.raises(XferError, match="answers NaN"):
        locked(net, twin)
    net, twin = built()
    layout = read(net, twin, specs("norm"), keep=("norm",))
    assert [s.name for s in candidates(layout, LiveStorages(net))] == ["inner_norm"], "a candidate is written by refits"
    both = torch.ones(12)
    net.norm, net.inner_norm = nn.Parameter(both[:8]), nn.Parameter(both[8:])
    assert candidates(read(net, twin), LiveStorages(net)) == [], "a candidate fills its storage alone"
    with pytest.raises(XferError, match="could not be told"):
        locked(net, twin)


def test_a_trial_forward_sees_no_old_memory():
    """`torch.empty` returns freed memory, and a NaN in it would pass for the lock's."""

    def made():
        freed = [torch.full((1 << 12,), float("nan")) for _ in range(50)]
        like, shape = torch.zeros(1 << 12), torch.Size((1 << 12,))
        del freed
        return [torch.empty(1 << 12), torch.empty(shape), torch.empty_like(like), like.new_empty(1 << 12)]

    assert any(t.isnan().any() for _ in range(20) for t in made())
    with EmptyIsZero():
        assert not any(t.any() for _ in range(20) for t in made())
