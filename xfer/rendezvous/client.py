"""A client of the coordinator: one connection, one inbox for the main thread, one lane per replica that this process takes part in.

The reader thread only distributes messages: store replies to the callers that wait for them, messages about a replica to
its lane, aborts to the lane at once (they free a blocked transfer), all others to the inbox. It never touches weights.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import torch

from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import LEAVE_S, SILENCE_S
from xfer.coordinator.messages import Label
from xfer.ending import EXIT_S
from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError, XferError
from xfer.plan.fabric import Site, host_identity
from xfer.rendezvous.channel import SEND_S, Channel, dial
from xfer.rendezvous.layouts import Shelf

M = TypeVar("M")
M2 = TypeVar("M2")
M3 = TypeVar("M3")
M4 = TypeVar("M4")
M5 = TypeVar("M5")
AGAIN_S = 0.05
"""Seconds until a client dials again after a failed session told it to."""
SILENT = "trainer 0: its process, which has the rendezvous in it, does not answer"
"""Why no answer came in time to a question that the coordinator answers at once."""
_left: dict[tuple[str, str], str] = {}
"""By rendezvous and label of a client of this process: the last session that it left or that refused it."""


def data_plane(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that carry bytes of weights on `device`. The coordinator compares them.

    NCCL opens no communicator between different versions of itself, and reports it late, on some ranks, in its own log.
    torch passes NCCL's identifiers in a form that changes between releases. gloo works between releases of torch
    (docs/guide.md), so its version is not compared.
    """
    if device.type != "cuda":
        return (("data plane", "gloo"),)
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    return (("data plane", "nccl"), ("NCCL", ".".join(map(str, torch.cuda.nccl.version()))), ("torch", release))


class LanePort(Protocol):
    """The methods of a lane that the client calls (participants/lane.py). All but `close` run on the reader thread and may not block."""

    def post(self, message: m.Message) -> None: ...
    def cancel(self, error: XferError, epoch: int | None) -> None: ...
    def part_ready(self, ready: m.PartReady) -> None: ...
    def let_go(self) -> None: ...
    def close(self) -> None: ...


class Questions:
    """Sends questions and waits for their answers. The reader thread calls `put` and `close`, any thread all else.

    Args:
        send: Called with a message for the coordinator and the seconds that sending may take.
        label: This client, for errors.
    """

    def __init__(self, send: Callable[..., None], label: str):
        self.send, self._label = send, label
        self._changed = threading.Condition()
        self._last, self._closed = 0, ""
        self._answers: dict[int, bytes | None] = {}  # by the numbers of the calls that somebody waits for

    def put(self, reply: m.Reply) -> None:
        with self._changed:
            if reply.call in self._answers:
                self._answers[reply.call] = reply.value
                self._changed.notify_all()

    def close(self, reason: str) -> None:
        with self._changed:
            self._closed = reason or "closed"
            self._changed.notify_all()

    def ask(
        self,
        what: str,
        until: float,
        *makes: Callable[[int], m.Message],
        cancelled: Callable[[], bool] = lambda: False,
        why: str = SILENT,
    ) -> list[bytes]:
        """Ask some questions at once, and return the answers.

        Args:
            what: What is waited for, quoted in errors.
            until: Monotonic time.
            makes: Each makes the message with this number.
            cancelled: Whether to wait no longer.
            why: The likely reason if no answer comes in time.

        Raises:
            PeerLost: The coordinator is gone, or `cancelled` returned True.
            DeadlineExceeded: Not all answers came in time.
        """
        with self._changed:
            calls = range(self._last + 1, self._last + 1 + len(makes))
            self._last += len(makes)
            self._answers.update(dict.fromkeys(calls))
        try:
            for make, call in zip(makes, calls):
                self.send(make(call), max(0.0, until - time.monotonic()))
            with self._changed:
                while True:
                    answers = [answer for call in calls if (answer := self._answers[call]) is not None]
                    if len(answers) == len(calls):
                        return answers
                    if self._closed:
                        raise PeerLost(f"the rendezvous is gone while waiting for {what}: {self._closed}")
                    if cancelled():
                        raise PeerLost(f"cancelled while waiting for {what}")
                    if (left := until - time.monotonic()) <= 0:
                        raise DeadlineExceeded(f"no answer in time: {what}", [why], where=self._label)
                    self._changed.wait(min(left, 0.2))
        finally:
            with self._changed:
                for call in calls:
                    del self._answers[call]


