"""A trainer rank on the packed route: it gathers with the other trainers, and sends messages if it assembles them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.errors import DeadlineExceeded
from xfer.packed.broadcast import OneAhead, own_stream
from xfer.packed.buffer import warm_sum
from xfer.packed.feed import Feed, Pump
from xfer.packed.plan import BucketPlan
from xfer.packed.plane import HEAD_TAG, MAGIC, PackedPlane, words_of
from xfer.packed.shared import announce, exporters_of, send_offer, wait_done
from xfer.packed.source import PackedSource
from xfer.packed.wire import Exporters, decode_exporters, digest, encode
from xfer.participants.data_plane import News, Progress, Stop
from xfer.plan.checksum import added
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.store import RendezvousStore
from xfer.trace.catalog import Catalog
from xfer.trace.traced import TrainerLayout
from xfer.transport.group import Link

logger = logging.getLogger("xfer")
OVER_S = 2.0
"""Seconds that a replica's lane waits for the end of its gather after it has left the gather."""


class PackedTrainer:
    """Implements `TrainerSide`. No storage is read in place, so there is nothing to bind, to keep alive or to sum ahead."""

    role = "trainer"

    def __init__(self, source: PackedSource, party: RendezvousClient):
        self.index, self.device, self.inventory = source.rank, source.device, b""
        self.catalog: Catalog  # set by `read`
        self._party, self.pump = party, Pump(source, party.label)
        self._replicas: set[int] = set()

    def read(self, catalog: Catalog, layout: TrainerLayout) -> None:
        self.catalog, self.inventory = catalog, catalog.digest().encode()

    def forget_layout(self) -> None:
        self.inventory = b""

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pass

    def plane(self, replica: int) -> TrainerPlane:
        self._replicas.add(replica)
        return TrainerPlane(self._party, self, replica)

    def counts_buffers(self, replica: int) -> bool:
        """Return whether the plane of `replica` counts the buffers, which all planes of this rank share."""
        return replica == min(self._replicas)

    def wait_still(self, seconds: float) -> bool:
        return self.pump.wait_over(seconds)

    def measure(self, until: float) -> None:
        return None

    def quantize(self, largest: bytes = b"") -> None:
        pass

    scratch_bytes, rules = 0, ()

    def explain(self) -> str:
        return ""

    def news(self, committed: bool) -> News:
        return News()

    def compare(self) -> None:
        """Do nothing: all bytes are sent."""

    def remember(self, attempt: int) -> None:
        pass

    def begin_sums(self, attempt: int, idle: Iterable[int]) -> None:
        pass

    def warn(self, lines: Sequence[str]) -> tuple[str, ...]:
        return self.pump.with_gather(lines)

    def keep_alive(self) -> None:
        pass

    def let_go_kept(self) -> None:
        pass

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class TrainerPlane(PackedPlane):
    """A trainer rank's part in one replica's refits."""

    side: PackedTrainer

    def __init__(self, party: RendezvousClient, side: PackedTrainer, replica: int):
        super().__init__(party, side, replica)
        self.pump = side.pump
        self._mine: tuple[
            int, ...
        ] = ()  # with colocated engines: ranks on the link of the workers that this rank serves
        self._feed: Feed | None = None

    @property
    def way(self) -> str:
        return self.pump.source.way

    @property
    def extra_bytes(self) -> int:
        return self.pump.extra_bytes if self.side.counts_buffers(self.replica) else 0

    def expect(self, go: m.Go) -> None:
        self.pump.enter(go.attempt, go.together or (self.replica,))

    def stop(self) -> None:
        super().stop()
        if (feed := self._feed) is not None:
            feed.stir()

    def wait_still(self, seconds: float) -> bool:
        """See `DataPlane`. Also waits until no gather reads parameters."""
        until = time.monotonic() + seconds
        return super().wait_still(seconds) and self.pump.wait_over(max(0.0, until - time.monotonic()))

    def forget(self) -> None:
        self.pump.forget()

    def close_routes(self) -> None:
        if not self.pump.wait_sent(self._deadline_s):
            what = "a gather still runs, or its messages are being sent; its memory cannot be released"
            raise DeadlineExceeded(what, where=self.party.label)
        self.forget()

    def _find_exporters(self, store: RendezvousStore) -> Exporters:
        if not self.pump.colocated:
            if self.side.index == 0:
                store.set("exporters", encode(Exporters()))
            return Exporters()
        store.set(f"place{self.side.index}", self.place)
        if self.side.index:
            found = decode_exporters(store.get("exporters"))
        else:
            places = [store.get(f"place{r}").decode() for r in range(self.pump.source.world)]
            ranks = exporters_of(places)
            found = Exporters(tuple(ranks), tuple(places[r] for r in ranks))
            store.set("exporters", encode(found))
        self.pump.exports = self.side.index in found.ranks
        return found

    def _rank_on_link(self, store: RendezvousStore) -> int | None:
        if not self.pump.exports:
            return None
        if not self._shared:
            return 0
        rank = self._exporters.ranks.index(self.side.index)
        taken = [int(store.get(f"takes{w}")) for w in range(self._workers)]
        self._mine = tuple(self._first_worker + w for w, exporter in enumerate(taken) if exporter == rank)
        return rank

    # ---- refits

    def run(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        # Join even if this lane was stopped meanwhile: one gather serves all replicas, and all ranks take part.
        self._feed = feed = self.pump.join(go.attempt, go.together or (self.replica,), self.replica)
        try:
            return super().run(go, stop, until, progress)
        finally:
            feed.leave(self.replica)
            # A gather that hangs in a collective of the framework must not delay the lane's report.
            if not feed.over.wait(OVER_S):
                logger.warning("xfer: %s has ended a refit while its gather %s", self.party.label, feed.doing)
            self._feed = None

    def _move(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        """Gather with the other trainers, and send the messages if this rank sends."""
        feed, source, sends = self._feed, self.pump.source, self.pump.exports
        assert feed is not None
        wire_s, nbytes, total = 0.0, 0, 0
        if sends:
            with own_stream(self.side.device, f"send {self.replica}"):
                wire_s, nbytes, total = self._send(feed, go, stop, until, progress)
        feed.wait_over(until, stop)
        sums: tuple[m.Checksum, ...] = ()
        if go.verify and sends:
            total ^= int(faults.wants("trainer", self.side.index, "checksum"))
            workers = [r - self._first_worker for r in self._mine] if self._shared else range(self._workers)
            sums = tuple(m.Checksum.of(w, total) for w in workers)
        return m.Moved(
            self.replica, bytes_out=nbytes, pack_s=max(0.0, feed.seconds - source.built_s), wire_s=wire_s,
            verify_s=source.agreed_s + source.built_s, checksums=sums,
        )  # fmt: skip

    def _send(self, feed: Feed, go: m.Go, stop: Stop, until: float, progress: Progress) -> tuple[float, int, int]:
        """Send all messages. Returns seconds on the wire, bytes, and the sum of the messages if `go.verify`."""
        link, device = self._linked(), self.side.device
        if go.verify:
            warm_sum(device)
        plan = feed.plan(until, stop)
        if self.side.index == 0:
            self._announce(link, plan, go, until)
        if self._shared:
            send_offer(link, self.pump.offer, self._mine, until)
        seconds, nbytes, total = 0.0, 0, 0
        wire = OneAhead(link, until, lambda sent, _: feed.release(sent, self.replica))
        for number in range(len(plan.messages)):
            data = feed.take(number, until, stop)
            faults.point("trainer", self.side.index, "wave")
            nbytes += data.numel()
            if go.verify:
                total = added(total, feed.sum_of(number, until, stop))
            if self._shared:
                began = time.perf_counter()
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
        this = digest(plan.manifest)
        known = self._told == this
        size = 0 if known else len(plan.manifest)
        words = [MAGIC, len(plan.messages), size, plan.buffer_bytes, go.attempt, *words_of(this), int(self._shared)]
        self._tell(link, torch.tensor(words, dtype=torch.int64), until)
        if not known:
            self._tell(link, torch.frombuffer(bytearray(plan.manifest), dtype=torch.uint8), until)
            self._told = this

    def _tell(self, link: Link, data: torch.Tensor, until: float) -> None:
        if not self._shared:
            link.broadcast(data.to(self.side.device), 0, until)
            return
        for worker in range(self._first_worker, link.size):
            link.send(data, worker, HEAD_TAG, until)
