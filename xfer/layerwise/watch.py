"""Deadlines of collectives over NCCL, where no wait blocks the host: a thread looks whether they have arrived, and calls back when one
is late.

A kernel that waits for a rank that is gone holds every later operation of its stream, so the process hangs in the next call
that asks the device for a value. Only another thread can then free it, and that thread may not ask the device either. So it
reads from a number in host memory how many collectives have arrived. wire.py writes that number and frees the process; this file
knows only numbers and times.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

POLL_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """One collective. number: 1 for the first. what: describes it in an error. until: a time.monotonic() value. received: flat uint8
    tensors in which bytes of other ranks arrive."""

    number: int
    what: Callable[[], str]
    until: float
    received: Sequence[torch.Tensor]


class DeadlineWatch:
    """Watches collectives from a thread of its own.

    Args:
        deadline_s: Seconds from the start of a collective to its end.
        arrived: Returns how many have ended; they end in the order in which they started.
        expire: Called once, on the watching thread, with all collectives that have not arrived when one of them is late. Nothing
            is watched after that.
    """

    def __init__(self, deadline_s: float, arrived: Callable[[], int], expire: Callable[[list[Post]], None]):
        self._deadline_s, self._arrived, self._expire = deadline_s, arrived, expire
        self._poll_s = min(POLL_S, deadline_s / 20)
        self._posts: deque[Post] = deque()
        self._posted = 0
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="xfer-layerwise-watch", daemon=True)
        self._thread.start()

    def post(self, what: Callable[[], str], received: Sequence[torch.Tensor] = ()) -> Post:
        """Call it before the collective starts, because the start may block as well."""
        with self._change:
            self._posted += 1
            post = Post(self._posted, what, time.monotonic() + self._deadline_s, received)
            self._posts.append(post)
            if len(self._posts) == 1:
                self._change.notify()
        return post

    def missing(self) -> list[Post]:
        """The collectives that were posted and had not arrived at the last look."""
        with self._change:
            return list(self._posts)

    def close(self) -> None:
        """Stops watching. `expire` is not called afterwards, and has returned if it was called."""
        with self._change:
            self._closed = True
            self._change.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._posts)
                if self._closed:
                    return
                now, here = time.monotonic(), self._arrived()  # in this order: what is late has really not arrived
                while self._posts and self._posts[0].number <= here:
                    self._posts.popleft()
                missing = list(self._posts) if any(p.until <= now for p in self._posts) else []
            if missing:
                self._expire(missing)
                return
            with self._change:
                self._change.wait_for(lambda: self._closed, timeout=self._poll_s)
