"""Writes that mark what they change: an optimizer's copies of its fp32 masters into 16-bit parameters.

An optimizer announces itself (`announce`) and copies by `write`. A trainer's side that offers these parameters holds a `Written`, in
which such a copy sets the bits of the granules that it changes (marks.py). So it needs no copy of them and no comparison with one.

Other code may write parameters without an announcement. So a `Written` also has a checksum of each tensor (checksum.py), which each
`write` updates by what it changes. `settle` reads the tensors: if one has another checksum, something else has written it, and
all of its granules are marked.

A Triton kernel compares, writes and marks all tensors of a call in one pass on CUDA (written_triton.py); here is its torch twin.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from xfer.kernels.bits import GRANULE
from xfer.kernels.checksum import FACTORS, GROUP, MIXES, Sums, salts
from xfer.kernels.marks import ByteRange, SpanWrite, packed_bits, places
from xfer.plan.program import DTYPE_CODE, ROW, Op

if TYPE_CHECKING:
    from xfer.kernels.written_triton import MarkedWrites

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of tensors whose writes can be marked."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_TABLES = 64
"""Tables that a `Written` keeps. A layer-wise optimizer writes its parameters in as many turns as it has groups."""
_LOW = (1 << 32) - 1


class Writer(Protocol):
    """Code that writes tensors by `write`."""

    def writes(self) -> Iterable[torch.Tensor]:
        """Return these tensors. The caller leaves out those that are not plain, contiguous and of 16 bits."""


_writers: list[weakref.ref[Writer]] = []
_known: list[weakref.ref[Written]] = []


def announce(writer: Writer) -> None:
    """Add a writer, until it is gone or `forget` removes it."""
    _writers[:] = [r for r in _writers if r() is not None] + [weakref.ref(writer)]


def forget(writer: Writer) -> None:
    """Remove a writer that `announce` added."""
    _writers[:] = [r for r in _writers if r() not in (None, writer)]


def wanted() -> bool:
    """Whether any `Written` exists, which needs marks."""
    return any(r() is not None for r in _known)


def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Do `into.copy_(value)` for each pair (into, value) in turn, and mark the changes of tensors in spans of a `Written`."""
    live = [known for r in reversed(_known) if (known := r()) is not None]
    found = ((next((k for k in live if k.takes(*pair)), None), pair) for pair in pairs)
    for known, some in groupby(found, itemgetter(0)):
        if known is not None:
            known.write([pair for _, pair in some])
        else:
            for _, (into, value) in some:
                into.copy_(value)


def spans_of(roots: Sequence[torch.Tensor]) -> tuple[ByteRange, ...]:
    """Return the spans of these storages that announced writers write, in order.

    Args:
        roots: The storages, flat uint8.
    """
    at = sorted((t.data_ptr(), i) for i, t in enumerate(roots) if t.numel() and t.data_ptr() % 16 == 0)
    found = []
    for t in (t for r in _writers if (writer := r()) is not None for t in writer.writes()):
        k = bisect_right(at, (t.data_ptr(), len(roots))) - 1
        if k < 0 or type(t) not in PLAIN or t.dtype not in DTYPES or not t.is_contiguous():
            continue
        base, i = at[k]
        span = ByteRange(i, t.data_ptr() - base, t.data_ptr() - base + t.nbytes)
        if span.start % 16 == 0 and span.start < span.stop <= roots[i].numel() and t.device == roots[i].device:
            found.append(span)
    apart: list[ByteRange] = []
    for span in sorted(found):
        if not apart or span.root != apart[-1].root or span.start >= apart[-1].stop:
            apart.append(span)
    return tuple(apart)


