"""Fixed orders of events: what each caller hears, in which words, and how soon.

Real participants in a simulation, as in test_session.py, which searches random orders. Here each test chooses an order and leaves
the rest to a seed. Afterwards all that died or was stopped comes again, and the next refit must be whole everywhere.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.support import cpu_peer
from tests.support.simulated_job import DEADLINE_S, SOON_S, Engine, Job
from tests.support.simulation import Simulation
from xfer.coordinator import deadlines, relays
from xfer.coordinator import messages as m
from xfer.coordinator.commit import Phase
from xfer.coordinator.state import Client, ReplicaPhase
from xfer.direct import sums
from xfer.direct import trainer as direct_trainer
from xfer.direct.plane import DirectPlane
from xfer.errors import DeadlineExceeded, PeerLost, PlanMismatch, RebindError, RefitFailed, Unsupported, XferError
from xfer.kernels.block_fp8 import ScaleRule
from xfer.participants import computing
from xfer.participants.controller import ControllerPhase
from xfer.plan import relay
from xfer.rendezvous import client
from xfer.transport import p2p, relay_place, routes
from xfer.transport.p2p import P2P

SEEDS = pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
"""Two orders of everything that a test leaves open. In CI one, beside the hundred jobs of test_session.py."""


@contextmanager
def after_one_refit(seed: int = 0, trainers: int = 2, replicas: int = 1, workers: int = 2, **how) -> Iterator[Job]:
    with Simulation(seed) as sim:
        job = Job(sim, trainers, replicas, workers, **how)
        assert job.commits() == [True] * replicas
        yield job
        sim.stopped.clear()
        job.ended()
        if not any(who.startswith("trainer") for who in sim.dead):
            job.mend()
            if not sim.dead:
                job.close()


def call(job: Job, *ranks: int, **how) -> None:
    for i in ranks or range(job.trainers):
        job.call(i, **how)


def says(end: object) -> str:
    """All lines of an error, or of those of a report's replicas."""
    return str(end) if isinstance(end, XferError) else "\n".join(str(o.error) for o in end.outcomes if o.error)


def phase(job: Job, replica: int, wanted: ReplicaPhase) -> Callable[[], bool]:
    return lambda: job.coordinator.replicas[replica].phase is wanted


def stopped(job: Job, *who: str) -> None:
    for w in who:
        job.stop(w)


def workers(job: Job, replica: int) -> list[str]:
    return [job.engines[replica].worker(i) for i in range(job.workers)]


# ---- a process that fails at a point of a refit

TRAINER = ["enter", "drain", "before", "after", "plan", "link", "moving", "wave", "done"]
WORKER = ["plan", "link", "arm", "moving", "wave", "done", "commit"]
POINTS = [*(("trainer 1", p) for p in TRAINER), *(("worker", p) for p in WORKER)]
POINTS += [("trainer 0", p) for p in ("enter", "link", "moving")]


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("action", ["raise", "kill", "stop"])
@pytest.mark.parametrize(("victim", "point"), POINTS)
def test_a_process_that_fails_at_any_point_is_named_to_all_and_costs_no_more_than_it_must(
    victim, point, action, pulled
):
    """One that dies or raises is heard of at once, one that is stopped by the deadline. A worker costs its own replica only. Before
    its first write an engine serves its old version on; after it, it is out of service until a refit repairs it."""
    trains, moves = victim != "worker", point in ("moving", "wave", "done")
    if moves and trains and pulled or victim == "trainer 0" and action == "raise":
        pytest.skip("workers pull: this trainer moves nothing; or as trainer 1")
    with after_one_refit(trainers=3, replicas=2, pulled=pulled, computes=True) as job:
        who = victim if trains else job.engines[0].worker(1)
        name, began = who.split(" of ")[0], job.sim.now
        job.faults[who, point] = action
        if point in ("plan", "link"):  # they are made in a refit only when a layout changed
            job.sources[1].turn()
        call(job, deadline_s=8.0, min_replicas=1, verify=True)
        ends = job.ended()
        took = job.sim.now - began
        assert (who, point) not in job.faults, "that point was not passed"
        assert took < SOON_S / 2 if action != "stop" else took <= 8.0 + deadlines.CALL_GRACE_S + 0.02, took
        for end in ends:
            text = says(end)
            assert name in text or action == "raise" and trains, text
            assert action != "raise" or f"injected fault at {point}" in text, text
            if isinstance(end, XferError) and not trains:  # it may still read the trainers' memory
                assert action == "stop" and pulled and not end.drained, end
            elif not trains:
                assert [o.committed for o in end.outcomes] == [False, True], text
                kind = {"raise": XferError, "kill": PeerLost, "stop": DeadlineExceeded}[action]
                assert isinstance(end.outcomes[0].error, kind), text
            elif action == "kill" or victim == "trainer 0":
                assert isinstance(end, PeerLost if action == "kill" else XferError), end
                assert action == "kill" or "does not answer" in text, text
        if not trains and action != "kill":
            engine, serves = job.engines[0], point in ("plan", "link", "arm")
            job.sim.stopped.clear()
            job.sim.wait(deadlines.SETTLE_GRACE_S)
            assert engine.paused != serves and (engine.label == "1") == serves, engine.label
            assert (job.controllers[0].error is None) == serves


@pytest.mark.parametrize(("who", "text"), [("trainer 1", "not called"), ("trainer 0", ""), ("controller", "not armed")])
def test_a_process_that_is_stopped_between_refits_is_named_at_the_deadline(who, text):
    with after_one_refit(trainers=2, replicas=1) as job:
        stopped(job, job.controlled[0] if who == "controller" else who)
        began = job.sim.now
        call(job, *job.free(), deadline_s=5.0)
        for end in job.ended():
            assert isinstance(end, XferError) and text in str(end), end
            assert type(end) is DeadlineExceeded or who != "trainer 1"
            assert job.sim.now - began <= 5.0 + deadlines.CALL_GRACE_S + 0.01
        assert not job.engines[0].paused or who != "trainer 1"


# ---- replicas that join


@SEEDS
@pytest.mark.parametrize("now", [ReplicaPhase.PLANNING, ReplicaPhase.LINKING])
def test_a_refit_that_fails_while_a_replica_joins_leaves_it_joining(seed, now):
    with after_one_refit(seed, replicas=2, first_copies=False) as job:
        job.again(1)
        job.sim.until(phase(job, 1, now))
        epoch = job.coordinator.replicas[1].epoch
        stopped(job, *workers(job, 1))
        job.faults["trainer 1", "drain"] = "raise"
        call(job)
        assert all("injected fault at drain" in says(end) for end in job.ended())
        job.sim.stopped.clear()
        job.sim.quiet()
        assert phase(job, 1, ReplicaPhase.READY)() and job.coordinator.replicas[1].epoch == epoch


@SEEDS
@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("point", ["read", "plan", "link"])
def test_processes_of_a_replica_that_fails_while_it_joins_hear_why_at_once(seed, when, point):
    """Each once waited for its whole deadline, inside the engine's call."""
    with after_one_refit(seed, replicas=2) as job:
        began, engine = job.sim.now, job.engines[1]

        def serve() -> None:
            job.faults[engine.worker(1), point] = "raise"
            job.again(1)

        if when == "before":
            serve()
        call(job, 0, min_replicas=1)
        if when == "within":
            job.sim.until(lambda: job.coordinator.refit and len(job.coordinator.refit.parts[0].armed) == job.workers)
            serve()
        job.sim.quiet()
        call(job, 1, min_replicas=1)
        for end in job.ended():
            assert [o.committed for o in end.outcomes] == [True, False], end
        assert job.sim.now - began < 0.1
        assert all(not s.joined and f"injected fault at {point}" in str(s.error) for s in engine.sessions)
        assert job.controllers[1]._phase is ControllerPhase.OVER
        call(job, min_replicas=1)
        for end in job.ended():  # it is told as long as the engine is not served anew
            assert [o.committed for o in end.outcomes] == [True, False] and f"injected fault at {point}" in says(end)


@SEEDS
def test_trainers_whose_layouts_all_change_while_a_replica_links_cost_it_one_link(seed):
    with after_one_refit(seed, trainers=3, replicas=2) as job:
        job.again(1)
        job.sim.until(phase(job, 1, ReplicaPhase.LINKING))
        epoch = job.coordinator.replicas[1].epoch
        for source in job.sources:
            source.turn()
        call(job)
        assert all(o.committed for end in job.ended() for o in end.outcomes)
        assert job.coordinator.replicas[1].epoch <= epoch + 1


