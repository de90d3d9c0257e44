"""The calls of a controller to one engine replica: `LLM`, `AsyncLLM`, and the base class of all handles.

Every call returns within its timeout. vLLM has no timeouts: a worker stuck in a call blocks its engine for good. A call
without an answer is therefore *outstanding*: the handle sends nothing until that call ends, and errors name it.

vLLM does not survive calls out of order. With more than one worker, an update session that is started twice, or
finished without a start, raises on all workers; the executor reads one reply, and from then on answers every call with
the reply to the call before it. A handle therefore tracks the state of the update session and never sends a call that
vLLM would refuse. Calls that are sent ahead of an answer assume that the call before them succeeds.

This module does not import vLLM. Not here: the interface of a handle (participants/engine.py), the order of calls in a
refit (participants/), the worker's side (vllm_worker.py), HTTP and actors (remote.py), the lock of an in-process engine
(gate.py).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from xfer.coordinator.commit import STUCK
from xfer.engines.gate import Gate
from xfer.engines.settings import refuse_part, refuse_unreached
from xfer.errors import DeadlineExceeded, EngineLost, Unsupported, XferError
from xfer.participants.engine import ASK_S

logger = logging.getLogger("xfer")
PauseMode = Literal["keep", "keep_cache", "wait", "abort"]


class CallThread:
    """One daemon thread that runs blocking calls in order.

    A call that never returns then blocks neither the caller, which waits with a deadline, nor the exit of the interpreter. The
    thread ends when this object is garbage-collected.
    """

    def __init__(self, name: str):
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._todo,), name=f"xfer calls to {name}", daemon=True).start()
        weakref.finalize(self, self._todo.put, None)

    def submit(self, call: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._todo.put((call, future))
        return future


def _run(todo: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None]) -> None:
    while (got := todo.get()) is not None:
        call, future = got
        try:
            future.set_result(call())
        except BaseException as e:  # even SystemExit must reach the waiter and must not end the thread
            future.set_exception(e)
        del got, call, future  # they refer to the engine, and the next call may never come


@dataclass
class _Outstanding:
    """A call that was sent. When it has ended, `settled` applies its effect to the handle's state, once."""

    call: str
    future: Future
    on_success: Callable[[], None]
    on_error: Callable[[], None]

    def settled(self) -> None:
        (self.on_success if self.future.exception() is None else self.on_error)()


