"""All control messages: their fields with limits, and their coding.

A message is a tagged `msgspec.Struct` that travels as a msgpack array: the class name, then the fields. Bytes that do not
decode to exactly one message raise `ProtocolError`, and the connection ends. Nothing is unpickled or evaluated. Catalogs
and layouts are opaque bytes here; their own modules decode them and check every length again.

Every process talks to the coordinator only. The docstring of a message begins with its sender and its receiver, and speaks as the
sender; "ranks" are those of one replica's domain. `_RULES` in coordinator.py has the roles that may send each message.

A job has many pairs of a trainer and a replica, so messages of the hot path name several replicas at once (`Go`, `Done`,
`Drained`): their number grows with the number of ranks, not with the number of pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from xfer.errors import ProtocolError, XferError, from_wire
from xfer.plan.explain import size

WIRE_VERSION = 29
"""Sent in the challenge (rendezvous/channel.py), before any message that another version could not decode."""
MAX_FRAME = 1 << 30
"""Bytes of one control frame. All layouts of a thousand ranks take well below 1 MB."""
FIRST_COPIES = 1 << 30
"""Attempts from this number on are first copies (first_copy.py); refits are numbered from 1."""
CHECKED_BYTES = 1 << 20
"""The sender checks messages up to this size. Longer ones carry layouts, which are checked where they are made."""

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Label = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] | Name | None
"""A version as its caller named it: a number stays a number. None: no version."""
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=1 << 16)]
Bytes64 = Annotated[int, Meta(ge=0, le=(1 << 62))]
Seconds = Annotated[float, Meta(ge=0.0, lt=1e9)]
Blob = Annotated[bytes, Meta(max_length=MAX_FRAME)]
Digest = Annotated[bytes, Meta(max_length=32)]
"""Digest of a layout or of a roll: 32 hexadecimal digits; empty for none."""
Holds = Annotated[str, Meta(pattern="^(whole|mix|nothing)$")]
"""Weights of a worker: of one version; of two versions, after a failed refit; or only the random ones of its start."""
StoreKey = Annotated[str, Meta(max_length=256)]
StoreValue = Annotated[bytes, Meta(max_length=1 << 16)]
_STORE_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:\-]{0,255}")


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the structs inside messages."""


class WireMessage(Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. The tag is the class name."""


def _plain(text: str) -> str:
    """Return `text` without lone surrogates, which file names and foreign errors may hold and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


class WireError(Record, frozen=True):
    """An `XferError` as plain strings."""

    kind: Name
    message: Text
    violations: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    where: Name = ""

    @classmethod
    def of(cls, error: BaseException, where: str = "rendezvous") -> WireError:
        """Encode an error. A foreign exception becomes an XferError that names its class. Long texts are cut. `where`: the process, unless
        the error names one."""
        if not isinstance(error, XferError):
            error = XferError(f"{type(error).__name__}: {error}")
        kind, message, violations, at = error.to_wire()
        kind, message, at, *lines = (_plain(t) for t in (kind, message, at or where, *violations))
        return cls(kind[:256], message[:60000], tuple(v[:8000] for v in lines), at[:256])

    def error(self) -> XferError:
        return from_wire(self.kind, self.message, self.violations, self.where)


# ---- introduction


class Hello(WireMessage, frozen=True):
    """Client -> coordinator: the first message of every client. It is answered by `Welcome` or `Refused`, or by the end of the
    connection: dial again, for the next session.

    `index`: trainer rank, or worker rank inside its replica. `size`: number of trainer ranks, or of workers of the replica. `settings`:
    must be equal to those of trainer 0 where both have a key. `after`: the last session at this rendezvous that this client left or
    that refused it. If that session has failed, the client waits for the next one.
    """

    role: Annotated[str, Meta(pattern="^(trainer|controller|worker|observer)$")]
    index: Count
    size: Count
    replica: Count
    host: Name
    pid: Count
    settings: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=64)] = ()
    holds: Holds = "whole"  # worker
    session_open: bool = False  # worker: an earlier controller opened an update and did not finish it
    paused: bool = False  # worker: see `Paused`
    version: Label = None  # worker: label of the last refit that it installed
    after: Name = ""

    @property
    def label(self) -> str:
        """Name of this process in errors and logs."""
        if self.role in ("trainer", "observer"):
            return f"trainer {self.index}" if self.role == "trainer" else "observer"
        return f"replica {self.replica} {self.role}" + (f" {self.index}" if self.role == "worker" else "")


