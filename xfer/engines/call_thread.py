"""Blocking calls in a thread of their own. What is called: handles.py, remote.py."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class CallThread:
    """One daemon thread that runs blocking calls in order. A call that never returns then holds up neither the caller,
    who waits with a deadline, nor the end of the interpreter."""

    def __init__(self, name: str):
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"xfer calls to {name}", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._todo.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._todo.get()
            try:
                future.set_result(call())
            except BaseException as e:  # also SystemExit: it must reach the waiter, not end the thread
                future.set_exception(e)
