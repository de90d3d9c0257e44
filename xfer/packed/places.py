"""Maps the boxes of tensors that ranks hold to the parts of a message. Arithmetic only: no tensor, no process.

A `Copy` moves a box from a storage to its place in a message; one kernel launch runs a table of copies (xfer.kernels). Boxes
travel between ranks in *rounds* of a bounded size, so that a rank that assembles messages needs little memory beside them.
tensors.py runs the rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from xfer.errors import Unsupported
from xfer.mesh.box import row_major
from xfer.packed.wire import BucketPart, PackedMessage
from xfer.plan.intersect import cut_range
from xfer.plan.program import DTYPE_CODE, ITEMSIZE, MAX_DIMS, ROW, Op
from xfer.trace.fragment import Fragment, Ints

STEP = 16
"""Bytes. In a round every box begins at a multiple of this, so that kernels move words and never single bytes."""

Box = tuple[Ints, Ints, Ints]
"""Origin, extent, steps; see trace.fragment.Fragment."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """One box of a tensor.

    Attributes:
        box: The box.
        by: Rank -> the fragment with the box, for each rank that holds it.
    """

    box: Box
    by: Mapping[int, Fragment]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of `fragment` in storage number `root` to byte `at` of a flat buffer, with byte strides `strides` and dtype `dtype`."""

    root: int
    fragment: Fragment
    at: int
    strides: Ints
    dtype: str


