"""The mix of routes that one rank uses for one program: what a taker can map it pulls, everything else goes by p2p.

`find_ways`, `open_link` and `Ways.over` are collective: every rank of the sub-plan calls them in the same order. Which
route a row takes is decided by opening a probe, never by host names; a link is opened only when some rank needs one,
since NCCL alone costs hundreds of MiB. A `Routed` then runs like a `P2P`. Not here: the routes
themselves (peer.py, p2p.py), who opens and closes them (session/).
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from xfer.errors import Unsupported, XferError
from xfer.kernels.checksum import Sums
from xfer.plan.program import Op, Program, row_wire_bytes
from xfer.transport import peer, peer_host
from xfer.transport.group import ABORT_S, Link, open_group, wait_for_stream
from xfer.transport.p2p import P2P, TransferStats
from xfer.transport.relay_place import RelayPlace

Exchange = Callable[[bytes, Iterable[int]], dict[int, bytes]]
"""Gives this rank's bytes to whoever asks for them, and brings those of the ranks named. All ranks call it in the same
order."""

PIECE_BYTES = 48 << 10
"""Of a value that an exchange puts into a store; the coordinator's takes no larger ones than 64 KiB."""


def exchange_over_store(store, rank: int, size: int, name: str = "peer") -> Exchange:
    """Over a store with a prefix of this group's own. Values are cut into pieces that any store takes; only who needs a
    value fetches it, so that a coordinator carries what pairs have to say to each other and no more."""
    turn = 0

    def exchange(data: bytes, ranks: Iterable[int] = range(size)) -> dict[int, bytes]:
        nonlocal turn
        turn += 1
        pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)] or [b""]
        for i, piece in enumerate(pieces):  # each says how many there are, which also keeps it from being empty
            store.set(f"{name}/{turn}/{rank}/{i}", struct.pack("<I", len(pieces)) + piece)
        out = {}
        for r in ranks:
            got: list[bytes] = []
            count = 1
            while len(got) < count:
                value = bytes(store.get(f"{name}/{turn}/{r}/{len(got)}"))
                count = struct.unpack("<I", value[:4])[0]
                got.append(value[4:])
            out[r] = b"".join(got)
        return out

    return exchange


def any_rank(yes: bool, rank: int, size: int, exchange: Exchange) -> bool:
    """Whether some rank says yes; the same answer on all. Two rounds through rank 0."""
    said = exchange(b"1" if yes else b"0", range(size) if rank == 0 else ())
    verdict = b"1" if b"1" in said.values() else b"0"
    return exchange(verdict, (0,))[0] == b"1"


class PeerKind(Protocol):
    """How ranks read each other's storages: the classes of peer.py, or a test's double with the same calls."""

    @property
    def Export(self) -> type: ...
    @property
    def Mapping(self) -> type: ...
    @property
    def Pull(self) -> type: ...
    @property
    def takes(self) -> Callable[[np.ndarray], np.ndarray]: ...


PEERS: dict[str, PeerKind] = {"cuda": peer, **({"cpu": peer_host} if sys.platform == "linux" else {})}
"""By device type. A kind of device that is not here has p2p only."""


@dataclass(frozen=True, slots=True)
class RouteReport:
    """Of the last run of one rank: wire bytes in by route, and each route's own seconds, which overlap."""

    pulled_bytes: int
    pull_s: float
    p2p_bytes: int
    p2p_s: float


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """What goes which way in every run of one rank: wire bytes in and out by route. `refused`: why not all is pulled,
    of this rank's pairs."""

    pulled_in: int
    pulled_out: int
    p2p_in: int
    p2p_out: int
    refused: tuple[str, ...]

    def explain(self) -> str:
        lines = [
            f"{way}: {a:,} bytes pulled by the taker, {b:,} bytes sent (p2p)"
            for way, a, b in (("in", self.pulled_in, self.p2p_in), ("out", self.pulled_out, self.p2p_out))
            if a or b
        ]
        return "\n".join([*lines, *(f"not pulled: {r}" for r in self.refused)])


class EarlyGate(peer.WaveGate, Protocol):
    """What happens between the parts of a pull, and which rows are in which. `within`: what the kernel of the first part may sum."""

    within: Sums | None

    def parts(self, pulled: np.ndarray) -> np.ndarray:
        """The rows with the part that they belong to as their wave."""


