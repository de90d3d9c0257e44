"""A client of the coordinator: one connection, one inbox for the main thread, one lane per replica this process takes part in.

The reader thread only sorts: store answers to whoever waits for them, lane messages to the lane, aborts to the lane at
once (they must free a blocked transfer), everything else to the inbox. It never touches weights.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch

from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import LEAVE_S, SILENCE_S
from xfer.coordinator.wire import Label
from xfer.ending import EXIT_S
from xfer.errors import DeadlineExceeded, HandshakeError, PeerLost, ProtocolError, XferError
from xfer.plan.fabric import Site
from xfer.rendezvous.channel import SEND_S, Channel, dial
from xfer.rendezvous.layouts import Shelf
from xfer.rendezvous.store import Replies

M = TypeVar("M")
AGAIN_S = 0.05
"""Seconds until a client dials again after a session that has failed sent it on."""
_left: dict[tuple[str, str], str] = {}
"""By rendezvous and label of a client of this process: the session that it left, or that refused it, last."""


def host_identity() -> str:
    """Name of this host for the plan's same-host preference; XFER_HOST overrides it (tests, containers with one name)."""
    return os.environ.get("XFER_HOST") or socket.gethostname()


def versions() -> tuple[tuple[str, str], ...]:
    import numpy

    return (("python", platform.python_version()), ("torch", str(torch.__version__)), ("numpy", numpy.__version__))


def data_plane(device: torch.device) -> tuple[tuple[str, str], ...]:
    """What every process with weights on `device` says of the libraries that carry bytes, for comparison at the door.

    NCCL opens no communicator between different versions of itself, and says so late, on some ranks, in its own log. torch
    hands its identifiers over in a form that changes between releases. gloo has been seen to work between releases of torch
    (docs/guide.md), so nothing of it is compared.
    """
    if device.type != "cuda":
        return (("data plane", "gloo"),)
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    return (("data plane", "nccl"), ("NCCL", ".".join(map(str, torch.cuda.nccl.version()))), ("torch", release))


class LaneMessages(Protocol):
    """The receiving end of messages for one replica: see participants/lane.py."""

    def post(self, message: m.Message) -> None: ...

    def part_ready(self, ready: m.Brought) -> None: ...

    def cancel(self, error: XferError, epoch: int | None) -> None: ...

    def let_go(self) -> None: ...

    def close(self) -> None: ...


