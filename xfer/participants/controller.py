"""The controller of one replica: the only one that talks to the engine. Pause, start, update, finish, caches, resume.

It lives where the engine's handle lives, on a thread of its own; `update` blocks the engine until the decision and so runs
on another. Only this class resumes an engine that it paused, and never one that is dirty.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress

from xfer import logs
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import SETTLE_GRACE_S, SILENCE_S, STOP_GRACE_S
from xfer.errors import DeadlineExceeded, EngineLost, PeerLost, Unsupported, XferError
from xfer.participants import timeline
from xfer.participants.engine import EngineHandle
from xfer.participants.timeline import mark
from xfer.participants.turns import quick_turns
from xfer.rendezvous.client import RendezvousClient

logger = logging.getLogger("xfer")
UPDATE_GRACE_S = 5.0
"""Seconds between an engine's return from its update call and the decision reaching this controller."""
MIXED = "xfer:mixed"
"""Version text that an engine carries while its bytes may be of two versions."""
PAUSED = "xfer:paused"
"""Version text of an engine that we have paused and not written: while it joins, or until its first weights come."""
_HELD = {MIXED: "mix", PAUSED: "nothing"}
_AS_BEFORE = object()
UNKNOWN = "xfer:unknown"
"""What an engine is called after a refit that came to nothing, when its label before that is not known."""


class _ClosedError(Exception):
    """Its owner closed the controller."""


