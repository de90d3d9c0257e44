"""Moves cut into tiles: flat tables of small, equally long pieces of work that one kernel launch moves.

A tile is two-dimensional: `rows` runs of `width` units, a stride between runs on either end. Outer dims of a move
become separate tiles. Tables name storages by index and hold offsets, never addresses, so they stay valid when a storage is bound anew
at an equally aligned address. Arithmetic on numpy arrays only: no tensor and no device is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xfer.kernels.strided import StridedCopy

COLUMNS = 8
"""int64 words of a tile: from root | to root << 32, from offset, to offset, width | rows << 32, from and to strides of
rows, from and to strides of units. Offsets in bytes; strides in units (plain moves) or elements (conversions)."""

UNITS = (16, 8, 4, 2, 1)
"""Bytes that one thread moves at once; a plain move uses the largest that divides all its offsets, strides and runs."""

SMALL_TILE, LARGE_TILE = 64 << 10, 128 << 10
LARGE_FROM, LARGE_FROM_BESIDE_WIRE = 24 << 30, 128 << 20
"""Bytes of a call from which its tiles are large, so that its table stays small. Packs and unpacks have few programs, each of which
has enough large tiles sooner."""


@dataclass(frozen=True, slots=True)
class Table:
    """Tiles that one launch moves. `unit`: bytes (plain) or 0; `dtypes`: (from, to) of a conversion or None.

    `tiles`: int64 [n, COLUMNS]. `nbytes`: int64 [n], bytes that each tile writes.
    """

    unit: int
    dtypes: tuple[str, str] | None
    tiles: np.ndarray
    nbytes: np.ndarray


@dataclass(frozen=True, slots=True)
class End:
    """One end of a tile table: `aligned[i]` is the alignment in bytes (a power of two, at most 16) of storage i."""

    aligned: Sequence[int]


def plain_tables(
    moves: Sequence[StridedCopy], left: End, right: End, *, backwards: bool, large_from: int = LARGE_FROM
) -> list[Table]:
    """Tables of moves whose two dtypes are equal, one per unit. backwards: right to left (unpacking)."""
    if not moves:
        return []
    dims, roots, offsets = _laid(moves)
    # A move without a dense innermost run is one of single bytes.
    dense = (dims[:, -1, 1] == 1) & (dims[:, -1, 2] == 1)
    if not dense.all():
        dims = np.concatenate([dims, np.tile(np.array([[[1, 1, 1]]], np.int64), (len(moves), 1, 1))], axis=1)
        dims[dense, 1:] = dims[dense, :-1]
        dims[dense, 0] = (1, 0, 0)
    common = np.gcd(dims[:, -1, 0], 16)
    for end, side in ((left, 0), (right, 1)):
        common = np.gcd(common, offsets[:, side])
        common = np.gcd(common, np.array([end.aligned[r] for r in roots[:, side]], np.int64))
    for d in range(dims.shape[1] - 1):
        steps = np.where(dims[:, d, :1] > 1, dims[:, d, 1:], 0)
        common = np.gcd(common, np.gcd(steps[:, 0], steps[:, 1]))
    tile = _tile_bytes(int(dims[:, :, 0].prod(axis=1).sum()), large_from)
    out = []
    for unit in UNITS:
        mine = common == unit
        if mine.any():
            some = dims[mine].copy()
            some[:, -1, 0] //= unit
            some[:, :-1, 1:] //= unit
            some[:, -1, 1:] = 1
            out.append(_table(some, roots[mine], offsets[mine], unit, unit, unit, None, tile, backwards))
    return out


def cast_tables(
    moves: Sequence[StridedCopy], items: dict[str, int], *, backwards: bool, large_from: int = LARGE_FROM
) -> list[Table]:
    """Tables of moves that convert, one per pair of dtypes. Every value has to lie at a multiple of its own size."""
    kinds: dict[tuple[str, str], list[StridedCopy]] = {}
    for m in moves:
        kinds.setdefault((m.left_dtype, m.right_dtype), []).append(m)
    out = []
    for (left, right), some in sorted(kinds.items()):
        dims, roots, offsets = _laid(some)
        dims[:, :, 1] //= items[left]
        dims[:, :, 2] //= items[right]
        tile = _tile_bytes(int(dims[:, :, 0].prod(axis=1).sum()) * items[right], large_from)
        written = items[left] if backwards else items[right]
        pair = (right, left) if backwards else (left, right)
        steps = (items[left], items[right])
        out.append(_table(dims, roots, offsets, 0, *steps, pair, tile, backwards, written))
    return out


@dataclass(frozen=True, slots=True)
class Turns:
    """The order of the tiles of a pull. Storage r of the sources belongs to group `groups[r]`. Groups take turns of about
    `burst` bytes (0: of a tile), in the order of their numbers; a group with fewer bytes takes shorter turns, so that all end
    together. Groups `beside` have no turn: their tiles are spread evenly among all others.

    In long turns, destinations that begin with different sources always read from different GPUs. Destinations that begin with the
    same source share it to the end. What lies on the destination's own GPU needs no wire, so it goes beside.
    """

    groups: Sequence[int] = ()
    burst: int = 0
    beside: frozenset[int] = frozenset()


def interleaved(table: Table, turns: Turns) -> Table:
    """The same tiles in the order of `turns`."""
    group = np.asarray(turns.groups, np.int64)[table.tiles[:, 0] & 0xFFFFFFFF]
    count = int(group.max(initial=0)) + 1
    share, most = np.zeros(len(group)), 0
    for g in range(count):
        n = table.nbytes[mine := group == g]
        share[mine] = (np.cumsum(n) - n) / max(1, n.sum())
        most = max(most, 0 if g in turns.beside else int(n.sum()))
    when, beside = share, np.isin(group, list(turns.beside))
    if turns.burst:
        rounds = max(1, round(most / turns.burst))
        among = sorted(set(group[~beside].tolist()))
        nth = np.searchsorted(among, group)
        begun = np.floor(share * rounds)
        turn = (begun + (nth + share * rounds - begun) / max(1, len(among))) / rounds
        when = np.where(beside, share, turn)
    order = np.lexsort((group, when))
    return Table(table.unit, table.dtypes, np.ascontiguousarray(table.tiles[order]), table.nbytes[order])


def _laid(moves: Sequence[StridedCopy]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dims [m, k, (extent, left stride, right stride)], (left, right) storages and offsets of moves. `mirrored` dims start at the far
    end. A move of fewer dims than others has outer dims of extent 1."""
    depth = max(1, *(len(m.dims) for m in moves))
    dims = np.ones((len(moves), depth, 3), np.int64)
    dims[:, :, 1:] = 0
    offsets = np.array([(m.left, m.right) for m in moves], np.int64)
    for k, m in enumerate(moves):
        if m.dims:
            dims[k, depth - len(m.dims) :] = m.dims
        for d in m.mirrored:
            dims[k, depth - len(m.dims) + d, 2] *= -1
            offsets[k, 1] += (m.dims[d][0] - 1) * m.dims[d][2]
    return dims, np.array([(m.left_root, max(m.right_root, 0)) for m in moves], np.int64), offsets


