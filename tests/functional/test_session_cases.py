"""Fixed orders of events: what each caller hears, in which words, and how soon.

Real participants in a simulation, as in test_session.py, which searches random orders. Here each test chooses an order and leaves
the rest to a seed. Afterwards all that died or was stopped comes again, and the next refit must be whole everywhere.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from tests.support import cpu_peer
from tests.support.simulated_job import DEADLINE_S, SOON_S, Job
from tests.support.simulation import Simulation
from tests.support.world import kinds, ways
from xfer.coordinator import deadlines, relays
from xfer.coordinator import messages as m
from xfer.coordinator.commit import Phase
from xfer.coordinator.state import Client, ReplicaPhase
from xfer.direct import sums
from xfer.direct import trainer as direct_trainer
from xfer.direct.plane import DirectPlane
from xfer.errors import DeadlineExceeded, PeerLost, PlanMismatch, RebindError, Unsupported, VerificationError, XferError
from xfer.kernels.block_fp8 import ScaleRule
from xfer.participants import computing
from xfer.participants.controller import ControllerPhase
from xfer.plan import relay
from xfer.rendezvous import client
from xfer.transport import changes, p2p, peer_host, relay_place, routes
from xfer.transport.p2p import P2P

SEED = int(os.environ.get("XFER_SEED", "0"))
"""Of the order of everything that a test leaves open."""


@contextmanager
def after_one_refit(trainers: int = 2, replicas: int = 1, workers: int = 2, **how) -> Iterator[Job]:
    with Simulation(SEED) as sim:
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


def workers(job: Job, replica: int) -> list[str]:
    return [job.engines[replica].worker(i) for i in range(job.workers)]


# ---- a process that fails at a point of a refit


def fails_at(job: Job, who: str, point: str, action: str, **how) -> list:
    """A refit in which a process does so: how it ends on each rank. One that dies or raises is heard of at once, one that is stopped
    by the deadline."""
    began, job.faults[who, point] = job.sim.now, action
    if point in ("plan", "link"):  # they are made in a refit only when a layout changed
        job.sources[1].turn()
    call(job, deadline_s=8.0, **how)
    ends, took = job.ended(), job.sim.now - began
    assert (who, point) not in job.faults, "that point was not passed"
    assert took < SOON_S / 2 if action != "stop" else took <= 8.0 + deadlines.CALL_GRACE_S + 0.02, took
    return ends


TRAINER = ["enter", "drain", "ready", "before", "after", "plan", "link", "moving", "wave", "done"]
WORKER = ["plan", "link", "arm", "moving", "wave", "done", "commit"]
POINTS = [*(("trainer 1", p, False) for p in TRAINER), *(("worker", p, False) for p in WORKER)]
POINTS += [("trainer 0", p, False) for p in ("enter", "link", "moving")]
POINTS += [("trainer 1", "link", True), *(("worker", p, True) for p in WORKER[1:])]
"""Trainers move no bytes that workers pull."""


@pytest.mark.parametrize("action", ["raise", "kill", "stop"])
@pytest.mark.parametrize(("victim", "point", "pulled"), POINTS)
def test_a_process_that_fails_at_any_point_is_named_to_all_and_costs_no_more_than_it_must(
    victim, point, pulled, action
):
    """A worker costs its own replica only. Before its first write an engine serves its old version on; after it, it is out of service
    until a refit repairs it."""
    if victim == "trainer 0" and action == "raise":
        pytest.skip("as trainer 1")
    trains = victim != "worker"
    with after_one_refit(trainers=3, replicas=2, pulled=pulled, computes=True) as job:
        who = victim if trains else job.engines[0].worker(1)
        name = who.split(" of ")[0]
        for end in fails_at(job, who, point, action, min_replicas=1, verify=True):
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


# ---- replicas that join


def test_an_engine_that_is_served_anew_while_its_controller_arms_it_is_not_held_up():
    """The old controller's update call came behind the new one's init, and held the worker until that refit's deadline."""
    with after_one_refit(in_step=True) as job:
        engine, late = job.engines[0], []
        update = engine.update
        engine.update = lambda *a: (late.append(a), job.sim.block(engine._core.locked), update(*a))
        job.sessions[1].prepare()
        job.sim.until(lambda: late)
        del engine.update
        job.again(0)


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


# ---- relay chains and rings


FORMS = pytest.mark.parametrize("pulled", [True, False], ids=["chain", "ring"])
"""How replicas take their bytes: the first of a chain reads them from the trainers; each of a ring receives a share over its link."""


def relayed(replicas: int = 3, trainers: int = 1, workers: int = 1, pulled: bool = True):
    return after_one_refit(trainers, replicas, workers, pulled=pulled, relay=True)


def in_parts(job: Job) -> None:
    """Bytes come in many parts from the next opening of routes on."""
    job.sim.patch(relay_place, "PART_BYTES", 100)
    job.sim.patch(relay, "GRAIN", 4)
    job.sim.patch_item(p2p.STEP_BYTES, "cpu", 32)
    job.sources[0].turn()


def taken(job: Job, **how) -> list[str]:
    """A refit: the routes of each replica."""
    call(job, **how)
    return kinds(job.ended(SOON_S)[0])


