"""Orders of events that the coordinator once got wrong, and what its errors say. No sockets, threads or clocks.

test_coordinator.py searches random orders for broken promises. The tests here fix an order and check what the search
does not: that processes hear of a failure without any time passing, and the words in which they hear it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.cluster_model import Job, Process
from xfer.coordinator import deadlines
from xfer.coordinator import messages as m
from xfer.coordinator.commit import Phase
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.events import Connected, Received, Send, Unproven
from xfer.coordinator.state import Options, ReplicaPhase, differences, told
from xfer.errors import PlanMismatch

GOOD = [True]


@pytest.fixture(params=range(3))
def seed(request) -> int:
    """Seed of the order of all events that a test leaves open."""
    return request.param


def until(job: Job, condition: Callable[[], object]) -> None:
    """Let things happen, without any time passing, until `condition` holds."""
    while not condition():
        assert job.step(), "nothing happens any more"


def met(*size: int) -> Job:
    job = Job(*size)
    job.run()
    return job


def served(trainers: int, replicas: int, workers: int, seed: int = 0) -> Job:
    """A job after its first refit."""
    job = met(trainers, replicas, workers, seed)
    assert committed(job) == [True] * replicas
    return job


def committed(job: Job, **how) -> list[bool]:
    """Refit by all trainers. Returns by replica whether it committed, which all trainers hear alike."""
    outcomes = job.refit(**how)
    assert all(o is not None and o == outcomes[0] for o in outcomes)
    return [o.committed for o in outcomes[0].outcomes]


def armed(job: Job) -> Callable[[], bool]:
    """Return a condition: all workers of replica 0 are armed."""
    return lambda: job.coordinator.refit is not None and len(job.coordinator.refit.parts[0].armed) == job.workers


def call(job: Job, *ranks: int, verify: bool = True, deadline_s: float = 60.0, version: int | None = None) -> None:
    for i in ranks or range(len(job.trainers)):
        job.trainers[i].call(version, verify, deadline_s)


def ran(job: Job, *ranks: int, **how) -> None:
    """Some ranks call, and all happens that can happen without any time passing."""
    call(job, *ranks, **how)
    job.run()


def mended(job: Job) -> None:
    job.faults.clear()
    job.after()
    job.run()


def says(message: object) -> str:
    """Return all lines of the errors in a message, or in an outcome and its replicas."""
    errors = [message.error] if isinstance(message, m.Failed | m.Refused | m.Outcome) else []
    errors += [o.failure for o in getattr(message, "outcomes", ())]
    return "\n".join(str(e.error()) for e in errors if e is not None)


def leave(job: Job, replica: int) -> None:
    """The processes of a replica end."""
    e = job.engines[replica]
    for p in (e.controller, *e.workers):
        job.end(p)
    e.workers = []


def joins(job: Job, replica: int, phase: ReplicaPhase) -> None:
    """A replica joins again and reaches this phase."""
    leave(job, replica)
    job.serve(job.engines[replica])
    until(job, lambda: job.coordinator.replicas[replica].phase is phase)


@contextmanager
def stopped(*processes: Process) -> Iterator[None]:
    """Inside the context, these processes hear nothing and do nothing."""
    for p in processes:
        p.hung = True
    yield
    for p in processes:
        p.hung = False


# ---- while a replica joins


@pytest.mark.parametrize("phase", [ReplicaPhase.PLANNING, ReplicaPhase.LINKING])
def test_a_refit_that_fails_while_a_replica_joins_leaves_it_joining(seed, phase):
    job = served(2, 2, 2, seed)
    joins(job, 1, phase)
    epoch = job.coordinator.replicas[1].epoch
    job.faults[job.trainers[1], m.Ready] = True
    with stopped(*job.engines[1].workers):
        call(job)
        until(job, lambda: all(t.outcome for t in job.trainers))
    assert "a gather failed" in says(job.trainers[0].outcome)
    job.run()
    assert job.coordinator.replicas[1].phase is ReplicaPhase.READY and job.coordinator.replicas[1].epoch == epoch
    assert committed(job) == [True, True]


@pytest.mark.parametrize("when", ["before", "within", "again"])
@pytest.mark.parametrize("kind", [m.InventoryMsg, m.PlanInputs, m.ReplicaReady])
def test_processes_of_a_replica_that_fails_while_it_joins_hear_why_at_once(seed, when, kind):
    """Each once waited for its whole deadline, inside the engine's call; so did a worker that came after another had failed."""
    job = served(2, 2, 2, seed)
    began = job.now

    def serve() -> None:
        leave(job, 1)
        job.serve(job.engines[1])
        until(job, lambda: job.engines[1].workers)
        job.faults[job.engines[1].workers[1], kind] = True

    if when == "before":
        serve()
    with stopped(job.trainers[1]):
        call(job, 0)
        if when != "before":
            until(job, armed(job))
            serve()
        job.run()
    ran(job, 1)
    engine = job.engines[1]
    assert engine.controller.kept_out and all(w.kept_out or w.joined for w in engine.workers) and job.now == began
    assert kind is m.ReplicaReady or all(w.kept_out for w in engine.workers)
    assert job.coordinator.replicas[1].phase is ReplicaPhase.FAILED
    assert [o.committed for o in job.trainers[0].outcome.outcomes] == [True, False]
    assert committed(job) == [True, False], "it is told as long as it is not served anew"
    job.serve(engine)
    job.run()
    assert committed(job) == [True, True]


