"""The controller of one replica: the only one that talks to the engine. Pause, start, update, finish, caches, resume.

It lives where the engine's handle lives, on a thread of its own; `update` blocks the engine until the decision and so runs
on another. Only this class resumes an engine that it paused, and never one that is dirty.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager

from xfer.engines.handles import EngineHandle, handle_for
from xfer.errors import DeadlineExceeded, EngineLost, PeerLost, XferError
from xfer.session import messages as m
from xfer.session.attempt import SETTLE_GRACE_S, STOP_GRACE_S
from xfer.session.party import Party

logger = logging.getLogger("xfer")
UPDATE_GRACE_S = 5.0
"""Seconds between an engine's return from its update call and the decision reaching this controller."""
MIXED = "xfer:mixed"
"""Version text that an engine carries while its bytes may be of two versions."""


class Controller:
    """Made by `xfer.serve`. `version`: what the replica serves; `error`: why it serves nothing, or None."""

    def __init__(
        self,
        engine: object,
        rendezvous: str,
        token: str,
        *,
        replica: int,
        deadline_s: float,
        engine_rendezvous: str | None = None,
        keep: tuple[str, ...] = (),
        **handle_options,
    ):
        self.handle: EngineHandle = handle_for(engine, **handle_options)
        self.rendezvous, self.replica, self.deadline_s = rendezvous, replica, deadline_s
        self._token, self._keep, self._engine_rendezvous = token, keep, engine_rendezvous or rendezvous
        self.version, self.error = "", None
        self.torn = False  # bytes of two versions lie in the engine; the next commit mends it
        self.lost: XferError | None = None  # the trainers are gone: no refit will come, `version` is served on
        self.refits = 0
        self._ready, self._closing = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self._party: Party | None = None
        self._thread = threading.Thread(target=self._work, name=f"xfer-controller-{replica}", daemon=True)
        self._thread.start()

    # ---- for the owner of the engine

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Until the replica has a plan and a link; raises what kept it from that."""
        if not self._ready.wait(self.deadline_s if timeout_s is None else timeout_s):
            raise DeadlineExceeded(
                f"replica {self.replica} is not ready", ["have all trainer ranks called xfer.connect()?"]
            )
        if self.error is not None and not self.torn:
            raise self.error

    def wait_version(self, version: str, timeout_s: float) -> None:
        """Until the replica serves `version` (as text)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.version == str(version) or self._closing.is_set(), timeout_s):
                raise DeadlineExceeded(
                    f"replica {self.replica} serves version {self.version!r}, not {version!r}, after {timeout_s:.0f} s"
                )

    @contextmanager
    def serving(self, *, force: bool = False):
        """The engine, with refits held off while inside. Needed for an in-process `LLM`, which has no pause of its own.

        Raises EngineLost while the replica holds bytes of two versions; `force=True` enters all the same (the second lock
        then makes the engine answer NaN).
        """
        self._refuse(force)
        with self.handle.hold():
            self._refuse(force)  # a refit may have failed while we waited for our turn
            yield self.handle.engine

    def _refuse(self, force: bool) -> None:
        if self.error is not None and not force:
            raise EngineLost(
                f"replica {self.replica} must not serve: {self.error}", where=f"replica {self.replica} controller"
            )

    def close(self) -> None:
        self._closing.set()
        if self._party is not None:
            self._party.close()
        with self._changed:
            self._changed.notify_all()

    # ---- its own thread

    def _work(self) -> None:
        try:
            self._join()
        except Exception as e:
            self._down(e)
            return
        while not self._closing.is_set():
            try:
                message = self._party.take(
                    (m.Arm, m.Failed, m.ReplicaReady), time.monotonic() + 3600.0, "the next refit"
                )
                if isinstance(message, m.Arm):
                    for failed in self._refit(message):
                        self._lose(failed.error.error(), whole=failed.replica < 0)
                elif isinstance(message, m.Failed):
                    self._lose(message.error.error(), whole=message.replica < 0)
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

    def _lose(self, error: XferError, whole: bool) -> None:
        """The trainers are gone (`whole`: this replica is not), or one of this replica's workers is."""
        if whole and self.version and self.error is None:
            self.lost = error  # trainers come and go; one whole version is served on
            logger.warning("xfer: replica %d goes on serving version %s: %s", self.replica, self.version, error)
        elif self.error is None or not whole:
            self.torn = self.torn and whole
            self._set(error=error)
        self._ready.set()

    def _down(self, e: BaseException) -> None:
        error = e if isinstance(e, XferError) else EngineLost(f"{type(e).__name__}: {e}")
        logger.error("xfer: controller of replica %d: %s", self.replica, error)
        if self._party is not None:
            self._party.try_send(m.Failed(m.WireError.of(error, self._party.label), replica=self.replica))
        self._set(error=error)
        self._ready.set()

    def _set(self, version: str | None = None, error: XferError | None = None) -> None:
        with self._changed:
            self.error = error
            if version is not None:
                self.version = version
            self._changed.notify_all()

    def _join(self) -> None:
        workers = self.handle.workers(self.deadline_s)
        self._party = Party(
            self.rendezvous, self._token, "controller", size=workers, replica=self.replica, deadline_s=self.deadline_s
        )
        # Returns when every worker has joined or given up; why it gave up is on our own channel.
        self.handle.init({
            "rendezvous": self._engine_rendezvous, "token": self._token, "replica": self.replica, "workers": workers,
            "deadline_s": self.deadline_s, "keep": list(self._keep),
        }, self.deadline_s + STOP_GRACE_S)  # fmt: skip
        message = self._party.take((m.ReplicaReady, m.Failed), time.monotonic() + STOP_GRACE_S, "the replica's plan")
        if isinstance(message, m.Failed):
            self._set(error=message.error.error())
        elif message.torn:
            self._tear("an earlier connection ended in the middle of a refit; the next refit repairs it")
        self._ready.set()

    def _tear(self, why: str) -> None:
        """Keep the owner out until a commit. Stays paused; for an in-process LLM, which waits at a gate, `serving()` refuses."""
        self.torn = True
        self._set(version="", error=EngineLost(f"replica {self.replica} holds a mix of two versions", [why]))
        self.handle.stay_paused()

    def _refit(self, arm: m.Arm) -> list[m.Failed]:
        """One attempt. Returns what arrived meanwhile about lost trainers or workers, to be told after it."""
        handle, until = self.handle, time.monotonic() + arm.deadline_s + STOP_GRACE_S
        phases: list[tuple[str, float]] = []
        old, failure = self.version, None
        clock = time.perf_counter()
        began = clock

        def phase(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            phases.append((name, now - clock))
            clock = now

        update: threading.Thread | None = None
        raised: list[BaseException] = []
        decided = threading.Event()
        try:
            handle.pause(arm.deadline_s)
            phase("pause")
            handle.set_version(MIXED, arm.deadline_s)
            handle.start_update(arm.deadline_s)
            phase("start")

            def call() -> None:
                try:
                    handle.update(
                        {"attempt": arm.attempt, "deadline_s": arm.deadline_s}, arm.deadline_s + 2 * STOP_GRACE_S
                    )
                    if not decided.wait(
                        UPDATE_GRACE_S
                    ):  # e.g. the workers' plug-in is of another version and refused the call
                        raise EngineLost(
                            f"replica {self.replica}: the engine's update call returned before the refit was decided",
                            ["see the engine workers' logs"],
                        )
                except BaseException as e:
                    raised.append(e)
                    self._party.try_send(m.Failed(m.WireError.of(e, self._party.label), arm.attempt, self.replica))

            update = threading.Thread(target=call, name="xfer-update", daemon=True)
            update.start()
        except Exception as e:
            failure = e
            self._party.try_send(m.Failed(m.WireError.of(e, self._party.label), arm.attempt, self.replica))
        decision, lost = None, []
        try:
            while not isinstance(decision, m.Commit | m.Settle):
                decision = self._party.take(
                    (m.Commit, m.Settle, m.Failed),
                    until + SETTLE_GRACE_S,
                    "the decision",
                    lambda x: isinstance(x, m.Failed) or x.attempt == arm.attempt,
                )
                if isinstance(decision, m.Failed):
                    lost.append(decision)
        except XferError as e:
            # No word from the hub: the workers presume an abort, but whether they had begun to write is not known here.
            decision = m.Settle(arm.attempt, True, m.WireError.of(e, self._party.label))
        decided.set()
        if update is not None:
            update.join(timeout=STOP_GRACE_S * 2)
        stuck = update is not None and update.is_alive()
        phase("update")
        committed = isinstance(decision, m.Commit) and not stuck and not raised
        try:
            if stuck:
                raise EngineLost(f"replica {self.replica}: an engine worker did not return from its update call")
            if raised and isinstance(decision, m.Commit):
                raise EngineLost(
                    f"replica {self.replica}: its update call failed while the refit was committed", [str(raised[0])]
                )
            if failure is None or update is not None:
                handle.finish(decision.version if committed else None, SETTLE_GRACE_S)
            phase("finish")
            if committed:
                handle.reset_caches(SETTLE_GRACE_S)
                phase("reset caches")
                handle.set_version(decision.version, SETTLE_GRACE_S)
                self.refits += 1
                self.torn = False
                self._set(version=decision.version)
            elif isinstance(decision, m.Settle) and decision.dirty:
                self._tear(str(decision.error.error()))
                self._party.try_send(m.Settled(arm.attempt, "", False, 0.0, tuple(phases)))
                return lost
            else:
                handle.set_version(old, SETTLE_GRACE_S)
            handle.resume(SETTLE_GRACE_S)
            phase("resume")
            if not committed and self.error is not None and old:
                self._set()
            self._party.send(m.Settled(arm.attempt, self.version, True, time.perf_counter() - began, tuple(phases)))
        except Exception as e:
            error = e if isinstance(e, XferError) else EngineLost(f"replica {self.replica}: {type(e).__name__}: {e}")
            self._set(version="", error=error)
            handle.stay_paused()
            self._party.try_send(m.Settled(arm.attempt, "", False, 0.0, tuple(phases)))
            logger.error("xfer: replica %d could not be brought back: %s", self.replica, error)
        return lost