class Welcome(WireMessage, frozen=True):
    """Coordinator -> client: the hello is accepted.

    `drop`: globs of checkpoint tensors that no engine takes. `site`: hosts and links (plan/fabric.py), empty if unknown.
    `session`: name of the session for timelines; later sessions sort behind it as far as clocks agree. `hold_s`: seconds for
    which a rank may hold back a `Done` so that it travels with others.
    """

    trainers: Count
    replicas: Count
    drop: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    site: Blob = b""
    route: Name = "direct"
    session: Name = ""
    hold_s: Seconds = 0.0


class Refused(WireMessage, frozen=True):
    """Coordinator -> client: this process cannot take part. `session`: the session that refuses a hello."""

    error: WireError
    session: Name = ""


class Leave(WireMessage, frozen=True):
    """Client -> coordinator: I leave on purpose."""


class Reply(WireMessage, frozen=True):
    """Coordinator -> client: the answer to the client's message of this number.

    Messages that need an answer have a number, in the field `call` (rendezvous/client.py). The number of a caller that gives up is not
    used again, so a late answer does not reach a later question.
    """

    call: Count
    value: Blob = b""


class Ping(WireMessage, frozen=True):
    """Client -> coordinator: are you alive? Everything that was due to this client before is sent before the answer."""

    call: Count


# ---- layouts, plans and links (layouts.py and planning.py tell the order)


class Specs(WireMessage, frozen=True):
    """Trainer -> coordinator: the checkpoint tensors that this rank exports, as an encoded partial catalog. A catalog follows, once all
    trainers have told theirs or, if the exports have changed, are ready.

    Worker -> coordinator, in place of its inventory: the tensors that its engine needs derived (trace/derived.py) and that the
    catalog lacks. A new catalog follows.
    """

    catalog: Blob


class CatalogMsg(WireMessage, frozen=True):
    """Coordinator -> trainers, workers: the union of the specs of all trainers."""

    catalog: Blob
    generation: Count


class InventoryMsg(WireMessage, frozen=True):
    """Trainer or worker -> coordinator: the digest of its layout, made from the catalog of `generation`. It follows each catalog, and
    precedes `Ready` or `Armed` where the layout has changed since. Ranks that need the layout ask for it."""

    inventory: Digest
    generation: Count


class Fetch(WireMessage, frozen=True):
    """Rank -> coordinator: send me the rolls or layouts with these digests. Answered by all of them in this order (layouts.py)."""

    call: Count
    digests: Annotated[tuple[Digest, ...], Meta(max_length=65536)]


class LayoutAsk(WireMessage, frozen=True):
    """Coordinator -> one rank that announced this layout: send it."""

    inventory: Digest


class Layout(WireMessage, frozen=True):
    """Trainer or worker -> coordinator: the layout that was asked for (layouts.py)."""

    inventory: Digest
    packed: Blob


class PlanInputs(WireMessage, frozen=True):
    """Coordinator -> ranks: plan this replica from the layouts that two rolls name.

    `turn`: the place of this replica among `replicas` where sources take turns. Replicas of one layout have the same one if they
    hand bytes on to each other. `sources`: number of ranks that have the weights. `donor`: the replica whose workers these are; their
    roll then takes the place of the trainers'. -1: the trainers. `relay`: workers of one host hand common bytes on.
    """

    replica: Count
    epoch: Count
    trainers: Digest
    workers: Digest
    turn: Count = 0
    replicas: Count = 0
    drop: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    narrow: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    bucket_bytes: Bytes64 = 0
    deadline_s: Seconds = 600.0
    sources: Count = 0
    donor: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    relay: bool = False


