"""torch's `Store` over the authenticated control connection, so that communicators meet without an open key-value port.

It has what ProcessGroupGloo, ProcessGroupNCCL and agreements use: set, get, add, check, wait, delete, and a compare-and-set.
Values are addresses and NCCL ids of a few hundred bytes. The coordinator checks each key against this client's prefix
(`messages.check_store_key`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from torch.distributed import Store

from xfer.coordinator import messages as m
from xfer.rendezvous.client import SILENT, Questions


class RendezvousStore(Store):
    """A store whose keys begin with `prefix`, which names the replica and the epoch, so that only ranks of one epoch meet."""

    def __init__(
        self, questions: Questions, prefix: str, deadline_s: float, cancelled: Callable[[], bool] = lambda: False
    ):
        super().__init__()
        self._questions, self._prefix, self._seconds, self._cancelled = questions, prefix, deadline_s, cancelled

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def _ask(
        self, kind: m.StoreCall, *keys: str, value: bytes = b"", seconds: float | None = None, why: str = SILENT
    ) -> bytes:
        until = time.monotonic() + (self._seconds if seconds is None else seconds)
        ask = partial(self._call, kind, keys, value)
        what = f"{kind.value} {', '.join(keys)[:80]!r} in the store"
        return self._questions.ask(what, until, ask, cancelled=self._cancelled, why=why)[0]

    def _call(self, kind: m.StoreCall, keys: Sequence[str], value: bytes, call: int = 0) -> m.StoreAsk:
        return m.StoreAsk(kind, tuple(self._prefix + key for key in keys), value, call)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._questions.send(self._call(m.StoreCall.SET, [key], data))

    def get(self, key: str, seconds: float | None = None) -> bytes:
        return self._ask(m.StoreCall.GET, key, seconds=seconds, why="a peer did not open its data link")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(m.StoreCall.ADD, key, value=str(amount).encode()))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets the key if it does not exist, and returns the value that it then has. Only for `expected` "", as torch says that."""
        if expected:
            raise ValueError("only a key that does not exist can be compared and set")
        return self._ask(m.StoreCall.PUT, key, value=desired.encode())

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(m.StoreCall.CHECK, *keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key, None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return False  # the coordinator deletes all keys of an epoch
