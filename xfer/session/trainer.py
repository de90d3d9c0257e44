"""The trainer's half: connect once, then one `refit` per optimizer step, on every trainer rank.

Trainer rank 0 hosts the hub. Every rank: reads its own layout, publishes what it exports, and keeps one lane per replica.
What Megatron or FSDP is, is known only to the `Source` that was passed in.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.kernels.checksum import checksum_rows
from xfer.plan.cache import PlanCache
from xfer.plan.inventory import trainer_inventory
from xfer.plan.planner import SubPlan
from xfer.plan.program import Program
from xfer.plan.table import padded_shapes
from xfer.session import computing, faults
from xfer.session import messages as m
from xfer.session.bounds import SETTLE_GRACE_S, STOP_GRACE_S
from xfer.session.drain import Drain
from xfer.session.hub import Hub
from xfer.session.lane import Lane
from xfer.session.party import Party, host_identity
from xfer.session.readers import still_reading
from xfer.session.report import RefitReport, ReplicaOutcome
from xfer.session.roster import HubOptions
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Root
from xfer.trace.traced import Traced


class Layout(Protocol):
    """What a `Source` reads: fragments in storages, and the storages."""

    traced: Traced
    roots: tuple[Root, ...]
    tensors: Mapping[str, torch.Tensor]


class Source(Protocol):
    """A trainer framework's adapter on one rank."""

    rank: int
    world: int
    device: torch.device

    def drain(self) -> None:
        """Finish every parameter gather in flight and synchronize the device."""

    def read(self) -> Layout: ...

    def check(self) -> str:
        """ "same", "moved" (same layout, other addresses) or "changed"."""

    def rebind(self) -> Mapping[str, torch.Tensor]: ...

    def compute(self, meet: Callable[[tuple[int, ...], str], None]) -> None:
        """Fill the scratch among the roots from the present parameters; called if the layout has recipes or gathers.

        Call `meet(ranks, digest)` before gathering from those trainer ranks: see session/computing.py.
        """


