"""The interfaces between a session and a route. The direct route and the packed route are two implementations.

    TrainerSide   one per trainer session: this rank's storages, for all replicas
    WorkerSide    one per worker session (participants/worker.py): this worker's storages
    DataPlane     one per lane, made by a side: plan, open and run one replica's transfers

The session speaks the protocol (messages, phases, deadlines). The route moves bytes. Neither looks inside the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from xfer.coordinator import messages as m
from xfer.errors import XferError
from xfer.trace.catalog import Catalog
from xfer.trace.traced import TrainerLayout

if TYPE_CHECKING:
    from xfer.rendezvous.client import RendezvousClient


class Change(str, Enum):
    """What an adapter's `check` found since its last look: nothing, the same layout at other addresses, or another layout."""

    SAME = "same"
    MOVED = "moved"
    CHANGED = "changed"


@dataclass(eq=False)
class Stop:
    """Tells running work to end. One per epoch of a lane; set from any thread.

    Attributes:
        error: The reason to stop; None: continue.
    """

    error: XferError | None = None

    def stopped(self) -> bool:
        """Whether the work has to stop."""
        return self.error is not None

    def check(self) -> None:
        """Raise the error, if the work has to stop."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Facts of a plan that a session needs. Bytes are those of one refit.

    Attributes:
        digest: Must be equal on all ranks of the replica's domain; else nothing moves.
        labels: Names of all ranks of the domain: trainers, then the replica's workers.
        bytes_in: Bytes that this rank receives or reads.
        bytes_out: Bytes that this rank sends, or that others read from it.
        nbytes: Bytes that the whole replica receives.
        broadcast_bytes: Bytes that the replica would receive if every worker got every tensor whole.
        direct_share: Share of `nbytes`, 0 to 1, that needs no copy between wire and storage.
        kept_bytes: Bytes of the engine that no checkpoint tensor fills.
    """

    digest: str
    labels: tuple[str, ...]
    bytes_in: int
    bytes_out: int
    nbytes: int
    broadcast_bytes: int
    direct_share: float = 0.0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Facts about a trainer rank's bytes that it sends with `Ready` (coordinator/messages.py has the fields)."""

    sample: bytes = b""
    sends: bool = True
    unsent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartialBlocks:
    """Blocks of which this rank has a part and others have the rest, as `Measured` tells them (coordinator/messages.py)."""

    numbers: bytes
    largest: bytes


Progress = Callable[[int, int], None]
"""Called with (wave or bucket, bytes so far) while bytes move."""


