"""Links: xfer's own process groups, with deadlines, names for peers, and an abort that works from another thread.

`open_group` builds the group directly, so torch's default group, its registry and its settings are untouched and
several links can exist side by side: gloo for CPU storages, NCCL for CUDA. Only bytes travel, so every dtype does.
Not here: what is sent when (p2p.py), who owns the store and when a link is replaced (session/).

Facts of gloo that shape this file (seen on torch 2.13, each pinned by a test):
- A wait that expires closes all connections of the group. So there is no polling by short waits: a wait gets all the
  time that is left, and `abort` is one deliberate 1 ms wait for a message that nobody sends.
- `ProcessGroup.abort()` does not free a blocked `recv().wait()`; that deliberate wait does, in milliseconds.
- Nothing frees a thread that is inside the constructor of a group, where it waits for a peer that has published its
  address and died. So groups are made on a thread of their own, which is left alone when the caller is cancelled.
- A connection is closed under the lock under which its bytes are read, so when `abort` has returned no byte of a
  message that was posted before can arrive any more. This is what makes receiving straight into live storage safe.
- Collectives on tensors that are not contiguous deliver wrong bytes without an error. Hence `bytes_of`.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import Store

from xfer.ending import wait_for_all
from xfer.errors import DeadlineExceeded, PeerLost, XferError

Outgoing = tuple[torch.Tensor, int, int]
"""(contiguous tensor, peer rank, tag)"""

_POISON_TAG = 0x7FFFFF01
_TICK = timedelta(milliseconds=1)
_POLL_S = 20e-6
ABORT_S = 10.0
"""How long `Link.abort` waits, unless told otherwise, for what was under way."""
_EXPIRED, _CLOSED_HERE = "Timed out", "Application timeout caused pair closure"


class Aborted(PeerLost):
    """The link was aborted by this process, from `abort()` or because its run was cancelled."""


class Pending(Protocol):
    """One message (gloo) or one group of messages (NCCL) on its way."""

    peer: int

    def wait(self, deadline: float) -> None:
        """Returns when the message is complete. `deadline`: a time.monotonic() value.

        CUDA: makes the current stream wait and returns at once; `Link.finish` has the deadline.
        DeadlineExceeded, PeerLost or Aborted otherwise; the link is of no further use then.
        """


def from_rank(root: int):
    """Options of a broadcast that is begun and waited for later; on GPUs that is one beside the current stream, not in it."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    return options


