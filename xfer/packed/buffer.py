"""Copying tensors into messages and taking them out again: bytes only, so every dtype travels as it is.

Buffers are flat uint8 tensors that are reused; what is handed out of one is a view and dies with its next use, unless it
was put together from several messages. Not here: what lies where (plan.py, wire.py), and how messages travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from xfer.errors import PlanMismatch, ProtocolError
from xfer.packed.plan import Group
from xfer.packed.wire import Message, Part, nbytes_of
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

    def take(self, number: int, nbytes: int, longest: int = 0) -> torch.Tensor:
        """Buffer `number` modulo their count, cut to `nbytes`. `longest`: of the messages to come."""
        i = number % len(self._slots)
        if self._slots[i].numel() < nbytes:
            self._slots[i] = torch.empty(0, dtype=torch.uint8, device=self.device)  # before the new one is made
            self._slots[i] = torch.empty(max(nbytes, longest), dtype=torch.uint8, device=self.device)
        return self._slots[i][:nbytes]

    def reserve(self, longest: int) -> None:
        """Called before a gather whose messages have at most so many bytes. These grow by themselves."""

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        return sum(s.numel() for s in self._slots)

    def free(self) -> None:
        self._slots = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in self._slots]


class Packer:
    """Takes the tensors of one group in their order and fills its messages, one after the other.

    `buffer(message)` gives the bytes to fill; `filled(message, bytes)` is called as soon as a message is complete.
    """

    def __init__(self, group: Group, buffer, filled):
        self._group, self._buffer, self._filled = group, buffer, filled
        self._parts = [(m, p) for m in group.messages for p in m.parts]
        self._next = self._tensor = 0
        self._open: tuple[Message, torch.Tensor] | None = None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """PlanMismatch when this is not the tensor that the plan has next."""
        want = self._group.tensors[self._tensor] if self._tensor < len(self._group.tensors) else None
        if want is None or (name, tuple(tensor.shape), dtype_name(tensor)) != (want.name, want.shape, want.dtype):
            planned = f"{want.name} {want.dtype}{list(want.shape)}" if want else "nothing more"
            raise PlanMismatch(
                "the trainers export something else than what the buckets were planned from",
                [f"planned: {planned}; exported: {name} {dtype_name(tensor)}{list(tensor.shape)}"],
            )
        self._tensor += 1
        data = flat_bytes(tensor)
        while self._next < len(self._parts) and self._parts[self._next][1].spec is want:
            message, part = self._parts[self._next]
            self._next += 1
            if self._open is None or self._open[0] is not message:
                self._open = (message, self._buffer(message))
            into = self._open[1][part.offset : part.offset + part.size]
            into.copy_(data[part.start : part.start + part.size], non_blocking=True)
            if part is message.parts[-1]:
                self._filled(message, self._open[1])
                self._open = None

    def close(self) -> None:
        """PlanMismatch when tensors are missing."""
        if missing := self._group.tensors[self._tensor :]:
            raise PlanMismatch(
                "the trainers export less than what the buckets were planned from",
                [f"{t.name}: planned and not exported" for t in missing],
            )


class Unpacker:
    """Takes messages in their order and hands out whole tensors. Holds what has come of a tensor that spans several."""

    def __init__(self, device: torch.device):
        self._device = device
        self._partial: dict[str, tuple[torch.Tensor, int]] = {}
        self.done: set[str] = set()

    def take(self, message: Message, data: torch.Tensor) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Tensors that are complete with this message: views of `data`, or tensors of their own where they came in parts.

        ProtocolError, with all violations: `data` is shorter than the message, a tensor came before.
        """
        bad = [f"{p.spec.name}: has come already" for p in message.parts if p.spec.name in self.done]
        if data.numel() != message.nbytes or data.dtype != torch.uint8:
            bad.append(f"a message of {data.numel()} {dtype_name(data)}, {message.nbytes} bytes were announced")
        if bad:
            raise ProtocolError("a bucket is not what was announced", bad)
        out = []
        for part in message.parts:
            piece = data[part.offset : part.offset + part.size]
            tensor = _viewed(piece, part.spec) if part.whole else self._joined(part, piece)
            if tensor is not None:
                self.done.add(part.spec.name)
                out.append((part.spec, tensor))
        return out

    def _joined(self, part: Part, piece: torch.Tensor) -> torch.Tensor | None:
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


def wire_sum(data: torch.Tensor, number: int) -> int:
    """A sum over one message that no two swapped words leave as it was, mod 2**64: words weighted by their place and
    by the message's number."""
    n = data.numel() // 8 * 8
    words = data[:n].clone() if data.storage_offset() % 8 else data[:n]
    words = words.view(torch.int64)
    place = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=data.device) * 2 + 1
    total = int((words * place).sum().item()) + sum((i + 1) * int(b) for i, b in enumerate(data[n:].tolist()))
    return total * (2 * number + 1) % (1 << 64)


def specs_by_name(specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    return {s.name: s for s in specs}
