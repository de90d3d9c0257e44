"""Has what a trainer sends changed since the last refit, and what trains and is not sent? coordinator/unsent.py says what for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from xfer.coordinator.exports import NAMED, TWICE
from xfer.kernels.checksum import Sums
from xfer.plan.inventory import Inventory
from xfer.plan.options import matches, sent
from xfer.plan.rows import footprint_rows
from xfer.plan.table import padded_shapes
from xfer.trace.catalog import Catalog


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
