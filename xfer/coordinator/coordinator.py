"""The coordinator of one job. It introduces processes to each other, relays layouts, and decides each refit. It never sees weights.

    trainers --Specs--> coordinator --CatalogMsg--> trainers, workers --InventoryMsg--> coordinator
    coordinator --PlanInputs(replica)--> ranks --Planned(digest)--> coordinator --OpenLink--> ranks --LinkOpen--> coordinator
    coordinator --ReplicaReady--> ranks

The ranks of a replica are all trainers and that replica's workers. An error of a replica ends there; other replicas go on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from xfer import logs
from xfer.coordinator import failures, first_copy, relays
from xfer.coordinator import messages as m
from xfer.coordinator.commit import ReplicaRefit
from xfer.coordinator.deadlines import hold_s
from xfer.coordinator.events import Connected, Disconnected, Effect, Event, Mark, Received, Timers, Unproven
from xfer.coordinator.exports import Silence, refuse_untrained
from xfer.coordinator.layouts import pack, unpack_specs
from xfer.coordinator.planning import Planning
from xfer.coordinator.refit import Refit, Transfer
from xfer.coordinator.refits import RefitQueue
from xfer.coordinator.state import (
    STRANGER,
    Client,
    Ended,
    KeyValues,
    Options,
    Replica,
    ReplicaPhase,
    broadcast,
    differences,
    hello_violations,
)
from xfer.coordinator.status import Rejected, here, status, waited_for
from xfer.errors import DeadlineExceeded, HandshakeError, PeerLost, PlanMismatch, ProtocolError, XferError
from xfer.trace.catalog import Catalog

logger = logging.getLogger("xfer")
REFUSED_S = 2.0
"""Seconds that a rejected process has to read the reason before its connection is closed."""


class Coordinator:
    """A state machine: call `handle` with each event, and carry out the effects that it returns, in their order.

    Args:
        options: the arguments of trainer 0's connect().
        session: name of this job's session, for timelines.
        now: present time in seconds, of the clock that `handle` is called with.
        before: the session before this one at the same address, if it failed before all trainers had come.
    """

    def __init__(self, options: Options, session: str, now: float, before: Ended | None = None):
        self.options, self.session, self.now, self.before = options, session, now, before
        self.trainers: dict[int, Client] = {}
        self.replicas = {r: Replica(r) for r in range(options.replicas)}
        self.catalog: Catalog | None = None
        self.packed_catalog = b""
        self.generation = 0
        self.specs: dict[int, bytes] = {}
        self.derived: frozenset[tuple[str, str]] = frozenset()  # matrices that engines asked for in FP8, and rules
        self._underived = False  # whether the catalog lacks some of them
        self.respecified: set[Client] = set()  # trainers whose exports changed, until they get a catalog
        self.trainer_inventories: dict[int, bytes] = {}  # trainer -> digest of its layout
        self.silence = Silence()
        self.refit: Refit | None = None  # the running one
        self.copies: dict[int, first_copy.FirstCopy] = {}  # by number, those that are not over
        self.copied = 0  # how many first copies have begun
        self.failure: XferError | None = None  # a trainer is gone: no later refit can succeed
        self.met: set[int] = set()  # trainers that have been connected
        self.clients: set[Client] = set()  # those that were welcomed
        self.hold_s = hold_s(options.trainers, options.replicas)
        self.rejected = Rejected()
        self.store, self.planning, self.refits = KeyValues(), Planning(self), RefitQueue(self)
        self.timers, self._soon = Timers(), deque[Callable[[], None]]()
        self._by_number: dict[int, Client] = {}
        self._effects: list[Effect] = []
        self.opening = True  # trainer 0's connect() waits for all replicas
        self.at(now + options.deadline_s, self._check_opening)
        self.at(now + logs.EVERY_S, self._log_waiting)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event. Raises nothing: a bug fails the job.

        Args:
            event: what happened.
            now: monotonic time in seconds.

        Returns:
            The effects to carry out, in order.
        """
        self.now = max(self.now, now)
        # Due timers run first: if this process was stopped, others have acted on those deadlines already.
        while due := self.timers.due(self.now):
            self._soon += due
            self._run_soon()
        try:
            self._take(event)
        except Exception as e:
            self._own_fault(e)
        self._run_soon()
        effects = self._effects[:]
        self._effects.clear()  # clients hold this list
        return effects

    def _run_soon(self) -> None:
        while self._soon:
            try:
                self._soon.popleft()()
            except Exception as e:
                self._own_fault(e)

    def _own_fault(self, e: Exception) -> None:
        """Fail the job after a bug here, so that no process waits for its deadline."""
        own = XferError(f"the coordinator failed: {type(e).__name__}: {e}")
        self.fail(self, e if isinstance(e, XferError) else own)

    @property
    def wake_at(self) -> float | None:
        """Monotonic time at which `handle(Tick(), now)` is due if nothing happens before; None: never."""
        return self.timers.next

    def at(self, when: float, action: Callable[[], None], of: object = None) -> None:
        """Run `action` at monotonic time `when`, unless `of` is over by then."""
        self.timers.at(when, action, of)

    def soon(self, action: Callable[[], None]) -> None:
        """Run `action` after the present event."""
        self._soon.append(action)

    def _log_waiting(self) -> None:
        if self.opening or self.catalog is None:
            logger.info("xfer: %s; waiting for %s", here(self), "; ".join(waited_for(self)) or "nobody")
            self.at(self.now + logs.EVERY_S, self._log_waiting)

    def mark(self, text: str) -> None:
        """Note a moment of the timeline."""
        self._effects.append(Mark(text))

    # ---- membership

    def domain(self, replica: Replica) -> list[Client]:
        """Return the ranks of a replica in joint rank order: trainers, or the workers of its donor, then its workers."""
        return self.sources(replica) + [replica.workers[i] for i in sorted(replica.workers)]

    def sources(self, replica: Replica) -> list[Client]:
        """Return the ranks from which a replica gets its weights, in their order."""
        if replica.first is not None:
            return replica.first.sources
        return [self.trainers[i] for i in sorted(self.trainers)]

    def _take(self, event: Event) -> None:
        if isinstance(event, Received):
            client = self._by_number.get(event.client)
            if client is not None and not client.left and not client.closed:
                self._receive(client, event.message)
        elif isinstance(event, Connected):
            self._by_number[event.client] = Client(event.client, self._effects)
        elif isinstance(event, Disconnected):
            client = self._by_number.pop(event.client, None)
            if client is not None:
                client.closed = True
                self._gone(client, event.reason)
        elif isinstance(event, Unproven):
            self.rejected.unproven(event.host)

    def _receive(self, client: Client, msg: m.Message) -> None:
        try:
            if client.hello is STRANGER:
                if not isinstance(msg, m.Hello):
                    raise ProtocolError(f"{type(msg).__name__} before hello")
                return self._hello(client, msg)
            kind: type[m.WireMessage] = type(msg)
            h = client.hello
            senders, handler = _RULES.get(kind, ((), None))
            if handler is None or h.role not in senders:
                raise ProtocolError(f"{client.label} may not send {kind.__name__}")
            if kind in _OF_REPLICAS:
                replica = msg.replica  # type: ignore[union-attr]  # these kinds have one
                if replica not in self.replicas and kind is not m.Failed:
                    raise ProtocolError(f"{client.label} speaks of replica {replica}, which does not exist")
                if h.role == "worker" and replica not in self._speaks_for(client):
                    raise ProtocolError(f"{client.label} speaks for replica {replica}")
            if kind in _OF_MEMBERS and not self._is_member(client):
                return None  # its replica was lost, and another process may have its number by now
            return handler(self, client, msg)
        except ProtocolError as e:
            client.send(m.Refused(m.WireError.of(e)))
            client.close()

    def _speaks_for(self, client: Client) -> set[int]:
        """The replicas of which a worker is a rank, or has been one: its own, and those to which it has given first weights."""
        own = client.hello.replica
        return {own, *(self.replicas[own].gave_to if own in self.replicas else ())}

    def _is_member(self, client: Client) -> bool:
        h = client.hello
        if h.role == "trainer":
            return self.trainers.get(h.index) is client
        r = self.replicas[h.replica]
        return client is (r.controller if h.role == "controller" else r.workers.get(h.index))

    def _hello(self, client: Client, h: m.Hello) -> None:
        o = self.options
        if self._over_for(h):
            client.left = True
            return client.close()
        replica = self.replicas.get(h.replica)
        if h.role == "worker" and replica is not None and replica.controller is None:
            # Its controller was told why nothing can join here, and has left. The worker is told the same.
            if (why := self.failure or replica.error) is not None:
                return self._send_away(client, m.Refused(m.WireError.of(why), self.session))
        if bad := hello_violations(h, o, self.trainers, self.replicas):
            return self._refuse(client, h, bad)
        client.hello, client.label = h, h.label
        self.clients.add(client)
        plans = h.role in ("trainer", "worker")
        site = o.site if plans else b""
        client.send(m.Welcome(o.trainers, o.replicas, o.drop, site, o.route, self.session, self.hold_s))
        if h.role == "trainer":
            self._trainer_came(client, h)
        elif h.role == "controller":
            self._controller_came(client, h, self.replicas[h.replica])
        elif h.role == "worker":
            self._worker_came(client, h, self.replicas[h.replica])
        if self.failure is not None:
            client.send(m.Failed(m.WireError.of(self.failure)))

    def _trainer_came(self, client: Client, h: m.Hello) -> None:
        self.trainers[h.index] = client
        self.met.add(h.index)
        if len(self.trainers) == self.options.trainers:
            logger.info("xfer: %d of %d trainers have joined", len(self.trainers), self.options.trainers)
        # Trainers that were connected when a replica failed have been told. Where the job has failed, this one is told only why.
        for r in self.replicas.values() if self.failure is None else ():
            if r.phase in (ReplicaPhase.FAILED, ReplicaPhase.LOST) and r.error is not None:
                client.send(m.Failed(m.WireError.of(r.error), replica=r.index))

    def _controller_came(self, client: Client, h: m.Hello, replica: Replica) -> None:
        replica.renew(client, h.size, self.now + self.options.deadline_s)
        self.at(replica.until, lambda: self._check_join(replica))

    def _worker_came(self, client: Client, h: m.Hello, replica: Replica) -> None:
        replica.workers[h.index] = client
        if len(replica.workers) == replica.size:
            hosts = ", ".join(dict.fromkeys(c.hello.host for c in replica.workers.values()))
            workers = logs.counted(replica.size, "worker")
            logger.info("xfer: replica %d has joined: %s on %s", replica.index, workers, hosts)
        replica.dirty = replica.dirty or h.holds != "whole"
        self.refits.had(h.version)
        session = any(c.hello.session_open for c in replica.workers.values())
        paused = any(c.hello.paused for c in replica.workers.values())
        replica.tell(m.Found(len(replica.workers), replica.holds, session, paused))
        if replica.phase is ReplicaPhase.FAILED and replica.error is not None:
            client.send(m.Failed(m.WireError.of(replica.error), replica=replica.index))
        elif self.catalog is not None:
            client.send(m.CatalogMsg(self.packed_catalog, self.generation))

    def _over_for(self, h: m.Hello) -> bool:
        """Whether this client left this session and wants the next one. A worker does not: its controller came before it."""
        still_here = h.role == "trainer" and h.index in self.trainers  # its Leave is on its way
        return h.after == self.session and h.role != "worker" and (self.failure is not None or still_here)

    def _late_for(self, h: m.Hello) -> Ended | None:
        """Return the session before this one, if it failed without this trainer, which has not been told yet."""
        before = self.before
        missed = before is not None and h.role == "trainer" and h.index in before.missing and h.after != before.session
        return before if missed else None

    def _send_away(self, client: Client, answer: m.Refused) -> None:
        client.send(answer)
        client.left = True
        self.at(self.now + REFUSED_S, client.close)

    def _refuse(self, client: Client, h: m.Hello, bad: list[str]) -> None:
        if bad == differences(h, self.options) and (before := self._late_for(h)) is not None:
            why = f"it came late to the session before this one, and was told why that failed: {before.error.message}"
            self.rejected.refused(h, [f"{h.role} {h.index} (host {h.host}, pid {h.pid}): {why}"])
            return self._send_away(client, m.Refused(before.error, before.session))
        error = HandshakeError(
            "the rendezvous refused this process",
            [f"{h.role} {h.index} (host {h.host}, pid {h.pid}): {b}" for b in bad],
        )
        self.rejected.refused(h, error.violations)
        self._send_away(client, m.Refused(m.WireError.of(error), self.session))
        # It belongs to this job and cannot take part: others would wait for it until their deadline.
        if bad == differences(h, self.options) or (h.role == "worker" and h.index >= h.size):
            replica = self.replicas.get(h.replica)
            if h.role == "trainer":
                self.met.add(h.index)
                self.fail(self, error)
            elif replica is not None and replica.phase is ReplicaPhase.JOINING:
                self.fail(replica, error, gone=True)

    def _leave(self, client: Client, _: m.Leave) -> None:
        client.left = True
        self._departed(client, "left on purpose")
        client.close()

    def _gone(self, client: Client, reason: str) -> None:
        if not client.left:
            self._departed(client, reason)

    def _departed(self, client: Client, reason: str) -> None:
        self.clients.discard(client)
        self.store.drop(client)
        self.planning.departed(client)
        h = client.hello
        if h.role == "observer":
            return
        lost = PeerLost(
            f"{client.label} (host {h.host}, pid {h.pid}) {'has left' if client.left else f'is gone: {reason}'}",
            where="rendezvous",
        )
        if h.role == "trainer":
            self.trainers.pop(h.index, None)
            return self.fail(self, lost, left=client.left)
        replica = self.replicas[h.replica]
        if h.role == "controller" and replica.controller is client:
            replica.controller = None
        elif h.role == "worker" and replica.workers.get(h.index) is client:
            replica.workers.pop(h.index)
        else:
            return
        gave_up = client.left and replica.phase is ReplicaPhase.FAILED  # then it has told the reason
        how = logging.INFO if client.left else logging.WARNING
        logger.log(how, "xfer: replica %d takes part no more: %s", replica.index, lost.message)
        self.fail(replica, replica.error if gave_up and replica.error is not None else lost, gone=True)

    # ---- failures

    def fail(
        self,
        scope: Coordinator | Transfer | ReplicaRefit | Replica,
        error: XferError,
        by: Client | None = None,
        gone: bool = False,
        left: bool = False,
    ) -> None:
        """End what can no longer succeed, and tell the processes that wait for it. The only way to fail:
        a refit whose parts are all over then ends after the present event.

        Args:
            scope: This coordinator: the job, with the running refit and all later ones. A refit or first copy: the parts of all
                replicas that are not decided; or one of these parts. A replica: its joining, plan or link, and its part in the refit
                or its first copy.
            by: the process that reported the error.
            gone: a process of the replica is gone. It takes no part until a new controller joins with its number.
            left: the trainer that the job has lost left on purpose.
        """
        refit = self.refit
        if isinstance(scope, Coordinator):
            self.failure = self.failure or error
            if refit is not None:
                self.fail(refit, error)
            self.end_copies(error)
            for r in self.replicas.values():
                if r.phase.opening:
                    self.stop_ranks(r, error)
            broadcast(self.clients, m.Failed(m.WireError.of(error), left=left))
        elif isinstance(scope, Replica):
            self._end(scope, error, by, gone)
        else:
            scope.end(error, by)

    def _end(self, r: Replica, error: XferError, by: Client | None, gone: bool) -> None:
        """End replica `r`: one of its processes is gone, it got no plan or link, or a process cannot join."""
        refit, before = self.refit, r.phase
        part = refit.parts[r.index] if refit is not None else None
        if r.first is not None and not gone:
            return self.fail(r.first, error, by)
        if gone:
            r.phase, r.error = ReplicaPhase.LOST, error
            if refit is not None and part is not None:
                part.end(error, gone=True)
            if r.first is not None:
                r.first.end(error, gone=True)
            lost = PeerLost(f"replica {r.index}, which gave the weights, is lost", [str(error)])
            self.end_copies(lost, donor=r)
            relays.left(self, r)
            waiting, unheard = r.processes(), part is None  # else the outcome tells the trainers
        else:
            r.phase, r.error = ReplicaPhase.FAILED, error
            unheard = part is None or part.over
            if before.opening:  # processes that were told of the refit have joined, and hear of the abort
                waiting = [] if r.joined else r.processes()
            else:  # workers of a ready replica have joined: they would take this message for the end of a later refit
                some = r.processes() if before is ReplicaPhase.JOINING else [r.controller]
                waiting = [c for c in some if c is not None and c is not by]
        if before.opening:
            self.stop_ranks(r, error)
        told = m.Failed(m.WireError.of(error), replica=r.index)
        broadcast(waiting, told)
        if gone:
            r.controller, r.workers, r.inventories, r.version, r.unsettled = None, {}, {}, None, 0
        elif part is not None and not unheard:
            self.fail(part, error, None if before.opening else by)
        if unheard:
            broadcast(self.trainers.values(), told)

    def end_copies(self, error: XferError, donor: Replica | None = None) -> None:
        """End all first copies that are not decided, or all those of one donor."""
        for copy in list(self.copies.values()):
            if donor in (None, copy.donor):
                self.fail(copy, error)

    def stop_ranks(self, replica: Replica, error: XferError) -> None:
        """Stop the ranks that plan, link or move for this replica. Freeing a blocked one breaks the link for good."""
        running = replica.first or self.refit
        number = running.number if running is not None else 0
        abort = m.Abort(replica.index, number, replica.epoch, m.WireError.of(error))
        broadcast(self.domain(replica), abort)

    def _check_opening(self) -> None:
        replicas = self.opening and not all(r.joined for r in self.replicas.values())
        if self.failure is None and (self.catalog is None or replicas):
            late = f"not all are ready after {self.options.deadline_s:.0f} s: {here(self)}"
            self.fail(self, DeadlineExceeded(late, [*waited_for(self), *self.rejected.lines()]))

    def _check_join(self, replica: Replica) -> None:
        if replica.phase is ReplicaPhase.JOINING and self.now >= replica.until:
            missing = [f"worker {i}" for i in range(replica.size) if i not in replica.inventories]
            missing += [f"trainer {i}" for i in range(self.options.trainers) if i not in self.trainer_inventories]
            late = f"replica {replica.index} did not finish joining within {self.options.deadline_s:.0f} s"
            self.fail(replica, DeadlineExceeded(late, [f"no layout yet from {x}" for x in missing]), gone=True)

    # ---- catalog and layouts

    def _specs_came(self, client: Client, msg: m.Specs) -> None:
        h = client.hello
        if h.role == "worker":
            replica = self.replicas[h.replica]
            replica.derives = True
            replica.wanted[h.index] = {(s.of, s.rule) for s in Catalog.from_bytes(unpack_specs(msg.catalog)[0]).specs}
            return self._derive(replica)
        self.specs[h.index] = msg.catalog
        if self.catalog is not None:  # the new one is made when all trainers are ready
            self.trainer_inventories.pop(h.index, None)
            self.respecified.add(client)
            self._trainers_changed()
        elif len(self.specs) == self.options.trainers:
            try:
                self.make_catalog()
            except XferError as e:
                self.fail(self, e)

    def _derive(self, replica: Replica) -> None:
        """Make a catalog with the derived tensors that a replica's workers need, once all of them have told what they need. While bytes
        move by the old catalog, the new one waits until all trainers are ready for the next refit."""
        if replica.wanted and len(replica.wanted.keys() | replica.inventories.keys()) == replica.size:
            self.derived = self.derived.union(*replica.wanted.values())
            replica.wanted = {}
            self._underived = self.refit is not None and self.refit.moves
            if not self._underived:
                self.make_catalog()

    def make_catalog(self, anew: bool = False) -> bool:
        """Unite what the trainers export, and what they have to derive from it. Returns whether there is a new catalog.

        Args:
            anew: Make a new catalog even if nothing has changed.

        Raises:
            LayoutError: trainers disagree about a tensor.
            CoverageError: no tensor that trains would be sent.
        """
        told = {i: unpack_specs(b) for i, b in sorted(self.specs.items())}
        union = Catalog.union((f"trainer {i}", Catalog.from_bytes(catalog).specs) for i, (catalog, _) in told.items())
        union, self._underived = union.deriving(self.derived), False
        refuse_untrained({name for _, names in told.values() for name in names}, self.options.drop)
        if self.catalog is not None and union.digest() == self.catalog.digest() and not anew:
            return False
        self.end_copies(PlanMismatch("an engine wants weights in another form"))
        self.catalog, self.generation = union, self.generation + 1
        self.trainer_inventories.clear()
        for r in self.replicas.values():
            r.inventories.clear()
            r.stale = True
        self.packed_catalog = pack([union.to_bytes()])
        message = m.CatalogMsg(self.packed_catalog, self.generation)
        broadcast(self.trainers.values(), message)
        for r in self.replicas.values():
            broadcast(r.workers.values(), message)
        if self.refit is not None:
            self.refit.shared.measure_again()
        return True

    def _inventory_came(self, client: Client, msg: m.InventoryMsg) -> None:
        """Keep the digest of a layout. Plans that were made before may not run any more."""
        if msg.generation != self.generation:
            return  # made from an older catalog; the client is about to receive the newer one
        h, refit = client.hello, self.refit
        if h.role == "worker":
            r = self.replicas[h.replica]
            r.inventories[h.index], r.stale = msg.inventory, True
            self._derive(r)
            self.plan_if_complete(r)
        else:
            self.trainer_inventories[h.index] = msg.inventory
            self._trainers_changed()
            if refit is None or refit.all_ready:  # else other layouts may change, too
                self.plan_complete()
        if refit is not None:
            refit.shared.agree()
            refit.advance()

    def _trainers_changed(self) -> None:
        """Note that the trainers' exports, or their layouts, have changed. Plans with a donor stay valid."""
        for r in self.replicas.values():
            r.stale = r.stale or r.first is None

    def can_plan(self, replica: Replica) -> bool:
        """Whether the layouts of all ranks of a replica are known."""
        known = replica.first is not None or len(self.trainer_inventories) == self.options.trainers
        return replica.complete and known

    def note_moves(self, client: Client, msg: m.Ready | m.Armed) -> None:
        """Note storages that have moved and links that broke, whatever becomes of the refit: a rank reports them once."""
        if msg.rebound:
            trainer = client.hello.role == "trainer"
            for r in self.replicas.values() if trainer else [self.replicas[client.hello.replica]]:
                r.reopen = r.reopen or r.first is None or not trainer
                if client.hello.role == "worker":
                    r.hands = {}
        for i in getattr(msg, "broken", ()):
            if i in self.replicas and self.replicas[i].first is None:
                self.replicas[i].relink = True

    def settle_catalog(self) -> None:
        """All trainers have reported their changes: send a new catalog to all, or the old one to trainers that wait for one.

        If trainers disagree, the running refit fails; their exports may agree in the next one.
        """
        try:
            again = self.refit is not None and self.refit.shared.used
            if (self.respecified or self._underived) and not self.make_catalog(anew=again):
                broadcast(self.respecified, m.CatalogMsg(self.packed_catalog, self.generation))
            self.respecified = set()
        except XferError as e:
            if self.refit is not None:
                self.fail(self.refit, e)

    def plan_if_complete(self, replica: Replica) -> None:
        """Plan a replica that joins, or that is making a plan which became stale, once all layouts that it needs are known."""
        if replica.phase is ReplicaPhase.JOINING or (replica.stale and replica.phase.opening):
            if replica.phase is ReplicaPhase.JOINING and replica.complete:
                first_copy.begin(self, replica)
            if self.can_plan(replica):
                self.planning.plan(replica)

    def plan_complete(self) -> None:
        for r in self.replicas.values():
            self.plan_if_complete(r)

    # ---- the rest

    def _settled(self, client: Client, msg: m.Settled) -> None:
        replica = self.replicas[client.hello.replica]
        if msg.serving:
            replica.note_pause(False)
        if msg.attempt == replica.unsettled:
            replica.settled(msg)
        self._for_refit(client, msg)
        if self.refit is not None:
            self.refit.arm(replica)
            self.refit.advance()

    def _running(self, number: int) -> Transfer | None:
        """Return the refit or the first copy of this number, if it is not over."""
        return self.refit if self.refit is not None and self.refit.number == number else self.copies.get(number)

    def _armed(self, client: Client, msg: m.Armed) -> None:
        if (running := self._running(msg.attempt)) is not None:
            return running.handle(client, msg)
        # That refit is over. A controller that was closed since may have called the worker into it, and the worker would hold
        # the engine until that refit's deadline. Epoch 0: nothing of a later refit is stopped.
        self.note_moves(client, msg)
        over = m.WireError.of(PeerLost(f"refit {msg.attempt} is over"))
        client.send(m.Abort(client.hello.replica, msg.attempt, 0, over))

    def _for_refit(self, client: Client, msg: m.Done | m.PartReady | m.Committed | m.Stopped | m.Settled) -> None:
        if (running := self._running(msg.attempt)) is not None:  # else the answer comes too late
            running.handle(client, msg)

    def _ready(self, client: Client, msg: m.Ready) -> None:
        self.note_moves(client, msg)
        self.refits.told(client, msg)

    def _progress(self, client: Client, msg: m.Progress) -> None:
        client.progress = msg


