"""Relay chains: destinations of one layout, each of which pulls from the one before it, so that each byte leaves
the trainers once.

k replicas that all pull from one trainer share its outgoing bandwidth, so each takes k times as long as one alone.
In a chain the bytes of one destination are cut into parts. The first destination pulls part after part from the
trainers, and the second pulls each part out of the first one's storage one wave later, and so on. Each GPU is read
by one other and reads from one, so all bandwidth is used, and the chain takes (parts + k - 1) / parts times as long
as one copy.

In the alternative each destination pulls another share from the trainer and the rest from all other destinations.
That needs one wave more instead of k - 1, and every destination must map every other. Both took as long (seven
destinations of 61 GB on H200s: 187 ms, and 189 for the chain, where one copy takes 155 and a pull of it 163),
because both are limited by a GPU that is read while it reads.

This module knows only rows. transport/relay_place.py makes sure that a part is complete before the next destination
reads it, and coordinator/relays.py decides which destination stands before which.
"""

from __future__ import annotations

import numpy as np

from xfer.plan.program import ITEM, Op, row_wire_bytes
from xfer.plan.subplan import cut_rows

GRAIN = 512
"""Parts begin at multiples of so many elements of a row, so that few tiles lose their alignment."""


def handed_on(rows: np.ndarray, before: int) -> np.ndarray:
    """A destination's rows as the next one of the same layout pulls them: from rank `before`, as that one has
    converted them and where it has put them. Waves stay."""
    out = rows.copy()
    out["src"], out["op"], out["turn"] = before, Op.COPY, 0
    for column in ("dtype", "root", "offset", "strides"):
        out[f"src_{column}"] = out[f"dst_{column}"]
    return _sorted(out)


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort((rows["dst_offset"], rows["dst_root"], rows["src"], rows["wave"]))]


def in_parts(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows that move bytes to one destination, cut where a part ends inside one; a row's wave is its part, from 0.
    Parts have equal bytes up to the grain, and of each source the share that it has of all. The same for equal
    rows.
    """
    nbytes = row_wire_bytes(rows)
    share = np.zeros(len(rows))
    for source in np.unique(rows["src"]):
        n = nbytes[mine := rows["src"] == source]
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
