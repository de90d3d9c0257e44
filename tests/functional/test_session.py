"""The protocol of real participants, in any order of events: the coordinator, trainers, controllers, workers, lanes and routes are
xfer's own; a simulation gives them turns, a clock and a network (tests/support/simulation.py).

What docs/design.md promises is held here for any interleaving of calls, deaths, hangs, lost connections, failures at each point,
storages that move, layouts and exports that change, replicas that leave and join, late and repeated messages:

- an engine serves the bytes of one version, exactly those that trainers held at that call, and nothing writes while it serves;
- with `at_once=k` no more than k engines are out of service for a refit at the same time, but for one whose turn ended while it hung;
- a trainer may overwrite its weights as soon as its call has ended, or its fence if it published;
- every call ends within its bound, with a report or an error of xfer, and all ranks hear the same;
- while trainers are inside a step, whatever they have let go of, a replica that joins serves the newest version that another one
  serves; no call of trainers waits for a first copy;
- whatever happened, the next refit commits on every replica that is connected; where a trainer is gone, once all have started again;
- after two refits in which nothing happens, the next one opens no link and no route;
- when trainers start again, engines that hold one version serve it, and all others wait for the next refit.
"""

import contextlib
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support import cpu_peer
from tests.support.examples import EXAMPLES, FIXED
from tests.support.simulated_job import DEADLINE_S, SOON_S, Engine, Job
from tests.support.simulation import Simulation
from xfer.errors import XferError
from xfer.kernels.block_fp8 import ScaleRule

WORKERS, TRAINERS = ("read", "arm", "commit", "look", "apply"), ("enter", "drain", "before", "after", "ready")
POINTS = (*WORKERS, *TRAINERS, "plan", "link", "moving", "wave", "done", "digest", "checksum")
FAILURES = st.tuples(
    st.sampled_from(POINTS), st.integers(0, 20), st.sampled_from(["raise", "raise", "raise", "kill", "stop", "wait"])
)
CALLS = "pause start update finish reset resume".split()


CALM = precondition(lambda self: not (self.sim.stopped or self.sim.dead or self.job.running))


