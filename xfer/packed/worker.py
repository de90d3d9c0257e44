"""An engine worker on the packed route: it receives messages, and the engine's own loader loads their tensors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.errors import PeerLost, ProtocolError, RefitFailed, Unsupported, out_of_memory
from xfer.packed.broadcast import Arrivals
from xfer.packed.buffer import Buffers, Unpacker, warm_sum
from xfer.packed.plane import HEAD_TAG, HEADER_WORDS, MAGIC, PackedPlane, words_of
from xfer.packed.shared import SharedArrivals, nearest
from xfer.packed.wire import (
    MAX_MANIFEST,
    Exporters,
    PackedMessage,
    checked,
    decode_exporters,
    decode_manifest,
    digest,
    longest_of,
)
from xfer.participants.data_plane import Progress, Stop
from xfer.participants.worker import Adapter
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.store import RendezvousStore
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec
from xfer.transport.group import Link


class Loader(Protocol):
    """The engine's own loader on one worker; see `engines/vllm_loader.py` for vLLM's."""

    def accept(self, catalog: Catalog) -> None:
        """Refuse a catalog whose tensors the engine's loader cannot take."""

    def check(self) -> None:
        """Refuse an engine whose weights have no memory now. No address is kept between refits."""

    def begin(self, specs: Sequence[TensorSpec]) -> None: ...

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket. Its tensors are views of a buffer that is reused after this returns."""

    def finish(self) -> None:
        """Called after the last bucket. LayoutError if parameters were not loaded."""

    def abandon(self) -> None:
        """End a failed refit. Weights that were written stay, so the model is not usable."""


class Loads(Adapter, Protocol):
    """An engine framework's adapter, as this route uses it."""

    def loader(self) -> Loader: ...


class PackedWorker:
    """Implements `WorkerSide` (participants/worker.py)."""

    role = "worker"

    def __init__(self, adapter: Loads, party: RendezvousClient, replica: int, index: int):
        self.weights, self.loader = adapter.weights, adapter.loader()
        self.device, self.index, self.inventory = adapter.weights.device, index, b""
        self.catalog: Catalog  # set by `read`
        self._party, self._replica = party, replica

    def read(self, catalog: Catalog) -> tuple[TensorSpec, ...]:
        self.loader.accept(catalog)
        self.catalog, self.inventory = catalog, catalog.digest().encode()
        return ()

    def check(self, quick: bool = False) -> str:
        self.loader.check()
        return "same"

    def rebind(self) -> None:
        pass

    def base(self) -> int:
        return 0

    def plane(self, joint_rank: int) -> WorkerPlane:
        return WorkerPlane(self._party, self, self._replica)


_abandoned: list[tuple[Link, Buffers]] = []  # held until the aborted link no longer writes to the buffers