def test_trainers_whose_layouts_all_change_while_a_replica_links_cost_it_one_link(seed):
    """Each finds that the link is of an older layout. The second report once ended the refit that the first one had let
    continue."""
    job = served(3, 2, 2, seed)
    joins(job, 1, ReplicaPhase.LINKING)
    replica = job.coordinator.replicas[1]
    epoch = replica.epoch
    for t in job.trainers:
        t.change("inventory")
        t.fail("this rank's layout is not the one that the plan was made from", 0, 1, epoch, PlanMismatch)
    ran(job)
    assert [o.committed for o in job.trainers[0].outcome.outcomes] == [True, True]
    assert replica.epoch == epoch + 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_trainers_that_do_not_agree_what_to_gather_end_the_refit_and_not_a_link(seed, replicas):
    job = met(2, replicas, 1, seed)
    joins(job, replicas - 1, ReplicaPhase.LINKING)
    last = job.coordinator.replicas[replicas - 1]
    epoch = last.epoch
    with stopped(*job.engines[-1].workers):
        for t in job.trainers:
            t.slow = True
        call(job)
        for t in job.trainers:
            t.fail("trainer ranks would gather different tensors", t.attempt, kind=PlanMismatch)
        until(job, lambda: all(t.outcome for t in job.trainers))
    job.run()
    assert last.phase is ReplicaPhase.READY and last.epoch == epoch and not last.relink, "its link is whole"
    for t in job.trainers:
        t.slow = False
    assert committed(job) == [True] * replicas


def test_workers_of_a_replicas_former_life_do_not_speak_for_its_present_one(seed):
    """Their controller is gone while they read their layouts, and their reports arrive when others have their numbers."""
    job = served(1, 2, 2, seed)
    joins(job, 1, ReplicaPhase.JOINING)
    e, replica = job.engines[1], job.coordinator.replicas[1]
    until(job, lambda: len(replica.workers) == 2)
    old, e.workers = e.workers, []
    with stopped(*old):
        job.end(e.controller)
        job.serve(e)
        until(job, lambda: len(replica.workers) == 2 and not replica.inventories)
        for w in old:
            w.say(m.InventoryMsg(b"of another engine", job.coordinator.generation))
            w.fail("its controller is gone", 0, 1)
        job.run()
        assert b"of another engine" not in replica.inventories.values()
        assert committed(job) == [True, True]


@pytest.mark.parametrize("fails", [False, True])
def test_a_layout_that_changes_while_a_replica_is_planned_is_planned_again_at_once(seed, fails):
    """No rank answers for the old layout. `fails`: the refit in which a trainer reported the change fails first."""
    job = met(2, 1, 2, seed)
    joins(job, 0, ReplicaPhase.PLANNING)
    began, replica = job.now, job.coordinator.replicas[0]
    epoch = replica.epoch
    with stopped(*job.engines[0].workers):
        job.trainers[0].change("inventory")
        job.trainers[1].slow = fails
        call(job)
        until(job, lambda: replica.stale or replica.epoch > epoch)
        if fails:
            job.trainers[1].fail("boom", job.trainers[1].attempt)
        job.run()
        assert replica.epoch == epoch + 1
    job.run()
    assert replica.phase is ReplicaPhase.READY and job.now == began
    job.trainers[1].slow = False
    assert fails or job.trainers[0].outcome.outcomes[0].committed
    assert committed(job) == GOOD


