"""Replicas that join, leave and die at any time, among refits, while a replica that joins gets its first weights from another one.

The coordinator, trainers, controllers, workers, lanes and routes are xfer's own, in the simulation of test_session.py. Held for any
order of events:

- an engine serves the bytes of one version, exactly those that trainers held at that call, and nothing writes while it serves;
- while trainers are inside a step, whatever they have let go of, a replica that joins serves the newest version that another one
  serves;
- no call of trainers waits for a first copy, and the refit after it commits on every replica that is there.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.functional.test_session_cases import SEEDS, after_one_refit, call
from tests.support import cpu_peer
from tests.support.simulated_job import SOON_S, Job
from tests.support.simulation import Simulation
from xfer.kernels.block_fp8 import ScaleRule
from xfer.plan.inventory import engine_inventory
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, Root, Span, TensorSpec

EXAMPLES = int(os.environ.get("XFER_EXAMPLES", "60"))
POINTS = ("plan", "link", "moving", "wave", "done", "digest", "checksum", "read", "arm", "commit", "look")
FAILURES = st.tuples(st.integers(0, 20), st.sampled_from(POINTS), st.sampled_from(["raise", "raise", "kill"]))


class Fleet(RuleBasedStateMachine):
    @initialize(
        trainers=st.integers(1, 2),
        replicas=st.integers(2, 4),
        workers=st.integers(1, 2),
        pulled=st.booleans(),
        relay=st.booleans(),
        form=st.sampled_from([None, None, ScaleRule.IEEE]),
        seed=st.integers(0, 1 << 20),
    )
    def connect(self, trainers, replicas, workers, pulled, relay, form, seed) -> None:
        self.sim = Simulation(seed).__enter__()
        self.job = Job(self.sim, trainers, replicas, workers, pulled=pulled, relay=relay, forms=(form,))
        self.job.undisturbed(verify=bool(seed % 2))

    def processes(self, n: int) -> str | None:
        """A live process of a replica."""
        job = self.job
        some = [
            w for r in range(job.replicas) for w in (job.controlled[r], *map(job.engines[r].worker, range(job.workers)))
        ]
        some = [w for w in some if w not in self.sim.dead]
        return some[n % len(some)] if some else None

    # ---- refits

    @rule(
        verify=st.booleans(),
        wait=st.sampled_from(["commit", "sources", "ready"]),
        turns=st.integers(1, 400),
        slow=st.sampled_from([0.0, 0.0, 0.05]),
    )
    def trainers_call(self, verify: bool, wait: str, turns: int, slow: float) -> None:
        if slow:
            self.job.hold(slow)
        if len(self.job.free()) == self.job.trainers:
            for i in range(self.job.trainers):
                self.job.call(i, verify=verify, wait=wait, min_replicas=0)
        self.sim.let(turns) if turns < 300 else self.sim.quiet()

    @precondition(lambda self: not self.job.running)
    @rule(verify=st.booleans())
    def all_call_and_nothing_fails(self, verify: bool) -> None:
        cpu_peer.Hold.clear()
        self.job.undisturbed(verify)

    @rule(n=st.integers(0, 1))
    def a_trainer_lets_go_of_its_weights(self, n: int) -> None:
        if n in self.job.free():
            self.job.release(n)

    # ---- replicas

    @rule(
        some=st.sets(st.integers(0, 3), min_size=1, max_size=3),
        fails=st.lists(FAILURES, max_size=2),
        slow=st.sampled_from([0.0, 0.0, 0.05, 70.0]),
        turns=st.integers(0, 2000),
    )
    def replicas_join(self, some: set[int], fails, slow: float, turns: int) -> None:
        """Also those that are there: their owners start the engines anew. Joiners and donors fail at some points."""
        some = {n % self.job.replicas for n in some}
        if slow:
            self.job.hold(slow)
        for r in some:
            self.job.leaves(r)
            self.job.again(r)
        for n, where, action in fails:
            self.something_will_fail(n, where, action)
        self.sim.let(turns) if turns < 1500 else self.sim.quiet()

    @rule(n=st.integers(0, 3), turns=st.integers(0, 50))
    def a_replica_leaves(self, n: int, turns: int) -> None:
        self.job.leaves(n % self.job.replicas)
        self.sim.let(turns)

    @rule(n=st.integers(0, 20), turns=st.integers(0, 50))
    def a_process_dies(self, n: int, turns: int) -> None:
        if (who := self.processes(n)) is not None:
            self.job.die(who)
        self.sim.let(turns)

    def something_will_fail(self, n: int, where: str, action: str) -> None:
        if (who := self.processes(n)) is not None:
            self.job.faults[who, where] = action

    @rule(seconds=st.sampled_from([0.05, 6.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.wait(seconds)
        self.job.agree()

    @precondition(lambda self: not self.job.running)
    @rule(n=st.integers(0, 3), release=st.booleans())
    def a_joiner_serves_while_trainers_are_inside_a_step(self, n: int, release: bool) -> None:
        job, sim = self.job, self.sim
        job.faults.clear()
        cpu_peer.Hold.clear()
        for e in job.engines:
            e.fail.clear()
        sim.wait(SOON_S)  # what others began is over
        r = n % job.replicas
        others = [c for i, c in enumerate(job.controllers) if i != r and not job.out(i)]
        newest = max((c.version for c in others if c.version is not None and c.error is None), default=None)
        if newest is None or job.coordinator.refit is not None:
            return
        if release:
            job.release(0)
        called = job.calls[:]
        job.leaves(r)
        job.again(r)
        sim.block(lambda: job.controllers[r].version is not None, sim.now + SOON_S)
        assert job.controllers[r].version == newest and job.calls == called
        assert {t.held(job.last) for t in job.engines[r].takers} == {newest} and not job.engines[r].paused
        sim.block(lambda: not job.running, sim.now + SOON_S)

    # ---- the end

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        try:
            cpu_peer.Hold.clear()
            self.sim.block(lambda: not self.job.alive(), self.sim.now + 1000)
            assert not self.job.alive(), self.job.alive()
            self.sim.wait(200.0)
            self.job.agree()
            self.job.mend()
            self.job.close()
            self.sim.wait(20.0)
            left = [t.name for t in self.sim.threads if t.name.startswith("xfer-")]
            assert not left or self.sim.dead, "threads of closed sessions"
        finally:
            self.sim.__exit__(None, None, None)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=20,
    deadline=None,
    derandomize="XFER_EXAMPLES" not in os.environ,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


# ---- one order of events each


def copying(job: Job) -> bool:
    """Whether bytes of a first copy move, and half of them are there."""
    return cpu_peer.Hold.reached.is_set() and any(
        p.moving for c in job.coordinator.copies.values() for p in c.parts.values()
    )


@SEEDS
@pytest.mark.parametrize("relay", [False, True])
def test_a_refit_waits_for_no_first_copy_and_brings_its_joiner_the_newer_version(seed, relay):
    with after_one_refit(seed, replicas=2, pulled=True, relay=relay) as job:
        cpu_peer.Hold.begin()
        job.again(1)
        job.sim.until(lambda: copying(job))
        call(job)
        job.sim.until(lambda: job.engines[0].takers[0].locked)
        still = [p for c in job.coordinator.copies.values() for p in c.parts.values()]
        assert all(p.error is not None for p in still), (
            "the donor is written, and what was read of it could be committed"
        )
        cpu_peer.Hold.clear()
        assert [[o.committed for o in end.outcomes] for end in job.ended(SOON_S)] == [[True, True]] * 2
        assert [c.version for c in job.controllers] == [2, 2]


@SEEDS
def test_a_donor_that_dies_leaves_its_reader_torn_until_the_next_refit(seed):
    with after_one_refit(seed, replicas=2, pulled=True) as job:
        cpu_peer.Hold.begin()
        job.again(1)
        job.sim.until(lambda: copying(job))
        job.die(job.engines[0].worker(0))
        cpu_peer.Hold.clear()
        job.sim.wait(SOON_S)
        assert job.engines[1].paused and job.controllers[1].torn and job.controllers[1].version is None
        assert job.engines[1].takers[0].live["norm"].isnan().all(), "torn, and would answer NaN"
        call(job, min_replicas=1)
        assert [[o.committed for o in end.outcomes] for end in job.ended(SOON_S)] == [[False, True]] * 2


@SEEDS
@pytest.mark.parametrize("who", ["donor", "joiner"])
def test_bytes_that_changed_on_the_way_from_a_donor_are_not_committed(seed, who):
    with after_one_refit(seed, replicas=2) as job:  # by a verified refit
        job.again(1)
        job.faults[job.engines[who == "joiner"].worker(0), "checksum"] = "flip"
        job.sim.wait(SOON_S)
        assert job.controllers[1].version is None and job.engines[1].paused, job.controllers[1]
        job.differ.clear()  # this was no refit
        assert "replica 0 sent checksum" in str(job.controllers[1].error)
        assert not job.engines[0].paused and job.controllers[0].error is None, "the donor serves on"
        assert job.commits() == [True, True]


@SEEDS
@pytest.mark.parametrize("point", ["plan", "link", "digest"])
def test_a_copy_that_cannot_begin_costs_the_joiner_nothing(seed, point):
    """It serves what it had, and the next refit takes it along."""
    with after_one_refit(seed, replicas=2) as job:
        job.faults[job.engines[0].worker(1), point] = "raise"
        job.again(1)
        job.sim.wait(SOON_S)
        assert job.coordinator.copied == 1 and job.controllers[1].version is None
        assert not job.engines[1].paused and job.controllers[1].error is None
        assert job.commits() == [True, True]


@SEEDS
def test_no_trainer_has_a_part_in_a_first_copy_nor_need_live(seed):
    with after_one_refit(seed, replicas=3, trainers=2) as job:
        job.stop("trainer 1")
        for r in (1, 2):
            job.leaves(r)
        for r in (1, 2):
            job.again(r)
        job.sim.wait(SOON_S)
        assert [c.version for c in job.controllers] == [1, 1, 1] and not any(e.paused for e in job.engines)
        assert job.coordinator.copied == 2


def test_of_an_engine_whose_loader_computes_only_what_lies_in_live_storages_can_be_read():
    """What a recipe has read may not be there any more."""
    catalog = Catalog((TensorSpec("a", (4,), "bfloat16"), TensorSpec("b", (4,), "bfloat16")))
    made = engine_inventory(
        catalog, rank=0, host="h", roots=[Root("w", 8), Root("scratch/b", 8)], footprint=[Span("w", 0, 8)],
        fragments=[Fragment(n, (0,), (4,), root, 0, (2,), "bfloat16") for n, root in (("a", "w"), ("b", "scratch/b"))],
        recipes=["r"],
    )  # fmt: skip
    source = made.as_source()
    assert source.side == "trainer" and not source.recipes
    assert [catalog.tensors[t].name for t in source.table.tensor] == ["a"]