class Planned(WireMessage, frozen=True):
    """Rank -> coordinator: my plan has this digest."""

    replica: Count
    epoch: Count
    digest: Name


class OpenLink(WireMessage, frozen=True):
    """Coordinator -> ranks: all digests agree. Open the data link of this epoch and the routes over it.

    `fresh` False: the last link stays open, and only the routes are opened again, since storages moved. `workers`: number of the
    replica's workers, for ranks that made no plan (packed route). `host_pull`, `rdma`: workers read host memory by the kernel, or by
    NIXL. `relay`: replicas of one layout hand bytes on to each other. `hands`, to a worker: for each share of its bytes the
    `LinkOpen.hand` of the same worker of the replica that brings the share; empty for the share that it brings itself. `scratch`, for
    workers: bytes come into scratch of at most this many bytes; None: into live storage.
    """

    replica: Count
    epoch: Count
    fresh: bool = True
    workers: Count = 0
    host_pull: bool = False
    relay: bool = False
    rdma: bool = False
    hands: Annotated[tuple[Blob, ...], Meta(max_length=4096)] = ()
    scratch: Bytes64 | None = None


class LinkOpen(WireMessage, frozen=True):
    """Rank -> coordinator: my link and routes are open.

    From a worker of replicas that hand bytes on: `hand`, the storages that others may read (a `Handover`, transport/relay_place.py);
    `follows`, whether it reads from others; `receives`, whether it pulls nothing from trainers.
    """

    replica: Count
    epoch: Count
    hand: Blob = b""
    follows: bool = False
    receives: bool = False


class Found(WireMessage, frozen=True):
    """Coordinator -> controller: the state of your engine, from the hellos of the workers that have come so far.

    Unless it `holds` one whole version, the engine may not serve before its next commit, even if it does not join.
    """

    workers: Count = 0
    holds: Holds = "whole"
    session_open: bool = False
    paused: bool = False


class ReplicaReady(WireMessage, frozen=True):
    """Coordinator -> ranks, controller: this replica takes part in refits from now on.

    It has a plan and a link, unless there was nothing to link to or its plan is of an older layout. Then the next refit
    plans and links.
    """

    replica: Count


# ---- one refit


class Prepare(WireMessage, frozen=True):
    """Trainer -> coordinator: arm the engines early."""

    attempt: Count


class Arguments(Record, frozen=True):
    """The arguments of a call of nccl_xfer_refit(). They must be equal on all trainers.

    `version` None: the coordinator numbers the version. `delta`: send only changed elements, if they are less. `at_once`: most replicas
    that are out of service at the same time; 0: all. `scratch`: bytes come into scratch of at most this many bytes per worker while
    engines serve; None: into live storage.
    """

    version: Label = None
    verify: bool = False
    min_replicas: Count = 0
    deadline_s: Seconds = 600.0
    delta: bool = False
    at_once: Count = 0
    scratch: Bytes64 | None = None


class Enter(WireMessage, frozen=True):
    """Trainer -> coordinator: nccl_xfer_refit() was called with these arguments.

    It is sent before anything that may wait for other ranks, so that the coordinator's deadline runs and its error can name
    the ranks that have not called. `holds`: this rank's weights stay as they are until the outcome.
    """

    attempt: Count
    asked: Arguments
    holds: bool = True


class Ready(WireMessage, frozen=True):
    """Trainer -> coordinator: my gathers have ended and my storages hold the version.

    `rebound`: same layout, but storages that routes were opened for lie elsewhere now. `broken`: replicas whose link this rank gave up
    by itself. `sample`: until a version is committed, digests of some elements of each box, which number tensors by the catalog
    of `generation` (exports.py). `sends`: whether the bytes that this rank sends have changed since its last call, as far as it knows.
    `unsent`: some tensors that are trained, have changed and are not sent.
    """

    attempt: Count
    drained_s: Seconds = 0.0
    generation: Count = 0
    rebound: bool = False
    broken: Counts = ()
    sample: Blob = b""
    sends: bool = True
    unsent: Annotated[tuple[Text, ...], Meta(max_length=8)] = ()


