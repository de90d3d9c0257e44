"""One gather of the trainers' weights for all replicas that begin together, overlapped with sending.

A `Feed` is one gather on one trainer rank, on a thread of its own. It packs bucket k + 1 while the lanes send bucket k, through
two reused buffers. All trainer ranks gather, because gathering is collective. Rank 0 packs and sends; if workers map buffers,
one rank of each GPU does (shared.py). If a replica fails, it leaves and the others continue; if none is left, all ranks stop at
the same group. plane.py has the wire, source.py the gathered tensors.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.packed.broadcast import own_stream, recorded
from xfer.packed.buffer import Buffers, Packer, wire_sum
from xfer.packed.plan import BucketPlan, GatherGroup
from xfer.packed.shared import SharedBuffers
from xfer.packed.source import PackedSource
from xfer.packed.wire import PackedMessage
from xfer.participants.data_plane import Stop

PATIENCE_S = 5.0
"""Seconds that a rank which must stop waits for the coordinator to report the reason."""
LOOK_S = 0.2
"""Seconds between two checks whether a lane was stopped."""

IN_STEP = (
    "until it ends, run no collective of these trainers, hence no training step: it would be paired with the gather's; "
    "nccl_xfer_refit() on all ranks waits for it"
)
"""Gathers use the trainers' own groups, where a collective of one rank pairs with whichever collective the others run."""


