"""Relay chains (`Direct(relay=True)`): every byte leaves the trainers once, and a failure stops only the replicas behind it.

Workers read each other's memory for real (transport/peer_host.py), or, where a pull has to be stopped in its middle, through
tests/support/cpu_peer.py. The same on GPUs: test_gpu_refit.py.
"""

from __future__ import annotations

import sys
import threading
import time

import pytest

from tests.support.cpu_peer import MAPPED, Hold, peers  # noqa: F401
from tests.support.world import ToyEngine, World, good, right, until_true
from xfer.coordinator import relays
from xfer.coordinator.deadlines import CALL_GRACE_S
from xfer.errors import DeadlineExceeded, RefitFailed, XferError
from xfer.transport import peer_host, relay_place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")


@pytest.fixture(autouse=True)
def everything_is_read(monkeypatch):
    """In about ten parts."""
    monkeypatch.setattr(peer_host, "SHORTEST", 2)
    monkeypatch.setattr(relay_place, "PART_BYTES", 100)


def chain(replicas: int, trainers: int = 1, workers: int = 1, **more) -> World:
    return World(trainers, workers, replicas, host_pull=True, relay=True, **more)


def ways(report) -> list[dict[str, int]]:
    """Bytes by route, for each replica."""
    return [{r.route: r.bytes for r in o.routes} for o in report.outcomes]


def kinds(report) -> list[str]:
    return ["+".join(sorted(x)) for x in ways(report)]


def order(w: World) -> list[int | None]:
    """The replica from which each replica reads."""
    return [r.before and r.before[0] for r in w.coordinator.replicas.values()]


def steps(w: World, replica: int):
    return w.lane(replica).plane._routed.place.steps


@pytest.mark.parametrize("shape", [(1, 2, 4), (3, 2, 2), (2, 2, 1)])
def test_each_byte_leaves_the_trainers_once(shape):
    trainers, workers, replicas = shape
    with chain(replicas, trainers, workers) as w:
        for version in (1, 2):
            report = w.commits(version, verify=version != 2)
            one = report.outcomes[0].bytes_moved
            assert ways(report) == [{"peer": one}, *[{"relay": one}] * (replicas - 1)] and one > 0
        assert order(w) == [None, *range(replicas - 1)]
        opened = w.epochs()
        w.commits(3)
        assert w.epochs() == opened, "routes are opened once"


def test_a_verified_chain_sums_what_is_whole_while_the_rest_comes(monkeypatch):
    with chain(3, workers=2) as w:
        w.commits(1, verify=True)
        sums = [t.side._early[1] for e in w.engines for t in e.sessions]
        assert all(s is not None and len(s.first) for s in sums)
        told = {id(s): [] for s in sums}
        for s in sums:
            s._known = 0
            watched = lambda wave, stream, s=s, f=s.after: (told[id(s)].append(wave), f(wave, stream))  # noqa: E731
            monkeypatch.setattr(s, "after", watched)
        w.commits(2, verify=True)
        for s in sums:
            assert told[id(s)] == sorted(told[id(s)]) and s._part < max(told[id(s)])
            assert s._known == s._first.values()[0] != 0


def test_parts_are_handed_on_as_they_come(monkeypatch):
    """Also when the replicas behind open their routes anew: they then hear of the parts that are ready by then."""
    monkeypatch.setattr(relay_place, "PART_BYTES", 2048)
    with chain(3, shapes={"layers.0.w": (512, 24), "embed": (36, 8), "norm": (12,)}) as w:
        w.commits(1)
        heard, said = {1: [], 2: []}, []
        for i, some in heard.items():
            lane = w.lane(i)
            hear = lambda message, f=lane.part_ready, some=some: (some.append(message.part), f(message))  # noqa: E731
            monkeypatch.setattr(lane, "part_ready", hear)
        w.sessions[0].prepare()  # all arm: else one may go around another
        until_true(w.armed)
        w.commits(2)
        parts = {i: [p for p in some if p != relays.ALL_PARTS] for i, some in heard.items()}
        assert parts == {1: list(range(12)), 2: list(range(12))}
        plane = w.lane(0).plane
        say = lambda run, part, f=plane._say_part_ready: (said.append(part), f(run, part))  # noqa: E731
        monkeypatch.setattr(plane, "_say_part_ready", say)
        w.sessions[0].release()
        w.commits(3)
        assert said == parts[1]


def test_replicas_of_another_layout_stand_in_chains_of_their_own():
    with chain(4, engines=[ToyEngine(n) for n in (2, 1, 2, 1)]) as w:
        for version in (1, 2):
            assert kinds(w.commits(version)) == ["peer", "peer", "relay", "relay"]
        assert order(w) == [None, None, 0, 1]


def test_what_is_sent_goes_to_every_replica_and_what_is_read_is_handed_on(monkeypatch):
    monkeypatch.setattr(peer_host, "SHORTEST", 1 << 20)  # columns are no single runs
    with chain(3, trainers=2, workers=2) as w:
        for version in (1, 2):
            assert kinds(w.commits(version)) == ["gloo+peer", "gloo+relay", "gloo+relay"]


def test_a_worker_that_cannot_read_from_the_one_before_reads_from_the_trainers(monkeypatch, caplog):
    mapped = relay_place.RelayPlace._map

    def refused(self, before, outside, wanted):
        mapped(self, before, outside, wanted)
        self.why = "refused by the test"

    monkeypatch.setattr(relay_place.RelayPlace, "_map", refused)
    with chain(2) as w:
        assert kinds(w.commits(1)) == ["peer", "peer"]
    assert "pulls from the trainers, not from the replica before: refused by the test" in caplog.text


