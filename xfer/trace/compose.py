"""Reads of scratch composed with what was written there: the result says how the read's elements relate to the
*origins*.

A scratch tensor (clone, cat, stack, receive buffer) remembers pieces: "region `dst` of me holds region `src` of
that origin". `trace_back` answers a later read of any region of it by (where the elements go, which piece, where in
the piece's origin). Three ways, from cheap to general:
  pull    the read lies inside one piece: rewrite its dims in the digits of the piece's dims
  push    disjoint pieces lie inside the read (a `cat` that is read whole): rewrite each piece's dims in the digits of
          the read
  blocks  number the scratch in blocks of the largest common unit, paint the pieces in order, read, fold runs
The answers depend on geometry alone, so they are cached: thousands of experts share one shape.
Not here: what an origin is, dtypes, torch (watch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from xfer.trace.view import Ints, Region, coalesce, constant

MAX_BLOCKS = 1 << 24
"""Numbering a scratch in more blocks than this takes seconds and gigabytes; such a read is not answered."""
MAX_PARTS = 4096
"""A read that falls into more strided terms than this is no longer worth moving directly."""


@dataclass(frozen=True, slots=True)
class CopiedRegion:
    """Elements at `dst` come from `src` of the origin of piece number `piece`; -1: nothing was ever written there.

    `src` is relative to the piece's own source offset. Both regions have one shape.
    """

    piece: int
    dst: Region
    src: Region


Written = tuple[Region, Ints | None]
"""The geometry of a piece: its region of the scratch, and the strides of its source (None: a
constant).
"""


def rewrite(inner: Region, mate: Region, outer: Region, outer_mate: Region) -> tuple[Region, Region] | None:
    """Match the elements of `inner` with those of `outer` at the same addresses, when all of `inner` lies in `outer`.

    `mate` has inner's shape, `outer_mate` outer's. Returns (mate, outer_mate) cut to one common shape, in inner's
    order; None when the dims of `inner` do not fall into whole digits of `outer`'s dims.
    """
    digits = sorted(
        ((s, n, m) for n, s, m in zip(outer.shape, outer.strides, outer_mate.strides) if n > 1), reverse=True
    )
    size = [n for _, n, _ in digits]
    step = [s for s, _, _ in digits]
    span = 1
    for s, n, _ in reversed(digits):
        if s < span:  # dims of `outer` interleave or repeat: an address has no unique digits
            return None
        span = s * n
    rest = inner.offset - outer.offset
    if rest < 0:
        return None
    at, mate_at = [], outer_mate.offset
    for s, n, m in digits:
        q, rest = divmod(rest, s)
        if q >= n:
            return None
        at.append(q)
        mate_at += q * m
    if rest:
        return None
    top = list(at)  # the highest value that each digit reaches; below its size means that no carry happens
    dims: list[tuple[int, int, int]] = []
    for n, s, m in zip(inner.shape, inner.strides, mate.strides):
        if n == 1:
            continue
        if s == 0:
            dims.append((n, m, 0))
            continue
        parts = []
        while n > 1:
            i = next((i for i, t in enumerate(step) if t <= s), None)
            if i is None or s % step[i]:
                return None
            q = s // step[i]
            room = n
            if at[i] + (n - 1) * q >= size[i]:  # runs over into the next digit: must be whole digits, counted from 0
                if i == 0 or at[i] or size[i] % q or n % (size[i] // q) or step[i - 1] != step[i] * size[i]:
                    return None
                room = size[i] // q
            parts.append((room, m, q * digits[i][2]))
            top[i] += (room - 1) * q
            if top[i] >= size[i]:
                return None
            n, s, m = n // room, s * room, m * room
        dims += reversed(parts)
    shape, a, b = zip(*dims) if dims else ((), (), ())
    return Region(mate.offset, shape, a), Region(mate_at, shape, b)


@lru_cache(maxsize=1 << 16)
def trace_back(
    read: Region, dst: Region, pieces: tuple[Written, ...], disjoint: bool
) -> tuple[CopiedRegion, ...] | None:
    """The sources of the elements of `read` (of a scratch), as parts of `dst`, which has the shape of `read`.

    Later pieces win over earlier ones. `disjoint`: the pieces are known not to overlap. None: not a few strided terms.
    """
    for i in range(len(pieces) - 1, -1, -1):
        where, strides = pieces[i]
        hit = rewrite(read, dst, where, _source(where, strides))
        if hit is not None:
            return (CopiedRegion(i, *hit),)
        if read.meets(where):
            break
    if disjoint and sum(where.size for where, _ in pieces) == read.size:
        parts = []
        for i, (where, strides) in enumerate(pieces):
            hit = rewrite(where, _source(where, strides), read, dst)
            if hit is None:
                break
            parts.append(CopiedRegion(i, hit[1], hit[0]))
        else:
            return tuple(parts)
    return blocks(read, dst, pieces)


def spans_disjoint(regions: Sequence[Region]) -> bool:
    """Whether no two address spans overlap: a cheap proof that no element is written twice."""
    order = sorted(regions, key=lambda r: r.offset)
    return all(a.last < b.offset for a, b in zip(order, order[1:]))


@lru_cache(maxsize=1 << 12)
def covers(written: tuple[Region, ...], read: Region) -> bool | None:
    """Whether every element of `read` lies in one of `written`; None where that takes more than `MAX_BLOCKS` to say."""
    read, written = _addresses(read), tuple(_addresses(w) for w in written if w.size)
    if any(rewrite(read, read, w, w) is not None for w in reversed(written)):
        return True
    painted = _paint(read, read, tuple((w, None) for w in written))
    return None if painted is None else bool((painted.owner >= 0).all())


def _addresses(r: Region) -> Region:
    """A region of the same addresses, in rising order and each once as far as strides tell: of what is asked by place
    alone the order of dims says nothing."""
    dims = sorted(((n, s) for n, s in zip(r.shape, r.strides) if n > 1 and s), key=lambda d: -d[1])
    return Region(r.offset, *coalesce(*zip(*dims))) if dims else Region(r.offset, (), ())


def blocks(read: Region, dst: Region, pieces: Sequence[Written]) -> tuple[CopiedRegion, ...] | None:
    """The general way; see the module's text. None beyond `MAX_BLOCKS` or `MAX_PARTS`."""
    painted = _paint(read, dst, pieces)
    if painted is None:
        return None
    owner, source, target, unit = painted
    order = np.argsort(owner, kind="stable")
    cuts = np.flatnonzero(np.diff(owner[order])) + 1
    parts: list[CopiedRegion] = []
    for group in np.split(order, cuts):
        i = int(owner[group[0]])
        known = i >= 0 and pieces[i][1] is not None
        for d, s in fold(target[group], source[group], unit, 1 if known else 0):
            parts.append(CopiedRegion(i, d, s))
            if len(parts) > MAX_PARTS:
                return None
    return tuple(parts)


