"""Exact byte sets of strided regions: which bytes of a storage does a fragment, a fill or a span cover?

Sets of bytes are two int64 columns, start and stop. This module does only that arithmetic; coverage.py knows what the
bytes mean. The cost grows with the number of contiguous runs, not of elements: permuted dims coalesce by themselves, and
interleaved regions (combs) that complete each other are joined before they are divided into runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from xfer.errors import Unsupported

MAX_RUNS = 1 << 27
"""Most contiguous runs of one rank (4 GiB of columns): regions interleaved by single elements that nothing joins."""


@dataclass(frozen=True, slots=True, eq=False)
class Bytes:
    """`start[i] <= b < stop[i]`; `owner[i]` is the row of the region that the run comes from (of one of them, if
    joined).
    """

    start: np.ndarray
    stop: np.ndarray
    owner: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def empty(cls) -> Bytes:
        return cls(*(np.zeros(0, np.int64) for _ in range(3)))

    @classmethod
    def concat(cls, parts: list[Bytes]) -> Bytes:
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in cls.__slots__)) if parts else cls.empty()


def runs(
    offset: np.ndarray,
    extent: np.ndarray,
    strides: np.ndarray,
    item: np.ndarray,
    name: Callable[[int], str] = "region {}".format,
) -> Bytes:
    """Contiguous runs of regions: element i of region r is the `item[r]` bytes at `offset[r] + sum(i * strides[r])`.

    offset, item: int64 [N]; extent, strides: int64 [N, D]. A byte that a region reaches twice comes out twice.
    Raises Unsupported beyond MAX_RUNS, with the `name` of the regions that have most; adjacent regions count as the first of them.
    """
    count = len(offset)
    if not count:
        return Bytes.empty()
    long = (extent != 1).any(axis=0)
    extent, strides = extent[:, long], strides[:, long]
    start = offset + np.minimum((extent - 1) * strides, 0).sum(axis=1)  # strides made positive
    step = np.where(extent == 1, 0, np.abs(strides))
    order = np.argsort(step, axis=1, kind="stable")
    step, size = np.take_along_axis(step, order, 1), np.take_along_axis(extent, order, 1)
    length = item.astype(np.int64)
    for d in range(step.shape[1]):  # smallest stride first: a dim that continues the run belongs to it
        joins = (size[:, d] == 1) | (step[:, d] == length)
        length = np.where(joins, length * size[:, d], length)
        size[joins, d] = 1
    plain = (size == 1).all(axis=1)
    rows = plain.nonzero()[0]
    out = [Bytes(start[rows], start[rows] + length[rows], rows)]
    if len(rows) == count:
        return out[0]
    combs = [
        _Comb(int(start[r]), int(length[r]), tuple((int(n), int(s)) for n, s in zip(size[r], step[r]) if n > 1), int(r))
        for r in np.flatnonzero(~plain)
    ]
    joined = _join(combs)
    total = sum(prod(n for n, _ in c.teeth) for c in joined)
    if total > MAX_RUNS:
        most = sorted(((c.owner, prod(n for n, _ in c.teeth)) for c in joined), key=lambda x: -x[1])
        raise Unsupported(
            f"regions of {total} separate byte runs; up to {MAX_RUNS} can be proven to be disjoint",
            [f"{name(i)}: {n:,} of them lie apart" for i, n in most[:4]],
        )
    return Bytes.concat(out + [c.runs() for c in joined])


@dataclass(frozen=True, slots=True)
class _Comb:
    start: int
    length: int
    teeth: tuple[tuple[int, int], ...]  # (count, stride), smallest stride first
    owner: int

    def runs(self) -> Bytes:
        at = np.array([self.start], np.int64)
        for n, s in self.teeth:
            at = (np.arange(n, dtype=np.int64)[:, None] * s + at).reshape(-1)
        return Bytes(at, at + self.length, np.full(len(at), self.owner, np.int64))


def _join(combs: list[_Comb]) -> list[_Comb]:
    """Combs of equal teeth that lie side by side become one, until nothing changes. Only disjoint ones are joined."""
    done: list[_Comb] = []
    while combs:
        groups: dict[tuple[tuple[int, int], ...], list[_Comb]] = defaultdict(list)
        for c in combs:
            groups[c.teeth].append(c)
        combs = []
        for teeth, group in groups.items():
            group.sort(key=lambda c: (c.start, c.length))
            gap = teeth[0][1]
            last = group[0]
            merged = []
            for c in group[1:]:
                if c.start == last.start + last.length and last.length + c.length <= gap:
                    last = _Comb(last.start, last.length + c.length, teeth, last.owner)
                else:
                    merged.append(last)
                    last = c
            for c in [*merged, last]:
                if c.length == gap:  # closed up: it is a longer run under the remaining teeth, which may join others
                    combs.append(_shorten(c))
                else:
                    done.append(c)
    return done


def _shorten(c: _Comb) -> _Comb:
    length, teeth = c.length, c.teeth
    while teeth and teeth[0][1] == length:
        length, teeth = length * teeth[0][0], teeth[1:]
    return _Comb(c.start, length, teeth, c.owner) if teeth else _Comb(c.start, length, ((1, 1 << 62),), c.owner)


def overlaps(b: Bytes) -> Bytes:
    """The bytes that are covered more than once, as (start, stop, owner of the later run); may itself hold repeats."""
    order = np.lexsort((b.stop, b.start))
    start, stop = b.start[order], b.stop[order]
    reach = np.maximum.accumulate(stop) if len(stop) else stop
    hit = np.flatnonzero(start[1:] < reach[:-1]) + 1
    return Bytes(start[hit], np.minimum(stop[hit], reach[hit - 1]), b.owner[order][hit])


def union(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same bytes as sorted disjoint runs that do not touch; empty runs vanish."""
    full = stop > start
    if not full.all():
        start, stop = start[full], stop[full]
    order = start.argsort(kind="stable")
    start, stop = start[order], stop[order]
    if not len(start):
        return start, stop
    reach = np.maximum.accumulate(stop)
    fresh = (start[1:] > reach[:-1]).nonzero()[0]
    return start[np.concatenate([[0], fresh + 1])], reach[np.concatenate([fresh, [len(reach) - 1]])]


def difference(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a that are not in b; both are unions."""
    at = np.concatenate([*a, *b])
    in_a = np.concatenate([np.ones(len(a[0])), -np.ones(len(a[1])), np.zeros(2 * len(b[0]))]).astype(np.int64)
    in_b = np.concatenate([np.zeros(2 * len(a[0])), np.ones(len(b[0])), -np.ones(len(b[1]))]).astype(np.int64)
    order = np.argsort(at, kind="stable")
    at, depth_a, depth_b = at[order], np.cumsum(in_a[order]), np.cumsum(in_b[order])
    keep = (depth_a[:-1] > 0) & (depth_b[:-1] == 0) & (at[:-1] < at[1:])
    return union(at[:-1][keep], at[1:][keep])


def size(runs_: tuple[np.ndarray, np.ndarray]) -> int:
    return int((runs_[1] - runs_[0]).sum())
