"""A model of a job: a real Coordinator, and models of the processes around it that send what real ones send.

Nothing here has a thread, a socket or a clock. Messages wait in queues, in order per connection, until a test delivers
them; what a process does between two messages waits in its `todo`. So a test chooses the order of all events.

`Job.check` holds what must be true at any moment, `Job.settle` lets everything that can happen happen.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

from xfer.coordinator import messages as m
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.deadlines import CALL_GRACE_S, HOLD_S, SETTLE_GRACE_S, STOP_GRACE_S
from xfer.coordinator.events import Close, Connected, Disconnected, Event, Received, Send, Tick
from xfer.coordinator.layouts import pack_specs
from xfer.coordinator.relays import ALL_PARTS
from xfer.coordinator.state import Options
from xfer.errors import PeerLost, PlanMismatch, XferError
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec

WRITING = "bytes of two versions"
NOTHING = ""
DEADLINE_S = 60.0
LIVELOCK = 5000


@cache
def specs(variant: int) -> bytes:
    """Return what a trainer exports: one tensor, in odd variants two."""
    some = [TensorSpec(f"t{i}", (4,), "bfloat16") for i in range(1 + variant % 2)]
    return pack_specs(Catalog.union([("trainer", some)]).to_bytes(), [])


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@dataclass(eq=False)
class Process:
    """One connection's other end.

    `hung`: the process is stopped; its connection stays open. `sent` is on its way to the coordinator, `heard` on its way to this
    process; None there is the connection's end. `ended`: by refit, what its lanes have moved and not reported.
    """

    job: Job
    role: str
    index: int
    replica: int = 0
    number: int = 0
    alive: bool = True
    hung: bool = False
    connected: bool = True
    sent: deque[m.Message] = field(default_factory=deque)
    heard: deque[m.Message | None] = field(default_factory=deque)
    todo: deque[Callable[[], None]] = field(default_factory=deque)
    said: list[m.Message] = field(default_factory=list)
    error: str = ""
    ended: dict[int, list[m.Moved]] = field(default_factory=dict)

    def say(self, message: m.Message) -> None:
        if self.connected and self.alive:
            m.decode(m.encode(message))
            self.sent.append(message)
            self.said.append(message)

    def fail(
        self, why: str, attempt: int = 0, replica: int = -1, epoch: int = 0, kind: type[XferError] = XferError
    ) -> None:
        self.say(m.Failed(m.WireError.of(kind(why), self.role), attempt, replica, epoch))

    def moved(self, attempt: int, moved: m.Moved) -> None:
        """A lane has ended; its report may travel with those of lanes that end a little later."""
        batch = self.ended.setdefault(attempt, [])
        batch.append(moved)
        if len(batch) == 1:
            self.todo.append(lambda: self._say_done(attempt))
        if not self.job.holds:
            self._say_done(attempt)

    def _say_done(self, attempt: int) -> None:
        batch = self.ended.pop(attempt, None)
        if batch:
            self.say(m.Done(attempt, tuple(x.replica for x in batch), tuple(batch)))

    def hear(self, message: m.Message | None) -> None:
        raise NotImplementedError

    def time_passed(self) -> None: ...


@dataclass(eq=False)
class Lane:
    """One rank's part in one replica, as participants/lane.py has it: the epoch, and why what runs of it must end."""

    owner: Process
    replica: int
    epoch: int = 0
    cancelled: str = ""
    moving: int = 0  # the refit that it moves bytes of; it may have been cancelled
    plan: str = ""
    planned_from: bytes = b""
    broken: bool = False  # the communicator: an abort while it was used breaks it for good
    source: int = 0  # in a relay chain: the worker, by its connection, that this one reads from
    brought: int = 0  # the last refit of which that one has said that it has all bytes
    waits: m.Go | None = None  # for that word
    done: int = 0

    def hear(self, message: m.Message) -> None:
        o = self.owner
        if isinstance(message, m.Abort):
            if message.epoch >= self.epoch:
                self.cancelled = message.error.message or "aborted"
                self.broken = True
        elif isinstance(message, m.PlanInputs | m.OpenLink):
            if message.epoch != self.epoch:
                self.epoch, self.cancelled = message.epoch, ""
            o.todo.append(lambda: self._opened(message))
        elif isinstance(message, m.Go):
            o.todo.append(lambda: self._begin(message, self.epoch))
        elif isinstance(message, m.PartReady):
            self.brought = message.attempt if message.part == ALL_PARTS else self.brought
        elif isinstance(message, m.CloseRoutes):
            o.todo.append(lambda: o.say(m.RoutesClosed(self.replica)))
        self.go_on()

    def go_on(self) -> None:
        """Continue a transfer that waits for the worker before it, if that one has all bytes or the refit has ended."""
        if self.waits is not None and (self.cancelled or self.brought == self.waits.attempt):
            go, self.waits = self.waits, None
            self.owner.todo.append(lambda: self._end(go))

    def _opened(self, message: m.PlanInputs | m.OpenLink) -> None:
        o = self.owner
        if message.epoch != self.epoch or self.cancelled:
            return
        if o.job.faults.pop((o, type(message)), None):
            return o.fail("it cannot be done", 0, self.replica, message.epoch)
        if isinstance(message, m.PlanInputs) or message.fresh:
            self.broken = False
        if isinstance(message, m.PlanInputs):
            self.plan = digest(message.trainers, message.workers)
            rolls = o.job.coordinator.planning.layouts._rolls
            roll = rolls[message.trainers if o.role == "trainer" else message.workers]
            self.planned_from = roll.inventories[o.index]
            o.say(m.Planned(self.replica, message.epoch, self.plan))
        elif o.inventory() != self.planned_from:
            o.fail("the plan was made from another layout", 0, self.replica, message.epoch, PlanMismatch)
        elif o.role == "worker" and message.relay:
            self.source = int(message.before or b"0")
            o.say(m.LinkOpen(self.replica, message.epoch, b"%d" % o.number, bool(self.source)))
        else:
            o.say(m.LinkOpen(self.replica, message.epoch))

    def _begin(self, go: m.Go, epoch: int) -> None:
        if self.cancelled or epoch != self.epoch:
            return self.owner.fail("cancelled", go.attempt, self.replica, epoch, PeerLost)
        role = self.owner.role
        assert go.epoch == self.epoch, f"{role}: go in epoch {go.epoch}, its link is of {self.epoch}"
        assert self.owner.inventory() == self.planned_from, f"{role} moves by a plan of a layout that is gone"
        assert not self.broken, f"{role} moves over a communicator that an abort has broken"
        self.moving = go.attempt
        self.owner.begun(go)
        self.owner.todo.append(lambda: self._end(go))

    def _end(self, go: m.Go) -> None:
        if self.source and self.brought != go.attempt and not self.cancelled:
            self.waits = go
            return
        self.moving = 0
        fault = self.owner.job.faults.pop((self.owner, m.Go), None)
        if self.cancelled:
            return
        if fault:
            self.cancelled = "its own error"
            return self.owner.fail("bytes could not be moved", go.attempt, self.replica, self.epoch)
        sums = self.owner.sums(go) if go.verify else ()
        self.owner.done(go)
        self.done = go.attempt
        self.owner.moved(go.attempt, m.Moved(self.replica, 1, 1, 0.0, 0.0, 0.0, 0.0, sums))


