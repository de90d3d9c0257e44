"""One refit: trainers enter, drain and are ready; each replica is armed and let go as soon as it can be.

What happens to a replica from there, and where its version is committed, is commit.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from xfer import logs
from xfer.coordinator import holders, relays
from xfer.coordinator import messages as m
from xfer.coordinator.commit import Phase, ReplicaRefit
from xfer.coordinator.deadlines import TOGETHER_S
from xfer.coordinator.state import ReplicaPhase
from xfer.coordinator.wire import Label
from xfer.errors import DeadlineExceeded, EngineLost, PlanMismatch, VerificationError, XferError

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.state import Client, Replica


logger = logging.getLogger("xfer")


class Refit:
    """All replicas in one refit.

    Args:
        number: which refit of the session this is, from 1.
        deadline_s: seconds until it is aborted, from now or, if it is prepared, from the first call.
        prepared: armed before any trainer called.
    """

    def __init__(self, coordinator: Coordinator, number: int, deadline_s: float, prepared: bool):
        self.coordinator, self.number = coordinator, number
        self.entered: dict[int, m.Enter] = {}
        self.drained: dict[int, m.Ready] = {}
        self.parts: dict[int, ReplicaRefit] = {}
        self.began = coordinator.now
        self.version: Label = None
        self.verify = False
        self.ready_at = 0.0  # when the last trainer was ready
        self.called = False  # by some trainer, whose call this refit uses up whatever becomes of it
        self.abandoned = False  # nobody called in time: a trainer that calls now gets the next refit
        self.deadline_s = deadline_s
        # The deadline of a prepared refit begins anew with the first call: engines are armed for both.
        self.armed_s = deadline_s + (coordinator.options.deadline_s if prepared else 0.0)

    # ---- going forward

    def start(self) -> None:
        for r in self.coordinator.replicas.values():
            part = self.parts[r.index] = ReplicaRefit(self, r)
            r.stage(self.coordinator.now)
            r.plan_s = r.link_s = 0.0
            if r.controller is None:
                part.error = r.error or EngineLost(
                    f"replica {r.index} is not connected", ["start it and call xfer.serve() with this replica number"]
                )
                part.to(Phase.OVER)
            elif r.phase is ReplicaPhase.FAILED and r.complete:
                r.stale = True
        self._arm()
        self._set_deadline(self.deadline_s)

    def _arm(self) -> None:
        for part in self.parts.values():
            part.arm()

    def _set_deadline(self, seconds: float) -> None:
        self.until = self.began + seconds
        self.coordinator.at(self.until, self._late, of=self)

    def enter(self, client: Client, msg: m.Enter) -> None:
        """A trainer called nccl_xfer_refit()."""
        co = self.coordinator
        self.called = True
        if not self.entered:
            self.version = co.refits.next_label() if msg.version is None else msg.version
            self.verify = msg.verify
            armed_until, self.began = self.began + self.armed_s, co.now
            self.deadline_s = min(msg.deadline_s, armed_until - self.began)
            self._set_deadline(self.deadline_s)
            co.at(co.now + logs.EVERY_S, self._log_waiting, of=self)
        self.entered[client.hello.index] = msg
        if len(self.entered) == co.options.trainers:
            if odd := differences(self.entered):
                self.fail(PlanMismatch("trainer ranks asked for different refits; nothing was moved", odd))
            self.finish_if_over()  # no replica was there to begin with

    def ready(self, client: Client, msg: m.Ready) -> None:
        """A trainer's storages hold the version."""
        co = self.coordinator
        if client.hello.index not in self.entered:
            return
        self.drained[client.hello.index] = msg
        co.planning.let_go.discard(client)
        if len(self.drained) == co.options.trainers:
            self.ready_at = co.now
            co.mark("all trainers are ready")
            co.silence.take(self.drained.values())
            co.settle_catalog()
            self._compare_samples()
            self.advance()

    def _compare_samples(self) -> None:
        """Before a byte moves: do trainers that hold the same box hold the same bytes, as far as their samples show?

        A trainer tells a sample until its first commit. One that numbers tensors by an older catalog is left out.
        """
        co = self.coordinator
        told = {i: r.sample for i, r in self.drained.items() if r.sample and r.generation == co.generation}
        if told and (bad := holders.differences(told, co.catalog)):
            why = "trainers hold different bytes of one tensor; nothing was moved"
            self.fail(VerificationError(why, [*bad, holders.ADVICE]))

    def handle(self, client: Client, msg: m.Armed | m.Brought | m.Done | m.Committed | m.Stopped | m.Settled) -> None:
        """A message about a replica's part in this refit."""
        h = client.hello
        part = self.parts.get(h.replica if h.role != "trainer" else msg.replica)
        if part is None:
            return
        before = part.phase, len(part.readers)
        if isinstance(msg, m.Armed):
            part.arrived(client, msg)
        elif isinstance(msg, m.Brought):
            relays.brought(self, part, h.index, msg.part)
        elif isinstance(msg, m.Done):
            part.finished(client, msg)
        elif isinstance(msg, m.Committed):
            part.installed(h.index)
        elif isinstance(msg, m.Stopped):
            part.worker_stopped(client, msg)
        elif isinstance(msg, m.Settled):
            part.settled(msg)
        if before != (part.phase, len(part.readers)):
            self.finish_if_over()

    def advance(self) -> None:
        """Move every replica that can move. Called whenever something changed."""
        co = self.coordinator
        if co.refit is not self:
            return
        self._arm()
        if len(self.drained) < co.options.trainers:
            return
        for r in co.replicas.values():
            co.plan_if_complete(r)  # one that joins, from what trainers say that they have now
        able = [part for part in self.parts.values() if self._able(part)]
        packed = co.options.route == "packed"
        if packed and not self._all_there(able):
            return  # one gather feeds them all
        together = tuple(part.replica.index for part in able) if packed else ()
        for part in able:
            if relays.may_begin(self, part):
                part.go(together)
            else:
                relays.look_again(self, part)

    def _able(self, part: ReplicaRefit) -> bool:
        """Whether bytes of this replica may move now. Where a plan or a link is out of date, a new one is asked for."""
        co, r = self.coordinator, part.replica
        if part.phase is not Phase.ARMING or not r.size or len(part.armed) < r.size:
            return False
        # Trainers have said what they export now. A worker whose catalog is older is reading the newer one.
        if now := [a.unread for a in part.unread.values() if a.generation == co.generation]:
            part.fail(now[0].error())
        elif r.phase.before_ready:
            pass
        elif r.stale:
            if r.complete and len(co.trainer_inventories) == co.options.trainers:
                co.planning.plan(r)
        elif relays.held_up_by(self, part) is not None:
            relays.look_again(self, part)
        elif r.relink or r.reopen:
            co.planning.relink(r, fresh=r.relink)
        elif r.phase is ReplicaPhase.READY and relays.out_of_place(co, r):
            co.planning.relink(r, fresh=False)
        else:
            return r.phase is ReplicaPhase.READY
        return False

    def _all_there(self, able: list[ReplicaRefit]) -> bool:
        """Whether a gather for these may begin: no other replica can still come, or they have waited long enough."""
        if not able or all(part in able for part in self.parts.values() if part.phase is Phase.ARMING):
            return True
        co = self.coordinator
        waited = co.now - max(self.ready_at, *(part.armed_at for part in able))
        if waited >= TOGETHER_S:
            return True
        co.at(co.now + TOGETHER_S - waited, self.advance)
        return False

    def advance_soon(self) -> None:
        """A replica is out of this refit: others may have waited for it. Not from inside `advance`."""
        if self.coordinator.options.route == "packed" or self.coordinator.options.relay:
            self.coordinator.soon(self.advance)

    # ---- failing

    def fail(self, error: XferError, replicas: Sequence[Replica] | None = None, by: Client | None = None) -> None:
        """End the parts of these replicas (None: of all) that are not decided. `by`: the rank that raised."""
        for part in self.parts.values():
            if replicas is None or part.replica in replicas:
                part.fail(error, by)
        self.finish_if_over()

    def because(self, replica: Replica, error: XferError) -> None:
        """A rank of this refit says why it closed its connections."""
        part = self.parts.get(replica.index)
        if part is not None and part.why_until:
            part.because(error)
            self.finish_if_over()

    def lost(self, replica: Replica, error: XferError) -> None:
        """A process of the replica is gone."""
        part = self.parts.get(replica.index)
        if part is not None:
            part.lost(error)

    def _late(self) -> None:
        if self.coordinator.refit is not self or self.coordinator.now < self.until:
            return
        self.abandoned = not self.called
        for part in list(self.parts.values()):
            if part.phase in (Phase.ARMING, Phase.MOVING):
                part.fail(
                    DeadlineExceeded(
                        f"refit of version {'?' if self.version is None else repr(self.version)} to replica {part.replica.index} "
                        f"ended at its deadline of {self.deadline_s:.1f} s",
                        [f"waiting for {w}" for w in part.waiting_for()],
                    )
                )
        self.finish_if_over()

    # ---- the end

    def finish_if_over(self) -> None:
        co = self.coordinator
        for part in self.parts.values():
            # While it is arming it may yet read, however late the replica joins: no trainer may take it for done.
            if self.called and part.phase is not Phase.ARMING and not part.readers and not part.drained:
                part.drained = True
                co.broadcast(co.trainers.values(), m.Drained(part.replica.index, self.number, self.version))
        if co.refit is not self or not all(part.over for part in self.parts.values()):
            return
        why_until = max((part.why_until for part in self.parts.values()), default=0.0)
        if co.now < why_until:
            return co.at(why_until, self.finish_if_over, of=self)
        outcomes = tuple(part.outcome() for part in self.parts.values())
        co.refits.end(m.Outcome(self.number, self.version, outcomes, void=not self.called))

    # ---- what others ask of it

    def concerns(self, replica: Replica) -> bool:
        """Whether this refit still has something to do for the replica."""
        part = self.parts.get(replica.index)
        return part is not None and not part.over

    def has_told(self, replica: Replica) -> bool:
        """Whether its engine was told of this refit, and so has joined before."""
        part = self.parts.get(replica.index)
        return part is not None and part.told and not part.over

    def waiting_for(self) -> list[str]:
        lines = (w for part in self.parts.values() if not part.over for w in part.waiting_for())
        return list(dict.fromkeys(lines))

    def _log_waiting(self) -> None:
        co, these = self.coordinator, "; ".join(self.waiting_for()[:8])
        logger.info(
            "xfer: the refit to version %r takes %.0f s; waiting for %s", self.version, co.now - self.began, these
        )
        co.at(co.now + logs.EVERY_S, self._log_waiting, of=self)

    def phase_of(self, client: Client) -> str:
        """For `xfer status`."""
        h = client.hello
        if h.role != "trainer":
            part = self.parts.get(h.replica)
            return part.phase.value if part else "idle"
        if h.index not in self.entered:
            return "training"
        if h.index not in self.drained:
            return "draining"
        moving = any(part.phase is Phase.MOVING and client.label not in part.done for part in self.parts.values())
        return "moving" if moving else "waiting"


def differences(entered: Mapping[int, m.Enter]) -> list[str]:
    """Arguments that must be equal on all trainers and are not: one line per trainer."""
    names = ("version", "verify", "min_replicas", "deadline_s")
    odd = [a for a in names if len({getattr(e, a) for e in entered.values()}) > 1]
    return [
        f"trainer {i}: " + ", ".join(f"{a}={getattr(e, a)!r}" for a in odd) for i, e in sorted(entered.items()) if odd
    ]
