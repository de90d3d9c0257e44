"""The controller of one replica, the only part of xfer that calls the engine: pause, start, update, finish, caches, resume.

It runs in the process of the engine's handle, on a thread of its own. `update` blocks the engine until the decision and so
runs on another thread. Only the controller resumes an engine that it paused, and it resumes none whose bytes are of two versions.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

from xfer import logs, observers, timeline
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import SETTLE_GRACE_S, SILENCE_S, STOP_GRACE_S
from xfer.errors import DeadlineExceeded, EngineLost, PeerLost, Unsupported, XferError
from xfer.participants.engine import EngineHandle
from xfer.rendezvous.client import RendezvousClient
from xfer.timeline import mark
from xfer.turns import quick_turns

logger = logging.getLogger("xfer")
UPDATE_GRACE_S = 5.0
"""Seconds between an engine's return from its update call and the decision reaching this controller."""
MIXED = "xfer:mixed"
"""Version text that an engine carries while its bytes may be of two versions."""
PAUSED = "xfer:paused"
"""Version text of an engine that xfer has paused and not written: while it joins, or until its first weights come."""
_HELD: dict[str | None, m.Holds] = {MIXED: "mix", PAUSED: "nothing"}
UNKNOWN = "xfer:unknown"
"""Version text of an engine after a failed refit that wrote nothing, if its label before that is not known."""


class ControllerPhase(Enum):
    """Phase of a controller. Its `error` and `torn` say what the engine may serve.

    JOINING -> READY        the engine's workers and the coordinator know each other
    JOINING, READY -> OVER  the replica could not join, or the controller failed: no refit reaches it, and `error` is the reason
    any -> CLOSED           its owner has closed it
    """

    JOINING = "joining"
    READY = "ready"
    OVER = "over"
    CLOSED = "closed"


class _ClosedError(Exception):
    """The owner has closed the controller."""


_UNCHANGED: Any = object()


