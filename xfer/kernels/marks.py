"""Marks: one bit for each granule of a rank's storages, set if the granule has changed since an earlier refit.

A source compares the bytes that plans read with copies of those that it sent in that refit, but for spans whose changes an optimizer
marks when it writes them (written.py). The marks lie in memory that destinations map or read as they do storages, and a destination pulls
marked granules only (transport/peer.py, transport/peer_host.py). Granules are counted from the beginning of each storage. A mark may be
set for a granule that has not changed, never the other way round.

    base     int64      number of the refit since which granules are marked; 0: none, and the rest means nothing
    counts   int64 [n]  marked granules of each of n storages
    bits     of each storage one int32 for 32 granules, the first granule in the lowest bit

Triton kernels set bits and bring copies up to date on CUDA (marks_triton.py); here is their torch twin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from xfer.kernels.bits import GRANULE, WORD

if TYPE_CHECKING:
    from xfer.kernels.marks_triton import MarkKernels

_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes `start` to `stop` of storage `root`."""

    root: int
    start: int
    stop: int

    def of(self, roots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the span of these storages, flat uint8."""
        return roots[self.root][self.start : self.stop]


@dataclass(frozen=True, slots=True)
class SpanWrite:
    """`value` (float32, contiguous) goes into `into`, the tensor of a span, whose number is `span`."""

    span: int
    into: torch.Tensor
    value: torch.Tensor


def rest_of(spans: Iterable[ByteRange], sizes: Sequence[int]) -> tuple[ByteRange, ...]:
    """Return spans of whole words that have all bytes outside of `spans`, and perhaps some of theirs, in order; no two share a word.

    Args:
        spans: In any order. They may overlap, and end behind their storage.
        sizes: Bytes of each storage.
    """
    out: list[ByteRange] = []
    at = [0] * len(sizes)
    for s in sorted([*spans, *(ByteRange(i, n, n) for i, n in enumerate(sizes))]):
        if s.start > at[s.root]:
            start, stop = at[s.root] // WORD * WORD, min(-(-s.start // WORD) * WORD, sizes[s.root])
            if out and out[-1].root == s.root and out[-1].stop > start:
                start = out.pop().start
            out.append(ByteRange(s.root, start, stop))
        at[s.root] = max(at[s.root], s.stop)
    return tuple(out)


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
        parts: The spans that are compared with copies, see `rest_of`; None: all bytes of the storages.

    Attributes:
        tensor: The marks, flat uint8.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, parts: Sequence[ByteRange] | None = None):
        self._places = places(sizes)
        self._parts = rest_of((), sizes) if parts is None else parts
        self.tensor = torch.zeros(int(self._places[-1]), dtype=torch.uint8, device=device)
        self._head = self.tensor[: 8 * (1 + len(sizes))].view(torch.int64)
        self._bound: tuple[list[int], MarkKernels] | None = None
        self._by_kernel, self._compared = self.tensor.is_cuda, False

    @property
    def nbytes(self) -> int:
        """Bytes of the marks and of the kernels' tables."""
        return self.tensor.numel() + (self._bound[1].nbytes if self._bound else 0)

    def compare(
        self,
        now: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
        base: int,
        written: torch.Tensor | None = None,
    ) -> None:
        """Mark the granules in which parts of storages differ from copies. On the current stream; allocates nothing on CUDA in a second
        call with the same storages, if they begin at multiples of 16 bytes.

        Args:
            now: The storages, flat uint8.
            before: Copies of the parts as they were in refit `base`.
            base: Number of that refit.
            written: Marks of what has been written since, of which the bits are added; flat uint8.
        """
        first = int(self._places[0])
        if written is None:
            self.tensor.zero_()
        else:
            self._head.zero_()
            self.tensor[first:].copy_(written[first:])
        if self._by_kernel:
            bound = self._with_kernels(now, before)
            bound.compare()
            rest, roots = bound.rest, {self._parts[k].root for k in bound.rest}
        else:
            rest, roots = [*range(len(self._parts))], set(range(len(now)))
        for k in rest:
            part = self._parts[k]
            _mark(part.of(now), before[k], self.tensor[int(self._places[part.root]) + part.start // (8 * GRANULE) :])
        for i in roots:
            bits = self.tensor[self._places[i] : self._places[i + 1]]
            self._head[1 + i] = sum(((bits >> k) & 1).sum() for k in range(8))
        self._head[0].fill_(base)
        self._compared = True

    def update(self, now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """Make `before` equal to the parts of `now`, which is as it was in the last `compare`. Without such a call all bytes are copied."""
        left: Sequence[int] = range(len(self._parts))
        if self._compared and self._by_kernel:
            bound = self._with_kernels(now, before)
            bound.update()
            left = bound.rest
        if left:
            torch._foreach_copy_([before[k] for k in left], [self._parts[k].of(now) for k in left])
        self._compared = False

    def _with_kernels(self, now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> MarkKernels:
        from xfer.kernels.marks_triton import MarkKernels

        key = [t.data_ptr() for some in (now, before) for t in some]
        if self._bound is None or self._bound[0] != key:
            others = rest_of(self._parts, [t.numel() for t in now])
            self._bound = key, MarkKernels(now, before, self.tensor, self._places, self._parts, others)
        return self._bound[1]


def _mark(now: torch.Tensor, before: torch.Tensor, bits: torch.Tensor) -> None:
    """Add bits of granules that differ. `bits` begin with those of the first granule."""
    for at in range(0, now.numel(), _CHUNK):
        a, b = now[at : at + _CHUNK], before[at : at + _CHUNK]
        differs = torch.zeros(-(-a.numel() // WORD) * WORD, dtype=torch.bool, device=now.device)
        torch.ne(a, b, out=differs[: a.numel()])
        packed = packed_bits(differs.view(-1, GRANULE).any(1))
        bits[at // (8 * GRANULE) :][: len(packed)] |= packed


def packed_bits(some: torch.Tensor) -> torch.Tensor:
    """Return bool [8 n] as bits, the first in the lowest; uint8 [n]."""
    powers = 1 << torch.arange(8, device=some.device, dtype=torch.int32)
    return (some.view(-1, 8) * powers).sum(1).to(torch.uint8)
