"""The link over NCCL: a communicator of xfer's own, for tensors on CUDA devices.

torch's watchdog, and the end of the process that it brings about, are switched off for this group only: whether a rank is late
is decided by xfer's own deadlines, and a failed refit must leave the trainer alive. So nothing here waits on the host without a
deadline, and a deadline that passes aborts the communicator. See group.py for what a link promises.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import ProcessGroup, Store, Work

from xfer.background import BackgroundCall
from xfer.errors import PeerLost, XferError
from xfer.transport.group import (
    ABORT_S,
    Aborted,
    Arrived,
    Link,
    Outgoing,
    Pending,
    T,
    bytes_of,
    from_rank,
    not_closed,
    opened,
    wait_for_stream,
)

logger = logging.getLogger("xfer")
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a watchdog that sees an error leaves the process alone
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # and no monitor ends the process when the watchdog is held up
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # In torch's source a watchdog that sees an error waits five times this long, 75 s by default, with the lock that every post needs.
    # Seen on an H200: a source did not stop within 5 s, and does with 0.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # Work.wait makes the stream wait, not the host
}
POSTED_S = 1.0
"""How long an abort lets a post end: closing a group of messages over a communicator that was freed may crash the process."""
_environment = threading.Lock()


class NcclLink(Link):
    """A link over NCCL; see `Link`. `post` makes one group of the messages of a step; a wait is a wait of the current stream.

    Args:
        blocking: NCCL's calls return when the GPU has its work. Otherwise NCCL works on a thread of its own, and an abort also
            frees a rank that waits for others inside such a call.
        max_ctas: Most thread blocks that one collective may take from the GPU; None leaves that to NCCL.
    """

    grouped = True

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        device: torch.device,
        labels: tuple[str, ...],
        cancelled: Callable[[], bool] = lambda: False,
        *,
        blocking: bool = False,
        max_ctas: int | None = None,
    ):
        self.rank, self.size, self.labels, self.device = rank, size, labels, device
        self._aborted = threading.Event()
        self._timeout, self._warm = timeout, set[int]()
        self._pg: ProcessGroup | None = None
        self._end: BackgroundCall[None] | None = None
        self._lock = threading.Lock()
        self.posting = threading.Lock()
        """Held while something is posted."""
        if size == 1:
            return
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=30)  # xfer has deadlines of its own; this one must never be the first
        if not blocking:
            options.config.blocking = 0
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        # On the default stream of the device, where the trainer computes, the first word would wait for all work that is under way
        # there, which may wait for a peer that is late, and what comes next would wait for the word.
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            word = torch.zeros(1, dtype=torch.uint8, device=device)

        def connect() -> None:
            with quiet():
                pg = ProcessGroupNCCL(store, rank, size, options)
            with self._lock:
                late = self._aborted.is_set()
                # torch's stubs give the messages of a backend to ProcessGroup only.
                self._pg = None if late else cast(ProcessGroup, pg)
            if late:  # the caller gave up when there was nothing to abort yet
                pg.abort()
                raise Aborted("given up while the link was being opened", where=labels[rank])
            # All ranks at once: a communicator made by the first messages would need every rank to have some.
            pg.eager_connect_single_device(device)
            self.broadcast(word, 0, time.monotonic() + timeout)

        self.host_call(connect, f"not all of {size} ranks opened the link within {timeout:g} s", cancelled)

    def host_call(
        self, call: Callable[[], object], message: str, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Runs a call in which NCCL waits on the host for other ranks, on a stream of this link. Aborts the link, and raises as
        `opened`, if the call fails or does not return within the link's timeout."""

        def on_own_stream() -> None:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(self._stream):
                call()

        until = time.monotonic() + self._timeout
        try:
            opened(BackgroundCall(on_own_stream), until, message, self.labels[self.rank], cancelled)
        except BaseException:
            self.abort()
            raise

    def warm(self, peers: Sequence[int]) -> None:
        """See `Link`. One byte goes each way: NCCL connects a pair at its first messages, and waits on the host for the other
        rank. That must not happen in a refit, where `finish` has to notice a peer that stays away.
        """
        new = [p for p in peers if p not in self._warm]
        if not new:
            return
        with torch.cuda.stream(self._stream):
            into, out = torch.zeros(2, len(new), 16, dtype=torch.uint8, device=self.device)
        until = time.monotonic() + self._timeout

        def connect() -> None:
            receives, sends = ([(t[i], p, 0) for i, p in enumerate(new)] for t in (into, out))
            self.post(receives, sends)[0][0].wait(until)
            self.finish(until)

        names = [self.labels[p] for p in new]
        self.host_call(connect, f"no connection to all of {names} within {self._timeout:g} s")
        self._warm.update(new)

    def post(self, receives: Sequence[Outgoing], sends: Sequence[Outgoing]) -> tuple[list[Pending], list[Pending]]:
        if not receives and not sends:
            return [], []
        data = [bytes_of(t) for t, _, _ in (*receives, *sends)]

        def messages(pg) -> None:
            for k, (_, peer, tag) in enumerate((*receives, *sends)):
                (pg.recv if k < len(receives) else pg.send)([data[k]], peer, tag)

        work = self._posted(lambda pg: together(pg, lambda: messages(pg)))
        group: list[Pending] = [_NcclPending(self, work, (receives or sends)[0][1], data)]
        return group, group

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Pending:
        data = bytes_of(tensor)
        if self.size == 1 or not data.numel():
            return Arrived()
        work = self._posted(lambda pg: pg.broadcast([data], from_rank(root)))  # torch makes a group of one, too
        return _NcclBroadcast(self, work, root, [data])

    def start(self, collective: Callable[[ProcessGroup], T]) -> T:
        with self.posting:
            return collective(self._group())

    def _posted(self, post: Callable[[ProcessGroup], Work]) -> Work:
        try:
            return self.start(post)
        except RuntimeError as e:
            raise self._error(e) from e

    def finish(self, deadline: float, poll: Callable[[], None] = lambda: None) -> None:
        wait_for_stream(self.device, deadline, self.labels[self.rank], self._aborted.is_set, poll)

    @contextmanager
    def no_post(self, seconds: float) -> Iterator[None]:
        held = self.posting.acquire(timeout=seconds)
        try:
            yield
        finally:
            if held:
                self.posting.release()

    def abort(self, seconds: float = ABORT_S) -> None:
        self._aborted.set()
        with self._lock:
            pg, self._pg = self._pg, None
            if pg is not None:
                self._end = BackgroundCall(lambda: self._stop(pg))
        self.drained(seconds)

    def drained(self, seconds: float = 0.0) -> bool:
        # ncclCommAbort returns when the communicator's kernels have left the device: no byte is written afterwards. If it fails,
        # nothing is known about them.
        end = self._end
        if end is not None and not end.ended(time.monotonic() + seconds):
            end.give_up()
            return False
        return end is None or end.error is None

    def _stop(self, pg: ProcessGroup) -> None:
        with self.no_post(POSTED_S):
            pass  # a post that began has ended; one that is stuck is aborted all the same
        try:
            pg.abort()
        except RuntimeError as e:
            logger.error("xfer: %s: NCCL could not be stopped: %s", self.labels[self.rank], str(e).splitlines()[0])
            raise

    def close(self) -> None:
        self.abort()

    def blame(self, pending: Sequence[Pending]) -> list[str]:
        return []  # NCCL does not say which peer it waits for; the control connection does

    def _error(self, e: RuntimeError) -> XferError:
        who = self.labels[self.rank]
        if self._aborted.is_set():
            return Aborted("stopped here", where=who)
        return PeerLost("NCCL failed", [str(e).splitlines()[0][:300]], where=who)

    def _group(self):
        return not_closed(self._pg, self)


