"""Drains of a source, run in the background so that they cannot block the caller.

With parameter gathers in flight, a drain ends only when all data-parallel peers call too, and nothing interrupts a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from xfer.background import BackgroundCall
from xfer.errors import DeadlineExceeded
from xfer.participants import faults

if TYPE_CHECKING:
    from xfer.participants.trainer import Source


def refuse_running(some: Iterable[BackgroundCall[Any] | None], until: float, label: str) -> None:
    """Raise DeadlineExceeded if one of these calls still runs at monotonic `until`: it uses storages that the caller frees next.

    Args:
        some: Background calls of this rank.
        until: A time.monotonic() value.
        label: This rank, for the error.
    """
    for call in some:
        if call is not None and not call.ended(until):
            raise DeadlineExceeded(
                "a background call of an earlier refit has not ended, and uses this rank's parameters",
                ["other ranks take part in it, and one has not done its part yet: call again when it has"],
                where=label,
            )


def begin_drain(
    source: Source, label: str, register: Callable[[BackgroundCall[None]], None] = lambda _: None
) -> BackgroundCall[None]:
    """Start a drain of `source`. `register`: is given the call before it starts."""

    def drain() -> None:
        faults.point("trainer", source.rank, "drain")
        source.drain()

    return BackgroundCall(drain, source.device, label, "the trainer's parameters could not be made whole", register)
