"""Relay chains and rings (`Direct(relay=True)`) of workers that read each other's memory for real (transport/peer_host.py). The first one
of a chain reads the trainers' memory; all of a ring receive over gloo.

Order and failures: test_session_cases.py. The same on GPUs: test_gpu_refit.py.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.cpu_peer import MAPPED, Hold, peers  # noqa: F401
from tests.support.world import ToyEngine, World, until_true
from xfer.plan import relay
from xfer.plan.relay import ALL_PARTS
from xfer.transport import p2p, peer_host, relay_place

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


def order(w: World) -> list[list[int]]:
    """By replica, the replicas from which it reads."""
    return [[i for i, _ in r.sources if i != r.index] for r in w.coordinator.replicas.values()]


def steps(w: World, replica: int):
    return w.lane(replica).plane._routed.place.steps


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
        parts = {i: sorted(set(some)) for i, some in heard.items()}
        assert parts == {i: [*range(11), ALL_PARTS] for i in (1, 2)}
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
        assert order(w) == [[], [], [0], [1]]


def test_what_the_first_replica_receives_is_handed_on_as_it_comes(monkeypatch):
    """If it reads another part of it. Every route to the others is the one from the replica before."""
    monkeypatch.setattr(peer_host, "SHORTEST", 1 << 20)  # columns are no single runs, and go by gloo
    monkeypatch.setitem(p2p.STEP_BYTES, "cpu", 64)
    with World(2, 2, 3, host_pull=True, relay=True) as w:
        one = w.commits(1, verify=True).outcomes[0].bytes_moved
        heard = []
        lane = w.lane(2)
        monkeypatch.setattr(lane, "part_ready", lambda m, f=lane.part_ready: (heard.append(m.part), f(m)))
        for version, verify in ((2, False), (3, True)):
            heard.clear()
            w.sessions[0].prepare()  # all arm: else the last one may begin when everything is there
            until_true(w.armed)
            report = w.commits(version, verify=verify)
            assert kinds(report) == ["gloo+peer", "relay", "relay"]
            assert [sum(x.values()) for x in ways(report)] == [one] * 3
            parts = [p for p in heard if p != ALL_PARTS]
            assert parts == sorted(set(parts)) and len(parts) > 4


@pytest.mark.parametrize("workers", [1, 2])
def test_replicas_that_only_receive_take_a_share_each_and_read_the_others_as_they_come(monkeypatch, workers):
    """Also in a verified refit, and when the routes were opened anew."""
    monkeypatch.setitem(p2p.STEP_BYTES, "cpu", 256)
    monkeypatch.setattr(relay, "GRAIN", 8)
    shapes = {"layers.0.w": (512, 24), "embed": (36, 8), "norm": (12,)}
    with World(2, workers, 3, relay=True, shapes=shapes) as w:
        one = w.commits(1).outcomes[0].bytes_moved
        heard, opened = [], [r.epoch for r in w.coordinator.replicas.values()]
        lane = w.lane(2)
        monkeypatch.setattr(lane, "part_ready", lambda m, f=lane.part_ready: (heard.append(m.part), f(m)))
        for version, verify in ((2, False), (3, True)):
            heard.clear()
            report = w.commits(version, verify=verify)
            assert order(w) == [[1, 2], [0, 2], [0, 1]] and kinds(report) == ["gloo+relay"] * 3
            came = [x["gloo"] for x in ways(report)]
            assert sum(came) == one == ways(report)[0]["gloo"] + ways(report)[0]["relay"], "each byte came once"
            assert max(came) < 0.4 * one, came
            parts = [p for p in heard if p != ALL_PARTS]
            assert parts == sorted(set(parts)) and len(parts) > 4
        assert [r.epoch for r in w.coordinator.replicas.values()] == opened, "routes are opened once"
        w.sources[0].move()
        assert kinds(w.commits(4)) == ["gloo+relay"] * 3
