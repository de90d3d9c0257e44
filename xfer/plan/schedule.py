"""When the bytes of each pair (sender, taker) travel: pairs x waves, bounded per message and per rank.

Works on byte counts alone, so that every rank knows all waves without expanding anybody's rows. A pair's bytes are one
stream; a message is an interval of it. Not here: which rows a stream has (subplan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Messages sorted by (pair, wave): message m of its pair carries stream bytes from begin[m] to the next one's
    begin.
    """

    first: np.ndarray  # int64 [pairs + 1]
    wave: np.ndarray  # int32 [M]
    begin: np.ndarray  # int64 [M], bytes
    waves: int


def schedule(
    src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray, *, message: int, per_rank: int, unit: int, rotation: int = 0,
    rotations: int = 0, way: np.ndarray | None = None,
) -> Schedule:  # fmt: skip
    """First fit of messages into waves: at most `message` bytes of a pair and `per_rank` bytes in or out of a rank
    per wave.

    src, dst, nbytes: int [pairs], distinct pairs with nbytes > 0. Messages begin at multiples of `unit` bytes, of
    which `message` is one. Pairs with the most messages left go first, since a pair has one message a wave; among
    equals, takers begin with different senders (shifted by `rotation`), so that they do not drain one sender together.

    `way`: int [pairs], what a pair's bytes leave by and share with other pairs and other schedules (a NIC); default: the
    sender. Its bytes are spread over the waves as evenly as messages allow, so that schedules that run at once crowd it in
    no wave. `rotations` of them are numbered by `rotation`, and begin as far from each other as can be; with 0 of them
    `rotation` counts senders.
    """
    pairs = len(src)
    count = -(-nbytes // message)
    pair = np.repeat(np.arange(pairs), count)
    k = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
    left = count[pair] - k
    # What does not fill a message counts as whole units: it may travel before full ones, which must begin at a unit.
    rest = -(-(nbytes - (count - 1) * message) // unit) * unit
    amount = np.where(left > 1, message, rest[pair])
    turn = _turns(src, dst, rotation, rotations)
    order = np.lexsort((dst[pair], turn[pair], -amount, -left))

    ranks = int(max(src.max(initial=0), dst.max(initial=0))) + 1
    way = src if way is None else np.unique(way, return_inverse=True)[1].reshape(-1)
    busiest = max((int(np.bincount(end, nbytes).max()) for end in (src, dst) if pairs), default=0)
    least = max(1, -(-busiest // per_rank))  # waves
    even = -(-np.bincount(way, nbytes).astype(np.int64) // (least * message)) * message
    out, into = _Room(np.full(ranks, per_rank)), _Room(np.full(ranks, per_rank))
    away = _Room(np.maximum(message, even))
    used: list[list[int]] = [[] for _ in range(pairs)]
    sizes: list[list[int]] = [[] for _ in range(pairs)]
    for p, a in zip(pair[order].tolist(), amount[order].tolist()):
        at = ((out, int(src[p])), (into, int(dst[p])), (away, int(way[p])))
        w = _first_fit(at, a, used[p])
        for room, who in at:
            room.take(who, w, a)
        used[p].append(w)
        sizes[p].append(a)
    wave, begin = [], []
    for u, z in zip(used, sizes):
        by_wave = sorted(zip(u, z))
        wave += [w for w, _ in by_wave]
        begin += np.concatenate([[0], np.cumsum([n for _, n in by_wave])[:-1]]).astype(np.int64).tolist()
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    return Schedule(first, np.array(wave, np.int32), np.array(begin, np.int64), max(wave, default=-1) + 1)


class _Room:
    """Bytes still free of each rank (or way) in each wave; waves appear as they are needed."""

    def __init__(self, capacity: np.ndarray):
        self.capacity = capacity.astype(np.int64)
        self.free = np.repeat(self.capacity[:, None], 16, axis=1)
        self.full_until = [0] * len(capacity)  # no byte is free in the waves before

    def grow(self, waves: int) -> None:
        extra = waves - self.free.shape[1]
        if extra > 0:
            self.free = np.concatenate([self.free, np.repeat(self.capacity[:, None], extra, axis=1)], axis=1)

    def take(self, rank: int, wave: int, amount: int) -> None:
        row = self.free[rank]
        row[wave] -= amount
        while self.full_until[rank] < len(row) and not row[self.full_until[rank]]:
            self.full_until[rank] += 1


def _first_fit(at: Sequence[tuple[_Room, int]], amount: int, used: list[int]) -> int:
    """The first wave, not among `used`, in which everybody has room."""
    low = max(room.full_until[who] for room, who in at)
    while True:
        ok = at[0][0].free[at[0][1], low:] >= amount
        for room, who in at[1:]:
            ok &= room.free[who, low:] >= amount
        for w in used:
            if w >= low:
                ok[w - low] = False
        found = int(ok.argmax()) if len(ok) else 0
        if len(ok) and ok[found]:
            return low + found
        waves = 2 * at[0][0].free.shape[1]
        for room, _ in at:
            room.grow(waves)


def _turns(src: np.ndarray, dst: np.ndarray, rotation: int, rotations: int) -> np.ndarray:
    """Position of each pair in its taker's round of senders."""
    order = np.lexsort((src, dst))
    d = dst[order]
    start = np.flatnonzero(np.concatenate([[True], d[1:] != d[:-1]])) if len(d) else np.zeros(0, np.int64)
    many = np.diff(np.append(start, len(d)))
    place = np.arange(len(d)) - np.repeat(start, many)
    turn = np.empty(len(d), np.int64)
    taker = np.repeat(
        np.arange(len(start)), many
    )  # takers counted, so that joint ranks with a common divisor do not align
    senders = np.repeat(many, many)
    apart = np.maximum(
        1, senders // max(1, len(start))
    )  # with more senders than takers, takers start that far from each other
    stride = senders // max(1, rotations)
    # Not a multiple of what takers are apart, or schedules would only swap each other's senders.
    stride += np.where(stride % apart == 0, np.maximum(1, apart // max(1, rotations)), 0)
    shift = rotation * (stride if rotations else 1)
    turn[order] = (place - taker * apart - shift) % senders if len(d) else place
    return turn
