"""Fixed orders of events in a simulation: what each caller hears, in which words, and how soon. A seed chooses what an order leaves open.
Afterwards all that died or was stopped comes again, and the next refit must be whole everywhere."""

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
from tests.support.world import kinds
from xfer.coordinator import deadlines, relays
from xfer.coordinator import messages as m
from xfer.coordinator.state import Client, ReplicaPhase
from xfer.direct import sums
from xfer.direct import trainer as direct_trainer
from xfer.direct.plane import DirectPlane
from xfer.errors import DeadlineExceeded, PeerLost, Unsupported, VerificationError, XferError
from xfer.kernels.block_fp8 import ScaleRule
from xfer.participants import computing
from xfer.participants.controller import ControllerPhase
from xfer.plan import relay
from xfer.rendezvous import client
from xfer.transport import changes, p2p, peer_host, relay_place, routes

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


# ---- replicas that join


def test_an_engine_that_holds_a_version_and_does_not_serve_it_gives_no_first_weights():
    """The coordinator would give them under the version that it served before."""
    with after_one_refit(replicas=2, workers=1) as job:
        job.engines[0].fail["resume"] = XferError("stopped by the test")
        assert job.commits(min_replicas=1) == [False, True]
        assert job.engines[0].takers[0].held(2) == 2 and job.coordinator.replicas[0].version is None
        job.again(1)
        job.sim.quiet()
        assert job.engines[1].label == "2" and not job.engines[1].paused


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


@pytest.mark.parametrize(
    ("change", "held"),
    [*(("move", at) for at in HELD), ("turn", "a trainer has opened"), ("export", "a trainer has opened")],
)
def test_what_trainers_hold_may_change_while_a_replica_links(change, held):
    """The change comes while a thread that links stands at `held`. What was made for the old storages was once kept for the new ones."""
    where, name = HELD[held]
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

        def before(wave, stream):
            job.sim.block(lambda: job.coordinator.refit.parts[0].ready_parts.get(0) == relay.ALL_PARTS)
            raise XferError("it cannot go on")

        job.steps(0).before = before
        call(job, min_replicas=2)
        (end,) = job.ended(SOON_S)
        assert [o.committed for o in end.outcomes] == [False, True, True] and "it cannot go on" in says(end)
        assert taken(job) == ["gloo+relay"] * 3


@pytest.mark.parametrize("both", [False, True])
def test_a_replica_that_falls_with_another_one_waits_for_the_same_reason(both):
    """A worker says first that its connection to trainer 1 broke. In that trainer one lane raises, or each."""
    with relayed(replicas=2, trainers=2, pulled=False) as job:
        assert taken(job) == ["gloo+relay"] * 2
        for lane in job.sessions[1].lanes.values() if both else [job.sessions[1].lanes[1]]:

            def post(*_, link=lane.plane._link):
                link.abort()
                job.sim.wait(0.1)
                raise RuntimeError("out of memory")

            lane.plane._link.post = post
        call(job)
        for end in job.ended(SOON_S):
            assert str(end).count("[trainer 1] RuntimeError: out of memory") == 3, "of the refit, and of each replica"


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
        link = job.sessions[1].lanes[0].plane._link

        def post(*_):
            link.abort()
            job.sim.wait(late_s)
            raise RuntimeError("out of memory")

        link.post = post
        call(job)
        assert all("[trainer 1] RuntimeError: out of memory" in says(end) for end in job.ended(SOON_S))


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
        job.sources[0].drain = lambda: job.sim.wait(0.1)
        call(job)
        job.sim.quiet()
        for second in (job.sessions[0].refit, job.sessions[0].release):
            with pytest.raises(Unsupported, match="another thread"):
                second()
        assert all(o.committed for end in job.ended(0.2) for o in end.outcomes)


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
            *((source, name) for name in ("finish_gathers", "begin_check", "check", "compute")),
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
        assert mine == ["finish_gathers", "begin_check", *(["send"] * together)] and done == ["compute"] * together
        rest = {name for name, thread in on if thread.startswith("xfer-background")}
        assert rest == {"check", "measure", "quantize", "compare", "news", "moved", "send", *done}
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
        assert [s.fence() for s in job.sessions] == [0.0, 0.0], "an optimizer that it stands before goes on to step"
        enter(force=True)
        job.sim.dead.add("trainer 0")


def test_the_same_seed_gives_the_same_run():
    """Whatever was run before it in this process, and wherever objects lie."""

    def run() -> tuple[int, int]:
        with Simulation(7) as sim:
            job = Job(sim, 3, 2, 2, pulled=True, relay=True)
            job.faults[job.engines[1].worker(0), "wave"] = "kill"
            call(job, min_replicas=1)
            job.ended()
            job.mend()
            return sim.turns, sim.trace

    assert run() == run()


