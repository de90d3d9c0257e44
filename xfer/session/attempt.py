"""One refit attempt, as the hub sees it: who has entered, which replica is how far, and the decision for each.

Every replica runs through its own line; a failure moves only that line to `aborting`:

    arming --all workers armed, all trainers entered--> (planning, linking when a layout changed) --> moving
    moving --all done, checksums equal--> committing --all workers committed--> settling --controller settled--> over
    any state before committing --error, loss, deadline--> aborting --armed workers stopped--> settling --> over

Presumed abort: a worker that never hears `Commit` never installs. The decision is taken once, here, on the hub's one thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from xfer import logs
from xfer.errors import DeadlineExceeded, EngineLost, PeerLost, PlanMismatch, VerificationError, XferError
from xfer.session import messages as m
from xfer.session import relays
from xfer.session.bounds import ANSWER_GRACE_S, CAUSE_S, SETTLE_GRACE_S, STOP_GRACE_S, TOGETHER_S
from xfer.session.run import Run, checksum_violations, differences, outcome_of, waiting_for
from xfer.session.timeline import HUB, mark
from xfer.session.wire import Label

if TYPE_CHECKING:
    from xfer.session.hub import Hub
    from xfer.session.roster import Client, Replica


logger = logging.getLogger("xfer")


class Attempt:
    """Lives on the hub's brain thread only."""

    MESSAGES = (m.Armed, m.Brought, m.Done, m.Committed, m.Stopped, m.Settled)

    def __init__(self, hub: Hub, number: int, deadline_s: float, prepared: bool):
        self.hub, self.number = hub, number
        self.entered: dict[int, m.Enter] = {}
        self.drained: dict[int, m.Ready] = {}
        self.runs: dict[int, Run] = {}
        self.began = time.monotonic()
        self.version: Label = None
        self.verify = False
        self.ready_at = 0.0  # the last trainer was
        self.called = False  # by some trainer: its call is used up by this attempt, whatever becomes of it
        self.abandoned = False  # nobody called in time: whoever does now gets the next attempt
        self.deadline_s = deadline_s
        # The deadline of one that was prepared begins anew with the first call: engines are armed for both.
        self.armed_s = deadline_s + (hub.options.deadline_s if prepared else 0.0)

    # ---- starting

    def start(self) -> None:
        for r in self.hub.replicas.values():
            run = self.runs[r.index] = Run(r)
            r.stage()
            r.plan_s = r.link_s = 0.0
            if r.controller is None:
                why = r.error or EngineLost(
                    f"replica {r.index} is not connected", ["start it and call xfer.serve() with this replica number"]
                )
                run.error, run.state = why, "over"
                continue
            if r.state == "failed" and r.complete:
                r.stale = True
        self._arm()
        self._deadline(self.deadline_s)

    def concerns(self, replica: Replica) -> bool:
        """Whether this attempt still has something to do for the replica."""
        run = self.runs.get(replica.index)
        return run is not None and not run.over

    def has_told(self, replica: Replica) -> bool:
        """Whether its engine was told of this attempt, and so has joined before. Not of a former life, whose part is over."""
        run = self.runs.get(replica.index)
        return run is not None and run.told and not run.over

    def _arm(self) -> None:
        """A controller whose replica is still joining would not hear it: it is told when the replica is ready."""
        for run in self.runs.values():
            r = run.replica
            if (
                run.state == "arming"
                and not run.told
                and r.controller is not None
                and not r.unsettled
                and r.state not in ("joining", "planning", "linking")
            ):
                run.told = True
                r.controller.send(m.Arm(self.number, self.armed_s))

    def _deadline(self, seconds: float) -> None:
        self.until = self.began + seconds
        self.hub.at(self.until, self._late, of=self)

    def enter(self, client: Client, msg: m.Enter) -> None:
        self.called = True
        if not self.entered:
            self.version = self.hub.calls.next_label() if msg.version is None else msg.version
            self.verify = msg.verify
            armed_until, self.began = self.began + self.armed_s, time.monotonic()
            self.deadline_s = min(msg.deadline_s, armed_until - self.began)
            self._deadline(self.deadline_s)
            self.hub.at(self.began + logs.EVERY_S, self._say_waiting, of=self)
        self.entered[client.hello.index] = msg
        if len(self.entered) == self.hub.options.trainers:
            if odd := differences(self.entered):
                self.fail(PlanMismatch("trainer ranks asked for different refits; nothing was moved", odd))
            self.finish_if_over()  # no replica was there to begin with

    def ready(self, client: Client, msg: m.Ready) -> None:
        if client.hello.index not in self.entered:
            return
        self.drained[client.hello.index] = msg
        self.hub.planning.let_go.discard(client)
        if len(self.drained) == self.hub.options.trainers:
            self.ready_at = time.monotonic()
            mark(HUB, "all trainers are ready")
            self.hub.settle_catalog()
            self.advance()

    def takes(self, msg: m.Message) -> bool:
        return isinstance(msg, self.MESSAGES) and msg.attempt == self.number

    # ---- going forward

    def handle(self, client: Client, msg: m.Message) -> None:
        h = client.hello
        run = self.runs.get(h.replica if h.role != "trainer" else getattr(msg, "replica", -1))
        if run is None:
            return
        if isinstance(msg, m.Armed):
            self._armed(client, run, msg)
        elif isinstance(msg, m.Brought):
            relays.brought(self, run, h.index, msg.part)
        elif isinstance(msg, m.Done):
            if h.role == "worker":
                run.readers.pop(h.index, None)
                relays.brought(self, run, h.index, relays.ALL_PARTS)
            if run.state == "moving":
                run.done[client.label] = msg
                self._decide(run)
        elif isinstance(msg, m.Committed):
            run.committed.add(h.index)
            if run.state == "committing" and len(run.committed) == run.replica.size:
                run.state = "settling"
                self._settle_timer(run)
                run.replica.controller.send(m.Commit(run.replica.index, self.number, self.version))
        elif isinstance(msg, m.Stopped):
            run.stopped[h.index] = msg.dirty
            if msg.drained:
                run.readers.pop(h.index, None)
            self._stopped(run)
            if run.state == "committing":
                self._torn(
                    run, EngineLost(f"{client.label} left its call before it had installed version {self.version!r}")
                )
        elif isinstance(msg, m.Settled):
            self._settled(run, msg)
        self.finish_if_over()

    def _armed(self, client: Client, run: Run, msg: m.Armed) -> None:
        self.hub.take_changes(client, msg)
        if run.state != "arming":
            client.send(
                m.Abort(
                    run.replica.index,
                    self.number,
                    run.replica.epoch,
                    m.WireError.of(run.error or EngineLost("too late"), "rendezvous"),
                )
            )
            return
        run.armed.add(client.hello.index)
        if msg.unread is not None:
            run.unread[client.hello.index] = msg
        if len(run.armed) == run.replica.size:
            run.armed_at = time.monotonic()
            mark(HUB, f"replica {run.replica.index}: all workers are armed")
        self.advance()

    def advance(self) -> None:
        """Move every line that can move. Called whenever something changed."""
        self._arm()
        if len(self.drained) < self.hub.options.trainers:
            return
        for r in self.hub.replicas.values():
            self.hub.plan_if_complete(r)  # one that joins, from what trainers say that they have now
        able: list[Run] = []
        for run in self.runs.values():
            r = run.replica
            if run.state != "arming" or not r.size or len(run.armed) < r.size:
                continue
            # Trainers have said what they export now. A worker that had an older catalog is reading the newer one.
            if now := [a.unread for a in run.unread.values() if a.generation == self.hub.generation]:
                self.abort(run, now[0].error())
                continue
            if r.state in ("planning", "linking", "joining"):
                continue
            if r.stale:
                if r.complete and len(self.hub.trainer_inventories) == self.hub.options.trainers:
                    self.hub.planning.plan(r)
            elif relays.held_up_by(self, run) is not None:
                relays.look_again(self, run)
            elif r.relink or r.reopen:
                self.hub.planning.relink(r, fresh=r.relink)
            elif r.state == "ready" and relays.out_of_place(self.hub, r):
                self.hub.planning.relink(r, fresh=False)
            elif r.state == "ready":
                able.append(run)
        if self.hub.options.route == "packed" and not self._all_there(able):
            return  # one gather feeds them all
        together = tuple(run.replica.index for run in able) if self.hub.options.route == "packed" else ()
        for run in able:
            r = run.replica
            if not relays.may_begin(self, run):
                relays.look_again(self, run)
                continue
            run.readers = {
                i: m.Reader(c.label, c.hello.host, c.hello.pid) for i, c in r.workers.items() if i not in r.follows
            }
            run.state, run.epoch = "moving", r.epoch
            left = max(1.0, self.until - time.monotonic())
            # Workers first, the trainer in this process last: its threads would take the interpreter from the hub.
            self.hub.broadcast(
                reversed(self.hub.domain(r)),
                m.Go(r.index, self.number, r.epoch, self.version, self.verify, left, together, relays.tells(self, run)),
            )
            mark(HUB, f"replica {r.index}: go was sent")
            relays.began(self, run)

    def _all_there(self, able: list[Run]) -> bool:
        """Whether a gather for these may begin: no other replica can still come, or they have waited long enough."""
        if not able or all(run in able for run in self.runs.values() if run.state == "arming"):
            return True
        waited = time.monotonic() - max(self.ready_at, *(run.armed_at for run in able))
        if waited >= TOGETHER_S:
            return True
        self.hub.at(time.monotonic() + TOGETHER_S - waited, lambda: self.hub.attempt is self and self.advance())
        return False

    def _decide(self, run: Run) -> None:
        if len(run.done) < len(self.hub.domain(run.replica)):
            return
        bad = checksum_violations(run) if self.verify else []
        if bad:
            self.abort(
                run, VerificationError(f"replica {run.replica.index}: version {self.version!r} was not committed", bad)
            )
            return
        run.verified = self.verify
        self.hub.calls.had(self.version)
        run.state, run.decided_at = "committing", time.monotonic()
        mark(HUB, f"replica {run.replica.index}: decided")
        self.hub.at(run.decided_at + STOP_GRACE_S, lambda: self._install_late(run), of=self)
        self.hub.broadcast(run.replica.workers.values(), m.Commit(run.replica.index, self.number, self.version))
        if run.replica.controller is not None:
            run.replica.controller.send(m.Decided(self.number))

    # ---- going back

    def abort(self, run: Run, error: XferError) -> None:
        """End one replica's line before its decision; later than that nothing can be taken back, and nobody but its own
        workers is needed: a trainer that is lost while they install costs the next refit, not this one."""
        if run.state in ("committing", "settling", "aborting", "over"):
            return
        moved = run.state == "moving"
        run.state, run.error = "aborting", error
        run.dirty = moved
        if run.told or run.replica.state not in ("joining", "planning", "linking"):
            self._break(run, error)  # else it goes on joining: nothing of this attempt has reached it
        self.hub.at(time.monotonic() + STOP_GRACE_S, lambda: self._stop_late(run), of=self)
        self._stopped(run)
        relays.fallen(self, run, error)
        self._others_go_on()

    def _break(self, run: Run, error: XferError) -> None:
        r = run.replica
        r.relink = True  # an abort frees whoever is blocked by breaking the communicator: never used again
        if r.state in ("planning", "linking"):
            r.state, r.error = "failed", error  # planned anew by the next attempt
        wire = m.WireError.of(error, "rendezvous")
        self.hub.broadcast(self.hub.domain(r), m.Abort(r.index, self.number, r.epoch, wire))

    def _others_go_on(self) -> None:
        """Some may have waited for one that is out of it now. Not from inside `advance`."""
        if self.hub.options.route == "packed" or self.hub.options.relay:
            self.hub.at(time.monotonic(), lambda: self.hub.attempt is self and self.advance())

    def _install_late(self, run: Run) -> None:
        if run.state == "committing":
            self._torn(
                run,
                DeadlineExceeded(
                    f"replica {run.replica.index} did not install version {self.version!r} within {STOP_GRACE_S:.0f} s of the decision",
                    [f"waiting for {w}" for w in waiting_for(self, run)],
                ),
            )
            self.finish_if_over()

    def _torn(self, run: Run, error: XferError) -> None:
        """Decided, but not every worker installed: the replica may hold two versions and must not be resumed."""
        run.error, run.dirty = error, True
        run.replica.relink = True
        self._settle(run, True)

    def _stopped(self, run: Run) -> None:
        if run.state == "aborting" and all(w in run.stopped for w in run.armed if w in run.replica.workers):
            self._settle(run, any(run.stopped.values()))

    def _stop_late(self, run: Run) -> None:
        if run.state == "aborting":
            self._settle(run, run.dirty)  # someone did not answer: if bytes may have moved, they count as moved
            self.finish_if_over()

    def _settle(self, run: Run, dirty: bool) -> None:
        run.dirty = dirty or run.replica.dirty  # torn by an earlier attempt, this one did not mend it
        run.state = "settling"
        self._settle_timer(run)
        controller = run.replica.controller
        if controller is None or not run.told:  # its engine knows nothing of this attempt
            run.state = "over"
        else:
            # What it held before, the controller knows: a replica that had no weights yet holds no mix now.
            controller.send(m.Settle(self.number, dirty, m.WireError.of(run.error, "rendezvous")))

    def _settle_timer(self, run: Run) -> None:
        r, now, grace = run.replica, time.monotonic(), SETTLE_GRACE_S

        def unsettled() -> None:
            """Trainers have waited long enough; for the controller it is not too late."""
            if run.state == "settling":
                run.state, r.unsettled, r.dirty = "over", self.number, run.error is not None and run.dirty
                run.error = run.error or DeadlineExceeded(
                    f"replica {r.index} holds version {self.version!r}, but its engine was not back in service in time",
                    [f"replica {r.index} controller: resuming; the next refit waits for it"],
                )
                self.finish_if_over()

        def never() -> None:
            if run.state == "settling" or r.unsettled == self.number:
                self.hub.lose(
                    r, EngineLost(f"replica {r.index} was not back in service {grace:.0f} s after the decision")
                )
                self.finish_if_over()

        self.hub.at(max(now, self.until) + ANSWER_GRACE_S, unsettled, of=self)
        self.hub.at(now + grace, never)

    def _settled(self, run: Run, msg: m.Settled) -> None:
        if run.over:
            return
        if run.state != "settling":
            # It had no word from here for so long that it presumed the worst: whatever we do, its part is over.
            gave_up = f"replica {run.replica.index}: its controller gave up waiting for the decision"
            self.abort(run, DeadlineExceeded(gave_up, [f"waiting for {w}" for w in waiting_for(self, run)]))
            run.error = run.error or DeadlineExceeded(gave_up)  # it was decided, and nothing can be taken back
            run.dirty = run.dirty or not msg.serving
        run.settled, run.state = msg, "over"
        run.replica.dirty = run.dirty
        run.replica.settled(msg)
        if run.error is None and not msg.serving:
            run.error = EngineLost(
                f"replica {run.replica.index} committed version {self.version!r} but could not be resumed"
            )

    def lost(self, replica: Replica, error: XferError) -> None:
        """A process of the replica is gone (the hub has told its other processes)."""
        run = self.runs.get(replica.index)
        if run is None or run.over and run.error is None:
            return
        if isinstance(run.error, EngineLost):  # its controller told first that something died; this says who
            run.error = PeerLost(error.message, (*error.violations, str(run.error)), where=error.where)
        run.error = run.error or error
        if run.over:
            return
        wire = m.WireError.of(error, "rendezvous")
        self.hub.broadcast(self.hub.domain(replica), m.Abort(replica.index, self.number, replica.epoch, wire))
        if replica.controller is not None:
            replica.controller.send(m.Settle(self.number, True, wire))
        run.dirty, run.state = run.state != "arming", "over"
        relays.fallen(self, run, error)
        self._others_go_on()
        self.hub.at(time.monotonic(), self.finish_if_over)

    def planning_failed(self, replica: Replica, error: XferError) -> None:
        run = self.runs.get(replica.index)
        if run is not None:
            self.abort(run, error)
            self.finish_if_over()

    def failed(self, client: Client | None, replicas: list[Replica] | None, error: XferError) -> None:
        """A rank raised. `replicas` None: it concerns all."""
        for run in self.runs.values():
            if replicas is None or run.replica in replicas:
                if run.state == "committing" and client is not None and client.hello.role == "worker":
                    self._torn(run, error)
                    continue
                self.abort(run, error)
                if client is not None and isinstance(error, PeerLost) and run.error is error:
                    run.why_until = min(time.monotonic() + CAUSE_S, self.until)
        self.finish_if_over()

    def because(self, replica: Replica, error: XferError) -> None:
        """Of a rank of this attempt. One that raises while bytes move closes its connections, and others may tell of that before
        it says why, when its replica's part is over already."""
        run = self.runs.get(replica.index)
        if run is not None and run.why_until and not isinstance(error, PeerLost):
            run.error, run.why_until = error, 0.0
            self.finish_if_over()

    def fail(self, error: XferError) -> None:
        self.failed(None, None, error)

    def _late(self) -> None:
        if self.hub.attempt is not self or time.monotonic() < self.until:
            return
        self.abandoned = not self.called
        for run in list(self.runs.values()):
            if run.state in ("arming", "moving"):
                self.abort(
                    run,
                    DeadlineExceeded(
                        f"refit of version {'?' if self.version is None else repr(self.version)} to replica {run.replica.index} "
                        f"ended at its deadline of {self.deadline_s:.1f} s",
                        [f"waiting for {w}" for w in waiting_for(self, run)],
                    ),
                )
        self.finish_if_over()

    # ---- the end

    def finish_if_over(self) -> None:
        for run in self.runs.values():
            # While it is arming it may yet read, however late the replica joins: no trainer may take it for done.
            if self.called and run.state != "arming" and not run.readers and not run.drained:
                run.drained = True
                said = m.Drained(run.replica.index, self.number, self.version)
                self.hub.broadcast(self.hub.trainers.values(), said)
        if self.hub.attempt is not self or not all(run.over for run in self.runs.values()):
            return
        why_until = max((run.why_until for run in self.runs.values()), default=0.0)
        if time.monotonic() < why_until:
            return self.hub.at(why_until, self.finish_if_over, of=self)
        outcomes = tuple(outcome_of(self, run) for run in self.runs.values())
        self.hub.calls.end(m.Outcome(self.number, self.version, outcomes, void=not self.called))

    # ---- telling

    def waiting_for(self) -> list[str]:
        return list(dict.fromkeys(w for run in self.runs.values() if not run.over for w in waiting_for(self, run)))

    def _say_waiting(self) -> None:
        seconds, these = time.monotonic() - self.began, "; ".join(self.waiting_for()[:8])
        logger.info("xfer: the refit to version %r takes %.0f s; waiting for %s", self.version, seconds, these)
        self.hub.at(time.monotonic() + logs.EVERY_S, self._say_waiting, of=self)

    def phase_of(self, client: Client) -> str:
        h = client.hello
        if h.role == "trainer":
            if h.index not in self.entered:
                return "training"
            if h.index not in self.drained:
                return "draining"
            return (
                "moving"
                if any(run.state == "moving" and client.label not in run.done for run in self.runs.values())
                else "waiting"
            )
        run = self.runs.get(h.replica)
        return run.state if run else "idle"
