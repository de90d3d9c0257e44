"""The coordinator's data: clients, replicas and their phases, the options of the job, the store, and the rules of admission.

Nothing here decides a refit.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.events import Close, Effect, Send
from xfer.coordinator.messages import Label
from xfer.errors import ProtocolError, XferError

if TYPE_CHECKING:
    from xfer.coordinator.first_copy import FirstCopy

STRANGER = m.Hello("observer", 0, 0, 0, "", 0)
"""Stands for the hello of a connection that has not sent one. It takes part in nothing."""


@dataclass(eq=False)
class Client:
    """One connection that proved the token. `outbox`: the effects that the coordinator returns next."""

    number: int
    outbox: list[Effect] = field(repr=False)
    hello: m.Hello = STRANGER
    label: str = "a client without hello"
    left: bool = False
    closed: bool = False
    progress: m.Progress | None = None

    def send(self, message: m.Message) -> None:
        if not self.closed:
            self.outbox.append(Send((self.number,), message))

    def close(self) -> None:
        """Close the connection after everything that was sent before."""
        if not self.closed:
            self.closed = True
            self.outbox.append(Close(self.number))


def broadcast(clients: Iterable[Client], message: m.Message) -> None:
    """Send one message to all of these. It is encoded once."""
    some = [c for c in clients if not c.closed]
    if some:
        some[0].outbox.append(Send(tuple([c.number for c in some]), message))


class ReplicaPhase(Enum):
    """How far a replica is on its way into refits:

    ABSENT   -> JOINING                      its controller says hello
    JOINING  -> PLANNING                     the layouts of all its ranks are known
    PLANNING -> LINKING -> READY             all digests are equal; all links are open
    PLANNING -> READY                        nothing can be linked now: the next refit plans and links
    READY    -> PLANNING, LINKING            a layout or a storage changed
    JOINING, PLANNING, LINKING, READY -> FAILED   an error or a deadline; the next refit plans again
    any      -> LOST                         one of its processes is gone; a new controller joins as JOINING
    """

    ABSENT = "absent"
    JOINING = "joining"
    PLANNING = "planning"
    LINKING = "linking"
    READY = "ready"
    FAILED = "failed"
    LOST = "lost"

    @property
    def opening(self) -> bool:
        """A plan or a link is being made."""
        return self in (ReplicaPhase.PLANNING, ReplicaPhase.LINKING)

    @property
    def before_ready(self) -> bool:
        return self is ReplicaPhase.JOINING or self.opening


@dataclass(eq=False)
class Replica:
    """One engine replica: its processes, its plan and its link."""

    index: int
    size: int = 0
    controller: Client | None = None
    workers: dict[int, Client] = field(default_factory=dict)
    inventories: dict[int, bytes] = field(default_factory=dict)  # worker -> digest of its layout
    wanted: dict[int, set[tuple[str, str]]] = field(default_factory=dict)  # worker -> what it needs derived
    derives: bool = False  # some worker has asked for derived tensors, and may ask again when it reads a new catalog
    epoch: int = 0  # generation of its plan and link; messages of older epochs are ignored
    phase: ReplicaPhase = ReplicaPhase.ABSENT
    pending: set[Client] = field(default_factory=set)  # ranks that have to answer in this phase
    digests: dict[Client, str] = field(default_factory=dict)  # digest of each rank's plan
    digest: str = ""
    roll: bytes = b""  # digest of its workers' layouts and hosts, from which it was planned
    version: Label = None
    dirty: bool = False
    error: XferError | None = None
    until: float = 0.0
    relink: bool = False  # the plan is right, the communicator is broken
    reopen: bool = False  # the communicator is right, storages moved: routes must be opened again
    stale: bool = False  # a layout changed after the plan was made: only a new plan may run
    plan_s: float = 0.0  # seconds of the running refit for a new plan,
    link_s: float = 0.0  # and for opening links and routes
    stage_at: float = 0.0  # when the present stage began
    in_step: bool = False  # its workers are data-parallel ranks, as they said when they armed
    unsettled: int = 0  # a refit after which its controller has yet to say what the engine serves
    opened: dict[int, m.LinkOpen] = field(default_factory=dict)  # worker -> its answer to the last OpenLink
    hands: dict[int, bytes] = field(default_factory=dict)  # worker -> what other replicas may read of it
    offered: int = 0  # the epoch in which `hands` changed
    scratch: int | None = None  # bytes of scratch into which its routes bring bytes; None: into live storage
    joined: bool = False  # it was ready since its controller came
    base: int = 0  # the refit by changes whose bytes all of its workers hold, as far as they have said; 0: none
    # By share of its bytes, the replica that brings it, and that one's `offered`.
    sources: tuple[tuple[int, int], ...] = ()
    follows: set[int] = field(default_factory=set)  # workers that read from these replicas
    receives: bool = False  # all its workers pull nothing from trainers
    apart: bool = False  # in a relay ring, some worker could not read from the others
    committed: int = 0  # the last refit whose version it committed, or got from a donor
    verified: bool = False  # whether checksums were compared then
    first: FirstCopy | None = None  # it gets its first weights from another replica
    tried: bool = False  # that has been tried since it came; it is tried once
    gave_to: set[int] = field(default_factory=set)  # replicas to which its workers have given first weights

    def renew(self, controller: Client, size: int, until: float) -> None:
        """Begin anew with another engine, of which nothing is known. Only the epochs go on, since messages of older ones are ignored."""
        fresh = Replica(self.index, size, controller, epoch=self.epoch, phase=ReplicaPhase.JOINING, until=until)
        vars(self).update(vars(fresh))

    def tell(self, message: m.Message) -> None:
        """Send a message to the controller, if it is connected."""
        if self.controller is not None:
            self.controller.send(message)

    def note_pause(self, paused: bool) -> None:
        """Tell worker 0, which outlives controllers and trainers and says it in its next hello."""
        if 0 in self.workers:
            self.workers[0].send(m.Paused(paused))

    def processes(self) -> list[Client]:
        """Return the workers, and the controller if it is connected."""
        return [*self.workers.values(), *([self.controller] if self.controller is not None else [])]

    @property
    def rings(self) -> bool:
        """Whether it can stand in a relay ring."""
        return self.receives and not self.apart

    def stage(self, now: float) -> float:
        """Begin a stage. Returns the seconds of the one that ends."""
        seconds, self.stage_at = now - self.stage_at, now
        return seconds

    def settled(self, msg: m.Settled) -> None:
        """Note what the engine serves after a refit, as its controller told."""
        self.unsettled, self.dirty, self.version = 0, self.dirty and not msg.serving, msg.version

    @property
    def holds(self) -> m.Holds:
        """What its workers hold: the bytes of one version ("whole"), random ones ("nothing"), or a "mix"."""
        if not self.dirty:
            return "whole"
        return "nothing" if all(c.hello.holds == "nothing" for c in self.workers.values()) else "mix"

    @property
    def complete(self) -> bool:
        return self.controller is not None and self.size > 0 and len(self.workers) == self.size == len(self.inventories)


@dataclass(frozen=True)
class Ended:
    """A session that failed before all its trainers had come. The `missing` trainers may come late, to the next session."""

    session: str
    error: m.WireError
    missing: frozenset[int]


@dataclass(frozen=True)
class Options:
    """The arguments of trainer 0's `connect()`."""

    trainers: int
    replicas: int
    deadline_s: float
    bucket_bytes: int
    drop: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    site: bytes = b""  # encoded Site: hosts and links; empty where it is not known
    settings: tuple[tuple[str, str], ...] = ()  # must be equal in every hello that carries the same key
    route: str = "direct"
    host_pull: bool = False
    relay: bool = False
    rdma: bool = False
    colocated: bool = False
    first_copies: bool = False  # a replica that joins may get its first weights from another one
    gathers: bool = False  # one gather of the weights feeds all replicas that begin together


