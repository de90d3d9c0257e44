"""How the ranks of a process group tell each other a few bytes: through memory, where they share a host, else over the group.

A collective of the group takes 0.2 ms over gloo, as long as moving a small tensor. Not here: what ranks say (dtensor.py), and when
(dtensor_routes.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import sys
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import torch

from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_SAID_BYTES = 64 << 20
SHORT_BYTES = 64
"""Most bytes that go through memory."""
EAGER_S = 0.5e-3
"""Ranks that meet look for each other without a pause for so long."""
LONGEST_PAUSE_S = 1e-3
_STAMP = struct.Struct("<Q16s")
"""Number of the exchange, and a digest of it and the bytes: they may become visible in any order."""
_SLOT = _STAMP.size + SHORT_BYTES


class RankExchange:
    """All-gathers of bytes in a process group. All ranks call the same methods in the same order."""

    def __init__(self, group: ProcessGroup):
        self.rank, self.size = group.rank(), group.size()
        self._group = weakref.ref(group)
        self._pages: list[_Page] = []  # by rank, once all ranks have those of all others
        self._turn = 0

    @property
    def group(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise PeerLost("the process group was destroyed", where=f"rank {self.rank}")
        return group

    def exchange(self, data: bytes, deadline: float) -> list[bytes]:
        """Gather bytes from every rank, by rank.

        Args:
            data: Bytes of this rank, equally many on all ranks.
            deadline: A time.monotonic() value.

        Raises:
            DeadlineExceeded: Some ranks did not come.
            PeerLost: A rank is gone.
        """
        if self._pages and len(data) <= SHORT_BYTES:
            return self._through_memory(data, deadline)
        return self._over_group(data, deadline)

    def some_rank(self, yes: bool, deadline: float) -> bool:
        """Return whether some rank passes True; equal on all ranks."""
        return any(any(said) for said in self.exchange(bytes([yes]), deadline))

    def gather(self, data: bytes, deadline: float) -> list[bytes]:
        """Gather bytes of any length from every rank, by rank."""
        sizes = [int.from_bytes(n, "little") for n in self.exchange(len(data).to_bytes(8, "little"), deadline)]
        if max(sizes) > MAX_SAID_BYTES:
            raise ProtocolError(f"a rank sends {max(sizes)} bytes, at most {MAX_SAID_BYTES} are read")
        return [d[:n] for d, n in zip(self.exchange(data.ljust(max(*sizes, 1), b"\0"), deadline), sizes)]

    def share_memory(self, deadline: float) -> None:
        """Exchange short bytes through memory from now on, if all ranks can read each other's. Collective."""
        if self._pages or sys.platform != "linux":
            return
        mine = _Page.new()
        pages = [mine if r == self.rank else _Page.of(d) for r, d in enumerate(self.gather(mine.place, deadline))]
        if not self.some_rank(None in pages, deadline):
            self._pages = [p for p in pages if p is not None]

    def _through_memory(self, data: bytes, deadline: float) -> list[bytes]:
        # Two slots in turn: when a rank writes one again, all ranks have written the other one, and so have read this one.
        self._turn += 1
        at = self._turn % 2 * _SLOT
        self._pages[self.rank].memory[at : at + _STAMP.size + len(data)] = _stamped(self._turn, data)
        out: dict[int, bytes] = {}
        for pause in _pauses(deadline, self.rank):
            for rank in {*range(self.size)} - out.keys():
                gone = pause >= LONGEST_PAUSE_S and self._pages[rank].abandoned()
                seen = self._pages[rank].memory[at : at + _STAMP.size + len(data)]
                if seen == _stamped(self._turn, seen[_STAMP.size :]):
                    out[rank] = seen[_STAMP.size :]
                elif gone:
                    raise PeerLost(f"rank {rank} of the group is gone", where=f"rank {self.rank}")
            if len(out) == self.size:
                break
        return [out[rank] for rank in range(self.size)]

    def _over_group(self, data: bytes, deadline: float) -> list[bytes]:
        kinds = {d.type for d in self.group._device_types}
        device = "cpu" if "cpu" in kinds or not kinds else kinds.pop()
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = self.group.allgather([everyone], [mine])
            for _ in _pauses(deadline, self.rank):
                if work.is_completed():
                    break
            work.wait()
        except RuntimeError as e:
            raise PeerLost(f"a rank of the group is gone: {str(e).splitlines()[0]}", where=f"rank {self.rank}") from e
        return [bytes(t.numpy()) for t in torch.stack(everyone).cpu()]


def digest(*data: bytes) -> bytes:
    return hashlib.blake2b(b"".join(data), digest_size=16).digest()


def _stamped(turn: int, data: bytes) -> bytes:
    return _STAMP.pack(turn, digest(turn.to_bytes(8, "little"), data)) + data


def _pauses(deadline: float, rank: int) -> Iterator[float]:
    """Yield the length of each pause, without one first: none for ranks that are there, little work for ranks that are late."""
    began, pause = time.monotonic(), 0.0
    while True:
        yield pause
        now = time.monotonic()
        if now > deadline:
            raise DeadlineExceeded("not all ranks of the group entered xferdtensor in time", where=f"rank {rank}")
        if now - began > EAGER_S:
            pause = min(max(1e-5, 2 * pause), LONGEST_PAUSE_S)
        time.sleep(pause)


class _Page:
    """Memory that one rank writes and the others read. The writer holds a lock on it, which ends with its process."""

    def __init__(self, fd: int, place: bytes, access: int):
        self.place, self._fd = place, fd
        weakref.finalize(self, os.close, fd)
        self.memory = mmap.mmap(fd, 2 * _SLOT, access=access)

    @classmethod
    def new(cls) -> _Page:
        fd = os.memfd_create("xferdtensor")
        nonce = os.urandom(16)
        os.pwrite(fd, nonce.ljust(2 * _SLOT, b"\0"), 0)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return cls(fd, msgspec.msgpack.encode((os.getpid(), fd, nonce)), mmap.ACCESS_WRITE)

    @classmethod
    def of(cls, place: bytes) -> _Page | None:
        """The page of another rank; None if it lies on another host or must not be read."""
        pid, fd, nonce = msgspec.msgpack.decode(place, type=tuple[int, int, bytes])
        try:
            page = cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY), place, mmap.ACCESS_READ)
        except (OSError, ValueError):  # no such file, or a shorter one
            return None
        return page if page.memory[: len(nonce)] == nonce else None

    def abandoned(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
