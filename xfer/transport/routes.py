"""The mix of routes that one rank uses for one program: a destination pulls the rows whose storages it can map, and all other rows go
by p2p. Where replicas hand bytes on, a destination pulls rows from other destinations (relay_place.py).

`find_ways`, `open_link` and `Ways.over` are collective: every rank of the sub-plan calls them in the same order. A probe decides the
route of a row, never a host name. A link is opened only if some rank needs one, since NCCL alone costs hundreds of MiB. A
`Routed` then runs like a `P2P`. Not here: the routes themselves (peer.py, p2p.py), and the code that opens and closes them (direct/).
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from xfer.background import BackgroundCall
from xfer.errors import PeerLost, Unsupported, XferError
from xfer.kernels.checksum import Sums
from xfer.plan.program import Op, Program, row_wire_bytes
from xfer.plan.relay import shares
from xfer.transport import peer, peer_host, peer_rdma
from xfer.transport.changes import HeldBytes
from xfer.transport.group import ABORT_S, Link, wait_for_stream
from xfer.transport.links import open_group
from xfer.transport.p2p import P2P, STEP_BYTES, TransferStats
from xfer.transport.relay_place import Relay, RelayPlace
from xfer.transport.scratch import Held, Scratch

Exchange = Callable[[bytes, Iterable[int]], dict[int, bytes]]
"""Publishes this rank's bytes and returns those of the given ranks. All ranks call it in the same order."""

PIECE_BYTES = 48 << 10
"""Most bytes of a value that an exchange puts into a store; the coordinator's store takes at most 64 KiB."""


def exchange_over_store(store, rank: int, size: int, name: str = "peer") -> Exchange:
    """An exchange over a store, which needs a prefix of this group's own. Values are cut into pieces that any store takes. A rank fetches
    only the values that it names, which keeps the load of a coordinator low."""
    turn = 0

    def exchange(data: bytes, ranks: Iterable[int] = range(size)) -> dict[int, bytes]:
        nonlocal turn
        turn += 1
        pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)] or [b""]
        for i, piece in enumerate(pieces):  # each one has their number, so that none is empty
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
    """Whether `yes` is true on some rank; the same result on all ranks. Two rounds through rank 0."""
    said = exchange(b"1" if yes else b"0", range(size) if rank == 0 else ())
    verdict = b"1" if b"1" in said.values() else b"0"
    return exchange(verdict, (0,))[0] == b"1"


class PeerKind(Protocol):
    """A way in which ranks read each other's storages: the classes of peer.py, or a test double with the same calls."""

    @property
    def Export(self) -> type: ...
    @property
    def Mapping(self) -> type: ...
    @property
    def Pull(self) -> type: ...
    @property
    def takes(self) -> Callable[[np.ndarray], np.ndarray]: ...


PEERS: dict[str, PeerKind] = {"cuda": peer, **({"cpu": peer_host} if sys.platform == "linux" else {})}
"""By device type. A device type that is not listed has p2p only."""


def peer_kind(device: torch.device, rdma: bool) -> PeerKind | None:
    """The way in which ranks with weights on this device read each other's storages."""
    return peer_rdma if rdma else PEERS.get(device.type)


