"""Relays: takers of one layout that stand in a row, so that each byte leaves the trainers once.

k replicas that all pull from one trainer share its way out, so each waits k times as long as one alone would. In a relay the
bytes of one taker are cut into `parts`. The first taker pulls part after part from the trainers, the second pulls each part
out of the first's storage one wave later, and so on. Everybody reads from one GPU and is read by one, so every way is used
whole, and all of it takes (parts + k - 1) / parts of what one copy takes.

The other way, in which each taker pulls another share from the trainer and the rest from all others, needs one wave more
instead of k - 1, and every taker mapped by every other. Measured alike (seven takers of 61 GB on H200s: 187 ms against 189
of this one, where one copy takes 155 and a pull of it 163): what holds both is a GPU that gives and takes at once.

Only rows are known here. That a part is complete before the next taker reads it is the transport's business
(transport/relay.py, transport/relay_place.py), and who stands before whom is the session's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xfer.errors import PlanMismatch
from xfer.plan.program import ITEM, Op, Program, row_wire_bytes
from xfer.plan.subplan import cut_rows

GRAIN = 512
"""Parts begin at multiples of so many elements of a row, so that few tiles lose their alignment."""


def relay(rows: np.ndarray, takers: Sequence[int], parts: int) -> list[Program]:
    """The programs by which `takers` (joint ranks, one per replica, inventories equal) refit themselves in a row.

    rows: what one taker receives from ranks that are not among `takers`, and its fills; `dst` is one number throughout.
    Each returned program has only rows of its own taker, in `parts + len(takers) - 1` waves: number j's part p is its wave
    p + j. `wire` is 0, for all of it is pulled. ValueError for less than one part; PlanMismatch for rows that cannot be
    relayed.
    """
    if parts < 1:
        raise ValueError(f"a relay needs at least one part, not {parts}")
    if wrong := sorted({*rows["dst"][rows["dst"] != rows["dst"][:1]].tolist()}):
        raise PlanMismatch("rows of one taker are relayed, these are of several", [f"also of rank {r}" for r in wrong])
    if inner := sorted(set(rows["src"].tolist()) & set(takers)):
        raise PlanMismatch("relayed rows come from outside", [f"rank {r} is both sender and taker" for r in inner])
    fills, moved = rows[rows["op"] == Op.FILL], rows[rows["op"] != Op.FILL]
    pieces = in_parts(moved, parts)
    out = []
    for j, taker in enumerate(takers):
        mine, constant = handed_on(pieces, takers[j - 1]) if j else pieces.copy(), fills.copy()
        mine["dst"], constant["dst"] = taker, taker
        mine["wave"] += j
        out.append(Program(taker, parts + len(takers) - 1, np.concatenate([constant, mine])))
    return out


def handed_on(rows: np.ndarray, before: int) -> np.ndarray:
    """A taker's rows as the next one of the same layout pulls them: from rank `before`, as that one has converted them and
    where it has put them. Waves stay."""
    out = rows.copy()
    out["src"], out["op"], out["turn"] = before, Op.COPY, 0
    for column in ("dtype", "root", "offset", "strides"):
        out[f"src_{column}"] = out[f"dst_{column}"]
    return _sorted(out)


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort((rows["dst_offset"], rows["dst_root"], rows["src"], rows["wave"]))]


def in_parts(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows that move bytes to one taker, cut where a part ends inside one; a row's wave is its part, from 0. Parts have equal
    bytes up to the grain, and of each sender the share that it has of all. The same for equal rows.
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
    row: list[int] = []
    into: list[int] = []
    begin: list[int] = []
    stop: list[int] = []
    for i in np.flatnonzero(~whole).tolist():
        item = int(min(ITEM[rows["src_dtype"][i]], ITEM[rows["dst_dtype"][i]]))
        start, size = int(end[i] - nbytes[i]), int(nbytes[i]) // item
        cuts = [(int(e) - start) // item // GRAIN * GRAIN for e in edges[first[i] : last[i]]]
        for p, lo, hi in zip(range(first[i], last[i] + 1), [0, *cuts], [*cuts, size]):
            if hi > lo:
                row, into, begin, stop = [*row, i], [*into, p], [*begin, lo], [*stop, hi]
    cut, number = cut_rows(rows, *(np.array(x, np.int64) for x in (row, begin, stop)))
    found = np.concatenate([rows[whole], cut])
    found["wire"], found["wave"] = 0, np.concatenate([first[whole], np.array(into, np.int64)[number]])
    return _sorted(found)
