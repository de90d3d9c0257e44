"""Observers of refits in this process: metrics, spans, or a function of the user.

Trainer ranks and controllers tell them the end of each refit. An observer gets what the participant has anyway (its report, its
engine's calls) and keeps books of its own if it wants any. `xfer/metrics.py` has observers for Prometheus and OpenTelemetry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xfer.errors import XferError
    from xfer.report import RefitReport

logger = logging.getLogger("xfer")


@dataclass(frozen=True, slots=True)
class TrainerFinished:
    """The end of a refit on one trainer rank.

    Attributes:
        session: The coordinator's name of the session.
        attempt: Number of the attempt, the same on all ranks and engines of the session.
        rank: The trainer rank.
        seconds: Wall time of the call. It equals `report.seconds` if there is a report.
        report: The report, also if the call raised after the outcomes were known; None if it raised before.
        error: What the call raised; None if it returned.
    """

    session: str
    attempt: int
    rank: int
    seconds: float
    report: RefitReport | None
    error: XferError | None


@dataclass(frozen=True, slots=True)
class EngineFinished:
    """The end of a refit on one replica, told by its controller.

    Attributes:
        session: The coordinator's name of the session.
        attempt: Number of the attempt, the same on all ranks and engines of the session. From 2**30 on, this was no refit: the engine
            got its first weights from another one.
        replica: The replica's number.
        committed: Whether this refit was committed and the engine serves it.
        serving: Whether the engine serves now.
        torn: Whether the engine holds bytes that must not be served.
        version: The version that it serves; None if it serves none that a refit brought.
        outage_s: Seconds from pause to resume; 0 if the engine does not serve.
        phases: (name, seconds) of the calls to the engine, in order and without gaps, the first one beginning with the pause.
        error: Why the engine did not take the version; None if it did.
    """

    session: str
    attempt: int
    replica: int
    committed: bool
    serving: bool
    torn: bool
    version: int | str | None
    outage_s: float
    phases: tuple[tuple[str, float], ...]
    error: XferError | None


Observer = Callable[[TrainerFinished | EngineFinished], None]
_observers: tuple[Observer, ...] = ()


def observe(observer: Observer) -> Callable[[], None]:
    """Call a function at the end of each refit of this process's sessions and controllers.

    Args:
        observer: Called with a `TrainerFinished` on a trainer rank, before its call returns or raises, and with an `EngineFinished` where
            `serve` was called, after the engine serves again. After `wait="sources"`, a trainer rank calls it once the outcome
            is known, in the next call. What it raises is logged and changes nothing.

    Returns:
        A function that ends it.
    """
    global _observers
    _observers = (*_observers, observer)

    def end() -> None:
        global _observers
        _observers = tuple(o for o in _observers if o is not observer)

    return end


def tell(ended: TrainerFinished | EngineFinished) -> None:
    """Tell all observers of this process."""
    for observer in _observers:
        try:
            observer(ended)
        except Exception:
            logger.exception("xfer: an observer of refits failed")
