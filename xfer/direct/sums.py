"""Checksums of what a trainer rank owes its replicas, over one binding of its storages. A new binding gets a new object.

Where the device works by itself they begin before the rank is ready, while engines still pause: on a GPU that trainer and engine
share, a sum beside the pull would take memory's rate from it. Not here: what a checksum is (kernels/checksum.py), a taker's own
(early.py, worker.py), what digests of shared boxes are for (holders.py).
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


class _Reading:
    """Sums, and the attempt for which they were begun last."""

    def __init__(self, sums: Sums, device: torch.device):
        self.sums, self._device = sums, device
        self._begun: tuple[int, torch.cuda.Event] | None = None  # the attempt, and when its sums will have ended

    def begin(self, attempt: int) -> None:
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._begun is not None:
            stream.wait_event(self._begun[1])  # of an attempt that never asked: both write the same words
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
    """Digests of one set of shared boxes, taken once per attempt, whoever asks."""

    def __init__(self, sums: SharedSums, device: torch.device):
        self._sums, self._reading = sums, _Reading(sums.sums, device)
        self._lock, self._told = threading.Lock(), (0, b"")

    def begin(self, attempt: int) -> None:
        if self._lock.acquire(blocking=False):  # else a lane is still at an earlier attempt
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
    """Sums of one plan: `sent` by worker, `shared` over what other trainers hold too."""

    plan: PlanPart
    sent: _Reading
    shared: _Shared


class SourceSums:
    """index: this trainer rank. roots: its storages, flat uint8. shapes[t]: shape of canonical tensor t.

    `begin` is called by the thread that refits, `bind`, `values` and `shared` by a replica's lane; the two take turns, since a lane that
    is not idle is left out. `end` by who gives up the storages, when no lane works with them.
    """

    def __init__(self, index: int, roots: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]):
        self._index, self._roots, self._shapes = index, roots, shapes
        self._device = roots[0].device if roots else torch.device("cpu")
        self._bound: dict[int, Bound] = {}
        self._binding = threading.Lock()

    @property
    def replicas(self) -> set[int]:
        """Whose sums are bound."""
        return set(self._bound)

    def bind(self, replica: int, plan: PlanPart) -> Bound:
        """One reading for all workers of a replica. All Python per row, and all loading of kernels, happens here, once per plan."""
        held = self._bound.get(replica)
        if held is None or held.plan is not plan:
            rows = plan.program.rows
            rows = rows[rows["src"] == self._index]
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
        """Begins to read for `attempt`, on the current stream, and waits for nothing; nothing must write the storages until its
        `values`. plans: by replica. Only what is bound already begins: binding takes long."""
        bound = [b for replica, plan in plans.items() if (b := self._bound.get(replica)) is not None and b.plan is plan]
        for sums in dict.fromkeys([*(b.sent for b in bound), *(b.shared for b in bound)]):
            sums.begin(attempt)

    def values(self, replica: int, plan: PlanPart, attempt: int) -> list[int]:
        """By worker, 0 <= c < 2**64: what `begin` began for this attempt, or read now."""
        return self.bind(replica, plan).sent.values(attempt)

    def shared(self, replica: int, plan: PlanPart, attempt: int) -> bytes:
        """Digests of the boxes that other trainers hold too (holders.py), taken likewise; once per attempt for all replicas of one
        layout."""
        return self.bind(replica, plan).shared.told(attempt)

    def end(self) -> None:
        """Waits until nothing reads the storages for a sum any more."""
        for b in list(self._bound.values()):
            b.sent.end()
            b.shared.end()
