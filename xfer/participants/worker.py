"""The engine worker's part of a session: join once, then one `receive` per refit, inside the engine's own call.

No call here raises into the engine, and every wait has a deadline: vLLM reads its workers' replies in rank order and stops at
the first failure, after which every later answer belongs to the wrong call. Outcomes travel on xfer's own channel.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from xfer import faults, timeline
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import SILENCE_S, STOP_GRACE_S
from xfer.coordinator.layouts import pack_specs, unpack_one
from xfer.coordinator.messages import Label
from xfer.errors import DeadlineExceeded, PeerLost, RebindError, XferError
from xfer.participants.data_plane import Change, DataPlane, Stop
from xfer.participants.lane import Lane
from xfer.rendezvous.client import RendezvousClient, data_plane
from xfer.timeline import mark, nvtx
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec
from xfer.turns import quick_turns

logger = logging.getLogger("xfer")


class Weights(Protocol):
    """The live weights of one worker, through all its connections. `engines/weights.py` has them.

    Attributes:
        version: Label of the last refit that was installed.
        paused: Whether a controller was told to pause the engine, and none has said since that it serves.
    """

    device: torch.device
    version: Label
    paused: bool

    @property
    def holds(self) -> m.Holds:
        """Whether the model has "whole" weights, a "mix" or "nothing". The engine may serve only "whole" ones."""

    def choose_lock(self) -> str:
        """Find the tensor whose NaN makes every output NaN. All workers of the replica call this together."""

    def engage_lock(self) -> None:
        """Fill that tensor with NaN, before the first write."""

    def release_lock(self) -> None:
        """Install the new value of that tensor, after the last write."""

    def synchronize(self) -> None: ...


class Adapter(Protocol):
    """An engine framework's adapter on one worker; `engines/vllm_layout.py` has the one for vLLM. The sides of the routes
    need more methods of it.

    Attributes:
        drop: Globs of checkpoint tensors that this engine does not take.
    """

    drop: tuple[str, ...]

    @property
    def weights(self) -> Weights: ...


class WorkerSide(Protocol):
    """One engine worker's part of a route.

    Attributes:
        inventory: Digest of this worker's layout, for the coordinator; empty before the first `read`.
    """

    inventory: bytes

    def read(self, catalog: Catalog) -> tuple[TensorSpec, ...]:
        """Read the live layout under a catalog and set `inventory`.

        Returns:
            Tensors that trainers have to derive for this engine (trace/derived.py) and that are not in the catalog. `inventory`
            is then not set.
        """

    def check(self, quick: bool = False) -> str:
        """Return the value of a `Change` (data_plane.py). Raises if weights that refits leave alone (`keep=`) are lost.

        Args:
            quick: Return "same" if the tensors are the same objects at the same addresses. Allowed if a check has returned "same" a
                moment ago, and a whole one follows before the commit.
        """

    def rebind(self) -> None:
        """Use the new addresses of the same layout."""

    def base(self) -> int:
        """Return the number of the last refit by changes, if this worker's storages still hold what it left, else 0. Asked only while
        the model holds one whole version."""

    def plane(self, joint_rank: int) -> DataPlane:
        """Make the data plane of this worker, whose rank in the domain is `joint_rank`."""


@runtime_checkable
class Giver(Protocol):
    """A `WorkerSide` that can give its weights to another replica. Routes with `Options.first_copies` have it."""

    def giving_plane(self, replica: int) -> DataPlane:
        """Make the data plane by which this worker gives first weights to `replica`."""


NewWorkerSide = Callable[[str, Any, RendezvousClient, int, int], WorkerSide]
"""(route name, adapter, client, replica, worker rank) -> the worker's side of that route."""