@SEEDS
def test_trainers_that_do_not_agree_what_to_gather_end_the_refit_and_not_a_link(seed):
    with after_one_refit(seed, replicas=2, first_copies=False, computes=True) as job:
        job.again(1)
        job.sim.until(phase(job, 1, ReplicaPhase.LINKING))
        last = job.coordinator.replicas[1]
        epoch = last.epoch
        stopped(job, *workers(job, 1))
        job.sources[1].digest = "another"
        call(job)
        for end in job.ended(SOON_S):
            assert isinstance(end, PlanMismatch), end
        job.sources[1].digest = "same"
        job.sim.stopped.clear()
        job.sim.quiet()
        assert last.phase is ReplicaPhase.READY and last.epoch == epoch and not last.relink, "its link is whole"


@SEEDS
def test_an_engine_that_is_served_anew_while_its_controller_arms_it_is_not_held_up(seed):
    """The old controller's update call came behind the new one's init, and held the worker until that refit's deadline."""
    with after_one_refit(seed, in_step=True) as job:
        engine, late = job.engines[0], []
        update = engine.update
        engine.update = lambda *a: (late.append(a), job.sim.block(engine._core.locked), update(*a))
        job.sessions[1].prepare()
        job.sim.until(lambda: late)
        del engine.update
        job.again(0)


@SEEDS
def test_a_layout_that_changes_while_a_replica_is_planned_is_planned_again_at_once(seed):
    with after_one_refit(seed, replicas=2) as job:
        job.again(1)
        job.sim.until(phase(job, 1, ReplicaPhase.PLANNING))
        epoch = job.coordinator.replicas[1].epoch
        stopped(job, *workers(job, 1))
        job.sources[0].turn()
        call(job)
        job.sim.quiet()
        assert phase(job, 1, ReplicaPhase.PLANNING)() and job.coordinator.replicas[1].epoch == epoch + 1
        job.sim.stopped.clear()
        assert all(o.committed for end in job.ended(0.1) for o in end.outcomes)


@SEEDS
def test_a_layout_change_that_is_told_after_its_refit_is_over_is_not_forgotten(seed):
    """The worker reports it once."""
    with after_one_refit(seed) as job:
        job.engines[0].takers[0].changes = "turns"
        job.faults[job.engines[0].worker(0), "arm"] = "stop"
        call(job, deadline_s=2.0)
        for end in job.ended():
            assert isinstance(end, DeadlineExceeded) and "worker 0: not armed" in str(end), end


@SEEDS
@pytest.mark.parametrize("pulled", [False, True])
def test_a_trainer_that_gives_up_on_a_silent_coordinator_leaves_links_of_joiners_alone(seed, pulled):
    """It once stopped them without a word, so that the workers of the replica that joined could never take part."""
    with after_one_refit(seed, replicas=2, first_copies=False, pulled=pulled) as job:
        job.again(1)
        job.sim.until(phase(job, 1, ReplicaPhase.LINKING))
        epoch = job.coordinator.replicas[1].epoch
        stopped(job, *workers(job, 1))
        job.sim.quiet()
        job.later(lambda: job.sim.wait(20.0))
        job.unheard = {(0, 2), (1, 2)}
        call(job, deadline_s=0.5, min_replicas=1)
        for end in job.ended():
            assert isinstance(end, PeerLost if pulled else DeadlineExceeded), end
        job.sim.wait(20.0)
        job.sim.stopped.clear()
        job.sim.quiet()
        assert phase(job, 1, ReplicaPhase.READY)() and job.coordinator.replicas[1].epoch == epoch