def _tile_bytes(total: int, large_from: int) -> int:
    return LARGE_TILE if total >= large_from else SMALL_TILE


def _table(dims, roots, offsets, unit, left_step, right_step, dtypes, tile_bytes, backwards, written=None) -> Table:
    """dims [m, k, (extent, left stride, right stride)], strides in steps of left_step/right_step bytes."""
    written = written or right_step
    most = max(1, tile_bytes // written)
    width, rows = (
        dims[:, -1],
        dims[:, -2] if dims.shape[1] > 1 else np.tile(np.array([1, 0, 0], np.int64), (len(dims), 1)),
    )
    # Outer dims one index at a time.
    for d in range(dims.shape[1] - 2):
        n = dims[:, d, 0]
        if (n == 1).all():
            continue
        at, k = _repeat(n)
        offsets = offsets[k] + at[:, None] * dims[k, d, 1:] * (left_step, right_step)
        roots, dims, width, rows = roots[k], dims[k], width[k], rows[k]
    # Long runs are cut along the run and so, one row at a time; short ones by rows.
    long = width[:, 0] > most
    at, k = _repeat(np.where(long, rows[:, 0], -(-rows[:, 0] // np.maximum(1, most // width[:, 0]))))
    per = np.where(long, 1, np.maximum(1, most // width[:, 0]))[k]
    first = at * per
    count = np.minimum(per, rows[k, 0] - first)
    offsets = offsets[k] + first[:, None] * rows[k, 1:] * (left_step, right_step)
    roots, width, rows = roots[k], width[k], rows[k]
    at, k = _repeat(np.where(count == 1, -(-width[:, 0] // most), 1))
    first = at * most
    length = np.where(count[k] == 1, np.minimum(most, width[k, 0] - first), width[k, 0])
    offsets = offsets[k] + first[:, None] * width[k, 1:] * (left_step, right_step)
    out = np.empty((len(k), COLUMNS), np.int64)
    a, b = (1, 0) if backwards else (0, 1)
    out[:, 0] = roots[k, a] | roots[k, b] << 32
    out[:, 1], out[:, 2] = offsets[:, a], offsets[:, b]
    out[:, 3] = length | count[k] << 32
    out[:, 4], out[:, 5] = rows[k, 1 + a], rows[k, 1 + b]
    out[:, 6], out[:, 7] = width[k, 1 + a], width[k, 1 + b]
    return Table(unit, dtypes, out, length * count[k] * written)


def _repeat(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each item `counts[i]` times: (0, 1, ... counts[i] - 1) and i."""
    k = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(k)) - np.repeat(np.cumsum(counts) - counts, counts), k
