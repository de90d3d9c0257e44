"""Declared layouts of full-size models at any parallelism, for benchmarks and for tests of the planner.

Shapes come from Hugging Face configs (`xfer/cli/examples/*.json`): Qwen3, Qwen3-MoE and the DeepSeek-V3 family. A trainer
rank is laid out as Megatron-Core lays it out: QKV interleaved by KV group, gate and up stacked, parameters in reverse order
in one buffer of dense and one of expert parameters (`folded`, as DistributedDataParallel does) or each in its own storage.
An engine worker is laid out as vLLM does: one storage per fused parameter, KV heads replicated where there are more workers
than heads. Real layouts are traced; `python -m benchmarks.plan --trace` compares the two. Declared layouts serve where
hundreds of ranks, or ranks without a framework, are needed. Only `View` touches a device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import xfer
from xfer.direct.quantized import Quantized
from xfer.kernels.block_fp8 import ScaleRule
from xfer.mesh.box import Box
from xfer.mesh.parallel import EngineParallel, TrainerParallel
from xfer.plan.inventory import Inventory, engine_inventory, trainer_inventory
from xfer.trace.catalog import Catalog
from xfer.trace.derived import BLOCK, block_grid, quantized
from xfer.trace.fragment import Fragment, Root, Span, TensorSpec

ROWS = {
    "4B DP8 -> DP8": ("qwen3-4b", dict(world=8), 1, 8),
    "4B DP8 -> TP8": ("qwen3-4b", dict(world=8), 8, 1),
    "4B DP8 -> TP4xDP2": ("qwen3-4b", dict(world=8), 4, 2),
    "4B PP2xDP4 -> TP4xDP2": ("qwen3-4b", dict(world=8, pp=2), 4, 2),
    "4B PP4xDP2 -> TP4xDP2": ("qwen3-4b", dict(world=8, pp=4), 4, 2),
    "4B TP2xPP2xDP2 -> TP4xDP2": ("qwen3-4b", dict(world=8, tp=2, pp=2), 4, 2),
    "4B TP2xDP4 -> TP4xDP2": ("qwen3-4b", dict(world=8, tp=2), 4, 2),
    "30B EP4xTP2xDP2 -> TP4xDP4": ("qwen3-30b-a3b", dict(world=16, tp=2, ep=4, etp=1), 4, 4),
    "30B EP4xTP2xPP2 -> TP4xDP4": ("qwen3-30b-a3b", dict(world=16, tp=2, pp=2, ep=4, etp=1), 4, 4),
    "30B EP8xPP2 -> TP2xDP8": ("qwen3-30b-a3b", dict(world=16, pp=2, ep=8, etp=1), 2, 8),
    "30B EP8xPP2 -> TP8xDP2": ("qwen3-30b-a3b", dict(world=16, pp=2, ep=8, etp=1), 8, 2),
    "30B EP8xDP2 -> TP2xDP8": ("qwen3-30b-a3b", dict(world=16, ep=8, etp=1), 2, 8),
    "235B TP4xPP8xEP16 -> TP8xDP16": ("qwen3-235b-a22b", dict(world=128, tp=4, pp=8, ep=16, etp=1), 8, 16),
    "DeepSeek-V3 PP16xEP16 -> TP32xDP8": ("deepseek-v3", dict(world=256, pp=16, ep=16, etp=1), 32, 8),
    "1T MoE PP16xEP64 -> TP32xDP32": ("kimi-k2", dict(world=1024, pp=16, ep=64, etp=1), 32, 32),
}
"""By name (config, trainer's parallelism, workers of a replica, replicas): the mappings with published refit times of a
comparable system, which has expert tensor parallelism 1 (two of them with FP8 engines only), and one larger mapping. Hybrid Mamba
models are not declared."""
FP8_ROWS = {
    "4B FP8 DP8 -> DP8": ("qwen3-4b", dict(world=8), 1, 8),
    "4B FP8 DP8 -> TP4xDP2": ("qwen3-4b", dict(world=8), 4, 2),
    "4B FP8 PP2xDP4 -> TP4xDP2": ("qwen3-4b", dict(world=8, pp=2), 4, 2),
    "4B FP8 PP4xDP2 -> TP4xDP2": ("qwen3-4b", dict(world=8, pp=4), 4, 2),
    "4B FP8 TP2xDP4 -> TP4xDP2": ("qwen3-4b", dict(world=8, tp=2), 4, 2),
    "30B FP8 EP4xTP2xPP2 -> TP2xDP8": ("qwen3-30b-a3b", dict(world=16, tp=2, pp=2, ep=4, etp=1), 2, 8),
    "30B FP8 EP8xPP2 -> TP2xDP8": ("qwen3-30b-a3b", dict(world=16, pp=2, ep=8, etp=1), 2, 8),
    "30B FP8 EP8xDP2 -> TP2xDP8": ("qwen3-30b-a3b", dict(world=16, ep=8, etp=1), 2, 8),
}
"""As ROWS, the published ones whose engines serve block FP8. Trainers are in bf16 and quantize."""
SHAPES = {**ROWS, **{name.replace(" FP8", ""): row for name, row in FP8_ROWS.items()}}
"""All parallel shapes of both, for models in bf16."""
CONFIGS = Path(xfer.__file__).parent / "cli" / "examples"
ITEM = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint tensor in a parameter. `first`: its first element there; `pitch`: elements between rows."""

    tensor: str
    origin: tuple[int, ...]
    extent: tuple[int, ...]
    first: int
    pitch: int


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int  # elements
    pieces: tuple[Piece, ...]
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Model:
    """The entries of a Hugging Face config that decide shapes.

    `experts` 0: a dense model. `kv_lora` 0: grouped-query attention, else multi-head latent attention.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    rope: int = 0
    v_dim: int = 0
    bias: bool = False

    @classmethod
    def named(cls, name: str, **over: int) -> Model:
        """The model of `xfer/cli/examples/NAME.json`; `over` replaces entries of it, such as num_hidden_layers."""
        c = json.loads((CONFIGS / f"{name}.json").read_text()) | over
        mla = c["model_type"] == "deepseek_v3"
        experts = c.get("n_routed_experts" if mla else "num_experts", 0)
        return cls(
            name, c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"],
            c.get("head_dim", 0), c["intermediate_size"], c["vocab_size"], c["tie_word_embeddings"], experts,
            c.get("moe_intermediate_size", 0), c.get("n_shared_experts", 0) * c.get("moe_intermediate_size", 0),
            c.get("first_k_dense_replace", 0) if experts else c["num_hidden_layers"],
            c.get("q_lora_rank", 0), c.get("kv_lora_rank", 0), c.get("qk_nope_head_dim", 0), c.get("qk_rope_head_dim", 0),
            c.get("v_head_dim", 0), mla,
        )  # fmt: skip

    def specs(self) -> Iterator[TensorSpec]:
        """The checkpoint's tensors."""
        h, v = self.hidden, self.vocab

        def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
            return TensorSpec(name, shape, dtype)

        yield spec("model.embed_tokens.weight", v, h)
        yield spec("model.norm.weight", h)
        if not self.tied:
            yield spec("lm_head.weight", v, h)
        for i in range(self.layers):
            at = f"model.layers.{i}."
            yield spec(at + "input_layernorm.weight", h)
            yield spec(at + "post_attention_layernorm.weight", h)
            for name, shape in self._attention():
                yield spec(f"{at}self_attn.{name}.weight", *shape)
            if i < self.dense_layers:
                yield from (spec(f"{at}mlp.{n}.weight", *s) for n, s in self._mlp(self.ffn))
                continue
            yield spec(at + "mlp.gate.weight", self.experts, h)
            if self.bias:
                yield spec(at + "mlp.gate.e_score_correction_bias", self.experts, dtype="float32")
            if self.shared_ffn:
                yield from (spec(f"{at}mlp.shared_experts.{n}.weight", *s) for n, s in self._mlp(self.shared_ffn))
            for e in range(self.experts):
                yield from (spec(f"{at}mlp.experts.{e}.{n}.weight", *s) for n, s in self._mlp(self.expert_ffn))

    def _mlp(self, ffn: int) -> tuple[tuple[str, tuple[int, int]], ...]:
        return ("gate_proj", (ffn, self.hidden)), ("up_proj", (ffn, self.hidden)), ("down_proj", (self.hidden, ffn))

    def _attention(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        h, n, d = self.hidden, self.heads, self.head_dim
        if self.kv_lora:
            return (
                ("q_a_proj", (self.q_lora, h)), ("q_a_layernorm", (self.q_lora,)),
                ("q_b_proj", (n * (self.nope + self.rope), self.q_lora)),
                ("kv_a_proj_with_mqa", (self.kv_lora + self.rope, h)), ("kv_a_layernorm", (self.kv_lora,)),
                ("kv_b_proj", (n * (self.nope + self.v_dim), self.kv_lora)), ("o_proj", (h, n * self.v_dim)),
            )  # fmt: skip
        return (
            ("q_proj", (n * d, h)), ("k_proj", (self.groups * d, h)), ("v_proj", (self.groups * d, h)),
            ("o_proj", (h, n * d)), ("q_norm", (d,)), ("k_norm", (d,)),
        )  # fmt: skip

    def catalog(self, *, fp8: bool = False) -> Catalog:
        """fp8: with what engines ask for that serve block FP8: all matrices but the embedding and the head."""
        catalog = Catalog(tuple(sorted(self.specs())))
        if not fp8:
            return catalog
        vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
        matrices = [s.name for s in catalog.specs if len(s.shape) == 2 and s.name not in vocabulary]
        return catalog.deriving((n, ScaleRule.IEEE.value) for n in matrices)


@dataclass
class Layout:
    """The storages of one rank and the fragments of checkpoint tensors that lie in them."""

    sizes: dict[str, int] = field(default_factory=dict)
    fragments: list[Fragment] = field(default_factory=list)

    def add(self, root: str, p: Parameter) -> None:
        """Append `p` to storage `root`, at a multiple of 128 bytes."""
        item = ITEM[p.dtype]
        start = -(-self.sizes.get(root, 0) // 128) * 128
        for x in p.pieces:
            if all(x.extent):
                steps = ((x.pitch * item, item) if len(x.extent) == 2 else (item,) * len(x.extent))[: len(x.extent)]
                strides = tuple(0 if n == 1 else s for n, s in zip(x.extent, steps))
                self.fragments.append(
                    Fragment(x.tensor, x.origin, x.extent, root, start + x.first * item, strides, p.dtype)
                )
        self.sizes[root] = start + p.size * item

    def roots(self) -> list[Root]:
        return [Root(n, size) for n, size in sorted(self.sizes.items())]

    def trainer(self, catalog: Catalog, rank: int) -> Inventory:
        q = Quantized(catalog, self.fragments, torch.device("cpu"), f"trainer {rank}")
        roots, fragments = (*self.roots(), *q.roots), (*self.fragments, *q.fragments)
        return trainer_inventory(catalog, rank=rank, host="", roots=roots, fragments=fragments)

    def in_fp8(self, catalog: Catalog) -> Layout:
        """This engine's layout if the engine serves the FP8 matrices that `catalog` derives. Each parameter must have a storage of its
        own; its scales get another one."""
        bases = {s.name: s for s in catalog.exported}
        forms = {s.of: quantized(bases[s.of], s.rule) for s in catalog.specs if s.of}
        out = Layout()
        for f in self.fragments:
            if f.tensor not in forms:
                out.sizes[f.root] = self.sizes[f.root]
                out.fragments.append(f)
                continue
            (values, scales), wide = forms[f.tensor], f.strides[0] // 2
            out.sizes[f.root] = self.sizes[f.root] // 2
            out.fragments.append(
                replace(f, tensor=values.name, offset=f.offset // 2, strides=(wide, 1), dtype=values.dtype)
            )
            root, (down, across) = f"{f.root}_scales", block_grid((out.sizes[f.root] // wide, wide))
            out.sizes[root] = 4 * down * across
            first, extent = tuple(o // BLOCK for o in f.origin), block_grid(f.extent)
            at = f.offset // 2 // wide // BLOCK * across * 4
            out.fragments.append(Fragment(scales.name, first, extent, root, at, (across * 4, 4), scales.dtype))
        return out

    def engine(self, catalog: Catalog, rank: int) -> Inventory:
        return engine_inventory(
            catalog, rank=rank, host="", roots=self.roots(), fragments=self.fragments,
            footprint=[Span(r.name, 0, r.nbytes) for r in self.roots()], reads=[s.name for s in catalog.specs],
        )  # fmt: skip


def stages(layers: int, pp: int) -> list[range]:
    """The layers of each pipeline stage. The first stages have one more where `pp` does not divide `layers`."""
    cut = [i * (layers // pp) + min(i, layers % pp) for i in range(pp + 1)]
    return [range(a, b) for a, b in zip(cut, cut[1:])]


def trainer(m: Model, of: TrainerParallel, rank: int, *, folded: bool = True) -> Layout:
    """The layout of one Megatron-Core rank. folded: bf16 parameters share two storages."""
    dense, expert = (dict(zip(mesh.axes, mesh.coordinate(rank))) for mesh in (of.dense(), of.expert()))
    pp, tp = dense["pp"], dense["tp"]
    padded = -(-m.vocab // of.tp) * of.tp  # Bridge's provider pads no further
    mine, routed = [], []
    if pp == 0:
        mine.append(_vocab("model.embed_tokens.weight", m, tp, of.tp, padded))
    for i in stages(m.layers, of.pp)[pp]:
        mine += _dense_layer(m, i, tp, of.tp, True)
        if i >= m.dense_layers:
            routed += _experts_apart(m, i, expert["ep"], of.ep, expert["etp"], of.etp)
    if pp == of.pp - 1:
        mine.append(_norm("model.norm.weight", m.hidden))
        if not m.tied:
            mine.append(_vocab("lm_head.weight", m, tp, of.tp, padded))
    out = Layout()
    for root, parameters in (("dense", mine), ("experts", routed)):
        for p in reversed(parameters):
            plain = p.dtype == "bfloat16"
            out.add(root if folded and plain else p.name, p)
    return out


def engine(m: Model, of: EngineParallel, rank: int) -> Layout:
    """The layout of one vLLM worker of TP `of.tp`. With `of.ep` its experts are whole, else cut by TP."""
    out, tp = Layout(), of.tp
    padded = -(-m.vocab // 64) * 64
    parameters = [_vocab("model.embed_tokens.weight", m, rank, tp, padded)]
    for i in range(m.layers):
        parameters += _dense_layer(m, i, rank, tp, False)
        if i >= m.dense_layers:
            parameters += _experts_fused(m, i, rank, tp, of.ep)
    parameters.append(_norm("model.norm.weight", m.hidden))
    if not m.tied:
        parameters.append(_vocab("lm_head.weight", m, rank, tp, padded))
    for p in parameters:
        out.add(p.name, p)
    return out


def _norm(tensor: str, n: int, dtype: str = "bfloat16") -> Parameter:
    return Parameter(tensor, n, (Piece(tensor, (0,), (n,), 0, 1),), dtype)


def _rows(tensor: str, first: int, count: int, width: int, at: int) -> Piece:
    """Dense rows that begin at row `at` of a parameter."""
    return Piece(tensor, (first, 0), (count, width), at * width, width)


def _columns(tensor: str, rows: int, part: int, of: int, width: int) -> Parameter:
    """Part `part` of `of` equal parts of the columns, dense."""
    w = width // of
    return Parameter(tensor, rows * w, (Piece(tensor, (0, part * w), (rows, w), 0, w),))


def _stacked(name: str, width: int, parts: list[tuple[str, int, int]]) -> Parameter:
    """`parts` (tensor, first row, rows) stacked in one parameter."""
    at, pieces = 0, []
    for tensor, first, count in parts:
        pieces.append(_rows(tensor, first, count, width, at))
        at += count
    return Parameter(name, at * width, tuple(pieces))


def _vocab(tensor: str, m: Model, rank: int, tp: int, padded: int) -> Parameter:
    per = padded // tp
    count = max(0, min(m.vocab, (rank + 1) * per) - rank * per)
    return Parameter(tensor, per * m.hidden, (_rows(tensor, rank * per, count, m.hidden, 0),))


def _dense_layer(m: Model, i: int, rank: int, tp: int, megatron: bool) -> Iterator[Parameter]:
    """The parameters of a layer except its routed experts, in the model's order."""
    h, at = m.hidden, f"model.layers.{i}."
    yield _norm(at + "input_layernorm.weight", h)
    yield from (_mla if m.kv_lora else _gqa)(m, at + "self_attn.", rank, tp, megatron)
    yield _norm(at + "post_attention_layernorm.weight", h)
    if i < m.dense_layers:
        yield from _mlp(at + "mlp.", m.ffn, h, rank, tp)
        return
    yield _stacked(at + "mlp.gate.weight", h, [(at + "mlp.gate.weight", 0, m.experts)])
    if m.bias:
        yield _norm(at + "mlp.gate.e_score_correction_bias", m.experts, "float32")
    if m.shared_ffn:
        yield from _mlp(at + "mlp.shared_experts.", m.shared_ffn, h, rank, tp)


def _mlp(at: str, ffn: int, h: int, rank: int, tp: int) -> Iterator[Parameter]:
    f = ffn // tp
    yield _stacked(at + "gate_up", h, [(f"{at}{n}_proj.weight", rank * f, f) for n in ("gate", "up")])
    yield _columns(at + "down_proj.weight", h, rank, tp, ffn)


def _gqa(m: Model, at: str, rank: int, tp: int, megatron: bool) -> Iterator[Parameter]:
    h, d, q = m.hidden, m.head_dim, m.heads // tp
    per = m.heads // m.groups
    first, g = rank * m.groups // tp, max(1, m.groups // tp)  # more ranks than groups: a rank holds the one it needs
    if megatron:
        parts = [
            part
            for k in range(first, first + g)
            for part in (
                (at + "q_proj.weight", k * per * d, per * d),
                (at + "k_proj.weight", k * d, d),
                (at + "v_proj.weight", k * d, d),
            )
        ]
    else:
        parts = [(at + "q_proj.weight", rank * q * d, q * d)]
        parts += [(f"{at}{n}_proj.weight", first * d, g * d) for n in "kv"]
    yield _stacked(at + "qkv", h, parts)
    yield _norm(at + "q_norm.weight", d)
    yield _norm(at + "k_norm.weight", d)
    yield _columns(at + "o_proj.weight", h, rank, tp, m.heads * d)


def _mla(m: Model, at: str, rank: int, tp: int, megatron: bool) -> Iterator[Parameter]:
    h, n = m.hidden, m.heads // tp
    down = [(at + "q_a_proj.weight", 0, m.q_lora), (at + "kv_a_proj_with_mqa.weight", 0, m.kv_lora + m.rope)]
    if megatron:
        yield from (_stacked(t, h, [(t, 0, count)]) for t, _, count in down)
    else:
        yield _stacked(at + "qkv_a", h, down)
    yield _norm(at + "q_a_layernorm.weight", m.q_lora)
    yield _norm(at + "kv_a_layernorm.weight", m.kv_lora)
    for name, width, per in (("q_b_proj", m.q_lora, m.nope + m.rope), ("kv_b_proj", m.kv_lora, m.nope + m.v_dim)):
        yield _stacked(at + name, width, [(f"{at}{name}.weight", rank * n * per, n * per)])
    yield _columns(at + "o_proj.weight", h, rank, tp, m.heads * m.v_dim)


def _experts_apart(m: Model, i: int, ep: int, eps: int, etp: int, etps: int) -> list[Parameter]:
    """Megatron's grouped linear layers: one parameter per expert and projection, all fc1 before all fc2."""
    h, f, local, at = m.hidden, m.expert_ffn // etps, m.experts // eps, f"model.layers.{i}.mlp.experts."
    mine = range(ep * local, (ep + 1) * local)
    both = [
        _stacked(f"{at}{e}.fc1", h, [(f"{at}{e}.{n}_proj.weight", etp * f, f) for n in ("gate", "up")]) for e in mine
    ]
    return both + [_columns(f"{at}{e}.down_proj.weight", h, etp, etps, m.expert_ffn) for e in mine]


def _experts_fused(m: Model, i: int, rank: int, tp: int, whole: bool) -> list[Parameter]:
    """vLLM's w13 and w2, stacked over experts."""
    h, at = m.hidden, f"model.layers.{i}.mlp.experts."
    f = m.expert_ffn if whole else m.expert_ffn // tp
    low = 0 if whole else rank * f
    n = m.experts // tp if whole else m.experts
    mine = range(rank * n, (rank + 1) * n) if whole else range(n)
    up = [
        _rows(f"{at}{e}.{x}_proj.weight", low, f, h, (2 * k + j) * f)
        for k, e in enumerate(mine)
        for j, x in enumerate(("gate", "up"))
    ]
    down = [Piece(f"{at}{e}.down_proj.weight", (0, low), (h, f), k * h * f, f) for k, e in enumerate(mine)]
    return [Parameter(at + "w13", n * 2 * f * h, tuple(up)), Parameter(at + "w2", n * h * f, tuple(down))]


# ---- layouts as tensors, for benchmarks that move bytes

MODELS = {"4b": "qwen3-4b", "30b": "qwen3-30b-a3b", "235b": "qwen3-235b-a22b"}
"""Short names on command lines."""


def all_ways(ranks: int) -> TrainerParallel:
    """Dense parameters cut by TP and experts by EP, both over all ranks."""
    return TrainerParallel(world=ranks, tp=ranks, ep=ranks, etp=1)


class View:
    """The bf16 fragments of one rank as tensors over its storages (uint8, in the order of `layout.roots()`)."""

    def __init__(self, layout: Layout, storages):
        import torch

        self.torch, self.layout = torch, layout
        self._flat = {r.name: t.view(torch.int16) for r, t in zip(layout.roots(), storages)}

    def of(self, f: Fragment):
        """int16 [f.extent]."""
        return self.torch.as_strided(self._flat[f.root], f.extent, [s // 2 for s in f.strides], f.offset // 2)

    def values(self, f: Fragment, spec: TensorSpec, number: int, device):
        """int16 [f.extent]: a hash of tensor number and position, hence the same bits on every rank that holds them."""
        at = self.torch.zeros((), dtype=self.torch.int64, device=device)
        for d, (o, n) in enumerate(zip(f.origin, f.extent)):
            axis = self.torch.arange(o, o + n, dtype=self.torch.int64, device=device)
            at = at.unsqueeze(-1) * spec.shape[d] + axis
        x = at * 0x9E3779B1 + (number + 1) * 0x85EBCA6B
        x ^= x >> 15
        x *= 0xC2B2AE35
        x ^= x >> 13
        return x.to(self.torch.int16)

    def write(self, specs: dict[str, tuple[int, TensorSpec]], device) -> None:
        """Fill all fragments. specs: number and spec of every tensor, by name."""
        for f in self.layout.fragments:
            number, spec = specs[f.tensor]
            self.of(f).copy_(self.values(f, spec, number, device))

    def wrong(self, specs: dict[str, tuple[int, TensorSpec]], device) -> int:
        """The number of elements that differ from what `write` puts there."""
        count = self.torch.zeros((), dtype=self.torch.int64, device=device)
        for f in self.layout.fragments:
            number, spec = specs[f.tensor]
            count += (self.of(f) != self.values(f, spec, number, device)).sum()
        return int(count)


def overlap(f: Fragment, origin: tuple[int, ...], extent: tuple[int, ...]) -> tuple[tuple, tuple] | None:
    """The common box of a fragment and a piece as an index into each, None if they are disjoint."""
    both = Box(f.origin, f.extent).intersect(Box(origin, extent))
    if both is None:
        return None
    cut = lambda at: tuple(slice(o - a, o - a + n) for o, a, n in zip(both.origin, at, both.extent))  # noqa: E731
    return cut(f.origin), cut(origin)
