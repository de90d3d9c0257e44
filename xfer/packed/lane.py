"""One rank's part in one replica's refit of the packed route: trainer 0 broadcasts buckets, the replica's workers load them.

    sender   header (fixed size: how many messages, which manifest) | manifest, when this link has not had it | message 0, 1, …
    worker   receives message k + 1 while the engine's loader takes in message k, through two buffers
    others   gather with the sender (feed.py) and have no link

The thread, its queue and how it is stopped are the direct route's (session/lane.py); so are all messages to the hub.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xfer.errors import PeerLost, PlanMismatch, ProtocolError, RefitFailed, XferError
from xfer.packed.buffer import Buffers, Unpacker, specs_by_name, wire_sum
from xfer.packed.feed import Feed, Pump
from xfer.packed.shared import MAX_OFFER, SharedArrivals, announce, wait_done
from xfer.packed.wire import MAX_MANIFEST, Message, checked, decode_manifest, digest, nbytes_of
from xfer.session import faults
from xfer.session import messages as m
from xfer.session.lane import PROGRESS_S, Lane
from xfer.session.store import HubStore
from xfer.trace.fragment import TensorSpec
from xfer.transport import routes
from xfer.transport.group import Link

_MAGIC = 0x78666572
_HEADER = 8  # int64 words
HEAR_S = 2.0
"""Seconds in which a rank whose link broke hears why from the hub, before it reports that it broke."""


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


@dataclass(frozen=True, slots=True)
class _Summary:
    broadcast_bytes: int


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What a lane knows before the first gather: the names and sizes of what will come."""

    digest: str
    nbytes: int
    tensors: int
    workers: int = 0

    @property
    def summary(self) -> _Summary:
        return _Summary(self.nbytes * self.workers)


