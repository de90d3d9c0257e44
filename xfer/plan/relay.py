"""Relays: destinations of one layout on one host hand bytes on to each other, so that each byte leaves the trainers once.

Chains are for bytes that are read from trainers of the same host. k replicas that all pull from one trainer share its
outgoing bandwidth, so each takes k times as long as one alone. In a chain the bytes of one destination are cut into
parts. The first destination pulls part after part from the trainers, and the second pulls each part out of the first
one's storage one wave later, and so on. Each GPU is read by one other and reads from one, so all bandwidth is used, and
the chain takes (parts + k - 1) / parts times as long as one copy.

Rings are for bytes that come over the network. The bytes of each pair of ranks are cut into k shares. Each destination
receives another share, through its own network card, and reads the other shares from those that receive them, each
part as soon as it is there. So all k cards receive, each a k-th of the bytes.

Within one host a ring needs one wave more instead of k - 1, but every destination must map every other. Both took as
long (seven destinations of 61 GB on H200s: 187 ms, and 189 for the chain, where one copy takes 155 and a pull of it
163), because both are limited by a GPU that is read while it reads.

This module knows only rows. transport/relay_place.py makes sure that a part is complete before the next destination
reads it, and coordinator/relays.py decides which destination reads from which.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from xfer.plan.program import ITEM, LAG, Op, Program, row_wire_bytes
from xfer.plan.subplan import cut_rows

GRAIN = 512
"""Parts and shares begin at multiples of this many elements of a row, so that few tiles lose their alignment."""
ALL_PARTS = (1 << 31) - 1
"""The number that stands for the last part, whatever its number is."""


def handed_on(rows: np.ndarray, before: int) -> np.ndarray:
    """A destination's rows as the next destination of the same layout pulls them from rank `before`: in the dtype and at
    the place that they have there. Waves stay."""
    out = rows.copy()
    out["src"], out["op"], out["turn"] = before, Op.COPY, 0
    for column in ("dtype", "root", "offset", "strides"):
        out[f"src_{column}"] = out[f"dst_{column}"]
    return _sorted(out)


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort((rows["dst_offset"], rows["dst_root"], rows["src"], rows["wave"]))]


def in_parts(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows that move bytes to one destination, cut where a part ends inside one; a row's wave is its part, from 0.
    Parts have equal bytes up to `GRAIN`, and each source has the same share in every part. Equal rows give equal
    parts.
    """
    nbytes = row_wire_bytes(rows)
    share = np.zeros(len(rows))
    for source in np.unique(rows["src"]):
        n = nbytes[mine := rows["src"] == source]
        share[mine] = (np.cumsum(n) - n) / max(1, n.sum())
    order = np.lexsort((rows["src"], share))
    rows, nbytes = rows[order], nbytes[order]
    total = int(nbytes.sum())
    found, part, _ = _cut(rows, np.arange(1, count) * total // count)
    found["wire"], found["wave"] = 0, part
    return _sorted(found)


def shares(program: Program, takes: Mapping[int, tuple[int, int]]) -> Program:
    """A program without the bytes that destinations get from another destination. Both ends of a pair cut alike.

    Args:
        program: The program of a rank.
        takes: Destination -> (its share, number of shares), for destinations that do not take all. A share is an interval of the bytes
            of a pair of ranks, in the order in which they are sent, up to `GRAIN`. With 0 shares it takes nothing. Common bytes
            are not cut: their share follows from their wave, and that of a copy from the wave in which they came.
    """
    rows = program.rows
    other = ~np.isin(rows["dst"], list(takes)) | (rows["op"] == Op.FILL)
    came = rows["wave"] - LAG * (rows["common"] < 0)
    kept, at = [rows[other]], [np.flatnonzero(other)]
    for dst, (share, count) in takes.items():
        mine = ~other & (rows["dst"] == dst) & (count > 0)
        whole = np.flatnonzero(mine & (rows["common"] != 0) & (came * count // program.waves == share))
        kept.append(rows[whole])
        at.append(whole)
        mine &= rows["common"] == 0
        for src in np.unique(rows["src"][mine]):
            pair = np.flatnonzero(mine & (rows["src"] == src))
            total = int(row_wire_bytes(rows[pair]).sum())
            found, part, row = _cut(rows[pair], np.arange(1, count) * total // count)
            kept.append(found[part == share])
            at.append(pair[row[part == share]])
    left = np.concatenate(kept)[np.argsort(np.concatenate(at), kind="stable")]
    return Program(program.rank, program.waves, left)


def _cut(rows: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts rows at these positions in their bytes, one row behind the other. Returns the pieces of each row in order, the number of the
    interval between edges in which a piece lies, and the row that it was cut from."""
    nbytes = row_wire_bytes(rows)
    end = np.cumsum(nbytes)
    first = np.searchsorted(edges, end - nbytes, "right")
    last = np.searchsorted(edges, end, "left")  # the interval in which a row's last byte lies
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
    part = np.concatenate([first[whole], np.array(into, np.int64)[number]])
    return found, part, np.concatenate([np.flatnonzero(whole), np.array(row, np.int64)[number]])