class Controller:
    """Made by `xfer.serve`. `version`: what the replica serves, in the type that the trainers gave it, or None; `error`: why it
    serves nothing, or None."""

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
        """
        Args:
            handle: The engine, as `engines.handles.handle_for` makes one of whatever the caller has.
            keep: Globs of engine parameters that stay as they are.
            engine_rendezvous: The rendezvous as the engine's workers see it, where that differs.
            tell: Called with the error that ended this controller before it met the coordinator, which then cannot be told.
        """
        self.handle = handle
        self.rendezvous, self.replica, self.deadline_s = rendezvous, replica, deadline_s
        self._token, self._keep, self._engine_rendezvous = token, keep, engine_rendezvous or rendezvous
        self._tell = tell
        self.version: int | str | None = None
        self.error: XferError | None = None
        self.torn = False  # what lies in the engine is not to be served; the next commit mends it
        self.lost: XferError | None = None  # the trainers are gone: no refit will come; a whole `version` is served on
        self.refits = 0
        self._label: str | None = None  # the engine's own, outside of refits
        self._unheard: m.Settle | None = None  # a decision that we made up, since the coordinator was gone
        self._kept_from: XferError | None = None  # joining
        self._held = False  # its engine is paused while it joins
        self._doing = "asking its engine how many workers it has"
        self._workers = 0
        self._ready, self._closing = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self._party: RendezvousClient | None = None
        self._thread = threading.Thread(target=self._work, name=f"xfer-controller-{replica}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        if self._closing.is_set():
            state = "closed"
        elif self.error is not None:
            state = f"serves nothing: {self.error.line()}"
        elif not self._ready.is_set():
            state = "joining"
        else:
            state = "no refit yet" if self.version is None else f"serves version {self.version!r}"
        return f"<Controller of replica {self.replica} at {self.rendezvous}: {state}>"

    # ---- for the owner of the engine

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Until the replica takes part in refits; raises what kept it from that. Not on an AsyncLLM's own loop."""
        self._may_wait("wait_ready")
        self._refuse_closed("wait_ready()")
        if not self._ready.wait(self.deadline_s if timeout_s is None else timeout_s):
            raise DeadlineExceeded(f"replica {self.replica} is not ready", [self._why()])
        self._refuse_closed("wait_ready()")
        if self._kept_from is not None:
            raise self._kept_from
        with self._changed:
            if self.error is not None and not self.torn:
                raise self.error

    def _may_wait(self, call: str) -> None:
        self.handle.refuse_own_loop(call)

    def wait_version(self, version: int | str | None = None, timeout_s: float | None = None) -> int | str:
        """Until the replica serves `version`, or any that a refit brought; gives it in the type that the trainers gave it (1 and
        "1" are one label to wait for). For owners of an engine that was started without weights. `timeout_s`: default the
        connection's deadline. DeadlineExceeded; what ended this replica, as soon as it has: no refit will come. Unsupported once
        this was closed. Not on an AsyncLLM's own loop."""
        self._may_wait("wait_version")
        self._refuse_closed("wait_version()")

        def there() -> bool:
            return self.version is not None and (version is None or str(version) == str(self.version))

        def over() -> XferError | None:  # a torn replica, or one without weights yet, is mended by the next refit
            if self._closing.is_set():
                return self._closed(f"was closed before {awaited} came")
            return self._kept_from or (self.lost if self.torn or self.error is None else self.error)

        awaited = "a version that a refit brought" if version is None else f"version {version!r}"
        seconds = self.deadline_s if timeout_s is None else timeout_s
        with self._changed:
            self._changed.wait_for(lambda: there() or over() is not None, seconds)
            if there():
                return self.version
            if (ended := over()) is not None:
                raise ended
            raise DeadlineExceeded(
                f"replica {self.replica} serves version {self.version!r}, not {awaited}, after {seconds:.1f} s",
                [self._why()],
            )

    def _closed(self, how: str) -> Unsupported:
        again = f"xfer.serve(…, replica={self.replica}) makes another; until then no refit reaches this engine"
        held = [] if self.error is None else [f"the engine was left so: {self.error}"]
        return Unsupported(f"replica {self.replica}: its controller {how}", [again, *held])

    def _refuse_closed(self, call: str) -> None:
        if self._closing.is_set():
            raise self._closed(f"was closed by its owner: no {call} any more")

    def _why(self) -> str:
        """For a wait that came to nothing: what this controller knows."""
        return "have all trainer ranks called xfer.connect()?" if self.error is None else f"meanwhile {self.error}"

    @contextmanager
    def serving(self, *, force: bool = False):
        """The engine, with refits held off while inside. Needed for an in-process `LLM`, which has no pause of its own.

        Raises EngineLost while the replica holds bytes of two versions, or only the random ones of load_format="dummy"
        (see `wait_version`), Unsupported once this controller was closed: refits by a later one would not wait. `force=True`
        enters all the same (the second lock then makes the engine answer NaN).
        """
        self._refuse(force)
        with self.handle.hold():
            self._refuse(force)  # a refit may have failed while we waited for our turn
            yield self.handle.engine

    def _refuse(self, force: bool) -> None:
        if not force:
            self._refuse_closed("serving()")
        if self.error is not None and not force:
            raise EngineLost(
                f"replica {self.replica} must not serve: {self.error}", where=f"replica {self.replica} controller"
            )

    def close(self) -> None:
        self._closing.set()
        if self._party is not None:
            self._party.close()
        self._ready.set()
        with self._changed:
            self._changed.notify_all()
        if self._held:
            with suppress(Unsupported):
                self._may_wait("close")
                self._thread.join(STOP_GRACE_S)  # or the process may end with an engine paused that only joined

    # ---- its own thread

    def _work(self) -> None:
        try:
            with logs.while_waiting(lambda: f"replica {self.replica}: {self._doing}"):
                self._join()
            self._serve()
        except Exception as e:
            self._kept_from = None if isinstance(e, _ClosedError) else self._down(e)
        finally:
            if self._party is not None:
                self._party.close()  # else the coordinator would keep this replica's place for a controller that does nothing
            self._ready.set()
            with self._changed:
                self._changed.notify_all()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                message = self._party.take(
                    (m.Arm, m.Failed, m.ReplicaReady), time.monotonic() + 3600.0, "the next refit"
                )
                if isinstance(message, m.Arm):
                    with quick_turns():
                        lost = self._refit(message)
                    timeline.write(message.attempt, self._party.welcome.session)
                    for failed in lost:
                        self._lose(failed.error.error(), failed.replica < 0, failed.left)
                elif isinstance(message, m.Failed):
                    self._lose(message.error.error(), message.replica < 0, message.left)
                else:
                    self._ready.set()
            except DeadlineExceeded:
                continue
            except PeerLost as e:
                if not self._closing.is_set():
                    self._lose(e, whole=True)
                return
            except Exception as e:
                if not self._closing.is_set():
                    self._down(e)
                return

    def _lose(self, error: XferError, whole: bool, left: bool = False) -> None:
        """The trainers are gone (`whole`: this replica is not), or one of this replica's workers is. left: on purpose."""
        news = self.lost is None
        if whole:
            with self._changed:
                self.lost = error
                self._changed.notify_all()
        if (
            whole and self.version is not None and self.error is None
        ):  # trainers come and go; one whole version is served on
            if news:
                how = logging.INFO if left else logging.WARNING
                why = error.message if left else error.line()
                logger.log(how, "xfer: replica %d goes on serving version %r: %s", self.replica, self.version, why)
        elif self.error is None or not whole:
            self._set(error=error, torn=self.torn and whole)
        self._ready.set()

    def _down(self, e: BaseException) -> XferError:
        error = e if isinstance(e, XferError) else EngineLost(f"{type(e).__name__}: {e}")
        logger.error("xfer: controller of replica %d: %s", self.replica, error)
        if self._party is not None:
            self._party.try_send(m.Failed(m.WireError.of(error, self._party.label), replica=self.replica))
        elif self._tell is not None:
            self._tell(error)
        self._set(error=error)
        return error

    def _set(self, error: XferError | None = None, torn: bool | None = None, version: object = _AS_BEFORE) -> None:
        """In one step: who waits for a version tells by `torn` whether `error` is for good. `torn` None: as before."""
        with self._changed:
            self.error, self.torn = error, self.torn if torn is None else torn
            if version is not _AS_BEFORE:
                self.version = version
            self._changed.notify_all()

    def _join(self) -> None:
        self._workers = workers = self.handle.workers(self.deadline_s)
        self._unless_closed()
        self._doing = f"no answer from {self.rendezvous}; has trainer rank 0 called xfer.connect()?"
        try:
            self._party = RendezvousClient(
                self.rendezvous, self._token, "controller", size=workers, replica=self.replica, deadline_s=self.deadline_s,
                given_up=self._closing.is_set,
            )  # fmt: skip
        except PeerLost:
            self._unless_closed()
            raise
        self._unless_closed()
        self._doing = (
            f"waiting at {self.rendezvous} for trainers and for a plan, with {logs.counted(workers, 'worker')}"
        )
        found = self.handle.get_version(self.deadline_s)
        self._label = UNKNOWN if found in (MIXED, PAUSED) else found
        held = self._held = self.handle.ranks_in_step(SETTLE_GRACE_S)
        self._unless_closed()  # who closes it later waits for what follows
        try:
            if held:
                if (
                    found != MIXED
                ):  # before it pauses: of a pause that ends after this controller, a later one knows so whose it is
                    self.handle.set_version(PAUSED, SETTLE_GRACE_S)
                self.handle.pause(self.deadline_s)
            if found != MIXED:  # else who died in a refit has handed it over, and vLLM's session may be open
                self.handle.hand_over_drafter(self.deadline_s)
            # Returns when every worker has joined or given up; why it gave up is on our own channel.
            self.handle.init({
                "rendezvous": self._engine_rendezvous, "token": self._token, "replica": self.replica, "workers": workers,
                "deadline_s": self.deadline_s, "keep": list(self._keep),
            }, self.deadline_s + STOP_GRACE_S)  # fmt: skip
            until = time.monotonic() + STOP_GRACE_S
            message = self._party.take((m.ReplicaReady, m.Failed), until, "the replica's plan")
            if isinstance(message, m.Failed):
                self._kept_from = message.error.error()
        except Exception as e:
            with suppress(XferError):  # of two errors the first one counts
                self._met(found, held)
            if self._closing.is_set():
                raise _ClosedError from e
            raise
        self._met(found, held)
        self._kept_from = self._kept_from or self._failed_since()
        if self._kept_from is not None:
            self._set(error=self._kept_from)
        else:
            these = logs.counted(workers, "worker")
            logger.info("xfer: replica %d is ready at %s, with %s", self.replica, self.rendezvous, these)
        self._held = False
        self._ready.set()

    def _failed_since(self) -> XferError | None:
        """A worker may find no lock after the plan: it says so and returns from init, behind the word that the replica is ready."""
        self._party.catch_up(SILENCE_S)
        said = [x for x in list(self._party.inbox.queue) if isinstance(x, m.Failed) and x.replica == self.replica]
        return said[0].error.error() if said else None

    def _unless_closed(self) -> None:
        if self._closing.is_set():
            raise _ClosedError

    def _met(self, label: str | None, held: bool) -> None:
        """What an earlier controller left behind: a session of vLLM's, a pause and a label, bytes that may not serve. Also when
        joining failed. `held`: we paused the engine to join."""
        said = self._party.found or m.Found()
        holds = said.holds
        if said.workers < self._workers:  # the others may hold what the label says, or what an open session left
            unheard = "mix" if label is None and said.session_open else _HELD.get(label, "whole")
            holds = max(holds, unheard, key=("whole", "nothing", "mix").index)
        if said.session_open:
            self.handle.assume_open_session()
        ours = label in (MIXED, PAUSED) or label is None and (holds != "whole" or said.session_open)
        if ours:
            self.handle.assume_paused()
        if holds == "whole":
            if (ours or held) and self._label is not None:
                self.handle.set_version(self._label, SETTLE_GRACE_S)
            if ours or held:
                self.handle.resume(SETTLE_GRACE_S)
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
        """Nobody is served until a commit. Stays paused; for an in-process LLM, which waits at a gate, `serving()` refuses."""
        self._set(error, torn=True, version=None)
        try:
            self.handle.stay_paused()
        except XferError as e:
            logger.error("xfer: replica %d: %s", self.replica, e)

    def _refit(self, arm: m.Arm) -> list[m.Failed]:
        """One attempt. Returns what arrived meanwhile about lost trainers or workers, to be told after it."""
        mark(self._party.label, "told to arm")
        visit = _Visit(self, arm)
        visit.open()
        decision, lost = self._decision(arm, visit)
        try:
            committed = visit.close(decision)
            if committed:
                self.refits += 1
                self._label = str(decision.version)
                self._set(torn=False, version=decision.version)
            elif visit.touched and isinstance(decision, m.Settle) and decision.dirty:
                self._tear(str(decision.error.error()), known=decision is not self._unheard)
                self._party.try_send(m.Settled(arm.attempt, None, False, 0.0, visit.phases))
                return lost
            if self.torn:  # as before this attempt, which wrote nothing
                self._keep_out(self.error)
                self._party.try_send(m.Settled(arm.attempt, None, False, 0.0, visit.phases))
                return lost
            visit.resume(None if committed else self._label)
            mark(self._party.label, "its engine serves")
            if committed:
                logger.info(
                    "xfer: replica %d serves version %r, outage %.1f ms",
                    self.replica,
                    self.version,
                    visit.seconds * 1e3,
                )
            if not committed and self.error is not None and self.version is not None:
                self._set()
            # The engine serves by now; should the trainers be gone, that is no reason to stop it.
            self._party.try_send(m.Settled(arm.attempt, self.version, True, visit.seconds, visit.phases))
        except Exception as e:
            error = e if isinstance(e, XferError) else EngineLost(f"replica {self.replica}: {type(e).__name__}: {e}")
            logger.error("xfer: replica %d could not be brought back: %s", self.replica, error)
            self._keep_out(error)
            self._party.try_send(m.Settled(arm.attempt, None, False, 0.0, visit.phases))
        return lost

    def _decision(self, arm: m.Arm, visit: _Visit) -> tuple[m.Commit | m.Settle, list[m.Failed]]:
        due, lost = time.monotonic() + arm.deadline_s, []
        try:
            while True:
                message = self._party.take(
                    (m.Commit, m.Settle, m.Failed, m.Decided, m.CallAgain),
                    due + STOP_GRACE_S + SETTLE_GRACE_S,
                    "the decision",
                    lambda x: isinstance(x, m.Failed) or x.attempt == arm.attempt,
                    due,
                )
                if isinstance(message, m.Decided):
                    visit.wind_up()
                elif isinstance(message, m.CallAgain):
                    visit.call_again()
                elif isinstance(message, m.Failed):
                    lost.append(message)
                else:
                    return message, lost
        except XferError as e:
            # No word from the coordinator: the workers presume an abort, but whether they had begun to write is not known here.
            self._unheard = m.Settle(arm.attempt, True, m.WireError.of(e, self._party.label))
            return self._unheard, lost


class _Visit:
    """One attempt's calls to the engine: pause, start, update; after the decision finish, caches, resume."""

    def __init__(self, controller: Controller, arm: m.Arm):
        self.c, self.arm, self.handle = controller, arm, controller.handle
        self.touched = False  # an update session was opened; before that only the pause has to be undone
        self._update: threading.Thread | None = None
        self._raised: list[BaseException] = []
        self._unwound: Exception | None = None
        self._info = {"attempt": arm.attempt, "deadline_s": arm.deadline_s}
        self._decided = False
        self._after: queue.SimpleQueue[bool] = (
            queue.SimpleQueue()
        )  # for the thread in `update`: whether to call it again
        self._phases: list[tuple[str, float]] = []
        self._began = self._clock = time.perf_counter()

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._phases)

    @property
    def seconds(self) -> float:
        """Since the pause was sent."""
        return time.perf_counter() - self._began

    def open(self) -> None:
        """Up to the blocking update call, which goes on in a thread. What fails is told to the coordinator; nothing is raised."""
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
        """Workers were told to return from `update`, which is then called again."""
        logger.warning(
            "xfer: replica %d: its data-parallel ranks did not come together, as if somebody had resumed the engine during the refit; "
            "it is paused again", self.c.replica,
        )  # fmt: skip
        self._after.put(True)

    def _decide(self) -> None:
        """An update that returns now is not early."""
        self._decided = True
        self._after.put(False)

    def wind_up(self) -> None:
        """The workers are installing: everything up to serving, while the coordinator hears from them. `close` raises what fails."""
        try:
            self._decide()
            if self._update is not None and self._update.is_alive() and not self._raised:
                self.handle.finish_ahead()
            self._wind_up(True)
        except Exception as e:
            self._unwound = e

    def close(self, decision: m.Commit | m.Settle) -> bool:
        """Whether the engine now holds what was decided. EngineLost: it does not, though all workers were told to."""
        commit = isinstance(decision, m.Commit)
        if self._unwound is not None:
            raise self._unwound
        if not self._decided:
            self._wind_up(commit)
        if commit:
            self.handle.set_version(str(decision.version), SETTLE_GRACE_S)
        return commit

    def _wind_up(self, commit: bool) -> None:
        self._decide()
        update = self._update
        if update is not None:
            update.join(timeout=STOP_GRACE_S * 2)
            if update.is_alive():
                raise EngineLost(f"replica {self.c.replica}: an engine worker did not return from its update call")
        self._phase("update")
        if commit and (self._raised or update is None):
            why = [str(e) for e in self._raised] or ["it was never made"]
            raise EngineLost(f"replica {self.c.replica}: its update call failed while the refit was committed", why)
        if self.touched:
            self.handle.finish(None, SETTLE_GRACE_S)
            self._phase("finish")
        if commit:
            self.handle.reset_caches(SETTLE_GRACE_S)
            self._phase("reset_caches")

    def resume(self, label: str | None) -> None:
        """Serve again, under the label that it had before if one is given."""
        if self.touched and label is not None:
            self.handle.set_version(label, SETTLE_GRACE_S)
        self.handle.resume(SETTLE_GRACE_S)
        self._phase("resume")

    def _call(self) -> None:
        arm = self.arm
        try:
            while True:
                self.handle.update(self._info, arm.deadline_s + 2 * STOP_GRACE_S)
                if not self._after.get(timeout=UPDATE_GRACE_S):
                    return
                self.handle.pause(arm.deadline_s)
        except queue.Empty:  # e.g. the workers' plug-in is of another version and refused
            why = f"replica {self.c.replica}: the engine's update call returned before the refit was decided"
            self._fail(EngineLost(why, ["see the engine workers' logs"]))
        except BaseException as e:
            self._fail(e)

    def _fail(self, e: BaseException) -> None:
        self._raised.append(e)
        party = self.c._party
        party.try_send(m.Failed(m.WireError.of(e, party.label), self.arm.attempt, self.c.replica))

    def _phase(self, name: str) -> None:
        now = time.perf_counter()
        self._phases.append((name, now - self._clock))
        self._clock = now
        mark(self.c._party.label, f"{name} is over")