class RendezvousClient:
    """The owner sets `lanes` and `on_lane`, which makes a lane, before it tells anything that messages for lanes follow from."""

    def __init__(
        self,
        rendezvous: str,
        token: str,
        role: str,
        *,
        index: int = 0,
        size: int = 0,
        replica: int = 0,
        deadline_s: float,
        settings: tuple[tuple[str, str], ...] = (),
        holds: m.Holds = "whole",
        session_open: bool = False,
        version: Label = None,
        given_up: Callable[[], bool] = lambda: False,
    ):
        """given_up: asked before each attempt to connect; once it is true, PeerLost is raised."""
        self.label = {"trainer": f"trainer {index}", "worker": f"replica {replica} worker {index}"}.get(
            role, f"replica {replica} {role}"
        )
        self.lanes: Mapping[int, LaneMessages] = {}
        self.named: tuple[int, Label] = (0, None)  # an attempt, and the version that the coordinator calls it
        self.void: set[int] = set()  # attempts that were prepared and given up: no call has these numbers
        self.drained: dict[int, int] = {}  # replica -> last attempt of which the coordinator said `Drained`
        self.replies = Replies()
        self.shelf = Shelf(self.try_send)
        self.inbox: queue.Queue[m.Message | XferError] = queue.Queue()
        self.on_lane: Callable[[int], LaneMessages | None] = lambda replica: None
        self.found: m.Found | None = None
        self.lost: PeerLost | None = None
        self._failed: m.WireError | None = None  # why the coordinator said that nothing can be refitted any more
        self._heard = 0.0  # monotonic time of the coordinator's last word
        self._pings = self._pongs = 0
        self._asking = threading.Lock()
        self._leaving = False  # this process itself closes the connection
        self._news = threading.Condition()
        self._place = rendezvous, self.label
        hello = m.Hello(
            role, index, size, replica, host_identity(), os.getpid(), versions(), settings, holds, session_open, version,
            _left.get(self._place, ""),
        )  # fmt: skip
        self.channel, self.welcome = self._enter(rendezvous, token, hello, time.monotonic() + deadline_s, given_up)
        self.channel.start(self._sort, self._end)
        self.site = Site.from_bytes(self.welcome.site) if self.welcome.site else None

    def _enter(
        self, rendezvous: str, token: str, hello: m.Hello, until: float, given_up: Callable[[], bool]
    ) -> tuple[Channel, m.Welcome]:
        """Dial until a session welcomes or refuses this client. A session that is ending does neither; then dial again."""
        over = ""
        while not over or time.monotonic() < until:
            channel, answer = dial(rendezvous, token, until - time.monotonic(), given_up), None
            try:
                answer = channel.ask(hello, until)
                if isinstance(answer, m.Welcome):
                    return channel, answer
            except PeerLost as e:  # the session ended before it answered
                answer, over = m.DialAgain(), str(e)
            except TimeoutError:
                why = "trainer 0: its process, which has the rendezvous in it, does not answer"
                raise DeadlineExceeded("no answer in time: the rendezvous' welcome", [why], where=self.label) from None
            finally:
                if not isinstance(answer, m.Welcome):
                    channel.close()
            if isinstance(answer, m.Refused):
                _left[self._place] = answer.session or hello.after
                raise answer.error.error()
            if not isinstance(answer, m.DialAgain):
                raise ProtocolError(f"the rendezvous answered Hello with {type(answer).__name__}", where=self.label)
            over = over or "trainer rank 0 has not closed the session there, which this process has left"
            time.sleep(AGAIN_S)
        raise DeadlineExceeded(
            f"no new session began at {rendezvous} in time",
            [over, "has trainer rank 0, which hosts it, called xfer.connect() again?"],
            where=self.label,
        )

    def send(self, message: m.Message, seconds: float = SEND_S) -> None:
        """PeerLost when the coordinator is gone, or what it said was wrong before it went."""
        gone: XferError | None = None
        if self.lost is None:
            try:
                return self.channel.send(message, seconds)
            except PeerLost as e:
                gone = e
            self.channel.join(EXIT_S)  # it has read all that was said before the end
        raise self._failed.error() if self._failed is not None else self.lost or gone

    def try_send(self, message: m.Message, seconds: float = SEND_S) -> None:
        """For last words: the peer may be gone already."""
        if self.lost is None:
            with contextlib.suppress(PeerLost):
                self.channel.send(message, seconds)

    def stirred(self) -> None:
        """Something changed that `wait_for` may be waiting for."""
        with self._news:
            self._news.notify_all()

    def wait_for(self, condition: Callable[[], bool], until: float) -> bool:
        """Whether `condition` came true by monotonic `until`. Looked at after every message, and when a lane has done something."""
        with self._news:
            return self._news.wait_for(condition, max(0.0, until - time.monotonic()))

    def catch_up(self, seconds: float) -> None:
        """The coordinator has taken in what this process told it before, and what it had said by then is in the inbox,
        after this, unless it is
        gone or does not answer in these seconds. What others tell the coordinator may be behind that: they have to catch up themselves."""
        until, asked = time.monotonic() + seconds, self._ping(seconds)
        self.wait_for(lambda: self._pongs >= asked or self.lost is not None, until)

    def _ping(self, seconds: float) -> int:
        """Which of all questions this one is: the coordinator answers them in their order."""
        with self._asking:
            self._pings += 1
            asked = self._pings
            self.try_send(m.Ping(), seconds)
        return asked

    def _sort(self, message: m.Message) -> None:
        self._heard = time.monotonic()
        self._put(message)
        self.stirred()

    def _put(self, message: m.Message) -> None:
        if isinstance(message, m.Pong):
            self._pongs += 1
            return
        if isinstance(message, m.Found):
            self.found = message
            return
        if isinstance(message, m.StoreReply):
            self.replies.put(message)
            return
        if isinstance(message, m.LayoutAsk | m.Roll | m.Layouts):
            self.shelf.take(message)
            return
        if isinstance(message, m.Abort):
            lane = self.lanes.get(message.replica)
            if lane is not None:
                lane.cancel(message.error.error(), message.epoch)
        elif isinstance(message, m.Brought):
            lane = self.lanes.get(message.replica)
            if lane is not None:
                lane.part_ready(message)
            return
        elif isinstance(message, m.Drained):
            self.drained[message.replica] = message.attempt
            self.named = (message.attempt, message.version)
            return
        elif isinstance(message, m.CloseRoutes) and message.replica not in self.lanes:
            self.try_send(m.RoutesClosed(message.replica))  # nothing was ever opened here
            return
        elif isinstance(message, m.PlanInputs | m.OpenLink | m.Go | m.CloseRoutes):
            if isinstance(message, m.Go):
                self.named = (message.attempt, message.version)
            lane = self.on_lane(message.replica)
            if lane is not None:
                lane.post(message)
            return
        elif isinstance(message, m.Outcome) and message.void:
            self.void.add(message.attempt)
        elif isinstance(message, m.Failed) and message.replica < 0:
            self._failed = self._failed or message.error  # the first; that the others then leave is no reason
            for lane in list(self.lanes.values()):
                lane.let_go()
        self.inbox.put(message)

    def _end(self, reason: str) -> None:
        self.lost = PeerLost(
            "left the rendezvous: closed by this process itself"
            if self._leaving
            else "lost the control connection to the rendezvous in trainer 0's process",
            [f"reason: {reason}"],
            where=self.label,
        )
        self.replies.close(reason)
        for lane in list(self.lanes.values()):
            lane.cancel(self.lost, None)
        self.inbox.put(self.lost)
        self.stirred()

    def newest(self, kind: type[M]) -> M | None:
        """The last inbox message of this kind, if there is one; it and those before it are taken."""
        inbox = self.inbox
        with inbox.mutex:
            found = [x for x in inbox.queue if isinstance(x, kind)]
            for x in found:
                inbox.queue.remove(x)
        return found[-1] if found else None

    def take(
        self,
        kinds: tuple[type[M], ...],
        until: float,
        what: str,
        match: Callable[[M], bool] = lambda _: True,
        due: float | None = None,
    ) -> M:
        """Next inbox message of these kinds; others are dropped. Raises PeerLost when the coordinator is gone.

        due: monotonic time from which on the coordinator is asked whether it lives, by default SILENCE_S before `until`. A coordinator
        whose process is stopped or stuck keeps its connections; DeadlineExceeded names it after SILENCE_S without a word.
        """
        due, asked, wait = until - SILENCE_S if due is None else due, 0.0, 0.0
        while True:
            try:  # what is here already first: it may have come long before this was asked
                message = self.inbox.get(timeout=wait)
            except queue.Empty:
                now = time.monotonic()
                silent = self._heard < asked
                if now >= until or silent and now - asked >= SILENCE_S:
                    why = "trainer 0: its process, which has the rendezvous in it, does not answer"
                    deaf = silent and now - asked >= SILENCE_S / 2
                    raise DeadlineExceeded(
                        f"no answer in time: {what}", [why] if deaf else [], where=self.label
                    ) from None
                if now >= due and not silent and now - asked >= 1.0:
                    asked = now
                    self._ping(SILENCE_S)
                wait = min(until - now, max(due - now, 0.05), 1.0)
                continue
            if isinstance(message, XferError):
                self.inbox.put(message)  # stays true for the next caller too
                raise message
            if isinstance(message, kinds) and match(message):
                return message
            wait = max(0.0, min(wait, until - time.monotonic()))
            if isinstance(message, m.Refused) and m.Refused not in kinds:
                error = message.error.error()
                raise error if isinstance(error, XferError) else HandshakeError(str(error))

    def close(self) -> None:
        if self.channel.theirs:
            return  # links' descriptors are the parent's too: to abort them here is to break them there
        self._leaving = True
        _left[self._place] = self.welcome.session
        self.try_send(m.Leave())
        for lane in list(self.lanes.values()):
            lane.close()
        # The coordinator closes once it has heard that: from then on this place is free, for a new controller in this
        # process, say. And where bytes of the coordinator lie unread here, closing at once would take the word back.
        self.channel.join(LEAVE_S)
        self.channel.close()
        self.channel.join(EXIT_S)
