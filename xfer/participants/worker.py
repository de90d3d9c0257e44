"""The engine worker's half: join once, then one `receive` per refit, inside the engine's own call.

Nothing here raises into the engine and nothing hangs past its deadline: vLLM reads its workers' replies in rank order and
stops at the first failure, after which every later answer belongs to the wrong call. Outcomes travel on xfer's own channel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import SILENCE_S, STOP_GRACE_S
from xfer.coordinator.packing import unpack_one
from xfer.coordinator.wire import Label
from xfer.errors import DeadlineExceeded, PeerLost, VerificationError, XferError
from xfer.kernels.checksum import Constants, Sums
from xfer.participants import faults, timeline
from xfer.participants.early import FIRST, EarlySums, first_storages, whole_storages
from xfer.participants.lane import Lane
from xfer.participants.timeline import mark
from xfer.participants.turns import quick_turns
from xfer.plan.inventory import engine_inventory
from xfer.plan.part import Part
from xfer.plan.rows import footprint_rows
from xfer.plan.table import padded_shapes
from xfer.rendezvous.client import RendezvousClient, data_plane, host_identity
from xfer.trace.catalog import Catalog
from xfer.transport.routes import Routed

logger = logging.getLogger("xfer")


class Taker(Protocol):
    """An engine framework's adapter on one worker; `engines/vllm_layout.py` has the one for vLLM."""

    device: torch.device
    drop: tuple[str, ...]
    version: Label
    """Label of the last refit that was installed, whatever connection brought it. Kept here for a session."""

    @property
    def holds(self) -> m.Holds:
        """Which weights lie in the model, whatever connection brought them. Only "whole" ones may serve."""

    def read(self, catalog: Catalog): ...

    def check(self) -> str: ...

    def rebind(self) -> Mapping[str, torch.Tensor]: ...

    def choose_lock(self) -> str:
        """Find the tensor whose NaN makes every output NaN; all workers of the replica call this together."""

    def engage_lock(self) -> None: ...

    def release_lock(self) -> None: ...

    def run_recipes(self) -> None: ...

    def synchronize(self) -> None: ...


