"""The ends of threads: how long they get, together, when a session closes or the interpreter ends.

A thread of ours that comes back from C++ (gloo's, mostly) into an interpreter that is gone ends the process by
std::terminate; so whoever starts such threads stops them at exit and waits here. How a thread is stopped is its owner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

EXIT_S = 5.0


def wait_for_all(joins: Iterable[Callable[[float], None]], seconds: float = EXIT_S) -> None:
    """Calls each with the seconds that are left of `seconds`, 0 once there are none."""
    until = time.monotonic() + seconds
    for join in joins:
        join(max(0.0, until - time.monotonic()))