class Handle(ABC):
    """State of the update session, deadlines and error texts of all handles. A subclass sends the calls."""

    _in_step = True
    """Whether the engine may have data-parallel ranks that wait for one another in every step. True if unknown."""
    in_order = False
    """Whether the engine runs calls one after the other, in the order in which they were sent. If so, the handle may send a call
    before the previous one is answered, which saves the latency of that answer."""

    def __init__(self, name: str, pause_mode: PauseMode = "keep"):
        self.name = name
        self.keeps_caches = pause_mode == "keep_cache"
        self._mode = "keep" if self.keeps_caches else pause_mode
        self._ahead: dict[str, Future] = {}  # calls that were sent early, by name
        self._open = False
        self._paused = self._theirs = False  # paused by this handle; paused by another party before that
        self._asked: bool | None = None  # the engine's answer to `is_paused`, if it was asked
        self._outstanding: _Outstanding | None = None
        self._turn = threading.RLock()  # one call at a time; compound calls hold it throughout

    @abstractmethod
    def _send(self, call: str, **args: Any) -> Future:
        """Start one call and return at once.

        Args:
            call: Name of the call, one of those used in this module.
            **args: `info` (dict) of `init` and `update`, `text` of `set_version`.

        Returns:
            The result of the call, or its exception.
        """

    @property
    def session_open(self) -> bool:
        """Whether vLLM's update session is open, according to the calls that have ended."""
        return self._open

    def assume_open_session(self) -> None:
        self._open = True

    def assume_paused(self) -> None:
        self._paused, self._theirs = True, False

    @property
    @abstractmethod
    def engine(self) -> Any: ...

    @property
    def text_only(self) -> bool:
        """Whether the engine is known to have no multimodal and no encoder caches."""
        return False

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refuse_own_loop(self, call: str) -> None:
        """Raise if the caller is about to wait on the engine's own event loop. Only `AsyncEngine` has one."""
        return None

    def stay_paused(self, timeout: float = ASK_S) -> None:
        return None

    def workers(self, timeout: float = ASK_S) -> int:
        return int(self._call("workers", timeout))

    def ranks_in_step(self, timeout: float = ASK_S) -> bool:
        return False

    def init(self, info: Mapping[str, Any], timeout: float) -> None:
        self._call("init", timeout, info=dict(info))

    def pause(self, timeout: float) -> None:
        # Pause again even if this handle's last pause should still hold: somebody may have resumed a torn engine by force.
        with self._sequence(timeout) as left:
            if self._asked is None:
                self.ask_paused(left())
            self._call("pause", left(), done=self._now_paused, failed=lambda: setattr(self, "_asked", None))

    def ask_paused(self, timeout: float) -> None:
        """Ask whether another party has paused the engine.

        Call this just before `pause`, while the engine still serves; `pause` asks by itself otherwise. The question is never
        sent ahead: vLLM sends it one turn of its loop later than a pause that was called after it. The handle does not ask
        while the pause is its own alone, which includes a pause that timed out, since the answer would only show that pause.
        """
        with self._sequence(timeout) as left:
            if self._paused and not self._theirs:
                return
            said = self._is_paused(left())
            self._asked = self._theirs if said is None else said  # an engine without an answer counts as not paused
            self._theirs = self._theirs and self._asked  # its owner may have resumed it, which ends both pauses

    def _is_paused(self, timeout: float) -> bool | None:
        """Whether the engine is paused; None if it cannot tell."""
        try:
            said = self._call("is_paused", timeout)
        except (DeadlineExceeded, EngineLost):
            raise
        except XferError:
            return None
        return said if isinstance(said, bool) else None

    def _now_paused(self) -> None:
        self._paused, self._theirs, self._asked = True, self._theirs or bool(self._asked), None

    def resume(self, timeout: float) -> None:
        with self._sequence(timeout) as left:
            if self._paused and self._theirs:
                logger.info("xfer: %s was paused by somebody else before the refit, and stays so", self.name)
                self._paused = self._theirs = False
            elif self._paused and self._resumed(left()):
                logger.warning("xfer: %s was resumed by somebody else during the refit", self.name)
                self._paused = False
            elif self._paused:
                self._call("resume", left(), done=lambda: setattr(self, "_paused", False))

    def _resumed(self, timeout: float) -> bool:
        """Whether another party has already resumed an engine for which a second resume is harmful.

        A second resume can make vLLM's data-parallel ranks hang for good (vLLM pull request 55229): ranks that have begun a
        step skip the all-reduce in which the others wait.
        """
        return self._in_step and self._is_paused(timeout) is False

    def hand_over_drafter(self, timeout: float) -> bool:
        """Give the workers their drafter by one empty draft update. Return whether the engine has a drafter.

        A vLLM or a forwarder without these calls counts as one without a drafter. If its worker has one nevertheless, the
        worker refuses to join and names it.
        """
        if not all(self._call("has_drafter", timeout) or [False]):
            return False
        self.start_update(timeout, "start_draft")
        self.finish(None, timeout)
        return True

    def start_update(self, timeout: float, call: str = "start", *, then: Mapping[str, Any] | None = None) -> None:
        with self._sequence(timeout) as left:
            if self._open:
                self._close_session(left())
            self._ahead.clear()  # left over from a refit that failed before it made these calls
            after = {} if then is None else {"update": {"info": dict(then)}}
            self._call(call, left(), done=lambda: setattr(self, "_open", True), after=after)

    def update(self, info: Mapping[str, Any], timeout: float) -> None:
        with self._sequence(timeout) as left:
            if not self._open:
                raise XferError(f"{self.name}: update without an open session; call start_update first")
            # vLLM closes the session by itself when a worker's update_weights raises. xfer's own never raises.
            self._call("update", left(), failed=lambda: setattr(self, "_open", False), info=dict(info))

    def finish_ahead(self, reset: bool) -> None:
        # A text model needs no further reset. The encoder's cache is reset later, in its turn.
        for call in ("finish", "reset_prefix")[: 1 + reset] if self.in_order and self._open else ():
            self._ahead[call] = self._send(call)

    def finish(self, version: str | None, timeout: float) -> None:
        with self._sequence(timeout) as left:
            if self._open:
                self._close_session(left())
            if version is not None:
                self._call("set_version", left(), text=version)

    def set_version(self, text: str, timeout: float) -> None:
        self._call("set_version", timeout, text=text)

    def get_version(self, timeout: float) -> str | None:
        return self._call("get_version", timeout)

    def reset_caches(self, timeout: float) -> None:
        with self._sequence(timeout) as left:
            for call in self._cache_calls():
                if self._call(call, left()) is False:
                    raise XferError(
                        f"{self.name} did not drop its prefix cache",
                        [
                            "cache blocks are held, e.g. by a remote KV transfer, or a KV connector did not drop its own: keep "
                            "the engine paused and reset again"
                        ],
                    )

    def _cache_calls(self) -> tuple[str, ...]:
        # Each reset is a round trip while the engine does not serve. vLLM's cache of processed images is left alone: it holds
        # nothing that weights computed, and a request that was processed before its reset would fail without its image.
        return ("reset_prefix",) if self.text_only else ("reset_prefix", "reset_encoder")

    def _close_session(self, timeout: float) -> None:
        # An error in `finish` leaves vLLM's session open, and only another `finish` can close it. So the session stays open
        # here too, and the next `start_update` or `finish` tries again.
        self._call("finish", timeout, done=lambda: setattr(self, "_open", False))

    @contextmanager
    def _sequence(self, timeout: float) -> Iterator[Callable[[], float]]:
        """Hold the handle exclusively, after every earlier call has ended. Yield a function that returns the seconds left."""
        deadline = time.monotonic() + timeout

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        if not self._turn.acquire(timeout=timeout):
            raise DeadlineExceeded(f"{self.name} is still in another thread's call after {timeout:.1f} s")
        try:
            self._settle(left())
            yield left
        finally:
            self._turn.release()

    def _settle(self, timeout: float) -> None:
        """Wait for a call that timed out earlier. Its effect is unknown until it ends."""
        if self._outstanding is None:
            return
        try:
            self._outstanding.future.exception(timeout)
        except FutureTimeout:
            late = f"{self._outstanding.call}: the engine serves nothing until it ends; restart it if that is never"
            raise DeadlineExceeded(f"{self.name} has not answered an earlier call", [late]) from None
        ended, self._outstanding = self._outstanding, None
        ended.settled()

    def _call(
        self,
        call: str,
        timeout: float,
        *,
        done: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
        after: Mapping[str, Mapping[str, Any]] | None = None,
        **args: Any,
    ) -> Any:
        """Send a call and wait for its result.

        Args:
            call: Name of the call.
            timeout: Seconds.
            done: Called when the call has succeeded, however late.
            failed: Called when it has failed, however late.
            after: Next calls and their arguments. They are sent at once if the engine runs calls in order.
            **args: See `_send`.
        """
        with self._sequence(timeout) as left:
            future = self._ahead.pop(call, None) or self._send(call, **args)
            for other, its in (after or {}).items() if self.in_order else ():
                self._ahead[other] = self._send(other, **its)
            sent = _Outstanding(call, future, done, failed)
            try:
                sent.future.exception(left())
            except FutureTimeout:
                self._outstanding = sent
                waits = ["the next call waits for this one to end"]
                if self._in_step and call in ("is_paused", "pause", "resume"):
                    waits.append(STUCK)
                raise DeadlineExceeded(f"{self.name} did not answer {call} in {timeout:.1f} s", waits) from None
            sent.settled()
            error = sent.future.exception()
            if error is None:
                return sent.future.result()
            raise self._explained(call, error) from error

    def _explained(self, call: str, error: BaseException) -> XferError:
        if isinstance(error, XferError):
            return error
        text = f"{self.name}: {call} failed: {type(error).__name__}: {error}"
        # Compared by name: the class is vLLM's, and the controller's process need not have vLLM.
        if type(error).__name__ == "EngineDeadError" or isinstance(error, ConnectionError):
            return EngineLost(text)
        return DeadlineExceeded(text) if isinstance(error, TimeoutError) else XferError(text)


