"""The mix of routes that one rank uses for one program: what a taker can map it pulls, everything else goes by p2p.

`open_routes` is collective: every rank of the sub-plan calls it with the same exchange, twice around. Which route a row
takes is decided by opening a probe, never by host names. A `Routed` then runs like a `P2P`. Not here: the routes
themselves (peer.py, p2p.py), who opens and closes them (session/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from xfer.plan.program import Op, Program
from xfer.transport.group import Link
from xfer.transport.p2p import P2P, TransferStats
from xfer.transport.peer import Export, Mapping, Pull, refusals, split, taken_roots

Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes to every rank, in rank order. Called in the same order by all ranks."""


def exchange_over_store(store, rank: int, size: int, name: str = "peer") -> Exchange:
    """Over a store with a prefix of this group's own; values are up to a few MiB (64 bytes per allocation)."""
    turn = 0

    def exchange(data: bytes) -> list[bytes]:
        nonlocal turn
        turn += 1
        store.set(f"{name}/{turn}/{rank}", b"+" + data)
        return [bytes(store.get(f"{name}/{turn}/{r}"))[1:] for r in range(size)]

    return exchange


def exchange_over_link(link: Link, seconds: float) -> Exchange:
    """Over a link that is open already: lengths first, then each rank's bytes by broadcast."""

    def exchange(data: bytes) -> list[bytes]:
        until = time.monotonic() + seconds
        out = []
        for r in range(link.size):
            length = torch.tensor([len(data)], dtype=torch.int64).to(link.device)
            link.broadcast(length, r, until)
            n = int(length.item())
            body = torch.empty(n, dtype=torch.uint8)
            if r == link.rank and n:
                body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            body = body.to(link.device)
            link.broadcast(body, r, until)
            out.append(data if r == link.rank else bytes(body.cpu().numpy()))
        return out

    return exchange


@dataclass(frozen=True, slots=True)
class RouteReport:
    """Of the last run of one rank: wire bytes in by route and the pull's own seconds; why not everything was pulled."""

    pulled_bytes: int
    pull_s: float
    p2p_bytes: int
    refused: tuple[str, ...]


class Routed:
    """Runs a program over both routes. Same calls as `P2P`; `report` says what went which way."""

    def __init__(
        self, link: Link, p2p: P2P, pull: Pull | None, mapping: Mapping, export: Export | None, refused: Sequence[str]
    ):
        self.link, self.p2p, self.pull, self.mapping, self.export = link, p2p, pull, mapping, export
        self.extra_bytes = p2p.extra_bytes + (pull.extra_bytes if pull else 0)
        self.refused = tuple(refused)
        self.report = RouteReport(0, 0.0, 0, self.refused)

    @property
    def program(self) -> Program:
        """What goes by p2p, and fills."""
        return self.p2p.program

    def stop(self) -> None:
        """From another thread, beside `link.abort()`: ends a pull."""
        if self.pull is not None:
            self.pull.stop()

    def run(
        self,
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda wave, nbytes: None,
    ) -> TransferStats:
        """As `P2P.run`. Returns, or raises, with this rank's pulls drained (see `Pull.finish`)."""
        t0 = time.perf_counter()
        if self.pull is None:
            stats = self.p2p.run(deadline, cancelled, progress)
            self.report = RouteReport(0, 0.0, stats.bytes_in, self.refused)
            return stats
        self.pull.begin()
        try:
            stats = self.p2p.run(deadline, cancelled, progress)
        except BaseException:
            self.pull.stop()
            self.pull.finish(deadline, lambda: True)  # what it raises says more than the first error: still being read
            raise
        pulled = self.pull.finish(deadline, cancelled, self.link.labels[self.link.rank])
        self.report = RouteReport(pulled.bytes_in, pulled.seconds, stats.bytes_in, self.refused)
        progress(stats.waves, stats.bytes_in + pulled.bytes_in)
        return replace(
            stats,
            bytes_in=stats.bytes_in + pulled.bytes_in,
            wire_s=max(stats.wire_s, pulled.seconds),
            seconds=time.perf_counter() - t0,
            extra_bytes=self.extra_bytes,
        )

    def close(self) -> None:
        """Unmaps the senders' memory. After that they may free it. The link stays the caller's."""
        self.pull = None
        self.mapping.close()


def open_routes(
    link: Link,
    program: Program,
    roots: Sequence[torch.Tensor],
    exchange: Exchange,
    *,
    src_roots: Sequence[torch.Tensor] | None = None,
    allow_peer: bool = True,
    **p2p_options: int,
) -> Routed:
    """Collective. `roots`, `src_roots`: as for `P2P`. allow_peer False: this rank neither offers nor maps."""
    rank, device = program.rank, link.device
    allow_peer = allow_peer and device.type == "cuda"
    rows = program.rows[program.rows["op"] != Op.FILL]
    sends = bool(((rows["src"] == rank) & (rows["dst"] != rank)).any())
    export = Export(rank, roots if src_roots is None else src_roots, device) if sends and allow_peer else None
    offers = exchange(export.to_bytes() if export else b"")
    mapping = Mapping(rank, device)
    incoming = rows[(rows["dst"] == rank) & (rows["src"] != rank)]
    if allow_peer:
        for sender in sorted(set(incoming["src"].tolist())):
            if offers[sender]:
                wanted = sorted(set(incoming["src_root"][incoming["src"] == sender].tolist()))
                mapping.open(offers[sender], sender, wanted)
    answers = exchange(mapping.to_bytes() if len(incoming) else b"")
    pulled, rest = split(program, taken_roots(answers))
    pull = Pull(pulled, mapping, roots) if len(pulled) else None
    p2p = P2P(link, rest, roots, src_roots=src_roots, **p2p_options)
    return Routed(link, p2p, pull, mapping, export, [r for r in refusals(answers) if f"rank {rank} " in r])


class NoLink(Link):
    """For worlds in which everything is pulled, or ranks share a GPU, where NCCL refuses to meet: carries nothing."""

    grouped = True

    def __init__(self, rank: int, size: int, device: torch.device, labels: Sequence[str] = ()):
        self.rank, self.size, self.device = rank, size, device
        self.labels = tuple(labels) or tuple(f"rank {i}" for i in range(size))

    def post(self, receives, sends):
        if receives or sends:
            raise RuntimeError("there is no link between these ranks, and some rows cannot be pulled")
        return [], []

    def finish(self, deadline: float) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def broadcast(self, tensor, root: int, deadline: float) -> None:
        raise RuntimeError("there is no link between these ranks")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    def blame(self, pending) -> list[str]:
        return []
