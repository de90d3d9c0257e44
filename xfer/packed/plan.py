"""Which tensors go into which bucket: an index structure, made once from names, dtypes and shapes.

A *task* is what a framework exports in one go (one conversion task of Bridge, one parameter of a module); a *group* is the
tasks that are gathered together; its tensors lie in one or several *messages* of at most `limit` bytes. No tensor is
referred to, so a plan outlives offloading, reloading and replaced parameters; what it was made from is in its fingerprint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from xfer.errors import LayoutError, Unsupported
from xfer.packed.wire import BucketPart, Manifest, PackedMessage, digest, encode, nbytes_of, plain_request, request_of
from xfer.plan.program import ITEMSIZE
from xfer.trace.fragment import TensorSpec

ALIGN = 256
"""Bytes. Every tensor begins at a multiple, so any dtype can be viewed in place, whatever lies before it."""
BUCKET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TaskSize:
    """What task number `position` exports, in order. Tasks of one `key` (not None) must be exported in one call: some of
    them may export nothing by themselves."""

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
    """`limit`: bytes that no message exceeds; `packed` False: one message per tensor, as senders did before packing."""

    groups: tuple[GatherGroup, ...]
    limit: int
    packed: bool = True

    @cached_property
    def manifest(self) -> bytes:
        """Encoded; the same on all ranks that planned the same."""
        if not self.packed:
            return encode(Manifest(tuple(plain_request(g.tensors) for g in self.groups)))
        return encode(Manifest(tuple(request_of(x) for g in self.groups for x in g.messages), self.limit))

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes: of what is exported in which order in which buckets."""
        return digest(self.manifest + msgspec.msgpack.encode([g.positions for g in self.groups]))

    @property
    def messages(self) -> int:
        return sum(len(g.messages) for g in self.groups)

    @property
    def nbytes(self) -> int:
        """On the wire, without padding."""
        return sum(nbytes_of(t) for g in self.groups for t in g.tensors)

    @property
    def buffer_bytes(self) -> int:
        """The longest message."""
        return max((x.nbytes for g in self.groups for x in g.messages), default=0)


def make_plan(tasks: Iterable[TaskSize], limit: int = BUCKET_BYTES, *, packed: bool = True) -> BucketPlan:
    """Greedy by bytes, in task order: a group is closed before the task that would make it pass `limit`; tasks that share a
    key are one unit and are never split over groups, at the place of the first of them.

    A tensor longer than `limit` is cut at rows (at elements where one row is longer), so that the limit holds for every
    message. Unsupported: dtypes of unknown size; LayoutError: a name that comes twice, nothing to send.
    """
    if limit < ALIGN:
        raise ValueError(f"a bucket of {limit} bytes: at least {ALIGN}")
    units = [unit for unit in _units(tasks) if any(task.tensors for task in unit)]
    _refuse(units)
    groups: list[list[TaskSize]] = []
    used = 0
    for unit in units:
        size = sum(_padded(nbytes_of(t)) for task in unit for t in task.tensors)
        if not groups or used + size > limit:
            groups.append([])
            used = 0
        groups[-1] += unit
        used += size
    return BucketPlan(tuple(_group(g, limit, packed) for g in groups), limit, packed)


def _units(tasks: Iterable[TaskSize]) -> list[list[TaskSize]]:
    units: list[list[TaskSize]] = []
    by_key: dict[Hashable, list[TaskSize]] = {}
    for task in sorted(tasks, key=lambda t: t.position):
        if task.key is not None and task.key in by_key:
            by_key[task.key].append(task)
            continue
        units.append([task])
        if task.key is not None:
            by_key[task.key] = units[-1]
    return units


def _refuse(units: Sequence[Sequence[TaskSize]]) -> None:
    tensors = [t for unit in units for task in unit for t in task.tensors]
    if unknown := [f"{t.name}: dtype {t.dtype}" for t in tensors if t.dtype not in ITEMSIZE]:
        raise Unsupported("tensors of dtypes that cannot be packed", unknown)
    if twice := sorted(name for name, n in Counter(t.name for t in tensors).items() if n > 1):
        raise LayoutError("tensors that would be sent twice", twice)
    if not tensors:
        raise LayoutError("the trainers export no tensor at all")


def _group(tasks: Sequence[TaskSize], limit: int, packed: bool) -> GatherGroup:
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
        if not packed:
            messages.append(PackedMessage((BucketPart(spec, 0, nbytes_of(spec), 0),), nbytes_of(spec)))
            continue
        for start, size in _cuts(spec, limit):
            if parts and at + size > limit:
                close()
            parts.append(BucketPart(spec, start, size, at))
            at = _padded(at + size)
    close()
    return GatherGroup(tuple(t.position for t in tasks), tensors, tuple(messages))


def _cuts(spec: TensorSpec, limit: int) -> list[tuple[int, int]]:
    """(start, size) in bytes."""
    total = nbytes_of(spec)
    if total <= limit:
        return [(0, total)]
    row = total // spec.shape[0]
    step = limit // row * row or limit // ITEMSIZE[spec.dtype] * ITEMSIZE[spec.dtype]
    return [(at, min(step, total - at)) for at in range(0, total, step)]


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
