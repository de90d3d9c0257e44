"""Brings the doctors of several machines together, and measures between each two of them.

The process that has an address of the rendezvous' host listens there, or one with `--listen` (cli/line.py). All processes dial it, this
one too, and join with their facts. The leader, a thread of the process that listens, sends the facts of all to each process, tells pairs
to visit each other, and sends all results to all.

Visits of one step (visits.py) have no process in common. A process that is lost or late becomes a failure in the report, and
the others go on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from xfer.cli.doctor import visits
from xfer.cli.doctor.addresses import is_loopback
from xfer.cli.doctor.facts import Checkup, Finding, HostFacts, MemoryRead, NetworkPath, problem
from xfer.cli.line import GREET_S, Gathering, Line, Note, advised, listeners
from xfer.errors import XferError
from xfer.rendezvous.channel import dial_socket

SLACK_S = 10.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How to meet.

    Attributes:
        rendezvous: "tcp://HOST:PORT".
        size: Processes in all.
        timeout_s: Seconds that all have to come.
        stream_s: Seconds for which a rate is measured; 0: not at all.
        listen: This process listens, whatever the rendezvous' host resolves to.
    """

    rendezvous: str
    token: str
    size: int
    timeout_s: float
    stream_s: float
    listen: bool = False


class Join(Note, frozen=True):
    """Member -> leader: the first message."""

    facts: HostFacts
    size: int
    offers: dict[str, bytes]


class Begin(Note, frozen=True):
    """Leader -> member: all have come. `lasts_s`: longest time that all measurements may take."""

    lasts_s: float


class Visit(Note, frozen=True):
    """Leader -> member `me`: visit `other` now. `seen`, `names`, `stream_s`: see `visits.visit`. `offers`: memory of `other` to read."""

    me: HostFacts
    other: HostFacts
    seen: str
    offers: dict[str, bytes]
    names: dict[str, str]
    stream_s: Annotated[float, Meta(ge=0, le=60)]


class Visited(Note, frozen=True):
    """Member -> leader: the result of a visit."""

    paths: tuple[NetworkPath, ...]
    memory: tuple[MemoryRead, ...]


class Result(Note, frozen=True):
    """Leader -> member: the end."""

    checkup: Checkup


# ---- the leader


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """All pairs of n, in rounds of pairs that have nobody in common: the circle method."""
    some = list(range(n + n % 2))
    out = []
    for _ in range(len(some) - 1):
        half = len(some) // 2
        pairs = zip(some[:half], reversed(some[half:]))
        out.append([(a, b) for a, b in pairs if a < n and b < n])
        some[1:] = [some[-1], *some[1:-1]]
    return out


