"""What copy engines bring of a pull while the kernel moves all else: long runs, and large boxes of rows.

Loads by multiprocessors level off at 94 % of what a copy engine gets over NVLink, and a copy engine pauses between two copies. Side
by side they reach what one long copy gets (docs/results/gpu_2026-11-23_copies.md). Not here: tiles and kernels (triton_impl.py),
the driver's calls (cuda_driver.py), whose storages these are and how a pull is stopped (transport/peer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from xfer.kernels import cuda_driver as driver
from xfer.kernels.strided import Move
from xfer.kernels.tiles import Turns

_MAX_PITCH = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Rule:
    """What a copy engine gets. All measured on H200s.

    shares: (bytes of a run or box at least, share of all bytes that the engine may have once it took those), both rising. An engine
        and a kernel that pull at once end together at about that share; one that ends early leaves the link to the other.
    box_bytes: shorter runs go if so many bytes of them lie at one pitch on either end: they are one copy then, with one pause.
    row_bytes: the shortest run of such a box.
    cut_bytes: a run is cut in two at a multiple of that.
    most: copies. A stream that waits for a word holds only so many before its host has to wait too.
    """

    shares: tuple[tuple[int, float], ...] = ((512 << 10, 0.5), (1 << 20, 0.8))
    box_bytes: int = 16 << 20
    row_bytes: int = 256
    cut_bytes: int = 1 << 20
    most: int = 16 << 10

    @property
    def least(self) -> int:
        return self.shares[0][0] if self.shares else 1 << 62

    def share(self, nbytes: int) -> float:
        return max((s for n, s in self.shares if n <= nbytes), default=0.0)


PULLED = Rule()
READ_TOO = Rule(shares=(*PULLED.shares, (16 << 20, 1.0)))
"""Where this GPU is read while it reads: what a kernel asks for takes room from what leaves, what an engine asks for hardly does."""
NOTHING = Rule(shares=())


class Box(NamedTuple):
    """`rows` runs of `width` bytes, `pitch` apart on either end. Offsets in bytes."""

    left_root: int
    left: int
    left_pitch: int
    right_root: int
    right: int
    right_pitch: int
    width: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.width * self.rows


def divided(found: Sequence[Move], rule: Rule, turns: Turns) -> tuple[list[Move], list[Box]]:
    """(for the kernel, for a copy engine): the largest boxes, up to their share of the bytes that do not lie `turns.beside`, on the
    taker's own GPU. Both together move what `found` does; a box may be cut in two. Those of the engine come from one sender after
    the other, beginning with number `turns.rotation`, as takers that begin alike share a sender.
    """
    if not rule.shares:
        return list(found), []
    groups = turns.groups or [0] * (1 + max((m.left_root for m in found), default=0))
    away = [groups[m.left_root] not in turns.beside for m in found]
    total = sum(prod(m.extent) for m, a in zip(found, away) if a)  # of casts elements, which are few or all
    boxes: list[tuple[Box, Move]] = []
    kernel: list[Move] = []
    for m, a in zip(found, away):
        some = list(_boxes(m, rule)) if a else []
        if some and len(boxes) + len(some) <= rule.most:
            boxes += [(b, m) for b in some]
        else:
            kernel.append(m)
    engine: list[Box] = []
    taken = 0
    for box, m in sorted(boxes, key=lambda x: x[0].nbytes, reverse=True):
        first, rest = _cut(box, int(rule.share(box.nbytes) * total) - taken, rule)
        if first is not None:
            engine.append(first)
            taken += first.nbytes
        if rest is not None:
            kernel.append(_move(rest, m))
    return kernel, _in_turns(engine, [groups[b.left_root] for b in engine], turns.rotation)


def _boxes(m: Move, rule: Rule) -> Iterator[Box]:
    """The move as boxes for an engine, or none."""
    if m.left_dtype != m.right_dtype or m.mirrored or not m.dims or m.dims[-1][1:] != (1, 1):
        return
    width = m.dims[-1][0]
    rows, *pitch = m.dims[-2] if len(m.dims) > 1 else (1, 0, 0)
    if rule.row_bytes <= width < rule.box_bytes <= width * rows and width <= min(pitch) and max(pitch) <= _MAX_PITCH:
        outer = m.dims[:-2]
    elif width >= rule.least:
        outer, rows, pitch = m.dims[:-1], 1, [0, 0]
    else:
        return
    for at in product(*(range(n) for n, _, _ in outer)):
        a, b = (sum(i * d[k] for i, d in zip(at, outer)) for k in (1, 2))
        yield Box(m.left_root, m.left + a, pitch[0], m.right_root, m.right + b, pitch[1], width, rows)


def _cut(box: Box, room: int, rule: Rule) -> tuple[Box | None, Box | None]:
    """(at most `room` bytes of the box, the rest)."""
    if box.nbytes <= room:
        return box, None
    if box.rows == 1:
        n = max(0, room) // rule.cut_bytes * rule.cut_bytes
        if n < rule.least:
            return None, box
        return box._replace(width=n), box._replace(left=box.left + n, right=box.right + n, width=box.width - n)
    n = max(0, room) // box.width
    if n * box.width < rule.box_bytes:
        return None, box
    left, right = box.left + n * box.left_pitch, box.right + n * box.right_pitch
    return box._replace(rows=n), box._replace(left=left, right=right, rows=box.rows - n)


def _move(box: Box, m: Move) -> Move:
    run = (box.width, 1, 1)
    dims = ((box.rows, box.left_pitch, box.right_pitch), run) if box.rows > 1 else (run,)
    return m._replace(left=box.left, right=box.right, dims=dims)


def _in_turns(boxes: Sequence[Box], groups: Sequence[int], rotation: int) -> list[Box]:
    count = max(groups, default=0) + 1
    total, done = [0] * count, [0] * count
    for b, g in zip(boxes, groups):
        total[g] += b.nbytes
    when = []
    for b, g in zip(boxes, groups):
        when.append((done[g] / total[g], (g - rotation) % count))
        done[g] += b.nbytes
    return [boxes[i] for i in sorted(range(len(boxes)), key=when.__getitem__)]


class CopyEngine:
    """Copies on a stream of its own, between `begin` and `end` of the caller's current one. Not to be recorded in a graph."""

    def __init__(
        self, boxes: Sequence[Box], left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], device: torch.device
    ):
        def places(b: Box) -> tuple[int, int]:
            return right[b.right_root].data_ptr() + b.right, left[b.left_root].data_ptr() + b.left

        runs = [(*places(b), b.width) for b in boxes if b.rows == 1]
        wide = [(*places(b), b.right_pitch, b.left_pitch, b.width, b.rows) for b in boxes if b.rows > 1]
        self._copies = driver.Copies(runs, wide)
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._fork, self._join = torch.cuda.Event(), torch.cuda.Event()

    def begin(self) -> None:
        """Copies come after what the current stream was given before."""
        self._fork.record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """Launches the copies; what the current stream is given next comes after them, also where not all could be launched
        (DriverError)."""
        self._stream.wait_event(self._fork)
        try:
            self._copies.launch(self._stream)
        finally:
            self._join.record(self._stream)
            torch.cuda.current_stream(self._device).wait_event(self._join)
