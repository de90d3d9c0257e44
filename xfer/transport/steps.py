"""A program cut into steps: what is posted together, what goes through a buffer and where, what needs none.

Both ends of a message cut it alike, because all they look at is in the row itself: its bytes, and whether it is one
dense run on either end. Steps are numbered (wave, position in the wave), the same on all ranks, and every rank walks
its own in that order. A rank waits only for messages of earlier steps before it posts the next one; so the earliest
unfinished step of all can always be finished, and no set of programs can block itself.

Arithmetic on tables only. Not here: tensors, links (p2p.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xfer.kernels.strided import contiguous
from xfer.plan.program import ITEM, Program, WaveMessage, row_wire_bytes

ALIGN = 64
"""Messages begin at multiples of this in a buffer: whole cache lines, and any element is aligned."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One message: `nbytes` from or to byte `offset` of storage `root`, or of the step's buffer (root -1)."""

    tag: int
    nbytes: int
    root: int
    offset: int


@dataclass(frozen=True, slots=True)
class PairExchange:
    """All that one pair of ranks exchanges in one direction in one step.

    `rows` go through the step's buffer, `wire` is their offset in it. `peer`: the other rank.
    """

    peer: int
    pieces: tuple[StepMessage, ...]
    rows: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    wave: int
    sends: tuple[PairExchange, ...]
    receives: tuple[PairExchange, ...]
    send_buffer: int  # bytes
    receive_buffer: int


def steps(program: Program, step_bytes: int, direct_bytes: int) -> list[Step]:
    """The steps of one rank. Both limits must be the same on all ranks.

    step_bytes: most wire bytes of a pair in a step, and so the bound of buffers per peer; one element may exceed it.
    direct_bytes: rows of at least so many bytes that are dense on one end are messages of their own, from or to the
    storage.
    """
    if step_bytes < 1 or direct_bytes < 1:
        raise ValueError(f"step_bytes={step_bytes} and direct_bytes={direct_bytes} must be at least 1")
    sends = _by_step(program.sends(), "src", step_bytes, direct_bytes)
    receives = _by_step(program.receives(), "dst", step_bytes, direct_bytes)
    out = []
    for key in sorted(sends.keys() | receives.keys()):
        (s, s_bytes), (r, r_bytes) = sends.get(key, ([], 0)), receives.get(key, ([], 0))
        out.append(Step(key[0], tuple(s), tuple(r), s_bytes, r_bytes))
    return out


def _by_step(messages: Iterator[WaveMessage], end: str, step_bytes: int, direct_bytes: int) -> dict:
    """(wave, position) -> (parts, buffer bytes). `end`: the end of the rows that is here."""
    out: dict[tuple[int, int], tuple[list[PairExchange], int]] = {}
    tags: dict[int, int] = {}
    for message in messages:
        peer = message.dst if end == "src" else message.src
        for position, rows in enumerate(_portions(message.rows, step_bytes)):
            parts, used = out.get((message.wave, position), ([], 0))
            part, used = _part(peer, rows, end, direct_bytes, used, tags)
            out[message.wave, position] = ([*parts, part], used)
    return out


def _part(
    peer: int, rows: np.ndarray, end: str, direct_bytes: int, used: int, tags: dict[int, int]
) -> tuple[PairExchange, int]:
    """Rows that are messages of their own ("alone") and one message of all others, in this order on both ends."""
    nbytes = row_wire_bytes(rows)
    own = {e: ITEM[rows[f"{e}_dtype"]] for e in ("src", "dst")}
    # In place only where the wire's dtype is the storage's own: see `wire_dtype`.
    dense = {
        "src": contiguous(rows, "src") & (own["src"] <= own["dst"]),
        "dst": contiguous(rows, "dst") & ((own["dst"] < own["src"]) | (rows["src_dtype"] == rows["dst_dtype"])),
    }
    alone = (nbytes >= direct_bytes) & (dense["src"] | dense["dst"])
    tag = tags.get(peer, 0)
    buffered, pieces = [], []
    together = rows[~alone].copy()
    if len(together):
        size = nbytes[~alone]
        # Dense, in wire order: what goes alone, or is pulled (routes.py), leaves no gap. The planner put rows by falling alignment
        # of their sizes, so that elements stay aligned whichever of them are left.
        total = int(size.sum())
        together["wire"] = used + np.cumsum(size) - size
        pieces.append(StepMessage(tag, total, -1, used))
        buffered.append(together)
        used, tag = _up(used + total), tag + 1
    for i in np.flatnonzero(alone).tolist():
        if dense[end][i]:
            pieces.append(StepMessage(tag, int(nbytes[i]), int(rows[f"{end}_root"][i]), int(rows[f"{end}_offset"][i])))
        else:
            row = rows[i : i + 1].copy()
            row["wire"] = used
            pieces.append(StepMessage(tag, int(nbytes[i]), -1, used))
            buffered.append(row)
            used = _up(used + int(nbytes[i]))
        tag += 1
    tags[peer] = tag
    return PairExchange(peer, tuple(pieces), np.concatenate(buffered) if buffered else rows[:0]), used


def _portions(rows: np.ndarray, step_bytes: int) -> Iterator[np.ndarray]:
    """Consecutive rows of at most `step_bytes`; rows that do not fit are cut along their outermost dims."""
    nbytes = row_wire_bytes(rows)
    rows, nbytes = rows[nbytes > 0], nbytes[nbytes > 0]
    if (nbytes > step_bytes).any():
        rows = np.concatenate(
            [_cut(rows[i : i + 1], step_bytes) if n > step_bytes else rows[i : i + 1] for i, n in enumerate(nbytes)]
        )
        nbytes = row_wire_bytes(rows)
    start, total = 0, 0
    for i, n in enumerate(nbytes.tolist()):
        if total and total + n > step_bytes:
            yield rows[start:i]
            start, total = i, 0
        total += n
    if start < len(rows):
        yield rows[start:]


def _cut(row: np.ndarray, most: int) -> np.ndarray:
    """One row as several of at most `most` wire bytes (or one element), in wire order."""
    d = next((d for d, n in enumerate(row["extent"][0].tolist()) if n > 1), None)
    if d is None:
        return row
    inner = int(row_wire_bytes(row)[0]) // int(row["extent"][0, d])
    if inner <= most:
        return _slice(row, d, most // inner, inner)
    slices = _slice(row, d, 1, inner)
    return np.concatenate([_cut(slices[i : i + 1], most) for i in range(len(slices))])


def _slice(row: np.ndarray, d: int, step: int, inner: int) -> np.ndarray:
    """`row` cut along dim d every `step` indices; `inner`: wire bytes of one index. Dims before d have extent 1."""
    n = int(row["extent"][0, d])
    at = np.arange(0, n, step)
    out = np.repeat(row, len(at))
    out["extent"][:, d] = np.minimum(step, n - at)
    out["origin"][:, d] += at
    out["wire"] += at * inner
    for end in ("src", "dst"):
        out[f"{end}_offset"] += at * row[f"{end}_strides"][0, d]
    return out


def _up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
