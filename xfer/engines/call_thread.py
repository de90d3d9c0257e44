"""A thread that runs blocking calls. handles.py and remote.py use it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


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
