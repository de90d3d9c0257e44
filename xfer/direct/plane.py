"""The direct route's data plane: each byte goes straight from its source storage to its destination storage, by one replica's plan.

All ranks exchange their layouts and compute the same plan (rendezvous/layouts.py). They test which storages they can map of one another,
open a link for the rest, and run the program. `Storages` hides the differences between trainers and workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.direct import late
from xfer.errors import PeerLost, PlanMismatch, RebindError
from xfer.kernels.marks import ByteRange
from xfer.participants.data_plane import PlanFacts, Progress, Stop
from xfer.participants.lane import labels_of
from xfer.plan.cache import PlanCache
from xfer.plan.options import PlanOptions
from xfer.plan.part import PlanPart
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.store import RendezvousStore
from xfer.timeline import mark
from xfer.trace.catalog import Catalog
from xfer.transport import peer_rdma, routes
from xfer.transport.changes import HeldBytes
from xfer.transport.group import Link
from xfer.transport.p2p import WAVE_BYTES
from xfer.transport.relay_place import Relay, offer_of
from xfer.transport.scratch import Held, Scratch

logger = logging.getLogger("xfer")


class Storages(Protocol):
    """One rank's storages, and its work before and after bytes move. Lanes' threads call the methods.

    Attributes:
        role: "trainer", "worker", or "donor": a worker from which another replica reads.
        index: Rank among the trainers, or among the workers of its replica.
        device: Where the storages lie.
        catalog: The session's checkpoint tensors.
        inventory: Digest of the layout that `roots` follows.
    """

    role: str
    index: int
    device: torch.device

    @property
    def catalog(self) -> Catalog: ...

    @property
    def inventory(self) -> bytes: ...

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        """Return the binding generation and the storages, flat uint8, in the layout's order."""

    def opened(self, replica: int, plan: PlanPart, generation: int) -> None:
        """Called when a link for this plan is open and storages of `generation` are bound to it. If a newer generation exists by now,
        the routes are opened again."""

    def marks(self, plan: str) -> torch.Tensor | None:
        """Return the marks of what changed in the storages (kernels/marks.py), at one place as long as the binding generation is the
        same; None if there are none of all that the plan with this digest reads."""

    def remembered(self, attempt: int, plan: str) -> tuple[Sequence[torch.Tensor], Sequence[ByteRange]] | None:
        """Return copies of the bytes that this plan reads, as this refit sent them, and the parts of the storages that they are copies
        of; None if there are none."""

    def as_bound(self) -> bool:
        """Whether the storages are those of `roots`, by a whole look. Called on a worker that stages bytes. May raise instead of False."""

    def before(self) -> None:
        """Called just before the first byte may move."""

    def gate(self, go: m.Go, plan: PlanPart, routed: routes.Routed) -> routes.EarlyGate | None:
        """Return the gate that is called between the parts of this rank's pull, or None. Without one, and where replicas do not hand
        bytes on, the pull has one part."""

    def after(self, go: m.Go, plan: PlanPart) -> tuple[tuple[m.Checksum, ...], bytes]:
        """Called when the last byte has arrived.

        Returns:
            Checksums if `go.verify`, and on a trainer the digests of the boxes that other trainers hold too.
        """


@dataclass(frozen=True, slots=True)
class _Staged:
    """The bytes that an attempt has brought into scratch.

    Attributes:
        attempt: Its number.
        bound: Binding generation of the live storages.
        base: The refit by changes whose bytes the live storages held; 0: none.
        held: The bytes.
        looked: Whether the live storages were unchanged when the last byte had come.
    """

    attempt: int
    bound: int
    base: int
    held: Held
    looked: bool