class _NcclPending:
    __slots__ = ("link", "work", "peer", "data")

    def __init__(self, link: NcclLink, work, peer: int, data: list[torch.Tensor]):
        self.link, self.work, self.peer, self.data = link, work, peer, data

    def wait(self, deadline: float) -> None:
        try:
            self.work.wait()
        except RuntimeError as e:
            raise self.link._error(e) from e


class _NcclBroadcast(_NcclPending):
    __slots__ = ()

    def wait(self, deadline: float) -> None:
        super().wait(deadline)
        self.link.finish(deadline)


def together(pg, post: Callable[[], None]):
    """The work of everything that `post` starts over `pg` (a ProcessGroupNCCL), as one group.

    The group is closed whatever `post` raises. NCCL's groups belong to a thread, not to a communicator: a group that stays open
    would swallow, without an error, everything that this thread posts over any communicator from then on.
    """
    pg._start_coalescing()
    try:
        post()
    except BaseException:
        with suppress(RuntimeError):
            pg._end_coalescing()
        raise
    return pg._end_coalescing()


@contextmanager
def quiet() -> Iterator[None]:
    """Sets torch's variables for a group that is made inside. Other groups of the process keep the values of their owner."""
    with _environment:
        before = {k: os.environ.get(k) for k in _QUIET}
        os.environ.update(_QUIET)
        try:
            yield
        finally:
            for k, v in before.items():
                os.environ.pop(k) if v is None else os.environ.__setitem__(k, v)