class WorkerSession:
    role = "worker"

    def __init__(
        self,
        model: Taker,
        replica: int,
        worker_rank: int,
        workers: int,
        rendezvous: str,
        token: str,
        deadline_s: float,
        session_open: bool = False,
        in_step: bool = False,
    ):
        """in_step: whether workers of this replica, or of others, wait for this one in every step of the engine."""
        self.model, self.replica, self.index, self.size = model, replica, worker_rank, workers
        self.rendezvous, self.deadline_s = rendezvous, deadline_s
        self._token, self._session_open, self._in_step = token, session_open, in_step
        self.device = model.device
        self.error: XferError | None = None
        self._party: RendezvousClient | None = None
        self._lane_: Lane | None = None
        self._catalog: Catalog | None = None
        self._inventory = self._told = b""  # as it is, and as the coordinator heard of it last
        self._sums: Sums | None = None  # of these storages, bound when first asked for
        self._constants: tuple[Part, Constants] | None = None  # likewise, of this plan
        self._early: tuple[Routed, EarlySums | None] | None = None  # likewise, of these routes
        self._binding = self._generation = 0
        self._stale = False  # a layout was being read again and that did not end well
        self._packed = False  # the trainers chose the packed route
        self.joined = False

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
            holds=self.model.holds,
            session_open=self._session_open,
            version=self.model.version,
        )
        self._party.on_lane = self._lane
        self._packed = self._party.welcome.route == "packed"
        if self._packed:
            self.model = self.model.packed()
        self.model.drop = (*self.model.drop, *self._party.welcome.drop)
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
        self._lock_name = (
            self.model.choose_lock()
        )  # after everyone is known to be alive: it runs the model's own collectives
        self.joined = True
        logger.info("xfer: %s has joined %s, locked by %s", self._party.label, self.rendezvous, self._lock_name)

    def _raise_failed(self, message: m.Message) -> None:
        if isinstance(message, m.Failed):
            raise message.error.error()

    def _read(self, message: m.CatalogMsg) -> None:
        faults.point("worker", self.index, "read")
        self._catalog, self._generation = Catalog.from_bytes(unpack_one(message.catalog, "catalog")), message.generation
        self._publish()
        # If nobody is there, the inbox says why.
        self._party.try_send(m.InventoryMsg(self._inventory, message.generation))
        self._told = self._inventory

    def _publish(self) -> None:
        self._stale = True
        if self._packed:
            self.model.accept(self._catalog)
            self._inventory, self._names, self._stale = self._catalog.digest().encode(), [], False
            return
        layout = self.model.read(self._catalog)
        made = engine_inventory(
            self._catalog, rank=self.index, host=host_identity(), roots=layout.roots, fragments=layout.traced.fragments,
            fills=layout.traced.fills, footprint=layout.footprint, kept=layout.kept, staged=layout.staged, reads=layout.traced.reads,
            recipes=(r.digest() for r in layout.traced.recipes),
        )  # fmt: skip
        self._inventory = self._party.shelf.offer(made)
        self._names, self._rows = [r.name for r in made.roots], footprint_rows(made)
        self._bind(layout.tensors)
        self._stale = False

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._roots, self._sums, self._constants, self._early = [tensors[n] for n in self._names], None, None, None
        self._binding += 1

    def _lane(self, replica: int) -> Lane | None:
        if replica != self.replica:
            return None
        if self._lane_ is None:
            joint = self._party.welcome.trainers + self.index
            if self._packed:
                from xfer.packed.lane import PackedLane

                lane = PackedLane(self._party, self, replica, joint, loader=self.model)
            else:
                lane = Lane(self._party, self, replica, joint, None)
            self._lane_ = self._party.lanes[replica] = lane
        return self._lane_

    def _fail(self, e: BaseException, attempt: int = 0) -> None:
        error = self._noted(e)
        if self._party is not None:
            self._party.try_send(m.Failed(m.WireError.of(error, self._party.label), attempt, self.replica))

    def _noted(self, e: BaseException) -> XferError:
        self.error = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}")
        logger.error("xfer: replica %d worker %d: %s", self.replica, self.index, self.error)
        return self.error

    # ---- Side, for the lane

    def catalog(self) -> Catalog:
        return self._catalog

    def inventory(self) -> bytes:
        return self._inventory

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        return self._binding, self._roots

    def opened(self, replica: int, plan: Part, generation: int) -> None:
        """A worker has one lane, whose bytes have come before it sums them."""

    def before(self, go: m.Go, plan: Part) -> None:
        self.model.engage_lock()  # on a stream that the transfer waits for; the device was idle when this worker armed

    def gate(self, go: m.Go, plan: Part, routed: Routed) -> EarlySums | None:
        if self._early is not None and self._early[0] is not routed:
            self._early = None  # what it has summed came through other routes, whose buffers it would keep
        if routed.pull is not None and go.verify and self._early is None:
            rest = routed.program.rows
            others = rest[rest["dst"] == plan.program.rank]
            within = routed.place is None and routed.near
            if routed.place is None:
                part, first = 0, first_storages(routed.pulled, others, 1.0 if within else FIRST)
            else:
                part, first = whole_storages(routed.place.rows, others)
            shapes = padded_shapes(self._catalog)
            self._early = (
                routed,
                EarlySums(self._rows, self._roots, shapes, first, part, within) if len(first) else None,
            )
        return self._early[1] if go.verify and self._early is not None else None

    def after(self, go: m.Go, plan: Part) -> tuple[tuple[m.Checksum, ...], bytes]:
        # What the trainers sent is checked where it landed, before the loader's own arithmetic runs over scratch.
        out: tuple[m.Checksum, ...] = ()
        if go.verify:
            early = self._early[1] if self._early is not None else None
            if early is None and self._sums is None:
                self._sums = Sums.of_one(self._rows, self._roots, "dst", padded_shapes(self._catalog))
            value = early.value() if early is not None else self._sums.values()[0]
            if faults.wants("worker", self.index, "checksum"):
                value ^= 1
            out = (m.Checksum(self.index, (value % (1 << 64)).to_bytes(8, "little")),)
            if self._constants is None or self._constants[0] is not plan:
                self._constants = plan, Constants(plan.program.rows, self._roots)
            if wrong := self._constants[1].wrong():
                raise VerificationError(f"{wrong} constants (vocabulary padding) are not what the loader puts there")
        self.model.run_recipes()
        self.model.synchronize()
        return out, b""

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
        rebound = self._lane_.rebound()
        mark(party.label, "looked at its storages: armed")
        party.send(m.Armed(attempt, inventory, self._generation, rebound, unread, self._in_step))
        if unread is None:
            self._told = self._inventory
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
                self.model.version = message.version
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
        return m.Stopped(self.replica, attempt, self.model.holds == "mix", lane is None or lane.drained)

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
                self._bind(self.model.rebind())
                self._stale = False
            elif state != "same":
                self._publish()
        except Exception as e:
            return b"", m.WireError.of(self._noted(e), self._party.label)
        return self._inventory if self._inventory != self._told else b"", None

    def close(self) -> None:
        if self._party is not None:
            self._party.close()