_TRAINER, _WORKER, _CONTROLLER = ("trainer",), ("worker",), ("controller",)
_DOMAIN, _ALL = ("trainer", "worker"), ("trainer", "worker", "controller", "observer")
_OF_MEMBERS = frozenset({m.Specs, m.InventoryMsg, m.Armed, m.Planned, m.LinkOpen, m.Failed, m.Settled})
_Handler = Callable[[Coordinator, Client, Any], None]  # of the message that is its key

_RULES: dict[type[m.WireMessage], tuple[tuple[str, ...], _Handler]] = {
    m.Leave: (_ALL, Coordinator._leave),
    m.Ping: (_ALL, lambda co, client, msg: client.send(m.Reply(msg.call))),
    m.StatusAsk: (_ALL, lambda co, client, msg: client.send(status(co))),
    m.Progress: (_DOMAIN, Coordinator._progress),
    m.Failed: (_TRAINER + _WORKER + _CONTROLLER, failures.heard),
    m.Specs: (_DOMAIN, Coordinator._specs_came),
    m.InventoryMsg: (_DOMAIN, Coordinator._inventory_came),
    m.Fetch: (_DOMAIN, lambda co, client, msg: co.planning.layouts.fetch(client, msg)),
    m.Layout: (_DOMAIN, lambda co, client, msg: co.planning.layouts.came(client, msg)),
    m.Planned: (_DOMAIN, lambda co, client, msg: co.planning.planned(client, msg)),
    m.LinkOpen: (_DOMAIN, lambda co, client, msg: co.planning.link_open(client, msg)),
    m.Release: (_TRAINER, lambda co, client, msg: co.planning.release(client, msg.call)),
    m.RoutesClosed: (_DOMAIN, lambda co, client, msg: co.planning.closed(client, msg.replica)),
    m.Prepare: (_TRAINER, lambda co, client, msg: co.refits.prepare(msg)),
    m.Enter: (_TRAINER, lambda co, client, msg: co.refits.enter(client, msg)),
    m.Measured: (_TRAINER, lambda co, client, msg: co.refits.told(client, msg)),
    m.Ready: (_TRAINER, Coordinator._ready),
    m.Armed: (_WORKER, Coordinator._armed),
    m.PartReady: (_WORKER, Coordinator._for_refit),
    m.Done: (_DOMAIN, Coordinator._for_refit),
    m.Committed: (_WORKER, Coordinator._for_refit),
    m.Stopped: (_WORKER, Coordinator._for_refit),
    m.Settled: (_CONTROLLER, Coordinator._settled),
    m.StoreAsk: (_DOMAIN, lambda co, client, msg: co.store.handle(client, msg, co._speaks_for(client))),
}
"""By message: the roles that may send it, and its handler. All other messages are sent by the coordinator only."""

_OF_REPLICAS = frozenset(kind for kind in _RULES if "replica" in kind.__struct_fields__)