def _reads_text_only(vllm_config: Any) -> bool:
    try:
        model = vllm_config.model_config
        return not (model.is_multimodal_model or model.is_encoder_decoder)
    except AttributeError:
        return False  # another vLLM, or none


def _if_there(engine: Any, method: str) -> Callable[..., Any]:
    """The engine's method, or one that does nothing: vLLM 0.25 lacks some, such as those for the label of the weights."""
    return getattr(engine, method, None) or (lambda *args: None)


def _if_there_async(engine: Any, method: str) -> Callable[..., Awaitable[Any]]:
    async def nothing(*args: str) -> None:
        return None

    return getattr(engine, method, None) or nothing


class OfflineLLM(Handle):
    """vLLM's synchronous `LLM` in this process.

    An `LLM` has no pause, and two threads must not use it at once. Its owner therefore generates inside `hold()`, which
    enters a gate; a refit holds that gate from `pause` to `resume`.
    """

    in_order = True  # one thread makes all calls
    _in_step = False  # a pause closes the gate and does not reach vLLM

    def __init__(self, llm: Any, name: str = "LLM", pause_mode: Literal["keep", "keep_cache"] = "keep"):
        refuse_part(getattr(llm.llm_engine, "vllm_config", None))
        if pause_mode not in ("keep", "keep_cache"):
            raise Unsupported(
                f"pause_mode={pause_mode!r}", ["an LLM's requests wait between its steps: 'keep', 'keep_cache'"]
            )
        super().__init__(name, pause_mode)
        self._llm, self._thread = llm, CallThread(name)
        # One gate for all handles of an LLM: its owner may still be inside that of an earlier one.
        self._gate: Gate = vars(llm).setdefault("xfer_pause", Gate())

    @property
    def engine(self) -> Any:
        return self._llm

    @property
    def text_only(self) -> bool:
        return _reads_text_only(self._llm.llm_engine.vllm_config)

    def hold(self) -> AbstractContextManager[None]:
        """Use it as `with handle.hold(): llm.generate(…)`. It waits during a refit, and a thread may enter it again."""
        return self._gate.entered()

    def assume_paused(self) -> None:
        """Do nothing: an `LLM` has no pause, and an earlier controller has opened the gate."""

    def ask_paused(self, timeout: float) -> None:
        """Do nothing: no other party can pause an `LLM`."""

    def stay_paused(self, timeout: float = ASK_S) -> None:
        """Open the gate at once, even while a call does not return.

        An owner that waits at the gate could otherwise never learn that the engine is lost. Code that enters the gate must check that.
        """
        self._gate.let_by()
        self.resume(timeout)

    def pause(self, timeout: float) -> None:
        # This is not a call that may stay outstanding: after a timeout the gate must not close behind the owner.
        with self._sequence(timeout) as left:
            if self._paused:
                self._gate.keep_out()
                return
            if not self._gate.close(left()):
                raise DeadlineExceeded(
                    f"{self.name}: its owner was inside serving() for all of {timeout:.1f} s, so no refit could begin",
                    ["leave serving() between batches, or give refits a longer deadline_s"],
                )
            self._paused = True

    def _send(self, call: str, **args: Any) -> Future:
        if call == "resume":
            return self._thread.submit(self._gate.open)
        return self._thread.submit(lambda: self._at_the_gate(call, args))

    def _at_the_gate(self, call: str, args: dict[str, Any]) -> Any:
        self._gate.close()
        try:
            return self._now(call, **args)
        finally:
            self._gate.open()

    def _now(self, call: str, info: dict[str, Any] | None = None, text: str = "") -> Any:
        llm = self._llm
        calls: dict[str, Callable[[], Any]] = {
            # An offline LLM reaches the workers of its own data-parallel rank only.
            "workers": lambda: llm.llm_engine.vllm_config.parallel_config.world_size,
            "init": lambda: llm.init_weight_transfer_engine({"init_info": info}),
            "start": llm.start_weight_update,
            "has_drafter": lambda: workers_tell(llm) and llm.collective_rpc("supports_draft_weight_updates"),
            "start_draft": lambda: llm.start_draft_weight_update(),
            "update": lambda: llm.update_weights({"update_info": info}),
            "finish": llm.finish_weight_update,
            "set_version": lambda: _if_there(llm, "update_weight_version")(text),
            "get_version": lambda: _if_there(llm, "get_weight_version")(),
            "reset_prefix": lambda: llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
            "reset_encoder": lambda: llm.llm_engine.reset_encoder_cache(),
        }
        return calls[call]()