class Measured(WireMessage, frozen=True):
    """Trainer -> coordinator: the largest absolute values of my parts of blocks of which other trainers have parts, too.

    It comes before `Ready`, or before `InventoryMsg` where a new catalog asks for other blocks. `blocks`: their numbers in the
    catalog of `generation` (trace/catalog.py). `largest`: the bits of a float32 for each. Both are uint32, little-endian.
    Answered by `largest` over all trainers that have parts of these blocks.
    """

    call: Count
    attempt: Count
    generation: Count
    blocks: Blob
    largest: Blob


class Arm(WireMessage, frozen=True):
    """Coordinator -> controller: pause the engine and make its workers enter the receive call."""

    attempt: Count
    deadline_s: Seconds


class Paused(WireMessage, frozen=True):
    """Coordinator -> worker 0: your controller was told to pause the engine; or, not `paused`, it said that the engine serves again.

    The worker keeps this for the next controller: xfer has paused this engine, whatever its label is.
    """

    paused: bool


class Armed(WireMessage, frozen=True):
    """Worker -> coordinator: I am inside the receive call.

    `rebound`: same layout at other addresses. `unread`: why no layout could be made from the catalog of `generation`;
    the trainers may bring a newer catalog in this refit. `in_step`: the replica has data-parallel ranks, which wait for each
    other in every step. `base`: the refit by changes whose bytes I hold, all of them and unchanged since; 0: none.
    `staged`: all bytes of this refit are in my scratch, and fit the storages that I have now.
    """

    attempt: Count
    generation: Count = 0
    rebound: bool = False
    unread: WireError | None = None
    in_step: bool = False
    base: Count = 0
    staged: bool = False


class CallAgain(WireMessage, frozen=True):
    """Coordinator -> armed worker: return from the update call; nothing of this refit comes to you in it.

    Coordinator -> controller: pause the engine once more and call update again.
    """

    attempt: Count


class GoKind(Enum):
    """The task of a worker in a `Go`: bring all bytes into live storage (MOVE), bring them into scratch while the engine serves (STAGE), or
    bring the bytes in scratch into live storage (APPLY)."""

    MOVE = "move"
    STAGE = "stage"
    APPLY = "apply"


class Go(WireMessage, frozen=True):
    """Coordinator -> ranks: move version `version` to these replicas now. A rank gets one `Go` for all replicas that begin together.

    `epochs`: the epoch of each link, in the order of `replicas`. `together`, to trainers on the packed route: the replicas that are fed
    from one gather of the weights. `tells`, to workers: send `PartReady`, since others read from you. `bases`, in a delta: for each
    replica, the refit whose bytes all of its workers hold; 0: none. `kind`: for workers; trainers send the same bytes for MOVE and STAGE.
    """

    attempt: Count
    replicas: Counts
    epochs: Counts
    version: Label
    verify: bool
    deadline_s: Seconds
    together: Counts = ()
    tells: bool = False
    bases: Counts = ()
    kind: GoKind = GoKind.MOVE

    @property
    def base(self) -> int:
        """The base of the only replica of a Go that `each` returned; 0 if there is none."""
        return self.bases[0] if self.bases else 0

    @property
    def epoch(self) -> int:
        """The epoch of the only replica of a Go that `each` returned."""
        return self.epochs[0]

    def each(self) -> Iterator[tuple[int, Go]]:
        """Yield each replica, and the Go for its lane, which names no other replica."""
        if len(self.replicas) == 1:
            yield self.replicas[0], self
            return
        for k, replica in enumerate(self.replicas):
            bases = self.bases[k : k + 1]
            yield (
                replica,
                msgspec.structs.replace(self, replicas=(replica,), epochs=self.epochs[k : k + 1], bases=bases),
            )


