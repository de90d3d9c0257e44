"""Several ranks as threads of one process, each with its own gloo group: real sockets, no start-up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store


class MemoryStore(Store):
    """A store of this process, in plain Python."""

    def __init__(self, seconds: float = 20.0):
        super().__init__()
        self._data: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._seconds = seconds

    def set(self, key, value):
        with self._changed:
            self._data[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key):
        self.wait([key])
        return self._data[key]

    def add(self, key, amount):
        with self._changed:
            new = int(self._data.get(key, b"0")) + amount
            self._data[key] = str(new).encode()
            self._changed.notify_all()
            return new

    def check(self, keys):
        return all(k in self._data for k in keys)

    def wait(self, keys, timeout: timedelta | None = None):
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), seconds):
                raise RuntimeError(f"timeout: {keys} not set within {seconds} s")

    def delete_key(self, key):
        return self._data.pop(key, None) is not None


def run_ranks(size: int, rank: Callable[[int], object], seconds: float = 60.0) -> list:
    """`rank(r)` in a thread for every r: results, or the exceptions raised. Fails when a thread does not end."""
    out: list = [None] * size

    def main(r: int) -> None:
        try:
            out[r] = rank(r)
        except BaseException as e:
            out[r] = e

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(seconds)
    stuck = [r for r, t in enumerate(threads) if t.is_alive()]
    assert not stuck, f"ranks {stuck} did not end within {seconds} s"
    return out


def all_good(results: list) -> list:
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results
