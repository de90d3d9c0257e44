"""What the hub is to do later. Of one thread, which asks for what is due; not here: what is done."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """Actions by monotonic time, in seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None], object]] = []
        self._count = itertools.count()  # of two of one time the first comes first

    def at(self, when: float, action: Callable[[], None], of: object = None) -> None:
        """of: what the action is about, if it has nothing to do once that is over (`drop`)."""
        heapq.heappush(self._heap, (when, next(self._count), action, of))

    def next(self, otherwise: float) -> float:
        """When the first is due."""
        return self._heap[0][0] if self._heap else otherwise

    def due(self, now: float) -> list[Callable[[], None]]:
        """Taken out, in order of time."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            out.append(heapq.heappop(self._heap)[2])
        return out

    def drop(self, of: object) -> None:
        """It is over: its deadline may be an hour away, and until then nothing of it could be freed."""
        self._heap = [t for t in self._heap if t[3] is not of]
        heapq.heapify(self._heap)
