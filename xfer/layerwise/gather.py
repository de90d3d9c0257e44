"""Brings the parameters that owners have stepped to all other ranks, bucket by bucket.

`ParamGather` keeps the state of every bucket, and starts and finishes the gathers. ownership.py chooses the owner of a parameter,
shares.py the place of its bytes, and hooks.py the time at which a module needs it.

A gather is one broadcast per owner, of exactly that owner's part of the bucket: nothing is padded to the largest owner, and no rank
receives its own part. Over NCCL the broadcasts of a bucket are one grouped call (as torch does for an all-gather of uneven
sizes); over gloo they are asynchronous broadcasts beside each other.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from xfer.agreement import Agreement
from xfer.errors import DeadlineExceeded, LayoutError, PeerLost, PlanMismatch, StaleWeights, XferError
from xfer.layerwise.pulls import Pulls, Waitable, start_in_order
from xfer.layerwise.shares import Share, refuse_astray
from xfer.layerwise.wire import ON_ALL_RANKS, Wire


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The ranks among which parameters are owned, and a wire of their own.

    The process groups of the training code cannot be used, because the order of its collectives is not known here.

    Attributes:
        name: Name of the group in errors.
        wire: None for a rank without peers.
        ranks: Global ranks, in the order of the group.
        rank: This rank's number within the group.
    """

    name: str
    wire: Wire | None
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def like(
        cls,
        name: str,
        group: dist.ProcessGroup | None,
        device: torch.device,
        deadline_s: float,
        max_ctas: int | None = None,
    ) -> Peers:
        """Makes the peers of the ranks of `group` (None: the default group); see `Wire.over`. Collective over them."""
        ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        mine = ranks.index(dist.get_rank())
        return cls(name, Wire.over(group, device, deadline_s, max_ctas) if len(ranks) > 1 else None, ranks, mine)

    @classmethod
    def alone(cls, name: str) -> Peers:
        """Makes the peers of a process without others, which gathers nothing."""
        return cls(name, None, (0,), 0)

    def agree(self, digest: bytes, what: str, mend: str) -> None:
        """Raises the same error on all ranks unless all of them have the same digest.

        Args:
            digest: Digest to compare.
            what: Describes it in errors; used once per wire.
            mend: What to do if ranks differ.

        Raises:
            PlanMismatch: Ranks differ. PeerLost, DeadlineExceeded: A rank does not come.
        """
        if self.wire is None:
            return
        meeting = Agreement(self.wire.store, what, self.rank, range(self.size), lambda r: f"rank {self.ranks[r]}")
        try:
            meeting.meet(time.monotonic() + self.wire.deadline_s, digest.hex())
        except PlanMismatch as e:
            lines = [f"{line}: {mend} on both" for line in e.violations]
            raise PlanMismatch(f"{self.name}: ranks disagree about {what}", lines) from None
        except (DeadlineExceeded, PeerLost) as e:
            lines = [f"{line}: build the optimizer on ranks {list(self.ranks)}" for line in e.violations]
            raise type(e)(f"{self.name}: ranks did not all say {what}", lines) from None

    def connected(self) -> Wire:
        """The wire. Raises an XferError for a rank without peers."""
        if self.wire is None:
            raise XferError(f"{self.name}: this rank has no peers, so it cannot exchange anything with them")
        return self.wire

    @property
    def device(self) -> torch.device:
        """Where tensors of this group's collectives lie."""
        return self.wire.device if self.wire is not None else torch.device("cpu")


