"""Packs tensors into messages and unpacks them. Only bytes are copied, so every dtype travels unchanged.

Buffers are flat uint8 tensors that are reused. A tensor that comes out of a buffer is a view, valid until the buffer's next
use, unless it was joined from several messages. plan.py and wire.py define the layout of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

from xfer.errors import PlanMismatch, ProtocolError
from xfer.kernels.bits import copy_bits
from xfer.kernels.checksum import mix, mix_int
from xfer.packed.plan import GatherGroup
from xfer.packed.wire import BucketPart, PackedMessage, longest_of, nbytes_of
from xfer.trace.fragment import TensorSpec


def dtype_name(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def flat_bytes(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor as flat uint8. It is copied only if it is not contiguous."""
    t = t.detach().contiguous()
    # Not view(-1): torch regards a tensor of one element as contiguous, whatever its strides, and keeps them.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


class Buffers:
    """`count` byte buffers that messages fill in turn. They grow to the longest message and are then reused.

    Attributes:
        offer: How other processes open them; empty, except of `SharedBuffers`.
    """

    offer = b""

    def __init__(self, count: int, device: torch.device):
        self.device, self._slots = device, [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(count)]
        self._views: dict[tuple[int, int], tuple[PackedMessage, list[torch.Tensor | None]]] = {}
        self._messages: Sequence[PackedMessage] = ()

    def begin(self, messages: Sequence[PackedMessage]) -> None:
        """Make room for these messages, and drop the views of others. Buffers do not move before the next `begin`."""
        if messages is not self._messages:
            self._views, self._messages = {}, messages
        self._reserve(min(self.count, len(messages)), longest_of(messages))

    def _reserve(self, count: int, nbytes: int) -> None:
        for i in range(count):
            if self._slots[i].numel() < nbytes:
                self._views = {}  # views keep the old memory alive
                self._slots[i] = torch.empty(0, dtype=torch.uint8, device=self.device)  # free the old memory first
                self._slots[i] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def take(self, number: int, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` bytes of the buffer of message `number`."""
        return self._slots[number % self.count][:nbytes]

    def views(self, message: PackedMessage, data: torch.Tensor) -> list[torch.Tensor | None]:
        """Call the function `views`, cached by message and buffer: a model has tens of thousands of tensors, and torch needs a
        microsecond for each view."""
        key = id(message), data.data_ptr()
        found = self._views.get(key)
        if found is None or found[0] is not message:
            found = self._views[key] = (message, views(message, data))
        return found[1]

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
    """Return the message's tensors as views of `data`. None for a part of a tensor, and for bytes not aligned for the dtype."""
    out: list[torch.Tensor | None] = []
    for part in message.parts:
        piece = data[part.offset : part.offset + part.size]
        dtype = getattr(torch, part.spec.dtype)
        fits = part.whole and not piece.storage_offset() % dtype.itemsize
        out.append(piece.view(dtype).view(part.spec.shape) if fits else None)
    return out


FLUSH_BYTES = 64 << 20
"""Most bytes of tensors that wait to be copied by one call. They stay alive until then."""


class Packer:
    """Fills the messages of one group, in order, from its tensors, in order.

    Several tensors are copied by one call, so they must not change before their message is filled.

    Args:
        group: The group.
        buffer: Returns the bytes to fill for a message.
        filled: Called with a message's bytes as soon as it is complete.
        views: `Buffers.views` of the filled buffers.
    """

    def __init__(self, group: GatherGroup, buffer, filled, views=views):
        self._group, self._buffer, self._filled, self._view = group, buffer, filled, views
        self._parts = [(m, i, p) for m in group.messages for i, p in enumerate(m.parts)]
        self._next = self._tensor = 0
        self._open: tuple[PackedMessage, torch.Tensor, list[torch.Tensor | None]] | None = None
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._waiting = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Pack the next tensor. PlanMismatch if the plan has another tensor here."""
        want = self._group.tensors[self._tensor] if self._tensor < len(self._group.tensors) else None
        if (
            want is None
            or name != want.name
            or tensor.shape != want.shape
            or tensor.dtype is not getattr(torch, want.dtype)
        ):
            planned = f"{want.name} {want.dtype}{list(want.shape)}" if want else "no further tensor"
            raise PlanMismatch(
                "the trainers export another tensor than the one that was planned",
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
                self._filled(self._open[1])
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
        """Copy all waiting tensors by one call. One call per tensor would take longer than the wire."""
        with torch.no_grad():
            copy_bits(*self._copies)
        self._copies, self._waiting = ([], []), 0

    def close(self) -> None:
        """Check that no tensor is missing, else PlanMismatch."""
        if missing := self._group.tensors[self._tensor :]:
            raise PlanMismatch(
                "the trainers export fewer tensors than were planned",
                [f"{t.name}: planned and not exported" for t in missing],
            )


class Unpacker:
    """Takes messages in order and returns whole tensors. Keeps the parts of a tensor that spans several messages.

    Args:
        device: Where joined tensors are made.
        views: `Buffers.views`, if messages arrive in reused buffers.
    """

    def __init__(self, device: torch.device, views=views):
        self._device, self._view = device, views
        self._partial: dict[str, tuple[torch.Tensor, int]] = {}
        self.done: set[str] = set()

    def take(self, message: PackedMessage, data: torch.Tensor) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Return the tensors that are complete with this message.

        Args:
            message: The message.
            data: Its bytes.

        Returns:
            Views of `data`. Tensors that arrived in parts have memory of their own.

        Raises:
            ProtocolError: `data` has another length than the message, or a tensor arrived before. Names all violations.
        """
        bad = [f"{p.spec.name}: arrived before" for p in message.parts if p.spec.name in self.done]
        if data.numel() != message.nbytes or data.dtype != torch.uint8:
            bad.append(f"a message has {data.numel()} {dtype_name(data)}, but {message.nbytes} bytes were announced")
        if bad:
            raise ProtocolError("a bucket differs from its announcement", bad)
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
                "a bucket differs from its announcement",
                [f"{part.spec.name}: byte {part.start} arrived after byte {filled}"],
            )
        whole[part.start : part.start + part.size].copy_(piece)
        filled += part.size
        if filled == whole.numel():
            return _viewed(whole, part.spec)
        self._partial[part.spec.name] = (whole, filled)
        return None

    def close(self, expected: Iterable[str]) -> None:
        """Check that all `expected` tensors are complete, else ProtocolError with the name of each missing one."""
        missing = sorted(set(expected) - self.done)
        if missing:
            raise ProtocolError("a refit ended before all tensors arrived", [f"{n}: did not arrive" for n in missing])


def _viewed(piece: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if piece.storage_offset() % dtype.itemsize:  # the source packs without padding
        piece = piece.clone()
    return piece.view(dtype).view(spec.shape)


CHUNK = 1 << 22
"""Words of a message that are summed at once. A sum needs 16 bytes of memory per word of a chunk on GPUs, and 24 on CPUs, where
torch makes a widened copy of the words."""


def wire_sum(data: torch.Tensor, number: int) -> int:
    """Sum one message modulo 2**64: words of 32 bits, weighted by their place and by the message's number.

    Weights are mixed, odd 64-bit numbers, so a single wrong word always changes the sum. Any other set of changes passes with a
    probability of about 2**-64, or 2**-33 if all of them flip signs (the highest bits of words: differences of 2**31 leave 33
    bits).
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
    """Load the kernels of `wire_sum`, for whole and partial chunks, before a message is on its way. Loading a kernel beside
    NCCL's can hang the host."""
    wire_sum(torch.zeros(4 * CHUNK + 5, dtype=torch.uint8, device=device), 0)


def _weight(i: int) -> int:
    return mix_int(i + 1) | 1


@cache
def _weights(device: torch.device, count: int) -> torch.Tensor:
    """Return the weights of `count` words. They are made on the CPU, so that they are complete for every stream."""
    out = torch.arange(1, count + 1, dtype=torch.int64)
    mix(out, torch.empty_like(out))
    return out.bitwise_or_(1).to(device)