class Routed:
    """Runs a program over both routes. Same calls as `P2P`; `report` says what went which way, `plan` what will. `pulled`: rows
    that this rank pulls. `place`: in a row of replicas, where it has one; its gate has to be told of each run first."""

    def __init__(
        self,
        link: Link,
        p2p: P2P,
        pull,
        mapping,
        export,
        plan: RoutePlan,
        pulled: np.ndarray,
        roots: Sequence[torch.Tensor],
        place: RelayPlace | None = None,
    ):
        self.link, self.p2p, self.pull, self.mapping, self.export, self.plan = link, p2p, pull, mapping, export, plan
        self.pulled, self._roots, self.place = pulled, roots, place
        self.extra_bytes = p2p.extra_bytes + (pull.extra_bytes if pull else 0)
        self.report = RouteReport(0, 0.0, 0, 0.0)
        self._gated: tuple[Any, Any] = None, None  # a gate, and the pull that was bound for it
        self._running = pull
        self._ended: Callable[[], bool] = _yes  # whether the pull that ran last has left the device
        self.closed = False

    @property
    def drained(self) -> bool:
        """False: a pull of this rank may go on reading other ranks' storages, an aborted link this rank's own, or what came over it may
        still be unpacked."""
        return self._ended() and self.link.drained() and self.p2p.drained()

    @property
    def near(self) -> bool:
        """Whether all that this rank pulls lies on its own GPU."""
        return len(self.pulled) > 0 and set(self.pulled["src"].tolist()) <= getattr(self.mapping, "here", set())

    @property
    def program(self) -> Program:
        """What goes by p2p, and fills."""
        return self.p2p.program

    def stale(self) -> list[str]:
        """Storages of this rank that others have mapped and that lie elsewhere now, or are new memory at the old
        address: one line each. Then all ranks must open their routes again."""
        out = self.export.stale() if self.export is not None and self.plan.pulled_out else []
        return out + self.place.stale() if self.place is not None else out

    def stop(self) -> None:
        """From another thread, beside `link.abort()`: ends a pull."""
        pull = self._running
        if pull is not None:
            pull.stop()

    def run(
        self,
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda wave, nbytes: None,
        gate: EarlyGate | None = None,
    ) -> TransferStats:
        """As `P2P.run`. Returns, or raises, with this rank's pulls drained (see `Pull.finish`), or `drained` False. gate: pull
        in its parts, and let it in between; with a place in a row the parts are that one's, and the gate is told of each."""
        t0 = time.perf_counter()
        if self.pull is None:
            stats = self._wired(deadline, cancelled, progress)
            self.report = RouteReport(0, 0.0, stats.bytes_in, stats.seconds)
            return stats
        self._running = pull = self._pull_of(gate)
        self._ended = lambda: False
        # Its pull waits for parts of the replica before, on the host; what is sent to it must not wait for that.
        follows = self.place is not None and self.place.follows
        try:
            stats = self._wired(deadline, cancelled, progress) if follows else None
            pull.begin()
            progress(0, 0)  # now that bytes move: saying so costs what a message costs
            stats = stats or self._wired(deadline, cancelled, progress)
        except BaseException:
            pull.stop()
            try:
                pull.finish(deadline, lambda: True)
            except XferError as e:
                if not getattr(e, "drained", True):
                    self._ended = pull.over
                    raise  # it says more than the first error: still being read
            self._ended = _yes
            raise
        pulled = self._finish_pull(pull, deadline, cancelled)
        self.report = RouteReport(pulled.bytes_in, pulled.seconds, stats.bytes_in, stats.seconds)
        progress(stats.waves, stats.bytes_in + pulled.bytes_in)
        return replace(
            stats,
            bytes_in=stats.bytes_in + pulled.bytes_in,
            wire_s=max(stats.wire_s, pulled.seconds),
            seconds=time.perf_counter() - t0,
            extra_bytes=self.extra_bytes,
        )

    def _wired(
        self, deadline: float, cancelled: Callable[[], bool], progress: Callable[[int, int], None]
    ) -> TransferStats:
        """All that is not pulled. A rank that has nothing of it, over no link, does not even wait for its device."""
        if self.p2p.idle and isinstance(self.link, NoLink):
            return TransferStats(0, 0, (), 0, 0, 0.0, 0.0, 0.0, 0.0, 0)
        return self.p2p.run(deadline, cancelled, progress)

    def _pull_of(self, gate: EarlyGate | None):
        if self.place is not None:
            self.place.steps.beside = gate
            return self.pull
        if gate is None:
            return self.pull
        if self._gated[0] is not gate:
            rows = gate.parts(self.pulled)
            pull = PEERS[self.link.device.type].Pull(rows, self.mapping, self._roots, gate=gate, summed=gate.within)
            self._gated = gate, pull
            self.extra_bytes += pull.extra_bytes
        return self._gated[1]

    def _finish_pull(self, pull, deadline: float, cancelled: Callable[[], bool]):
        try:
            pulled = pull.finish(deadline, cancelled, self.link.labels[self.link.rank])
        except BaseException as e:
            self._ended = _yes if getattr(e, "drained", True) else pull.over
            raise
        self._ended = _yes
        return pulled

    def close(self) -> bool:
        """Unmaps the senders' memory: after that they may free it. The link stays the caller's. False, and nothing was done,
        where not all is drained: unmapping would wait for the kernel that does not leave, and what that works with, its
        tables and the buffers of messages, must stay. Hold this then, and call again."""
        if not self.drained:
            return False
        self.closed, self.pull, self._running, self._gated = True, None, None, (None, None)
        self.mapping.close()
        if self.place is not None:
            self.place.close()
        return True


