"""The peer route for host memory: a destination reads the memory of source processes on the same host.

The kernel copies each byte once (process_vm_readv), from its source to its final place, also for columns of a matrix. A socket
would copy it twice, and a buffer a third time. It works on Linux where the kernel lets one process read another (same user;
containers and ptrace_scope may forbid it). A probe finds that out; rows that cannot be read go by p2p, and so do conversions and
rows of scattered bytes (`takes`). Calls and messages are those of peer.py, which does the same for GPUs. peer_rdma.py reads by NIXL
instead of the kernel, and from other hosts too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import torch

from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError, RebindError, XferError
from xfer.kernels.bits import GRANULE
from xfer.kernels.strided import moves
from xfer.kernels.torch_impl import _check as check_rows
from xfer.plan.program import ITEM, MAX_DIMS, Op, row_wire_bytes
from xfer.transport import peer
from xfer.transport.group import Aborted
from xfer.transport.peer import NONCE_BYTES, Offer, PullStats, SharedAllocation, StoragePlace

SHORTEST = 512
"""Fewest bytes that must lie together on both ends. Each such run is an entry of the kernel's tables."""
PAYS = 0.5
"""If a larger share of the granules is marked, all bytes are read."""
RUNS, BATCH_BYTES = 1024, 8 << 20
"""Most runs (the kernel's limit) and about the most bytes of one call. A pull can be stopped between calls."""


def takes(rows: np.ndarray, shortest: int | None = None) -> np.ndarray:
    """The rows (bool array) that a destination can pull if it can read their storages. `shortest`: instead of SHORTEST."""
    run = ITEM[rows["dst_dtype"]]
    open_ = np.ones(len(rows), bool)
    for d in reversed(range(MAX_DIMS)):
        n = rows["extent"][:, d]
        together = (n == 1) | ((rows["src_strides"][:, d] == run) & (rows["dst_strides"][:, d] == run))
        open_ &= together
        run = np.where(open_, run * n, run)
    return (
        (rows["op"] == Op.COPY) & (rows["src_dtype"] == rows["dst_dtype"]) & (open_ | (run >= (shortest or SHORTEST)))
    )


class Export:
    """Offers the storages of a source, and their marks if it has some. Holds all of these, so that their addresses stay valid."""

    def __init__(
        self, rank: int, roots: Sequence[torch.Tensor], device: torch.device, marks: torch.Tensor | None = None
    ):
        self.rank, self._roots = rank, (*roots, *(() if marks is None else (marks,)))
        self._probe = torch.frombuffer(bytearray(secrets.token_bytes(NONCE_BYTES)), dtype=torch.uint8)
        some = (*self._roots, self._probe)
        self.offer = Offer(
            peer.WIRE_VERSION, rank, *peer.this_process(), bytes(self._probe.numpy()),
            SharedAllocation(b"", self._probe.data_ptr(), NONCE_BYTES, 0),
            tuple(SharedAllocation(b"", t.data_ptr(), t.numel(), 0) for t in some),
            tuple(StoragePlace(i, 0, t.numel()) for i, t in enumerate(some)), "", marks is not None,
        )  # fmt: skip
        self._allow()

    def _allow(self) -> None:
        _allow()

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.offer)

    def cut_off(self) -> bool:
        """See `peer.Export`."""
        return False

    def stale(self) -> list[str]:
        """Always empty, since `_roots` are held. The session finds out if a parameter has another storage."""
        return []


