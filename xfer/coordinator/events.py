"""Events that drive the coordinator, the effects that it asks for, and its timers. Times are seconds of one monotonic clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from xfer.coordinator.messages import Message


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection proved the job's token. `client`: a number that no other connection of this job has."""

    client: int


@dataclass(frozen=True, slots=True)
class Received:
    """A whole, valid message arrived."""

    client: int
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended, from either side."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unproven:
    """A caller at `host` could not prove the token, and its connection was closed."""

    host: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed: `Coordinator.wake_at` has come."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to each of these clients."""

    clients: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection after everything that was sent to it before."""

    client: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Note a moment of the timeline (XFER_TIMELINE)."""

    text: str


Event = Connected | Received | Disconnected | Unproven | Tick
Effect = Send | Close | Mark


class Timers:
    """Actions ordered by time. The caller tells what time it is."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None], object]] = []
        self._count = itertools.count()  # actions of equal time run in the order in which they were added

    def at(self, when: float, action: Callable[[], None], of: object = None) -> None:
        """Add an action. `drop(of)` removes it."""
        heapq.heappush(self._heap, (when, next(self._count), action, of))

    @property
    def next(self) -> float | None:
        """Time of the first action; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Callable[[], None]]:
        """Remove and return the actions that are due, in order of time."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            out.append(heapq.heappop(self._heap)[2])
        return out

    def drop(self, of: object) -> None:
        """Remove the actions that belong to `of`. A deadline may be an hour away, and its action would keep `of` alive until then."""
        self._heap = [t for t in self._heap if t[3] is not of]
        heapq.heapify(self._heap)
