"""Several hosts in one `xfer bench`: all run the same command, and the first one has the others start processes.

They meet as doctors do (cli/line.py). The first host listens and measures. Each other host starts processes on request, hands orders on
to them (children.py) and sends their answers back, until the first host ends the run or its connection ends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import msgspec
import typer

from xfer.cli.bench.rank import Task
from xfer.cli.children import ANSWER_S, Process
from xfer.cli.layouts.child import TraceTask
from xfer.cli.line import Gathering, Line, Note, advised, listeners
from xfer.cli.output import REFUSED, WRONG, told_errors
from xfer.errors import DeadlineExceeded, XferError, from_wire
from xfer.rendezvous.channel import dial_socket

SEND_S, SLACK_S = 60.0, 10.0
IDLE_S = 24 * 3600.0
"""Most seconds that a host waits for an order, while other hosts read layouts and refit."""
Start = Callable[[str, str, Any], Process]
"""Starts a process. Arguments: "rank", a name and a `Task`; or the side whose layouts the process reads, a name and a `TraceTask`."""


class Attendance(Note, frozen=True):
    """Host -> first host: the first message.

    Attributes:
        name: The host's name.
        asked: Option -> value, of those that must be equal on all hosts.
        gpus: Number of GPUs.
        frameworks: Side -> package -> version, of the frameworks that the host has.
        machine: What the JSON output says of the host.
    """

    name: str
    asked: dict[str, str]
    gpus: int
    frameworks: dict[str, dict[str, str]]
    machine: dict[str, Any]


class Met(Note, frozen=True):
    """First host -> host: all have come. `first`: the first host's name."""

    first: str


class Spawn(Note, frozen=True):
    """First host -> host: start a process. `number` names this request, and from then on the process."""

    number: int
    kind: str
    name: str
    task: bytes


class Instruct(Note, frozen=True):
    """First host -> host: an order to a process."""

    number: int
    process: int
    do: str
    how: dict[str, Any]


class Halt(Note, frozen=True):
    """First host -> host: stop a process."""

    process: int


class Answered(Note, frozen=True):
    """Host -> first host: the process is ready or has carried out an order, or its error (`XferError.to_wire`)."""

    number: int
    value: Any = None
    error: tuple[str, str, tuple[str, ...], str] | None = None


class Finish(Note, frozen=True):
    """First host -> host: the end. `said`: how it ended; `code`: exit code."""

    said: str
    code: int


@dataclass(frozen=True, slots=True)
class BenchHost:
    """A host, this one or another one."""

    has: Attendance
    start: Start


@contextmanager
def meeting(
    rendezvous: str | None, token: str, size: int, deadline_s: float, mine: BenchHost, say: Callable[[str], None]
) -> Iterator[list[BenchHost]]:
    """Meet the other hosts. On the first one, yield all, as `leading` does. On another one, take part to the end, and end the command.

    Args:
        rendezvous: "tcp://HOST:PORT"; None: this host is alone.
        size: Number of hosts.
        deadline_s: Seconds that all have to come.
        mine: This host.
        say: Called with what is being done.
    """
    sockets, why = ([], "") if rendezvous is None else listeners(rendezvous, token)
    if rendezvous is not None:
        say(f"waiting for {size} hosts at {rendezvous}, {deadline_s:g} s at most")
        if not sockets:
            with told_errors(refused=True):  # without data: the JSON is the first host's
                finish = _take_part(rendezvous, token, deadline_s, why, mine, say)
            say(finish.said)
            raise typer.Exit(finish.code)
    with leading(sockets, token, size, deadline_s, mine) as hosts:
        yield hosts


# ---- the first host


@contextmanager
def leading(
    sockets: Sequence[socket.socket], token: str, size: int, deadline_s: float, mine: BenchHost
) -> Iterator[list[BenchHost]]:
    """Yield all hosts: this one first, the others in the order of their names. They are told how the context ends.

    Args:
        sockets: Those that listen; none if this host is alone.

    Raises:
        XferError: Not all came, or they were asked different things.
    """
    callers = Gathering(sockets, token, Attendance)
    came = sorted(callers.wait(size - 1, deadline_s), key=lambda c: c[1].name)
    others = [_Remote(line, joined.name) for line, joined, _ in came]
    hosts = [mine, *(BenchHost(joined, r.start) for r, (_, joined, _) in zip(others, came))]
    me = mine.has.name
    finish = Finish(f"done: {me} prints the table", 0)
    try:
        _check(hosts, size, deadline_s, list(dict.fromkeys(callers.rejected)))
        for r in others:
            r.tell(Met(me))
        yield hosts
    except typer.Exit as e:
        finish = Finish(f"something failed: {me} says what", e.exit_code)
        raise
    except BaseException as e:
        finish = Finish(f"{me}: {type(e).__name__}: {e}", REFUSED)
        raise
    finally:
        for r in others:
            r.tell(finish)
        late = Finish(f"all {size} hosts of --size had come before this one", WRONG)
        for line, _ in callers.late():
            with suppress(XferError):
                line.send(late, time.monotonic() + SLACK_S)
            line.close()


