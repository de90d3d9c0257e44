"""The peer route by NIXL: a destination reads host memory of its sources on any host.

A source registers its storages with NIXL, whose metadata (its address, and keys of the memory) travels in the offer. UCX, under NIXL,
reads with a network card (RDMA) if the host has one that can. Otherwise a thread of UCX in the source's process sends the requested
bytes, over TCP or shared memory. Rows of short runs, and conversions, go by p2p (`takes`). All else is as in peer_host.py.

NIXL's cancel promises nothing: bytes still arrive after it (measured). So a read that is stopped is waited for until it ends or
fails. Until then `over` is False, and the caller must not use the memory. A read is never torn down, either: UCX 1.23 over TCP aborts
a source that was stopped with requests unread when their connection closed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from xfer.errors import PeerLost
from xfer.transport import peer, peer_host

logger = logging.getLogger("xfer")
SHORTEST = 4096
"""See peer_host.py. Shorter reads cost more than a copy into a message."""
AHEAD = 4
"""Calls that a destination has under way with one source, each of up to `peer_host.BATCH_BYTES`."""
OPEN_S = 10.0
"""Seconds in which a source must answer the first read."""
WAKE_US = 10_000
"""The source's thread sleeps until UCX has an event, but no longer than this. NIXL's own choice, 0, keeps a processor busy."""
_POLL_S = 50e-6


def missing() -> str:
    """Why NIXL cannot be used here, or ""."""
    try:
        from nixl import _bindings  # noqa: F401
    except ImportError as e:
        return f"NIXL is not installed here ({e}): pip install 'xfer-refit[nixl]'"
    return ""


def takes(rows: np.ndarray) -> np.ndarray:
    """See peer_host.py."""
    return peer_host.takes(rows, SHORTEST)


class _Agent:
    """A NIXL agent with UCX, and the memory that is registered with it. Its calls raise NIXL's errors, plain Exceptions."""

    def __init__(self, serves: bool):
        from nixl import _bindings as nixl

        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, WAKE_US
        self.nixl, self.agent = nixl, nixl.nixlAgent(secrets.token_hex(8), config)
        self.ucx = [self.agent.createBackend("UCX", {})]
        self.held: dict[tuple[int, int], torch.Tensor] = {}

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        new = {(t.data_ptr(), t.nbytes): t for t in tensors if t.nbytes}
        new = {k: t for k, t in new.items() if k not in self.held}
        if new:
            self.agent.registerMem(self._table(self.nixl.nixlRegDList, [*new]), self.ucx)
            self.held |= new

    def forget(self, t: torch.Tensor) -> None:
        if self.held.pop((t.data_ptr(), t.nbytes), None) is not None:
            self.agent.deregisterMem(self._table(self.nixl.nixlRegDList, [(t.data_ptr(), t.nbytes)]), self.ucx)

    def read(self, name: str, runs: np.ndarray) -> int:
        """Begins to read these runs of `peer_host.Runs`, and returns NIXL's handle of the transfer."""
        kind = self.nixl.nixlXferDList
        local, remote = self._table(kind, runs[:, [0, 2]]), self._table(kind, runs[:, [1, 2]])
        handle = self.agent.createXferReq(self.nixl.NIXL_READ, local, remote, name, b"", self.ucx)
        self.agent.postXferReq(handle, b"")
        return handle

    def ended(self, handle: int) -> bool:
        """Whether a transfer has ended; its handle is then released. Raises if it failed."""
        try:
            if self.agent.getXferStatus(handle) == self.nixl.NIXL_IN_PROG:
                return False
        except Exception:
            self.agent.releaseXferReq(handle)
            raise
        self.agent.releaseXferReq(handle)
        return True

    def _table(self, kind: type, places: Any) -> Any:
        table = np.zeros((len(places), 3), np.uint64)  # address, bytes, device
        table[:, :2] = places
        return kind(self.nixl.DRAM_SEG, table)

    def close(self) -> None:
        """Ends all connections: from now on this process reads nothing by them, and nobody reads its memory."""
        self.agent = None

    __del__ = close  # before the memory is freed


class Export(peer_host.Export):
    """See peer_host.py. Without NIXL it offers nothing. Others may read as long as it lives."""

    def __init__(
        self, rank: int, roots: Sequence[torch.Tensor], device: torch.device, marks: torch.Tensor | None = None
    ):
        super().__init__(rank, roots, device, marks)
        self._agent: _Agent | None = None
        try:
            self._agent = _Agent(serves=True)
            self._agent.register((*self._roots, self._probe))
            probe = peer.SharedAllocation(self._agent.agent.getLocalMD(), self._probe.data_ptr(), peer.NONCE_BYTES, 0)
        except Exception as e:
            logger.warning("xfer: rank %d offers nothing by NIXL: %s", rank, missing() or e)
            probe = None
        self.offer = msgspec.structs.replace(self.offer, probe=probe)

    def _allow(self) -> None:
        pass

    def to_bytes(self) -> bytes:
        return super().to_bytes() if self.offer.probe is not None else b""

    def cut_off(self) -> bool:
        """See `peer.Export`: the memory is no longer registered."""
        if self._agent is not None:
            self._agent.close()
        self._agent = None
        return True

    def stale(self) -> list[str]:
        """See `peer.Export`."""
        return [] if self._agent is not None else ["reading by NIXL was ended"]