@dataclass(frozen=True, slots=True)
class GivenBox:
    """One box of one part of a message, and the rank that provides it. `fragment` lies in that rank's storages."""

    rank: int
    fragment: Fragment
    part: BucketPart

    @property
    def nbytes(self) -> int:
        return prod(self.fragment.extent) * ITEMSIZE[self.fragment.dtype]

    @property
    def padded(self) -> int:
        return -(-self.nbytes // STEP) * STEP

    def copy(self, root: int, fragment: Fragment | None = None) -> Copy:
        """Return the copy to the box's place in the message.

        Args:
            root: Number of the storage.
            fragment: The place of the bytes, if it is not `self.fragment`.
        """
        f, steps = self.fragment, dense(self.part.spec.shape, self.part.spec.dtype)
        at = self.part.offset - self.part.start + sum(o * s for o, s in zip(f.origin, steps))
        strides = tuple(s * q for s, q in zip(steps, f.steps or (1,) * len(steps)))
        return Copy(root, fragment or f, at, strides, self.part.spec.dtype)


@dataclass(frozen=True, slots=True)
class Round:
    """Boxes that other ranks send to `target` at once.

    Attributes:
        target: The receiving rank.
        pieces: The boxes, each with its first byte in the section of its rank.
        sections: sections[r] is (first byte at the target, number of bytes) of rank r's bytes.
    """

    target: int
    pieces: tuple[tuple[int, GivenBox], ...]
    sections: Mapping[int, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        return max((start + n for start, n in self.sections.values()), default=0)


def dense(shape: Ints, dtype: str) -> Ints:
    """Return the byte strides of a contiguous tensor."""
    return tuple(s * ITEMSIZE[dtype] for s in row_major(shape))


def pieces(message: PackedMessage, held: Mapping[str, Sequence[HeldBox]], target: int) -> list[GivenBox]:
    """Return all boxes of `message` for rank `target`. A box that the target holds comes from its own storages; a box that
    several other ranks hold comes from each of them in turn."""
    out, turn = [], 0
    for part in message.parts:
        ranges = None if part.whole else _ranges(part)
        for one in held[part.spec.name]:
            rank = target
            if target not in one.by:
                some = sorted(one.by)
                rank, turn = some[turn % len(some)], turn + 1
            f = one.by[rank]
            found = [f] if ranges is None else [clip(f, *box) for box in ranges]
            out += [GivenBox(rank, x, part) for x in found if x is not None and all(x.extent)]
    return out


def _ranges(part: BucketPart) -> list[tuple[Ints, Ints]]:
    item = ITEMSIZE[part.spec.dtype]
    shape = part.spec.shape
    found = cut_range([0] * len(shape), [*shape], part.start // item, (part.start + part.size) // item)
    return [(tuple(origin), tuple(extent)) for origin, extent in found]


def clip(f: Fragment, origin: Ints, extent: Ints) -> Fragment | None:
    """Return the part of `f` inside a box of its tensor, or None if they do not intersect."""
    steps = f.steps or (1,) * len(f.extent)
    lows, counts = [], []
    for o, n, q, a, m in zip(f.origin, f.extent, steps, origin, extent):
        low, high = max(0, -(-(a - o) // q)), min(n, -(-(a + m - o) // q))
        if high <= low:
            return None
        lows.append(low)
        counts.append(high - low)
    return replace(
        f,
        origin=tuple(o + i * q for o, i, q in zip(f.origin, lows, steps)),
        extent=tuple(counts),
        offset=f.offset + sum(i * s for i, s in zip(lows, f.strides)),
    )


def smaller(f: Fragment, most: int) -> Iterator[Fragment]:
    """Cut `f` along its first dims into parts of at most `most` bytes. Single elements are not cut."""
    if prod(f.extent) * ITEMSIZE[f.dtype] <= most or all(n == 1 for n in f.extent):
        yield f
        return
    d = next(i for i, n in enumerate(f.extent) if n > 1)
    row = prod(f.extent[d + 1 :]) * ITEMSIZE[f.dtype]
    count = max(1, most // row)
    step = (f.steps or (1,) * len(f.extent))[d]
    for i in range(0, f.extent[d], count):
        n = min(count, f.extent[d] - i)
        part = replace(
            f,
            origin=(*f.origin[:d], f.origin[d] + i * step, *f.origin[d + 1 :]),
            extent=(*f.extent[:d], n, *f.extent[d + 1 :]),
            offset=f.offset + i * f.strides[d],
        )
        yield from smaller(part, most)


def rounds(found: Iterable[GivenBox], target: int, most: int) -> list[Round]:
    """Return the rounds by which other ranks send boxes to `target`, each of at most about `most` bytes. Equal on all ranks."""
    out: list[Round] = []
    some: list[GivenBox] = []
    used = 0
    for piece in found:
        if piece.rank == target:
            continue
        for f in smaller(piece.fragment, most):
            p = replace(piece, fragment=f)
            if some and used + p.padded > most:
                out.append(_round(some, target))
                some, used = [], 0
            some.append(p)
            used += p.padded
    return [*out, _round(some, target)] if some else out


def _round(some: Sequence[GivenBox], target: int) -> Round:
    size: dict[int, int] = {}
    placed = []
    for p in some:
        at = size.get(p.rank, 0)
        placed.append((at, p))
        size[p.rank] = at + p.padded
    start, sections = 0, {}
    for rank in sorted(size):
        sections[rank] = (start, size[rank])
        start += size[rank]
    return Round(target, tuple(placed), sections)


def sent(r: Round, rank: int, number: Mapping[str, int]) -> list[Copy]:
    """Return the copies from this rank's storages into its section, densely. `number`: numbers of the storages by name."""
    return [
        Copy(number[p.fragment.root], p.fragment, at, dense(p.fragment.extent, p.fragment.dtype), p.fragment.dtype)
        for at, p in r.pieces
        if p.rank == rank
    ]  # fmt: skip


def landed(r: Round, root: int) -> list[Copy]:
    """Return the copies from the received sections (storage number `root`) to their places in the message."""
    out = []
    for at, p in r.pieces:
        f = p.fragment
        strides = dense(f.extent, f.dtype)
        out.append(p.copy(root, replace(f, offset=r.sections[p.rank][0] + at, strides=strides)))
    return out


def table(copies: Sequence[Copy]) -> np.ndarray:
    """Return rows (dtype ROW) for xfer.kernels, side "local", with destinations in storage 0. Unsupported for more than MAX_DIMS
    dims."""
    if deep := sorted({c.fragment.tensor for c in copies if len(c.fragment.extent) > MAX_DIMS}):
        raise Unsupported(f"tensors of more than {MAX_DIMS} dims cannot be packed", deep)
    out = np.zeros(len(copies), ROW)
    if not copies:
        return out

    def column(values: Iterable[Sequence[int]], fill: int) -> list[list[int]]:
        return [[fill] * (MAX_DIMS - len(v)) + list(v) for v in values]

    out["op"] = [Op.COPY if c.fragment.dtype == c.dtype else Op.CAST for c in copies]
    out["src_dtype"] = [DTYPE_CODE[c.fragment.dtype] for c in copies]
    out["dst_dtype"] = [DTYPE_CODE[c.dtype] for c in copies]
    out["src_root"] = [c.root for c in copies]
    out["src_offset"] = [c.fragment.offset for c in copies]
    out["dst_offset"] = [c.at for c in copies]
    out["extent"] = column((c.fragment.extent for c in copies), 1)
    out["src_strides"] = column((c.fragment.strides for c in copies), 0)
    out["dst_strides"] = column((c.strides for c in copies), 0)
    return out


def held_wholly(shape: Ints, boxes: Iterable[Box]) -> bool:
    """Return whether boxes cover every element of a tensor. They may overlap, unless one has steps other than 1."""
    return _covered(tuple(shape), tuple(sorted(boxes)))


@lru_cache(maxsize=4096)
def _covered(shape: Ints, boxes: tuple[Box, ...]) -> bool:
    total = prod(shape)
    there = sum(prod(extent) for _, extent, _ in boxes)
    if there < total or not total:
        return there >= total
    if len(boxes) == 1 or any(q != 1 for _, _, steps in boxes for q in steps):
        return there == total
    edges = [
        sorted({0, n, *(o[d] for o, _, _ in boxes), *(o[d] + e[d] for o, e, _ in boxes)}) for d, n in enumerate(shape)
    ]
    seen = np.zeros([len(e) - 1 for e in edges], bool)
    for origin, extent, _ in boxes:
        seen[tuple(slice(e.index(o), e.index(o + n)) for e, o, n in zip(edges, origin, extent))] = True
    return bool(seen.all())
