"""Blocking calls in a thread of their own. What is called: handles.py, remote.py."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class CallThread:
    """One daemon thread that runs blocking calls in order. A call that never returns then holds up neither the caller,
    who waits with a deadline, nor the end of the interpreter. It ends with its last user."""

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
        except BaseException as e:  # also SystemExit: it must reach the waiter, not end the thread
            future.set_exception(e)
        del got, call, future  # the engine is in them, and the next call may never come
