"""Who the hub knows: clients, replicas, and what the job's first trainer said about itself. State only, no decisions."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from dataclasses import dataclass, field

from xfer.errors import PeerLost, ProtocolError, XferError
from xfer.session import messages as m
from xfer.session.channel import Channel

PROMPT = (m.Arm, m.Go, m.Brought, m.Drained, m.Commit, m.Settle, m.Outcome)


@dataclass(eq=False)
class Client:
    """One authenticated connection, after its hello."""

    channel: Channel
    hello: m.Hello | None = None
    left: bool = False
    progress: m.Progress | None = None
    _out: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _writer: threading.Thread | None = None
    _order: threading.Lock = field(default_factory=threading.Lock)
    _queued: int = 0

    @property
    def label(self) -> str:
        h = self.hello
        if h is None:
            return "a client without hello"
        if h.role == "trainer":
            return f"trainer {h.index}"
        return (
            f"replica {h.replica} worker {h.index}"
            if h.role == "worker"
            else f"replica {h.replica} controller"
            if h.role == "controller"
            else "observer"
        )

    def send(self, message: m.Message) -> None:
        """Returns at once, whether the client reads or not: one that does not must not hold up the hub's decisions. What
        cannot leave now is queued; what a whole job waits for leaves now, without waking a thread first.

        One that cannot be reached is handled when its reader reports the end, never here.
        """
        with self._order:
            if not self._queued and isinstance(message, PROMPT) and self.channel.send_now(message):
                return
            self._queued += 1
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="xfer-hub-write", daemon=True)
                self._writer.start()
            self._out.put(message)

    def _write(self) -> None:
        while (message := self._out.get()) is not None:
            try:
                self.channel.send(message)
            except PeerLost:
                return
            except ProtocolError as e:  # a bug of ours: this client would wait for ever for what it was not told
                logging.getLogger("xfer").error("xfer: %s: %s", self.label, e)
                self.channel.close()
                return
            with self._order:
                self._queued -= 1

    def finish(self) -> None:
        """No more messages; those that are queued still go."""
        self._out.put(None)

    def say_all(self, seconds: float) -> None:
        """After `finish`: wait for what is queued to go, and hang up."""
        with self._order:  # not while it is being started
            writer = self._writer
        if writer is not None:
            writer.join(seconds)
        self.channel.hang_up()


@dataclass(eq=False)
class Replica:
    """What the hub knows of one engine replica."""

    index: int
    size: int = 0
    controller: Client | None = None
    workers: dict[int, Client] = field(default_factory=dict)
    inventories: dict[int, bytes] = field(default_factory=dict)
    epoch: int = 0
    state: str = "absent"  # absent | joining | planning | linking | ready | failed | lost
    pending: set[Client] = field(default_factory=set)  # who still owes an answer in this state
    digests: dict[str, str] = field(default_factory=dict)  # label -> plan digest
    digest: str = ""
    version: str = ""
    dirty: bool = False
    error: XferError | None = None
    until: float = 0.0
    relink: bool = False  # plan is still right, the communicator is not
    reopen: bool = False  # the communicator too, but storages moved: routes must be opened again
    plan_s: float = 0.0  # what the present attempt spends on a new plan,
    link_s: float = 0.0  # and on opening links and routes
    stage_at: float = 0.0  # monotonic time from which the stage that runs counts
    unsettled: int = 0  # attempt after which its controller has not said yet what the engine serves
    stale: bool = False  # an inventory came after the plan was made: only a new plan may run
    hands: dict[int, bytes] = field(default_factory=dict)  # worker -> what the next one in a row may read of it
    before: tuple[int, int] | None = None  # the replica, and its epoch, that the routes were opened behind
    follows: set[int] = field(default_factory=set)  # workers that do read from that one

    def processes(self) -> list[Client]:
        """Workers, and the controller if it is here."""
        return [*self.workers.values(), *([self.controller] if self.controller is not None else [])]

    def stage(self) -> float:
        """Ends one stage and begins the next; seconds of the one that ends."""
        now = time.monotonic()
        seconds, self.stage_at = now - self.stage_at, now
        return seconds

    def settled(self, msg: m.Settled) -> None:
        """Its controller says what the engine serves after an attempt."""
        self.unsettled, self.dirty = 0, self.dirty and not msg.serving
        if msg.version:
            self.version = msg.version

    @property
    def holds(self) -> m.Holds:
        """What its workers hold together, by what they said when they joined and what became of them since."""
        if not self.dirty:
            return "whole"
        return "nothing" if all(c.hello.holds == "nothing" for c in self.workers.values()) else "mix"

    @property
    def complete(self) -> bool:
        return self.controller is not None and self.size > 0 and len(self.workers) == self.size == len(self.inventories)


@dataclass(frozen=True)
class HubOptions:
    trainers: int
    replicas: int
    deadline_s: float
    bucket_bytes: int
    drop: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    site: bytes = b""  # encoded Site: who sits where on which links; empty when not known
    settings: tuple[tuple[str, str], ...] = ()  # must be equal in every hello that carries the same key
    route: str = "direct"
    host_pull: bool = False
    relay: bool = False
    colocated: bool = False


def told(o: HubOptions) -> tuple[tuple[str, str], ...]:
    """What every trainer says of connect()'s arguments, for comparison at the door."""
    return (
        ("replicas", str(o.replicas)),
        ("deadline_s", f"{o.deadline_s:g}"),
        ("bucket_bytes", str(o.bucket_bytes)),
        ("route", o.route),
        ("host_pull", str(o.host_pull)),
        ("relay", str(o.relay)),
        ("colocated", str(o.colocated)),
        ("drop", _short(o.drop)),
        ("narrow", _short(o.narrow)),
        ("fabric", f"one with digest {hashlib.blake2b(o.site, digest_size=6).hexdigest()}" if o.site else "none"),
    )


