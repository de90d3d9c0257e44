"""The end of a process that used torch's gloo groups. For tests and demos only.

A gloo thread of torch that drops the last reference to a tensor takes the interpreter's lock. If the interpreter is
ending by then, Python ends the thread, and C++ the process: "terminate called without an active exception" (pytorch issue
190489). `destroy_process_group` joins the threads of a group unless somebody still holds the group; a DeviceMesh does, so do
FSDP2's caches and Megatron's globals. xfer's own groups are joined by `close` (transport/group.py).
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

WAIT_S = 1.0
_TICK_S = 0.001
_NAME = "gloo_runloop"


def settle_at_exit() -> None:
    """Before the interpreter ends, wait until torch's gloo threads have let go. Idempotent. Nothing happens but on Linux."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """A thread that sleeps twice in a row, while this one left the interpreter's lock alone, waits for work and not for the lock."""
    until, quiet = time.monotonic() + WAIT_S, 0
    while quiet < 2 and time.monotonic() < until:
        time.sleep(_TICK_S)
        quiet = 0 if _some_runs() else quiet + 1


def _some_runs() -> bool:
    for thread in Path("/proc/self/task").glob("*"):
        try:
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if _NAME in name and rest.split()[0] == "R":
            return True
    return False
