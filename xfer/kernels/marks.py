"""Marks: one bit for each granule of a rank's storages, set if the granule has changed since an earlier refit.

A source compares its storages with copies of what it sent in that refit. The marks lie in memory that destinations map or read as they
do storages, and a destination pulls marked granules only (transport/peer.py, transport/peer_host.py). Granules are counted from the
beginning of each storage. A mark may be set for a granule that has not changed, never the other way round.

    base     int64      number of the refit since which granules are marked; 0: none, and the rest means nothing
    counts   int64 [n]  marked granules of each of n storages
    bits     of each storage one int32 for 32 granules, the first granule in the lowest bit

Triton kernels set bits and bring copies up to date on CUDA (marks_triton.py); here is their torch twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from xfer.kernels.bits import GRANULE, WORD

if TYPE_CHECKING:
    from xfer.kernels.marks_triton import MarkKernels

_CHUNK = 16 << 20


def places(sizes: Sequence[int]) -> np.ndarray:
    """Return the byte at which the bits of each storage begin in the marks, and the length of the marks; int64 [n + 1].

    Args:
        sizes: Bytes of each storage.
    """
    head = -(-8 * (1 + len(sizes)) // 16) * 16
    words = -(-np.asarray(sizes, np.int64).reshape(-1) // WORD)
    return head + 4 * np.concatenate([np.zeros(1, np.int64), np.cumsum(words)])


class ChangeMarks:
    """The marks of a source.

    Args:
        sizes: Bytes of each of its storages.
        device: Where these lie.

    Attributes:
        tensor: The marks, flat uint8.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self._places = places(sizes)
        self.tensor = torch.zeros(int(self._places[-1]), dtype=torch.uint8, device=device)
        self._head = self.tensor[: 8 * (1 + len(sizes))].view(torch.int64)
        self._bound: tuple[list[int], MarkKernels] | None = None
        self._compared = False

    @property
    def nbytes(self) -> int:
        """Bytes of the marks and of the kernels' tables."""
        return self.tensor.numel() + (self._bound[1].nbytes if self._bound else 0)

    def compare(self, now: Sequence[torch.Tensor], before: Sequence[torch.Tensor], base: int) -> None:
        """Mark the granules in which two lists of storages differ. On the current stream; allocates nothing on CUDA in a second call
        with the same storages, if they begin at multiples of 16 bytes.

        Args:
            now: The storages, flat uint8.
            before: Copies of them as they were in refit `base`.
            base: Number of that refit.
        """
        self._head.zero_()
        rest: Sequence[int] = range(len(now))
        if self.tensor.is_cuda:
            bound = self._with_kernels(now, before)
            bound.compare()
            rest = bound.rest
        for i in rest:
            bits = self.tensor[self._places[i] : self._places[i + 1]]
            self._head[1 + i] = _mark(now[i], before[i], bits)
        self._head[0].fill_(base)
        self._compared = True

    def update(self, now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """Make `before` equal to `now`, where `now` is as it was in the last `compare`. Without such a call all bytes are copied."""
        if self._compared and self.tensor.is_cuda:
            bound = self._with_kernels(now, before)
            bound.update()
            now, before = ([some[i] for i in bound.rest] for some in (now, before))
        if now:
            torch._foreach_copy_(list(before), list(now))
        self._compared = False

    def _with_kernels(self, now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> MarkKernels:
        from xfer.kernels.marks_triton import MarkKernels

        key = [t.data_ptr() for some in (now, before) for t in some]
        if self._bound is None or self._bound[0] != key:
            self._bound = key, MarkKernels(now, before, self.tensor, self._places)
        return self._bound[1]


def _mark(now: torch.Tensor, before: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Set the bits of one storage. Returns how many there are, int64 []."""
    powers = 1 << torch.arange(8, device=now.device, dtype=torch.int32)
    count = torch.zeros((), dtype=torch.int64, device=now.device)
    for at in range(0, now.numel(), _CHUNK):
        a, b = now[at : at + _CHUNK], before[at : at + _CHUNK]
        differs = torch.zeros(-(-a.numel() // WORD) * WORD, dtype=torch.bool, device=now.device)
        torch.ne(a, b, out=differs[: a.numel()])
        some = differs.view(-1, 8, GRANULE).any(2)
        first = at // (8 * GRANULE)
        bits[first : first + len(some)] = (some * powers).sum(1).to(torch.uint8)
        count += some.sum()
    return count
