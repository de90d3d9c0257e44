"""Routes in sessions: pulls (by cpu_peer.py, as by CUDA IPC) and sends, storages that move, release, and pulls that fail."""

import sys
import threading
import time

import pytest

from tests.support import cpu_peer
from tests.support.cpu_peer import MAPPED, REFUSED, Hold, peers
from tests.support.packed_world import PackedWorld
from tests.support.simulation import simulated
from tests.support.world import SHAPES, World, good, until_true
from xfer.background import BackgroundCall
from xfer.coordinator import messages as m
from xfer.direct.plane import DirectPlane
from xfer.errors import DeadlineExceeded, PeerLost
from xfer.packed.plane import PackedPlane
from xfer.participants import refit
from xfer.participants.lane import Lane
from xfer.transport import peer_host, routes

pytestmark = pytest.mark.usefixtures(simulated.__name__, peers.__name__)


def by_route(report) -> dict[str, int]:
    out: dict[str, int] = {}
    for o in report.outcomes:
        for r in o.routes:
            out[r.route] = out.get(r.route, 0) + r.bytes
    return out


def refuse_all(trainers: int) -> None:
    REFUSED.update((r, i) for r in range(trainers) for i in range(len(SHAPES)))


# ---- what goes which way


@pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")
def test_host_memory_is_read_by_the_workers_themselves(monkeypatch):
    """The real route of CPUs: workers read most bytes; rows of scattered bytes are sent."""
    monkeypatch.setitem(routes.PEERS, "cpu", peer_host)
    for shortest, ways in ((2, {"peer"}), (1 << 20, {"peer", "gloo"})):
        monkeypatch.setattr(peer_host, "SHORTEST", shortest)
        with World(2, 2) as w:
            for version in (1, 2):
                sent = by_route(report := w.commits(version))
                assert sent.keys() == ways and min(sent.values()) > 0 and sum(sent.values()) == report.bytes


def test_what_cannot_be_mapped_is_sent_and_the_reason_is_told():
    REFUSED.update({(0, 0), (0, 2)})
    with World(2, 2) as w:
        sent = by_route(report := w.commits(1))
        plans = [s._lane_.plane._routed.plan for e in w.engines for s in e.sessions]
        assert sent == {"peer": sum(p.pulled_in for p in plans), "gloo": sum(p.p2p_in for p in plans)}
        assert min(sent.values()) > 0 and sum(sent.values()) == report.bytes
        assert ["refused by the test" in s.explain() for s in w.sessions] == [True, False]
        REFUSED.add((1, 0))
        w.sources[1].move()  # routes are opened again, with less to pull, over the link that stands
        assert by_route(w.commits(2))["gloo"] > sent["gloo"]


# ---- release


def given_up(w: World, deadline_s: float, match: str = "unmap") -> None:
    """A release that is not answered in time."""
    w.sessions[0].deadline_s = deadline_s
    with pytest.raises(DeadlineExceeded, match=match):
        w.sessions[0].release()
    w.sessions[0].deadline_s = w.deadline_s


@pytest.mark.parametrize("made", [World, PackedWorld])
def test_a_worker_that_did_not_answer_a_release_is_asked_again_by_the_next(monkeypatch, made):
    late, plane = [True], DirectPlane if made is World else PackedPlane
    monkeypatch.setattr(plane, "unmapped", property(lambda p: not (late and p.side.role == "worker")))
    with made(trainers=1, workers=1) as w:
        w.commits(1)
        given_up(w, 1.0)
        w.commits(2)
        late.clear()
        for version in (3, 4):
            w.sessions[0].release()
            w.commits(version)


def test_release_needs_nothing_of_a_replica_that_has_not_come():
    w = PackedWorld(trainers=1, workers=1, replicas=2, deadline_s=5.0, wait=False)
    serve = w.serve
    w.serve = lambda engine, i: serve(engine, i) if i == 0 else None
    w.connect()
    w.controllers[0].wait_ready(5.0)
    w.sessions[0].release()
    w.controllers[1] = serve(w.engines[1], 1)
    w.controllers[1].wait_ready(5.0)
    assert w.commits(2).committed == 2
    w.close()


