"""Does training reach the engines? A refit that sends none of what trains commits, and changes nothing.

- `refuse_untrained`: no tensor that requires grad is sent at all. That is an error as soon as all ranks have told what they export.
- `Unsent` and `Silence`: some of them are sent, but what is sent has the same bytes as in the refit before, while tensors that are
  not sent have changed. After two such refits in a row there is one warning.

What trains is what the adapter gives with `requires_grad` set. What is not sent is what `drop=` names, since engines never take that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from xfer.errors import CoverageError
from xfer.kernels.checksum import Sums
from xfer.plan.inventory import Inventory
from xfer.plan.options import matches, sent
from xfer.plan.rows import footprint_rows
from xfer.plan.table import padded_shapes
from xfer.session import messages as m
from xfer.trace.catalog import Catalog

logger = logging.getLogger("xfer")
NAMED = 3
"""Tensors that an error or a warning names."""
TWICE = 2
ADVICE = (
    "merge adapters and give the merged weights under the checkpoint's names, or do not name in drop= what trains; if only frozen "
    "weights are to be sent, give the adapter no tensor that requires grad"
)


def refuse_untrained(trained: Iterable[str], drop: Sequence[str]) -> None:
    """CoverageError when there are tensors that require grad, on any trainer, and `drop` names all of them."""
    names = sorted(trained)
    if names and all(matches(n, tuple(drop)) for n in names):
        raise CoverageError(
            "refits would send nothing that trains",
            [
                f"{len(names)} tensors require grad, such as {', '.join(names[:NAMED])}: drop= names all of them; {ADVICE}"
            ],
        )


class Unsent:
    """One trainer rank's half. It compares checksums only where tensors that require grad are not sent, and only until what is sent
    has changed once, or two refits in a row have told that it has not."""

    def __init__(self, drop: Sequence[str]):
        self._drop = tuple(drop)
        self._kept: tuple[str, ...] = ()
        self._sends = True  # something that trains
        self._were: list[int] | None = None  # sums of what was sent, and of what was not and trains
        self._told = 0
        self._over = False

    def expect(self, trained: Iterable[str]) -> None:
        """trained: checkpoint tensors of this rank that require grad."""
        kept = {n for n in trained if matches(n, self._drop)}
        self._kept, self._sends = tuple(sorted(kept)), bool(set(trained) - kept)

    def look(
        self, catalog: Catalog, inventory: Inventory, roots: Sequence[torch.Tensor]
    ) -> tuple[bool, tuple[str, ...]]:
        """Whether what this rank sends has changed since the last look, as far as it knows; and some of the tensors that train, have
        changed since then, and are not sent. May read all bytes of this rank, and waits for them."""
        if self._over or not self._kept:
            return self._sends, ()
        were, self._were = self._were, self._sums(catalog, inventory, roots)
        if were is None or were[0] != self._were[0]:
            self._over = were is not None
            return True, ()
        if were[1] == self._were[1]:
            return False, ()
        self._told += 1
        self._over = self._told == TWICE
        return False, self._kept[:NAMED]

    def _sums(self, catalog: Catalog, inventory: Inventory, roots: Sequence[torch.Tensor]) -> list[int]:
        """Of what is sent, and of what trains and is not. By canonical place: storages may have moved."""
        trains = np.array([not set(self._kept).isdisjoint(catalog.members(t.name)) for t in catalog.tensors])
        rows, is_sent = footprint_rows(inventory), sent(catalog, self._drop)
        some = (is_sent | trains)[rows["tensor"]]
        slot = np.where(is_sent[rows["tensor"]], 0, 1)
        return Sums(rows[some], slot[some], 2, roots, "dst", padded_shapes(catalog)).values()


class Silence:
    """The hub's half: how many refits in a row have sent nothing new."""

    def __init__(self) -> None:
        self._times = 0

    def take(self, ready: Iterable[m.Ready]) -> None:
        """What all trainers said on entry of one refit. Warns once."""
        ready = list(ready)
        names = sorted({n for r in ready for n in r.unsent})
        if any(r.sends for r in ready):
            self._times = min(0, self._times)
        elif names and self._times >= 0:
            self._times += 1
        if self._times == TWICE:
            self._times = -1  # said for good
            logger.warning(
                "xfer: two refits in a row sent the weights that the engines already have, although training goes on: tensors that "
                "require grad have changed and are not sent, such as %s (drop=); %s",
                ", ".join(names[:NAMED]),
                ADVICE,
            )
