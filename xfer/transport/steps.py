"""Cuts a program into steps: the messages that are posted together, and the rows that go through a buffer.

Both ends cut a message alike, because the cut depends only on the rows of their pair: their bytes, their waves, and whether
a row is one dense run on either end. Steps are numbered (wave, position in the wave), the same on all ranks, and every rank
runs its steps in that order. Before a rank posts a step it waits only for messages of earlier steps. So the earliest
unfinished step of all ranks can always finish, and no set of programs can deadlock. In the last waves a step carries half of
what is left of its pair, so that little is unpacked after the last byte has arrived.

This module computes on tables only; see p2p.py for tensors and links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xfer.kernels.strided import contiguous
from xfer.plan.program import ITEM, Program, WaveMessage, row_wire_bytes
from xfer.plan.subplan import cut_rows

LAST_WAVES = 2
"""Waves in which steps get shorter. The last one may be short, so that the unpacking of the one before it counts too."""
SHORTEST = 3
"""They do not get shorter than this part of a full step: each costs NCCL some time (see `STEP_BYTES` in p2p.py)."""

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
        step_bytes: Most wire bytes of a pair in a step, which bounds the buffers per peer. One element may exceed it. In the last
            `LAST_WAVES` waves a step has half of what is left of its pair, but not less than a third of this; unless the
            destination has nothing to unpack.
        direct_bytes: Fewest bytes of a row that is a message of its own, from or to the storage, if it is dense on one end.
    """
    if step_bytes < 1 or direct_bytes < 1:
        raise ValueError(f"step_bytes={step_bytes} and direct_bytes={direct_bytes} must be at least 1")
    last = program.waves - LAST_WAVES
    sends = _by_step([*program.sends()], "src", last, step_bytes, direct_bytes)
    receives = _by_step([*program.receives()], "dst", last, step_bytes, direct_bytes)
    out = []
    for key in sorted(sends.keys() | receives.keys()):
        (s, s_bytes), (r, r_bytes) = sends.get(key, ([], 0)), receives.get(key, ([], 0))
        out.append(Step(key[0], tuple(s), tuple(r), s_bytes, r_bytes))
    return out


def _by_step(messages: list[WaveMessage], end: str, last: int, step_bytes: int, direct_bytes: int) -> dict:
    """(wave, position) -> (parts, buffer bytes). `end`: "src" or "dst", the end of the rows on this rank. Steps get shorter from
    wave `last` on, where destinations have something to unpack."""
    out: dict[tuple[int, int], tuple[list[PairExchange], int]] = {}
    tags: dict[int, int] = {}
    left: dict[int, int] = {}  # peer -> wire bytes of messages with shorter steps
    peers = [message.dst if end == "src" else message.src for message in messages]
    shorter = [m.wave >= last and not _direct(m.rows, direct_bytes)["dst"].all() for m in messages]
    for peer, message, short in zip(peers, messages, shorter):
        left[peer] = left.get(peer, 0) + short * int(row_wire_bytes(message.rows).sum())
    for peer, message, short in zip(peers, messages, shorter):
        least = max(1, step_bytes // SHORTEST) if short else step_bytes
        for position, rows in enumerate(_portions(message.rows, step_bytes, least, left[peer])):
            parts, used = out.get((message.wave, position), ([], 0))
            part, used = _part(peer, rows, end, direct_bytes, used, tags)
            out[message.wave, position] = ([*parts, part], used)
            left[peer] -= short * part.nbytes
    return out


def _direct(rows: np.ndarray, direct_bytes: int) -> dict[str, np.ndarray]:
    """For each end, which rows travel alone and need no buffer there."""
    own = {e: ITEM[rows[f"{e}_dtype"]] for e in ("src", "dst")}
    long = row_wire_bytes(rows) >= direct_bytes
    # In place only where the wire's dtype is the storage's own: see `wire_dtype`.
    return {
        "src": long & contiguous(rows, "src") & (own["src"] <= own["dst"]),
        "dst": long & contiguous(rows, "dst") & ((own["dst"] < own["src"]) | (rows["src_dtype"] == rows["dst_dtype"])),
    }


def _part(
    peer: int, rows: np.ndarray, end: str, direct_bytes: int, used: int, tags: dict[int, int]
) -> tuple[PairExchange, int]:
    """One message of the short rows, and then one message for each row that is sent alone; in this order on both ends."""
    nbytes = row_wire_bytes(rows)
    direct = _direct(rows, direct_bytes)
    alone = direct["src"] | direct["dst"]
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
        if direct[end][i]:
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


def _portions(rows: np.ndarray, most: int, least: int, left: int) -> Iterator[np.ndarray]:
    """Cuts the rows of a message into portions of half of the `left` bytes of their pair, at least `least` and at most `most` bytes.
    A short rest joins the portion before it. Rows are cut at multiples of `ALIGN` bytes; shorter steps cut them between any elements."""
    nbytes = row_wire_bytes(rows)
    rows, nbytes = rows[nbytes > 0], nbytes[nbytes > 0]
    item = nbytes // rows["extent"].prod(axis=1)
    ends = np.cumsum(nbytes)
    starts, at, end = ends - nbytes, 0, int(nbytes.sum())
    while at < end:
        size, to = min(most, max(least, (left - at) // 2)), end
        if end - at > min(most, size + least // 4):
            i = int(np.searchsorted(ends, at + size, "right"))  # this row is cut
            inside = at + size - int(starts[i])
            inside -= inside % (ALIGN if size >= ALIGN else int(item[i]))
            to = int(starts[i]) + inside
            to += int(item[i]) if to == at else 0  # an element is longer than a step
        which = np.arange(np.searchsorted(ends, at, "right"), np.searchsorted(starts, to, "left"))
        if at == starts[which[0]] and to == ends[which[-1]]:
            yield rows[which]
        else:
            begin = np.maximum(at - starts[which], 0) // item[which]
            stop = np.minimum(to - starts[which], nbytes[which]) // item[which]
            yield cut_rows(rows, which, begin, stop)[0]
        at = to


def _up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
