"""Routes in sessions: what is pulled and what is sent, storages that move, release, and pulls that end badly.

CUDA IPC is played by tests/support/cpu_peer.py; everything else is real. The same on GPUs: test_gpu_refit.py.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref

import pytest
import torch

from tests.support import cpu_peer, world
from tests.support.world import World, good, right, until_true
from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.participants import readers
from xfer.transport import peer_host, routes


@pytest.fixture(autouse=True)
def peers(monkeypatch):
    monkeypatch.setitem(routes.PEERS, "cpu", cpu_peer)
    monkeypatch.setattr(world, "HOST_PULL", True)
    cpu_peer.Hold.clear()
    cpu_peer.REFUSED.clear()
    cpu_peer.MAPPED.clear()
    yield
    cpu_peer.Hold.clear()


def by_route(report) -> dict[str, int]:
    out: dict[str, int] = {}
    for o in report.outcomes:
        for r in o.routes:
            out[r.route] = out.get(r.route, 0) + r.bytes
    return out


def epochs(w: World) -> list[int]:
    return [r.epoch for r in w.sessions[0]._server.coordinator.replicas.values()]


def move(source, names=None) -> None:
    """Other storages with the same values; whoever still reads the old ones gets NaN."""
    for name in names or list(source.params):
        old = source.params[name]
        source.params[name] = old.clone()
        old.fill_(float("nan"))


def test_verified_refits_by_pulls_and_then_by_the_link():
    """Sums that began while bytes were pulled are of that refit, not of the next one, which comes another way."""
    with World(2, 2) as w:
        for version in (1, 2):
            report = good(w.refit(version, verify=True))
            assert report.outcomes[0].verified and by_route(report)["peer"] > 0
        cpu_peer.REFUSED.update((r, i) for r in range(2) for i in range(64))
        old = [weakref.ref(s._lane_.plane._routed) for s in w.engines[0].sessions]
        move(w.sources[0])
        report = good(w.refit(3, verify=True))
        assert "peer" not in by_route(report)
        right(w, 3)
        cpu_peer.REFUSED.clear()
        move(w.sources[0])
        report = good(w.refit(4, verify=True))
        assert by_route(report)["peer"] > 0
        old += [weakref.ref(s._lane_.plane._routed) for s in w.engines[0].sessions]
        move(w.sources[0])
        good(w.refit(5, verify=False))
        right(w, 5)
        gc.collect()
        assert [r() for r in old] == [None] * 4, "routes that were opened anew are held, with their buffers"


def test_host_memory_is_read_by_the_workers_themselves(monkeypatch):
    """The real route of CPUs: most bytes come so, rows of scattered bytes are sent, and both say it."""
    if sys.platform != "linux":
        pytest.skip("process_vm_readv is Linux's")
    monkeypatch.setitem(routes.PEERS, "cpu", peer_host)
    monkeypatch.setattr(peer_host, "SHORTEST", 2)
    with World(2, 2) as w:
        for version in (1, 2):
            report = good(w.refit(version))
            right(w, version)
            assert by_route(report) == {"peer": report.bytes} and report.bytes > 0
        assert "pulled by the destination" in w.sessions[0].explain()
    monkeypatch.setattr(peer_host, "SHORTEST", 1 << 20)
    with World(2, 2) as w:
        for version in (1, 2):
            sent = by_route(good(w.refit(version)))
            right(w, version)
            assert sent["peer"] > 0 and sent["gloo"] > 0, "some rows are one run, columns of others are not"


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 2, 2), (1, 1, 1)])
def test_everything_is_pulled_and_the_report_says_so(shape):
    trainers, workers, replicas = shape
    with World(trainers, workers, replicas) as w:
        for version in (1, 2):
            report = good(w.refit(version))
            right(w, version)
            assert (
                report.verified and set(by_route(report)) == {"peer"} and by_route(report)["peer"] == report.bytes > 0
            )
            assert "peer: " in report.routes() and "GB/s" in report.routes()
            assert report.flatten()["xfer/route/peer_bytes"] == report.bytes
        assert epochs(w) == [1] * replicas, "nothing moved, so nothing is opened twice"
        assert "pulled by the destination" in w.sessions[0].explain()
        assert all(isinstance(s._party.lanes[0].plane._link, routes.NoLink) for s in w.sessions), "nobody needs a link"


def test_what_cannot_be_mapped_is_sent_and_the_reason_is_told():
    cpu_peer.REFUSED.update({(0, 0), (0, 2)})
    with World(2, 2) as w:
        assert [s.side._sums.replicas for s in w.sessions] == [{0}] * 2, "loaded beside NCCL that waits"
        report = good(w.refit(1))
        right(w, 1)
        sent = by_route(report)
        plans = [s._lane_.plane._routed.plan for e in w.engines for s in e.sessions]
        want = {"peer": sum(p.pulled_in for p in plans), "gloo": sum(p.p2p_in for p in plans)}
        assert sent == want and min(sent.values()) > 0 and sum(sent.values()) == report.bytes
        assert "refused by the test" in w.sessions[0].explain()
        assert "refused by the test" not in w.sessions[1].explain()
        cpu_peer.REFUSED.add((1, 0))
        move(w.sources[1])  # routes are opened again, with less to pull, over the link that stands
        again = good(w.refit(2))
        right(w, 2)
        assert by_route(again)["gloo"] > sent["gloo"]


def test_a_link_is_opened_when_storages_moved_to_where_they_cannot_be_mapped():
    with World(2, 2) as w:
        assert by_route(good(w.refit(1))).keys() == {"peer"}
        cpu_peer.REFUSED.update({(0, i) for i in range(4)})
        move(w.sources[1])
        report = good(w.refit(2))
        right(w, 2)
        assert by_route(report).keys() == {"peer", "gloo"}


def test_moved_storages_are_mapped_again_by_all_ranks_together():
    """One rank moves, all reopen, over the link that stands; then the other, then both, then a worker's."""
    with World(2, 2, 2) as w:
        good(w.refit(1))
        links = [s._party.lanes[r].plane._link for s in w.sessions for r in range(2)]
        for version, who in ((2, [0]), (3, [1]), (4, [0, 1])):
            for i in who:
                move(w.sources[i])
            report = good(w.refit(version))
            right(w, version)
            assert by_route(report) == {"peer": report.bytes}
            assert epochs(w) == [version] * 2
        assert [s._party.lanes[r].plane._link for s in w.sessions for r in range(2)] == links
        assert len(cpu_peer.MAPPED) == 4, "every worker has one mapping, old ones are closed"
        taker = w.engines[0].takers[0]
        taker.live["embed"] = torch.zeros_like(taker.live["embed"])
        taker.check = lambda: "same" if taker._ptrs == [t.data_ptr() for t in taker.live.values()] else "moved"
        good(w.refit(5))
        right(w, 5)
        assert epochs(w) == [5, 4], "a worker's storages concern its own replica only"


