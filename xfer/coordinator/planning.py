"""How a replica gets its plan and its link: layouts go out, equal digests come back, then each epoch opens one data link.

A plan is known here by its digest only. A trainer takes its storages back here, too: every process that reads them unmaps
them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from xfer.coordinator import messages as m
from xfer.coordinator import relays
from xfer.coordinator.deadlines import OWNER_S
from xfer.coordinator.layouts import LayoutExchange
from xfer.coordinator.state import ReplicaPhase, broadcast
from xfer.coordinator.status import awaited_ranks
from xfer.errors import DeadlineExceeded, PlanMismatch, XferError

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.state import Client, Replica

RELEASE_LOOK_S = 0.02
"""Seconds between two checks whether routes that are being opened are open, so that they can be closed."""


class Planning:
    def __init__(self, coordinator: Coordinator):
        self.coordinator = coordinator
        self.layouts = LayoutExchange(self._owners, lambda ask: coordinator.at(coordinator.now + OWNER_S, ask))
        self._closing: set[tuple[Client, int]] = set()  # clients that have to unmap, and the replica
        self._releasing: dict[Client, int] = {}  # trainers that wait for them, and the call of each one's last release
        self.let_go: set[Client] = set()  # trainers that released and have not entered a refit since

    # ---- the plan

    def plan(self, replica: Replica) -> None:
        """Begin a planning epoch. The layouts of all its ranks are known."""
        co, o, first = self.coordinator, self.coordinator.options, replica.first
        self._new_epoch(replica)
        replica.stage(co.now)
        replica.phase, replica.error, replica.relink, replica.stale = ReplicaPhase.PLANNING, None, False, False
        domain = co.domain(replica)
        replica.digests, replica.pending, replica.hands, replica.receives = {}, set(domain), {}, False
        sources = o.trainers if first is None else first.donor.size
        sides = (
            (co.trainer_inventories if first is None else first.donor.inventories, sources, domain[:sources]),
            (replica.inventories, replica.size, domain[sources:]),
        )
        rolls = [
            self.layouts.roll([held[i] for i in range(n)], [c.hello.host for c in clients], keep=2 * o.replicas + 2)
            for held, n, clients in sides
        ]
        replica.roll = rolls[1]
        turn = relays.turn(replica.roll, o.replicas) if o.relay else replica.index
        inputs = m.PlanInputs(
            replica.index,
            replica.epoch,
            rolls[0],
            replica.roll,
            turn,
            o.replicas,
            o.drop,
            o.narrow,
            o.bucket_bytes,
            o.deadline_s,
            sources,
            -1 if first is None else first.donor.index,
            o.relay,
        )
        broadcast(domain, inputs)

    def _new_epoch(self, replica: Replica) -> None:
        replica.epoch += 1
        replica.until = self.coordinator.now + self.coordinator.options.deadline_s
        epoch = replica.epoch
        self.coordinator.at(replica.until, lambda: self._late(replica, epoch))

    def _owners(self, inventory: bytes) -> Iterator[Client]:
        """Yield the connected clients that announced this layout."""
        co = self.coordinator
        yield from (c for i, c in co.trainers.items() if co.trainer_inventories.get(i) == inventory)
        for r in co.replicas.values():
            yield from (c for i, c in r.workers.items() if r.inventories.get(i) == inventory)

    def planned(self, client: Client, msg: m.Planned) -> None:
        replica = self.coordinator.replicas[msg.replica]
        if not self._awaited(replica, client, msg.epoch, ReplicaPhase.PLANNING):
            return
        replica.digests[client] = msg.digest
        if replica.pending:
            return
        if len(set(replica.digests.values())) > 1:
            return self.coordinator.fail(replica, _mismatch(replica))
        replica.digest = next(iter(replica.digests.values()))
        if replica.first is None and (replica.stale or self.let_go):
            replica.plan_s = replica.stage(self.coordinator.now)
            self.postpone(replica)
        else:
            self._link(replica)

    def _awaited(self, replica: Replica, client: Client, epoch: int, phase: ReplicaPhase) -> bool:
        """Take a client off the list of those that have to answer. False: it is not on it, in this epoch and phase."""
        if epoch != replica.epoch or replica.phase is not phase or client not in replica.pending:
            return False
        replica.pending.discard(client)
        return True

    # ---- the link

    def _link(self, replica: Replica, fresh: bool = True) -> None:
        co, o = self.coordinator, self.coordinator.options
        seconds = replica.stage(co.now)
        if replica.phase is ReplicaPhase.PLANNING:
            replica.plan_s = seconds
        if replica.phase is ReplicaPhase.PLANNING or replica.relink or replica.reopen:
            replica.apart = False  # the reason may be gone
        replica.phase, replica.pending = ReplicaPhase.LINKING, set(co.domain(replica))
        replica.relink = replica.reopen = False
        co.store.forget(f"r{replica.index}/")
        replica.sources, replica.opened, replica.follows = relays.place(co, replica), {}, set()
        if replica.first is None and co.refit is not None and co.refit.called and replica.scratch != co.refit.scratch:
            replica.scratch, replica.hands = co.refit.scratch, {}  # what others may read is told when routes are open
        relay = o.relay and o.replicas > 1 and replica.first is None
        order = m.OpenLink(
            replica.index, replica.epoch, fresh, replica.size, o.host_pull, relay, o.rdma, scratch=replica.scratch
        )
        broadcast(co.sources(replica), order)
        for i, c in replica.workers.items():
            c.send(msgspec.structs.replace(order, hands=relays.hands(co, replica, i)))

    def relink(self, replica: Replica, fresh: bool) -> None:
        """Open the link of an existing plan, in a new epoch.

        Args:
            fresh: the communicator is broken. If False, only the routes are opened again, by all ranks together, since each
                end must know what the other one can map.
        """
        self._new_epoch(replica)
        self._link(replica, fresh)

    def link_open(self, client: Client, msg: m.LinkOpen) -> None:
        replica = self.coordinator.replicas[msg.replica]
        if not self._awaited(replica, client, msg.epoch, ReplicaPhase.LINKING):
            return
        if client.hello.role == "worker":
            replica.opened[client.hello.index] = msg
        if not replica.pending:
            if replica.first is None:
                relays.opened(replica)
            replica.link_s = replica.stage(self.coordinator.now)
            self._ready(replica)

    def postpone(self, replica: Replica, error: XferError | None = None) -> None:
        """Let a replica join without a link. The next refit plans and links.

        Trainers have released their storages, or have another layout than the plan. `error` ends the ranks that are linking.
        """
        if error is not None:
            self.coordinator.stop_ranks(replica, error)
            replica.stale = True
        replica.relink = True
        self._ready(replica)

    def _ready(self, replica: Replica) -> None:
        co = self.coordinator
        replica.phase, replica.joined = ReplicaPhase.READY, True
        told = [*(co.sources(replica) if replica.first is None else ()), *replica.processes()]
        broadcast(told, m.ReplicaReady(replica.index))
        if replica.first is not None:
            replica.first.linked()
        elif co.refit is not None:
            co.refit.arm(replica)
            co.refit.advance()

    def _late(self, replica: Replica, epoch: int) -> None:
        if replica.epoch == epoch and replica.phase.opening:
            co = self.coordinator
            untold = [i for i in range(co.options.trainers) if i not in co.trainer_inventories]
            error = DeadlineExceeded(
                f"replica {replica.index} is still {replica.phase.value} after {co.options.deadline_s:.0f} s",
                [awaited_ranks(replica), *(f"no layout yet from trainer {i}" for i in untold)],
            )
            co.fail(replica, error)

    # ---- unmapping, before trainers free their storages

    def release(self, client: Client, call: int) -> None:
        """Unmap a trainer's storages before the trainer frees them: every process that reads them unmaps them, then the trainer is told.

        Workers read trainers' storages; where trainers gather they read each other's too. The next refit opens the
        routes again.
        """
        self.let_go.add(client)
        self._releasing.pop(client, None)  # it no longer waits for its release before this one
        self._release_when_open(client, call)

    def _release_when_open(self, client: Client, call: int) -> None:
        """Routes that are being opened are closed afterwards."""
        co = self.coordinator
        if client not in self.let_go or call < self._releasing.get(client, 0):
            return  # it gave this release up, and has entered a refit or asked again since
        if any(r.phase.opening and r.first is None for r in co.replicas.values()):
            return co.at(co.now + RELEASE_LOOK_S, lambda: self._release_when_open(client, call))
        self._releasing[client] = call
        # These have mapped no trainer's storages.
        copying = {r.index for r in co.replicas.values() if r.first is not None}
        for r in co.replicas.values():
            if r.index not in copying:
                self.unmap(r)
        for c in co.clients:  # workers of lost replicas, too: they live on and keep their mappings
            if c.hello.role == "worker" and c.hello.replica not in copying:
                self._close(c, c.hello.replica)
        self._answer_releases()

    def unmap(self, r: Replica) -> None:
        """Ask the ranks that read others' memory for this replica to close their routes."""
        r.reopen = True
        gathers = self.coordinator.options.gathers
        for c in self.coordinator.domain(r) if gathers else r.workers.values():
            self._close(c, r.index)

    def _close(self, client: Client, replica: int) -> None:
        self._closing.add((client, replica))
        client.send(m.CloseRoutes(replica))  # even if it was asked before: it may have opened routes again since

    def closed(self, client: Client, replica: int | None = None) -> None:
        """Note that this client has unmapped the storages for a replica, or is gone (`replica` None)."""
        self._closing = {(c, r) for c, r in self._closing if c is not client or replica not in (None, r)}
        self._answer_releases()

    def departed(self, client: Client) -> None:
        """Ask others for the layouts that a departed client has not sent. Runs later, when the client is no member any more."""
        self.let_go.discard(client)
        self.closed(client)
        self.coordinator.soon(lambda: self.layouts.gone(client))

    def _answer_releases(self) -> None:
        if not self._closing:
            waiting, self._releasing = self._releasing, {}
            for client, call in waiting.items():
                client.send(m.Reply(call))


def _mismatch(replica: Replica) -> PlanMismatch:
    digests = list(replica.digests.values())
    most = max(sorted(set(digests)), key=digests.count)
    odd = sorted(f"{c.label}: digest {d}, most ranks have {most}" for c, d in replica.digests.items() if d != most)
    return PlanMismatch(
        f"ranks planned replica {replica.index} differently; nothing was moved",
        [*odd, "install the same xfer and numpy on all sides"],
    )