class Feed:
    """One gather on one trainer rank.

    Args:
        source: The weights.
        buffers: Where buckets are packed.
        replicas: Replicas whose lanes will join.
        label: Name of this rank.
        sends: Whether this rank packs and sends.
        before: The previous gather, which must be over, and must have sent all that the buffers hold.

    Attributes:
        over: Set when the gather reads no weights any more. The last messages may still be on their way.
        doing: Present activity of the gather; quoted in timeout errors.
        seconds: Duration of the gather, including waits for the wire.
    """

    def __init__(
        self,
        source: PackedSource,
        buffers: Buffers,
        replicas: tuple[int, ...],
        label: str,
        sends: bool,
        before: Feed | None,
    ):
        self.replicas, self.over = replicas, threading.Event()
        self.doing = "waits for the other replicas' lanes"
        self.seconds = 0.0
        self._source, self._buffers, self._label = source, buffers, label
        self._sends, self._before = sends, before
        self._news, self._summing = threading.Condition(), threading.Lock()
        self._sums: dict[int, int] = {}  # message -> its sum
        self._live: dict[int, int] = {}  # replica -> number of messages that it has released
        self._came: set[int] = set()
        self._number = 0  # of the message that is filled next
        self._plan: BucketPlan | None = None
        self._ready: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}  # message -> bytes, their event
        self._error: BaseException | None = None
        self._patience = 0.0  # monotonic time until which this rank does not report the error itself

    # ---- for lanes

    def join(self, replica: int) -> None:
        """Called by each replica's lane. The last one starts the gather."""
        with self._news:
            self._came.add(replica)
            self._live[replica] = 0
            if self._came == set(self.replicas):
                threading.Thread(target=self._run, name="xfer-gather", daemon=True).start()
            self._news.notify_all()

    def leave(self, replica: int) -> None:
        with self._news:
            self._live.pop(replica, None)
            if not self._live:
                self._ready = {}
            self._news.notify_all()

    def wait_left(self, seconds: float = math.inf) -> bool:
        """Wait until no lane sends out of the buffers. Returns whether that is so. Lanes leave by their own deadline."""
        until = time.monotonic() + seconds
        with self._news:
            while self._live and time.monotonic() < until:
                self._news.wait(LOOK_S)
            return not self._live

    def stir(self) -> None:
        with self._news:
            self._news.notify_all()

    def plan(self, until: float, stop: Stop) -> BucketPlan:
        """Return the plan of this gather, when all trainers have agreed on it."""
        self._wait(lambda: self._plan is not None, until, stop, "the trainers to agree on what they send")
        assert self._plan is not None
        return self._plan

    def take(self, number: int, until: float, stop: Stop) -> torch.Tensor:
        """Return the bytes of message `number`. They are valid until `release`."""
        self._wait(lambda: number in self._ready, until, stop, f"bucket {number} to be gathered")
        data, filled = self._ready[number]
        if filled is not None:
            torch.cuda.current_stream(data.device).wait_event(filled)
        return data

    def sum_of(self, number: int, until: float, stop: Stop) -> int:
        """Return the sum of a message that was taken and not released. It is computed once for all replicas."""
        while not self._summing.acquire(timeout=LOOK_S):
            stop.check()
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"timed out waiting for the sum of bucket {number}", where=self._label)
        try:
            if number not in self._sums:
                self._sums[number] = wire_sum(self._ready[number][0], number)
            return self._sums[number]
        finally:
            self._summing.release()

    def release(self, number: int, replica: int) -> None:
        with self._news:
            self._live[replica] = number + 1
            self._news.notify_all()

    def wait_over(self, until: float, stop: Stop) -> None:
        """Wait until the gather is over. Raises its error, if there is one."""
        self._wait(self.over.is_set, until, stop, "the trainers to gather their weights")
        self._wait(lambda: self._error is None, until, stop, "another trainer rank to say why it stopped")

    def _wait(self, there: Callable[[], bool], until: float, stop: Stop, what: str) -> None:
        with self._news:
            while not there():
                stop.check()
                if self._error is not None and time.monotonic() >= self._patience:
                    raise self._problem()
                if self._error is None and self.over.is_set():
                    raise PeerLost("the trainers stopped gathering", where=self._label)
                if time.monotonic() >= until:
                    raise DeadlineExceeded(
                        f"timed out waiting for {what}", [f"the gather of this rank {self.doing}"], where=self._label
                    )
                self._news.wait(LOOK_S)

    def _problem(self) -> XferError:
        e = self._error
        if isinstance(e, XferError):
            e.where = e.where or self._label
            return e
        what = f"the trainers' weights could not be gathered: {type(e).__name__}: {e}"
        if isinstance(e, dist.DistBackendError) or "onnection closed by peer" in str(e) or "onnection reset" in str(e):
            # torch gives no reason; the rank that broke the collective reports it.
            return PeerLost(what, where=self._label)
        return XferError(what, where=self._label)

    # ---- the gather's thread

    def _run(self) -> None:
        device = self._source.device
        if self._before is not None:
            # Without a deadline, even if all lanes have left this gather: all ranks run all gathers, in the same order.
            self.doing = "waits for an earlier one, which has not ended"
            self._before.over.wait()
            if self._sends:
                self.doing = "waits until the messages of an earlier one are sent from the same buffers"
                self._before.wait_left()
            self._before = None
        began = time.perf_counter()
        try:
            with torch.no_grad(), own_stream(device, "gather"):
                try:
                    self._gather()
                finally:
                    if device.type == "cuda":  # until then parameters are read
                        torch.cuda.current_stream(device).synchronize()
        except BaseException as e:
            self._fail(e)
        finally:
            self.seconds = time.perf_counter() - began
            with self._news:
                self.over.set()
                self._news.notify_all()

    def _fail(self, e: BaseException) -> None:
        self._source.doubt()
        self._stop(e)

    def _stop(self, e: BaseException) -> None:
        with self._news:
            self._error = self._error or e
            self._news.notify_all()

    def _told_to_stop(self) -> None:
        """Stop because another rank or all replicas have failed. The coordinator reports the reason; this rank's error is raised only
        if no report arrives within PATIENCE_S."""
        if self._error is None:
            self._patience = time.monotonic() + PATIENCE_S
            self._stop(PeerLost("another trainer rank stopped gathering and has not said why", where=self._label))

    def _gather(self) -> None:
        source = self._source
        self.doing = "waits for the other trainers to agree on what is sent"
        plan = source.begin()
        try:
            if self._sends:
                self._buffers.begin(plan.messages)
            with self._news:
                self._plan = plan
                self._news.notify_all()
            if source.writes:
                self.doing = "makes the tables of its copies"
                source.prepare(self._buffers if self._sends else None)
        except Exception as e:  # the other ranks learn of it at the first group
            self._fail(e)
        for i, group in enumerate(plan.groups):
            self.doing = f"waits for the other trainers at bucket group {i} of {len(plan.groups)}"
            if not source.go_on(self._error is not None or not self._live):
                self._told_to_stop()
                return
            self.doing = f"is in bucket group {i} of {len(plan.groups)}, which begins with {group.tensors[0].name}"
            try:
                self._gather_group(group)
            except Exception as e:  # the other ranks learn of it at the next `go_on`
                self._fail(e)
        # A rank that failed in the last group must report it, or the others would regard the gather as complete.
        self.doing = "waits for the other trainers to finish the last bucket group"
        if not source.go_on(self._error is not None):
            self._told_to_stop()

    def _gather_group(self, group: GatherGroup) -> None:
        if self._source.writes:
            return self._place_group(group)
        packer = None
        if self._sends:
            packer = Packer(group, self._buffer, self._filled, self._buffers.views)
        # The loop runs to its end even if packing fails, because the other ranks run the same collectives.
        for name, tensor in self._source.tensors(group):
            if packer is not None and self._error is None:
                try:
                    packer.put(name, tensor)
                except Exception as e:
                    self._fail(e)
        if packer is not None and self._error is None:
            packer.close()

    def _place_group(self, group: GatherGroup) -> None:
        for message in group.messages:
            data = None
            if self._sends and self._error is None:
                try:
                    data = self._buffer(message)
                except Exception as e:
                    self._fail(e)
            self._source.place(message, data)  # also without a buffer: the other ranks take part
            if data is not None:
                self._filled(data)

    def _buffer(self, message: PackedMessage) -> torch.Tensor:
        """Return the next buffer, when every remaining replica has released the message that it holds."""
        old = self._number - self._buffers.count
        with self._news:
            while any(done <= old for done in self._live.values()):
                self._news.wait(LOOK_S)
            self._ready.pop(old, None)
        return self._buffers.take(self._number, message.nbytes)

    def _filled(self, data: torch.Tensor) -> None:
        event = recorded(data.device)
        with self._news:
            if self._live:
                self._ready[self._number] = (data, event)
            self._number += 1
            self._news.notify_all()


