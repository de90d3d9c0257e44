"""Several ranks as threads of one process, each with its own gloo group: real sockets, no start-up."""

import copy
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import HashStore


def soon(seconds: float = 20.0) -> float:
    """A deadline that nothing here reaches unless it hangs."""
    return time.monotonic() + seconds


def memory_store(seconds: float = 20.0) -> HashStore:
    """A store of this process, whose waits end after `seconds`."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    return store


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


class Gather:
    """An all-gather between ranks that are threads, as often as they call."""

    def __init__(self, ranks: int, seconds: float = 20.0):
        self._given: list = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=seconds)

    def __call__(self, rank: int, mine: object) -> list:
        """Copies of what all ranks gave. Raises BrokenBarrierError where one of them does not come."""
        self._given[rank] = copy.deepcopy(mine)
        self._barrier.wait()
        got = copy.deepcopy(self._given)
        self._barrier.wait()
        return got
