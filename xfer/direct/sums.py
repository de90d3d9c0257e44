"""Checksums of the bytes that a trainer rank sends to its replicas. One object covers one binding of the storages.

On a GPU the sums begin before the rank is ready, while the engines still pause. If they ran beside the pull on a GPU that trainer and
engine share, they would take memory bandwidth from it. kernels/checksum.py defines the checksum; early.py and worker.py compute the
destination's; holders.py explains the digests of shared boxes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from xfer.direct.holders import SharedSums
from xfer.kernels.checksum import Sums
from xfer.plan.part import PlanPart
from xfer.plan.subplan import spans


class _Reading:
    """Sums that can begin ahead of their use, for one attempt."""

    def __init__(self, sums: Sums, device: torch.device):
        self.sums, self._device = sums, device
        self._begun: tuple[int, torch.cuda.Event] | None = None  # the attempt, and the event after its sums

    def begin(self, attempt: int) -> None:
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._begun is not None:
            stream.wait_event(self._begun[1])  # an earlier attempt did not ask for its sums; both write the same words
        self.sums.begin()
        self._begun = attempt, stream.record_event()

    def values(self, attempt: int) -> list[int]:
        begun, self._begun = self._begun, None
        if begun is not None:
            torch.cuda.current_stream(self._device).wait_event(begun[1])
            if begun[0] == attempt:
                return self.sums.ended()
        return self.sums.values()

    def end(self) -> None:
        if self._begun is not None:
            self._begun[1].synchronize()
            self._begun = None


class _Shared:
    """Digests of one set of shared boxes, computed once per attempt for all replicas."""

    def __init__(self, sums: SharedSums, device: torch.device):
        self._sums, self._reading = sums, _Reading(sums.sums, device)
        self._lock, self._told = threading.Lock(), (0, b"")

    def begin(self, attempt: int) -> None:
        if self._lock.acquire(blocking=False):  # otherwise a lane still works on an earlier attempt
            try:
                self._reading.begin(attempt)
            finally:
                self._lock.release()

    def told(self, attempt: int) -> bytes:
        with self._lock:
            if self._told[0] != attempt:
                self._told = attempt, self._sums.told(self._reading.values(attempt))
            return self._told[1]

    def end(self) -> None:
        with self._lock:
            self._reading.end()


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """Sums of one plan.

    Attributes:
        plan: The plan.
        sent: Sums of the bytes sent, one per worker.
        shared: Digests of the boxes that other trainers hold too.
    """

    plan: PlanPart
    sent: _Reading
    shared: _Shared


class SourceSums:
    """Checksums of one trainer rank for all replicas.

    The thread that refits calls `begin`; a replica's lane calls `bind`, `values` and `shared`. They take turns, because `begin` leaves
    out lanes that are not idle. The thread that gives up the storages calls `end`, when no lane works with them.

    Args:
        index: This trainer rank.
        roots: Its storages, flat uint8.
        shapes: shapes[t] is the shape of checkpoint tensor t.
    """

    def __init__(self, index: int, roots: Sequence[torch.Tensor], shapes: np.ndarray | Sequence[Sequence[int]]):
        self._index, self._roots, self._shapes = index, roots, shapes
        self._device = roots[0].device if roots else torch.device("cpu")
        self._bound: dict[int, Bound] = {}
        self._binding = threading.Lock()

    @property
    def replicas(self) -> set[int]:
        """Replicas whose sums are bound."""
        return set(self._bound)

    def bind(self, replica: int, plan: PlanPart) -> Bound:
        """Prepare the sums of a replica, for all of its workers. Does all Python work per row and loads all kernels, once per plan."""
        held = self._bound.get(replica)
        if held is None or held.plan is not plan:
            rows = _sent(plan, self._index)
            worker = rows["dst"].astype(np.int64) - plan.trainers
            sent = Sums(rows, worker, plan.workers, self._roots, "src", self._shapes)
            with self._binding:  # replicas of one layout share a part
                held = self._bound[replica] = Bound(plan, _Reading(sent, self._device), self._shared_of(plan))
        return held

    def _shared_of(self, plan: PlanPart) -> _Shared:
        rows = plan.shared.tobytes()
        alike = (b.shared for b in self._bound.values() if b.plan.shared.tobytes() == rows)
        return next(alike, None) or _Shared(SharedSums(plan.shared, self._roots, self._shapes), self._device)

    def begin(self, plans: Mapping[int, PlanPart], attempt: int) -> None:
        """Begin the sums of `attempt` on the current stream, without waiting. The storages must not be written until `values`.

        Args:
            plans: Plan of each replica. Sums that are not bound do not begin, because binding takes long.
            attempt: The attempt.
        """
        bound = [b for replica, plan in plans.items() if (b := self._bound.get(replica)) is not None and b.plan is plan]
        for b in bound:
            b.sent.begin(attempt)
        for shared in dict.fromkeys(b.shared for b in bound):
            shared.begin(attempt)

    def values(self, replica: int, plan: PlanPart, attempt: int) -> list[int]:
        """Return one checksum per worker, 0 <= c < 2**64. Computes them now if `begin` did not begin them for this attempt."""
        return self.bind(replica, plan).sent.values(attempt)

    def shared(self, replica: int, plan: PlanPart, attempt: int) -> bytes:
        """Return the digests of the boxes that other trainers hold too (holders.py). Replicas of one layout share the computation."""
        return self.bind(replica, plan).shared.told(attempt)

    def end(self) -> None:
        """Wait until no sum reads the storages."""
        for b in list(self._bound.values()):
            b.sent.end()
            b.shared.end()


def _sent(plan: PlanPart, rank: int) -> np.ndarray:
    """Return the rows that a rank sends, once for each worker that gets their bytes, be it from another worker."""
    rows = plan.program.rows
    rows = rows[rows["src"] == rank]
    order = np.argsort(rows["common"], kind="stable")
    number, dst = plan.handed_on.T
    low, high = (np.searchsorted(rows["common"][order], number, side) for side in ("left", "right"))
    copy, at = spans(low, high)
    more = rows[order[at]]
    more["dst"] = dst[copy]
    return np.concatenate([rows, more])
