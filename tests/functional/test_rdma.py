"""The peer route by NIXL (transport/peer_rdma.py), for real: UCX over TCP, in this process and between emulated hosts.

Real RDMA is not here: over TCP a thread of UCX in the source's process sends what the destination asks for.
"""

from __future__ import annotations

import signal
import sys

import pytest

from tests.functional.test_hosts import FAR, GRACE_S, NEEDED, SHORT, begin, good, in_time, no_mix, right
from tests.functional.test_session_routes import by_route
from tests.support.host_world import HostWorld
from tests.support.hosts import Cluster, missing
from tests.support.world import World, until_true
from xfer.routes import Direct
from xfer.transport import peer_rdma

NIXL = pytest.mark.skipif(bool(peer_rdma.missing()), reason=peer_rdma.missing())


def test_without_nixl_connect_refuses_and_a_rank_that_offers_nothing_is_sent_its_bytes(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nixl", None)  # importing it then fails, as where it is not installed
    wrong = Direct(rdma=True, relay=True).wrong(None, 2)
    assert len(wrong) == 2 and "relay=True" in wrong[0] and "pip install" in wrong[1], wrong
    with World(2, 2, rdma=True) as w:
        report = w.commits(1)
        assert by_route(report) == {"gloo": report.bytes} and "offers nothing by NIXL" in caplog.text


@NIXL
def test_refits_changes_and_moved_storages(monkeypatch):
    monkeypatch.setattr(peer_rdma, "SHORTEST", 2)
    with World(2, 2, 2, rdma=True) as w:
        for version in (1, 2, 3):
            report = w.commits(version, delta="auto")
            assert set(by_route(report)) == {"rdma"} and report.verified
        epochs = w.epochs()  # routes were opened again once already, for marks
        w.sources[0].move()
        assert set(by_route(w.commits(4))) == {"rdma"} and w.epochs() == [n + 1 for n in epochs]


@pytest.fixture
def world(tmp_path, request):
    """As of test_hosts.py, with workers that read by NIXL."""
    if why := missing():
        pytest.skip(why)
    with Cluster(4, mbit=getattr(request, "param", 16.0)) as c:
        c.show_nics()
        with HostWorld(c, tmp_path, trainers=2, workers=1, deadline_s=FAR, rdma=True) as w:
            good(w.meet())
            good(w.refit(1))
            right(w, 1)
            yield w


@NIXL
@pytest.mark.parametrize("world", [200.0], indirect=True)
def test_workers_read_every_byte_once_from_other_hosts(world):
    w, c = world, world.cluster
    for version in (2, 3):
        before = [c.bytes_in(h) for h in c.hosts]
        report = good(w.refit(version, verify=True))
        assert report["committed"] == [True, True] and [set(r) for r in report["routes"]] == [{"rdma"}] * 2, report
        right(w, version)
        for h, b in zip(c.hosts, before):
            needed, came = NEEDED * (h in c.hosts[2:]), c.bytes_in(h) - b
            assert needed <= came <= needed * 1.02 + 0.05 * NEEDED * (not needed), (h.name, came)
    w.trainers[0].value("change")  # storages that move are offered anew
    good(w.refit(5, verify=True))
    right(w, 5)


@NIXL
@pytest.mark.slow
def test_a_trainer_that_dies_in_mid_read_is_one_typed_error_in_time(world):
    w = world
    begin(w, 2, deadline_s=FAR)
    w.trainers[1].signal(signal.SIGKILL)
    for a in in_time(w.answers([0]), 20.0):
        assert a["kind"] == "raised" and a["type"] == "PeerLost" and "trainer 1" in a["text"], a
    assert w.trainers[1].dead()
    no_mix(w)
    w.quiet()
    good(w.meet())
    good(w.refit(3, deadline_s=FAR))
    right(w, 3)


@NIXL
@pytest.mark.slow
def test_a_cut_link_fails_its_replica_in_time_and_the_other_goes_on(world):
    w, c = world, world.cluster
    begin(w, 2, deadline_s=SHORT, min_replicas=1)
    c.cut(c.hosts[3])
    report = good(in_time(w.answers(), SHORT + GRACE_S))
    assert report["committed"] == [True, False] and "replica 1" in report["errors"][1], report
    right(w, 2, [0])
    c.mend(c.hosts[3])
    until_true(lambda: good(w.refit(3, deadline_s=FAR, min_replicas=1))["committed"] == [True, True], FAR)
    right(w, 3)


@NIXL
@pytest.mark.slow
def test_a_trainer_that_is_stopped_in_mid_read_goes_on_later(world):
    """Until it does, bytes may still arrive, and no refit is begun. Nothing of the old one arrives in the next."""
    w = world
    w.fault("trainers", "trainer:1:moving:stop@1")
    w.begin(2, deadline_s=SHORT)
    until_true(w.trainers[1].is_stopped, 20)
    answers = in_time(w.answers([0]), SHORT + GRACE_S)
    assert all(a["kind"] == "raised" and a["type"] in ("DeadlineExceeded", "PeerLost") for a in answers), answers
    w.trainers[1].signal(signal.SIGCONT)
    w.answers([1])
    no_mix(w)
    until_true(lambda: all(a["kind"] == "done" for a in w.refit(3, deadline_s=FAR)), FAR)
    right(w, 3)
