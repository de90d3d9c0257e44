"""Counts calls of Python functions, but not those of the garbage collector: it runs finalizers of objects that other
tests have left, at moments that depend on all that the process has allocated."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


class Calls:
    """Counts calls of Python functions while `on`."""

    def __init__(self):
        self.on, self.count = False, 0

    def __call__(self, frame, event: str, arg) -> None:
        if self.on and event == "call":
            self.count += 1


@contextmanager
def _counted(set_profile: Callable) -> Iterator[Calls]:
    calls = Calls()
    gc.collect()
    gc.disable()
    set_profile(calls)
    try:
        yield calls
    finally:
        set_profile(None)
        gc.enable()


def in_new_threads() -> AbstractContextManager[Calls]:
    """Counts in the threads that start in the block."""
    return _counted(threading.setprofile)


def calls_of(look: Callable[[], T]) -> tuple[T, int]:
    """Returns what `look` returns, and how many Python functions were called, itself included."""
    with _counted(sys.setprofile) as calls:
        calls.on = True
        result = look()
        calls.on = False
    return result, calls.count
