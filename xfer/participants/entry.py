"""Admits calls to a trainer rank's session: one thread at a time, and none after `close`.

A call after `close` raises Unsupported, not PeerLost: no peer is gone, so calling again would not help.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from xfer.errors import Unsupported


class Entry:
    """Admits one call at a time.

    Attributes:
        closed: Whether the session is closed. A call that is inside then ends with its connection.
    """

    def __init__(self) -> None:
        self.closed = False
        self._inside = threading.Lock()

    def refuse_closed(self, call: str, where: str) -> None:
        """Raise Unsupported if the session is closed. `call` and `where` (this rank) are quoted in the error."""
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
        """Admit one call. Raises Unsupported if the session is closed or another thread is inside."""
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
        """Yield whether no call was inside; if so, none is admitted until the end of the context."""
        free = self._inside.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._inside.release()

    def locked(self) -> bool:
        """Whether a call is inside."""
        return self._inside.locked()