class PartReady(WireMessage, frozen=True):
    """Worker -> coordinator: of the bytes that other replicas read from me in this refit, all parts up to `part` are here.

    Coordinator -> worker: all workers from which you read have them. `replica`: the replica of the worker that sends or receives it.
    """

    replica: Count
    attempt: Count
    part: Count


class Progress(WireMessage, frozen=True):
    """Trainer or worker -> coordinator: progress of a transfer, for `xfer status` and timeout errors."""

    replica: Count
    attempt: Count
    wave: Count
    bytes_done: Bytes64
    bytes_planned: Bytes64


class Checksum(Record, frozen=True):
    """Sum over the bytes that go to worker `worker`, mod 2**64, little-endian."""

    worker: Count
    value: Annotated[bytes, Meta(min_length=8, max_length=8)]

    @classmethod
    def of(cls, worker: int, total: int) -> Checksum:
        return cls(worker, (total % (1 << 64)).to_bytes(8, "little"))

    @property
    def total(self) -> int:
        return int.from_bytes(self.value, "little")


class RouteTaken(Record, frozen=True):
    """The bytes that one route brought. Routes run concurrently.

    Attributes:
        route: "peer", "rdma", "nccl", "gloo", "relay" or "packed".
        bytes: Bytes of all workers.
        seconds: Seconds of the slowest worker.
    """

    route: Name
    bytes: Bytes64
    seconds: Seconds

    def __str__(self) -> str:
        rate = f" at {self.bytes / self.seconds / 1e9:.1f} GB/s" if self.seconds else ""
        return f"{self.route}: {self.bytes:,} bytes in {self.seconds * 1e3:.2f} ms{rate}"


class Moved(Record, frozen=True):
    """One rank's work for one replica in a refit. Times are wall seconds.

    `held`, of a trainer in a verified refit: digests of bytes that other trainers hold too (exports.py). `apply_s`: seconds in which a
    worker brought bytes from its scratch into live storage. `scratch_bytes`: bytes of that scratch.
    """

    replica: Count
    bytes_in: Bytes64 = 0
    bytes_out: Bytes64 = 0
    pack_s: Seconds = 0.0
    wire_s: Seconds = 0.0
    unpack_s: Seconds = 0.0
    verify_s: Seconds = 0.0
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=65536)] = ()
    routes: Annotated[tuple[RouteTaken, ...], Meta(max_length=8)] = ()
    held: Blob = b""
    apply_s: Seconds = 0.0
    scratch_bytes: Bytes64 = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to report: no bytes, no digests, and less than a millisecond."""
        some = self.bytes_in or self.bytes_out or self.checksums or self.routes or self.held or self.scratch_bytes
        return not some and self.pack_s + self.wire_s + self.unpack_s + self.verify_s < 1e-3


class Done(WireMessage, frozen=True):
    """Rank -> coordinator: my part for these replicas is done. A worker reads no storage of a trainer any more.

    `moved`: an entry for each of the replicas for which there is something to report.
    """

    attempt: Count
    replicas: Counts
    moved: Annotated[tuple[Moved, ...], Meta(max_length=65536)] = ()


class Drained(WireMessage, frozen=True):
    """Coordinator -> trainers: no worker of these replicas reads your storages in this refit any more, or will.

    It says nothing about bytes that the trainer's own lanes still send.
    """

    attempt: Count
    version: Label
    replicas: Counts


class Commit(WireMessage, frozen=True):
    """Coordinator -> workers: install `version`.

    Coordinator -> controller: workers were told so. The update call is about to return, and the controller may prepare what follows it.
    It may serve only after `Settle`.
    """

    replica: Count
    attempt: Count
    version: Label


class Committed(WireMessage, frozen=True):
    """Worker -> coordinator: the new version lies in live storage, and the lock is released."""

    replica: Count
    attempt: Count


class Abort(WireMessage, frozen=True):
    """Coordinator -> ranks: this refit, or planning epoch, is over for this replica because of `error`."""

    replica: Count
    attempt: Count
    epoch: Count
    error: WireError


class Stopped(WireMessage, frozen=True):
    """Worker -> coordinator, after an abort, or when it has failed to stage: nothing of this refit will be written any more.

    `dirty`: bytes of live storage were written. `drained` False: a kernel of mine may go on reading trainers' storages.
    """

    replica: Count
    attempt: Count
    dirty: bool
    drained: bool = True


class Settle(WireMessage, frozen=True):
    """Coordinator -> controller: bring the engine back. Without an `error` all workers have installed `version`: serve it. After an
    abort, resume if clean, stay paused if dirty."""

    attempt: Count
    version: Label
    dirty: bool = False
    error: WireError | None = None


class Settled(WireMessage, frozen=True):
    """Controller -> coordinator: the refit is over for the engine. `version`: what it serves now, None if it is paused.

    `attempt` 0: the engine serves again that an earlier controller had left paused.
    """

    attempt: Count
    version: Label
    serving: bool
    outage_s: Seconds
    phases: Annotated[tuple[tuple[Name, Seconds], ...], Meta(max_length=32)] = ()


class Failed(WireMessage, frozen=True):
    """Any process -> coordinator: I raised `error`. Coordinator -> any process: `error` is the reason.

    `replica`: the only replica that is concerned; -1 for all. `epoch`: that of the plan, link or Go on which a lane worked; 0 if
    none. `left`, from the coordinator: a trainer left on purpose.
    """

    error: WireError
    attempt: Count = 0
    replica: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    epoch: Count = 0
    left: bool = False

    def ends(self, wait: bool) -> bool:
        """Whether a trainer's connect() ends with this error. With `wait` False, it does not end if a single replica fails."""
        return wait or self.replica < 0


