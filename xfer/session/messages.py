"""Every control message, typed. Encoding, size limits and field checks live here; sockets, state and meaning do not.

A message is a tagged `msgspec.Struct`; what does not decode to exactly one of them is a `ProtocolError` and ends the
connection. Nothing is ever unpickled or evaluated. Blobs (catalogs, inventories) are opaque bytes here and are decoded by
their own modules, which check every length again.

Who says what to whom is told by `session/hub.py`; the short version: everyone talks to the hub, the hub talks to everyone.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from xfer.errors import ProtocolError, XferError, from_wire

WIRE_VERSION = 5
MAX_FRAME = 1 << 30
"""Bytes of one control frame; an inventory of a 30 B model's rank is about 1.5 MB."""
MAX_STORE_VALUE = 1 << 16

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Bytes64 = Annotated[int, Meta(ge=0, le=(1 << 62))]
Seconds = Annotated[float, Meta(ge=0.0, lt=1e9)]
Blob = Annotated[bytes, Meta(max_length=MAX_FRAME)]
StoreKey = Annotated[str, Meta(max_length=256)]
StoreValue = Annotated[bytes, Meta(max_length=MAX_STORE_VALUE)]

_STORE_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:\-]{0,255}")


def _plain(text: str) -> str:
    """Any text as one that can be encoded: file names and foreign errors may hold lone surrogates."""
    return text.encode("utf-8", "replace").decode()


class _Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class WireError(Struct, frozen=True, forbid_unknown_fields=True):
    """An `XferError` as plain strings."""

    kind: Name
    message: Text
    violations: Annotated[tuple[Text, ...], Meta(max_length=4096)] = ()
    where: Name = ""

    @classmethod
    def of(cls, error: BaseException, where: str) -> WireError:
        """Foreign exceptions travel as XferError with their class name; texts are cut to what a frame may hold."""
        if isinstance(error, XferError):
            kind, message, violations, at = error.to_wire()
        else:
            kind, message, violations, at = "XferError", f"{type(error).__name__}: {error}", (), ""
        kind, message, at, *violations = (_plain(t) for t in (kind, message, at or where, *violations[:1000]))
        return cls(kind[:256], message[:60000], tuple(v[:8000] for v in violations), at[:256])

    def error(self) -> XferError:
        return from_wire(self.kind, self.message, self.violations, self.where)


# ---- introduction


Holds = Annotated[str, Meta(pattern="^(whole|mix|nothing)$")]
"""Weights of a worker: of one version; of two, after a refit that failed; or only the random ones it was started with."""


class Hello(_Message):
    """First message of every client. `index`: trainer rank, or worker rank inside its replica; 0 for others."""

    wire_version: int
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
    version: Annotated[str, Meta(max_length=256)] = ""  # worker: label of the last refit that it installed


class Welcome(_Message):
    """hub -> client. `drop`: globs of canonical names that no engine needs to take."""

    trainers: Count
    replicas: Count
    drop: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()


class Refused(_Message):
    error: WireError


# ---- layouts and plans


class Specs(_Message):
    """trainer -> hub: canonical tensors that this rank's export touches, as an encoded partial catalog."""

    catalog: Blob


class CatalogMsg(_Message):
    """hub -> trainer, worker: the union over all trainer ranks."""

    catalog: Blob
    generation: Count


class InventoryMsg(_Message):
    inventory: Blob
    generation: Count


class PlanInputs(_Message):
    """hub -> domain: plan this replica from these inventories (joint rank order)."""

    replica: Count
    epoch: Count
    trainers: Annotated[tuple[Blob, ...], Meta(max_length=65536)]
    workers: Annotated[tuple[Blob, ...], Meta(max_length=65536)]
    hosts: Annotated[tuple[Name, ...], Meta(max_length=131072)]
    drop: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    narrow: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    bucket_bytes: Bytes64 = 0
    deadline_s: Seconds = 600.0


class Planned(_Message):
    replica: Count
    epoch: Count
    digest: Name
    seconds: Seconds
    bytes_in: Bytes64 = 0
    bytes_out: Bytes64 = 0


class OpenLink(_Message):
    """hub -> domain: digests agree; open the data link of this epoch, and the routes over it. `fresh` False: the link
    of the last epoch stands, only the routes are opened again, since some rank's storages lie elsewhere now."""

    replica: Count
    epoch: Count
    fresh: bool = True


class LinkOpen(_Message):
    replica: Count
    epoch: Count


class ReplicaReady(_Message):
    """hub -> domain, controller: this replica has a plan and a link. Unless it `holds` one whole version, it may not
    serve before its next commit."""

    replica: Count
    epoch: Count
    digest: Name
    holds: Holds = "whole"
    session_open: bool = False


# ---- one refit


class Prepare(_Message):
    """trainer -> hub: arm the engines early."""

    attempt: Count


class Enter(_Message):
    """trainer -> hub: nccl_xfer_refit() was called with these arguments. Sent before anything that may wait for other
    ranks, so that the hub's deadline runs and its error can say who has not called. `version` empty: the hub numbers it."""

    attempt: Count
    version: Name
    verify: bool
    min_replicas: Count
    deadline_s: Seconds


class Ready(_Message):
    """trainer -> hub: drained and synchronized; my storage holds the version.

    `specs`: only when what this rank exports changed; an inventory then follows the new catalog. `inventory`: only when its
    layout changed, made from the catalog of `generation`.
    """

    attempt: Count
    drained_s: Seconds = 0.0
    specs: Blob = b""
    inventory: Blob = b""
    generation: Count = 0
    rebound: bool = False  # same layout, but what the routes were opened for lies elsewhere now


