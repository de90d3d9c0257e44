"""The link over NCCL: a communicator of xfer's own, for storages on CUDA devices.

torch's watchdog and its teardown of the process are switched off for this group only: a rank that is late is the
session's to judge, and a failed refit must leave the trainer alive. So nothing here waits on the host without a
deadline, and expiry aborts the communicator. See group.py for what a link promises.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch.distributed import Store

from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.transport.group import (
    ABORT_S,
    Aborted,
    Arrived,
    Aside,
    Link,
    Outgoing,
    Pending,
    bytes_of,
    from_rank,
    wait_for_stream,
)

logger = logging.getLogger("xfer")
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a watchdog that sees an error leaves the process alone
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # and no monitor ends the process when the watchdog is held up
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # By torch's source a watchdog that sees an error stands five times this long, 75 s by default, with the lock that every post needs.
    # Seen on an H200: a sender that did not stop in 5 s, and does with 0.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # Work.wait makes the stream wait, not the host
}
_POSTED_S = 1.0
"""So long an abort lets a group of messages that is being posted end: closing a group over a freed communicator may crash."""
_environment = threading.Lock()


class NcclLink(Link):
    """See `Link`. `post` makes one group of a step's messages; a wait is a wait of the current stream."""

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
    ):
        self.rank, self.size, self.labels, self.device = rank, size, labels, device
        self._aborted = threading.Event()
        self._timeout, self._warm = timeout, set[int]()
        self._pg = None
        self._lock, self._posting, self._end = threading.Lock(), threading.Lock(), None
        if size == 1:
            return
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=30)  # deadlines are ours; this one must never be the first
        options.config.blocking = 0
        # A thread begins on the device's default stream, where the trainer computes: the first word would wait for all that is
        # under way there, which may wait for a peer that is late, and what is given to it next would wait for the word.
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            word = torch.zeros(1, dtype=torch.uint8, device=device)

        def connect() -> None:
            torch.cuda.set_device(device)
            with quiet():
                pg = ProcessGroupNCCL(store, rank, size, options)
            with self._lock:
                late = self._aborted.is_set()
                self._pg = None if late else pg
            if late:  # it was not there yet when the caller gave up: nothing would end what it waits for
                pg.abort()
                raise Aborted("given up while the link was being opened", where=labels[rank])
            # All ranks at once: a communicator made by the first messages would need every rank to have some.
            pg.eager_connect_single_device(device)
            with torch.cuda.stream(self._stream):
                self.broadcast(word, 0, time.monotonic() + timeout)

        error = Aside(connect).wait(timeout, cancelled)
        if error is None:
            return
        self.abort()
        if isinstance(error, XferError):
            raise error
        kind = DeadlineExceeded if isinstance(error, TimeoutError) else PeerLost
        raise kind(
            f"not all of {size} ranks opened the link within {timeout:g} s: {error}", where=labels[rank]
        ) from error

    def warm(self, peers: Sequence[int]) -> None:
        """One byte each way. NCCL connects a pair at its first messages and waits on the host for the other to come; so
        that must not happen in a refit, where a peer that stays away has to be seen by `finish`.
        """
        new = [p for p in peers if p not in self._warm]
        if not new:
            return
        with torch.cuda.stream(self._stream):
            into, out = torch.zeros(2, len(new), 16, dtype=torch.uint8, device=self.device)
        until = time.monotonic() + self._timeout

        def meet() -> None:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(self._stream):
                pending, _ = self.post(
                    [(into[i], p, 0) for i, p in enumerate(new)], [(out[i], p, 0) for i, p in enumerate(new)]
                )
                pending[0].wait(until)
                self.finish(until)

        error = Aside(meet).wait(self._timeout)
        if error is not None:
            self.abort()
            if isinstance(error, XferError):
                raise error
            kind = DeadlineExceeded if isinstance(error, TimeoutError) else PeerLost
            names = [self.labels[p] for p in new]
            raise kind(
                f"no connection to all of {names} within {self._timeout:g} s: {error}", where=self.labels[self.rank]
            )
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

    def _posted(self, post: Callable):
        """What `post` gives of the process group, before an abort or not at all."""
        with self._posting:
            pg = self._group()
            try:
                return post(pg)
            except RuntimeError as e:
                raise self._error(e) from e

    def finish(self, deadline: float) -> None:
        wait_for_stream(self.device, deadline, self.labels[self.rank], self._aborted.is_set)

    def abort(self, seconds: float = ABORT_S) -> None:
        self._aborted.set()
        with self._lock:
            pg, self._pg = self._pg, None
            if pg is not None:
                self._end = Aside(lambda: self._stop(pg))
        self.drained(seconds)

    def drained(self, seconds: float = 0.0) -> bool:
        # ncclCommAbort returns when the communicator's kernels have left the device: no byte is written afterwards. One
        # that fails has said nothing about them.
        end = self._end
        return end is None or end.wait(seconds) is None

    def _stop(self, pg) -> None:
        if self._posting.acquire(
            timeout=_POSTED_S
        ):  # one that began has ended; one that is stuck is freed all the same
            self._posting.release()
        try:
            pg.abort()
        except RuntimeError as e:
            logger.error("xfer: %s: NCCL could not be stopped: %s", self.labels[self.rank], str(e).splitlines()[0])
            raise

    def close(self) -> None:
        self.abort()

    def blame(self, pending: Sequence[Pending]) -> list[str]:
        return []  # NCCL does not tell which peer it waits for; the control connection does

    def _error(self, e: RuntimeError) -> XferError:
        who = self.labels[self.rank]
        if self._aborted.is_set():
            return Aborted("stopped here", where=who)
        return PeerLost("NCCL failed", [str(e).splitlines()[0][:300]], where=who)

    def _group(self):
        pg = self._pg
        if pg is None:
            raise Aborted(
                "this link is closed" if self.size > 1 else "a group of one rank has no peers",
                where=self.labels[self.rank],
            )
        return pg


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
    """What `post` gives to `pg` (a ProcessGroupNCCL), as one group: its work. Closed whatever `post` raises: a group is the thread's, not
    the communicator's, so one left open would swallow, without an error, all that this thread posts over any other from then on."""
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
    """torch reads these when a group is made; other groups of the process keep what their owner set."""
    with _environment:
        before = {k: os.environ.get(k) for k in _QUIET}
        os.environ.update(_QUIET)
        try:
            yield
        finally:
            for k, v in before.items():
                os.environ.pop(k) if v is None else os.environ.__setitem__(k, v)
