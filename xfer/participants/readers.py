"""Finds the workers that may still read a trainer's storages after a failed refit.

A worker that pulls sends `Done`, or `Stopped` once its pull is drained. A worker that sends neither has died or lost its
connection. A dead process reads nothing; a living one may still read. Not here: what a trainer does with the answer (refit.py),
which readers are suspected (coordinator/commit.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from xfer.coordinator import messages as m
from xfer.rendezvous.client import host_identity
from xfer.transport.peer import DRAIN_S

GRACE_S = DRAIN_S + 1.0
"""Seconds to wait: a worker that lost its connection stops its pull by itself within `DRAIN_S`; a killed one ends sooner."""


def still_reading(readers: Sequence[m.Reader], seconds: float | None = None) -> list[str]:
    """Wait until these readers are dead.

    Only processes of this host can be checked, which is enough: a pull does not leave a host. As everywhere in xfer,
    `host_identity()` identifies a host, so containers that share a name but not their process ids must set XFER_HOST.

    Args:
        readers: The suspected workers.
        seconds: How long to wait. Default: GRACE_S.

    Returns:
        One line for each reader that may still be alive.
    """
    until = time.monotonic() + (GRACE_S if seconds is None else seconds)
    left = list(readers)
    while left:
        left = [r for r in left if r.host != host_identity() or _alive(r.pid)]
        if not left or time.monotonic() > until:
            break
        time.sleep(0.01)
    return [f"{r.label} (host {r.host}, pid {r.pid})" for r in left]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            state = f.read().rsplit(b")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")  # a zombie has no memory and no device context
