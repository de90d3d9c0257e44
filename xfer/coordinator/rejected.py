"""Rejected connections, listed in timeout errors: a missing rank is often a rejected one."""

from __future__ import annotations

from collections.abc import Sequence

from xfer.coordinator import messages as m

REMEMBERED = 8


class Rejected:
    """Connections that said hello and were refused, by rank, and those that could not prove the token, by count: they may be anybody."""

    def __init__(self) -> None:
        self._refused: dict[tuple[str, int, int], str] = {}  # (role, index, replica) -> why, the last of each
        self._unproven, self._last = 0, ""

    def unproven(self, host: str) -> None:
        self._unproven, self._last = self._unproven + 1, host

    def refused(self, h: m.Hello, why: Sequence[str]) -> None:
        key = h.role, h.index, h.replica
        self._refused.pop(key, None)
        self._refused[key] = "; ".join(why)
        while len(self._refused) > REMEMBERED:
            del self._refused[next(iter(self._refused))]

    def trainer(self, index: int) -> bool:
        """Whether a process that called itself this trainer rank was refused."""
        return any(role == "trainer" and i == index for role, i, _ in self._refused)

    def lines(self) -> list[str]:
        """One line per rejected process. May be called from any thread."""
        out = [f"turned away: {why}" for why in list(self._refused.values())]
        if self._unproven:
            callers = "a caller" if self._unproven == 1 else f"{self._unproven} callers"
            out.append(
                f"turned away: {callers} with another token, last from {self._last}: is token= the same everywhere?"
            )
        return out
