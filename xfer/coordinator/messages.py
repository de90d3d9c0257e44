"""Every control message, typed, and their coding with its size limits. Sockets, state and meaning do not live here; the
messages about layouts and plans are in plan_messages.py, what messages are made of in wire.py.

A message is a tagged `msgspec.Struct`; what does not decode to exactly one of them is a `ProtocolError` and ends the
connection. Nothing is ever unpickled or evaluated. Blobs (catalogs, inventories) are opaque bytes here and are decoded by
their own modules, which check every length again.

Who says what to whom is told by `coordinator/coordinator.py`; in
short, every process talks to the coordinator, and no two others talk to each other.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from xfer.coordinator.plan_messages import (
    CatalogMsg,
    Found,
    Holds,
    InventoryMsg,
    Layout,
    LayoutAsk,
    Layouts,
    LayoutsAsk,
    LinkOpen,
    OpenLink,
    PlanInputs,
    Planned,
    ReplicaReady,
    Roll,
    RollAsk,
    Specs,
)
from xfer.coordinator.wire import (
    MAX_FRAME,
    Blob,
    Bytes64,
    Count,
    Digest,
    Label,
    Name,
    Route,
    Seconds,
    StoreKey,
    StoreValue,
    Text,
    WireError,
    WireMessage,
)
from xfer.errors import ProtocolError

WIRE_VERSION = 18
"""Told in the challenge (channel.py), before any message that another version could not decode."""
_STORE_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:\-]{0,255}")


# ---- introduction


class Hello(WireMessage):
    """First message of every client. `index`: trainer rank, or worker rank inside its replica; 0 for others. `after`: the session
    at this rendezvous that this client left, or that refused it, last. If that session has failed, the client waits for the next one."""

    role: Annotated[str, Meta(pattern="^(trainer|controller|worker|observer)$")]
    index: Count
    size: Count  # ranks on that side: trainer world, or workers of the replica
    replica: Count
    host: Name
    pid: Count
    versions: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=64)] = ()
    settings: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=64)] = ()
    holds: Holds = "whole"  # worker
    session_open: bool = False  # worker: an earlier controller opened an update that it did not finish
    version: Label = None  # worker: label of the last refit that it installed
    after: Name = ""


class Welcome(WireMessage):
    """coordinator -> client. `drop`: globs of canonical names that no engine needs to take. `site`: who sits where on which links
    (plan/fabric.py), empty when not known. `route`: "packed" when whole tensors travel in buckets (xfer/packed). `session`: this one's
    name, for timelines; later ones sort behind it as far as clocks agree."""

    trainers: Count
    replicas: Count
    drop: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    site: Blob = b""
    route: Route = "direct"
    session: Name = ""


class Refused(WireMessage):
    """coordinator -> client. `session`: the one that refuses; set in an answer to a hello."""

    error: WireError
    session: Name = ""


class DialAgain(WireMessage):
    """coordinator -> client, in answer to its hello: you have left this session, and it has failed. Dial again for the next one."""


# ---- one refit


class Prepare(WireMessage):
    """trainer -> coordinator: arm the engines early."""

    attempt: Count


class Enter(WireMessage):
    """trainer -> coordinator: nccl_xfer_refit() was called with these arguments. Sent before anything that may wait for other
    ranks, so that the coordinator's deadline runs and its error can say who has not called. `version` None: the coordinator numbers it."""

    attempt: Count
    version: Label
    verify: bool
    min_replicas: Count
    deadline_s: Seconds


class Ready(WireMessage):
    """trainer -> coordinator: drained and synchronized; my storage holds the version.

    `specs`: only when what this rank exports changed; an inventory then follows the new catalog. `inventory`: only when its
    layout changed, made from the catalog of `generation`. `sample`: until a version is committed, digests of some elements of each
    box, which numbers tensors by that catalog (holders.py). `sends`: whether what it sends has changed since its last call, as far
    as it knows; `unsent`: some tensors that train, have changed since then and are not sent (unsent.py).
    """

    attempt: Count
    drained_s: Seconds = 0.0
    specs: Blob = b""
    inventory: Digest = b""
    generation: Count = 0
    rebound: bool = False  # same layout, but what the routes were opened for lies elsewhere now
    broken: Annotated[
        tuple[Count, ...], Meta(max_length=1 << 16)
    ] = ()  # replicas whose link this rank gave up by itself
    sample: Blob = b""
    sends: bool = True
    unsent: Annotated[tuple[Text, ...], Meta(max_length=8)] = ()


class Arm(WireMessage):
    """coordinator -> controller: stop serving and enter the receive call."""

    attempt: Count
    deadline_s: Seconds


class Armed(WireMessage):
    """worker -> coordinator: inside the receive call. `inventory`: empty unless the layout changed. `unread`: why no
    layout could be made from
    the catalog of `generation`; the trainers may bring a newer one with this very attempt. `in_step`: the replica has data-parallel
    ranks, which wait for one another in every step."""

    attempt: Count
    inventory: Digest = b""
    generation: Count = 0
    rebound: bool = False
    unread: WireError | None = None
    in_step: bool = False