class Arm(_Message):
    """hub -> controller: stop serving and enter the receive call."""

    attempt: Count
    deadline_s: Seconds


class Armed(_Message):
    """worker -> hub: inside the receive call. `inventory`: empty unless the layout changed."""

    attempt: Count
    inventory: Blob = b""
    generation: Count = 0
    rebound: bool = False


class Go(_Message):
    """hub -> domain: move version `version` now."""

    replica: Count
    attempt: Count
    epoch: Count
    version: Name
    verify: bool
    deadline_s: Seconds


class Progress(_Message):
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


class Done(_Message):
    """domain -> hub: my part of the program has run. From a worker: it reads no trainer's storage any more."""

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


class Drained(_Message):
    """hub -> trainers: nobody of this replica reads your storage in this attempt any more, or its part in it is over
    and nobody will. What your own lane still sends is yours to know."""

    replica: Count
    attempt: Count
    version: Name


class Commit(_Message):
    """hub -> workers, controller: install and serve `version`."""

    replica: Count
    attempt: Count
    version: Name


class Committed(_Message):
    """worker -> hub: the new version lies in live storage, lock released."""

    replica: Count
    attempt: Count


class Abort(_Message):
    """hub -> domain: this attempt (or planning epoch) is over for this replica."""

    replica: Count
    attempt: Count
    epoch: Count
    error: WireError


class Stopped(_Message):
    """worker -> hub, after an abort: nothing of this attempt will be written any more. `dirty`: live bytes were written.
    `drained` False: a kernel of mine may go on reading trainers' storages."""

    replica: Count
    attempt: Count
    dirty: bool
    drained: bool = True


class Settle(_Message):
    """hub -> controller, after an abort: resume when clean, stay paused when dirty."""

    attempt: Count
    dirty: bool
    error: WireError


class Settled(_Message):
    """controller -> hub: the attempt is over on the engine's side. `version`: what it serves now, empty when paused."""

    attempt: Count
    version: Name
    serving: bool
    outage_s: Seconds
    phases: Annotated[tuple[tuple[Name, Seconds], ...], Meta(max_length=32)] = ()


class Failed(_Message):
    """anyone -> hub: I raised. `replica` limits the damage; -1: all replicas."""

    error: WireError
    attempt: Count = 0
    replica: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1


class Reader(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that may still read trainers' storages."""

    label: Name
    host: Name
    pid: Count


class OutcomeMsg(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of one replica in one attempt; seconds on the clocks that `session/report.py` explains."""

    replica: Count
    committed: bool
    serving: bool
    version: Name
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


class Outcome(_Message):
    """hub -> trainers: the attempt is over everywhere. `void`: it was prepared and nobody called in time; a call that
    comes for it goes on with the next number."""

    attempt: Count
    version: Name
    outcomes: Annotated[tuple[OutcomeMsg, ...], Meta(max_length=65536)]
    error: WireError | None = None
    void: bool = False


class Release(_Message):
    """trainer -> hub: my storages are about to be freed; let every worker unmap them. Answered by `Released`."""


class CloseRoutes(_Message):
    """hub -> worker: unmap the trainers' storages. Answered by `RoutesClosed`."""

    replica: Count


class RoutesClosed(_Message):
    replica: Count


class Released(_Message):
    """hub -> trainer: nobody has your storages mapped any more."""


class Leave(_Message):
    """client -> hub: I am going on purpose."""


class Ping(_Message):
    """client -> hub: are you there? Asked only by who has waited past a deadline of the hub's."""


class Pong(_Message):
    """hub -> client, from the thread that decides: what else was due has been sent before it."""


# ---- the store, for communicators that want one


class StoreSet(_Message):
    key: StoreKey
    value: StoreValue


class StoreGet(_Message):
    """Answered when the key exists."""

    call: Count
    key: StoreKey


class StoreAdd(_Message):
    call: Count
    key: StoreKey
    amount: Annotated[int, Meta(gt=-(1 << 31), lt=1 << 31)]


class StoreCheck(_Message):
    call: Count
    keys: Annotated[tuple[StoreKey, ...], Meta(max_length=65536)]


class StoreReply(_Message):
    call: Count
    value: StoreValue = b""
    flag: bool = True


# ---- observers


class StatusAsk(_Message):
    pass


class PartyStatus(Struct, frozen=True, forbid_unknown_fields=True):
    label: Name
    host: Name
    phase: Name
    wave: Count = 0
    bytes_done: Bytes64 = 0
    bytes_planned: Bytes64 = 0


class StatusReply(_Message):
    attempt: Count
    state: Text
    waiting_for: Annotated[tuple[Name, ...], Meta(max_length=65536)]
    parties: Annotated[tuple[PartyStatus, ...], Meta(max_length=131072)]
    versions: Annotated[tuple[tuple[Count, Name], ...], Meta(max_length=65536)] = ()


Message = (
    Hello | Welcome | Refused | Specs | CatalogMsg | InventoryMsg | PlanInputs | Planned | OpenLink | LinkOpen | ReplicaReady
    | Prepare | Enter | Ready | Arm | Armed | Go | Progress | Done | Drained | Commit | Committed | Abort
    | Stopped | Settle | Settled | Failed | Release | CloseRoutes | RoutesClosed | Released
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