class PackedLane(Lane):
    """`pump`: on trainers; `loader`: on workers."""

    def __init__(
        self, party, side, replica: int, joint_rank: int, *, pump: Pump | None = None, loader: Loader | None = None
    ):
        self.pump, self.loader = pump, loader
        self._feed: Feed | None = None
        self._told = b""  # digest of the manifest that this link has carried
        self._messages: tuple[Message, ...] = ()
        self._buffers = Buffers(2, side.device) if loader is not None else None
        super().__init__(party, side, replica, joint_rank, None)

    @property
    def sends(self) -> bool:
        return self.pump is not None and self.side.index == 0

    # ---- what sessions ask of a lane

    def cancel(self, error: XferError, epoch: int | None) -> None:
        super().cancel(error, epoch)
        if (feed := self._feed) is not None:
            feed.stir()

    def planned_bytes(self) -> tuple[int, int]:
        if self.plan is None:
            return 0, 0
        return (self.plan.nbytes, 0) if self.loader is not None else (0, self.plan.nbytes if self.sends else 0)

    @property
    def extra_bytes(self) -> int:
        if self.loader is not None:
            return self._buffers.nbytes
        return self.pump.extra_bytes if self.replica == min(self.party.lanes, default=self.replica) else 0

    def rebound(self) -> bool:
        return False

    def explain(self) -> str:
        return (
            f"packed: {self.plan.tensors} whole tensors, {self.plan.nbytes:,} bytes, broadcast by trainer 0 "
            f"to {self.plan.workers} workers, which load them"
        )

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
        if self.plan is None:
            raise PlanMismatch("asked to open a link without a plan")
        self.plan = replace(self.plan, workers=o.workers)
        if o.fresh:
            self._close_link()
        if self._link is None and (self.loader is not None or self.sends):
            self._open(o)
        self._check()
        self.party.send(m.LinkOpen(self.replica, o.epoch))

    def _open(self, o: m.OpenLink) -> None:
        def cancelled() -> bool:
            return self._cancelled is not None

        store = HubStore(
            self.party.channel, self.party.replies, f"r{self.replica}/e{o.epoch}/", self._deadline_s, cancelled
        )
        labels = ("trainer 0", *(f"replica {self.replica} worker {i}" for i in range(o.workers)))
        rank = 0 if self.sends else 1 + self.side.index
        link: Link = routes.open_link(store, rank, 1 + o.workers, self._deadline_s, self.side.device, labels, cancelled)
        with self._lock:
            self._link, self._told = link, b""
        self._check()  # a cancel that came meanwhile has seen no link to abort

    # ---- refits

    def _do_go(self, go: m.Go) -> None:
        if self.pump is not None:
            # Also when this lane was stopped meanwhile: the gather is one for all replicas, and all ranks take part.
            self._feed = self.pump.join(go.attempt, go.together or (self.replica,), self.replica)
        try:
            self._go(go)
        except PeerLost:
            # Who breaks a link has a reason, which comes by the hub and says more than that the link is broken.
            until = time.monotonic() + HEAR_S
            while self._cancelled is None and time.monotonic() < until:
                time.sleep(0.01)
            raise
        finally:
            if (feed := self._feed) is not None:
                feed.leave(self.replica)
                feed.over.wait()  # not idle before: this rank's parameters are being read
                self._feed = None

    def _go(self, go: m.Go) -> None:
        self._check()
        self.go_attempt = go.attempt
        until = time.monotonic() + go.deadline_s + 2.0  # the hub's own deadline comes first: it knows who is late
        self.party.try_send(m.Progress(self.replica, go.attempt, "moving", 0, 0, sum(self.planned_bytes())))
        faults.point(self.side.role, self.side.index, "moving")
        done = self._take_in(go, until) if self.loader is not None else self._give(go, until)
        faults.point(self.side.role, self.side.index, "done")
        self._check()
        self.party.send(done)
        self.done_attempt = go.attempt

    def _why(self) -> XferError | None:
        return self._cancelled

    def _give(self, go: m.Go, until: float) -> m.Done:
        """A trainer: gather with the others, and send what was gathered if that is this rank's part."""
        feed = self._feed
        wire_s, nbytes, total = self._send(feed, go, until) if self.sends else (0.0, 0, 0)
        feed.wait_over(until, self._why)
        sums: tuple[m.Checksum, ...] = ()
        if go.verify and self.sends:
            total ^= int(faults.wants("trainer", self.side.index, "checksum"))
            sums = tuple(m.Checksum(w, total.to_bytes(8, "little")) for w in range(self.plan.workers))
        source = self.pump.source
        return m.Done(
            self.replica, go.attempt, 0, nbytes, max(0.0, feed.seconds - source.built_s), wire_s, 0.0,
            source.agreed_s + source.built_s, sums,
        )  # fmt: skip

    def _send(self, feed: Feed, go: m.Go, until: float) -> tuple[float, int, int]:
        """(seconds on the wire, bytes, sum over messages when verifying)."""
        link, device = self._link, self.side.device
        plan = feed.plan(until, self._why)
        manifest, known = plan.manifest, self._told == digest(plan.manifest)
        offer = self.pump.offer
        words = torch.tensor(
            [
                _MAGIC,
                plan.messages,
                0 if known else len(manifest),
                plan.buffer_bytes,
                go.attempt,
                *_words(digest(manifest)),
                len(offer),
            ],
            dtype=torch.int64,
        )
        link.broadcast(words.to(device), 0, until)
        if not known:
            link.broadcast(torch.frombuffer(bytearray(manifest), dtype=torch.uint8).to(device), 0, until)
            self._told = digest(manifest)
        if offer:
            link.broadcast(torch.frombuffer(bytearray(offer), dtype=torch.uint8).to(device), 0, until)
        seconds, nbytes, total, said = 0.0, 0, 0, time.monotonic()
        for number in range(plan.messages):
            data = feed.take(number, until, self._why)
            faults.point("trainer", self.side.index, "wave")
            began = time.perf_counter()
            if offer:
                announce(link, number, until, device)
                wait_done(link, number, self.plan.workers, until, device)  # the next is being packed meanwhile
            else:
                link.broadcast(data, 0, until)
            seconds += time.perf_counter() - began
            nbytes += data.numel()
            if go.verify:
                total = (total + wire_sum(data, number)) % (1 << 64)
            feed.release(number, self.replica)
            said = self._progress(go, number, nbytes, said)
        return seconds, nbytes, total

    def _progress(self, go: m.Go, number: int, nbytes: int, said: float) -> float:
        now = time.monotonic()
        if now - said < PROGRESS_S:
            return said
        self.party.try_send(m.Progress(self.replica, go.attempt, "moving", number, nbytes, sum(self.planned_bytes())))
        return now

    # ---- workers

    def _take_in(self, go: m.Go, until: float) -> m.Done:
        link, model = self._link, self.loader
        messages, offer = self._announced(go, link, until)
        specs = self.side.catalog().specs
        how = (until, self.side.device, go.verify)
        if offer:
            arrivals = SharedArrivals(link, messages, offer, *how)
        else:
            arrivals = _Arrivals(link, messages, self._buffers, *how)
        unpacker, said, load_s = Unpacker(self.side.device), time.monotonic(), 0.0
        nbytes = 0
        try:
            self.side.before(go, self.plan)
            model.begin(specs)
            for number, message in enumerate(messages):
                data = arrivals.take()
                self._check()
                faults.point("worker", self.side.index, "wave")
                began = time.perf_counter()
                tensors = [(s.name, t) for s, t in unpacker.take(message, data)]
                if tensors:
                    self._load(tensors, number, message)
                del tensors, data
                load_s += time.perf_counter() - began
                nbytes += message.nbytes
                arrivals.free()
                said = self._progress(go, number, nbytes, said)
            unpacker.close(s.name for s in specs)
            began = time.perf_counter()
            model.finish()
            load_s += time.perf_counter() - began
        except BaseException as e:
            if self._cancelled is None and not isinstance(e, PeerLost):  # before the others see the link break
                self.party.try_send(m.Failed(m.WireError.of(e, self.party.label), go.attempt, self.replica))
            link.abort()  # or the receiving thread would go on writing to buffers, and wait for what nobody sends
            model.abandon()
            raise
        finally:
            arrivals.close()
        self.side.model.synchronize()
        total = arrivals.total ^ int(go.verify and faults.wants("worker", self.side.index, "checksum"))
        sums = (m.Checksum(self.side.index, total.to_bytes(8, "little")),) if go.verify else ()
        carried = (m.RouteBytes("packed", nbytes, arrivals.seconds),)
        return m.Done(self.replica, go.attempt, nbytes, 0, 0.0, arrivals.seconds, load_s, 0.0, sums, carried)

    def _load(self, tensors: list[tuple[str, torch.Tensor]], number: int, message: Message) -> None:
        """RefitFailed when the engine's memory does not suffice."""
        try:
            self.loader.load(tensors)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and not isinstance(e, torch.OutOfMemoryError) and "alloc" not in str(e):
                raise
            raise RefitFailed(
                f"this worker ran out of memory while it took in bucket {number}, of {message.nbytes:,} bytes",
                [
                    f"{type(e).__name__}: {e}"[:500],
                    "give connect() a smaller bucket_bytes, or leave the engine more memory",
                ],
                where=self.party.label,
            ) from e

    def _announced(self, go: m.Go, link: Link, until: float) -> tuple[tuple[Message, ...], bytes]:
        """What will come, and the offer of shared buffers if it lies in such; checked against what the trainers said that
        they export, before a byte of the model changes."""
        device = self.side.device
        words = torch.zeros(_HEADER, dtype=torch.int64, device=device)
        link.broadcast(words, 0, until)
        magic, count, size, longest, attempt, high, low, shared = words.tolist()
        fits = 0 <= size <= MAX_MANIFEST and 0 <= shared <= MAX_OFFER
        if magic != _MAGIC or attempt != go.attempt or not fits:
            raise ProtocolError(
                "what came is not the beginning of this refit",
                [f"attempt {go.attempt} was to come; came {words.tolist()}"],
            )
        if size:
            data = torch.zeros(size, dtype=torch.uint8, device=device)
            link.broadcast(data, 0, until)
            raw = bytes(data.cpu().numpy())
            self._messages, self._told = (
                checked(decode_manifest(raw), specs_by_name(self.side.catalog().specs)),
                digest(raw),
            )
        if _words(self._told.ljust(16, b"\0")) != [high, low] or len(self._messages) != count:
            raise ProtocolError("the sender refers to buckets that it has not announced here")
        if longest != max((x.nbytes for x in self._messages), default=0):
            raise ProtocolError(f"the sender's longest message has {longest} bytes, none here has")
        offer = torch.zeros(shared, dtype=torch.uint8, device=device)
        if shared:
            link.broadcast(offer, 0, until)
        return self._messages, bytes(offer.cpu().numpy())

    def _close_link(self) -> None:
        super()._close_link()
        self._told, self._messages = b"", ()


