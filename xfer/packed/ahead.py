"""Broadcasts one ahead: each message begins before the previous one is waited for, so that the wire is never idle in between."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from xfer.transport.group import Link, Pending


class OneAhead:
    """Broadcasts messages from rank 0 of `link`, in order. Used on both ends. `give` and `close` raise the link's errors.

    Args:
        link: The link.
        until: Deadline of every wait, a time.monotonic() value.
        arrived: Called with (number, data) when a message is complete on this rank.

    Attributes:
        seconds: Time during which a message was on the wire, up to the last complete one.
    """

    def __init__(self, link: Link, until: float, arrived: Callable[[int, torch.Tensor], object]):
        self.seconds = 0.0
        self._link, self._until, self._arrived = link, until, arrived
        self._before: tuple[int, torch.Tensor, Pending, float] | None = None
        self._ended = 0.0

    def give(self, number: int, data: torch.Tensor) -> None:
        """Begin this message, then wait for the previous one."""
        now = number, data, self._link.begin_broadcast(data, 0, self._until), time.perf_counter()
        self.close()
        self._before = now

    def close(self) -> None:
        """Wait for the message that is under way."""
        before, self._before = self._before, None
        if before is None:
            return
        number, data, pending, began = before
        pending.wait(self._until)
        now = time.perf_counter()
        self.seconds += now - max(began, self._ended)
        self._ended = now
        self._arrived(number, data)