class Reader(Record, frozen=True):
    """A worker that may still read trainers' storages."""

    label: Name
    host: Name
    pid: Count


class ReplicaOutcome(Record, frozen=True):
    """The outcome of a refit on one replica.

    Attributes:
        replica: Its number.
        committed: Whether it committed this refit.
        serving: Whether its engine serves.
        version: The version that it serves now; None if it serves nothing.
        transfer_s: Seconds on the transfer clock (report.py).
        outage_s: Seconds on the outage clock.
        bytes_moved: Bytes that all its workers received.
        bytes_per_worker: The same by worker.
        phases: (name, seconds) of the calls to its engine.
        verified: Whether checksums were compared and equal.
        dirty: Whether it holds bytes of two versions.
        failure: The encoded `error`.
        routes: Bytes by route.
        readers: Workers that began to read trainers' storages and have not told the end.
        scratch_bytes: Bytes of scratch that all its workers hold for staged refits.
    """

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
    failure: WireError | None = None
    routes: Annotated[tuple[RouteTaken, ...], Meta(max_length=8)] = ()
    readers: Annotated[tuple[Reader, ...], Meta(max_length=65536)] = ()
    scratch_bytes: Bytes64 = 0

    @property
    def error(self) -> XferError | None:
        """Why it did not commit; None if it did."""
        return self.failure.error() if self.failure is not None else None

    def __str__(self) -> str:
        serves = "serves nothing" if self.version is None else f"serves version {self.version!r}"
        moved = f"{size(self.bytes_moved)} in {self.transfer_s * 1e3:.1f} ms, outage {self.outage_s * 1e3:.1f} ms"
        if not self.committed:
            moved = "unknown why" if self.error is None else self.error.line()
        verified = ", verified" if self.verified else ""
        return (
            f"replica {self.replica} {'committed' if self.committed else 'did not commit'}, {serves}: {moved}{verified}"
        )

    def __repr__(self) -> str:
        return f"<ReplicaOutcome: {self}>"


class Outcome(WireMessage, frozen=True):
    """Coordinator -> trainers: the refit is over everywhere.

    `void`: it was prepared and no trainer called in time; a later call for it goes on with the next number.
    """

    attempt: Count
    version: Label
    outcomes: Annotated[tuple[ReplicaOutcome, ...], Meta(max_length=65536)]
    error: WireError | None = None
    void: bool = False


