"""Gathers among ranks of one host without a kernel: each rank copies the parameters of other owners out of their memory.

NCCL's broadcasts occupy multiprocessors, even while they wait for each other, and the forward that hides them lacks these.
Here only one small sum per step goes over the wire, as the sign that all owners have stepped. Each rank queues its copies behind
it, by copy engines over NVLink, all buckets at once in the order of use, on one stream: a GPU reads from others with one
engine, which empties one stream before it looks at the next (seen on H200s), and one rank alone reads at full rate. Several ranks
that read from one owner slow each other down, so within a few buckets each rank begins with another owner.

    owner steps -> begin: the small sum -> every rank copies from owners -> another small sum -> drain, meet -> owner steps

The second sum says that all ranks have copied and the owner may write again. Code that writes parameters outside of `step()` waits
for it by `meet`. `step()` need not: after its own drain it sums the norm of all gradients over these ranks.

On CPUs the kernel copies (process_vm_readv) when bytes are waited for. How memory is mapped: transport/peer.py and peer_host.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Table
from contextlib import nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from xfer.background import BackgroundCall
from xfer.layerwise.shares import Share
from xfer.layerwise.wire import Wire
from xfer.transport import peer, peer_host
from xfer.transport.group import opened
from xfer.transport.routes import any_rank, exchange_over_store

_NUMBERS = 1 << 16  # times the number of ranks of a host it fits in int32
FIRST_WINDOW = 2
"""Buckets of the first window, within which a rank may begin with any owner. Each next window is twice as long, since its buckets are
needed later."""


class Waitable(Protocol):
    """Bytes that are on their way: a collective's work, or copies."""

    def wait(self) -> object:
        """Returns when the bytes are here; on GPUs makes the current stream wait for them."""


class Pulls:
    """One rank's copies from the other ranks of a wire, made by `open_pulls`. stream: shared by all groups of the rank; None on a CPU."""

    def __init__(
        self,
        wire: Wire,
        export: peer.Export | peer_host.Export,
        mapping: peer.Mapping | peer_host.Mapping,
        numbers: Table[int, int],
        shares: Sequence[Share],
        stream: torch.cuda.Stream | None,
    ):
        self._wire, self._mapping, self._numbers = wire, mapping, numbers
        self._export = export  # holds the memory that others have mapped
        self._homes = {id(s): s.home for s in shares if s.home is not None}
        self._others = [s.home for s in shares if s.home is not None and s.owner != wire.rank and s.nbytes]
        self._all_stepped: dist.Work | None = None
        self._all_copied: dist.Work | None = None
        self.stream = stream
        self._number, self._sign = 0, torch.zeros(1, dtype=torch.int32, device=wire.device)
        self._over = torch.zeros_like(self._sign)
        self._came = torch.zeros((), dtype=torch.bool, device=wire.device)
        self._firsts = {
            id(s): [m.param.data.view(-1)[:1] for m in s.members if m.param.numel()] for s in shares if s.nbytes
        }
        dtypes = {x.dtype for some in self._firsts.values() for x in some}
        self._factor, self._one, self._nan = (
            {d: torch.full((), value, dtype=d, device=wire.device) for d in dtypes} for value in (1.0, 1.0, math.nan)
        )
        if stream is not None:
            wire.behind = [stream]

    def record(self) -> None:
        """Tells torch's allocator which memory the copies use: if the model is dropped while copies are queued, its memory is not
        reused before they have ended."""
        if self.stream is not None:
            scalars = [t for some in (self._factor, self._one, self._nan) for t in some.values()]
            for t in (self._sign, self._over, self._came, *scalars, *self._others):
                t.record_stream(self.stream)

    def begin(self) -> None:
        """Tells the other ranks that this rank's owned parameters are those of the new step (on its current stream). Called once per step,
        on all ranks."""
        # Another number in every step: an aborted sum may add up words of the step before, which are in NCCL's buffers.
        self._number = self._number % _NUMBERS + 1
        self._sign.fill_(self._number)
        self._all_copied = None
        stepped = self._wire.meet(lambda: "the sign that all owners have stepped", self._others, self._sign)
        self._all_stepped = stepped
        if self.stream is not None:  # so copies also come after this rank's last reads of what they overwrite
            with torch.cuda.stream(self.stream):
                stepped.wait()
                torch.eq(self._sign[0], self._wire.size * self._number, out=self._came)
                for dtype, factor in self._factor.items():
                    torch.where(self._came, self._one[dtype], self._nan[dtype], out=factor)

    def wanted(self, shares: Sequence[Share]) -> list[Share]:
        """The shares among `shares` that other ranks own."""
        return [s for s in shares if s.owner != self._wire.rank and s.nbytes]

    def turn(self, share: Share) -> int:
        """The turn at which this rank reads from the owner: at any turn each rank reads from another owner."""
        return (share.owner - self._wire.rank) % self._wire.size

    def copy(self, share: Share) -> None:
        """Copies a share on the current stream; on a CPU at once."""
        self._mapping.read_into(share.owner, self._numbers[id(share)], self._homes[id(share)])

    def seal(self, shares: Sequence[Share]) -> None:
        """Runs on the current stream, behind a bucket's copies: if the sum was aborted, which also starts the copies, an element of each
        parameter becomes NaN. A forward that was launched already then gives NaN, not numbers of unknown weights."""
        firsts: dict[torch.dtype, list[torch.Tensor]] = {}
        for share in shares:
            for first in self._firsts.get(id(share), ()):
                firsts.setdefault(first.dtype, []).append(first)
        for dtype, some in firsts.items():
            torch._foreach_mul_(some, self._factor[dtype])  # one kernel; by 1 it changes no number

    def read(self, shares: Sequence[Share]) -> None:
        """Waits for the owners, and copies. On a CPU only."""
        if self._all_stepped is not None:
            self._all_stepped.wait()
            self._all_stepped = None
        for s in shares:
            self.copy(s)

    def end(self) -> None:
        """Tells the other ranks that this rank's copies of the step are queued (on a CPU: made). Called once per step, on all ranks."""
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            self._all_copied = self._wire.meet(lambda: "the sign that all ranks have copied", (), self._over)

    def meet(self) -> None:
        """Waits until no rank copies out of this rank's memory any more: on GPUs the current stream waits; on CPUs this call waits
        until the others have drained."""
        if self._all_copied is not None:
            self._all_copied.wait()
            self._all_copied = None

    def unmap(self) -> None:
        """Unmaps the others' memory once this rank's copies have left the device."""
        if self.stream is not None:
            self.stream.synchronize()
        self._mapping.close()

    def part(self) -> None:
        """After `unmap` and before any memory is freed: waits on the host until all ranks have unmapped. Collective."""
        self._wire.all_reduce(self._over)
        if self.stream is not None:
            torch.cuda.current_stream(self._wire.device).synchronize()
        self._wire.check()


