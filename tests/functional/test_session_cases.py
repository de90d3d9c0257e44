"""Orders of events that were once defects, and the words in which callers hear of them, with real participants in a simulation.

test_session.py searches random orders for broken promises. A case here fixes some of an order and leaves the rest to a seed.
It checks what the search does not: that processes hear of a failure without any time passing, what it costs, and the words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support.simulated_job import DEADLINE_S, Job
from tests.support.simulation import Simulation
from xfer.coordinator import deadlines
from xfer.coordinator import messages as m
from xfer.coordinator.commit import Phase
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.events import Connected, Received, Send, Unproven
from xfer.coordinator.state import Options, ReplicaPhase, differences, told
from xfer.errors import PlanMismatch
from xfer.participants.controller import ControllerPhase


@pytest.fixture(params=range(3))
def sim(request) -> Iterator[Simulation]:
    """`request.param`: seed of all that a case leaves open."""
    with Simulation(request.param) as s:
        yield s


def served(sim: Simulation, *size: int, **how) -> Job:
    """A job after its first refit."""
    job = Job(sim, *size, **how)
    assert job.commits() == [True] * job.replicas
    return job


def until(sim: Simulation, condition: Callable[[], object]) -> None:
    """Let things happen, without any time passing, until `condition` holds."""
    began = sim.now
    sim.until(lambda: bool(condition()))
    assert sim.now < began + 0.1


@contextlib.contextmanager
def stopped(job: Job, *processes: str) -> Iterator[None]:
    """Inside the context these processes do nothing."""
    job.sim.stopped.update(processes)
    yield
    job.sim.stopped.difference_update(processes)


def workers(job: Job, replica: int) -> list[str]:
    return [job.engines[replica].worker(i) for i in range(job.workers)]


def joins(job: Job, replica: int, phase: ReplicaPhase) -> None:
    """A replica joins again and reaches this phase."""
    job.again(replica)
    until(job.sim, lambda: job.coordinator.replicas[replica].phase is phase)


def heard(job: Job) -> list:
    return [job.ends.get((i, job.calls[i])) for i in range(job.trainers)]


def all_heard(job: Job) -> bool:
    return all(e is not None for e in heard(job))


# ---- while a replica joins


@pytest.mark.parametrize("phase", [ReplicaPhase.PLANNING, ReplicaPhase.LINKING])
def test_a_refit_that_fails_while_a_replica_joins_leaves_it_joining(sim, phase):
    job = served(sim, 2, 2, 2)
    joins(job, 1, phase)
    epoch = job.coordinator.replicas[1].epoch
    job.faults["trainer 1", "drain"] = "raise"
    with stopped(job, *workers(job, 1)):
        job.call(0), job.call(1)
        until(sim, lambda: all_heard(job))
    assert "injected fault at drain" in str(heard(job)[0])
    sim.quiet()
    assert job.coordinator.replicas[1].phase is ReplicaPhase.READY and job.coordinator.replicas[1].epoch == epoch
    assert job.commits() == [True, True]


@pytest.mark.parametrize("when", ["before", "within", "again"])
@pytest.mark.parametrize("where", ["look", "plan", "lock"])
def test_processes_of_a_replica_that_fails_while_it_joins_hear_why_at_once(sim, when, where):
    """Each once waited for its whole deadline, inside the engine's call; so did a worker that came after another had failed."""
    job = served(sim, 2, 2, 2)
    began, engine = sim.now, job.engines[1]

    def serve() -> None:
        if where == "lock":
            engine.takers[1].choose_lock = lambda: 1 / 0
        else:
            job.faults[engine.worker(1), where] = "raise"
        job.again(1)

    if when == "before":
        serve()
        sim.quiet()
    with stopped(job, "trainer 1"):
        job.call(0, min_replicas=1)
        if when != "before":
            until(sim, job.armed)
            serve()
        sim.quiet()
    job.call(1, min_replicas=1)
    sim.block(lambda: not job.running)
    sim.quiet()
    assert job.controllers[1]._phase is ControllerPhase.OVER and engine.sessions[1].error
    assert sim.now < began + 2 * deadlines.CAUSE_S
    assert where == "lock" or all(s.error for s in engine.sessions)
    assert [o.committed for o in heard(job)[0].outcomes] == [True, False], heard(job)
    assert job.commits(min_replicas=1) == [True, False], "it is told as long as it is not served anew"
    engine.takers[1].__dict__.pop("choose_lock", None)
    job.again(1)
    sim.quiet()
    assert job.commits() == [True, True]


