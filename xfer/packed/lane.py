"""One rank's part in one replica's refit of the packed route: trainer 0 broadcasts buckets, the replica's workers load them.

    sender   header (fixed size: how many messages, which manifest) | manifest, when this link has not had it | message 0, 1, …
    worker   receives message k + 1 while the engine's loader takes in message k, through two buffers
    others   gather with the sender (feed.py) and have no link

Colocated (shared.py), the link has one rank per exporter before the workers', in memory of the host: trainer 0 tells all of
them the same header, and each exporter its own workers where its buffers are.

The thread, its queue and how it is stopped are the direct route's (participants/lane.py); so are all messages to the coordinator.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xfer.coordinator import messages as m
from xfer.errors import DeadlineExceeded, PeerLost, PlanMismatch, ProtocolError, RefitFailed, XferError
from xfer.packed.ahead import OneAhead
from xfer.packed.arrivals import Arrivals, own_stream
from xfer.packed.buffer import Buffers, Unpacker, out_of_memory, specs_by_name, warm_sum
from xfer.packed.feed import Feed, Pump
from xfer.packed.plan import BucketPlan
from xfer.packed.shared import MAX_OFFER, SharedArrivals, announce, exporters_of, nearest, place_of, wait_done
from xfer.packed.wire import (
    MAX_MANIFEST,
    Exporters,
    Message,
    checked,
    decode_exporters,
    decode_manifest,
    digest,
    encode,
    nbytes_of,
)
from xfer.participants import faults
from xfer.participants.lane import PROGRESS_S, Lane
from xfer.rendezvous.store import RendezvousStore
from xfer.trace.fragment import TensorSpec
from xfer.transport import routes
from xfer.transport.group import Link

logger = logging.getLogger("xfer")
_MAGIC = 0x78666572
_HEADER = 8  # int64 words
_HEAD, _OFFER = 8, 9
"""Tags of headers and offers where the link is shared memory's."""
HEAR_S = 2.0
"""Seconds in which a rank whose link broke hears why from the coordinator, before it reports that it broke."""
OVER_S = 2.0
"""Seconds in which a gather that nobody needs any more ends, when nothing hangs."""


class Loader(Protocol):
    """The engine's side of a worker; vllm_model.py has the one for vLLM."""

    drop: tuple[str, ...]

    def begin(self, specs: Sequence[TensorSpec]) -> None: ...

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Takes a bucket in. Its tensors are views of a buffer that is used again after this returns."""

    def finish(self) -> None:
        """After the last bucket; LayoutError when parameters were left out."""

    def abandon(self) -> None:
        """The refit ends here: what was written stays, and the model must not be taken for whole."""


_abandoned: list[tuple[Link, Buffers]] = []  # held until what was received by an aborted link has left the device


@dataclass(frozen=True, slots=True)
class _Summary:
    broadcast_bytes: int
    nbytes: int
    direct_share = 0.0  # the engine's loader copies all of it
    kept_bytes = 0  # loaders write what they are given, so `keep=` is refused


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What a lane knows before the first gather: the names and sizes of what will come."""

    digest: str
    nbytes: int
    tensors: int
    workers: int = 0

    @property
    def summary(self) -> _Summary:
        return _Summary(self.nbytes * self.workers, self.nbytes * self.workers)


