"""Replicas in a row (`connect(relay=True)`): every byte leaves the trainers once, and a failure takes along whom it must, nobody else.

Workers read each other's memory for real (transport/peer_host.py), or, where a pull has to be stopped in its middle, through
tests/support/cpu_peer.py. The same on GPUs: test_gpu_refit.py.
"""

from __future__ import annotations

import sys
import threading
import time

import pytest

from tests.support import cpu_peer
from tests.support.world import TOKEN, ToyEngine, World, good, right, until_true
from xfer.coordinator import relays
from xfer.coordinator.deadlines import CALL_GRACE_S
from xfer.errors import DeadlineExceeded, RefitFailed, XferError
from xfer.participants.controller import Controller
from xfer.transport import peer_host, relay_place, routes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")


@pytest.fixture(autouse=True)
def everything_is_read(monkeypatch):
    """In some ten parts."""
    monkeypatch.setattr(peer_host, "SHORTEST", 2)
    monkeypatch.setattr(relay_place, "PART_BYTES", 100)


@pytest.fixture
def holds(monkeypatch):
    """Pulls can be stopped in their middle."""
    monkeypatch.setitem(routes.PEERS, "cpu", cpu_peer)
    for clear in (cpu_peer.Hold.clear, cpu_peer.REFUSED.clear, cpu_peer.MAPPED.clear):
        clear()
    yield cpu_peer.Hold
    cpu_peer.Hold.clear()


def row_of(replicas: int, trainers: int = 1, workers: int = 2, **more) -> World:
    return World(trainers, workers, replicas, host_pull=True, relay=True, **more)


def ways(report) -> list[dict[str, int]]:
    """Bytes by route, for each replica."""
    return [{r.route: r.bytes for r in o.routes} for o in report.outcomes]


def order(w: World) -> list[int | None]:
    """Whom each replica stands behind."""
    return [r.before and r.before[0] for r in w.sessions[0]._server.coordinator.replicas.values()]


def arm(w: World) -> None:
    """All engines, before the next refit: else one may go around another that arms late."""
    w.sessions[0].prepare()
    coordinator = w.sessions[0]._server.coordinator
    until_true(
        lambda: coordinator.refit and all(len(r.armed) == r.replica.size for r in coordinator.refit.parts.values())
    )


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 2, 4), (3, 2, 2), (2, 2, 1)])
def test_each_byte_leaves_the_trainers_once(shape):
    trainers, workers, replicas = shape
    with row_of(replicas, trainers, workers) as w:
        for version in (1, 2, 3):
            report = good(w.refit(version, verify=version != 2))
            right(w, version)
            one = report.outcomes[0].bytes_moved
            assert ways(report) == [{"peer": one}, *[{"relay": one}] * (replicas - 1)] and one > 0
        assert order(w) == [None, *range(replicas - 1)]


def test_routes_of_a_row_are_opened_once():
    with row_of(3) as w:
        good(w.refit(1))
        coordinator = w.sessions[0]._server.coordinator
        opened = [r.epoch for r in coordinator.replicas.values()]
        assert order(w) == [None, 0, 1]
        good(w.refit(2))
        assert [r.epoch for r in coordinator.replicas.values()] == opened
        right(w, 2)


def test_a_verified_row_sums_what_is_whole_while_the_rest_comes(monkeypatch):
    with row_of(3) as w:
        good(w.refit(1, verify=True))
        sums = [t.side._early[1] for e in w.engines for t in e.sessions]
        assert all(s is not None and len(s.first) for s in sums)
        told = {id(s): [] for s in sums}
        for s in sums:
            s._known = 0
            watched = lambda wave, stream, s=s, f=s.after: (told[id(s)].append(wave), f(wave, stream))  # noqa: E731
            monkeypatch.setattr(s, "after", watched)
        good(w.refit(2, verify=True))
        right(w, 2)
        for s in sums:
            assert told[id(s)] == sorted(told[id(s)]) and s._part < max(told[id(s)])
            assert s._known == s._first.values()[0] != 0