class DirectPlane:
    """Implements `DataPlane`.

    Args:
        party: Client of the rendezvous.
        side: This rank's storages.
        replica: The replica that the plane serves.
        joint_rank: This rank in the replica's domain: trainers first, then workers. In a first copy a worker gets another joint rank
            with its plan.
        cache: Where plans are kept between runs.
    """

    def __init__(
        self, party: RendezvousClient, side: Storages, replica: int, joint_rank: int, cache: PlanCache | None = None
    ):
        self.party, self.side, self.replica, self.joint_rank, self.cache = party, side, replica, joint_rank, cache
        self.facts: PlanFacts | None = None
        self.part: PlanPart | None = None
        self.inputs: m.PlanInputs | None = None  # inputs of `part`
        self.exchange_seconds = 0.0  # time in which the layouts were exchanged and checked
        self._planned_from = b""  # digest of this rank's own layout in the plan
        self._agreed = True  # all ranks agreed on `part`, and it is in the cache
        self._deadline_s = 0.0
        self._link: Link | None = None
        self._routed: routes.Routed | None = None
        self._bound = -1  # binding generation of the routes
        self._stream: torch.cuda.Stream | None = None
        self._offer: tuple[object, str, Any] | None = None  # of these storages by this plan
        self._scratch: Scratch | None = None  # on a worker, where bytes are staged
        self._held: _Staged | None = None
        self._applied: Held | None = None  # the last one; a copy of it may still be on the device
        self._lock = threading.Lock()

    # ---- from other threads

    @property
    def extra_bytes(self) -> int:
        return self._scratch_bytes + (self._routed.extra_bytes if self._routed is not None else 0)

    @property
    def read_by_others(self) -> bool:
        routed = self._routed
        return routed is not None and routed.plan.pulled_out > 0

    def cut_off(self) -> bool:
        routed = self._routed
        return routed is not None and routed.export is not None and routed.export.cut_off()

    @property
    def sends(self) -> bool:
        """Whether this rank sends messages over its link in a refit by the present routes."""
        routed = self._routed
        return routed is not None and routed.plan.p2p_out > 0

    @property
    def drained(self) -> bool:
        routed, applied = self._routed, self._applied
        return all(x is None or x.drained for x in (routed, applied, *self._late()))

    @property
    def unmapped(self) -> bool:
        return not self._late()

    def _late(self) -> list[routes.Routed]:
        return late.held(self.party.label, self.replica)

    def expect(self, go: m.Go) -> None:
        pass

    def holds(self, attempt: int, base: int) -> bool:
        staged = self._staged(attempt)
        if staged is None or self.side.inventory != self._planned_from:
            return False
        return not staged.held.needs_base or staged.base == base

    def looked(self, attempt: int) -> bool:
        staged = self._staged(attempt)
        return staged is not None and staged.looked

    def _staged(self, attempt: int) -> _Staged | None:
        """Return what this attempt has staged for the storages as they are bound now."""
        staged = self._held
        fits = staged is not None and (staged.attempt, staged.bound) == (attempt, self.side.roots()[0])
        return staged if fits else None

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
            link.abort(0.0)  # no wait: this may be the thread that receives messages for all lanes

    def wait_still(self, seconds: float) -> bool:
        link = self._link
        return link is None or link.drained(seconds)

    def moved(self) -> bool:
        routed = self._routed
        return self._bound not in (-1, self.side.roots()[0]) or routed is not None and bool(routed.stale())

    def explain(self) -> str:
        plan = self.part.explain() if self.part is not None else ""
        how = self._routed.plan.explain() if self._routed is not None else ""
        return "\n".join(filter(None, [plan, how]))

    def forget(self) -> None:
        with self._lock:
            self._routed, self._bound = None, -1

    # ---- plan

    def make_plan(self, inputs: m.PlanInputs, stop: Stop) -> PlanFacts:
        self.close()
        self._offer = self._held = None
        self.inputs, self._deadline_s, shelf = inputs, inputs.deadline_s, self.party.shelf
        if self.side.role == "worker":
            self.joint_rank = inputs.sources + self.side.index
        self.part, inventories = shelf.plan(
            inputs, self.joint_rank, self.side.catalog, self.options(inputs), self.cache, stop.stopped
        )
        self.exchange_seconds = shelf.exchange_s[self.replica]
        self._agreed = shelf.cached.get(self.replica, False)
        self._planned_from = inventories[self.joint_rank]
        part, s = self.part, self.part.summary
        worker = self.joint_rank - part.trainers
        self.facts = PlanFacts(
            part.digest,
            labels_of(range(part.trainers), self.replica, part.workers, inputs.donor),
            s.bytes_in[worker] if worker >= 0 else 0,
            s.bytes_out[self.joint_rank] if worker < 0 else 0,
            s.nbytes,
            s.broadcast_bytes,
            s.direct_share,
            s.kept_bytes,
        )
        return self.facts

    def options(self, inputs: m.PlanInputs) -> PlanOptions:
        """Return the plan's options. They are equal on all ranks of the domain, because they follow from the coordinator's message."""
        # A site places no replica's workers as sources of another one.
        site, cuda = self.party.site if inputs.donor < 0 else None, self.side.device.type == "cuda"
        return PlanOptions(
            bucket_bytes=inputs.bucket_bytes,
            drop=inputs.drop,
            narrow=inputs.narrow,
            rotation=inputs.turn,
            rotations=inputs.replicas,
            wave_bytes=max(WAVE_BYTES["cuda"], inputs.bucket_bytes) if cuda else 0,
            site=site,
            replica=inputs.replica if site is not None else 0,
            relay=inputs.relay,
        )

    def agreed(self) -> None:
        if self.cache is not None and self.part is not None and not self._agreed:
            self.cache.put(self.part)  # only now: a link opens only if the digests of all ranks are equal
        self._agreed = True

    # ---- open

    def open(self, order: m.OpenLink, stop: Stop) -> m.LinkOpen:
        prefix = f"r{self.replica}/e{order.epoch}/"
        store = RendezvousStore(self.party.questions, prefix, self._deadline_s, stop.stopped)
        self._held = None
        old = self._close_routes()  # held until all destinations have unmapped: it keeps this rank's old storages alive
        if order.fresh:
            self.close()
        stop.check()
        try:
            self._open_routes(store, order, stop)
        finally:
            if self._routed is None:
                self._bound = -1  # otherwise each later refit would open all other replicas' routes again
        del old
        place = self._routed.place if self._routed is not None else None
        said = (place.hand(), place.follows, place.receives) if place is not None else ()
        return m.LinkOpen(self.replica, order.epoch, *said)

    def _open_routes(self, store: RendezvousStore, order: m.OpenLink, stop: Stop) -> None:
        """Open link and routes. Collective over the domain, in the same order on all ranks."""
        part, facts = self.part, self.facts
        digest = part.digest if part is not None else ""
        while self._bound != self.side.roots()[0]:  # otherwise `moved` could miss a move that happens in between
            (self._bound, roots), marks = self.side.roots(), self.side.marks(digest)
        if part is None or facts is None or self.side.inventory != self._planned_from:
            raise PlanMismatch(
                "this rank's layout is not the one that the plan was made from; nothing was moved",
                where=self.party.label,
            )
        rank, labels, device = self.joint_rank, facts.labels, self.side.device
        scratch = self._scratch = self._scratch_for(order, part, roots)
        roots = roots if scratch is None else scratch.roots
        exchange = routes.exchange_over_store(store, rank, len(labels), "routes")
        peers = device.type != "cpu" or order.host_pull or order.rdma
        relay = Relay(order.hands, self._say_part_ready, self._offered(part, roots)) if order.relay else None
        ways = routes.find_ways(
            part.program, len(labels), device, roots, exchange, labels,
            allow_peer=peers, relay=relay, marks=marks, rdma=order.rdma,
        )  # fmt: skip
        beside = ways.wired and self.side.role == "trainer" or scratch is not None or self.side.role == "donor"
        if beside and device.type == "cuda" and self._stream is None:
            # This thread uses the stream from now on. On the default stream each lane would wait for all others, and the work of
            # the trainer, or of an engine that serves meanwhile, for all lanes. A trainer whose bytes are all pulled needs no stream:
            # the first one costs a memory pool.
            self._stream = torch.cuda.Stream(device)
            torch.cuda.set_stream(self._stream)
        try:
            link = self._link
            if ways.wired and (link is None or isinstance(link, routes.NoLink)):
                link = routes.open_link(
                    store, rank, len(labels), self._deadline_s, device, labels, stop.stopped, ways.plan.refused
                )
            with self._lock:
                self._link = link = link or routes.NoLink(rank, len(labels), device, labels)
            stop.check()
            routed = ways.over(link, roots, scratch=scratch)
        except BaseException:
            ways.close()
            raise
        if ways.place is not None and ways.place.why:
            logger.warning(
                "xfer: %s takes all its bytes from the trainers, none from another replica: %s",
                self.party.label, ways.place.why,
            )  # fmt: skip
        with self._lock:
            self._routed = routed
        if ways.wired:
            self.side.opened(self.replica, part, self._bound)
        stop.check()  # a `stop` that was called meanwhile saw no routes

    def _scratch_for(self, order: m.OpenLink, part: PlanPart, live: Sequence[torch.Tensor]) -> Scratch | None:
        """Return the scratch into which a worker's bytes come: the present one, if it fits."""
        old, self._scratch = self._scratch, None
        if order.scratch is None or self.side.role != "worker":
            return None
        if old is not None and old.serves(part.program, live, order.scratch):
            return old
        return Scratch(part.program, live, order.scratch, self.party.label, old)

    def _offered(self, part: PlanPart, roots: Sequence[torch.Tensor]) -> Any:
        """Return the offer of a worker's storages to other replicas. It stays the same as long as the storages do."""
        if self.side.role != "worker":
            return None
        known, which = self._offer, self._bound if self._scratch is None else [t.data_ptr() for t in roots]
        if known is None or known[:2] != (which, part.digest) or known[2].stale():
            kind, number = routes.PEERS.get(self.side.device.type), part.trainers + part.workers + self.replica
            if kind is None:
                return None
            known = which, part.digest, offer_of(kind, part.program, roots, number, self.side.device)
            self._offer = known
        return known[2]

    def _say_part_ready(self, attempt: int, part: int) -> None:
        self.party.try_send(m.PartReady(self.replica, attempt, part))

    # ---- run

    def run(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        stop.check()
        return self._apply(go, stop, until) if go.kind is m.GoKind.APPLY else self._move(go, stop, until, progress)

    def _move(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        routed, side, part = self._routed, self.side, self.part

        def moved(wave: int, nbytes: int) -> None:
            faults.point(side.role, side.index, "wave")
            progress(wave, nbytes)

        if routed is None or part is None or self._bound != side.roots()[0]:
            raise PlanMismatch(
                "storages of this rank moved, and the routes to them were not opened again; nothing was moved",
                where=self.party.label,
            )
        if side.role == "worker" and not self.drained:
            raise PeerLost(
                "work of an earlier refit is still on the device and may still write here; nothing was moved",
                ["refit again later, or restart this engine"],
                where=self.party.label,
                drained=False,
            )
        self._held = None
        if go.kind is m.GoKind.MOVE:
            side.before()
        faults.point(side.role, side.index, "moving")
        if routed.place is not None:
            routed.place.steps.begin(go.attempt, until, stop.stopped, go.tells)
        sent = side.remembered(go.base, part.digest) or ()
        base = HeldBytes(go.base, int(part.digest[:15], 16), *sent) if go.base else None
        stats = routed.run(until, stop.stopped, moved, side.gate(go, part, routed), base)
        handed_on = sum(p.bytes_in for p in stats.peers if p.peer >= part.trainers)
        mark(self.party.label, "bytes have moved")
        stop.check()
        if (held := routed.held(base is not None)) is not None:
            looked = go.kind is m.GoKind.STAGE and self._looks_as_bound()
            self._held = _Staged(go.attempt, self._bound, go.base, held, looked)
        rest = m.Moved(self.replica) if go.kind is m.GoKind.STAGE else self._finish(go, stop, until, part)
        return msgspec.structs.replace(
            rest, bytes_in=stats.bytes_in, bytes_out=stats.bytes_out, pack_s=stats.pack_s, wire_s=stats.wire_s,
            unpack_s=stats.unpack_s, routes=self._by_route(routed, handed_on), scratch_bytes=self._scratch_bytes,
        )  # fmt: skip

    def _looks_as_bound(self) -> bool:
        """Look at the storages while the engine serves. False after an error: the whole look in the pause then raises it."""
        try:
            return self.side.as_bound()
        except Exception:
            return False

    def _look_again(self) -> None:
        """Check before the commit what the quick look in the pause leaves out."""
        if not self.side.as_bound():
            raise RebindError(
                "storages of this worker changed after its bytes were staged; the next refit reads them anew",
                where=self.party.label,
            )

    def _apply(self, go: m.Go, stop: Stop, until: float) -> m.Moved:
        """Bring what is staged into live storage."""
        if self.part is None or self._staged(go.attempt) is None:
            raise PlanMismatch("this worker does not hold the bytes of this refit", where=self.party.label)
        self.side.before()
        faults.point(self.side.role, self.side.index, "apply")
        return self._finish(go, stop, until, self.part)

    def _finish(self, go: m.Go, stop: Stop, until: float, part: PlanPart) -> m.Moved:
        """Bring what is held into live storage, if anything is, and do what follows the last byte."""
        staged, self._held = self._held, None
        began = time.perf_counter()
        if staged is not None:
            self._applied = staged.held
            staged.held.apply(until, self.party.label, self._look_again if staged.looked else lambda: None)
            self._applied = None
            mark(self.party.label, "bytes are applied")
            stop.check()
        applied = time.perf_counter()
        sums, shared = self.side.after(go, part)
        return m.Moved(
            self.replica, verify_s=time.perf_counter() - applied, checksums=sums, held=shared,
            apply_s=applied - began if staged is not None else 0.0, scratch_bytes=self._scratch_bytes,
        )  # fmt: skip

    @property
    def _scratch_bytes(self) -> int:
        return self._scratch.extra_bytes if self._scratch is not None else 0

    def _by_route(self, routed: routes.Routed, handed_on: int) -> tuple[m.RouteTaken, ...]:
        """Return the bytes that came by each route. `handed_on`: bytes that other workers of the replica sent over the link."""
        r, wire = routed.report, "nccl" if self.side.device.type == "cuda" else "gloo"
        pulled = "rdma" if routed.kind is peer_rdma else "peer"
        pulled = "relay" if routed.place is not None and routed.place.follows else pulled
        some = (
            (pulled, r.pulled_bytes, r.pull_s),
            (wire, r.p2p_bytes - handed_on, r.p2p_s),
            ("relay", handed_on, r.p2p_s),
        )
        return tuple(m.RouteTaken(name, n, seconds) for name, n, seconds in some if n)

    # ---- close

    def unmap(self) -> None:
        self._close_routes()

    def close_routes(self) -> None:
        self._close_routes()
        self._scratch = None  # what is staged keeps it until it is applied

    def _close_routes(self) -> routes.Routed | None:
        """Unmap other ranks' memory, in the background if the device still reads it.

        Returns:
            The old routes, which keep this rank's own storages alive.
        """
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
