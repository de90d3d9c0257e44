"""The rendezvous: one hub per job, in trainer rank 0's process. It introduces, relays and decides; it never touches weights.

One thread per connection reads; one thread, the *brain*, handles every event in order, so that state needs no lock. Here:
threads, who is connected, catalogs and inventories, and which message goes where. Beside it: `door.py` (who may come in),
`roster.py` (clients, replicas), `planning.py` (a replica's plan and link), `calls.py` and `attempt.py` (refits), `failures.py` (who is told
of one), `keyvalue.py` (the store).

    trainers --Specs--> hub --CatalogMsg--> trainers, workers --InventoryMsg--> hub
    hub --PlanInputs(replica)--> its domain --Planned(digest)--> hub --OpenLink--> domain --LinkOpen--> hub --ReplicaReady--> trainers

The *domain* of a replica is all trainers and that replica's workers: an error in it ends there, other replicas go on.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone

from xfer.ending import wait_for_all
from xfer.errors import DeadlineExceeded, HandshakeError, PeerLost, ProtocolError, XferError
from xfer.session import failures, relays
from xfer.session import messages as m
from xfer.session.attempt import Attempt
from xfer.session.bounds import STOP_GRACE_S
from xfer.session.calls import Calls
from xfer.session.channel import Channel
from xfer.session.door import Door
from xfer.session.keyvalue import KeyValues
from xfer.session.packing import pack, unpack_one
from xfer.session.planning import Planning
from xfer.session.roster import Client, HubOptions, Replica, differences, hello_violations
from xfer.session.status import status
from xfer.session.timers import Timers
from xfer.session.turned_away import TurnedAway
from xfer.trace.catalog import Catalog

GOODBYE_S = 2.0
"""Seconds that clients have, together, to read what they were told before the hub closed."""


@dataclass(frozen=True)
class Ended:
    """A session that failed before all of its trainers had come. The `missing` ones may come late, and meet the next session."""

    session: str
    error: m.WireError
    missing: frozenset[int]


_ended: dict[str, Ended] = {}
"""By rendezvous: the last session that this process hosted there, if it ended so."""


class Hub:
    """Listens at `rendezvous` from construction until `close()`."""

    def __init__(self, rendezvous: str, token: str, options: HubOptions):
        self.options, self.rendezvous, self.before = options, rendezvous, _ended.get(rendezvous)
        self.session = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f ") + secrets.token_hex(2)
        self.trainers: dict[int, Client] = {}
        self.replicas = {r: Replica(r) for r in range(options.replicas)}
        self.catalog: Catalog | None = None
        self.packed_catalog = b""
        self.generation = 0
        self.specs: dict[int, bytes] = {}
        self._respecified: set[Client] = set()
        self.trainer_inventories: dict[int, bytes] = {}
        self.attempt: Attempt | None = None
        self.failure: XferError | None = None  # a trainer is gone: nothing can be refitted any more
        self.met: set[int] = set()  # trainers that have been here
        self.clients: set[Client] = set()
        self._admitted: set[Client] | None = set()  # these, and who has not said hello yet or was refused; None: closed
        self._admitting = threading.Lock()
        self.store, self.planning, self.calls = KeyValues(), Planning(self), Calls(self)
        self.timers = Timers()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._think, name="xfer-hub", daemon=True)
        self.at(time.monotonic() + options.deadline_s, self._check_trainers)
        self.turned_away = TurnedAway()
        self.door = Door(rendezvous, token, self._admit, self.turned_away.unproven)
        self._thread.start()

    # ---- threads

    def _admit(self, channel: Channel) -> None:
        client = Client(channel)
        with self._admitting:
            if self._admitted is None:  # it proved the token while the door was being closed
                return channel.close()
            self._admitted.add(client)
        channel.start(
            lambda msg: self._events.put(lambda: self._handle(client, msg)),
            lambda reason: self._events.put(lambda: self._gone(client, reason)),
        )

    def _think(self) -> None:
        while True:
            now = time.monotonic()
            try:
                event = self._events.get(timeout=min(1.0, max(0.0, self.timers.next(now + 1.0) - now)))
            except queue.Empty:
                event = self._nothing
            if event is None:
                return
            # What is due goes first: if this process was stopped, deadlines have passed that all others have acted on.
            for f in (*self.timers.due(time.monotonic()), event):
                try:
                    f()
                except Exception as e:  # a bug here must not leave everyone waiting for their deadlines
                    self.fail_everything(
                        e if isinstance(e, XferError) else XferError(f"the hub failed: {type(e).__name__}: {e}")
                    )

    @staticmethod
    def _nothing() -> None:
        pass

    def at(self, when: float, action: Callable[[], None], of: object = None) -> None:
        """Run `action` on the brain at monotonic time `when`; not if `of` is over by then."""
        self.timers.at(when, action, of)

    def hear_out(self, trainer: int) -> None:
        """Until the brain has heard that this one has left, and so all that it said before: why, too, which others are to be told."""
        until = time.monotonic() + GOODBYE_S
        while trainer in self.trainers and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    def close(self, until: float = 0.0) -> None:
        """Not before monotonic time `until` while trainers are still to come: here they learn why there is nothing to join,
        at a closed door they would knock until their deadline. Nor while an attempt is undone: an engine that hears no more
        of it must take the worst for granted."""
        while (0 in self.trainers or len(self.met) < self.options.trainers) and time.monotonic() < until:
            time.sleep(0.02)
        ends = time.monotonic() + STOP_GRACE_S
        # Not only once the brain has heard that trainer 0 leaves: it may be busy.
        while self.attempt is not None and self._thread.is_alive() and time.monotonic() < ends:
            time.sleep(0.005)
        self.door.close()
        self._events.put(None)
        self._thread.join(timeout=5.0)
        missing = frozenset(range(self.options.trainers)) - self.met
        if self.failure is not None and missing:
            _ended[self.rendezvous] = Ended(self.session, m.WireError.of(self.failure, "rendezvous"), missing)
        else:
            _ended.pop(self.rendezvous, None)
        with self._admitting:
            clients, self._admitted = list(self._admitted or ()), None
        for c in clients:
            c.finish()
        # Each reads to our end, and closes its own.
        wait_for_all([*(c.say_all for c in clients), *(c.channel.join for c in clients)], GOODBYE_S)
        for c in clients:
            c.channel.close()
        wait_for_all(c.channel.join for c in clients)

    # ---- who is here

    def domain(self, replica: Replica) -> list[Client]:
        """Trainers, then workers, in joint rank order."""
        return [self.trainers[i] for i in sorted(self.trainers)] + [replica.workers[i] for i in sorted(replica.workers)]

    def broadcast(self, clients: Iterable[Client], message: m.Message) -> None:
        for c in clients:
            c.send(message)

    def _handle(self, client: Client, msg: m.Message) -> None:
        if client.left or client.channel.closed and not isinstance(msg, m.Leave | m.Stopped | m.Failed):
            return
        try:
            if client.hello is None:
                if not isinstance(msg, m.Hello):
                    raise ProtocolError(f"{type(msg).__name__} before hello")
                return self._hello(client, msg)
            if client.hello.role not in _SENDERS.get(type(msg), ()):
                raise ProtocolError(f"{client.label} may not send {type(msg).__name__}")
            replica = getattr(msg, "replica", None)
            if replica is not None and not (replica in self.replicas or isinstance(msg, m.Failed)):
                raise ProtocolError(f"{client.label} speaks of replica {replica}, which does not exist")
            if replica is not None and client.hello.role == "worker" and replica != client.hello.replica:
                raise ProtocolError(f"{client.label} speaks for replica {replica}")
            if isinstance(msg, _OF_MEMBERS) and not self._is_member(client):
                return None  # of a life that its replica has lost: another one may have begun with the same number
            name = type(msg).__name__
            handler = getattr(self, f"_on_{name}", None) or getattr(self.calls, f"on_{name}", None)
            if handler is not None:
                return handler(client, msg)
            if self.attempt is not None and self.attempt.takes(msg):
                return self.attempt.handle(client, msg)
            if isinstance(msg, m.Armed):
                return self.take_changes(client, msg)  # to one that is over; the worker leaves it by its own deadline
            if isinstance(msg, _LATE):
                return None  # an answer to an attempt that is over: refused by being ignored
            raise ProtocolError(f"{client.label} sent {type(msg).__name__}, which is not for the hub now")
        except ProtocolError as e:
            refused = m.Refused(m.WireError.of(e, "rendezvous"))
            if not client.channel.send_now(refused):  # what is queued is written by another thread, to a closed connection then
                client.send(refused)
            client.channel.close()

    def _is_member(self, client: Client) -> bool:
        h = client.hello
        if h.role == "trainer":
            return self.trainers.get(h.index) is client
        r = self.replicas[h.replica]
        return client is (r.controller if h.role == "controller" else r.workers.get(h.index))

    def _hello(self, client: Client, h: m.Hello) -> None:
        o, replica = self.options, self.replicas.get(h.replica)
        if self._over_for(h):
            return self._turn_away(client, m.Again())
        bad = hello_violations(h, o, self.trainers, self.replicas)
        if bad and bad == differences(h, o) and (before := self._late_for(h)) is not None:
            why = f"it came late to the session before this one, and was told why that failed: {before.error.message}"
            self.turned_away.refused(h, [f"{h.role} {h.index} (host {h.host}, pid {h.pid}): {why}"])
            return self._turn_away(client, m.Refused(before.error, before.session))
        if bad:
            error = HandshakeError(
                "the rendezvous refused this process",
                [f"{h.role} {h.index} (host {h.host}, pid {h.pid}): {b}" for b in bad],
            )
            self.turned_away.refused(h, error.violations)
            self._turn_away(client, m.Refused(m.WireError.of(error, "rendezvous"), self.session))
            # It is one of us and cannot come in: the others would wait for it in vain.
            if bad == differences(h, o) or (h.role == "worker" and h.index >= h.size):
                if h.role == "trainer":
                    self.fail_everything(error)
                elif replica is not None and replica.state == "joining":
                    self.lose(replica, error)
            return
        client.hello = h
        client.channel.label = client.label
        self.clients.add(client)
        plans = h.role in ("trainer", "worker")
        client.send(m.Welcome(o.trainers, o.replicas, o.drop, o.site if plans else b"", o.route, self.session))
        if h.role == "trainer":
            self.trainers[h.index] = client
            for r in self.replicas.values():  # trainers who were here when it ended have been told
                if r.state in ("failed", "lost") and r.error is not None:
                    client.send(m.Failed(m.WireError.of(r.error, "rendezvous"), replica=r.index))
        elif h.role == "controller":
            replica.controller, replica.size, replica.state, replica.error = client, h.size, "joining", None
            replica.workers, replica.inventories, replica.version, replica.dirty = {}, {}, "", False
            replica.until = time.monotonic() + o.deadline_s
            self.at(replica.until, lambda: self._check_join(replica))
        elif h.role == "worker":
            replica.workers[h.index] = client
            replica.dirty = replica.dirty or h.holds != "whole"
            self.calls.had(h.version)
            session = any(c.hello.session_open for c in replica.workers.values())
            replica.controller.send(m.Found(len(replica.workers), replica.holds, session))
            if replica.state == "failed" and replica.error is not None:  # those who were here when it did have been told
                client.send(m.Failed(m.WireError.of(replica.error, "rendezvous"), replica=replica.index))
            elif self.catalog is not None:
                client.send(m.CatalogMsg(self.packed_catalog, self.generation))
        if self.failure is not None:
            client.send(m.Failed(m.WireError.of(self.failure, "rendezvous")))
        if h.role == "trainer":
            self.met.add(h.index)

    def _turn_away(self, client: Client, answer: m.Refused | m.Again) -> None:
        client.send(answer)
        client.left = True
        self.at(time.monotonic() + 2.0, client.channel.close)

    def _over_for(self, h: m.Hello) -> bool:
        """Whether this client has left this session and waits for the next one. Workers come only where their controller is."""
        still_here = h.role == "trainer" and h.index in self.trainers  # its Leave has not arrived
        return h.after == self.session and h.role != "worker" and (self.failure is not None or still_here)

    def _late_for(self, h: m.Hello) -> Ended | None:
        """The session before this one, if it failed without this trainer and the trainer has not been told why."""
        before = self.before
        missed = before is not None and h.role == "trainer" and h.index in before.missing and h.after != before.session
        return before if missed else None

    def _gone(self, client: Client, reason: str) -> None:
        client.finish()
        with self._admitting:
            if self._admitted is not None:
                self._admitted.discard(client)
        self.clients.discard(client)
        self.store.drop(client)
        self.planning.let_go.discard(client)
        self.planning.closed(client)
        self.at(time.monotonic(), lambda: self.planning.layouts.gone(client))  # when it is out of the roster
        h = client.hello
        if h is None or h.role == "observer":
            return
        lost = PeerLost(
            f"{client.label} (host {h.host}, pid {h.pid}) {'left' if client.left else 'is gone'}: {reason}",
            where="rendezvous",
        )
        if h.role == "trainer":
            self.trainers.pop(h.index, None)
            self.fail_everything(lost)
            return
        replica = self.replicas[h.replica]
        if h.role == "controller" and replica.controller is client:
            replica.controller = None
        elif h.role == "worker" and replica.workers.get(h.index) is client:
            replica.workers.pop(h.index)
        else:
            return
        gave_up = client.left and replica.state == "failed"  # then it has said why
        self.lose(replica, replica.error if gave_up and replica.error is not None else lost)

    def _on_Leave(self, client: Client, _: m.Leave) -> None:
        client.left = True
        h = client.hello
        if h.role != "observer":
            self._gone(client, "left on purpose")
        client.hello = None
        client.channel.close()

    def lose(self, replica: Replica, error: XferError) -> None:
        """A process of this replica is gone: it is out until a new controller joins with its number."""
        if replica.state == "lost":
            return
        was, replica.state, replica.error = replica.state, "lost", error
        if self.attempt is not None:
            self.attempt.lost(replica, error)
        relays.left(self, replica)
        if was in ("planning", "linking"):
            self.planning.abort(replica, error)
        wire = m.WireError.of(error, "rendezvous")
        self.broadcast(replica.processes(), m.Failed(wire, replica=replica.index))
        replica.controller, replica.workers, replica.inventories, replica.version = None, {}, {}, ""
        replica.unsettled = 0
        if self.attempt is None:
            self.broadcast(self.trainers.values(), m.Failed(wire, replica=replica.index))

    def fail_everything(self, error: XferError) -> None:
        """A trainer is gone or the hub is broken: every attempt ends and no later one can succeed."""
        if self.failure is None:
            self.failure = error
        if self.attempt is not None:
            self.attempt.fail(error)
        wire = m.WireError.of(error, "rendezvous")
        for r in self.replicas.values():
            if r.state in ("planning", "linking"):
                self.planning.abort(r, error)
        self.broadcast(list(self.clients), m.Failed(wire))

    def _check_trainers(self) -> None:
        missing = [i for i in range(self.options.trainers) if i not in self.specs]
        if missing and self.failure is None:
            self.fail_everything(
                DeadlineExceeded(
                    f"not all of {self.options.trainers} trainer ranks connected within {self.options.deadline_s:.0f} s",
                    [*map(self._why_missing, missing), *self.turned_away.lines()],
                )
            )

    def _why_missing(self, i: int) -> str:
        if i in self.trainers:
            return f"trainer {i}: it has not said what it exports"
        return f"trainer {i}: it {'was turned away' if self.turned_away.trainer(i) else 'has not called xfer.connect()'}"

    def _check_join(self, replica: Replica) -> None:
        if replica.state == "joining" and time.monotonic() >= replica.until:
            missing = [f"worker {i}" for i in range(replica.size) if i not in replica.inventories]
            missing += [f"trainer {i}" for i in range(self.options.trainers) if i not in self.trainer_inventories]
            self.lose(
                replica,
                DeadlineExceeded(
                    f"replica {replica.index} did not finish joining within {self.options.deadline_s:.0f} s",
                    [f"no layout yet from {x}" for x in missing],
                ),
            )

    # ---- catalog and inventories

    def _on_RollAsk(self, client: Client, msg: m.RollAsk) -> None:
        self.planning.layouts.roll_asked(client, msg)

    def _on_LayoutsAsk(self, client: Client, msg: m.LayoutsAsk) -> None:
        self.planning.layouts.layouts_asked(client, msg)

    def _on_Layout(self, client: Client, msg: m.Layout) -> None:
        self.planning.layouts.came(client, msg)

    def _on_Specs(self, client: Client, msg: m.Specs) -> None:
        self.specs[client.hello.index] = msg.catalog
        if len(self.specs) == self.options.trainers:
            try:
                self.make_catalog()
            except XferError as e:
                self.fail_everything(e)

    def make_catalog(self) -> bool:
        """Union of what the trainers export; True when it changed. LayoutError when they disagree."""
        parts = [
            (f"trainer {i}", Catalog.from_bytes(unpack_one(b, "specs")).specs) for i, b in sorted(self.specs.items())
        ]
        union = Catalog.union(parts)
        if self.catalog is not None and union.digest() == self.catalog.digest():
            return False
        self.catalog, self.generation = union, self.generation + 1
        self.trainer_inventories.clear()
        for r in self.replicas.values():
            r.inventories.clear()
            r.stale = True
        self.packed_catalog = pack([union.to_bytes()])
        message = m.CatalogMsg(self.packed_catalog, self.generation)
        self.broadcast(self.trainers.values(), message)
        for r in self.replicas.values():
            self.broadcast(r.workers.values(), message)
        return True

    def _on_InventoryMsg(self, client: Client, msg: m.InventoryMsg) -> None:
        if msg.generation != self.generation:
            return  # made from an older catalog; a newer one is on its way
        self.take_inventory(client, msg.inventory)
        for r in self.replicas.values():
            self.plan_if_complete(r)
        if self.attempt is not None:
            self.attempt.advance()

    def take_inventory(self, client: Client, data: bytes) -> None:
        """From here on no plan that was made before may run."""
        h = client.hello
        if h.role == "trainer":
            self.trainer_inventories[h.index] = data
            for r in self.replicas.values():
                r.stale = True
        elif h.role == "worker":
            self.replicas[h.replica].inventories[h.index] = data
            self.replicas[h.replica].stale = True

    def take_changes(self, client: Client, msg: m.Ready | m.Armed, specs: bytes = b"") -> None:
        """What a rank found changed on entry. Kept whatever becomes of the attempt: the rank will not say it again."""
        inventory, generation, h = msg.inventory, msg.generation, client.hello
        if msg.rebound:
            for r in self.replicas.values() if h.role == "trainer" else [self.replicas[h.replica]]:
                r.reopen = True
        for r in [self.replicas[i] for i in getattr(msg, "broken", ()) if i in self.replicas]:
            r.relink = True
        if specs:
            self.specs[client.hello.index] = specs
            self.trainer_inventories.pop(client.hello.index, None)  # a new one follows the catalog
            self._respecified.add(client)
            for r in self.replicas.values():
                r.stale = True
        elif inventory and generation == self.generation:
            self.take_inventory(client, inventory)

    def settle_catalog(self) -> None:
        """After all ranks said what changed: a new catalog for everyone, or the same for those who wait for one. Where they
        disagree this attempt is over; what they export may fit again by the next."""
        try:
            if self._respecified and not self.make_catalog():
                self.broadcast(self._respecified, m.CatalogMsg(self.packed_catalog, self.generation))
            self._respecified = set()
        except XferError as e:
            self.attempt.fail(e)

    def plan_if_complete(self, replica: Replica) -> None:
        if not replica.complete or len(self.trainer_inventories) < self.options.trainers:
            return
        if replica.state == "joining" or (replica.stale and replica.state in ("planning", "linking")):
            self.planning.plan(replica)  # in the place of a plan of layouts that are gone: nobody answers for those

    def _on_Planned(self, client: Client, msg: m.Planned) -> None:
        self.planning.planned(client, msg)

    def _on_LinkOpen(self, client: Client, msg: m.LinkOpen) -> None:
        self.planning.link_open(client, msg)

    def _on_Release(self, client: Client, msg: m.Release) -> None:
        self.planning.release(client, msg.number)

    def _on_RoutesClosed(self, client: Client, msg: m.RoutesClosed) -> None:
        self.planning.closed(client, msg.replica)

    def _on_Failed(self, client: Client, msg: m.Failed) -> None:
        failures.heard(self, client, msg)

    def _on_Settled(self, client: Client, msg: m.Settled) -> None:
        replica = self.replicas[client.hello.replica]
        if msg.attempt == replica.unsettled:
            replica.settled(msg)
        if self.attempt is not None and self.attempt.takes(msg):
            self.attempt.handle(client, msg)
        if self.attempt is not None:
            self.attempt.advance()

    # ---- the store: only introduces peers to each other's data addresses

    def _prefix(self, client: Client) -> str:
        return "" if client.hello.role == "trainer" else f"r{client.hello.replica}/"

    def _on_StoreSet(self, client: Client, msg: m.StoreSet) -> None:
        self.store.set(msg, self._prefix(client))

    def _on_StoreGet(self, client: Client, msg: m.StoreGet) -> None:
        self.store.get(client, msg, self._prefix(client))

    def _on_StoreAdd(self, client: Client, msg: m.StoreAdd) -> None:
        self.store.add(client, msg, self._prefix(client))

    def _on_StoreCheck(self, client: Client, msg: m.StoreCheck) -> None:
        self.store.check(client, msg, self._prefix(client))

    # ---- observers

    def _on_Progress(self, client: Client, msg: m.Progress) -> None:
        client.progress = msg

    def _on_Ping(self, client: Client, _: m.Ping) -> None:
        client.send(m.Pong())

    def _on_StatusAsk(self, client: Client, _: m.StatusAsk) -> None:
        client.send(status(self))


_LATE = (m.Brought, m.Done, m.Committed, m.Stopped, m.Settled)

_OF_MEMBERS = m.InventoryMsg | m.Armed | m.Planned | m.LinkOpen | m.Failed | m.Settled
_BOTH, _ALL = ("trainer", "worker"), ("trainer", "worker", "controller", "observer")
_SENDERS: dict[type, tuple[str, ...]] = {
    m.Specs: ("trainer",), m.InventoryMsg: _BOTH, m.RollAsk: _BOTH, m.LayoutsAsk: _BOTH, m.Layout: _BOTH,
    m.Planned: _BOTH, m.LinkOpen: _BOTH, m.Prepare: ("trainer",), m.Enter: ("trainer",),
    m.Ready: ("trainer",),
    m.Armed: ("worker",), m.Brought: ("worker",), m.Progress: _BOTH, m.Done: _BOTH, m.Committed: ("worker",), m.Stopped: ("worker",),
    m.Settled: ("controller",), m.Failed: ("trainer", "worker", "controller"), m.Leave: _ALL, m.StoreSet: _BOTH, m.StoreGet: _BOTH,
    m.StoreAdd: _BOTH, m.StoreCheck: _BOTH, m.Ping: _ALL, m.StatusAsk: _ALL, m.Release: ("trainer",), m.RoutesClosed: _BOTH,
}  # fmt: skip
"""Which role may send what. A message that is not listed comes from the hub only."""
