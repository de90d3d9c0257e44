"""Links: xfer's own process groups, with deadlines, names for peers, and an abort that works from another thread.

`open_group` builds the group directly, so torch's default group, its registry and its settings stay untouched and
several links can exist side by side: gloo for CPU tensors, NCCL for CUDA tensors. Messages and broadcasts carry bytes, so every
dtype travels. What is sent when is decided elsewhere: p2p.py for refits, packed/ for buckets, layerwise/wire.py for gathers.

Facts of gloo that shape this file (seen on torch 2.13, each pinned by a test):
- A wait that expires closes all connections of the group. So there is no polling by short waits: a wait gets all the
  time that is left, and `abort` is one deliberate 1 ms wait for a message that nobody sends.
- `ProcessGroup.abort()` does not free a blocked `recv().wait()`; that deliberate wait does, in milliseconds.
- A wait for a message of which some bytes have come is not freed by that either: it ends at its own deadline. So a link waits on threads
  of its own, and an abort frees the callers that wait for these threads. The connection is closed all the same.
- Nothing frees a thread that is inside the constructor of a group, where it waits for a peer that has published its
  address and died. So groups are made in background calls, which are given up when the caller is cancelled.
- A connection is closed under the lock under which its bytes are read, so when `abort` has returned no byte of a
  message that was posted before can arrive any more. This is what makes receiving straight into live storage safe.
- Collectives on tensors that are not contiguous deliver wrong bytes without an error. Hence `bytes_of`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
from torch.distributed import ProcessGroup, Store, Work

from xfer.background import BackgroundCall
from xfer.errors import DeadlineExceeded, PeerLost, XferError

T = TypeVar("T")
Outgoing = tuple[torch.Tensor, int, int]
"""(contiguous tensor, peer rank, tag)"""

_POISON_TAG = 0x7FFFFF01
_TICK = timedelta(milliseconds=1)
_POLL_S = 20e-6
ABORT_S = 10.0
"""Seconds that `Link.abort` waits by default for operations under way."""
_LAST_S = 1.0
"""Seconds by which gloo's own timeout of an opening comes before ours, because gloo's error says more."""
_EXPIRED, _CLOSED_HERE = "Timed out", "Application timeout caused pair closure"


class Aborted(PeerLost):
    """This process aborted the link, by `abort()` or because its run was cancelled."""


class Pending(Protocol):
    """One message (gloo) or one group of messages (NCCL) that is under way."""

    peer: int

    def wait(self, deadline: float) -> None:
        """Returns when the message is complete. On CUDA it makes the current stream wait and returns at once; the deadline
        is then that of `Link.finish`.

        Args:
            deadline: A time.monotonic() value.

        Raises:
            DeadlineExceeded, PeerLost, Aborted: The link cannot be used any more.
        """


def from_rank(root: int):
    """Options of a broadcast that is waited for later. On GPUs it then runs on NCCL's stream, not on the current one."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    return options


