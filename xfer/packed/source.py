"""One trainer rank of the packed route: its exported tensors, checks for changes, and gathers.

`PackedSource` wraps a `WeightStream`, the framework's part (tensors.py, trainers/). It keeps the bucket plan, and tracks when the
plan and the framework's task objects are stale: if `check` finds a change on any rank, all ranks rebuild both at the beginning of
the next gather.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard

import torch

from xfer.errors import Unsupported
from xfer.packed import agree
from xfer.packed.buffer import Buffers
from xfer.packed.plan import ALIGN, BucketPlan, GatherGroup, TaskSize, make_plan
from xfer.packed.wire import PackedMessage
from xfer.trace.fragment import TensorSpec
from xfer.trace.traced import Traced, TrainerLayout

BESIDE = 8
"""Ranks that assemble messages leave 1 / BESIDE of a bucket for tables and for bytes from other ranks, so that two buffers
and all of these take no more memory than two buckets."""
PROGRAMS = 64
"""Most Triton programs of a copy that runs beside a broadcast: NCCL's kernels need multiprocessors of their own."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """How one rank takes part in assembling messages from the boxes that ranks hold.

    Attributes:
        here: Whether this rank assembles messages.
        round_bytes: Most bytes that arrive at once at a rank that assembles.
        programs: Most Triton programs of a copy; None: no limit.
    """

    here: bool
    round_bytes: int
    programs: int | None = PROGRAMS


class WeightStream(Protocol):
    """A trainer framework's weights. All trainer ranks call the methods marked collective in the same order.

    Attributes:
        rank: This trainer rank.
        world: Number of trainer ranks.
        device: Where the weights lie.
    """

    rank: int
    world: int
    device: torch.device

    def drain(self) -> None: ...

    def read(self) -> tuple[TensorSpec, ...]:
        """Return the checkpoint tensors of which this rank holds a part. Not collective."""

    def check(self) -> str:
        """Return "same", "moved" or "changed", compared with `read` or the last `check`. RebindError for tensors without bytes."""

    def build(self, assembly: Assembly) -> tuple[TaskSize, ...]:
        """Make new task objects. Collective. Returns the tensors that each of them exports, equal on all ranks."""

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        """Export the tasks of one group. Collective. Yields names and whole tensors, in the plan's order. On ranks that do not
        assemble, tensors may be None."""


class WritingStream(WeightStream, Protocol):
    """A stream that can assemble messages in the buffers that are sent (tensors.py).

    Attributes:
        writes: Whether it assembles messages, with the present weights.
        pulls: Whether ranks then read each other's storages.
    """

    writes: bool

    @property
    def pulls(self) -> bool: ...

    def prepare(self, plan: BucketPlan, buffers: Buffers | None) -> None: ...
    def place(self, message: PackedMessage, data: torch.Tensor | None) -> None: ...
    def forget(self) -> None: ...


def _writes(stream: WeightStream) -> TypeGuard[WritingStream]:
    return getattr(stream, "writes", False)


class PackedSource:
    """Implements `Source` (participants/trainer.py).

    Args:
        stream: The framework's part.
        limit: Most bytes of a message.
        colocated: The engines' workers are on this host and map the buffers instead of receiving messages (shared.py).
    """

    reads_together = False

    def __init__(self, stream: WeightStream, limit: int, colocated: bool = False):
        self.stream, self.limit, self.colocated = stream, limit, colocated
        self.rank, self.world, self.device = stream.rank, stream.world, stream.device
        self.plan: BucketPlan | None = None
        self.built = 0  # number of rebuilds
        self.agreed_s = self.built_s = 0.0  # seconds of the last gather's agreement, and of its rebuild
        self._stale = True
        self._looking = threading.Lock()  # a lane may `forget` while this rank's caller checks
        # Two rounds take half of the memory beside the buffers, tables the other half. With colocated engines no broadcast runs.
        rounds = max(1 << 20, limit // (2 * BESIDE))
        self.assembly = Assembly(stream.rank == 0, rounds, None if colocated else PROGRAMS)

    @property
    def writes(self) -> bool:
        """Whether `place` assembles messages, once a gather has begun. If not, `tensors` yields the tensors to pack."""
        return _writes(self.stream)

    @property
    def way(self) -> str:
        """How the last gather assembled tensors; "" before the first gather."""
        if self.plan is None:
            return ""
        if not _writes(self.stream):
            return "exported whole by the trainers' framework"
        if self.stream.pulls:
            return "put together by copies out of the trainers' storages"
        return "put together from what trainers send in rounds"

    def assemble(self, whole: bool) -> None:
        """Set whether this rank needs whole tensors. All ranks call it before a gather."""
        if self.assembly.here != whole:
            self.assembly, self._stale = replace(self.assembly, here=whole), True

    def drain(self) -> None:
        self.stream.drain()

    def read(self) -> TrainerLayout:
        """Read the tensors' names, shapes and dtypes. No storage is read in place."""
        with self._looking:
            self._stale = True
            specs = tuple(sorted(self.stream.read()))
            return TrainerLayout(Traced(specs, ()), (), {}, getattr(self.stream, "trained", frozenset()))

    def check(self) -> str:
        """Check for changes. After a result other than "same", task objects are stale until a gather has made new ones."""
        try:
            with self._looking:
                state = self.stream.check()
        except BaseException:
            self._stale = True
            raise
        if state != "same":  # only ever set here: a gather may have begun meanwhile
            self._stale = True
        return state

    def rebind(self) -> Mapping[str, torch.Tensor]:
        return {}

    # ---- one gather; collective over the trainer ranks

    def begin(self) -> BucketPlan:
        """Agree with all ranks: keep tasks and plan if they are fresh on every rank, else rebuild them on all ranks."""
        began = time.perf_counter()
        plan = self.plan
        stale = agree.any_rank(self._stale, self._fingerprint, self.device)
        self.agreed_s, self.built_s = time.perf_counter() - began, 0.0
        if stale or plan is None:
            began = time.perf_counter()
            self._stale = False  # before the rebuild, so that a `check` during it can set it again
            try:
                tasks = self.stream.build(self.assembly)
                longest = max(ALIGN, self.limit - self.limit // BESIDE) if self.writes else self.limit
                self.plan = plan = make_plan(tasks, longest)
                agree.any_rank(False, plan.fingerprint, self.device)
            except BaseException:
                self._stale = True
                raise
            self.built += 1
            self.built_s = time.perf_counter() - began
        return plan

    @property
    def _fingerprint(self) -> bytes:
        return self.plan.fingerprint if self.plan is not None else b""

    def doubt(self) -> None:
        """Rebuild tasks and plan in the next gather. Called after a failed gather, whose cause `check` may not detect."""
        self._stale = True

    def go_on(self, stop: bool) -> bool:
        """Return whether the gather continues: no rank has set `stop`. Called between groups, so all ranks stop at the same one."""
        return not agree.any_rank(stop, self._fingerprint, self.device)

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightStream.tensors`. If the caller stops early, the next gather rebuilds: the framework may have kept a part of the
        group (Bridge: experts that wait to be stacked)."""
        whole = False
        try:
            yield from self.stream.tensors(group)
            whole = True
        finally:
            if not whole:
                self.doubt()

    def prepare(self, buffers: Buffers | None) -> None:
        """See `WritingStream`. Called once per gather, before its first message. Other streams have nothing to prepare."""
        if self.plan is not None and _writes(self.stream):
            self.stream.prepare(self.plan, buffers)

    def place(self, message: PackedMessage, data: torch.Tensor | None) -> None:
        """See `WritingStream`."""
        if not _writes(self.stream):
            raise TypeError(f"a {type(self.stream).__name__} yields tensors and cannot place messages")
        self.stream.place(message, data)

    def forget(self) -> None:
        """Drop storages and buffers. The next gather rebuilds tasks and plan."""
        with self._looking:
            self._stale = True
            if hasattr(self.stream, "forget"):
                self.stream.forget()

    def let_go(self) -> None:
        """Do the same as `forget`. It may be called before a replica has joined."""
        self.forget()


def _is_stream(trainer: object) -> TypeGuard[WeightStream]:
    return all(hasattr(trainer, name) for name in ("read", "check", "build", "tensors", "drain"))


def packed_source(trainer: object, limit: int, colocated: bool = False) -> PackedSource:
    """Wrap the trainer that a caller gave to `connect`.

    Args:
        trainer: A `PackedSource`, an object with a method `stream`, or a `WeightStream`.
        limit: Most bytes of a message.
        colocated: The engines' workers are on this host.

    Raises:
        Unsupported: the trainer yields no whole tensors, or torch's default group, over which trainers gather, has other ranks.
    """
    if isinstance(trainer, PackedSource):
        return trainer
    if hasattr(trainer, "stream"):
        stream: WeightStream = trainer.stream()
    elif _is_stream(trainer):
        stream = trainer
    else:
        raise Unsupported(
            f"the packed route cannot read a {type(trainer).__name__}",
            ["give a MegatronTrainer, a TensorTrainer, or an object like xfer.packed.source.WeightStream"],
        )
    here, there = (stream.rank, stream.world), agree.ranks()
    if here != there:
        raise Unsupported(
            "the packed route gathers over torch.distributed's default group, which differs from these trainers",
            [f"trainer {here[0]} of {here[1]} is rank {there[0]} of {there[1]} there; use the direct route"],
        )
    return PackedSource(stream, limit, colocated)