class DataPlane(Protocol):
    """One rank's transfers to or from one replica.

    `make_plan`, `open`, `run` and `close_routes` run one at a time, on the lane's thread; other threads may call `stop`,
    `expect` and `part_ready`. All but `stop` and `expect` may block. A stopped call raises the error of its `Stop`.

    Attributes:
        facts: Facts of the last plan; None before the first.
    """

    facts: PlanFacts | None

    @property
    def extra_bytes(self) -> int:
        """Bytes of buffers that this plane holds beside the model's weights."""

    @property
    def read_by_others(self) -> bool:
        """Whether destinations pull from this rank's storages over the present routes."""

    @property
    def drained(self) -> bool:
        """False while stopped work of this rank may still read or write on the device."""

    @property
    def unmapped(self) -> bool:
        """Whether nothing is mapped any more after `unmap`."""

    def cut_off(self) -> bool:
        """Make destinations unable to read this rank's storages, if the route allows that; routes must then be opened again. Returns
        whether no destination can read them any more."""

    def make_plan(self, inputs: m.PlanInputs, stop: Stop) -> PlanFacts:
        """Plan this rank's part. Closes the link of the previous plan."""

    def open(self, order: m.OpenLink, stop: Stop) -> m.LinkOpen:
        """Open the link of an epoch and the routes over it, and return the answer to `order`. Collective over the domain."""

    def agreed(self) -> None:
        """Note that all ranks have the same plan and the link is open. The plan may be cached for later runs."""

    def expect(self, go: m.Go) -> None:
        """Note that a `Go` has arrived. Called before `run`, in the order of arrival, which is the same on all ranks."""

    def run(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        """Move the bytes of one refit: do what `go.kind` says.

        Args:
            go: The order; its attempt and options.
            stop: Set when the transfer has to end.
            until: Monotonic time of the deadline.
            progress: Is called with (wave or bucket, bytes so far) while bytes move.

        Returns:
            The facts to send with `Done`.
        """

    def holds(self, attempt: int, base: int) -> bool:
        """Whether all bytes of this attempt are in scratch here, and fit this worker's storages as they are now.

        Args:
            attempt: Number of the attempt.
            base: The refit by changes whose bytes this worker's storages hold; 0: none.
        """

    def looked(self, attempt: int) -> bool:
        """Whether all bytes of this attempt are in scratch here, and this worker's storages were unchanged when the last byte arrived.
        A whole look at them follows before this attempt's `Done`."""

    def part_ready(self, ready: m.PartReady) -> None:
        """Note that the workers from which this one reads have these parts."""

    def stop(self) -> None:
        """Free a blocked `open` or `run`. Returns at once."""

    def wait_still(self, seconds: float) -> bool:
        """Wait up to `seconds` until no aborted link and no gather uses this rank's storages. Returns whether that is so."""

    def unmap(self) -> None:
        """Unmap the storages of other ranks. Storages that a pull still reads stay mapped until it has ended (`drained`)."""

    def close_routes(self) -> None:
        """Unmap as `unmap` does, on the coordinator's order. Trainers wait for it."""

    def forget(self) -> None:
        """Drop the references to this rank's own storages. Called only while idle, after every destination has unmapped
        them."""

    def close(self) -> None:
        """Close link and routes."""

    def moved(self) -> bool:
        """Whether storages have other addresses than when the routes were opened. All ranks then open them again."""

    def explain(self) -> str:
        """Describe which bytes take which route, for a person to read."""


class TrainerSide(Protocol):
    """One trainer rank's part of a route. The thread in the session's call makes all calls, except of `plane`.

    Attributes:
        inventory: Digest of this rank's layout, for the coordinator; empty before the first `read`.
        scratch_bytes: Bytes that `quantize` fills, held as long as the layout is used, and those that `remember` needs.
        rules: Names of the rules by which it quantizes (kernels/quantize.py), and of those of weights that it has quantized already; ()
            if engines take no quantized weights.
    """

    inventory: bytes

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def rules(self) -> tuple[str, ...]: ...

    def read(self, catalog: Catalog, layout: TrainerLayout) -> None:
        """Take a layout under a catalog, and set `inventory`."""

    def measure(self, until: float) -> PartialBlocks | None:
        """Measure the blocks of which this rank has only a part, in storages that hold the new weights.

        Args:
            until: Monotonic time until which a GPU may take.

        Returns:
            None if it has whole blocks only.
        """

    def quantize(self, largest: bytes = b"") -> None:
        """Bring the quantized form of the weights up to date, from storages that hold the new ones. On GPUs the current stream does
        it, and this returns before it has; engines may read the result when it has.

        Args:
            largest: The largest values of the blocks that `measure` returned, over all ranks.
        """

    def explain(self) -> str:
        """Describe what `quantize` does, for a person to read; empty if it does nothing."""

    def forget_layout(self) -> None:
        """Forget the layout, which does not fit the catalog: nothing can be read from this rank until `read`."""

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors of the same layout, which have other addresses."""

    def plane(self, replica: int) -> DataPlane:
        """Make a data plane to one replica."""

    def wait_still(self, seconds: float) -> bool:
        """Wait up to `seconds` until no earlier refit reads the storages that the next call checks. Returns whether that is
        so."""

    def news(self, committed: bool) -> News:
        """Return the facts to send with `Ready`, from storages that hold the new weights.

        Args:
            committed: Whether the session has committed a version before.
        """

    def begin_sums(self, attempt: int, idle: Iterable[int]) -> None:
        """Begin this attempt's checksums on the current stream.

        Args:
            attempt: Number of the attempt.
            idle: Replicas whose lanes run nothing.
        """

    def compare(self) -> None:
        """Find out what has changed since the bytes that `remember` kept last, from storages that hold the new weights; on GPUs on
        the current stream."""

    def remember(self, attempt: int) -> None:
        """Keep the bytes that this attempt sent, so that a later one can send what has changed since. Called while the storages
        still hold them and nothing reads them."""

    def warn(self, lines: Sequence[str]) -> tuple[str, ...]:
        """Return the `lines` of an error, after lines that say what the caller must not do while a failed refit still runs."""

    def keep_alive(self) -> None:
        """Keep this rank's storages allocated, even if the trainer drops them: a worker may still read them."""

    def let_go_kept(self) -> None:
        """Free the storages of `keep_alive`."""

    def release(self) -> None:
        """Drop all references to the trainer's storages until the next `read` or `rebind`."""

    def close(self) -> None:
        """Wait until the device reads nothing for this side."""


NewTrainerSide = Callable[["RendezvousClient"], TrainerSide]
"""Makes a trainer's side once its session is connected."""
