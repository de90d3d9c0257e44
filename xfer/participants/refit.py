"""One `nccl_xfer_refit` on one trainer rank: from the call to its outcome, within its bound (deadlines.py).

    Enter -> drain -> re-read what moved -> compute -> Ready -> (the lanes move bytes) -> Outcome

With `wait="ready"` (`Session.publish`) the call returns once it has looked at the storages. All that follows runs in one background
call, which the fence waits for. Work that the trainer's next forward may disturb stays on the caller's thread: gathers, the look at
the storages, and exports that ranks compute together over the trainer's own process groups.

The session, which is the state of a rank between refits, is in trainer.py.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from xfer import faults
from xfer.background import LOOK_S, BackgroundCall
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import CALL_GRACE_S, SILENCE_S, STOP_GRACE_S
from xfer.errors import DeadlineExceeded, PeerLost, RebindError, XferError
from xfer.participants import computing
from xfer.rendezvous.client import host_identity
from xfer.report import RefitReport
from xfer.timeline import mark
from xfer.transport.group import Aborted, wait_for_stream
from xfer.transport.peer import DRAIN_S
from xfer.turns import quick_turns

if TYPE_CHECKING:
    from xfer.participants.lane import Lane
    from xfer.participants.trainer import Source, TrainerSession

logger = logging.getLogger("xfer")

_LAST_S = 1.0
"""Seconds of the bound that a rank without an outcome keeps for stopping its own lanes."""
SELDOM_S = 5e-4
"""Seconds between two looks at a device in the background, where each look takes the interpreter from the trainer's next forward."""
READERS_S = DRAIN_S + 1.0
"""Seconds to wait for workers that may read a trainer's storages: one that lost its connection stops its pull by itself within `DRAIN_S`;
a killed one ends sooner."""


