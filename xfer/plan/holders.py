"""Bytes that several ranks hold: their digests, and which ranks hold others than the rest (direct/holders.py makes the digests)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from xfer.errors import ProtocolError
from xfer.plan import columns as col
from xfer.trace.catalog import Catalog

HELD = np.dtype([("tensor", "<i4"), ("boxes", "<u8"), ("digest", "<u8")])
"""One digest of the bytes that a rank holds in some boxes of a checkpoint tensor. Entries of several ranks with equal `tensor` and
`boxes` are of the same elements."""
NAMED = 3
"""Tensors that a line names."""
ADVICE = (
    "ranks that hold a tensor must hold the same bits of it, since workers of one engine take it from different ranks: load or "
    "broadcast these from one rank, and look for a gradient that is not reduced over all holders"
)


def differences(told: Mapping[int, bytes], catalog: Catalog) -> list[str]:
    """Compare the digests of all trainers.

    Args:
        told: by trainer rank, its entries (HELD) as bytes.

    Returns:
        One line for each way in which trainers differ: how many tensors, some of their names, and which trainers agree.

    Raises:
        ProtocolError: bytes that are not such entries.
    """
    found = [col.unpack(raw, HELD, len(raw) // HELD.itemsize, what="digests of boxes") for raw in told.values()]
    held, rank = np.concatenate(found), np.repeat(list(told), [len(f) for f in found])
    if not len(held):
        return []
    if not 0 <= held["tensor"].min() <= held["tensor"].max() < len(catalog.tensors):
        raise ProtocolError("digests of boxes: a tensor that is not in the catalog")
    order = np.lexsort((rank, held["boxes"], held["tensor"]))
    held, rank = held[order], rank[order]
    fresh = (held["tensor"][1:] != held["tensor"][:-1]) | (held["boxes"][1:] != held["boxes"][:-1])
    start = np.flatnonzero(np.concatenate([[True], fresh]))
    ends = np.append(start[1:], len(held))
    unlike = np.logical_or.reduceat(held["digest"] != np.repeat(held["digest"][start], ends - start), start)
    kinds: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    for a, b in zip(start[unlike].tolist(), ends[unlike].tolist()):
        same: dict[int, list[int]] = defaultdict(list)
        for digest, r in zip(held["digest"][a:b].tolist(), rank[a:b].tolist()):
            same[digest].append(r)
        groups = sorted(map(tuple, same.values()), key=lambda g: (-len(g), g))
        kinds[tuple(groups)].append(catalog.tensors[held["tensor"][a]].name)
    return [_line(list(dict.fromkeys(names)), groups) for groups, names in kinds.items()]


def _line(names: Sequence[str], groups: Sequence[Sequence[int]]) -> str:
    what = names[0] if len(names) == 1 else f"{len(names)} tensors, such as {', '.join(names[:NAMED])}"
    who = [f"trainer{'s' * (len(g) > 1)} {_some(g)}" for g in groups]
    more = f", and {len(who) - 4} contents more" if len(who) > 4 else ""
    return f"{what}: one content on {', another on '.join(who[:4])}{more}"


def _some(ranks: Iterable[int]) -> str:
    names = [str(r) for r in ranks]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