class DoneCollector:
    """Makes one `Done` of those of a rank's lanes that end within `hold_s` of each other.

    The first lane that ends waits on its own thread until all replicas that were told Go are done, or `hold_s` has passed.
    Lanes that end meanwhile leave their report to it and do not wait. The last one sends all of them.
    """

    def __init__(self, send: Callable[[m.Message], None], hold_s: float):
        self._send, self._hold_s = send, hold_s
        self._changed = threading.Condition()
        self._attempt = 0
        self._moving: set[int] = set()  # replicas whose lanes have not ended
        self._ended: list[m.Moved] = []

    def begin(self, go: m.Go) -> None:
        with self._changed:
            if go.attempt != self._attempt:
                self._attempt, self._moving, self._ended = go.attempt, set(), []
                self._changed.notify_all()
            self._moving.update(go.replicas)

    def done(self, attempt: int, moved: m.Moved) -> None:
        with self._changed:
            if attempt != self._attempt:
                return  # that refit is over: the coordinator has begun another one
            self._ended.append(moved)
            self._moving.discard(moved.replica)
            if self._moving and len(self._ended) > 1:
                return  # the first lane sends it
            batch = self._ended
            if self._moving:
                self._changed.wait_for(lambda: self._ended is not batch, self._hold_s)
            if self._ended is not batch:
                return  # the last lane has sent it
            self._ended = []
            self._changed.notify_all()
        self._send(m.Done(attempt, tuple(x.replica for x in batch), tuple(x for x in batch if not x.idle)))