class _Arrivals:
    """Receives messages one after the other on a thread of its own, as far ahead as there are buffers."""

    def __init__(self, link: Link, messages, buffers: Buffers, until: float, device: torch.device, verify: bool):
        self.seconds, self.total = 0.0, 0
        self._link, self._messages, self._buffers, self._until = link, messages, buffers, until
        self._device, self._verify = device, verify
        self._free = threading.Semaphore(buffers.count)
        self._here: queue.Queue[torch.Tensor | BaseException] = queue.Queue()
        self._stop = False
        self._thread = threading.Thread(target=self._receive, name="xfer-receive", daemon=True)
        self._thread.start()

    def take(self) -> torch.Tensor:
        """The next message; raises what the link raised."""
        found = self._here.get(timeout=max(1.0, self._until - time.monotonic() + 5.0))
        if isinstance(found, BaseException):
            raise found
        return found

    def free(self) -> None:
        """What `take` gave is not needed any more."""
        self._free.release()

    def close(self) -> None:
        self._stop = True
        self._free.release()
        self._thread.join()

    def _receive(self) -> None:
        longest = max((x.nbytes for x in self._messages), default=0)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for number, message in enumerate(self._messages):
                self._free.acquire()
                if self._stop:
                    return
                data = self._buffers.take(number, message.nbytes, longest)
                began = time.perf_counter()
                self._link.broadcast(data, 0, self._until)
                self.seconds += time.perf_counter() - began
                if self._verify:
                    self.total = (self.total + wire_sum(data, number)) % (1 << 64)
                self._here.put(data)
        except BaseException as e:
            self._here.put(e)


def _words(sixteen: bytes) -> list[int]:
    return [int.from_bytes(sixteen[i : i + 8], "little", signed=True) for i in (0, 8)]
