"""The engine worker's half: join once, then one `receive` per refit, inside the engine's own call.

Nothing here raises into the engine and nothing hangs past its deadline: vLLM reads its workers' replies in rank order and
stops at the first failure, after which every later answer belongs to the wrong call. Outcomes travel on xfer's own channel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import SILENCE_S, STOP_GRACE_S
from xfer.coordinator.messages import Label
from xfer.coordinator.packing import unpack_one
from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.participants import faults, timeline
from xfer.participants.data_plane import DataPlane
from xfer.participants.lane import Lane
from xfer.participants.timeline import mark
from xfer.participants.turns import quick_turns
from xfer.rendezvous.client import RendezvousClient, data_plane
from xfer.trace.catalog import Catalog

logger = logging.getLogger("xfer")


class Adapter(Protocol):
    """An engine framework's adapter on one worker; `engines/vllm_layout.py` has the one for vLLM. A route's side asks
    more of it."""

    device: torch.device
    drop: tuple[str, ...]
    """Globs of checkpoint tensors that this engine does not take."""
    version: Label
    """Label of the last refit that was installed, whatever connection brought it. The adapter keeps it for a session."""

    @property
    def holds(self) -> m.Holds:
        """Which weights lie in the model, whatever connection brought them. Only "whole" ones may serve."""


class Model(Protocol):
    """The live model of one worker, as a session commands it: an adapter itself, or a route's view of one."""

    def check(self) -> str:
        """ "same", "moved" (same layout, other addresses) or "changed". Raises where kept weights are lost."""

    def choose_lock(self) -> str:
        """Find the tensor whose NaN makes every output NaN. All workers of the replica call this together."""

    def release_lock(self) -> None: ...

    def synchronize(self) -> None: ...


class WorkerSide(Protocol):
    """What one engine worker takes by a route."""

    model: Model
    inventory: bytes
    """Digest of this worker's layout as the coordinator is to know it; empty before the first `read`."""

    def read(self, catalog: Catalog) -> None:
        """Read the live layout under a catalog; sets `inventory`."""

    def rebind(self) -> None:
        """The same layout lies at other addresses."""

    def plane(self, joint_rank: int) -> DataPlane:
        """The data plane of this worker, whose rank in the domain is `joint_rank`."""


NewWorkerSide = Callable[[str, Any, RendezvousClient, int, int], WorkerSide]
"""(route's name, adapter, client, replica, worker rank) -> that route's side."""