def wait_for_stream(
    device: torch.device,
    deadline: float,
    where: str,
    stopped: Callable[[], bool] = lambda: False,
    poll: Callable[[], None] = lambda: None,
) -> None:
    """Returns when the current stream has done all its work. Polls, so that an abort and the deadline are seen whatever the
    device does. `poll` is called meanwhile."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if stopped():
            raise Aborted("stopped here while bytes were moving", where=where)
        if time.monotonic() > deadline:
            raise DeadlineExceeded("the deadline passed while bytes were moving", where=where)
        poll()
        time.sleep(_POLL_S)


class Arrived:
    """A message that is complete already."""

    peer = -1

    def wait(self, deadline: float) -> None:
        pass


class Link(Protocol):
    """One rank's end of a private group of processes. Implementations inherit `send`, `recv` and `broadcast`."""

    rank: int
    size: int
    labels: tuple[str, ...]
    device: torch.device
    grouped: bool
    """Whether the messages of a step must be posted by one call (NCCL), instead of receives first and then sends (gloo)."""

    def post(self, receives: Sequence[Outgoing], sends: Sequence[Outgoing]) -> tuple[list[Pending], list[Pending]]:
        """Starts messages, receives first, and returns at once. Messages of a pair of ranks with one tag match in order."""

    def warm(self, peers: Sequence[int]) -> None:
        """Connects to those of `peers` that are not connected yet. Collective among them: each names the other."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int, deadline: float) -> None:
        """Sends one message, and returns when `tensor` may be written again."""
        self.post((), [(tensor, dst, tag)])[1][0].wait(deadline)
        self.finish(deadline)

    def recv(self, tensor: torch.Tensor, src: int, tag: int, deadline: float) -> None:
        self.post([(tensor, src, tag)], ())[0][0].wait(deadline)
        self.finish(deadline)

    def finish(self, deadline: float, poll: Callable[[], None] = lambda: None) -> None:
        """Returns when the current stream has done all its work, and calls `poll` until then. On the CPU there is nothing to wait
        for."""

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Pending:
        """Starts to copy the bytes of rank `root` into the `tensor` (contiguous) of every rank, and returns at once. Broadcasts
        run one after the other. `wait` on the result returns, on GPUs too, when no rank's bytes move here any more."""

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """`begin_broadcast` and the wait for it."""
        self.begin_broadcast(tensor, root, deadline).wait(deadline)

    def start(self, collective: Callable[[ProcessGroup], T]) -> T:
        """Gives torch's process group to `collective`, which starts something over it, and returns what that returns. An abort
        comes before this or after it, never in between. For callers that have deadlines of their own.

        Raises:
            Aborted: The link is aborted or closed.
        """

    def no_post(self, seconds: float) -> AbstractContextManager[None]:
        """Lets no post begin inside. Waits at most `seconds` for a post that has begun, and then lets it go on."""
        return nullcontext()

    def abort(self, seconds: float = ABORT_S) -> None:
        """Frees everything that is blocked on this link, in any thread, and makes the link useless. Never blocks for long.

        When it has returned, no byte of any message is written into local memory any more, whichever thread aborted first;
        unless that took longer than `seconds`, or failed: ask `drained`.
        """

    def drained(self, seconds: float = 0.0) -> bool:
        """False if the link was aborted and, `seconds` later, its messages may still read and write this rank's memory."""
        return True

    def close(self) -> None:
        """Closes the connections. Messages that are complete here still reach their receivers."""

    def blame(self, pending: Sequence[Pending]) -> list[str]:
        """After a failure: one line for each peer that had not delivered, or had closed its connection."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as flat uint8, over the same memory. ValueError if it is not contiguous: gloo would send wrong bytes."""
    if not tensor.is_contiguous():
        raise ValueError(f"only contiguous tensors travel, not shape {tuple(tensor.shape)} strides {tensor.stride()}")
    return tensor.detach().view(-1).view(torch.uint8)


def opened(
    call: BackgroundCall[T],
    until: float,
    message: str,
    where: str,
    cancelled: Callable[[], bool] = lambda: False,
    advice: str = "",
) -> T:
    """The result of a call that opens something together with other ranks, or an error in xfer's words.

    Args:
        call: Is given up if it has not returned at `until` (a time.monotonic() value) or once `cancelled()`.
        message: The error's message, e.g. "not all of 2 ranks opened the link within 5 s".
        where: The label of this rank.
        advice: What to do about it; becomes the error's violation.

    Raises:
        DeadlineExceeded: It took too long. PeerLost: Another rank, or the store, is gone. Aborted: It was cancelled.
    """
    try:
        return call.take(until, cancelled)
    except (RuntimeError, TimeoutError) as e:
        if not call.over and cancelled():
            raise Aborted("cancelled while the link was being opened", where=where) from None
        late = isinstance(e, TimeoutError) or "imed out" in str(e) or "imeout" in str(e)
        kind, said = DeadlineExceeded if late else PeerLost, _first_line(e)
        if advice:
            raise kind(message, [f"{advice} ({said})"], where=where) from e
        raise kind(f"{message}: {said}", where=where) from e