def told(o: Options) -> tuple[tuple[str, str], ...]:
    """Return connect()'s arguments as text. They must be equal on all trainer ranks."""
    return (
        ("replicas", str(o.replicas)),
        ("deadline_s", f"{o.deadline_s:g}"),
        ("bucket_bytes", str(o.bucket_bytes)),
        ("route", o.route),
        ("host_pull", str(o.host_pull)),
        ("relay", str(o.relay)),
        ("rdma", str(o.rdma)),
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
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return text if len(text) <= 200 else f"{len(globs)} patterns, blake2b {digest}"


def differences(h: m.Hello, o: Options) -> list[str]:
    """Return one line for each setting in which this process differs from trainer 0."""
    mine = dict(o.settings)
    return [
        f"{k} is {v!r}, trainer 0 has {mine[k]!r}" + (f": {_ADVICE[k]}" if k in _ADVICE else "")
        for k, v in h.settings
        if k in mine and mine[k] != v
    ]


def hello_violations(h: m.Hello, o: Options, trainers: dict[int, Client], replicas: dict[int, Replica]) -> list[str]:
    """Return all reasons why this process cannot take part, not only the first."""
    bad = _trainer_violations(h, o, trainers) if h.role == "trainer" else _engine_violations(h, o, replicas)
    bad += differences(h, o)
    replica = replicas.get(h.replica)
    return bad or (_seat_violations(h, replica) if replica is not None else [])


def _trainer_violations(h: m.Hello, o: Options, trainers: dict[int, Client]) -> list[str]:
    bad = []
    if h.size != o.trainers:
        bad.append(f"it says there are {h.size} trainer ranks, trainer 0 says {o.trainers}")
    if h.index >= o.trainers:
        bad.append(f"trainer rank {h.index} of {o.trainers}")
    if h.index in trainers:
        bad.append(f"trainer {h.index} is connected already")
    return bad


def _engine_violations(h: m.Hello, o: Options, replicas: dict[int, Replica]) -> list[str]:
    bad: list[str] = []
    if h.role == "observer":
        return bad
    if not h.size:
        bad.append("its engine says that it has no workers")
    if h.role == "worker" and h.index >= h.size:
        bad.append(
            f"worker {h.index} of {h.size}: an engine that was started as one rank of several is a replica of its own; "
            "install the same xfer where it runs"
        )
    if h.replica not in replicas:
        bad.append(f"replica {h.replica}: trainers expect replicas 0..{o.replicas - 1}; pass replicas= to connect()")
    return bad


def _seat_violations(h: m.Hello, replica: Replica) -> list[str]:
    if h.role == "controller" and replica.controller is not None:
        return [
            f"replica {h.replica} has a controller already ({replica.controller.hello.host}, pid {replica.controller.hello.pid}); each "
            "engine is served with a replica= of its own. The place of one whose host vanished is free within a minute"
        ]
    if h.role != "worker":
        return []
    if replica.controller is None:
        return [f"worker of replica {h.replica} came before its controller"]
    if h.size != replica.size:
        return [f"{h.size} workers, its controller says {replica.size}"]
    return [f"worker {h.index} of replica {h.replica} is connected already"] if h.index in replica.workers else []


class KeyValues:
    """The store in which communicators meet; rendezvous/store.py is the clients' half."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._parked: dict[str, list[tuple[Client, int]]] = defaultdict(list)

    def handle(self, client: Client, msg: m.StoreAsk, replicas: Iterable[int]) -> None:
        """Carry out a call and answer it.

        Args:
            replicas: those whose keys the client may use; of a trainer, all keys.

        Raises:
            ProtocolError: a key is not the client's, or `add` finds no number. It ends the connection.
        """
        prefixes = [""] if client.hello.role == "trainer" else [f"r{i}/" for i in replicas]
        for key in msg.keys:
            m.check_store_key(key, *prefixes)
        values, kind, key = self._values, msg.kind, msg.keys[0]
        if kind is m.StoreCall.CHECK:
            return client.send(m.Reply(msg.call, b"1" if all(k in values for k in msg.keys) else b""))
        if kind is m.StoreCall.GET and key not in values:
            return self._parked[key].append((client, msg.call))
        if kind is m.StoreCall.SET or kind is m.StoreCall.PUT and key not in values:
            self._put(key, msg.value)
        if kind is m.StoreCall.ADD:
            try:
                self._put(key, str(int(values.get(key, b"0")) + int(msg.value)).encode())
            except ValueError:
                raise ProtocolError(f"store key {key!r} does not hold a number, or gets none added") from None
        if kind is not m.StoreCall.SET:
            client.send(m.Reply(msg.call, values[key]))

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for client, call in self._parked.pop(key, ()):
            client.send(m.Reply(call, value))

    def forget(self, prefix: str) -> None:
        """Delete the values of an epoch that is over, and the calls that wait for some: their callers have given up."""
        for some in (self._values, self._parked):
            for key in [k for k in some if k.startswith(prefix)]:
                del some[key]

    def drop(self, client: Client) -> None:
        """Forget what a client that is gone waits for."""
        for key, parked in list(self._parked.items()):
            parked[:] = [p for p in parked if p[0] is not client]
            if not parked:
                del self._parked[key]