def test_a_layout_change_that_is_told_after_its_refit_is_over_is_not_forgotten(seed):
    """The worker reports it once."""
    job = served(2, 1, 1, seed)
    (worker,) = job.engines[0].workers
    worker.moves = True
    call(job, deadline_s=1.0)
    until(job, lambda: worker.receiving)
    with stopped(worker):
        job.settle(1.0 + deadlines.ANSWER_GRACE_S + 0.5)
        assert "worker 0: not armed" in says(job.trainers[0].outcome)
        worker.todo.popleft()()  # it arms, before it hears that the refit is over
    job.run()
    assert not worker.moves
    assert committed(job) == GOOD


# ---- calls


def undoing(seed: int) -> Job:
    """All ranks gave up on a silent coordinator, and refit 2 is being undone until `faults` are cleared."""
    job = served(2, 1, 2, seed)
    job.faults[job.engines[0].controller, m.Settled] = True  # its engine does not come back into service yet
    for t in job.trainers:
        t.slow = True
    call(job)
    until(job, armed(job))
    for t in job.trainers:
        t.called, t.slow = False, False
        t.fail("no answer in time", t.attempt)
    job.run()
    return job


@pytest.mark.parametrize("early", [(0,), (1,), (0, 1)])
def test_a_call_that_comes_while_the_refit_before_is_undone_begins_when_it_has(seed, early):
    """The ranks that called first were once refused, and the others with them."""
    job = undoing(seed)
    ran(job, *early)
    assert job.coordinator.refit.number == 2 and not any(job.trainers[i].outcome for i in early)
    mended(job)
    until(job, lambda: job.coordinator.refit is None or job.coordinator.refit.number == 3)
    for i in {0, 1} - set(early):
        call(job, i)
    job.settle()
    assert all(t.outcome.attempt == 3 and t.outcome.outcomes[0].committed for t in job.trainers)


def test_a_call_that_cannot_begin_by_its_deadline_says_what_was_still_undone(seed):
    job = undoing(seed)
    ran(job, 0, deadline_s=0.8)
    job.pass_time(0.8)
    job.run()
    call(job, 1)  # the same call, of a rank that comes later
    job.run()
    for t in job.trainers:
        assert "could not begin by its deadline of 0.8 s" in says(t.outcome), says(t.outcome)
        assert "replica 0 controller: resuming" in says(t.outcome)
    call(job, 0)
    job.trainers[1].attempt += 1
    job.trainers[1].fail("min_replicas=-1", job.trainers[1].attempt)
    job.run()
    assert "min_replicas=-1" in says(job.trainers[0].outcome), "it hears at once that another rank has failed in it"
    mended(job)
    assert committed(job) == GOOD


def test_a_rank_that_calls_anew_without_a_word_ends_the_call_that_it_left(seed):
    """It was interrupted before it could report that, and the others waited for it."""
    job = served(2, 1, 1, seed)
    ran(job, 1)
    job.trainers[0].attempt += 1
    call(job, 0)
    job.settle(2 * deadlines.CAUSE_S)
    assert "trainer 0 has left refit 2" in says(job.trainers[1].outcome)
    ran(job, 1)
    assert all(t.outcome.attempt == 3 and t.outcome.outcomes[0].committed for t in job.trainers)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (dict(min_replicas=1), dict(min_replicas=2)),
        (dict(deadline_s=8.0), dict(deadline_s=9.0)),
        (dict(verify=True), dict(verify=False)),
        (dict(version="a"), dict(version=None)),
    ],
)
def test_ranks_that_ask_for_different_refits_are_told_what_differs(mine, theirs):
    job = served(2, 2, 1)
    for t, odd in zip(job.trainers, (mine, theirs)):
        t.attempt, t.called, t.until = 2, True, job.now + 60.0
        t.say(m.Enter(**dict(attempt=2, version=None, verify=True, min_replicas=2, deadline_s=60.0) | odd))
    job.run()
    ((name, value),) = mine.items()
    for t in job.trainers:
        assert f"trainer 0: {name}={value!r}" in says(t.outcome) and f"trainer 1: {name}=" in says(t.outcome)
        t.attempt = 2
    assert committed(job) == [True, True]


# ---- prepared refits


