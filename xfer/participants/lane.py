"""A lane: one rank's part in one replica, on a thread of its own. The same for trainers and workers, whatever the route.

    PlanInputs -> Planned      OpenLink -> LinkOpen      Go -> Done      CloseRoutes -> RoutesClosed      or Failed

A trainer has a lane per replica, so that a replica that hangs or dies delays no other one. A worker has one lane. A lane
decides nothing: it gives each message to its `DataPlane`, sends the answer, and stops when it is told to (`cancel`).
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence

import torch

from xfer.coordinator import messages as m
from xfer.ending import wait_for_all
from xfer.errors import PeerLost, PlanMismatch, XferError
from xfer.participants import faults
from xfer.participants.data_plane import DataPlane, PlanFacts, Stop
from xfer.participants.timeline import mark
from xfer.participants.turns import short_sleeps
from xfer.plan.explain import size
from xfer.rendezvous.client import RendezvousClient

logger = logging.getLogger("xfer")
PROGRESS_S = 0.5
"""Seconds between two progress messages of a running transfer."""
GO_GRACE_S = 2.0
"""Seconds beyond a refit's deadline in which a transfer goes on: the coordinator's own deadline comes first, since it
knows which rank is late."""
LOOK_S = 0.05
"""Seconds between two looks at whether stopped work has left the device."""


_running: weakref.WeakSet[Lane] = weakref.WeakSet()
os.register_at_fork(
    after_in_child=_running.clear
)  # a forked process has no such threads, and the links are its parent's


@atexit.register
def _stop_all() -> None:
    """Ends the lanes of a process that exits without closing its session."""
    lanes = list(_running)
    for lane in lanes:
        lane.stop()
    wait_for_all(lane.join for lane in lanes)


_UNMAP = object()
"""To the lane's thread: unmap, once what runs has ended."""