def formed(pulled: bool, there: Sequence[int], replicas: int) -> tuple[list[str], list[list[int]]]:
    """The routes and the order of a chain or a ring of these replicas."""
    kinds, order = [""] * replicas, [[] for _ in range(replicas)]
    for k, i in enumerate(there):
        kinds[i] = ("relay" if k else "peer") if pulled else "gloo+relay" if len(there) > 1 else "gloo"
        order[i] = list(there[max(0, k - 1) : k]) if pulled else [x for x in there if x != i]
    return kinds, order


@FORMS
@pytest.mark.parametrize("shape", [(1, 2, 4), (3, 2, 2), (2, 2, 1)])
def test_each_byte_leaves_the_trainers_once(shape, pulled):
    trainers, workers, replicas = shape
    with relayed(replicas, trainers, workers, pulled) as job:
        for verify in (True, False):
            call(job, verify=verify)
            end = job.ended()[0]
            one = end.outcomes[0].bytes_moved
            assert [sum(x.values()) for x in ways(end)] == [one] * replicas
            assert sum(n for x in ways(end) for kind, n in x.items() if kind != "relay") == one > 0
        assert job.order() == formed(pulled, range(replicas), replicas)[1]
        opened = job.epochs()
        assert job.commits() == [True] * replicas and job.epochs() == opened, "routes are opened once"


def test_replicas_on_different_hosts_form_rings_of_their_own_even_if_their_plans_are_equal():
    """Plans number hosts, and do not name them."""
    with Simulation(SEED) as sim:
        sim.patch(
            client,
            "host_identity",
            lambda: "bc"[int(who[1]) % 2] if (who := sim.running.who.split())[0] == "replica" else "a",
        )
        sim.patch(relays, "turn", lambda roll, replicas: 0)
        job = Job(sim, 1, 4, 2, relay=True)
        assert job.commits() == [True] * 4 and len({r.digest for r in job.coordinator.replicas.values()}) == 1
        assert taken(job) == ["gloo+relay"] * 4 and job.order() == [[2], [3], [0], [1]]
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
            assert taken(job) == [first, first if len(refusing) == 2 else f"{first}+relay"]
    assert "from the trainers, none from another replica: refused by the test" in caplog.text


@FORMS
def test_trainers_may_step_when_their_bytes_are_there(pulled):
    """What is left is read from engines: a trainer that overwrites its weights changes nothing for it."""
    with relayed(replicas=2, pulled=pulled) as job:
        there, let = job.steps(1).there, []
        job.steps(1).there = lambda run, part: (job.sim.block(lambda: let), there(run, part))
        call(job, wait="sources")
        assert job.ended(1.0)[0].pending, "the sources were held for a replica that does not read them"
        let.append(0)  # its trainer has trained on
        job.sim.wait(1.0)
        assert job.engines[1].takers[0].held(2) == 2


def test_a_replica_that_is_lost_in_its_middle_takes_along_those_behind_it_and_no_other():
    with relayed(replicas=4) as job:
        in_parts(job)
        assert job.commits() == [True] * 4
        stuck, reached = job.steps(1), []
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
        assert taken(job, min_replicas=3) == ["peer", "", "relay", "relay"] and job.order()[2:] == [[0], [2]]
        job.again(1)  # back in its place, in another engine
        job.sim.quiet()
        assert (taken(job), job.order()) == formed(True, range(4), 4)


def test_what_a_replica_has_received_is_read_from_it_even_if_it_fails_then():
    """In a ring, where its own share is whole when it fails, and not all that it reads."""
    with relayed(pulled=False) as job:
        in_parts(job)
        assert taken(job) == ["gloo+relay"] * 3
        before = job.steps(0).before
        job.steps(0).before = lambda wave, stream: (
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
        assert taken(job) == ["gloo+relay"] * 3


@FORMS
@pytest.mark.parametrize("fails", [True, False])
def test_a_replica_that_fails_or_is_late_before_bytes_move_is_gone_around(fails, pulled):
    """In the same refit, the others do without it; a late one follows, and takes nothing from the trainers."""
    with relayed(pulled=pulled) as job:
        engine = job.engines[1]
        pause, let = engine.pause, []
        if fails:
            engine.fail["pause"] = XferError("the engine does not pause")
        else:
            engine.pause = lambda timeout: (job.sim.block(lambda: let), pause(timeout))
        call(job, min_replicas=2)
        job.sim.wait(deadlines.TOGETHER_S + 0.1)
        assert job.engines[2].takers[0].held(2) == 2 and job.order()[2] == [0]
        let.append(0)
        end = job.ended()[0]
        assert [o.committed for o in end.outcomes] == [True, not fails, True]
        assert fails or ways(end)[1].keys() == {"relay"}
        engine.pause = pause
        assert job.commits() == [True] * 3 and job.order() == formed(pulled, range(3), 3)[1]


# ---- what changed


def failed(point: str) -> Callable[[Job], object]:
    def refit(job: Job) -> None:
        assert job.commits() == [True]  # the last one is no multiple of three: not new in all elements
        job.faults[job.engines[0].worker(0), point] = "raise"
        call(job)
        assert all(isinstance(e, XferError) for e in job.ended())

    return refit


def a_value_changes_on_its_way(job: Job) -> None:
    """What a trainer sends, or a worker reads, of the values that changed; not which ones these are."""
    encode, read, flips = changes.encode, peer_host.Mapping.read, []

    def encoded(*a) -> torch.Tensor | None:
        if (message := encode(*a)) is not None and len(message) and not flips:
            flips.append("sent")
            message[-1] ^= 1
        return message

    def reads(mapping, calls, check=None, where="") -> None:
        read(mapping, calls, check, where)
        if check is not None and calls and not flips:  # marks are read without a check
            flips.append("pulled")
            ctypes.c_ubyte.from_address(int(calls[0].local[0, 0])).value ^= 1

    job.calls = [job.last + 2] * job.trainers  # of versions 7 and 8 few elements are new
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changes, "encode", encoded)
        patched.setattr(peer_host.Mapping, "read", reads)
        job.wrong.add((0, job.last + 3))
        for end in job.all(verify=True):
            assert flips and isinstance(end, VerificationError) and "replica 0" in str(end), end
    (engine,) = job.engines
    assert engine.paused and engine.label == "xfer:mixed" and job.controllers[0].error is not None