class Written:
    """Marks of what is written into spans of some storages. Writes are marked from now on.

    Args:
        roots: The storages, flat uint8.
        spans: See `spans_of`.

    Attributes:
        bits: Laid out as marks; their head means nothing. Flat uint8.
    """

    def __init__(self, roots: Sequence[torch.Tensor], spans: Sequence[ByteRange]):
        self.spans, self._places = tuple(spans), places([t.numel() for t in roots])
        self.bits = torch.zeros(int(self._places[-1]), dtype=torch.uint8, device=roots[0].device)
        self._by_kernel = self.bits.is_cuda and find_spec("triton") is not None
        self.bind(roots)
        self._sums = self._read().to(self.bits.device)
        _known[:] = [r for r in _known if r() is not None] + [weakref.ref(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of the marks, the checksums and the kernels' tables."""
        return self.bits.numel() + self._sums.nbytes + sum(t.nbytes for t in self._tables.values())

    def bind(self, roots: Sequence[torch.Tensor]) -> None:
        """Use these storages of the same sizes, which have other addresses. If they hold other bytes, or writes go to other places in
        them, `settle` finds that."""
        self._tables: dict[tuple, MarkedWrites] = {}
        self._number = {s.of(roots).data_ptr(): k for k, s in enumerate(self.spans)}
        rows, n = np.zeros(len(self.spans), ROW), np.array([(s.stop - s.start) // 2 for s in self.spans], np.int64)
        rows["op"], rows["src_dtype"], rows["dst_dtype"] = Op.COPY, *[DTYPE_CODE["int16"]] * 2
        rows["tensor"] = np.arange(len(rows))
        rows["dst_root"], rows["dst_offset"] = np.array([(s.root, s.start) for s in self.spans]).T
        rows["extent"], rows["dst_strides"] = 1, 2
        rows["extent"][:, -1] = n
        self._checksums = Sums(rows, rows["tensor"], len(rows), roots, "dst", [(x,) for x in n.tolist()])

    def _read(self) -> torch.Tensor:
        """The checksums of the spans as they are; int32 [spans, 2]."""
        return torch.from_numpy(np.array(self._checksums.values(), np.uint64).view(np.int32).reshape(-1, 2).copy())

    def settle(self) -> None:
        """Mark all of each span that something else than `write` has written."""
        now = self._read()
        for k in (now != self._sums.cpu()).any(1).nonzero().view(-1).tolist():
            s = self.spans[k]
            at = int(self._places[s.root])
            self.bits[at + s.start // (8 * GRANULE) : at + -(-s.stop // (8 * GRANULE))] = 255
        self._sums.copy_(now)

    def clear(self) -> None:
        """Remove all marks."""
        self.bits.zero_()

    def takes(self, into: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether `into` is the tensor of a span, and `write` can do `into.copy_(value)`."""
        k = self._number.get(into.data_ptr()) if type(into) in PLAIN and into.dtype in DTYPES else None
        if k is None or into.nbytes != self.spans[k].stop - self.spans[k].start or not into.is_contiguous():
            return False
        return value.shape == into.shape and value.dtype in (*DTYPES, torch.float32)  # others may round twice

    def write(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Do `into.copy_(value)` for pairs that it `takes`, in turn, and mark what that changes."""
        writes = [
            SpanWrite(
                self._number[into.data_ptr()],
                into.detach(),
                value.detach().to(into.device, torch.float32).contiguous(),
            )
            for into, value in pairs
        ]
        if not self._by_kernel:
            for w in writes:
                self._write(w.span, w.into, w.value.to(w.into.dtype))
        elif len({w.span for w in writes}) == len(writes):
            self._bound_to(writes).run(self.bits, self._sums)
        else:
            for w in writes:  # one kernel must not write a tensor twice
                self._bound_to([w]).run(self.bits, self._sums)
        torch.autograd.graph.increment_version([into for into, _ in pairs])

    def _bound_to(self, writes: Sequence[SpanWrite]) -> MarkedWrites:
        """The tables of these writes, which an optimizer makes again in its next step."""
        from xfer.kernels.written_triton import MarkedWrites

        key = tuple((w.span, w.value.data_ptr()) for w in writes)
        if key not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[key] = MarkedWrites(writes, self.spans, self._places)
        return self._tables[key]

    def _write(self, k: int, into: torch.Tensor, value: torch.Tensor) -> None:
        """Mark first, and copy last: if this is interrupted, `settle` finds a sum that does not fit."""
        old, new = (t.view(-1).view(torch.int16) for t in (into, value))
        at = (old != new).nonzero().view(-1)
        start, first = self.spans[k].start, self.spans[k].start // (8 * GRANULE)
        some = torch.zeros(-(-self.spans[k].stop // (8 * GRANULE)) - first, 8, dtype=torch.bool, device=at.device)
        some.view(-1)[(start + 2 * at) // GRANULE - 8 * first] = True
        place = int(self._places[self.spans[k].root]) + first
        self.bits[place : place + len(some)] |= packed_bits(some)
        change = new[at].long() - old[at]
        for half, salt in enumerate(salts(k)):
            weight = at // GROUP + salt & _LOW
            for shift, factor in MIXES[half]:
                weight ^= weight >> shift
                weight = weight * (factor or 1) & _LOW
            factors = torch.tensor(FACTORS[half], device=at.device)[at % GROUP]
            self._sums[k, half] += ((weight | 1) * factors * change).sum().to(torch.int32)  # wraps
        into.copy_(value)
