"""The interfaces between a session and a route. The direct route and the packed route are two implementations.

    TrainerSide   one per trainer session: what this rank offers to every replica
    WorkerSide    one per worker session (participants/worker.py): what this worker takes
    DataPlane     one per lane, made by a side: plan, open and run one replica's transfers

The session speaks the protocol (messages, phases, deadlines). The route moves bytes. Neither looks inside the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from xfer.coordinator import messages as m
from xfer.errors import XferError
from xfer.trace.catalog import Catalog
from xfer.trace.traced import TrainerLayout

if TYPE_CHECKING:
    from xfer.rendezvous.client import RendezvousClient


class Stop:
    """Tells running work to end. One per epoch of a lane; set from any thread."""

    def __init__(self) -> None:
        self.error: XferError | None = None

    def stopped(self) -> bool:
        return self.error is not None

    def check(self) -> None:
        """Raises the error that the work was stopped with, if it was."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What a session has to know of a plan. Bytes are those of one refit.

    Attributes:
        digest: Equal on all ranks of the replica's domain, or nothing moves.
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
    """What a trainer rank tells of its bytes when it is ready; see `Ready` in coordinator/messages.py."""

    sample: bytes = b""
    sends: bool = True
    unsent: tuple[str, ...] = ()


Progress = Callable[[int, int], None]
"""Called with (wave or bucket, bytes so far) while bytes move."""


class DataPlane(Protocol):
    """One rank's transfers to or from one replica.

    `make_plan`, `open`, `run` and `close_routes` run one at a time, on the lane's thread; `stop`, `expect` and
    `part_ready` may come from other threads. All but `stop` and `expect` may block, and raise what `stop` was set with.
    """

    facts: PlanFacts | None
    """Of the last plan; None before the first."""

    @property
    def extra_bytes(self) -> int:
        """Bytes of buffers that this plane holds beside the model."""

    @property
    def read_by_others(self) -> bool:
        """Whether destinations read this rank's storages by themselves over the present routes."""

    @property
    def drained(self) -> bool:
        """False while work of this rank that was stopped may go on reading or writing on the device."""

    @property
    def unmapped(self) -> bool:
        """Whether all that `unmap` was called for is unmapped."""

    def make_plan(self, inputs: m.PlanInputs, stop: Stop) -> PlanFacts:
        """Plan this rank's part. Closes the link of the plan before."""

    def open(self, order: m.OpenLink, stop: Stop) -> m.LinkOpen:
        """Open the link of an epoch and the routes over it. Collective over the domain. Returns the answer to `order`."""

    def agreed(self) -> None:
        """All ranks have the same plan, and the link is open: the plan may be kept for later runs."""

    def expect(self, go: m.Go) -> None:
        """A `Go` has arrived. Called in the order of arrival, which is the same on all ranks, before `run`."""

    def run(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        """Move the bytes of one refit by monotonic time `until`. Returns what to tell with `Done`."""

    def part_ready(self, ready: m.PartReady) -> None:
        """The worker before this one in a relay chain has these parts."""

    def stop(self) -> None:
        """Free whatever blocks in `open` or `run`. Returns at once."""

    def wait_still(self, seconds: float) -> bool:
        """Whether, within `seconds`, nothing of this rank is read or written by an aborted link or a gather any more."""

    def unmap(self) -> None:
        """Let go of what this rank has mapped of others. What still reads stays mapped until it has ended: see `drained`."""

    def close_routes(self) -> None:
        """As `unmap`, on the coordinator's order, which trainers wait for."""

    def forget(self) -> None:
        """Let go of this rank's own storages. Only while idle, after every destination has unmapped them."""

    def close(self) -> None:
        """Close link and routes."""

    def moved(self) -> bool:
        """Whether the routes were opened for storages that lie elsewhere now. Then all ranks open them again."""

    def explain(self) -> str:
        """What goes which way, for a person to read."""


class TrainerSide(Protocol):
    """What one trainer rank offers. Calls come from the thread that is in the session's call, but for `plane`."""

    inventory: bytes
    """Digest of this rank's layout as the coordinator is to know it; empty before the first `read`."""

    def read(self, catalog: Catalog, layout: TrainerLayout) -> None:
        """Take over a layout that was read, under a catalog; sets `inventory`."""

    def forget_layout(self) -> None:
        """The layout changed and the catalog does not fit it yet: nothing can be read from this rank until `read`."""

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same layout lies at other addresses."""

    def plane(self, replica: int) -> DataPlane:
        """A new data plane to one replica."""

    def wait_still(self, seconds: float) -> bool:
        """Whether, within `seconds`, no earlier refit reads what the next call is about to look at."""

    def news(self, committed: bool) -> News:
        """What to tell with `Ready`, read from storages that hold the version. `committed`: the session has a version."""

    def begin_sums(self, attempt: int, idle: Iterable[int]) -> None:
        """Begin this attempt's checksums on the current stream. `idle`: replicas whose lanes run nothing."""

    def warn(self, lines: Sequence[str]) -> tuple[str, ...]:
        """`lines` of an error, preceded by what the caller must not do while something of a failed refit goes on."""

    def keep_alive(self) -> None:
        """Somebody may still read this rank's storages: they must not be freed, whatever the trainer drops."""

    def let_go_kept(self) -> None:
        """Free what `keep_alive` kept."""

    def release(self) -> None:
        """Hold none of the trainer's storages until the next `read` or `rebind`."""

    def close(self) -> None:
        """Wait until the device reads nothing for this side any more."""


NewTrainerSide = Callable[["RendezvousClient"], TrainerSide]
"""Makes a trainer's side once its session is connected."""
