"""A job of real participants inside a simulation, with what a test may do to it: stop, kill, fail at a point, change. Only the trainers'
and the engines' frameworks are small stand-ins (world.py), which check what xfer promises them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import torch

from tests.support import cpu_peer, fp8_engine, world
from tests.support.simulation import Simulation
from tests.support.world import REFIT, Meets, ToyEngine, ToySource, ToyTaker, World
from xfer import faults
from xfer.arguments import RefitOptions
from xfer.coordinator import coordinator
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import CALL_GRACE_S, HOLD_S, TOGETHER_S
from xfer.errors import EngineLost, VerificationError, XferError
from xfer.kernels import checksum
from xfer.kernels.block_fp8 import ScaleRule
from xfer.participants.controller import Controller, ControllerPhase, _EngineCalls
from xfer.plan import planner
from xfer.transport import peer_host, routes

DEADLINE_S = 60.0
SOON_S = 2 * TOGETHER_S
"""Longer than what anything waits for on purpose while every process answers; a fraction of any deadline."""
LATE = (m.Armed, m.Done, m.Committed, m.Stopped, m.Settled, m.Planned, m.LinkOpen, m.RoutesClosed)
SHAPES = {"layers.0.w": (24, 12), "embed": (36, 8), "norm": (12,)}
value = cache(ToySource.value)
made: dict[object, object] = {}
"""What pure functions of xfer have returned, in any simulation of this process: by their names and by what they depend on."""


def once(owner: object, name: str, key: Callable) -> tuple[object, str, Callable]:
    """A pure function that computes only what it has not computed before; `key` is called with its arguments."""
    real = getattr(owner, name)

    def call(*args):
        at = name, key(*args)
        if at not in made:
            made[at] = real(*args)
        return made[at]

    return owner, name, call


def chunk(mixer: checksum._Mixer, totals: torch.Tensor, space, own: str, final: str, where: checksum.Placed) -> None:
    """The sum of these bytes in this place, as `once`."""
    extent, strides = [n for n, _, _ in where.dims], [s for _, s, _ in where.dims]
    data = space.view(torch.uint8, where.offset, [*extent, checksum.ITEMSIZE[own]], [*strides, 1]).numpy().tobytes()
    at = own, final, where.index, where.salts, *((n, c) for n, _, c in where.dims), data
    if at not in made:
        summed(mixer, alone := torch.zeros_like(totals), space, own, final, where)
        made[at] = alone
    totals += made[at]


summed = checksum._Mixer._chunk
digests = lambda some: tuple(i.digest() for i in some)  # noqa: E731
KNOWN = (
    once(planner, "make_draft", lambda c, s, d, options: (c.digest(), digests(s), digests(d), options.for_draft())),
    once(planner, "finish", lambda draft, deal, key, options: key),
    (checksum._Mixer, "_chunk", chunk),
)
"""A third of the time of a simulation is theirs."""


def maps(plane) -> bool:
    """Whether a rank has mapped the storages of others by this plane."""
    return bool(plane._routed and plane._routed.mapping.number in cpu_peer.MAPPED or not plane.unmapped)


class Source(Meets):
    """`computes`: it meets the other ranks before it is ready, as ranks do that gather together. Rank 0 does not know that its drain
    waits for nobody."""

    job: Job
    computes = let = False
    finish_gathers = ToySource.drain
    value = staticmethod(lambda name, shape, version: value(name, tuple(shape), version))

    def read(self):
        layout = super().read() if self.computes else ToySource.read(self)
        self.point("look")  # now: the next `check` compares with what this look has seen
        return layout

    def finishes_alone(self) -> bool:
        return self.rank > 0

    def begin_check(self) -> Callable[[], bool] | None:
        """It sees addresses, and what it returns sees strides."""
        there = [now[0] for now in self._now()] == [then[0] for then in self._ptrs]
        return (lambda: self.check() == "same") if there else None

    def let_go(self) -> None:
        self.let = True

    def point(self, where: str) -> None:
        self.job.point("trainer", self.rank, where)


class Taker(ToyTaker):
    """`changes`: what its storages do before the next look at them in a pause. `looks`: (in a pause, quick) of all looks."""

    engine: Engine
    changes = ""
    looks: list[tuple[bool, bool]]

    def check(self, quick: bool = False) -> str:
        now = ""
        self.looks.append((self.engine.paused, quick))
        if self.engine.paused:
            now, self.changes = self.changes, ""
        if now == "moves":
            for name, old in list(self.live.items()):
                self.live[name] = old.clone()
        elif now == "turns":
            world.turned(self.live)
        elif now == "turns_within":
            world.turned_within(self.live["layers.0.w"])
        return super().check(quick)

    def read(self, catalog):
        layout = super().read(catalog)
        self.engine.job.point("worker", self.rank, "look")
        return layout

    def engage_lock(self) -> None:
        self.engine.job.sim.must(self.engine.paused, f"{self.engine.name} is written while it serves")
        super().engage_lock()

    def held(self, versions: int) -> int | None:
        """The version that lies in the live storage; 0: none yet, None: bytes of two."""
        if all((t == 7.0).all() for t in self.live.values()):
            return 0
        return next((v for v in range(versions, 0, -1) if not self.wrong(v)), None)


class Fp8Taker(Taker, fp8_engine.Fp8Taker):
    """Serves one matrix in FP8. It is smaller than a block, of which each trainer has some rows."""

    all_shapes, matrices = SHAPES, ("layers.0.w",)

    def __init__(self, rank: int, workers: int, _):
        super().__init__(rank, workers)
        for t in self.live.values():
            t.fill_(7)


class Engine(ToyEngine):
    """Carries out one call after the other, as an engine's core does, and dies with each of its workers."""

    def __init__(self, job: Job, replica: int):
        self.job, self.replica, self.name, self.dead = job, replica, f"engine {replica}", False
        self.life = next(job.sim.numbers)
        self.slow: dict[str, float] = {}  # seconds that the next call of a name takes
        super().__init__(0)
        rule = job.forms[len(job.made) % len(job.forms)]
        job.made.append(self)
        self.takers = [(Fp8Taker if rule else Taker)(i, job.workers, SHAPES) for i in range(job.workers)]
        for t in self.takers:
            t.engine, t.rule, t.looks = self, rule, []
        self.in_step, self._core = job.in_step, threading.Lock()

    def worker(self, index: int) -> str:
        """The name of its process."""
        return f"replica {self.replica} worker {index} of life {self.life}"

    def _did(self, what: str) -> None:
        if what in ("pause", "resume"):
            self.job.told.append((self.replica, what))
        self.job.point("engine", self.replica, what)
        if seconds := self.slow.pop(what, 0.0):
            self.job.nap(seconds)
        if self.dead:
            raise EngineLost("the engine has died")
        super()._did(what)

    def _all(self, call) -> None:
        sim, left = self.job.sim, []
        for i in range(len(self.takers)):
            with sim.process(self.worker(i)):
                left.append(threading.Thread(target=call, args=(i,)))
                left[-1].start()
        sim.block(lambda: self.dead or not any(t.is_alive() for t in left))
        if self.dead:
            raise EngineLost("the engine has died")

    def core(self, call, timeout: float) -> None:
        """In the engine's process, which outlives its controllers: after the calls before it."""
        raised: list[Exception] = []

        def run() -> None:
            with self._core:
                try:
                    call()
                except Exception as e:
                    raised.append(e)

        with self.job.sim.process(self.name):
            thread = threading.Thread(target=run)
            thread.start()
        self.job.sim.block(lambda: self.dead or not thread.is_alive(), self.job.sim.now + timeout)
        if raised or self.dead or thread.is_alive():
            raise (raised or [EngineLost("the engine does not answer")])[0]

    def init(self, info, timeout) -> None:
        self.core(lambda: super(Engine, self).init(info, timeout), timeout)

    def update(self, info, timeout) -> None:
        self.core(lambda: super(Engine, self).update(info, timeout), timeout)

    def resume(self, timeout) -> None:
        super().resume(timeout)
        self.check()

    def check(self) -> None:
        """What it serves is one version, on all workers, and the one that its label names."""
        if not self.paused and not self.dead:
            held = [t.held(self.job.last) for t in self.takers]
            label = int(self.label) if self.label.isdecimal() else held[0]
            whole = held == [label] * len(held) and label is not None
            self.job.sim.must(whole, f"{self.name} serves {held} as {self.label!r}")


