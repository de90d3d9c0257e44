"""The protocol of real participants, in any order of events: the coordinator, trainers, controllers, workers, lanes and routes are
xfer's own; a simulation gives them turns, a clock and a network (tests/support/simulation.py).

What docs/design.md promises is held here for any interleaving of calls, deaths, hangs, lost connections, failures at each point,
storages that move, layouts and exports that change, replicas that leave and join, late and repeated messages:

- an engine serves the bytes of one version, exactly those that trainers held at that call, and nothing writes while it serves;
- a trainer may overwrite its weights as soon as its call has ended;
- every call ends within its bound, with a report or an error of xfer, and all ranks hear the same;
- whatever happened, the next refit commits on every replica that is connected, unless a trainer is gone.
"""

from __future__ import annotations

import contextlib
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.simulated_job import DEADLINE_S, Job
from tests.support.simulation import Simulation
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import TOGETHER_S
from xfer.errors import XferError

EXAMPLES = int(os.environ.get("XFER_EXAMPLES", "60"))
SOON_S = 2 * TOGETHER_S
"""Longer than what anything waits for on purpose while every process answers; a fraction of any deadline."""
WORKERS, TRAINERS = ("read", "arm", "commit", "look"), ("enter", "drain", "before", "after")
POINTS = (*WORKERS, *TRAINERS, "plan", "link", "moving", "wave", "done", "digest", "checksum")
FAILURES = st.tuples(
    st.sampled_from(POINTS), st.integers(0, 20), st.sampled_from(["raise", "raise", "raise", "kill", "stop"])
)
LATE = (m.Armed, m.Done, m.Committed, m.Stopped, m.Settled, m.Planned, m.LinkOpen, m.RoutesClosed)