def test_a_prepare_while_the_last_refit_is_still_being_settled_is_kept_for_later(seed):
    job = served(2, 1, 1, seed)
    job.faults[job.engines[0].controller, m.Settled] = True
    ran(job)
    job.trainers[0].say(m.Prepare(3))
    job.run()
    assert job.coordinator.failure is None and job.coordinator.refit.number == 2
    mended(job)
    assert job.coordinator.refit.number == 3 and not job.coordinator.refit.called
    assert committed(job) == GOOD


def test_a_call_that_comes_while_a_prepare_is_being_given_up_is_served(seed):
    job = served(2, 1, 1, seed)
    job.trainers[0].say(m.Prepare(2))
    job.run()
    job.faults[job.engines[0].controller, m.Settled] = True
    job.pass_time(job.options.deadline_s)
    job.run()
    assert job.coordinator.refit.number == 2 and job.coordinator.refit.abandoned
    call(job, 0)
    job.trainers[1].say(m.Prepare(2))  # while it is being given up, too
    job.run()
    mended(job)
    ran(job, 1)
    assert all(t.outcome.attempt == 3 and t.outcome.outcomes[0].committed for t in job.trainers)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_calls_own_deadline_counts_whatever_connects_was(seed, prepared):
    """Also at the end of the time that was prepared for, and beyond the workers' grace."""
    job = served(1, 1, 1, seed)
    (t,) = job.trainers
    t.slow = True
    if prepared:
        t.say(m.Prepare(2))
        job.run()
        job.pass_time(job.options.deadline_s - 1.0)
        job.run()
    ran(job, deadline_s=60.0 if prepared else 600.0)
    job.pass_time(30.0 if prepared else 500.0)
    t.ready()
    job.run()
    assert t.outcome.outcomes[0].committed


# ---- deaths and silence


def test_a_trainer_that_is_lost_while_workers_install_costs_the_next_refit_not_this_one(seed):
    job = served(3, 1, 2, seed)
    call(job)
    until(job, lambda: job.coordinator.refit and job.coordinator.refit.parts[0].phase is Phase.COMMITTING)
    job.end(job.trainers[2])
    job.run()
    assert all(t.outcome.outcomes[0].committed for t in job.trainers[:2])
    assert job.engines[0].serving and job.engines[0].contents == ["2"] * 2
    ran(job, 0, 1)
    assert all("trainer 2" in says(t.outcome) for t in job.trainers[:2])


@pytest.mark.parametrize("fails", [False, True])
def test_trainers_do_not_wait_for_an_engine_that_comes_back_late_but_the_next_refit_does(seed, fails):
    job = served(2, 1, 2, seed)
    job.faults[job.engines[0].controller, m.Settled] = True
    job.trainers[1].slow = fails
    began = job.now
    ran(job, deadline_s=1.0)
    if fails:
        job.trainers[1].fail("boom", job.trainers[1].attempt)
    job.run()
    job.settle(1.0 + deadlines.ANSWER_GRACE_S)
    assert job.now <= began + 1.0 + deadlines.ANSWER_GRACE_S + 1.0
    assert all(("boom" if fails else "not back in service") in says(t.outcome) for t in job.trainers)
    job.trainers[1].slow = False
    ran(job)
    assert not any(t.outcome for t in job.trainers)
    mended(job)
    assert all(t.outcome.outcomes[0].committed for t in job.trainers) and job.engines[0].serving


def test_a_refit_that_is_over_leaves_no_deadline_behind(seed):
    job = served(2, 1, 1, seed)
    left = len(job.coordinator.timers._heap)
    for _ in range(10):
        ran(job)
    assert len(job.coordinator.timers._heap) <= left + 10  # one a refit looks whether its engine has come back


def test_the_transfer_clock_runs_from_readiness_to_decision_whatever_is_done_between(seed):
    """Not from the first call, and not only while bytes move: a new plan is part of it, told as a phase of its own."""
    job = served(2, 1, 1, seed)
    job.trainers[1].slow = True
    ran(job)
    job.pass_time(3.0)
    job.trainers[1].ready()
    job.run()
    o = job.trainers[0].outcome.outcomes[0]
    assert o.committed and o.transfer_s == 0.0 and dict(o.phases)["plan"] == dict(o.phases)["link"] == 0.0
    job.trainers[1].slow = False
    w = job.engines[0].workers[0]
    w.moves = True
    call(job)
    for phase in (ReplicaPhase.PLANNING, ReplicaPhase.LINKING):
        until(job, lambda phase=phase: job.coordinator.replicas[0].phase is phase)
        with stopped(w):
            job.run()
            job.pass_time(0.5)
    job.run()
    o = job.trainers[0].outcome.outcomes[0]
    assert (o.committed, o.transfer_s) == (True, 1.0) and dict(o.phases)["plan"] == dict(o.phases)["link"] == 0.5


