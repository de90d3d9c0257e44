"""The trainer's part of a session: connect once, then one `refit` per optimizer step, on every trainer rank.

Trainer rank 0 hosts the coordinator. Every rank reads its own layout, publishes the tensors that it exports, and keeps one lane
per replica. Only the `Source` that the caller passes in depends on Megatron or FSDP.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from xfer import logs, observers, timeline
from xfer.arguments import Labels, RefitOptions
from xfer.background import BackgroundCall
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import LEAVE_S, STOP_GRACE_S, TOLD_S
from xfer.coordinator.layouts import pack_specs, unpack_one
from xfer.coordinator.state import Options, told
from xfer.errors import DeadlineExceeded, RebindError, Unsupported, XferError
from xfer.participants import computing
from xfer.participants.data_plane import Change, NewTrainerSide
from xfer.participants.lane import Lane
from xfer.participants.refit import RefitCall
from xfer.rendezvous.client import SILENT, RendezvousClient, data_plane
from xfer.rendezvous.server import Server
from xfer.report import RefitReport
from xfer.timeline import nvtx
from xfer.trace.catalog import Catalog
from xfer.trace.traced import TrainerLayout
from xfer.transport.group import wait_for_stream
from xfer.turns import quick_turns, short_sleeps

logger = logging.getLogger("xfer")


class Source(Protocol):
    """A trainer framework's adapter on one rank.

    It may have these methods, too:

    - `let_go()` drops its references to the trainer's tensors until the next `check`.
    - `fence_before(fence)` makes the framework call `fence` before it changes exported tensors outside of an optimizer's step.
    - `mark_writes(optimizer)` lets an optimizer of the framework mark what it changes (kernels/written.py), if it can.
    - `finish_gathers()` is `drain` without its wait for the device: later work of the current stream finds the exported bytes in memory.
      A publish calls it in place of `drain`.
    - `finishes_alone()` returns whether `finish_gathers` now waits for no other rank. A publish then needs no thread for it.
    - `begin_check()` is the part of a `check` that must come before the next forward. It returns None if something has changed, else a
      function for the rest, which returns whether `check` would return "same". A publish calls that function in the background.

    Attributes:
        rank: This trainer rank.
        world: Number of trainer ranks.
        reads_together: Whether `read` needs all ranks at once. It is then called when they connect and never again.
    """

    rank: int
    world: int
    reads_together: bool

    @property
    def device(self) -> torch.device: ...

    def drain(self) -> None:
        """Finish every parameter gather in flight. On return this rank's exported bytes are in memory, whichever stream
        wrote them."""

    def read(self) -> TrainerLayout:
        """Read the layout of the exported tensors on this rank."""

    def check(self) -> str:
        """Return the value of a `Change` (data_plane.py): "same", "moved" or "changed"."""

    def rebind(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the layout, by name, at their present addresses."""


class Computes(Source, Protocol):
    """A source whose layouts may have recipes or gathers."""

    def compute(self, meet: Callable[[tuple[int, ...], str], None]) -> None:
        """Fill the scratch tensors among the roots from the present parameters. Called if the layout has recipes or gathers.

        Args:
            meet: The source calls `meet(ranks, digest)` before it gathers from those trainer ranks (participants/computing.py).
        """


class Entry:
    """Admits calls to a trainer rank's session: one thread at a time, and none after `close`.

    A refused call raises Unsupported, not PeerLost: no peer is gone, so calling again would not help.

    Args:
        where: This rank, for errors.

    Attributes:
        closed: Whether the session is closed. A call that is inside then ends with its connection.
    """

    def __init__(self, where: str) -> None:
        self.closed = False
        self._where, self._inside = where, threading.Lock()

    def refuse_closed(self, call: str) -> None:
        """Raise Unsupported if the session is closed. `call` is quoted in the error."""
        if self.closed:
            raise Unsupported(
                f"{call} was called after this session was closed, on this rank itself",
                [
                    "close it on every trainer rank and call xfer.connect() again there, and xfer.serve() for each engine"
                ],
                where=self._where,
            )

    @contextlib.contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Admit one call. Raises Unsupported if the session is closed or another thread is inside."""
        self.refuse_closed(call)
        with self.if_free() as free:
            if not free:
                raise Unsupported(
                    f"{call} was called while another thread of this rank is inside xfer",
                    ["call it from one thread at a time; all ranks must make the same calls in the same order"],
                    where=self._where,
                )
            yield

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Yield whether no call was inside; if so, none is admitted until the end of the context."""
        free = self._inside.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._inside.release()


