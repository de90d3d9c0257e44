"""Detects tensors that train but are not sent: they change between refits while the sent tensors do not.

coordinator/exports.py uses the result to warn the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from xfer.coordinator.exports import NAMED, TWICE
from xfer.kernels.checksum import Sums
from xfer.plan.inventory import Inventory, footprint_rows
from xfer.plan.options import matches, sent
from xfer.plan.table import padded_shapes
from xfer.trace.catalog import Catalog


class Unsent:
    """Comparison on one trainer rank.

    It computes checksums only if some tensors that require grad are not sent. It stops when the sent tensors have changed once, or
    after TWICE reports of tensors that changed and are not sent.

    Args:
        drop: Globs of checkpoint tensors that no engine takes.
    """

    def __init__(self, drop: Sequence[str]):
        self._drop = tuple(drop)
        self._kept: tuple[str, ...] = ()
        self._sends = True  # whether a tensor that requires grad is sent
        self._were: list[int] | None = None  # sums of the sent tensors, and of those that train and are not sent
        self._told = 0
        self._over = False

    def expect(self, trained: Iterable[str]) -> None:
        """Set the checkpoint tensors of this rank that require grad."""
        kept = {n for n in trained if matches(n, self._drop)}
        self._kept, self._sends = tuple(sorted(kept)), bool(set(trained) - kept)

    def look(
        self, catalog: Catalog, inventory: Inventory, roots: Sequence[torch.Tensor]
    ) -> tuple[bool, tuple[str, ...]]:
        """Compare with the last call. May read all bytes of this rank, and waits for that.

        Returns:
            False if the sent tensors are known not to have changed, and at most NAMED of the tensors that train, have changed, and
            are not sent.
        """
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
        """Return two checksums: of the sent tensors, and of those that train and are not sent.

        Both count by place in the checkpoint tensor, because storages may have moved.
        """
        trains = np.array([not set(self._kept).isdisjoint(catalog.members(t.name)) for t in catalog.tensors])
        rows, is_sent = footprint_rows(inventory), sent(catalog, self._drop)
        some = (is_sent | trains)[rows["tensor"]]
        slot = np.where(is_sent[rows["tensor"]], 0, 1)
        return Sums(rows[some], slot[some], 2, roots, "dst", padded_shapes(catalog)).values()
