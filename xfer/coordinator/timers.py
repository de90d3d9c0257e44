"""What the coordinator does later, ordered by time. Reads no clock: the caller says what time it is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """Actions by monotonic time, in seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None], object]] = []
        self._count = itertools.count()  # of two actions at one time, the one that was added first runs first

    def at(self, when: float, action: Callable[[], None], of: object = None) -> None:
        """Add an action. `of`: what it is about; `drop(of)` removes it."""
        heapq.heappush(self._heap, (when, next(self._count), action, of))

    @property
    def next(self) -> float | None:
        """When the first action is due; None without one."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Callable[[], None]]:
        """Remove and return what is due, in order of time."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            out.append(heapq.heappop(self._heap)[2])
        return out

    def drop(self, of: object) -> None:
        """Remove all actions about `of`. A deadline may be an hour away, and its action would keep `of` alive until then."""
        self._heap = [t for t in self._heap if t[3] is not of]
        heapq.heapify(self._heap)