def start_in_order(buckets: Sequence[tuple[Pulls, Sequence[Share]]], behind: Sequence[Waitable] = ()) -> list[Waitable]:
    """Queues the copies of each bucket's parameters that others own.

    Args:
        buckets: In the order of use.
        behind: Works that must end before any copy begins, so that they have the wire for themselves.

    Returns:
        One object per bucket, which is waited for like a collective's work.
    """
    if not buckets or buckets[0][0].stream is None:
        return [_Reads(pulls, pulls.wanted(shares)) for pulls, shares in buckets]
    stream, copies = buckets[0][0].stream, [_Copied() for _ in buckets]
    with torch.cuda.stream(stream):
        for work in behind:
            work.wait()
        for window in windows(len(buckets)):
            wanted = {i: buckets[i][0].wanted(buckets[i][1]) for i in window}
            queue = [(buckets[i][0], s, i) for i in window for s in wanted[i]]
            queue.sort(key=lambda q: (q[0].turn(q[1]), q[2]))
            last = {i: at for at, (_, _, i) in enumerate(queue)}
            for at, (pulls, share, i) in enumerate(queue):
                pulls.copy(share)
                if last[i] == at:
                    pulls.seal(wanted[i])
                    copies[i].record()
    return [*copies]


def windows(n: int) -> Iterator[range]:
    """Places 0 to n - 1 in windows; within a window each rank may have an order of its own."""
    start, size = 0, FIRST_WINDOW
    while start < n:
        yield range(start, min(start + size, n))
        start, size = start + size, 2 * size


class _Copied:
    """A bucket's copies on a stream; there are none if this rank owns all of it."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def record(self) -> None:
        """Called when the last copy was queued."""
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class _Reads:
    """Copies that `wait` makes."""

    def __init__(self, pulls: Pulls, shares: Sequence[Share]):
        self._pulls, self._shares = pulls, shares

    def wait(self) -> None:
        self._pulls.read(self._shares)


def open_pulls(
    wire: Wire, shares: Sequence[Share], deadline_s: float, stream: torch.cuda.Stream | None
) -> Pulls | None:
    """Maps the parameters that the other ranks of the wire own. Collective over the wire.

    Args:
        shares: The shares of all buckets of the wire's ranks, in the same order on all ranks.
        deadline_s: Seconds to wait for the other ranks.
        stream: The stream of the copies, on GPUs.

    Returns:
        None, on all ranks, if some rank cannot read all parameters of the others: they are on another host, in memory that cannot be
        mapped (expandable segments), or not in runs.

    Raises:
        DeadlineExceeded, PeerLost: A rank did not come.
    """

    def unmap(made: Pulls | None) -> None:  # or others' memory would stay mapped
        if made is not None:
            made.unmap()

    call = BackgroundCall(  # the store has a deadline of its own
        lambda: _open(wire, shares, stream),
        wire.device,
        undo=unmap,
    )
    return opened(
        call,
        time.monotonic() + deadline_s,
        "ranks of one host did not all say where their parameters lie",
        f"rank {wire.rank} of {wire.size}",
        advice="build the optimizer on all of them, with one route",
    )


def _open(wire: Wire, shares: Sequence[Share], stream: torch.cuda.Stream | None) -> Pulls | None:
    kind = peer if wire.device.type == "cuda" else peer_host
    numbers: dict[int, int] = {}
    by_owner: dict[int, list[Share]] = {r: [] for r in range(wire.size)}
    for s in shares:
        if s.nbytes:
            numbers[id(s)] = len(by_owner[s.owner])
            by_owner[s.owner].append(s)
    exchange = exchange_over_store(wire.store, wire.rank, wire.size)
    homeless = any(s.home is None for those in by_owner.values() for s in those)
    mine = [s.home for s in by_owner[wire.rank] if s.home is not None]
    export = kind.Export(wire.rank, mine, wire.device)
    offers = exchange(export.to_bytes(), range(wire.size))
    mapping, missing = kind.Mapping(wire.rank, wire.device), homeless
    try:
        for other, data in sorted(offers.items()):
            if other != wire.rank and not homeless:
                wanted = range(len(by_owner[other]))
                mapping.open(data, other, wanted)
                missing |= len(mapping.roots.get(other, {})) < len(wanted)
        if any_rank(missing, wire.rank, wire.size, exchange):
            mapping.close()
            return None
    except BaseException:
        mapping.close()
        raise
    pulls = Pulls(wire, export, mapping, numbers, shares, stream)
    pulls.record()
    return pulls