LARGE = {"layers.0.w": (512, 24), "embed": (36, 8), "norm": (12,)}
"""Rows long enough to be cut into parts."""


def test_parts_are_handed_on_as_they_come(monkeypatch):
    """Also in a refit in which those that follow open their routes anew: what has come until then is told them then."""
    monkeypatch.setattr(relay_place, "PART_BYTES", 2048)
    with row_of(3, workers=1, shapes=LARGE) as w:
        good(w.refit(1))
        heard, said = {1: [], 2: []}, []
        for i, some in heard.items():
            lane = w.engines[i].sessions[0]._lane_
            monkeypatch.setattr(
                lane,
                "part_ready",
                lambda message, f=lane.part_ready, some=some: (some.append(message.part), f(message)),
            )
        arm(w)
        good(w.refit(2))
        right(w, 2)
        for some in heard.values():  # that its source has ended it may hear too late to need it
            assert [p for p in some if p != relays.ALL_PARTS] == list(range(12)), some
        parts, lane = [p for p in heard[1] if p != relays.ALL_PARTS], w.engines[0].sessions[0]._lane_
        monkeypatch.setattr(
            lane.plane,
            "_say_part_ready",
            lambda run, part, f=lane.plane._say_part_ready: (said.append(part), f(run, part)),
        )
        w.sessions[0].release()
        good(w.refit(3))
        right(w, 3)
        assert said == parts


def test_replicas_of_another_layout_stand_in_rows_of_their_own():
    engines = [ToyEngine(n) for n in (2, 1, 2, 1)]
    with row_of(4, engines=engines) as w:
        for version in (1, 2):
            report = good(w.refit(version))
            assert [[t.wrong(version) for t in e.takers] for e in engines] == [[[]] * n for n in (2, 1, 2, 1)]
            assert [set(x) for x in ways(report)] == [{"peer"}, {"peer"}, {"relay"}, {"relay"}]
        assert order(w) == [None, None, 0, 1]


def test_what_is_sent_goes_to_every_replica_and_what_is_read_is_handed_on(monkeypatch):
    monkeypatch.setattr(peer_host, "SHORTEST", 1 << 20)  # columns are no single runs
    with row_of(3, trainers=2) as w:
        for version in (1, 2):
            report = good(w.refit(version))
            right(w, version)
        assert [set(x) for x in ways(report)] == [{"peer", "gloo"}, *[{"relay", "gloo"}] * 2]


def test_a_worker_that_cannot_read_from_the_one_before_reads_from_the_trainers(monkeypatch, caplog):
    mapped = relay_place.RelayPlace._map

    def refused(self, before, outside, wanted):
        mapped(self, before, outside, wanted)
        self.why = "refused by the test"

    with monkeypatch.context() as patch:
        patch.setattr(relay_place.RelayPlace, "_map", refused)
        with row_of(2) as w:
            report = good(w.refit(1))
            right(w, 1)
            assert [set(x) for x in ways(report)] == [{"peer"}, {"peer"}]
    assert "pulls from the trainers, not from the replica before: refused by the test" in caplog.text


def test_storages_that_move_are_handed_on_from_where_they_are(holds):
    """A trainer's, then those of a replica in the middle: whoever read the old ones would read NaN."""
    with row_of(3) as w:
        good(w.refit(1))
        for name, old in list(w.sources[0].params.items()):
            w.sources[0].params[name] = old.clone()
            old.fill_(float("nan"))
        good(w.refit(2))
        right(w, 2)
        for t in w.engines[1].takers:
            for name, old in list(t.live.items()):
                t.live[name] = old.clone()
                old.fill_(float("nan"))
            t.spare = t.spare.clone()
        report = good(w.refit(3))
        right(w, 3)
        assert [set(x) for x in ways(report)] == [{"peer"}, {"relay"}, {"relay"}]