# ---- admission


class Admission:
    """Sends hellos to the coordinator of a job that has met, and returns the answers."""

    def __init__(self, trainers: int = 2):
        self.job = Job(trainers, 1, 1)
        self.job.run()

    def hello(self, role: str, index: int = 0, size: int = 1, **more) -> str:
        co, number = self.job.coordinator, next(self.job.numbers)
        co.handle(Connected(number), self.job.now)
        said = m.Hello(role, index, size, more.pop("replica", 0), "elsewhere", 7, **more)
        effects = co.handle(Received(number, said), self.job.now)
        return "\n".join(says(x.message) for x in effects if isinstance(x, Send) and number in x.clients)


@pytest.mark.parametrize(
    ("hello", "answer"),
    [
        (("trainer", 1, 3), "it says there are 3 trainer ranks, trainer 0 says 2"),
        (("trainer", 5, 2), "trainer rank 5 of 2"),
        (("trainer", 1, 2), "trainer 1 is connected already"),
        (("controller", 0, 0), "its engine says that it has no workers"),
        (("controller", 0, 1), "replica 0 has a controller already"),
        (("worker", 1, 1), "worker 1 of 1: an engine that was started as one rank of several"),
    ],
)
def test_hellos_that_cannot_be_right_are_refused_with_the_reason(hello, answer):
    assert answer in Admission().hello(*hello)


@pytest.mark.parametrize("scope", ["replica", "job"])
def test_a_late_worker_whose_controller_was_told_and_left_is_told_why_too(scope):
    """It was once told that it came before its controller."""
    admission = Admission()
    job, (engine,) = admission.job, admission.job.engines
    job.coordinator.replicas[0].size = 2
    if scope == "replica":
        engine.workers[0].fail("it cannot read its layout", 0, 0)
    else:
        job.trainers[0].fail("nothing that trains is sent")
    job.run()
    engine.controller.say(m.Leave())
    job.run()
    said = admission.hello("worker", 1, 2)
    assert ("it cannot read its layout" if scope == "replica" else "nothing that trains is sent") in said


def test_a_trainer_that_was_refused_for_its_arguments_is_not_waited_for_by_the_closing_rendezvous():
    """It has its error. connect() of trainer 0 once raised five seconds later than that of the others."""
    options = Options(2, 1, 20.0, 4096, settings=(("deadline_s", "20"),))
    co = Coordinator(options, "session", 0.0)
    for i, seconds in enumerate(("20", "19")):
        co.handle(Connected(i), 0.0)
        co.handle(Received(i, m.Hello("trainer", i, 2, 0, "host", 7, settings=(("deadline_s", seconds),))), 0.0)
    assert "deadline_s is '19', trainer 0 has '20'" in str(co.failure) and co.met == {0, 1}


def test_rejected_processes_are_listed_for_timeout_errors():
    admission = Admission()
    assert "trainers expect replicas 0..0" in admission.hello("controller", 0, 1, replica=1)
    co = admission.job.coordinator
    co.handle(Unproven("10.0.0.9"), admission.job.now)
    first, second = co.rejected.lines()
    assert "rejected: controller 0" in first and "replica 1: trainers expect replicas 0..0" in first
    assert "rejected: a caller with another token, last from 10.0.0.9" in second


def test_all_arguments_in_which_ranks_differ_are_named():
    here = Options(2, 1, 20.0, 4096)
    here = replace(here, settings=told(here))
    other = Options(2, 2, 19.0, 8192, drop=("vision.*",), narrow=tuple(f"layer.{i}.*" for i in range(99)))
    hello = m.Hello("trainer", 1, 2, 0, "elsewhere", 7, settings=told(other))
    lines = differences(hello, here)
    for name in ("replicas", "deadline_s", "bucket_bytes", "drop", "narrow"):
        assert any(line.startswith(f"{name} is ") and "trainer 0 has " in line for line in lines), (name, lines)
    assert all(len(line) < 600 for line in lines)
