"""Slices: which boxes of a global tensor a rank holds under a declared layout, and where they sit in its local tensor.

Every placement acts on one dim alone, so a layout is, per dim, a list of *runs* (start, length) of global indices in
the order in which they are stored; the boxes are the product of the dims' runs. Not here: bytes and storages
(trace/declared.py), and which layer lives on which pipeline stage (read from the frameworks, never computed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

from xfer.mesh.box import Box, Ints
from xfer.mesh.mesh_info import MeshInfo
from xfer.mesh.placement import Interleaved, Placement, Replicate, Segmented, Shard, StridedShard, checked

Runs = tuple[tuple[int, int], ...]
"""(first global index, length), in storage order; neighbours merged, none empty."""


@dataclass(frozen=True, slots=True)
class LocalBox:
    """`box` of the global tensor lies at index `at` (per dim, in elements) of the rank's local tensor."""

    box: Box
    at: Ints


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """One rank's part of a tensor: the shape of its local tensor and the boxes that fill it, each local element
    once."""

    shape: Ints
    boxes: tuple[LocalBox, ...]


def local_layout(
    global_shape: Sequence[int], mesh: MeshInfo, placements: Sequence[Placement], rank: int, name: str = "tensor"
) -> LocalLayout | None:
    """The layout of `rank`, or None when it is not in `mesh`. Empty shards have a dim of size 0 and no boxes.

    LayoutError (all violations) when `placements` do not fit `global_shape` and `mesh`; `name` is used in its text.
    """
    placements = checked(global_shape, mesh, placements, name)
    here = mesh.coordinate(rank)
    if here is None:
        return None
    cuts = list(zip(placements, mesh.sizes, here))
    runs = [
        _runs(n, tuple(c for c in cuts if not isinstance(c[0], Replicate) and c[0].dim == d))
        for d, n in enumerate(global_shape)
    ]
    shape = tuple(sum(length for _, length in dim) for dim in runs)
    starts = [list(accumulate((length for _, length in dim), initial=0)) for dim in runs]
    boxes = tuple(
        LocalBox(
            Box(tuple(r[i][0] for r, i in zip(runs, pick)), tuple(r[i][1] for r, i in zip(runs, pick))),
            tuple(s[i] for s, i in zip(starts, pick)),
        )
        for pick in product(*(range(len(dim)) for dim in runs))
    )
    return LocalLayout(shape, boxes)


def local_shape(
    global_shape: Sequence[int], mesh: MeshInfo, placements: Sequence[Placement], rank: int, name: str = "tensor"
) -> Ints | None:
    """Shape of the local tensor of `rank`; None when it is not in the mesh."""
    layout = local_layout(global_shape, mesh, placements, rank, name)
    return layout.shape if layout else None


def chunk(n: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of chunk `index` of `n` in `parts`, as torch.chunk cuts; chunks that it omits are empty."""
    width = -(-n // parts)
    start = min(n, width * index)
    return start, min(n, start + width) - start


@lru_cache(maxsize=65536)
def _runs(n: int, cuts: tuple[tuple[Placement, int, int], ...]) -> Runs:
    """Runs of a dim of size `n` after all cuts, (placement, axis size, coordinate); each one cuts the result of those before it."""
    runs: Runs = ((0, n),) if n else ()
    for placement, size, index in cuts:
        runs = _merged(_cut(runs, placement, size, index))
    return runs


def _cut(runs: Runs, p: Placement, size: int, index: int) -> Iterable[tuple[int, int]]:
    n = sum(length for _, length in runs)
    if isinstance(p, Shard):
        return _take(runs, *chunk(n, size, index))
    if isinstance(p, StridedShard):
        parts = [_take(runs, *chunk(n, p.split_factor, part)) for part in range(min(n, p.split_factor))]
        return [run for part in parts for run in _chunk_of(part, size, index)]
    if isinstance(p, Segmented):
        out: list[tuple[int, int]] = []
        copies = p.copies or (1,) * len(p.segments)
        for start, length, c in zip(accumulate(p.segments, initial=0), p.segments, copies):
            out += _chunk_of(_within(runs, start, length), size // c, index // c)
        return out
    if isinstance(p, Interleaved):
        groups = [[run for lo, width in row for run in _within(runs, lo, width)] for row in _grid(p)]
        groups = [g for g in groups if g]  # an axis before this one may have taken some
        first, count = chunk(len(groups), size, index)
        return [run for g in groups[first : first + count] for run in g]
    raise TypeError(f"{p!r} cuts no dim")


def _grid(p: Interleaved) -> list[list[tuple[int, int]]]:
    """Per group: (start, length) of its part of each segment."""
    widths = [s // p.groups for s in p.segments]
    starts = list(accumulate(p.segments, initial=0))
    return [[(start + g * width, width) for start, width in zip(starts, widths)] for g in range(p.groups)]


def _chunk_of(runs: Sequence[tuple[int, int]], parts: int, index: int) -> list[tuple[int, int]]:
    return _take(runs, *chunk(sum(length for _, length in runs), parts, index))


def _take(runs: Sequence[tuple[int, int]], start: int, length: int) -> list[tuple[int, int]]:
    """The part of `runs` at *stored* positions start … start + length."""
    out, at, stop = [], 0, start + length
    for first, width in runs:
        lo, hi = max(start - at, 0), min(stop - at, width)
        if hi > lo:
            out.append((first + lo, hi - lo))
        at += width
    return out


def _within(runs: Sequence[tuple[int, int]], start: int, length: int) -> list[tuple[int, int]]:
    """The part of `runs` whose *global* indices lie in start … start + length, in stored order."""
    out = []
    for first, width in runs:
        lo, hi = max(first, start), min(first + width, start + length)
        if hi > lo:
            out.append((lo, hi - lo))
    return out


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    out: list[tuple[int, int]] = []
    for first, width in runs:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + width)
        else:
            out.append((first, width))
    return tuple(out)