def open_link(
    store,
    rank: int,
    size: int,
    seconds: float,
    device: torch.device,
    labels: Sequence[str],
    cancelled: Callable[[], bool] = lambda: False,
    refused: Sequence[str] = (),
    exchange: Exchange | None = None,
) -> Link:
    """Collective. gloo on the CPU, NCCL on CUDA. Unsupported, on all ranks, where ranks of one host share a GPU:
    NCCL would refuse to meet there, and does not say so everywhere. refused: why not all is pulled, of this rank's pairs.
    exchange: where ranks compare their devices; None: over `store`."""
    if device.type == "cuda":
        # NCCL compares GPUs among ranks of one host only, and hosts by this name where it is given.
        mine = f"{os.environ.get('NCCL_HOSTID', '')} {peer.uuid_of(device)}"
        exchange = exchange or exchange_over_store(store, rank, size, "device")
        said = exchange("\n".join((mine, *refused[:1])).encode(), range(size) if rank == 0 else ())
        devices, _, reasons = zip(*(x.decode().partition("\n") for x in said.values())) if said else ((), (), ())
        shared = len(set(devices)) < len(devices)
        # Whoever's error is heard first, it says why.
        verdict = exchange("\n".join(("shared", *dict.fromkeys(reasons))).encode() if shared else b"", (0,))[0]
        if verdict:
            raise Unsupported(
                "some bytes cannot be pulled, and NCCL cannot carry them: ranks share a GPU",
                [
                    *(line for line in verdict.decode().split("\n")[1:] if line),
                    "give every rank a GPU of its own, or memory that others can map: trainers on an engine's GPU without "
                    "expandable_segments in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
                ],
                where=labels[rank],
            )
    return open_group(store, rank, size, seconds, device, labels, cancelled)


@dataclass(frozen=True, slots=True)
class Ways:
    """What this rank's program was split into, before a link is there. `wired`: whether any rank needs one."""

    pulled: np.ndarray
    rest: Program
    mapping: Any
    export: Any
    plan: RoutePlan
    wired: bool

    def over(
        self,
        link: Link,
        roots: Sequence[torch.Tensor],
        *,
        src_roots=None,
        place: RelayPlace | None = None,
        **p2p_options: int,
    ) -> Routed:
        """Binds both routes. Collective when p2p has new pairs to connect."""
        pull = None
        if len(self.pulled):
            pull = (
                PEERS[link.device.type].Pull(self.pulled, self.mapping, roots)
                if place is None
                else place.pull(self.mapping)
            )
        p2p = P2P(link, self.rest, roots, src_roots=src_roots, **p2p_options)
        return Routed(link, p2p, pull, self.mapping, self.export, self.plan, self.pulled, roots, place)

    def place(
        self,
        roots: Sequence[torch.Tensor],
        outside: int,
        device: torch.device,
        before: bytes,
        say: Callable[[int, int], None],
    ) -> RelayPlace | None:
        """This worker's place in a row of replicas (relay_place.py), for `over`. None where ranks cannot read each other's storages."""
        kind = PEERS.get(device.type) if self.export is not None or len(self.pulled) else None
        return (
            RelayPlace(kind, self.pulled, roots, self.rest.rank, outside, device, before, say)
            if kind is not None
            else None
        )