class Controller:
    """The controller of one replica; `xfer.serve` makes it. Also a context manager that closes itself.

    Args:
        handle: The engine, as `engines.choose_handle.handle_for` makes it.
        rendezvous: "tcp://HOST:PORT".
        token: The job's secret.
        replica: The replica's number.
        deadline_s: Seconds for joining, and the default of the waits below.
        engine_rendezvous: The rendezvous as the engine's workers reach it, if that differs.
        keep: Globs of engine parameters that refits leave alone.
        tell: Called with the error that ends this controller before it meets the coordinator, which then cannot be told.

    Attributes:
        version: The version that the replica serves, in the type that the trainers gave it; None if it serves none.
        error: Why the replica serves nothing; None if it serves.
        torn: Whether the engine holds bytes that must not be served. The next commit repairs it.
        lost: Why no refit will come, since the trainers are gone; None while they are there. A whole version is still served.
        refits: Number of committed refits.
    """

    def __init__(
        self,
        handle: EngineHandle,
        rendezvous: str,
        token: str,
        *,
        replica: int,
        deadline_s: float,
        engine_rendezvous: str | None = None,
        keep: tuple[str, ...] = (),
        tell: Callable[[XferError], None] | None = None,
    ):
        self.handle = handle
        self.rendezvous, self.replica, self.deadline_s = rendezvous, replica, deadline_s
        self._token, self._keep, self._engine_rendezvous = token, keep, engine_rendezvous or rendezvous
        self._tell = tell
        self.version: int | str | None = None
        self.error: XferError | None = None
        self.torn = False
        self.lost: XferError | None = None
        self.refits = 0
        self._label: str | None = None  # the engine's own label, outside of refits
        self._unheard: m.Settle | None = None  # a decision that this controller made, since the coordinator was gone
        self._held = False  # whether the engine is paused so that the replica can join
        self._doing = "asking its engine how many workers it has"
        self._workers = 0
        self._phase = ControllerPhase.JOINING
        self._changed = threading.Condition()
        self._party: RendezvousClient | None = None
        self._thread = threading.Thread(target=self._work, name=f"xfer-controller-{replica}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        if self.error is not None and not self._closed:
            state = f"serves nothing: {self.error.line()}"
        elif self._phase is not ControllerPhase.READY:
            state = self._phase.value
        else:
            state = "no refit yet" if self.version is None else f"serves version {self.version!r}"
        return f"<Controller of replica {self.replica} at {self.rendezvous}: {state}>"

    # ---- for the owner of the engine

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the replica takes part in refits. Not on an AsyncLLM's own loop.

        Args:
            timeout_s: Seconds. Default: the controller's `deadline_s`.

        Raises:
            DeadlineExceeded: The replica is not ready in time.
            Unsupported: The controller is closed, or the thread runs the engine's own loop.
            XferError: The reason why the replica could not join.
        """
        self._refuse_waiting("wait_ready")
        with self._changed:
            seconds = self.deadline_s if timeout_s is None else timeout_s
            if not self._changed.wait_for(lambda: self._phase is not ControllerPhase.JOINING, seconds):
                raise DeadlineExceeded(f"replica {self.replica} is not ready", [self._why()])
            self._refuse_closed("wait_ready()")
            if self.error is not None and (self._phase is ControllerPhase.OVER or not self.torn):
                raise self.error

    def wait_version(
        self, version: int | str | None = None, timeout_s: float | None = None, *, at_least: int | None = None
    ) -> int | str:
        """Wait until the replica serves a version. For owners of an engine that starts without weights, and for samplers whose
        weights must not be too old. Not on an AsyncLLM's own loop.

        Args:
            version: The version to wait for; 1 and "1" are the same. Default: any that a refit brings.
            timeout_s: Seconds. Default: the controller's `deadline_s`.
            at_least: Wait for this number or a higher one; a version that is no number is not enough.

        Returns:
            The version, in the type that the trainers gave it.

        Raises:
            DeadlineExceeded: The replica does not serve it in time.
            Unsupported: The controller is closed, or the thread runs the engine's own loop.
            XferError: The reason why no refit will come, as soon as there is one.
        """
        self._refuse_waiting("wait_version")

        def there() -> bool:
            served = str(self.version)
            recent = at_least is None or served.lstrip("-").isdecimal() and int(served) >= at_least
            return self.version is not None and recent and (version is None or str(version) == served)

        def over() -> XferError | None:
            if self._closed:
                return self._closed_error(f"was closed before {awaited} came")
            # By the next refit. It also repairs an engine that has no weights yet.
            repaired = self.torn and self._phase is not ControllerPhase.OVER
            return self.lost if repaired or self.error is None else self.error

        awaited = "a version that a refit brought" if version is None else f"version {version!r}"
        awaited += f" from {at_least} on" * (at_least is not None)
        seconds = self.deadline_s if timeout_s is None else timeout_s
        with self._changed:
            self._changed.wait_for(lambda: there() or over() is not None, seconds)
            if self.version is not None and there():
                return self.version
            if (ended := over()) is not None:
                raise ended
            raise DeadlineExceeded(
                f"replica {self.replica} serves version {self.version!r}, not {awaited}, after {seconds:.1f} s",
                [self._why()],
            )

    @property
    def _closed(self) -> bool:
        return self._phase is ControllerPhase.CLOSED

    def _closed_error(self, how: str) -> Unsupported:
        again = f"xfer.serve(…, replica={self.replica}) makes another; until then no refit reaches this engine"
        held = [] if self.error is None else [f"the engine was left so: {self.error}"]
        return Unsupported(f"replica {self.replica}: its controller {how}", [again, *held])

    def _refuse_waiting(self, call: str) -> None:
        self.handle.refuse_own_loop(call)
        self._refuse_closed(f"{call}()")

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise self._closed_error(f"was closed by its owner: no {call} any more")

    def _why(self) -> str:
        """Return what this controller knows, to quote in timeout errors."""
        return "have all trainer ranks called xfer.connect()?" if self.error is None else f"meanwhile {self.error}"

    @contextmanager
    def serving(self, *, force: bool = False) -> Iterator[Any]:
        """Hold off refits inside the context, and yield the engine. Needed for an in-process `LLM`, which has no pause.

        Args:
            force: Enter in spite of the errors below. The NaN lock then makes the engine answer NaN.

        Raises:
            EngineLost: The replica holds bytes of two versions, or only the random ones of load_format="dummy" (see
                `wait_version`).
            Unsupported: The controller is closed: refits by a later controller would not wait.
        """
        self._refuse(force)
        with self.handle.hold():
            self._refuse(force)  # a refit may have failed during the wait
            yield self.handle.engine

    def _refuse(self, force: bool) -> None:
        if not force:
            self._refuse_closed("serving()")
        if self.error is not None and not force:
            raise EngineLost(
                f"replica {self.replica} must not serve: {self.error}", where=f"replica {self.replica} controller"
            )

    def close(self) -> None:
        """Leave the session. The engine keeps its weights and, if it serves, continues to serve."""
        self._to(ControllerPhase.CLOSED)
        if self._party is not None:
            self._party.close()
        if self._held:
            with suppress(Unsupported):
                self.handle.refuse_own_loop("close")
                # Otherwise the process may end before it resumes an engine that it paused to join.
                self._thread.join(STOP_GRACE_S)

    def _to(self, phase: ControllerPhase) -> None:
        """Change the phase. A closed controller stays closed."""
        with self._changed:
            self._phase = self._phase if self._closed else phase
            self._changed.notify_all()

    # ---- its own thread

    def _work(self) -> None:
        try:
            with logs.while_waiting(lambda: f"replica {self.replica}: {self._doing}"):
                party = self._join()
            while not self._closed:
                self._next(party)
        except _ClosedError:
            pass
        except PeerLost as e:
            if self._phase is ControllerPhase.JOINING:
                self._down(e)
            elif not self._closed:
                self._lose(e, whole=True)
        except Exception as e:
            if not self._closed:
                self._down(e)
        finally:
            if self._party is not None:
                self._party.close()  # else the coordinator would keep the replica's place for a controller that has ended

    def _next(self, party: RendezvousClient) -> None:
        """Carry out the coordinator's next message, if there is one."""
        try:
            message = party.take(time.monotonic() + 3600.0, "the next refit", m.Arm, m.Failed, m.ReplicaReady)
        except DeadlineExceeded:
            return
        lost = [message] if isinstance(message, m.Failed) else []
        if isinstance(message, m.Arm):
            with quick_turns():
                lost = self._refit(party, message)
            timeline.write(message.attempt, party.welcome.session)
        for failed in lost:
            self._lose(failed.error.error(), failed.replica < 0, failed.left)

    def _lose(self, error: XferError, whole: bool, left: bool = False) -> None:
        """Note that the trainers are gone, or a worker of this replica.

        Args:
            error: The reason.
            whole: Whether the trainers are gone and this replica is whole. If False, one of its workers is gone.
            left: Whether the trainers left on purpose.
        """
        news = self.lost is None
        if whole:
            with self._changed:
                self.lost = error
                self._changed.notify_all()
        if whole and self.version is not None and self.error is None:  # trainers come and go; the version is served on
            if news:
                how = logging.INFO if left else logging.WARNING
                why = error.message if left else error.line()
                logger.log(how, "xfer: replica %d goes on serving version %r: %s", self.replica, self.version, why)
        elif self.error is None or not whole:
            self._set(error=error, torn=self.torn and whole, version=None)

    def _down(self, e: BaseException) -> None:
        """End this controller because of an error."""
        error = e if isinstance(e, XferError) else EngineLost(f"{type(e).__name__}: {e}")
        logger.error("xfer: controller of replica %d: %s", self.replica, error)
        if self._party is not None:
            self._party.try_send(m.Failed(m.WireError.of(error, self._party.label), replica=self.replica))
        elif self._tell is not None:
            self._tell(error)
        self._set(error=error)
        self._to(ControllerPhase.OVER)

    def _set(
        self, error: XferError | None = None, torn: bool | None = None, version: int | str | None = _UNCHANGED
    ) -> None:
        """Set the state in one step: `wait_version` sees by `torn` whether `error` is final. `torn` None: unchanged."""
        with self._changed:
            self.error, self.torn = error, self.torn if torn is None else torn
            if version is not _UNCHANGED:
                self.version = version
            self._changed.notify_all()

    def _join(self) -> RendezvousClient:
        self._workers = workers = self.handle.workers(self.deadline_s)
        these = logs.counted(workers, "worker")
        self._begin(f"no answer from {self.rendezvous}; has trainer rank 0 called xfer.connect()?")
        try:
            self._party = party = RendezvousClient(
                self.rendezvous, self._token, "controller", size=workers, replica=self.replica, deadline_s=self.deadline_s,
                given_up=lambda: self._closed,
            )  # fmt: skip
        except PeerLost:
            self._begin(self._doing)
            raise
        self._begin(f"waiting at {self.rendezvous} for trainers and for a plan, with {these}")
        found = self.handle.get_version(self.deadline_s)
        self._label = UNKNOWN if found in (MIXED, PAUSED) else found
        # One that xfer has paused is paused anew: an older SGLang server cannot say so, and would be resumed when its workers have joined.
        held = self._held = self.handle.ranks_in_step(SETTLE_GRACE_S) or found in (MIXED, PAUSED)
        self._begin(self._doing)  # a later `close` waits for the rest of this function
        kept: XferError | None = None
        try:
            if held and found != MIXED:
                # Before the pause: if this controller dies in it, the next one sees that xfer paused.
                self.handle.set_version(PAUSED, SETTLE_GRACE_S)
            if held:
                self.handle.pause(self.deadline_s)
            if found != MIXED:  # else a controller that died in a refit has done this, and vLLM's session may be open
                self.handle.hand_over_drafter(self.deadline_s)
            # Returns when every worker has joined or given up; the reason for giving up comes by the coordinator.
            self.handle.init({
                "rendezvous": self._engine_rendezvous, "token": self._token, "replica": self.replica, "workers": workers,
                "deadline_s": self.deadline_s, "keep": list(self._keep),
            }, self.deadline_s + STOP_GRACE_S)  # fmt: skip
            message = party.take(time.monotonic() + STOP_GRACE_S, "the replica's plan", m.ReplicaReady, m.Failed)
            kept = message.error.error() if isinstance(message, m.Failed) else None
        except Exception as e:
            with suppress(XferError):  # the first error counts
                self._met(party, found, held)
            if self._closed:
                raise _ClosedError from e
            raise
        self._met(party, found, held)
        kept = kept or self._failed_since(party)
        if kept is not None:
            self._set(error=kept)
        else:
            logger.info("xfer: replica %d is ready at %s, with %s", self.replica, self.rendezvous, these)
        self._held = False
        self._to(ControllerPhase.READY if kept is None else ControllerPhase.OVER)
        return party

    def _begin(self, doing: str) -> None:
        """Begin a step of joining. `doing` is logged if it takes long. Raises _ClosedError if the owner has closed."""
        self._doing = doing
        if self._closed:
            raise _ClosedError

    def _failed_since(self, party: RendezvousClient) -> XferError | None:
        """The error of a worker after ReplicaReady: one that joins without a link chooses its lock then, and may find none."""
        party.catch_up(SILENCE_S)
        said = party.here(m.Failed, lambda x: x.replica == self.replica)
        return said[0].error.error() if said else None

    def _met(self, party: RendezvousClient, label: str | None, held: bool) -> None:
        """Take over the state that an earlier controller left: vLLM's update session, a pause and a label, bytes that must not be served.

        Called also when joining failed.

        Args:
            party: The connection.
            label: The engine's label before joining.
            held: Whether this controller paused the engine to join.
        """
        said = party.found or m.Found()
        holds = said.holds
        if said.workers < self._workers:  # for the other workers the label counts, or that a session is open
            unheard = "mix" if label is None and said.session_open else _HELD.get(label, "whole")
            holds = max(holds, unheard, key=("whole", "nothing", "mix").index)
        if said.session_open:
            self.handle.assume_open_session()
        ours = said.paused or label in (MIXED, PAUSED) or label is None and (holds != "whole" or said.session_open)
        if ours:
            self.handle.assume_paused()
        if holds == "whole":
            if ours and label != PAUSED:
                self.handle.reset_caches(SETTLE_GRACE_S)  # its workers may have committed since these were filled
            if (ours or held) and self._label is not None:
                self.handle.set_version(self._label, SETTLE_GRACE_S)
            if ours or held:
                _resume(self.handle)
            if said.paused:
                logger.warning("xfer: replica %d is resumed: its controller ended in a refit", self.replica)
                party.try_send(m.Settled(0, None, True, 0.0))
            return
        self.handle.pause(self.deadline_s)
        self.handle.set_version(MIXED if holds == "mix" else PAUSED, SETTLE_GRACE_S)
        if holds == "mix":
            self._tear("an earlier connection ended in the middle of a refit; the next refit repairs it")
        else:
            self._keep_out(
                EngineLost(
                    f"replica {self.replica} holds no weights to serve yet",
                    ["it was started with load_format='dummy'; the first refit brings them"],
                )
            )

    def _tear(self, why: str, known: bool = True) -> None:
        holds = "holds" if known else "may hold"
        self._keep_out(EngineLost(f"replica {self.replica} {holds} a mix of two versions", [why]))

    def _keep_out(self, error: XferError) -> None:
        """Keep the engine from serving until a commit. It stays paused; an in-process LLM has no pause, and `serving()`
        refuses it."""
        self._set(error, torn=True, version=None)
        try:
            self.handle.stay_paused()
        except XferError as e:
            logger.error("xfer: replica %d: %s", self.replica, e)

    def _refit(self, party: RendezvousClient, arm: m.Arm) -> list[m.Failed]:
        """Run one attempt. Returns the messages about lost trainers or workers that arrived during it."""
        mark(party.label, "told to arm")
        # Of one whole version, with a label. Others may come from NaN (a torn engine that was resumed by force) or random weights.
        keeps = self.handle.keeps_caches and self.version is not None and self.error is None
        calls = _EngineCalls(self.handle, party, self.replica, arm, resets=not keeps)
        calls.open()
        decision, lost = self._decision(party, arm, calls)
        try:
            serves = self._carry_out(calls, decision, party)
        except Exception as e:
            error = e if isinstance(e, XferError) else EngineLost(f"replica {self.replica}: {type(e).__name__}: {e}")
            logger.error("xfer: replica %d could not be brought back: %s", self.replica, error)
            self._keep_out(error)
            serves = False
        # If the engine serves, it must not stop because the trainers are gone: this send raises nothing.
        now = (self.version, True, calls.seconds) if serves else (None, False, 0.0)
        party.try_send(m.Settled(arm.attempt, *now, calls.phases))
        committed = serves and decision.error is None
        why = None if committed else self.error if decision.error is None else decision.error.error()
        here = party.welcome.session, arm.attempt, self.replica
        observers.tell(
            observers.EngineFinished(*here, committed, serves, self.torn, *(now[0], now[2]), calls.phases, why)
        )
        return lost

    def _carry_out(self, calls: _EngineCalls, decision: m.Settle, party: RendezvousClient) -> bool:
        """Carry out a decision. Returns whether the engine serves."""
        calls.close(decision)
        if decision.error is None:
            self.refits += 1
            self._label = str(decision.version)
            self._set(torn=False, version=decision.version)
        elif calls.touched and decision.dirty:
            self._tear(str(decision.error.error()), known=decision is not self._unheard)
            return False
        if self.torn and self.error is not None:  # as before this attempt, which wrote nothing
            self._keep_out(self.error)
            return False
        calls.resume(None if decision.error is None else self._label)
        mark(party.label, "its engine serves")
        if decision.error is None:
            outage = calls.seconds * 1e3
            logger.info("xfer: replica %d serves version %r, outage %.1f ms", self.replica, self.version, outage)
        elif self.version is not None:
            self._set()
        return True

    def _decision(self, party: RendezvousClient, arm: m.Arm, calls: _EngineCalls) -> tuple[m.Settle, list[m.Failed]]:
        """Wait for the decision. Returns it, and the messages about lost trainers or workers that came before it."""
        due, lost = time.monotonic() + arm.deadline_s, list[m.Failed]()
        try:
            while True:
                message = party.take(
                    due + STOP_GRACE_S + SETTLE_GRACE_S,
                    "the decision",
                    m.Commit,
                    m.Settle,
                    m.Failed,
                    m.CallAgain,
                    match=lambda x: isinstance(x, m.Failed) or x.attempt == arm.attempt,
                    due=due,
                )
                if isinstance(message, m.Commit):
                    calls.wind_up()
                elif isinstance(message, m.CallAgain):
                    calls.call_again()
                elif isinstance(message, m.Failed):
                    lost.append(message)
                else:
                    return message, lost
        except XferError as e:
            # The coordinator is silent: the workers assume an abort, but they may have begun to write.
            self._unheard = m.Settle(arm.attempt, None, True, m.WireError.of(e, party.label))
            return self._unheard, lost


def _resume(handle: EngineHandle) -> None:
    """Resume an engine that holds whole weights. If it fails, the next controller sees by the label that xfer paused the engine."""
    try:
        handle.resume(SETTLE_GRACE_S)
    except Exception:
        with suppress(Exception):
            handle.set_version(PAUSED, SETTLE_GRACE_S)
        raise


class _EngineCalls:
    """One attempt's calls to the engine: pause, start, update; after the decision finish, caches, resume.

    Args:
        handle: The engine.
        party: The controller's connection.
        replica: The replica's number.
        arm: The coordinator's order.
        resets: Whether a commit drops the engine's caches.

    Attributes:
        touched: Whether an update session was opened; before that only the pause has to be undone.
        phases: (name, seconds) of the calls so far.
    """

    def __init__(self, handle: EngineHandle, party: RendezvousClient, replica: int, arm: m.Arm, resets: bool):
        self.handle, self.arm, self._resets = handle, arm, resets
        self._party, self._replica = party, replica
        self.touched = False
        self._update: threading.Thread | None = None
        self._raised: list[BaseException] = []
        self._unwound: Exception | None = None
        self._info = {"attempt": arm.attempt, "deadline_s": arm.deadline_s}
        self._decided = False
        # For the thread that calls `update`: whether to call it again.
        self._after: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.phases: tuple[tuple[str, float], ...] = ()
        self._began = self._clock = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the pause was sent."""
        return time.perf_counter() - self._began

    def open(self) -> None:
        """Pause the engine, open the session and start the blocking update call on a thread. Raises nothing: errors go to the
        coordinator."""
        try:
            self.handle.ask_paused(self.arm.deadline_s)
            self._began = self._clock = time.perf_counter()
            self.handle.pause(self.arm.deadline_s)
            self._phase("pause")
            self.touched = True
            self.handle.set_version(MIXED, self.arm.deadline_s)
            self.handle.start_update(self.arm.deadline_s, then=self._info)
            self._phase("start")
            self._update = threading.Thread(target=self._call, name="xfer-update", daemon=True)
            self._update.start()
        except Exception as e:
            self._fail(e)

    def call_again(self) -> None:
        """Call `update` again once the workers have returned from it; the coordinator has told them to."""
        logger.warning(
            "xfer: replica %d: its data-parallel ranks did not come together, as if somebody had resumed the engine during the refit; "
            "it is paused again", self._replica,
        )  # fmt: skip
        self._after.put(True)

    def _decide(self) -> None:
        """Note that the refit is decided: an update call that returns now is not early."""
        self._decided = True
        self._after.put(False)

    def wind_up(self) -> None:
        """Finish the update while the workers install and the coordinator collects their answers. `close` raises the error."""
        try:
            self._decide()
            if self._update is not None and self._update.is_alive() and not self._raised:
                self.handle.finish_ahead(self._resets)
            self._wind_up(True)
        except Exception as e:
            self._unwound = e

    def close(self, decision: m.Settle) -> None:
        """Carry out the decision.

        Raises:
            EngineLost: The engine does not hold the version that was committed, or a worker did not return.
        """
        if self._unwound is not None:
            raise self._unwound
        if not self._decided:
            self._wind_up(decision.error is None)
        if decision.error is None:
            self.handle.set_version(str(decision.version), SETTLE_GRACE_S)

    def _wind_up(self, commit: bool) -> None:
        self._decide()
        update = self._update
        if update is not None:
            update.join(timeout=STOP_GRACE_S * 2)
            if update.is_alive():
                raise EngineLost(f"replica {self._replica}: an engine worker did not return from its update call")
        self._phase("update")
        if commit and (self._raised or update is None):
            why = [str(e) for e in self._raised] or ["it was never made"]
            raise EngineLost(f"replica {self._replica}: its update call failed while the refit was committed", why)
        if self.touched:
            self.handle.finish(None, SETTLE_GRACE_S)
            self._phase("finish")
        if commit and self._resets:
            self.handle.reset_caches(SETTLE_GRACE_S)
            self._phase("reset_caches")

    def resume(self, label: str | None) -> None:
        """Resume the engine, under this label if one is given."""
        if self.touched and label is not None:
            self.handle.set_version(label, SETTLE_GRACE_S)
        _resume(self.handle)
        self._phase("resume")

    def _call(self) -> None:
        arm = self.arm
        try:
            while True:
                self.handle.update(self._info, arm.deadline_s + 2 * STOP_GRACE_S)
                if not self._after.get(timeout=UPDATE_GRACE_S):
                    return
                self.handle.pause(arm.deadline_s)
        except queue.Empty:  # for example, the workers' plug-in has another version and refused
            why = f"replica {self._replica}: the engine's update call returned before the refit was decided"
            self._fail(EngineLost(why, ["see the engine workers' logs"]))
        except BaseException as e:
            self._fail(e)

    def _fail(self, e: BaseException) -> None:
        self._raised.append(e)
        self._party.try_send(m.Failed(m.WireError.of(e, self._party.label), self.arm.attempt, self._replica))

    def _phase(self, name: str) -> None:
        now = time.perf_counter()
        self.phases += ((name, now - self._clock),)
        self._clock = now
        mark(self._party.label, f"{name} is over")