EVENTS: dict[str, tuple[bool, Callable[[Job], object]]] = {
    "nothing": (False, lambda job: None),
    "a trainer's storages move": (False, lambda job: job.sources[0].move()),
    "the refit fails before a byte moves": (False, failed("arm")),
    "a worker's storages move": (True, lambda job: setattr(job.engines[0].takers[0], "changes", "moves")),
    "something else writes a worker's bytes": (True, lambda job: [t.zero_() for t in job.engines[0].takers[0].live.values()]),
    "the refit fails while bytes move": (True, failed("wave")),
    "a value changes on its way": (True, a_value_changes_on_its_way),
    "two refits, the last of all bytes": (True, lambda job: [job.commits(delta=d) for d in ("auto", None)]),
    "the trainers release their weights": (True, lambda job: [s.release() for s in job.sessions]),
    "the replica is served again": (True, lambda job: (job.again(0), job.sim.quiet())),
    "the trainers' layouts change": (True, lambda job: [s.turn() for s in job.sources]),
    "every element changes": (True, lambda job: job.commits()),
}  # fmt: skip
"""What happens before a refit by changes -> whether it sends all bytes."""
LESS = {False: 0.5, True: 1.0}
"""How much less moves, by whether it is pulled. Matrices of 288 bytes have few granules that did not change."""