class WorkerPlane(PackedPlane):
    """A worker's part in its replica's refits."""

    side: PackedWorker

    def __init__(self, party: RendezvousClient, side: PackedWorker, replica: int):
        super().__init__(party, side, replica)
        self._exporter = 0  # with colocated engines: rank on the link of this worker's exporter
        self._messages: tuple[PackedMessage, ...] = ()  # of the manifest that this link has carried
        self._buffers = Buffers(2, side.device)

    @property
    def extra_bytes(self) -> int:
        return self._buffers.nbytes

    def _find_exporters(self, store: RendezvousStore) -> Exporters:
        return decode_exporters(store.get("exporters"))

    def _rank_on_link(self, store: RendezvousStore) -> int:
        if self._shared:
            places = self._exporters.places
            self._exporter = nearest(self.place, places)
            if (self.place == "cpu") != (places[self._exporter] == "cpu"):
                raise Unsupported("colocated trainers and engines must both be on CPUs or both on GPUs")
            store.set(f"takes{self.side.index}", str(self._exporter))
        return self._first_worker + self.side.index

    # ---- refits

    def _move(self, go: m.Go, stop: Stop, until: float, progress: Progress) -> m.Moved:
        """Receive all messages and load them."""
        link, loader = self._linked(), self.side.loader
        _abandoned[:] = [x for x in _abandoned if not x[0].drained()]
        messages = self._announced(link, go, until)
        arrivals = self._arrivals(link, messages, go.verify, until)
        unpacker = Unpacker(self.side.device) if self._shared else Unpacker(self.side.device, self._buffers.views)
        specs = self.side.catalog.specs
        load_s, nbytes = 0.0, 0
        try:
            self.side.weights.engage_lock()
            with self._memory_for("made its model ready to be loaded"):
                loader.begin(specs)
            for number, message in enumerate(messages):
                with self._memory_for(f"took in bucket {number}, of {message.nbytes:,} bytes"):
                    data = arrivals.take()
                    stop.check()
                    faults.point("worker", self.side.index, "wave")
                    began = time.perf_counter()
                    tensors = [(s.name, t) for s, t in unpacker.take(message, data)]
                    if tensors:
                        loader.load(tensors)
                del tensors, data
                load_s += time.perf_counter() - began
                nbytes += message.nbytes
                arrivals.free()
                progress(number, nbytes)
            unpacker.close(s.name for s in specs)
            began = time.perf_counter()
            with self._memory_for("finished what it had loaded"):
                loader.finish()
            load_s += time.perf_counter() - began
        except BaseException as e:
            if not stop.stopped() and not isinstance(e, PeerLost):  # before other ranks see the broken link
                self.party.try_send(m.Failed(m.WireError.of(e, self.party.label), go.attempt, self.replica))
            link.abort()  # otherwise the receiving thread would continue to write to buffers, and wait for more messages
            loader.abandon()
            raise
        finally:
            if not arrivals.close() or not link.drained():  # the link may still write to the buffers
                _abandoned.append((link, self._buffers))
                self._buffers = Buffers(2, self.side.device)
        self.side.weights.synchronize()
        total = arrivals.total ^ int(go.verify and faults.wants("worker", self.side.index, "checksum"))
        sums = (m.Checksum.of(self.side.index, total),) if go.verify else ()
        carried = (m.RouteTaken("packed", nbytes, arrivals.seconds),)
        return m.Moved(
            self.replica, bytes_in=nbytes, wire_s=arrivals.seconds, unpack_s=load_s, checksums=sums, routes=carried
        )

    def _arrivals(
        self, link: Link, messages: tuple[PackedMessage, ...], verify: bool, until: float
    ) -> Arrivals | SharedArrivals:
        """Make room for the messages, before a byte of the model changes, and begin to receive them."""
        with self._memory_for(f"made room for buckets of {longest_of(messages):,} bytes"):
            if verify:
                warm_sum(self.side.device)
            if self._shared:
                return SharedArrivals(link, messages, until, self.side.device, verify, exporter=self._exporter)
            return Arrivals(link, messages, self._buffers, until, self.side.device, verify)

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
        words = self._hear(link, torch.zeros(HEADER_WORDS, dtype=torch.int64), until).tolist()
        magic, count, size, longest, attempt, high, low, shared = words
        if magic != MAGIC or attempt != go.attempt or not 0 <= size <= MAX_MANIFEST or shared != int(self._shared):
            raise ProtocolError(
                "the header received does not belong to this refit",
                [f"expected attempt {go.attempt}; received {words}"],
            )
        if size:
            raw = bytes(self._hear(link, torch.zeros(size, dtype=torch.uint8), until).numpy())
            self._messages = checked(decode_manifest(raw), {s.name: s for s in self.side.catalog.specs})
            self._told = digest(raw)
        if words_of(self._told.ljust(16, b"\0")) != [high, low] or len(self._messages) != count:
            raise ProtocolError("the trainer refers to buckets that it has not announced here")
        if longest != longest_of(self._messages):
            raise ProtocolError(f"the trainer's longest message has {longest} bytes, but no announced message has")
        return self._messages

    def _hear(self, link: Link, data: torch.Tensor, until: float) -> torch.Tensor:
        """Receive from trainer 0 as many bytes as `data` has. Returns them on the CPU."""
        if self._shared:
            link.recv(data, 0, HEAD_TAG, until)
            return data
        data = data.to(self.side.device)
        link.broadcast(data, 0, until)
        return data.cpu()