class Trainer(Process):
    def start(self) -> None:
        self.lanes = {r: Lane(self, r) for r in range(self.job.options.replicas)}
        self.variant, self.layout, self.generation = 0, 0, 0
        self.attempt, self.until, self.called = 0, 0.0, False
        self.free: dict[int, int] = {}  # replica -> the last refit of which it was told `Drained`
        self.void: set[int] = set()
        self.outcome: m.Outcome | None = None
        self.releases = 0
        self.slow = False  # its drain waits for the test
        self._changed: dict = {}
        self.say(m.Hello("trainer", self.index, self.job.options.trainers, 0, f"host{self.index}", 1))

    def inventory(self) -> bytes:
        return digest("trainer", self.layout, self.generation).encode()

    def call(self, label: int | None, verify: bool, deadline_s: float) -> None:
        self.attempt += 1
        while self.attempt in self.void:
            self.attempt += 1
        self.called, self.outcome, self.error = True, None, ""
        self.until = self.job.now + deadline_s
        self._call = (label, verify, deadline_s)
        self.say(m.Enter(self.attempt, label, verify, 0, deadline_s))
        if not self.slow:
            self.todo.append(self.ready)

    def ready(self) -> None:
        if not self.called:
            return
        if self.job.faults.pop((self, m.Ready), None):
            return self.fail("a gather failed", self.attempt)
        news, self._changed = self._changed, {}
        if "inventory" in news:
            news["inventory"] = self.inventory()
        broken = tuple(r for r, lane in self.lanes.items() if lane.cancelled)
        self.say(m.Ready(self.attempt, 0.0, generation=self.generation, broken=broken, **news))

    def change(self, what: str) -> None:
        if what == "rebound":
            news = {"rebound": True}
        elif what == "inventory":
            self.layout += 1
            news = {"inventory": b"later"}
        else:
            self.variant += 1
            news = {"specs": specs(self.variant)}
        self._changed |= news

    def hear(self, message: m.Message | None) -> None:
        if message is None:
            self.connected, self.called = False, False
            for lane in self.lanes.values():
                lane.cancelled = "the connection ended"
        elif isinstance(message, m.Welcome):
            self.todo.append(lambda: self.say(m.Specs(specs(self.variant))))
        elif isinstance(message, m.CatalogMsg):
            self.generation = message.generation
            self.todo.append(lambda: self.say(m.InventoryMsg(self.inventory(), self.generation)))
        elif isinstance(message, m.Go):
            for replica, go in message.each():
                self.lanes[replica].hear(go)
        elif isinstance(message, m.PlanInputs | m.OpenLink | m.Abort | m.CloseRoutes):
            self.lanes[message.replica].hear(message)
        elif isinstance(message, m.Drained):
            self.free.update(dict.fromkeys(message.replicas, message.attempt))
        elif isinstance(message, m.Outcome):
            if message.void:
                self.void.add(message.attempt)
            if self.called and message.attempt == self.attempt:
                self.called, self.outcome = False, message
                if message.void:
                    self.call(*self._call)

    def time_passed(self) -> None:
        if self.called and self.job.now > self.until + CALL_GRACE_S:
            self.called, self.error = False, "no answer in time"
            self.fail("no answer in time", self.attempt)
            for lane in self.lanes.values():
                lane.cancelled = lane.cancelled or "its rank gave up"

    def begun(self, go: m.Go) -> None: ...

    def done(self, go: m.Go) -> None: ...

    def sums(self, go: m.Go) -> tuple[m.Checksum, ...]:
        return tuple(m.Checksum(w, bytes(8)) for w in range(self.job.workers))