class Job(World):
    """`last`: the last version that a rank has called with. `ends`: (rank, version) -> the report, or the error. `forms`: of the engines,
    one after the other: the rule by which they want weights in FP8, or None. Those that come later have the next one."""

    def __init__(
        self, sim: Simulation, trainers: int, replicas: int, workers: int, *, pulled: bool = False, relay: bool = False,
        in_step: bool = False, holds: bool = False, computes: bool = False, forms: Sequence[ScaleRule | None] = (None,),
        delta: str | None = None, at_once: int | None = None, stage: bool = False, **how
    ):  # fmt: skip
        how |= dict(host_pull=pulled, relay=relay, drop=("extra",))
        super().__init__(trainers, workers, replicas, DEADLINE_S, SHAPES, **how)
        self.sim, self.in_step, self.last = sim, in_step, 0
        self.forms, self.made, self.delta, self.at_once, self.stage = forms, [], delta, at_once, stage
        self.turns: set[int] = set()  # replicas whose engines are out of service for a refit
        self.controlled = [""] * replicas  # by replica: the process of its controller
        self.told: list[tuple[int, str]] = []  # what engines were told: (replica, "pause" or "resume"), in order
        self.faults: dict[tuple[str, str], str] = {}
        self.passed: dict[
            tuple[str, str], None
        ] = {}  # all points that processes have passed, in order: (process, point)
        self.naps = 0
        self.began, self.trains_s = 0.0, 0.0  # of the last call; for how long ranks train after a publish
        self.published: dict[int, float] = {}  # rank -> seconds until its publish returned
        self.calls, self.running = [0] * self.trainers, {}
        self.ends: dict[tuple[int, int], object] = {}
        self.excused: set[tuple[int, int]] = set()
        self.differ: set[tuple[int, int]] = set()
        self.evened: set[int] = set()  # versions of which a trainer's checksum was changed, perhaps as a worker's was
        self.harms = 0  # how often something happened to a process
        self.hurt: set[int] = set()  # replicas that may be out: something happened to a process that they need
        self.unheard: set[tuple[int, int]] = set()  # calls in which the coordinator's process, trainer 0's, was stopped
        self.wrong: set[tuple[int, int]] = set()  # (replica, version) of which a checksum differed
        self.sources = [Source(i, self.trainers, SHAPES) for i in range(self.trainers)]
        for source in self.sources:
            source.job, source.computes = self, computes
        self.engines = [Engine(self, r) for r in range(self.replicas)]
        sim.patch(world, "free_port", lambda: 1)
        sim.patch(faults, "point", self.point)
        sim.patch(faults, "wants", self.wants)
        self.count_turns()
        sim.patch_item(routes.PEERS, "cpu", cpu_peer)
        for known in KNOWN:
            sim.patch(*known)
        for name, number in (("PAYS", 0.99), ("SHORTEST", 1)):  # storages are small: pulls go by marks all the same
            sim.patch(peer_host, name, number)
        cpu_peer.Hold.clear()
        for some in (cpu_peer.REFUSED, cpu_peer.MAPPED):
            some.clear()
        sim.patch(coordinator, "hold_s", lambda *_: HOLD_S if holds else 0.0)
        self.connect()

    def count_turns(self) -> None:
        """No more engines are out of service for a refit than it allows. Replicas that may be out for another reason do not count,
        nor do those whose turn has ended while they hung."""
        opened, carried = _EngineCalls.open, Controller._carry_out

        def open(calls: _EngineCalls) -> None:
            self.turns.add(calls._replica)
            refit = self.coordinator.refit
            if refit is not None and refit.number == calls.arm.attempt and refit.rolling.at_once:
                late = {p.replica.index for p in refit.rolling._late}
                here = self.turns - self.hurt - late
                self.sim.must(len(here) <= refit.rolling.at_once, f"{here} are out of service at once")
            opened(calls)

        def carry_out(controller: Controller, *decision) -> bool:
            try:
                return carried(controller, *decision)
            finally:
                self.turns.discard(controller.replica)

        self.sim.patch(_EngineCalls, "open", open)
        self.sim.patch(Controller, "_carry_out", carry_out)

    def serve(self, engine, replica: int):
        self.controlled[replica] = f"replica {replica} controller at {self.sim.turns}"
        with self.sim.process(self.controlled[replica]):
            return super().serve(engine, replica)

    def _connect_one(self, i: int):
        with self.sim.process(f"trainer {i}"):
            super()._connect_one(i)

    def point(self, role: str, rank: int, where: str) -> None:
        self.passed[self.sim.running.who, where] = None
        action = self.faults.pop((self.sim.running.who, where), "")
        if action not in ("", "wait") and where in ("read", "look", "plan", "link"):
            self.hurts(self.sim.running.who)
        if action == "wait":
            self.nap(3.0)
        if action == "raise":
            raise RuntimeError(f"injected fault at {where}")
        if action == "kill":
            self.die(self.sim.running.who)
        if action == "stop":
            self.stop(self.sim.running.who)
            self.sim.block(lambda: True)

    def nap(self, seconds: float) -> None:
        """What runs takes so long."""
        self.naps += 1
        try:
            self.sim.wait(seconds)
        finally:
            self.naps -= 1

    def stop(self, who: str) -> None:
        """SIGSTOP. A call of a rank that was stopped in it may take as long as that; others give up on a silent coordinator."""
        self.sim.stopped.add(who)
        self.hurts(who)
        self.excused |= {(i, self.calls[i]) for i in range(self.trainers) if who == f"trainer {i}"}
        if who == "trainer 0":
            self.unheard |= {(i, self.calls[i]) for i in self.running}

    def breaks(self, who: str) -> None:
        """The connection of this process."""
        self.hurts(who)
        for c in self.sim.channels:
            if c.who == who and not c.closed:
                c.break_("connection reset by peer")

    def says_again(self, who: str, which: slice = slice(-3, None)) -> None:
        """Some of what it said in earlier refits."""
        now = self.coordinator.refit.number if self.coordinator.refit else 0
        for c in self.sim.channels:
            if c.who == who and not c.closed and not c.finished:
                c.sent.extend([x for x in c.said if isinstance(x, LATE) and getattr(x, "attempt", 0) != now][which])

    def wants(self, role: str, rank: int, what: str) -> bool:
        who = self.sim.running.who
        flip = self.faults.pop((who, what), "") != ""
        if flip and what == "digest":
            self.hurts(who)
        if flip and what == "checksum":
            some = [int(who.split()[1])] if role == "worker" else range(self.replicas)
            self.wrong |= {(r, self.last) for r in some}
            self.differ |= {(r, self.last) for r in some if role == "worker"}
            self.evened |= {self.last} if role == "trainer" else set()
        return flip

    def hurts(self, who: str) -> None:
        self.harms += 1
        self.hurt |= {int(who.split()[1])} if who.startswith("replica") else set(range(self.replicas))

    def hold(self, seconds: float) -> None:
        """Pulls stand in their middle for so long."""
        cpu_peer.Hold.begin()
        threading.Timer(seconds, cpu_peer.Hold.clear).start()

    def die(self, who: str) -> None:
        """SIGKILL. An engine does not outlive a worker."""
        for e in self.engines:
            e.dead = e.dead or who in map(e.worker, range(self.workers))
        self.hurts(who)
        self.sim.kill(who)
        self.sim.block(lambda: True)

    def free(self) -> list[int]:
        """Trainers that can call."""
        gone = self.sim.stopped | self.sim.dead
        return [i for i in range(self.trainers) if i not in self.running and f"trainer {i}" not in gone]

    def alive(self) -> list[str]:
        """Calls of processes that live."""
        return [t.name for i, t in self.running.items() if f"trainer {i}" not in self.sim.dead]

    def call(self, i: int, **how) -> None:
        """A rank trains, calls, and trains on as soon as it may. `joined`: the call that waits for what it has published."""
        joined = how.pop("joined", "fence")
        self.began = self.began if self.running else self.sim.now
        self.calls[i] += 1
        version = self.calls[i]
        self.last = max(self.last, version)
        usual = dict(delta=self.delta, at_once=self.at_once, stage=self.stage)
        options = REFIT | dict(version=version, deadline_s=DEADLINE_S) | usual | how
        began, bound = self.sim.now, options["deadline_s"] + CALL_GRACE_S * (1 + (joined == "settle")) + 0.01
        if (pending := self.sessions[i].pending) is not None:  # it first waits for the outcome of the call before
            bound += max(CALL_GRACE_S, pending.ends - began)
        if "trainer 0" in self.sim.stopped:
            self.unheard.add((i, version))

        def run() -> None:
            self.sources[i].set(version)
            try:
                end = self.sessions[i].refit(RefitOptions(**options))
                if options["wait"] == "ready":
                    self.between(i, end)
                    getattr(self.sessions[i], joined)()
            except XferError as e:
                end = e
            took = self.sim.now - began
            self.plausible(i, version, end)
            assert took < bound or (i, version) in self.excused, f"{took} s: {end}"
            if getattr(end, "drained", True):
                self.sources[i].set(10_000 + version)
            self.ends[i, version] = end
            del self.running[i]

        with self.sim.process(f"trainer {i}"):
            self.running[i] = threading.Thread(target=run, name=f"call of trainer {i}")
            self.running[i].start()

    def interrupt(self, i: int) -> None:
        """Before the rank could say that it calls. It calls anew later."""
        self.sessions[i].attempt += 1
        self.calls[i] += 1

    def closes(self, i: int) -> None:
        with self.sim.process(f"trainer {i}"):
            self.sessions[i].close()

    def between(self, i: int, report) -> None:
        """A rank has published and trains for `trains_s`; its weights stay until it calls the fence."""
        self.published[i] = self.sim.now - self.began
        if self.trains_s:
            self.sim.wait(self.trains_s)

    def all(self, **how) -> list:
        """All call, and everything happens. What each heard."""
        for i in range(self.trainers):
            self.call(i, **how)
        self.sim.block(lambda: not self.running)
        return [self.ends[i, self.calls[i]] for i in range(self.trainers)]

    def level(self) -> None:
        """Ranks call equally often, and have heard what became of every call."""
        for session in self.sessions:
            with contextlib.suppress(XferError):
                session.settle()
        last = max(self.calls)
        for i in range(self.trainers):
            while self.calls[i] < last:
                self.call(i)
                self.sim.block(lambda: not self.running, self.sim.now + 1000)

    def prompt(self) -> None:
        """Whatever takes long has ended, and nothing takes long any more. What was arranged to raise does so."""
        cpu_peer.Hold.clear()
        self.faults = {at: action for at, action in self.faults.items() if action == "raise"}
        for e in self.engines:
            e.slow.clear()
        self.sim.block(lambda: not self.naps, self.sim.now + DEADLINE_S)

    def untroubled(self) -> None:
        """Nothing that was arranged happens any more."""
        self.faults.clear()
        for e in self.engines:
            e.fail.clear()
        self.prompt()

    def undisturbed(self, verify: bool) -> list[bool]:
        """A refit while every process answers and nothing fails: whatever happened before, it commits on all replicas that are there.
        Which committed; one that is about to join may."""
        sim = self.sim
        self.untroubled()
        self.level()
        sim.quiet()
        there = [not self.out(e.replica) for e in self.engines]
        missing = {r for r, here in enumerate(there) if not here}
        assert missing <= self.hurt, "a replica takes part no more, and nothing happened to it"
        prepared = self.coordinator.refit is not None
        at_once = None if prepared else self.at_once  # prepared: all are paused
        for i in range(self.trainers):
            self.call(i, verify=verify, min_replicas=sum(there), at_once=at_once)
        sim.block(lambda: not self.running, sim.now + SOON_S)
        assert not self.running, self.coordinator.refit and self.coordinator.refit.waiting_for()
        self.agree()
        for i in range(self.trainers):
            end = self.ends[i, self.last]
            assert not isinstance(end, XferError), end
            committed = [o.committed for o in end.outcomes]
            assert all(c or r in missing for r, c in enumerate(committed)), end
            assert end.version == self.last and end.verified == (verify and any(committed))
            assert self.sessions[i].version == self.last or not any(committed)
        for e, o, c in zip(self.engines, end.outcomes, self.controllers):
            if o.committed:
                assert o.serving and len(o.bytes_per_worker) == self.workers
                assert o.bytes_moved == sum(o.bytes_per_worker) > 0
                assert e.takers[0].held(self.last) == self.last == c.version == int(e.label) and c.error is None
        return committed

    def mend(self) -> None:
        """All replicas that are out come again; the next refit is whole everywhere, and all engines serve it."""
        self.sim.stopped.clear()
        self.sim.quiet()
        for e in self.engines:
            if self.out(e.replica):
                self.again(e.replica)
        assert all(self.undisturbed(True))
        for e in self.engines:
            assert not e.paused
            e.check()

    def ended(self, seconds: float = 1000.0) -> list:
        """Wait for the calls of processes that are neither dead nor stopped. Returns the result of each one's last call."""
        gone = lambda i: f"trainer {i}" in self.sim.dead | self.sim.stopped  # noqa: E731
        self.sim.block(lambda: all(map(gone, self.running)), self.sim.now + seconds)
        assert all(map(gone, self.running)), self.coordinator.refit and self.coordinator.refit.waiting_for()
        return [self.ends[i, self.calls[i]] for i in range(self.trainers) if not gone(i)]

    def commits(self, **how) -> list[bool]:
        """A refit by all. By replica, whether it committed."""
        ends = self.all(**how)
        assert not any(isinstance(e, XferError) for e in ends), ends
        self.agree()
        return [o.committed for o in ends[0].outcomes]

    def plausible(self, i: int, version: int, end: object) -> None:
        """A coordinator that lives is not given up on, and bytes differ only if a test made them differ."""
        told = str(end) if isinstance(end, XferError) else ""
        heard = f"[trainer {i}] no answer in time" not in told or (i, version) in self.unheard | self.excused
        self.sim.must(heard, f"trainer {i} gave up on a coordinator that lives: {told}")
        right = not isinstance(end, VerificationError) or bool(self.wrong)  # of this call, or of a pending one
        self.sim.must(right, f"bytes differ: {told}")

    def again(self, replica: int) -> None:
        """The owner of an engine serves it again, or a new one in its place."""
        self.hurt.add(replica)
        self._leave(replica)
        self.controllers[replica] = self.serve(self.engines[replica], replica)

    def leaves(self, replica: int) -> None:
        """The owner of an engine stops it, in good order."""
        if {self.controlled[replica], *map(self.engines[replica].worker, range(self.workers))} & self.sim.stopped:
            return  # nothing of it answers
        self.hurt.add(replica)
        self._leave(replica)
        engine = self.engines[replica]
        for i, s in enumerate(engine.sessions):
            with self.sim.process(engine.worker(i)):
                s.close()
        engine.dead = True

    def _leave(self, replica: int) -> None:
        if self.controlled[replica] not in self.sim.dead:
            self.controllers[replica].close()
        if self.engines[replica].dead:
            self.engines[replica] = Engine(self, replica)

    def restart(self) -> None:
        """The trainers that are left close their sessions. All start anew, and the owners of engines serve them again."""
        for i in range(self.trainers):
            if f"trainer {i}" not in self.sim.dead:
                with contextlib.suppress(XferError):
                    self.closes(i)
        self.sim.bury("trainer")
        self.sim.quiet()
        self.running.clear()
        planes = [s._lane_.plane for e in self.engines if not e.dead for s in e.sessions if s._lane_]
        mapped = [p for p in planes if p.inputs is not None and p.inputs.donor < 0 and maps(p)]
        assert not mapped, "trainers that start again need memory that workers have mapped"
        for replica in range(self.replicas):
            self._leave(replica)
            self.engines[replica].fail.clear()
        self.calls = [self.last] * self.trainers
        self.connect()
        self.sim.quiet()
        for e in self.engines:
            assert e.paused == any(t.locked for t in e.takers), "torn engines wait for a refit, all others serve"
            e.check()

    def mapped(self) -> bool:
        """Whether workers have mapped trainers' weights: not those that have left, which unmap them afterwards, nor those that got a first
        copy last, which map another engine's."""
        known = {c.label for c in self.coordinator.clients}
        some = [s._lane_.plane for e in self.engines for s in e.sessions if s._lane_ and s._party.label in known]
        own = [p for p in some if p.inputs is not None and p.inputs.donor < 0]
        return any(map(maps, own))

    def release(self, i: int) -> None:
        harms, calm = self.harms, not self.sim.stopped | self.sim.dead

        def run() -> None:
            try:
                self.sessions[i].release()
                free = self.sim.dead or not cpu_peer.MAPPED or not self.mapped()
                self.sim.must(free, "a trainer may free its weights, and others have mapped them")
                self.sim.must(self.sources[i].let, "the adapter was not told to let go of its weights")
                self.sources[i].let = False
                held = [weakref.ref(t.untyped_storage()) for t in self.sources[i].params.values()]
                self.sources[i].move()
                gone = not any(r() for r in held) or self.sessions[i].side._kept
                self.sim.must(gone, "something of xfer holds weights that were released")
            except XferError as e:
                kept = not calm or self.harms > harms
                self.sim.must(kept, f"nothing kept trainer {i} from releasing its weights: {e}")
            del self.running[i]

        with self.sim.process(f"trainer {i}"):
            self.running[i] = threading.Thread(target=run, name=f"release of trainer {i}")
            self.running[i].start()

    def out(self, replica: int) -> bool:
        """Whether a replica takes part only when it is served again; its owner was told, or knows that it died."""
        e, c = self.engines[replica], self.controllers[replica]
        joined = len(e.sessions) == self.workers and all(s.joined for s in e.sessions)
        lost = self.coordinator.replicas[replica].controller is None or self.controlled[replica] in self.sim.dead
        return e.dead or lost or not joined or c._phase is ControllerPhase.OVER

    def agree(self) -> None:
        """All ranks that heard the outcome of a call heard the same, and the coordinator has not failed by itself."""
        told = defaultdict(set)
        for (_, version), end in self.ends.items():
            if not isinstance(end, XferError) and not end.pending:
                told[version].add(tuple(o.committed for o in end.outcomes))
                for o in end.outcomes:
                    wrong = (o.replica, version) in self.differ and version not in self.evened
                    assert not (wrong and o.committed and o.verified), "bytes were committed that differ"
        assert all(len(x) == 1 for x in told.values()), told
        co, refit = self.coordinator, self.coordinator.refit
        assert co.failure is None or any(w.startswith("trainer") for w in self.sim.dead), co.failure
        for part in refit.parts.values() if refit is not None and refit.called else ():
            known = part.drained or part.readers or part.may_be_read
            assert known, f"trainers have not been told that nobody reads for replica {part.replica.index}"
