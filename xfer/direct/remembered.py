"""A trainer rank's memory of a refit, by which a later one finds changed bytes: copies of what plans read, or marks of every write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from xfer.kernels.bits import WORD
from xfer.kernels.marks import ByteRange, ChangeMarks, rest_of
from xfer.kernels.strided import bounds
from xfer.kernels.written import Written, spans_of
from xfer.plan.program import ROW


def read_parts(rows: np.ndarray, sizes: Sequence[int], without: Sequence[ByteRange] = ()) -> tuple[ByteRange, ...]:
    """Return spans of whole words that have all bytes between the first and the last one of each row, as of `rest_of`.

    Args:
        rows: Rows of a source.
        sizes: Bytes of each of its storages.
        without: Spans that are left out.
    """
    low, high = bounds(rows, "src")
    words = np.unique(np.stack([rows["src_root"], low // WORD, -(-high // WORD)], axis=1), axis=0)
    unread = rest_of([ByteRange(root, a * WORD, b * WORD) for root, a, b in words.tolist()], sizes)
    return rest_of([*without, *unread], sizes)


class Remembered:
    """Copies and marks of what plans read of a trainer rank's storages. Spans that an optimizer writes by marking writes
    (kernels/written.py) have no copies, unless messages are sent, which are compared with copies.

    Attributes:
        refit: Number of the refit; 0: none.
        marks: The granules that have changed since; None if destinations do not pull.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Free everything."""
        self.refit = 0
        self.marks: ChangeMarks | None = None
        self._plans: frozenset[str] = frozenset()  # digests of those whose bytes are kept
        self._spans: tuple[ByteRange, ...] | None = None  # those without copies; None: nothing is kept
        self._parts: tuple[ByteRange, ...] = ()
        self._copies: list[torch.Tensor] = []
        self._copied_bytes = 0
        self._written: Written | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copies and the marks."""
        some = (self.marks, self._written)
        return self._copied_bytes + sum(x.nbytes for x in some if x is not None)

    def keep(
        self, refit: int, roots: Sequence[torch.Tensor], plans: Mapping[str, np.ndarray], *, pulled: bool, sends: bool
    ) -> bool:
        """Keep the bytes of a refit.

        Args:
            refit: Its number.
            roots: The storages as they were compared and sent; flat uint8.
            plans: The rows that read them, by the digest of their plan.
            pulled: Whether destinations pull.
            sends: Whether messages are sent, beside pulls or without any.

        Returns:
            Whether there are other marks than before, which destinations have to map.
        """
        spans, sizes = () if sends else spans_of(roots), [t.numel() for t in roots]
        if spans != self._spans or not plans.keys() <= self._plans:
            self.forget()
            self._parts = read_parts(np.concatenate([np.empty(0, ROW), *plans.values()]), sizes, spans)
            self._copies = [torch.empty_like(part.of(roots)) for part in self._parts]
            self._copied_bytes = sum(t.numel() for t in self._copies)
            self._written = Written(roots, spans) if spans else None
            self._plans, self._spans = frozenset(plans), spans  # last: without memory for all of it there is none of it
        self.refit = 0  # in case that the caller is interrupted
        if new := pulled and self.marks is None:
            self.marks = ChangeMarks(sizes, roots[0].device, self._parts)
        if self.marks is not None:
            self.marks.update(roots, self._copies)
        elif self._copies:
            torch._foreach_copy_(self._copies, [part.of(roots) for part in self._parts])
        if self._written is not None:
            self._written.clear()
        self.refit = refit
        return new

    def compare(self, roots: Sequence[torch.Tensor]) -> None:
        """Set the marks, from storages that hold the new bytes; on GPUs on the current stream."""
        if self.marks is None:
            return
        if self._written is not None:
            self._written.settle()
        self.marks.compare(roots, self._copies, self.refit, self._written.bits if self._written is not None else None)

    def moved(self, roots: Sequence[torch.Tensor]) -> None:
        """Use these storages, which have other addresses."""
        if self._written is not None:
            self._written.bind(roots)

    def marks_for(self, plan: str) -> torch.Tensor | None:
        """Return the marks; None if there are none of all that this plan reads."""
        marks = self.marks if plan in self._plans else None
        return marks.tensor if marks is not None else None

    def whole(self, refit: int, plan: str) -> tuple[Sequence[torch.Tensor], Sequence[ByteRange]] | None:
        """Return copies of the bytes that this plan reads, as this refit sent them, and the parts of the storages that they are copies
        of, in order; None if there are none."""
        there = plan in self._plans and self._copies and not self._spans and refit == self.refit
        return (self._copies, self._parts) if there else None