class Worker(Process):
    """`content`: what lies in the live storage. `receiving`: the refit whose receive call it is in."""

    def start(self, engine: Engine) -> None:
        self.engine, self.lane = engine, Lane(self, self.replica)
        self.receiving, self.due, self.inbox = 0, 0.0, deque()
        self.generation, self.layout, self.joined, self.kept_out = 0, 0, False, False
        self.stopping: m.Abort | None = None
        content = self.content
        holds = "whole" if content not in (WRITING, NOTHING) else "mix" if content == WRITING else "nothing"
        version = content if holds == "whole" else None
        self.moves = False  # its storages are others when it arms
        hello = "worker", self.index, self.job.workers, self.replica, "engine", 1
        self.say(m.Hello(*hello, holds=holds, version=version))

    @property
    def content(self) -> str:
        return self.engine.contents[self.index]

    @content.setter
    def content(self, value: str) -> None:
        self.engine.contents[self.index] = value

    def inventory(self) -> bytes:
        return digest("worker", self.index, self.layout, self.generation).encode()

    def receive(self, attempt: int, deadline_s: float) -> None:
        """The engine's update call reached this worker."""
        if not self.alive:
            return
        if not self.joined:
            self.fail("it never joined", attempt, self.replica)
            self.say(m.Stopped(self.replica, attempt, self.content == WRITING))
            return self.engine.returned(self, failed=True)
        if not self.connected:
            return self.engine.returned(self, failed=True)
        self.receiving, self.due, self.stopping = attempt, self.job.now + deadline_s, None
        self.todo.append(self._arm)

    def _arm(self) -> None:
        if not self.receiving:
            return
        if self.job.faults.pop((self, m.Armed), None):
            return self._give_up("it cannot arm")
        news = {}
        if self.moves:
            self.moves, self.layout = False, self.layout + 1
            news = {"rebound": True, "inventory": self.inventory()}
        self.say(m.Armed(self.receiving, generation=self.generation, in_step=self.job.in_step, **news))
        while self.inbox and self.receiving:
            self._take(self.inbox.popleft())

    def hear(self, message: m.Message | None) -> None:
        if message is None:
            self.connected = False
            self.lane.cancelled = "the connection ended"
            self.lane.go_on()
            if self.receiving:
                self._give_up("the connection ended")
        elif isinstance(message, m.PlanInputs | m.OpenLink | m.Go | m.PartReady | m.Abort | m.CloseRoutes):
            self.lane.hear(message)
            if isinstance(message, m.Abort):
                self._for_main(message)
        else:
            self._for_main(message)

    def _for_main(self, message: m.Message) -> None:
        if not self.inbox and (self.receiving or not (self.joined or self.kept_out)):
            self._take(message)
        else:
            self.inbox.append(message)

    def _take(self, message: m.Message) -> None:
        """On the worker's main thread."""
        if isinstance(message, m.CatalogMsg):
            self.generation = message.generation
            self.todo.append(self._read)
        elif isinstance(message, m.ReplicaReady) and not self.joined:
            self.joined = True
            if self.job.faults.pop((self, m.ReplicaReady), None):
                self.joined, self.kept_out = False, True
                self.fail("no lock", 0, self.replica)
        elif isinstance(message, m.Failed) and self.receiving:
            self._give_up(message.error.message)
        elif isinstance(message, m.Failed) and not self.joined and not self.kept_out:
            self.kept_out = True
            self.fail(message.error.message, 0, self.replica)
        elif isinstance(message, m.Commit) and message.attempt == self.receiving:
            self.job.decided(self, message.attempt, True)
            assert (self, message.attempt) not in self.job.corrupt, "a version was committed whose checksums differ"
            if self.job.faults.pop((self, m.Commit), None):
                return self._give_up("it cannot install")
            self.content = str(message.version)
            self.say(m.Committed(self.replica, message.attempt))
            self._leave(failed=False)
        elif isinstance(message, m.CallAgain) and message.attempt == self.receiving:
            self._leave(failed=False)
        elif isinstance(message, m.Abort) and message.attempt == self.receiving:
            self.job.decided(self, message.attempt, False)
            if self.lane.moving:
                self.stopping = message  # once its lane has come to rest
            else:
                self._stopped()

    def _read(self) -> None:
        if not self.joined and self.job.faults.pop((self, m.InventoryMsg), None):
            self.kept_out = True
            return self.fail("it cannot read its layout", 0, self.replica)
        self.say(m.InventoryMsg(self.inventory(), self.generation))

    def _stopped(self) -> None:
        attempt = self.receiving
        self.say(m.Stopped(self.replica, attempt, self.content == WRITING, not self.lane.moving))
        self._leave(failed=False)

    def _give_up(self, why: str) -> None:
        attempt = self.receiving
        self.fail(why, attempt, self.replica)
        self.lane.cancelled = self.lane.cancelled or why
        self.lane.go_on()
        self.say(m.Stopped(self.replica, attempt, self.content == WRITING, not self.lane.moving))
        self._leave(failed=True)

    def _leave(self, failed: bool) -> None:
        self.receiving, self.stopping = 0, None
        self.engine.returned(self, failed)

    def begun(self, go: m.Go) -> None:
        if not self.lane.source:
            self.job.check_reads(self, go)
        self.content = WRITING

    def done(self, go: m.Go) -> None:
        if self.lane.source:
            (source,) = [p for p in self.job.processes if p.number == self.lane.source]
            assert source.lane.done == go.attempt, "a worker has bytes that the one before it in the chain has not"

    def sums(self, go: m.Go) -> tuple[m.Checksum, ...]:
        wrong = self.job.faults.pop((self, m.Checksum), None)
        if wrong:
            self.job.corrupt.add((self, go.attempt))
        return (m.Checksum(self.index, bytes([1 if wrong else 0, *[0] * 7])),)

    def time_passed(self) -> None:
        if self.stopping is not None and not self.lane.moving:
            self._stopped()
        if self.receiving and self.job.now > self.due + STOP_GRACE_S:
            self._give_up("no decision in time")


