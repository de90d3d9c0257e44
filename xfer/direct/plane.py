"""The direct route's data plane: each byte goes from where it lies to where it belongs, by the plan of one replica.

Ranks exchange their layouts and plan alike (rendezvous' Shelf), find out which storages they can map of one another, open
a link for the rest, and run the program. What differs between trainers and workers hangs behind `Storages`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from xfer.coordinator import messages as m
from xfer.direct import late
from xfer.errors import PeerLost, PlanMismatch
from xfer.participants import faults
from xfer.participants.data_plane import PlanFacts, Progress, Stop
from xfer.participants.lane import labels_of
from xfer.participants.timeline import mark
from xfer.plan.cache import PlanCache
from xfer.plan.options import PlanOptions
from xfer.plan.part import PlanPart
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.store import RendezvousStore
from xfer.trace.catalog import Catalog
from xfer.transport import routes
from xfer.transport.group import Link
from xfer.transport.p2p import WAVE_BYTES

logger = logging.getLogger("xfer")


class Storages(Protocol):
    """One rank's storages, and what its side does before and after bytes move. Called on lanes' threads."""

    role: str
    index: int
    device: torch.device
    catalog: Catalog
    inventory: bytes
    """Digest of the layout that `roots` follows."""

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        """(binding generation, flat uint8 tensors in the layout's root order)."""

    def opened(self, replica: int, plan: PlanPart, generation: int) -> None:
        """A link carries bytes of this plan, and storages of that generation are bound to it. A newer generation may
        exist by now; then the routes are opened again."""

    def before(self) -> None:
        """Called just before the first byte may move."""

    def gate(self, go: m.Go, plan: PlanPart, routed: routes.Routed) -> routes.EarlyGate | None:
        """What happens between the parts of this rank's pull. None: nothing; outside of a relay chain it is one part."""

    def after(self, go: m.Go, plan: PlanPart) -> tuple[tuple[m.Checksum, ...], bytes]:
        """Called when the last byte is here. Returns checksums when `go.verify`, and on a trainer digests of the boxes
        that other trainers hold too."""


class DirectPlane:
    """See `DataPlane`."""

    def __init__(
        self, party: RendezvousClient, side: Storages, replica: int, joint_rank: int, cache: PlanCache | None = None
    ):
        self.party, self.side, self.replica, self.joint_rank, self.cache = party, side, replica, joint_rank, cache
        self.facts: PlanFacts | None = None
        self.part: PlanPart | None = None
        self.inputs: m.PlanInputs | None = None  # what `part` was made from
        self.exchange_seconds = 0.0  # until the layouts were here and checked
        self._planned_from = b""  # digest of this rank's own layout in the plan
        self._agreed = True  # all ranks agree on `part`, and it is in the cache
        self._deadline_s = 0.0
        self._link: Link | None = None
        self._routed: routes.Routed | None = None
        self._bound = -1  # binding generation that the routes were opened for
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()

    # ---- from other threads

    @property
    def extra_bytes(self) -> int:
        return self._routed.extra_bytes if self._routed is not None else 0

    @property
    def read_by_others(self) -> bool:
        routed = self._routed
        return routed is not None and routed.plan.pulled_out > 0

    @property
    def drained(self) -> bool:
        routed = self._routed
        return (routed is None or routed.drained) and all(r.drained for r in self._late())

    @property
    def unmapped(self) -> bool:
        return not self._late()

    def _late(self) -> list[routes.Routed]:
        return late.held(self.party.label, self.replica)

    def expect(self, go: m.Go) -> None:
        pass

    def part_ready(self, ready: m.PartReady) -> None:
        routed = self._routed
        if routed is not None and routed.place is not None:
            routed.place.steps.there(ready.attempt, ready.part)

    def stop(self) -> None:
        with self._lock:
            link, routed = self._link, self._routed
        if routed is not None:
            routed.stop()
        if link is not None:
            link.abort(0.0)  # this may be the thread that reads for all lanes

    def wait_still(self, seconds: float) -> bool:
        link = self._link
        return link is None or link.drained(seconds)

    def moved(self) -> bool:
        routed = self._routed
        return self._bound not in (-1, self.side.roots()[0]) or routed is not None and bool(routed.stale())

    def explain(self) -> str:
        how = self._routed.plan.explain() if self._routed is not None else ""
        return "\n".join(filter(None, [self.part.explain(), how]))

    def forget(self) -> None:
        with self._lock:
            self._routed, self._bound = None, -1

    # ---- plan

    def make_plan(self, inputs: m.PlanInputs, stop: Stop) -> PlanFacts:
        self.close()
        self.inputs, self._deadline_s, shelf = inputs, inputs.deadline_s, self.party.shelf
        self.part, inventories = shelf.plan(
            inputs, self.joint_rank, self.side.catalog, self.options(inputs), self.cache, stop.check
        )
        self.exchange_seconds = shelf.exchange_s[self.replica]
        self._agreed = shelf.cached.get(self.replica, False)
        self._planned_from = inventories[self.joint_rank]
        part, s = self.part, self.part.summary
        worker = self.joint_rank - part.trainers
        self.facts = PlanFacts(
            part.digest,
            labels_of(range(part.trainers), self.replica, part.workers),
            s.bytes_in[worker] if worker >= 0 else 0,
            s.bytes_out[self.joint_rank] if worker < 0 else 0,
            s.nbytes,
            s.broadcast_bytes,
            s.direct_share,
            s.kept_bytes,
        )
        return self.facts

    def options(self, inputs: m.PlanInputs) -> PlanOptions:
        """What every rank of the domain plans by, from what the coordinator told all of them."""
        site, cuda = self.party.site, self.side.device.type == "cuda"
        return PlanOptions(
            bucket_bytes=inputs.bucket_bytes,
            drop=inputs.drop,
            narrow=inputs.narrow,
            rotation=inputs.turn,
            rotations=inputs.replicas,
            wave_bytes=max(WAVE_BYTES["cuda"], inputs.bucket_bytes) if cuda else 0,
            **({"site": site, "replica": inputs.replica} if site is not None else {}),
        )

    def agreed(self) -> None:
        if self.cache is not None and not self._agreed:
            self.cache.put(self.part)  # not sooner: no link is opened unless the digests of all ranks are equal
        self._agreed = True

    # ---- open

    def open(self, order: m.OpenLink, stop: Stop) -> m.LinkOpen:
        prefix = f"r{self.replica}/e{order.epoch}/"
        store = RendezvousStore(self.party.channel, self.party.replies, prefix, self._deadline_s, stop.stopped)
        old = self._close_routes()  # kept until all destinations have unmapped: it holds this rank's old storages
        if order.fresh:
            self.close()
        stop.check()
        try:
            self._open_routes(store, order, stop)
        finally:
            if self._routed is None:
                self._bound = -1  # or each refit from now on would open all other replicas' routes again
        del old
        place = self._routed.place
        said = (place.hand(), place.follows) if place is not None else ()
        return m.LinkOpen(self.replica, order.epoch, *said)

    def _open_routes(self, store: RendezvousStore, order: m.OpenLink, stop: Stop) -> None:
        """Collective over the domain, in the same order on all ranks."""
        while self._bound != self.side.roots()[0]:  # else `moved` could be asked after a move that is not noted yet
            self._bound, roots = self.side.roots()
        if self.side.inventory != self._planned_from:
            raise PlanMismatch(
                "this rank's layout is not the one that the plan was made from; nothing was moved",
                where=self.party.label,
            )
        rank, labels, device = self.joint_rank, self.facts.labels, self.side.device
        exchange = routes.exchange_over_store(store, rank, len(labels), "routes")
        peers = device.type != "cpu" or order.host_pull
        ways = routes.find_ways(self.part.program, len(labels), device, roots, exchange, labels, allow_peer=peers)
        if ways.wired and device.type == "cuda" and self.side.role == "trainer" and self._stream is None:
            # For this thread from now on. On the default stream each lane would wait for all others, and the trainer's
            # work for all of them. A rank whose bytes are all pulled needs none: a first stream costs a pool of memory.
            self._stream = torch.cuda.Stream(device)
            torch.cuda.set_stream(self._stream)
        place = None
        try:
            if order.relay and self.side.role == "worker":
                place = ways.place(roots, len(labels), device, order.before, self._say_part_ready)
            link = self._link
            if ways.wired and (link is None or isinstance(link, routes.NoLink)):
                link = routes.open_link(
                    store, rank, len(labels), self._deadline_s, device, labels, stop.stopped, ways.plan.refused
                )
            with self._lock:
                self._link = link = link or routes.NoLink(rank, len(labels), device, labels)
            stop.check()
            routed = ways.over(link, roots, place=place)
        except BaseException:
            ways.mapping.close()
            if place is not None:
                place.close()
            raise
        if place is not None and place.why:
            logger.warning(
                "xfer: %s pulls from the trainers, not from the replica before: %s", self.party.label, place.why
            )
        with self._lock:
            self._routed = routed
        if ways.wired:
            self.side.opened(self.replica, self.part, self._bound)
        stop.check()  # a `stop` that came meanwhile has seen no routes

    def _say_part_ready(self, attempt: int, part: int) -> None:
        self.party.try_send(m.PartReady(self.replica, attempt, part))

    # ---- run

    def run(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        stop.check()
        routed, side = self._routed, self.side

        def moved(wave: int, nbytes: int) -> None:
            faults.point(side.role, side.index, "wave")
            progress(wave, nbytes)

        if routed is None or self._bound != side.roots()[0]:
            raise PlanMismatch(
                "storages of this rank moved and the routes to them were not opened again; nothing was moved",
                where=self.party.label,
            )
        if side.role == "worker" and not self.drained:
            raise PeerLost(
                "what an earlier refit began has not left the device, and may still write here; nothing was moved",
                ["refit again later, or start this engine anew"],
                where=self.party.label,
                drained=False,
            )
        side.before()
        faults.point(side.role, side.index, "moving")
        if routed.place is not None:
            routed.place.steps.begin(go.attempt, until, stop.stopped, go.tells)
        stats = routed.run(until, stop.stopped, moved, side.gate(go, self.part, routed))
        began = time.perf_counter()
        mark(self.party.label, "bytes have moved")
        stop.check()
        sums, held = side.after(go, self.part)
        return m.Moved(
            self.replica, stats.bytes_in, stats.bytes_out, stats.pack_s, stats.wire_s, stats.unpack_s,
            time.perf_counter() - began, sums, self._by_route(routed), held,
        )  # fmt: skip

    def _by_route(self, routed: routes.Routed) -> tuple[m.RouteBytes, ...]:
        r, wire = routed.report, "nccl" if self.side.device.type == "cuda" else "gloo"
        pulled = "relay" if routed.place is not None and routed.place.follows else "peer"
        some = ((pulled, r.pulled_bytes, r.pull_s), (wire, r.p2p_bytes, r.p2p_s))
        return tuple(m.RouteBytes(name, n, seconds) for name, n, seconds in some if n)

    # ---- close

    def unmap(self) -> None:
        self._close_routes()

    close_routes = unmap

    def _close_routes(self) -> routes.Routed | None:
        """Unmap what this rank has mapped, later if it is being read. Returns the routes, which hold its own storages."""
        with self._lock:
            old, self._routed, self._bound = self._routed, None, -1
        if old is not None and not old.close():
            late.close_later(old, self.party.label, self.replica, self.side.device)
        return old

    def close(self) -> None:
        self._close_routes()
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