class State(enum.Enum):
    """The state of a bucket on this rank.

    STALE: owners have newer parameters. IN_FLIGHT: bytes may arrive at any moment. CURRENT: all parameters are those of the last step.
    """

    STALE = "stale"
    IN_FLIGHT = "in flight"
    CURRENT = "current"


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters that are gathered together. `index`: in the order of registration over all groups, equal on all peers."""

    index: int
    peers: Peers
    shares: tuple[Share, ...]
    state: State = State.CURRENT
    works: Sequence[Waitable] = field(default_factory=list)
    runs: list[tuple[Share, torch.Tensor]] = field(default_factory=list)
    """Buffers that are sent or received in place of parameters without a home."""
    landed: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
    """On GPUs: the only stream that waited for the bytes, and an event behind that wait."""
    versions: list[int] = field(default_factory=list)
    """autograd's version counters of its parameters, at the time of the step."""

    def now(self) -> list[int]:
        """autograd's present version counters of its parameters."""
        return [m.param._version for s in self.shares for m in s.members]

    def label(self) -> str:
        """The bucket and its state, for errors."""
        first = self.shares[0].members[0].name
        owners = sorted({self.peers.ranks[s.owner] for s in self.shares})
        return f"bucket {self.index} of {self.peers.name} ({first} …, owned by ranks {owners}): {self.state.value}"


@dataclass(slots=True)
class GatherStats:
    """Sums over all gathers of this rank since construction or `reset`.

    Attributes:
        received: Planned bytes of other ranks' runs: parameters and their padding.
        lacked: Planned bytes of the parameters that other ranks own.
        unexpected: Buckets that were needed before others that were expected first.
    """

    received: int = 0
    lacked: int = 0
    unexpected: int = 0

    def reset(self) -> None:
        self.received = self.lacked = self.unexpected = 0