class WorkerSession:
    """One engine worker's membership in a session.

    Args:
        adapter: The engine framework's adapter.
        new_side: Makes the side of the route that the trainers chose.
        replica: Number of the worker's replica.
        worker_rank: The worker's rank in its replica.
        workers: Number of workers of the replica.
        rendezvous: "tcp://HOST:PORT".
        token: The job's secret.
        deadline_s: Seconds for joining.
        session_open: Whether the engine has an update session open that an earlier controller began.
        in_step: Whether workers of this replica, or of others, wait for this one in every step of the engine.

    Attributes:
        error: The last error; None if there was none.
        joined: Whether `join` succeeded.
    """

    role = "worker"

    def __init__(
        self,
        adapter: Adapter,
        new_side: NewWorkerSide,
        replica: int,
        worker_rank: int,
        workers: int,
        rendezvous: str,
        token: str,
        deadline_s: float,
        session_open: bool = False,
        in_step: bool = False,
    ):
        self.adapter, self._new_side = adapter, new_side
        self._side: WorkerSide | None = None
        self.replica, self.index, self.size = replica, worker_rank, workers
        self.rendezvous, self.deadline_s = rendezvous, deadline_s
        self._token, self._session_open, self._in_step = token, session_open, in_step
        self._weights, self.device = adapter.weights, adapter.weights.device
        self.error: XferError | None = None
        self._party: RendezvousClient | None = None
        self._lane_: Lane | None = None
        self._lanes: dict[int, Lane] = {}  # by replica: this lane, and those by which it gives weights to others
        self._catalog: Catalog | None = None
        self._told: bytes | None = b""  # the inventory that the coordinator knows. None: a catalog comes first
        self._generation = 0
        self._stale = False  # the last attempt to read the layout again failed
        self._locked = -1.0  # the last epoch whose link may open, since the lock is chosen
        self.joined = False

    @property
    def side(self) -> WorkerSide:
        """This worker's side of the route.

        Raises:
            PeerLost: The worker has not met the coordinator, which knows the route.
        """
        if self._side is None:
            raise self._never_joined()
        return self._side

    def _never_joined(self) -> XferError:
        return self.error or PeerLost("this worker never joined")

    # ---- joining

    def join(self) -> None:
        """Connect, read the live layout, publish it, and wait for a plan and a link. Raises nothing: see the module."""
        try:
            self._join()
        except Exception as e:
            self._fail(e)
            if self._party is not None:
                # The controller asks the coordinator when this has returned: the coordinator must know of the failure.
                self._party.catch_up(SILENCE_S)

    def _join(self) -> None:
        until = time.monotonic() + self.deadline_s
        self._party = party = RendezvousClient(
            self.rendezvous,
            self._token,
            "worker",
            index=self.index,
            size=self.size,
            replica=self.replica,
            deadline_s=self.deadline_s,
            settings=data_plane(self.device),
            holds=self._weights.holds,
            session_open=self._session_open,
            paused=self._weights.paused,
            version=self._weights.version,
        )
        party.on_paused = partial(setattr, self._weights, "paused")
        party.lanes, party.on_lane = self._lanes, partial(self._lane, party)
        self._side = self._new_side(party.welcome.route, self.adapter, party, self.replica, self.index)
        self.adapter.drop = (*self.adapter.drop, *party.welcome.drop)
        first = party.take(until, "the catalog: trainers have not connected yet", m.CatalogMsg, m.Failed)
        if isinstance(first, m.Failed):
            raise first.error.error()
        self._read(party, first)
        while True:
            message = party.take(
                until,
                "a plan: another rank is still reading its layout",
                m.ReplicaReady,
                m.Failed,
                m.CatalogMsg,
                m.OpenLink,
            )
            if isinstance(message, m.Failed):
                raise message.error.error()
            if isinstance(message, m.CatalogMsg):
                self._read(party, message)
                continue
            # Not earlier: this runs the model's own collectives, and now all workers have planned. Not later: `connect` returns when
            # links are open, and raises if there is no lock. A replica may be ready without a link: the next refit opens it.
            if isinstance(message, m.OpenLink) or self._locked < 0:
                lock = self._weights.choose_lock()
                self.side.rebind()  # from now on refits write the lock's scratch instead of its live storage
            if isinstance(message, m.ReplicaReady):
                break
            self._locked = message.epoch
            party.stirred()
        self._locked, self.joined = math.inf, True
        party.stirred()
        logger.info("xfer: %s has joined %s, locked by %s", party.label, self.rendezvous, lock)

    def _may_open(self, party: RendezvousClient, order: m.OpenLink, stop: Stop) -> None:
        """Wait, on the lane's thread, until this worker has its lock, or raise why it never will."""

        def locked() -> bool:
            return self._locked >= order.epoch

        party.wait_for(lambda: locked() or stop.stopped() or self.error is not None, time.monotonic() + self.deadline_s)
        stop.check()
        if not locked():
            raise self._never_joined()

    def _read(self, party: RendezvousClient, message: m.CatalogMsg) -> None:
        self._catalog, self._generation = Catalog.from_bytes(unpack_one(message.catalog, "catalog")), message.generation
        self._told, self._stale = b"", True  # the next refit reads this catalog, if something fails here
        faults.point("worker", self.index, "read")
        if missing := self._publish(self._catalog):
            self._told = None
            party.try_send(m.Specs(pack_specs(Catalog(missing).to_bytes(), ())))  # a catalog with them will come
        self._tell(party)

    def _tell(self, party: RendezvousClient) -> None:
        """Send the inventory, if the coordinator does not know it. If it is gone, the inbox has the reason."""
        if self._told is not None and self._told != self.side.inventory:
            party.try_send(m.InventoryMsg(self.side.inventory, self._generation))
            self._told = self.side.inventory

    def _publish(self, catalog: Catalog) -> tuple[TensorSpec, ...]:
        self._stale = True
        missing = self.side.read(catalog)
        self._stale = False
        return missing

    def _lane(self, party: RendezvousClient, replica: int) -> Lane | None:
        if replica not in self._lanes:
            if replica == self.replica:
                plane, role = self.side.plane(party.welcome.trainers + self.index), "worker"
            elif isinstance(self.side, Giver):
                plane, role = self.side.giving_plane(replica), "donor"
            else:
                return None
            self._lanes[replica] = Lane(
                party, role, self.index, self.device, replica, plane, partial(self._may_open, party)
            )
            self._lane_ = self._lanes.get(self.replica)
        return self._lanes[replica]

    def _fail(self, e: BaseException, attempt: int = 0) -> XferError:
        error = self._noted(e)
        if self._party is not None:
            self._party.try_send(m.Failed(m.WireError.of(error, self._party.label), attempt, self.replica))
        return error

    def _noted(self, e: BaseException) -> XferError:
        self.error = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}")
        logger.error("xfer: replica %d worker %d: %s", self.replica, self.index, self.error)
        return self.error

    # ---- receiving

    def receive(self, attempt: int, deadline_s: float) -> None:
        """Run one refit attempt, from armed to decided.

        Raises nothing: see the module. Waits for the decision until `STOP_GRACE_S` after the deadline, and for a transfer that was
        stopped as long again.

        Args:
            attempt: Number of the attempt.
            deadline_s: Seconds until the coordinator decides at the latest.
        """
        try:
            with quick_turns(), nvtx(f"update, replica {self.replica} worker {self.index}"):
                self._receive(attempt, deadline_s)
        except Exception as e:
            error = self._fail(e, attempt)
            lane = self._lane_
            if lane is not None:
                lane.cancel(error, None)
                lane.wait_idle(STOP_GRACE_S)
            if self._party is not None:
                self._party.try_send(self._stopped(attempt))
        if self._party is not None:
            # Later, on another thread: the engine waits for this call to return.
            timeline.write(attempt, self._party.welcome.session, wait_s=timeline.ASIDE_S)

    def _receive(self, attempt: int, deadline_s: float) -> None:
        party, lane = self._party, self._lane_
        if party is None or lane is None or not self.joined:
            raise self._never_joined()
        due = time.monotonic() + deadline_s
        mark(party.label, "in update")
        self._weights.synchronize()
        mark(party.label, "its device is idle")
        unread = self._refresh(party, lane.plane.looked(attempt))
        faults.point("worker", self.index, "arm")
        rebound = lane.plane.moved()
        base = self.side.base() if self._weights.holds == "whole" else 0
        mark(party.label, "looked at its storages: armed")
        staged = lane.plane.holds(attempt, base)
        party.send(m.Armed(attempt, self._generation, rebound, unread, self._in_step, base, staged))
        while True:
            message = party.take(
                due + STOP_GRACE_S,
                "the decision of this refit",
                m.Commit,
                m.Abort,
                m.CallAgain,
                m.Failed,
                m.CatalogMsg,
                due=due,
            )
            if isinstance(message, m.CatalogMsg):
                self._read(party, message)
            elif isinstance(message, m.Failed):
                raise message.error.error()
            elif message.attempt != attempt:
                continue  # an answer to an earlier attempt
            elif isinstance(message, m.CallAgain):
                return
            elif isinstance(message, m.Commit):
                faults.point("worker", self.index, "commit")
                lane.wait_idle(STOP_GRACE_S)
                self._weights.release_lock()
                self._weights.synchronize()
                self._weights.version = message.version
                mark(party.label, "installed")
                party.send(m.Committed(self.replica, attempt))
                return
            else:
                if not lane.wait_idle(STOP_GRACE_S):
                    raise DeadlineExceeded("the transfer of this worker did not stop after an abort")
                party.send(self._stopped(attempt))
                return

    def _stopped(self, attempt: int) -> m.Stopped:
        lane = self._lane_
        return m.Stopped(self.replica, attempt, self._weights.holds == "mix", lane is None or lane.plane.drained)

    def _refresh(self, party: RendezvousClient, quick: bool) -> m.WireError | None:
        """Bring the layout up to date, and tell the coordinator if it has changed.

        Args:
            party: The connection.
            quick: See `WorkerSide.check`.

        Returns:
            The error if the layout cannot be read. It ends the attempt only if trainers publish no newer catalog; their catalog may
            come before or after this.
        """
        change = Change(self.side.check(quick))  # in any case: it refuses lost kept weights, which `read` would accept
        if self._stale:
            change = Change.CHANGED
        newer = party.newest(m.CatalogMsg) if self._stale else None  # replaces the catalog that could not be read
        try:
            if newer is not None:
                self._read(party, newer)
            elif change is Change.MOVED:
                self._stale = True
                self.side.rebind()
                self._stale = False
            elif change is Change.CHANGED and self._catalog is not None:
                if missing := self._publish(self._catalog):
                    self._stale = True
                    names = (f"{s.of}: {s.dtype}, rule {s.rule}" for s in missing)
                    raise RebindError(
                        "this engine wants weights in another form than when it joined; restart it", names
                    )
            self._tell(party)
        except Exception as e:
            return m.WireError.of(self._noted(e), party.label)
        return None

    def close(self) -> None:
        if self._party is not None:
            self._party.close()
