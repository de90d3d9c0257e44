"""Threads that take turns more often while a refit runs.

A thread that computes in Python keeps the interpreter for 5 ms when another wants it. The hub lives in trainer 0's process, so
every message of a refit that arrives while that rank looks through its storages would wait so long, and a refit has a dozen of
them one behind the other. Nothing else is known here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 250e-6

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