def test_trainers_may_step_when_the_first_of_the_row_has_everything(holds):
    """What the others read lies in engines: a trainer that overwrites its weights changes nothing for them."""
    with row_of(2, workers=1) as w:
        good(w.refit(1))
        waits, let = threading.Event(), threading.Event()
        steps = w.engines[1].sessions[0]._lane_.plane._routed.place.steps
        there = steps.there

        def late(run, part):
            waits.set()
            let.wait(10)
            there(run, part)

        steps.there = late
        results = []
        run = threading.Thread(target=lambda: results.append(w.refit(2, wait="sources", verify=False)))
        run.start()
        assert waits.wait(10)
        run.join(10)
        assert not run.is_alive(), "the sources were held for a replica that does not read them"
        w.sources[0].set(9)
        let.set()
        good(results[0])
        w.sessions[0].settle()
        right(w, 2)
        good(w.refit(3))
        right(w, 3)


def lose(w: World, i: int) -> None:
    """As if the processes of a replica had died."""
    w.controllers[i].close()
    for s in w.engines[i].sessions:
        s._party.channel.close()


def test_who_is_lost_in_its_middle_takes_along_those_behind_it_and_nobody_else(holds):
    with row_of(4, workers=1) as w:
        good(w.refit(1))
        results = []
        steps = [e.sessions[0]._lane_.plane._routed.place.steps for e in w.engines]
        before, reached = steps[1].before, threading.Event()

        def stuck(wave, stream):
            if wave > 3:
                reached.set()
                while not steps[1]._cancelled():
                    time.sleep(0.001)
            before(wave, stream)

        steps[1].before = stuck
        arm(w)
        run = threading.Thread(target=lambda: results.append(w.refit(2, min_replicas=1)))
        run.start()
        assert reached.wait(10)
        until_true(lambda: all(w.engines[i].takers[0].locked for i in (2, 3)))  # they have begun to write
        lose(w, 1)
        run.join(20)
        assert not run.is_alive()
        report = good(results[0])
        assert [o.committed for o in report.outcomes] == [True, False, False, False]
        right(w, 2, [0])
        assert "replica 2 takes its weights from replica 1, which failed" in str(report.outcomes[2].error)
        assert "replica 3 takes its weights from replica 2" in str(report.outcomes[3].error)
        assert all(w.engines[i].takers[0].live["norm"].isnan().all() for i in (2, 3)), "torn, and serves NaN"
        report = good(w.refit(3, min_replicas=3))
        right(w, 3, [0, 2, 3])
        assert order(w)[2:] == [0, 2] and [set(x) for x in ways(report)] == [{"peer"}, set(), {"relay"}, {"relay"}]
        # And back in its place, in another engine.
        w.engines[1] = ToyEngine(1)
        w.controllers[1] = Controller(w.engines[1], w.rendezvous, TOKEN, replica=1, deadline_s=w.deadline_s)
        w.controllers[1].wait_ready(20)
        report = good(w.refit(4))
        right(w, 4)
        assert order(w) == [None, 0, 1, 2] and [set(x) for x in ways(report)] == [{"peer"}, *[{"relay"}] * 3]


def test_who_fails_before_bytes_move_holds_up_nobody():
    """Those behind it find another one to stand behind, in the same refit."""
    with row_of(3, workers=1) as w:
        good(w.refit(1))
        w.engines[1].fail["pause"] = XferError("the engine does not pause")
        report = good(w.refit(2, min_replicas=2))
        assert [o.committed for o in report.outcomes] == [True, False, True]
        right(w, 2, [0, 2])
        assert order(w)[2] == 0 and set(ways(report)[2]) == {"relay"}
        good(w.refit(3))
        right(w, 3)
        assert order(w) == [None, 0, 1]