class Engine:
    """One vLLM: `serving`, and what lies in its workers' storage. It outlives controllers and connections."""

    def __init__(self, job: Job, replica: int):
        self.job, self.replica = job, replica
        self.contents = ["0"] * job.workers
        self.serving, self.torn = True, False
        self.workers: list[Worker] = []
        self.controller: Controller | None = None
        self.inside: set[Worker] = set()
        self.failed = False

    def returned(self, worker: Worker, failed: bool) -> None:
        self.inside.discard(worker)
        self.failed = self.failed or failed


class Controller(Process):
    def start(self, engine: Engine) -> None:
        self.engine, self.version = engine, None
        self.visit: m.Arm | None = None
        self.due, self.verdict, self.later = 0.0, None, deque()
        self.ready = self.kept_out = self.to_open = self.again = False
        self.say(m.Hello("controller", 0, self.job.workers, self.replica, "engine", 1))

    def hear(self, message: m.Message | None) -> None:
        if message is None:
            self.connected = False
            if self.visit is not None and self.verdict is None:
                self.verdict = m.Settle(self.visit.attempt, True, m.WireError.of(PeerLost("gone"), ""))
            return
        if isinstance(message, m.Welcome):
            self.todo.append(self._join)
        elif isinstance(message, m.ReplicaReady):
            self.ready = True
        elif isinstance(message, m.Failed) and message.replica == self.replica:
            self.kept_out = True  # while it joins; later than that, a process of the replica is gone
        elif isinstance(message, m.CallAgain):
            self.again = self.visit is not None and message.attempt == self.visit.attempt
        elif self.visit is not None and not isinstance(message, m.Commit | m.Settle):
            self.later.append(message)
        else:
            self._take(message)

    def _join(self) -> None:
        e = self.engine
        whole = len(set(e.contents)) == 1 and e.contents[0] not in (WRITING, NOTHING)
        e.torn = not whole
        e.serving = whole
        self.job.bring_workers(e)

    def _take(self, message: m.Message) -> None:
        if isinstance(message, m.Arm):
            self.visit, self.verdict = message, None
            self.due, self.to_open = self.job.now + message.deadline_s, True
        elif isinstance(message, m.Commit | m.Settle) and self.visit and message.attempt == self.visit.attempt:
            self.verdict = message

    def _open(self) -> None:
        e, arm, self.to_open = self.engine, self.visit, False
        e.serving, e.failed, e.inside = False, False, {w for w in e.workers if w.alive}
        for w in e.workers:
            w.receive(arm.attempt, arm.deadline_s)

    def time_passed(self) -> None:
        """Winds the visit up once the decision is here and the update call has returned."""
        arm, e = self.visit, self.engine
        if arm is None:
            return
        if self.to_open and all(w.joined or w.kept_out or not w.alive for w in e.workers):  # its init call has returned
            self._open()
        if self.again and not e.inside:
            self.again = False
            self._open()
        if self.verdict is None and self.job.now > self.due + STOP_GRACE_S + SETTLE_GRACE_S:
            self.verdict = m.Settle(arm.attempt, True, m.WireError.of(PeerLost("silence"), ""))
        if self.verdict is None or e.inside or self.to_open or self.job.faults.get((self, m.Settled)):
            return
        verdict, self.visit, self.again = self.verdict, None, False
        if isinstance(verdict, m.Commit):
            good = not e.failed
            e.torn, e.serving = not good, good
            self.version = verdict.version if good else None
        elif verdict.dirty:
            e.torn, e.serving, self.version = True, False, None
        elif not e.torn:
            e.serving = True
        self.say(m.Settled(arm.attempt, self.version if e.serving else None, e.serving, 0.0))
        while self.later and self.visit is None:
            self._take(self.later.popleft())