class PackedLane(Lane):
    """`pump`: on trainers; `loader`: on workers."""

    def __init__(
        self, party, side, replica: int, joint_rank: int, *, pump: Pump | None = None, loader: Loader | None = None
    ):
        self.pump, self.loader = pump, loader
        self._feed: Feed | None = None
        self._told = b""  # digest of the manifest that this link has carried
        self._exporters = Exporters()
        # Colocated: on exporters their workers', on workers their exporter's rank on the link.
        self._mine: tuple[int, ...] = ()
        self._opened = False  # also where this rank needs no link: who asks again would wait for ranks that have one
        self._messages: tuple[Message, ...] = ()
        self._buffers = Buffers(2, side.device) if loader is not None else None
        super().__init__(party, side, replica, joint_rank, None)

    @property
    def sends(self) -> bool:
        return self.pump is not None and self.pump.exports

    @property
    def place(self) -> str:
        """See shared.place_of."""
        return self.pump.place if self.pump is not None else place_of(self.side.device)

    @property
    def _shared(self) -> bool:
        return bool(self._exporters.ranks)

    # ---- what sessions ask of a lane

    def post(self, message: m.Message) -> None:
        if self.pump is not None and isinstance(message, m.Go):
            self.pump.enter(message.attempt, message.together or (self.replica,))
        super().post(message)

    def cancel(self, error: XferError, epoch: int | None) -> None:
        super().cancel(error, epoch)
        if (feed := self._feed) is not None:
            feed.stir()

    def wait_idle(self, seconds: float, moved: bool = False) -> bool:
        """On trainers also that no gather reads parameters any more."""
        until = time.monotonic() + seconds
        if not super().wait_idle(seconds, moved):
            return False
        return self.pump is None or self.pump.wait_over(max(0.0, until - time.monotonic()))

    def forget_routes(self) -> None:
        super().forget_routes()
        if self.pump is not None:
            self.pump.forget()

    def _do_close_routes(self) -> None:
        if self.pump is not None:
            if not self.pump.wait_sent(self._deadline_s):
                what = "a gather is still running, or being sent; nothing of it can be released"
                raise DeadlineExceeded(what, where=self.party.label)
            self.pump.forget()
        super()._do_close_routes()

    def planned_bytes(self) -> tuple[int, int]:
        if self.plan is None:
            return 0, 0
        if self.loader is not None:
            return self.plan.nbytes, 0
        return 0, self.plan.nbytes if self.pump.source.rank == 0 else 0

    @property
    def extra_bytes(self) -> int:
        if self.loader is not None:
            return self._buffers.nbytes
        return self.pump.extra_bytes if self.replica == min(self.party.lanes, default=self.replica) else 0

    def rebound(self) -> bool:
        return False

    def explain(self) -> str:
        what = f"packed: {self.plan.tensors} whole tensors, {self.plan.nbytes:,} bytes"
        if self.pump is not None and self.pump.source.way:
            what += f", {self.pump.source.way}"
        if self._shared:
            ranks = ", ".join(map(str, self._exporters.ranks))
            return f"{what}, in buffers of trainer {ranks} that {self.plan.workers} workers map and load from"
        return f"{what}, broadcast by trainer 0 to {self.plan.workers} workers, which load them"

    # ---- planning and linking

    def _do_plan(self, p: m.PlanInputs) -> None:
        faults.point(self.side.role, self.side.index, "plan")
        self._close_link()
        began = time.perf_counter()
        catalog = self.side.catalog()
        told = f"packed {catalog.digest()} {p.bucket_bytes} {sorted(p.drop)}"
        said = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
        if faults.wants(self.side.role, self.side.index, "digest"):
            said = said[::-1]
        self._deadline_s = p.deadline_s
        self.plan = PackedPlan(said, sum(map(nbytes_of, catalog.specs)), len(catalog.specs))
        self.plan_seconds = time.perf_counter() - began
        self._check()
        self.party.send(m.Planned(self.replica, p.epoch, said, self.plan_seconds, *self.planned_bytes()))

    def _do_link(self, o: m.OpenLink) -> None:
        faults.point(self.side.role, self.side.index, "link")
        began = time.perf_counter()
        if self.plan is None:
            raise PlanMismatch("asked to open a link without a plan")
        self.plan = replace(self.plan, workers=o.workers)
        if o.fresh:
            self._close_link()
        if self._link is None and not self._opened:
            self._open(o)
            self._opened = True
        self._check()
        self.party.send(m.LinkOpen(self.replica, o.epoch))
        self._log_planned(began)

    def _open(self, o: m.OpenLink) -> None:
        cancelled = self._running.stopped
        store = RendezvousStore(
            self.party.channel, self.party.replies, f"r{self.replica}/e{o.epoch}/", self._deadline_s, cancelled
        )
        self._exporters = self._agree_exporters(store)
        first = len(self._exporters.ranks) or 1  # of the workers' ranks on the link
        if self.loader is not None:
            rank = first + self.side.index
            if self._shared:
                self._mine = (nearest(self.place, self._exporters.places),)
                store.set(f"takes{self.side.index}", str(self._mine[0]))
        elif not self.sends:
            return
        else:
            rank = self._exporters.ranks.index(self.side.index) if self._shared else 0
            if self._shared:
                taken = [int(store.get(f"takes{w}")) for w in range(o.workers)]
                self._mine = tuple(first + w for w, exporter in enumerate(taken) if exporter == rank)
        labels = (
            *(f"trainer {i}" for i in self._exporters.ranks or (0,)),
            *(f"replica {self.replica} worker {i}" for i in range(o.workers)),
        )
        device = torch.device("cpu") if self._shared else self.side.device
        link: Link = routes.open_link(store, rank, first + o.workers, self._deadline_s, device, labels, cancelled)
        with self._lock:
            self._link, self._told = link, b""
        self._check()  # a cancel that came meanwhile has seen no link to abort

    def _agree_exporters(self, store: RendezvousStore) -> Exporters:
        """Trainer 0 says it to all, once per link."""
        if self.pump is None:
            return decode_exporters(store.get("exporters"))
        if not self.pump.colocated:
            if self.side.index == 0:
                store.set("exporters", encode(Exporters()))
            return Exporters()
        store.set(f"place{self.side.index}", self.place)
        if self.side.index:
            found = decode_exporters(store.get("exporters"))
        else:
            source = self.pump.source
            places = [store.get(f"place{r}").decode() for r in range(source.world)]
            ranks = exporters_of(places, getattr(source.stream, "everywhere", False))
            found = Exporters(tuple(ranks), tuple(places[r] for r in ranks))
            store.set("exporters", encode(found))
        self.pump.exports = self.side.index in found.ranks
        return found

    # ---- refits

    def _do_go(self, go: m.Go) -> None:
        if self.pump is not None:
            # Also when this lane was stopped meanwhile: the gather is one for all replicas, and all ranks take part.
            self._feed = self.pump.join(go.attempt, go.together or (self.replica,), self.replica)
        try:
            self._go(go)
        except PeerLost:
            # Who breaks a link has a reason, which comes by the coordinator and says more than that the link is broken.
            until = time.monotonic() + HEAR_S
            while self._running.error is None and time.monotonic() < until:
                time.sleep(0.01)
            raise
        finally:
            if (feed := self._feed) is not None:
                feed.leave(self.replica)
                # Not beyond its deadline: a gather that hangs, in a collective of the framework's say, must not hold up
                # the words with the coordinator. See wait_idle.
                if not feed.over.wait(OVER_S):
                    logger.warning("xfer: %s has ended a refit while its gather %s", self.party.label, feed.doing)
                self._feed = None

    def _go(self, go: m.Go) -> None:
        self._check_go(go)
        self.go_attempt = go.attempt
        until = (
            time.monotonic() + go.deadline_s + 2.0
        )  # the coordinator's own deadline comes first: it knows who is late
        self.party.try_send(m.Progress(self.replica, go.attempt, "moving", 0, 0, sum(self.planned_bytes())))
        faults.point(self.side.role, self.side.index, "moving")
        done = self._take_in(go, until) if self.loader is not None else self._give(go, until)
        faults.point(self.side.role, self.side.index, "done")
        self._check()
        self.party.send(done)
        self.done_attempt = go.attempt

    def _why(self) -> XferError | None:
        return self._running.error

    def _give(self, go: m.Go, until: float) -> m.Done:
        """A trainer: gather with the others, and send what was gathered if that is this rank's part."""
        feed = self._feed
        wire_s, nbytes, total = 0.0, 0, 0
        if self.sends:
            with own_stream(self.side.device, f"send {self.replica}"):
                wire_s, nbytes, total = self._send(feed, go, until)
        feed.wait_over(until, self._why)
        sums: tuple[m.Checksum, ...] = ()
        if go.verify and self.sends:
            total ^= int(faults.wants("trainer", self.side.index, "checksum"))
            workers = [r - len(self._exporters.ranks) for r in self._mine] if self._shared else range(self.plan.workers)
            sums = tuple(m.Checksum(w, total.to_bytes(8, "little")) for w in workers)
        source = self.pump.source
        return m.Done(
            self.replica, go.attempt, 0, nbytes, max(0.0, feed.seconds - source.built_s), wire_s, 0.0,
            source.agreed_s + source.built_s, sums,
        )  # fmt: skip

    def _send(self, feed: Feed, go: m.Go, until: float) -> tuple[float, int, int]:
        """(seconds on the wire, bytes, sum over messages when verifying)."""
        link, device = self._link, self.side.device
        if go.verify:
            warm_sum(device)
        plan = feed.plan(until, self._why)
        if self.side.index == 0:
            self._announce(plan, go, until)
        if self._shared:
            offer = torch.frombuffer(bytearray(self.pump.offer), dtype=torch.uint8)
            for worker in self._mine:
                link.send(torch.tensor([offer.numel()]), worker, _OFFER, until)
                link.send(offer, worker, _OFFER, until)
        seconds, nbytes, total, said = 0.0, 0, 0, time.monotonic()
        wire = OneAhead(link, until, lambda sent, _: feed.release(sent, self.replica))
        for number in range(plan.messages):
            data = feed.take(number, until, self._why)
            faults.point("trainer", self.side.index, "wave")
            began = time.perf_counter()
            nbytes += data.numel()
            if go.verify:
                total = (total + feed.sum_of(number, until, self._why)) % (1 << 64)
            if self._shared:
                announce(link, number, self._mine, until, device)
                wait_done(link, number, self._mine, until)  # the next is being packed meanwhile
                seconds += time.perf_counter() - began
                feed.release(number, self.replica)
            else:
                wire.give(number, data)
            said = self._progress(go, number, nbytes, said)
        wire.close()
        return seconds + wire.seconds, nbytes if self.side.index == 0 else 0, total

    def _announce(self, plan: BucketPlan, go: m.Go, until: float) -> None:
        """What comes, to all workers: the header, and the manifest if this link has not carried it."""
        known = self._told == digest(plan.manifest)
        size = 0 if known else len(plan.manifest)
        words = [_MAGIC, plan.messages, size, plan.buffer_bytes, go.attempt, *_words(digest(plan.manifest))]
        self._tell(torch.tensor([*words, int(self._shared)], dtype=torch.int64), until)
        if not known:
            self._tell(torch.frombuffer(bytearray(plan.manifest), dtype=torch.uint8), until)
            self._told = digest(plan.manifest)

    def _tell(self, data: torch.Tensor, until: float) -> None:
        if not self._shared:
            return self._link.broadcast(data.to(self.side.device), 0, until)
        for worker in range(len(self._exporters.ranks), self._link.size):
            self._link.send(data, worker, _HEAD, until)

    def _hear(self, data: torch.Tensor, until: float) -> torch.Tensor:
        """Filled, on the CPU."""
        if self._shared:
            self._link.recv(data, 0, _HEAD, until)
            return data
        data = data.to(self.side.device)
        self._link.broadcast(data, 0, until)
        return data.cpu()

    def _progress(self, go: m.Go, number: int, nbytes: int, said: float) -> float:
        now = time.monotonic()
        if now - said < PROGRESS_S:
            return said
        self.party.try_send(m.Progress(self.replica, go.attempt, "moving", number, nbytes, sum(self.planned_bytes())))
        return now

    # ---- workers

    def _take_in(self, go: m.Go, until: float) -> m.Done:
        link, model = self._link, self.loader
        _abandoned[:] = [x for x in _abandoned if not x[0].drained()]
        messages = self._announced(go, until)
        self._buffers.begin(messages)
        specs = self.side.catalog().specs
        how = (until, self.side.device, go.verify)
        longest = max((x.nbytes for x in messages), default=0)
        offer = self._offered(until) if self._shared else b""
        with self._memory_for(f"made room for buckets of {longest:,} bytes"):  # before a byte of the model changes
            if go.verify:
                warm_sum(self.side.device)
            if self._shared:
                arrivals = SharedArrivals(link, messages, offer, *how, exporter=self._mine[0], place=self.place)
            else:
                for i in range(min(self._buffers.count, len(messages))):
                    self._buffers.take(i, longest)
                arrivals = Arrivals(link, messages, self._buffers, *how)
        unpacker = Unpacker(self.side.device, *([] if self._shared else [self._buffers.views]))
        said, load_s, nbytes = time.monotonic(), 0.0, 0
        try:
            self.side.before(go, self.plan)
            with self._memory_for("made its model ready to be loaded"):
                model.begin(specs)
            for number, message in enumerate(messages):
                with self._memory_for(f"took in bucket {number}, of {message.nbytes:,} bytes"):
                    data = arrivals.take()
                    self._check()
                    faults.point("worker", self.side.index, "wave")
                    began = time.perf_counter()
                    tensors = [(s.name, t) for s, t in unpacker.take(message, data)]
                    if tensors:
                        model.load(tensors)
                del tensors, data
                load_s += time.perf_counter() - began
                nbytes += message.nbytes
                arrivals.free()
                said = self._progress(go, number, nbytes, said)
            unpacker.close(s.name for s in specs)
            began = time.perf_counter()
            with self._memory_for("finished what it had loaded"):
                model.finish()
            load_s += time.perf_counter() - began
        except BaseException as e:
            if self._running.error is None and not isinstance(e, PeerLost):  # before the others see the link break
                self.party.try_send(m.Failed(m.WireError.of(e, self.party.label), go.attempt, self.replica))
            link.abort()  # or the receiving thread would go on writing to buffers, and wait for what nobody sends
            model.abandon()
            raise
        finally:
            if not arrivals.close() or not link.drained():  # somebody may still write to them
                _abandoned.append((link, self._buffers))
                self._buffers = Buffers(2, self.side.device)
        self.side.model.synchronize()
        total = arrivals.total ^ int(go.verify and faults.wants("worker", self.side.index, "checksum"))
        sums = (m.Checksum(self.side.index, total.to_bytes(8, "little")),) if go.verify else ()
        carried = (m.RouteBytes("packed", nbytes, arrivals.seconds),)
        return m.Done(self.replica, go.attempt, nbytes, 0, 0.0, arrivals.seconds, load_s, 0.0, sums, carried)

    @contextlib.contextmanager
    def _memory_for(self, what: str) -> Iterator[None]:
        """RefitFailed when this worker's memory does not suffice for it."""
        try:
            yield
        except Exception as e:
            if not out_of_memory(e):
                raise
            advice = "give connect() a smaller bucket_bytes, or leave the engine more memory"
            why = [f"{type(e).__name__}: {e}"[:500], advice]
            raise RefitFailed(f"this worker ran out of memory while it {what}", why, where=self.party.label) from e

    def _announced(self, go: m.Go, until: float) -> tuple[Message, ...]:
        """What will come; checked against what the trainers said that they export, before a byte of the model changes."""
        words = self._hear(torch.zeros(_HEADER, dtype=torch.int64), until).tolist()
        magic, count, size, longest, attempt, high, low, shared = words
        if magic != _MAGIC or attempt != go.attempt or not 0 <= size <= MAX_MANIFEST or shared != int(self._shared):
            raise ProtocolError(
                "what came is not the beginning of this refit", [f"attempt {go.attempt} was to come; came {words}"]
            )
        if size:
            raw = bytes(self._hear(torch.zeros(size, dtype=torch.uint8), until).numpy())
            self._messages = checked(decode_manifest(raw), specs_by_name(self.side.catalog().specs))
            self._told = digest(raw)
        if _words(self._told.ljust(16, b"\0")) != [high, low] or len(self._messages) != count:
            raise ProtocolError("the sender refers to buckets that it has not announced here")
        if longest != max((x.nbytes for x in self._messages), default=0):
            raise ProtocolError(f"the sender's longest message has {longest} bytes, none here has")
        return self._messages

    def _offered(self, until: float) -> bytes:
        """Where this worker's exporter has its buffers."""
        length = torch.zeros(1, dtype=torch.int64)
        self._link.recv(length, self._mine[0], _OFFER, until)
        if not 0 < int(length) <= MAX_OFFER:
            raise ProtocolError(f"an offer of {int(length)} bytes: 1 to {MAX_OFFER} are read")
        offer = torch.zeros(int(length), dtype=torch.uint8)
        self._link.recv(offer, self._mine[0], _OFFER, until)
        return bytes(offer.numpy())

    def _close_link(self) -> None:
        super()._close_link()
        self._told, self._messages, self._exporters, self._mine = b"", (), Exporters(), ()
        self._opened = False


def _words(sixteen: bytes) -> list[int]:
    return [int.from_bytes(sixteen[i : i + 8], "little", signed=True) for i in (0, 8)]