def test_trainers_whose_layouts_all_change_while_a_replica_links_cost_it_one_link(sim):
    """Each finds that the link is of an older layout. The second report once ended the refit that the first one had let
    continue."""
    job = served(sim, 3, 2, 2)
    joins(job, 1, ReplicaPhase.LINKING)
    replica = job.coordinator.replicas[1]
    epoch = replica.epoch
    for s in job.sources:
        s.turn()
    assert job.commits() == [True, True] and replica.epoch <= epoch + 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_trainers_that_do_not_agree_what_to_gather_end_the_refit_and_not_a_link(sim, replicas):
    job = Job(sim, 2, replicas, 1, computes=True)
    joins(job, replicas - 1, ReplicaPhase.LINKING)
    last = job.coordinator.replicas[replicas - 1]
    epoch = last.epoch
    with stopped(job, *workers(job, replicas - 1)):
        job.sources[1].digest = "another"
        ends = job.all()
        assert all(isinstance(e, PlanMismatch) for e in ends), ends
    sim.quiet()
    assert last.phase is ReplicaPhase.READY and last.epoch == epoch and not last.relink, "its link is whole"
    job.sources[1].digest = "same"
    assert job.commits() == [True] * replicas


def test_a_layout_change_that_is_told_after_its_refit_is_over_is_not_forgotten(sim):
    """The worker reports it once."""
    job = served(sim, 2, 1, 1)
    job.engines[0].takers[0].changes, job.faults[job.engines[0].worker(0), "arm"] = "turns", "stop"
    assert all("worker 0: not armed" in str(e) for e in job.all(deadline_s=1.0))
    sim.stopped.clear()
    assert job.commits() == [True]


# ---- calls


def undoing(sim: Simulation) -> tuple[Job, list[bool]]:
    """A refit that failed is being undone until the list is emptied: its engine does not come back into service yet."""
    job, late = served(sim, 2, 1, 2), [True]
    engine = job.engines[0]
    resume = engine.resume
    engine.resume = lambda timeout: (sim.block(lambda: not late), resume(timeout))
    job.faults["trainer 1", "drain"] = "raise"
    assert all("injected fault" in str(e) for e in job.all(deadline_s=1.0)) and late
    return job, late


def test_trainers_do_not_wait_for_an_engine_that_comes_back_late_but_the_next_refit_does(sim):
    began = sim.now
    job, late = undoing(sim)
    assert sim.now <= began + 1.0 + deadlines.ANSWER_GRACE_S + 0.1
    job.call(0), job.call(1)
    sim.wait(10.0)
    assert len(job.running) == 2 and job.engines[0].paused
    late.clear()
    sim.block(lambda: not job.running)
    assert all(e.outcomes[0].committed for e in heard(job)) and not job.engines[0].paused


def test_a_refit_whose_engine_is_not_back_says_what_it_waited_for(sim):
    job, late = undoing(sim)
    for e in job.all(deadline_s=0.8):
        assert "replica 0 controller: bringing its engine back after refit 2" in str(e)
    late.clear()
    assert job.commits() == [True]


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_calls_anew_without_a_word_ends_the_call_that_it_left(sim, early):
    """It was interrupted before it could report that, and the others waited for it."""
    job = served(sim, 2, 1, 1)
    job.call(1 - early)
    sim.quiet()
    job.sessions[early].attempt += 1
    job.calls[early] += 1
    job.call(early)
    sim.block(lambda: 1 - early not in job.running)
    assert f"trainer {early} has left refit 2" in str(heard(job)[1 - early])
    job.call(1 - early)
    sim.block(lambda: not job.running)
    assert all(e.outcomes[0].committed for e in heard(job))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (dict(min_replicas=1), dict(min_replicas=2)),
        (dict(deadline_s=8.0), dict(deadline_s=9.0)),
        (dict(verify=True), dict(verify=False)),
        (dict(version="a"), dict(version=None)),
    ],
)
def test_ranks_that_ask_for_different_refits_are_told_what_differs(sim, mine, theirs):
    job = served(sim, 2, 2, 1)
    job.call(0, **mine), job.call(1, **theirs)
    sim.block(lambda: not job.running)
    ((name, value),) = mine.items()
    for e in heard(job):
        assert f"trainer 0: {name}={value!r}" in str(e) and f"trainer 1: {name}=" in str(e)
    assert job.commits() == [True, True]