@dataclass(frozen=True, slots=True)
class RouteReport:
    """The last run of one rank: incoming wire bytes and seconds by route. The times overlap."""

    pulled_bytes: int
    pull_s: float
    p2p_bytes: int
    p2p_s: float


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Wire bytes in and out, by route, of every run of one rank. `refused`: for pairs of this rank, the reason why not all rows are
    pulled."""

    pulled_in: int
    pulled_out: int
    p2p_in: int
    p2p_out: int
    refused: tuple[str, ...]

    def explain(self) -> str:
        lines = [
            f"{way}: {a:,} bytes pulled by the destination, {b:,} bytes sent (p2p)"
            for way, a, b in (("in", self.pulled_in, self.p2p_in), ("out", self.pulled_out, self.p2p_out))
            if a or b
        ]
        return "\n".join([*lines, *(f"not pulled: {r}" for r in self.refused)])


class EarlyGate(peer.WaveGate, Protocol):
    """A gate that also cuts a pull into parts. `within`: sums that the kernel of the first part may take."""

    within: Sums | None

    def parts(self, pulled: np.ndarray) -> np.ndarray:
        """The rows, with the number of their part as their wave."""


class Routed:
    """Runs a program over both routes, with the calls of `P2P`.

    Attributes:
        report: Bytes and seconds by route of the last run.
        plan: Bytes by route of every run.
        pulled: Rows that this rank pulls.
        place: This worker's place among replicas that hand bytes on, or None. Call `place.steps.begin` before each run.
        scratch: The scratch into which runs bring their bytes; None: into live storage.
        kind: The `PeerKind` of its pulls, if it may have some.
    """

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
        scratch: Scratch | None = None,
        kind: Any = None,
    ):
        self.kind = kind
        self.link, self.p2p, self.pull, self.mapping, self.export, self.plan = link, p2p, pull, mapping, export, plan
        self.pulled, self._roots, self.place, self.scratch = pulled, roots, place, scratch
        self.report = RouteReport(0, 0.0, 0, 0.0)
        self._gated: tuple[Any, Any] = None, None  # a gate, and the pull that was bound for it
        self._running = pull
        self._ended: Callable[[], bool] = _yes  # whether the last pull has left the device
        self.closed = False

    @property
    def extra_bytes(self) -> int:
        """Bytes of buffers and of kernels' tables."""
        return self.p2p.extra_bytes + sum(pull.extra_bytes for pull in (self.pull, self._gated[1]) if pull is not None)

    @property
    def drained(self) -> bool:
        """Whether all work of the last run has ended. If False, a pull may still read other ranks' storages, an aborted link may still
        read this rank's, or received bytes may still be unpacked."""
        return self._ended() and self.link.drained() and self.p2p.drained()

    @property
    def near(self) -> bool:
        """Whether all rows that this rank pulls lie on its own GPU."""
        return len(self.pulled) > 0 and set(self.pulled["src"].tolist()) <= getattr(self.mapping, "here", set())

    @property
    def program(self) -> Program:
        """The rows that go by p2p, and the fills."""
        return self.p2p.program

    def held(self, by_changes: bool) -> Held | None:
        """The bytes that the last run has brought into scratch; None without scratch. `by_changes`: whether the run had a base."""
        if self.scratch is None:
            return None
        if not by_changes:
            return Held(self.scratch)
        if self.pull is None or not self.pull.by_marks:
            return self.p2p.held(self.scratch, self.pulled, None)
        return self.p2p.held(self.scratch, self.pulled[peer.whole_bytes(self.pulled) > 0], self.pull.apply)

    def stale(self) -> list[str]:
        """One line for each storage of this rank that others have mapped and that has moved, or is new memory at the old address. If there
        is one, all ranks must open their routes again."""
        out = self.export.stale() if self.export is not None and self.plan.pulled_out else []
        return out + self.place.stale() if self.place is not None else out

    def stop(self) -> None:
        """Ends a pull, from another thread. `link.abort()` ends the p2p part."""
        pull = self._running
        if pull is not None:
            pull.stop()

    def run(
        self,
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda wave, nbytes: None,
        gate: EarlyGate | None = None,
        base: HeldBytes | None = None,
    ) -> TransferStats:
        """As `P2P.run`. When it returns or raises, this rank's pulls are drained (see `Pull.finish`), or `drained` is False.

        Args:
            gate: Cuts the pull into parts and runs between them. With a `place` the parts are the place's, and the gate is called
                after each.
            base: See `P2P.run`. Pulls, too, bring only changed granules, if the sources have marks of them (kernels/marks.py). Pulls
                from other replicas bring all bytes.
        """
        t0 = time.perf_counter()
        if self.pull is None:
            stats = self._wired(deadline, cancelled, progress, base)
            self.report = RouteReport(0, 0.0, stats.bytes_in, stats.seconds)
            return stats
        self._running = pull = self._pull_of(gate)
        pull.choose(base.attempt if base is not None else 0, deadline)
        self._ended = lambda: False
        # A pull from other replicas waits on the host for their parts. What comes from the trainers need not wait for that.
        if self.place is not None and self.place.follows:
            stats, pulled = self._run_beside(pull, deadline, cancelled, progress, base)
        else:
            with self._drained(pull, deadline):
                pull.begin()
                progress(0, 0)  # after the start, since it costs as much as a message
                stats = self._wired(deadline, cancelled, progress, base)
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

    @contextmanager
    def _drained(self, pull, deadline: float) -> Iterator[None]:
        """If the body raises, the pull is stopped, and has left the device before the error goes on."""
        try:
            yield
        except BaseException:
            pull.stop()
            try:
                pull.finish(deadline, lambda: True)
            except XferError as e:
                if not getattr(e, "drained", True):
                    self._ended = pull.over
                    raise  # it says more than the first error: the pull still reads
            self._ended = _yes
            raise

    def _run_beside(
        self,
        pull,
        deadline: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        base: HeldBytes | None,
    ) -> tuple[TransferStats, peer.PullStats]:
        """Runs the rows that are not pulled, and a pull that waits for others: on a thread of its own if messages come meanwhile."""

        def pulled() -> peer.PullStats:
            with self._drained(pull, deadline):
                pull.begin()
            return self._finish_pull(pull, deadline, cancelled)

        if not self.plan.p2p_in:  # it may hand on what it pulls
            came = pulled()
            return self._wired(deadline, cancelled, progress, base), came
        call = BackgroundCall(pulled, self.link.device)
        try:
            stats = self._wired(deadline, cancelled, progress, base)
        except BaseException:
            pull.stop()
            raise
        finally:
            if not call.ended(max(deadline, time.monotonic()) + 2 * peer.DRAIN_S):
                self._ended = lambda: call.over and pull.over()
        if not call.over:
            raise PeerLost("a pull does not end", where=self.link.labels[self.link.rank], drained=False)
        return stats, call.take(deadline)

    def _wired(
        self,
        deadline: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        base: HeldBytes | None,
    ) -> TransferStats:
        """Runs the rows that are not pulled. A rank without such rows and without a link does not wait for its device."""
        if self.p2p.idle and isinstance(self.link, NoLink):
            return TransferStats(0, 0, (), 0, 0, 0.0, 0.0, 0.0, 0.0, 0)
        return self.p2p.run(deadline, cancelled, progress, self.place.steps if self.place is not None else None, base)

    def _pull_of(self, gate: EarlyGate | None):
        if self.place is not None:
            self.place.steps.beside = gate
            return self.pull
        if gate is None:
            return self.pull
        if self._gated[0] is not gate:
            rows = gate.parts(self.pulled)
            pull = self.kind.Pull(rows, self.mapping, self._roots, gate=gate, summed=gate.within)
            self._gated = gate, pull
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
        """Unmaps the sources' memory, which they may free afterwards. The caller closes the link.

        Returns:
            False, without having done anything, if not all is drained. Unmapping would wait for the kernel that does not end, and
            the kernel's tables and the buffers of messages must stay. Keep this object then, and call again.
        """
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
    """Opens a link: gloo on the CPU, NCCL on CUDA. Collective.

    Args:
        refused: See `RoutePlan`; quoted in the error.
        exchange: The exchange by which ranks compare their devices; None: over `store`.

    Raises:
        Unsupported: On all ranks, if ranks of one host share a GPU. NCCL would refuse them, but not with an error on every rank.
    """
    if device.type == "cuda":
        # NCCL compares GPUs among ranks of one host only, and hosts by this name where it is given.
        mine = f"{os.environ.get('NCCL_HOSTID', '')} {peer.uuid_of(device)}"
        exchange = exchange or exchange_over_store(store, rank, size, "device")
        said = exchange("\n".join((mine, *refused[:1])).encode(), range(size) if rank == 0 else ())
        devices, _, reasons = zip(*(x.decode().partition("\n") for x in said.values())) if said else ((), (), ())
        shared = len(set(devices)) < len(devices)
        # Every rank's error has the reasons.
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
    """The two parts of this rank's program, before a link is opened. `wired`: whether any rank needs a link. `place`, `kind`: see `Routed`;
    if `place.follows`, nothing is pulled from sources."""

    pulled: np.ndarray
    rest: Program
    mapping: Any
    export: Any
    plan: RoutePlan
    wired: bool
    place: RelayPlace | None = None
    kind: Any = None

    def over(
        self,
        link: Link,
        roots: Sequence[torch.Tensor],
        *,
        src_roots=None,
        scratch: Scratch | None = None,
        **p2p_options: int,
    ) -> Routed:
        """Binds both routes. Collective when p2p has new pairs to connect. `scratch`: the scratch that has `roots`, if any."""
        pull, place = None, self.place
        if place is not None:
            pull = place.pull(self.mapping)
        elif len(self.pulled):
            live = scratch.live if scratch is not None else ()
            pull = self.kind.Pull(self.pulled, self.mapping, roots, live=live)
        p2p = P2P(link, self.rest, roots, src_roots=src_roots, scratch=scratch, **p2p_options)
        return Routed(
            link, p2p, pull, self.mapping, self.export, self.plan, self.pulled, roots, place, scratch, self.kind
        )

    def close(self) -> None:
        """Unmaps everything, if routes were not opened after all."""
        self.mapping.close()
        if self.place is not None:
            self.place.close()


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
    relay: Relay | None = None,
    marks: torch.Tensor | None = None,
    rdma: bool = False,
) -> Ways:
    """Finds out which storages of its sources this rank can map, and splits the program. Collective.

    Args:
        roots, src_roots: See `P2P`.
        allow_peer: If False, on all ranks alike, no rank maps storages of its sources.
        relay: On all ranks or on none: destinations hand bytes on.
        marks: The marks of the storages that this rank offers (kernels/marks.py); None without any.
        rdma: On all ranks or on none: ranks read each other's storages by NIXL (peer_rdma.py).
    """
    rank, kind = program.rank, peer_kind(device, rdma) if allow_peer or relay is not None else None
    rows = program.rows[program.rows["op"] != Op.FILL]
    if kind is None:  # on all ranks alike: the coordinator rejects a client with another data plane
        return Ways(rows[:0], program, _NoMapping(), None, _planned(program, program, ()), True)
    labels = tuple(labels) or tuple(f"rank {i}" for i in range(size))
    outgoing = rows[(rows["src"] == rank) & (rows["dst"] != rank)]
    takers = sorted({*outgoing["dst"].tolist()})
    incoming = rows[(rows["dst"] == rank) & (rows["src"] != rank)]
    senders = sorted({*incoming["src"].tolist()})
    offered = allow_peer and (outgoing["common"] == 0).any()
    export = kind.Export(rank, roots if src_roots is None else src_roots, device, marks) if offered else None
    offers = exchange(export.to_bytes() if export else b"", senders)
    mapping = kind.Mapping(rank, device)
    if own := sorted({*rows["src_root"][(rows["src"] == rank) & (rows["dst"] == rank)].tolist()}):
        mapping.own(roots if src_roots is None else src_roots, own)
    place = None
    try:
        for sender in senders:
            wanted = {*incoming["src_root"][(incoming["src"] == sender) & (incoming["common"] == 0)].tolist()}
            if offers[sender] and wanted:
                mapping.open(offers[sender], sender, sorted(wanted))
        share = 0, 1
        if relay is not None and relay.hands:
            taken = peer.taken_roots([b""] * rank + [mapping.to_bytes()])
            pulled, rest = peer.split(program, taken, kind.takes)
            place = RelayPlace(kind, rest, pulled, STEP_BYTES[device.type], relay, roots, device)
            share = place.share
            if place.follows:
                mapping.close()
        mine = mapping.to_bytes(share)
        answers = [b""] * size
        for r, answer in {**exchange(mine if senders else b"", takers), rank: mine}.items():
            answers[r] = answer
        program = shares(program, peer.taken_shares(answers))
        pulled, rest = peer.split(program, peer.taken_roots(answers), kind.takes)
        plan = _planned(program, rest, tuple(peer.refusals(answers, labels, rank)))
        wired = any_rank(bool(plan.p2p_in + plan.p2p_out), rank, size, exchange)
        if place is not None and place.follows:
            plan = replace(plan, pulled_in=int(row_wire_bytes(place.rows).sum()))
    except BaseException:
        mapping.close()
        if place is not None:
            place.close()
        raise
    return Ways(pulled, rest, mapping, export, plan, wired, place, kind)


