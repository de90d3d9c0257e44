"""Two pullers copy marked granules of a trainer's storages, as workers do, and check that they have the bytes of their plans then."""

from __future__ import annotations

import numpy as np
import torch

from xfer.direct.remembered import Remembered
from xfer.kernels.bits import GRANULE
from xfer.kernels.marks import ByteRange, places
from xfer.plan.program import DTYPE_CODE, ROW


def reading(spans: list[ByteRange]) -> np.ndarray:
    """Rows that read these bytes, every other one backwards."""
    rows = np.zeros(len(spans), ROW)
    rows["src_dtype"], rows["extent"] = DTYPE_CODE["uint8"], 1
    for k, (row, span) in enumerate(zip(rows, spans)):
        row["src_root"], row["src_offset"] = span.root, span.stop - 1 if k % 2 else span.start
        row["extent"][-1], row["src_strides"][-1] = span.stop - span.start, -1 if k % 2 else 1
    return rows


class Puller:
    """`base`: the refit whose bytes it holds in `live`; 0: none. `seed`: picks the bytes that its plan reads; 0: all."""

    def __init__(self) -> None:
        self.base, self.seed, self.live = 0, 0, list[torch.Tensor]()

    def reads(self, roots: list[torch.Tensor]) -> list[ByteRange]:
        random, out = np.random.default_rng(self.seed), []
        for i, n in enumerate(r.numel() for r in roots):
            start, stop = sorted(random.integers(0, n + 1, 2).tolist()) if self.seed else (0, n)
            out += [ByteRange(i, start, stop)] if start < stop and (not self.seed or random.random() < 0.7) else []
        return out

    def pull(self, roots: list[torch.Tensor], marks: torch.Tensor | None) -> int:
        """Copy what is marked, or everything if the marks do not fit. Returns how many bytes it has copied."""
        head = None if marks is None else marks[: 8 * (1 + len(roots))].view(torch.int64)
        if len(self.live) != len(roots):
            self.base, self.live = 0, [torch.zeros_like(r) for r in roots]
        whole = head is None or not self.base or int(head[0]) != self.base
        moved, at = 0, places([r.numel() for r in roots])
        for span in self.reads(roots):
            i, pieces = span.root, [(span.start, span.stop)]
            if not whole:
                bits = np.unpackbits(marks.numpy()[at[i] : at[i + 1]], bitorder="little")
                assert bits.sum() == head[1 + i]
                marked = [(g * GRANULE, (g + 1) * GRANULE) for g in np.flatnonzero(bits).tolist()]
                pieces = [(max(x, span.start), min(y, span.stop)) for x, y in marked]
            for start, stop in pieces:
                if start < stop:
                    self.live[i][start:stop] = roots[i][start:stop]
                    moved += stop - start
            assert torch.equal(span.of(self.live), span.of(roots))
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

    def plan(self, n: int) -> None:
        """One of them gets another plan, and still holds what it has pulled."""
        self.pullers[n % 2].seed = n

    def plans(self, roots: list[torch.Tensor]) -> dict[str, np.ndarray]:
        return {str(one.seed): reading(one.reads(roots)) for one in self.pullers}

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
        moved = 0
        for k, one in enumerate(self.pullers):
            if how == "interrupted":
                one.base = 0
            elif how != "all fail" and (how != "one fails" or k == 0):
                n = one.pull(roots, self.last.marks_for(str(one.seed)))
                moved, one.base = moved or n, self.number
        if how not in ("all fail", "interrupted"):
            self.last.keep(self.number, roots, self.plans(roots), pulled=True, sends=how == "sent, too")
        return moved