class TrainerSession:
    """Made by `xfer.connect`; use that."""

    role = "trainer"

    def __init__(
        self,
        source: Source,
        rendezvous: str,
        token: str,
        *,
        replicas: int,
        deadline_s: float,
        bucket_bytes: int,
        drop: Sequence[str],
        narrow: Sequence[str],
        cache_dir: str | None,
    ):
        self.source, self.index, self.device = source, source.rank, source.device
        self.deadline_s, self.replicas = deadline_s, replicas
        self.attempt, self.version = 0, ""
        self._cache = PlanCache(cache_dir) if cache_dir else None
        self._hub: Hub | None = None
        self._until, self._open = time.monotonic() + deadline_s, False
        self._catalog: Catalog | None = None
        self._generation = 0
        self._inventory, self._names, self._roots, self._binding = b"", [], [], 0
        self._pending, self._pending_version, self._pending_want = 0, "", 0
        self._stale = False  # a layout was being read again and that did not end well
        self._specs = b""
        self._released = False
        self._drain: Drain | None = None  # of the last call; may run longer than that
        self._quarantine: list[list[torch.Tensor]] = []  # storages that somebody may still read
        settings = (
            ("bucket_bytes", str(bucket_bytes)),
            ("data plane", "nccl" if self.device.type == "cuda" else "gloo"),
        )
        if source.rank == 0:
            self._hub = Hub(
                rendezvous,
                token,
                HubOptions(source.world, replicas, deadline_s, bucket_bytes, tuple(drop), tuple(narrow), settings),
            )
        try:
            self._party = Party(
                rendezvous,
                token,
                "trainer",
                index=source.rank,
                size=source.world,
                deadline_s=deadline_s,
                settings=settings,
            )
        except BaseException:
            if self._hub is not None:
                self._hub.close()
            raise
        self._party.on_lane = self._lane

    # ---- connecting

    def open(self, wait: bool) -> None:
        """Publish the layout; with `wait`, until every replica has a plan and a link."""
        until = time.monotonic() + self.deadline_s
        try:
            self._take(self.source.read())
        except Exception as e:
            self._party.try_send(m.Failed(m.WireError.of(e, self._party.label)))
            raise
        self._specs = self._own_specs()
        self._party.send(m.Specs(self._specs))
        message = self._party.take(
            (m.CatalogMsg, m.Failed), until, "the catalog: other trainer ranks have not connected yet"
        )
        self._raise_failed(message)
        self._take_catalog(message)
        # If the hub has closed meanwhile, the reason is in the inbox already; a send that raises would hide it.
        self._party.try_send(m.InventoryMsg(self._inventory, self._generation))
        if wait:
            ready: set[int] = set()
            while len(ready) < self.replicas:
                missing = sorted(set(range(self.replicas)) - ready)
                try:
                    message = self._party.take(
                        (m.ReplicaReady, m.Failed, m.CatalogMsg),
                        until,
                        f"replicas {missing} have not joined; is xfer.serve() running for them?",
                    )
                except DeadlineExceeded as e:  # told first, or the others would only hear that this rank has left
                    self._party.try_send(m.Failed(m.WireError.of(e, self._party.label)))
                    raise
                if isinstance(message, m.CatalogMsg):
                    self._take_catalog(message)
                    self._party.try_send(m.InventoryMsg(self._inventory, self._generation))
                    continue
                self._raise_failed(message)
                ready.add(message.replica)
        self._open = True

    def _raise_failed(self, message: m.Message) -> None:
        if isinstance(message, m.Failed):
            raise message.error.error()

    def _take(self, layout: Layout) -> None:
        self._layout = layout

    def _take_catalog(self, message: m.CatalogMsg) -> None:
        self._catalog, self._generation = Catalog.from_bytes(message.catalog), message.generation
        self._make_inventory()

    def _make_inventory(self) -> None:
        made = trainer_inventory(
            self._catalog,
            rank=self.index,
            host=host_identity(),
            roots=self._layout.roots,
            fragments=self._layout.traced.fragments,
            recipes=(r.digest() for r in self._layout.traced.recipes),
        )
        self._inventory, self._names = made.to_bytes(), [r.name for r in made.roots]
        self._bind(self._layout.tensors)

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._roots = [tensors[name] for name in self._names]
        self._binding += 1

    def _lane(self, replica: int) -> Lane | None:
        return self._party.lanes.get(replica) or self._new_lane(replica)

    def _new_lane(self, replica: int) -> Lane | None:
        if not 0 <= replica < self.replicas:
            return None
        lane = self._party.lanes[replica] = Lane(self._party, self, replica, self.index, self._cache)
        return lane

    # ---- Side, for the lanes

    def catalog(self) -> Catalog:
        return self._catalog

    def inventory(self) -> bytes:
        return self._inventory

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        return self._binding, self._roots

    def before(self, go: m.Go, plan: SubPlan) -> None:
        pass

    def after(self, go: m.Go, plan: SubPlan, program: Program) -> tuple[m.Checksum, ...]:
        if not go.verify:
            return ()
        rows, shapes, first = program.rows, padded_shapes(self._catalog), plan.trainers
        out = []
        for worker in range(plan.workers):
            mine = rows[(rows["src"] == program.rank) & (rows["dst"] == first + worker)]
            value = checksum_rows(mine, self._roots, "src", shapes)
            if faults.wants("trainer", self.index, "checksum"):
                value ^= 1
            out.append(m.Checksum(worker, (value % (1 << 64)).to_bytes(8, "little")))
        return tuple(out)

    # ---- refitting

    def prepare(self) -> None:
        """Arm the engines for the next refit now; they stop serving until it has run."""
        self._party.send(m.Prepare(self.attempt + 1))

    def refit(
        self, *, version: str | int | None, verify: bool, wait: str, min_replicas: int | None, deadline_s: float | None
    ) -> RefitReport:
        began = time.perf_counter()
        if self._pending:
            try:
                self._finish(self._pending, self._pending_version, began, self._pending_want)
            except XferError as e:
                # This call is used up by the news, on this rank as on those that heard it earlier: attempts stay in step.
                self.attempt += 1
                self._party.try_send(m.Failed(m.WireError.of(e, self._party.label), self.attempt))
                raise
        self.attempt += 1
        number, name = self.attempt, str(self.attempt if version is None else version)
        seconds = self.deadline_s if deadline_s is None else deadline_s
        self._seconds = seconds
        until = time.monotonic() + seconds
        want = self.replicas if min_replicas is None else min_replicas
        try:
            faults.point("trainer", self.index, "enter")
            self._party.send(m.Enter(number, name, verify, want, seconds))
            if self._made_whole(number, until):
                specs, inventory = self._refresh()
                rebound = any(lane.rebound() for lane in self._party.lanes.values())
                seconds = self._drain.seconds + computing.compute(
                    self.source, self._layout, self._party, number, until, lambda: self._is_over(number)
                )
                self._party.send(m.Ready(number, seconds, specs, inventory, self._generation, rebound))
        except computing.Over:
            pass  # the outcome is here already
        except Exception as e:
            error = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}", where=self._party.label)
            self._party.try_send(m.Failed(m.WireError.of(error, self._party.label), number))
            if error is e:
                raise
            raise error from e
        if wait == "sources":
            return self._until_sources_free(number, name, began, want)
        return self._finish(number, name, began, want)

    def _made_whole(self, number: int, until: float) -> bool:
        """Drains. False: the attempt was over before that. DeadlineExceeded, naming who has not called, when it is still
        running then: it goes on by itself, and the next call waits for it first."""

        def over() -> bool:
            return self._is_over(number)

        if self._drain is not None and not self._drain.over:
            with contextlib.suppress(XferError):  # of a call that has had its error
                self._drain.wait(until, over, STOP_GRACE_S)
        if self._drain is None or self._drain.over:
            self._drain = Drain(self.source, self._party.label)
            if self._drain.wait(until, over, STOP_GRACE_S):
                return not over()
        why = "this rank's parameters were not made whole in time: gathers that were in flight wait for other ranks"
        self._party.try_send(
            m.Failed(m.WireError.of(DeadlineExceeded(why, where=self._party.label), self._party.label), number)
        )
        try:
            told = [o.error.error() for o in self._outcome(number).outcomes if o.error is not None]
        except XferError as e:
            told = [e]
        raise DeadlineExceeded(
            f"{why}; they go on waiting, so do not train before they ended",
            dict.fromkeys(line for e in told for line in (e.violations or (e.message,))),
            where=self._party.label,
        )

    def _is_over(self, number: int) -> bool:
        return any(
            isinstance(x, XferError) or isinstance(x, m.Outcome) and x.attempt == number
            for x in list(self._party.inbox.queue)
        )

    def _refresh(self) -> tuple[bytes, bytes]:
        """Re-read what a framework has moved since the last refit. Returns (specs, inventory), empty when unchanged.

        The adapter remembers what it was last asked for, so whatever fails here must be read again by the next call.
        """
        state = "changed" if self._stale else self.source.check()
        if state == "same" and self._released:
            state = "moved"  # or not; its storages were let go of
        self._released = False
        if state == "same":
            return b"", b""
        self._stale = True
        if state == "moved":
            self._bind(self.source.rebind())
            self._stale = False
            return b"", b""
        self._take(self.source.read())
        specs = self._own_specs()
        if specs != self._specs:
            self._specs, self._stale = specs, False
            return specs, b""  # the inventory follows the hub's answer: the catalog may have changed
        old = self._inventory
        self._make_inventory()
        self._stale = False
        return (b"", self._inventory) if self._inventory != old else (b"", b"")

    def _own_specs(self) -> bytes:
        return Catalog.union([(self._party.label, self._layout.traced.specs)]).to_bytes()

    def _outcome(self, number: int) -> m.Outcome:
        until = time.monotonic() + self._seconds + STOP_GRACE_S + SETTLE_GRACE_S + 10.0
        while True:
            try:
                message = self._party.take((m.Outcome, m.CatalogMsg, m.Failed), until, "the outcome of this refit")
            except (DeadlineExceeded, PeerLost) as e:
                self._stop_lanes(e)
                if any(lane.free_attempt < number <= lane.go_attempt for lane in self._party.lanes.values()):
                    raise PeerLost(
                        f"{e.message}; workers may still read this rank's parameters",
                        e.violations,
                        where=self._party.label,
                        drained=False,
                    ) from e
                raise
            if isinstance(message, m.CatalogMsg):
                self._answer(message, number)
            elif isinstance(message, m.Outcome) and message.attempt == number:
                return message
            # Failed: the outcome that follows tells it per replica; older outcomes belong to attempts that ended early here

    def _answer(self, message: m.CatalogMsg, number: int) -> None:
        """A new catalog, or the same one again for a rank whose exports changed."""
        self._stale = True
        try:
            self._take_catalog(message)
        except Exception as e:
            self._party.try_send(m.Failed(m.WireError.of(e, self._party.label), number))
            return
        self._stale = False
        self._party.send(m.InventoryMsg(self._inventory, self._generation))

    def _stop_lanes(self, error: XferError) -> bool:
        for lane in self._party.lanes.values():
            lane.cancel(error, None)
        return all([lane.wait_idle(STOP_GRACE_S) for lane in self._party.lanes.values()])

    def _finish(self, number: int, name: str, began: float, want: int) -> RefitReport:
        self._pending = 0
        outcome = self._outcome(number)
        if outcome.error is not None:
            raise outcome.error.error()
        if not all([lane.wait_idle(STOP_GRACE_S) for lane in self._party.lanes.values()]):
            raise PeerLost(
                "a transfer of this rank did not stop: its parameters may still be read",
                where=self._party.label,
                drained=False,
            )
        self._quarantine_if_read(outcome)
        report = self._report(name, tuple(ReplicaOutcome.of(o) for o in outcome.outcomes), began)
        report.raise_unless(want)
        self.version = name
        return report

    def _quarantine_if_read(self, outcome: m.Outcome) -> None:
        """PeerLost(drained=False) when a worker may still read this rank's storages; they are kept alive then."""
        readers = [
            r
            for o in outcome.outcomes
            if (lane := self._party.lanes.get(o.replica)) is not None and lane.pulled_out
            for r in o.readers
        ]
        if readers and (left := still_reading(readers)):
            self._quarantine.append(self._roots)
            raise PeerLost(
                "workers may still read this rank's parameters: do not write or free them before those have ended",
                left,
                where=self._party.label,
                drained=False,
            )

    def release(self) -> None:
        """See `Refit.release`."""
        until = time.monotonic() + self.deadline_s
        if not all([lane.wait_idle(self.deadline_s) for lane in self._party.lanes.values()]):
            raise DeadlineExceeded("a transfer of this rank is still running", where=self._party.label)
        self._party.send(m.Release())
        kept = []
        try:
            while not isinstance(
                message := self._party.take((m.Released, m.Outcome, m.Failed), until, "every worker to unmap"),
                m.Released,
            ):
                kept.append(message)
        finally:
            for message in kept:  # of a refit that returned early, or a replica that is gone: for the next call
                self._party.inbox.put(message)
        for lane in self._party.lanes.values():
            lane.forget_routes()
        self._roots, self._released = [], True
        self._layout = replace(self._layout, tensors={})

    def _unread(self, replica: int, number: int) -> bool:
        """Whether this replica reads nothing of this rank in attempt `number` any more. A lane alone cannot tell: one
        that is idle may not have begun, and a replica that is still joining has none yet."""
        lane = self._party.lanes.get(replica)
        if lane is not None and lane.free_attempt >= number:
            return True
        # Idle after that word: a Go of this attempt would have been posted to the lane before it.
        return self._party.drained.get(replica, 0) >= number and (lane is None or lane.wait_idle(0.0))

    def _until_sources_free(self, number: int, name: str, began: float, want: int) -> RefitReport:
        """Return when this rank's storage is no longer read; the outcome is collected by the next call."""
        until = time.monotonic() + self._seconds + STOP_GRACE_S
        while not all(self._unread(r, number) for r in range(self.replicas)):
            early = [
                x
                for x in list(self._party.inbox.queue)
                if isinstance(x, XferError) or isinstance(x, m.Outcome) and x.attempt == number
            ]
            if early or time.monotonic() > until:
                return self._finish(number, name, began, want)
            if any(isinstance(x, m.CatalogMsg) for x in list(self._party.inbox.queue)):
                message = self._party.take((m.CatalogMsg, m.Outcome), until, "the catalog")
                if isinstance(message, m.CatalogMsg):
                    self._answer(message, number)
                else:
                    self._party.inbox.put(message)  # looked at in the next round
            time.sleep(0.0005)
        self._pending, self._pending_version, self._pending_want = number, name, want
        return self._report(name, (), began, pending=True)

    def _report(
        self, name: str, outcomes: tuple[ReplicaOutcome, ...], began: float, pending: bool = False
    ) -> RefitReport:
        lanes = [lane for lane in self._party.lanes.values() if lane.plan is not None]
        full = sum(lane.plan.summary.broadcast_bytes for lane in lanes)
        sent = sum(lane.planned_bytes()[1] for lane in lanes)
        return RefitReport(
            self.index,
            name,
            time.perf_counter() - began,
            outcomes,
            sent,
            full,
            sum(lane.extra_bytes for lane in lanes) + computing.scratch_bytes(self._layout),
            pending,
        )

    def explain(self) -> str:
        lanes = [
            f"replica {r}\n{lane.explain()}" for r, lane in sorted(self._party.lanes.items()) if lane.plan is not None
        ]
        return "\n\n".join(filter(None, [*lanes, computing.explain(self._layout, self._party.label)]))

    def close(self) -> None:
        self._party.close()
        if self._hub is not None:
            time.sleep(0.05)  # let the others' goodbyes arrive before the socket goes
            self._hub.close(0.0 if self._open else min(self._until, time.monotonic() + STOP_GRACE_S))
