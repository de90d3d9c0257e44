"""Routes that cannot be closed yet, because a kernel on the device still uses their tables, buffers and mapped memory.

This module holds them after their lane has ended. Each has a thread that closes it when the device has finished.
"""

from __future__ import annotations

import atexit
import logging
import threading

import torch

from xfer.ending import wait_for_all
from xfer.transport import routes

logger = logging.getLogger("xfer")
LATE_S = 0.05
"""Seconds between two attempts to close."""
_held: dict[routes.Routed, tuple[tuple[str, int], threading.Thread]] = {}
_exiting = threading.Event()


def close_later(routed: routes.Routed, label: str, replica: int, device: torch.device) -> None:
    """Hold the routes of `label`'s lane for `replica`, and close them in the background when they are drained."""
    closing = threading.Thread(target=_close, args=(routed, device), name="xfer-late", daemon=True)
    _held[routed] = (label, replica), closing
    closing.start()


def held(label: str, replica: int) -> list[routes.Routed]:
    """Return the held routes of `label`'s lane for `replica`."""
    return [r for r, (whose, _) in list(_held.items()) if whose == (label, replica)]


def stop() -> list[threading.Thread]:
    """Stop trying to close, because the process ends.

    Returns:
        The threads, which end within LATE_S. A thread that is only being started is left out: it cannot be joined.
    """
    _exiting.set()
    return [thread for _, thread in list(_held.values()) if thread.is_alive()]


@atexit.register
def _stop_all() -> None:
    """End the threads of a process that exits while a kernel still uses its routes."""
    wait_for_all(thread.join for thread in stop())


def _close(routed: routes.Routed, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        while not routed.close():
            routed.stop()  # each time: a pull that begins late clears the stop word
            if _exiting.wait(LATE_S):
                return
    except Exception as e:  # a driver error, which this process cannot repair
        logger.error("xfer: %s: memory of other ranks cannot be unmapped: %s", _held[routed][0][0], e)
    del _held[routed]
