"""The peer route for host memory as GPUs have it: a pull runs beside its caller, and a source may refuse single storages.

What reads, and what it reads, is the real peer_host. `Hold` stops a pull in the middle.
"""

from __future__ import annotations

import sys
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest

from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.plan.program import Op
from xfer.transport import peer_host, routes
from xfer.transport.group import Aborted

MAPPED: set[int] = set()
"""Numbers of mappings that are open."""
REFUSED: set[tuple[int, int]] = set()
"""(source rank, storage) that cannot be mapped."""
_numbers = iter(range(1, 1 << 30))


class Hold:
    """While `held` is set, pulls wait in the middle; if `deaf`, they ignore stop() too."""

    held, deaf, reached = threading.Event(), False, threading.Event()

    @classmethod
    def begin(cls, deaf: bool = False) -> None:
        cls.clear()
        cls.deaf = deaf
        cls.held.set()

    @classmethod
    def clear(cls) -> None:
        cls.held.clear()
        cls.reached.clear()
        cls.deaf = False


def takes(rows: np.ndarray) -> np.ndarray:
    """Short runs too."""
    return (rows["op"] == Op.COPY) & (rows["src_dtype"] == rows["dst_dtype"])


class Export(peer_host.Export):
    forced = False

    def stale(self) -> list[str]:
        return ["new memory at the old address"] if self.forced else []


class Mapping(peer_host.Mapping):
    def __init__(self, rank, device):
        super().__init__(rank, device)
        self.number = next(_numbers)

    def open(self, data, rank, wanted) -> None:
        refused = [i for i in wanted if (rank, i) in REFUSED]
        super().open(data, rank, [i for i in wanted if i not in refused])
        if rank in self.pids:
            MAPPED.add(self.number)
        for i in refused:
            self._why[rank] = f"storage {i}: refused by the test"

    def close(self) -> None:
        MAPPED.discard(self.number)
        super().close()


class Middle:
    """A gate after whose first wave a pull is held; `gate` is that of the caller."""

    def __init__(self, pull: Pull, gate):
        self.pull, self.gate, self.first = pull, gate or Mock(), None

    def before(self, wave, stream) -> None:
        self.first = wave if self.first is None else self.first
        self.gate.before(wave, stream)

    def after(self, wave, stream) -> None:
        self.gate.after(wave, stream)
        if wave == self.first:
            Hold.reached.set()
            while Hold.held.is_set() and (Hold.deaf or not self.pull._stopped):
                time.sleep(0.001)

    def open(self) -> None:
        self.gate.open()


class Pull(peer_host.Pull):
    _thread = _result = None

    def __init__(self, rows, mapping, roots, gate=None, **more):
        if gate is None:
            rows = rows.copy()
            rows["wave"] = 2 * np.arange(len(rows)) // max(1, len(rows))
        super().__init__(rows, mapping, roots, gate=Middle(self, gate), **more)
        self.mapping, self.rows = mapping, rows

    def begin(self) -> None:
        assert self.mapping.number in MAPPED, "a pull through a mapping that was closed"
        super().begin()
        self._gate.first = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = super().finish(float("inf"))
        except XferError as e:
            self._result = e

    def over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish(self, deadline, cancelled=lambda: False, where=""):
        while not self.over():
            late = time.monotonic() > deadline
            if late or cancelled():
                self.stop()
                self._thread.join(0.3)
                if not self.over():
                    raise PeerLost("a pull does not leave", where=where, drained=False)
                raise (DeadlineExceeded if late else Aborted)("the pull was ended", where=where)
            time.sleep(0.001)
        if isinstance(self._result, XferError):
            raise self._result
        return self._result


@pytest.fixture
def peers(monkeypatch):
    """Workers of a World pull through this double."""
    monkeypatch.setitem(routes.PEERS, "cpu", sys.modules[__name__])
    monkeypatch.setattr("tests.support.world.HOST_PULL", True)
    for state in (Hold, REFUSED, MAPPED):
        state.clear()
    yield
    Hold.clear()