class PauseTurns:
    """Tells pauses and resumes of one `AsyncLLM` by its owner from those of refits, and serializes them if it has data-parallel ranks.

    vLLM knows one pause, whoever called for it. So this class replaces two methods of the engine object: the new ones note
    that the owner called them. Of an engine with data-parallel ranks, each rank runs a call between two steps of its own. If two
    calls overlap, or if an engine is resumed that is not paused, one rank can wait in the all-reduce of a resume while another
    waits for it in a step, and neither returns. There the new methods also wait for earlier calls, and a resume first asks
    whether the engine is paused.

    Attributes:
        owners: Whether the owner has paused the engine since a refit last asked whether it is paused.
    """

    def __init__(self, engine: Any, in_step: bool):
        self._in_step, self._lock, self.owners = in_step, asyncio.Lock(), False
        self._engine = weakref.ref(engine)  # an AsyncLLM ends its processes when it is garbage-collected
        engine.pause_generation, engine.resume_generation = self.of(self.pause, True), self.of(self.resume, False)
        engine.xfer_pause_turns = self

    @classmethod
    def on(cls, engine: Any, in_step: bool) -> PauseTurns:
        """Return the object that an earlier handle made for this engine, or a new one."""
        return vars(engine).get("xfer_pause_turns") or cls(engine, in_step)

    def of(self, call: Callable[..., Awaitable[None]], owners: bool | None = None) -> Callable[..., Awaitable[None]]:
        """Return `call` in its turn. `owners`: what it sets; None for a call of a refit."""

        async def alone(*args: Any, **how: Any) -> None:
            async with self._lock if self._in_step else nullcontext():
                self.owners = self.owners if owners is None else owners
                await call(*args, **how)

        async def in_turn(*args: Any, **how: Any) -> None:
            await asyncio.shield(alone(*args, **how))  # the ranks go on although the caller was cancelled

        return in_turn if self._in_step else alone

    def _alive(self) -> Any:
        engine = self._engine()
        if engine is None:
            raise EngineLost("this AsyncLLM was garbage-collected")
        return engine

    async def pause(self, *args: Any, **how: Any) -> None:
        """Call the engine's own method, without waiting for a turn."""
        engine = self._alive()
        await type(engine).pause_generation(engine, *args, **how)

    async def resume(self, *args: Any, **how: Any) -> None:
        """Call the engine's own method, without waiting for a turn."""
        engine = self._alive()
        if not self._in_step or await _if_there_async(engine, "is_paused")() is not False:
            await type(engine).resume_generation(engine, *args, **how)