_ADVICE = {
    "data plane": "weights of both sides must be on GPUs, or on CPUs",
    "NCCL": "install one version on both sides, or load it into one of them with LD_PRELOAD",
    "torch": "install one release on both sides",
}


def _short(globs: tuple[str, ...]) -> str:
    text = ", ".join(sorted(set(globs)))
    return (
        text
        if len(text) <= 200
        else f"{len(globs)} patterns, blake2b {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    )


def differences(h: m.Hello, o: HubOptions) -> list[str]:
    """Settings in which this process differs from trainer 0."""
    mine = dict(o.settings)
    return [
        f"{k} is {v!r}, trainer 0 has {mine[k]!r}" + (f": {_ADVICE[k]}" if k in _ADVICE else "")
        for k, v in h.settings
        if k in mine and mine[k] != v
    ]


def hello_violations(h: m.Hello, o: HubOptions, trainers: dict[int, Client], replicas: dict[int, Replica]) -> list[str]:
    """Everything that keeps this process out, not the first thing."""
    bad = []
    if h.role == "trainer":
        if h.size != o.trainers:
            bad.append(f"it says there are {h.size} trainer ranks, trainer 0 says {o.trainers}")
        if h.index >= o.trainers:
            bad.append(f"trainer rank {h.index} of {o.trainers}")
        if h.index in trainers:
            bad.append(f"trainer {h.index} is connected already")
    if h.role in ("controller", "worker") and not h.size:
        bad.append("its engine says that it has no workers")
    if h.role == "worker" and h.index >= h.size:
        bad.append(
            f"worker {h.index} of {h.size}: an engine that was started as one rank of several is a replica of its own; "
            "install the same xfer where it runs"
        )
    if h.role in ("controller", "worker") and h.replica not in replicas:
        bad.append(f"replica {h.replica}: trainers expect replicas 0..{o.replicas - 1}; pass replicas= to connect()")
    bad += differences(h, o)
    replica = replicas.get(h.replica)
    if not bad and replica is not None:
        if h.role == "controller" and replica.controller is not None:
            bad.append(f"replica {h.replica} has a controller already; each engine is served with a replica= of its own")
        if h.role == "worker":
            if replica.controller is None:
                bad.append(f"worker of replica {h.replica} came before its controller")
            elif h.size != replica.size:
                bad.append(f"{h.size} workers, its controller says {replica.size}")
            elif h.index in replica.workers:
                bad.append(f"worker {h.index} of replica {h.replica} is connected already")
    return bad
