"""One refit: trainers enter, drain and are ready; each replica is armed and begins as soon as it can.

`Transfer` has what a refit and a first copy (first_copy.py) have in common.

commit.py has the rest of a replica's way, and the place where its version is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from xfer import logs
from xfer.coordinator import messages as m
from xfer.coordinator import relays
from xfer.coordinator.blocks import SharedBlocks
from xfer.coordinator.commit import Phase, ReplicaRefit
from xfer.coordinator.deadlines import ARM_AHEAD_S, TOGETHER_S
from xfer.coordinator.messages import Label
from xfer.coordinator.rolling import Rolling
from xfer.coordinator.state import ReplicaPhase, broadcast
from xfer.errors import EngineLost, PeerLost, PlanMismatch, ProtocolError, Unsupported, VerificationError, XferError
from xfer.plan import holders

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.state import Client, Replica


logger = logging.getLogger("xfer")


class Owed:
    """The ranks that have not said `Done`, and for which replicas.

    Ranks are numbered as in the domain of a replica: sources, then its workers. A set of replicas is an integer with bit `r`
    for replica `r`. Each replica is watched at the first rank that owes it, so a `Done` concerns only the replicas that are
    watched at its sender. The work of a refit thus grows with the number of ranks, not with the pairs of a rank and a replica.

    Args:
        sources: number of ranks that have the weights: all trainers or, in a first copy, the workers of the donor.
        replicas: number of the job's replicas.
        joiner: the replica that gets a first copy.
    """

    def __init__(self, sources: int, replicas: int, joiner: int | None = None):
        self._sources, self._replicas, self._joiner = sources, replicas, joiner
        self._owed = [0] * sources
        self._watched = [0] * sources

    def is_source(self, client: Client) -> bool:
        h = client.hello
        return h.role == "trainer" or self._joiner not in (None, h.replica)

    def rank(self, client: Client) -> int:
        index = client.hello.index
        return index if self.is_source(client) else self._sources + index

    def begin(self, replicas: Sequence[Replica], sources: bool = True) -> None:
        """Note that all ranks of these replicas (without `sources`: their workers only) were told Go, and owe a `Done`."""
        more = self._sources + max(r.size for r in replicas) - len(self._owed)
        self._owed += [0] * more
        self._watched += [0] * more
        some = sum(1 << r.index for r in replicas)
        for i in range(self._sources if sources else 0):
            self._owed[i] |= some
        for r in replicas:
            for i in range(self._sources, self._sources + r.size):
                self._owed[i] |= 1 << r.index
        self._watched[0 if sources else self._sources] |= some

    def owes(self, client: Client, replica: int) -> bool:
        i = self.rank(client)
        return i < len(self._owed) and bool(self._owed[i] >> replica & 1)

    def done(self, client: Client, replicas: tuple[int, ...]) -> list[int]:
        """Note what a rank has done.

        Returns:
            The replicas that no rank owes any more.

        Raises:
            ProtocolError: a replica does not exist.
        """
        i, some = self.rank(client), _bits(replicas, self._replicas)
        if i >= len(self._owed):
            return []
        left = self._watched[i] & some
        self._owed[i] &= ~some
        self._watched[i] &= ~some
        while left and i + 1 < len(self._owed):
            i += 1
            here = left & self._owed[i]
            self._watched[i] |= here
            left &= ~here
        return [r for r in range(left.bit_length()) if left >> r & 1]


@lru_cache(maxsize=256)
def _bits(replicas: tuple[int, ...], count: int) -> int:
    """Return the set of these replicas. The trainers of a large job name the same ones."""
    if (last := max(replicas, default=0)) >= count:
        raise ProtocolError(f"a rank speaks of replica {last}, which does not exist")
    return sum(1 << r for r in set(replicas))


class Transfer:
    """A refit or a first copy: some replicas get weights from the same sources, and each one has a decision of its own (commit.py).

    Attributes:
        number: in messages; refits count from 1, first copies from `FIRST_COPIES`.
        order: versions of a higher order are newer.
        source: name of those that have the weights, for errors.
        parts: by replica, those that take part.
        holds: whether no source changes its weights before the outcome.
        by_changes: whether sources may send only what changed.
        armed_s: seconds for which engines are paused at most.
        scratch: see `Arguments`.
    """

    source = "trainers"
    all_ready = True
    holds = by_changes = verify = False
    scratch: int | None = None
    armed_s: float
    version: Label = None

    def __init__(self, coordinator: Coordinator, number: int, owed: Owed, at_once: int = 0):
        self.coordinator, self.number, self.order, self.owed = coordinator, number, number, owed
        self.parts: dict[int, ReplicaRefit] = {}
        self.rolling = Rolling(self, at_once)
        self.began = self.until = coordinator.now
        self.ready_at = 0.0  # when the last source was ready
        self.drained_s = 0.0  # seconds of the slowest trainer

    def arm(self, replica: Replica) -> None:
        """Arm a replica if it is its turn and nothing is in the way."""
        raise NotImplementedError

    def arm_all(self) -> None:
        """Arm all replicas that can be."""
        for part in self.parts.values():
            self.arm(part.replica)

    def advance(self) -> None:
        """Let every replica begin that can. Called whenever something has changed for which a replica may wait."""
        raise NotImplementedError

    def advance_soon(self) -> None:
        """Call `advance` after the present event: a replica has left, for which others may have waited. Callable inside `advance`."""

    def moved_on(self, part: ReplicaRefit) -> None:
        """Note that a replica has another phase or other readers, or was told to move bytes."""
        raise NotImplementedError

    def trainers_waited_for(self) -> list[str]:
        return []

    def end(self, error: XferError, by: Client | None = None, gone: bool = False) -> None:
        """End the parts of all replicas that are not decided. Only `Coordinator.fail` calls this. Arguments: see `ReplicaRefit.end`."""
        for part in self.parts.values():
            part.end(error, by, gone)
        self.coordinator.soon(self.finish_if_over)  # no part has to be open

    def finish_if_over(self) -> None:
        """End the transfer if no part is open."""
        raise NotImplementedError

    def go(
        self,
        parts: Sequence[ReplicaRefit],
        together: tuple[int, ...] = (),
        tells: bool = False,
        kind: m.GoKind = m.GoKind.MOVE,
    ) -> m.Go:
        replicas, epochs = tuple(p.replica.index for p in parts), tuple(p.epoch for p in parts)
        left = max(1.0, self.until - self.coordinator.now)
        bases = tuple(p.replica.base for p in parts) if self.by_changes else ()
        return m.Go(self.number, replicas, epochs, self.version, self.verify, left, together, tells, bases, kind)

    def handle(self, client: Client, msg: m.Armed | m.PartReady | m.Done | m.Committed | m.Stopped | m.Settled) -> None:
        """Handle a message of a rank or a controller about this transfer."""
        if isinstance(msg, m.Done):
            return self._done(client, msg)
        if (part := self.parts.get(client.hello.replica)) is None:
            return
        if isinstance(msg, m.Armed):
            part.arrived(client, msg)
        elif isinstance(msg, m.PartReady):
            relays.part_ready(self, part, client.hello.index, msg.part)
        elif isinstance(msg, m.Committed):
            part.installed(client.hello.index)
        elif isinstance(msg, m.Stopped):
            part.worker_stopped(client, msg)
        elif isinstance(msg, m.Settled):
            part.settled(msg)

    def _done(self, client: Client, msg: m.Done) -> None:
        """Note that a rank has moved its part for some replicas.

        Raises:
            ProtocolError: the message names a replica that does not exist or, from a worker that receives, that is not its own.
        """
        h = client.hello
        source = self.owed.is_source(client)
        if not source:
            if msg.replicas != (h.replica,):
                raise ProtocolError(f"{client.label} speaks for replicas {msg.replicas[:8]}")
            if h.replica in self.parts:
                self.parts[h.replica].read(h.index)
        for x in msg.moved:
            if self.owed.owes(client, x.replica):
                self.parts[x.replica].totals.add(client, x, source)
        for r in self.owed.done(client, msg.replicas):
            self.parts[r].done()


class Refit(Transfer):
    """All replicas in one refit.

    Args:
        number: which refit of the session this is, from 1.
        deadline_s: seconds until it is aborted, from now or, if it is prepared, from the first call.
        asked: what its first trainer asks for; None: it is prepared, and armed before any trainer has called.
    """

    def __init__(self, coordinator: Coordinator, number: int, deadline_s: float, asked: m.Arguments | None):
        owed = Owed(coordinator.options.trainers, coordinator.options.replicas)
        super().__init__(coordinator, number, owed, asked.at_once if asked is not None else 0)
        self.entered: dict[int, m.Enter] = {}
        self.drained: dict[int, m.Ready] = {}
        self.waiting: dict[int, ReplicaRefit] = {}  # those of `parts` that have not begun
        self.open: set[int] = set()  # those of `parts` that are not over
        self.delta, self.holds = False, True
        self._first = Phase.STAGING if asked is not None and asked.scratch is not None else Phase.ARMING
        self.called = False  # by some trainer, whose call this refit uses up whatever becomes of it
        self.abandoned = False  # nobody called in time: a trainer that calls now gets the next refit
        self.deadline_s = deadline_s
        # The deadline of a prepared refit begins again with the first call: engines are armed for both.
        self.armed_s = deadline_s + (coordinator.options.deadline_s if asked is None else 0.0)
        self._go_at = 0.0  # when replicas that can begin no longer wait for others
        self.shared = SharedBlocks(self)
        # The different arguments of `entered`. A comparison of all ranks at each call would take time quadratic in their number.
        self._asked: set[m.Arguments] = set()
        self._undrained = 0  # how many of `parts` may be read from
        self._to_tell: list[int] = []  # replicas for which trainers are not told Drained yet
        self._arm_at = self.began + (0.0 if asked is None else coordinator.refits.arm_after)

    # ---- going forward

    def start(self) -> None:
        co = self.coordinator
        for r in co.replicas.values():
            part = self.parts[r.index] = ReplicaRefit(self, r, self._first)
            r.stage(co.now)
            r.plan_s = r.link_s = 0.0
            if r.controller is None:
                part.phase = Phase.OVER
                part.error = r.error or EngineLost(
                    f"replica {r.index} is not connected", ["start it and call xfer.serve() with this replica number"]
                )
            elif r.phase is ReplicaPhase.FAILED and r.complete:
                r.stale = True
        self.waiting = {r: part for r, part in self.parts.items() if not part.over}
        self.open, self._undrained = {*self.waiting}, len(self.parts)
        self.arm_all()
        if self._arm_at > self.coordinator.now:
            self.coordinator.at(self._arm_at, self.arm_all, of=self)
        self._set_deadline(self.deadline_s)

    @property
    def all_ready(self) -> bool:  # type: ignore[override]
        """Whether all trainers are ready."""
        return len(self.drained) == self.coordinator.options.trainers

    @property
    def moves(self) -> bool:
        """Whether bytes of some replica may move."""
        return any(not p.waiting and not p.over for p in self.parts.values())

    @property
    def by_changes(self) -> bool:  # type: ignore[override]
        """Whether sources may send only what changed. A scratch that others read needs all bytes."""
        return self.delta and (self.scratch is None or not self.coordinator.options.relay)

    def moved_on(self, part: ReplicaRefit) -> None:
        co, r = self.coordinator, part.replica.index
        if part.waiting:
            self.waiting[r] = part
        else:
            self.waiting.pop(r, None)
        if not part.drained and not part.may_be_read:
            co.soon(lambda: self._note_drained(part))  # not now: trainers hear Go first
        if part.over and r in self.open:
            self.open.discard(r)
            if not self.open:
                co.soon(self.finish_if_over)
            elif self.rolling.at_once:
                co.soon(self.arm_all)

    def arm(self, replica: Replica) -> None:
        """As `Transfer.arm`, unless trainers are expected to need longer to be ready than the engine to arm."""
        part = self.parts[replica.index]
        if self.rolling.may_begin(part) and (self.coordinator.now >= self._arm_at or self.all_ready):
            part.arm()

    def arm_after(self) -> float:
        """Seconds by which the next refit sends Arm after its first call: with them, all engines of this one would have armed shortly
        before the last trainer was ready. An engine that is armed earlier stops serving for nothing. 0.0 if some did not arm."""
        took = [part.armed_at - part.told_at for part in self.parts.values() if part.told]
        if not self.ready_at or not took or min(took) < 0.0:
            return 0.0
        return max(0.0, self.ready_at - self.began - max(took) - ARM_AHEAD_S)

    def _set_deadline(self, seconds: float) -> None:
        self.until = self.began + seconds
        self.coordinator.at(self.until, self._late, of=self)

    def enter(self, client: Client, msg: m.Enter) -> None:
        """A trainer called nccl_xfer_refit()."""
        co = self.coordinator
        self.called = True
        if not self.entered:
            asked = msg.asked
            self.version = co.refits.next_label() if asked.version is None else asked.version
            self.verify, self.delta, self.scratch = asked.verify, asked.delta, asked.scratch
            if asked.at_once != self.rolling.at_once:
                why = f"at_once={asked.at_once}: prepare() has paused all engines for this refit; nothing was moved"
                co.fail(
                    self, Unsupported(why, ["call refit() or publish() without prepare() where replicas take turns"])
                )
            armed_until, self.began = self.began + self.armed_s, co.now
            self.deadline_s = min(asked.deadline_s, armed_until - self.began)
            self._set_deadline(self.deadline_s)
            co.at(co.now + logs.EVERY_S, self._log_waiting, of=self)
            for part in self.parts.values():  # a replica of a prepared refit may be over by now
                self._note_drained(part)
        self.entered[client.hello.index] = msg
        self.holds = self.holds and msg.holds
        self._asked.add(msg.asked)
        # Checked at each call: a rank with a shorter deadline than the first one's would give up before all have called.
        if len(self._asked) > 1:
            odd = differences(self.entered)
            co.fail(self, PlanMismatch("trainer ranks asked for different refits; nothing was moved", odd))
        if len(self.entered) == co.options.trainers:
            self.finish_if_over()  # no replica was there to begin with

    def measured(self, client: Client, msg: m.Measured) -> None:
        """A trainer has measured blocks of which others have parts, too."""
        if client.hello.index in self.entered:
            self.shared.measured(client, msg)

    def ready(self, client: Client, msg: m.Ready) -> None:
        """A trainer's storages hold the version."""
        co = self.coordinator
        if client.hello.index not in self.entered:
            return
        self.drained[client.hello.index] = msg
        self.drained_s = max(self.drained_s, msg.drained_s)
        co.planning.let_go.discard(client)
        self.shared.agree()
        if self.all_ready:
            self.ready_at = co.now
            co.mark("all trainers are ready")
            # They bring the weights from now on.
            co.end_copies(PeerLost("a refit has begun, which brings a newer version"))
            co.silence.take(self.drained.values())
            co.settle_catalog()
            self._put_aside(self.entered[client.hello.index].asked.min_replicas)
            self._compare_samples()
            co.plan_complete()  # a replica that joins is planned from what trainers have now
            self.arm_all()
            if any(r.derives for r in co.replicas.values()):
                co.at(co.now + TOGETHER_S, self.advance, of=self)
            self.advance()

    def _put_aside(self, wanted: int) -> None:
        """Go on without replicas whose engines are not back from an earlier refit, if the other replicas are as many as `wanted`."""
        late = [p for p in self.waiting.values() if p.replica.unsettled]
        if sum(not p.over for p in self.parts.values()) - len(late) < wanted:
            return
        for part in late:
            since = f"replica {part.replica.index} is put aside: its engine is not back in service since refit {part.replica.unsettled}"
            error = EngineLost(since, ["it takes part again when its controller has brought it back"])
            self.coordinator.fail(part, error)

    def _compare_samples(self) -> None:
        """Before a byte moves: compare the samples of trainers that hold the same boxes.

        A trainer sends a sample until its first commit. A sample that numbers tensors by an older catalog is left out.
        """
        co = self.coordinator
        told = {i: r.sample for i, r in self.drained.items() if r.sample and r.generation == co.generation}
        if told and co.catalog is not None and (bad := holders.differences(told, co.catalog)):
            why = "trainers hold different bytes of one tensor; nothing was moved"
            co.fail(self, VerificationError(why, [*bad, holders.ADVICE]))

    def advance(self) -> None:
        co = self.coordinator
        if co.refit is not self or not self.all_ready:
            return
        reading = [p for p in self.waiting.values() if p.replica.derives and p.armed and not p.replica.complete]
        if reading and co.now < self.ready_at + TOGETHER_S:
            return  # a timer is set; these workers may ask for one more catalog, which cannot be made while bytes move
        held = co.now < self._go_at and not co.options.gathers
        if held and not all(p.able_since for p in self.rolling.now(self.waiting.values())):
            return  # a timer is set
        able = [part for part in list(self.waiting.values()) if part.able()]
        if not able or not self._all_there(able):
            return
        begun = relays.can_begin(self, able)
        for part in able:
            part.begin() if part in begun else relays.look_again(self, part)
        if begun:
            self.owed.begin([part.replica for part in begun])
            # Trainers after workers, and the trainer of this process last: its threads would take the interpreter from the coordinator.
            together = tuple(part.replica.index for part in begun) if co.options.gathers else ()
            broadcast([co.trainers[i] for i in sorted(co.trainers, reverse=True)], self.go(begun, together))

    def _all_there(self, able: list[ReplicaRefit]) -> bool:
        """Whether replicas that can begin do so now: no other one can still come, or they have waited long enough.

        Where trainers gather, one gather of the weights feeds all that begin together. In a large job one `Go` tells a
        trainer of all of them.
        """
        co = self.coordinator
        gathers = co.options.gathers
        if len(able) == len(self.rolling.now(self.waiting.values())) or not (gathers or co.hold_s):
            return True
        if gathers:
            self._go_at = max(part.able_since for part in able) + TOGETHER_S
        elif not self._go_at:
            self._go_at = co.now + co.hold_s
        if co.now < self._go_at:
            co.at(self._go_at, self.advance, of=self)
            return False
        self._go_at = 0.0
        return True

    def advance_soon(self) -> None:
        if self.coordinator.options.gathers or self.coordinator.options.relay:
            self.coordinator.soon(self.advance)

    def _late(self) -> None:
        if self.coordinator.refit is not self or self.coordinator.now < self.until:
            return
        self.abandoned = not self.called
        for part in list(self.parts.values()):
            if part.phase in (Phase.STAGING, Phase.ARMING, Phase.MOVING):
                version = "?" if self.version is None else repr(self.version)
                what = f"refit of version {version} to replica {part.replica.index}"
                self.coordinator.fail(part, part.late(f"{what} ended at its deadline of {self.deadline_s:.1f} s"))
        self.finish_if_over()

    # ---- the end

    def _note_drained(self, part: ReplicaRefit) -> None:
        """Tell trainers that no worker of a replica reads their storages, or will. A replica that waits may, however late it joins."""
        if not self.called or part.drained or part.may_be_read or self.coordinator.refit is not self:
            return
        co, part.drained = self.coordinator, True
        self._undrained -= 1
        self._to_tell.append(part.replica.index)
        if not self._undrained or not co.hold_s:
            self._tell_drained()
        elif len(self._to_tell) == 1:
            co.at(co.now + co.hold_s, self._tell_drained, of=self)

    def _tell_drained(self) -> None:
        if self._to_tell:
            co, replicas, self._to_tell = self.coordinator, tuple(self._to_tell), []
            broadcast(co.trainers.values(), m.Drained(self.number, self.version, replicas))

    def finish_if_over(self) -> None:
        co = self.coordinator
        if self.open or co.refit is not self:
            return
        why_until = max((part.why_until for part in self.parts.values()), default=0.0)
        if co.now < why_until:
            return co.at(why_until, self.finish_if_over, of=self)
        self._tell_drained()
        outcomes = tuple(part.outcome() for part in self.parts.values())
        co.refits.end(m.Outcome(self.number, self.version, outcomes, void=not self.called))

    # ---- what others ask of it

    def concerns(self, replica: Replica) -> bool:
        """Whether this refit still has something to do for the replica."""
        return not self.parts[replica.index].over

    def has_told(self, replica: Replica) -> bool:
        """Whether the replica's processes have joined, and will be told how this refit ends."""
        part = self.parts[replica.index]
        return (part.told or replica.joined) and not part.over

    def trainers_waited_for(self) -> list[str]:
        trainers = range(self.coordinator.options.trainers)
        out = [f"trainer {i}: it has not called nccl_xfer_refit()" for i in trainers if i not in self.entered]
        late = "it has called, and is not ready: it finishes parameter gathers in flight, or computes what it exports"
        return out + [
            f"trainer {i}: {late}" for i in sorted(self.entered.keys() - self.drained.keys() - self.shared.waiting)
        ]

    def waiting_for(self) -> list[str]:
        """List what the refit waits for, one line each."""
        lines = self.trainers_waited_for() if self.open else []
        lines += [w for part in self.parts.values() for w in part.own_waiting_for()]
        return list(dict.fromkeys(lines))

    def _log_waiting(self) -> None:
        co, these = self.coordinator, "; ".join(self.waiting_for()[:8])
        seconds = co.now - self.began
        logger.info("xfer: the refit to version %r takes %.0f s; waiting for %s", self.version, seconds, these)
        co.at(co.now + logs.EVERY_S, self._log_waiting, of=self)

    def phase_of(self, client: Client) -> str:
        """The activity of a process, for `xfer status`."""
        h = client.hello
        if h.role != "trainer":
            return self.parts[h.replica].phase.value
        if h.index not in self.entered:
            return "training"
        if h.index not in self.drained:
            return "draining"
        moving = any(part.moving and self.owed.owes(client, part.replica.index) for part in self.parts.values())
        return "moving" if moving else "waiting"


def differences(entered: Mapping[int, m.Enter]) -> list[str]:
    """Compare what trainers asked for, which is not the same on all of them. Returns one line per trainer."""
    names = m.Arguments.__struct_fields__
    odd = [a for a in names if len({getattr(e.asked, a) for e in entered.values()}) > 1]
    return [
        f"trainer {i}: " + ", ".join(f"{a}={getattr(e.asked, a)!r}" for a in odd) for i, e in sorted(entered.items())
    ]