class CallAgain(WireMessage):
    """coordinator -> armed worker: return from the update call; nothing of this attempt comes to you in it. coordinator
    -> controller: pause the engine once more, and call update again."""

    attempt: Count


class Go(WireMessage):
    """coordinator -> domain: move version `version` now. `together`: replicas that are fed from one gather of the trainers'
    weights (packed route); those of one attempt get equal lists, in which each replica stands once. `tells`: the workers
    say `Brought`, since others read from them."""

    replica: Count
    attempt: Count
    epoch: Count
    version: Label
    verify: bool
    deadline_s: Seconds
    together: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()
    tells: bool = False


class Brought(WireMessage):
    """worker -> coordinator: of what I pull in this attempt, all parts up to `part` are here. coordinator -> worker of
    the replica that follows: they are there for you to read. `replica`: the one whose worker says or hears it."""

    replica: Count
    attempt: Count
    part: Count


class Progress(WireMessage):
    replica: Count
    attempt: Count
    phase: Name
    wave: Count
    bytes_done: Bytes64
    bytes_planned: Bytes64


class Checksum(Struct, frozen=True, forbid_unknown_fields=True):
    """Sum over the bytes that go to worker `worker`, mod 2**64."""

    worker: Count
    value: Annotated[bytes, Meta(min_length=8, max_length=8)]


class RouteBytes(Struct, frozen=True, forbid_unknown_fields=True):
    """What one route brought, and how long that took; routes run beside each other."""

    route: Name
    nbytes: Bytes64
    seconds: Seconds


class Done(WireMessage):
    """domain -> coordinator: my part of the program has run. From a worker: it reads no trainer's storage any more. `held`: of a trainer
    in a verified refit, digests of what other trainers hold too (holders.py)."""

    replica: Count
    attempt: Count
    bytes_in: Bytes64
    bytes_out: Bytes64
    pack_s: Seconds
    wire_s: Seconds
    unpack_s: Seconds
    verify_s: Seconds = 0.0
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=65536)] = ()
    routes: Annotated[tuple[RouteBytes, ...], Meta(max_length=8)] = ()
    held: Blob = b""


class Drained(WireMessage):
    """coordinator -> trainers: nobody of this replica reads your storage in this attempt any more, or its part in it is over
    and nobody will. What your own lane still sends is yours to know."""

    replica: Count
    attempt: Count
    version: Label


class Commit(WireMessage):
    """coordinator -> workers, controller: install and serve `version`."""

    replica: Count
    attempt: Count
    version: Label


class Decided(WireMessage):
    """coordinator -> controller: workers were told to install. The update call is about to return; what follows it may be done
    meanwhile, but nothing served before `Commit` says that all of them did."""

    attempt: Count


class Committed(WireMessage):
    """worker -> coordinator: the new version lies in live storage, lock released."""

    replica: Count
    attempt: Count


class Abort(WireMessage):
    """coordinator -> domain: this attempt (or planning epoch) is over for this replica."""

    replica: Count
    attempt: Count
    epoch: Count
    error: WireError


class Stopped(WireMessage):
    """worker -> coordinator, after an abort: nothing of this attempt will be written any more. `dirty`: live bytes were written.
    `drained` False: a kernel of mine may go on reading trainers' storages."""

    replica: Count
    attempt: Count
    dirty: bool
    drained: bool = True


class Settle(WireMessage):
    """coordinator -> controller, after an abort: resume when clean, stay paused when dirty."""

    attempt: Count
    dirty: bool
    error: WireError


class Settled(WireMessage):
    """controller -> coordinator: the attempt is over on the engine's side. `version`: what it serves now, None when paused."""

    attempt: Count
    version: Label
    serving: bool
    outage_s: Seconds
    phases: Annotated[tuple[tuple[Name, Seconds], ...], Meta(max_length=32)] = ()


class Failed(WireMessage):
    """anyone -> coordinator: I raised. `replica` limits the damage; -1: all replicas. `epoch`: of the plan, link or go that a lane was at;
    0 from whoever was at none. coordinator -> anyone: this is why."""

    error: WireError
    attempt: Count = 0
    replica: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    epoch: Count = 0
    left: bool = False  # from the coordinator: the process that this is about left on purpose

    def ends(self, wait: bool) -> bool:
        """A trainer's connect. A replica that fails early is left out like one that fails later, if not all are waited for."""
        return wait or self.replica < 0


