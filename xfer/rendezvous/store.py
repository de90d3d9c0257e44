"""torch's `Store` over the authenticated control connection, so that communicators meet without an open key-value port.

It has what ProcessGroupGloo, ProcessGroupNCCL and agreements use: set, get, add, check, wait, delete, and a compare-and-set.
Values are addresses and NCCL ids of a few hundred bytes. The coordinator checks each key against this client's prefix
(`messages.check_store_key`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from xfer.coordinator import messages as m
from xfer.errors import DeadlineExceeded, PeerLost
from xfer.rendezvous.channel import Channel

SILENT = "trainer 0: its process, which has the rendezvous in it, does not answer"
"""Why no answer came in time to a question that the coordinator answers at once."""


class Replies:
    """Replies to store calls. The reader thread puts them, the callers wait for them."""

    def __init__(self) -> None:
        self._lock, self._ready = threading.Lock(), threading.Condition()
        self._next, self._closed = 0, ""
        self._answers: dict[int, m.StoreReply] = {}

    def ticket(self) -> int:
        """Return the number of a new call."""
        with self._lock:
            self._next += 1
            return self._next

    def put(self, reply: m.StoreReply) -> None:
        with self._ready:
            self._answers[reply.call] = reply
            self._ready.notify_all()

    def close(self, reason: str) -> None:
        with self._ready:
            self._closed = reason or "closed"
            self._ready.notify_all()

    def wait(
        self, call: int, until: float, what: str, cancelled: Callable[[], bool] = lambda: False, why: str = SILENT
    ) -> m.StoreReply:
        """Return the reply to a call. `why`: the likely reason if none comes in time.

        Raises:
            PeerLost: the coordinator is gone, or `cancelled` returned True.
            DeadlineExceeded: no reply came by monotonic `until`.
        """
        with self._ready:
            while call not in self._answers:
                left = until - time.monotonic()
                if self._closed:
                    raise PeerLost(f"the rendezvous is gone while waiting for {what}: {self._closed}")
                if cancelled():
                    raise PeerLost(f"cancelled while waiting for {what}")
                if left <= 0:
                    raise DeadlineExceeded(f"{what} did not appear in time", [why])
                self._ready.wait(min(left, 0.2))
            return self._answers.pop(call)


class RendezvousStore(Store):
    """A store whose keys begin with `prefix`, which names the replica and the epoch, so that only ranks of one epoch meet."""

    def __init__(
        self,
        channel: Channel,
        replies: Replies,
        prefix: str,
        deadline_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        super().__init__()
        self._channel, self._replies, self._prefix = channel, replies, prefix
        self._seconds, self._cancelled = deadline_s, cancelled

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def _ask(
        self, make: Callable[[int], m.Message], what: str, seconds: float | None = None, why: str = SILENT
    ) -> m.StoreReply:
        call = self._replies.ticket()
        self._channel.send(make(call))
        until = time.monotonic() + (self._seconds if seconds is None else seconds)
        return self._replies.wait(call, until, what, self._cancelled, why)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._channel.send(m.StoreSet(self._prefix + key, data))

    def _get(self, key: str, seconds: float | None = None) -> bytes:
        why = "a peer did not open its data link"
        return self._ask(lambda c: m.StoreGet(c, self._prefix + key), f"store key {key!r}", seconds, why).value

    def get(self, key: str) -> bytes:
        return self._get(key)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda c: m.StoreAdd(c, self._prefix + key, amount), f"store counter {key!r}").value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets the key if it does not exist, and returns the value that it then has. Only for `expected` "", as torch says that."""
        if expected:
            raise ValueError("only a key that does not exist can be compared and set")
        data = desired.encode()
        return self._ask(lambda c: m.StoreCompareSet(c, self._prefix + key, data), f"store key {key!r}").value

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda c: m.StoreCheck(c, tuple(self._prefix + k for k in keys)), "store check").flag

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._get(key, None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return False  # the coordinator deletes all keys of an epoch
