"""One rank's part in one replica: plan it, open its link, run its program. A thread of its own, the same for both sides.

A trainer has a lane per replica, so that a replica that hangs or dies holds up nobody else's; a worker has one. The lane
never decides anything: it answers `Planned`, `LinkOpen`, `Done` or `Failed`, and stops when told to (`cancel`).

What differs between the sides hangs behind `Side`: where storages are, and what happens before and after the bytes move.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from xfer.coordinator import messages as m
from xfer.ending import wait_for_all
from xfer.errors import PeerLost, PlanMismatch, XferError
from xfer.participants import faults, late
from xfer.participants.timeline import mark
from xfer.participants.turns import short_sleeps
from xfer.plan.cache import PlanCache
from xfer.plan.explain import size
from xfer.plan.options import PlanOptions
from xfer.plan.part import Part
from xfer.rendezvous.store import RendezvousStore
from xfer.trace.catalog import Catalog
from xfer.transport import routes
from xfer.transport.group import Link
from xfer.transport.p2p import WAVE_BYTES

logger = logging.getLogger("xfer")
PROGRESS_S = 0.5
"""Seconds between two progress messages of a running transfer."""


class Side(Protocol):
    """What a lane asks of the trainer's or worker's session."""

    role: str
    index: int
    device: torch.device

    def catalog(self) -> Catalog: ...

    def inventory(self) -> bytes:
        """Digest of the inventory that `roots` follows."""

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        """(binding generation, flat uint8 tensors in the inventory's root order)."""

    def opened(self, replica: int, plan: Part, generation: int) -> None:
        """A link carries bytes of this plan, and this rank's storages of that generation have been bound to it. There may be
        another one by now: then they are opened again."""

    def before(self, go: m.Go, plan: Part) -> None:
        """Just before the first byte may move."""

    def gate(self, go: m.Go, plan: Part, routed: routes.Routed) -> routes.EarlyGate | None:
        """What is to happen while bytes move, between parts of this rank's pull. None: nothing, and outside of a row it is
        pulled as one."""

    def after(self, go: m.Go, plan: Part) -> tuple[tuple[m.Checksum, ...], bytes]:
        """After the last byte has: recipes. When `go.verify`, returns checksums, and on a trainer digests of what others hold too."""


_running: weakref.WeakSet[Lane] = weakref.WeakSet()
os.register_at_fork(
    after_in_child=_running.clear
)  # links are the parent's, and the threads that could end are not here


@atexit.register
def _stop_all() -> None:
    """A process that ends without closing its session."""
    closing, lanes = late.stop(), list(_running)
    for lane in lanes:
        lane.stop()
    wait_for_all(x.join for x in (*lanes, *closing))


_UNMAP = object()
"""Of this file: to a lane's thread, when it has ended what runs."""


class _Scope:
    """All messages of one epoch. `error`: why what runs of it, or is yet to run, ends early."""

    def __init__(self, epoch: int):
        self.epoch = epoch
        self.error: XferError | None = None

    def stopped(self) -> bool:
        return self.error is not None


class Lane:
    def __init__(self, party, side: Side, replica: int, joint_rank: int, cache: PlanCache | None):
        self.party, self.side, self.replica, self.joint_rank, self.cache = party, side, replica, joint_rank, cache
        self.labels: tuple[str, ...] = ()
        self.done_attempt = 0
        self.plan: Part | None = None
        self.inputs: m.PlanInputs | None = None  # what `plan` was made from
        self.plan_seconds = 0.0  # in which the plan was made, the exchange of layouts included
        self.exchange_seconds = 0.0  # until the layouts were here and checked
        self.go_attempt = self.pulled_attempt = (
            0  # that it was last let go in; the last of those in which takers read from here,
        )
        self._go_epoch = 0  # and over the routes of which epoch
        self._given_up: tuple[int, XferError | None] = (
            0,
            None,
        )  # the last attempt that may not begin here any more, and why
        self._link: Link | None = None
        self._routed: routes.Routed | None = None
        self._bound = -1  # binding generation that the routes were opened for
        self._stream: torch.cuda.Stream | None = None
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._idle, self._still = threading.Event(), threading.Event()  # still: as far as refits go
        self._moves = 0  # how many are to run, or do
        self._idle.set()
        self._still.set()
        self._ended = False
        self._scope = _Scope(0)  # of the newest message
        self._running = self._scope  # of the one that the lane's thread is at
        self._planned_from = b""
        self._deadline_s = 0.0  # of what it waits for, as the coordinator says with the plan
        self._logged = ""  # digest of the plan that the log has
        self._agreed = True  # on `plan`, by all ranks; it was put into the cache then
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"xfer-lane-{replica}", daemon=True)
        self._thread.start()
        _running.add(self)

    # ---- called from other threads

    def post(self, message: m.Message) -> None:
        with self._lock:
            if self._ended:
                return  # nobody would make it idle again
            self._idle.clear()
            if isinstance(message, m.PlanInputs | m.OpenLink) and message.epoch != self._scope.epoch:
                # What still runs of the old epoch must not take the new one for leave to go on.
                self._scope.error = self._scope.error or PeerLost(f"replica {self.replica}: another epoch has begun")
                self._scope = _Scope(message.epoch)
            if isinstance(message, m.Go):
                self._moves += 1
                self._still.clear()
                self.go_attempt, self._go_epoch = message.attempt, self._scope.epoch
                if self.pulled_out:
                    self.pulled_attempt = message.attempt
            # Inside the lock, or the lane could call itself idle in between.
            self._queue.put((message, self._scope, self._scope.stopped()))

    def cancel(self, error: XferError, epoch: int | None) -> None:
        """Stop what runs: frees a blocked transfer. `epoch` None: whatever the epoch."""
        with self._lock:
            if epoch is not None and epoch < self._scope.epoch:
                return
            self._scope.error = error
            link, routed = self._link, self._routed
            self._unmap_next()
        if routed is not None:
            routed.stop()
        if link is not None:
            link.abort(0.0)  # this may be the thread that reads what the coordinator says, to all lanes

    def give_up(self, attempt: int, error: XferError) -> bool:
        """Of this attempt nothing goes on or begins here any more, and nobody has to be told. True: it had begun. A plan or link
        goes on: it may be of a replica that joins, whose processes wait for it."""
        with self._lock:
            self._given_up, began, epoch = (attempt, error), self.go_attempt >= attempt, self._go_epoch
        if began:
            self.cancel(error, epoch)  # unless there is a newer one, which has stopped what began
        return began

    def let_go(self) -> None:
        """Nothing will be moved any more: a worker unmaps the trainers' storages, once what runs has ended."""
        with self._lock:
            self._unmap_next()

    def _unmap_next(self) -> None:
        """What a worker has mapped may be memory of a process that is gone, whose successor needs it."""
        if self.side.role == "worker" and not self._ended:
            self._idle.clear()
            self._queue.put((_UNMAP, self._scope, False))

    def wait_idle(self, seconds: float, moved: bool = False) -> bool:
        """True when nothing of the lane runs any more: no byte will be read or written by it, but for pulls (`drained`).
        moved: nothing that a refit began. A plan or link may go on, of an engine that joins: it reads nothing, and may take long."""
        until = time.monotonic() + seconds
        if not (self._still if moved else self._idle).wait(seconds):
            return False
        link = self._link
        return link is None or link.drained(max(0.0, until - time.monotonic()))

    def planned_bytes(self) -> tuple[int, int]:
        """(bytes in, bytes out) of this rank in one refit; zeros without a plan."""
        if self.plan is None:
            return 0, 0
        s, taker = self.plan.summary, self.joint_rank - self.plan.trainers
        return (s.bytes_in[taker], 0) if taker >= 0 else (0, s.bytes_out[self.joint_rank])

    @property
    def extra_bytes(self) -> int:
        """Bytes of buffers that this lane holds beside the model."""
        return self._routed.extra_bytes if self._routed is not None else 0

    @property
    def pulled_out(self) -> int:
        """Bytes of this rank that takers read by themselves in each refit over the present routes."""
        return self._routed.plan.pulled_out if self._routed is not None else 0

    @property
    def free_attempt(self) -> int:
        """The last attempt that went through and in which nobody reads this rank's storages any more."""
        done = self.done_attempt  # its routes may be another engine's by now
        return min(done, self.party.drained.get(self.replica, 0)) if self.pulled_attempt >= done else done

    @property
    def drained(self) -> bool:
        """False: a pull of this rank, or a message to it, did not leave the device, and may go on reading and writing."""
        routed = self._routed
        return (routed is None or routed.drained) and all(r.drained for r in self._late())

    def _late(self) -> list[routes.Routed]:
        return late.held(self.party.label, self.replica)

    @property
    def gave_up(self) -> bool:
        """It was told to stop, perhaps by this rank alone; the coordinator does not know then that the link is broken."""
        return self._scope.stopped()

    def rebound(self) -> bool:
        """Whether the routes were opened, or are being opened, for storages that lie elsewhere now. Then all ranks must open them
        again."""
        routed = self._routed
        return self._bound not in (-1, self.side.roots()[0]) or routed is not None and bool(routed.stale())

    def explain(self) -> str:
        """The plan, and what goes which way."""
        how = self._routed.plan.explain() if self._routed is not None else ""
        return "\n".join([self.plan.explain(), *([how] if how else [])])

    def forget_routes(self) -> None:
        """Lets go of this rank's storages; only when idle, and after every taker has unmapped them."""
        with self._lock:
            self._routed, self._bound = None, -1

    def close(self) -> None:
        self.stop()
        self.join(5.0)
        self._close_link()

    def stop(self) -> None:
        """Frees what is blocked; the thread ends after that."""
        closed = PeerLost("closed")
        self.cancel(closed, None)
        with self._lock:
            self._scope.error = self._scope.error or closed  # of an epoch that began since
            self._ended = True
            self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(timeout=seconds)

    # ---- the lane's own thread

    def _work(self) -> None:
        short_sleeps()
        if self.side.device.type == "cuda":
            torch.cuda.set_device(self.side.device)  # the current device is a property of the thread
        while True:
            item = self._queue.get()
            if item is None:
                self._idle.set()
                self._still.set()
                return
            message, self._running, refused = item
            try:
                with torch.no_grad():
                    if isinstance(message, m.PlanInputs):
                        self._do_plan(message)
                    elif isinstance(message, m.OpenLink):
                        self._do_link(message)
                    elif message is _UNMAP:
                        self._close_routes()  # they are not used again
                    elif isinstance(message, m.CloseRoutes):
                        self._do_close_routes()
                    elif isinstance(message, m.Go):
                        self._do_go(message)
            except Exception as e:
                go, cancelled = isinstance(message, m.Go), self._running.error
                own = (
                    go and e is not cancelled and not isinstance(e, PeerLost)
                )  # others may tell of its end, not of why
                wire = m.WireError.of(e if own else cancelled or e, self.party.label)
                if cancelled is None or go and (refused or own):  # else the coordinator knows already
                    at = getattr(message, "attempt", 0), self.replica, getattr(message, "epoch", 0)
                    self.party.try_send(m.Failed(wire, *at))
            finally:
                with self._lock:
                    self._moves -= isinstance(message, m.Go)
                    if not self._moves:
                        self._still.set()
                    if self._queue.empty():
                        self._idle.set()
                self.party.stirred()

    def _check(self) -> None:
        if self._running.error is not None:
            raise self._running.error

    def _do_plan(self, p: m.PlanInputs) -> None:
        faults.point(self.side.role, self.side.index, "plan")
        self._close_link()
        t0 = time.perf_counter()
        self.inputs = p
        self.plan, inventories = self.party.shelf.plan(
            p, self.joint_rank, self.side.catalog(), self.options(p), self.cache, self._check
        )
        self.exchange_seconds = self.party.shelf.exchange_s[p.replica]
        self._planned_from = inventories[self.joint_rank]
        digest = self.plan.digest
        if faults.wants(self.side.role, self.side.index, "digest"):
            digest = digest[::-1]
        self.plan_seconds = time.perf_counter() - t0
        self.labels = (
            *(f"trainer {i}" for i in range(self.plan.trainers)),
            *(f"replica {self.replica} worker {i}" for i in range(self.plan.workers)),
        )
        self._check()
        self.party.send(m.Planned(self.replica, p.epoch, digest, self.plan_seconds, *self.planned_bytes()))
        self._deadline_s = p.deadline_s
        self._agreed = self.party.shelf.cached.get(p.replica, False)

    def options(self, p: m.PlanInputs) -> PlanOptions:
        """What every rank of the domain plans by, from what the coordinator told all of them."""
        site = {"site": self.party.site, "replica": p.replica} if self.party.site is not None else {}
        return PlanOptions(
            bucket_bytes=p.bucket_bytes, drop=p.drop, narrow=p.narrow, rotation=p.turn, rotations=p.replicas, **site,
            wave_bytes=max(WAVE_BYTES[self.side.device.type], p.bucket_bytes) if self.side.device.type == "cuda" else 0,
        )  # fmt: skip

    def _do_link(self, o: m.OpenLink) -> None:
        faults.point(self.side.role, self.side.index, "link")
        began = time.perf_counter()
        if self.plan is None:
            raise PlanMismatch("asked to open a link without a plan")
        store = RendezvousStore(
            self.party.channel,
            self.party.replies,
            f"r{self.replica}/e{o.epoch}/",
            self._deadline_s,
            self._running.stopped,
        )
        # Kept until all takers have unmapped: it holds this rank's old storages.
        old = self._close_routes()
        if o.fresh:
            self._close_link()
        self._check()
        try:
            self._open_routes(store, o)
        finally:
            if self._routed is None:
                self._bound = -1  # or each refit from now on would open all other replicas' routes again
        del old
        place = self._routed.place if self._routed is not None else None
        said = (place.hand(), place.follows) if place is not None else ()
        self.party.send(m.LinkOpen(self.replica, o.epoch, *said))
        if self.cache is not None and not self._agreed:
            self.cache.put(self.plan)  # not sooner: the coordinator opens no link unless the digests of all are equal
        self._agreed = True
        self._log_planned(began)

    def _log_planned(self, began: float) -> None:
        """Trainer 0, once for each plan, when a link for it is there."""
        if self.joint_rank == 0 and self._logged != self.plan.digest:
            self._logged, s = self.plan.digest, self.plan.summary
            seconds = self.plan_seconds + time.perf_counter() - began
            logger.info(
                "xfer: replica %d planned: %s a refit, %.0f %% direct, in %.2f s",
                self.replica, size(s.nbytes), 100 * s.direct_share, seconds,
            )  # fmt: skip

    def _open_routes(self, store: RendezvousStore, o: m.OpenLink) -> None:
        """Collective over the domain, in the same order on all ranks."""
        while (
            self._bound != self.side.roots()[0]
        ):  # else `rebound` could be asked after they moved and before this is noted
            self._bound, roots = self.side.roots()
        if self.side.inventory() != self._planned_from:
            raise PlanMismatch(
                "this rank's layout is not the one that the plan was made from; nothing was moved",
                where=self.party.label,
            )
        rank, size, device = self.joint_rank, len(self.labels), self.side.device
        exchange = routes.exchange_over_store(store, rank, size, "routes")
        peers = device.type != "cpu" or o.host_pull
        ways = routes.find_ways(self.plan.program, size, device, roots, exchange, self.labels, allow_peer=peers)
        if ways.wired and device.type == "cuda" and self.side.role == "trainer" and self._stream is None:
            # Of this thread from now on. On the default one each lane would wait for all others, and the trainer's work for all.
            # Not where everything is pulled: nothing would run on it, and with its first stream torch makes a pool, in the GPU's memory.
            self._stream = torch.cuda.Stream(device)
            torch.cuda.set_stream(self._stream)
        place = None
        try:
            if o.relay and self.side.role == "worker":
                place = ways.place(roots, size, device, o.before, self._say_brought)
            link = self._link
            if ways.wired and (link is None or isinstance(link, routes.NoLink)):
                link = routes.open_link(
                    store, rank, size, self._deadline_s, device, self.labels, self._running.stopped, ways.plan.refused
                )
            with self._lock:
                self._link = link = link or routes.NoLink(rank, size, device, self.labels)
            self._check()
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
            self.side.opened(self.replica, self.plan, self._bound)
        self._check()  # a cancel that came meanwhile has seen no routes to stop

    def _do_close_routes(self) -> None:
        self._close_routes()
        while self._late():  # what it reads stays mapped, and nobody is told otherwise
            if self._ended or self._running is not self._scope:
                return  # they are opened anew; who still wants them closed asks again
            time.sleep(late.LATE_S)
        self.party.send(m.RoutesClosed(self.replica))

    def _close_routes(self) -> routes.Routed | None:
        """Unmaps what this rank has mapped, later if it is being read. Returns the routes, which still hold its own storages."""
        with self._lock:
            old, self._routed, self._bound = self._routed, None, -1
        if old is not None and not old.close():
            late.close_later(old, self.party.label, self.replica, self.side.device)
        return old

    def _check_go(self, go: m.Go) -> None:
        self._check()
        if go.attempt <= self._given_up[0]:
            raise self._given_up[1]

    def _do_go(self, go: m.Go) -> None:
        self._check_go(go)
        until = (
            time.monotonic() + go.deadline_s + 2.0
        )  # the coordinator's own deadline comes first: it knows who is late
        routed = self._routed
        if routed is None or self._bound != self.side.roots()[0]:
            raise PlanMismatch(
                "storages of this rank moved and the routes to them were not opened again; nothing was moved",
                where=self.party.label,
            )
        if self.side.role == "worker" and not self.drained:
            raise PeerLost(
                "what an earlier refit began has not left the device, and may still write here; nothing was moved",
                ["refit again later, or start this engine anew"],
                where=self.party.label,
                drained=False,
            )
        mark(self.party.label, "go")
        self.side.before(go, self.plan)
        planned = sum(self.planned_bytes())
        said = time.monotonic()

        def progress(wave: int, nbytes: int) -> None:
            nonlocal said
            faults.point(self.side.role, self.side.index, "wave")
            now = time.monotonic()
            if now - said >= PROGRESS_S:
                said = now
                self.party.try_send(m.Progress(self.replica, go.attempt, "moving", wave, nbytes, planned))

        faults.point(self.side.role, self.side.index, "moving")
        if routed.place is not None:
            routed.place.steps.begin(go.attempt, until, self._running.stopped, go.tells)
        stats = routed.run(until, self._running.stopped, progress, self.side.gate(go, self.plan, routed))
        t0 = time.perf_counter()
        mark(self.party.label, "bytes have moved")
        self._check()
        sums, held = self.side.after(go, self.plan)
        faults.point(self.side.role, self.side.index, "done")
        self._check()
        mark(self.party.label, "done")
        self.party.send(m.Done(
            self.replica, go.attempt, stats.bytes_in, stats.bytes_out, stats.pack_s, stats.wire_s, stats.unpack_s,
            time.perf_counter() - t0, sums, self._by_route(routed), held,
        ))  # fmt: skip
        self.done_attempt = go.attempt

    def brought(self, message: m.Brought) -> None:
        """From the reading thread: the worker before this one has these parts."""
        routed = self._routed
        if routed is not None and routed.place is not None:
            routed.place.steps.there(message.attempt, message.part)

    def _say_brought(self, attempt: int, part: int) -> None:
        self.party.try_send(m.Brought(self.replica, attempt, part))

    def _by_route(self, routed: routes.Routed) -> tuple[m.RouteBytes, ...]:
        r, wire = routed.report, "nccl" if self.side.device.type == "cuda" else "gloo"
        pulled = "relay" if routed.place is not None and routed.place.follows else "peer"
        some = ((pulled, r.pulled_bytes, r.pull_s), (wire, r.p2p_bytes, r.p2p_s))
        return tuple(m.RouteBytes(name, n, seconds) for name, n, seconds in some if n)

    def _close_link(self) -> None:
        self._close_routes()
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
