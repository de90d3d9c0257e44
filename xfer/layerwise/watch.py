"""Deadlines of what is on its way over NCCL, where no wait blocks the host: a thread looks whether it has arrived, and does
something about it when it has not in time.

A kernel that waits for a rank that is gone holds every later operation of its stream, so the process hangs in whatever
call of the user's next asks the device for a value. Only another thread can then free it, and one that has not to ask the
device either. What arrived is therefore read from a number in host memory. Who writes it, and what freeing means, is
wire.py's to say; this file knows numbers and times only.
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
    """One collective. number: of the first it is 1. what: describes it, when somebody asks. until: a time.monotonic() value.
    received: flat uint8, where bytes of others arrive."""

    number: int
    what: Callable[[], str]
    until: float
    received: Sequence[torch.Tensor]


class Watch:
    """deadline_s: for each collective, from its start. arrived: how many have come to their end; they end in the order of
    their starts. expire: called once, on the watching thread, with all that have not arrived when one of them is late;
    nothing is watched after that."""

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
        """To be called before the collective is started, for that may block as well."""
        with self._change:
            self._posted += 1
            post = Post(self._posted, what, time.monotonic() + self._deadline_s, received)
            self._posts.append(post)
            if len(self._posts) == 1:
                self._change.notify()
        return post

    def missing(self) -> list[Post]:
        """What was posted and had not arrived when somebody last looked."""
        with self._change:
            return list(self._posts)

    def close(self) -> None:
        """Watch no more. `expire` is not called afterwards, and has returned if it was called."""
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