def wait_for_stream(
    device: torch.device, deadline: float, where: str, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Returns when all that the current stream was given is done. Polls, so that an abort and the deadline are seen whatever the
    device does."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if stopped():
            raise Aborted("stopped here while bytes were moving", where=where)
        if time.monotonic() > deadline:
            raise DeadlineExceeded("the deadline passed while bytes were moving", where=where)
        time.sleep(_POLL_S)


class Arrived:
    """What needs no waiting."""

    peer = -1

    def wait(self, deadline: float) -> None:
        pass


class Link(Protocol):
    """One rank's end of a private group of processes. Implementations inherit `send` and `recv`."""

    rank: int
    size: int
    labels: tuple[str, ...]
    device: torch.device
    grouped: bool
    """Whether the messages of a step must be posted by one call (NCCL) instead of receives first, then sends (gloo)."""

    def post(self, receives: Sequence[Outgoing], sends: Sequence[Outgoing]) -> tuple[list[Pending], list[Pending]]:
        """Starts messages, receives first, and returns at once. Messages of a pair with one tag match in order."""

    def warm(self, peers: Sequence[int]) -> None:
        """Makes what connections to `peers` are not made yet. Collective among them: each names the other."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int, deadline: float) -> None:
        """One message, and the wait until `tensor` may be written again."""
        self.post((), [(tensor, dst, tag)])[1][0].wait(deadline)
        self.finish(deadline)

    def recv(self, tensor: torch.Tensor, src: int, tag: int, deadline: float) -> None:
        self.post([(tensor, src, tag)], ())[0][0].wait(deadline)
        self.finish(deadline)

    def finish(self, deadline: float) -> None:
        """Returns when all that was enqueued on the current stream is done. Nothing to do on the CPU."""

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Pending:
        """`tensor` (contiguous) of rank `root` into that of all ranks. Returns at once; `wait` of what is returned ends, also on
        GPUs, when nothing of it is under way here. Those that are begun come one after the other."""

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """`begin_broadcast`, and the wait for it."""
        self.begin_broadcast(tensor, root, deadline).wait(deadline)

    def abort(self, seconds: float = ABORT_S) -> None:
        """Frees everything that is blocked on this link, in any thread, and makes it useless. Never blocks for long.

        When it has returned, no byte of any message will be written into local memory any more, whoever called it first;
        unless that took longer than `seconds`, or failed: ask `drained`.
        """

    def drained(self, seconds: float = 0.0) -> bool:
        """False: it was aborted, and `seconds` later what was under way may still read and write this rank's memory."""
        return True

    def close(self) -> None:
        """Lets go of connections. Messages that are complete here still reach their takers."""

    def blame(self, pending: Sequence[Pending]) -> list[str]:
        """After a failure: one line per peer that had not delivered, or had closed its connection."""


def open_group(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    device: torch.device | str = "cpu",
    labels: Sequence[str] = (),
    cancelled: Callable[[], bool] = lambda: False,
) -> Link:
    """Joins `size` ranks that meet at `store` (one prefix per group) within `timeout` seconds.

    labels: names of the ranks for errors, e.g. "trainer 2", "engine 0 worker 1". cancelled: asked while waiting, and
    Aborted raised once it says so. DeadlineExceeded when not all came.
    """
    names = tuple(labels) or tuple(f"rank {i}" for i in range(size))
    if not 0 <= rank < size or len(names) != size:
        raise ValueError(f"rank {rank} of {size} with {len(names)} labels")
    device = torch.device(device)
    if device.type == "cuda":
        from xfer.transport.nccl import NcclLink

        return NcclLink(store, rank, size, timeout, device, names, cancelled)
    return GlooLink(store, rank, size, timeout, names, cancelled)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as flat uint8, sharing memory. ValueError when it is not contiguous: gloo would send wrong bytes."""
    if not tensor.is_contiguous():
        raise ValueError(f"only contiguous tensors travel, not shape {tuple(tensor.shape)} strides {tensor.stride()}")
    return tensor.detach().view(-1).view(torch.uint8)


class Aside:
    """A call that nothing can free, on a thread of its own. It touches no byte of a model, so it may be left behind.
    `value`: what it gave."""

    left: set[threading.Thread] = set()

    def __init__(self, call: Callable[[], object]):
        self.value: object = None
        self._call, self._over = call, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="xfer-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as e:
            self._error = e
        self._call = None  # what it holds goes before anybody goes on
        self._over.set()
        Aside.left.discard(self._thread)

    def wait(
        self, seconds: float, cancelled: Callable[[], bool] = lambda: False, where: str = ""
    ) -> BaseException | None:
        """None when it came back, else its error; TimeoutError or Aborted when it was left behind."""
        until = time.monotonic() + seconds
        while not self._over.wait(min(0.05, max(0.0, until - time.monotonic()))):
            if cancelled():
                gave_up = Aborted("cancelled while the link was being opened", where=where)
            elif time.monotonic() >= until:
                gave_up = TimeoutError("no answer in time")
            else:
                continue
            Aside.left.add(self._thread)
            if self._over.is_set():  # meanwhile, and has perhaps taken itself out before it was put in
                Aside.left.discard(self._thread)
            return gave_up
        return self._error


@atexit.register
def _end_asides() -> None:
    wait_for_all(thread.join for thread in list(Aside.left))


class GlooLink(Link):
    """See `Link`. Connections between all pairs exist when the constructor returns."""

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
        self._pg = None
        if size == 1:
            return
        from torch.distributed import ProcessGroupGloo

        try:
            make = Aside(lambda: ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))
            # gloo has the timeout for each of its waits, and so comes first.
            if (error := make.wait(3 * timeout, cancelled, labels[rank])) is not None:
                raise error
            self._pg = make.value
        except XferError:
            raise
        except (RuntimeError, TimeoutError) as e:
            late = isinstance(e, TimeoutError) or "imed out" in str(e) or "imeout" in str(e)
            kind = DeadlineExceeded if late else PeerLost
            raise kind(
                f"not all of {size} ranks opened the link within {timeout:g} s: {_first_line(e)}", where=labels[rank]
            ) from e

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

    def finish(self, deadline: float) -> None:
        pass

    # ---- the end

    def abort(self, seconds: float = ABORT_S) -> None:
        self._aborted.set()
        with self._lock:
            pg = self._pg
        if pg is None:
            return
        # One expired wait closes every connection of the context; the other peers are tried in case that ever changes.
        for peer in range(self.size):
            if peer == self.rank:
                continue
            try:
                pg.recv([torch.empty(1, dtype=torch.uint8)], peer, _POISON_TAG).wait(_TICK)
            except RuntimeError:
                pass

    def close(self) -> None:
        self._aborted.set()
        with self._lock:
            self._pg = None

    def blame(self, pending: Sequence[Pending]) -> list[str]:
        out: dict[int, str] = {}
        for p in pending:
            fate = p.fate()
            if fate is not None and (p.peer not in out or "closed" in fate):
                out[p.peer] = f"{self.labels[p.peer]}: {fate}"
        return [out[peer] for peer in sorted(out, key=lambda r: ("closed" not in out[r], r))]

    def error(self, e: RuntimeError, peer: int, what: str) -> XferError:
        """gloo's words in ours."""
        text, who = str(e), self.labels[self.rank]
        if self._aborted.is_set():
            return Aborted(f"stopped here while waiting for {what} {self.labels[peer]}", where=who)
        if _EXPIRED in text or "timed out" in text or _CLOSED_HERE in text:
            return DeadlineExceeded(f"the deadline passed while waiting for {what} {self.labels[peer]}", where=who)
        return PeerLost(
            f"the connection to {self.labels[peer]} was closed: it died, or it gave up", [_first_line(e)], where=who
        )

    def _group(self):
        pg = self._pg
        if pg is None:
            raise Aborted(
                "this link is closed" if self.size > 1 else "a group of one rank has no peers",
                where=self.labels[self.rank],
            )
        return pg


class _GlooPending:
    __slots__ = ("link", "work", "peer", "verb", "data")

    def __init__(self, link: GlooLink, work, peer: int, verb: str, data: torch.Tensor):
        # `data` is held: gloo keeps an address only.
        self.link, self.work, self.peer, self.verb, self.data = link, work, peer, verb, data

    def wait(self, deadline: float) -> None:
        left = max(0.001, deadline - time.monotonic())
        try:
            done = self.work.wait(timedelta(seconds=left))
        except RuntimeError as e:
            raise self.link.error(e, self.peer, f"{self.data.numel()} bytes {self.verb}") from e
        if done is False:
            raise self.link.error(RuntimeError(_CLOSED_HERE), self.peer, f"{self.data.numel()} bytes {self.verb}")

    def fate(self) -> str | None:
        """On an aborted link, where waits return at once: None when complete, else what became of the message."""
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
