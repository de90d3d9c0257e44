"""Counts calls of Python functions, but not those of the garbage collector: it runs finalizers of objects that other
tests have left, at moments that depend on all that the process has allocated."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
def in_new_threads() -> Iterator[Calls]:
    """Counts in the threads that start in the block."""
    calls = Calls()
    with _no_collection():
        threading.setprofile(calls)
        try:
            yield calls
        finally:
            threading.setprofile(None)


def calls_of(look: Callable[[], T]) -> tuple[T, int]:
    """Returns what `look` returns, and how many Python functions were called, itself included."""
    calls = Calls()
    calls.on = True
    with _no_collection():
        sys.setprofile(calls)
        try:
            result = look()
        finally:
            sys.setprofile(None)
    return result, calls.count


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