class GlooLink(Link):
    """A link over gloo; see `Link`. All pairs of ranks are connected when the constructor returns."""

    grouped = False

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        labels: tuple[str, ...],
        cancelled: Callable[[], bool] = lambda: False,
    ):
        self.rank, self.size, self.labels, self.device = rank, size, labels, torch.device("cpu")
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._waits, self._idle = set[_Wait](), list[_Waiter]()
        self._pg: ProcessGroup | None = None
        if size == 1:
            return
        from torch.distributed import ProcessGroupGloo

        # torch's stubs give the messages of a backend to ProcessGroup only.
        make = BackgroundCall(
            lambda: cast(ProcessGroup, ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))
        )
        late = f"not all of {size} ranks opened the link within {timeout:g} s"
        self._pg = opened(make, time.monotonic() + timeout + _LAST_S, late, labels[rank], cancelled)

    # ---- messages

    def post(self, receives: Sequence[Outgoing], sends: Sequence[Outgoing]) -> tuple[list[Pending], list[Pending]]:
        pg = self._group()
        started: tuple[list[Pending], list[Pending]] = ([], [])
        for kind, messages, into in ((pg.recv, receives, started[0]), (pg.send, sends, started[1])):
            verb = "from" if kind == pg.recv else "to"
            for tensor, peer, tag in messages:
                data = bytes_of(tensor)
                try:
                    work = kind([data], peer, tag)
                except RuntimeError as e:
                    raise self.error(e, peer, f"{data.numel()} bytes {verb}") from e
                into.append(_GlooPending(self, work, peer, verb, data))
        return started

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Pending:
        data = bytes_of(tensor)
        if self.size == 1 or not data.numel():
            return Arrived()
        options = from_rank(root)
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            return _GlooPending(self, self._group().broadcast([data], options), root, "of a broadcast from", data)
        except RuntimeError as e:
            raise self.error(e, root, "a broadcast of") from e

    def start(self, collective: Callable[[ProcessGroup], T]) -> T:
        return collective(self._group())

    def warm(self, peers: Sequence[int]) -> None:
        """Does nothing: all pairs are connected."""

    def finish(self, deadline: float, poll: Callable[[], None] = lambda: None) -> None:
        """Does nothing: a message is complete when its wait returns."""

    def wait(self, work: Work, seconds: float) -> bool:
        """Wait for a message as `work.wait` does, but no longer than until the link is aborted.

        Raises:
            RuntimeError: torch raised it.
        """
        try:
            waiter = self._idle.pop()
        except IndexError:
            waiter = _Waiter()
        wait = _Wait(work, timedelta(seconds=seconds))
        self._waits.add(wait)
        try:
            if not self._aborted.is_set():  # an abort that comes after this finds the wait
                waiter.begin(wait)
                wait.over.wait()
            if wait.said is None:
                raise RuntimeError(_CLOSED_HERE)
            return wait.result()
        finally:
            self._waits.discard(wait)
            if wait.said is None or self._aborted.is_set():
                waiter.end()
            else:
                self._idle.append(waiter)

    # ---- the end

    def abort(self, seconds: float = ABORT_S) -> None:
        self._aborted.set()
        with self._lock:
            pg = self._pg
        try:
            self._close_all(pg)
        finally:
            for wait in list(self._waits):
                wait.over.set()
            self._end_idle()

    def _end_idle(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def _close_all(self, pg: ProcessGroup | None) -> None:
        if pg is None:
            return
        # One wait that expires closes every connection of the context; the other peers are tried in case that ever changes.
        for peer in range(self.size):
            if peer == self.rank:
                continue
            try:
                pg.recv([torch.empty(1, dtype=torch.uint8)], peer, _POISON_TAG).wait(_TICK)
            except RuntimeError:
                pass

    def close(self) -> None:
        self._aborted.set()
        self._end_idle()
        with self._lock:
            self._pg = None

    def blame(self, pending: Sequence[Pending]) -> list[str]:
        out: dict[int, str] = {}
        for p in pending:
            fate = p.fate() if isinstance(p, _GlooPending) else None
            if fate is not None and (p.peer not in out or "closed" in fate):
                out[p.peer] = f"{self.labels[p.peer]}: {fate}"
        return [out[peer] for peer in sorted(out, key=lambda r: ("closed" not in out[r], r))]

    def error(self, e: RuntimeError, peer: int, what: str) -> XferError:
        """The error in xfer's words."""
        text, who = str(e), self.labels[self.rank]
        if self._aborted.is_set():
            return Aborted(f"stopped here while waiting for {what} {self.labels[peer]}", where=who)
        if _EXPIRED in text or "timed out" in text or _CLOSED_HERE in text:
            return DeadlineExceeded(f"the deadline passed while waiting for {what} {self.labels[peer]}", where=who)
        return PeerLost(
            f"the connection to {self.labels[peer]} was closed: it died, or it gave up", [_first_line(e)], where=who
        )

    def _group(self):
        return not_closed(self._pg, self)


def not_closed(pg: ProcessGroup | None, link: Link):
    """The process group of a link. Raises Aborted if there is none."""
    if pg is None:
        why = "this link is closed" if link.size > 1 else "a group of one rank has no peers"
        raise Aborted(why, where=link.labels[link.rank])
    return pg


class _Wait:
    """One wait for a message. `over` is set when it has ended, or when the link is aborted: then nothing is `said`."""

    __slots__ = ("work", "seconds", "over", "said")

    def __init__(self, work: Work, seconds: timedelta):
        self.work, self.seconds, self.over = work, seconds, threading.Event()
        self.said: bool | RuntimeError | None = None

    def run(self) -> None:
        try:
            self.said = self.work.wait(self.seconds) is not False
        except RuntimeError as e:
            self.said = e
        self.over.set()

    def result(self) -> bool:
        if isinstance(self.said, RuntimeError):
            raise self.said
        return bool(self.said)


class _Waiter:
    """A thread in which one wait runs after the other."""

    def __init__(self) -> None:
        self._next: queue.SimpleQueue[_Wait | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="xfer-wait", daemon=True).start()

    def _run(self) -> None:
        while (wait := self._next.get()) is not None:
            wait.run()
            del wait  # else it keeps the message's storage until the next one

    def begin(self, wait: _Wait) -> None:
        self._next.put(wait)

    def end(self) -> None:
        """End the thread, after the wait that it is in."""
        self._next.put(None)


class _GlooPending:
    __slots__ = ("link", "work", "peer", "verb", "data")

    def __init__(self, link: GlooLink, work, peer: int, verb: str, data: torch.Tensor):
        # gloo keeps only an address, so `data` is held here.
        self.link, self.work, self.peer, self.verb, self.data = link, work, peer, verb, data

    def wait(self, deadline: float) -> None:
        left = max(0.001, deadline - time.monotonic())
        try:
            done = self.link.wait(self.work, left)
        except RuntimeError as e:
            raise self.link.error(e, self.peer, f"{self.data.numel()} bytes {self.verb}") from e
        if done is False:
            raise self.link.error(RuntimeError(_CLOSED_HERE), self.peer, f"{self.data.numel()} bytes {self.verb}")

    def fate(self) -> str | None:
        """None if the message is complete, otherwise a description of its failure. Only on an aborted link, where waits return at once."""
        try:
            self.work.wait(_TICK)
        except RuntimeError as e:
            if _CLOSED_HERE in str(e) or _EXPIRED in str(e):
                return f"{self.data.numel()} bytes {self.verb} it were not done"
            return f"closed its connection with {self.data.numel()} bytes {self.verb} it not done"
        return None


def _first_line(e: BaseException) -> str:
    text = str(e).splitlines()[0] if str(e) else type(e).__name__
    return text.rsplit("] ", 1)[-1][:200] if text.startswith("[") and "] " in text else text[:200]
