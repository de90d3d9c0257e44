"""From the pieces of a storage, in the order they were written, to its final state: disjoint fragments, fills and
recipes.

A later write over the same bytes wins. What is still `Undefined` at the end is an error by name, all of them
collected in `Ledger.errors`; the caller decides when to raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from xfer.errors import LayoutError, Unsupported
from xfer.trace.boxes import boxes, merge, split_of
from xfer.trace.compose import blocks
from xfer.trace.expr import (
    Constant,
    Foreign,
    Literal,
    NamedTensor,
    Operand,
    OperatorResult,
    Piece,
    Undefined,
    converted,
    dtype_name,
    simplify,
    walk,
)
from xfer.trace.fragment import Fill, Fragment, TensorSpec
from xfer.trace.owned import own_parts
from xfer.trace.traced import Cast, Recipe, Traced
from xfer.trace.view import Region, coalesce
from xfer.trace.watch import not_given


def settle(pieces: Sequence[Piece]) -> list[Piece]:
    """The disjoint pieces that remain after writes in this order, in the same order. Unsupported if they cannot be
    determined.
    """
    last = {p.dst: i for i, p in enumerate(pieces) if p.dst.size}  # the same region written again: the last one stands
    alive = sorted(last.values())
    out: list[tuple[int, Piece]] = []
    for group in _touching([(i, pieces[i]) for i in alive]):
        out += group if len(group) == 1 else _overlay(group)
    return [p for _, p in sorted(out, key=lambda x: x[0])]


def _touching(pieces: list[tuple[int, Piece]]) -> list[list[tuple[int, Piece]]]:
    """Groups whose address spans overlap, directly or through others; each group in program order."""
    groups: list[list[tuple[int, Piece]]] = []
    end = -1
    for i, p in sorted(pieces, key=lambda x: x[1].dst.offset):
        if p.dst.offset > end or not groups:
            groups.append([])
        groups[-1].append((i, p))
        end = max(end, p.dst.last)
    return [sorted(g, key=lambda x: x[0]) for g in groups]


def _overlay(group: list[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
    group = _uncovered(group)
    if len(group) == 1:
        return group
    lo = min(p.dst.offset for _, p in group)
    n = max(p.dst.last for _, p in group) + 1 - lo
    parts = blocks(Region(lo, (n,), (1,)), Region(lo, (n,), (1,)), tuple(p.geometry for _, p in group))
    if parts is None:
        raise Unsupported("overlapping writes are too interleaved to say what is left of each")
    left: dict[int, list[Piece]] = {}
    for part in parts:
        if part.piece >= 0:
            p = group[part.piece][1]
            src = part.src.shifted(p.src.offset)
            left.setdefault(part.piece, []).append(Piece(p.origin, src, part.dst, p.chain))
    out = []
    for k, rest in sorted(left.items()):
        i, p = group[k]
        intact = sum(r.dst.size for r in rest) == p.dst.size
        out += [(i, p)] if intact else [(i, r) for r in rest]
    return out


def _uncovered(group: list[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
    """Without the pieces that lie wholly under one later dense piece: the usual `zero_()` before the real writes."""
    kept: list[tuple[int, Piece]] = []
    for i, p in reversed(group):
        if not any(_run(q.dst) and q.dst.offset <= p.dst.offset and p.dst.last <= q.dst.last for _, q in kept):
            kept.append((i, p))
    return kept[::-1]


def _run(r: Region) -> bool:
    """Whether the region is one run of consecutive addresses, in any order."""
    by_stride = sorted(zip(r.shape, r.strides), key=lambda d: -d[1])
    return Region(r.offset, *(tuple(x) for x in zip(*by_stride))).dense if by_stride else True


class Ledger:
    """Collects the final state of a trace, of either side. `given`: the sources that were offered, with their full shapes.

    `checkpoint_is_source`: engine side (checkpoint tensors flow into storages); else the trainer's, where parameters
    flow into checkpoint tensors.
    """

    def __init__(self, given: Mapping[str, TensorSpec], *, checkpoint_is_source: bool):
        self.given, self.checkpoint_is_source = given, checkpoint_is_source
        self.fragments: list[Fragment] = []
        self.fills: list[Fill] = []
        self.recipes: list[Recipe] = []
        self.casts: set[Cast] = set()
        self.reads: set[str] = set()
        self.errors: list[str] = []
        self.specs: dict[str, TensorSpec] = {}
        self.computes = False  # whether anything that was entered is computed, here or on another rank

    def add(self, target: str, pieces: Sequence[Piece], dtype: torch.dtype, spec: TensorSpec | None = None) -> bool:
        """Enter what `target` holds: a root, or on the trainer's side a checkpoint tensor, with its spec. Returns whether this
        rank holds any of it.

        Pieces are disjoint. `dtype`: of target's elements.
        """
        mine = False
        for p in pieces:
            self.computes |= isinstance(p.origin, Operand | OperatorResult)
            if _elsewhere(p):
                continue
            mine = True
            try:
                self._enter(target, p, dtype, spec)
            except (LayoutError, Unsupported) as e:
                self.errors.append(f"{target}: {e.message}")
        if mine and spec is not None:
            self.specs[target] = spec
        return mine

    def _enter(self, target: str, p: Piece, dtype: torch.dtype, spec: TensorSpec | None) -> None:
        if isinstance(p.origin, Undefined):
            self.errors.append(f"{target}: {p.dst.size} elements at {p.dst.offset}: {p.origin.why}")
        elif isinstance(p.origin, Literal):
            what = not_given(p.origin.tensor)
            self.errors.append(f"{target}: {p.dst.size} elements at {p.dst.offset}: written from {what}")
        elif isinstance(p.origin, Constant):
            self._fill(target, p, p.origin, dtype)
        elif isinstance(p.origin, Operand | OperatorResult):
            for part in self._share(p):
                assert isinstance(part.origin, Operand | OperatorResult)  # a part of one
                self._recipe(target, part, part.origin, part.src, part.chain, dtype)
            for x in walk(p.origin):
                if isinstance(x, NamedTensor):
                    self._read(x.name)
        else:
            self._fragment(target, p, dtype, spec)

    def _fragment(self, target: str, p: Piece, dtype: torch.dtype, spec: TensorSpec | None) -> None:
        assert isinstance(p.origin, NamedTensor)
        source = p.origin.name
        given = self.given[source]
        chain = simplify(p.chain)
        moved = chain is not None and len(chain) == 1
        seen = dtype_name(p.chain[0])
        same_ends = seen == given.dtype and (spec is None or spec.dtype == dtype_name(p.chain[-1]))
        if chain is None or not (moved or same_ends):
            # two roundings, or a conversion from or to other bits: only doing it again gives the same values
            n = p.src.last + 1
            whole = Region(0, (n,), (1,))
            operand = Operand((Piece(p.origin, whole, whole, p.chain[:1]),), n, whole, p.chain[0])
            self._recipe(target, p, operand, p.src, p.chain, dtype)
            self._read(source)
            return
        checkpoint = given if self.checkpoint_is_source else spec
        assert checkpoint is not None
        itemsize = dtype.itemsize if self.checkpoint_is_source else p.chain[0].itemsize
        if self.checkpoint_is_source:
            kind = given.dtype if moved else dtype_name(chain[-1])
            found = boxes(checkpoint, p.src, p.dst.scaled(itemsize), target, kind)
        else:
            kind = checkpoint.dtype if moved else given.dtype  # where only bits move, they are the exported tensor's
            found = boxes(checkpoint, p.dst, p.src.scaled(itemsize), source, kind)
        if not moved:
            root = target if self.checkpoint_is_source else source
            self.casts.add(Cast(checkpoint.name, root, tuple(dtype_name(d) for d in chain)))
        self.fragments += found
        self._read(source)

    def _read(self, source: str) -> None:
        self.reads.add(source)
        if self.checkpoint_is_source:
            self.specs[source] = self.given[source]

    def _fill(self, target: str, p: Piece, origin: Constant, dtype: torch.dtype) -> None:
        if not self.checkpoint_is_source:
            self.errors.append(f"{target}: {p.dst.size} elements are a constant that no parameter holds")
            return
        value = converted(origin.tensor((), torch.device("cpu")), p.chain)
        bits = value.reshape(1).view(torch.uint8).numpy().tobytes()
        r = p.dst.scaled(dtype.itemsize)
        shape, strides = coalesce(r.shape, r.strides)
        self.fills.append(Fill(target, r.offset, shape, strides, dtype_name(value.dtype), bits))

    def _share(self, p: Piece) -> list[Piece]:
        """The parts of a computed piece that this rank reports: not the whole piece if ranks computed it together."""
        together = isinstance(p.origin, OperatorResult) and any(isinstance(x, Foreign) for x in walk(p.origin))
        return own_parts(p) if together else [p]

    def _recipe(
        self, target: str, p: Piece, expr: Operand | OperatorResult, part: Region, chain, dtype: torch.dtype
    ) -> None:
        leaves = list(walk(expr))
        lost = sorted({x.why for x in leaves if isinstance(x, Undefined)})
        if lost:
            self.errors.append(f"{target}: computed from {'; '.join(lost)}")
            return
        r = p.dst.scaled(dtype.itemsize)
        names = tuple(dtype_name(d) for d in chain)
        self.recipes.append(Recipe(target, r.offset, r.shape, r.strides, dtype_name(dtype), expr, part, names))

    def close(self) -> Traced:
        """Everything entered so far, sorted; neighbours merged."""
        specs = self.specs.values() if self.checkpoint_is_source else self._split_specs()
        key = lambda f: (f.tensor, f.origin, f.root, f.offset)  # noqa: E731
        return Traced(
            specs=tuple(sorted(specs, key=lambda s: s.name)),
            fragments=tuple(sorted(merge(self.fragments), key=key)),
            fills=tuple(sorted(self.fills, key=lambda f: (f.root, f.offset, f.extent, f.strides))),
            recipes=tuple(self.recipes),
            reads=tuple(sorted(self.reads)),
            unread=tuple(sorted(set(self.given) - self.reads)),
            casts=tuple(sorted(self.casts, key=lambda c: (c.tensor, c.root, c.dtypes))),
        )

    def _split_specs(self) -> list[TensorSpec]:
        """Specs of the tensors that this rank exports, with the split that its interleaved parts need."""
        of: dict[str, list[Fragment]] = {}
        for f in self.fragments:
            if f.steps:
                of.setdefault(f.tensor, []).append(f)
        return [replace(s, split=split_of(s.shape, of[s.name])) if s.name in of else s for s in self.specs.values()]


def _elsewhere(p: Piece) -> bool:
    """Whether the piece is another rank's business: its data, or something computed from nothing but its data."""
    if not isinstance(p.origin, Operand | OperatorResult):
        return isinstance(p.origin, Foreign)
    kinds = {type(x) for x in walk(p.origin)}
    return Foreign in kinds and NamedTensor not in kinds


def spec_of(name: str, t: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(t.shape), dtype_name(t.dtype))