def test_a_release_that_was_given_up_while_a_replica_was_planned_closes_nothing_of_a_later_refit(monkeypatch):
    plan, post, go_on, asked = Lane._plan, Lane.post, threading.Event(), []
    with World(trainers=1, workers=1, replicas=2, first_copies=False) as w:
        w.commits(1)
        w.leave(1)
        monkeypatch.setattr(Lane, "_plan", lambda lane, x: (lane._role == "trainer" or go_on.wait(60), plan(lane, x)))
        monkeypatch.setattr(Lane, "post", lambda lane, x: (asked.append(x), post(lane, x)))
        w.come(1)
        until_true(lambda: w.phase(1) == "planning" and w.sessions[0].lanes[1].wait_idle(0.0))
        given_up(w, 0.3)
        good(w.refit(2, min_replicas=1, deadline_s=1.0))  # the replica that joins is waited for so long
        go_on.set()
        w.controllers[1].wait_ready(20.0)
        time.sleep(0.2)
        assert not any(isinstance(x, m.CloseRoutes) for x in asked)
        assert w.commits(3).committed == 2


# ---- pulls that end badly


def not_drained(results: list) -> None:
    assert all(isinstance(r, PeerLost) and not r.drained and "replica 0 worker 0" in str(r) for r in results), results


def test_a_pull_that_does_not_stop_quarantines_its_sources_and_no_refit_runs_beside_it(monkeypatch):
    """Both write the same storages: the old pull would tear the new version after its commit."""
    monkeypatch.setattr(refit, "READERS_S", 0.2)
    with World(2, 1) as w:
        w.commits(1)
        Hold.begin(deaf=True)
        late = set(MAPPED)
        kept = [s.side._kept for s in w.sessions]
        for version in (2, 3):
            not_drained(w.refit(version, deadline_s=2.5))
            assert all(len(k) == version - 1 for k in kept), "quarantined storages are kept alive"
        released = BackgroundCall(lambda: w.on_all(lambda i: w.sessions[i].release()))
        assert not released.ended(time.monotonic() + 0.5) and late <= MAPPED, "said to be unmapped while it is read"
        Hold.clear()
        assert released.ended(time.monotonic() + 20) and not MAPPED
        assert all(kept), "no worker has said more than that of its own mappings"
        w.commits(4)
        assert not any(kept), "kept for ever"
        until_true(lambda: len(MAPPED) == 1 and not late & MAPPED, 20)


def test_a_reader_is_known_to_be_dead_only_on_this_host(monkeypatch):
    monkeypatch.setattr(refit, "_alive", lambda pid: False)
    assert not refit.still_reading([m.Reader("w", refit.host_identity(), 1)], 1.0)
    assert refit.still_reading([m.Reader("w", "another host", 1)], 0.01)


@pytest.mark.parametrize("wait", ["commit", "sources"])
def test_a_worker_that_vanished_while_it_read_is_suspected_though_its_replica_has_come_anew(monkeypatch, wait):
    """The worker is a thread here, so it lives on. The routes of the new one, which maps nothing, say that nobody pulls."""
    monkeypatch.setattr(refit, "READERS_S", 0.2)
    hold, reached, go_on, joined = (threading.Event() for _ in range(4))

    class FirstHeld(cpu_peer.Pull):
        def begin(self):
            self.held = hold.is_set() and threading.current_thread().name == "xfer-lane-0"
            super().begin()

        def _run(self):
            if self.held:
                reached.set()
                go_on.wait(40)
            super()._run()

    monkeypatch.setattr(cpu_peer, "Pull", FirstHeld)
    with World(1, 1, 2) as w:
        w.commits(1)
        hold.set()
        taker = w.engines[1].takers[0]
        run_recipes = taker.run_recipes
        taker.run_recipes = lambda: (joined.wait(20), run_recipes())
        results, first = w.start(2, wait=wait, min_replicas=1), w.engines[0]
        try:
            assert reached.wait(10)
            hold.clear()
            for s in first.sessions:
                s._party.channel.close()
            w.controllers[0].close()
            refuse_all(1)
            w.come(0).wait_ready(10)
            joined.set()
            not_drained(results(40))
            assert len(w.sessions[0].side._kept) == 1
        finally:
            go_on.set()
        w.commits(3)
        first.sessions[0].close()