def open_routes(link: Link, program: Program, roots: Sequence[torch.Tensor], exchange: Exchange, **options) -> Routed:
    """`find_ways`, and then `Ways.over` a link that is open already."""
    src_roots = options.pop("src_roots", None)
    allow_peer, marks = options.pop("allow_peer", True), options.pop("marks", None)
    ways = find_ways(
        program, link.size, link.device, roots, exchange, link.labels,
        src_roots=src_roots, allow_peer=allow_peer, marks=marks,
    )  # fmt: skip
    try:
        return ways.over(link, roots, src_roots=src_roots, **options)
    except BaseException:
        ways.close()
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
    """The link of ranks that pull all rows: it carries nothing."""

    grouped = True

    def __init__(self, rank: int, size: int, device: torch.device, labels: Sequence[str] = ()):
        self.rank, self.size, self.device = rank, size, device
        self.labels = tuple(labels) or tuple(f"rank {i}" for i in range(size))

    def post(self, receives, sends):
        if receives or sends:
            raise RuntimeError("there is no link between these ranks, and some rows cannot be pulled")
        return [], []

    def finish(self, deadline: float, poll: Callable[[], None] = lambda: None) -> None:
        if self.device.type == "cuda":
            wait_for_stream(self.device, deadline, self.labels[self.rank], poll=poll)

    def begin_broadcast(self, tensor, root: int, deadline: float):
        raise RuntimeError("there is no link between these ranks")

    def start(self, collective):
        raise RuntimeError("there is no link between these ranks")

    def warm(self, peers) -> None:
        pass

    def abort(self, seconds: float = ABORT_S) -> None:
        pass

    def close(self) -> None:
        pass

    def blame(self, pending) -> list[str]:
        return []