@pytest.mark.parametrize("pulled", [False, True], ids=["sent", "pulled"])
@pytest.mark.parametrize("stage", [False, True], ids=["at once", "staged"])
def test_a_refit_moves_what_changed_only_if_both_ends_hold_the_same_refit(pulled, stage):
    """The engine holds the bytes of the trainers' moment in any case (`Job.agree`)."""
    with after_one_refit(delta="auto", pulled=pulled, stage=stage) as job:
        moved = lambda: job.ended()[0].outcomes[0].bytes_moved  # noqa: E731
        whole = moved()
        for event, (sends_all, happens) in EVENTS.items():
            job.calls = [job.last // 3 * 3 + 3] * job.trainers  # of three versions, the last is new in all elements
            assert job.commits(verify=False) == job.commits(verify=False) == [True]
            assert 0 < moved() < whole * LESS[pulled]
            assert job.commits() == job.commits() == [True]  # each differs everywhere from the one before
            assert [e.extra_bytes >= whole / 3 for e in job.ended()] == [True, True], "copies are told"
            happens(job)
            assert job.commits(verify=False) == [True]
            untouched = stage and event == "the refit fails while bytes move"  # they moved into scratch
            assert (moved() == whole) == (sends_all and not untouched), event


def test_of_two_replicas_the_one_that_did_not_commit_what_trainers_remember_gets_all_bytes():
    with after_one_refit(replicas=2, delta="auto") as job:
        whole = job.ended()[0].outcomes[0].bytes_moved
        assert job.commits() == [True, True] and job.commits() == [True, True]
        job.faults[job.engines[1].worker(0), "arm"] = "raise"
        assert job.commits(min_replicas=1) == [True, False]
        assert job.commits(verify=False) == [True, True]
        came = [o.bytes_moved for o in job.ended()[0].outcomes]
        assert came[0] < whole / 2 and came[1] == whole


# ---- calls


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


def test_the_transfer_clock_runs_from_readiness_to_decision_whatever_is_done_between():
    """Not from the first call, and not only while bytes move: a new plan is part of it, told as a phase of its own."""
    with after_one_refit() as job:
        drain, job.sources[1].drain = job.sources[1].drain, lambda: job.sim.wait(3.0)
        call(job)
        (o,) = job.ended()[0].outcomes
        assert o.committed and o.transfer_s == 0.0 and dict(o.phases)["plan"] == dict(o.phases)["link"] == 0.0
        assert dict(o.phases)["drain"] == 3.0
        job.sources[1].drain, job.engines[0].takers[0].changes = drain, "turns"
        call(job)
        for now in (ReplicaPhase.PLANNING, ReplicaPhase.LINKING):
            job.sim.until(phase(job, 0, now))
            job.stop(workers(job, 0)[0])
            job.sim.wait(0.5)
            job.sim.stopped.clear()
        (o,) = job.ended()[0].outcomes
        assert round(o.transfer_s, 3) == 1.0
        assert round(dict(o.phases)["plan"], 3) == round(dict(o.phases)["link"], 3) == 0.5


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


def test_a_publish_returns_when_a_rank_is_ready_and_its_fence_when_nobody_reads():
    with after_one_refit() as job:
        engine, seen = job.engines[0], {}
        engine.slow["pause"] = 3.0

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
        assert [e.before.version for e in job.all()] == [2, 2] and all(s.fence() == 0.0 for s in job.sessions)
        assert all(e.before.fence_s > 0 for e in job.ended())


@pytest.mark.parametrize(("point", "may_be_read"), [("arm", False), ("moving", True)])
def test_a_fence_ends_at_its_deadline_and_says_whether_weights_may_still_be_read(point, may_be_read):
    """A worker stops before it pulls, or in the middle. Before it pulls, a rank may hear that nobody reads before it hears why."""
    with after_one_refit(pulled=True) as job:
        published, job.faults[workers(job, 0)[0], point] = [], "stop"
        job.between = lambda i, report: published.append(report.pending)
        began = job.sim.now
        call(job, wait="ready", deadline_s=5.0)
        for end in job.ended():
            if isinstance(end, XferError) or may_be_read:
                assert isinstance(end, XferError) and "worker 0" in str(end), end
                assert getattr(end, "drained", True) != may_be_read, end
            else:
                assert end.pending, end
        assert published == [True, True] and 5.0 <= job.sim.now - began <= 5.0 + deadlines.CALL_GRACE_S + 0.01


@pytest.mark.parametrize("joined", ["fence", "settle", "refit"])
def test_what_fails_after_a_publish_has_returned_fails_all_at_once_and_is_raised_by_what_joins_it(joined):
    with after_one_refit() as job:
        published = []

        def between(i: int, report) -> None:
            published.append(report.pending)
            job.sim.wait(1.0)  # shorter than any deadline
            job.sim.must(job.coordinator.refit is None, "the other rank waits for one that has failed")

        job.between, job.faults["trainer 1", "ready"] = between, "raise"
        call(job, wait="ready", joined="explain" if joined == "refit" else joined)  # explain waits for nothing
        heard = [job.ended()]
        call(job)
        heard.append(job.ended())
        assert published == [True, True] and isinstance(heard[joined == "refit"][1], XferError)
        for ends in zip(*heard):  # the other rank, which nobody has read, may hear of it in its next call
            error = next(end for end in ends if isinstance(end, XferError))
            assert "injected fault at ready" in str(error) and "trainer 1" in str(error), error


def test_a_publish_that_takes_long_to_be_ready_holds_up_its_fence_alone():
    with after_one_refit() as job:
        began, seen = job.sim.now, []
        job.between = lambda i, report: seen.append(job.sim.now - began)
        job.faults["trainer 1", "ready"] = "wait"
        call(job, wait="ready")
        assert all(end.pending for end in job.ended()) and 3.0 <= job.sim.now - began < 3.5
        assert max(seen) < 0.1
        (outcome,) = job.all()[0].before.outcomes
        assert outcome.committed


def test_closing_raises_what_failed_after_a_publish_had_returned():
    with after_one_refit() as job:
        job.faults["trainer 1", "ready"] = "raise"
        call(job, wait="ready", joined="explain")
        assert all(end.pending for end in job.ended())
        for i in (1, 0):
            with pytest.raises(XferError, match="injected fault at ready"):
                job.closes(i)
        job.sim.wait(20.0)
        assert not [t.name for t in job.sim.threads if t.who.startswith("trainer")], "threads of closed sessions"
        job.sim.dead.add("trainer 0")


def test_a_publish_that_fails_before_the_coordinator_knows_of_it_fails_on_all_ranks_at_once():
    """A rank that waits for no other one looks first. It tells that it has called, and why it fails, before it raises."""

    def gone() -> str:
        raise RebindError("its storages are gone")

    with after_one_refit() as job:
        began, source = job.sim.now, job.sources[1]
        source.check = gone
        call(job, wait="ready")
        heard = [job.ended()]
        del source.check
        assert job.sim.now - began < 1.0 and isinstance(heard[0][1], RebindError)
        call(job)
        heard.append(job.ended())
        error = next(
            ends[0] for ends in heard if isinstance(ends[0], XferError)
        )  # perhaps in its next call: nobody has read it
        assert "its storages are gone" in str(error) and "trainer 1" in str(error), error


@pytest.mark.parametrize("together", [False, True])
def test_a_publish_takes_of_its_callers_thread_what_the_next_forward_may_change_and_nothing_else(together):
    """Gathers and what ranks compute together too: the next forward uses the same groups."""
    with after_one_refit(trainers=1, delta="auto", pulled=True, computes=together) as job:
        (source,), (session,), on = job.sources, job.sessions, []

        def watch(owner: object, name: str) -> None:
            was = getattr(owner, name)
            job.sim.patch(owner, name, lambda *a: (on.append((name, job.sim.running.name)), was(*a))[1])

        source.finishes_alone = lambda: True
        for owner, name in (
            *((source, name) for name in ("finish_gathers", "check", "compute")),
            *((session.side, name) for name in ("measure", "quantize", "compare", "news")),
            *((lane.plane, "moved") for lane in session.lanes.values()),
            (session.party, "send"),
        ):
            watch(owner, name)
        done: list[str] = []
        job.between = lambda i, report: done.extend(name for name, _ in on if name == "compute")
        call(job, wait="ready")
        assert job.ended()[0].pending
        mine = [name for name, thread in on if thread == "call of trainer 0"]
        assert mine == ["finish_gathers", "check", *(["send"] * together)] and done == ["compute"] * together
        rest = {name for name, thread in on if thread.startswith("xfer-background")}
        assert rest == {"measure", "quantize", "compare", "news", "moved", "send", *done}
        call(job)
        assert job.ended()[0].before.committed == 1


@pytest.mark.parametrize("seed", [2, 6])
def test_an_error_that_its_caller_keeps_holds_no_weights_that_were_released(seed):
    """One that was raised where ranks meet to compute: its frames once had the layout. `Job.release` looks at the weights."""
    with Simulation(seed) as sim:
        job = Job(sim, 2, 1, 1, computes=True)
        job.interrupt(0)
        job.undisturbed(False)
        sim.wait(1.0)
        assert any(isinstance(end, XferError) for end in job.ends.values())
        job.release(1)
        sim.wait(0.3)
        job.mend()
        job.close()


# ---- leaving, and what is called at the wrong time


@pytest.mark.parametrize("wait", ["sources", "ready"])
def test_what_became_of_a_refit_whose_caller_did_not_wait_is_heard_by_the_next_call(wait):
    with after_one_refit(replicas=2) as job:
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
            with pytest.raises(XferError, match="division by zero"):
                job.closes(i)
        assert job.engines[0].takers[0].held(2) == 2 and not job.engines[0].paused and job.engines[1].paused
        job.sim.dead.add("trainer 0")


def test_what_is_called_after_closing_says_that_it_was_closed_here():
    """Not PeerLost, after which a caller would call again. A call that is running hears it, too."""
    with after_one_refit() as job:
        call(job, 1)
        job.sim.quiet()
        job.closes(1)
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


def test_an_engine_that_needs_fp8_comes_while_bytes_move_by_the_old_catalog():
    """The catalog with what it needs waits until the next refit."""
    with after_one_refit(replicas=2, forms=[None, None, ScaleRule.IEEE]) as job:
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
        failed = {0, 1} if trains else {0}
        for end in fails_at(job, who, point, action, min_replicas=0 if trains else 1):
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


@pytest.mark.parametrize("change", ["moves", "turns"])
@pytest.mark.parametrize("wait", ["commit", "sources"])
def test_staged_bytes_for_storages_that_an_engine_has_no_longer_are_brought_anew_or_refused(change, wait):
    """Anew while all trainers hold their weights. Others may have changed them: then the engine keeps its old version."""
    with after_one_refit(stage=True) as job:
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


def test_storages_of_a_staged_refit_are_looked_at_whole_while_the_engine_serves_and_while_bytes_are_applied():
    with after_one_refit() as job:
        taker = job.engines[0].takers[0]
        taker.looks.clear()
        assert job.commits(stage=True) == [True] and taker.looks == [(False, False), (True, True), (True, False)]
        taker.looks.clear()
        assert job.commits() == [True] and taker.looks == [(True, False)]


def test_what_a_quick_look_in_the_pause_cannot_see_is_found_before_the_commit_and_the_next_refit_repairs():
    """A tensor is laid out anew in its place between staging and the pause."""
    with after_one_refit(stage=True) as job:
        job.engines[0].takers[1].changes = "turns in its place"
        call(job)
        for end in job.ended():
            assert isinstance(end, RebindError) and "changed after its bytes were staged" in str(end), end
            assert "replica 0 worker 1" in str(end)
        assert job.engines[0].paused and job.engines[0].takers[1].live["norm"].isnan().all()
        assert job.commits() == [True]


@pytest.mark.parametrize("pulled", [False, True], ids=["sent", "pulled"])
def test_a_delta_that_is_staged_for_other_bytes_than_the_engine_has_is_brought_whole(pulled):
    """Something else writes weights while they are staged."""
    with after_one_refit(stage=True, delta="auto", pulled=pulled) as job:
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


@pytest.mark.parametrize("how", [{}, dict(delta="auto"), dict(delta="auto", pulled=True)], ids=str)
def test_release_returns_scratch_and_what_is_staged_is_applied_all_the_same(how):
    """Trainers release their weights while the engine has yet to pause."""
    with after_one_refit(stage=True, **how) as job:
        engine = job.engines[0]
        engine.slow["pause"] = 1.0
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


@pytest.mark.parametrize("wait", ["commit", "sources", "ready"])
@pytest.mark.parametrize("pulled", [False, True])
def test_replicas_take_turns_by_number(pulled, wait):
    """Each serves again before the next one is paused, whatever the trainers wait for."""
    with after_one_refit(replicas=3, pulled=pulled, at_once=1) as job:
        job.told.clear()
        call(job, wait=wait)
        job.ended()
        job.level()
        assert job.told == [(r, what) for r in range(3) for what in ("pause", "resume")]


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
def test_replicas_that_take_turns_read_from_those_that_had_theirs(pulled):
    """Nobody waits for a replica whose turn has not come, so relays cost no time."""
    with after_one_refit(trainers=1, replicas=3, pulled=pulled, relay=True, at_once=1) as job:
        began = job.sim.now
        assert taken(job) == ["peer" if pulled else "gloo", "relay", "relay"] and job.sim.now < began + 1.0


# ---- first copies


FIRST = [("donor", "checksum"), ("joiner", "checksum"), ("donor", "plan"), ("donor", "link"), ("donor", "digest")]


@pytest.mark.parametrize(("who", "point"), FIRST)
def test_a_first_copy_that_fails_leaves_the_joiner_to_the_next_refit(who, point):
    """Paused if bytes had moved, and serving what it had if not. The donor serves on."""
    with after_one_refit(replicas=2) as job:  # by a verified refit
        job.again(1)
        job.faults[job.engines[who == "joiner"].worker(0), point] = "raise"
        job.sim.wait(SOON_S)
        moved, (donor, joiner) = point == "checksum", job.controllers
        assert job.coordinator.copied == 1 and joiner.version is None and job.engines[1].paused == moved
        assert "replica 0 sent checksum" in str(joiner.error) if moved else joiner.error is None
        assert not job.engines[0].paused and donor.error is None
        job.differ.clear()  # this was no refit
        assert job.commits() == [True, True]


def copying(job: Job) -> bool:
    """Whether bytes of a first copy move, and half of them are there."""
    copies = job.coordinator.copies.values()
    return cpu_peer.Hold.reached.is_set() and any(p.moving for c in copies for p in c.parts.values())


@pytest.mark.parametrize("donor", ["is written by a refit", "dies"])
def test_a_donor_that_cannot_go_on_while_it_is_read_costs_the_copy_and_no_refit_waits(donor):
    with after_one_refit(replicas=2, pulled=True) as job:
        cpu_peer.Hold.begin()
        job.again(1)
        job.sim.until(lambda: copying(job))
        if donor == "dies":
            job.die(job.engines[0].worker(0))
            cpu_peer.Hold.clear()
            job.sim.wait(SOON_S)
            assert job.engines[1].paused and job.controllers[1].torn and job.controllers[1].version is None
            assert job.engines[1].takers[0].live["norm"].isnan().all(), "torn, and would answer NaN"
        call(job, min_replicas=1)
        if donor != "dies":
            job.sim.until(lambda: job.engines[0].takers[0].locked)
            still = [p for c in job.coordinator.copies.values() for p in c.parts.values()]
            assert all(p.error is not None for p in still), "what was read of the donor could be committed"
            cpu_peer.Hold.clear()
        assert [[o.committed for o in end.outcomes] for end in job.ended(SOON_S)] == [[donor != "dies", True]] * 2


# ---- fixed orders: what happens, step by step

ORDERS = {
    "a controller that is stopped between refits is named": ("", "stop c0 | call deadline_s=5 | fails not armed"),
    "a trainer that is stopped between refits is named": ("", "stop t1 | call 0 deadline_s=5 | fails not called"),
    "a layout that changes while a replica is planned is planned again at once":
        ("replicas=2", "again 1 | phase 1 planning | stop w1.0 w1.1 | change t0 turn | call | quiet | anew 1 | go | commits"),
    **{f"processes of a replica that fails at {point} while it joins hear why at once": ("replicas=2",
        f"fault w1.1 {point} raise | again 1 | phase 1 joining | call 0 min_replicas=1 | quiet | call 1 min_replicas=1 | ended | "
        f"told 1 at {point} | without 1 at {point} | call min_replicas=1 | without 1 at {point}") for point in ("read", "plan", "link")},
    **{f"also where it fails at {point} while others are armed": ("replicas=2",
        f"call 0 min_replicas=1 | armed | fault w1.1 {point} raise | again 1 | quiet | call 1 min_replicas=1 | ended | "
        f"told 1 at {point} | call min_replicas=1 | without 1 at {point}") for point in ("read", "plan", "link")},
    **{f"a refit that {fails} while a replica is {now} leaves its link alone": ("replicas=2 first_copies=0 computes",
        f"again 1 | phase 1 {now} | stop w1.0 w1.1 | quiet | {trouble} | call min_replicas=1 {seconds} | fails {text} | gather t1 same | "
        "wait 20 | go | quiet | linked 1")
       for now in ("planning", "linking") for fails, trouble, seconds, text in (
           ("raises", "fault t1 drain raise", "", "at drain"), ("gathers otherwise", "gather t1 another", "", "would gather different"),
           ("hears nothing", "deaf 20", "deadline_s=0.5", "not all have come"))},
    "layouts that all change while a replica links are planned once":
        ("replicas=2 trainers=3", "again 1 | phase 1 linking | change t0 turn | change t1 turn | change t2 turn | call | commits | "
         "anew 1"),
    **{f"a worker whose storages {what} and that tells so when its refit is over is not forgotten":
        ("pulled", f"change w0.0 {what} | fault w0.0 arm stop | call deadline_s=2 | fails worker 0: not armed")
       for what in ("turns", "moves")},
    "an engine that is late to come back is put aside by calls that do not want all":
        ("replicas=2", "slow 0 resume 20 | call deadline_s=1 min_replicas=1 | ended | call min_replicas=1 | without 0 is put aside"),
    "a replica that joins while weights are released is refitted":
        ("replicas=2 pulled", "release t0 | quiet | again 0 | quiet | release t1 | quiet | again 1 | quiet | call | commits"),
    "a trainer that failed before it told of changed exports tells them later":
        ("replicas=2 computes", "change t0 export | change t1 export | fault t1 look raise | call | fails at look | again 1 | "
         "quiet | call | commits"),
    "and so does one that gathers":
        ("replicas=2 computes", "change t0 export | change t1 export | fault t1 before raise | call | fails at before | again 1 | "
         "quiet | call | commits"),
    "an engine that comes new into a refit hands on nothing":
        ("trainers=1 workers=1 replicas=2 pulled relay", "slow 1 pause 4 | call min_replicas=1 | wait 2.5 | die w0.0 | quiet | again 0 | "
         "commits"),
    "an engine that could not be resumed serves when it is served anew":
        ("trainers=1 workers=1", "prepare t0 | quiet | error 0 resume | close t0 | wait 1 | restart"),
    "engines that were armed when the trainers died serve again when they are back":
        ("", "prepare t1 | quiet | die t0 | wait 180 | restart"),
    "a call that comes while the refit before it is undone begins when it has been":
        ("", "fault t1 drain raise | stop c0 | call deadline_s=2 | fails at drain | call 0 | quiet | go | call 1 | commits"),
    "a rank that calls anew without a word ends the call that it left":
        ("", "call 1 | quiet | interrupt t0 | call 0 | soon 1 | call 1 | commits"),
    "a prepared refit that nobody calls for is given up":
        ("replicas=2", "prepare t0 | quiet | paused 1 | wait 70 | paused 0 | prepare t1 | quiet | wait 59 | call 1 | wait 30 | "
         "call 0 | commits"),
    "a call that comes while a prepared refit is given up is served":
        ("", "prepare t0 | quiet | stop c0 | wait 60.1 | call 0 | prepare t1 | quiet | go | quiet | call 1 | commits"),
    "a prepare while the last refit is being settled is kept for later":
        ("", "slow 0 resume 3 | call | wait 1 | prepare t0 | quiet | commits | quiet | paused 1"),
    "a call that cannot begin by its deadline says what was still undone":
        ("", "slow 0 resume 20 | call deadline_s=1 | fails its engine was not back in service | call deadline_s=0.8 | "
         "fails controller: bringing its engine back | call | commits"),
    "a rank that others wait for with their parts of a block is named":
        ("trainers=3 fp8", "stop t1 | call 0 2 deadline_s=5 | fails trainer 1: it has not called"),
    "replicas cannot take turns where all were paused before":
        ("replicas=2", "prepare t0 | quiet | call at_once=1 | fails prepare() has paused all engines | paused 0"),
    "an engine that comes back late is waited for by the next refit":
        ("", "fault w0.0 done raise | slow 0 resume 20 | call deadline_s=1 | fails at done | call | wait 5 | commits"),
    "a trainer that is lost while workers install costs the next refit only":
        ("trainers=3", "fault w0.0 commit wait | call | phase 0 committing | die t2 | commits | call 0 1 | fails trainer 2"),
    "a call that waits for a refit that is being undone ends at its deadline":
        ("", "stop c0 | call 1 | quiet | interrupt t0 | call 0 deadline_s=1 | soon 0 | go | soon 1"),
    "leaving finishes a refit whose sources were free":
        ("", "fault w0.0 commit wait | call wait=sources | soon 0 | close t0 | close t1 | paused 0 | held 2 | restart"),
    "leaving brings armed engines back into service":
        ("", "prepare t1 | quiet | close t0 | close t1 | wait 10 | paused 0 | held 1 | restart"),
    "a worker that hangs between staging and commit leaves a whole engine":
        ("replicas=2 stage", "call deadline_s=8 min_replicas=1 | staged | stop w0.1 | fails deadline | go | wait 60 | call | commits"),
    "a controller that dies between staging and commit leaves a whole engine":
        ("replicas=2 stage", "call deadline_s=8 min_replicas=1 | staged | die c0 | fails controller | wait 60 | again 0 | quiet | call | "
         "commits"),
    **{f"a trainer that dies when a delta is staged and {point}, {way or 'sent'}, costs the refit only":
        (f"replicas=2 stage delta=auto {way}", f"{before} | die t1 | fails is gone | wait 4 | {then} | restart | call | commits")
       for way in ("", "pulled") for point, before, then in (
           ("not applied", "slow 0 pause 2 | slow 1 pause 2 | call | staged | wait 1", "paused 0 | held 1"),
           ("half applied", "fault w0.0 apply wait | fault w1.0 apply wait | call | phase 0 moving | phase 1 moving | wait 1",
            "paused 1"))},
    "exports that change one rank after the other are measured by each new catalog":
        ("trainers=3 replicas=2 fp8", "change t0 export | call | commits | change t1 export | call | commits | change t2 export | "
         "call | commits"),
}  # fmt: skip
CHANGES = [
    "change t0 move | fault t1 drain raise | call verify=0 | ended | change t1 move",
    "change w0.0 turns | fault w0.1 arm raise | call verify=0 | ended | change w0.0 moves | fault w0.1 look raise",
    "change w0.0 turns | fault w0.0 arm raise | call verify=0 | ended | change w0.0 moves | fault w0.0 look raise",
    "change t0 turn | fault t0 look raise",
    "change t0 move | fault t0 look raise",
    "change t0 export | fault w0.0 look raise | call verify=0 | ended | change t0 export",
    "change t0 export | fault w0.0 read raise",
    "change t0 export | change t1 export | fault t1 before raise | call verify=0 | ended | change w0.1 turns",
    "release t0 | quiet | change t1 move | fault w0.1 arm raise | call verify=0 | ended | change t0 turn | release t1 | quiet",
]
"""What changes before refits that may fail. Checksums alone do not show a refit of old storages, since both ends sum them. Most of
these once committed wrong bytes."""
ORDERS |= {
    f"{x} {route}": (f"computes {route}", f"{x} | call verify=0 | ended") for x in CHANGES for route in ("", "pulled")
}
"""The job, and what happens in it. At the end all that is gone comes again, and the next refit is whole (`after_one_refit`)."""


def named(job: Job, who: str) -> str:
    """t1: trainer 1; c0: the controller of replica 0; w0.1: its worker 1."""
    replica, _, worker = who[1:].partition(".")
    return {"t": f"trainer {replica}", "c": job.controlled[int(replica) % job.replicas]}.get(who[0]) or job.engines[
        int(replica)
    ].worker(int(worker))


def until_phase(job: Job, number: str, wanted: str) -> None:
    """Of the replica, or of its part of the refit."""
    co, i = job.coordinator, int(number)
    parts = lambda: [co.refit.parts[i]] if co.refit and i in co.refit.parts else []  # noqa: E731
    job.sim.until(lambda: wanted in [x.phase.value for x in (co.replicas[i], *parts())])
    job.seen = co.replicas[i].epoch


def goes_deaf(job: Job, seconds: str) -> None:
    """The rendezvous, for so long."""
    job.later(lambda: job.sim.wait(float(seconds)))
    job.unheard |= {(i, job.calls[i] + 1) for i in range(job.trainers)}


def options(words: Iterable[str]) -> dict[str, object]:
    """`name=value`; `name` alone is true."""
    value = lambda v: int(v) if v.isdigit() else float(v) if "." in v else v or True  # noqa: E731
    return {k: value(v) for k, _, v in (w.partition("=") for w in words)}


HAPPENS: dict[str, Callable[..., object]] = {
    "call": lambda job, *a: call(job, *(int(x) for x in a if x.isdigit()), **options(x for x in a if "=" in x)),
    "ended": lambda job: (job.ended(SOON_S), job.faults.clear()),
    "prepare": lambda job, who: job.sessions[int(who[1])].prepare(),
    "release": lambda job, who: job.release(int(who[1])),
    "interrupt": lambda job, who: job.interrupt(int(who[1])),
    "close": lambda job, who: job.closes(int(who[1])),
    "again": lambda job, replica: job.again(int(replica)),
    "restart": lambda job: job.restart(),
    "change": lambda job, who, how: getattr(job.sources[int(who[1])], how)() if who[0] == "t" else
        setattr(job.engines[int(who[1])].takers[int(who[3])], "changes", how),
    "gather": lambda job, who, digest: setattr(job.sources[int(who[1])], "digest", digest),
    "fault": lambda job, who, point, action: job.faults.update({(named(job, who), point): action}),
    "stop": lambda job, *some: [job.stop(named(job, who)) for who in some],
    "die": lambda job, *some: [job.die(named(job, who)) for who in some],
    "slow": lambda job, replica, what, seconds: job.engines[int(replica)].slow.update({what: float(seconds)}),
    "error": lambda job, replica, what: job.engines[int(replica)].fail.update({what: RuntimeError("boom")}),
    "deaf": goes_deaf,
    "phase": until_phase,
    "staged": lambda job: job.sim.until(staged(job)),
    "armed": lambda job: job.sim.until(lambda: job.coordinator.refit and len(job.coordinator.refit.parts[0].armed) == job.workers),
    "go": lambda job: job.sim.stopped.clear(),
    "quiet": lambda job: job.sim.quiet(),
    "wait": lambda job, seconds: job.sim.wait(float(seconds)),
}  # fmt: skip
HOLDS: dict[str, Callable[..., bool]] = {
    "fails": lambda job, *text: all(" ".join(text) in says(end) for end in job.ended()),
    "commits": lambda job: all(o.committed for end in job.ended(5 * SOON_S) for o in end.outcomes),
    "without": lambda job, replica, *text: all(
        not end.outcomes[int(replica)].committed and " ".join(text) in says(end) for end in job.ended(SOON_S)),
    "told": lambda job, replica, *text: job.controllers[int(replica)]._phase is ControllerPhase.OVER and all(
        not s.joined and " ".join(text) in str(s.error) for s in job.engines[int(replica)].sessions),
    "soon": lambda job, rank: job.sim.block(lambda: int(rank) not in job.running, job.sim.now + SOON_S),
    "paused": lambda job, whether: all(e.paused == bool(int(whether)) for e in job.engines),
    "held": lambda job, version: all(t.held(job.last) == int(version) for e in job.engines for t in e.takers),
    "anew": lambda job, replica: job.epochs()[int(replica)] == job.seen + 1,
    "linked": lambda job, replica: (r := job.coordinator.replicas[int(replica)]).phase is ReplicaPhase.READY
        and r.epoch == job.seen and not r.relink,
}  # fmt: skip
"""`fails` and `commits` wait for the calls that were made; `soon` waits for one rank's. `anew`: planned or linked once more since the
last `phase`; `linked`: as it was then."""


@pytest.mark.parametrize("order", ORDERS)
def test_what_happens_in_this_order_ends_in_time_and_the_next_refit_is_whole(order):
    how, steps = ORDERS[order]
    made = options(how.split())
    forms = [ScaleRule.IEEE if made.pop("fp8", False) else None]
    with after_one_refit(**made, forms=forms) as job:
        for step in steps.split(" | "):
            verb, *args = step.split()
            if verb in HAPPENS:
                HAPPENS[verb](job, *args)
            else:
                assert HOLDS[verb](job, *args), (step, job.ends)
