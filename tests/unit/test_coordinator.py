"""The commit protocol under every order of events: a real Coordinator and models of the processes around it, with a fake clock.

What docs/design.md promises is held here for any interleaving of calls, deaths, hangs, lost connections, failures at each
step, changed layouts, late and repeated messages:

- no engine serves bytes of two versions, or while bytes may be written;
- a refit of a replica is decided once, and every worker hears the same decision;
- no worker begins to read a trainer's storages after that trainer was told that nobody does;
- every call ends within its bound, and not because a trainer gave up on a coordinator that lives;
- whatever happened, the next refit commits on every replica that is connected, unless a trainer is gone.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.cluster_model import DEADLINE_S, Controller, Job, Process, Trainer, Worker
from xfer.coordinator import messages as m
from xfer.coordinator.commit import TRANSITIONS, Phase
from xfer.coordinator.deadlines import TOGETHER_S
from xfer.coordinator.events import Received
from xfer.coordinator.refit import Owed
from xfer.coordinator.state import Client, Replica

EXAMPLES = int(os.environ.get("XFER_EXAMPLES", "200"))
SOON_S = 2 * TOGETHER_S
"""Longer than what the coordinator waits for on purpose while every process answers; a fraction of any deadline."""
LATE = (m.Armed, m.Done, m.Committed, m.Stopped, m.Settled, m.Planned, m.LinkOpen, m.RoutesClosed)


class Cluster(RuleBasedStateMachine):
    """One job. Steps that a rule does not name happen in an order that hypothesis's seed chooses."""

    @initialize(
        trainers=st.integers(1, 3),
        replicas=st.integers(1, 3),
        workers=st.integers(1, 2),
        relay=st.booleans(),
        in_step=st.booleans(),
        holds=st.booleans(),
        seed=st.integers(0, 1 << 20),
    )
    def connect(
        self, trainers: int, replicas: int, workers: int, relay: bool, in_step: bool, holds: bool, seed: int
    ) -> None:
        self.job = Job(trainers, replicas, workers, seed, relay, in_step, holds)
        self.hung: set[Process] = set()
        self.excused: set[Trainer] = set()  # stopped at some time in their call: they may give up

    @invariant()
    def trainers_hear_at_once_that_nobody_reads_them(self) -> None:
        """Calls with `wait="sources"` return by that. Trainers heard it late of a replica behind another one, if engines had armed
        before the trainers were ready."""
        refit = self.job.coordinator.refit if hasattr(self, "job") else None
        for part in refit.parts.values() if refit is not None and refit.called else ():
            assert part.drained or part.readers or part.phase is Phase.ARMING, part.replica.index

    def pick(self, n: int, *kinds: type) -> Process | None:
        some = [p for p in self.job.processes if p.alive and p.connected and isinstance(p, kinds)]
        return some[n % len(some)] if some else None

    # ---- time and order

    @rule(steps=st.integers(1, 40))
    def things_happen(self, steps: int) -> None:
        self.job.run(steps)

    @rule(seconds=st.sampled_from([0.3, 2.0, 6.0, 20.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.job.now + seconds
        self.job.run()
        while self.job.now < until:
            self.job.pass_time(min(1.0, until - self.job.now))
            self.job.run()
        for t in self.job.trainers:
            assert not t.error or t in self.excused, f"trainer {t.index} gave up: {t.error}"

    # ---- what callers do

    @rule(verify=st.booleans(), ranks=st.sets(st.integers(0, 2), min_size=1))
    def call(self, verify: bool, ranks: set[int]) -> None:
        """Some ranks call; others may follow. Ranks that ask for different refits (`verify`) hear so."""
        for t in self.job.trainers:
            if t.index in ranks and t.alive and t.connected and not t.called and not t.hung and t.generation:
                self.excused.discard(t)
                t.call(None, verify, DEADLINE_S if t.attempt % 2 else 5.0)

    @rule(verify=st.booleans())
    def all_call_and_everything_happens(self, verify: bool) -> None:
        self.call(verify, {0, 1, 2})
        self.job.run()

    @precondition(lambda self: not self.hung and self.job.coordinator.failure is None)
    @rule(early=st.integers(0, 2))
    def all_call_and_none_waits_for_a_deadline(self, early: int) -> None:
        """Whatever fails: while no process is stopped, only waits of a few seconds lie between the last call and the outcome."""
        job = self.job
        free = [t for t in job.trainers if not t.called and t.generation]
        if len(free) < len(job.trainers) or not all(t.alive and t.connected for t in free):
            return
        last = max(t.attempt for t in free)
        for t in free:
            t.attempt = last
            self.excused.discard(t)
        for t in free[early:] + free[:early]:
            t.call(None, True, DEADLINE_S)
            job.run(3)
        job.settle(SOON_S)
        assert not any(t.called for t in free), job.coordinator.refit and job.coordinator.refit.waiting_for()

    @rule(n=st.integers(0, 9))
    def prepare(self, n: int) -> None:
        t = self.pick(n, Trainer)
        if t is not None and not t.called and not t.hung:
            t.say(m.Prepare(t.attempt + 1))

    @rule(n=st.integers(0, 9))
    def release(self, n: int) -> None:
        t = self.pick(n, Trainer)
        if t is not None and not t.called and not t.hung and t.generation:
            t.releases += 1
            t.say(m.Release(t.releases))

    @rule(n=st.integers(0, 9), what=st.sampled_from(["rebound", "inventory", "specs"]))
    def a_trainer_changes(self, n: int, what: str) -> None:
        t = self.pick(n, Trainer)
        if t is not None and not t.called:
            t.change(what)

    @rule(n=st.integers(0, 9))
    def an_engine_moves(self, n: int) -> None:
        w = self.pick(n, Worker)
        if w is not None:
            w.moves = True

    # ---- what goes wrong

    @rule(n=st.integers(0, 20), dead=st.booleans())
    def an_engine_loses_a_process(self, n: int, dead: bool) -> None:
        p = self.pick(n, Worker, Controller)
        if p is not None:
            self.job.end(p, dead)

    @rule(n=st.integers(0, 20))
    def a_process_is_stopped(self, n: int) -> None:
        p = self.pick(n, Trainer, Worker, Controller)
        if p is not None:
            p.hung = True
            self.hung.add(p)
            if isinstance(p, Trainer):
                self.excused.add(p)

    @rule(n=st.integers(0, 9))
    def a_controller_is_slow_to_resume(self, n: int) -> None:
        c = self.pick(n, Controller)
        if c is not None:
            self.job.faults[c, m.Settled] = True
            self.hung.add(c)

    @precondition(lambda self: self.hung)
    @rule()
    def stopped_processes_go_on(self) -> None:
        for p in self.hung:
            p.hung = False
            self.job.faults.pop((p, m.Settled), None)
        self.hung.clear()

    @rule(
        n=st.integers(0, 20),
        kind=st.sampled_from([m.PlanInputs, m.OpenLink, m.Ready, m.Armed, m.Go, m.Commit, m.ReplicaReady]),
    )
    def a_process_will_fail(self, n: int, kind: type) -> None:
        p = self.pick(n, Trainer, Worker)
        if p is not None:
            self.job.faults[p, kind] = True

    @rule(n=st.integers(0, 9))
    def a_byte_arrives_wrong(self, n: int) -> None:
        w = self.pick(n, Worker)
        if w is not None:
            self.job.faults[w, m.Checksum] = True
            self.all_call_and_everything_happens(True)

    @rule(n=st.integers(0, 20), which=st.integers(0, 50))
    def a_message_is_said_again(self, n: int, which: int) -> None:
        p = self.pick(n, Trainer, Worker, Controller)
        old = [x for x in p.said if isinstance(x, LATE)] if p is not None else []
        running = self.job.coordinator.refit
        old = [x for x in old if running is None or getattr(x, "attempt", 0) != running.number]
        old = [x for x in old if not getattr(x, "inventory", b"")]  # a connection keeps the order of layouts
        if old and p.connected:
            self.job.give(Received(p.number, old[which % len(old)]))
            self.job.after()

    @precondition(lambda self: len(self.job.trainers) > 1)
    @rule(n=st.integers(0, 9), certain=st.integers(0, 9))
    def a_trainer_dies(self, n: int, certain: int) -> None:
        t = self.pick(n, Trainer)
        if t is not None and not certain:
            self.job.end(t)

    @rule()
    def lost_replicas_join_again(self) -> None:
        for e in self.job.engines:
            c = e.controller
            if not (c.alive and c.connected):
                self.job.serve(e)

    # ---- the end

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        job = self.job
        self.stopped_processes_go_on() if self.hung else None
        job.faults.clear()
        job.settle()
        for t in job.trainers:
            running = job.coordinator.refit
            assert not (t.alive and t.called), f"trainer {t.index} still waits: {running and running.waiting_for()}"
        if job.coordinator.failure is not None:
            return
        for e in job.engines:
            kept_out = e.controller.kept_out or any(w.kept_out for w in e.workers)
            if kept_out or job.coordinator.replicas[e.replica].controller is None:
                job.serve(e)  # its owner was told
        job.run()  # without time: what a trainer exports anew is known when it calls
        last = max(t.attempt for t in job.trainers)
        for t in job.trainers:
            t.attempt = last  # ranks call equally often
        outcomes = job.refit()
        for o in outcomes:
            assert o is not None and o.error is None, o
            assert all(x.committed for x in o.outcomes), [x.error for x in o.outcomes]
        for e in job.engines:
            assert e.serving and e.contents == [str(outcomes[0].version)] * job.workers


TestCoordinator = Cluster.TestCase
TestCoordinator.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms(use_true_random=True))
def test_a_replica_is_done_when_its_last_rank_is(trainers, sizes, random):
    """Against one set per replica; replicas begin in any batches, ranks end in any order and may repeat themselves."""
    waiting = [Replica(r, size) for r, size in enumerate(sizes)]
    clients = [Client(0, [], m.Hello("trainer", i, trainers, 0, "", 0)) for i in range(trainers)]
    clients += [Client(0, [], m.Hello("worker", i, n, r, "", 0)) for r, n in enumerate(sizes) for i in range(n)]
    owed, left = Owed(trainers, len(sizes)), dict[int, set[Client]]()
    while waiting or left:
        if waiting and random.random() < 0.3:
            some = [waiting.pop() for _ in range(random.randint(1, len(waiting)))]
            owed.begin(some)
            left |= {
                r.index: {c for c in clients if c.hello.role == "trainer" or c.hello.replica == r.index} for r in some
            }
        elif left:
            c = random.choice(clients)
            mine = [r for r in left if c.hello.role == "trainer" or c.hello.replica == r]
            assert all(owed.owes(c, r) == (c in left[r]) for r in mine)
            said = tuple(random.sample(mine, random.randint(0, len(mine))))
            for r in said:
                left[r].discard(c)
            assert owed.done(c, said) == sorted(r for r, ranks in left.items() if not ranks)
            left = {r: ranks for r, ranks in left.items() if ranks}


def test_engines_serve_until_trainers_are_about_to_be_ready():
    """Armed at the first call, they would wait as long as trainers drain and look at their storages. How long that takes the refit
    before tells; trainers that are quicker than then wait for no timer, and after a refit that failed engines are armed at once."""
    job = Job(trainers=2, replicas=1, workers=2)
    job.settle()
    (engine,) = job.engines

    def idle(seconds: int, dead: bool = False) -> int:
        """A refit whose trainers are ready after so many seconds: for how many of them the engine did not serve."""
        for t in job.trainers:
            t.slow = True
            t.call(None, False, DEADLINE_S)
        job.run()
        waited = 0
        for _ in range(seconds):
            waited += not engine.serving
            job.pass_time(1.0)
            job.run()
        for t in job.trainers:
            t.fail("a gather failed", t.attempt) if dead else t.ready()
        job.settle()
        assert [x.committed for t in job.trainers for x in t.outcome.outcomes] == [not dead] * 2
        return waited

    job.refit()
    assert idle(5) == 5 and idle(5) == 0 and idle(5) == 0
    assert idle(0) == 0 and idle(3) == 3
    assert idle(2, dead=True) == 0 and idle(2) == 2


def test_every_phase_ends_and_no_decision_is_taken_back():
    """The table that the docs print: from every phase OVER can be reached, and nothing leads back behind the decision."""
    after = {a: {b for x, b, _ in TRANSITIONS if x is a} for a in Phase}
    for phase in Phase:
        seen, todo = set(), [phase]
        while todo:
            now = todo.pop()
            seen.add(now)
            todo += after[now] - seen
        assert Phase.OVER in seen
        if phase in (Phase.COMMITTING, Phase.SETTLING, Phase.OVER):
            assert not seen & {Phase.ARMING, Phase.MOVING, Phase.ABORTING}


def test_the_design_prints_the_table():
    text = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    assert "".join(f"| {a.value} | {b.value} | {when} |\n" for a, b, when in TRANSITIONS) in text
