"""A trainer of the packed route, as a session sees it: what it exports, whether that is still so, and one gather of it.

`PackedSource` wraps a `WeightStream`, which is a framework's half (megatron.py, tensors.py). It keeps the bucket plan and knows
when it and the framework's own task objects are stale: whatever `check` finds changed on any rank is rebuilt on all ranks
at the beginning of the next gather.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from xfer.errors import Unsupported
from xfer.packed import agree
from xfer.packed.plan import ALIGN, BucketPlan, GatherGroup, TaskSize, make_plan
from xfer.packed.wire import PackedMessage
from xfer.trace.fragment import TensorSpec
from xfer.trace.traced import Traced, TrainerLayout


class WeightStream(Protocol):
    """What a trainer framework gives. Methods marked collective are called by all trainer ranks in step."""

    rank: int
    world: int
    device: torch.device

    def drain(self) -> None: ...

    def read(self) -> tuple[TensorSpec, ...]:
        """Checkpoint tensors of which this rank holds a part, by name. No collective."""

    def check(self) -> str:
        """ "same", "moved" or "changed" since `read` or the last `check`; RebindError for tensors without bytes."""

    def build(self) -> tuple[TaskSize, ...]:
        """Collective. Task objects made anew; what each of them exports, the same on all ranks."""

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. What the tasks of one group export, whole, in the plan's order. On ranks that do not assemble
        tensors may be None."""


class WritingStream(WeightStream, Protocol):
    """A stream that puts messages together where they are sent from (tensors.py), where `writes` is true."""

    writes: bool
    assembles: bool
    round_bytes: int

    def prepare(self, plan: BucketPlan, buffer: Callable[[int, PackedMessage], torch.Tensor] | None) -> None: ...
    def place(self, message: PackedMessage, data: torch.Tensor | None) -> None: ...
    def forget(self) -> None: ...


BESIDE = 8
"""Streams that write into buffers leave this part of a bucket for what they need beside it (tables, what arrives from
other ranks), so that two buffers and all of that are no more than two buckets."""