class Lane:
    """One rank's part in one replica. All methods may be called from any thread."""

    def __init__(
        self, party: RendezvousClient, role: str, index: int, device: torch.device, replica: int, plane: DataPlane
    ):
        self.party, self.replica, self.plane = party, replica, plane
        self._role, self._index, self._device = role, index, device
        self.done_attempt = 0
        self.go_attempt = 0  # the last attempt that a Go came for
        self.read_attempt = 0  # the last of those in which destinations read this rank's storages by themselves
        self._go_epoch = 0
        self._given_up: tuple[int, XferError | None] = 0, None  # the last attempt that must not begin any more, and why
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._idle, self._still = threading.Event(), threading.Event()  # nothing runs; no refit runs
        self._moves = 0  # number of Go messages that wait or run
        self._idle.set()
        self._still.set()
        self._ended = False
        self._epoch, self._stop = 0, Stop()  # of the newest message
        self._now = self._stop  # of the message that runs
        self._deadline_s = 0.0  # of planning and linking, as the coordinator says with the plan
        self._planned_s = 0.0  # seconds that the last plan took
        self._logged = ""  # digest of the plan that was logged last
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"xfer-lane-{replica}", daemon=True)
        self._thread.start()
        _running.add(self)

    # ---- from other threads

    @property
    def facts(self) -> PlanFacts | None:
        return self.plane.facts

    def post(self, message: m.Message) -> None:
        with self._lock:
            if self._ended:
                return  # no thread would make it idle again
            self._idle.clear()
            if isinstance(message, m.PlanInputs | m.OpenLink) and message.epoch != self._epoch:
                # What still runs of the old epoch must not take the new one's Stop for leave to go on.
                self._stop.error = self._stop.error or PeerLost(f"replica {self.replica}: another epoch has begun")
                self._epoch, self._stop = message.epoch, Stop()
            if isinstance(message, m.Go):
                self.plane.expect(message)
                self._moves += 1
                self._still.clear()
                self.go_attempt, self._go_epoch = message.attempt, self._epoch
                if self.plane.read_by_others:
                    self.read_attempt = message.attempt
            # Inside the lock, or the lane could call itself idle in between.
            self._queue.put((message, self._stop, self._stop.stopped()))

    def part_ready(self, ready: m.PartReady) -> None:
        self.plane.part_ready(ready)

    def cancel(self, error: XferError, epoch: int | None) -> None:
        """Stop what runs, and free a blocked transfer. `epoch` None: whatever the epoch."""
        with self._lock:
            if epoch is not None and epoch < self._epoch:
                return
            self._stop.error = error
            self._unmap_next()
        self.plane.stop()

    def give_up(self, attempt: int, error: XferError) -> bool:
        """Begin nothing of this attempt any more, and stop what has begun, without telling anybody.

        A plan or a link goes on: it may be of a replica that joins, whose processes wait for it.

        Returns:
            Whether the attempt had begun here.
        """
        with self._lock:
            self._given_up, began, epoch = (attempt, error), self.go_attempt >= attempt, self._go_epoch
        if began:
            self.cancel(error, epoch)  # a newer epoch has stopped what began already
        return began

    def let_go(self) -> None:
        """Nothing will move any more: a worker unmaps the trainers' storages once what runs has ended."""
        with self._lock:
            self._unmap_next()

    def _unmap_next(self) -> None:
        """A worker's mappings may be memory of a process that is gone, whose successor needs it."""
        if self._role == "worker" and not self._ended:
            self._idle.clear()
            self._queue.put((_UNMAP, self._stop, False))

    def wait_idle(self, seconds: float, moved: bool = False) -> bool:
        """Whether, within `seconds`, nothing of the lane runs any more: it reads and writes no byte, except by a pull that
        did not leave the device (`drained`).

        Args:
            moved: Wait only for what refits began. A plan or link of an engine that joins reads nothing and may take long.
        """
        until = time.monotonic() + seconds
        if not (self._still if moved else self._idle).wait(seconds):
            return False
        return self.plane.wait_still(max(0.0, until - time.monotonic()))

    @property
    def free_attempt(self) -> int:
        """The last attempt that went through and in which nobody reads this rank's storages any more."""
        done = self.done_attempt  # the present routes may be another engine's
        return min(done, self.party.drained.get(self.replica, 0)) if self.read_attempt >= done else done

    @property
    def gave_up(self) -> bool:
        """Whether it was told to stop, perhaps by this rank alone: the coordinator does not know then that the link broke."""
        return self._stop.stopped()

    def close(self) -> None:
        self.stop()
        self.join(5.0)
        self.plane.close()

    def stop(self) -> None:
        """Free what blocks; the thread ends after that."""
        closed = PeerLost("closed")
        self.cancel(closed, None)
        with self._lock:
            self._stop.error = self._stop.error or closed  # of an epoch that began since
            self._ended = True
            self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(timeout=seconds)

    # ---- the lane's own thread

    def _work(self) -> None:
        short_sleeps()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is a property of the thread
        while True:
            item = self._queue.get()
            if item is None:
                self._idle.set()
                self._still.set()
                return
            message, self._now, refused = item
            try:
                with torch.no_grad():
                    self._handle(message)
            except Exception as e:
                self._failed(message, e, refused)
            finally:
                with self._lock:
                    self._moves -= isinstance(message, m.Go)
                    if not self._moves:
                        self._still.set()
                    if self._queue.empty():
                        self._idle.set()
                self.party.stirred()

    def _handle(self, message: object) -> None:
        if isinstance(message, m.PlanInputs):
            self._plan(message)
        elif isinstance(message, m.OpenLink):
            self._open(message)
        elif isinstance(message, m.Go):
            self._go(message)
        elif isinstance(message, m.CloseRoutes):
            self._close_routes()
        elif message is _UNMAP:
            self.plane.unmap()

    def _failed(self, message: object, e: Exception, refused: bool) -> None:
        """Tell the coordinator, unless it knows: it cancels by an error of its own. `refused`: cancelled before it was queued."""
        go, cancelled = isinstance(message, m.Go), self._now.error
        own = go and e is not cancelled and not isinstance(e, PeerLost)  # a PeerLost may be another rank's fault
        if cancelled is None or go and (refused or own):
            error = m.WireError.of(e if own else cancelled or e, self.party.label)
            at = getattr(message, "attempt", 0), self.replica, getattr(message, "epoch", 0)
            self.party.try_send(m.Failed(error, *at))

    def _plan(self, inputs: m.PlanInputs) -> None:
        faults.point(self._role, self._index, "plan")
        began = time.perf_counter()
        self._deadline_s = inputs.deadline_s
        facts = self.plane.make_plan(inputs, self._now)
        self._planned_s = time.perf_counter() - began
        digest = facts.digest
        if faults.wants(self._role, self._index, "digest"):
            digest = digest[::-1]
        self._now.check()
        moved = facts.bytes_in, facts.bytes_out
        self.party.send(m.Planned(self.replica, inputs.epoch, digest, self._planned_s, *moved))

    def _open(self, order: m.OpenLink) -> None:
        faults.point(self._role, self._index, "link")
        began = time.perf_counter()
        self._planned()
        answer = self.plane.open(order, self._now)
        self._now.check()
        self.party.send(answer)
        self.plane.agreed()
        self._log_planned(self._planned_s + time.perf_counter() - began)

    def _log_planned(self, seconds: float) -> None:
        """Once for each plan, on trainer 0."""
        facts = self._planned()
        if self._role == "trainer" and self._index == 0 and self._logged != facts.digest:
            self._logged = facts.digest
            logger.info(
                "xfer: replica %d planned: %s a refit, %.0f %% direct, in %.2f s",
                self.replica, size(facts.nbytes), 100 * facts.direct_share, seconds,
            )  # fmt: skip

    def _go(self, go: m.Go) -> None:
        until, said, planned = time.monotonic() + go.deadline_s + GO_GRACE_S, time.monotonic(), self._planned()
        nbytes, stop = planned.bytes_in + planned.bytes_out, self._now
        if go.attempt <= self._given_up[0]:
            stop = Stop()
            stop.error = self._given_up[1]

        def progress(wave: int, done: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= PROGRESS_S:
                said = now
                self.party.try_send(m.Progress(self.replica, go.attempt, "moving", wave, done, nbytes))

        mark(self.party.label, "go")
        moved = self.plane.run(go, stop, until, progress)
        faults.point(self._role, self._index, "done")
        self._now.check()
        mark(self.party.label, "done")
        self.party.done(go.attempt, moved)
        self.done_attempt = go.attempt

    def _planned(self) -> PlanFacts:
        if self.facts is None:
            raise PlanMismatch("the coordinator asked for a link or a refit before a plan", where=self.party.label)
        return self.facts

    def _close_routes(self) -> None:
        self.plane.close_routes()
        while not self.plane.unmapped:  # what is being read stays mapped, and nobody is told otherwise
            if self._ended or self._now is not self._stop:
                return  # routes are opened anew; whoever still wants them closed asks again
            time.sleep(LOOK_S)
        self.party.send(m.RoutesClosed(self.replica))


def labels_of(trainers: Sequence[int], replica: int, workers: int) -> tuple[str, ...]:
    """Names of a domain's ranks: these trainers, then the workers of one replica."""
    return (*(f"trainer {i}" for i in trainers), *(f"replica {replica} worker {i}" for i in range(workers)))