# ---- prepared refits


@pytest.mark.parametrize("prepared", [False, True])
def test_a_calls_own_deadline_counts_whatever_connects_was(sim, prepared):
    """Also at the end of the time that was prepared for, and beyond the workers' grace."""
    job = served(sim, 1, 1, 1)
    if prepared:
        job.sessions[0].prepare()
        sim.wait(DEADLINE_S - 1.0)
    job.sources[0].drain = lambda: sim.wait(30.0 if prepared else 500.0)
    assert job.commits(deadline_s=60.0 if prepared else 600.0) == [True]


def test_a_prepare_ends_at_its_deadline_and_uses_up_neither_a_number_nor_a_label(sim):
    job = served(sim, 2, 1, 1)
    job.sessions[0].prepare()
    sim.wait(1.0)
    assert job.engines[0].paused
    sim.wait(DEADLINE_S)
    assert not job.engines[0].paused and job.coordinator.refit is None
    assert [e.version for e in job.all(version=None)] == [2, 2]


# ---- deaths, time and cost


def test_a_trainer_that_is_lost_while_workers_install_costs_the_next_refit_not_this_one(sim):
    job = served(sim, 3, 1, 2)
    for i in range(3):
        job.call(i)
    until(sim, lambda: job.coordinator.refit and job.coordinator.refit.parts[0].phase is Phase.COMMITTING)
    job.die("trainer 2")
    sim.block(lambda: not job.alive())
    assert all(job.ends[i, 2].outcomes[0].committed for i in range(2)) and job.engines[0].label == "2"
    job.call(0), job.call(1)
    sim.block(lambda: not job.alive())
    assert all("trainer 2" in str(job.ends[i, 3]) for i in range(2))


def test_a_refit_that_is_over_leaves_no_deadline_behind(sim):
    job = served(sim, 2, 1, 1)
    left = len(job.coordinator.timers._heap)
    for _ in range(10):
        job.commits()
    assert len(job.coordinator.timers._heap) <= left + 10  # one a refit looks whether its engine has come back


def test_the_transfer_clock_runs_from_readiness_to_decision_whatever_is_done_between(sim):
    """Not from the first call, and not only while bytes move: a new plan is part of it, told as a phase of its own."""
    job = served(sim, 2, 1, 1)
    job.sources[1].drain = lambda: sim.wait(3.0)
    o = job.all()[0].outcomes[0]
    assert o.committed and o.transfer_s < 0.1 and dict(o.phases)["plan"] == dict(o.phases)["link"] == 0.0
    job.sources[1].drain = lambda: None
    job.engines[0].takers[0].changes = "turns"
    job.call(0), job.call(1)
    for phase in (ReplicaPhase.PLANNING, ReplicaPhase.LINKING):
        until(sim, lambda phase=phase: job.coordinator.replicas[0].phase is phase)
        with stopped(job, *workers(job, 0)):
            sim.wait(0.5)
    sim.block(lambda: not job.running)
    o = heard(job)[0].outcomes[0]
    assert o.committed and 1.0 <= o.transfer_s < 1.1
    assert all(0.5 <= dict(o.phases)[phase] < 0.6 for phase in ("plan", "link"))


