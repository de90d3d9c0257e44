"""One `nccl_xfer_refit` on one trainer rank: from the call to its outcome, within its bound (deadlines.py).

    Enter -> drain -> re-read what moved -> compute -> Ready -> (the lanes move bytes) -> Outcome

What a rank holds and how it got connected is in trainer.py, of which each call is given the session.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from xfer.background import LOOK_S, BackgroundCall
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import CALL_GRACE_S, STOP_GRACE_S
from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.participants import computing, faults, readers
from xfer.participants.arguments import Call
from xfer.participants.drain import begin_drain
from xfer.participants.report import RefitReport, ReplicaOutcome
from xfer.participants.timeline import mark

if TYPE_CHECKING:
    from xfer.participants.lane import Lane
    from xfer.participants.trainer import TrainerSession

logger = logging.getLogger("xfer")

_LAST_S = 1.0
"""Seconds, within the bound, that a rank which was told nothing keeps for stopping its own lanes."""


class RefitCall:
    """`finish` may come later than `run`, in the next call or when the session is closed."""

    def __init__(self, session: TrainerSession, call: Call):
        self.session, self.party, self.call = session, session.party, call
        self.began, self.until = time.perf_counter(), time.monotonic() + call.seconds
        self.ends = self.until + CALL_GRACE_S
        self.number = 0
        self._entered = self._told = (
            False  # whether the coordinator knows of this attempt; whether its outcome was asked for
        )
        self._may_be_read = False  # workers are let go by the coordinator before this rank is

    @property
    def label(self) -> str:
        return self.party.label

    def run(self) -> RefitReport:
        try:
            with self._naming_gathers():
                return self._run()
        except Exception:
            raise
        except (
            BaseException
        ) as e:  # KeyboardInterrupt, say: whoever catches it goes on with the weights, so this refit must not
            if self._entered:
                why = self._untold(PeerLost(f"nccl_xfer_refit() was interrupted: {type(e).__name__}", where=self.label))
                if not getattr(why, "drained", True):
                    logger.error("xfer: %s", why)
            raise

    def _run(self) -> RefitReport:
        while True:
            self.number = self.session.next_attempt()
            self._enter()
            if self.call.wait == "sources" and self._wait_for_sources():
                self.session.pending = self
                return self._report(self._version(), (), pending=True)
            outcome = self._outcome()
            if not outcome.void:  # else this one was prepared and given up before anybody called
                return self._conclude(outcome)

    @contextlib.contextmanager
    def _naming_gathers(self) -> Iterator[None]:
        """An error says first what the caller must not do while something of this refit goes on."""
        try:
            yield
        except XferError as e:
            e.violations = self.session.side.warn(e.violations)
            raise

    # ---- going in

    def _enter(self) -> None:
        session, call = self.session, self.call
        self._entered = self._told = self._may_be_read = False
        try:
            mark(self.label, "called")
            faults.point("trainer", session.index, "enter")
            self.party.send(m.Enter(self.number, call.version, call.verify, call.want, call.seconds))
            self._entered = True
            if self._made_whole():
                mark(self.label, "drained")
                specs, inventory = session.refresh()
                mark(self.label, "looked at its storages")
                lanes = list(self.session.lanes.values())
                rebound = any([lane.plane.moved() for lane in lanes])
                broken = tuple(lane.replica for lane in lanes if lane.gave_up)
                seconds = session.drain.seconds + self._computed()
                news = session.side.news(session.version is not None)
                if session.device.type == "cuda":
                    # Copies that a source makes when it is looked at (a callable's) are on this thread's stream, lanes on theirs.
                    torch.cuda.current_stream(session.device).synchronize()
                    if call.verify:
                        session.begin_sums(self.number)
                mark(self.label, "ready")
                self._may_be_read = True
                self.party.send(
                    m.Ready(
                        self.number,
                        seconds,
                        specs,
                        inventory,
                        session.generation,
                        rebound,
                        broken,
                        news.sample,
                        news.sends,
                        news.unsent,
                    )
                )
                session.has_told(specs, inventory)
        except computing.Over:
            pass  # the outcome is here already
        except Exception as e:
            error = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}", where=self.label)
            self.party.try_send(m.Failed(m.WireError.of(error, self.label), self.number))
            if self._entered and not self._told:
                with contextlib.suppress(XferError):
                    self._outcome()  # or the next call could come while this attempt is still being undone
            if error is e:
                raise
            raise error from e

    def _computed(self) -> float:
        session = self.session

        def begun(call: BackgroundCall[bool]) -> None:
            session.computing = call

        try:
            return computing.compute(
                session.source, session.layout, self.party, self.number, self.until, self._is_over, begun
            )
        except computing.Unfinished:
            raise self._late(
                "what this rank's export computes was not there in time: other ranks take part in it, and one has not done its part; "
                "it goes on waiting, so do not train before it ended"
            ) from None
        finally:
            if session.computing is not None and session.computing.over:
                session.computing = None  # what it raised holds all that its frames do

    def _is_over(self) -> bool:
        """Whether the outcome is here, or none will ever come."""
        return any(
            isinstance(x, XferError) or isinstance(x, m.Outcome) and x.attempt == self.number
            for x in list(self.party.inbox.queue)
        )

    def _made_whole(self) -> bool:
        """Drains, after gathers and computations that an earlier call left. False: the attempt was over before that. DeadlineExceeded,
        naming who has not called, when one is still running then: it goes on by itself, and the next call waits for it first."""
        session = self.session

        def begun(drain: BackgroundCall[None]) -> None:
            session.drain = drain

        if not self._gathers_ended():
            raise self._late("a gather of an earlier refit has not ended, and reads what would be looked at now")
        if (left := session.computing) is not None:
            if not left.ended(self.until, self._is_over, STOP_GRACE_S):  # that call has told its error
                raise self._late("what an earlier refit was to compute has not ended, and writes where this one would")
            session.computing = None
        if session.drain is not None and not session.drain.over:
            session.drain.ended(self.until, self._is_over, STOP_GRACE_S)  # that call has told its error
        if session.drain is None or session.drain.over:
            begin_drain(session.source, self.label, begun)
            if session.drain.wait(self.until, self._is_over, STOP_GRACE_S):
                return not self._is_over()
        raise self._late(
            "this rank's parameters were not made whole in time: gathers that were in flight wait for other ranks; "
            "they go on waiting, so do not train before they ended"
        )

    def _gathers_ended(self) -> bool:
        """Waits as for a drain: a look lets go of tables and mappings that a gather works with."""
        until, told = self.until, False
        while not self.session.side.wait_still(max(0.0, min(LOOK_S, until - time.monotonic()))):
            now = time.monotonic()
            if now >= until:
                return False
            if not told and self._is_over():
                until, told = min(until, now + STOP_GRACE_S), True
        return True

    def _late(self, why: str) -> DeadlineExceeded:
        try:  # the coordinator's deadline is ours, and it knows who has not called
            told = [o.error.error() for o in self._outcome().outcomes if o.error is not None]
        except XferError as e:
            told = [e]
        lines = dict.fromkeys(line for e in told for line in (e.violations or (e.message,)))
        return DeadlineExceeded(why, lines, where=self.label)

    # ---- waiting

    def _wait_for_sources(self) -> bool:
        """True when this rank's storage is no longer read; False when the outcome says more than that."""

        def free() -> bool:
            return all(self._unread(r) for r in range(self.session.replicas))

        def asked() -> bool:
            return any(isinstance(x, m.CatalogMsg) for x in list(self.party.inbox.queue))

        while not free():
            in_time = self.party.wait_for(lambda: free() or asked() or self._is_over(), self.until)
            if not in_time or self._is_over():
                return False
            if asked():
                message = self.party.take((m.CatalogMsg, m.Outcome), self.until, "the catalog")
                if isinstance(message, m.CatalogMsg):
                    self._answer(message)
                else:
                    self.party.inbox.put(message)  # looked at in the next round
        return True

    def _unread(self, replica: int) -> bool:
        """Whether this replica reads nothing of this rank in this attempt any more. A lane alone cannot tell: one that is
        idle may not have begun, and a replica that is still joining has none yet."""
        lane = self.session.lanes.get(replica)
        if lane is not None and lane.free_attempt >= self.number:
            return True
        # Idle after that word: a Go of this attempt would have been posted to the lane before it.
        return self.party.drained.get(replica, 0) >= self.number and (lane is None or lane.wait_idle(0.0))

    def _outcome(self) -> m.Outcome:
        self._told = True
        while True:
            try:
                message = self.party.take(
                    (m.Outcome, m.CatalogMsg, m.Failed),
                    self.ends - _LAST_S,
                    "the outcome of this refit",
                    due=self.until,
                )
            except (DeadlineExceeded, PeerLost) as e:
                raise self._untold(e) from e
            if isinstance(message, m.CatalogMsg):
                self._answer(message)
            elif isinstance(message, m.Outcome) and message.attempt == self.number:
                return message
            # Failed: the outcome that follows tells it per replica; older outcomes belong to attempts that ended early here

    def _untold(self, e: XferError) -> XferError:
        """The coordinator is gone or silent: stop by ourselves, and say whether somebody may still read our storages."""
        # A coordinator whose process was stopped reads all this when it goes on: it must not run the refit without us then.
        self.party.try_send(m.Failed(m.WireError.of(e, self.label), self.number), _LAST_S)
        lanes = list(self.session.lanes.values())
        stopped = self._idle([lane for lane in lanes if lane.give_up(self.number, e)])
        # What a stopped lane sends nobody reads any more; what takers pull they may.
        if stopped and not (
            self._may_be_read
            and any(
                (lane.plane.read_by_others or self._pulled(lane)) and lane.free_attempt < self.number for lane in lanes
            )
        ):
            return e
        self.session.side.keep_alive()
        why = "workers may still read this rank's parameters" if stopped else "a transfer of this rank did not stop"
        return PeerLost(f"{e.message}; {why}", e.violations, where=self.label, drained=False)

    def _pulled(self, lane: Lane) -> bool:
        """Whether takers read from this rank in this attempt. The lane's present routes may be of an engine that came after it began."""
        return lane.read_attempt >= self.number

    def _idle(self, lanes: Sequence[Lane]) -> bool:
        """Whether these come to rest, in the time that stopping takes and within the call's bound."""
        until = min(time.monotonic() + STOP_GRACE_S, max(self.ends, time.monotonic() + _LAST_S))
        return all([lane.wait_idle(max(0.0, until - time.monotonic()), moved=True) for lane in lanes])

    def _answer(self, message: m.CatalogMsg) -> None:
        """A new catalog, or the same one again for a rank whose exports changed."""
        try:
            self.session.follow(message)
        except Exception as e:
            self.party.try_send(m.Failed(m.WireError.of(e, self.label), self.number))

    # ---- coming out

    def finish(self) -> RefitReport:
        """Wait for the outcome and report it; raises what became of it. It may have come while nobody asked, and if not, the
        coordinator is still given the time to answer."""
        self.ends = max(self.ends, time.monotonic() + CALL_GRACE_S)
        with self._naming_gathers():
            return self._conclude(self._outcome())

    def _conclude(self, outcome: m.Outcome) -> RefitReport:
        if outcome.error is not None:
            raise outcome.error.error()
        # Others plan and link for replicas that join: that reads nothing, and may take long.
        if not self._idle([lane for lane in list(self.session.lanes.values()) if lane.go_attempt >= self.number]):
            self.session.side.keep_alive()
            raise PeerLost(
                "a transfer of this rank did not stop: its parameters may still be read",
                where=self.label,
                drained=False,
            )
        self._quarantine_if_read(outcome)
        report = self._report(outcome.version, tuple(ReplicaOutcome.of(o) for o in outcome.outcomes))
        if report.committed:  # by some; for fewer than were wanted the call raises
            self.session.version = outcome.version
        report.raise_unless(self.call.want)
        return report

    def _quarantine_if_read(self, outcome: m.Outcome) -> None:
        """PeerLost(drained=False) when a worker may still read this rank's storages; they are kept alive then."""
        some = [
            r
            for o in outcome.outcomes
            if (lane := self.session.lanes.get(o.replica)) is not None and self._pulled(lane)
            for r in o.readers
        ]
        seconds = min(readers.GRACE_S, max(_LAST_S, self.ends - time.monotonic()))
        if some and (left := readers.still_reading(some, seconds)):
            self.session.side.keep_alive()
            raise PeerLost(
                "workers may still read this rank's parameters: do not write or free them before those have ended",
                left,
                where=self.label,
                drained=False,
            )

    def _version(self) -> int | str | None:
        """What the coordinator calls this refit, when there is no outcome yet."""
        attempt, version = self.party.named
        return version if attempt == self.number else self.call.version

    def _report(
        self, version: int | str | None, outcomes: tuple[ReplicaOutcome, ...], pending: bool = False
    ) -> RefitReport:
        planes = [lane.plane for lane in list(self.session.lanes.values()) if lane.facts is not None]
        return RefitReport(
            self.session.index,
            version,
            time.perf_counter() - self.began,
            outcomes,
            sum(plane.facts.bytes_out for plane in planes),
            sum(plane.facts.broadcast_bytes for plane in planes),
            sum(plane.extra_bytes for plane in planes) + computing.scratch_bytes(self.session.layout),
            sum(plane.facts.kept_bytes for plane in planes),
            pending,
        )
