"""What a source does together with other ranks, run in the background so that it cannot keep its caller.

A drain ends, with parameter gathers in flight, when all data-parallel peers call too, and nothing interrupts a collective.
What to tell whom is decided in trainer.py and refit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from xfer.background import BackgroundCall
from xfer.errors import DeadlineExceeded
from xfer.participants import faults

if TYPE_CHECKING:
    from xfer.participants.trainer import Source


def refuse_running(some: Iterable[BackgroundCall | None], until: float, label: str) -> None:
    """DeadlineExceeded when one of these still runs at monotonic `until`: it reads or writes what its rank is about to let go of."""
    for call in some:
        if call is not None and not call.ended(until):
            raise DeadlineExceeded(
                "what an earlier refit began has not ended, and uses this rank's parameters",
                ["other ranks take part in it, and one has not done its part yet: call again when it has"],
                where=label,
            )


def begin_drain(
    source: Source, label: str, register: Callable[[BackgroundCall[None]], None] = lambda _: None
) -> BackgroundCall[None]:
    def drain() -> None:
        faults.point("trainer", source.rank, "drain")
        source.drain()

    return BackgroundCall(drain, source.device, label, "the trainer's parameters could not be made whole", register)
