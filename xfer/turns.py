"""Makes threads switch more often while a refit runs, and sleep no longer than they ask for.

A thread that computes in Python keeps the interpreter for 5 ms when another thread wants it. The coordinator runs in trainer 0's
process, so each message that arrives while that rank checks its storages would wait as long, and a refit has a dozen messages in
sequence. And Linux may end a sleep late, by the thread's timer slack (prctl(2)), which is longer than a small refit moves bytes.
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
    """Set the interpreter's switch interval to at most `INTERVAL_S` seconds inside the context, and restore it afterwards. Any
    number of threads may be inside."""
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
    """Set this thread's timer slack to `SLACK_NS`. Returns whether that worked; it does on Linux only."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NS)) == 0)
