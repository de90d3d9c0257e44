"""The packed route's data plane: trainer 0 broadcasts buckets, the replica's workers load them.

    trainer 0       sends a header (fixed size: number of messages, digest of the manifest), the manifest if this link has not
                    carried it, then messages 0, 1, …
    workers         receive message k + 1 while the engine's loader reads message k, through two buffers
    other trainers  gather with trainer 0 (feed.py) and have no link

With colocated engines (shared.py) the link is in host memory, and its first ranks are the exporters. Trainer 0 sends the header to
all workers, and each exporter sends its workers the location of its buffers.

Both routes share the lane's thread and queue (participants/lane.py) and the messages to the coordinator.
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
"""Tags of headers and offers on a link in host memory."""
HEAR_S = 2.0
"""Seconds that a rank whose link broke waits for the coordinator to report the reason, before it reports the broken link."""
OVER_S = 2.0
"""Seconds within which a gather ends after its last replica has left, unless it hangs."""


class PackedRank(Protocol):
    """The trainer's or worker's side that made the plane.

    Attributes:
        role: "trainer" or "worker".
        index: Rank among those of its role.
        device: Its device.
        catalog: The session's checkpoint tensors.
    """

    role: str
    index: int
    device: torch.device
    catalog: Catalog

    def counts_buffers(self, replica: int) -> bool:
        """Return whether the plane of `replica` counts the buffers, which all planes of this rank share."""


class Loader(Protocol):
    """An engine framework's adapter on one worker; see `engines/vllm_loader.py` for vLLM's."""

    device: torch.device

    def accept(self, catalog: Catalog) -> None:
        """Refuse a catalog whose tensors the engine's loader cannot take."""

    def engage_lock(self) -> None: ...

    def synchronize(self) -> None: ...

    def begin(self, specs: Sequence[TensorSpec]) -> None: ...

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket. Its tensors are views of a buffer that is reused after this returns."""

    def finish(self) -> None:
        """Called after the last bucket. LayoutError if parameters were not loaded."""

    def abandon(self) -> None:
        """End a failed refit. Weights that were written stay, so the model is not usable."""


_abandoned: list[tuple[Link, Buffers]] = []  # held until the aborted link no longer writes to the buffers


class PackedPlane:
    """Implements `DataPlane`.

    Args:
        party: Client of the rendezvous.
        side: The side that made this plane.
        replica: The replica that it serves.
        pump: On trainers: this rank's gathers.
        loader: On workers: the engine's adapter.
    """

    drained = unmapped = True  # nothing is mapped, and a transfer ends only when its work has left the device
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
        self._nbytes = self._tensors = self._workers = 0  # the first two: of one copy of all checkpoint tensors
        self._deadline_s = 0.0
        self._link: Link | None = None
        self._stop = Stop()  # of the running refit
        self._lock = threading.Lock()
        self._feed: Feed | None = None
        self._told = b""  # digest of the manifest that this link has carried
        self._exporters = Exporters()
        # With colocated engines: ranks on the link of an exporter's workers, or of a worker's exporter.
        self._mine: tuple[int, ...] = ()
        self._opened = False  # true also if this rank needs no link: opening again would wait for ranks that have one
        self._messages: tuple[PackedMessage, ...] = ()
        self._buffers = Buffers(2 if loader is not None else 0, side.device)

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
        if self.pump is None:
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
        """See `DataPlane`. On trainers, also wait until no gather reads parameters."""
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
            what = "a gather still runs, or its messages are being sent; its memory cannot be released"
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
        if self.facts is not None:
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
        first = len(self._exporters.ranks) or 1  # rank of worker 0 on the link
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
        stop.check()  # a `stop` that was called meanwhile saw no link to abort

    def _linked(self) -> Link:
        """Return the open link, else PeerLost."""
        if self._link is None:
            raise PeerLost("this rank has no open link; nothing was moved", where=self.party.label)
        return self._link

    def _agree_exporters(self, store: RendezvousStore) -> Exporters:
        """Return the exporters. Trainer 0 chooses them and tells all ranks, once per link."""
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
        self._stop, pump = stop, self.pump
        feed: Feed | None = None
        if pump is not None:
            # Also if this lane was stopped meanwhile: one gather serves all replicas, and all ranks take part.
            self._feed = feed = pump.join(go.attempt, go.together or (self.replica,), self.replica)
        try:
            stop.check()
            faults.point(self.side.role, self.side.index, "moving")
            if pump is not None and feed is not None:
                return self._give(pump, feed, go, until, progress)
            if self.loader is None:
                raise TypeError("a packed plane needs a pump or a loader")
            return self._take_in(self.loader, go, until, progress)
        except PeerLost:
            # The rank that broke the link has a reason, which arrives from the coordinator and tells more than a broken link.
            heard = time.monotonic() + HEAR_S
            while not stop.stopped() and time.monotonic() < heard:
                time.sleep(0.01)
            raise
        finally:
            if feed is not None:
                feed.leave(self.replica)
                # A gather that hangs in a collective of the framework must not delay the lane's report.
                if not feed.over.wait(OVER_S):
                    logger.warning("xfer: %s has ended a refit while its gather %s", self.party.label, feed.doing)
                self._feed = None

    def _why(self) -> XferError | None:
        return self._stop.error

    def _give(self, pump: Pump, feed: Feed, go: m.Go, until: float, progress: Progress) -> m.Moved:
        """On a trainer: gather with the others, and send the messages if this rank sends."""
        wire_s, nbytes, total = 0.0, 0, 0
        if self.sends:
            with own_stream(self.side.device, f"send {self.replica}"):
                wire_s, nbytes, total = self._send(pump, feed, go, until, progress)
        feed.wait_over(until, self._why)
        sums: tuple[m.Checksum, ...] = ()
        if go.verify and self.sends:
            total ^= int(faults.wants("trainer", self.side.index, "checksum"))
            workers = [r - len(self._exporters.ranks) for r in self._mine] if self._shared else range(self._workers)
            sums = tuple(m.Checksum(w, total.to_bytes(8, "little")) for w in workers)
        source = pump.source
        return m.Moved(
            self.replica, 0, nbytes, max(0.0, feed.seconds - source.built_s), wire_s, 0.0,
            source.agreed_s + source.built_s, sums,
        )  # fmt: skip

    def _send(self, pump: Pump, feed: Feed, go: m.Go, until: float, progress: Progress) -> tuple[float, int, int]:
        """Send all messages. Returns seconds on the wire, bytes, and the sum of the messages if `go.verify`."""
        link, device = self._linked(), self.side.device
        if go.verify:
            warm_sum(device)
        plan = feed.plan(until, self._why)
        if self.side.index == 0:
            self._announce(link, plan, go, until)
        if self._shared:
            offer = torch.frombuffer(bytearray(pump.offer), dtype=torch.uint8)
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
                wait_done(link, number, self._mine, until)  # the next message is packed meanwhile
                seconds += time.perf_counter() - began
                feed.release(number, self.replica)
            else:
                wire.give(number, data)
            progress(number, nbytes)
        wire.close()
        return seconds + wire.seconds, nbytes if self.side.index == 0 else 0, total

    def _announce(self, link: Link, plan: BucketPlan, go: m.Go, until: float) -> None:
        """Send the header to all workers, and the manifest if this link has not carried it."""
        known = self._told == digest(plan.manifest)
        size = 0 if known else len(plan.manifest)
        words = [_MAGIC, plan.messages, size, plan.buffer_bytes, go.attempt, *_words(digest(plan.manifest))]
        self._tell(link, torch.tensor([*words, int(self._shared)], dtype=torch.int64), until)
        if not known:
            self._tell(link, torch.frombuffer(bytearray(plan.manifest), dtype=torch.uint8), until)
            self._told = digest(plan.manifest)

    def _tell(self, link: Link, data: torch.Tensor, until: float) -> None:
        if not self._shared:
            link.broadcast(data.to(self.side.device), 0, until)
            return
        for worker in range(len(self._exporters.ranks), link.size):
            link.send(data, worker, _HEAD, until)

    def _hear(self, link: Link, data: torch.Tensor, until: float) -> torch.Tensor:
        """Receive from trainer 0 as many bytes as `data` has. Returns them on the CPU."""
        if self._shared:
            link.recv(data, 0, _HEAD, until)
            return data
        data = data.to(self.side.device)
        link.broadcast(data, 0, until)
        return data.cpu()

    # ---- workers

    def _take_in(self, model: Loader, go: m.Go, until: float, progress: Progress) -> m.Moved:
        """On a worker: receive all messages and load them."""
        link = self._linked()
        _abandoned[:] = [x for x in _abandoned if not x[0].drained()]
        messages = self._announced(link, go, until)
        self._buffers.begin(messages)
        specs = self.side.catalog.specs
        how = (until, self.side.device, go.verify)
        longest = max((x.nbytes for x in messages), default=0)
        offer = self._offered(link, until) if self._shared else b""
        arrivals: Arrivals | SharedArrivals
        with self._memory_for(f"made room for buckets of {longest:,} bytes"):  # before a byte of the model changes
            if go.verify:
                warm_sum(self.side.device)
            if self._shared:
                arrivals = SharedArrivals(link, messages, offer, *how, exporter=self._mine[0], place=self.place)
            else:
                for i in range(min(self._buffers.count, len(messages))):
                    self._buffers.take(i, longest)
                arrivals = Arrivals(link, messages, self._buffers, *how)
        unpacker = Unpacker(self.side.device) if self._shared else Unpacker(self.side.device, self._buffers.views)
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
            if not self._stop.stopped() and not isinstance(e, PeerLost):  # before other ranks see the broken link
                self.party.try_send(m.Failed(m.WireError.of(e, self.party.label), go.attempt, self.replica))
            link.abort()  # otherwise the receiving thread would continue to write to buffers, and wait for more messages
            model.abandon()
            raise
        finally:
            if not arrivals.close() or not link.drained():  # the link may still write to the buffers
                _abandoned.append((link, self._buffers))
                self._buffers = Buffers(2, self.side.device)
        model.synchronize()
        total = arrivals.total ^ int(go.verify and faults.wants("worker", self.side.index, "checksum"))
        sums = (m.Checksum(self.side.index, total.to_bytes(8, "little")),) if go.verify else ()
        carried = (m.RouteBytes("packed", nbytes, arrivals.seconds),)
        return m.Moved(self.replica, nbytes, 0, 0.0, arrivals.seconds, load_s, 0.0, sums, carried)

    @contextlib.contextmanager
    def _memory_for(self, what: str) -> Iterator[None]:
        """Turn an out-of-memory error into RefitFailed. `what`: what the worker did, in the past tense."""
        try:
            yield
        except Exception as e:
            if not out_of_memory(e):
                raise
            advice = "give connect() a smaller bucket_bytes, or leave the engine more memory"
            why = [f"{type(e).__name__}: {e}"[:500], advice]
            raise RefitFailed(f"this worker ran out of memory while it {what}", why, where=self.party.label) from e

    def _announced(self, link: Link, go: m.Go, until: float) -> tuple[PackedMessage, ...]:
        """Receive the announcement of the messages, and check it against the catalog before a byte of the model changes."""
        words = self._hear(link, torch.zeros(_HEADER, dtype=torch.int64), until).tolist()
        magic, count, size, longest, attempt, high, low, shared = words
        if magic != _MAGIC or attempt != go.attempt or not 0 <= size <= MAX_MANIFEST or shared != int(self._shared):
            raise ProtocolError(
                "the header received does not belong to this refit",
                [f"expected attempt {go.attempt}; received {words}"],
            )
        if size:
            raw = bytes(self._hear(link, torch.zeros(size, dtype=torch.uint8), until).numpy())
            self._messages = checked(decode_manifest(raw), specs_by_name(self.side.catalog.specs))
            self._told = digest(raw)
        if _words(self._told.ljust(16, b"\0")) != [high, low] or len(self._messages) != count:
            raise ProtocolError("the trainer refers to buckets that it has not announced here")
        if longest != max((x.nbytes for x in self._messages), default=0):
            raise ProtocolError(f"the trainer's longest message has {longest} bytes, but no announced message has")
        return self._messages

    def _offered(self, link: Link, until: float) -> bytes:
        """Receive the `BufferOffer` of this worker's exporter."""
        length = torch.zeros(1, dtype=torch.int64)
        link.recv(length, self._mine[0], _OFFER, until)
        if not 0 < int(length) <= MAX_OFFER:
            raise ProtocolError(f"an offer of shared buffers has {int(length)} bytes; 1 to {MAX_OFFER} are allowed")
        offer = torch.zeros(int(length), dtype=torch.uint8)
        link.recv(offer, self._mine[0], _OFFER, until)
        return bytes(offer.numpy())


def _words(sixteen: bytes) -> list[int]:
    return [int.from_bytes(sixteen[i : i + 8], "little", signed=True) for i in (0, 8)]
