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
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from xfer.coordinator import messages as m
from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError, RefitFailed, XferError, out_of_memory
from xfer.packed.ahead import OneAhead
from xfer.packed.arrivals import Arrivals, own_stream
from xfer.packed.buffer import Buffers, Unpacker, specs_by_name, warm_sum
from xfer.packed.feed import Feed, Pump
from xfer.packed.plan import BucketPlan
from xfer.packed.shared import MAX_OFFER, SharedArrivals, announce, exporters_of, nearest, place_of, wait_done
from xfer.packed.wire import (
    MAX_MANIFEST,
    Exporters,
    PackedMessage,
    checked,
    decode_exporters,
    decode_manifest,
    digest,
    encode,
    nbytes_of,
)
from xfer.participants import faults
from xfer.participants.data_plane import PlanFacts, Progress, Stop
from xfer.participants.lane import labels_of
from xfer.plan.checksum import added
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.store import RendezvousStore
from xfer.trace.catalog import Catalog
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


class PackedRank(Protocol):
    """One rank of a session: the trainer's or worker's side that made this plane."""

    role: str
    index: int
    device: torch.device
    catalog: Catalog

    def counts_buffers(self, replica: int) -> bool:
        """Whether this replica's plane counts the buffers that all planes of this rank share."""


class Loader(Protocol):
    """An engine framework's adapter on one worker; `engines/vllm_loader.py` has the one for vLLM."""

    device: torch.device

    def accept(self, catalog: Catalog) -> None:
        """Refuse a catalog whose tensors the engine's loader cannot take."""

    def engage_lock(self) -> None: ...

    def synchronize(self) -> None: ...

    def begin(self, specs: Sequence[TensorSpec]) -> None: ...

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Takes a bucket in. Its tensors are views of a buffer that is used again after this returns."""

    def finish(self) -> None:
        """After the last bucket; LayoutError when parameters were left out."""

    def abandon(self) -> None:
        """The refit ends here: what was written stays, and the model must not be taken for whole."""


_abandoned: list[tuple[Link, Buffers]] = []  # held until what an aborted link received has left the device


class PackedPlane:
    """See `DataPlane`. It has a `pump` on trainers and a `loader` on workers."""

    drained = unmapped = True  # nothing is mapped, and a transfer ends only when nothing of it is on the device
    read_by_others = False

    def __init__(
        self,
        party: RendezvousClient,
        side: PackedRank,
        replica: int,
        *,
        pump: Pump | None = None,
        loader: Loader | None = None,
    ):
        self.party, self.side, self.replica, self.pump, self.loader = party, side, replica, pump, loader
        self.facts: PlanFacts | None = None
        self._nbytes = self._tensors = self._workers = 0  # of the plan: of one copy of all checkpoint tensors
        self._deadline_s = 0.0
        self._link: Link | None = None
        self._stop = Stop()  # of what runs
        self._lock = threading.Lock()
        self._feed: Feed | None = None
        self._told = b""  # digest of the manifest that this link has carried
        self._exporters = Exporters()
        # Colocated: an exporter's workers on the link; on a worker its exporter.
        self._mine: tuple[int, ...] = ()
        self._opened = False  # also where this rank needs no link: asking again would wait for ranks that have one
        self._messages: tuple[PackedMessage, ...] = ()
        self._buffers = Buffers(2, side.device) if loader is not None else None

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

    # ---- from other threads

    @property
    def extra_bytes(self) -> int:
        if self.loader is not None:
            return self._buffers.nbytes
        return self.pump.extra_bytes if self.side.counts_buffers(self.replica) else 0

    def expect(self, go: m.Go) -> None:
        if self.pump is not None:
            self.pump.enter(go.attempt, go.together or (self.replica,))

    def part_ready(self, ready: m.PartReady) -> None:
        pass

    def stop(self) -> None:
        with self._lock:
            link = self._link
        if link is not None:
            link.abort(0.0)
        if (feed := self._feed) is not None:
            feed.stir()

    def wait_still(self, seconds: float) -> bool:
        """On trainers also that no gather reads parameters any more."""
        until, link = time.monotonic() + seconds, self._link
        if link is not None and not link.drained(seconds):
            return False
        return self.pump is None or self.pump.wait_over(max(0.0, until - time.monotonic()))

    def moved(self) -> bool:
        return False

    def explain(self) -> str:
        what = f"packed: {self._tensors} whole tensors, {self._nbytes:,} bytes"
        if self.pump is not None and self.pump.source.way:
            what += f", {self.pump.source.way}"
        if self._shared:
            ranks = ", ".join(map(str, self._exporters.ranks))
            return f"{what}, in buffers of trainer {ranks} that {self._workers} workers map and load from"
        return f"{what}, broadcast by trainer 0 to {self._workers} workers, which load them"

    # ---- close

    def unmap(self) -> None:
        pass

    def forget(self) -> None:
        if self.pump is not None:
            self.pump.forget()

    def close_routes(self) -> None:
        if self.pump is not None and not self.pump.wait_sent(self._deadline_s):
            what = "a gather is still running, or being sent; nothing of it can be released"
            raise DeadlineExceeded(what, where=self.party.label)
        self.forget()

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
        self._told, self._messages, self._exporters, self._mine = b"", (), Exporters(), ()
        self._opened = False

    # ---- plan and link

    def make_plan(self, inputs: m.PlanInputs, stop: Stop) -> PlanFacts:
        self.close()
        self._deadline_s, catalog = inputs.deadline_s, self.side.catalog
        told = f"packed {catalog.digest()} {inputs.bucket_bytes} {sorted(inputs.drop)}"
        digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
        self._nbytes, self._tensors = sum(map(nbytes_of, catalog.specs)), len(catalog.specs)
        takes = self._nbytes if self.loader is not None else 0
        gives = self._nbytes if self.pump is not None and self.side.index == 0 else 0
        self.facts = PlanFacts(digest, (), takes, gives, 0, 0)
        return self.facts

    def open(self, order: m.OpenLink, stop: Stop) -> m.LinkOpen:
        moved, self._workers = self._nbytes * order.workers, order.workers
        self.facts = replace(self.facts, nbytes=moved, broadcast_bytes=moved)
        if order.fresh:
            self.close()
        if self._link is None and not self._opened:
            self._open(order, stop)
            self._opened = True
        return m.LinkOpen(self.replica, order.epoch)

    def agreed(self) -> None:
        pass

    def _open(self, order: m.OpenLink, stop: Stop) -> None:
        prefix = f"r{self.replica}/e{order.epoch}/"
        store = RendezvousStore(self.party.channel, self.party.replies, prefix, self._deadline_s, stop.stopped)
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
                taken = [int(store.get(f"takes{w}")) for w in range(order.workers)]
                self._mine = tuple(first + w for w, exporter in enumerate(taken) if exporter == rank)
        labels = labels_of(self._exporters.ranks or (0,), self.replica, order.workers)
        device = torch.device("cpu") if self._shared else self.side.device
        link: Link = routes.open_link(
            store, rank, first + order.workers, self._deadline_s, device, labels, stop.stopped
        )
        with self._lock:
            self._link, self._told = link, b""
        stop.check()  # a `stop` that came meanwhile has seen no link to abort

    def _agree_exporters(self, store: RendezvousStore) -> Exporters:
        """Trainer 0 tells all ranks, once per link."""
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

    def run(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        self._stop = stop
        if self.pump is not None:
            # Also when this lane was stopped meanwhile: the gather is one for all replicas, and all ranks take part.
            self._feed = self.pump.join(go.attempt, go.together or (self.replica,), self.replica)
        try:
            stop.check()
            faults.point(self.side.role, self.side.index, "moving")
            if self.loader is not None:
                return self._take_in(go, until, progress)
            return self._give(go, until, progress)
        except PeerLost:
            # The rank that broke the link has a reason. It comes by the coordinator, and says more than a broken link.
            heard = time.monotonic() + HEAR_S
            while not stop.stopped() and time.monotonic() < heard:
                time.sleep(0.01)
            raise
        finally:
            if (feed := self._feed) is not None:
                feed.leave(self.replica)
                # A gather that hangs in a collective of the framework must not delay what the lane has to tell.
                if not feed.over.wait(OVER_S):
                    logger.warning("xfer: %s has ended a refit while its gather %s", self.party.label, feed.doing)
                self._feed = None

    def _why(self) -> XferError | None:
        return self._stop.error

    def _give(self, go: m.Go, until: float, progress: Progress) -> m.Moved:
        """A trainer: gather with the others, and send what was gathered if that is this rank's part."""
        feed = self._feed
        wire_s, nbytes, total = 0.0, 0, 0
        if self.sends:
            with own_stream(self.side.device, f"send {self.replica}"):
                wire_s, nbytes, total = self._send(feed, go, until, progress)
        feed.wait_over(until, self._why)
        sums: tuple[m.Checksum, ...] = ()
        if go.verify and self.sends:
            total ^= int(faults.wants("trainer", self.side.index, "checksum"))
            workers = [r - len(self._exporters.ranks) for r in self._mine] if self._shared else range(self._workers)
            sums = tuple(m.Checksum(w, total.to_bytes(8, "little")) for w in workers)
        source = self.pump.source
        return m.Moved(
            self.replica, 0, nbytes, max(0.0, feed.seconds - source.built_s), wire_s, 0.0,
            source.agreed_s + source.built_s, sums,
        )  # fmt: skip

    def _send(self, feed: Feed, go: m.Go, until: float, progress: Progress) -> tuple[float, int, int]:
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
        seconds, nbytes, total = 0.0, 0, 0
        wire = OneAhead(link, until, lambda sent, _: feed.release(sent, self.replica))
        for number in range(plan.messages):
            data = feed.take(number, until, self._why)
            faults.point("trainer", self.side.index, "wave")
            began = time.perf_counter()
            nbytes += data.numel()
            if go.verify:
                total = added(total, feed.sum_of(number, until, self._why))
            if self._shared:
                announce(link, number, self._mine, until, device)
                wait_done(link, number, self._mine, until)  # the next is being packed meanwhile
                seconds += time.perf_counter() - began
                feed.release(number, self.replica)
            else:
                wire.give(number, data)
            progress(number, nbytes)
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

    # ---- workers

    def _take_in(self, go: m.Go, until: float, progress: Progress) -> m.Moved:
        link, model = self._link, self.loader
        _abandoned[:] = [x for x in _abandoned if not x[0].drained()]
        messages = self._announced(go, until)
        self._buffers.begin(messages)
        specs = self.side.catalog.specs
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
        load_s, nbytes = 0.0, 0
        try:
            model.engage_lock()
            with self._memory_for("made its model ready to be loaded"):
                model.begin(specs)
            for number, message in enumerate(messages):
                with self._memory_for(f"took in bucket {number}, of {message.nbytes:,} bytes"):
                    data = arrivals.take()
                    self._stop.check()
                    faults.point("worker", self.side.index, "wave")
                    began = time.perf_counter()
                    tensors = [(s.name, t) for s, t in unpacker.take(message, data)]
                    if tensors:
                        model.load(tensors)
                del tensors, data
                load_s += time.perf_counter() - began
                nbytes += message.nbytes
                arrivals.free()
                progress(number, nbytes)
            unpacker.close(s.name for s in specs)
            began = time.perf_counter()
            with self._memory_for("finished what it had loaded"):
                model.finish()
            load_s += time.perf_counter() - began
        except BaseException as e:
            if not self._stop.stopped() and not isinstance(e, PeerLost):  # before the others see the link break
                self.party.try_send(m.Failed(m.WireError.of(e, self.party.label), go.attempt, self.replica))
            link.abort()  # or the receiving thread would go on writing to buffers, and wait for what nobody sends
            model.abandon()
            raise
        finally:
            if not arrivals.close() or not link.drained():  # somebody may still write to them
                _abandoned.append((link, self._buffers))
                self._buffers = Buffers(2, self.side.device)
        model.synchronize()
        total = arrivals.total ^ int(go.verify and faults.wants("worker", self.side.index, "checksum"))
        sums = (m.Checksum(self.side.index, total.to_bytes(8, "little")),) if go.verify else ()
        carried = (m.RouteBytes("packed", nbytes, arrivals.seconds),)
        return m.Moved(self.replica, nbytes, 0, 0.0, arrivals.seconds, load_s, 0.0, sums, carried)

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

    def _announced(self, go: m.Go, until: float) -> tuple[PackedMessage, ...]:
        """What will come; checked against what the trainers said that they export, before a byte of the model changes."""
        words = self._hear(torch.zeros(_HEADER, dtype=torch.int64), until).tolist()
        magic, count, size, longest, attempt, high, low, shared = words
        if magic != _MAGIC or attempt != go.attempt or not 0 <= size <= MAX_MANIFEST or shared != int(self._shared):
            raise ProtocolError(
                "what came is not the beginning of this refit", [f"attempt {go.attempt} was to come; came {words}"]
            )
        if size:
            raw = bytes(self._hear(torch.zeros(size, dtype=torch.uint8), until).numpy())
            self._messages = checked(decode_manifest(raw), specs_by_name(self.side.catalog.specs))
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


def _words(sixteen: bytes) -> list[int]:
    return [int.from_bytes(sixteen[i : i + 8], "little", signed=True) for i in (0, 8)]
