"""Who came to the rendezvous and could not stay: said where somebody was waited for in vain, who may be one of these.

Those that did not prove the token may be anybody; they are counted, and named by their address only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from xfer.session import messages as m

REMEMBERED = 8


class TurnedAway:
    """Heard of on the door's threads and the hub's, asked on the caller's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: dict[tuple[str, int, int], str] = {}  # by role, index and replica; the last of each
        self._unproven, self._last = 0, ""

    def unproven(self, peer: str) -> None:
        with self._lock:
            self._unproven, self._last = self._unproven + 1, peer

    def refused(self, h: m.Hello, why: Sequence[str]) -> None:
        key = h.role, h.index, h.replica
        with self._lock:
            self._refused.pop(key, None)
            self._refused[key] = "; ".join(why)
            while len(self._refused) > REMEMBERED:
                del self._refused[next(iter(self._refused))]

    def trainer(self, index: int) -> bool:
        """Whether one of this rank was refused."""
        with self._lock:
            return any(role == "trainer" and i == index for role, i, _ in self._refused)

    def lines(self) -> list[str]:
        with self._lock:
            out = [f"turned away: {why}" for why in self._refused.values()]
            if self._unproven:
                callers = "a caller" if self._unproven == 1 else f"{self._unproven} callers"
                out.append(f"turned away: {callers} with another token, last from {self._last}: is token= the same everywhere?")
            return out
