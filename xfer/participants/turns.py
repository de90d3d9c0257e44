"""Threads that take turns more often while a refit runs, and that sleep no longer than they ask for.

A thread that computes in Python keeps the interpreter for 5 ms when another wants it. The coordinator lives in trainer 0's process, so
every message of a refit that arrives while that rank looks through its storages would wait so long, and a refit has a dozen of
them one behind the other. And Linux lets a sleep end late by the thread's timer slack (prctl(2)), which is more than the bytes of
a small refit need. Nothing else is known here.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 250e-6
SLACK_NS = 1000
_PR_SET_TIMERSLACK = 29

_lock = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def quick_turns() -> Iterator[None]:
    """Inside, `sys.setswitchinterval` is at most `INTERVAL_S`; afterwards what it was. Any number of threads may be inside."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, INTERVAL_S))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                sys.setswitchinterval(_before)


def short_sleeps() -> bool:
    """This thread's sleeps are rounded up by `SLACK_NS` and no more. Linux only; False elsewhere."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NS)) == 0
