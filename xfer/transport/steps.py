"""Cuts a program into steps: the messages that are posted together, and the rows that go through a buffer.

Both ends cut a message alike, because the cut depends only on the row itself: its bytes, and whether it is one dense run on
either end. Steps are numbered (wave, position in the wave), the same on all ranks, and every rank runs its steps in that
order. Before a rank posts a step it waits only for messages of earlier steps. So the earliest unfinished step of all ranks can
always finish, and no set of programs can deadlock.

This module computes on tables only; see p2p.py for tensors and links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xfer.kernels.strided import contiguous
from xfer.plan.program import ITEM, Program, WaveMessage, row_wire_bytes

ALIGN = 64
"""Messages begin at multiples of this many bytes in a buffer, so that they fill whole cache lines and all elements are aligned."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One message: `nbytes` from or to byte `offset` of storage `root`, or of the step's buffer (root -1)."""

    tag: int
    nbytes: int
    root: int
    offset: int


@dataclass(frozen=True, slots=True)
class PairExchange:
    """The messages of one pair of ranks, in one direction, in one step.

    `rows` go through the step's buffer; their field `wire` is the offset in it. `peer`: the other rank.
    """

    peer: int
    pieces: tuple[StepMessage, ...]
    rows: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank."""

    wave: int
    sends: tuple[PairExchange, ...]
    receives: tuple[PairExchange, ...]
    send_buffer: int  # bytes
    receive_buffer: int


def steps(program: Program, step_bytes: int, direct_bytes: int) -> list[Step]:
    """The steps of one rank. Both limits must be the same on all ranks.

    Args:
        program: The program of the rank.
        step_bytes: Most wire bytes of a pair in a step, which bounds the buffers per peer. One element may exceed it.
        direct_bytes: Fewest bytes of a row that is a message of its own, from or to the storage, if it is dense on one end.
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


def arrivals(program: Program, step_bytes: int) -> np.ndarray:
    """The rows that this rank receives, cut as its steps are; a row's wave is the number of its step (see `steps`)."""
    sends, receives = (list(_by_key(m, step_bytes)) for m in (program.sends(), program.receives()))
    number = {key: i for i, key in enumerate(sorted({key for key, _, _ in (*sends, *receives)}))}
    out = [program.rows[:0]]
    for key, _, rows in receives:
        out.append(rows.copy())
        out[-1]["wave"] = number[key]
    return np.concatenate(out)


def _by_step(messages: Iterator[WaveMessage], end: str, step_bytes: int, direct_bytes: int) -> dict:
    """(wave, position) -> (parts, buffer bytes). `end`: "src" or "dst", the end of the rows on this rank."""
    out: dict[tuple[int, int], tuple[list[PairExchange], int]] = {}
    tags: dict[int, int] = {}
    for key, message, rows in _by_key(messages, step_bytes):
        parts, used = out.get(key, ([], 0))
        peer = message.dst if end == "src" else message.src
        part, used = _part(peer, rows, end, direct_bytes, used, tags)
        out[key] = ([*parts, part], used)
    return out


def _by_key(
    messages: Iterator[WaveMessage], step_bytes: int
) -> Iterator[tuple[tuple[int, int], WaveMessage, np.ndarray]]:
    """The portions of each message, with their steps' keys: (wave, position)."""
    for message in messages:
        for position, rows in enumerate(_portions(message.rows, step_bytes)):
            yield (message.wave, position), message, rows


def _part(
    peer: int, rows: np.ndarray, end: str, direct_bytes: int, used: int, tags: dict[int, int]
) -> tuple[PairExchange, int]:
    """One message of the short rows, and then one message for each row that is sent alone; in this order on both ends."""
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
        # Dense, in wire order: rows that are sent alone or pulled (routes.py) leave no gap. The planner sorts rows by falling
        # alignment of their sizes, so that the elements of any subset stay aligned.
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
    """Groups consecutive rows into portions of at most `step_bytes`. Longer rows are cut along their outermost dims."""
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
    """Cuts one row into rows of at most `most` wire bytes (or one element), in wire order."""
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