def test_engines_serve_until_trainers_are_about_to_be_ready(sim):
    """Armed at the first call, they would wait as long as trainers drain and look at their storages. How long that takes the refit
    before tells; trainers that are quicker than then wait for no timer, and after a refit that failed engines are armed at once."""
    job = served(sim, 2, 1, 2)
    (engine,) = job.engines

    def idle(seconds: float, fails: bool = False) -> int:
        """A refit whose trainers are ready after so many seconds: for how many of them the engine did not serve."""
        for s in job.sources:
            s.drain = lambda: (sim.wait(seconds), 1 / 0 if fails else None)
        began = sim.now
        for i in range(2):
            job.call(i)
        waited = 0
        for k in range(int(seconds)):
            sim.block(lambda: False, began + k + 0.5)
            waited += engine.paused
        sim.block(lambda: not job.running)
        assert fails or all(e.outcomes[0].committed for e in heard(job))
        return waited

    assert idle(5) == 5 and idle(5) == 0 and idle(5) == 0
    assert idle(0) == 0 and idle(3) == 3
    assert idle(2, fails=True) == 0 and idle(2) == 2


# ---- admission


def answer(job: Job, hello: m.Hello) -> str:
    """What the coordinator of a job that has met says to a process."""
    co, number = job.coordinator, 1000 + job.sim.turns
    co.handle(Connected(number), job.sim.now)
    effects = co.handle(Received(number, hello), job.sim.now)
    said = [x.message for x in effects if isinstance(x, Send) and number in x.clients]
    return "\n".join(str(x.error.error()) for x in said if isinstance(x, m.Failed | m.Refused))


def hello(role: str, index: int = 0, size: int = 1, replica: int = 0) -> m.Hello:
    return m.Hello(role, index, size, replica, "elsewhere", 7)


HELLOS = [
    (hello("trainer", 1, 3), "it says there are 3 trainer ranks, trainer 0 says 2"),
    (hello("trainer", 5, 2), "trainer rank 5 of 2"),
    (hello("trainer", 1, 2), "trainer 1 is connected already"),
    (hello("controller", 0, 0), "its engine says that it has no workers"),
    (hello("controller", 0, 1), "replica 0 has a controller already"),
    (hello("controller", 0, 1, 1), "trainers expect replicas 0..0"),
    (hello("worker", 1, 1), "worker 1 of 1: an engine that was started as one rank of several"),
]


def test_hellos_that_cannot_be_right_are_refused_with_the_reason_and_listed():
    with Simulation() as sim:
        for said, why in HELLOS:
            job = Job(sim, 2, 1, 1)
            assert why in answer(job, said)
            job.coordinator.handle(Unproven("10.0.0.9"), sim.now)
            first, second = job.coordinator.rejected.lines()
            assert first.startswith("rejected: ") and why in first
            assert "rejected: a caller with another token, last from 10.0.0.9" in second


def test_a_trainer_that_was_refused_for_its_arguments_is_not_waited_for_by_the_closing_rendezvous():
    """It has its error. connect() of trainer 0 once raised five seconds later than that of the others."""
    options = Options(2, 1, 20.0, 4096, settings=(("deadline_s", "20"),))
    co = Coordinator(options, "session", 0.0)
    for i, seconds in enumerate(("20", "19")):
        co.handle(Connected(i), 0.0)
        co.handle(Received(i, m.Hello("trainer", i, 2, 0, "host", 7, settings=(("deadline_s", seconds),))), 0.0)
    assert "deadline_s is '19', trainer 0 has '20'" in str(co.failure) and co.met == {0, 1}


def test_all_arguments_in_which_ranks_differ_are_named():
    here = Options(2, 1, 20.0, 4096)
    here = replace(here, settings=told(here))
    other = Options(2, 2, 19.0, 8192, drop=("vision.*",), narrow=tuple(f"layer.{i}.*" for i in range(99)))
    lines = differences(replace_settings(told(other)), here)
    for name in ("replicas", "deadline_s", "bucket_bytes", "drop", "narrow"):
        assert any(line.startswith(f"{name} is ") and "trainer 0 has " in line for line in lines), (name, lines)
    assert all(len(line) < 600 for line in lines)


def replace_settings(settings) -> m.Hello:
    return m.Hello("trainer", 1, 2, 0, "elsewhere", 7, settings=settings)