class Cluster(RuleBasedStateMachine):
    @initialize(
        trainers=st.integers(1, 3),
        replicas=st.sampled_from([1, 2, 2, 3, 3, 4]),
        workers=st.integers(1, 2),
        pulled=st.booleans(),
        relay=st.booleans(),
        in_step=st.booleans(),
        holds=st.booleans(),
        computes=st.booleans(),
        forms=st.sampled_from([*[(None,)] * 3, (ScaleRule.IEEE,), (None, *ScaleRule)]),
        again=st.sampled_from(["", "plainly", "while sources are free", "while engines are armed"]),
        delta=st.sampled_from([None, "auto"]),
        at_once=st.sampled_from([None, 1, 2]),
        stage=st.booleans(),
        seed=st.integers(0, 1 << 20),
    )
    def connect(self, again: str, seed: int, **how) -> None:
        self.again, self.sim = again, Simulation(seed).__enter__()
        self.job = Job(self.sim, **how)

    def to(self, what: Callable[..., object], n: int, kinds: str = "tcw", *how) -> None:
        """Do this to a live process of these kinds, if there is one."""
        if who := self.who(n, kinds):
            what(self.job, who, *how)

    def who(self, n: int, kinds: str = "tcw") -> str | None:
        """A live process of these kinds: trainers, controllers, workers."""
        job = self.job
        some = [f"trainer {i}" for i in range(job.trainers) if "t" in kinds]
        for e in job.engines:
            some += [job.controlled[e.replica]] * ("c" in kinds)
            some += [e.worker(i) for i in range(job.workers) if "w" in kinds]
        some = [w for w in some if w not in self.sim.dead]
        return some[n % len(some)] if some else None

    def engine(self, n: int) -> Engine:
        return self.job.engines[n % self.job.replicas]

    # ---- calls

    @rule(seconds=st.sampled_from([0.3, 2.0, 6.0, 20.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.wait(seconds)
        self.job.agree()

    @rule(
        ranks=st.sampled_from([{0, 1, 2}] * 5 + [{0}, {1}, {0, 2}]),
        verify=st.booleans(),
        wait=st.sampled_from(["commit", "commit", "sources", "ready", "ready"]),
        joined=st.sampled_from(["fence", "settle"]),
        short=st.booleans(),
        fails=st.lists(FAILURES, max_size=2),
        then=st.sampled_from([0.0, 0.0, 0.1, 1.0, 7.0]),
        turns=st.integers(1, 300),
        slow=st.sampled_from([0.0, 0.0, 0.0, 0.05, 6.0]),
        fewest=st.sampled_from([None, None, 0, 1]),
    )
    def call(self, ranks, verify, wait, joined, short, fails, then, turns, slow, fewest) -> None:
        """Some ranks call; others may follow. Processes fail at some points, perhaps in a later refit only. `slow`: seconds for which
        pulls stand in their middle."""
        if slow:
            self.job.hold(slow)
        for failure in fails:
            self.will_fail(*failure)
        for i in self.job.free():
            if i in ranks:
                how = dict(min_replicas=fewest, deadline_s=5.0 if short else DEADLINE_S, joined=joined)
                self.job.call(i, verify=verify, wait=wait, **how)
        self.sim.wait(then) if then else self.sim.let(turns) if turns < 200 else self.sim.quiet()

    def will_fail(self, where: str, n: int, action: str) -> None:
        some = "w" if action == "kill" or where in WORKERS else "t" if where in TRAINERS else "tw"
        if (who := self.who(n, some)) is not None:
            self.job.faults[who, where] = action

    @CALM
    @rule(order=st.permutations(range(3)), turns=st.integers(0, 50))
    def all_call_and_none_waits_for_a_deadline(self, order, turns: int) -> None:
        """Whatever fails: while no process is stopped, only waits of a few seconds lie between the last call and the outcome."""
        job = self.job
        job.prompt()
        self.job.level()
        for i in order:
            if i < job.trainers:
                job.call(i, verify=True)
                self.sim.let(turns)
        self.sim.block(lambda: not job.running, self.sim.now + SOON_S)
        assert not job.running, job.coordinator.refit and job.coordinator.refit.waiting_for()

    @CALM
    @rule(verify=st.booleans())
    def all_call_and_nothing_fails(self, verify: bool) -> None:
        self.job.undisturbed(verify)

    @CALM
    @rule(n=st.integers(0, 3), release=st.booleans(), stop=st.booleans())
    def a_joiner_serves_while_trainers_are_inside_a_step(self, n: int, release: bool, stop: bool) -> None:
        """They may have let go of their weights. Those that have no rendezvous in their process may be stopped."""
        job, r = self.job, n % self.job.replicas
        job.untroubled()
        self.sim.wait(SOON_S)  # what others began is over
        others = [c for i, c in enumerate(job.controllers) if i != r and not job.out(i)]
        newest = max((c.version for c in others if c.version is not None and c.error is None), default=None)
        if newest is None or job.coordinator.refit is not None or len(job.forms) > 1:
            return  # an engine that wants another form than its donor has gets its weights from trainers
        if release:
            job.release(0)
        if stop:
            self.sim.stopped |= {f"trainer {i}" for i in range(1, job.trainers)}
        called = job.calls[:]
        job.leaves(r)
        job.again(r)
        self.sim.block(lambda: job.controllers[r].version is not None, self.sim.now + SOON_S)
        assert job.controllers[r].version == newest and job.calls == called
        assert {t.held(job.last) for t in job.engines[r].takers} == {newest} and not job.engines[r].paused
        self.sim.stopped.clear()
        self.sim.block(lambda: not job.running, self.sim.now + SOON_S)

    # ---- what happens to processes meanwhile

    @rule(
        what=st.deferred(lambda: st.sampled_from([*EVENTS, *OFTEN])),
        n=st.integers(0, 20),
        which=st.integers(0, 50),
        turns=st.integers(0, 100),
    )
    def meanwhile(self, what: str, n: int, which: int, turns: int) -> None:
        EVENTS[what](self, n, which)
        self.sim.let(turns)

    def prepare(self, n: int, _: int) -> None:
        if n in self.job.free():
            with contextlib.suppress(XferError):
                self.job.sessions[n].prepare()

    def they_send_otherwise(self, _: int, which: int) -> None:
        """All bytes from now on, or what changed; staged, or not."""
        if which % 2:
            self.job.delta = None if self.job.delta else "auto"
        else:
            self.job.stage = not self.job.stage

    def a_trainer_changes(self, n: int, which: int) -> None:
        n %= self.job.trainers
        if n in self.job.free():
            source = self.job.sources[n]
            (source.move, source.turn, source.export, source.turn_within)[which % 4]()

    def a_storage_cannot_be_mapped(self, n: int, which: int) -> None:
        """From the next opening of routes on; or all can be again."""
        cpu_peer.REFUSED.clear()
        cpu_peer.REFUSED.update({(n % self.job.trainers, i) for i in range(which % 5)})

    def a_trainer_dies(self, n: int, which: int) -> None:
        if self.job.trainers > 1 and which % 3 == 0:
            self.job.die(self.who(n, "t"))

    def replicas_come_anew(self, n: int, which: int) -> None:
        """Their owners stop the engines, one after the other, and start new ones. Joiners and donors may fail soon."""
        for r in range(self.job.replicas):
            if which >> r & 1:
                self.job.leaves(r)
                self.job.again(r)

    # ---- the end

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
        job.untroubled()
        sim.block(lambda: not job.alive(), sim.now + 1000)
        assert not job.alive(), job.alive()
        sim.wait(200.0)
        job.agree()
        if self.again or any(who.startswith("trainer") for who in sim.dead):
            if "sources" in self.again:
                for i in job.free():
                    job.call(i, wait="sources", min_replicas=0)
                sim.block(lambda: not job.alive())
            elif "armed" in self.again:
                self.prepare(0, 0)
                sim.let(50)
            job.restart()
        job.mend()
        assert all(job.undisturbed(False))  # by changes: workers map the marks
        opened = job.epochs()
        assert all(job.undisturbed(False))
        # A replica may find a better one to read from.
        assert job.relay or job.epochs() == opened, "a warm refit opens nothing"
        if not sim.dead:
            job.close()
            sim.wait(20.0)
            left = [t.name for t in sim.threads if t.name.startswith("xfer-")]
            assert not left, "threads of closed sessions"


EVENTS: dict[str, Callable[[Cluster, int, int], object]] = {
    "prepare": Cluster.prepare,
    "release": lambda c, n, _: n in c.job.free() and c.job.release(n),
    "a rank is interrupted": lambda c, n, _: n in c.job.free() and c.job.interrupt(n),
    "they send otherwise": Cluster.they_send_otherwise,
    "a trainer changes": Cluster.a_trainer_changes,
    "an engine changes": lambda c, n, which: setattr(
        (takers := [t for e in c.job.engines for t in e.takers])[n % len(takers)], "changes", ("moves", "turns")[which % 2]),
    "a call to an engine fails": lambda c, n, which: c.engine(n).fail.update({CALLS[which % 6]: RuntimeError("boom")}),
    "an engine is slow": lambda c, n, which: c.engine(n).slow.update({CALLS[which % 6]: (0.3, 3.0, 20.0)[which // 6 % 3]}),
    "a storage cannot be mapped": Cluster.a_storage_cannot_be_mapped,
    "a process of an engine dies": lambda c, n, _: c.to(Job.die, n, "cw"),
    "a connection breaks": lambda c, n, _: c.to(Job.breaks, n, "cw"),
    "a trainer dies": Cluster.a_trainer_dies,
    "a process is stopped": lambda c, n, _: c.to(Job.stop, n),
    "stopped processes go on": lambda c, *_: c.sim.stopped.clear(),
    "a message is said again": lambda c, n, which: c.to(Job.says_again, n, "tcw", slice(which % 12, which % 12 + 1)),
    "a replica is served again": lambda c, n, _: c.job.again(n % c.job.replicas),
    "replicas come anew": Cluster.replicas_come_anew,
    "a replica leaves": lambda c, n, _: c.job.leaves(n % c.job.replicas),
    # As early as while its replica joins, or as a donor.
    "a process will fail": lambda c, n, which: c.will_fail(POINTS[which % len(POINTS)], n, ("raise", "raise", "kill", "wait")[n % 4]),
    "pulls stand": lambda c, _, which: c.job.hold((0.05, 6.0, 70.0)[which % 3]),
}  # fmt: skip
"""What happens to processes meanwhile, by two numbers that choose what and to whom."""
OFTEN = "release", "a process is stopped", "stopped processes go on", "replicas come anew", "an engine is slow"
TestSession = Cluster.TestCase
TestSession.settings = settings(
    max_examples=EXAMPLES // 2,
    stateful_step_count=20,
    deadline=None,
    derandomize=FIXED,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
