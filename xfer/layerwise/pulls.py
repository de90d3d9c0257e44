"""Gathers among ranks of one host without a kernel: each rank copies what others own straight out of their memory into its own.

Broadcasts of NCCL run on multiprocessors, and hold them while they wait for each other; the forward that they hide behind has
fewer then. Here only one small sum per step goes over the wire, as the sign that all owners have stepped. Behind it
each rank has its copies queued, by copy engines over NVLink, a stream per owner, all buckets at once in the order of use.

    owner steps -> begin: the small sum -> every rank copies from owners -> drain -> norm of gradients -> owner steps

An owner may write again when all have copied. No message says so: every `step()` sums the norm of all gradients over these ranks
after its own drain, so whoever has that sum knows that all ranks have drained. What writes parameters outside of `step()` has to
drain and meet first, on all ranks, as checkpoint.load does.

On CPUs the kernel copies (process_vm_readv), when bytes are waited for. What is mapped how is transport/peer.py's and peer_host.py's.
"""

from __future__ import annotations

from collections.abc import Mapping as Table
from collections.abc import Sequence

import torch

from xfer.errors import DeadlineExceeded, PeerLost
from xfer.layerwise.shares import Share
from xfer.layerwise.wire import Wire
from xfer.transport import peer, peer_host
from xfer.transport.group import Aside
from xfer.transport.routes import any_rank, exchange_over_store


class Pulls:
    """One rank's copies from the other ranks of a wire. Made by `open_pulls`."""

    def __init__(
        self, wire: Wire, export: peer.Export, mapping: peer.Mapping, numbers: Table[int, int], shares: Sequence[Share]
    ):
        self._wire, self._mapping, self._numbers = wire, mapping, numbers
        self._export = export  # holds what others know us by
        self._others = [s.home for s in shares if s.owner != wire.rank and s.nbytes]
        self._all_stepped = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        if wire.device.type == "cuda":
            self._streams = {r: torch.cuda.Stream(wire.device) for r in range(wire.size) if r != wire.rank}
            wire.behind = list(self._streams.values())

    def begin(self) -> None:
        """This rank's owned parameters are those of the new step (on its current stream). Once per step, on all ranks."""
        self._all_stepped = self._wire.meet(lambda: "the sign that all owners have stepped", self._others)
        for stream in self._streams.values():  # so copies also come after this rank's last reads of what they overwrite
            with torch.cuda.stream(stream):
                self._all_stepped.wait()

    def start(self, shares: Sequence[Share]) -> list[_Copied | _Reads]:
        """Queue the copies of what others own of these; what is returned is waited for as a work of a collective."""
        # From the next rank on, so that not all begin with the same owner.
        far = lambda s: (s.owner - self._wire.rank) % self._wire.size  # noqa: E731
        theirs = sorted((s for s in shares if s.owner != self._wire.rank and s.nbytes), key=far)
        if not self._streams:
            return [_Reads(self, theirs)]
        events = []
        for s in theirs:
            with torch.cuda.stream(self._streams[s.owner]):
                s.home.copy_(self._mapping.roots[s.owner][self._numbers[id(s)]], non_blocking=True)
                events.append(torch.cuda.Event())
                events[-1].record()
        return [_Copied(events)]

    def read(self, shares: Sequence[Share]) -> None:
        """On a CPU: wait for the owners, and copy."""
        if self._all_stepped is not None:
            self._all_stepped.wait()
            self._all_stepped = None
        for s in shares:
            self._mapping.read_into(s.owner, self._numbers[id(s)], s.home)

    def close(self, together: bool) -> None:
        """Let go of others' memory. together: first wait until nobody reads this rank's any more; collective."""
        if together:
            self._wire.all_reduce(torch.zeros(1, dtype=torch.int32, device=self._wire.device))
            if self._streams:
                torch.cuda.synchronize(self._wire.device)
        self._mapping.close()


class _Copied:
    """Copies on streams."""

    def __init__(self, events: Sequence[torch.cuda.Event]):
        self._events = events

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        for e in self._events:
            stream.wait_event(e)


class _Reads:
    """Copies that are made when somebody waits for them."""

    def __init__(self, pulls: Pulls, shares: Sequence[Share]):
        self._pulls, self._shares = pulls, shares

    def wait(self) -> None:
        self._pulls.read(self._shares)


def open_pulls(wire: Wire, shares: Sequence[Share], deadline_s: float) -> Pulls | None:
    """None, on all ranks, where some rank cannot read all that others own: another host, memory that cannot be mapped
    (expandable segments), parameters that did not settle into runs. Collective over the wire.

    shares: of all buckets of the wire's ranks, in the same order on all. DeadlineExceeded or PeerLost when a rank does not come.
    """

    def meet() -> Pulls | None:
        if wire.device.type == "cuda":
            torch.cuda.set_device(wire.device)  # of this thread
        return _open(wire, shares)

    aside = Aside(meet)  # the store's deadline is somebody else's
    error = aside.wait(deadline_s)
    if error is None:
        return aside.value
    if isinstance(error, RuntimeError | TimeoutError):
        late = isinstance(error, TimeoutError) or "imeout" in str(error) or "imed out" in str(error)
        raise (DeadlineExceeded if late else PeerLost)(
            "ranks of one host did not all say where their parameters lie",
            [f"build the optimizer on all of them, with one route ({str(error).splitlines()[0][:160]})"],
            where=f"rank {wire.rank} of {wire.size}",
        ) from error
    raise error


def _open(wire: Wire, shares: Sequence[Share]) -> Pulls | None:
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
    return Pulls(wire, export, mapping, numbers, shares)
