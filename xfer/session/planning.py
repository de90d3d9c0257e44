"""How a replica gets its plan and its link: inventories out, equal digests back, then one data link per epoch.

    joining -> planning --all digests equal--> linking --all links open--> ready (postpone: without a link)
    planning, linking --error, deadline--> failed (planned anew by the next attempt)

Runs on the hub's brain thread. What a plan is, is plan/'s business; here its digest is a string.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xfer.errors import DeadlineExceeded, PlanMismatch, XferError
from xfer.session import messages as m
from xfer.session import relays
from xfer.session.layouts import Relay

if TYPE_CHECKING:
    from xfer.session.hub import Hub
    from xfer.session.roster import Client, Replica


class Planning:
    def __init__(self, hub: Hub):
        self.hub = hub
        self.layouts = Relay(self._owners)
        self._closing: set[tuple[Client, int]] = set()  # who has not unmapped yet, of which replica
        self._releasing: dict[Client, int] = {}  # trainers that wait for them, and the number of what each asked last
        self.let_go: set[Client] = set()  # trainers that released and have not entered a refit since

    def plan(self, replica: Replica) -> None:
        """Start a planning epoch for a replica whose inventories are all here."""
        replica.epoch += 1
        replica.stage()
        replica.state, replica.error, replica.relink, replica.stale = "planning", None, False, False
        replica.digests, replica.pending = {}, set(self.hub.domain(replica))
        replica.until = time.monotonic() + self.hub.options.deadline_s
        domain, o = self.hub.domain(replica), self.hub.options
        sides = (
            (self.hub.trainer_inventories, o.trainers, domain[: o.trainers]),
            (replica.inventories, replica.size, domain[o.trainers :]),
        )
        rolls = [
            self.layouts.roll([held[i] for i in range(n)], [c.hello.host for c in clients], keep=2 * o.replicas + 2)
            for held, n, clients in sides
        ]
        turn = relays.turn(rolls[1], o.replicas) if o.relay else replica.index
        self.hub.broadcast(domain, m.PlanInputs(
            replica.index, replica.epoch, *rolls, turn, o.replicas, o.drop, o.narrow, o.bucket_bytes, o.deadline_s
        ))  # fmt: skip
        epoch = replica.epoch
        self.hub.at(replica.until, lambda: self._late(replica, epoch))

    def _owners(self, inventory: bytes) -> Iterator[Client]:
        """Who has announced it, and is here."""
        yield from (c for i, c in self.hub.trainers.items() if self.hub.trainer_inventories.get(i) == inventory)
        for r in self.hub.replicas.values():
            yield from (c for i, c in r.workers.items() if r.inventories.get(i) == inventory)

    def _late(self, replica: Replica, epoch: int) -> None:
        if replica.epoch == epoch and replica.state in ("planning", "linking"):
            waiting = sorted(c.label for c in replica.pending)
            some = range(self.hub.options.trainers)
            waiting += [f"the layout of trainer {i}" for i in some if i not in self.hub.trainer_inventories]
            self.failed(
                replica,
                DeadlineExceeded(
                    f"replica {replica.index} is still {replica.state} after {self.hub.options.deadline_s:.0f} s",
                    [f"waiting for {w}" for w in waiting],
                ),
            )

    def failed(self, replica: Replica, error: XferError) -> None:
        self.abort(replica, error)
        replica.state, replica.error = "failed", error
        attempt, said = self.hub.attempt, m.Failed(m.WireError.of(error, "rendezvous"), replica=replica.index)
        if attempt is None or not attempt.has_told(replica):  # a plan is made while its processes join: they wait for it
            self.hub.broadcast(replica.processes(), said)
        if attempt is not None and attempt.concerns(replica):
            attempt.planning_failed(replica, error)
        else:
            self.hub.broadcast(self.hub.trainers.values(), said)

    def abort(self, replica: Replica, error: XferError) -> None:
        abort = m.Abort(
            replica.index,
            self.hub.attempt.number if self.hub.attempt else 0,
            replica.epoch,
            m.WireError.of(error, "rendezvous"),
        )
        self.hub.broadcast(self.hub.domain(replica), abort)

    def planned(self, client: Client, msg: m.Planned) -> None:
        replica = self.hub.replicas[msg.replica]
        if msg.epoch != replica.epoch or replica.state != "planning" or client not in replica.pending:
            return
        replica.pending.discard(client)
        replica.digests[client.label] = msg.digest
        if replica.pending:
            return
        if len(set(replica.digests.values())) > 1:
            most = max(sorted(set(replica.digests.values())), key=list(replica.digests.values()).count)
            odd = [
                f"{who}: digest {d}, most ranks have {most}" for who, d in sorted(replica.digests.items()) if d != most
            ]
            self.failed(
                replica,
                PlanMismatch(
                    f"ranks planned replica {replica.index} differently; nothing was moved",
                    odd + ["install the same xfer and numpy on all sides"],
                ),
            )
            return
        replica.digest = next(iter(replica.digests.values()))
        if replica.stale or self.let_go:
            replica.plan_s = replica.stage()
            self.postpone(replica)
        else:
            self.link(replica)

    def postpone(self, replica: Replica, error: XferError | None = None) -> None:
        """It is let join without a link: trainers have let go of what there is to link to, or have another layout than the one it
        was planned from. The next refit plans and links. `error`: what ends those that are linking."""
        if error is not None:
            self.abort(replica, error)
            replica.stale = True
        replica.relink = True
        self._ready(replica)

    def link(self, replica: Replica, fresh: bool = True) -> None:
        seconds = replica.stage()
        if replica.state == "planning":
            replica.plan_s = seconds
        replica.state, replica.pending = "linking", set(self.hub.domain(replica))
        replica.relink = replica.reopen = False
        self.hub.store.forget(f"r{replica.index}/")
        ahead, o = relays.before(self.hub, replica), self.hub.options
        replica.before, replica.hands, replica.follows = relays.place(ahead), {}, set()
        for c in self.hub.domain(replica):
            hand = ahead.hands[c.hello.index] if ahead is not None and c.hello.role == "worker" else b""
            c.send(m.OpenLink(replica.index, replica.epoch, fresh, replica.size, o.host_pull, o.relay, hand))

    def relink(self, replica: Replica, fresh: bool) -> None:
        """The plan stands: a new epoch with the same digest. `fresh`: the communicator of the last attempt is broken;
        else only routes are opened again, all ranks together, since each end must know what the other can map."""
        replica.epoch += 1
        replica.until = time.monotonic() + self.hub.options.deadline_s
        epoch = replica.epoch
        self.hub.at(replica.until, lambda: self._late(replica, epoch))
        self.link(replica, fresh)

    # ---- unmapping before trainers free

    def release(self, client: Client, number: int) -> None:
        """Everyone unmaps who reads trainers' storages (every worker; by the packed route trainers too, each other's); then all
        trainers that asked are told, and routes are opened again by the next refit."""
        self.let_go.add(client)
        self._releasing.pop(client, None)  # it no longer waits for what it asked before
        self._release_when_open(client, number)

    def _release_when_open(self, client: Client, number: int) -> None:
        """What is being opened is closed after."""
        if client not in self.let_go or number < self._releasing.get(client, 0):
            return  # it gave that up, and has entered a refit or asked again since
        if any(r.state in ("planning", "linking") for r in self.hub.replicas.values()):
            self.hub.at(time.monotonic() + 0.02, lambda: self._release_when_open(client, number))
            return
        self._releasing[client] = number
        for r in self.hub.replicas.values():
            self.unmap(r)
        for c in self.hub.clients:  # of replicas that are lost: they live on, with all that they have mapped
            if c.hello is not None and c.hello.role == "worker":
                self._close(c, c.hello.replica)
        self._answer_releases()

    def unmap(self, r: Replica) -> None:
        """Whoever of this replica reads others' memory closes its routes; the next refit opens them again."""
        r.reopen = True
        for c in self.hub.domain(r) if self.hub.options.route == "packed" else r.workers.values():
            self._close(c, r.index)

    def _close(self, client: Client, replica: int) -> None:
        self._closing.add((client, replica))
        client.send(m.CloseRoutes(replica))  # again, if it was asked before: it may have opened routes anew since

    def closed(self, client: Client, replica: int | None = None) -> None:
        """This one has unmapped, or (None) is gone."""
        self._closing = {(c, r) for c, r in self._closing if c is not client or replica not in (None, r)}
        self._answer_releases()

    def _answer_releases(self) -> None:
        if not self._closing:
            waiting, self._releasing = self._releasing, {}
            for client, number in waiting.items():
                client.send(m.Released(number))

    def link_open(self, client: Client, msg: m.LinkOpen) -> None:
        replica = self.hub.replicas[msg.replica]
        if msg.epoch != replica.epoch or replica.state != "linking" or client not in replica.pending:
            return
        replica.pending.discard(client)
        if client.hello.role == "worker" and self.hub.options.relay:
            replica.hands[client.hello.index] = msg.hand
            replica.follows |= {client.hello.index} if msg.follows else set()
        if not replica.pending:
            replica.link_s = replica.stage()
            self._ready(replica)

    def _ready(self, replica: Replica) -> None:
        replica.state = "ready"
        ready = m.ReplicaReady(replica.index, replica.epoch, replica.digest)
        self.hub.broadcast(self.hub.domain(replica), ready)
        if replica.controller is not None:
            replica.controller.send(ready)
        if self.hub.attempt is not None:
            self.hub.attempt.advance()