class RefitCall:
    """One refit. `finish` may come later than `run`: in the next call, or when the session is closed.

    Args:
        session: The rank's session.
        asked: The arguments of the call, for the coordinator.
        wait: The event at which the call returns: "commit", "sources" or "ready".

    Attributes:
        number: Number of the present attempt.
        until: Monotonic time of the deadline.
        ends: Monotonic time by which the call raises or returns.
        report: The report with the outcomes, also if the call then raised; None before they are known.
    """

    def __init__(self, session: TrainerSession, asked: m.Arguments, wait: str):
        self.session, self.party, self.asked, self.wait = session, session.party, asked, wait
        self.began, self.until = time.perf_counter(), time.monotonic() + asked.deadline_s
        self.ends = self.until + CALL_GRACE_S
        self.number = 0
        self._seconds: float | None = None  # of a call that returned before the outcome was known
        self.report: RefitReport | None = None
        self._entered = False  # whether the coordinator knows of this attempt
        self._announcing = threading.Lock()  # an interrupted caller and the background may announce at the same time
        self._told = False  # whether this rank has waited for the outcome
        self._drained_s: float | None = None  # seconds of the drain; None: the attempt was over first
        self._rest_of_look: Callable[[], bool] | None = None  # as `TrainerSession.refresh` returns it
        self._returns = threading.Event()  # the call returns: the background would take the interpreter from it before
        self._rest: BackgroundCall[m.Outcome | None] | None = None  # of a call that returned once it had looked
        self._may_be_read = False  # whether workers may have begun to read this rank's storages
        self.free = False  # whether this rank's storages are known to be free
        self.compare_s = 0.0  # seconds in which this rank compared its weights with those of the refit before
        self.fence_s = 0.0  # seconds for which the caller waited at the fence

    @property
    def label(self) -> str:
        return self.party.label

    @property
    def elapsed(self) -> float:
        """Wall time of the call so far, or of the whole call if it has returned."""
        return time.perf_counter() - self.began if self._seconds is None else self._seconds

    def run(self) -> RefitReport:
        """Run the refit until its outcome; with `wait="sources"` until this rank's storages are free; with `wait="ready"` until this
        rank has looked at its storages."""
        with self._guarded():
            try:
                self._begin()
                if self.wait != "ready":
                    return self._until_free()
                mark(self.label, "returns")
                return self._pending()
            finally:
                self._returns.set()

    def fence(self) -> RefitReport:
        """Wait until this rank's storages are free, after `wait="ready"`.

        Returns:
            A pending report, or the last one if the outcome came first.
        """
        began = time.perf_counter()
        try:
            with self._guarded():
                return self._until_free()
        finally:
            self.fence_s = time.perf_counter() - began

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Put lines before those of an error: what the caller must not do while a part of this refit still runs. Stop this refit if the
        caller is interrupted (KeyboardInterrupt, for example) before its storages are free, since it may then change the weights."""
        try:
            yield
        except XferError as e:
            e.violations = self.session.side.warn(e.violations)
            raise
        except Exception:
            raise
        except BaseException as e:
            if self.number and not self.free:
                self._try_to_announce()
                why = self._untold(PeerLost(f"nccl_xfer_refit() was interrupted: {type(e).__name__}", where=self.label))
                if not getattr(why, "drained", True):
                    logger.error("xfer: %s", why)
            raise

    def _pending(self) -> RefitReport:
        """Leave the outcome to a later call."""
        self.session.pending, self._seconds = self, self.elapsed
        return self._report(self._version(), (), pending=True)

    def _begin(self) -> None:
        """Do what needs the caller's thread. With `wait="ready"` the rest begins in the background."""
        session = self.session
        self.number = session.next_attempt()
        self._attempt(self._enter)
        if self.wait == "ready":
            self._rest = BackgroundCall(
                self._go_on,
                session.device,
                self.label,
                register=partial(setattr, session, "rest"),
                stream=session.beside(),
                after=self._returns,
            )

    def _go_on(self) -> m.Outcome | None:
        """Get ready, and wait until this rank's storages are free (returns None) or for the outcome."""
        self._attempt(self._get_ready)
        if self.wait != "commit" and self._wait_for_sources():
            return None
        return self._outcome()

    def _went_on(self) -> m.Outcome | None:
        """Return the result of `_go_on`, here or in the background, or raise its error."""
        if (rest := self._rest) is None:
            return self._go_on()
        try:
            if not rest.wait(self.ends):
                raise self._undrained(
                    "publish() has not ended in the background, where it reads this rank's parameters"
                )
            return rest.result
        finally:
            if rest.over:
                self._rest = self.session.rest = None  # its error would keep alive all objects of its frames

    def _until_free(self) -> RefitReport:
        while (outcome := self._went_on()) is not None and outcome.void:
            self._begin()  # the attempt was prepared and given up before a rank called
        if outcome is None or any(o.error is None for o in outcome.outcomes):
            self._remember()
        if outcome is None:
            report = self._pending()
        else:
            self.session.pending = None
            report = self._conclude(outcome)
        self.free = True
        return report

    def _remember(self) -> None:
        """Keep what this refit sent, before the caller changes it."""
        if self.asked.delta:
            self.session.side.remember(self.number)

    # ---- going in

    def _enter(self) -> None:
        session = self.session
        self._entered = self._told = self._may_be_read = False
        self._drained_s = None
        mark(self.label, "called")
        faults.point("trainer", session.index, "enter")
        alone = self.wait == "ready" and getattr(session.source, "finishes_alone", bool)() and not self._left_running()
        if not alone:
            self._announce()
        if (seconds := self._drained(alone)) is not None:
            mark(self.label, "drained")
            self._rest_of_look = session.refresh(beside=self.wait == "ready")
            mark(self.label, "looked at its storages")
            if session.layout.traced.gathers:
                self._announce()
                session.tell()
                seconds += self._computed()
            self._drained_s = seconds

    def _announce(self) -> None:
        """Tell the coordinator that this rank has called, once. A publish that waits for no other rank does so in the background: the
        coordinator's thread, which may be of this process, would take the interpreter while the caller waits."""
        with self._announcing:
            if not self._entered:
                self.party.send(m.Enter(self.number, self.asked, holds=self.wait == "commit"))
                self._entered = True

    def _try_to_announce(self) -> None:
        with contextlib.suppress(XferError):  # the error that follows is the caller's
            self._announce()

    def _get_ready(self) -> None:
        session, asked, seconds = self.session, self.asked, self._drained_s
        self._announce()
        if seconds is None:
            return
        if (look := self._rest_of_look) is not None:
            self._rest_of_look = None
            if not look():
                session.distrust()
                raise RebindError(
                    "tensors got another shape, strides or dtype in their place since the last refit, or tables of modules were replaced",
                    ["refit again: it reads the layout anew"],
                    where=self.label,
                )
        session.tell()
        if self.wait == "ready":
            seconds += self._device_waited()
        with quick_turns():
            faults.point("trainer", session.index, "ready")
            lanes = list(session.lanes.values())
            rebound = any([lane.plane.moved() for lane in lanes])
            broken = tuple(lane.replica for lane in lanes if lane.gave_up)
            if not session.layout.traced.gathers:
                seconds += self._computed()
            self._quantize()
            if asked.delta:
                self._compare()
            news = session.side.news(session.version is not None)
            if session.device.type == "cuda":
                # Copies that a source makes when it is checked (of a callable) run on this thread's stream; lanes have others.
                wait_for_stream(session.device, self.until, self.label)
                if asked.verify:
                    session.begin_sums(self.number)
            mark(self.label, "ready")
            self._may_be_read = True
            self.party.send(
                m.Ready(self.number, seconds, session.generation, rebound, broken, news.sample, news.sends, news.unsent)
            )

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step. Tell the coordinator of its error at once, and raise it when the attempt has been undone."""
        try:
            step()
        except computing.Over:
            pass  # the outcome is in the inbox
        except Exception as e:
            error = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}", where=self.label)
            self._try_to_announce()
            self.party.try_send(m.Failed(m.WireError.of(error, self.label), self.number))
            if self._entered and not self._told:
                with contextlib.suppress(XferError):
                    self._outcome()  # else the next call could come while this attempt is still being undone
            if error is e:
                raise
            raise error from e

    def _device_waited(self) -> float:
        """Wait for the device's work from before the call, as a blocking refit does in its drain. Returns the seconds."""
        began = time.perf_counter()
        if self.session.device.type == "cuda":
            try:
                seldom = partial(time.sleep, SELDOM_S)
                wait_for_stream(self.session.device, self.until, self.label, self._is_over, seldom)
            except Aborted:
                raise computing.Over from None
            except DeadlineExceeded:
                raise self._late("this rank's device did not finish the work before the call in time") from None
        return time.perf_counter() - began

    def _computed(self) -> float:
        session, begun = self.session, partial(setattr, self.session, "computing")
        try:
            return computing.compute(
                session.source, session.layout.traced, self.party, self.number, self.until, self._is_over, begun
            )
        except computing.Unfinished:
            raise self._late(
                "this rank's export was not computed in time: other ranks take part in the computation, and one has not done its part; "
                "the computation still waits for it, so do not train before it has ended"
            ) from None
        finally:
            if session.computing is not None and session.computing.over:
                session.computing = None  # its error would keep alive all objects of its frames

    def _quantize(self) -> None:
        """Bring this rank's quantized weights up to date. Ranks that have parts of one block agree on its largest value first.

        Raises:
            Over: The attempt has ended.
            DeadlineExceeded: Another rank has not measured its parts. It names the ranks that have not come.
        """
        side, party = self.session.side, self.party
        parts = side.measure(self.until)
        if parts is None:
            return side.quantize()

        measured = partial(
            m.Measured, attempt=self.number, generation=self.session.generation,
            blocks=parts.numbers, largest=parts.largest,
        )  # fmt: skip
        try:  # the coordinator has the same deadline and knows which ranks are missing
            (largest,) = party.questions.ask("blocks", self.until + SILENCE_S, measured, cancelled=self._is_over)
        except DeadlineExceeded:
            raise self._late(
                "trainers that have parts of one FP8 block quantize it together, and not all have come in time"
            ) from None
        except PeerLost:
            raise computing.Over from None  # the outcome is in the inbox, or the reason why none will come
        mark(self.label, "agreed on blocks")
        side.quantize(largest)

    def _compare(self) -> None:
        """Find out which bytes have changed, and measure the time of the comparison alone."""
        side, device, label = self.session.side, self.session.device, self.label
        if device.type == "cuda":
            wait_for_stream(device, self.until, label)
        began = time.perf_counter()
        side.compare()
        if device.type == "cuda":
            wait_for_stream(device, self.until, label)
        self.compare_s = time.perf_counter() - began
        mark(label, "compared")

    def _is_over(self) -> bool:
        """Whether the outcome is in the inbox, or none will come."""
        return self.party.over(m.Outcome, lambda x: x.attempt == self.number)

    def _drained(self, alone: bool) -> float | None:
        """Drain the source, after all work that an earlier call left running.

        Args:
            alone: The drain waits for no other rank and nothing is left running, so it needs no thread.

        Returns:
            Seconds of the drain; None if the attempt was over first.

        Raises:
            DeadlineExceeded: A gather, a computation, an earlier publish or the drain still runs. Names the ranks that have not
                called. It continues in the background, and the next call waits for it first.
        """
        session, source = self.session, self.session.source

        def ended(left: BackgroundCall[Any] | None) -> bool:  # the earlier call has raised its error
            return left is None or left.ended(self.until, self._is_over, STOP_GRACE_S)

        if not self._gathers_ended():
            raise self._late(
                "a gather of an earlier refit has not ended, and reads the storages that this refit would check"
            )
        for left, why in (
            (session.rest, "an earlier publish() has not ended in the background, and reads the storages that this refit would check"),
            (session.computing, "a computation of an earlier refit has not ended, and writes the scratch that this one needs"),
        ):  # fmt: skip
            if not ended(left):
                raise self._late(why)
        session.rest = session.computing = None
        if ended(session.drain):
            finish = getattr(source, "finish_gathers", source.drain) if self.wait == "ready" else source.drain
            if alone:
                began = time.perf_counter()
                finish()
                return time.perf_counter() - began
            drain = begin_drain(source, self.label, partial(setattr, session, "drain"), finish)
            if drain.wait(self.until, self._is_over, STOP_GRACE_S):
                return None if self._is_over() else drain.seconds
        raise self._late(
            "this rank's parameters were not made whole in time: gathers that were in flight wait for other ranks; "
            "they still wait, so do not train before they have ended"
        )

    def _left_running(self) -> bool:
        """Whether an earlier call left something running that this one has to wait for."""
        session = self.session
        calls = (session.rest, session.computing, session.drain)
        return any(c is not None and not c.over for c in calls) or not session.side.wait_still(0.0)

    def _gathers_ended(self) -> bool:
        """Wait for gathers as for a drain: `refresh` frees tables and mappings that a gather uses."""
        until, told = self.until, False
        while not self.session.side.wait_still(max(0.0, min(LOOK_S, until - time.monotonic()))):
            now = time.monotonic()
            if now >= until:
                return False
            if not told and self._is_over():
                until, told = min(until, now + STOP_GRACE_S), True
        return True

    def _late(self, why: str) -> DeadlineExceeded:
        try:  # the coordinator has the same deadline and knows which ranks have not called
            told = [o.error for o in self._outcome().outcomes if o.error is not None]
        except XferError as e:
            told = [e]
        lines = dict.fromkeys(line for e in told for line in (e.violations or (e.message,)))
        return DeadlineExceeded(why, lines, where=self.label)

    # ---- waiting

    def _wait_for_sources(self) -> bool:
        """Return True when this rank's storages are no longer read, False when the outcome is there first or time is up."""

        def free() -> bool:
            return all(self._unread(r) for r in range(self.session.replicas))

        def asked() -> bool:
            return bool(self.party.here(m.CatalogMsg))

        while not free():
            in_time = self.party.wait_for(lambda: free() or asked() or self._is_over(), self.until)
            if not in_time or self._is_over():
                return False
            if (message := self.party.newest(m.CatalogMsg)) is not None:
                self._answer(message)
        return True

    def _unread(self, replica: int) -> bool:
        """Whether this replica has finished reading this rank's storages in this attempt.

        The lane alone does not show that: an idle lane may not have begun, and a replica that is joining has no lane yet.
        """
        lane = self.session.lanes.get(replica)
        if lane is not None and lane.free_attempt >= self.number:
            return True
        # Idle is enough after Drained: a Go of this attempt would have been posted to the lane before it.
        return self.party.drained.get(replica, 0) >= self.number and (lane is None or lane.wait_idle(0.0))

    def _outcome(self) -> m.Outcome:
        self._told = True
        while True:
            try:
                message = self.party.take(
                    self.ends - _LAST_S, "the outcome of this refit", m.Outcome, m.CatalogMsg, m.Failed, due=self.until
                )
            except (DeadlineExceeded, PeerLost) as e:
                raise self._untold(e) from e
            if isinstance(message, m.CatalogMsg):
                self._answer(message)
            elif isinstance(message, m.Outcome) and message.attempt == self.number:
                return message
            # Ignored: Failed, since the outcome that follows has each replica's error, and outcomes of earlier attempts.

    def _untold(self, e: XferError) -> XferError:
        """Stop the lanes without the coordinator, which is gone or silent.

        Returns:
            The error for the caller. It has drained=False if a worker may still read this rank's storages.
        """
        # If the coordinator's process is only stopped, it reads this later and must not run the refit without this rank.
        self.party.try_send(m.Failed(m.WireError.of(e, self.label), self.number), _LAST_S)
        lanes = list(self.session.lanes.values())
        stopped = self._idle([lane for lane in lanes if lane.give_up(self.number, e)])
        # Nobody receives from a stopped lane, but destinations may still pull.
        if stopped and not (
            self._may_be_read
            and any(
                (lane.plane.read_by_others or self._pulled(lane)) and lane.free_attempt < self.number for lane in lanes
            )
        ):
            return e
        why = "workers may still read this rank's parameters" if stopped else "a transfer of this rank did not stop"
        return self._undrained(f"{e.message}; {why}", e.violations)

    def _undrained(self, why: str, lines: Sequence[str] = ()) -> PeerLost:
        """Keep this rank's storages alive, and return the error that says why."""
        self.session.side.keep_alive()
        return PeerLost(why, lines, where=self.label, drained=False)

    def _pulled(self, lane: Lane) -> bool:
        """Whether destinations read from this rank in this attempt. The lane's present routes may belong to an engine that
        joined after the attempt began."""
        return lane.read_attempt >= self.number

    def _idle(self, lanes: Sequence[Lane]) -> bool:
        """Whether these lanes become idle within the grace for stopping and within the call's bound."""
        until = min(time.monotonic() + STOP_GRACE_S, max(self.ends, time.monotonic() + _LAST_S))
        return all([lane.wait_idle(max(0.0, until - time.monotonic()), moved=True) for lane in lanes])

    def _answer(self, message: m.CatalogMsg) -> None:
        """Answer a new catalog, or the same one again after this rank's exports changed."""
        try:
            self.session.follow(message, self._quantize, self.until)
        except computing.Over:
            pass  # the outcome is in the inbox
        except Exception as e:
            self.party.try_send(m.Failed(m.WireError.of(e, self.label), self.number))

    # ---- coming out

    def finish(self) -> RefitReport:
        """Wait for the outcome and report it, or raise its error. The coordinator gets at least CALL_GRACE_S from now on to
        answer."""
        self.ends = max(self.ends, time.monotonic() + CALL_GRACE_S)
        with self._guarded():
            return self._conclude(self._outcome())

    def _conclude(self, outcome: m.Outcome) -> RefitReport:
        if outcome.error is not None:
            raise outcome.error.error()
        # Other lanes plan and link for replicas that join: they read nothing and may take long.
        if not self._idle([lane for lane in list(self.session.lanes.values()) if lane.go_attempt >= self.number]):
            raise self._undrained("a transfer of this rank did not stop: its parameters may still be read")
        self._quarantine_if_read(outcome)
        report = self.report = self._report(outcome.version, outcome.outcomes)
        if report.committed:  # if fewer replicas than wanted committed, the call raises below
            self.session.version = outcome.version
        report.raise_unless(self.asked.min_replicas)
        return report

    def _quarantine_if_read(self, outcome: m.Outcome) -> None:
        """Keep this rank's storages alive and raise PeerLost(drained=False) if a worker may still read them."""
        some = [
            r
            for o in outcome.outcomes
            if o.readers and (lane := self.session.lanes.get(o.replica)) is not None and self._pulled(lane)
            if not lane.plane.cut_off()
            for r in o.readers
        ]
        seconds = min(READERS_S, max(_LAST_S, self.ends - time.monotonic()))
        if some and (left := still_reading(some, seconds)):
            why = "workers may still read this rank's parameters: do not write or free them before those have ended"
            raise self._undrained(why, left)

    def _version(self) -> int | str | None:
        """The label of this refit before its outcome is known."""
        attempt, version = self.party.named
        return version if attempt == self.number else self.asked.version

    def _report(
        self, version: int | str | None, outcomes: tuple[m.ReplicaOutcome, ...], pending: bool = False
    ) -> RefitReport:
        planned = [
            (lane.plane, facts) for lane in list(self.session.lanes.values()) if (facts := lane.facts) is not None
        ]
        return RefitReport(
            self.session.index,
            version,
            self.elapsed,
            outcomes,
            sum(facts.bytes_out for _, facts in planned),
            sum(facts.broadcast_bytes for _, facts in planned),
            sum(plane.extra_bytes for plane, _ in planned)
            + self.session.computed_bytes
            + self.session.side.scratch_bytes,
            sum(facts.kept_bytes for _, facts in planned),
            pending,
            fence_s=self.fence_s,
            rules=self.session.side.rules,
            compare_s=self.compare_s,
        )