class WorkerSession:
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
        """
        Args:
            new_side: Makes the side of the route that the trainers chose.
            session_open: The engine has an update session open that an earlier controller began.
            in_step: Workers of this replica, or of others, wait for this one in every step of the engine.
        """
        self.adapter, self._new_side, self.side = adapter, new_side, None
        self.replica, self.index, self.size = replica, worker_rank, workers
        self.rendezvous, self.deadline_s = rendezvous, deadline_s
        self._token, self._session_open, self._in_step = token, session_open, in_step
        self.device = adapter.device
        self.error: XferError | None = None
        self._party: RendezvousClient | None = None
        self._lane_: Lane | None = None
        self._catalog: Catalog | None = None
        self._told = b""  # the inventory that the coordinator heard of last
        self._generation = 0
        self._stale = False  # a layout was being read again and that did not end well
        self.joined = False

    @property
    def model(self) -> Model:
        return self.side.model

    # ---- joining

    def join(self) -> None:
        """Connect, read the live layout, publish it, wait for a plan and a link. Returns normally whatever happens."""
        try:
            self._join()
        except Exception as e:
            self._fail(e)
            if self._party is not None:
                self._party.catch_up(
                    SILENCE_S
                )  # when this has returned the controller asks the coordinator, which must have heard of it

    def _join(self) -> None:
        until = time.monotonic() + self.deadline_s
        self._party = RendezvousClient(
            self.rendezvous,
            self._token,
            "worker",
            index=self.index,
            size=self.size,
            replica=self.replica,
            deadline_s=self.deadline_s,
            settings=data_plane(self.device),
            holds=self.adapter.holds,
            session_open=self._session_open,
            version=self.adapter.version,
        )
        self._party.on_lane = self._lane
        self.side = self._new_side(self._party.welcome.route, self.adapter, self._party, self.replica, self.index)
        self.adapter.drop = (*self.adapter.drop, *self._party.welcome.drop)
        first = self._party.take((m.CatalogMsg, m.Failed), until, "the catalog: trainers have not connected yet")
        self._raise_failed(first)
        self._read(first)
        while True:
            message = self._party.take(
                (m.ReplicaReady, m.Failed, m.CatalogMsg), until, "a plan: another rank is still reading its layout"
            )
            if isinstance(message, m.CatalogMsg):
                self._read(message)
                continue
            self._raise_failed(message)
            break
        lock = self.model.choose_lock()  # not sooner: it runs the model's own collectives, so all workers must be alive
        self.side.rebind()  # from now on refits write the scratch of the lock in place of its live storage
        self.joined = True
        logger.info("xfer: %s has joined %s, locked by %s", self._party.label, self.rendezvous, lock)

    def _raise_failed(self, message: m.Message) -> None:
        if isinstance(message, m.Failed):
            raise message.error.error()

    def _read(self, message: m.CatalogMsg) -> None:
        faults.point("worker", self.index, "read")
        self._catalog, self._generation = Catalog.from_bytes(unpack_one(message.catalog, "catalog")), message.generation
        self._publish()
        # If nobody is there, the inbox says why.
        self._party.try_send(m.InventoryMsg(self.side.inventory, message.generation))
        self._told = self.side.inventory

    def _publish(self) -> None:
        self._stale = True
        self.side.read(self._catalog)
        self._stale = False

    def _lane(self, replica: int) -> Lane | None:
        if replica != self.replica:
            return None
        if self._lane_ is None:
            plane = self.side.plane(self._party.welcome.trainers + self.index)
            self._lane_ = Lane(self._party, "worker", self.index, self.device, replica, plane)
            self._party.lanes = {replica: self._lane_}
        return self._lane_

    def _fail(self, e: BaseException, attempt: int = 0) -> None:
        error = self._noted(e)
        if self._party is not None:
            self._party.try_send(m.Failed(m.WireError.of(error, self._party.label), attempt, self.replica))

    def _noted(self, e: BaseException) -> XferError:
        self.error = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}")
        logger.error("xfer: replica %d worker %d: %s", self.replica, self.index, self.error)
        return self.error

    # ---- receiving

    def receive(self, attempt: int, deadline_s: float) -> None:
        """One refit attempt, from armed to decided. Returns normally, by the deadline, whatever happens."""
        try:
            with quick_turns():
                self._receive(attempt, deadline_s)
        except Exception as e:
            self._fail(e, attempt)
            lane = self._lane_
            if lane is not None:
                lane.cancel(self.error, None)
                lane.wait_idle(STOP_GRACE_S)
            if self._party is not None:
                self._party.try_send(self._stopped(attempt))
        if self._party is not None:
            timeline.write(
                attempt, self._party.welcome.session, wait_s=timeline.ASIDE_S
            )  # the engine waits for this call to return

    def _receive(self, attempt: int, deadline_s: float) -> None:
        if self._party is None or not self.joined:
            raise self.error or PeerLost("this worker never joined")
        party, due = self._party, time.monotonic() + deadline_s
        mark(party.label, "in update")
        self.model.synchronize()
        mark(party.label, "its device is idle")
        inventory, unread = self._refresh()
        faults.point("worker", self.index, "arm")
        rebound = self._lane_.plane.moved()
        mark(party.label, "looked at its storages: armed")
        party.send(m.Armed(attempt, inventory, self._generation, rebound, unread, self._in_step))
        if unread is None:
            self._told = self.side.inventory
        while True:
            message = party.take(
                (m.Commit, m.Abort, m.CallAgain, m.Failed, m.CatalogMsg),
                due + STOP_GRACE_S,
                "the decision of this refit",
                due=due,
            )
            if isinstance(message, m.CatalogMsg):
                self._read(message)
            elif isinstance(message, m.Failed):
                self._raise_failed(message)
            elif message.attempt != attempt:
                continue  # an answer to an earlier attempt
            elif isinstance(message, m.CallAgain):
                return
            elif isinstance(message, m.Commit):
                faults.point("worker", self.index, "commit")
                self._lane_.wait_idle(STOP_GRACE_S)
                self.model.release_lock()
                self.model.synchronize()
                self.adapter.version = message.version
                mark(party.label, "installed")
                party.send(m.Committed(self.replica, attempt))
                return
            else:
                lane = self._lane_
                if lane is not None and not lane.wait_idle(STOP_GRACE_S):
                    raise DeadlineExceeded("the transfer of this worker did not stop after an abort")
                party.send(self._stopped(attempt))
                return

    def _stopped(self, attempt: int) -> m.Stopped:
        lane = self._lane_
        return m.Stopped(self.replica, attempt, self.adapter.holds == "mix", lane is None or lane.plane.drained)

    def _refresh(self) -> tuple[bytes, m.WireError | None]:
        """The inventory, where the coordinator has not heard of it: also what an attempt read that ended before it
        could tell. Or why there is
        none: that ends the attempt only if trainers bring nothing newer, which they may have sent before this or not."""
        state = (
            self.model.check()
        )  # always: kept weights that are lost it refuses, and `read` would take them as they lie
        if self._stale:
            state = "changed"
        newer = (
            self._party.newest(m.CatalogMsg) if self._stale else None
        )  # what could not be read before has been replaced
        try:
            if newer is not None:
                self._read(newer)
            elif state == "moved":
                self._stale = True
                self.side.rebind()
                self._stale = False
            elif state != "same":
                self._publish()
        except Exception as e:
            return b"", m.WireError.of(self._noted(e), self._party.label)
        return self.side.inventory if self.side.inventory != self._told else b"", None

    def close(self) -> None:
        if self._party is not None:
            self._party.close()
