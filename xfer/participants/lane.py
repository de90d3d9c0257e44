"""A lane: one rank's part in one replica, on a thread of its own. It is the same for trainers and workers and for all routes.

    PlanInputs -> Planned      OpenLink -> LinkOpen      Go -> Done      CloseRoutes -> RoutesClosed      or Failed

A trainer has a lane per replica, so that a replica that hangs or dies delays no other replica. A worker has one lane, and one more for
each replica to which it gives first weights (coordinator/first_copy.py). A lane
decides nothing: it passes each message to its `DataPlane`, sends the answer, and stops on `cancel`.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.ending import wait_for_all
from xfer.errors import PeerLost, PlanMismatch, XferError
from xfer.participants.data_plane import DataPlane, PlanFacts, Stop
from xfer.plan.explain import size
from xfer.rendezvous.client import RendezvousClient
from xfer.timeline import mark, nvtx
from xfer.turns import short_sleeps

logger = logging.getLogger("xfer")
PROGRESS_S = 0.5
"""Seconds between two progress messages of a running transfer."""
GO_GRACE_S = 2.0
"""Seconds by which a transfer may outlast the refit's deadline: the coordinator gives up first, since it knows which rank is
late."""
LOOK_S = 0.05
"""Seconds between two checks whether stopped work has left the device."""


_running: weakref.WeakSet[Lane] = weakref.WeakSet()
# A forked process has none of these threads, and the links belong to its parent.
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _stop_all() -> None:
    """End the lanes of a process that exits without closing its session."""
    lanes = list(_running)
    for lane in lanes:
        lane.stop()
    wait_for_all(lane.join for lane in lanes)


_UNMAP = object()
"""Item for the lane's thread: unmap after the work before it."""