class ParamGather:
    """The gathers of one rank.

    Each bucket is gathered exactly once per step, and the buckets of one group in one order on all of its ranks, whatever
    forwards do. So ranks that run their modules in different orders, or one more forward than others, still match. But a
    broadcast needs all of them: a rank that asks for parameters (a forward, state_dict()) waits until the others ask too,
    or step. If they wait for that rank elsewhere, it waits until the deadline.

    If a wait blocks the process (over gloo) and there are several groups, the first wait of a forward starts all gathers that are left.

    Args:
        buckets: In the order of registration, equal on all peers.
        overlap: If False, `begin` gathers everything at once.
        prefetch_depth: Buckets that are on their way beyond the one that is needed, over all groups together; at least 1.
        deadline_s: Seconds of every wait for peers, for errors.
        label: This rank, in errors.
        blank: Whether `begin` overwrites stale parameters by NaNs.
        pulls: By name of peers. The buckets of these peers are copied out of the owners' memory, all at once. Only the first bucket
            of use, which all ranks need at the same moment, is broadcast.
        wires: Wires beside those of the buckets. If one of them is lost, this gather is unusable, too.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        overlap: bool = True,
        prefetch_depth: int = 1,
        deadline_s: float = 600.0,
        label: str = "",
        blank: bool = False,
        pulls: Mapping[str, Pulls] | None = None,
        wires: Sequence[Wire] = (),
    ):
        if prefetch_depth < 1:
            raise LayoutError(f"prefetch_depth={prefetch_depth}: fetch at least one bucket ahead")
        self.buckets, self.overlap, self.prefetch_depth = tuple(buckets), overlap, prefetch_depth
        self.deadline_s, self.label, self.blank = deadline_s, label, blank
        self.version = 0
        self.stats = GatherStats()
        self.order = list(self.buckets)
        self._at = {b.index: i for i, b in enumerate(self.order)}
        self.pulls = dict(pulls or {})
        self._pending = 0  # buckets that are not CURRENT
        self._ahead = 0  # buckets at the start of `order` that travel while owners still step others
        # Groups have no common order, and over gloo a wait blocks the process. A rank that skips a module of one group and waits for a
        # bucket of another group would not start the gather for which its peers of the first group wait: a deadlock.
        self._held_up_by_others = len({id(b.peers) for b in self.buckets}) > 1 and any(
            b.peers.device.type == "cpu" for b in self.buckets
        )
        self.broken: XferError | None = None
        """The error that made the gather unusable."""
        self._kept: list[torch.Tensor] = []  # memory that a broken gather may still write
        self._wires = list(dict.fromkeys(w for w in (*(b.peers.wire for b in self.buckets), *wires) if w is not None))

    # ---- order

    def learn(self, used: Sequence[int]) -> None:
        """Sets the order in which buckets are expected. used: indices in the order of first use here; other buckets come last.

        Collective over every group with more than one rank: its buckets come in the order of its first rank. The groups' orders
        are then merged as this rank uses them.
        """
        self.drain()
        seen = dict.fromkeys([*used, *(b.index for b in self.buckets)])
        mine = [self.buckets[i] for i in seen]
        chains: dict[int, list[Bucket]] = {}
        for b in self.buckets:
            chains.setdefault(id(b.peers), []).append(b)
        agreed = {}
        for key, chain in chains.items():
            peers = chain[0].peers
            order = torch.tensor([b.index for b in mine if b.peers is peers], dtype=torch.int64, device=peers.device)
            self.guarded(lambda o=order, p=peers: p.connected().broadcast(o, 0), "the order of buckets")
            agreed[key] = iter(order.tolist())
            self.check()
        self.order = [self.buckets[next(agreed[id(b.peers)])] for b in mine]
        self._at = {b.index: i for i, b in enumerate(self.order)}

    # ---- one step

    def begin_ahead(self, stepped: Callable[[Bucket], bool]) -> None:
        """Starts broadcasts of buckets that are stepped already, while owners still step others.

        Only the first `prefetch_depth` buckets in the order of use start, which all ranks need first. `drain()` must have been called
        before the owners write, and `begin` must follow.

        Args:
            stepped: Whether the parameters of a bucket are stepped; the same on all ranks.
        """
        for b in self.order[self._ahead : self.prefetch_depth]:
            if not self.overlap or self._is_copied(b) or not stepped(b):
                return
            self._outdate(b)
            self._pending += 1
            self._ahead += 1
            self.start_param_sync(b)

    def begin(self) -> None:
        """Marks all buckets as stale, after the owners have stepped. Starts the first gathers; without `overlap` it finishes all.
        `drain()` must have been called before the owners write."""
        self.check()
        ahead, self._ahead = self._ahead, 0
        rest = [b for b in self.buckets if self._at[b.index] >= ahead]
        if pending := [b for b in rest if b.state is not State.CURRENT]:
            raise LayoutError("begin() before drain()", [b.label() for b in pending], where=self.label)
        self.guarded(self.refuse_astray, "memory of parameters")
        self.version += 1
        for b in rest:
            self._outdate(b)
        self._pending += len(rest)
        for pulls in self.pulls.values():
            self.guarded(pulls.begin, "the sign that all owners have stepped")
        if self.overlap:
            self._prefetch(ahead, self.prefetch_depth)
            for b in self.order:
                if b.peers.name in self.pulls and not self._is_copied(b):
                    self.start_param_sync(b)
            self._launch_copies()  # they delay no computation
        else:
            self.drain()

    @property
    def settled(self) -> bool:
        """Whether every parameter is that of the last step."""
        return self._pending == 0

    def start_param_sync(self, bucket: Bucket) -> None:
        """Starts the bucket's gather, after the earlier ones of its group. Does nothing if it was started."""
        self.check()
        if bucket.state is not State.STALE:
            return
        for b in self.order[: self._at[bucket.index] + 1]:
            if b.peers is bucket.peers and b.state is State.STALE:
                self.guarded(lambda b=b: self._launch(b), b.label())

    def finish_param_sync(self, bucket: Bucket, skip_next_bucket_dispatch: bool = False) -> None:
        """Returns when the bucket's parameters are those of the last step (over NCCL: for later work of the current stream).

        Starts its gather if it was not started. Does nothing if it was finished.

        Args:
            bucket: The bucket.
            skip_next_bucket_dispatch: If False, also starts the gathers of the next buckets before it waits.

        Raises:
            PeerLost, DeadlineExceeded: A peer does not take part. The gather is unusable, and every later call raises the same.
        """
        self.check()
        if bucket.state is State.CURRENT:
            return
        at = self._at[bucket.index]
        if not skip_next_bucket_dispatch and any(b.state is not State.CURRENT for b in self.order[:at]):
            self.stats.unexpected += 1
        self.start_param_sync(bucket)
        if not skip_next_bucket_dispatch:
            self._prefetch(at + 1, self.prefetch_depth)
            if self._held_up_by_others:
                self._start_rest()
        self.guarded(lambda: self._land(bucket), bucket.label())

    def follow(self, bucket: Bucket) -> None:
        """Makes the current stream wait for the bytes of a CURRENT bucket, if only another stream has waited so far. Not while a graph is
        captured: the capture begins behind all earlier work of the device and may not wait for work outside of it."""
        if bucket.landed is None:
            return
        stream, event = bucket.landed
        here = torch.cuda.current_stream(bucket.peers.device)
        if here == stream or torch.cuda.is_current_stream_capturing():
            return
        here.wait_event(event)

    def drain(self) -> None:
        """Finishes all gathers, in order. Starts all of them before it waits for the first. Collective unless everything is
        finished already."""
        self.check()
        if not self._pending:
            return
        self._start_rest()
        self._launch_copies()
        for b in self.order:
            self.finish_param_sync(b, skip_next_bucket_dispatch=True)

    def meet(self) -> None:
        """After `drain`, before parameters are written: waits until no rank copies them out of this rank's memory any more. All ranks
        drain and meet; code that only reads need not."""
        self.check()
        for pulls in self.pulls.values():
            self.guarded(pulls.meet, "the sign that all ranks have copied")

    # ---- details

    def _outdate(self, b: Bucket) -> None:
        b.state = State.STALE
        for s in b.shares:
            if s.owner != b.peers.rank:
                s.outdate()
                if self.blank:
                    s.blank()
        b.versions = b.now()

    def _prefetch(self, at: int, depth: int) -> None:
        """Starts gathers until `depth` buckets from place `at` on are on their way."""
        for b in self.order[at:]:
            if depth == 0:
                return
            if b.state is State.STALE:
                self.start_param_sync(b)
            if b.state is State.IN_FLIGHT:
                depth -= 1

    def _start_rest(self) -> None:
        """Starts all broadcasts that are left, each group's in its order."""
        for b in self.order:
            if b.state is State.STALE and not self._is_copied(b):
                self.guarded(lambda b=b: self._launch(b), b.label())

    def _is_copied(self, b: Bucket) -> bool:
        return b.peers.name in self.pulls and b is not next(x for x in self.order if x.peers is b.peers)

    def _launch_copies(self) -> None:
        """Starts all copies that are left, in the order of use."""
        left = [b for b in self.order if b.state is State.STALE and self._is_copied(b)]
        if left:
            self.guarded(lambda: self._copy(left), left[0].label())

    def _copy(self, buckets: Sequence[Bucket]) -> None:
        for b in buckets:
            self._moves(b)
        first = [w for b in self.order if b.state is State.IN_FLIGHT and not self._is_copied(b) for w in b.works]
        works = start_in_order([(self.pulls[b.peers.name], b.shares) for b in buckets], first)
        for b, work in zip(buckets, works, strict=True):
            b.works, b.state = [work], State.IN_FLIGHT
        self._end_copies({b.peers.name for b in buckets}, on_host=False)

    def _end_copies(self, names: Iterable[str], on_host: bool) -> None:
        """Ends the copies of those groups whose last copy of this step was just queued, or made by this process."""
        for name in sorted(names):
            pulls, done = self.pulls[name], (State.CURRENT,) if on_host else (State.IN_FLIGHT, State.CURRENT)
            if (pulls.stream is None) == on_host and all(
                b.state in done for b in self.order if b.peers.name == name and self._is_copied(b)
            ):
                pulls.end()

    def _launch(self, b: Bucket) -> None:
        if self._is_copied(b):
            return self._copy([b])
        b.works = b.peers.connected().broadcasts(self._moves(b), b.label)
        b.state = State.IN_FLIGHT

    def _moves(self, b: Bucket) -> list[tuple[int, torch.Tensor]]:
        """(owner, memory) of each run of the bucket."""
        refuse_astray(b.shares, self.label)
        moves = []
        for s in b.shares:
            mine = s.owner == b.peers.rank
            if s.nbytes == 0:
                continue
            run = s.home if s.home is not None else s.staging(fill=mine)
            moves.append((s.owner, run))
            if s.home is None:
                b.runs.append((s, run))
            if not mine:
                self.stats.received += s.nbytes
                self.stats.lacked += sum(m.nbytes for m in s.members)
        return moves

    def _land(self, b: Bucket) -> None:
        for work in b.works:
            work.wait()
        refuse_astray(b.shares, self.label)
        self._refuse_written(b)
        with torch.no_grad():
            for share, run in b.runs:
                if share.owner != b.peers.rank:
                    share.unpack(run)
        if b.peers.device.type == "cuda":
            stream = torch.cuda.current_stream(b.peers.device)
            b.landed = stream, stream.record_event()
        b.works, b.runs, b.state = [], [], State.CURRENT
        self._pending -= 1
        if self._is_copied(b):
            self._end_copies([b.peers.name], on_host=True)

    def _refuse_written(self, b: Bucket) -> None:
        """Refuses parameters that were written after the step, by clipping for example: the bytes of the gather overwrite that on some
        ranks and not on others."""
        names = [m.name for s in b.shares for m in s.members]
        if bad := [n for n, was, is_ in zip(names, b.versions, b.now()) if was != is_]:
            raise StaleWeights(
                "parameters were written while their owners were sending them",
                [
                    f"{n}: drain() on all ranks before it is written; build the model anew and load a checkpoint"
                    for n in bad
                ],
                where=self.label,
            )

    def refuse_astray(self) -> None:
        """Raises RebindError for parameters that are no longer in the memory that gathers use."""
        refuse_astray((s for b in self.buckets for s in b.shares), self.label)

    def check(self) -> None:
        """Raises the error that made the gather unusable: raised here, or over NCCL found by the thread that watches deadlines."""
        if self.broken is None:
            for wire in self._wires:
                if wire.lost is not None:
                    self.broken = wire.lost
        if self.broken is not None:
            raise self.broken

    def guarded(self, call, what: str) -> None:
        """Runs `call`. An error of a collective becomes a typed error, which this gather raises from then on. Any other error (out of
        memory, a user's own optimizer) is raised as it is; the other ranks wait for this one then, so the gather is unusable, too."""
        began = time.monotonic()
        try:
            call()
        except XferError as e:
            self.broken = e
            raise
        except BaseException as e:
            if self.broken is not None:  # a call inside has set it
                raise
            self.check()  # an abort may have caused this error
            took = time.monotonic() - began
            self._kept += [run for b in self.buckets for _, run in b.runs]
            if not _of_the_wire(e):
                self.broken = StaleWeights(
                    "a step or a gather broke off, and other ranks may be ahead",
                    [f"{what}: {type(e).__name__}: {_first_line(e)}", *_states(self.buckets)],
                    where=self.label,
                )
                raise
            late = took >= 0.9 * self.deadline_s
            kind = DeadlineExceeded if late else PeerLost
            why = f"not within {self.deadline_s:.0f} s" if late else "a peer has ended or closed its connections"
            self.broken = kind(
                f"parameters could not be gathered: {why}",
                [f"{what}: {_first_line(e)}", *([ON_ALL_RANKS] if late else ()), *_states(self.buckets)],
                where=self.label,
            )
            raise self.broken from e


def _of_the_wire(e: BaseException) -> bool:
    """Whether it is an error of a collective: NCCL's and stores' errors have a class; gloo's are RuntimeErrors with typical words."""
    words = ("gloo", "onnection", "imed out", "imeout")
    return isinstance(e, dist.DistError) or type(e) is RuntimeError and any(w in str(e) for w in words)


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [""])[0][:160]


def _states(buckets: Iterable[Bucket]) -> list[str]:
    return [
        f"{b.label()}: not usable; build the model anew and load a checkpoint"
        for b in buckets
        if b.state is not State.CURRENT
    ]
