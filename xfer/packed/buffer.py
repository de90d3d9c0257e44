"""Copying tensors into messages and taking them out again: bytes only, so every dtype travels as it is.

Buffers are flat uint8 tensors that are reused; what is handed out of one is a view and dies with its next use, unless it
was put together from several messages. Not here: what lies where (plan.py, wire.py), and how messages travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

from xfer.errors import PlanMismatch, ProtocolError
from xfer.kernels.bits import copy_bits
from xfer.kernels.checksum import mix, mix_int
from xfer.packed.plan import GatherGroup
from xfer.packed.wire import BucketPart, PackedMessage, nbytes_of
from xfer.trace.fragment import TensorSpec


def dtype_name(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def flat_bytes(t: torch.Tensor) -> torch.Tensor:
    """The tensor as flat uint8; a copy only where it is not contiguous."""
    t = t.detach().contiguous()
    # Not view(-1): torch calls a tensor of one element contiguous whatever its strides, and keeps those.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


class Buffers:
    """`count` byte buffers that grow to the longest message and are then reused."""

    def __init__(self, count: int, device: torch.device):
        self.device, self._slots = device, [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(count)]
        self._views: dict[tuple[int, int], tuple[PackedMessage, list[torch.Tensor | None]]] = {}
        self._plan: object = None

    def take(self, number: int, nbytes: int, longest: int = 0) -> torch.Tensor:
        """Buffer `number` modulo their count, cut to `nbytes`. `longest`: of the messages to come."""
        i = number % len(self._slots)
        if self._slots[i].numel() < nbytes:
            self._views = {}  # they hold the old memory
            self._slots[i] = torch.empty(0, dtype=torch.uint8, device=self.device)  # before the new one is made
            self._slots[i] = torch.empty(max(nbytes, longest), dtype=torch.uint8, device=self.device)
        return self._slots[i][:nbytes]

    def begin(self, plan: object) -> None:
        """Messages are those of this plan from here on. Views of another one's are dropped: they would never be asked for."""
        if plan is not self._plan:
            self._views, self._plan = {}, plan

    def views(self, message: PackedMessage, data: torch.Tensor) -> list[torch.Tensor | None]:
        """See `views`; made once for each message and buffer, since a model has tens of thousands of tensors and torch
        needs a microsecond for each view."""
        key = id(message), data.data_ptr()
        found = self._views.get(key)
        if found is None or found[0] is not message:
            found = self._views[key] = (message, views(message, data))
        return found[1]

    def reserve(self, longest: int) -> None:
        """Called before a gather whose messages have at most so many bytes. These grow by themselves."""

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        return sum(s.numel() for s in self._slots)

    def free(self) -> None:
        self._views = {}
        self._slots = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in self._slots]


def views(message: PackedMessage, data: torch.Tensor) -> list[torch.Tensor | None]:
    """The message's tensors over its bytes; None for parts of tensors, and where bytes are not aligned for their dtype."""
    out: list[torch.Tensor | None] = []
    for part in message.parts:
        piece = data[part.offset : part.offset + part.size]
        dtype = getattr(torch, part.spec.dtype)
        fits = part.whole and not piece.storage_offset() % dtype.itemsize
        out.append(piece.view(dtype).view(part.spec.shape) if fits else None)
    return out


FLUSH_BYTES = 64 << 20
"""Of tensors that wait to be copied by one call; they must stay alive until then."""


class Packer:
    """Takes the tensors of one group in their order and fills its messages, one after the other.

    `buffer(message)` gives the bytes to fill; `filled(message, bytes)` is called as soon as a message is complete.
    `views`: Buffers.views of the buffers that are filled. Tensors are copied some at a time, so they must not change before
    their message is filled.
    """

    def __init__(self, group: GatherGroup, buffer, filled, views=views):
        self._group, self._buffer, self._filled, self._view = group, buffer, filled, views
        self._parts = [(m, i, p) for m in group.messages for i, p in enumerate(m.parts)]
        self._next = self._tensor = 0
        self._open: tuple[PackedMessage, torch.Tensor, list[torch.Tensor | None]] | None = None
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._waiting = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """PlanMismatch when this is not the tensor that the plan has next."""
        want = self._group.tensors[self._tensor] if self._tensor < len(self._group.tensors) else None
        if (
            want is None
            or name != want.name
            or tensor.shape != want.shape
            or tensor.dtype is not getattr(torch, want.dtype)
        ):
            planned = f"{want.name} {want.dtype}{list(want.shape)}" if want else "nothing more"
            raise PlanMismatch(
                "the trainers export something else than what the buckets were planned from",
                [f"planned: {planned}; exported: {name} {dtype_name(tensor)}{list(tensor.shape)}"],
            )
        self._tensor += 1
        while self._next < len(self._parts) and self._parts[self._next][2].spec is want:
            message, i, part = self._parts[self._next]
            self._next += 1
            if self._open is None or self._open[0] is not message:
                data = self._buffer(message)
                self._open = (message, data, self._view(message, data))
            into = self._open[2][i]
            if into is None:
                into = self._open[1][part.offset : part.offset + part.size]
                into.copy_(flat_bytes(tensor)[part.start : part.start + part.size], non_blocking=True)
            else:
                self._later(into, tensor, part.size)
            if i == len(message.parts) - 1:
                self._copy()
                self._filled(message, self._open[1])
                self._open = None

    def _later(self, into: torch.Tensor, tensor: torch.Tensor, nbytes: int) -> None:
        if not tensor.is_contiguous():
            into.copy_(tensor, non_blocking=True)
            return
        self._copies[0].append(into)
        self._copies[1].append(tensor)
        self._waiting += nbytes
        if self._waiting >= FLUSH_BYTES:
            self._copy()

    def _copy(self) -> None:
        """One call for many tensors: a call for each would take longer than the wire does."""
        with torch.no_grad():
            copy_bits(*self._copies)
        self._copies, self._waiting = ([], []), 0

    def close(self) -> None:
        """PlanMismatch when tensors are missing."""
        if missing := self._group.tensors[self._tensor :]:
            raise PlanMismatch(
                "the trainers export less than what the buckets were planned from",
                [f"{t.name}: planned and not exported" for t in missing],
            )