@pytest.mark.usefixtures("peers")
def test_storages_that_move_are_handed_on_from_where_they_are_and_released_before_they_are_freed():
    """A trainer's storages move, then those of a replica in the middle. The old ones hold NaN."""
    with chain(3, workers=2) as w:
        w.commits(1)
        w.sources[0].move()
        w.commits(2)
        for t in w.engines[1].takers:
            for name, old in list(t.live.items()):
                t.live[name] = old.clone()
                old.fill_(float("nan"))
            t.spare = t.spare.clone()
        assert kinds(w.commits(3)) == ["peer", "relay", "relay"]
        w.sessions[0].release()
        assert not MAPPED
        w.commits(4)


@pytest.mark.usefixtures("peers")
def test_trainers_may_step_when_the_first_of_the_chain_has_everything():
    """The others read from engines: a trainer that overwrites its weights changes nothing for them."""
    with chain(2) as w:
        w.commits(1)
        waits, let = threading.Event(), threading.Event()
        there = steps(w, 1).there
        steps(w, 1).there = lambda run, part: (waits.set(), let.wait(10), there(run, part))
        results = w.start(2, wait="sources", verify=False)
        assert waits.wait(10)
        good(results(10))  # else the sources were held for a replica that does not read them
        w.sources[0].set(9)
        let.set()
        w.sessions[0].settle()
        right(w, 2)
        w.commits(3)


@pytest.mark.usefixtures("peers")
def test_a_replica_that_is_lost_in_its_middle_takes_along_those_behind_it_and_no_other():
    with chain(4) as w:
        w.commits(1)
        stuck, reached = steps(w, 1), threading.Event()
        before, mapped = stuck.before, w.lane(2).plane._routed.place.mapping.number

        def stand(wave, stream):
            if wave > 3:
                reached.set()
                while not stuck._cancelled():
                    time.sleep(0.001)
            before(wave, stream)

        stuck.before = stand
        w.sessions[0].prepare()
        until_true(w.armed)
        results = w.start(2, min_replicas=1)
        assert reached.wait(10) and mapped in MAPPED
        until_true(lambda: all(w.engines[i].takers[0].locked for i in (2, 3)))  # they have begun to write
        w.lose(1)
        report = good(results(20))
        assert [o.committed for o in report.outcomes] == [True, False, False, False]
        right(w, 2, [0])
        for i in (2, 3):
            assert f"replica {i} takes its weights from replica {i - 1}" in str(report.outcomes[i].error)
            assert w.engines[i].takers[0].live["norm"].isnan().all(), "torn, and serves NaN"
        until_true(lambda: mapped not in MAPPED)
        report = w.commits(3, [0, 2, 3], min_replicas=3)
        assert order(w)[2:] == [0, 2] and kinds(report) == ["peer", "", "relay", "relay"]
        w.come(1).wait_ready(20)  # back in its place, in another engine
        assert kinds(w.commits(4)) == ["peer", "relay", "relay", "relay"] and order(w) == [None, 0, 1, 2]


@pytest.mark.parametrize("fails", [True, False])
def test_a_replica_that_fails_or_is_late_before_bytes_move_is_gone_around(monkeypatch, fails):
    """In the same refit, those behind it read from another replica; a late one follows."""
    monkeypatch.setattr(relays, "TOGETHER_S", 0.3)
    with chain(3) as w:
        w.commits(1)
        pause, let = w.engines[1].pause, threading.Event()
        if fails:
            w.engines[1].fail["pause"] = XferError("the engine does not pause")
        else:
            w.engines[1].pause = lambda timeout: (let.wait(10), pause(timeout))
        results = w.start(2, min_replicas=2)
        until_true(lambda: not w.engines[2].takers[0].wrong(2))
        assert order(w)[2] == 0
        let.set()
        report = good(results(20))
        assert kinds(report) == ["peer", "" if fails else "relay", "relay"]
        right(w, 2, [0, 2] if fails else None)
        w.engines[1].pause = pause
        w.commits(3)
        assert order(w) == [None, 0, 1]


def test_an_engine_that_comes_new_into_a_refit_hands_on_nothing():
    """The one before it committed in this refit, died, and came back with other weights, before the next one armed."""
    with chain(2) as w:
        w.commits(1)
        pause, let = w.engines[1].pause, threading.Event()
        w.engines[1].pause = lambda timeout: (let.wait(20), pause(timeout))
        results = w.start(2, verify=False, min_replicas=1)
        first = until_true(lambda: w.coordinator.refit).parts[0]
        until_true(lambda: first.over)
        w.lose(0)
        until_true(lambda: w.phase(0) == "lost")
        w.come(0)
        until_true(lambda: w.phase(0) == "ready")
        let.set()
        report = good(results(20))
        assert first.error is None and kinds(report)[1] == "peer"
        right(w, 2, [1])


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_that_waits_for_parts_that_never_come_ends_at_the_deadline(hangs):
    """The one before it hangs, or its messages are lost."""
    with chain(2) as w:
        w.commits(1)
        if hangs:
            Hold.begin()
            texts = ["replica 0 worker 0: still moving", "takes its weights from replica 0, which failed"]
        else:
            steps(w, 1).there = lambda run, part: None
            texts = ["1 of 2 replicas committed", "replica 1 worker 0: still moving", "behind replica 0"]
        w.fails(2, RefitFailed | DeadlineExceeded, *texts, within=2.0 + CALL_GRACE_S, deadline_s=2.0)
        Hold.clear()
        w.commits(3)
