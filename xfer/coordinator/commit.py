"""One replica in a refit: its phases, the decision, and the way back. A version is committed here.

The commit is a two-phase commit with presumed abort. Its ranks are all trainers and the workers of one replica. A worker
that never hears `Commit` never installs. The decision is taken once, in `ReplicaRefit.decide`, when every rank has said
`Done` and, in a verified refit, the checksums agree.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator import relays
from xfer.coordinator.deadlines import ANSWER_GRACE_S, APART_S, CAUSE_S, SETTLE_GRACE_S, STOP_GRACE_S
from xfer.coordinator.state import ReplicaPhase, broadcast
from xfer.errors import DeadlineExceeded, EngineLost, PeerLost, RebindError, VerificationError, XferError
from xfer.plan import holders
from xfer.plan.checksum import added
from xfer.plan.relay import ALL_PARTS

if TYPE_CHECKING:
    from xfer.coordinator.refit import Transfer
    from xfer.coordinator.state import Client, Replica


STUCK = (
    "data-parallel ranks can wait for each other forever if somebody else paused or resumed their engine during a refit, or "
    "resumed one that was not paused: then restart it"
)


UNKNOWN = XferError("no error was recorded")
VOID = "its storages, or the bytes in them, are not those that it staged for; refit again"


class Phase(Enum):
    """Phase of one replica in one refit. `TRANSITIONS` lists the moves between phases."""

    STAGING = "staging"
    ARMING = "arming"
    MOVING = "moving"
    COMMITTING = "committing"
    ABORTING = "aborting"
    SETTLING = "settling"
    OVER = "over"


TRANSITIONS: tuple[tuple[Phase, Phase, str], ...] = (
    (
        Phase.STAGING,
        Phase.ARMING,
        "every rank said Done, so all bytes are in the workers' scratch: Arm to the controller",
    ),
    (
        Phase.STAGING,
        Phase.ARMING,
        "its engine serves no whole version, or has to read its layout first: nothing is staged",
    ),
    (Phase.STAGING, Phase.ABORTING, "an error or the deadline: Abort to the ranks; the engine goes on serving"),
    (Phase.STAGING, Phase.OVER, "the replica is not connected, or a process of it is gone"),
    (Phase.ARMING, Phase.MOVING, "all trainers are ready, all workers armed, plan and link up to date: Go"),
    (
        Phase.ARMING,
        Phase.MOVING,
        "all workers armed, and what they have staged fits: Go to the workers, which apply it",
    ),
    (
        Phase.MOVING,
        Phase.COMMITTING,
        "every rank said Done and the checksums agree: the decision, Commit to workers and controller",
    ),
    (Phase.COMMITTING, Phase.SETTLING, "every worker has installed: Settle to the controller"),
    (Phase.COMMITTING, Phase.SETTLING, "a worker failed, or STOP_GRACE_S passed: the replica is torn, Settle"),
    (Phase.ARMING, Phase.ABORTING, "an error or the deadline: Abort to the ranks"),
    (Phase.MOVING, Phase.ABORTING, "an error, unequal checksums or the deadline: Abort to the ranks"),
    (Phase.ABORTING, Phase.SETTLING, "every worker that armed or staged has stopped, or STOP_GRACE_S passed: Settle"),
    (Phase.ABORTING, Phase.OVER, "the same, and the engine was never told of this refit"),
    (Phase.SETTLING, Phase.OVER, "the controller said what its engine serves, or did not in time"),
    (Phase.ARMING, Phase.OVER, "the replica is not connected, or a process of it is gone"),
    (Phase.MOVING, Phase.OVER, "a process of the replica is gone"),
    (Phase.COMMITTING, Phase.OVER, "a process of the replica is gone, or its controller gave up"),
)
"""All moves of a replica in a refit: from, to, when. docs/design.md prints this table."""

_ALLOWED = {(a, b) for a, b, _ in TRANSITIONS}


@dataclass(eq=False)
class Totals:
    """Sums and maxima over the ranks of a replica, added up as each `Done` arrives."""

    pack_s: float = 0.0
    wire_s: float = 0.0
    unpack_s: float = 0.0
    verify_s: float = 0.0
    apply_s: float = 0.0
    bytes_in: dict[int, int] = field(default_factory=dict)  # worker -> bytes
    scratch: dict[int, int] = field(default_factory=dict)  # worker -> bytes
    routes: dict[str, m.RouteTaken] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # worker -> checksum by the sources
    live: dict[int, int] = field(default_factory=dict)  # worker -> checksum of its live bytes
    held: dict[int, bytes] = field(default_factory=dict)  # trainer -> digests of bytes that others hold too

    def add(self, client: Client, x: m.Moved, source: bool) -> None:
        """Add what a rank reports. `source`: whether the rank has the weights, and is no worker of this replica."""
        self.pack_s, self.wire_s = max(self.pack_s, x.pack_s), max(self.wire_s, x.wire_s)
        self.unpack_s, self.verify_s = max(self.unpack_s, x.unpack_s), max(self.verify_s, x.verify_s)
        self.apply_s = max(self.apply_s, x.apply_s)
        for r in x.routes:  # bytes add up, the seconds of the slowest rank count
            old = self.routes.get(r.route, m.RouteTaken(r.route, 0, 0.0))
            self.routes[r.route] = m.RouteTaken(r.route, old.bytes + r.bytes, max(old.seconds, r.seconds))
        sums = [(c.worker, c.total) for c in x.checksums]
        if not source:
            worker = client.hello.index
            self.bytes_in[worker] = self.bytes_in.get(worker, 0) + x.bytes_in
            self.scratch[worker] = x.scratch_bytes
            self.live.update(sums)
            return
        for worker, value in sums:
            self.sent[worker] = added(self.sent[worker], value)
        if x.held:
            self.held[client.hello.index] = x.held


@dataclass(eq=False)
class ReplicaRefit:
    """One replica in one refit or, in its place, a first copy."""

    refit: Transfer
    replica: Replica
    phase: Phase = Phase.ARMING
    begun: bool = False  # its ranks were told to move bytes
    staged_at: float = 0.0  # when all bytes were in scratch
    armed: dict[int, m.Armed] = field(default_factory=dict)  # by worker
    calls: int = 0  # update calls that did not bring its workers together
    astray: set[int] = field(default_factory=set)  # workers that have yet to enter the last of those, and leave it
    totals: Totals = field(default_factory=Totals)
    committed: set[int] = field(default_factory=set)
    stopped: dict[int, bool] = field(default_factory=dict)  # worker -> whether live bytes were written
    told: bool = False  # its controller was sent Arm
    told_at: float = 0.0
    error: XferError | None = None
    armed_at: float = 0.0
    decided_at: float = 0.0
    said: m.Settled | None = None
    dirty: bool = False
    verified: bool = False
    readers: dict[int, m.Reader] = field(default_factory=dict)  # workers that may read trainers' storages
    drained: bool = False  # no worker reads trainers' storages, nor will; trainers are told
    ready_parts: dict[int, int] = field(default_factory=dict)  # worker -> last part that is complete there (relays.py)
    told_parts: dict[int, int] = field(default_factory=dict)  # worker -> last part of others that it was told of
    waits: bool = False  # for a replica from which it reads, with a timer set to look again
    epoch: int = 0  # of the routes that it moves by
    why_until: float = 0.0  # its error says that a connection closed; the reason may come until then

    @property
    def waiting(self) -> bool:
        """Whether its ranks have yet to be told to move bytes."""
        return self.phase in (Phase.STAGING, Phase.ARMING) and not self.begun

    @property
    def moving(self) -> bool:
        """Whether its ranks were told to move bytes, and some may still do."""
        return self.begun and (self.phase is Phase.STAGING or self.phase is Phase.MOVING and not self.staged_at)

    @property
    def able_since(self) -> float:
        """Monotonic time since which all sources are ready and all workers armed (connected, if bytes are staged first); 0.0: not yet."""
        ready, staging = self.refit.ready_at, self.phase is Phase.STAGING
        there = self.replica.joined if staging else len(self.armed) == self.replica.size
        return max(ready, self.armed_at) if ready and there else 0.0

    @property
    def may_be_read(self) -> bool:
        """Whether some worker reads trainers' storages, or may still do so in this refit.

        Staged bytes that turn out not to fit are brought anew while all trainers hold their weights.
        """
        again = self.begun and self.phase in (Phase.STAGING, Phase.ARMING) and self.refit.holds
        return self.waiting or again or bool(self.readers)

    @property
    def unread(self) -> dict[int, m.Armed]:
        """The workers that could not read a layout with their catalog."""
        return {w: a for w, a in self.armed.items() if a.unread is not None}

    @property
    def over(self) -> bool:
        return self.phase is Phase.OVER

    def to(self, phase: Phase) -> None:
        """Change the phase. Every change goes through here."""
        if phase is self.phase:
            return
        if (self.phase, phase) not in _ALLOWED:
            raise XferError(f"replica {self.replica.index} may not go from {self.phase.value} to {phase.value}")
        self.phase = phase
        self.refit.moved_on(self)

    # ---- forward

    def arm(self) -> None:
        """Send Arm to the controller. While the replica joins, its controller takes no Arm: it is sent when the replica is ready."""
        r = self.replica
        free = r.controller is not None and not r.unsettled and not r.phase.before_ready
        free = free and r.first in (None, self.refit)
        if self.phase is Phase.ARMING and not self.told and free:
            self.told, self.told_at = True, self.refit.coordinator.now
            r.note_pause(True)
            r.tell(m.Arm(self.refit.number, self.refit.armed_s))
            self.refit.rolling.began(self)

    def arrived(self, client: Client, msg: m.Armed) -> None:
        """A worker is inside its receive call."""
        co, r, worker = self.refit.coordinator, self.replica, client.hello.index
        co.note_moves(client, msg)
        if self.phase is not Phase.ARMING:
            why = m.WireError.of(self.error or EngineLost("too late"))
            return client.send(m.Abort(r.index, self.refit.number, r.epoch, why))
        if worker in self.astray:
            self.astray.discard(worker)
            return client.send(m.CallAgain(self.refit.number))
        r.in_step = msg.in_step
        if msg.in_step and not self.armed:
            due, calls = co.now + APART_S * 2**self.calls, self.calls
            co.at(due, lambda: self._call_again(calls), of=self.refit)
        self.armed[worker] = msg
        if len(self.armed) < r.size:
            return
        self.armed_at = co.now
        co.mark(f"replica {r.index}: all workers are armed")
        held = {a.base for a in self.armed.values()}
        r.base = held.pop() if len(held) == 1 else 0
        if not self.begun:
            self.refit.advance()
        elif all(a.staged for a in self.armed.values()):
            self._apply()
        elif self.refit.holds:
            self.begun, self.staged_at, self.totals = False, 0.0, Totals()
            self.ready_parts, self.told_parts = {}, {}
            self.refit.moved_on(self)
            self.refit.advance()
        else:
            odd = [f"replica {r.index} worker {w}: {VOID}" for w, a in sorted(self.armed.items()) if not a.staged]
            void = f"replica {r.index} cannot use the bytes that it has staged; nothing was written"
            co.fail(self, RebindError(void, odd))

    def _call_again(self, calls: int) -> None:
        """Repeat the update call, which did not bring all data-parallel ranks together.

        Some ranks are in the call. Others can be in a step, if somebody resumed the engine meanwhile, and a step ends when
        all ranks have taken part in it. So the ranks in the call leave it, the others enter it and leave it too, and then
        the controller pauses the engine and calls again.
        """
        r, number = self.replica, self.refit.number
        if self.phase is not Phase.ARMING or self.calls != calls or len(self.armed) == r.size:
            return
        self.calls += 1
        self.astray = set(range(r.size)) - self.armed.keys()
        r.tell(m.CallAgain(number))
        broadcast([r.workers[w] for w in self.armed if w in r.workers], m.CallAgain(number))
        self.armed.clear()

    def able(self) -> bool:
        """Whether bytes of this replica may move now. If a plan or a link is out of date, ask for a new one."""
        refit, r, co = self.refit, self.replica, self.refit.coordinator
        if r.first not in (None, refit):
            return False
        if not self.waiting or not r.size or not self._stages_first() and len(self.armed) < r.size:
            return False
        # Trainers have said what they export now. A worker whose catalog is older is reading the newer one.
        if now := [a.unread for a in self.unread.values() if a.unread is not None and a.generation == co.generation]:
            co.fail(self, now[0].error())
        elif r.phase.before_ready:
            pass
        elif r.stale:
            if co.can_plan(r):
                co.planning.plan(r)
        elif relays.held_up_by(refit, self) is not None:
            relays.look_again(refit, self)
        elif r.relink or r.reopen or r.scratch != refit.scratch:
            co.planning.relink(r, fresh=r.relink)
        elif r.phase is ReplicaPhase.READY and relays.out_of_place(co, r):
            co.planning.relink(r, fresh=False)
        else:
            return r.phase is ReplicaPhase.READY
        return False

    def _stages_first(self) -> bool:
        """Whether bytes come into scratch before the engine is armed. They cannot if the engine serves no whole version, is not back from
        an earlier refit, or has to read its layout anew: it is then armed now, and reads its layout when it is armed."""
        r = self.replica
        if self.phase is Phase.STAGING and (r.dirty or r.unsettled or not r.complete and not r.phase.before_ready):
            self.to(Phase.ARMING)
            self.refit.arm(r)
        return self.phase is Phase.STAGING

    def begin(self) -> None:
        """Bytes move from here on. The workers are told here, the trainers by the refit, for all replicas that begin together."""
        co, r, refit = self.refit.coordinator, self.replica, self.refit
        self.readers = {
            i: m.Reader(c.label, c.hello.host, c.hello.pid) for i, c in r.workers.items() if i not in r.follows
        }
        self.begun, self.epoch = True, r.epoch
        kind = m.GoKind.STAGE if self.phase is Phase.STAGING else m.GoKind.MOVE
        refit.moved_on(self) if kind is m.GoKind.STAGE else self.to(Phase.MOVING)
        broadcast(r.workers.values(), refit.go([self], tells=relays.tells(refit, self), kind=kind))
        co.mark(f"replica {r.index}: go was sent")
        relays.began(refit, self)

    def read(self, worker: int) -> None:
        """Note that a worker is done: it no longer reads a trainer's storage, and others may read all of its bytes."""
        self.totals.bytes_in.setdefault(worker, 0)
        self._reads_no_more(worker)
        relays.part_ready(self.refit, self, worker, ALL_PARTS)
        self._stopped()

    def _reads_no_more(self, worker: int) -> None:
        if self.readers.pop(worker, None) is not None:
            self.refit.moved_on(self)

    def done(self) -> None:
        """Every rank has carried out the last Go."""
        if self.phase is Phase.MOVING:
            self.decide()
        elif self.phase is Phase.STAGING:
            co = self.refit.coordinator
            self.staged_at = co.now
            co.mark(f"replica {self.replica.index}: all bytes are staged")
            self.to(Phase.ARMING)
            self.refit.arm(self.replica)

    def _apply(self) -> None:
        """Let the workers copy staged bytes into live storage: all are armed, and the bytes fit."""
        co, r, refit = self.refit.coordinator, self.replica, self.refit
        self.to(Phase.MOVING)
        refit.owed.begin([r], sources=False)
        broadcast(r.workers.values(), refit.go([self], kind=m.GoKind.APPLY))
        co.mark(f"replica {r.index}: go was sent")

    def decide(self) -> None:
        """Every rank is done: commit, if the checksums agree."""
        co, r, refit = self.refit.coordinator, self.replica, self.refit
        if bad := [*self._checksum_violations(), *self._holder_violations()] if refit.verify else []:
            error = VerificationError(f"replica {r.index}: version {refit.version!r} was not committed", bad)
            return co.fail(self, error)
        self.verified = r.verified = refit.verify
        r.committed = refit.order
        co.refits.had(refit.version)
        r.base = refit.number if refit.by_changes else 0
        self.decided_at = co.now
        self.to(Phase.COMMITTING)
        co.mark(f"replica {r.index}: decided")
        co.at(co.now + STOP_GRACE_S, self._install_late, of=refit)
        broadcast(r.processes(), m.Commit(r.index, refit.number, refit.version))

    def installed(self, worker: int) -> None:
        self.committed.add(worker)
        if self.phase is Phase.COMMITTING and len(self.committed) == self.replica.size:
            self.to(Phase.SETTLING)
            self._settle_timers()
            self.replica.tell(m.Settle(self.refit.number, self.refit.version))

    def settled(self, msg: m.Settled) -> None:
        """The controller says what its engine serves."""
        r, version = self.replica, self.refit.version
        if self.over:
            return
        if self.phase is not Phase.SETTLING:
            # The controller heard nothing for so long that it assumed the worst. This ends the replica's part in any phase.
            error = self.late(f"replica {r.index}: its controller gave up waiting for the decision")
            self.refit.coordinator.fail(self, error)
            self.error = self.error or error  # a decision that was taken cannot be taken back
            self.dirty = self.dirty or not msg.serving
        self.said = msg
        r.dirty = self.dirty
        r.settled(msg)
        if self.error is None and not msg.serving:
            self.error = EngineLost(f"replica {r.index} committed version {version!r} but could not be resumed")
        self.to(Phase.OVER)

    # ---- back

    def end(self, error: XferError, by: Client | None = None, gone: bool = False) -> None:
        """End this replica's part because of `error`. Only `Coordinator.fail` calls this.

        Before the decision the replica aborts. After it nothing can be taken back: a worker that does not install leaves the
        replica torn, and errors of other processes do not count, since only the workers are needed.

        Args:
            by: the process that reported the error.
            gone: a process of the replica is gone, which ends its part in any phase. Its other processes have been told.
        """
        co, r, before = self.refit.coordinator, self.replica, self.phase
        if gone:
            if self.over and self.error is None:
                return
            if isinstance(self.error, EngineLost):  # the controller reported first that something died; this names it
                self.error = PeerLost(error.message, (*error.violations, str(self.error)), where=error.where)
            self.error = self.error or error
            if self.over:
                return
            co.stop_ranks(r, error)
            r.tell(m.Settle(self.refit.number, None, True, m.WireError.of(error)))
            self.dirty = before not in (Phase.STAGING, Phase.ARMING)
            self.to(Phase.OVER)
        elif before is Phase.COMMITTING and by is not None and by.hello.role == "worker":
            self.error, r.relink = error, True
            return self._settle(True)
        elif before in (Phase.STAGING, Phase.ARMING, Phase.MOVING):
            self.dirty, self.error = before is Phase.MOVING, error
            self.to(Phase.ABORTING)
            # Else it goes on joining: nothing of this refit has reached it.
            if self.told or r.joined or not r.phase.before_ready:
                r.relink = True
                if r.phase.opening:
                    r.phase, r.error = ReplicaPhase.FAILED, error  # the next refit plans again
                co.stop_ranks(r, error)
            if by is not None and isinstance(error, PeerLost):
                self.why_until = min(co.now + CAUSE_S, self.refit.until)
            co.at(co.now + STOP_GRACE_S, self._stop_late, of=self.refit)
            self._stopped()
        else:
            return
        relays.fallen(self.refit, self, error)
        self.refit.advance_soon()

    def because(self, error: XferError) -> None:
        """Replace an error that only said that a connection closed by the reason.

        A rank that raises while bytes move closes its connections, and others may report that before it reports why.
        """
        if not isinstance(error, PeerLost):
            self.error, self.why_until = error, 0.0

    def worker_stopped(self, client: Client, msg: m.Stopped) -> None:
        """After an abort: this worker will write nothing of this refit any more."""
        self.stopped[client.hello.index] = msg.dirty
        if msg.drained:
            self._reads_no_more(client.hello.index)
        self._stopped()
        if self.phase is Phase.COMMITTING:
            version = self.refit.version
            error = EngineLost(f"{client.label} left its call before it had installed version {version!r}")
            self.refit.coordinator.fail(self, error, by=client)

    def _stopped(self) -> None:
        at_work = self.armed.keys() | self.readers.keys()
        if self.phase is Phase.ABORTING and all(w in self.stopped for w in at_work if w in self.replica.workers):
            self._settle(any(self.stopped.values()))

    def _stop_late(self) -> None:
        if self.phase is Phase.ABORTING:
            self._settle(self.dirty)  # a worker did not answer: bytes that may have moved count as moved

    def _install_late(self) -> None:
        if self.phase is Phase.COMMITTING:
            what = f"replica {self.replica.index} did not install version {self.refit.version!r}"
            error = self.late(f"{what} within {STOP_GRACE_S:.0f} s of the decision")
            missing = next(c for i, c in self.replica.workers.items() if i not in self.committed)
            self.refit.coordinator.fail(self, error, by=missing)

    def _settle(self, dirty: bool) -> None:
        self.dirty = dirty or self.replica.dirty  # torn by an earlier refit, which this one did not repair
        controller = self.replica.controller
        if controller is None or not self.told:  # its engine knows nothing of this refit
            return self.to(Phase.OVER)
        self.to(Phase.SETTLING)
        self._settle_timers()
        # The controller knows what the engine held before: a replica that had no weights yet does not hold a mix now.
        controller.send(m.Settle(self.refit.number, None, dirty, m.WireError.of(self.error or UNKNOWN)))

    def _settle_timers(self) -> None:
        co, r, refit = self.refit.coordinator, self.replica, self.refit
        stuck = [f"replica {r.index}: {STUCK}"] if r.in_step else []

        def unsettled() -> None:
            """Trainers have waited long enough; the controller may still finish."""
            if self.phase is Phase.SETTLING:
                r.unsettled, r.dirty = refit.number, self.error is not None and self.dirty
                self.error = self.error or DeadlineExceeded(
                    f"replica {r.index} holds version {refit.version!r}, but its engine was not back in service in time",
                    [f"replica {r.index} controller: resuming; the next refit waits for it", *stuck],
                )
                self.to(Phase.OVER)

        def never() -> None:
            if self.phase is Phase.SETTLING or r.unsettled == refit.number:
                late = f"replica {r.index} was not back in service {SETTLE_GRACE_S:.0f} s after the decision"
                co.fail(r, EngineLost(late, stuck), gone=True)

        co.at(max(co.now, refit.until) + ANSWER_GRACE_S, unsettled, of=refit)
        co.at(co.now + SETTLE_GRACE_S, never)

    # ---- reports

    def late(self, text: str) -> DeadlineExceeded:
        """Make the error of a wait that has taken too long. It names what the replica waits for."""
        return DeadlineExceeded(text, [f"waiting for {w}" for w in self.waiting_for()])

    def waiting_for(self) -> list[str]:
        """List what the replica waits for in its phase, trainers included: one line each."""
        return [*self.refit.trainers_waited_for(), *self.own_waiting_for()]

    def own_waiting_for(self) -> list[str]:
        r = self.replica
        if self.waiting or self.phase is Phase.ARMING:
            return self._arming_for()
        if self.begun and self.phase in (Phase.STAGING, Phase.MOVING):
            return [self._moving(c) for c in self.refit.coordinator.domain(r) if self.refit.owed.owes(c, r.index)]
        if self.phase is Phase.COMMITTING:
            return [f"replica {r.index} worker {w}: installing" for w in range(r.size) if w not in self.committed]
        return [f"replica {r.index} controller: resuming"] if self.phase is Phase.SETTLING else []

    def _arming_for(self) -> list[str]:
        r, refit, co = self.replica, self.refit, self.refit.coordinator
        if r.unsettled:
            return [f"replica {r.index} controller: bringing its engine back after refit {r.unsettled}"]
        if refit.rolling.waits(self):
            return [f"replica {r.index}: its turn, at_once={refit.rolling.at_once}"]
        who = [
            f"replica {r.index} worker {w}: not armed (its controller is pausing the engine or a request is still running)"
            for w in range(r.size)
            if w not in self.armed and self.phase is Phase.ARMING
        ]
        if self.phase is Phase.ARMING and r.in_step and len(self.armed) < r.size:
            who.append(f"replica {r.index}: {STUCK}")
        if r.phase.opening:
            who += [f"{c.label}: {r.phase.value}" for c in sorted(r.pending, key=lambda c: c.label)]
        if r.stale and refit.all_ready and len(self.armed) == r.size:
            silent = [i for i in range(co.options.trainers) if i not in co.trainer_inventories]
            who += [f"trainer {i}: it has not said how what it exports now lies in its memory" for i in silent]
        who += [
            f"replica {r.index} worker {w}: it cannot read what trainers exported so far: {a.unread.message}"
            for w, a in sorted(self.unread.items())
            if a.unread is not None
        ]
        ahead = relays.ahead(refit, self)
        if ahead is not None:
            who.append(f"replica {r.index}: reads from replica {ahead.replica.index}, which has not begun")
        return who

    def _moving(self, c: Client) -> str:
        r, p = self.replica, c.progress
        far = behind = ""
        if p and p.attempt == self.refit.number and p.replica == r.index:
            far = f", wave {p.wave}, {p.bytes_done} of {p.bytes_planned} bytes"
        if c.hello.role == "worker" and c.hello.index in r.follows:
            behind = f", reads from {relays.named(r)}"
        return f"{c.label}: still moving{far}{behind}"

    def _checksum_violations(self) -> list[str]:
        r, sent, live, source = self.replica, self.totals.sent, self.totals.live, self.refit.source
        return [
            f"replica {r.index} worker {w}: {source} sent checksum {sent.get(w, 0):016x}, its live bytes have {live.get(w, 0):016x}; "
            "the replica stays paused until a refit succeeds"
            for w in range(r.size)
            if w not in live or live[w] != sent.get(w, 0)
        ]

    def _holder_violations(self) -> list[str]:
        """Tensors of which trainers hold different bytes, by the digests of a verified refit."""
        held = self.totals.held
        catalog = self.refit.coordinator.catalog
        lines = holders.differences(held, catalog) if held and catalog is not None else []
        return [*lines, holders.ADVICE] if lines else []

    def outcome(self) -> m.ReplicaOutcome:
        """The result of this replica, for the trainers' reports."""
        s, ok, refit, r, t = self.said, self.error is None, self.refit, self.replica, self.totals
        per_worker = tuple(t.bytes_in[i] for i in sorted(r.workers) if i in t.bytes_in)
        phases = (
            ("arm", max(0.0, self.armed_at - max(refit.began, self.told_at)) if self.armed_at else 0.0),
            *((("stage", self.staged_at - refit.ready_at), ("apply", t.apply_s)) if self.staged_at else ()),
            ("plan", r.plan_s),
            ("link", r.link_s),
            ("pack", t.pack_s),
            ("wire", t.wire_s),
            ("unpack", t.unpack_s),
            ("verify", t.verify_s),
            ("drain", refit.drained_s),
            *(s.phases if s else ()),
        )
        if s is not None:
            serves = s.version
        else:  # None: nothing, or not known yet
            serves = None if self.dirty or r.unsettled else r.version
        return m.ReplicaOutcome(
            replica=r.index,
            committed=ok and s is not None,
            serving=s is not None and s.serving,
            version=serves,
            transfer_s=self._transfer_s(),
            outage_s=s.outage_s if s else 0.0,
            bytes_moved=sum(per_worker),
            bytes_per_worker=per_worker,
            phases=phases,
            verified=self.verified,
            dirty=self.dirty and not ok,
            failure=None if ok else m.WireError.of(self.error or UNKNOWN),
            routes=tuple(t.routes[k] for k in sorted(t.routes)),
            readers=tuple(self.readers.values()),
            scratch_bytes=sum(t.scratch.values()),
        )

    def _transfer_s(self) -> float:
        """Seconds in which bytes could move: while they were staged, and from armed to the decision."""
        if not self.decided_at:
            return 0.0
        staged = max(0.0, self.staged_at - self.refit.ready_at)
        return staged + max(0.0, self.decided_at - max(self.refit.ready_at, self.armed_at))