class Unpacker:
    """Takes messages in their order and hands out whole tensors. Holds what has come of a tensor that spans several.

    `views`: Buffers.views, where messages come in reused buffers.
    """

    def __init__(self, device: torch.device, views=views):
        self._device, self._view = device, views
        self._partial: dict[str, tuple[torch.Tensor, int]] = {}
        self.done: set[str] = set()

    def take(self, message: PackedMessage, data: torch.Tensor) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Tensors that are complete with this message: views of `data`, or tensors of their own where they came in parts.

        ProtocolError, with all violations: `data` is shorter than the message, a tensor came before.
        """
        bad = [f"{p.spec.name}: has come already" for p in message.parts if p.spec.name in self.done]
        if data.numel() != message.nbytes or data.dtype != torch.uint8:
            bad.append(f"a message of {data.numel()} {dtype_name(data)}, {message.nbytes} bytes were announced")
        if bad:
            raise ProtocolError("a bucket is not what was announced", bad)
        out = []
        for part, tensor in zip(message.parts, self._view(message, data), strict=True):
            if tensor is None:
                piece = data[part.offset : part.offset + part.size]
                tensor = _viewed(piece, part.spec) if part.whole else self._joined(part, piece)
            if tensor is not None:
                self.done.add(part.spec.name)
                out.append((part.spec, tensor))
        return out

    def _joined(self, part: BucketPart, piece: torch.Tensor) -> torch.Tensor | None:
        whole, filled = self._partial.pop(part.spec.name, (None, 0))
        if whole is None:
            whole = torch.empty(nbytes_of(part.spec), dtype=torch.uint8, device=self._device)
        if part.start != filled:
            raise ProtocolError(
                "a bucket is not what was announced",
                [f"{part.spec.name}: byte {part.start} came after byte {filled}"],
            )
        whole[part.start : part.start + part.size].copy_(piece)
        filled += part.size
        if filled == whole.numel():
            return _viewed(whole, part.spec)
        self._partial[part.spec.name] = (whole, filled)
        return None

    def close(self, expected: Iterable[str]) -> None:
        """ProtocolError naming every tensor that has not come whole."""
        missing = sorted(set(expected) - self.done)
        if missing:
            raise ProtocolError("a refit ended before all tensors had come", [f"{n}: has not come" for n in missing])


def _viewed(piece: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if piece.storage_offset() % dtype.itemsize:  # a sender that packs without padding
        piece = piece.clone()
    return piece.view(dtype).view(spec.shape)


CHUNK = 1 << 22
"""Words of a message that are summed at once: beside it a sum needs 16 bytes for each of these, on CPUs 24 (torch widens words
aside), and no more."""


def wire_sum(data: torch.Tensor, number: int) -> int:
    """A sum over one message, modulo 2**64: words of 32 bits, weighted by their place and by the message's number.

    Weights are mixed, odd, and twice as long as words. So a single wrong word always changes the sum; any other set of
    changes passes with a chance of about one in 2**64, or in 2**33 where all of them are swaps of signs (the highest bits of
    words: differences of 2**31 leave 33 bits).
    """
    n = data.numel() // 4 * 4
    weights = _weights(data.device, CHUNK)
    work = torch.empty(min(CHUNK, n // 4), dtype=torch.int64, device=data.device)
    sums = torch.empty(-(-n // (4 * CHUNK)), dtype=torch.int64, device=data.device)
    for i, at in enumerate(range(0, n, 4 * CHUNK)):
        piece = data[at : min(at + 4 * CHUNK, n)]
        words = (piece.clone() if piece.storage_offset() % 4 else piece).view(torch.int32)
        torch.sum(torch.mul(words, weights[: words.numel()], out=work[: words.numel()]), dim=0, out=sums[i])
    found = sums.tolist()
    found.append(int.from_bytes(bytes(data[n:].tolist()), "little"))
    return sum(x * _weight(i) for i, x in enumerate(found)) * _weight(number) % (1 << 64)


def warm_sum(device: torch.device) -> None:
    """Loads what `wire_sum` needs, for whole chunks and for parts of one, before a message is on its way: to load a kernel
    beside NCCL's can hang the host."""
    wire_sum(torch.zeros(4 * CHUNK + 5, dtype=torch.uint8, device=device), 0)


def _weight(i: int) -> int:
    return mix_int(i + 1) | 1


@cache
def _weights(device: torch.device, count: int) -> torch.Tensor:
    """Made on the CPU, so that they are there when this returns, whatever the stream."""
    out = torch.arange(1, count + 1, dtype=torch.int64)
    mix(out, torch.empty_like(out))
    return out.bitwise_or_(1).to(device)


def specs_by_name(specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    return {s.name: s for s in specs}