class Release(WireMessage, frozen=True):
    """Trainer -> coordinator: my storages are about to be freed; make every process unmap them. Answered when none has them mapped."""

    call: Count


class CloseRoutes(WireMessage, frozen=True):
    """Coordinator -> worker, and trainer on the packed route: unmap the trainers' storages. Answered by `RoutesClosed`.

    `link`, to workers of a donor and of the replica to which it gave weights: close the routes and the link between you. Not answered.
    """

    replica: Count
    link: bool = False


class RoutesClosed(WireMessage, frozen=True):
    """Rank -> coordinator: the storages are unmapped, as `CloseRoutes` asked."""

    replica: Count


# ---- the store in which communicators meet


class StoreCall(Enum):
    """A call of the store. All but SET are answered."""

    SET = "set"
    GET = "get"  # answered with the value, when the key exists
    ADD = "add"  # a number, as text; answered with the sum
    PUT = "put"  # sets a key that does not exist; answered with the value that it then has
    CHECK = "check"  # answered by "1" if all keys exist, else by nothing


class StoreAsk(WireMessage, frozen=True):
    """Client -> coordinator: a call about one key, or, to CHECK, about several."""

    kind: StoreCall
    keys: Annotated[tuple[StoreKey, ...], Meta(min_length=1, max_length=65536)]
    value: StoreValue = b""
    call: Count = 0


# ---- observers


class StatusAsk(WireMessage, frozen=True):
    """Any process -> coordinator: send a `StatusReply`, for `xfer status`."""


class PartyStatus(Record, frozen=True):
    label: Name
    host: Name
    phase: Name
    wave: Count = 0
    bytes_done: Bytes64 = 0
    bytes_planned: Bytes64 = 0


class StatusReply(WireMessage, frozen=True):
    attempt: Count
    state: Text
    waiting_for: Annotated[tuple[Name, ...], Meta(max_length=65536)]
    parties: Annotated[tuple[PartyStatus, ...], Meta(max_length=131072)]
    versions: Annotated[tuple[tuple[Count, Label], ...], Meta(max_length=65536)] = ()


Message = (
    Hello | Welcome | Refused | Specs | CatalogMsg | InventoryMsg | Fetch | LayoutAsk | Layout
    | PlanInputs | Planned | OpenLink | LinkOpen | Found | ReplicaReady
    | Prepare | Enter | Measured | Ready | Arm | Paused | Armed | CallAgain | Go | PartReady | Progress | Done | Drained
    | Commit | Committed
    | Abort | Stopped | Settle | Settled | Failed | Release | CloseRoutes | RoutesClosed
    | Outcome | Leave | Ping | Reply | StoreAsk | StatusAsk | StatusReply
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encode a message.

    Raises:
        ProtocolError: the receiver would reject it. It is raised at the sender, so that a bug there does not look like an attack.
    """
    try:
        data = _encoder.encode(message)
        if len(data) <= CHECKED_BYTES:
            _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, TypeError) as e:
        raise ProtocolError(f"{type(message).__name__} cannot be sent: {e}"[:500]) from None
    if len(data) > MAX_FRAME:
        raise ProtocolError(f"{type(message).__name__} has {len(data)} bytes, a frame at most {MAX_FRAME}")
    return data


def decode(data: bytes) -> Message:
    """Decode one message.

    Raises:
        ProtocolError: `data` is not exactly one message. Nothing else is ever raised.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
        raise ProtocolError(f"malformed control message of {len(data)} bytes: {e}"[:500]) from None


def check_store_key(key: str, *prefixes: str) -> None:
    """Check that a client may use a store key.

    Raises:
        ProtocolError: the key has characters that are not allowed, or begins with none of the client's prefixes.
    """
    if not _STORE_KEY.fullmatch(key) or ".." in key:
        raise ProtocolError(f"store key {key[:80]!r} has characters or a length that are not allowed")
    if not key.startswith(prefixes):
        raise ProtocolError(
            f"store key {key[:80]!r} is outside this client's prefix {' or '.join(map(repr, prefixes))}"
        )