class _Painted(NamedTuple):
    """Blocks of `unit` elements of a read, in its order: their piece (-1: none), where they come from and
    go."""

    owner: np.ndarray
    source: np.ndarray
    target: np.ndarray
    unit: int


def _paint(read: Region, dst: Region, pieces: Sequence[Written]) -> _Painted | None:
    """Number the blocks, paint the pieces in order, read. None beyond `MAX_BLOCKS`."""
    near = [i for i, (where, _) in enumerate(pieces) if read.meets(where)]
    shape, at, to = coalesce(read.shape, read.strides, dst.strides)
    unit = gcd(_run(shape, at, to), *_outer(shape, at, to))
    flat = {}
    for i in near:
        where, strides = pieces[i]
        dims = coalesce(where.shape, where.strides, strides if strides is not None else where.strides)
        flat[i] = dims
        unit = gcd(unit, _run(*dims), where.offset - read.offset, *_outer(*dims))
    unit = max(unit, 1)
    base, count = read.offset, (read.last - read.offset) // unit + 1
    work = sum(pieces[i][0].size for i in near) + read.size
    if count > MAX_BLOCKS or work // unit > 2 * MAX_BLOCKS:
        return None
    who = np.full(count, -1, np.int32)
    address = np.zeros(count, np.int64)
    for i in near:
        where, strides = pieces[i]
        n, w, s = flat[i]
        place = _grid(where.offset - base, n, w, w, s, unit) // unit
        inside = (place >= 0) & (place < count)
        who[place[inside]] = i
        address[place[inside]] = 0 if strides is None else _grid(0, n, s, w, s, unit)[inside]
    place = _grid(0, shape, at, at, to, unit) // unit
    return _Painted(who[place], address[place], _grid(dst.offset, shape, to, at, to, unit), unit)


def fold(d: np.ndarray, s: np.ndarray, unit: int = 1, inner: int = 1) -> Iterator[tuple[Region, Region]]:
    """Blocks of `unit` elements at `d[i]` and `s[i]` as few strided terms, in order. `inner`: stride of `s` inside
    a block.
    """
    i = 0
    while i < len(d):
        dims = [(unit, 1, inner)] if unit > 1 else []
        lead_d, lead_s, used = d[i:], s[i:], 1
        while len(lead_d) > 1:
            dd, ds = int(lead_d[1] - lead_d[0]), int(lead_s[1] - lead_s[0])
            if dd <= 0 or ds < 0:  # a region does not walk backwards
                break
            n = 1 + _leading((np.diff(lead_d) == dd) & (np.diff(lead_s) == ds))
            dims.insert(0, (n, dd, ds))
            used *= n
            rows = len(lead_d) // n
            a, b = lead_d[: rows * n].reshape(rows, n), lead_s[: rows * n].reshape(rows, n)
            alike = ((a - a[:, :1]) == (a[0] - a[0, 0])).all(1) & ((b - b[:, :1]) == (b[0] - b[0, 0])).all(1)
            rows = _leading(alike)
            if rows <= 1:
                break
            lead_d, lead_s = a[:rows, 0], b[:rows, 0]
        shape, ds_, ss_ = coalesce(*zip(*dims)) if dims else ((), (), ())
        yield Region(int(d[i]), shape, ds_), Region(int(s[i]), shape, ss_)
        i += used


def _leading(flags: np.ndarray) -> int:
    """How many flags at the start are set."""
    return len(flags) if flags.all() else int(np.argmin(flags))


def _source(where: Region, strides: Ints | None) -> Region:
    return constant(where.shape) if strides is None else Region(0, where.shape, strides)


def _run(shape: Ints, a: Ints, b: Ints) -> int:
    """Length of the innermost run that is consecutive on both sides."""
    return shape[-1] if shape and a[-1] == 1 and b[-1] == 1 else 1


def _outer(shape: Ints, a: Ints, b: Ints) -> Ints:
    """Strides in the scratch that have to be whole blocks."""
    return a[:-1] if shape and a[-1] == 1 and b[-1] == 1 else a


def _grid(start: int, shape: Ints, strides: Ints, a: Ints, b: Ints, unit: int) -> np.ndarray:
    """Address of each block in row-major order. (a, b) tell whether the innermost dim is a run, counted in blocks."""
    out = np.array([start], np.int64)
    for k, (n, s) in enumerate(zip(shape, strides)):
        run = unit if k == len(shape) - 1 and a[-1] == 1 and b[-1] == 1 else 1
        out = (out[:, None] + np.arange(0, n, run, dtype=np.int64) * s).reshape(-1)
    return out
