"""A double of transport/peer.py for worlds whose ranks are threads of one process.

It stands in for CUDA IPC, which this machine lacks, and nothing else: splitting, sessions and rows are the real ones. A
mapping holds the source's own tensors; what the real one would get wrong silently is an error here. `Hold` stops a pull in
the middle.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref

import msgspec
import numpy as np
import pytest

from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.kernels import bind
from xfer.plan.program import row_wire_bytes
from xfer.transport import peer, routes
from xfer.transport.group import Aborted

OFFERED: weakref.WeakValueDictionary[int, Export] = weakref.WeakValueDictionary()
MAPPED: set[int] = set()
"""Numbers of mappings that are open."""
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


takes = peer.takes


class Export:
    def __init__(self, rank, roots, device):
        self.rank, self._roots = rank, roots
        self.number, self.forced = next(_numbers), False
        OFFERED[self.number] = self

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.number)

    def stale(self) -> list[str]:
        return ["new memory at the old address"] if self.forced else []


class Mapping(peer.Mapping):
    def __init__(self, rank, device):
        super().__init__(rank, device)
        self.number = next(_numbers)

    def open(self, data, rank, wanted) -> None:
        offer = OFFERED.get(msgspec.msgpack.decode(data, type=int))
        if offer is None:  # as of real ones, whose probe does not hold its nonce any more
            self.roots[rank], self._why[rank] = {}, "the offer is gone"
            return
        assert offer.rank == rank
        MAPPED.add(self.number)
        self.roots[rank] = {}
        for i in wanted:
            if (rank, i) in REFUSED:
                self._why[rank] = f"storage {i}: refused by the test"
            else:
                self.roots[rank][i] = offer._roots[i]

    def close(self) -> None:
        MAPPED.discard(self.number)
        self.roots = {}


REFUSED: set[tuple[int, int]] = set()
"""(source rank, storage) that cannot be mapped."""


class Pull:
    def __init__(self, rows, mapping, roots, gate=None, read_too=False, summed=None):
        self.mapping, self.rows, self._gate, self._broke = mapping, rows, gate, None
        self._thread, self._done = None, False
        known = sorted((a, b) for a, some in mapping.roots.items() for b in some)
        number = {pair: i for i, pair in enumerate(known)}
        rows = rows.copy()
        rows["src_root"] = [number[a, b] for a, b in zip(rows["src"].tolist(), rows["src_root"].tolist())]
        sources = [mapping.roots[a][b] for a, b in known]
        part = (2 * np.arange(len(rows)) // max(1, len(rows))) if gate is None else rows["wave"]
        self._waves = sorted(set(part.tolist()))
        self._parts = [bind(rows[part == w], roots, "local", src_roots=sources) for w in self._waves]
        self.extra_bytes = 0
        self.nbytes = int(row_wire_bytes(rows).sum())

    def begin(self) -> None:
        assert self.mapping.number in MAPPED, "a pull through a mapping that was closed"
        self._stopped, self._done, self._broke, self._began = False, False, None, time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for k, (wave, part) in enumerate(zip(self._waves, self._parts)):
                if self._gate is not None:
                    self._gate.before(wave, None)
                if self._stopped:
                    return
                part.copy()
                if self._gate is not None:
                    self._gate.after(wave, None)
                if not k:
                    Hold.reached.set()
                    while Hold.held.is_set() and (Hold.deaf or not self._stopped):
                        time.sleep(0.001)
            self._done = not self._stopped
        except XferError as e:
            self._broke = e

    def stop(self) -> None:
        self._stopped = True
        if self._gate is not None:
            self._gate.open()

    def over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish(self, deadline, cancelled=lambda: False, where=""):
        while self._thread is not None and self._thread.is_alive():
            late = time.monotonic() > deadline
            if late or cancelled():
                self.stop()
                self._thread.join(0.3)
                if self._thread.is_alive():
                    raise PeerLost("a pull does not leave", where=where, drained=False)
                raise (DeadlineExceeded if late else Aborted)("the pull was ended", where=where)
            time.sleep(0.001)
        if self._broke is not None:
            raise self._broke
        if not self._done:
            raise Aborted("the pull was stopped here", where=where)
        return peer.PullStats(self.nbytes, (), 0.0, time.perf_counter() - self._began)


@pytest.fixture
def peers(monkeypatch):
    """Workers of a World pull through this double."""
    monkeypatch.setitem(routes.PEERS, "cpu", sys.modules[__name__])
    monkeypatch.setattr("tests.support.world.HOST_PULL", True)
    for state in (Hold, REFUSED, MAPPED):
        state.clear()
    yield
    Hold.clear()