def _check(hosts: Sequence[BenchHost], size: int, deadline_s: float, rejected: Sequence[str]) -> None:
    if len(hosts) < size:
        names = ", ".join(h.has.name for h in hosts)
        advice = (
            "start the same command on all hosts within --deadline; one that cannot reach this address says why there"
        )
        said = f"only {len(hosts)} of {size} hosts came within {deadline_s:g} s: {names}"
        raise DeadlineExceeded(said, [*(f"rejected: {line}" for line in rejected), advice])
    differs = []
    for option in hosts[0].has.asked:
        said_by: dict[str, list[str]] = {}
        for h in hosts:
            said_by.setdefault(h.has.asked.get(option, ""), []).append(h.has.name)
        if len(said_by) > 1:
            differs.append(
                f"{option}: " + "; ".join(f"{v or 'nothing'} on {', '.join(on)}" for v, on in said_by.items())
            )
    if differs:
        raise XferError("give the same options on all hosts", differs)


class _Remote:
    """The first host's end of the line to another one."""

    def __init__(self, line: Line, name: str):
        self._out, self._lock = line, threading.Lock()
        self._out.label = name
        self._in = Line(line.sock.dup(), name)  # another thread reads, with a timeout of its own
        self._numbers, self._waiting = count(), dict[int, Future[Any]]()
        self._lost: XferError | None = None
        threading.Thread(target=self._hear, name=f"xfer-bench-{name}", daemon=True).start()

    def start(self, kind: str, name: str, task: msgspec.Struct) -> Process:
        return RemoteProcess(self, kind, name, msgspec.msgpack.encode(task))

    def tell(self, note: Note) -> None:
        with self._lock:
            self._send(note)

    def ask(self, make: Callable[[int], Note]) -> tuple[int, Future[Any]]:
        """Send a request. Returns its number, and the answer to come."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # nobody can take it back: the other host may be at it
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            self._send(make(number))
        return number, answer

    def _send(self, note: Note) -> None:
        try:
            if self._lost is None:
                self._out.send(note, time.monotonic() + SEND_S)
        except XferError as e:
            self._lost = e
        if self._lost is not None:
            self._give_up(self._lost)

    def _give_up(self, why: XferError) -> None:
        self._lost = why
        while self._waiting:
            self._waiting.popitem()[1].set_exception(why)

    def _hear(self) -> None:
        while self._lost is None:
            with self._lock:
                before = set(self._waiting)
            try:
                said = self._in.take(time.monotonic() + ANSWER_S + SLACK_S, Answered)
            except XferError as e:
                with self._lock:
                    if before & self._waiting.keys() or not isinstance(e, DeadlineExceeded):
                        self._give_up(e)
                continue
            with self._lock:
                answer = self._waiting.pop(said.number, Future())
            if said.error is None:
                answer.set_result(said.value)
            else:
                answer.set_exception(from_wire(*said.error))
        for line in (self._in, self._out):
            line.close()


class RemoteProcess:
    """A process of another host. It implements `Process`."""

    def __init__(self, host: _Remote, kind: str, name: str, task: bytes):
        self.name, self._host = name, host
        self._number, self.ready = host.ask(partial(Spawn, kind=kind, name=name, task=task))

    def order(self, do: str, **how: Any) -> Future[Any]:
        return self._host.ask(partial(Instruct, process=self._number, do=do, how=how))[1]

    def stop(self) -> None:
        self._host.tell(Halt(self._number))


# ---- the other hosts


def _take_part(
    rendezvous: str, token: str, deadline_s: float, why: str, mine: BenchHost, say: Callable[[str], None]
) -> Finish:
    """Obey the first host to the end. Raises XferError if it cannot be reached, or is gone."""
    with advised("bench", why):
        line = Line(dial_socket(rendezvous, token, deadline_s), "the first host")
        line.send(mine.has, time.monotonic() + SLACK_S)
        note = line.take(time.monotonic() + deadline_s + SLACK_S, Met, Finish)
    if isinstance(note, Met):
        line.label = note.first
        say(f"{mine.has.name} starts processes for {note.first}, which prints the table")
        note = _obey(line, mine.start)
    return note


def _obey(line: Line, start: Start) -> Finish:
    running: dict[int, Process] = {}
    out, lock = Line(line.sock.dup(), line.label), threading.Lock()

    def answer(number: int, done: Future[Any]) -> None:
        error = XferError("the process was stopped") if done.cancelled() else done.exception()
        if error is not None and not isinstance(error, XferError):
            error = XferError(f"{type(error).__name__}: {error}")
        said = Answered(number, error=error.to_wire()) if error else Answered(number, done.result())
        with lock, suppress(XferError):  # the main thread notices that the first host is gone
            out.send(said, time.monotonic() + SEND_S)

    try:
        while not isinstance(note := line.take(time.monotonic() + IDLE_S, Spawn, Instruct, Halt, Finish), Finish):
            if isinstance(note, Halt):
                if note.process in running:
                    running.pop(note.process).stop()
                continue
            done: Future[Any] = Future()
            try:
                if isinstance(note, Spawn):
                    task = msgspec.msgpack.decode(note.task, type=Task if note.kind == "rank" else TraceTask)
                    running[note.number] = start(note.kind, note.name, task)
                    done = running[note.number].ready
                else:
                    done = running[note.process].order(note.do, **note.how)
            except (OSError, KeyError, msgspec.MsgspecError) as e:
                done.set_exception(e)
            done.add_done_callback(partial(answer, note.number))
        return note
    finally:
        for process in running.values():
            process.stop()
