"""`vllm serve` processes as replicas: who controls them, and how one that was started again comes back.

Lives in trainer rank 0, as `connect(engines=[url, …])` makes it. A controller ends with its server; when something answers
at that URL again it needs a new one, and the next refit brings that server to the current version.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import xfer
from examples.grpo.client import DIRECT
from xfer.errors import DeadlineExceeded
from xfer.participants.controller import Controller


class Replicas:
    """`controllers`: those of `Session.controllers`, in the order of `urls`."""

    def __init__(self, urls: Sequence[str], controllers: Sequence[Controller], rendezvous: str, token: str):
        self.urls, self.rendezvous, self._token = tuple(urls), rendezvous, token
        self.controllers = list(controllers)
        self._own: list[Controller] = []

    def rejoin(self, timeout_s: float = 60.0) -> list[int]:
        """Take back what has died and answers again; call it before a refit. Which replicas joined."""
        joined = []
        for i, (url, old) in enumerate(zip(self.urls, self.controllers)):
            if old.error is None or old.torn or not healthy(url):
                continue  # it serves, or the next refit mends it, or nobody is there
            old.close()
            new = self.controllers[i] = xfer.serve(url, rendezvous=self.rendezvous, token=self._token, replica=i)
            self._own.append(new)
            try:
                new.wait_ready(timeout_s)
                joined.append(i)
            except xfer.XferError as e:
                print(f"replica {i} did not rejoin: {e}", file=sys.stderr, flush=True)
        return joined

    def close(self) -> None:
        for c in self._own:
            c.close()


def wait_healthy(urls: Sequence[str], deadline_s: float = 600.0) -> None:
    """Until all answer, so that those that do not are named before anything else begins. DeadlineExceeded."""
    end = time.monotonic() + deadline_s
    while missing := [url for url in urls if not healthy(url)]:
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"not all servers answered within {deadline_s:.0f} s", [f"{u}/health" for u in missing]
            )
        time.sleep(0.5)


def healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
