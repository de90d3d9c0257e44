"""When the bytes of each pair (sender, taker) travel: pairs x waves, bounded per message and per rank.

Works on byte counts alone, so that every rank knows all waves without expanding anybody's rows. A pair's bytes are one
stream; a message is an interval of it. Not here: which rows a stream has (subplan.py).
"""

from __future__ import annotations

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
    src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray, *, message: int, per_rank: int, unit: int, rotation: int = 0
) -> Schedule:
    """First fit of messages into waves: at most `message` bytes of a pair and `per_rank` bytes in or out of a rank
    per wave.

    src, dst, nbytes: int [pairs], distinct pairs with nbytes > 0. Messages begin at multiples of `unit` bytes, of
    which `message` is one. Pairs with the most messages left go first, since a pair has one message a wave; among
    equals, takers begin with different senders (shifted by `rotation`), so that they do not drain one sender
    together.
    """
    pairs = len(src)
    count = -(-nbytes // message)
    pair = np.repeat(np.arange(pairs), count)
    k = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
    left = count[pair] - k
    # What does not fill a message counts as whole units: it may travel before full ones, which must begin at a unit.
    rest = -(-(nbytes - (count - 1) * message) // unit) * unit
    amount = np.where(left > 1, message, rest[pair])
    turn = _turns(src, dst, rotation)
    order = np.lexsort((dst[pair], turn[pair], -amount, -left))

    ranks = int(max(src.max(initial=0), dst.max(initial=0))) + 1
    out, into = _Room(ranks, per_rank), _Room(ranks, per_rank)
    used: list[list[int]] = [[] for _ in range(pairs)]
    sizes: list[list[int]] = [[] for _ in range(pairs)]
    for p, a in zip(pair[order].tolist(), amount[order].tolist()):
        s, t = int(src[p]), int(dst[p])
        w = out.first_fit(into, s, t, a, used[p])
        out.take(s, w, a)
        into.take(t, w, a)
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
    """Bytes still free of each rank in each wave; waves appear as they are needed."""

    def __init__(self, ranks: int, per_rank: int):
        self.free = np.full((ranks, 16), per_rank, np.int64)
        self.full_until = [0] * ranks  # no byte is free in the waves before
        self.per_rank = per_rank

    def first_fit(self, other: _Room, rank: int, peer: int, amount: int, used: list[int]) -> int:
        low = max(self.full_until[rank], other.full_until[peer])
        while True:
            ok = (self.free[rank, low:] >= amount) & (other.free[peer, low:] >= amount)
            for w in used:
                if w >= low:
                    ok[w - low] = False
            at = int(ok.argmax()) if len(ok) else 0
            if len(ok) and ok[at]:
                return low + at
            self.grow()
            other.grow(self.free.shape[1])

    def grow(self, waves: int = 0) -> None:
        extra = (waves or 2 * self.free.shape[1]) - self.free.shape[1]
        if extra > 0:
            self.free = np.concatenate([self.free, np.full((len(self.free), extra), self.per_rank, np.int64)], axis=1)

    def take(self, rank: int, wave: int, amount: int) -> None:
        row = self.free[rank]
        row[wave] -= amount
        while self.full_until[rank] < len(row) and not row[self.full_until[rank]]:
            self.full_until[rank] += 1


def _turns(src: np.ndarray, dst: np.ndarray, rotation: int) -> np.ndarray:
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
    turn[order] = (place - taker * apart - rotation) % senders if len(d) else place
    return turn
