"""The trainer's half: connect once, then one `refit` per optimizer step, on every trainer rank.

Trainer rank 0 hosts the coordinator. Every rank: reads its own layout, publishes what it exports, and keeps one lane per replica.
What Megatron or FSDP is, is known only to the `Source` that was passed in.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from xfer import logs
from xfer.background import BackgroundCall
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import STOP_GRACE_S, TOLD_S
from xfer.coordinator.packing import pack_specs, unpack_one
from xfer.coordinator.state import Options, told
from xfer.errors import DeadlineExceeded, RebindError, XferError
from xfer.participants import computing, timeline
from xfer.participants.arguments import Labels, checked_call
from xfer.participants.data_plane import NewTrainerSide
from xfer.participants.drain import refuse_running
from xfer.participants.entry import Entry
from xfer.participants.lane import Lane
from xfer.participants.refit import RefitCall
from xfer.participants.report import RefitReport
from xfer.participants.turns import quick_turns, short_sleeps
from xfer.rendezvous.client import RendezvousClient, data_plane
from xfer.rendezvous.server import Server
from xfer.trace.catalog import Catalog
from xfer.trace.traced import TrainerLayout

logger = logging.getLogger("xfer")


class Source(Protocol):
    """A trainer framework's adapter on one rank. It may have a `let_go()`: hold none of the trainer's tensors until the next look."""

    rank: int
    world: int
    reads_together: bool
    """Whether `read` needs all ranks at once. Then it is called when they connect and never again."""

    @property
    def device(self) -> torch.device: ...

    def drain(self) -> None:
        """Finish every parameter gather in flight. On return what this rank offers lies in memory, whichever stream wrote it."""

    def read(self) -> TrainerLayout: ...

    def check(self) -> str:
        """ "same", "moved" (same layout, other addresses) or "changed"."""

    def rebind(self) -> Mapping[str, torch.Tensor]: ...


class Computes(Source, Protocol):
    """One whose layouts may have recipes or gathers."""

    def compute(self, meet: Callable[[tuple[int, ...], str], None]) -> None:
        """Fill the scratch among the roots from the present parameters; called where the layout has recipes or gathers.

        Call `meet(ranks, digest)` before gathering from those trainer ranks: see participants/computing.py.
        """


class TrainerSession:
    """One connected trainer rank. `xfer.connect` makes it.

    Args:
        source: The trainer framework's adapter.
        options: What `connect` was called with; equal on all trainer ranks.
        new_side: Makes the route's half of this rank.
    """

    def __init__(self, source: Source, rendezvous: str, token: str, options: Options, new_side: NewTrainerSide):
        self.source, self.index, self.device = source, source.rank, source.device
        self.rendezvous, self.deadline_s, self.replicas = rendezvous, options.deadline_s, options.replicas
        self.attempt = 0
        self.version: int | str | None = None  # the last that some replica committed
        self._labels = Labels()
        self._server: Server | None = None
        self._until, self._open = time.monotonic() + self.deadline_s, False
        self._catalog: Catalog | None = None
        self.generation = 0
        self._relay = options.relay
        self.pending: RefitCall | None = None  # returned before its outcome was known
        self._before: RefitReport | None = None  # its report, until the next one has told it
        self._busy = Entry()
        self._stale = False  # a layout was being read again and that did not end well
        self._specs = b""
        self._told: tuple[bytes, bytes | None] = (
            b"",
            b"",
        )  # specs and inventory that the coordinator knows; None: it owes a catalog
        self._released = False
        self._releases = 0  # number of releases begun
        self.drain: BackgroundCall[None] | None = None  # of the last call; may run longer than that
        self.computing: BackgroundCall[bool] | None = None  # while it runs, maybe after its call
        settings = (*told(options), *data_plane(self.device))
        if source.rank == 0:
            noted = partial(timeline.mark, timeline.HUB)
            self._server = Server(rendezvous, token, replace(options, settings=settings), noted, short_sleeps)
        try:
            # One of the ranks that dial speaks for all; once trainer 0 listens, it says which are missing.
            knocking = logs.while_waiting(
                lambda: f"trainer 1: no answer from {rendezvous}; has trainer rank 0 called xfer.connect()?"
            )
            with knocking if source.rank == 1 else contextlib.nullcontext():
                self._party = RendezvousClient(
                    rendezvous,
                    token,
                    "trainer",
                    index=source.rank,
                    size=source.world,
                    deadline_s=self.deadline_s,
                    settings=settings,
                )
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise
        self.side = new_side(self._party)
        self.lanes: dict[int, Lane] = {}  # by replica; a lane is made when its first message comes
        self._party.lanes, self._party.on_lane = self.lanes, self._lane

    @property
    def party(self) -> RendezvousClient:
        return self._party

    def __repr__(self) -> str:
        version = "no refit yet" if self.version is None else f"version {self.version!r}"
        of = f"trainer {self.index} of {self.source.world}, {logs.counted(self.replicas, 'replica')}"
        return f"{of}, at {self.rendezvous}: {'closed' if self._busy.closed else version}"

    # ---- connecting

    def open(self, wait: bool) -> None:
        """Publish the layout; with `wait`, until every replica has a plan and a link."""
        until = time.monotonic() + self.deadline_s
        try:
            self.layout = self._read_together(until, wait) if self.source.reads_together else self.source.read()
        except Exception as e:
            self._party.try_send(m.Failed(m.WireError.of(e, self._party.label)))
            raise
        self._specs = self._own_specs()
        self._party.send(m.Specs(self._specs))
        self.has_told(self._specs, b"")
        message = self._party.take(
            (m.CatalogMsg, m.Failed), until + TOLD_S, "the catalog: other trainer ranks have not connected yet",
            match=lambda x: isinstance(x, m.CatalogMsg) or x.ends(wait),
        )  # fmt: skip
        self._raise_failed(message)
        self._take_catalog(message)
        self._tell_inventory()
        if wait:
            ready: set[int] = set()
            while len(ready) < self.replicas:
                missing = sorted(set(range(self.replicas)) - ready)
                try:
                    message = self._party.take(
                        (m.ReplicaReady, m.Failed, m.CatalogMsg),
                        until
                        if self._server is not None
                        else until + TOLD_S,  # the coordinator's rank knows who was turned away
                        f"replicas {missing} have not joined; is xfer.serve() running for them?",
                    )
                except DeadlineExceeded as e:  # told first, or the others would only hear that this rank has left
                    e.violations += tuple(self._server.rejected()) if self._server is not None else ()
                    self._party.try_send(m.Failed(m.WireError.of(e, self._party.label)))
                    raise
                if isinstance(message, m.CatalogMsg):
                    self._take_catalog(message)
                    self._tell_inventory()
                    continue
                self._raise_failed(message)
                ready.add(message.replica)
        self._open = True
        if self._server is not None:
            self._server.coordinator.opening = False

    def cannot_join(self, replica: int, fatal: bool, error: XferError) -> None:
        """A controller of this process never met the coordinator: its replica will not come. `fatal`: all ranks are waiting for it."""
        said = m.WireError.of(error, f"replica {replica} controller")
        self._party.try_send(m.Failed(said, replica=-1 if fatal else replica))

    def _read_together(self, until: float, wait: bool) -> TrainerLayout:
        def pointless() -> bool:
            return any(
                isinstance(x, XferError) or isinstance(x, m.Failed) and x.ends(wait)
                for x in list(self._party.inbox.queue)
            )

        reading = BackgroundCall(self.source.read, self.device, self._party.label, "the layout could not be read")
        if reading.wait(until, pointless, STOP_GRACE_S):
            return reading.result
        # The coordinator's deadline is ours, and it knows who is missing.
        self._party.wait_for(pointless, time.monotonic() + TOLD_S)
        if pointless():
            now = time.monotonic()
            self._raise_failed(
                self._party.take((m.Failed,), now + TOLD_S, "who does not take part", lambda x: x.ends(wait))
            )
        raise DeadlineExceeded(
            "layouts are read by all ranks together (probe=), and not all took part",
            ["call xfer.connect() on every trainer rank, with the same probe="],
            where=self._party.label,
        )

    def _raise_failed(self, message: m.Message) -> None:
        if isinstance(message, m.Failed):
            raise message.error.error()

    def _tell_inventory(self) -> None:
        # If the coordinator has closed meanwhile, the reason is in the inbox already; a send that raises would hide it.
        self._party.try_send(m.InventoryMsg(self.side.inventory, self.generation))
        self.has_told(b"", self.side.inventory)

    def _take_catalog(self, message: m.CatalogMsg) -> None:
        self._catalog, self.generation = Catalog.from_bytes(unpack_one(message.catalog, "catalog")), message.generation
        self.side.read(self._catalog, self.layout)

    def _lane(self, replica: int) -> Lane | None:
        return self.lanes.get(replica) or self._new_lane(replica)

    def _new_lane(self, replica: int) -> Lane | None:
        if not 0 <= replica < self.replicas:
            return None
        lane = Lane(self._party, "trainer", self.index, self.device, replica, self.side.plane(replica))
        self.lanes[replica] = lane
        return lane

    # ---- refitting

    def begin_sums(self, attempt: int) -> None:
        """Of what this rank will send, before it says that it is ready. Lanes that are at something else sum later."""
        self.side.begin_sums(attempt, [r for r, lane in list(self.lanes.items()) if lane.wait_idle(0.0)])

    def prepare(self) -> None:
        """Arm the engines for the next refit now; they stop serving until it has run."""
        self._busy.refuse_closed("prepare()", self._party.label)
        self._party.send(m.Prepare(self.attempt + 1))

    def refit(
        self,
        *,
        version: str | int | None = None,
        verify: bool = False,
        wait: str = "commit",
        min_replicas: int | None = None,
        deadline_s: float | None = None,
    ) -> RefitReport:
        """See `xfer.nccl_xfer_refit`."""
        with self._busy.alone("nccl_xfer_refit()", self._party.label):
            try:
                self._finish_pending()
                call = checked_call(
                    version, verify, wait, min_replicas, deadline_s,
                    replicas=self.replicas, default_s=self.deadline_s, used=self._labels,
                )  # fmt: skip
            except XferError as e:
                # This call is used up by that, here as on the other ranks, which hear of it: attempts stay in step.
                e.where = e.where or self._party.label
                self._party.try_send(m.Failed(m.WireError.of(e, self._party.label), self.next_attempt()))
                raise
            with quick_turns():
                try:
                    report = self._let_go(RefitCall(self, call).run())
                    report, self._before = replace(report, before=self._before), None
                    return report
                finally:
                    timeline.write(self.attempt, self._party.welcome.session)

    def next_attempt(self) -> int:
        self.attempt += 1
        while self.attempt in self._party.void:
            self.attempt += 1
        return self.attempt

    def _finish_pending(self) -> None:
        """The outcome of a call that returned when its sources were free."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._before = self._let_go(pending.finish())

    def _let_go(self, report: RefitReport) -> RefitReport:
        """Of what was kept alive, once all replicas hold a later version: no worker takes part in a refit while a pull of its
        own is left over (lane.py). And of the label, which no later refit may have."""
        if self.index == 0 and not report.pending:
            logger.log(logging.INFO if report.committed == self.replicas else logging.WARNING, "xfer: %s", report)
        if report.committed:
            self._labels = self._labels.after(report.version)
        if report.committed == self.replicas and all(lane.plane.drained for lane in self.lanes.values()):
            self.side.let_go_kept()
        return report

    def refresh(self) -> tuple[bytes, bytes]:
        """Re-read what a framework has moved since the last refit. Returns (specs, inventory), each empty where the coordinator was
        told of it (`has_told`).

        The adapter remembers what it was last asked for, so whatever fails here must be read again by the next call; and
        what was read must be told by the next call where this one ends before it could.
        """
        state = "changed" if self._stale else self.source.check()
        if state == "same" and self._released:
            state = "moved"  # or not; its storages were let go of
        if state != "same":
            self._stale = True
            self._released = False
            if state == "moved":
                self.layout = replace(self.layout, tensors=self.source.rebind())
                self.side.rebind(self.layout.tensors)
            else:
                self._read_again()
            self._stale = False
        specs, inventory = self._told
        own = self.side.inventory
        if self._specs != specs:
            return self._specs, b""  # the inventory follows the coordinator's answer: the catalog may have changed
        return b"", b"" if inventory in (None, own) else own

    def _read_again(self) -> None:
        if self.source.reads_together:
            raise RebindError(
                "this rank's layout changed, and only all ranks together can read it anew (probe=)",
                ["close this session and connect again, on every rank"],
                where=self._party.label,
            )
        self.layout = self.source.read()
        self._specs = self._own_specs()
        if self._specs == self._told[0] and self._told[1] is not None:
            self.side.read(self._catalog, self.layout)
        else:
            self.side.forget_layout()

    def has_told(self, specs: bytes, inventory: bytes) -> None:
        """What the coordinator has heard from this rank, empty for nothing."""
        self._told = specs or self._told[0], None if specs else inventory or self._told[1]

    def _own_specs(self) -> bytes:
        catalog = Catalog.union([(self._party.label, self.layout.traced.specs)])
        return pack_specs(catalog.to_bytes(), self.layout.trained)

    def follow(self, message: m.CatalogMsg) -> None:
        """A new catalog, or the same one again for a rank whose exports changed: answer with the inventory over it."""
        self._stale, self._told = (
            True,
            (self._told[0], b""),
        )  # what the coordinator owed is here, whatever becomes of the answer
        self._take_catalog(message)
        self._stale = False
        self._party.send(m.InventoryMsg(self.side.inventory, self.generation))
        self.has_told(b"", self.side.inventory)

    def release(self) -> None:
        """See `Session.release`."""
        with self._busy.alone("release()", self._party.label):
            self._release()

    def _release(self) -> None:
        until = time.monotonic() + self.deadline_s
        if not all([lane.wait_idle(max(0.0, until - time.monotonic())) for lane in list(self.lanes.values())]):
            raise DeadlineExceeded(
                "a transfer of this rank is still running", self.side.warn(()), where=self._party.label
            )
        refuse_running((self.drain, self.computing), until, self._party.label)
        self._releases += 1
        self._party.send(m.Release(self._releases))
        kept = []
        try:
            while not isinstance(
                message := self._party.take(
                    (m.Released, m.Outcome, m.Failed),
                    until,
                    "every worker to unmap",
                    lambda x: not isinstance(x, m.Released) or x.number == self._releases,
                ),
                m.Released,
            ):
                kept.append(message)
        finally:
            for message in kept:  # of a refit that returned early, or a replica that is gone: for the next call
                self._party.inbox.put(message)
        for lane in list(self.lanes.values()):
            lane.plane.forget()
        self.side.release()
        self._released = True
        self.layout = replace(self.layout, tensors={})
        if hasattr(self.source, "let_go"):
            self.source.let_go()

    def explain(self) -> str:
        self._busy.refuse_closed("explain()", self._party.label)
        lanes = [
            f"replica {r}\n{lane.plane.explain()}" for r, lane in sorted(self.lanes.items()) if lane.facts is not None
        ]
        if self._relay:
            lanes.append(
                "replicas of one layout stand in a row: what is pulled here, only the first of them pulls from trainers; "
                "the others read it from the one before (`relay` in a report's routes)"
            )
        return "\n\n".join(filter(None, [*lanes, computing.explain(self.layout, self._party.label)]))

    def settle(self) -> None:
        """Wait for what an earlier call left running, within that call's bound; raises what became of it. Before the
        rendezvous goes: engines that lose it in the middle of a refit must not serve."""
        with self._busy.if_free() as free:
            if free:  # else another thread hangs in a call, and closing is what frees it
                self._finish_pending()

    def close(self) -> None:
        """`settle`, and leave, whatever that raises. Nothing in a process that was forked from the one that connected."""
        if self._party.channel.theirs:
            return
        try:
            self.settle()
        finally:
            self._busy.closed = True
            self._party.close()
            if self._server is not None:
                self._server.wait_left(self.index)
                time.sleep(0.05)  # let the others' goodbyes arrive before the socket goes
                self._server.close(0.0 if self._open else min(self._until, time.monotonic() + STOP_GRACE_S))
            self.side.close()  # last: it raises what became of the device
