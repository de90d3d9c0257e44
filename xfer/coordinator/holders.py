"""Do trainer ranks that hold one box of a tensor hold the same bytes in it? The ranks' digests
(participants/holders.py) are compared here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from xfer.errors import ProtocolError
from xfer.plan import columns as col
from xfer.trace.catalog import Catalog

HELD = np.dtype([("tensor", "<i4"), ("boxes", "<u8"), ("digest", "<u8")])
"""One entry of what a rank tells: `digest` of its bytes in some boxes of a canonical tensor. Entries of several ranks with equal
`tensor` and `boxes` are of the same elements."""
NAMED = 3
"""Tensors that an error names of each kind."""
ADVICE = (
    "ranks that hold a tensor must hold the same bits of it, since workers of one engine take it from different ranks: load or "
    "broadcast these from one rank, and look for a gradient that is not reduced over all holders"
)
"""The last line of such an error."""


def differences(told: Mapping[int, bytes], catalog: Catalog) -> list[str]:
    """One line for each way in which trainers differ: how many tensors, some of them, and which trainers hold the same.

    told: entries (HELD) by trainer rank. ProtocolError for what are none.
    """
    found = [col.unpack(raw, HELD, len(raw) // HELD.itemsize, what="digests of boxes") for raw in told.values()]
    held, rank = np.concatenate(found), np.repeat(list(told), [len(f) for f in found])
    if not len(held):
        return []
    if not 0 <= held["tensor"].min() <= held["tensor"].max() < len(catalog.tensors):
        raise ProtocolError("digests of boxes: of a tensor that is not in the catalog")
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
    ranks = [str(r) for r in ranks]
    return ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