class Reader(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that may still read trainers' storages."""

    label: Name
    host: Name
    pid: Count


class OutcomeMsg(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of one replica in one attempt; seconds on the clocks that `participants/report.py` explains."""

    replica: Count
    committed: bool
    serving: bool
    version: Label
    transfer_s: Seconds = 0.0
    outage_s: Seconds = 0.0
    bytes_moved: Bytes64 = 0
    bytes_per_worker: Annotated[tuple[Bytes64, ...], Meta(max_length=65536)] = ()
    phases: Annotated[tuple[tuple[Name, Seconds], ...], Meta(max_length=64)] = ()
    verified: bool = False
    dirty: bool = False
    error: WireError | None = None
    routes: Annotated[tuple[RouteBytes, ...], Meta(max_length=8)] = ()
    readers: Annotated[tuple[Reader, ...], Meta(max_length=65536)] = ()  # began and never said that they ended


class Outcome(WireMessage):
    """coordinator -> trainers: the attempt is over everywhere. `void`: it was prepared and nobody called in time; a call that
    comes for it goes on with the next number."""

    attempt: Count
    version: Label
    outcomes: Annotated[tuple[OutcomeMsg, ...], Meta(max_length=65536)]
    error: WireError | None = None
    void: bool = False


class Release(WireMessage):
    """trainer -> coordinator: my storages are about to be freed; let everyone unmap them. Answered by `Released`, with the same number,
    which no other of this trainer's has: an answer to one that was given up may come when routes are open again."""

    number: Count


class CloseRoutes(WireMessage):
    """coordinator -> worker, by the packed route trainers too: unmap the trainers' storages. Answered by `RoutesClosed`."""

    replica: Count


class RoutesClosed(WireMessage):
    replica: Count


class Released(WireMessage):
    """coordinator -> trainer: nobody has your storages mapped any more."""

    number: Count


class Leave(WireMessage):
    """client -> coordinator: I am going on purpose."""


class Ping(WireMessage):
    """client -> coordinator: are you there? Asked only by who has waited past a deadline of the coordinator's."""


class Pong(WireMessage):
    """coordinator -> client, from the thread that decides: what else was due has been sent before it."""


# ---- the store, for communicators that want one


class StoreSet(WireMessage):
    key: StoreKey
    value: StoreValue


class StoreGet(WireMessage):
    """Answered when the key exists."""

    call: Count
    key: StoreKey


class StoreAdd(WireMessage):
    call: Count
    key: StoreKey
    amount: Annotated[int, Meta(gt=-(1 << 31), lt=1 << 31)]


class StoreCheck(WireMessage):
    call: Count
    keys: Annotated[tuple[StoreKey, ...], Meta(max_length=65536)]


class StoreReply(WireMessage):
    call: Count
    value: StoreValue = b""
    flag: bool = True


# ---- observers


class StatusAsk(WireMessage):
    pass


class PartyStatus(Struct, frozen=True, forbid_unknown_fields=True):
    label: Name
    host: Name
    phase: Name
    wave: Count = 0
    bytes_done: Bytes64 = 0
    bytes_planned: Bytes64 = 0


class StatusReply(WireMessage):
    attempt: Count
    state: Text
    waiting_for: Annotated[tuple[Name, ...], Meta(max_length=65536)]
    parties: Annotated[tuple[PartyStatus, ...], Meta(max_length=131072)]
    versions: Annotated[tuple[tuple[Count, Label], ...], Meta(max_length=65536)] = ()


Message = (
    Hello | Welcome | Refused | DialAgain | Specs | CatalogMsg | InventoryMsg | RollAsk | Roll | LayoutsAsk | Layouts | LayoutAsk | Layout
    | PlanInputs | Planned | OpenLink | LinkOpen | Found | ReplicaReady
    | Prepare | Enter | Ready | Arm | Armed | CallAgain | Go | Brought | Progress | Done | Drained | Commit | Decided | Committed
    | Abort | Stopped | Settle | Settled | Failed | Release | CloseRoutes | RoutesClosed | Released
    | Outcome | Leave | Ping | Pong | StoreSet | StoreGet | StoreAdd | StoreCheck | StoreReply | StatusAsk | StatusReply
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


CHECKED_BYTES = 1 << 20
"""Messages up to this size are checked by whoever sends them. Longer ones are inventories, whose makers check them."""


def encode(message: Message) -> bytes:
    """ProtocolError for what the other end would have to refuse: a mistake here must not look like an attack there."""
    try:
        data = _encoder.encode(message)
        if len(data) <= CHECKED_BYTES:
            _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, TypeError) as e:
        raise ProtocolError(f"{type(message).__name__} cannot be sent: {e}"[:500]) from None
    if len(data) > MAX_FRAME:
        raise ProtocolError(
            f"{type(message).__name__} of {len(data)} bytes is over the {MAX_FRAME} bytes that a frame may have"
        )
    return data


def decode(data: bytes) -> Message:
    """Raises ProtocolError for whatever is not exactly one message; never anything else."""
    try:
        return _decoder.decode(data)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        UnicodeDecodeError,
        RecursionError,
        OverflowError,
        ValueError,
    ) as e:
        raise ProtocolError(f"malformed control message of {len(data)} bytes: {e}"[:500]) from None


def check_store_key(key: str, prefix: str) -> None:
    """A client may only touch the keys of its own domain's prefix; anything else is a ProtocolError."""
    if not _STORE_KEY.fullmatch(key) or ".." in key:
        raise ProtocolError(f"store key {key[:80]!r} has characters or a length that are not allowed")
    if not key.startswith(prefix):
        raise ProtocolError(f"store key {key[:80]!r} is outside this client's prefix {prefix!r}")