class TrainerSession:
    """One connected trainer rank. `xfer.connect` makes it.

    Args:
        source: The trainer framework's adapter.
        rendezvous: "tcp://HOST:PORT"; rank 0 listens there.
        token: The job's secret.
        options: The arguments of `connect`; equal on all trainer ranks.
        new_side: Makes this rank's side of the route.

    Attributes:
        version: The last version that a replica committed; None before the first.
        attempt: Number of the last refit attempt.
        generation: Number of the catalog in use.
        computed_bytes: Bytes of scratch for tensors that this rank's layout computes.
        pending: A call that returned before its outcome was known.
        drain: The last call's drain, which may run longer than the call.
        computing: The last call's computation, while it runs, perhaps longer than the call.
        rest: The background part of the last publish, while it runs.
        lanes: Lanes by replica. A lane is made when its first message comes.
    """

    def __init__(self, source: Source, rendezvous: str, token: str, options: Options, new_side: NewTrainerSide):
        self.source, self.index, self.device = source, source.rank, source.device
        self.rendezvous, self.deadline_s, self.replicas = rendezvous, options.deadline_s, options.replicas
        self.attempt = 0
        self.version: int | str | None = None
        self._labels = Labels()
        self._server: Server | None = None
        self._until, self._open = time.monotonic() + self.deadline_s, False
        self._catalog: Catalog | None = None
        self.generation = 0
        self._relay, self._route = options.relay, options.route
        self.pending: RefitCall | None = None
        self._before: RefitReport | None = None  # report of a pending call, until the next report includes it
        self._busy = Entry(f"trainer {source.rank}")
        self._stale = False  # the last attempt to read the layout again failed
        self.layout: TrainerLayout
        self._specs = b""
        # Specs and inventory that the coordinator knows. None: it answers the specs with a catalog first.
        self._told: tuple[bytes, bytes | None] = (b"", b"")
        self._released = False
        self.drain: BackgroundCall[None] | None = None
        self.computing: BackgroundCall[bool] | None = None
        self.rest: BackgroundCall[m.Outcome | None] | None = None
        self._stream: torch.cuda.Stream | None = None  # of the background of publishes
        settings = (*told(options), *data_plane(self.device))
        if source.rank == 0:
            noted = partial(timeline.mark, timeline.HUB)
            self._server = Server(rendezvous, token, replace(options, settings=settings), noted, short_sleeps)
        try:
            # One rank logs for all that dial. Once trainer 0 listens, it logs which ranks are missing.
            knocking = logs.while_waiting(
                lambda: f"trainer 1: no answer from {rendezvous}; has trainer rank 0 called xfer.connect()?"
            )
            with knocking if source.rank == 1 else contextlib.nullcontext():
                self._party = RendezvousClient(
                    rendezvous,
                    token,
                    "trainer",
                    index=source.rank,
                    size=source.world,
                    deadline_s=self.deadline_s,
                    settings=settings,
                )
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise
        self.side = new_side(self._party)
        self.lanes: dict[int, Lane] = {}
        self._party.lanes, self._party.on_lane = self.lanes, self._lane

    @property
    def party(self) -> RendezvousClient:
        return self._party

    @property
    def over(self) -> bool:
        """Whether the session is closed, or the coordinator is gone, so that no refit can come."""
        return self._busy.closed or self._party.lost is not None

    def __repr__(self) -> str:
        version = "no refit yet" if self.version is None else f"version {self.version!r}"
        of = f"trainer {self.index} of {self.source.world}, {logs.counted(self.replicas, 'replica')}"
        return f"{of}, at {self.rendezvous}: {'closed' if self._busy.closed else version}"

    # ---- connecting

    def open(self, wait: bool) -> None:
        """Publish the layout.

        Args:
            wait: Return only when every replica has a plan and a link.
        """
        until = time.monotonic() + self.deadline_s
        if self._server is not None:
            self._server.coordinator.opening = wait
        with self._telling():
            self._take_layout(self._read_together(until, wait) if self.source.reads_together else self.source.read())
        self.tell()
        missing = set(range(self.replicas)) if wait else set[int]()
        while self._catalog is None or missing:
            # The coordinator has the same deadline, and knows which processes are late and which ones it rejected.
            message = self._party.take(
                until + TOLD_S,
                "the plans and links of all replicas",
                m.ReplicaReady,
                m.Failed,
                m.CatalogMsg,
                match=lambda x: not isinstance(x, m.Failed) or x.ends(wait),
            )
            if isinstance(message, m.CatalogMsg):
                with self._telling():
                    self._take_catalog(message)
                self.tell()
            elif isinstance(message, m.Failed):
                raise message.error.error()
            else:
                missing.discard(message.replica)
        self._open = True
        if self._server is not None:
            self._server.coordinator.opening = False

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the coordinator of an error inside, before this rank leaves; otherwise the others would learn only that it has left."""
        try:
            yield
        except Exception as e:
            self._tell_failed(e, self._party.label)
            raise

    def cannot_join(self, replica: int, fatal: bool, error: BaseException) -> None:
        """Tell the coordinator that a replica will not join, because its controller in this process never reached it.

        Args:
            replica: The replica's number.
            fatal: Whether all ranks wait for this replica, so that the session fails.
            error: The controller's error.
        """
        self._tell_failed(error, f"replica {replica} controller", -1 if fatal else replica)

    def _tell_failed(self, error: BaseException, by: str, replica: int = -1) -> None:
        """Tell the coordinator before anything of this process leaves. Controllers leave by connections of their own, and the other
        ranks would hear only that."""
        self._party.try_send(m.Failed(m.WireError.of(error, by), replica=replica))
        self._party.catch_up(LEAVE_S)

    def _read_together(self, until: float, wait: bool) -> TrainerLayout:
        def pointless() -> bool:
            return self._party.over(m.Failed, lambda x: x.ends(wait))

        reading = BackgroundCall(self.source.read, self.device, self._party.label, "the layout could not be read")
        if reading.wait(until, pointless, STOP_GRACE_S) and reading.result is not None:
            return reading.result
        # The coordinator has the same deadline and knows which ranks are missing.
        self._party.wait_for(pointless, time.monotonic() + TOLD_S)
        if pointless():
            until, why = time.monotonic() + TOLD_S, "the names of ranks that do not take part"
            raise self._party.take(until, why, m.Failed, match=lambda x: x.ends(wait)).error.error()
        raise DeadlineExceeded(
            "layouts are read by all ranks together (probe=), and not all took part",
            ["call xfer.connect() on every trainer rank, with the same probe="],
            where=self._party.label,
        )

    def _take_catalog(self, message: m.CatalogMsg) -> None:
        self._told = self._told[0], b""  # the coordinator waits for an inventory, even if this fails
        self._catalog, self.generation = Catalog.from_bytes(unpack_one(message.catalog, "catalog")), message.generation
        self.side.read(self._catalog, self.layout)

    def _lane(self, replica: int) -> Lane | None:
        if replica not in self.lanes and 0 <= replica < self.replicas:
            plane = self.side.plane(replica)
            self.lanes[replica] = Lane(self._party, "trainer", self.index, self.device, replica, plane)
        return self.lanes.get(replica)

    # ---- refitting

    def beside(self) -> torch.cuda.Stream | None:
        """Return, on a GPU, a stream of xfer's own, which waits for all earlier work of the caller's stream."""
        if self.device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._stream

    def begin_sums(self, attempt: int) -> None:
        """Begin the checksums of this rank's bytes before it reports ready. Busy lanes compute theirs later."""
        self.side.begin_sums(attempt, [r for r, lane in list(self.lanes.items()) if lane.wait_idle(0.0)])

    def prepare(self) -> None:
        """Arm the engines for the next refit now; they stop serving until it has run."""
        self._busy.refuse_closed("prepare()")
        self._party.send(m.Prepare(self.attempt + 1))

    def refit(self, options: RefitOptions = RefitOptions()) -> RefitReport:  # noqa: B008  frozen
        """See `xfer.nccl_xfer_refit`."""
        with self._busy.alone("nccl_xfer_refit()"):
            try:
                self._finish_pending()
                asked = options.checked(self.replicas, self.deadline_s, self._labels, self._route)
            except XferError as e:
                # The failed call uses up an attempt here and, by this message, on the other ranks: numbers stay equal.
                e.where = e.where or self._party.label
                self._party.try_send(m.Failed(m.WireError.of(e, self._party.label), self.next_attempt()))
                raise
            # A publish gives the interpreter to others when it returns: only what it leaves in the background waits for their messages.
            turns = contextlib.nullcontext() if options.wait == "ready" else quick_turns()
            with turns, nvtx(f"refit, trainer {self.index}"):
                refit = RefitCall(self, asked, str(options.wait))
                report = self._ended(refit, refit.run)
                report, self._before = replace(report, before=self._before), None
                return report

    def fence(self) -> float:
        """See `Session.fence`."""
        if self._busy.closed:  # hooks of optimizers stay behind
            return 0.0
        with self._busy.alone("fence()"):
            return self._fence()

    def _fence(self) -> float:
        call = self.pending
        if call is None or call.free:
            return 0.0
        self.pending = None  # in case that it raises
        report = self._ended(call, call.fence)
        if not report.pending:
            self._before = report
        return call.fence_s

    def next_attempt(self) -> int:
        """Advance to the next attempt number, past attempts that were prepared and given up."""
        self.attempt += 1
        while self.attempt in self._party.void:
            self.attempt += 1
        return self.attempt

    def _finish_pending(self) -> None:
        """Wait for the outcome of a call that returned before it was known."""
        self._fence()
        pending, self.pending = self.pending, None
        if pending is not None:
            self._before = self._ended(pending, pending.finish)

    def _ended(self, refit: RefitCall, call: Callable[[], RefitReport]) -> RefitReport:
        """Run a call that ends a refit, and tell observers of its end. A call that returns before the outcome is not told."""
        error: XferError | None = None
        try:
            report = self._let_go(call())
        except XferError as e:
            error = e
            raise
        else:
            return report
        finally:
            if refit.report is not None or error is not None:
                here = self._party.welcome.session, refit.number, self.index
                timeline.write(refit.number, here[0])
                seconds = refit.elapsed if refit.report is None else refit.report.seconds
                observers.tell(observers.TrainerFinished(*here, seconds, refit.report, error))

    def _let_go(self, report: RefitReport) -> RefitReport:
        """Log a report, note its label as used, and free storages that an earlier failed refit kept alive.

        They are free once all replicas hold a later version: no worker takes part in a refit while a pull of its own is left
        over (lane.py).
        """
        if self.index == 0 and not report.pending:
            logger.log(logging.INFO if report.committed == self.replicas else logging.WARNING, "xfer: %s", report)
        if report.committed and report.version is not None:
            self._labels = self._labels.after(report.version)
        if report.committed == self.replicas and all(lane.plane.drained for lane in self.lanes.values()):
            self.side.let_go_kept()
        return report

    def refresh(self, beside: bool = False) -> Callable[[], bool] | None:
        """Read the storages again that the framework has moved since the last refit. `tell` tells the coordinator of changes.

        The adapter compares with its last look, so the next call must read again if this one fails.

        Args:
            beside: Return a function for the part of the check that may run beside the next forward (`Source.begin_check`). If the
                function returns False, call `distrust`.
        """
        if beside and not self._stale and not self._released and hasattr(self.source, "begin_check"):
            if (rest := self.source.begin_check()) is not None:
                return rest
        change = Change.CHANGED if self._stale else Change(self.source.check())
        if change is Change.SAME and self._released:
            change = Change.MOVED  # perhaps not, but the storages were released
        if change is not Change.SAME:
            self._stale = True
            self._released = False
            if change is Change.MOVED:
                self.layout = replace(self.layout, tensors=self.source.rebind())
                self.side.rebind(self.layout.tensors)
            else:
                self._read_again()
            self._stale = False
        return None

    def distrust(self) -> None:
        """Note that the layout has changed since it was read: the next refit reads it again."""
        self._stale = True

    def _read_again(self) -> None:
        if self.source.reads_together:
            raise RebindError(
                "this rank's layout changed, and only all ranks together can read it anew (probe=)",
                ["close this session and connect again, on every rank"],
                where=self._party.label,
            )
        self._take_layout(self.source.read())
        if self._specs == self._told[0] and self._told[1] is not None and self._catalog is not None:
            self.side.read(self._catalog, self.layout)
        else:
            self.side.forget_layout()

    def tell(self) -> None:
        """Send the specs or the inventory, if the coordinator does not know them. If it is gone, the inbox has the reason."""
        specs, inventory = self._told
        if self._specs != specs:
            self._party.try_send(m.Specs(self._specs))
            self._told = self._specs, None  # a catalog follows, on which the inventory depends
        elif inventory not in (None, self.side.inventory):
            self._party.try_send(m.InventoryMsg(self.side.inventory, self.generation))
            self._told = specs, self.side.inventory

    def _take_layout(self, layout: TrainerLayout) -> None:
        catalog = Catalog.union([(self._party.label, layout.traced.specs)])
        self.layout, self.computed_bytes = layout, computing.scratch_bytes(layout)
        self._specs = pack_specs(catalog.to_bytes(), layout.trained)

    def follow(self, message: m.CatalogMsg, quantize: Callable[[], None], until: float) -> None:
        """Take a new catalog, or the same one again after this rank's exports changed, and answer with the inventory.

        Args:
            quantize: Brings quantized weights up to date.
            until: Monotonic time until which the GPU may take to quantize what the catalog asks for.
        """
        self._stale = True
        self._take_catalog(message)
        self._stale = False
        quantize()
        if self.side.rules and self.device.type == "cuda":
            wait_for_stream(self.device, until, self._party.label)  # lanes have streams of their own
        self.tell()

    def release(self) -> None:
        """See `Session.release`."""
        with self._busy.alone("release()"):
            self._release()

    def _release(self) -> None:
        self._fence()
        until = time.monotonic() + self.deadline_s
        if not all([lane.wait_idle(max(0.0, until - time.monotonic())) for lane in list(self.lanes.values())]):
            raise DeadlineExceeded(
                "a transfer of this rank is still running", self.side.warn(()), where=self._party.label
            )
        for call in (self.drain, self.computing, self.rest):
            if call is not None and not call.ended(until):
                raise DeadlineExceeded(
                    "a background call of an earlier refit has not ended, and uses this rank's parameters",
                    ["other ranks take part in it, and one has not done its part yet: call again when it has"],
                    where=self._party.label,
                )
        why = f"a worker reads them, or hangs; or {SILENT}"
        self._party.questions.ask("every worker to unmap this rank's storages", until, m.Release, why=why)
        for lane in list(self.lanes.values()):
            lane.plane.forget()
        self.side.release()
        self._released = True
        self.layout = replace(self.layout, tensors={})
        if hasattr(self.source, "let_go"):
            self.source.let_go()

    def explain(self) -> str:
        """See `Session.explain`."""
        self._busy.refuse_closed("explain()")
        lanes = [
            f"replica {r}\n{lane.plane.explain()}" for r, lane in sorted(self.lanes.items()) if lane.facts is not None
        ]
        if self._relay:
            lanes.append(
                "replicas of one layout on the same hosts hand bytes on to each other: each takes a share of them from the "
                "trainers, or the first one all, and the others read it there (`relay` in a report's routes); what several workers "
                "of a replica need from other hosts is sent to one on each host, which sends it on"
            )
        own = [computing.explain(self.layout, self._party.label), self.side.explain()]
        return "\n\n".join(filter(None, [*lanes, *own]))

    def settle(self) -> None:
        """Wait for the outcome of an earlier call, within that call's bound, and raise its error.

        This comes before the rendezvous closes: an engine that loses it in the middle of a refit must not serve.
        """
        with self._busy.if_free() as free:
            if free:  # else another thread hangs in a call, and closing frees it
                self._finish_pending()

    def close(self) -> None:
        """Call `settle`, then leave the session even if that raises. Does nothing in a forked child of the process that
        connected."""
        if self._party.channel.theirs:
            return
        try:
            self.settle()
        finally:
            self._busy.closed = True
            self._party.close()
            if self._server is not None:
                self._server.wait_left(self.index)
                time.sleep(0.05)  # let the Leave messages of the others arrive before the socket closes
                self._server.close(0.0 if self._open else min(self._until, time.monotonic() + STOP_GRACE_S))
            if hasattr(self, "layout"):  # hooks of optimizers keep this object
                self.layout = replace(self.layout, tensors={})
            self.side.close()  # last: it may raise an error of the device
