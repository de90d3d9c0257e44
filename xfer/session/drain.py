"""A source's `drain`, run so that it cannot keep its caller: it may be collective, and nothing interrupts a collective.

With parameter gathers in flight it ends when all data-parallel peers call too. A peer that does not would hold this rank
for ever; so `drain` runs on a thread and the caller waits by a deadline. What to tell whom is the session's (trainer.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from xfer.errors import XferError
from xfer.session import faults

if TYPE_CHECKING:
    from xfer.session.trainer import Source

LOOK_S = 0.05
"""Seconds between two looks at whether the attempt has ended meanwhile."""


class Drain:
    """One run of it, begun at once."""

    def __init__(self, source: Source, label: str):
        self._source, self._label = source, label
        self._cuda = source.device.type == "cuda"
        # Gathers are queued behind what the caller has queued: the optimizer's writes, on whatever stream he uses.
        self._stream = torch.cuda.current_stream(source.device) if self._cuda else None
        self._error: BaseException | None = None
        self._over, self._began, self.seconds = threading.Event(), time.perf_counter(), 0.0
        threading.Thread(target=self._run, name="xfer-drain", daemon=True).start()

    def _run(self) -> None:
        try:
            with ExitStack() as inside, torch.no_grad():
                if self._cuda:
                    inside.enter_context(torch.cuda.device(self._source.device))
                    inside.enter_context(torch.cuda.stream(self._stream))
                faults.point("trainer", self._source.rank, "drain")
                self._source.drain()
        except BaseException as e:
            self._error = e
        self.seconds = time.perf_counter() - self._began
        self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self, until: float, pointless: Callable[[], bool], grace_s: float) -> bool:
        """Until it is over (True) or monotonic `until`; at most `grace_s` longer once `pointless()`. What it raised is
        raised here, always as an XferError."""
        while not self._over.wait(max(0.0, min(LOOK_S, until - time.monotonic()))):
            if time.monotonic() >= until:
                return False
            if pointless():
                until, pointless = min(until, time.monotonic() + grace_s), lambda: False
        error = self._error
        if error is None:
            return True
        if isinstance(error, XferError):
            error.where = error.where or self._label
            raise error
        raise XferError(
            f"the trainer's parameters could not be made whole: {type(error).__name__}: {error}", where=self._label
        ) from error