class Job:
    """All of it. `faults`: (process, kind of message) -> True makes the process fail where it would say or do that."""

    def __init__(
        self,
        trainers: int,
        replicas: int,
        workers: int,
        seed: int = 0,
        relay: bool = False,
        in_step: bool = False,
        holds: bool = False,
    ):
        self.workers, self.in_step, self.holds, self.now = workers, in_step, holds, 1000.0
        self.options = Options(trainers, replicas, DEADLINE_S, 1 << 20, relay=relay)
        self.coordinator = Coordinator(self.options, "session", self.now)
        self.coordinator.hold_s = HOLD_S if holds else 0.0
        self.random = random.Random(seed)
        self.processes: list[Process] = []
        self.numbers = itertools.count(1)
        self.faults: dict[tuple[Process, type], bool] = {}
        self.corrupt: set[tuple[Worker, int]] = set()  # whose bytes differ from what was sent
        self.verdicts: dict[tuple[Worker, int], bool] = {}
        self.steps = 0
        self.trainers = [self._new(Trainer, "trainer", i) for i in range(trainers)]
        self.engines = [Engine(self, r) for r in range(replicas)]
        for t in self.trainers:
            t.start()
        for e in self.engines:
            self.serve(e)

    def _new(self, kind: type, role: str, index: int, replica: int = 0) -> Process:
        p = kind(self, role, index, replica, next(self.numbers))
        self.processes.append(p)
        self.give(Connected(p.number))
        return p

    def serve(self, engine: Engine) -> None:
        """A new controller for an engine, after its owner closed the old one; the workers' old sessions are closed."""
        if engine.controller is not None:
            self.end(engine.controller)
        engine.controller = self._new(Controller, "controller", 0, engine.replica)
        engine.controller.start(engine)

    def bring_workers(self, engine: Engine) -> None:
        for w in engine.workers:
            self.end(w)
        engine.workers = [self._new(Worker, "worker", i, engine.replica) for i in range(self.workers)]
        for w in engine.workers:
            w.start(engine)

    # ---- events

    def give(self, event: Event) -> None:
        self.steps += 1
        by_number = {p.number: p for p in self.processes}
        for effect in self.coordinator.handle(event, self.now):
            if isinstance(effect, Send):
                m.encode(effect.message)
            for number in effect.clients if isinstance(effect, Send) else [getattr(effect, "client", 0)]:
                p = by_number.get(number)
                if p is None or not p.connected:
                    continue
                if isinstance(effect, Send):
                    p.heard.append(effect.message)
                elif isinstance(effect, Close):
                    p.heard.append(None)
                    p.sent.clear()
        failure = self.coordinator.failure
        assert failure is None or "the coordinator failed" not in failure.message, failure

    def possible(self) -> Iterator[Callable[[], None]]:
        for p in self.processes:
            if p.sent:
                yield lambda p=p: self.give(Received(p.number, p.sent.popleft()))
            if p.alive and not p.hung:
                if p.heard:
                    yield lambda p=p: self._hear(p)
                if p.todo:
                    yield lambda p=p: p.todo.popleft()()

    def _hear(self, p: Process) -> None:
        message = p.heard.popleft()
        p.hear(message)
        if message is None:
            self.give(Disconnected(p.number, "closed"))

    def step(self) -> bool:
        """One thing that can happen happens. False when nothing can."""
        some = list(self.possible())
        if not some:
            return False
        self.random.choice(some)()
        self.after()
        return True

    def after(self) -> None:
        for p in self.processes:
            if p.alive and not p.hung:
                p.time_passed()
        self.check()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.give(Tick())
        self.after()

    def run(self, steps: int = LIVELOCK) -> None:
        for _ in range(steps):
            if not self.step():
                return
        assert steps < LIVELOCK, "messages go round and round"

    def settle(self, seconds: float = 4 * DEADLINE_S) -> None:
        """Until nothing happens any more, however much time passes."""
        self.run()
        until = self.now + seconds
        while (wake := self.coordinator.wake_at) is not None and self.now < until:
            self.pass_time(min(max(wake - self.now, 0.01), 1.0))
            self.run()

    def end(self, p: Process, dead: bool = True) -> None:
        """A process is killed, or (dead False) loses its connection and lives on."""
        if dead:
            p.alive = False
            if isinstance(p, Worker):
                p.engine.inside.discard(p)
                p.engine.failed = True
        if p.connected:
            if dead:
                p.connected = False
                p.heard.clear()
            else:
                p.heard.append(None)
                return
            self.give(Disconnected(p.number, "connection reset"))
        p.sent.clear()

    # ---- what must be true

    def check(self) -> None:
        for e in self.engines:
            if e.serving:
                whole = len(set(e.contents)) == 1 and e.contents[0] != WRITING
                assert whole, f"replica {e.replica} serves {e.contents}"

    def decided(self, worker: Worker, attempt: int, commit: bool) -> None:
        """A worker heard the decision of a refit: one that heard Commit never hears anything else."""
        before = self.verdicts.setdefault((worker, attempt), commit)
        assert before == commit, (
            f"replica {worker.replica} worker {worker.index} heard two decisions of refit {attempt}"
        )
        beside = [(w, v) for (w, n), v in self.verdicts.items() if n == attempt and w.engine is worker.engine]
        others = {v for w, v in beside if w.connected}
        assert len(others) == 1 or not commit, f"replica {worker.replica}: refit {attempt} was decided in two ways"

    def check_reads(self, worker: Worker, go: m.Go) -> None:
        """A worker begins to read trainers' storages: no trainer may have been told that it is done with."""
        for t in self.trainers:
            free = t.free.get(worker.replica, 0)
            assert free < go.attempt, f"trainer {t.index} was told Drained before {worker.index} began"

    def refit(self, **how: object) -> list[m.Outcome | None]:
        """All trainers call, and everything happens. Their outcomes."""
        label = how.pop("version", None)
        for t in self.trainers:
            t.call(label, bool(how.get("verify", True)), float(how.get("deadline_s", DEADLINE_S)))
        self.settle()
        return [t.outcome for t in self.trainers]