# ---- staged refits


def staged(job: Job, replica: int = 0) -> Callable[[], bool]:
    """All bytes are in the workers' scratch, and the engine has yet to pause."""
    return lambda: (refit := job.coordinator.refit) is not None and bool(refit.parts[replica].staged_at)


def paused(job: Job, replica: int = 0) -> int:
    return job.engines[replica].log.count("pause")


def test_storages_of_a_staged_refit_are_looked_at_whole_while_the_engine_serves_and_while_bytes_are_applied():
    with after_one_refit() as job:
        taker = job.engines[0].takers[0]
        taker.looks.clear()
        assert job.commits(stage=True) == [True] and taker.looks == [(False, False), (True, True), (True, False)]
        taker.looks.clear()
        assert job.commits() == [True] and taker.looks == [(True, False)]


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
        assert job.ends[0, 3].scratch_bytes == job.ends[0, 3].flatten()["xfer/scratch_bytes"] == 4 * needs
        assert job.commits() == [True, True] and not job.ends[0, 4].scratch_bytes


# ---- fixed orders: what happens, step by step

DIFFERENT = "min_replicas=1", "deadline_s=8.0", "verify=False", "version=77", "at_once=1"
ORDERS = {
    # ---- calls that differ
    **{f"ranks that ask for different refits hear what differs, even if another one does not call: {odd}": ("trainers=3 replicas=2",
        f"call 0 {same} | call 1 {same} {odd} | soon 0 | soon 1 | took 0 0.1 | paused 0 | wait 60 | call 2 {same} | "
        f"fails asked for different refits | fails trainer 1: {odd} | paused 0")
       for same in ("verify=True min_replicas=2",) for odd in DIFFERENT},
    # ---- publishing
    "a publish returns when its rank is ready, and its fence when nobody reads":
        ("", "slow 0 pause 3 | trains 1 | call wait=ready | pending | took 3 3.5 | quiet | held 2 | call | before 2 | call | before -"),
    **{f"a fence ends at its deadline and says whether weights may still be read: a worker stops at {point}": ("pulled",
        f"fault w0.0 {point} stop | call wait=ready deadline_s=5 | took 5 15.01 | published 0 1 | undrained {may_be_read}")
       for point, may_be_read in (("arm", 0), ("moving", 1))},
    **{f"what fails after a publish has returned fails all at once and is raised by {joins}": ("",
        f"fault t1 ready raise | trains 1 | call wait=ready joined={joined} | took 1 1.1 | published 0 1 | call | heard trainer 1 | "
        "heard at ready")
       for joins, joined in (("the fence", "fence"), ("settling", "settle"), ("the next call", "explain"))},
    "a publish that fails before the coordinator knows of it fails on all ranks at once":
        ("", "change t1 turn | fault t1 look raise | call wait=ready | took 0 0.1 | call | heard trainer 1 | heard at look"),
    "a tensor that is laid out anew in its place is found before a publish sends it, and the next refit reads it anew":
        ("", "change t1 turn_within | call wait=ready | took 0 1 | published 0 1 | call | heard trainer 1 | heard in their place"),
    # ---- leaving
    "closing raises what failed after a publish had returned":
        ("", "fault t1 ready raise | call wait=ready joined=explain | pending | raises t1 at ready | raises t0 at ready | wait 20 | "
         "unthreaded | restart"),
    "closing raises what became of a refit that nobody waited for":
        ("replicas=2", "slow 1 finish 1 | error 1 resume | call wait=sources | pending | raises t1 could not be resumed | "
         "raises t0 could not be resumed | held 2 | paused 0 1 | restart"),
    # ---- staged refits
    **{f"bytes that are staged for storages that an engine has no longer ({change}) are brought anew":
        ("stage", f"change w0.1 {change} | call | commits | paused 0 | held 2") for change in ("moves", "turns")},
    **{f"or refused ({change}) where trainers may have changed them":
        ("stage", f"change w0.1 {change} | call wait=sources | ended | settles cannot use the bytes that it has staged | "
         "quiet | paused 0 | held 1") for change in ("moves", "turns")},
    "a tensor that is laid out anew in its place, as no quick look sees, is found before the commit":
        ("stage", "change w0.1 turns_within | call | fails changed after its bytes were staged | fails replica 0 worker 1 | torn 0 1 | "
         "call | commits"),
    **{f"release returns scratch, and what is staged is applied all the same {how}": (f"stage {how}",
        "slow 0 pause 1 | call wait=sources | ended | staged | paused 0 | release 0 | release 1 | ended | level | held 2 | unscratched")
       for how in ("", "delta=auto", "delta=auto pulled")},
    # ---- replicas that take turns
    "a replica that hangs in its turn gives it to the next": ("replicas=3 at_once=1",
        f"fault w0.0 arm stop | call min_replicas=2 | came 0 1 1 | took 0 {DEADLINE_S / 3 + 3 * deadlines.STOP_GRACE_S} | "
        "says 1 was not done when its turn of 20.0 s ended"),
    **{f"replicas that take turns read from those that had theirs {way}": (f"trainers=1 replicas=3 relay at_once=1 {way}",
        f"call | took 0 1 | routes {first} relay relay") for way, first in (("", "gloo"), ("pulled", "peer"))},
    # ---- routes
    **{f"{workers} workers pull everything from {trainers} trainers, and the report says so":
        (f"trainers={trainers} workers={workers} replicas={replicas} pulled", "call | all pulled | call | all pulled | explain pulled by "
         f"the destination | linkless | epochs {'1 ' * replicas}") for trainers, workers, replicas in ((3, 2, 2), (1, 1, 1))},
    "storages that moved are mapped again by all ranks; those of a worker concern its own replica":
        ("replicas=2 pulled", "change t0 move | call | all pulled | epochs 2 2 | change t1 move | call | all pulled | epochs 3 3 | "
         "change t0 move | change t1 move | call | all pulled | epochs 4 4 | linkless | mapped 4 | change w0.0 moves | call | commits | "
         "epochs 5 4 | force t1 | call | commits | epochs 6 5"),
    # ---- replicas that others could read from
    **{f"a replica that fails before bytes move is gone around in the same refit, in a {form}": (f"{three} {way}",
        "error 1 pause | call min_replicas=2 | came 1 0 1 | reads 2 0 | call | commits | formed")
       for three in ("trainers=1 workers=1 replicas=3 relay",) for form, way in (("chain", "pulled"), ("ring", ""))},
    **{f"a replica that is late takes nothing from the trainers, and holds up nobody, in a {form}": (f"{three} {way}",
        f"slow 1 pause 9 | call min_replicas=2 | wait {deadlines.TOGETHER_S + 0.1} | holds 2 2 | reads 2 0 | came 1 1 1 | "
        f"routes {routes} | call | commits | formed") for three in ("trainers=1 workers=1 replicas=3 relay",)
       for form, way, routes in (("chain", "pulled", "peer relay relay"), ("ring", "", "gloo+relay relay gloo+relay"))},
    # ---- first copies that are under way
    "a donor that a refit writes while it is read costs the copy, and no refit waits": ("replicas=2 pulled",
        "hold | again 1 | copying | call min_replicas=1 | locked 0 | uncommittable | free | came 1 1 | "
        f"took 0 {SOON_S}"),
    # ---- many replicas
    "lanes that end within the hold say so once, and one that hangs holds up no other for longer":
        ("replicas=3 holds", "call | commits | dones 1 1 | fault t0 moving wait | call | commits | dones 2 1"),
    "lanes of a small job say at once that they have ended": ("replicas=3", "call | commits | dones 3 3"),
    # ---- the rest
    "a call ends at once when a trainer dies while no replica is there":
        ("trainers=3", "die c0 | quiet | call 0 min_replicas=0 | quiet | die t1 | took 0 0.1"),
    "what an engine in FP8 needs, and tells while bytes move by the old catalog, waits until the next":
        ("replicas=2 late_fp8", "die w1.0 | fault w0.0 commit wait | call min_replicas=1 | phase 0 committing | again 1 | derived | "
         "wait 1 | catalog 1 | came 1 0 | quiet | catalog 1 | call min_replicas=1 | ended | catalog 2"),
    **{f"a refit that came to nothing leaves the label that it found: {found}": ("trainers=1", f"label 0 {found} | again 0 | quiet | "
        f"{nothing} | labels {left} | call version=a | commits | {nothing} | labels a")
       for found, left in (("checkpoint-900", "checkpoint-900"), ("xfer:mixed", "xfer:unknown"))
       for nothing in ("prepare t0 | armed | fault t0 drain raise | call | fails at drain | quiet | paused 0",)},
    "a layout that changes while a replica is planned is planned again at once":
        ("replicas=2", "again 1 | phase 1 planning | stop w1.0 w1.1 | change t0 turn | call | quiet | anew 1 | go | commits"),
    **{f"processes of a replica that fails at {point} while it joins hear why at once": ("replicas=2",
        f"fault w1.1 {point} raise | again 1 | phase 1 joining | call 0 min_replicas=1 | quiet | call 1 min_replicas=1 | ended | "
        f"told 1 at {point} | without 1 at {point} | call min_replicas=1 | without 1 at {point}") for point in ("read", "plan", "link")},
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
        ("replicas=2", "slow 0 resume 20 | call deadline_s=1 min_replicas=1 | ended | call min_replicas=1 | without 0 is put aside | "
         "took 0 0 | call deadline_s=1 | fails bringing its engine back | wait 20 | call min_replicas=1 | commits"),
    "a replica that joins while weights are released is refitted":
        ("replicas=2 pulled", "release 0 | quiet | again 0 | quiet | release 1 | quiet | again 1 | quiet | call | commits"),
    "an engine that comes new into a refit hands on nothing":
        ("trainers=1 workers=1 replicas=2 pulled relay", "slow 1 pause 4 | call min_replicas=1 | wait 2.5 | die w0.0 | quiet | again 0 | "
         "commits"),
    "a call that comes while the refit before it is undone begins when it has been":
        ("", "fault t1 drain raise | stop c0 | call deadline_s=2 | fails at drain | call 0 | quiet | go | call 1 | commits"),
    "a rank that calls anew without a word ends the call that it left":
        ("", "call 1 | quiet | interrupt 0 | call 0 | soon 1 | call 1 | commits"),
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
    "a call that waits for a refit that is being undone ends at its deadline":
        ("", "stop c0 | call 1 | quiet | interrupt 0 | call 0 deadline_s=1 | soon 0 | go | soon 1"),
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
    "release 0 | quiet | change t1 move | fault w0.1 arm raise | call verify=0 | ended | change t0 turn | release 1 | quiet",
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


def raises(call: Callable[[], object], *text: str) -> bool:
    with pytest.raises(XferError, match=" ".join(text)):
        call()
    return True


def told_as_pulled(report) -> bool:
    """Whether workers pulled all bytes, by every way in which a report says so."""
    told = sum(r.bytes for o in report.outcomes for r in o.routes), report.flatten()["xfer/route/peer_bytes"]
    return (
        {*kinds(report)} == {"peer"}
        and told == (report.bytes, report.bytes)
        and "peer: " in report.routes()
        and report.bytes > 0
    )


def dones(job: Job, who: str) -> int:
    """How many messages of this process said in the last refit that lanes of it have ended."""
    said, last = [x for c in job.sim.channels if c.who == who for x in c.said], max(job.coordinator.refits.finished)
    return sum(isinstance(x, m.Done) and x.attempt == last for x in said)


def copied(job: Job) -> list:
    """What first copies that are under way do."""
    return [p for c in job.coordinator.copies.values() for p in c.parts.values()]


def last_two(job: Job) -> list[list]:
    """What each rank heard in its last call and in the one before. A rank whose weights nobody has read may hear in its next call that
    another one failed."""
    job.ended()
    return [[job.ends[i, job.calls[i] - 1], job.ends[i, job.calls[i]]] for i in range(job.trainers)]


def options(words: Iterable[str]) -> dict[str, object]:
    """`name=value`; `name` alone is true."""
    words_ = {"": True, "True": True, "False": False}
    value = lambda v: words_[v] if v in words_ else int(v) if v.isdigit() else float(v) if "." in v else v  # noqa: E731
    return {k: value(v) for k, _, v in (w.partition("=") for w in words)}


HAPPENS: dict[str, Callable[..., object]] = {  # beside the methods of a job and of its simulation
    "call": lambda job, *a: call(job, *(int(x) for x in a if x.isdigit()), **options(x for x in a if "=" in x)),
    "ended": lambda job: (job.ended(SOON_S), job.faults.clear()),
    "prepare": lambda job, who: job.sessions[int(who[1])].prepare(),
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
    "trains": lambda job, seconds: setattr(job, "trains_s", float(seconds)),
    "hold": lambda job: cpu_peer.Hold.begin(),
    "free": lambda job: cpu_peer.Hold.clear(),
    "copying": lambda job: job.sim.until(lambda: cpu_peer.Hold.reached.is_set() and any(p.moving for p in copied(job))),
    "locked": lambda job, replica: job.sim.until(lambda: job.engines[int(replica)].takers[0].locked),
    "derived": lambda job: job.sim.until(lambda: job.coordinator.derived),
    "label": lambda job, replica, text: setattr(job.engines[int(replica)], "label", text),
    "force": lambda job, who: setattr(job.sessions[int(who[1])].lanes[0].plane._routed.export, "forced", True),
}  # fmt: skip
HOLDS: dict[str, Callable[..., bool]] = {
    "fails": lambda job, *text: all(" ".join(text) in says(end) for end in job.ended()),
    "commits": lambda job: all(o.committed for end in job.ended(5 * SOON_S) for o in end.outcomes),
    "without": lambda job, replica, *text: all(
        not end.outcomes[int(replica)].committed and " ".join(text) in says(end) for end in job.ended(SOON_S)),
    "told": lambda job, replica, *text: job.controllers[int(replica)]._phase is ControllerPhase.OVER and all(
        not s.joined and " ".join(text) in str(s.error) for s in job.engines[int(replica)].sessions),
    "came": lambda job, *some: all([str(int(o.committed)) for o in end.outcomes] == [*some] for end in job.ended()),
    "says": lambda job, whether, *text: all((" ".join(text) in says(end)) == bool(int(whether)) for end in job.ended()),
    "pending": lambda job: all(end.pending for end in job.ended()),
    "took": lambda job, least, most: (job.ended(), float(least) <= job.sim.now - job.began <= float(most))[1],
    "published": lambda job, least, most: len(job.published) == job.trainers and all(
        float(least) <= x <= float(most) for x in job.published.values()),
    "undrained": lambda job, whether: all(
        getattr(end, "drained", True) != int(whether) if isinstance(end, XferError) else whether == "0" for end in job.ended()),
    "heard": lambda job, *text: all(" ".join(text) in str(next(x for x in last if isinstance(x, XferError))) for last in last_two(job)),
    "before": lambda job, version: all(
        end.before is None if version == "-" else end.before.version == int(version)
        and end.flatten()["xfer/before/fence_s"] == end.before.fence_s > 0 for end in job.ended()),
    "raises": lambda job, who, *text: raises(lambda: job.closes(int(who[1])), *text),
    "settles": lambda job, *text: all(raises(session.settle, *text) for session in job.sessions),
    "unthreaded": lambda job: not [t.name for t in job.sim.threads if t.who.startswith("trainer")],
    "torn": lambda job, replica, worker: (e := job.engines[int(replica)]).paused and job.controllers[int(replica)].torn and bool(
        e.takers[int(worker)].live["norm"].isnan().all()),
    "unscratched": lambda job: not any(s._lane_.plane.extra_bytes for e in job.engines for s in e.sessions),
    "routes": lambda job, *wanted: kinds(job.ended()[0]) == [*wanted],
    "all": lambda job, _: all(end.verified and told_as_pulled(end) for end in job.ended()),
    "explain": lambda job, *text: " ".join(text) in job.sessions[0].explain(),
    "linkless": lambda job: all(isinstance(s.lanes[0].plane._link, routes.NoLink) for s in job.sessions),
    "mapped": lambda job, count: len(cpu_peer.MAPPED) == int(count),
    "epochs": lambda job, *wanted: job.epochs() == [int(x) for x in wanted],
    "reads": lambda job, replica, *others: job.order()[int(replica)] == [int(x) for x in others],
    "formed": lambda job: job.order() == formed(bool(job.host_pull), range(job.replicas), job.replicas)[1],
    "holds": lambda job, replica, version: {t.held(job.last) for t in job.engines[int(replica)].takers} == {int(version)},
    "uncommittable": lambda job: all(p.error is not None for p in copied(job)),
    "dones": lambda job, *counts: [dones(job, f"trainer {i}") for i in range(job.trainers)] == [int(n) for n in counts],
    "catalog": lambda job, number: job.coordinator.generation == int(number),
    "labels": lambda job, text: [e.label for e in job.engines] == [text],
    "soon": lambda job, rank: job.sim.block(lambda: int(rank) not in job.running, job.sim.now + SOON_S),
    "paused": lambda job, *flags: [e.paused for e in job.engines] == [f == "1" for f in flags] * (len(job.engines) // len(flags)),
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
    fp8, late = made.pop("fp8", False), made.pop("late_fp8", False)
    forms = [None, None, ScaleRule.IEEE] if late else [ScaleRule.IEEE if fp8 else None]
    with after_one_refit(**made, forms=forms) as job:
        for step in steps.split(" | "):
            verb, *args = step.split()
            if verb in HOLDS:
                assert HOLDS[verb](job, *args), (step, job.ends)
            elif verb in HAPPENS:
                HAPPENS[verb](job, *args)
            else:
                getattr(job.sim if hasattr(job.sim, verb) else job, verb)(
                    *(float(x) if "." in x else int(x) for x in args)
                )