class Pump:
    """Makes the feeds of one trainer rank: one for each set of replicas that begin together.

    Args:
        source: The weights.
        label: Name of this rank.
    """

    def __init__(self, source: PackedSource, label: str):
        self.source, self._label = source, label
        self.colocated = source.colocated
        self.exports = source.rank == 0
        self._buffers = SharedBuffers(2, source.device) if source.colocated else Buffers(2, source.device)
        self._lock, self._forgetting = threading.Lock(), threading.Lock()
        self._feeds: dict[tuple[int, tuple[int, ...]], Feed] = {}
        self._last: Feed | None = None

    @property
    def exports(self) -> bool:
        """Whether this rank packs. Lanes set it when they open a link, before the first gather; see shared.exporters_of."""
        return self._exports

    @exports.setter
    def exports(self, value: bool) -> None:
        self._exports = value
        self.source.assemble(value)

    def forget(self) -> None:
        """Drop the trainers' storages and the buffers. Called only while no gather runs and everything is sent. Lanes of several
        replicas may call it at once; on return everything is dropped."""
        with self._forgetting:
            self.source.forget()
            self._buffers.free()

    def enter(self, attempt: int, together: tuple[int, ...]) -> Feed:
        """Return the feed of an attempt, and make it on the first call.

        The thread that receives the coordinator's messages calls this when Go arrives, so that gathers run in the order of Go,
        which is the same on all ranks. Lanes' own threads may come in another order.
        """
        with self._lock:
            key = (attempt, together)
            if key not in self._feeds:
                self._feeds = {k: f for k, f in self._feeds.items() if not f.over.is_set()}
                self._feeds[key] = self._last = Feed(
                    self.source, self._buffers, together, self._label, self.exports, self._last
                )
            return self._feeds[key]

    def join(self, attempt: int, together: tuple[int, ...], replica: int) -> Feed:
        """Join the feed of an attempt. Called by the lane of every replica in `together`."""
        feed = self.enter(attempt, together)
        feed.join(replica)
        return feed

    def wait_over(self, seconds: float) -> bool:
        """Wait until no gather of this rank runs. Returns whether that is so."""
        with self._lock:
            last = self._last
        return last is None or last.over.wait(seconds)

    def wait_sent(self, seconds: float) -> bool:
        """Do `wait_over`, and wait until all gathered messages are sent, also to other replicas, whose lanes may be slower."""
        until = time.monotonic() + seconds
        with self._lock:
            last = self._last
        return self.wait_over(seconds) and (last is None or last.wait_left(max(0.0, until - time.monotonic())))

    def with_gather(self, violations: Iterable[str]) -> tuple[str, ...]:
        """Return `violations`, preceded by a warning if a gather still runs. A warning about a gather that has ended is removed."""
        with self._lock:
            running = [feed for feed in self._feeds.values() if not feed.over.is_set()]
        lines = [f"a gather of this rank goes on: it {feed.doing}; {IN_STEP}" for feed in running[:1]]
        return (*lines, *(v for v in violations if not v.endswith(IN_STEP)))

    @property
    def offer(self) -> bytes:
        """How workers of this host open the buffers; empty if they are not shared. Stable while a feed has a plan."""
        return self._buffers.offer

    @property
    def extra_bytes(self) -> int:
        return self._buffers.nbytes
