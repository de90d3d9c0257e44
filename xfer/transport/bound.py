"""A step with its tensors: messages as (tensor, peer, tag), and the copies between storages and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from xfer.kernels import Side, bind
from xfer.transport.group import Link, Outgoing
from xfer.transport.steps import PairExchange, Step

BESIDE_WIRE = 64
"""Programs of a kernel that copies while messages travel: enough to be faster than the wire, and few enough for NCCL's kernel to keep its
rate. Nothing travels beside the first pack and the last unpack, so these take the whole GPU."""


class BufferRows(Protocol):
    """Rows of one message that are packed into a buffer, or unpacked from it."""

    @property
    def scratch_bytes(self) -> int: ...

    def pack(self, buffer: torch.Tensor) -> None: ...

    def unpack(self, buffer: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class BoundPart:
    """The messages of one pair of ranks, in one direction, in one step.

    Attributes:
        peer: The other rank.
        nbytes: Bytes of the messages.
        messages: Tensor, peer and tag of each.
        copy: Rows that are packed into, or unpacked from, a buffer, and the buffer; None if there are none.
    """

    peer: int
    nbytes: int
    messages: Sequence[Outgoing]
    copy: tuple[BufferRows, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class BoundStep:
    """All messages of one rank in one step. `nbytes`: their bytes."""

    wave: int
    nbytes: int
    sends: Sequence[BoundPart]
    receives: Sequence[BoundPart]


@dataclass(frozen=True, slots=True)
class PeerBytes:
    """Wire bytes of a run from and to one other rank."""

    peer: int
    label: str
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Bytes by peer and number of messages, over some steps."""

    peers: tuple[PeerBytes, ...]
    messages: int

    @classmethod
    def of(cls, steps: Sequence[BoundStep], link: Link) -> Tally:
        per_peer: dict[int, list[int]] = {}
        for step in steps:
            for which, parts in enumerate((step.receives, step.sends)):
                for part in parts:
                    per_peer.setdefault(part.peer, [0, 0])[which] += part.nbytes
        messages = sum(len(p.messages) for s in steps for p in (*s.sends, *s.receives))
        return cls(tuple(PeerBytes(p, link.labels[p], *per_peer[p]) for p in sorted(per_peer)), messages)


def made_step(wave: int, sends: Sequence[BoundPart], receives: Sequence[BoundPart]) -> BoundStep:
    """Return the step of these messages."""
    return BoundStep(wave, sum(p.nbytes for p in (*sends, *receives)), sends, receives)


def bound_step(
    step: Step,
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    out: torch.Tensor,
    into: torch.Tensor,
    *,
    first: bool,
    last: bool,
) -> BoundStep:
    """Bind a step to storages and its two buffers. `first`, `last`: nothing travels beside its pack, or its unpack."""
    return made_step(
        step.wave,
        [_bound(p, src, "src", out, first) for p in step.sends],
        [_bound(p, dst, "dst", into, last) for p in step.receives],
    )


def _bound(
    part: PairExchange, roots: Sequence[torch.Tensor], side: Side, buffer: torch.Tensor, whole_gpu: bool
) -> BoundPart:
    messages = [
        ((buffer if p.root < 0 else roots[p.root])[p.offset : p.offset + p.nbytes], part.peer, p.tag)
        for p in part.pieces
    ]
    if not len(part.rows):
        return BoundPart(part.peer, part.nbytes, messages)
    rows = bind(part.rows, roots, side, programs=None if whole_gpu else BESIDE_WIRE)
    rows.prepare(buffer)
    return BoundPart(part.peer, part.nbytes, messages, (rows, buffer))