def begin_drain(
    source: Source,
    label: str,
    register: Callable[[BackgroundCall[None]], None] = lambda _: None,
    finish: Callable[[], None] | None = None,
) -> BackgroundCall[None]:
    """Start a drain of `source`, or `finish` in its place. `register` is given the call before it starts.

    With parameter gathers in flight, a drain ends only when all data-parallel peers call too, and nothing interrupts a
    collective. So it runs in the background.
    """

    def drain() -> None:
        faults.point("trainer", source.rank, "drain")
        (finish or source.drain)()

    return BackgroundCall(drain, source.device, label, "the trainer's parameters could not be made whole", register)


def still_reading(suspects: Sequence[m.Reader], seconds: float) -> list[str]:
    """Wait until these workers are dead. They have not told the end of their pulls (coordinator/commit.py).

    Only processes of this host can be checked, which is enough: a pull does not leave a host. As everywhere in xfer,
    `host_identity()` identifies a host, so containers that share a name but not their process ids must set XFER_HOST.

    Returns:
        One line for each that may still be alive after so many seconds.
    """
    until, left = time.monotonic() + seconds, list(suspects)
    while (left := [r for r in left if r.host != host_identity() or _alive(r.pid)]) and time.monotonic() <= until:
        time.sleep(0.01)
    return [f"{r.label} (host {r.host}, pid {r.pid})" for r in left]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            state = f.read().rsplit(b")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")  # a zombie has no memory and no device context