def test_new_memory_at_an_old_address_is_mapped_again():
    with World(2, 1) as w:
        good(w.refit(1))
        w.sessions[1]._party.lanes[0].plane._routed.export.forced = True
        good(w.refit(2))
        right(w, 2)
        assert epochs(w) == [2]


def test_a_move_in_an_attempt_that_fails_is_not_forgotten():
    """Both move; one of them raises before it says so. The next refit must open all routes again."""
    with World(2, 1) as w:
        good(w.refit(1))
        move(w.sources[0])
        w.sources[1].fail = RuntimeError("not now")
        assert all(isinstance(r, BaseException) for r in w.refit(2))
        w.sources[1].fail = None
        move(w.sources[1])
        good(w.refit(3))
        right(w, 3)


def test_release_unmaps_and_lets_go_and_the_next_refit_maps_again():
    with World(2, 2, 2) as w:
        for version in (1, 2):
            good(w.refit(version))
            assert len(cpu_peer.MAPPED) == 4
            before = [weakref.ref(t.untyped_storage()) for s in w.sources for t in s.params.values()]
            values = [{n: t.clone() for n, t in s.params.items()} for s in w.sources]
            answers = w.on_all(lambda i: w.sessions[i].release())
            assert answers == [None, None] and not cpu_peer.MAPPED
            for s in w.sources:
                s.params.clear()
            gc.collect()
            assert [r() for r in before] == [None] * len(before), "something of xfer still holds trainers' storages"
            for s, v in zip(w.sources, values):
                s.params = v
        good(w.refit(3))
        right(w, 3)


def test_release_twice_and_of_one_rank_only():
    with World(2, 1) as w:
        good(w.refit(1))
        w.sessions[0].release()
        w.sessions[0].release()
        assert not cpu_peer.MAPPED
        good(w.refit(2))
        right(w, 2)


def test_sources_are_free_only_when_no_taker_reads():
    with World(2, 2) as w:
        good(w.refit(1))
        cpu_peer.Hold.begin()
        returned = threading.Event()
        for t in w.engines[0].takers:
            t.installs_after(returned)
        for s in w.sources:
            s.set(2)
        answers: list = []
        t = threading.Thread(target=lambda: answers.extend(w.refit(wait="sources")))
        t.start()
        assert cpu_peer.Hold.reached.wait(10)
        time.sleep(0.3)
        assert not answers, "the trainers were let go while their storages were being read"
        cpu_peer.Hold.held.clear()
        t.join(20)
        returned.set()
        assert good(answers).pending
        for s in w.sources:
            s.set(9)  # must not be seen
        until_true(lambda: not any(t.locked for t in w.engines[0].takers), 20)
        right(w, 2)
        good(w.refit(3))
        right(w, 3)