def test_who_does_not_arm_is_gone_around(monkeypatch):
    """Its engine takes its time to pause; those behind it take their weights elsewhere, and it follows when it can."""
    monkeypatch.setattr(relays, "TOGETHER_S", 0.3)
    with row_of(3, workers=1) as w:
        good(w.refit(1))
        pause, let = w.engines[1].pause, threading.Event()
        w.engines[1].pause = lambda timeout: (let.wait(10), pause(timeout))
        results = []
        run = threading.Thread(target=lambda: results.append(w.refit(2)))
        run.start()
        until_true(lambda: not w.engines[2].takers[0].wrong(2))  # it does not wait for one that does not arm
        assert not let.is_set() and order(w)[2] == 0
        let.set()
        run.join(20)
        report = good(results[0])
        right(w, 2)
        assert [set(x) for x in ways(report)] == [{"peer"}, {"relay"}, {"relay"}]
        w.engines[1].pause = pause
        good(w.refit(3))
        right(w, 3)
        assert order(w) == [None, 0, 1]


def test_an_engine_that_comes_new_into_a_refit_hands_on_nothing(monkeypatch):
    """The one before it had committed in this refit, died, and came back with other weights, before the next one armed."""
    with row_of(2, workers=1) as w:
        good(w.refit(1))
        pause, let = w.engines[1].pause, threading.Event()
        w.engines[1].pause = lambda timeout: (let.wait(20), pause(timeout))
        results = []
        run = threading.Thread(target=lambda: results.append(w.refit(2, verify=False, min_replicas=1)))
        run.start()
        attempt = until_true(lambda: w.sessions[0]._server.coordinator.refit)
        until_true(lambda: attempt.parts[0].over)
        assert attempt.parts[0].error is None
        lose(w, 0)
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[0].phase.value == "lost")
        w.engines[0] = ToyEngine(1)
        w.controllers[0] = Controller(w.engines[0], w.rendezvous, TOKEN, replica=0, deadline_s=w.deadline_s)
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[0].phase.value == "ready")
        let.set()
        run.join(20)
        report = good(results[0])
        assert set(ways(report)[1]) == {"peer"}
        right(w, 2, [1])


@pytest.mark.parametrize("hears", [True, False])
def test_who_waits_for_parts_that_never_come_ends_at_the_deadline(holds, hears):
    """The one before it hangs, or what it says is lost."""
    with row_of(2, workers=1) as w:
        good(w.refit(1))
        steps = w.engines[1].sessions[0]._lane_.plane._routed.place.steps
        if hears:
            holds.begin()
        else:
            steps.there = lambda run, part: None
        began = time.monotonic()
        (error,) = w.refit(2, deadline_s=3.0)
        text = str(error)
        assert isinstance(error, RefitFailed | DeadlineExceeded) and time.monotonic() - began < 3.0 + CALL_GRACE_S
        if hears:
            assert (
                "replica 0 worker 0: still moving" in text and "takes its weights from replica 0, which failed" in text
            )
        else:
            assert "1 of 2 replicas committed" in text and "replica 1 worker 0: still moving" in text
            assert "behind replica 0" in text
        holds.clear()
        good(w.refit(3))
        right(w, 3)


def test_a_replica_that_is_gone_is_unmapped_by_those_behind_it(holds):
    with row_of(2, workers=1) as w:
        good(w.refit(1))
        place = w.engines[1].sessions[0]._lane_.plane._routed.place
        assert place.mapping.number in cpu_peer.MAPPED
        lose(w, 0)
        until_true(lambda: place.mapping.number not in cpu_peer.MAPPED)
        report = good(w.refit(2, min_replicas=1))
        right(w, 2, [1])
        assert set(ways(report)[1]) == {"peer"}


def test_trainers_release_before_they_free(holds):
    with row_of(2, workers=1) as w:
        good(w.refit(1))
        w.sessions[0].release()
        assert not cpu_peer.MAPPED
        good(w.refit(2))
        right(w, 2)
