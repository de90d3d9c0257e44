"""Assigns tensors to buckets, once, from names, dtypes and shapes.

A *task* is one unit of a framework's export (a conversion task of Bridge, a parameter of a module). A *group* holds the tasks
that are gathered together; its tensors fill one or several *messages* of at most `limit` bytes. A plan refers to no tensor, so
it outlives offloading, reloading and replaced parameters. Its fingerprint covers its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from xfer.errors import LayoutError, Unsupported
from xfer.packed.wire import BucketPart, Manifest, PackedMessage, digest, encode, longest_of, nbytes_of, request_of
from xfer.plan.program import ITEMSIZE
from xfer.trace.fragment import TensorSpec

ALIGN = 256
"""Bytes. Every tensor begins at a multiple, so that it can be viewed in place with any dtype."""
BUCKET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TaskSize:
    """The tensors that one task exports.

    Attributes:
        position: Number of the task.
        tensors: Its tensors, in the order of the export.
        key: Tasks of one key (not None) must be exported in one call, because some of them may export nothing alone.
    """

    position: int
    tensors: tuple[TensorSpec, ...]
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """Tasks that are gathered in one call, and the messages that their tensors fill."""

    positions: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    messages: tuple[PackedMessage, ...]


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of a model.

    Attributes:
        groups: The groups, in order.
        limit: Most bytes of a message.
    """

    groups: tuple[GatherGroup, ...]
    limit: int

    @cached_property
    def messages(self) -> tuple[PackedMessage, ...]:
        """The messages of all groups, in the order in which they are sent."""
        return tuple(x for g in self.groups for x in g.messages)

    @cached_property
    def manifest(self) -> bytes:
        """The encoded `Manifest`. It is equal on ranks with equal plans."""
        return encode(Manifest(tuple(map(request_of, self.messages)), self.limit))

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest, 16 bytes, of the exported tensors, their order and their buckets."""
        return digest(self.manifest + msgspec.msgpack.encode([g.positions for g in self.groups]))

    @property
    def buffer_bytes(self) -> int:
        return longest_of(self.messages)


def make_plan(tasks: Iterable[TaskSize], limit: int = BUCKET_BYTES) -> BucketPlan:
    """Fill groups greedily, in task order: a group ends before the task that would exceed `limit`.

    Tasks that share a key form one unit, at the position of the first of them, and stay in one group. A tensor longer than
    `limit` is cut at rows, or at elements if a single row is longer, so that the limit holds for every message.

    Args:
        tasks: All tasks.
        limit: Most bytes of a message, at least ALIGN.

    Raises:
        Unsupported: a dtype's size is unknown.
        LayoutError: a name appears twice, or there is nothing to send.
    """
    if limit < ALIGN:
        raise ValueError(f"a bucket of {limit} bytes is too small: at least {ALIGN} are needed")
    found = [unit for unit in units(tasks) if any(task.tensors for task in unit)]
    _refuse(found)
    groups: list[list[TaskSize]] = []
    used = 0
    for unit in found:
        size = sum(_padded(nbytes_of(t)) for task in unit for t in task.tensors)
        if not groups or used + size > limit:
            groups.append([])
            used = 0
        groups[-1] += unit
        used += size
    return BucketPlan(tuple(_group(g, limit) for g in groups), limit)


def units(tasks: Iterable[TaskSize]) -> list[list[TaskSize]]:
    """Return the tasks that must be exported in one call, each set at the position of its first task."""
    found: dict[Hashable, list[TaskSize]] = {}
    for task in sorted(tasks, key=lambda t: t.position):
        alone = object()
        found.setdefault(alone if task.key is None else task.key, []).append(task)
    return list(found.values())


def _refuse(units: Sequence[Sequence[TaskSize]]) -> None:
    tensors = [t for unit in units for task in unit for t in task.tensors]
    if unknown := [f"{t.name}: dtype {t.dtype}" for t in tensors if t.dtype not in ITEMSIZE]:
        raise Unsupported("tensors have dtypes that cannot be packed", unknown)
    if twice := sorted(name for name, n in Counter(t.name for t in tensors).items() if n > 1):
        raise LayoutError("tensors appear twice in the export", twice)
    if not tensors:
        raise LayoutError("the trainers export no tensor", ["give the trainer's adapter a model with parameters"])


def _group(tasks: Sequence[TaskSize], limit: int) -> GatherGroup:
    tensors = tuple(t for task in tasks for t in task.tensors)
    messages: list[PackedMessage] = []
    parts: list[BucketPart] = []
    at = 0

    def close() -> None:
        nonlocal at
        if parts:
            messages.append(PackedMessage(tuple(parts), parts[-1].offset + parts[-1].size))
        parts.clear()
        at = 0

    for spec in tensors:
        for start, size in _cuts(spec, limit):
            if parts and at + size > limit:
                close()
            parts.append(BucketPart(spec, start, size, at))
            at = _padded(at + size)
    close()
    return GatherGroup(tuple(t.position for t in tasks), tensors, tuple(messages))


def _cuts(spec: TensorSpec, limit: int) -> list[tuple[int, int]]:
    """Return (start, size) of each part of a tensor, in bytes."""
    total = nbytes_of(spec)
    if total <= limit:
        return [(0, total)]
    row = total // spec.shape[0]
    step = limit // row * row or limit // ITEMSIZE[spec.dtype] * ITEMSIZE[spec.dtype]
    return [(at, min(step, total - at)) for at in range(0, total, step)]


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