def test_a_pull_is_stopped_when_its_replica_fails_and_the_next_refit_is_whole():
    with World(2, 2) as w:
        good(w.refit(1))
        cpu_peer.Hold.begin()
        began = time.monotonic()
        results = w.refit(2, deadline_s=1.0)
        assert all(isinstance(r, DeadlineExceeded) for r in results), results
        assert time.monotonic() - began < 8
        cpu_peer.Hold.held.clear()
        good(w.refit(3))
        right(w, 3)


def test_a_pull_that_does_not_stop_quarantines_its_sources(monkeypatch):
    monkeypatch.setattr(readers, "GRACE_S", 0.2)
    with World(2, 1) as w:
        good(w.refit(1))
        cpu_peer.Hold.begin(deaf=True)
        results = w.refit(2, deadline_s=2.5)
        assert all(isinstance(r, PeerLost) and not r.drained for r in results), results
        assert "replica 0 worker 0" in str(results[0])
        roots = [s.side._kept for s in w.sessions]
        assert all(len(q) == 1 for q in roots), "quarantined storages are kept alive"
        late = set(cpu_peer.MAPPED)
        released = threading.Thread(target=lambda: w.on_all(lambda i: w.sessions[i].release()))
        released.start()
        released.join(0.5)
        assert released.is_alive() and late == cpu_peer.MAPPED != set(), "said to be unmapped while it is read"
        cpu_peer.Hold.clear()
        released.join(20)
        assert not released.is_alive() and not cpu_peer.MAPPED
        assert all(len(q) == 1 for q in roots), "no worker has said more than that of its own mappings"
        good(w.refit(3))
        right(w, 3)
        assert not any(roots), "kept for ever"


def test_a_refit_does_not_run_beside_a_pull_that_was_left_over(monkeypatch):
    """It writes where that one does, and would be torn by it after it was installed."""
    monkeypatch.setattr(readers, "GRACE_S", 0.2)
    with World(2, 1) as w:
        good(w.refit(1))
        cpu_peer.Hold.begin(deaf=True)
        late = set(cpu_peer.MAPPED)
        for version in (2, 3):
            results = w.refit(version, deadline_s=2.5)
            assert all(isinstance(r, PeerLost) and not r.drained for r in results), results
        assert late <= cpu_peer.MAPPED
        cpu_peer.Hold.clear()
        good(w.refit(4))
        right(w, 4)
        until_true(lambda: len(cpu_peer.MAPPED) == 1 and not late & cpu_peer.MAPPED, 20)


def test_a_worker_that_vanished_while_it_read_is_told_from_one_that_is_dead(monkeypatch):
    """In this world workers are threads, so a worker whose connection breaks lives on: its sources stay suspect."""
    monkeypatch.setattr(readers, "GRACE_S", 0.2)
    with World(1, 1) as w:
        good(w.refit(1))
        cpu_peer.Hold.begin(deaf=True)
        answers: list = []
        t = threading.Thread(target=lambda: answers.extend(w.refit(2)))
        t.start()
        assert cpu_peer.Hold.reached.wait(10)
        w.engines[0].sessions[0]._party.channel.close()
        t.join(40)
        assert isinstance(answers[0], XferError), answers
        assert isinstance(answers[0], PeerLost) and not answers[0].drained, answers
        cpu_peer.Hold.clear()
        monkeypatch.setattr(readers, "_alive", lambda pid: False)
        assert not readers.still_reading([readers.m.Reader("w", readers.host_identity(), 1)])
        assert readers.still_reading([readers.m.Reader("w", "another host", 1)], 0.01)


@pytest.mark.parametrize("wait", ["commit", "sources"])
def test_a_worker_that_vanished_is_suspected_though_its_replica_has_come_anew_meanwhile(monkeypatch, wait):
    """Where that one maps nothing (it runs on another host), the lane's routes say that nobody pulls: not of this refit."""
    monkeypatch.setattr(readers, "GRACE_S", 0.2)
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
        good(w.refit(1))
        hold.set()
        taker, answers = w.engines[1].takers[0], []
        run_recipes = taker.run_recipes
        taker.run_recipes = lambda: (joined.wait(20), run_recipes())
        t = threading.Thread(target=lambda: answers.extend(w.refit(2, wait=wait, min_replicas=1)))
        try:
            t.start()
            assert reached.wait(10)
            hold.clear()
            w.engines[0].sessions[0]._party.channel.close()
            w.controllers[0].close()
            cpu_peer.REFUSED.update((0, i) for i in range(len(w.sources[0].params)))
            w.engines.append(world.ToyEngine(1))
            w.controllers[0] = w.serve(w.engines[2], 0)
            w.controllers[0].wait_ready(10)
            joined.set()
            t.join(40)
            assert isinstance(answers[0], PeerLost) and not answers[0].drained, answers
            assert "replica 0 worker 0" in str(answers[0]) and len(w.sessions[0].side._kept) == 1
        finally:
            go_on.set()
        good(w.refit(3))
        assert [w.engines[i].takers[0].wrong(3) for i in (1, 2)] == [[], []]
