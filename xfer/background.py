"""One blocking call on a thread of its own, whose caller can stop waiting for it.

Nothing interrupts a collective, the constructor of a communicator or a call into a driver. A peer that does not come would
block the caller for good, so such a call runs here and the caller waits with a deadline.

These modules also use threads, for something else than a background call: a loop with state that runs as long as its owner
(`participants/lane.py`, `participants/controller.py`, `direct/late.py`, `packed/feed.py`, `packed/broadcast.py`,
`layerwise/watch.py`, `rendezvous/`), many calls in order on one thread (`engines/handles.py`), and calls that take turns
(`packed/lockstep.py`).
"""

from __future__ import annotations

import _thread
import atexit
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch

from xfer.ending import wait_for_all
from xfer.errors import XferError

T = TypeVar("T")
LOOK_S = 0.05
"""Seconds between two looks at whether waiting still makes sense."""
_given_up: set[BackgroundCall[Any]] = set()
"""Calls whose callers gave up. The interpreter waits for them before it ends, because a thread that returns from C++ later would crash
the process."""


def _never() -> bool:
    return False


class BackgroundCall(Generic[T]):
    """One run of a blocking call, started at once, without gradients.

    Args:
        call: What to run.
        device: If this is a CUDA device, the call runs with this device and the stream that is current for the caller, so
            that kernels it launches are queued behind the caller's.
        stream: The stream that the call runs with, in place of the caller's.
        where: Where an error happened, e.g. "trainer 3".
        failure: The message of the XferError that replaces any other error of the call. Empty: errors stay as they are.
        register: Called with this object before the call starts. An interrupt can hit the caller while the thread starts;
            the caller can still wait for an object that is registered.
        undo: Called with the result if the caller gave up before the call returned.
        after: The call waits until this is set. The thread has done nothing on the device before, so its caller goes on at once.

    Attributes:
        error: What the call raised; None otherwise.
        seconds: How long the call took; 0.0 until it is over.
    """

    def __init__(
        self,
        call: Callable[[], T],
        device: torch.device | None = None,
        where: str = "",
        failure: str = "",
        register: Callable[[BackgroundCall[T]], None] = lambda _: None,
        *,
        undo: Callable[[T], object] = lambda _: None,
        stream: torch.cuda.Stream | None = None,
        after: threading.Event | None = None,
    ):
        self._returned: list[T] = []  # empty until the call has returned
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._call, self._undo, self._where, self._failure, self._after = call, undo, where, failure, after
        cuda = device is not None and device.type == "cuda"
        self._device, self._stream = device, stream or (torch.cuda.current_stream(device) if cuda else None)
        self._over, self._began, self._given_up = threading.Event(), time.perf_counter(), False
        self._ending = threading.Lock()  # orders the end of the call and the caller's giving up
        self._first = threading.Lock()  # taken by the thread as it begins, or by a caller that could not start it
        self._left = threading.Event()  # the thread has nothing more to do
        try:
            register(self)
            _thread.start_new_thread(self._run, ())  # Thread.start() would give the interpreter to it
        except BaseException:
            if self._first.acquire(blocking=False):
                self._over.set()
            raise

    def _run(self) -> None:
        if not self._first.acquire(blocking=False):
            return
        if self._after is not None:
            self._after.wait()
        try:
            with ExitStack() as inside, torch.no_grad():
                if self._stream is not None:
                    inside.enter_context(torch.cuda.device(self._device))
                    inside.enter_context(torch.cuda.stream(self._stream))
                self._returned.append(self._call())
        except BaseException as e:
            self.error = e
        del self._call  # frees what it holds before the caller goes on
        self.seconds = time.perf_counter() - self._began
        with self._ending:
            self._over.set()
        try:
            if self._given_up and self.error is None:
                self._undo(self._returned[0])
        finally:
            _given_up.discard(self)
            self._left.set()

    @property
    def result(self) -> T | None:
        """What the call returned; None until then."""
        return self._returned[0] if self._returned else None

    @property
    def over(self) -> bool:
        """Whether the call has returned or raised."""
        return self._over.is_set()

    def ended(self, until: float, pointless: Callable[[], bool] = _never, grace_s: float = 0.0) -> bool:
        """Waits for the end of the call, and raises nothing of it.

        Args:
            until: A time.monotonic() value.
            pointless: Whether waiting makes no sense any more; called every LOOK_S seconds.
            grace_s: Seconds to wait all the same after that.

        Returns:
            Whether the call is over.
        """
        while not self._over.wait(max(0.0, min(LOOK_S, until - time.monotonic()))):
            if time.monotonic() >= until:
                return False
            if pointless():
                until, pointless = min(until, time.monotonic() + grace_s), _never
        return True

    def wait(self, until: float, pointless: Callable[[], bool] = _never, grace_s: float = 0.0) -> bool:
        """As `ended`, and raises the error of the call once it is over."""
        if not self.ended(until, pointless, grace_s):
            return False
        error = self.error
        if isinstance(error, XferError):
            error.where = error.where or self._where
        elif error is not None and self._failure:
            raise XferError(f"{self._failure}: {type(error).__name__}: {error}", where=self._where) from error
        if error is not None:
            raise error
        return True

    def take(self, until: float, cancelled: Callable[[], bool] = _never) -> T:
        """Returns the result, or raises the error of the call. Gives up at `until`, once `cancelled()`, and when interrupted.

        Raises:
            TimeoutError: The call was given up.
        """
        try:
            self.ended(until, cancelled)
        finally:
            self.give_up()
        if self._given_up:
            raise TimeoutError("no answer in time")
        self.wait(until)
        return self._returned[0]

    def give_up(self) -> None:
        """Drops the result: `undo` gets it when the call returns. No effect once the call is over."""
        with self._ending:
            if not self._over.is_set():
                self._given_up = True
                _given_up.add(self)


@atexit.register
def _end() -> None:
    wait_for_all(call._left.wait for call in list(_given_up))