class Mapping(peer_host.Mapping):
    """See peer_host.py. A connection that failed is opened again by the next read."""

    def __init__(self, rank: int, device: torch.device):
        super().__init__(rank, device)
        self._metadata: dict[int, bytes] = {}
        self._into: list[torch.Tensor] = []
        self._agent: _Agent | None = None
        self._names: dict[int, str] = {}
        self._flying: list[tuple[int, int]] = []  # source, and handle of a transfer
        self._failed: dict[int, str] = {}
        self._lock = threading.Lock()
        self.until = 0.0  # deadline of reads that have no other one

    def open(self, data: bytes, rank: int, wanted: Sequence[int]) -> None:
        """See `peer.Mapping`."""
        offer = peer._decode(data, peer.Offer, rank)
        self._metadata[rank], self.until = offer.probe.handle if offer.probe else b"", time.monotonic() + OPEN_S
        super().open(data, rank, wanted)
        if self._flying:  # a source that does not answer; no other read is under way
            self._hang_up()

    def own(self, roots: Sequence[torch.Tensor], wanted: Sequence[int]) -> None:
        """Nothing: this rank copies its own storages without NIXL."""

    def read_to(self, roots: Iterable[torch.Tensor]) -> None:
        """Tells into which storages `read` will read."""
        self._into += roots
        if self._agent is not None:
            self._agent.register(self._into)

    def _read_at(self, rank: int, address: int, into: torch.Tensor) -> None:
        agent = self._opened()
        agent.register([into])
        super()._read_at(rank, address, into)
        agent.forget(into)

    def read(self, calls: Sequence[peer_host.Runs], check: Callable[[], None] | None = None, where: str = "") -> None:
        """See peer_host.py. Several calls are under way at each source at once.

        Raises:
            PeerLost: The memory of a source is gone. With drained=False: bytes may still arrive.
        """
        waiting: dict[int, deque[peer_host.Runs]] = {}
        for c in calls:
            waiting.setdefault(c.sender, deque()).append(c)
        try:
            agent = self._opened()
            while any(waiting.values()) or self._flying:
                (check or self._in_time)()
                for sender, some in waiting.items():
                    while some and sum(s == sender for s, _ in self._flying) < AHEAD:
                        self._begin(agent, sender, some.popleft())
                if not self._poll():
                    time.sleep(_POLL_S)
                for sender, why in self._failed.items():
                    raise peer_host.lost(sender, f"by NIXL: {why}", where)
        except BaseException:
            until = time.monotonic() + peer.DRAIN_S
            while not self.over():
                if time.monotonic() > until:
                    raise PeerLost("reads by NIXL do not end", where=where, drained=False) from None
                time.sleep(_POLL_S)
            raise

    def over(self) -> bool:
        """See peer_host.py. False after a `read` that raised with drained=False, until what it has begun has ended."""
        self._poll()
        if self._flying:
            return False
        if self._failed:
            self._hang_up()
        return True

    def close(self) -> None:
        super().close()
        self._hang_up()
        self._metadata, self._into = {}, []

    def _hang_up(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._agent, self._flying, self._failed = None, [], {}

    def _opened(self) -> _Agent:
        if self._agent is None:
            try:
                agent = _Agent(serves=False)
                agent.register(self._into)
            except Exception as e:
                raise PeerLost(missing() or f"NIXL cannot start here: {e}") from None
            self._agent, self._names = agent, {}
        return self._agent

    def _in_time(self) -> None:
        if time.monotonic() > self.until:
            raise PeerLost("NIXL did not read it in time")

    def _begin(self, agent: _Agent, sender: int, call: peer_host.Runs) -> None:
        try:
            if sender not in self._names:
                self._names[sender] = agent.agent.loadRemoteMD(self._metadata[sender]).decode()
            self._flying.append((sender, agent.read(self._names[sender], call.runs)))
        except Exception as e:
            self._failed[sender] = str(e)

    def _poll(self) -> bool:
        """Looks at what is under way. Returns whether something has ended."""
        with self._lock:
            before, agent = self._flying, self._agent
            self._flying = [x for x in before if agent is not None and not self._ended(agent, *x)]
            return len(self._flying) < len(before)

    def _ended(self, agent: _Agent, sender: int, handle: int) -> bool:
        try:
            return agent.ended(handle)
        except Exception as e:
            self._failed[sender] = str(e)
            return True


class Pull(peer_host.Pull):
    """See peer_host.py."""

    _mapping: Mapping

    def __init__(self, rows: np.ndarray, mapping: Mapping, roots: Sequence[torch.Tensor], **how: Any):
        mapping.read_to(roots[i] for i in sorted(set(rows["dst_root"].tolist())))
        super().__init__(rows, mapping, roots, **how)

    def choose(self, base: int, deadline: float) -> None:
        """See `peer.Pull`."""
        self._mapping.until = deadline
        super().choose(base, deadline)
