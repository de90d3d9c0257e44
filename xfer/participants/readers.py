"""Who may still read a trainer's storages after a refit that failed, and how a trainer learns that they have ended.

A worker that pulls says `Done`, or `Stopped` once its pull was drained. One that says neither has died or lost its
connection; a dead process reads nothing, a living one may. Here is the look for that. Not here: what a trainer does
with the answer (trainer.py), which readers are suspected (coordinator/commit.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from xfer.coordinator import messages as m
from xfer.rendezvous.client import host_identity
from xfer.transport.peer import DRAIN_S

GRACE_S = DRAIN_S + 1.0
"""A worker that lost its connection stops its pull by itself within `DRAIN_S`; a killed one takes less to end."""


def still_reading(readers: Sequence[m.Reader], seconds: float | None = None) -> list[str]:
    """Labels of readers that are not known to be dead after `seconds` (default GRACE_S).

    Only processes of this host are known: a pull does not leave a host. Hosts are told apart as everywhere in xfer, by
    `host_identity()`, so containers that share a name but not their process ids must set XFER_HOST.
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
    return state not in (b"Z", b"X")  # a zombie has no memory any more, and no context on a device
