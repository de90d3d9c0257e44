"""Rows as the fewest plain strided copies. Arithmetic on integers only: no tensor and no device is known here.

Each row is a box; on both of its ends (storage and wire, or two storages) it is an offset and one byte stride per
dim. `moves` drops dims of extent 1, joins dims that are contiguous on both ends, and joins neighbouring rows that
together form one larger strided box. Experts, layers of one buffer and interleaved heads fold into single copies this
way.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from xfer.plan.program import DTYPES, ITEM, ITEMSIZE, MAX_DIMS, Op, wire_dtype

WIRE = -1
"""In place of a root index: the wire buffer."""

PEEL_LIMIT = 4096
"""A dim that runs backwards on one end is cut into this many copies at most; longer ones are marked `mirrored`."""

Dim = tuple[int, int, int]


class StridedCopy(NamedTuple):
    """`dims`: (extent, left stride, right stride), outermost first. Offsets and strides in bytes, strides >= 0.

    When the dtypes are equal the innermost dims count *bytes* (the element is a dim of its own, already joined with
    its neighbours), else *elements*. `left` is the storage (for local rows: the source's), `right` the wire buffer
    (the destination's). `mirrored`: indices of dims to be walked backwards on the right end.
    """

    left_root: int
    left: int
    left_dtype: str
    right_root: int
    right: int
    right_dtype: str
    dims: tuple[Dim, ...]
    mirrored: tuple[int, ...] = ()

    @property
    def extent(self) -> tuple[int, ...]:
        return tuple(n for n, _, _ in self.dims)


def wire_strides(extent: list[int], item: int) -> list[int]:
    """Byte strides of a dense row-major box."""
    return [*accumulate(reversed(extent[1:]), int.__mul__, initial=item)][::-1]


def moves(rows: np.ndarray, side: str) -> list[StridedCopy]:
    """The copies that move `rows`, without FILL rows. Before copies are joined, they are in the order of the rows."""
    rows = rows[rows["op"] != Op.FILL]
    out: list[StridedCopy] = []
    columns = ("src_dtype", "dst_dtype", "src_root", "dst_root", "wire", "src_offset", "dst_offset")
    scalars = [rows[c].tolist() for c in columns]
    arrays = [rows[c].tolist() for c in ("extent", "src_strides", "dst_strides")]
    for sd, dd, sroot, droot, wire, soff, doff, extent, sstr, dstr in zip(*scalars, *arrays):
        src, dst = DTYPES[sd], DTYPES[dd]
        if side == "local":
            left, right = (sroot, soff, src, sstr), (droot, doff, dst, dstr)
        else:
            travels = wire_dtype(src, dst)
            left = (sroot, soff, src, sstr) if side == "src" else (droot, doff, dst, dstr)
            right = (WIRE, wire, travels, wire_strides(extent, ITEMSIZE[travels]))
        out.extend(_simplest(left, right, extent))
    return _join_all(out)


def bounds(rows: np.ndarray, end: str) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last byte that each row touches in its storage on end "src" or "dst". Empty rows: (0, 0)."""
    reach = (rows["extent"] - 1) * rows[f"{end}_strides"]
    item = ITEM[rows[f"{end}_dtype"]]
    low = rows[f"{end}_offset"] + np.minimum(reach, 0).sum(axis=1)
    high = rows[f"{end}_offset"] + np.maximum(reach, 0).sum(axis=1) + item
    some = (rows["extent"] > 0).all(axis=1)
    return np.where(some, low, 0), np.where(some, high, 0)


def contiguous(rows: np.ndarray, end: str) -> np.ndarray:
    """Whether each row is one dense row-major run in its storage on end "src" or "dst" (bool array)."""
    want = ITEM[rows[f"{end}_dtype"]]
    dense = np.ones(len(rows), bool)
    for d in reversed(range(MAX_DIMS)):
        n = rows["extent"][:, d]
        dense &= (n == 1) | (rows[f"{end}_strides"][:, d] == want)
        want *= n
    return dense


def _simplest(left: tuple, right: tuple, extent: list[int]) -> list[StridedCopy]:
    (lroot, loff, ltype, lstrides), (rroot, roff, rtype, rstrides) = left, right
    if 0 in extent:
        return []
    dims: list[Dim] = []
    backwards: list[int] = []
    for n, a, b in zip(extent, lstrides, rstrides):
        if n == 1:
            continue
        if a < 0:  # begin at the lowest address; the other end is reversed, too
            loff, roff, a, b = loff + (n - 1) * a, roff + (n - 1) * b, -a, -b
        if b < 0:
            if a == 0:
                roff, b = roff + (n - 1) * b, -b
            else:
                backwards.append(len(dims))
        dims.append((n, a, b))
    if ltype == rtype:
        dims.append((ITEMSIZE[ltype], 1, 1))
    if not backwards:
        return [StridedCopy(lroot, loff, ltype, rroot, roff, rtype, _coalesce(dims))]
    if prod(dims[d][0] for d in backwards) > PEEL_LIMIT:
        for d in backwards:
            n, a, b = dims[d]
            roff, dims[d] = roff + (n - 1) * b, (n, a, -b)
        return [StridedCopy(lroot, loff, ltype, rroot, roff, rtype, tuple(dims), tuple(backwards))]
    starts = [(loff, roff)]
    for d in backwards:
        n, a, b = dims[d]
        starts = [(x + i * a, y + i * b) for x, y in starts for i in range(n)]
    rest = _coalesce([dim for d, dim in enumerate(dims) if d not in backwards])
    return [StridedCopy(lroot, x, ltype, rroot, y, rtype, rest) for x, y in starts]


def _coalesce(dims: list[Dim]) -> tuple[Dim, ...]:
    out: list[Dim] = []
    for n, a, b in dims:
        if out and out[-1][1] == n * a and out[-1][2] == n * b:
            out[-1] = (out[-1][0] * n, a, b)
        else:
            out.append((n, a, b))
    return tuple(out)


def _join_all(found: list[StridedCopy]) -> list[StridedCopy]:
    # A second pass joins what the first one built (pairs of pairs); it ends when a pass joins nothing.
    while True:
        out: list[StridedCopy] = []
        for move in found:
            joined = _join(out[-1], move) if out else None
            if joined is None:
                out.append(move)
            else:
                out[-1] = joined
        if len(out) == len(found):
            return out
        found = out


def _join(p: StridedCopy, c: StridedCopy) -> StridedCopy | None:
    """One move that does the work of `p` and then `c`, or None."""
    if (p.left_root, p.right_root, p.left_dtype, p.right_dtype) != (
        c.left_root,
        c.right_root,
        c.left_dtype,
        c.right_dtype,
    ):
        return None
    if p.mirrored or c.mirrored:
        return None
    step = (c.left - p.left, c.right - p.right)
    if p.dims:
        n, a, b = p.dims[0]
        if step == (n * a, n * b):
            if c.dims and p.dims[1:] == c.dims[1:] and c.dims[0][1:] == (a, b):
                return p._replace(dims=((n + c.dims[0][0], a, b), *p.dims[1:]))
            if p.dims[1:] == c.dims:
                return p._replace(dims=((n + 1, a, b), *p.dims[1:]))
    if p.dims == c.dims and min(step) > 0:
        return p._replace(dims=_coalesce([(2, *step), *p.dims]))
    return None
