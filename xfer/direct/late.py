"""Routes that could not be closed yet: something of theirs has not left the device. They are held here, whatever becomes of their
lane, since a kernel works with their tables and buffers and with what they have mapped; each has a thread that closes it once it can.
"""

from __future__ import annotations

import logging
import threading

import torch

from xfer.transport import routes

logger = logging.getLogger("xfer")
LATE_S = 0.05
"""Seconds between two looks at them."""
_held: dict[routes.Routed, tuple[tuple[str, int], threading.Thread]] = {}
_exiting = threading.Event()


def close_later(routed: routes.Routed, label: str, replica: int, device: torch.device) -> None:
    closing = threading.Thread(target=_close, args=(routed, device), name="xfer-late", daemon=True)
    _held[routed] = (label, replica), closing
    closing.start()


def held(label: str, replica: int) -> list[routes.Routed]:
    """Those of this party's lane for this replica."""
    return [r for r, (whose, _) in list(_held.items()) if whose == (label, replica)]


def stop() -> list[threading.Thread]:
    """The process ends: no more looks. Returns the threads, which end soon; one that is only being started cannot be joined."""
    _exiting.set()
    return [thread for _, thread in list(_held.values()) if thread.is_alive()]


def _close(routed: routes.Routed, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        while not routed.close():
            routed.stop()  # again and again: what begins late clears the word
            if _exiting.wait(LATE_S):
                return
    except Exception as e:  # of the driver: this process can do no more about it
        logger.error("xfer: %s: what was read cannot be unmapped: %s", _held[routed][0][0], e)
    del _held[routed]