def find_ways(
    program: Program,
    size: int,
    device: torch.device,
    roots: Sequence[torch.Tensor],
    exchange: Exchange,
    labels: Sequence[str] = (),
    *,
    src_roots: Sequence[torch.Tensor] | None = None,
    allow_peer: bool = True,
) -> Ways:
    """Collective: who can map what of whom. `roots`, `src_roots`: as for `P2P`. allow_peer False, on all ranks
    alike: everything goes by p2p. Then, and where no kind of peer route is known for the device, nothing is exchanged."""
    rank, kind = program.rank, PEERS.get(device.type) if allow_peer else None
    rows = program.rows[program.rows["op"] != Op.FILL]
    if kind is None:  # of all ranks alike: a hello with another data plane is refused
        return Ways(rows[:0], program, _NoMapping(), None, _planned(program, program, ()), True)
    labels = tuple(labels) or tuple(f"rank {i}" for i in range(size))
    takers = sorted({*rows["dst"][(rows["src"] == rank) & (rows["dst"] != rank)].tolist()})
    incoming = rows[(rows["dst"] == rank) & (rows["src"] != rank)]
    senders = sorted({*incoming["src"].tolist()})
    export = kind.Export(rank, roots if src_roots is None else src_roots, device) if takers else None
    offers = exchange(export.to_bytes() if export else b"", senders)
    mapping = kind.Mapping(rank, device)
    try:
        for sender in senders:
            if offers[sender]:
                wanted = sorted({*incoming["src_root"][incoming["src"] == sender].tolist()})
                mapping.open(offers[sender], sender, wanted)
        mine = mapping.to_bytes()
        answers = [b""] * size
        for r, answer in {**exchange(mine if senders else b"", takers), rank: mine}.items():
            answers[r] = answer
        pulled, rest = peer.split(program, peer.taken_roots(answers), kind.takes)
        plan = _planned(program, rest, tuple(peer.refusals(answers, labels, rank)))
        wired = any_rank(bool(plan.p2p_in + plan.p2p_out), rank, size, exchange)
    except BaseException:
        mapping.close()
        raise
    return Ways(pulled, rest, mapping, export, plan, wired)


def open_routes(link: Link, program: Program, roots: Sequence[torch.Tensor], exchange: Exchange, **options) -> Routed:
    """`find_ways` and then `over` a link that is there already."""
    src_roots = options.pop("src_roots", None)
    allow_peer = options.pop("allow_peer", True)
    ways = find_ways(
        program, link.size, link.device, roots, exchange, link.labels, src_roots=src_roots, allow_peer=allow_peer
    )
    try:
        return ways.over(link, roots, src_roots=src_roots, **options)
    except BaseException:
        ways.mapping.close()
        raise


def _planned(program: Program, rest: Program, refused: tuple[str, ...]) -> RoutePlan:
    def both(p: Program) -> tuple[int, int]:
        rows = p.rows[(p.rows["op"] != Op.FILL) & (p.rows["src"] != p.rows["dst"])]
        nbytes = row_wire_bytes(rows)
        return int(nbytes[rows["dst"] == p.rank].sum()), int(nbytes[rows["src"] == p.rank].sum())

    (all_in, all_out), (p2p_in, p2p_out) = both(program), both(rest)
    return RoutePlan(all_in - p2p_in, all_out - p2p_out, p2p_in, p2p_out, refused)


def _yes() -> bool:
    return True


class _NoMapping:
    def close(self) -> None:
        pass


class NoLink(Link):
    """For worlds in which everything is pulled: carries nothing."""

    grouped = True

    def __init__(self, rank: int, size: int, device: torch.device, labels: Sequence[str] = ()):
        self.rank, self.size, self.device = rank, size, device
        self.labels = tuple(labels) or tuple(f"rank {i}" for i in range(size))

    def post(self, receives, sends):
        if receives or sends:
            raise RuntimeError("there is no link between these ranks, and some rows cannot be pulled")
        return [], []

    def finish(self, deadline: float) -> None:
        if self.device.type == "cuda":
            wait_for_stream(self.device, deadline, self.labels[self.rank])

    def begin_broadcast(self, tensor, root: int, deadline: float):
        raise RuntimeError("there is no link between these ranks")

    def warm(self, peers) -> None:
        pass

    def abort(self, seconds: float = ABORT_S) -> None:
        pass

    def close(self) -> None:
        pass

    def blame(self, pending) -> list[str]:
        return []
