"""The part of a pull that a copy engine brings while the kernel moves the rest: long runs, and large boxes of rows.

Loads by multiprocessors reach at most 94 % of a copy engine's rate over NVLink. A GPU reads from others by one engine, which
carries out one copy after the other, on whatever streams they are. So it copies all bytes of one source before it turns to the next:
destinations that begin with different sources then never read from the same one (benchmarks/RESULTS.md). Not here: tiles and kernels
(triton_impl.py), the driver's calls (cuda_driver.py), whose storages these are and how a pull is stopped (transport/peer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from xfer.kernels import cuda_driver as driver
from xfer.kernels.strided import StridedCopy
from xfer.kernels.tiles import Turns

_MAX_PITCH = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Rule:
    """The part of a pull that goes to a copy engine. All numbers were measured on H200s.

    share: largest share of each source's bytes, 0 to 1.
    least: bytes of the shortest run.
    box_bytes: shorter runs go too if at least this many bytes of them lie at one pitch on either end. They are one copy then; an engine
        pauses some microseconds between two such copies.
    row_bytes: bytes of the shortest run of such a box.
    cut_bytes: a run is cut in two at a multiple of this many bytes.
    most: largest number of copies. With more of them queued, a stream that waits for a word makes its host wait too.
    """

    share: float
    least: int = 512 << 10
    box_bytes: int = 16 << 20
    row_bytes: int = 256
    cut_bytes: int = 1 << 20
    most: int = 20 << 10


PULLED = Rule(0.8)
"""The kernel moves the shortest copies, a fifth of the bytes, at the same time. A share between 65 and 100 % changes the time of a pull of
a 4B model by at most 2 %, from one source and from several: the order of the sources matters more (benchmarks/RESULTS.md)."""
READ_TOO = Rule(1.0)
"""For a GPU that is read while it reads: a kernel's requests take bandwidth from outgoing data, and other GPUs' engines wait for them."""
NOTHING = Rule(0.0)


class PitchedRuns(NamedTuple):
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


def divided(
    found: Sequence[StridedCopy], rule: Rule, turns: Turns
) -> tuple[list[StridedCopy], list[list[PitchedRuns]]]:
    """Divide the moves of a pull into (those for the kernel, those for a copy engine by source, in the order of turns). The engine gets the
    largest boxes of each source, up to the rule's share of its bytes. The kernel gets all of the sources `turns.beside`, which are on the
    destination's own GPU. Both together move what `found` moves; a box may be cut in two.
    """
    if not rule.share:
        return list(found), []
    groups = turns.groups or [0] * (1 + max((m.left_root for m in found), default=0))
    room: dict[int, float] = {}  # source -> bytes that the engine may still get
    boxes: list[tuple[PitchedRuns, StridedCopy]] = []
    kernel: list[StridedCopy] = []
    for m in found:
        group = groups[m.left_root]
        away = group not in turns.beside
        room[group] = room.get(group, 0.0) + rule.share * prod(m.extent)  # elements of casts, which are few or all
        some = list(_boxes(m, rule)) if away else []
        if some and len(boxes) + len(some) <= rule.most:
            boxes += [(b, m) for b in some]
        else:
            kernel.append(m)
    engine: dict[int, list[PitchedRuns]] = {}
    for box, m in sorted(boxes, key=lambda x: x[0].nbytes, reverse=True):
        group = groups[box.left_root]
        first, rest = _cut(box, int(room[group]), rule)
        if first is not None:
            engine.setdefault(group, []).append(first)
            room[group] -= first.nbytes
        if rest is not None:
            kernel.append(_move(rest, m))
    return kernel, [engine[group] for group in sorted(engine)]


def _boxes(m: StridedCopy, rule: Rule) -> Iterator[PitchedRuns]:
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
        yield PitchedRuns(m.left_root, m.left + a, pitch[0], m.right_root, m.right + b, pitch[1], width, rows)


def _cut(box: PitchedRuns, room: int, rule: Rule) -> tuple[PitchedRuns | None, PitchedRuns | None]:
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


def _move(box: PitchedRuns, m: StridedCopy) -> StridedCopy:
    run = (box.width, 1, 1)
    dims = ((box.rows, box.left_pitch, box.right_pitch), run) if box.rows > 1 else (run,)
    return m._replace(left=box.left, right=box.right, dims=dims)


class CopyEngine:
    """Copies on a stream of its own, ordered after `begin` and before `end` on the caller's current stream. Must not be recorded in a
    graph. `turns`: groups of boxes, copied one group after the other."""

    def __init__(
        self,
        turns: Sequence[Sequence[PitchedRuns]],
        left: Sequence[torch.Tensor],
        right: Sequence[torch.Tensor],
        device: torch.device,
    ):
        def places(b: PitchedRuns) -> tuple[int, int]:
            return right[b.right_root].data_ptr() + b.right, left[b.left_root].data_ptr() + b.left

        def copies(boxes: Sequence[PitchedRuns]) -> driver.CopyBatch:
            runs = [(*places(b), b.width) for b in boxes if b.rows == 1]
            wide = [(*places(b), b.right_pitch, b.left_pitch, b.width, b.rows) for b in boxes if b.rows > 1]
            return driver.CopyBatch(runs, wide)

        self._copies = [copies(boxes) for boxes in turns]
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._fork, self._join = torch.cuda.Event(), torch.cuda.Event()

    def begin(self) -> None:
        """Makes the copies wait for the earlier work of the current stream."""
        self._fork.record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """Launches the copies, and makes later work of the current stream wait for them, also if not all could be launched
        (DriverError)."""
        self._stream.wait_event(self._fork)
        try:
            for copies in self._copies:
                copies.launch(self._stream)
        finally:
            self._join.record(self._stream)
            torch.cuda.current_stream(self._device).wait_event(self._join)