class Leader:
    """Runs a meeting on a thread of its own. Members hear of everything that goes wrong."""

    def __init__(self, listeners: Sequence[socket.socket], terms: Terms):
        self._terms = terms
        self._callers = Gathering(listeners, terms.token, Join)
        self.failures: list[Finding] = []
        self._gone: set[Line] = set()
        self._thread = threading.Thread(target=self._run, name="xfer-doctor-leader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Called when this process's member has its result: by then the others have theirs, or do not read it."""
        self._thread.join(SLACK_S)

    def _run(self) -> None:
        came = self._gather()
        lines = [line for line, _, _ in came]
        try:
            self._lead(lines, [j for _, j, _ in came], [address for *_, address in came])
        finally:
            for line in lines:
                line.close()
            self._send_away()

    def _send_away(self) -> None:
        """Tells processes that came after the last expected one."""
        for line, join in self._callers.late():
            said = f"all {self._terms.size} processes of --size had come before this one"
            failure = problem("meeting", join.facts.host, said, "give the number of all processes as --size")
            self._tell(line, Result(Checkup((join.facts,), failures=(failure,))), time.monotonic() + GREET_S)
            line.close()

    def _gather(self) -> list[tuple[Line, Join, str]]:
        terms = self._terms
        came = self._callers.wait(terms.size, terms.timeout_s)
        came.sort(key=lambda c: (c[1].facts.host, c[1].facts.machine, c[1].facts.pid))
        if len(came) < terms.size:
            here = ", ".join(j.facts.host for _, j, _ in came)
            said = f"only {len(came)} of {terms.size} processes came within {terms.timeout_s:g} s: {here}"
            advice = "start it on all machines within that time; one that cannot reach this address says why there"
            self._fail(terms.rendezvous, said, advice)
            for line in dict.fromkeys(self._callers.rejected):
                self._fail(terms.rendezvous, f"rejected: {line}", "is XFER_TOKEN the same everywhere?")
        for _, join, _ in came:
            if join.size != terms.size:
                said = f"was started with --size {join.size}, the one that listens with {terms.size}"
                self._fail(join.facts.host, said, "give the same --size everywhere")
        return came

    def _lead(self, lines: Sequence[Line], joins: Sequence[Join], addresses: Sequence[str]) -> None:
        hosts = labelled([j.facts for j in joins])
        for line, facts in zip(lines, hosts):
            line.label = facts.label
        far = any(not hosts[0].shares_network(f) for f in hosts)
        seen = tuple("" if far and is_loopback(a) else a for a in addresses)
        steps = [step for pairs in rounds(len(hosts)) for step in (pairs, [(b, a) for a, b in pairs])]
        bound = [visits.longest_s(f, s, self._terms.stream_s) + SLACK_S for f, s in zip(hosts, seen)]
        lasts = [max((bound[b] for _, b in step), default=0.0) for step in steps]
        names = {f.identity: f.label for f in hosts}
        for line in lines:
            self._tell(line, Begin(sum(lasts)), time.monotonic() + SLACK_S)
        measured: list[NetworkPath] = []
        memory: list[MemoryRead] = []
        for step, seconds in zip(steps, lasts):
            until = time.monotonic() + seconds
            told = []
            for a, b in step:
                visit = Visit(hosts[a], hosts[b], seen[b], joins[b].offers, names, self._terms.stream_s)
                if lines[b] not in self._gone and self._tell(lines[a], visit, until):
                    told.append(lines[a])
            for line in told:
                if found := self._tried(line, partial(line.take, until, Visited)):
                    measured += found.paths
                    memory += found.memory
        result = Result(Checkup(hosts, tuple(measured), tuple(memory), tuple(self.failures)))
        for line in lines:
            self._tell(line, result, time.monotonic() + SLACK_S)

    def _tell(self, line: Line, note: Note, until: float) -> bool:
        return bool(self._tried(line, lambda: line.send(note, until)))

    def _tried(self, line: Line, act: Callable[[], Any]) -> Any:
        """Returns what `act` returns; None if that member was lost before, or is lost in `act`."""
        if line in self._gone:
            return None
        try:
            return act()
        except XferError as e:
            self._gone.add(line)
            self._fail(line.label, f"left during the measurements: {e.message}", "look at its output")
            line.close()
            return None

    def _fail(self, where: str, said: str, advice: str) -> None:
        self.failures.append(problem("meeting", where, said, advice))


def labelled(hosts: Sequence[HostFacts]) -> tuple[HostFacts, ...]:
    """Gives processes of one host name a number behind it."""
    many, count = Counter(f.host for f in hosts), Counter[str]()
    out = []
    for f in hosts:
        count[f.host] += 1
        out.append(replace(f, label=f"{f.host} #{count[f.host]}" if many[f.host] > 1 else f.host))
    return tuple(out)


# ---- a member


def attend(terms: Terms, facts: HostFacts) -> Checkup:
    """Meets the other processes, takes part in the measurements, and returns all results.

    Raises:
        XferError: This process could not take part. Its violations say what to do.
    """
    leader, (sockets, why) = None, listeners(terms.rendezvous, terms.token, terms.listen)
    door, port = visits.open_door(facts.identity, terms.token)
    try:
        with advised("doctor", why, " --listen there if it is behind NAT"):
            at = terms.rendezvous
            if sockets:
                leader, at = Leader(sockets, terms), _own(sockets[0])
            offers, kept = visits.offer_probes(facts)
            line = Line(dial_socket(at, terms.token, terms.timeout_s), "the doctor that listens")
            try:
                return _take_part(line, terms, replace(facts, port=port), offers)
            finally:
                line.close()
                del kept
    finally:
        door.close()
        if leader is not None:
            leader.close()


def _own(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _take_part(line: Line, terms: Terms, facts: HostFacts, offers: dict[str, bytes]) -> Checkup:
    line.send(Join(facts, terms.size, offers), time.monotonic() + SLACK_S)
    note = line.take(time.monotonic() + terms.timeout_s + SLACK_S, Begin, Result)
    if isinstance(note, Begin):
        until = time.monotonic() + note.lasts_s + 2 * SLACK_S
        while isinstance(note := line.take(until, Visit, Result), Visit):
            v, near = note, note.me.shares_machine(note.other)
            paths = tuple(visits.visit(v.me, v.other, v.seen, terms.token, v.stream_s, v.names))
            line.send(Visited(paths, tuple(visits.read_probes(v.me, v.other, v.offers)) if near else ()), until)
    return note.checkup
