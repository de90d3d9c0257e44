"""The way into a trainer rank's session: for one thread at a time, and for nobody once it was closed. Who comes then is not told that a
peer is gone, for which one would call again: it is its own process that has left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from xfer.errors import Unsupported


class Entry:
    def __init__(self) -> None:
        self.closed = False  # whoever is inside by then finds out by the connection's end
        self._inside = threading.Lock()

    def refuse_closed(self, call: str, where: str) -> None:
        if self.closed:
            raise Unsupported(
                f"{call} was called after this session was closed, on this rank itself",
                [
                    "close it on every trainer rank and call xfer.connect() again there, and xfer.serve() for each engine"
                ],
                where=where,
            )

    @contextmanager
    def alone(self, call: str, where: str) -> Iterator[None]:
        self.refuse_closed(call, where)
        with self.if_free() as free:
            if not free:
                raise Unsupported(
                    f"{call} was called while another thread of this rank is inside xfer",
                    ["call it from one thread at a time; all ranks must make the same calls in the same order"],
                    where=where,
                )
            yield

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Whether no call was inside; then none comes in."""
        free = self._inside.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._inside.release()

    def locked(self) -> bool:
        """Whether a call is inside."""
        return self._inside.locked()