class Lane:
    """One rank's part in one replica. All methods may be called from any thread.

    Args:
        party: The rank's connection.
        role: "trainer", "worker", or "donor" for a worker that gives its weights to another replica.
        index: Trainer rank, or worker rank in its replica.
        device: Device of the weights.
        replica: Number of the replica that gets the weights.
        plane: Moves the bytes.
        may_open: Called before a link is opened. It returns when the link may be opened, and raises if the work has to stop.

    Attributes:
        done_attempt: The last attempt whose transfer has succeeded on this rank.
        go_attempt: The last attempt with a Go message.
        read_attempt: The last attempt in which destinations read this rank's storages by themselves.
    """

    def __init__(
        self,
        party: RendezvousClient,
        role: str,
        index: int,
        device: torch.device,
        replica: int,
        plane: DataPlane,
        may_open: Callable[[m.OpenLink, Stop], None] = lambda order, stop: None,
    ):
        self.party, self.replica, self.plane, self._may_open = party, replica, plane, may_open
        self._role, self._index, self._device = role, index, device
        self.done_attempt = 0
        self.go_attempt = 0
        self.read_attempt = 0
        self._go_epoch = 0
        self._given_up: tuple[int, XferError | None] = 0, None  # no attempt up to this one may begin, and why
        # (message or _UNMAP, its Stop, whether it was stopped before it was queued); None ends the thread.
        self._queue: queue.SimpleQueue[tuple[object, Stop, bool] | None] = queue.SimpleQueue()
        self._idle, self._still = threading.Event(), threading.Event()  # nothing runs; no refit runs
        self._moves = 0  # number of Go messages that wait or run
        self._idle.set()
        self._still.set()
        self._ended = False
        self._epoch, self._stop = 0, Stop()  # the newest epoch, and its Stop
        self._now = self._stop  # the Stop of the running message
        self._planned_s = 0.0  # seconds of the last planning
        self._logged = ""  # digest of the plan that was logged last
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"xfer-lane-{replica}", daemon=True)
        self._thread.start()
        _running.add(self)

    # ---- from other threads

    @property
    def facts(self) -> PlanFacts | None:
        """Facts of the last plan; None before the first."""
        return self.plane.facts

    def post(self, message: m.Message) -> None:
        """Queue a message for the lane's thread."""
        with self._lock:
            if self._ended:
                return  # no thread would set it idle again
            self._idle.clear()
            if isinstance(message, m.PlanInputs | m.OpenLink) and message.epoch != self._epoch:
                # Work of the old epoch that still runs must end, and not continue under the new epoch's Stop.
                self._stop.error = self._stop.error or PeerLost(f"replica {self.replica}: another epoch has begun")
                self._epoch, self._stop = message.epoch, Stop()
            if isinstance(message, m.Go):
                self.plane.expect(message)
                self._moves += 1
                self._still.clear()
                self.go_attempt, self._go_epoch = message.attempt, self._epoch
                if self.plane.read_by_others:
                    self.read_attempt = message.attempt
            # Inside the lock; otherwise the lane could set itself idle in between.
            self._queue.put((message, self._stop, self._stop.stopped()))

    def part_ready(self, ready: m.PartReady) -> None:
        """Pass on that the workers from which this one reads have some parts."""
        self.plane.part_ready(ready)

    def cancel(self, error: XferError, epoch: int | None) -> None:
        """Stop running work and free a blocked transfer.

        Args:
            error: The reason, which the work raises.
            epoch: Do nothing if a newer epoch has begun. None: stop the work of any epoch.
        """
        with self._lock:
            if epoch is not None and epoch < self._epoch:
                return
            self._stop.error = error
            self._unmap_next()
        self.plane.stop()

    def give_up(self, attempt: int, error: XferError) -> bool:
        """Begin no more work of this attempt, and stop the work that has begun. Sends nothing.

        Planning and linking continue: they may be for a replica that joins, whose processes wait for it.

        Args:
            attempt: Number of the attempt.
            error: The reason.

        Returns:
            Whether the attempt had begun on this lane.
        """
        with self._lock:
            self._given_up, began, epoch = (attempt, error), self.go_attempt >= attempt, self._go_epoch
        if began:
            self.cancel(error, epoch)  # if a newer epoch has begun, it has stopped this work
        return began

    def let_go(self) -> None:
        """Unmap the trainers' storages, on a worker, after running work has ended: no refit will follow."""
        with self._lock:
            self._unmap_next()

    def _unmap_next(self) -> None:
        """Queue an unmap on a worker: its mappings may hold memory of a dead process, which that process's successor needs."""
        if self._role == "worker" and not self._ended:
            self._idle.clear()
            self._queue.put((_UNMAP, self._stop, False))

    def wait_idle(self, seconds: float, moved: bool = False) -> bool:
        """Wait until the lane runs nothing. It then reads and writes no byte, except by a pull that has not left the device
        (`drained`).

        Args:
            seconds: How long to wait.
            moved: Wait only for work of refits. Planning and linking for an engine that joins reads nothing and may take long.

        Returns:
            Whether the lane became idle in time.
        """
        until = time.monotonic() + seconds
        if not (self._still if moved else self._idle).wait(seconds):
            return False
        return self.plane.wait_still(max(0.0, until - time.monotonic()))

    @property
    def free_attempt(self) -> int:
        """The last attempt that succeeded and whose destinations have finished reading this rank's storages."""
        done = self.done_attempt  # the present routes may belong to another engine
        return min(done, self.party.drained.get(self.replica, 0)) if self.read_attempt >= done else done

    @property
    def gave_up(self) -> bool:
        """Whether the lane was stopped. If this rank alone stopped it, the coordinator does not know that the link broke."""
        return self._stop.stopped()

    def close(self) -> None:
        """Stop the lane and close its plane."""
        self.stop()
        self.join(5.0)
        self.plane.close()

    def stop(self) -> None:
        """Free blocked work and end the thread."""
        closed = PeerLost("closed")
        self.cancel(closed, None)
        with self._lock:
            self._stop.error = self._stop.error or closed  # if a new epoch has begun since `cancel`
            self._ended = True
            self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
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
                if isinstance(message, m.Go) and message.kind is m.GoKind.STAGE:  # no `receive` runs that would say it
                    self.party.try_send(m.Stopped(self.replica, message.attempt, False, self.plane.drained))
                e.__traceback__ = e.__context__ = None  # a Stop keeps its error, whose frames have storages
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
            self.plane.close() if message.link else self._close_routes()
        elif message is _UNMAP:
            self.plane.unmap()

    def _failed(self, message: object, e: Exception, refused: bool) -> None:
        """Tell the coordinator of an error, unless it knows: when it cancels, it has sent the error itself.

        Args:
            message: The message that failed.
            e: Its error.
            refused: Whether the message was cancelled before it was queued.
        """
        go, cancelled = isinstance(message, m.Go), self._now.error
        own = go and e is not cancelled and not isinstance(e, PeerLost)  # a PeerLost may be another rank's fault
        if cancelled is None or go and (refused or own):
            error = m.WireError.of(e if own else cancelled or e, self.party.label)
            at = getattr(message, "attempt", 0), self.replica, getattr(message, "epoch", 0)
            self.party.try_send(m.Failed(error, *at))

    def _plan(self, inputs: m.PlanInputs) -> None:
        faults.point(self._role, self._index, "plan")
        began = time.perf_counter()
        facts = self.plane.make_plan(inputs, self._now)
        self._planned_s = time.perf_counter() - began
        digest = facts.digest
        if faults.wants(self._role, self._index, "digest"):
            digest = digest[::-1]
        self._now.check()
        self.party.send(m.Planned(self.replica, inputs.epoch, digest))

    def _open(self, order: m.OpenLink) -> None:
        faults.point(self._role, self._index, "link")
        began = time.perf_counter()
        self._planned()
        self._may_open(order, self._now)
        answer = self.plane.open(order, self._now)
        self._now.check()
        self.party.send(answer)
        self.plane.agreed()
        self._log_planned(self._planned_s + time.perf_counter() - began)

    def _log_planned(self, seconds: float) -> None:
        """Log each plan once, on trainer 0."""
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
            stop = Stop(self._given_up[1])

        def progress(wave: int, done: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= PROGRESS_S:
                said = now
                self.party.try_send(m.Progress(self.replica, go.attempt, wave, done, nbytes))

        mark(self.party.label, "go")
        of = f", replica {self.replica}" if self._role == "trainer" else ""
        with nvtx(f"move, {self.party.label}{of}"):
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
        while not self.plane.unmapped:  # storages that are still read stay mapped, and RoutesClosed waits for them
            if self._ended or self._now is not self._stop:
                return  # routes are being opened again; a trainer that still needs them closed asks again
            time.sleep(LOOK_S)
        self.party.send(m.RoutesClosed(self.replica))


def labels_of(sources: Sequence[int], replica: int, workers: int, donor: int = -1) -> tuple[str, ...]:
    """Return the labels of a domain's ranks: these trainers, or these workers of the donor, then the workers of one replica."""
    of = "trainer" if donor < 0 else f"replica {donor} worker"
    return (*(f"{of} {i}" for i in sources), *(f"replica {replica} worker {i}" for i in range(workers)))