class AsyncEngine(Handle):
    """vLLM's `AsyncLLM`, driven from a thread other than the one that runs its event loop."""

    def __init__(
        self,
        engine: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        pause_mode: PauseMode = "keep",
        name: str = "AsyncLLM",
        in_order: bool | None = None,
    ):
        """Make a handle.

        Args:
            engine: The `AsyncLLM`.
            loop: Its event loop.
            pause_mode: `mode` of vLLM's `pause_generation`, or "keep_cache": see `xfer.serve`.
            name: Its name in errors and logs.
            in_order: Whether the engine runs calls in the order in which they were made. Default: True if the methods are
                vLLM's own, which send before they wait, to an engine core that reads one queue. A wrapper's methods may differ.
        """
        refuse_part(getattr(engine, "vllm_config", None))
        super().__init__(name, pause_mode)
        self._engine, self._loop = engine, loop
        parallel = getattr(getattr(engine, "vllm_config", None), "parallel_config", None)
        self._in_step = getattr(parallel, "data_parallel_size", 1) > 1
        self._turns = PauseTurns.on(engine, self._in_step)
        calls = ("start_weight_update", "collective_rpc", "finish_weight_update", "reset_prefix_cache")
        self.in_order = all(map(self._is_vllms, calls)) if in_order is None else in_order

    @property
    def engine(self) -> Any:
        return self._engine

    @property
    def text_only(self) -> bool:
        return _reads_text_only(getattr(self._engine, "vllm_config", None))

    def ranks_in_step(self, timeout: float = ASK_S) -> bool:
        return self._in_step

    def _resumed(self, timeout: float) -> bool:
        return False  # PauseTurns asks before it resumes

    def refuse_own_loop(self, call: str) -> None:
        """Raise Unsupported on the thread of the engine's event loop, where a wait for the engine would never end."""
        if running_loop() is self._loop:
            raise Unsupported(
                f"{self.name}: {call} would block the engine's own event loop",
                ["run it in another thread, e.g. await asyncio.to_thread(controller.wait_ready)"],
            )

    def _send(self, call: str, **args: Any) -> Future:
        if self._loop.is_closed():
            raise EngineLost(f"{self.name}: its event loop is closed")
        self.refuse_own_loop(call)
        return asyncio.run_coroutine_threadsafe(self._now(call, **args), self._loop)

    def _pause(self) -> Callable[..., Awaitable[None]]:
        """The call that pauses, without the 20 ms that vLLM's `pause_generation` sleeps at its end.

        vLLM sleeps so that callers see the last outputs before it returns, which is "not required for correctness". In a refit
        these outputs arrive while weights move, so this calls the engine core directly.
        """
        core = getattr(self._engine, "engine_core", None) if self._is_vllms("pause_generation") else None
        pause = getattr(core, "pause_scheduler_async", None)
        return self._turns.of(pause or self._turns.pause)

    async def _is_paused_now(self) -> Any:
        self._turns.owners = False  # the answer shows a pause that was called for until now
        return await _if_there_async(self._engine, "is_paused")()

    async def _resume(self) -> None:
        if self._turns.owners:
            logger.info("xfer: %s was paused by its owner during the refit, and stays so", self.name)
        else:
            await self._turns.resume()

    async def _reset_prefix(self) -> Any:
        """Reset the prefix cache. Return whether every data-parallel rank did; vLLM 0.25 returns the first rank's answer only."""
        core = getattr(self._engine, "engine_core", None) if self._is_vllms("reset_prefix_cache") else None
        ask, ranks = getattr(core, "_call_utility_async", None), getattr(core, "core_engines", ())
        if ask is None or len(ranks) < 2:
            return await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        return all(await asyncio.gather(*(ask("reset_prefix_cache", True, True, engine=rank) for rank in ranks)))

    def _is_vllms(self, method: str) -> bool:
        return getattr(getattr(type(self._engine), method, None), "__module__", "").startswith("vllm.")

    async def _now(self, call: str, info: dict[str, Any] | None = None, text: str = "") -> Any:
        engine = self._engine
        rpc = engine.collective_rpc
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "init": lambda: rpc("init_weight_transfer_engine", kwargs={"init_info": info}),
            # Caches are dropped after the commit, when all of their content is known to come from old weights.
            "is_paused": self._is_paused_now,
            "pause": lambda: self._pause()(mode=self._mode, clear_cache=False),
            "resume": self._turns.of(self._resume),
            "start": engine.start_weight_update,
            "has_drafter": lambda: (
                rpc("supports_draft_weight_updates") if workers_tell(engine) else asyncio.sleep(0, [])
            ),
            "start_draft": lambda: engine.start_draft_weight_update(),
            "update": lambda: rpc("update_weights", kwargs={"update_info": info}),
            "finish": engine.finish_weight_update,
            "set_version": lambda: _if_there_async(engine, "update_weight_version")(text),
            "get_version": lambda: _if_there_async(engine, "get_weight_version")(),
            "reset_prefix": self._reset_prefix,
            "reset_encoder": engine.reset_encoder_cache,
        }
        if call == "workers":
            parallel = engine.vllm_config.parallel_config
            refuse_unreached(parallel, parallel.world_size_across_dp)
            return parallel.world_size_across_dp
        return await calls[call]()


def workers_tell(engine: Any) -> bool:
    """Whether an engine's workers can be asked whether they have a drafter.

    Those of vLLM 0.26 and 0.27 cannot, although these engines have `start_draft_weight_update`. A call that workers do not have
    would leave vLLM's later answers out of step.
    """
    if not hasattr(engine, "start_draft_weight_update"):
        return False
    if not any(c.__module__.startswith("vllm.") for c in type(engine).__mro__):
        return True
    from vllm.v1.worker.worker_base import WorkerBase

    return hasattr(WorkerBase, "supports_draft_weight_updates")


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
