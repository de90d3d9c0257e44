"""Two checks of what trainers export: do holders of the same bytes agree, and does training reach the engines?

`differences` compares digests of boxes that several trainers hold (participants/holders.py makes them).
`refuse_untrained` and `Silence` find a refit that commits but changes nothing in the engines:

- No tensor that requires grad is sent at all. That is an error as soon as all ranks have told what they export.
- Some are sent, but with the same bytes as in the refit before, while tensors that are not sent have changed
  (participants/unsent.py finds out). After two such refits in a row there is one warning.

A tensor trains if the adapter gives it with `requires_grad` set. It is not sent if `drop=` names it, since engines never
take such tensors.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from xfer.coordinator import messages as m
from xfer.errors import CoverageError, ProtocolError
from xfer.plan import columns as col
from xfer.plan.options import matches
from xfer.trace.catalog import Catalog

logger = logging.getLogger("xfer")
HELD = np.dtype([("tensor", "<i4"), ("boxes", "<u8"), ("digest", "<u8")])
"""One digest of the bytes that a rank holds in some boxes of a checkpoint tensor. Entries of several ranks with equal `tensor` and
`boxes` are of the same elements."""
NAMED = 3
"""Tensors that an error or a warning names."""
TWICE = 2
"""Refits in a row that send nothing new before there is a warning."""
HOLDERS_ADVICE = (
    "ranks that hold a tensor must hold the same bits of it, since workers of one engine take it from different ranks: load or "
    "broadcast these from one rank, and look for a gradient that is not reduced over all holders"
)
UNSENT_ADVICE = (
    "merge adapters and give the merged weights under the checkpoint's names, or do not name in drop= what trains; if only frozen "
    "weights are to be sent, give the adapter no tensor that requires grad"
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


def refuse_untrained(trained: Iterable[str], drop: Sequence[str]) -> None:
    """Check that some tensor that trains is sent.

    Args:
        trained: names of the tensors that require grad, of all trainers.

    Raises:
        CoverageError: there are such tensors, and `drop` names all of them.
    """
    names = sorted(trained)
    if names and all(matches(n, tuple(drop)) for n in names):
        some = f"{len(names)} tensors require grad, such as {', '.join(names[:NAMED])}"
        raise CoverageError(
            "refits would send nothing that trains", [f"{some}: drop= names all of them; {UNSENT_ADVICE}"]
        )


class Silence:
    """Counts the refits in a row that sent nothing new, and warns once."""

    def __init__(self) -> None:
        self._times = 0

    def take(self, ready: Iterable[m.Ready]) -> None:
        """Take what all trainers said on entry of one refit."""
        ready = list(ready)
        names = sorted({n for r in ready for n in r.unsent})
        if any(r.sends for r in ready):
            self._times = min(0, self._times)
        elif names and self._times >= 0:
            self._times += 1
        if self._times == TWICE:
            self._times = -1  # never warn again
            logger.warning(
                "xfer: two refits in a row sent the weights that the engines already have, although training goes on: tensors that "
                "require grad have changed and are not sent, such as %s (drop=); %s",
                ", ".join(names[:NAMED]),
                UNSENT_ADVICE,
            )
