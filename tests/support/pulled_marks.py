"""Two who pull from a trainer's storages what is marked, as workers do, and check that they then have its bytes."""

from __future__ import annotations

import numpy as np
import torch

from xfer.direct.remembered import Remembered
from xfer.kernels.bits import GRANULE
from xfer.kernels.marks import places


class Puller:
    """`base`: the refit whose bytes it holds in `live`; 0: none."""

    def __init__(self) -> None:
        self.base, self.live = 0, list[torch.Tensor]()

    def pull(self, roots: list[torch.Tensor], marks: torch.Tensor | None) -> int:
        """Copy what is marked, or everything if the marks do not fit. Returns how many bytes it has copied."""
        head = None if marks is None else marks[: 8 * (1 + len(roots))].view(torch.int64)
        if head is None or not self.base or int(head[0]) != self.base or len(self.live) != len(roots):
            self.live = [r.clone() for r in roots]
            return sum(r.numel() for r in roots)
        moved, at = 0, places([r.numel() for r in roots])
        for i, (root, live) in enumerate(zip(roots, self.live, strict=True)):
            bits = np.unpackbits(marks.numpy()[at[i] : at[i + 1]], bitorder="little")
            assert bits.sum() == head[1 + i]
            for g in np.flatnonzero(bits).tolist():
                part = slice(g * GRANULE, (g + 1) * GRANULE)
                live[part] = root[part]
                moved += root[part].numel()
        return moved


class Pair:
    """Two of them, and what the trainer keeps.

    Attributes:
        last: That.
        number: Of the last refit.
    """

    def __init__(self) -> None:
        self.last, self.pullers, self.number = Remembered(), (Puller(), Puller()), 0
        self._at: list[int] = []

    def refit(self, roots: list[torch.Tensor], how: str) -> int:
        """A refit, as DirectTrainer takes part in it.

        Args:
            roots: The storages.
            how: "one fails", "all fail" before a byte moves; "interrupted": all fail, torn; "sent, too": some bytes are not pulled.

        Returns:
            Bytes that the first one has pulled.
        """
        at = [r.data_ptr() for r in roots]
        if self._at and at != self._at:
            self.last.moved(roots)
        self._at = at
        self.number += 1
        self.last.compare(roots)
        marks = self.last.marks.tensor if self.last.marks is not None else None
        moved = 0
        for k, one in enumerate(self.pullers):
            if how == "interrupted":
                one.base = 0
            elif how != "all fail" and (how != "one fails" or k == 0):
                n = one.pull(roots, marks)
                moved, one.base = moved or n, self.number
                assert all(map(torch.equal, one.live, roots))
        if how not in ("all fail", "interrupted"):
            self.last.keep(self.number, roots, pulled=True, sends=how == "sent, too")
        return moved
