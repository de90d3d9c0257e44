"""Relays: takers of one layout that receive each byte from the trainers once, together, and the rest from each other.

k replicas that all pull from one trainer share its way out, so each waits k times as long as one alone would. In a relay the
bytes of one taker are cut into `waves * k` parts. In wave w taker j pulls part (w, j) from its senders and the parts
(w - 1, i) of all others i out of taker i's storage, where they lie already. So a byte leaves the trainers once, every
taker's way in is full all the time, and the whole takes (waves + 1) / waves of what one copy takes.

Only rows are known here. That a part is complete before others read it is the transport's business (transport/relay.py),
and that all these takers commit or none does is the session's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xfer.errors import PlanMismatch
from xfer.plan.program import ITEM, ROW, Op, Program, row_wire_bytes
from xfer.plan.subplan import cut_row

GRAIN = 512
"""Parts begin at multiples of so many elements of a row, so that few tiles lose their alignment."""


def relay(rows: np.ndarray, takers: Sequence[int], waves: int) -> list[Program]:
    """The programs by which `takers` (joint ranks, one per replica, inventories equal) refit themselves together.

    rows: what one taker receives from ranks that are not among `takers`, and its fills; `dst` is one number throughout.
    Returned programs have `waves + 1` waves and only rows of their own taker; `wire` is 0, for all of it is pulled.
    ValueError for less than one wave; PlanMismatch for rows that cannot be relayed.
    """
    if waves < 1:
        raise ValueError(f"a relay needs at least one wave, not {waves}")
    if wrong := sorted({*rows["dst"][rows["dst"] != rows["dst"][:1]].tolist()}):
        raise PlanMismatch("rows of one taker are relayed, these are of several", [f"also of rank {r}" for r in wrong])
    if inner := sorted(set(rows["src"].tolist()) & set(takers)):
        raise PlanMismatch("relayed rows come from outside", [f"rank {r} is both sender and taker" for r in inner])
    fills, moved = rows[rows["op"] == Op.FILL], rows[rows["op"] != Op.FILL]
    pieces, part = _parts(moved, waves * len(takers))
    wave, owner = np.divmod(part, len(takers))
    out = []
    for j, taker in enumerate(takers):
        mine = pieces.copy()
        mine["wave"], mine["dst"] = np.where(owner == j, wave, wave + 1), taker
        others = owner != j
        mine["src"] = np.where(others, np.asarray(takers, np.int32)[owner], mine["src"])
        mine["op"] = np.where(others, Op.COPY, mine["op"])  # taker i has converted it already
        for column in ("dtype", "root", "offset", "strides"):
            theirs = mine[f"dst_{column}"]
            keep = others if theirs.ndim == 1 else others[:, None]
            mine[f"src_{column}"] = np.where(keep, theirs, mine[f"src_{column}"])
        constant = fills.copy()
        constant["dst"] = taker
        mine = mine[np.lexsort((mine["dst_offset"], mine["dst_root"], mine["src"], mine["wave"]))]
        out.append(Program(taker, waves + 1, np.concatenate([constant, mine])))
    return out


def _parts(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cut where a part ends inside one; the part of each). Parts have equal bytes up to the grain, and of each
    sender the share that it has of all.
    """
    nbytes = row_wire_bytes(rows)
    share = np.zeros(len(rows))
    for sender in np.unique(rows["src"]):
        n = nbytes[mine := rows["src"] == sender]
        share[mine] = (np.cumsum(n) - n) / max(1, n.sum())
    order = np.lexsort((rows["src"], share))
    rows, nbytes = rows[order], nbytes[order]
    end = np.cumsum(nbytes)
    edges = np.arange(1, count) * (int(end[-1]) if len(end) else 0) // count
    first = np.searchsorted(edges, end - nbytes, "right")
    last = np.searchsorted(edges, end, "left")  # the part in which a row's last byte lies
    whole = first == last
    pieces, part = [rows[whole]], [first[whole]]
    for i in np.flatnonzero(~whole).tolist():
        item = int(min(ITEM[rows["src_dtype"][i]], ITEM[rows["dst_dtype"][i]]))
        start, size = int(end[i] - nbytes[i]), int(nbytes[i]) // item
        cuts = [(int(e) - start) // item // GRAIN * GRAIN for e in edges[first[i] : last[i]]]
        for p, lo, hi in zip(range(first[i], last[i] + 1), [0, *cuts], [*cuts, size]):
            if hi > lo:
                cut = cut_row(rows[i], lo, hi)
                pieces.append(cut)
                part.append(np.full(len(cut), p))
    found, numbers = np.concatenate(pieces) if len(rows) else np.zeros(0, ROW), np.concatenate(part)
    found["wire"] = 0
    return found, numbers