class RendezvousClient:
    """One process's connection to the coordinator.

    Args:
        rendezvous: "tcp://HOST:PORT".
        token: the job's secret.
        role: see `Hello`.
        deadline_s: seconds to connect.
        given_up: called before each attempt to connect; if it returns True, PeerLost is raised.
        who: further fields of `Hello`; the numbers are 0 by default.

    Attributes:
        lanes: by replica. The owner sets it.
        on_lane: returns the lane of a replica, and may make it. The owner sets it before it sends anything that messages for
            lanes follow from.
        on_paused: called with each `Paused`. The owner, a worker, sets it.
        drained: by replica, the last refit for which the coordinator said `Drained`.
        named: (number of a refit, label of its version), from the last message that told them.
        void: refits that were prepared and given up; no call has these numbers.

    Raises:
        DeadlineExceeded: no session began in time.
        HandshakeError: the token or a setting is wrong.
    """

    def __init__(
        self,
        rendezvous: str,
        token: str,
        role: str,
        *,
        deadline_s: float,
        given_up: Callable[[], bool] = lambda: False,
        **who: Any,
    ):
        numbers = dict.fromkeys(("index", "size", "replica"), 0)
        hello = m.Hello(role, host=host_identity(), pid=os.getpid(), **numbers | who)
        self.label = hello.label
        self.lanes: Mapping[int, LanePort] = {}
        self.named: tuple[int, Label] = (0, None)
        self.void: set[int] = set()
        self.drained: dict[int, int] = {}
        self.questions = Questions(self.send, self.label)
        self.shelf = Shelf(self.questions)
        self.inbox: queue.Queue[m.Message | XferError] = queue.Queue()
        self.on_lane: Callable[[int], LanePort | None] = lambda replica: None
        self.on_paused: Callable[[bool], None] = lambda paused: None
        self.found: m.Found | None = None
        self.lost: PeerLost | None = None
        self._failed: m.WireError | None = None  # why the coordinator said that no later refit can succeed
        self._heard = 0.0  # monotonic time of the coordinator's last message
        self._leaving = False  # this process itself closes the connection
        self._news = threading.Condition()
        self._place = rendezvous, self.label
        hello = msgspec.structs.replace(hello, after=_left.get(self._place, ""))
        self.channel, self.welcome = self._enter(rendezvous, token, hello, time.monotonic() + deadline_s, given_up)
        # A worker may be in a refit and in first copies of several replicas at once, each of them an attempt of its own.
        self._collector = DoneCollector(self.send, self.welcome.hold_s) if role == "trainer" else None
        self.channel.start(self._sort, self._end)
        self.site = Site.from_bytes(self.welcome.site) if self.welcome.site else None

    def _enter(
        self, rendezvous: str, token: str, hello: m.Hello, until: float, given_up: Callable[[], bool]
    ) -> tuple[Channel, m.Welcome]:
        """Dial until a session welcomes or refuses this client. A session that is ending does neither."""
        over = ""
        while not over or time.monotonic() < until:
            channel, answer = dial(rendezvous, token, until - time.monotonic(), given_up), None
            try:
                answer = channel.ask(hello, until)
                if isinstance(answer, m.Welcome):
                    return channel, answer
            except PeerLost as e:  # the session is over, for this client at least
                over = str(e)
            except TimeoutError:
                raise DeadlineExceeded(
                    "no answer in time: the rendezvous' welcome", [SILENT], where=self.label
                ) from None
            finally:
                if not isinstance(answer, m.Welcome):
                    channel.close()
            if isinstance(answer, m.Refused):
                _left[self._place] = answer.session or hello.after
                raise answer.error.error()
            if answer is not None:
                raise ProtocolError(f"the rendezvous answered Hello with {type(answer).__name__}", where=self.label)
            time.sleep(AGAIN_S)
        raise DeadlineExceeded(
            f"no new session began at {rendezvous} in time",
            [over, "has trainer rank 0, which hosts it, closed the session before and called xfer.connect() again?"],
            where=self.label,
        )

    def send(self, message: m.Message, seconds: float = SEND_S) -> None:
        """Send a message.

        Raises:
            PeerLost: the coordinator is gone.
            XferError: the coordinator is gone, and this is the reason that it gave before.
        """
        gone: XferError | None = None
        if self.lost is None:
            try:
                return self.channel.send(message, seconds)
            except PeerLost as e:
                gone = e
            self.channel.join(EXIT_S)  # until all that the coordinator sent before the end is read
        raise self._failed.error() if self._failed is not None else self.lost or gone or PeerLost("no coordinator")

    def try_send(self, message: m.Message, seconds: float = SEND_S) -> None:
        """Send a message if the coordinator still listens."""
        if self.lost is None:
            with contextlib.suppress(PeerLost):
                self.channel.send(message, seconds)

    def done(self, attempt: int, moved: m.Moved) -> None:
        """A lane has moved its part. In a large job a trainer's may be held back for a moment, to travel with those of other lanes."""
        if self._collector is not None:
            self._collector.done(attempt, moved)
        else:
            self.send(m.Done(attempt, (moved.replica,), () if moved.idle else (moved,)))

    def stirred(self) -> None:
        """Wake `wait_for`: something may have changed that it waits for."""
        with self._news:
            self._news.notify_all()

    def wait_for(self, condition: Callable[[], bool], until: float) -> bool:
        """Wait until `condition` is true, by monotonic `until`. It is evaluated after every message and every step of a lane."""
        with self._news:
            return self._news.wait_for(condition, max(0.0, until - time.monotonic()))

    def catch_up(self, seconds: float) -> None:
        """Wait until the coordinator has handled all messages of this process, and its messages until then are in the inbox.

        Returns earlier if the coordinator is gone or does not answer in these seconds. Messages of other processes may
        still be on their way to the coordinator: they have to catch up themselves.
        """
        with contextlib.suppress(XferError):
            self.questions.ask("the coordinator", time.monotonic() + seconds, m.Ping)

    def _sort(self, message: m.Message) -> None:
        self._heard = time.monotonic()
        self._put(message)
        self.stirred()

    def _put(self, message: m.Message) -> None:
        handler = self._HANDLERS.get(type(message))
        if handler is None or handler(self, message):
            self.inbox.put(message)

    # Handlers, on the reader thread. They return True for messages that the main thread gets as well.

    def _found(self, message: m.Found) -> None:
        self.found = message

    def _abort(self, message: m.Abort) -> bool:
        if message.replica in self.lanes:
            self.lanes[message.replica].cancel(message.error.error(), message.epoch)
        return True

    def _part_ready(self, message: m.PartReady) -> None:
        if message.replica in self.lanes:
            self.lanes[message.replica].part_ready(message)

    def _drained(self, message: m.Drained) -> None:
        self.drained.update(dict.fromkeys(message.replicas, message.attempt))
        self.named = (message.attempt, message.version)

    def _post(self, replica: int, message: m.PlanInputs | m.OpenLink | m.Go) -> bool:
        lane = self.on_lane(replica)
        if lane is not None:
            lane.post(message)
        return isinstance(message, m.OpenLink)  # a worker that joins chooses its lock then

    def _close_routes(self, message: m.CloseRoutes) -> None:
        if message.replica in self.lanes:
            self.lanes[message.replica].post(message)
        elif not message.link:
            self.try_send(m.RoutesClosed(message.replica))  # nothing was ever opened here

    def _go(self, message: m.Go) -> None:
        self.named = (message.attempt, message.version)
        if self._collector is not None:
            self._collector.begin(message)
        for replica, go in message.each():
            self._post(replica, go)

    def _outcome(self, message: m.Outcome) -> bool:
        if message.void:
            self.void.add(message.attempt)
        return True

    def _all_failed(self, message: m.Failed) -> bool:
        if message.replica < 0:
            self._failed = self._failed or message.error  # the first; others that leave because of it are no reason
            for lane in list(self.lanes.values()):
                lane.let_go()
        return True

    _HANDLERS: ClassVar[dict[type, Callable[..., bool | None]]] = {
        m.Found: _found,
        m.Paused: lambda self, message: self.on_paused(message.paused),
        m.Reply: lambda self, message: self.questions.put(message),
        m.LayoutAsk: lambda self, message: self.shelf.give(message.inventory),
        m.Abort: _abort,
        m.PartReady: _part_ready,
        m.Drained: _drained,
        m.PlanInputs: lambda self, message: self._post(message.replica, message),
        m.OpenLink: lambda self, message: self._post(message.replica, message),
        m.CloseRoutes: _close_routes,
        m.Go: _go,
        m.Outcome: _outcome,
        m.Failed: _all_failed,
    }

    def _end(self, reason: str) -> None:
        self.lost = PeerLost(
            "left the rendezvous: closed by this process itself"
            if self._leaving
            else "lost the control connection to the rendezvous in trainer 0's process",
            [f"reason: {reason}"],
            where=self.label,
        )
        self.questions.close(reason)
        for lane in list(self.lanes.values()):
            lane.cancel(self.lost, None)
        self.inbox.put(self.lost)
        self.stirred()

    def here(self, kind: type[M], match: Callable[[M], bool] = lambda _: True) -> list[M]:
        """Return the inbox messages of this kind, and leave them there."""
        return [x for x in list(self.inbox.queue) if isinstance(x, kind) and match(x)]

    def newest(self, kind: type[M]) -> M | None:
        """Take all inbox messages of this kind and return the last one; None if there is none."""
        with self.inbox.mutex:
            found = self.here(kind)
            for x in found:
                self.inbox.queue.remove(x)
        return found[-1] if found else None

    def over(self, kind: type[M], match: Callable[[M], bool]) -> bool:
        """Whether a message of this kind is here, or none will come: the coordinator is gone."""
        return bool(self.here(XferError) or self.here(kind, match))

    def take(
        self,
        until: float,
        what: str,
        kind: type[M],
        kind2: type[M2] | None = None,
        kind3: type[M3] | None = None,
        kind4: type[M4] | None = None,
        kind5: type[M5] | None = None,
        *,
        match: Callable[[M | M2 | M3 | M4 | M5], bool] = lambda _: True,
        due: float | None = None,
    ) -> M | M2 | M3 | M4 | M5:
        """Return the next inbox message of these kinds. Other messages are dropped.

        A coordinator whose process is stopped or stuck keeps its connections. So it is asked from monotonic time `due` on,
        by default SILENCE_S before `until`, whether it lives.

        Args:
            until: monotonic time.
            what: what the caller waits for, quoted in errors.
            kind: type of the message; `kind2` to `kind5` are further types. They are separate arguments, since type checkers
                find no union in a tuple of types.
            match: whether to return a message of these kinds.

        Raises:
            PeerLost: the coordinator is gone.
            DeadlineExceeded: no such message came, or the coordinator did not answer for SILENCE_S.
            XferError: the coordinator refused this process.
        """
        kinds = tuple(k for k in (kind, kind2, kind3, kind4, kind5) if k is not None)
        due, asked, wait = until - SILENCE_S if due is None else due, 0.0, 0.0
        while True:
            try:  # first without waiting: the message may be here for long
                message = self.inbox.get(timeout=wait)
            except queue.Empty:
                now = time.monotonic()
                silent = self._heard < asked
                if now >= until or silent and now - asked >= SILENCE_S:
                    deaf = silent and now - asked >= SILENCE_S / 2
                    raise DeadlineExceeded(
                        f"no answer in time: {what}", [SILENT] if deaf else [], where=self.label
                    ) from None
                if now >= due and not silent and now - asked >= 1.0:
                    asked = now
                    self.try_send(m.Ping(0), SILENCE_S)  # any message is an answer
                wait = min(until - now, max(due - now, 0.05), 1.0)
                continue
            if isinstance(message, XferError):
                self.inbox.put(message)  # for the next caller, too
                raise message
            if isinstance(message, kinds) and match(message):
                return message
            wait = max(0.0, min(wait, until - time.monotonic()))
            if isinstance(message, m.Refused) and m.Refused not in kinds:
                raise message.error.error()

    def close(self) -> None:
        if self.channel.theirs:
            return  # a forked process shares descriptors with its parent: aborting links here would break them there
        self._leaving = True
        _left[self._place] = self.welcome.session
        self.try_send(m.Leave())
        for lane in list(self.lanes.values()):
            lane.close()
        # The coordinator closes once it has handled Leave. From then on another client may have this role and number.
        # Closing here first could also discard the Leave, if bytes of the coordinator lie unread here.
        self.channel.join(LEAVE_S)
        self.channel.close()
        self.channel.join(EXIT_S)