class Cluster(RuleBasedStateMachine):
    @initialize(
        trainers=st.integers(1, 3),
        replicas=st.integers(1, 3),
        workers=st.integers(1, 2),
        pulled=st.booleans(),
        relay=st.booleans(),
        in_step=st.booleans(),
        holds=st.booleans(),
        computes=st.booleans(),
        seed=st.integers(0, 1 << 20),
    )
    def connect(self, trainers, replicas, workers, pulled, relay, in_step, holds, computes, seed) -> None:
        self.sim = Simulation(seed).__enter__()
        self.job = Job(
            self.sim, trainers, replicas, workers,
            pulled=pulled, relay=relay, in_step=in_step, holds=holds, computes=computes,
        )  # fmt: skip

    def who(self, n: int, kinds: str = "tcw") -> str | None:
        """A live process of these kinds: trainers, controllers, workers."""
        job = self.job
        some = [f"trainer {i}" for i in range(job.trainers) if "t" in kinds]
        for e in job.engines:
            some += [job.controlled[e.replica]] * ("c" in kinds)
            some += [e.worker(i) for i in range(job.workers) if "w" in kinds]
        some = [w for w in some if w not in self.sim.dead]
        return some[n % len(some)] if some else None

    # ---- what callers do

    @rule(turns=st.integers(1, 300))
    def things_happen(self, turns: int) -> None:
        self.sim.let(turns)

    @rule(seconds=st.sampled_from([0.3, 2.0, 6.0, 20.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.wait(seconds)
        self.job.agree()

    @rule(
        ranks=st.sampled_from([{0, 1, 2}] * 5 + [{0}, {1}, {0, 2}]),
        verify=st.booleans(),
        wait=st.sampled_from(["commit", "commit", "sources"]),
        short=st.booleans(),
        fails=st.lists(FAILURES, max_size=2),
        then=st.sampled_from([0.0, 0.0, 0.0, 0.1, 7.0]),
        turns=st.integers(1, 300),
    )
    def call(self, ranks, verify: bool, wait: str, short: bool, fails, then: float, turns: int) -> None:
        """Some ranks call; others may follow. Processes fail at some points, perhaps in a later refit only."""
        for where, n, action in fails:
            some = "w" if action == "kill" or where in WORKERS else "t" if where in TRAINERS else "tw"
            if (who := self.who(n, some)) is not None:
                self.job.faults[who, where] = action
        for i in self.job.free():
            if i in ranks:
                self.job.call(i, verify=verify, wait=wait, deadline_s=5.0 if short else DEADLINE_S)
        self.sim.wait(then) if then else self.sim.let(turns) if turns < 200 else self.sim.quiet()

    @precondition(lambda self: not (self.sim.stopped or self.sim.dead or self.job.running))
    @rule(order=st.permutations(range(3)), turns=st.integers(0, 50))
    def all_call_and_none_waits_for_a_deadline(self, order, turns: int) -> None:
        """Whatever fails: while no process is stopped, only waits of a few seconds lie between the last call and the outcome."""
        job = self.job
        self.level()
        for i in order:
            if i < job.trainers:
                job.call(i, verify=True)
                self.sim.let(turns)
        self.sim.block(lambda: not job.running, self.sim.now + SOON_S)
        assert not job.running, job.coordinator.refit and job.coordinator.refit.waiting_for()

    @rule(n=st.integers(0, 2))
    def prepare(self, n: int) -> None:
        if n in self.job.free():
            with contextlib.suppress(XferError):
                self.job.sessions[n].prepare()

    @rule(n=st.integers(0, 2))
    def release(self, n: int) -> None:
        if n in self.job.free():
            self.job.release(n)

    @rule(n=st.integers(0, 2), what=st.sampled_from(["move", "turn", "export"]))
    def a_trainer_changes(self, n: int, what: str) -> None:
        if n in self.job.free():
            getattr(self.job.sources[n], what)()

    @rule(r=st.integers(0, 2), n=st.integers(0, 1), what=st.sampled_from(["moves", "turns"]))
    def an_engine_changes(self, r: int, n: int, what: str) -> None:
        self.job.engines[r % self.job.replicas].takers[n % self.job.workers].changes = what

    # ---- what goes wrong

    @rule(r=st.integers(0, 2), what=st.sampled_from("pause start update finish reset resume".split()))
    def a_call_to_an_engine_will_fail(self, r: int, what: str) -> None:
        self.job.engines[r % self.job.replicas].fail[what] = RuntimeError("boom")

    @rule(n=st.integers(0, 20), dead=st.booleans())
    def an_engine_loses_a_process(self, n: int, dead: bool) -> None:
        """It dies, or its connection breaks."""
        who = self.who(n, "cw")
        if who is not None and dead:
            self.job.die(who)
        for c in self.sim.channels:
            if c.who == who and not c.closed:
                c.break_("connection reset by peer")

    @precondition(lambda self: self.job.trainers > 1)
    @rule(n=st.integers(0, 9), certain=st.integers(0, 9))
    def a_trainer_dies(self, n: int, certain: int) -> None:
        who = self.who(n, "t")
        if who is not None and not certain:
            self.job.die(who)

    @rule(n=st.integers(0, 20))
    def a_process_is_stopped(self, n: int) -> None:
        who = self.who(n)
        if who is not None:
            self.job.stop(who)

    @rule()
    def stopped_processes_go_on(self) -> None:
        self.sim.stopped.clear()

    @rule(n=st.integers(0, 20), which=st.integers(0, 50))
    def a_message_is_said_again(self, n: int, which: int) -> None:
        co = self.job.coordinator
        some = [c for c in self.sim.channels if not c.closed and not c.finished and c.who == self.who(n)]
        old = [x for c in some for x in c.said if isinstance(x, LATE)]
        old = [x for x in old if co.refit is None or getattr(x, "attempt", 0) != co.refit.number]
        old = [x for x in old if not getattr(x, "inventory", b"")]  # a connection keeps the order of layouts
        if old:
            some[0].sent.append(old[which % len(old)])

    @rule(r=st.integers(0, 2))
    def a_replica_is_served_again(self, r: int) -> None:
        if r < self.job.replicas:
            self.job.again(r)

    # ---- the end

    def level(self) -> None:
        """Ranks call equally often, and have heard what became of every call."""
        job = self.job
        for session in job.sessions:
            with contextlib.suppress(XferError):
                session.settle()
        last = max(job.calls)
        for i in range(job.trainers):
            while job.calls[i] < last:
                job.call(i)
                self.sim.block(lambda: not job.running, self.sim.now + 1000)

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        try:
            self.end()
        finally:
            self.sim.__exit__(None, None, None)

    def end(self) -> None:
        job, sim = self.job, self.sim
        sim.stopped.clear()
        job.faults.clear()
        sim.block(lambda: not job.alive(), sim.now + 1000)
        assert not job.alive(), job.alive()
        sim.wait(200.0)
        job.agree()
        if job.coordinator.failure is not None or "trainer 0" in sim.dead:
            return
        self.level()
        for e in job.engines:
            e.fail.clear()
            if job.out(e.replica):
                job.again(e.replica)
        sim.quiet()
        last = max(job.calls)
        for i in range(job.trainers):
            job.call(i, verify=True)
        sim.block(lambda: not job.running)
        for i in range(job.trainers):
            end = job.ends[i, last + 1]
            assert not isinstance(end, XferError), end
            assert all(o.committed for o in end.outcomes), end
        for e in job.engines:
            assert not e.paused
            e.check()
            assert e.takers[0].held(last + 1) == last + 1
        if not sim.dead:
            job.close()


TestSession = Cluster.TestCase
TestSession.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