class PackedSource:
    """See `Source` in participants/trainer.py. `limit`: bytes of a message; `packed` False: one message per tensor. `colocated`: the
    engines' workers are on this host and map the buffers instead of receiving them (shared.py)."""

    reads_together = False

    def __init__(self, stream: WeightStream, limit: int, packed: bool = True, colocated: bool = False):
        self.stream, self.limit, self.packed, self.colocated = stream, limit, packed, colocated
        self.rank, self.world, self.device = stream.rank, stream.world, stream.device
        self.plan: BucketPlan | None = None
        self.built = 0  # how often tasks were made anew
        self.agreed_s = self.built_s = 0.0  # seconds of the last gather's check, and of rebuilding in it
        self._stale = True
        self._looking = threading.Lock()  # lanes let go of what another rank releases, while this rank's caller looks
        if hasattr(stream, "round_bytes"):
            stream.round_bytes = max(1 << 20, limit // (2 * BESIDE))  # twice, and tables have as much again
        if colocated and hasattr(stream, "programs"):
            stream.programs = None  # nobody broadcasts

    @property
    def writes(self) -> bool:
        """Whether messages are put together by `place`, after a gather has begun; else `tensors` gives what to pack."""
        return getattr(self.stream, "writes", False)

    @property
    def way(self) -> str:
        """How the last gather brought tensors together; "" before the first."""
        if self.plan is None:
            return ""
        if not self.writes:
            return "exported whole by the trainers' framework"
        pulled = getattr(self.stream, "pulls", False)
        return (
            "put together by copies out of the trainers' storages"
            if pulled
            else "put together from what trainers send in rounds"
        )

    def assemble(self, whole: bool) -> None:
        """Whether this rank needs whole tensors; all ranks say so before a gather."""
        if getattr(self.stream, "assembles", whole) != whole:
            self.stream.assembles, self._stale = whole, True

    def drain(self) -> None:
        self.stream.drain()

    def read(self) -> TrainerLayout:
        """Names only: no storage is read in place."""
        with self._looking:
            self._stale = True
            specs = tuple(sorted(self.stream.read()))
            return TrainerLayout(Traced(specs, ()), (), {}, getattr(self.stream, "trained", frozenset()))

    def check(self) -> str:
        """Task objects are stale from the first call on that is not "same", until a gather has made new ones."""
        try:
            with self._looking:
                state = self.stream.check()
        except BaseException:
            self._stale = True
            raise
        if state != "same":  # never written back from what it was: a gather may have begun meanwhile
            self._stale = True
        return state

    def rebind(self) -> Mapping[str, torch.Tensor]:
        return {}

    def compute(self, meet: Callable[[tuple[int, ...], str], None]) -> None:
        """Nothing: what is computed is computed while tensors are gathered."""

    # ---- one gather; collective over the trainer ranks

    def begin(self) -> BucketPlan:
        """The one check of all ranks: tasks and plan are kept if they are fresh on every rank, else made anew on all."""
        began = time.perf_counter()
        old = self.plan.fingerprint if self.plan is not None else b""
        stale = agree.any_rank(self._stale, old, self.device)
        self.agreed_s, self.built_s = time.perf_counter() - began, 0.0
        if stale:
            began = time.perf_counter()
            self._stale = (
                False  # before tasks are made: a look that comes meanwhile is of something newer than they are
            )
            try:
                tasks = self.stream.build()
                longest = max(ALIGN, self.limit - self.limit // BESIDE) if self.writes else self.limit
                self.plan = make_plan(tasks, longest, packed=self.packed)
                agree.any_rank(False, self.plan.fingerprint, self.device)
            except BaseException:
                self._stale = True
                raise
            self.built += 1
            self.built_s = time.perf_counter() - began
        return self.plan

    def doubt(self) -> None:
        """A gather failed here, perhaps of something that no look can see: the next one makes tasks and plan anew."""
        self._stale = True

    def go_on(self, stop: bool) -> bool:
        """Between two groups: whether no rank has to stop. All ranks stop at the same group."""
        return not agree.any_rank(stop, self.plan.fingerprint, self.device)

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        """Where it does not come to its end, the framework may have kept a part of the group, which must not get into the next gather
        (Bridge: experts that wait to be stacked)."""
        whole = False
        try:
            yield from self.stream.tensors(group)
            whole = True
        finally:
            if not whole:
                self.doubt()

    def prepare(self, buffer: Callable[[int, PackedMessage], torch.Tensor] | None) -> None:
        """See WritingStream; once per gather, before its first message."""
        self.stream.prepare(self.plan, buffer)

    def place(self, message: PackedMessage, data: torch.Tensor | None) -> None:
        self.stream.place(message, data)

    def forget(self) -> None:
        """Lets go of storages and buffers; the next gather begins anew."""
        with self._looking:
            self._stale = True
            if hasattr(self.stream, "forget"):
                self.stream.forget()

    def let_go(self) -> None:
        """As `forget`, also where no replica has come yet."""
        self.forget()


def packed_source(trainer: object, limit: int, packed: bool = True, colocated: bool = False) -> PackedSource:
    """For the source that a caller gave to `connect`. Unsupported for kinds that give no whole tensors, and where the trainers
    are not torch's default group, over which they gather."""
    if isinstance(trainer, PackedSource):
        return trainer
    if hasattr(trainer, "stream"):
        stream: WeightStream = trainer.stream()
    elif all(hasattr(trainer, name) for name in ("read", "check", "build", "tensors", "drain")):
        stream = trainer
    else:
        raise Unsupported(
            f"the packed route cannot read a {type(trainer).__name__}",
            ["give a MegatronTrainer, a TensorTrainer, or an object like xfer.packed.source.Stream"],
        )
    here, there = (stream.rank, stream.world), agree.ranks()
    if here != there:
        raise Unsupported(
            "the packed route gathers over the default group of torch.distributed, which is not these trainers",
            [f"trainer {here[0]} of {here[1]}: rank {there[0]} of {there[1]} there; use the direct route"],
        )
    return PackedSource(stream, limit, packed, colocated)
