"""What a source does together with other ranks, run so that it cannot keep its caller: nothing interrupts a collective.

A drain ends, with parameter gathers in flight, when all data-parallel peers call too; a layout that is probed is read by
all ranks in step. A rank that does not come would hold the others for ever; so these run on a thread, and the caller waits
by a deadline. What to tell whom is the session's (trainer.py, refit.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from xfer.errors import DeadlineExceeded, XferError
from xfer.participants import faults

if TYPE_CHECKING:
    from xfer.participants.trainer import Source

T = TypeVar("T")
LOOK_S = 0.05
"""Seconds between two looks at whether waiting still makes sense."""


class Aside(Generic[T]):
    """One run of `call`, begun at once. `what`: what went wrong if it raises something foreign, for its message. `begun`: is given
    this before it runs, for whoever has to know of it however its making ends: starting a thread can be interrupted."""

    def __init__(
        self,
        call: Callable[[], T],
        device: torch.device,
        label: str,
        what: str,
        begun: Callable[[Aside], None] = lambda _: None,
    ):
        self._call, self._device, self._label, self._what = call, device, label, what
        # What is launched there is queued behind what the caller has queued (the optimizer's writes), on his stream.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._error: BaseException | None = None
        self.result: T | None = None
        self._over, self._began, self.seconds = threading.Event(), time.perf_counter(), 0.0
        self._first = (
            threading.Lock()
        )  # taken by the thread as it begins, or by who gave up on it before: then it never does
        try:
            begun(self)
            threading.Thread(target=self._run, name="xfer-aside", daemon=True).start()
        except BaseException:
            if self._first.acquire(blocking=False):
                self._over.set()
            raise

    def _run(self) -> None:
        if not self._first.acquire(blocking=False):
            return
        try:
            with ExitStack() as inside, torch.no_grad():
                if self._stream is not None:
                    inside.enter_context(torch.cuda.device(self._device))
                    inside.enter_context(torch.cuda.stream(self._stream))
                self.result = self._call()
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
        raise XferError(f"{self._what}: {type(error).__name__}: {error}", where=self._label) from error


def refuse_running(some: Iterable[Aside | None], until: float, label: str) -> None:
    """DeadlineExceeded when one of these still runs at monotonic `until`: it reads or writes what its rank is about to let go of."""
    for aside in some:
        if aside is None:
            continue
        with suppress(XferError):  # whose call has told it
            aside.wait(until, lambda: False, 0.0)
        if not aside.over:
            raise DeadlineExceeded(
                "what an earlier refit began has not ended, and uses this rank's parameters",
                ["other ranks take part in it, and one has not done its part yet: call again when it has"],
                where=label,
            )


class Drain(Aside[None]):
    def __init__(self, source: Source, label: str, begun: Callable[[Aside], None] = lambda _: None):
        def drain() -> None:
            faults.point("trainer", source.rank, "drain")
            source.drain()

        super().__init__(drain, source.device, label, "the trainer's parameters could not be made whole", begun)