HELD = {
    "sums are bound": (sums.Sums, "__init__"),
    "a trainer has opened": (direct_trainer.DirectTrainer, "opened"),
    "routes are found": (routes, "find_ways"),
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("change", ["move", "turn", "export"])
def test_what_trainers_hold_may_change_while_a_replica_links(held, change):
    """The change comes while a thread that links stands at `held`. What was made for the old storages was kept for the new ones;
    where they had another form, the replica could never take part again."""
    where, name = HELD[held]
    if change != "move" and held != "a trainer has opened":
        pytest.skip("a new form is planned anew")
    real, opening = getattr(where, name), []
    with after_one_refit(replicas=2) as job:
        bindings = [s.side._binding for s in job.sessions]

        def late(*a, **k):
            opening.append(held)
            job.sim.block(lambda: all(s.side._binding > b for s, b in zip(job.sessions, bindings)))
            return real(*a, **k)

        job.sim.patch(where, name, late)
        job.again(1)
        job.sim.until(lambda: opening)
        for source in job.sources:
            getattr(source, change)()
        # The coordinator hears of it when the link is open: else it plans anew at once.
        compute, linking = computing.compute, phase(job, 1, ReplicaPhase.LINKING)
        job.sim.patch(computing, "compute", lambda *a: (job.sim.block(lambda: not linking()), 0.0)[1])
        call(job)
        assert all(o.committed for end in job.ended(SOON_S) for o in end.outcomes)
        setattr(where, name, real)
        computing.compute = compute
        assert [s.error for s in job.engines[1].sessions] == [None] * 2


@SEEDS
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("released", [(0,), (0, 1)])
def test_a_replica_that_joins_while_weights_are_released_is_refitted_when_they_are_back(seed, pulled, released):
    """Engines restart while they sample; colocated trainers have released their weights by then."""
    with after_one_refit(seed, replicas=2, pulled=pulled) as job:
        for i in released:
            job.sessions[i].release()
        job.again(0)
        job.sim.quiet()
        assert not job.out(0)


@SEEDS
@pytest.mark.parametrize("point", ["look", "before"])
def test_a_trainer_that_failed_before_it_told_of_changed_exports_tells_them_later(seed, point):
    """A replica that joins meanwhile gets them too."""
    with after_one_refit(seed, replicas=2, computes=True) as job:
        for s in job.sources:
            s.export()
        job.faults["trainer 1", point] = "raise"
        call(job)
        assert all(f"injected fault at {point}" in says(end) for end in job.ended())
        job.again(1)
        job.sim.quiet()
        call(job)
        assert all(o.committed for end in job.ended(SOON_S) for o in end.outcomes)


@SEEDS
def test_a_replica_that_could_not_be_linked_costs_the_others_nothing_when_storages_move(seed):
    with after_one_refit(seed, replicas=2, first_copies=False, pulled=True) as job:
        job.faults[job.engines[1].worker(0), "link"] = "raise"
        job.again(1)
        job.sim.quiet()
        job.sources[0].move()
        epochs = set()
        for _ in range(3):
            call(job, min_replicas=1)
            assert all([o.committed for o in end.outcomes] == [True, False] for end in job.ended(SOON_S))
            epochs.add(job.coordinator.replicas[0].epoch)
        assert len(epochs) == 1, "routes are opened once"


def test_a_call_does_not_take_the_link_of_an_engine_that_joins_for_a_transfer_that_does_not_stop():
    """The replica was lost in the same refit, in which its lane had begun to move bytes."""
    with after_one_refit(trainers=1, workers=1, replicas=2) as job:
        open_routes, go_on, linking, lost = DirectPlane._open_routes, [], [], []

        def slow(plane, *a):
            if plane.side.role == "worker" and plane.replica == 0:
                linking.append(plane)
                job.sim.block(lambda: go_on)
            return open_routes(plane, *a)

        job.sim.patch(DirectPlane, "_open_routes", slow)
        for e in job.engines:
            e.takers[0].run_recipes = lambda: job.sim.block(lambda: lost)
        call(job, min_replicas=1)
        job.sim.until(lambda: job.coordinator.refit and all(p.moving for p in job.coordinator.refit.parts.values()))
        job.again(0)
        job.sim.until(lambda: linking)
        lost.append(0)
        (end,) = job.ended(SOON_S)
        assert [o.committed for o in end.outcomes] == [False, True], end
        go_on.append(0)


@SEEDS
def test_sources_are_not_free_while_a_replica_that_is_waited_for_has_yet_to_join(seed):
    """Its workers still read their layout, so it has no lane on any trainer. A caller that went by lanes would train on, and the
    replica would commit the next weights under this version, with every checksum right."""
    with after_one_refit(seed, replicas=2) as job:
        engine = job.engines[1] = type(job.engines[1])(job, 1)
        for t in engine.takers:
            read = t.read
            t.read = lambda catalog, read=read: (job.sim.wait(0.5), read(catalog))[1]
        job.again(1)
        job.sim.until(lambda: job.coordinator.replicas[1].controller is not None)
        began = job.sim.now
        call(job, wait="sources")
        ends = job.ended(SOON_S)
        assert job.sim.now >= began + 0.4 and not any(isinstance(end, XferError) for end in ends), ends


@SEEDS
def test_an_engine_that_could_not_be_resumed_serves_when_it_is_served_anew(seed):
    """A refit that wrote nothing left it paused, under the label of its whole version."""
    with after_one_refit(seed, trainers=1, workers=1) as job:
        job.sessions[0].prepare()
        job.sim.until(lambda: job.engines[0].paused)
        job.engines[0].fail["resume"] = RuntimeError("boom")
        with job.sim.process("trainer 0"):
            job.sessions[0].close()
        job.sim.until(lambda: "resume" not in job.engines[0].fail)
        job.restart()
        assert not job.engines[0].paused


# ---- relay chains and rings


FORMS = pytest.mark.parametrize("pulled", [True, False], ids=["chain", "ring"])
"""How replicas take their bytes: the first of a chain reads them from the trainers; each of a ring receives a share over its link."""


def relayed(seed: int = 0, replicas: int = 3, trainers: int = 1, workers: int = 1, pulled: bool = True):
    return after_one_refit(seed, trainers, replicas, workers, pulled=pulled, relay=True)


def in_parts(job: Job) -> None:
    """Bytes come in many parts from the next opening of routes on."""
    job.sim.patch(relay_place, "PART_BYTES", 100)
    job.sim.patch(relay, "GRAIN", 4)
    job.sim.patch_item(p2p.STEP_BYTES, "cpu", 32)
    job.sources[0].turn()


def order(job: Job) -> list[list[int]]:
    """By replica, the replicas from which it reads."""
    return [[i for i, _ in r.sources if i != r.index] for r in job.coordinator.replicas.values()]


def formed(pulled: bool, there: Sequence[int], replicas: int) -> tuple[list[str], list[list[int]]]:
    """The routes and the order of a chain or a ring of these replicas."""
    kinds, order = [""] * replicas, [[] for _ in range(replicas)]
    for k, i in enumerate(there):
        kinds[i] = ("relay" if k else "peer") if pulled else "gloo+relay" if len(there) > 1 else "gloo"
        order[i] = list(there[max(0, k - 1) : k]) if pulled else [x for x in there if x != i]
    return kinds, order


def ways(end) -> list[dict[str, int]]:
    """Bytes by route, for each replica."""
    return [{r.route: r.bytes for r in o.routes} for o in end.outcomes]


def kinds(job: Job, **how) -> list[str]:
    """A refit: the routes of each replica."""
    call(job, **how)
    return ["+".join(sorted(x)) for x in ways(job.ended(SOON_S)[0])]


def steps(job: Job, replica: int):
    return job.lane(replica).plane._routed.place.steps


@SEEDS
@FORMS
@pytest.mark.parametrize("shape", [(1, 2, 4), (3, 2, 2), (2, 2, 1)])
def test_each_byte_leaves_the_trainers_once(seed, shape, pulled):
    trainers, workers, replicas = shape
    with relayed(seed, replicas, trainers, workers, pulled) as job:
        for verify in (True, False):
            call(job, verify=verify)
            end = job.ended()[0]
            one = end.outcomes[0].bytes_moved
            assert [sum(x.values()) for x in ways(end)] == [one] * replicas
            assert sum(n for x in ways(end) for kind, n in x.items() if kind != "relay") == one > 0
        assert order(job) == formed(pulled, range(replicas), replicas)[1]
        opened = job.epochs()
        assert job.commits() == [True] * replicas and job.epochs() == opened, "routes are opened once"


@SEEDS
def test_replicas_on_different_hosts_form_rings_of_their_own_even_if_their_plans_are_equal(seed):
    """Plans number hosts, and do not name them."""
    with Simulation(seed) as sim:
        sim.patch(
            client,
            "host_identity",
            lambda: "bc"[int(who[1]) % 2] if (who := sim.running.who.split())[0] == "replica" else "a",
        )
        sim.patch(relays, "turn", lambda roll, replicas: 0)
        job = Job(sim, 1, 4, 2, relay=True)
        assert job.commits() == [True] * 4 and len({r.digest for r in job.coordinator.replicas.values()}) == 1
        assert kinds(job) == ["gloo+relay"] * 4 and order(job) == [[2], [3], [0], [1]]
        job.close()


@FORMS
@pytest.mark.parametrize("refusing", [{1}, {1, 2}])
def test_a_worker_that_cannot_read_from_others_takes_its_bytes_from_the_trainers(caplog, pulled, refusing):
    """One worker of each replica, or both. The other one still reads, in a chain, since no ring can be formed."""
    mapped, first = relay_place.RelayPlace._map, "peer" if pulled else "gloo"

    def refused(self, data, written):
        if self.mapping.rank in refusing:
            raise relay_place._Unreadable("refused by the test")
        return mapped(self, data, written)

    with relayed(replicas=2, workers=2, pulled=pulled) as job:
        job.sim.patch(relay_place.RelayPlace, "_map", refused)
        job.again(1)
        job.sim.quiet()
        for _ in range(2):
            assert kinds(job) == [first, first if len(refusing) == 2 else f"{first}+relay"]
    assert "from the trainers, none from another replica: refused by the test" in caplog.text


@SEEDS
@FORMS
def test_storages_that_move_are_handed_on_from_where_they_are_and_released_before_they_are_freed(seed, pulled):
    """A trainer's storages move, then those of a replica in the middle, then those of all replicas. The old ones hold NaN."""
    with relayed(seed, workers=2, pulled=pulled) as job:
        job.sources[0].move()
        assert kinds(job) == formed(pulled, range(3), 3)[0]
        for some in (job.engines[1:2], job.engines):
            for t in [t for e in some for t in e.takers]:
                for name, old in list(t.live.items()):
                    t.live[name] = old.clone()
                    old.fill_(float("nan"))
                t.spare = t.spare.clone()
            assert (kinds(job), order(job)) == formed(pulled, range(3), 3)
        job.sessions[0].release()
        assert not cpu_peer.MAPPED


@FORMS
def test_trainers_may_step_when_their_bytes_are_there(pulled):
    """What is left is read from engines: a trainer that overwrites its weights changes nothing for it."""
    with relayed(replicas=2, pulled=pulled) as job:
        there, let = steps(job, 1).there, []
        steps(job, 1).there = lambda run, part: (job.sim.block(lambda: let), there(run, part))
        call(job, wait="sources")
        assert job.ended(1.0)[0].pending, "the sources were held for a replica that does not read them"
        let.append(0)  # its trainer has trained on
        job.sim.wait(1.0)
        assert job.engines[1].takers[0].held(2) == 2


@SEEDS
@FORMS
def test_a_replica_that_dies_takes_along_those_that_read_from_it_and_the_next_refit_does_without(seed, pulled):
    """The first one dies when some of its parts are there. Those that read from it are torn."""
    with relayed(seed, 3, trainers=2, pulled=pulled) as job:
        in_parts(job)
        assert (kinds(job), order(job)) == formed(pulled, range(3), 3)
        head, said = steps(job, 0), []
        say = head._say

        def dies(run, part):
            say(run, part)
            said.append(part)
            if len(said) == 3:
                job.die(job.engines[0].worker(0))

        head._say = dies
        job.sessions[0].prepare()
        job.sim.quiet()
        call(job, min_replicas=1)
        end = job.ended(SOON_S)[0]
        assert max(said) < relay.ALL_PARTS, "the test kills it when everything is there"
        assert (
            isinstance(end, PeerLost) and "takes its weights from replica" in str(end) and "which failed" in str(end)
        ), end
        assert all(job.engines[i].takers[0].live["norm"].isnan().all() for i in (1, 2)), "torn, and serves NaN"
        assert (kinds(job, min_replicas=2), order(job)[1:]) == (
            formed(pulled, [1, 2], 3)[0],
            formed(pulled, [1, 2], 3)[1][1:],
        )
        job.again(0)
        job.sim.quiet()
        assert (kinds(job), order(job)) == formed(pulled, range(3), 3)


@SEEDS
def test_a_replica_that_is_lost_in_its_middle_takes_along_those_behind_it_and_no_other(seed):
    with relayed(seed, replicas=4) as job:
        in_parts(job)
        assert job.commits() == [True] * 4
        stuck, reached = steps(job, 1), []
        before, mapped = stuck.before, job.lane(2).plane._routed.place.mapping.number

        def stand(wave, stream):
            if wave > 3:
                reached.append(wave)
                job.sim.block(stuck._cancelled)
            before(wave, stream)

        stuck.before = stand
        job.sessions[0].prepare()
        job.sim.quiet()
        call(job, min_replicas=1)
        job.sim.until(lambda: reached and all(job.engines[i].takers[0].locked for i in (2, 3)))
        assert mapped in cpu_peer.MAPPED
        job.die(job.engines[1].worker(0))
        (end,) = job.ended(SOON_S)
        assert [o.committed for o in end.outcomes] == [True, False, False, False]
        for i in (2, 3):
            assert f"replica {i} takes its weights from replica {i - 1}" in str(end.outcomes[i].error)
            assert job.engines[i].takers[0].live["norm"].isnan().all(), "torn, and serves NaN"
        assert mapped not in cpu_peer.MAPPED
        assert kinds(job, min_replicas=3) == ["peer", "", "relay", "relay"] and order(job)[2:] == [[0], [2]]
        job.again(1)  # back in its place, in another engine
        job.sim.quiet()
        assert (kinds(job), order(job)) == formed(True, range(4), 4)


@SEEDS
def test_what_a_replica_has_received_is_read_from_it_even_if_it_fails_then(seed):
    """In a ring, where its own share is whole when it fails, and not all that it reads."""
    with relayed(seed, pulled=False) as job:
        in_parts(job)
        assert kinds(job) == ["gloo+relay"] * 3
        before = steps(job, 0).before
        steps(job, 0).before = lambda wave, stream: (
            job.sim.block(lambda: len(job.coordinator.refit.parts[0].ready_parts) and whole()), boom(), before(wave, stream)
        )  # fmt: skip

        def whole() -> bool:
            return job.coordinator.refit.parts[0].ready_parts[0] == relay.ALL_PARTS

        def boom():
            raise XferError("it cannot go on")

        call(job, min_replicas=2)
        (end,) = job.ended(SOON_S)
        assert [o.committed for o in end.outcomes] == [False, True, True] and "it cannot go on" in str(
            end.outcomes[0].error
        )
        assert kinds(job) == ["gloo+relay"] * 3


@SEEDS
@FORMS
@pytest.mark.parametrize("fails", [True, False])
def test_a_replica_that_fails_or_is_late_before_bytes_move_is_gone_around(seed, fails, pulled):
    """In the same refit, the others do without it; a late one follows, and takes nothing from the trainers."""
    with relayed(seed, pulled=pulled) as job:
        engine = job.engines[1]
        pause, let = engine.pause, []
        if fails:
            engine.fail["pause"] = XferError("the engine does not pause")
        else:
            engine.pause = lambda timeout: (job.sim.block(lambda: let), pause(timeout))
        call(job, min_replicas=2)
        job.sim.wait(deadlines.TOGETHER_S + 0.1)
        assert job.engines[2].takers[0].held(2) == 2 and order(job)[2] == [0]
        let.append(0)
        end = job.ended()[0]
        assert [o.committed for o in end.outcomes] == [True, not fails, True]
        assert fails or ways(end)[1].keys() == {"relay"}
        engine.pause = pause
        assert job.commits() == [True] * 3 and order(job) == formed(pulled, range(3), 3)[1]


def test_an_engine_that_comes_new_into_a_refit_hands_on_nothing():
    """The one before it committed in this refit, died, and came back with other weights, before the next one armed."""
    with relayed(replicas=2) as job:
        pause, let = job.engines[1].pause, []
        job.engines[1].pause = lambda timeout: (job.sim.block(lambda: let), pause(timeout))
        call(job, min_replicas=1)
        job.sim.until(lambda: job.coordinator.refit is not None)
        first = job.coordinator.refit.parts[0]
        job.sim.wait(deadlines.TOGETHER_S / 2)
        assert first.over and first.error is None
        job.die(job.engines[0].worker(0))
        job.sim.quiet()
        job.again(0)
        job.sim.quiet()
        let.append(0)
        (end,) = job.ended(SOON_S)
        assert ways(end)[1].keys() == {"peer"} and end.outcomes[1].committed
        job.engines[1].pause = pause


@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_that_waits_for_parts_that_never_come_ends_at_the_deadline(hangs):
    """The one before it hangs, or its messages are lost."""
    with relayed(replicas=2) as job:
        in_parts(job)
        assert job.commits() == [True] * 2
        if hangs:
            cpu_peer.Hold.begin()
            texts = ["replica 0 worker 0: still moving", "takes its weights from replica 0, which failed"]
        else:
            steps(job, 1).there = lambda run, part: None
            texts = ["1 of 2 replicas committed", "replica 1 worker 0: still moving", "reads from replica 0"]
        began = job.sim.now
        call(job, deadline_s=2.0)
        (end,) = job.ended()
        assert isinstance(end, RefitFailed | DeadlineExceeded) and all(t in str(end) for t in texts), end
        assert job.sim.now - began <= 2.0 + deadlines.CALL_GRACE_S
        cpu_peer.Hold.clear()


# ---- storages and exports that change between refits

ROUNDS = [
    ("T0 move, T1!drain", "T1 move"),
    ("W0 turns, W1!arm", "W0 moves, W1!look"),
    ("W0 turns, W0!arm", "W0 moves, W0!look"),
    ("T0 turn, T0!look", ""),
    ("T0 move, T0!look", ""),
    ("T0 export, W0!look", "T0 export"),
    ("T0 export, W0!read", ""),
    ("T0 export, T1 export, T1!before", "W1 turns"),
    ("T0 release, T1 move, W1!arm", "T0 turn, T1 release"),
]
"""What happens before each of two refits: to trainer 0 or 1, or worker 0 or 1. `!`: it fails at that point of the refit."""


@SEEDS
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_whatever_changed_and_failed_before_a_refit_that_commits_has_the_bytes_of_its_moment(seed, pulled, rounds):
    """Checksums alone do not show a refit of old storages, since both ends sum them. Most of these once committed wrong bytes."""
    with after_one_refit(seed, pulled=pulled, computes=True) as job:
        for events in rounds:
            for who, between, what in ((x[:2], x[2], x[3:]) for x in events.split(", ") if x):
                i, worker = int(who[1]), job.engines[0].worker(int(who[1]))
                if between == "!":
                    job.faults[worker if who[0] == "W" else f"trainer {i}", what] = "raise"
                elif who[0] == "W":
                    job.engines[0].takers[i].changes = what
                elif what == "release":
                    job.sessions[i].release()
                else:
                    getattr(job.sources[i], what)()
            call(job, verify=False)
            for end in job.ended(SOON_S):
                assert not isinstance(end, XferError) or "!" in events or "T0 export" == events, end
            job.faults.clear()


# ---- what changed


EVENTS = {  # before a refit by changes -> whether it sends all bytes
    "nothing": False,
    "a trainer's storages move": False,
    "the refit fails before a byte moves": False,
    "a worker's storages move": True,
    "a worker's bytes are written by something else": True,
    "the refit fails while bytes move": True,
    "a refit sends all bytes": True,
    "the trainers release their weights": True,
    "the replica is served again": True,
    "the trainers' layouts change": True,
    "every element changes": True,
}


LESS = {False: 0.5, True: 1.0}
"""How much less moves, by whether it is pulled. Matrices of 288 bytes have few granules that did not change."""
ROUTES = pytest.mark.parametrize("pulled", [False, True], ids=["sent", "pulled"])


@SEEDS
@ROUTES
@pytest.mark.parametrize("stage", [False, True], ids=["at once", "staged"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_refit_moves_what_changed_only_if_both_ends_hold_the_same_refit(seed, pulled, stage, event):
    """The engine holds the bytes of the trainers' moment in any case (`Job.agree`)."""
    with after_one_refit(seed, delta="auto", pulled=pulled, stage=stage) as job:
        (taker, _), (source, _) = job.engines[0].takers, job.sources
        whole = job.ended()[0].outcomes[0].bytes_moved
        assert job.commits(verify=False) == [True]
        assert 0 < job.ended()[0].outcomes[0].bytes_moved < whole * LESS[pulled]
        assert job.commits() == [True] and job.commits() == [True]  # version 4 differs from 3 everywhere, as 3 from 2
        assert [e.extra_bytes >= whole / 3 for e in job.ended()] == [True, True], "copies are told"
        if event.startswith(("the refit fails", "a refit sends")):
            assert job.commits() == [True]  # then the last one is no multiple of three
        if event == "a trainer's storages move":
            source.move()
        elif event.startswith("the refit fails"):
            job.faults[job.engines[0].worker(0), "wave" if "while" in event else "arm"] = "raise"
            call(job)
            assert all(isinstance(e, XferError) for e in job.ended())
            job.faults.clear()
        elif event == "a worker's storages move":
            taker.changes = "moves"
        elif event == "a worker's bytes are written by something else":
            for t in taker.live.values():
                t.zero_()
        elif event == "a refit sends all bytes":
            assert job.commits(delta=None) == [True] and job.ended()[0].outcomes[0].bytes_moved == whole
        elif event == "the trainers release their weights":
            for s in job.sessions:
                s.release()
        elif event == "the replica is served again":
            job.again(0)
            job.sim.quiet()
        elif event == "the trainers' layouts change":
            for s in job.sources:
                s.turn()
        elif event == "every element changes":
            assert job.commits() == [True]
        assert job.commits(verify=False) == [True]
        untouched = stage and event == "the refit fails while bytes move"  # they moved into scratch
        assert (job.ended()[0].outcomes[0].bytes_moved == whole) == (EVENTS[event] and not untouched)


@SEEDS
@ROUTES
def test_a_replica_that_did_not_commit_what_the_trainers_remember_gets_all_bytes(seed, pulled):
    """The other one does not."""
    with after_one_refit(seed, replicas=2, delta="auto", pulled=pulled) as job:
        whole = job.ended()[0].outcomes[0].bytes_moved
        assert job.commits() == [True, True] and job.commits() == [True, True]
        job.faults[job.engines[1].worker(0), "arm"] = "raise"
        assert job.commits(min_replicas=1) == [True, False]
        job.faults.clear()
        assert job.commits(verify=False) == [True, True]
        came = [o.bytes_moved for o in job.ended()[0].outcomes]
        assert came[0] < whole * LESS[pulled] and came[1] == whole


# ---- calls


@SEEDS
@pytest.mark.parametrize("early", [(0,), (1,), (0, 1)])
def test_a_call_that_comes_while_the_refit_before_is_undone_begins_when_it_has(seed, early):
    """A slow engine holds the end up. The ranks that called first were once refused, and the others with them."""
    with after_one_refit(seed) as job:
        job.faults["trainer 1", "drain"] = "raise"
        stopped(job, job.controlled[0])
        call(job, deadline_s=2.0)
        job.ended()
        call(job, *early)
        job.sim.quiet()
        assert not any((i, 3) in job.ends for i in early)
        job.sim.stopped.clear()
        for i in {0, 1} - set(early):
            call(job, i)
        assert all(o.committed for end in job.ended(SOON_S) for o in end.outcomes)


@SEEDS
def test_a_call_that_cannot_begin_by_its_deadline_says_what_was_still_undone(seed):
    with after_one_refit(seed) as job:
        resume, job.engines[0].resume = job.engines[0].resume, lambda timeout: (job.sim.wait(20.0), resume(timeout))
        call(job, deadline_s=1.0)
        ends = job.ended()
        assert all("its engine was not back in service in time" in says(end) for end in ends), ends
        began = job.sim.now
        call(job, deadline_s=0.8)
        for end in job.ended():
            assert isinstance(end, DeadlineExceeded) and "replica 0 controller: bringing its engine back" in str(end), (
                end
            )
        assert job.sim.now - began <= 0.8 + deadlines.ANSWER_GRACE_S + 0.01
        job.engines[0].resume = resume
        job.sim.wait(20.0)


DIFFERENT = [
    dict(min_replicas=1), dict(deadline_s=8.0), dict(verify=False), dict(version=77), dict(at_once=1),
]  # fmt: skip


@pytest.mark.parametrize("odd", DIFFERENT)
@pytest.mark.parametrize("absent", [False, True])
def test_ranks_that_ask_for_different_refits_are_told_at_once_what_differs(odd, absent):
    """Also where another rank does not call: each has a deadline of its own, and one of them once gave up on the coordinator."""
    with after_one_refit(trainers=3, replicas=2) as job:
        began = job.sim.now
        call(job, 0, verify=True, min_replicas=2)
        call(job, 1, **dict(verify=True, min_replicas=2) | odd)
        if absent:
            job.ended(0.1)
            job.sim.wait(DEADLINE_S)
        call(job, 2, verify=True, min_replicas=2)
        for end in job.ended():
            assert isinstance(end, PlanMismatch), end
            ((name, value),) = odd.items()
            assert f"trainer 1: {name}={value!r}" in str(end) and ("trainer 0: " in str(end) or not absent), end
        assert absent or job.sim.now == began
        assert not any(e.paused for e in job.engines)


@SEEDS
def test_a_rank_that_calls_anew_without_a_word_ends_the_call_that_it_left(seed):
    """It was interrupted before it could report that, and the others waited for it."""
    with after_one_refit(seed) as job:
        call(job, 1)
        job.sim.quiet()
        job.sessions[0].attempt += 1
        job.calls[0] += 1
        call(job, 0)
        job.sim.block(lambda: 1 not in job.running, job.sim.now + 1.0)
        assert "trainer 0 has left refit 2" in says(job.ends[1, 2])
        call(job, 1)
        assert all(o.committed for end in job.ended(SOON_S) for o in end.outcomes)


def test_a_drain_that_waits_for_ranks_that_do_not_call_ends_at_the_deadline_and_names_them():
    """Megatron's overlapped gathers wait so under data parallelism; here an event stands for the gather. The next call waits for it."""
    with after_one_refit(trainers=4) as job:
        gathered, order, began = threading.Event(), [], job.sim.now
        for i, s in enumerate(job.sources):
            s.drain = gathered.set if i % 2 else lambda i=i: (gathered.wait(60), order.append(i))
        call(job, 0, 2, deadline_s=1.0)
        job.sim.block(lambda: not job.running, began + 20.0)
        assert job.sim.now - began <= 1.0 + deadlines.CALL_GRACE_S and not order
        for i in (0, 2):
            for text in (*(f"trainer {k}: it has not called nccl_xfer_refit()" for k in (1, 3)), "do not train"):
                assert isinstance(job.ends[i, 2], DeadlineExceeded) and text in str(job.ends[i, 2])
        call(job, 1, 3)  # the same call, late
        for i in (1, 3):
            assert isinstance(job.ended()[i], DeadlineExceeded) and "trainer" in str(job.ended()[i])
        for i, s in enumerate(job.sources):
            s.drain = lambda i=i: order.append(i + 10)
        assert job.commits() == [True] and set(order[:2]) == {0, 2}, "the drains of the call before came first"


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_ranks_hear_the_cause_of_a_closed_connection(late_s):
    """Other ranks report the broken link before the rank that raised reports its error."""
    with after_one_refit() as job:
        run = P2P.run

        def runs(self, *a, **k):
            if self.link.rank == 1:
                self.link.abort()
                job.sim.wait(late_s)
                raise RuntimeError("out of memory")
            return run(self, *a, **k)

        P2P.run = runs
        try:
            call(job)
            for end in job.ended(SOON_S):
                assert "[trainer 1] RuntimeError: out of memory" in says(end), end
        finally:
            P2P.run = run


@pytest.mark.parametrize("lost", [False, True])
def test_a_lane_that_does_not_stop_is_told_apart(lost):
    """Its parameters may still be read, and must be neither written nor freed: PeerLost says so, and xfer keeps them alive."""
    with after_one_refit() as job:
        began, moves, routed = job.sim.now, threading.Event(), job.sessions[1].lanes[0].plane._routed
        run = routed.run
        routed.run = lambda *a: (moves.set(), job.sim.wait(40.0), run(*a))
        call(job, deadline_s=20.0 if lost else 1.0)
        job.sim.until(moves.is_set)
        if lost:
            job.sessions[1].party.channel.break_("connection reset by peer")
        first, second = job.ended()
        assert job.sim.now - began <= 1.0 + deadlines.CALL_GRACE_S + 0.01
        assert isinstance(second, PeerLost) and not second.drained and job.sessions[1].side._kept
        assert lost or isinstance(first, DeadlineExceeded) and not job.sessions[0].side._kept, first
        job.sim.wait(60.0)
        if lost:
            job.sim.dead.add("trainer 1")


def test_a_trainer_that_lost_the_coordinator_before_its_go_does_not_take_its_parameters_for_free():
    """Workers are let go first, and may pull from a rank that has not heard of it."""
    with after_one_refit(workers=1, pulled=True) as job:
        cpu_peer.Hold.begin(deaf=True)
        send = Client.send
        unless_go = lambda c, x: None if isinstance(x, m.Go) and c.label == "trainer 1" else send(c, x)  # noqa: E731
        job.sim.patch(Client, "send", unless_go)
        call(job, deadline_s=2.0)
        job.sim.until(cpu_peer.Hold.reached.is_set)
        job.sessions[1].party.channel.break_("connection reset by peer")
        job.sim.until(lambda: not job.sessions[1]._busy._inside.locked())
        assert len(job.sessions[1].side._kept) == 1
        cpu_peer.Hold.clear()
        end = job.ended()[1]
        assert isinstance(end, PeerLost) and not end.drained
        job.sim.dead.add("trainer 1")


def test_two_threads_of_one_rank_cannot_refit_at_once():
    with after_one_refit() as job:
        go_on = threading.Event()
        job.sources[0].drain = lambda: go_on.wait(10.0)
        call(job)
        job.sim.quiet()
        for second in (job.sessions[0].refit, job.sessions[0].release):
            with pytest.raises(Unsupported, match="another thread"):
                second()
        go_on.set()
        assert all(o.committed for end in job.ended(0.1) for o in end.outcomes)


@SEEDS
def test_the_transfer_clock_runs_from_readiness_to_decision_whatever_is_done_between(seed):
    """Not from the first call, and not only while bytes move: a new plan is part of it, told as a phase of its own."""
    with after_one_refit(seed) as job:
        drain, job.sources[1].drain = job.sources[1].drain, lambda: job.sim.wait(3.0)
        call(job)
        (o,) = job.ended()[0].outcomes
        assert o.committed and o.transfer_s == 0.0 and dict(o.phases)["plan"] == dict(o.phases)["link"] == 0.0
        assert dict(o.phases)["drain"] == 3.0
        job.sources[1].drain, job.engines[0].takers[0].changes = drain, "turns"
        call(job)
        for now in (ReplicaPhase.PLANNING, ReplicaPhase.LINKING):
            job.sim.until(phase(job, 0, now))
            stopped(job, workers(job, 0)[0])
            job.sim.wait(0.5)
            job.sim.stopped.clear()
        (o,) = job.ended()[0].outcomes
        assert round(o.transfer_s, 3) == 1.0
        assert round(dict(o.phases)["plan"], 3) == round(dict(o.phases)["link"], 3) == 0.5


# ---- prepared refits


@SEEDS
def test_a_prepared_refit_arms_engines_which_serve_again_if_no_call_follows(seed):
    """It uses up neither a number nor a label, and a call in time is served within its own deadline."""
    with after_one_refit(seed, replicas=2) as job:
        job.sessions[0].prepare()
        job.sim.quiet()
        assert all(e.paused for e in job.engines)
        job.sim.wait(DEADLINE_S + SOON_S)
        assert not any(e.paused for e in job.engines) and [e.label for e in job.engines] == ["1"] * 2
        job.sessions[1].prepare()
        job.sim.quiet()
        assert all(e.paused for e in job.engines)
        job.sim.wait(DEADLINE_S - 1.0)
        call(job, 1)
        job.sim.wait(30.0)
        call(job, 0)
        assert all(o.committed for end in job.ended(0.1) for o in end.outcomes)


@SEEDS
def test_a_call_that_comes_while_a_prepared_refit_is_given_up_is_served(seed):
    with after_one_refit(seed) as job:
        job.sessions[0].prepare()
        job.sim.quiet()
        stopped(job, job.controlled[0])
        job.sim.wait(DEADLINE_S + 0.1)
        call(job, 0)
        job.sessions[1].prepare()  # while it is being given up, too
        job.sim.quiet()
        job.sim.stopped.clear()
        job.sim.quiet()
        call(job, 1)
        assert all(o.committed for end in job.ended(SOON_S) for o in end.outcomes)


@SEEDS
def test_a_prepare_while_the_last_refit_is_still_being_settled_is_kept_for_later(seed):
    with after_one_refit(seed) as job:
        resume, job.engines[0].resume = job.engines[0].resume, lambda timeout: (job.sim.wait(3.0), resume(timeout))
        call(job)
        job.sim.wait(1.0)
        job.sessions[0].prepare()
        job.sim.quiet()
        assert job.coordinator.refit.number == 2
        job.engines[0].resume = resume
        job.ended()
        job.sim.quiet()
        assert job.coordinator.refit.number == 3 and not job.coordinator.refit.called and job.engines[0].paused


# ---- deaths and silence


@SEEDS
def test_a_trainer_that_is_lost_while_workers_install_costs_the_next_refit_not_this_one(seed):
    with after_one_refit(seed, trainers=3) as job:
        call(job)
        job.sim.until(lambda: job.coordinator.refit and job.coordinator.refit.parts[0].phase is Phase.COMMITTING)
        job.die("trainer 2")
        assert all(o.committed for end in job.ended() for o in end.outcomes)
        assert not job.engines[0].paused and job.engines[0].takers[0].held(2) == 2
        call(job, 0, 1)
        for end in job.ended():
            assert isinstance(end, PeerLost) and "trainer 2" in str(end)


@SEEDS
@pytest.mark.parametrize("fails", [False, True])
def test_trainers_do_not_wait_for_an_engine_that_comes_back_late_but_the_next_refit_does(seed, fails):
    with after_one_refit(seed) as job:
        resume, job.engines[0].resume = job.engines[0].resume, lambda timeout: (job.sim.wait(20.0), resume(timeout))
        began = job.sim.now
        if fails:
            job.faults[job.engines[0].worker(0), "done"] = "raise"
        call(job, deadline_s=1.0)
        ends = job.ended()
        if not fails:
            assert job.sim.now - began <= 1.0 + deadlines.ANSWER_GRACE_S + 0.1
        wanted = "injected fault" if fails else "not back in service"
        assert all(wanted in says(end) for end in ends)
        job.engines[0].resume = resume
        call(job)
        job.sim.wait(5.0)
        assert len(job.running) == 2 or fails
        assert all(o.committed for end in job.ended(20.0) for o in end.outcomes)


@SEEDS
def test_an_engine_that_was_armed_when_the_trainers_died_serves_again_when_they_are_back(seed):
    """Before the first refit: nothing was written, whatever its label says."""
    with after_one_refit(seed) as job:
        job.sessions[1].prepare()
        job.sim.quiet()
        job.die("trainer 0")
        job.sim.wait(3 * DEADLINE_S)
        assert job.engines[0].paused and "may hold a mix" in str(job.controllers[0].error)
        job.restart()
        assert (job.engines[0].paused, job.engines[0].label, job.controllers[0].error) == (False, "xfer:unknown", None)


def test_engines_serve_until_trainers_are_about_to_be_ready():
    """Armed at the first call, they would wait as long as trainers drain. How long that takes the refit before tells."""
    with after_one_refit() as job:
        engine, drains = job.engines[0], [s.drain for s in job.sources]

        def idle(seconds: float) -> float:
            """A refit whose trainers drain for so long: the seconds for which the engine did not serve."""
            for s in job.sources:
                s.drain = lambda: job.sim.wait(seconds) if seconds else None
            began, pause, paused = job.sim.now, engine.pause, []
            engine.pause = lambda timeout: (paused.append(job.sim.now), pause(timeout))
            assert job.commits() == [True]
            engine.pause = pause
            assert job.sim.now - began < seconds + 0.5
            return round(job.sim.now - paused[0])

        assert [idle(s) for s in (5, 5, 5, 0, 3, 3)] == [5, 0, 0, 0, 3, 0]
        for s, drain in zip(job.sources, drains):
            s.drain = drain


def test_a_refit_that_is_over_leaves_no_deadline_behind():
    with after_one_refit() as job:
        left = len(job.coordinator.timers._heap)
        for _ in range(10):
            assert job.commits() == [True]
        assert len(job.coordinator.timers._heap) <= left + 10, "one a refit looks whether its engine has come back"


# ---- publishing


@SEEDS
def test_a_publish_returns_when_a_rank_is_ready_and_its_fence_when_nobody_reads(seed):
    with after_one_refit(seed) as job:
        engine, pause, seen = job.engines[0], job.engines[0].pause, {}
        engine.pause = lambda timeout: (job.sim.wait(3.0), pause(timeout))

        def between(i: int, report) -> None:
            assert report.pending
            seen[i] = job.sim.now
            job.sim.wait(1.0)

        job.between = between
        began = job.sim.now
        call(job, wait="ready")
        assert all(end.pending for end in job.ended()) and 3.0 <= job.sim.now - began < 3.5
        assert all(at - began < 0.5 for at in seen.values())
        job.sim.quiet()
        job.agree()
        assert [t.held(2) for t in engine.takers] == [2, 2], "trainers have overwritten their weights by now"
        engine.pause = pause
        assert [e.before.version for e in job.all()] == [2, 2] and all(s.fence() == 0.0 for s in job.sessions)
        assert all(e.before.fence_s > 0 for e in job.ended())


@SEEDS
def test_of_two_publishes_the_older_one_commits_first(seed):
    with after_one_refit(seed) as job:
        engine, resume, served = job.engines[0], job.engines[0].resume, []
        engine.resume = lambda timeout: (job.sim.wait(2.0), resume(timeout), served.append(engine.label))
        began = job.sim.now
        for _ in range(2):
            call(job, wait="ready")
            assert all(end.pending for end in job.ended())
        assert job.sim.now - began < 3.0, "the second one waits for the first one, and not for itself"
        ends = job.all(wait="commit")
        assert [e.before.version for e in ends] == [3, 3] and [e.version for e in ends] == [4, 4]
        assert served == ["2", "3", "4"]


# ---- leaving, and what is called at the wrong time


@SEEDS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_leaving_after_the_sources_were_free_finishes_that_refit_first(seed, order):
    """Else the engine would lose its rendezvous while it holds two versions, and stay out of service."""
    with after_one_refit(seed) as job:
        for t in job.engines[0].takers:
            t.run_recipes = lambda: job.sim.wait(3.0)
        call(job, wait="sources")
        assert all(end.pending for end in job.ended(1.0))
        for i in order:
            with job.sim.process(f"trainer {i}"):
                job.sessions[i].close()
        assert job.controllers[0].version == 2 and not job.engines[0].paused and job.engines[0].takers[1].held(2) == 2
        job.sim.dead.add("trainer 0")  # nothing comes after


@SEEDS
@pytest.mark.parametrize("armed", [False, True])
def test_trainer_0_leaves_an_engine_that_was_armed_in_service(seed, armed):
    with after_one_refit(seed) as job:
        job.sessions[1].prepare()
        job.sim.quiet() if armed else job.sim.let(5)
        for i in (0, 1):
            with job.sim.process(f"trainer {i}"):
                job.sessions[i].close()
        job.sim.wait(SOON_S)
        assert not job.engines[0].paused and job.engines[0].label == "1" and job.controllers[0].version == 1
        job.sim.dead.add("trainer 0")


@SEEDS
@pytest.mark.parametrize("wait", ["sources", "ready"])
def test_what_became_of_a_refit_whose_caller_did_not_wait_is_heard_by_the_next_call(seed, wait):
    with after_one_refit(seed, replicas=2) as job:
        job.engines[1].fail["pause"] = RuntimeError("engine 1 is broken")
        job.engines[0].takers[0].run_recipes = lambda: job.sim.wait(0.1)
        whole = job.ended()[0].flatten().keys()
        call(job, wait=wait, min_replicas=1)
        unknown = {f"xfer/{k}" for k in ("transfer_s", "outage_s", "bytes", "gb_per_s", "committed", "replicas")}
        assert all(r.pending and r.before is None and not unknown & r.flatten().keys() for r in job.ended())
        job.sim.wait(300.0)  # an optimizer step that takes longer than the deadline and its grace
        call(job)
        for end in job.ended():
            assert (end.committed, end.before.committed, end.before.version) == (2, 1, 2), end
            assert "engine 1 is broken" in says(end.before)
            told = end.flatten()
            assert (told["xfer/committed"], told["xfer/before/committed"], told["xfer/before/replicas"]) == (2, 1, 2)
            assert whole <= told.keys() and "xfer/before/transfer_s" in told
            assert all(k.replace("/", "_").isidentifier() for k in told), "some loggers take no other names"
            assert pickle.loads(pickle.dumps(end)).before.version == 2
        assert all(end.before is None for end in job.all())
        job.engines[1].fail["pause"] = RuntimeError("engine 1 is broken")
        for t in job.engines[1].takers:
            t.run_recipes = lambda: job.sim.wait(0.1)
        call(job, wait=wait)
        job.ended()
        call(job)
        for end in job.ended():  # both replicas were wanted: that call is used up on all ranks
            assert isinstance(end, XferError) and "engine 1 is broken" in str(end), end


def test_leaving_raises_what_became_of_a_refit_that_nobody_waited_for():
    with after_one_refit(replicas=2) as job:
        for t in job.engines[1].takers:
            t.run_recipes = lambda: job.sim.wait(1.0) or 1 / 0
        call(job, wait="sources")
        assert all(end.pending for end in job.ended(0.5))
        for i in (1, 0):
            with job.sim.process(f"trainer {i}"), pytest.raises(XferError, match="division by zero"):
                job.sessions[i].close()
        assert job.engines[0].takers[0].held(2) == 2 and not job.engines[0].paused and job.engines[1].paused
        job.sim.dead.add("trainer 0")


def test_what_is_called_after_closing_says_that_it_was_closed_here():
    """Not PeerLost, after which a caller would call again. A call that is running hears it, too."""
    with after_one_refit() as job:
        call(job, 1)
        job.sim.quiet()
        with job.sim.process("trainer 1"):
            job.sessions[1].close()
        end = job.ended()[1]
        assert isinstance(end, PeerLost) and "by this process itself" in str(end)
        for _ in range(2):
            job.close()
        (controller,) = job.controllers

        def enter(**how) -> None:
            with controller.serving(**how):
                pass

        calls = {(f, "xfer.connect()") for s in job.sessions for f in (s.refit, s.prepare, s.release, s.explain)}
        calls |= {(f, "xfer.serve(") for f in (controller.wait_ready, controller.wait_version, enter)}
        for f, hint in calls:
            with pytest.raises(Unsupported, match="was closed") as caught:
                f()
            assert type(caught.value) is Unsupported and hint in caught.value.violations[0]
        assert [s.version for s in job.sessions] == [1, 1], "what was so stays so"
        enter(force=True)
        job.sim.dead.add("trainer 0")


def test_the_same_seed_gives_the_same_run():
    """Whatever was run before it in this process, and wherever objects lie."""
    traces = []
    for _ in range(2):
        with Simulation(7) as sim:
            job = Job(sim, 3, 2, 2, pulled=True, relay=True)
            job.faults[job.engines[1].worker(0), "wave"] = "kill"
            call(job, min_replicas=1)
            job.ended()
            job.mend()
            traces.append((sim.turns, sim.trace))
    assert traces[0] == traces[1]


# ---- blocks in FP8


def test_a_rank_that_others_wait_for_with_their_parts_of_a_block_is_named_at_the_deadline():
    with after_one_refit(trainers=3, forms=[ScaleRule.IEEE]) as job:
        stopped(job, "trainer 1")
        call(job, 0, 2, deadline_s=5.0)
        for end in job.ended():
            lines = str(end)
            assert isinstance(end, DeadlineExceeded) and "trainer 1: it has not called" in lines, end
            assert "trainer 0:" not in lines and "trainer 2:" not in lines, "they have measured, and wait"


@SEEDS
def test_an_engine_that_needs_fp8_comes_while_bytes_move_by_the_old_catalog(seed):
    """The catalog with what it needs waits until the next refit."""
    with after_one_refit(seed, replicas=2, forms=[None, None, ScaleRule.IEEE]) as job:
        job.die(workers(job, 1)[0])
        taker = job.engines[0].takers[0]
        install, taker.release_lock = taker.release_lock, lambda: (job.sim.wait(3.0), install())
        call(job, min_replicas=1)
        job.sim.until(lambda: job.coordinator.refit and job.coordinator.refit.parts[0].phase is Phase.COMMITTING)
        job.again(1)
        job.sim.until(lambda: job.coordinator.derived)
        job.sim.wait(1.0)
        assert job.coordinator.refit is not None and job.coordinator.generation == 1
        assert all(end.committed == 1 for end in job.ended())
        taker.release_lock = install
        job.sim.quiet()
        assert job.coordinator.generation == 1 and job.commits()[0] and job.coordinator.generation == 2


def test_a_catalog_that_comes_while_a_trainer_releases_its_weights_is_answered_in_the_next_refit():
    """It was dropped, and the engine that it was made for held the refit up."""
    with after_one_refit(replicas=2, pulled=True, forms=[ScaleRule.IEEE, ScaleRule.IEEE, ScaleRule.POW2]) as job:
        stopped(job, workers(job, 0)[0])
        job.release(0)
        job.sim.quiet()
        job.die(workers(job, 1)[0])
        generation = job.coordinator.generation
        job.again(1)
        job.sim.until(lambda: job.coordinator.generation > generation)
        job.sim.quiet()
        job.sim.stopped.clear()
        job.sim.block(lambda: not job.running)


@SEEDS
def test_ranks_with_parts_of_a_block_agree_by_every_catalog_in_any_order(seed):
    """Ranks export anew one after the other. The first time the union of exports changes, then it stays what it was: a catalog is made
    anew either time, and all measure by it."""
    with after_one_refit(seed, trainers=3, replicas=2, forms=[ScaleRule.IEEE]) as job:
        for rank in range(3):
            job.sources[rank].export()
            generation = job.coordinator.generation
            assert job.commits(verify=True) == [True, True]
            assert job.coordinator.generation == generation + 1
        assert job.commits() == [True, True]


# ---- staged refits


def staged(job: Job, replica: int = 0) -> Callable[[], bool]:
    """All bytes are in the workers' scratch, and the engine has yet to pause."""
    return lambda: (refit := job.coordinator.refit) is not None and bool(refit.parts[replica].staged_at)


def paused(job: Job, replica: int = 0) -> int:
    return job.engines[replica].log.count("pause")


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("action", ["raise", "kill", "stop"])
@pytest.mark.parametrize("victim", ["trainer 1", "worker"])
@pytest.mark.parametrize("point", ["link", "moving", "done"])
def test_a_refit_that_fails_while_it_is_staged_does_not_reach_the_engine(point, victim, action, pulled):
    """It is never paused, serves its old version on, and is whole. With a worker that fails the other replica goes on."""
    trains = victim != "worker"
    if trains and pulled and point != "link" or not trains and action == "kill":
        pytest.skip("this trainer moves nothing; the engine dies with its worker")
    with after_one_refit(replicas=2, pulled=pulled, stage=True) as job:
        assert job.commits() == [True, True]
        who, pauses = victim if trains else job.engines[0].worker(1), [paused(job, r) for r in range(2)]
        began, failed = job.sim.now, {0, 1} if trains else {0}
        job.faults[who, point] = action
        if point == "link":
            job.sources[1].turn()
        call(job, deadline_s=8.0, min_replicas=0 if trains else 1)
        ends = job.ended()
        assert (who, point) not in job.faults, "that point was not passed"
        assert job.sim.now - began <= (SOON_S / 2 if action != "stop" else 8.0 + deadlines.CALL_GRACE_S + 0.02)
        for end in ends:
            if isinstance(end, XferError):  # the worker may still read the trainers' memory
                assert trains or action == "stop" and pulled and not end.drained, end
            else:
                assert not all(o.committed for o in end.outcomes) and (trains or end.outcomes[1].committed), says(end)
                assert all(o.committed or o.version == 2 and not o.dirty for o in end.outcomes), end
                failed = {o.replica for o in end.outcomes if not o.committed}
        for r in failed:
            engine, controller = job.engines[r], job.controllers[r]
            assert (
                paused(job, r) == pauses[r] and not engine.paused and engine.label == "2" and controller.error is None
            )
            assert [t.held(3) for t in engine.takers] == [2, 2]


@SEEDS
@pytest.mark.parametrize("who", ["trainer 1", "worker", "controller"])
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_process_that_dies_or_hangs_between_staging_and_commit_leaves_a_whole_engine(seed, who, action):
    with after_one_refit(seed, replicas=2, stage=True) as job:
        name = {"worker": job.engines[0].worker(1), "controller": job.controlled[0]}.get(who, who)
        call(job, deadline_s=8.0, min_replicas=0)
        job.sim.until(staged(job))
        job.stop(name) if action == "stop" else job.die(name)
        began = job.sim.now
        ends = job.ended()
        assert job.sim.now - began <= 8.0 + deadlines.CALL_GRACE_S + 0.02
        for end in ends if who != "trainer 1" else ():
            assert not isinstance(end, XferError), end
            assert [o.committed for o in end.outcomes] == [False, True], says(end)
        job.sim.stopped.clear()
        job.sim.wait(deadlines.SETTLE_GRACE_S)
        for e in job.engines:
            versions = {t.held(2) for t in e.takers}
            assert e.dead or versions in ({1}, {2}) and not any(t.locked for t in e.takers)


@SEEDS
@pytest.mark.parametrize("change", ["moves", "turns"])
@pytest.mark.parametrize("wait", ["commit", "sources"])
def test_staged_bytes_for_storages_that_an_engine_has_no_longer_are_brought_anew_or_refused(seed, change, wait):
    """Anew while all trainers hold their weights. Others may have changed them: then the engine keeps its old version."""
    with after_one_refit(seed, stage=True) as job:
        taker = job.engines[0].takers[1]
        taker.changes = change  # it is seen when the worker arms
        call(job, wait=wait)
        job.ended()
        for session in job.sessions:
            if wait == "commit":
                assert session.version == 2
            else:
                with pytest.raises(RebindError, match="cannot use the bytes that it has staged"):
                    session.settle()
        job.sim.quiet()
        engine = job.engines[0]
        assert not engine.paused and {t.held(2) for t in engine.takers} == {2 if wait == "commit" else 1}


@SEEDS
@ROUTES
def test_a_delta_that_is_staged_for_other_bytes_than_the_engine_has_is_brought_whole(seed, pulled):
    """Something else writes weights while they are staged."""
    with after_one_refit(seed, stage=True, delta="auto", pulled=pulled) as job:
        whole = job.ended()[0].outcomes[0].bytes_moved
        call(job)
        job.sim.until(staged(job))
        taker = job.engines[0].takers[0]
        for t in taker.live.values():
            t.fill_(3.0)
        (end, _) = job.ended()
        assert end.committed == 1 and taker.held(2) == 2 and end.outcomes[0].bytes_moved == whole


def test_a_scratch_above_the_budget_costs_only_its_replica_and_says_how_large_it_would_be():
    with after_one_refit(replicas=2) as job:
        needs = sum(t.numel() * 2 for t in job.engines[0].takers[0].live.values())
        pauses = paused(job)
        call(job, stage=True, stage_budget=needs - 1)
        for end in job.ended():
            assert isinstance(end, Unsupported) and f"takes {needs:,} bytes of scratch" in str(end), end
            assert f"stage_budget allows {needs - 1:,}" in str(end)
        assert paused(job) == pauses and not any(e.paused for e in job.engines)
        assert job.commits(stage=True, stage_budget=needs) == [True, True]
        assert job.ends[0, 3].scratch_bytes == 4 * needs
        assert job.commits() == [True, True] and not job.ends[0, 4].scratch_bytes


@SEEDS
@ROUTES
def test_release_returns_scratch_and_what_is_staged_is_applied_all_the_same(seed, pulled):
    """Trainers release their weights while the engine has yet to pause."""
    with after_one_refit(seed, stage=True, delta="auto", pulled=pulled) as job:
        engine = job.engines[0]
        pause, engine.pause = engine.pause, lambda seconds: (job.sim.wait(1.0), pause(seconds))
        call(job, wait="sources")
        job.ended()
        job.sim.until(staged(job))
        assert not engine.paused
        for i in range(job.trainers):
            job.release(i)
        job.sim.block(lambda: not job.running)
        job.level()
        assert {t.held(2) for t in engine.takers} == {2}
        planes = [s._lane_.plane for s in engine.sessions]
        assert not any(p.extra_bytes for p in planes)


# ---- replicas that take turns


def outages(job: Job, monkeypatch) -> list[tuple[int, str]]:
    """What engines are told from now on: (replica, "pause" or "resume"), in order."""
    told: list[tuple[int, str]] = []
    did = Engine._did

    def noted(engine: Engine, what: str) -> None:
        if what in ("pause", "resume"):
            told.append((engine.replica, what))
        did(engine, what)

    monkeypatch.setattr(Engine, "_did", noted)
    return told


@pytest.mark.parametrize("wait", ["commit", "sources", "ready"])
@pytest.mark.parametrize("pulled", [False, True])
def test_replicas_take_turns_by_number(pulled, wait, monkeypatch):
    """Each serves again before the next one is paused, whatever the trainers wait for."""
    with after_one_refit(replicas=3, pulled=pulled, at_once=1) as job:
        told = outages(job, monkeypatch)
        call(job, wait=wait)
        job.ended()
        job.level()
        assert told == [(r, what) for r in range(3) for what in ("pause", "resume")]


def test_no_more_replicas_are_out_of_service_than_a_refit_allows(monkeypatch):
    with after_one_refit(replicas=3, at_once=2) as job:
        told = outages(job, monkeypatch)
        assert job.commits() == [True] * 3
        assert {told[0], told[1]} == {(0, "pause"), (1, "pause")} and told[2][1] == "resume"
        assert told.index((2, "pause")) > 2


@pytest.mark.parametrize("action", ["kill", "stop", "raise"])
@pytest.mark.parametrize("point", ["arm", "moving", "commit"])
def test_a_replica_that_fails_in_its_turn_gives_it_to_the_next(point, action):
    """At once if it dies or raises; if it hangs, when its share of the time is over."""
    with after_one_refit(replicas=3, at_once=1) as job:
        began = job.sim.now
        job.faults[job.engines[0].worker(0), point] = action
        call(job, min_replicas=2)
        for end in job.ended():
            assert [o.committed for o in end.outcomes] == [False, True, True], says(end)
        hung = DEADLINE_S / 3 + 3 * deadlines.STOP_GRACE_S  # its turn, then it and its controller give up
        assert job.sim.now - began <= (hung if action == "stop" else SOON_S)
        late = "was not done when its turn of 20.0 s ended"
        assert (late in says(end)) == (action == "stop" and point != "commit"), says(end)


@pytest.mark.parametrize("pulled", [False, True])
def test_replicas_that_take_turns_read_from_those_that_had_theirs(pulled, monkeypatch):
    """Nobody waits for a replica whose turn has not come, so relays cost no time."""
    with after_one_refit(trainers=1, replicas=3, pulled=pulled, relay=True, at_once=1) as job:
        told, began = outages(job, monkeypatch), job.sim.now
        (end,) = job.all()
        assert [[r.route for r in o.routes] for o in end.outcomes] == [
            ["peer" if pulled else "gloo"],
            ["relay"],
            ["relay"],
        ]
        assert job.sim.now < began + 1.0 and [r for r, what in told if what == "pause"] == [0, 1, 2]


def test_replicas_cannot_take_turns_where_all_were_paused_before():
    with after_one_refit(replicas=2) as job:
        job.sessions[0].prepare()
        job.sim.quiet()
        call(job, at_once=1)
        for end in job.ended():
            assert isinstance(end, Unsupported) and "prepare() has paused all engines" in str(end)
        assert not any(e.paused for e in job.engines)
