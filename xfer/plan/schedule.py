"""When the bytes of each pair (source, destination) travel: pairs x waves, bounded per message and per rank; and in
which turn a destination pulls from which source.

Works on byte counts alone, so that every rank knows all waves without expanding anybody's rows. A pair's bytes are one
stream; a message is an interval of it. Not here: which rows a stream has (subplan.py).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from xfer.plan import columns as col


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
    rotations: int = 0, way: np.ndarray | None = None,
) -> Schedule:  # fmt: skip
    """First fit of messages into waves: at most `message` bytes of a pair and `per_rank` bytes in or out of a rank
    per wave.

    src, dst, nbytes: int [pairs], distinct pairs with nbytes > 0. Messages begin at multiples of `unit` bytes, of
    which `message` is one. Pairs with the most messages left go first, since a pair has one message a wave; among
    equals, destinations begin with different sources (shifted by `rotation`), so that they do not drain one source
    together.

    `way`: int [pairs], what a pair's bytes leave by and share with other pairs and other schedules (a NIC);
    default: the source. Its bytes are spread over the waves as evenly as messages allow, so that schedules that run
    at once crowd it in no wave. `rotations` of them are numbered by `rotation`, and begin as far from each other as
    can be; with 0 of them `rotation` counts sources.
    """
    pairs = len(src)
    count = -(-nbytes // message)
    until = count.cumsum()
    pair = np.arange(pairs).repeat(count)
    left = until[pair] - np.arange(len(pair))
    # What does not fill a message counts as whole units: it may travel before full ones, which must begin at a unit.
    rest = -(-(nbytes - (count - 1) * message) // unit) * unit
    amount = np.where(left > 1, message, rest[pair])
    turn = _turns(src, dst, nbytes, rotation, rotations)
    order = np.lexsort((dst[pair], turn[pair], -amount, -left))

    ranks = int(max(src.max(initial=0), dst.max(initial=0))) + 1
    way = src if way is None else np.unique(way, return_inverse=True)[1].reshape(-1)
    busiest = max((int(np.bincount(end, nbytes).max()) for end in (src, dst) if pairs), default=0)
    least = max(1, -(-busiest // per_rank))  # waves
    even = -(-np.bincount(way, nbytes).astype(np.int64) // (least * message)) * message
    out, into, away = (
        [_Room(n) for n in sizes]
        for sizes in ([per_rank] * ranks, [per_rank] * ranks, np.maximum(message, even).tolist())
    )
    rooms = [(out[s], into[d], away[w]) for s, d, w in zip(src.tolist(), dst.tolist(), way.tolist())]
    sent: list[dict[int, int]] = [{} for _ in range(pairs)]  # wave -> bytes
    for p, a in zip(pair[order].tolist(), amount[order].tolist()):
        w = _first_fit(rooms[p], a, sent[p])
        for room in rooms[p]:
            room.take(w, a)
        sent[p][w] = a
    wave, begin = [], []
    for by_wave in sent:
        done = 0
        for w in sorted(by_wave):
            wave.append(w)
            begin.append(done)
            done += by_wave[w]
    first = np.concatenate([[0], until]).astype(np.int64)
    waves = max(wave, default=-1) + 1
    return Schedule(first, np.array(wave, np.int32), np.array(begin, np.int64), waves, turn.astype(np.int32))


class _Room:
    """Bytes still free of one rank (or way) in each wave; waves appear as they are needed. Plain lists: what is
    looked for is found within a few waves, which takes less than one call of numpy."""

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
    """Position of each pair in its destination's round of sources. Those that have next to nothing for a
    destination come last."""
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
