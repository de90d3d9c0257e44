"""When the bytes of each pair (source, destination) travel: pairs x waves, bounded per message and per rank; and in
which turn a destination pulls from which source.

It needs byte counts alone, so every rank knows all waves without expanding the rows of others. A pair's bytes are one
stream; a message is an interval of it. Not here: which rows a stream has (subplan.py).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from xfer.plan import columns as col

SLICES = 32
"""A pair that is spread over waves has slices of at least 1 / SLICES of a message. Shorter ones cost more than they gain."""
_Messages = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Pair, wave and bytes of each message, int64 [M], sorted by pair and wave."""
_NONE: _Messages = (np.zeros(0, np.int64),) * 3


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Messages sorted by (pair, wave): message m of its pair carries stream bytes from begin[m] to the next one's
    begin.
    """

    first: np.ndarray  # int64 [pairs + 1]
    wave: np.ndarray  # int32 [M]
    begin: np.ndarray  # int64 [M], bytes
    waves: int
    turn: np.ndarray  # int32 [pairs], place of the pair in its destination's round of sources


def schedule(
    src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray, *, message: int, per_rank: int, unit: int, rotation: int = 0,
    rotations: int = 0, way: np.ndarray | None = None, far: np.ndarray | None = None, least: int = 1,
) -> Schedule:  # fmt: skip
    """Messages in waves: at most `message` bytes of a pair and `per_rank` bytes in or out of a rank per wave.

    src, dst, nbytes: int [pairs], with nbytes > 0. Messages begin at multiples of `unit` bytes, of which `message` is one.
    `least`: fewest waves over which they are spread.

    `far`: bool [pairs], whether a pair's ranks are on different hosts; default: none is. Those pairs are spread over
    the waves (`_spread`), the others fill what is left of the waves by first fit (`_fit`). Spreading makes more
    messages and shorter ones; on one host they would cost more than they bring.

    `way`: int [pairs], the port by which the bytes of a pair that is not far leave, shared with other pairs and other
    schedules; default: the source. The bytes of a port are spread over the waves as evenly as messages allow, so that
    schedules that run at once crowd it in no wave. This is schedule `rotation` of `rotations`, which begin as far from
    each other as possible; if `rotations` is 0, `rotation` counts sources.
    """
    pairs = len(src)
    turn = _turns(src, dst, nbytes, rotation, rotations)
    busiest = max((int(np.bincount(end, nbytes).max()) for end in (src, dst) if pairs), default=0)
    least = max(1, least, -(-busiest // per_rank))
    far = np.flatnonzero(np.zeros(pairs, bool) if far is None else far)
    spread = _spread(src[far], dst[far], nbytes[far], least, message, per_rank, unit, rotation)
    if spread is None:
        far, spread = far[:0], _NONE
    near = np.setdiff1d(np.arange(pairs), far)
    fitted = _fit(
        src[near], dst[near], nbytes[near], turn[near], least, message, per_rank, unit,
        None if way is None else way[near], (src[far][spread[0]], dst[far][spread[0]], *spread[1:]),
    )  # fmt: skip
    pair, wave, size = (
        np.concatenate(both) for both in zip((far[spread[0]], *spread[1:]), (near[fitted[0]], *fitted[1:]))
    )
    order = np.lexsort((wave, pair))
    pair, wave, size = pair[order], np.unique(wave[order], return_inverse=True)[1].reshape(-1), size[order]
    first = np.searchsorted(pair, np.arange(pairs + 1))
    ends = size.cumsum()
    begin = ends - size
    begin -= begin[first[pair]] if len(pair) else 0
    return Schedule(
        first.astype(np.int64), wave.astype(np.int32), begin, int(wave.max(initial=-1)) + 1, turn.astype(np.int32)
    )


def _spread(
    src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray, least: int, message: int, per_rank: int, unit: int, rotation: int,
) -> _Messages | None:  # fmt: skip
    """Every pair's bytes evenly over all waves, in slices of at least a `SLICES`th of a message.

    So every wave is a small copy of the whole, and no link is idle in one wave and busy in another. None if the slices do
    not fit into about twice the waves that the bytes need, since many pairs are short.
    """
    if not len(src):
        return _NONE
    ranks, pairs = int(max(src.max(), dst.max())) + 1, np.arange(len(src))
    units, short = -(-nbytes // unit), max(1, message // SLICES // unit)
    needed = -(-nbytes // message)
    waves = max(least, int(needed.max()))
    # Pairs of less than a slice for each wave begin in different waves. Multiples of the golden ratio lie evenly.
    phase = (pairs * 40503 + rotation * 25033) % (1 << 16)
    for _ in range(16):
        count = np.maximum(needed, np.minimum(waves, np.maximum(1, units // short)))
        pair = pairs.repeat(count)
        nth = np.arange(len(pair)) - (count.cumsum() - count)[pair]
        begin = nth * units[pair] // count[pair] * unit
        end = np.minimum((nth + 1) * units[pair] // count[pair] * unit, nbytes[pair])
        wave = ((nth << 16) + phase[pair]) * waves // (count[pair] << 16)
        size = end - begin
        if all(np.bincount(rank[pair] * waves + wave, size, ranks * waves).max() <= per_rank for rank in (src, dst)):
            return pair, wave, size
        waves += 1 + waves // 16
    return None


def _fit(
    src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray, turn: np.ndarray, least: int, message: int, per_rank: int,
    unit: int, way: np.ndarray | None, taken: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> _Messages:  # fmt: skip
    """First fit, beside messages that are `taken` already: (source, destination, wave, bytes).

    Pairs with the most messages left go first, since a pair has one message a wave; among equals, destinations begin
    with different sources (by `turn`), so that they do not drain one source together.
    """
    if not len(src):
        return _NONE
    count = -(-nbytes // message)
    until = count.cumsum()
    pair = np.arange(len(src)).repeat(count)
    left = until[pair] - np.arange(len(pair))
    # The rest that does not fill a message counts as whole units: it may go before full messages, which must begin at a unit.
    rest = -(-(nbytes - (count - 1) * message) // unit) * unit
    amount = np.where(left > 1, message, rest[pair])
    order = np.lexsort((dst[pair], turn[pair], -amount, -left))

    ranks = int(max(x.max(initial=0) for x in (src, dst, *taken[:2]))) + 1
    way = src if way is None else np.unique(way, return_inverse=True)[1].reshape(-1)
    even = -(-np.bincount(way, nbytes).astype(np.int64) // (least * message)) * message
    out, into, away = (
        [_Room(n) for n in sizes]
        for sizes in ([per_rank] * ranks, [per_rank] * ranks, np.maximum(message, even).tolist())
    )
    for s, d, w, n in zip(*(x.tolist() for x in taken)):
        out[s].until(w + 1)[w] -= n
        into[d].until(w + 1)[w] -= n
    rooms = [(out[s], into[d], away[w]) for s, d, w in zip(src.tolist(), dst.tolist(), way.tolist())]
    sent: list[dict[int, int]] = [{} for _ in range(len(src))]  # wave -> bytes
    for p, a in zip(pair[order].tolist(), amount[order].tolist()):
        w = _first_fit(rooms[p], a, sent[p])
        for room in rooms[p]:
            room.take(w, a)
        sent[p][w] = a
    wave = np.array([w for by_wave in sent for w in sorted(by_wave)], np.int64)
    size = np.array([by_wave[w] for by_wave in sent for w in sorted(by_wave)], np.int64)
    last = until - 1
    size[last] -= np.bincount(pair, size, len(src)).astype(np.int64) - nbytes
    return pair, wave, size


class _Room:
    """Free bytes of one rank (or way) in each wave; waves are added when they are needed. Plain lists: a search ends
    within a few waves, which takes less time than one call of numpy."""

    __slots__ = ("capacity", "free", "full_until")

    def __init__(self, capacity: int):
        self.capacity, self.free = capacity, [capacity] * 16
        self.full_until = 0  # no byte is free in the waves before

    def until(self, waves: int) -> list[int]:
        if len(self.free) < waves:
            self.free += [self.capacity] * (waves - len(self.free))
        return self.free

    def take(self, wave: int, amount: int) -> None:
        free = self.free
        free[wave] -= amount
        while self.full_until < len(free) and not free[self.full_until]:
            self.full_until += 1


def _first_fit(rooms: tuple[_Room, _Room, _Room], amount: int, used: Container[int]) -> int:
    """The first wave, not among `used`, in which all of them have room."""
    low = max(room.full_until for room in rooms)
    waves = max(16, 2 * low)
    while True:
        a, b, c = (room.until(waves) for room in rooms)
        for w in range(low, waves):
            if a[w] >= amount and b[w] >= amount and c[w] >= amount and w not in used:
                return w
        low, waves = waves, 2 * waves


def _turns(src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray, rotation: int, rotations: int) -> np.ndarray:
    """Position of each pair in its destination's round of sources. Sources with very few bytes for a destination come
    last."""
    if not len(src):
        return np.zeros(0, np.int64)
    most = np.zeros(int(dst.max()) + 1, np.int64)
    np.maximum.at(most, dst, nbytes)
    few = 8 * nbytes < most[dst]
    order = np.lexsort((src, few, dst))
    turn, (start, many) = np.empty(len(src), np.int64), col.runs(dst[order])
    place = np.arange(len(src)) - start.repeat(many)
    readers = np.bincount(src[~few], minlength=int(src.max()) + 1)
    same: dict[
        bytes, int
    ] = {}  # destinations of the same sources counted: joint ranks with a common divisor would align
    for at, count in zip(start.tolist(), many.tolist()):
        mine = order[at : at + count]
        sources = src[mine][~few[mine]]
        destination = same[sources.tobytes()] = same.get(sources.tobytes(), -1) + 1
        n = len(sources)
        # With more sources than destinations that share them, destinations start that far from each other.
        apart = max(1, n // int(readers[sources].max()))
        stride = n // max(1, rotations)
        # Not a multiple of what destinations are apart, or schedules would only swap each other's sources.
        if stride % apart == 0:
            stride += max(1, apart // max(1, rotations))
        shift = destination * apart + rotation * (stride if rotations else 1)
        turn[mine] = np.where(few[mine], place[at : at + count], (place[at : at + count] - shift) % n)
    return turn
