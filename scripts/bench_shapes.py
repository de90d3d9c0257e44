"""Not a command. Declared layouts of full-size Qwen3 models for benchmarks: as Megatron-Core lays them out and as vLLM does.

Names and shapes are those of the checkpoints. Trainers: one buffer of dense and one of expert parameters, filled in
reverse order of parameters as DistributedDataParallel does, QKV interleaved by group, vocabulary padded to 128 * tp.
Engines: one storage per fused parameter. Layouts only; nothing here touches a device but `View`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xfer.mesh.box import Box
from xfer.trace.fragment import Fragment, Root, Span, TensorSpec

ITEM = 2  # bfloat16
PIECE = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
"""(tensor, origin, extent, first element in the parameter, elements between rows)"""


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int  # of an expert where there are any
    vocab: int = 151936
    head_dim: int = 128
    experts: int = 0
    tied: bool = False

    def specs(self) -> Iterator[TensorSpec]:
        h, d = self.hidden, self.head_dim
        mlp = (("gate_proj", (self.ffn, h)), ("up_proj", (self.ffn, h)), ("down_proj", (h, self.ffn)))
        yield TensorSpec("model.embed_tokens.weight", (self.vocab, h), "bfloat16")
        yield TensorSpec("model.norm.weight", (h,), "bfloat16")
        if not self.tied:
            yield TensorSpec("lm_head.weight", (self.vocab, h), "bfloat16")
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name, shape in (
                ("self_attn.q_proj", (self.heads * d, h)), ("self_attn.k_proj", (self.groups * d, h)),
                ("self_attn.v_proj", (self.groups * d, h)), ("self_attn.o_proj", (h, self.heads * d)),
                ("self_attn.q_norm", (d,)), ("self_attn.k_norm", (d,)),
                ("input_layernorm", (h,)), ("post_attention_layernorm", (h,)),
            ):  # fmt: skip
                yield TensorSpec(f"{layer}{name}.weight", shape, "bfloat16")
            if self.experts:
                yield TensorSpec(f"{layer}mlp.gate.weight", (self.experts, h), "bfloat16")
            for where in [f"experts.{e}." for e in range(self.experts)] or [""]:
                for name, shape in mlp:
                    yield TensorSpec(f"{layer}mlp.{where}{name}.weight", shape, "bfloat16")


@dataclass(frozen=True)
class Parallel:
    """How Megatron cuts a model; ranks are numbered tp first, then data or expert parallel, then pp."""

    ranks: int
    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1

    @classmethod
    def all_ways(cls, ranks: int) -> Parallel:
        """Dense parts cut by TP, experts by EP, both over all ranks."""
        return cls(ranks, tp=ranks, ep=ranks)

    def __str__(self) -> str:
        cut = {"TP": self.tp, "EP": self.ep, "ETP": self.etp, "PP": self.pp}
        return "".join(f"{k}{n}" for k, n in cut.items() if n > 1) or "whole"


MODELS = {
    "4b": Model("Qwen3-4B", 36, 2560, 32, 8, 9728, tied=True),
    "30b": Model("Qwen3-30B-A3B", 48, 2048, 32, 4, 768, experts=128),
    "235b": Model("Qwen3-235B-A22B", 94, 4096, 64, 4, 1536, experts=128),
}


@dataclass
class Layout:
    """Fragments and storages of one rank."""

    fragments: list[Fragment] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, root: str, nbytes: int, pieces: list[PIECE]) -> None:
        """A parameter after what `root` holds already, at a multiple of 64 elements."""
        start = -(-self.sizes.get(root, 0) // 128) * 128
        for tensor, origin, extent, first, pitch in pieces:
            strides = (pitch * ITEM, ITEM) if len(extent) == 2 else (ITEM,)
            strides = tuple(0 if n == 1 else s for n, s in zip(extent, strides))
            self.fragments.append(Fragment(tensor, origin, extent, root, start + first * ITEM, strides, "bfloat16"))
        self.sizes[root] = start + nbytes

    def roots(self) -> list[Root]:
        return [Root(n, s) for n, s in sorted(self.sizes.items())]

    def footprint(self) -> list[Span]:
        return [Span(n, 0, s) for n, s in sorted(self.sizes.items())]


def _rows(tensor: str, first: int, count: int, width: int, at: int) -> PIECE:
    """Rows of a tensor that lie densely from row `at` of a parameter."""
    return tensor, (first, 0), (count, width), at * width, width


def _vocab(tensor: str, m: Model, rank: int, tp: int, padded: int) -> tuple[int, list[PIECE]]:
    per = padded // tp
    count = max(0, min(m.vocab, (rank + 1) * per) - rank * per)
    return per * m.hidden * ITEM, [_rows(tensor, rank * per, count, m.hidden, 0)]


def _dense(
    m: Model, rank: int, tp: int, interleaved: bool, padded: int, layers: range
) -> Iterator[tuple[str, int, list[PIECE]]]:
    """(parameter, bytes, pieces) of everything but the experts, in the order of the model. Where there are more ranks
    than KV heads, ranks share one, as vLLM has it."""
    h, d, q, g = m.hidden, m.head_dim, m.heads // tp, max(1, m.groups // tp)
    kv = rank * m.groups // tp
    if 0 in layers:
        yield "embed", *_vocab("model.embed_tokens.weight", m, rank, tp, padded)
    for i in layers:
        layer = f"model.layers.{i}."
        attn = layer + "self_attn."
        qkv = []
        if interleaved:  # Megatron: per KV group its queries, its key, its value
            per = m.heads // m.groups
            for k in range(g):
                base, group = k * (per + 2) * d, kv + k
                qkv += [
                    _rows(attn + "q_proj.weight", group * per * d, per * d, h, base),
                    _rows(attn + "k_proj.weight", group * d, d, h, base + per * d),
                    _rows(attn + "v_proj.weight", group * d, d, h, base + (per + 1) * d),
                ]
        else:
            qkv = [
                _rows(attn + "q_proj.weight", rank * q * d, q * d, h, 0),
                _rows(attn + "k_proj.weight", kv * d, g * d, h, q * d),
                _rows(attn + "v_proj.weight", kv * d, g * d, h, (q + g) * d),
            ]
        for name, n in (("input_layernorm", h), ("self_attn.q_norm", d), ("self_attn.k_norm", d)):
            yield layer + name, n * ITEM, [(f"{layer}{name}.weight", (0,), (n,), 0, 1)]
        yield layer + "qkv", (q + 2 * g) * d * h * ITEM, qkv
        yield layer + "o", h * q * d * ITEM, [(attn + "o_proj.weight", (0, rank * q * d), (h, q * d), 0, q * d)]
        yield layer + "ln2", h * ITEM, [(f"{layer}post_attention_layernorm.weight", (0,), (h,), 0, 1)]
        if m.experts:
            yield layer + "router", m.experts * h * ITEM, [_rows(f"{layer}mlp.gate.weight", 0, m.experts, h, 0)]
        else:
            f = m.ffn // tp
            up = [_rows(f"{layer}mlp.{n}_proj.weight", rank * f, f, h, k * f) for k, n in enumerate(("gate", "up"))]
            yield layer + "fc1", 2 * f * h * ITEM, up
            yield layer + "fc2", h * f * ITEM, [(f"{layer}mlp.down_proj.weight", (0, rank * f), (h, f), 0, f)]
    if m.layers - 1 not in layers:
        return
    yield "norm", h * ITEM, [("model.norm.weight", (0,), (h,), 0, 1)]
    if not m.tied:
        yield "head", *_vocab("lm_head.weight", m, rank, tp, padded)


def trainer(m: Model, rank: int, how: Parallel) -> Layout:
    """As DistributedDataParallel keeps it: one buffer of dense parameters, one of experts."""
    out = Layout()
    per_stage, layers = how.ranks // how.pp, m.layers // how.pp
    stage, place = divmod(rank, per_stage)
    here = range(stage * layers, (stage + 1) * layers)
    pad = 128 * how.tp
    dense = list(_dense(m, place % how.tp, how.tp, True, -(-m.vocab // pad) * pad, here))
    for _, nbytes, pieces in reversed(dense):
        out.add("dense", nbytes, pieces)
    local, f, h = m.experts // how.ep, m.ffn // how.etp, m.hidden
    part, group = place % how.etp, place // how.etp % how.ep
    for i in reversed(here if m.experts else ()):
        for e in reversed(range(group * local, (group + 1) * local)):
            name = f"model.layers.{i}.mlp.experts.{e}."
            out.add("experts", h * f * ITEM, [(name + "down_proj.weight", (0, part * f), (h, f), 0, f)])
            both = [_rows(f"{name}{n}_proj.weight", part * f, f, h, k * f) for k, n in enumerate(("gate", "up"))]
            out.add("experts", 2 * f * h * ITEM, both)
    return out


def engine(m: Model, rank: int, tp: int) -> Layout:
    out = Layout()
    for name, nbytes, pieces in _dense(m, rank, tp, False, -(-m.vocab // 64) * 64, range(m.layers)):
        out.add(name, nbytes, pieces)
    f, h = m.ffn // tp, m.hidden
    for i in range(m.layers if m.experts else 0):
        w13, w2 = [], []
        for e in range(m.experts):
            name = f"model.layers.{i}.mlp.experts.{e}."
            for k, n in enumerate(("gate", "up")):
                w13.append(_rows(f"{name}{n}_proj.weight", rank * f, f, h, (2 * e + k) * f))
            w2.append((name + "down_proj.weight", (0, rank * f), (h, f), e * h * f, f))
        out.add(f"model.layers.{i}.w13", m.experts * 2 * f * h * ITEM, w13)
        out.add(f"model.layers.{i}.w2", m.experts * h * f * ITEM, w2)
    return out


class View:
    """Fragments of one rank as tensors over its storages: what tests of bytes and the packed baseline work on."""

    def __init__(self, layout: Layout, storages):
        import torch

        self.torch, self.layout = torch, layout
        self._flat = {r.name: t.view(torch.int16) for r, t in zip(layout.roots(), storages)}

    def of(self, f: Fragment):
        steps = [s // ITEM for s in f.strides]
        return self.torch.as_strided(self._flat[f.root], f.extent, steps, f.offset // ITEM)

    def values(self, f: Fragment, spec: TensorSpec, number: int, device):
        """Bits that depend on the canonical place alone, alike on every rank."""
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
        for f in self.layout.fragments:
            number, spec = specs[f.tensor]
            if all(f.extent):
                self.of(f).copy_(self.values(f, spec, number, device))

    def wrong(self, specs: dict[str, tuple[int, TensorSpec]], device) -> int:
        """How many elements differ from what belongs there."""
        count = self.torch.zeros((), dtype=self.torch.int64, device=device)
        for f in self.layout.fragments:
            number, spec = specs[f.tensor]
            count += (self.of(f) != self.values(f, spec, number, device)).sum()
        return int(count)


def overlap(f: Fragment, origin: tuple[int, ...], extent: tuple[int, ...]) -> tuple[tuple, tuple] | None:
    """Index of the common box in a fragment and in a piece."""
    both = Box(f.origin, f.extent).intersect(Box(origin, extent))
    if both is None:
        return None
    cut = lambda at: tuple(slice(o - a, o - a + n) for o, a, n in zip(both.origin, at, both.extent))  # noqa: E731
    return cut(f.origin), cut(origin)