class Mapping(peer.OpenedRoots[tuple[int, int]]):
    """Storages that a destination may read. `roots[rank][i]`: (address, bytes) of storage i of that source."""

    def __init__(self, rank: int, device: torch.device):
        super().__init__(rank, device)
        self.pids: dict[int, int] = {}

    def open(self, data: bytes, rank: int, wanted: Sequence[int]) -> None:
        """See `peer.Mapping`."""
        offer = peer._decode(data, Offer, rank)
        found = self.roots.setdefault(rank, {})
        if len(offer.places) != len(offer.allocations) or not offer.places:
            raise ProtocolError(f"rank {rank} offers {len(offer.allocations)} storages at {len(offer.places)} places")
        seen = torch.empty(NONCE_BYTES, dtype=torch.uint8)
        self.pids[rank] = offer.pid
        try:
            self._read_at(rank, offer.allocations[-1].base, seen)
            if bytes(seen.numpy()) != offer.nonce:
                raise PeerLost("its probe does not hold its nonce: this is another process's memory")
        except PeerLost as e:
            del self.pids[rank]
            self._why[rank] = f"its memory cannot be read from here: {'; '.join(e.violations) or e.message}"
            return
        for root in wanted:
            if not 0 <= root < offer.storages:
                raise ProtocolError(f"rank {rank} offers {offer.storages} storages, storage {root} is asked for")
            found[root] = (offer.allocations[root].base, offer.allocations[root].nbytes)
        if offer.marked:
            marks = offer.allocations[-2]
            self.marks[rank] = peer.marks_of(rank, (marks.base, marks.nbytes), offer)

    def own(self, roots: Sequence[torch.Tensor], wanted: Sequence[int]) -> None:
        """See `peer.Mapping`."""
        self.roots[self.rank] = {i: (roots[i].data_ptr(), roots[i].numel()) for i in wanted}
        self.pids[self.rank] = os.getpid()

    def read_into(self, rank: int, root: int, into: torch.Tensor) -> None:
        """Copies the first bytes of a storage, as many as `into` has, into this contiguous tensor.

        Raises:
            PeerLost: The source's process is gone.
        """
        address, there = self.roots[rank][root]
        n = into.nbytes
        if n > there or not into.is_contiguous():
            raise ValueError(f"storage {root} of rank {rank} has {there} bytes, {n} are asked for")
        self._read_at(rank, address, into)

    def read_marks(self, rank: int, nbytes: int) -> np.ndarray:
        """Copies the first bytes of a source's marks, uint8 [nbytes]. Raises PeerLost as `read_into`."""
        into = torch.empty(nbytes, dtype=torch.uint8)
        self._read_at(rank, self.marks[rank][0][0], into)
        return into.numpy()

    def _read_at(self, rank: int, address: int, into: torch.Tensor) -> None:
        at = np.arange(0, into.nbytes, BATCH_BYTES)
        length, none = np.minimum(BATCH_BYTES, into.nbytes - at), np.zeros_like(at)
        runs = np.stack([into.data_ptr() + at, address + at, length, none, at, none], axis=1)
        self.read([Runs.of(rank, self.pids[rank], runs[k : k + 1]) for k in range(len(at))])

    def read(self, calls: Sequence[Runs], check: Callable[[], None] | None = None, where: str = "") -> None:
        """Makes these calls. Nothing is read any more when it returns or raises, unless `over` says otherwise.

        Args:
            check: Called between calls; what it raises ends the reading.
            where: Label of this rank in errors.

        Raises:
            PeerLost: The memory of a source is gone.
        """
        for c in calls:
            if check is not None:
                check()
            try:
                _read(c.pid, c.local, c.remote, c.nbytes)
            except OSError as e:
                raise lost(c.sender, f"(pid {c.pid}): {e.strerror}", where) from None

    def over(self) -> bool:
        """Whether nothing is read any more: always, outside `read`."""
        return True

    def close(self) -> None:
        self.roots, self.pids, self.marks = {}, {}, {}


