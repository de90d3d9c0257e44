"""Faults for tests only: make a named process die, hang or raise at a named point. Does nothing unless XFER_FAULT or
XFER_FAULT_FILE is set.

    XFER_FAULT="worker:1:moving:kill"       role : rank : point : action, several separated by commas
    XFER_FAULT="trainer:2:enter:hang@2"     @N: only at the Nth time this point is passed (default: every time)

Actions: kill (SIGKILL to itself), stop (SIGSTOP to itself, until a SIGCONT), hang (sleep for XFER_FAULT_HANG_S, default
3600 s, or until XFER_FAULT_FILE is written), raise (RuntimeError), digest and checksum (the caller asks `wants` and corrupts its
own value). Points: see the callers of `point` and `wants`.

XFER_FAULT_FILE names a file whose text replaces XFER_FAULT. It is read at every point, so that a test can inject a fault into a
running process. Counting starts again whenever the file is written.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

_passed: Counter[str] = Counter()
_written = 0
_passing = threading.Lock()
"""Held during a pass. Lanes of several replicas pass points on threads of their own, and each pass needs its own number. The kernel
stops or kills the threads of a process one after another: the lock keeps the other threads from passing a point meanwhile."""


def _text() -> str:
    global _written
    path = os.environ.get("XFER_FAULT_FILE")
    if not path:
        return os.environ.get("XFER_FAULT", "")
    try:
        with open(path) as f:
            written, text = os.fstat(f.fileno()).st_mtime_ns, f.read().strip()
    except FileNotFoundError:
        return ""
    if written != _written:
        _written = written
        _passed.clear()
    return text


def _actions(role: str, rank: int, where: str) -> list[str]:
    """Count a pass of this point and return the actions that are set for it. The caller holds `_passing`."""
    text = _text()
    if not text:
        return []
    here = f"{role}:{rank}:{where}"
    _passed[here] += 1
    found = []
    for item in text.split(","):
        head, _, action = item.rpartition(":")
        action, _, nth = action.partition("@")
        if head == here and (not nth or int(nth) == _passed[here]):
            found.append(action)
    return found


def wants(role: str, rank: int, where: str) -> bool:
    """Count a pass of this point and return whether a fault of any kind is set for it."""
    with _passing:
        return bool(_actions(role, rank, where))


def point(role: str, rank: int, where: str) -> None:
    """Count a pass of this point and carry out the actions that are set for it."""
    with _passing:
        actions, written = _actions(role, rank, where), _written
        for action in actions:
            if action in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
                time.sleep(0.5)  # the kernel may stop this thread last: it must not pass the point before
    for action in actions:
        if action == "hang":
            _hang(float(os.environ.get("XFER_FAULT_HANG_S", "3600")), written)
        elif action == "raise":
            raise RuntimeError(f"injected fault at {where}")


def _hang(seconds: float, written: int) -> None:
    path = os.environ.get("XFER_FAULT_FILE")
    if not path:
        return time.sleep(seconds)
    until = time.monotonic() + seconds
    while time.monotonic() < until and os.stat(path).st_mtime_ns == written:
        time.sleep(0.02)
