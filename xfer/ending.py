"""Waits for threads when a session closes or the interpreter ends.

A thread that returns from C++ (mostly gloo's) after the interpreter has ended calls std::terminate. So each module that
starts such threads stops them at exit, in its own way, and waits for them here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

EXIT_S = 5.0


def wait_for_all(joins: Iterable[Callable[[float], object]], seconds: float = EXIT_S) -> None:
    """Calls each of `joins` with what is left of `seconds`, in seconds; 0 once nothing is left."""
    until = time.monotonic() + seconds
    for join in joins:
        join(max(0.0, until - time.monotonic()))