class Pull:
    """Rows bound to the addresses of both ends. Warm: `begin`/`finish` may be called any number of times by one thread."""

    def __init__(
        self,
        rows: np.ndarray,
        mapping: Mapping,
        roots: Sequence[torch.Tensor],
        *,
        gate: peer.WaveGate | None = None,
        read_too: bool = False,  # no effect here
        summed: object = None,  # no effect either: sums are taken between the parts
        live: Sequence[torch.Tensor] = (),  # see peer.Pull
    ):
        check_rows(rows, "dst", roots, roots)  # the kernel checks no addresses
        self._stopped, self._gate = False, gate
        self._roots, self._live = roots, live  # held: their addresses are in the tables
        self._parts: dict[int, list[Runs]] = {}  # by wave; one without a gate
        for wave in sorted(set(rows["wave"].tolist())) if gate is not None else [0]:
            part = rows if gate is None else rows[rows["wave"] == wave]
            self._parts[wave] = [c for a in sorted(set(part["src"].tolist())) for c in _calls(part, a, mapping, roots)]
        nbytes = row_wire_bytes(rows)
        self.by_sender = tuple((a, int(nbytes[rows["src"] == a].sum())) for a in sorted(set(rows["src"].tolist())))
        some = [t for calls in self._parts.values() for c in calls for t in (c.local, c.remote, c.runs)]
        self.extra_bytes = sum(t.nbytes for t in some)
        self._mapping, self._now = mapping, self._parts

    @property
    def by_marks(self) -> bool:
        return self._now is not self._parts

    def choose(self, base: int, deadline: float) -> None:
        """See `peer.Pull`.

        Raises:
            PeerLost: The memory of a source is gone.
        """
        self._now, mapping = self._parts, self._mapping
        senders = [a for a, _ in self.by_sender]
        if not base or not senders or not mapping.marks.keys() >= set(senders):
            return
        count = granules = 0
        for a in senders:
            at = mapping.marks[a][1]
            head = mapping.read_marks(a, 8 * len(at)).view(np.int64)
            if head[0] != base:
                return
            for i, (_, n) in mapping.roots[a].items():
                count, granules = count + int(head[1 + i]), granules + -(-n // GRANULE)
        if count > PAYS * granules:
            return
        bits = {a: mapping.read_marks(a, int(mapping.marks[a][1][-1])) for a in senders}
        self._now = {
            wave: [m for c in calls for m in _marked(c, bits[c.sender], mapping.marks[c.sender][1])]
            for wave, calls in self._parts.items()
        }

    def apply(self) -> None:
        """See `peer.Pull`."""
        shift = np.array([b.data_ptr() - a.data_ptr() for a, b in zip(self._roots, self._live)], np.int64)
        for c in (c for calls in self._now.values() for c in calls):
            here = np.ascontiguousarray(c.runs[:, [0, 2]])
            into = here.copy()
            into[:, 0] += shift[c.runs[:, 5]]
            _read(os.getpid(), into, here, c.nbytes)

    def begin(self) -> None:
        self._stopped = False

    def stop(self) -> None:
        """Stops the pull after its current call, from any thread."""
        self._stopped = True
        if self._gate is not None:
            self._gate.open()

    def over(self) -> bool:
        """See `peer.Pull`."""
        return self._mapping.over()

    def finish(self, deadline: float, cancelled: Callable[[], bool] = lambda: False, where: str = "") -> PullStats:
        """Reads all rows. Nothing is read any more when it returns or raises.

        Raises:
            DeadlineExceeded, Aborted: The pull was stopped.
            PeerLost: The memory of a source is gone.
        """
        began = time.perf_counter()

        def check() -> None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the deadline passed while bytes were pulled", where=where)
            if self._stopped or cancelled():
                raise Aborted("the pull was cancelled", where=where)

        moved = dict.fromkeys((a for a, _ in self.by_sender), 0)
        for wave, calls in self._now.items():
            if self._gate is not None:
                check()
                self._gate.before(wave, None)
            self._mapping.read(calls, check, where)
            for c in calls:
                moved[c.sender] += c.nbytes
            if self._gate is not None:
                self._gate.after(wave, None)
        seconds = time.perf_counter() - began
        return PullStats(sum(moved.values()), tuple(moved.items()), seconds)


@dataclass(frozen=True, slots=True)
class Runs:
    """The reads of one call of process_vm_readv. local, remote: iovecs (address, bytes), int64 [n, 2]. runs: the same before
    adjacent ones are joined, int64 [n, 6]: local address, remote address, bytes, storage and offset in it, local storage."""

    sender: int
    pid: int
    local: np.ndarray
    remote: np.ndarray
    runs: np.ndarray
    nbytes: int

    @classmethod
    def of(cls, sender: int, pid: int, runs: np.ndarray) -> Runs:
        """The call that reads these runs."""
        local, remote = _joined(runs[:, [0, 2]]), _joined(runs[:, [1, 2]])
        return cls(sender, pid, local, remote, runs, int(runs[:, 2].sum()))


def _calls(rows: np.ndarray, sender: int, mapping: Mapping, roots: Sequence[torch.Tensor]) -> Iterator[Runs]:
    mine, known = rows[rows["src"] == sender], mapping.roots.get(sender, {})
    if unknown := sorted({*mine["src_root"].tolist()} - known.keys()):
        raise RebindError(f"{len(unknown)} storages are not mapped", [f"rank {sender}, storage {i}" for i in unknown])
    for runs in _batches(mine, known, roots):
        yield Runs.of(sender, mapping.pids[sender], runs)


def _marked(call: Runs, bits: np.ndarray, at: np.ndarray) -> Iterator[Runs]:
    """The part of a call that is marked. Unmarked bytes between two marked granules are read too if there are few of them."""
    begin, end = call.runs[:, 4], call.runs[:, 4] + call.runs[:, 2]
    first = begin // GRANULE
    run = np.repeat(np.arange(len(begin)), (end - 1) // GRANULE + 1 - first)
    granule = np.arange(len(run)) - np.searchsorted(run, run) + first[run]
    is_set = bits[at[call.runs[run, 3]] + granule // 8] >> (granule % 8).astype(np.uint8) & 1 != 0
    run, granule = run[is_set], granule[is_set]
    if not len(run):
        return
    new = np.ones(len(run), bool)
    new[1:] = (run[1:] != run[:-1]) | ((granule[1:] - granule[:-1] - 1) * GRANULE >= SHORTEST)
    starts = np.flatnonzero(new)
    last = np.append(starts[1:], len(run)) - 1
    run = run[starts]
    low = np.maximum(granule[starts] * GRANULE, begin[run])
    high = np.minimum((granule[last] + 1) * GRANULE, end[run])
    pieces = call.runs[run].copy()
    pieces[:, :2] += (low - begin[run])[:, None]
    pieces[:, 2] = high - low
    for k in range(0, len(pieces), RUNS):
        yield Runs.of(call.sender, call.pid, pieces[k : k + RUNS])


def _batches(rows: np.ndarray, known: dict[int, tuple[int, int]], roots: Sequence[torch.Tensor]):
    """The runs of each call (`Runs.runs`)."""
    ends = []
    for move in moves(rows, "local"):
        dims = list(move.dims)
        at = np.array([[move.right, move.left]], np.int64)
        for d in move.mirrored:
            at[:, 0] += (dims[d][0] - 1) * dims[d][2]
            dims[d] = (dims[d][0], dims[d][1], -dims[d][2])
        run = 1
        while dims and dims[-1][1:] == (run, run):
            run *= dims.pop()[0]
        for n, a, b in dims:
            at = (at[:, None] + np.arange(n)[:, None] * np.array([b, a])).reshape(-1, 2)
        base, limit = known[move.left_root]
        if len(at) and (at[:, 1].min() < 0 or at[:, 1].max() + run > limit):
            raise XferError(f"a row reaches outside storage {move.left_root}, which has {limit} bytes")
        offset = at[:, 1].copy()
        at += (roots[move.right_root].data_ptr(), base)
        cut = np.arange(0, run, BATCH_BYTES)  # long runs in pieces
        length = np.tile(np.minimum(BATCH_BYTES, run - cut), len(at))
        at = (at[:, None] + cut[:, None]).reshape(-1, 2)
        offset = (offset[:, None] + cut).reshape(-1)
        there, here = (np.full_like(length, i) for i in (move.left_root, move.right_root))
        ends.append(np.stack([at[:, 0], at[:, 1], length, there, offset, here], axis=1))
    table = np.concatenate(ends) if ends else np.empty((0, 6), np.int64)
    start = 0
    total = np.cumsum(table[:, 2])
    while start < len(table):
        before = total[start] - table[start, 2]
        stop = min(start + RUNS, int(np.searchsorted(total, before + BATCH_BYTES, "right")))
        part = table[start : max(stop, start + 1)]
        yield part
        start += len(part)


def _joined(runs: np.ndarray) -> np.ndarray:
    first = np.ones(len(runs), bool)
    first[1:] = runs[1:, 0] != runs[:-1].sum(axis=1)
    starts = np.flatnonzero(first)
    return np.ascontiguousarray(np.stack([runs[starts, 0], np.add.reduceat(runs[:, 1], starts)], axis=1))


@cache
def _libc():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip
    return libc


def lost(rank: int, why: str, where: str = "") -> PeerLost:
    """The error of a source whose memory cannot be read."""
    return PeerLost("memory that was offered cannot be read any more", [f"rank {rank} {why}"], where=where)


def _read(pid: int, local: np.ndarray, remote: np.ndarray, nbytes: int) -> None:
    """Reads memory of another process. Raises OSError if the kernel refuses, the process is gone, or not all of it is mapped."""
    got = _libc().process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if got != nbytes:
        code = ctypes.get_errno() if got < 0 else errno.EFAULT
        raise OSError(code, os.strerror(code))


@cache
def _allow() -> None:
    """Lets other processes read this one where the kernel lets only parents trace (Yama's ptrace_scope 1). Only ranks that offer their
    memory call it."""
    if sys.platform == "linux":
        _libc().prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
