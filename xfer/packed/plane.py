"""The packed route's data plane: trainer 0 broadcasts buckets, the replica's workers load them.

    trainer 0       sends a header (eight 64-bit words: number of messages, digest of the manifest), the manifest if this link has
                    not carried it, then messages 0, 1, … (trainer.py)
    workers         receive message k + 1 while the engine's loader reads message k, through two buffers (worker.py)
    other trainers  gather with trainer 0 (feed.py) and have no link

With colocated engines (shared.py) the link is in host memory, and its first ranks are the exporters. Trainer 0 sends the header to
all workers, and each exporter sends its workers the location of its buffers.

This module has what both ends share: the plan and the link. The lane's thread and queue (participants/lane.py) and the messages to
the coordinator are those of the direct route.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from typing import Protocol

import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.errors import PeerLost
from xfer.packed.shared import place_of
from xfer.packed.wire import Exporters, nbytes_of
from xfer.participants.data_plane import PlanFacts, Progress, Stop
from xfer.participants.lane import labels_of
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.store import RendezvousStore
from xfer.trace.catalog import Catalog
from xfer.transport import routes
from xfer.transport.group import Link

MAGIC = 0x78666572
HEADER_WORDS = 8
HEAD_TAG = 8
"""Tag of headers and manifests on a link in host memory."""
HEAR_S = 2.0
"""Seconds that a rank whose link broke waits for the coordinator to report the reason, before it reports the broken link."""


class PackedSide(Protocol):
    """The trainer's or worker's side that made a plane.

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


class PackedPlane:
    """The common part of `TrainerPlane` and `WorkerPlane`, which implement `DataPlane`.

    Args:
        party: Client of the rendezvous.
        side: The side that made this plane.
        replica: The replica that it serves.
    """

    drained = unmapped = True  # nothing is mapped, and a transfer ends only when its work has left the device
    read_by_others = False

    def cut_off(self) -> bool:
        return False

    def __init__(self, party: RendezvousClient, side: PackedSide, replica: int):
        self.party, self.side, self.replica = party, side, replica
        self.facts: PlanFacts | None = None
        self._nbytes = self._tensors = self._workers = 0  # the first two: of one copy of all checkpoint tensors
        self._deadline_s = 0.0
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._opened = False  # true also if this rank needs no link: opening again would wait for ranks that have one
        self._told = b""  # digest of the manifest that this link has carried
        self._exporters = Exporters()  # none: buckets are broadcast

    @property
    def place(self) -> str:
        """See shared.place_of."""
        return place_of(self.side.device)

    @property
    def way(self) -> str:
        """How tensors are assembled, as far as this rank knows."""
        return ""

    @property
    def _shared(self) -> bool:
        return bool(self._exporters.ranks)

    @property
    def _first_worker(self) -> int:
        """Rank of worker 0 on the link."""
        return len(self._exporters.ranks) or 1

    # ---- from other threads

    def expect(self, go: m.Go) -> None:
        pass

    def holds(self, attempt: int, base: int) -> bool:
        return False

    def looked(self, attempt: int) -> bool:
        return False

    def part_ready(self, ready: m.PartReady) -> None:
        pass

    def stop(self) -> None:
        with self._lock:
            link = self._link
        if link is not None:
            link.abort(0.0)

    def wait_still(self, seconds: float) -> bool:
        link = self._link
        return link is None or link.drained(seconds)

    def moved(self) -> bool:
        return False

    def explain(self) -> str:
        what = ", ".join(filter(None, (f"packed: {self._tensors} whole tensors, {self._nbytes:,} bytes", self.way)))
        if self._shared:
            ranks = ", ".join(map(str, self._exporters.ranks))
            return f"{what}, in buffers of trainer {ranks} that {self._workers} workers map and load from"
        return f"{what}, broadcast by trainer 0 to {self._workers} workers, which load them"

    # ---- close

    def unmap(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def close_routes(self) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
        self._told, self._exporters, self._opened = b"", Exporters(), False

    # ---- plan and link

    def make_plan(self, inputs: m.PlanInputs, stop: Stop) -> PlanFacts:
        self.close()
        self._deadline_s, catalog = inputs.deadline_s, self.side.catalog
        told = f"packed {catalog.digest()} {inputs.bucket_bytes} {sorted(inputs.drop)}"
        digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
        self._nbytes, self._tensors = sum(map(nbytes_of, catalog.specs)), len(catalog.specs)
        worker = self.side.role == "worker"
        gives = not worker and self.side.index == 0
        self.facts = PlanFacts(digest, (), self._nbytes * worker, self._nbytes * gives, 0, 0)
        return self.facts

    def open(self, order: m.OpenLink, stop: Stop) -> m.LinkOpen:
        moved, self._workers = self._nbytes * order.workers, order.workers
        if self.facts is not None:
            self.facts = replace(self.facts, nbytes=moved, broadcast_bytes=moved)
        if order.fresh:
            self.close()
        if not self._opened:
            self._open(order, stop)
            self._opened = True
        return m.LinkOpen(self.replica, order.epoch)

    def agreed(self) -> None:
        pass

    def _open(self, order: m.OpenLink, stop: Stop) -> None:
        prefix = f"r{self.replica}/e{order.epoch}/"
        store = RendezvousStore(self.party.questions, prefix, self._deadline_s, stop.stopped)
        self._exporters = self._find_exporters(store)
        rank = self._rank_on_link(store)
        if rank is None:
            return
        link: Link = routes.open_link(
            store, rank, self._first_worker + order.workers, self._deadline_s,
            torch.device("cpu") if self._shared else self.side.device,
            labels_of(self._exporters.ranks or (0,), self.replica, order.workers), stop.stopped,
        )  # fmt: skip
        with self._lock:
            self._link, self._told = link, b""
        stop.check()  # a `stop` that was called meanwhile saw no link to abort

    def _find_exporters(self, store: RendezvousStore) -> Exporters:
        """Return the exporters of this link, which trainer 0 chooses; none if buckets are broadcast."""
        raise NotImplementedError

    def _rank_on_link(self, store: RendezvousStore) -> int | None:
        """Return this rank's number on the link; None if it needs no link."""
        raise NotImplementedError

    # ---- refits

    def run(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        try:
            stop.check()
            faults.point(self.side.role, self.side.index, "moving")
            return self._move(go, stop, until, progress)
        except PeerLost:
            # The rank that broke the link has a reason, which arrives from the coordinator and tells more than a broken link.
            heard = time.monotonic() + HEAR_S
            while not stop.stopped() and time.monotonic() < heard:
                time.sleep(0.01)
            raise

    def _move(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        """Do this rank's part; see `DataPlane.run`."""
        raise NotImplementedError

    def _linked(self) -> Link:
        """Return the open link, else PeerLost."""
        if self._link is None:
            raise PeerLost("this rank has no open link; nothing was moved", where=self.party.label)
        return self._link


def words_of(digest: bytes) -> list[int]:
    """Return the 16 bytes of a digest as two words of a header."""
    return [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
