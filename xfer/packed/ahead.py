"""Broadcasts one ahead: each message is given to the wire before the one before it is waited for, on both sides, so that the
wire has no rest between them. What a message is, and what becomes of it, is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from xfer.transport.group import Link, Pending


class OneAhead:
    """Messages of rank 0 of `link`, in order. `arrived(number, data)` is called when nothing of a message is under way here any more.

    until: time.monotonic() value, of every wait. seconds: in which the wire had some message, up to the last that arrived.
    What the link raises comes from `give` or `close`.
    """

    def __init__(self, link: Link, until: float, arrived: Callable[[int, torch.Tensor], object]):
        self.seconds = 0.0
        self._link, self._until, self._arrived = link, until, arrived
        self._before: tuple[int, torch.Tensor, Pending, float] | None = None
        self._ended = 0.0

    def give(self, number: int, data: torch.Tensor) -> None:
        """Begins this one, then waits for the one before."""
        now = number, data, self._link.begin_broadcast(data, 0, self._until), time.perf_counter()
        self.close()
        self._before = now

    def close(self) -> None:
        """Waits for what is still under way."""
        before, self._before = self._before, None
        if before is None:
            return
        number, data, pending, began = before
        pending.wait(self._until)
        now = time.perf_counter()
        self.seconds += now - max(began, self._ended)
        self._ended = now
        self._arrived(number, data)
