"""Relay chains and rings of workers that read each other's memory for real (transport/peer_host.py). The first one of a chain reads the
trainers' memory; all of a ring receive over gloo."""

import sys

import pytest

from tests.support.cpu_peer import MAPPED, Hold, peers  # noqa: F401
from tests.support.world import ToyEngine, World, kinds, until_true, ways
from xfer.plan import relay
from xfer.plan.relay import ALL_PARTS
from xfer.transport import p2p, peer_host, relay_place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")

BIG = {"layers.0.w": (512, 24), "embed": (36, 8), "norm": (12,)}


@pytest.fixture(autouse=True)
def everything_is_read(monkeypatch):
    """In about ten parts."""
    monkeypatch.setattr(peer_host, "SHORTEST", 2)
    monkeypatch.setattr(relay_place, "PART_BYTES", 100)


def chain(replicas: int, trainers: int = 1, workers: int = 1, **more) -> World:
    return World(trainers, workers, replicas, host_pull=True, relay=True, **more)


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


def test_replicas_that_open_their_routes_anew_hear_of_the_parts_that_are_ready(monkeypatch):
    monkeypatch.setattr(relay_place, "PART_BYTES", 2048)
    with chain(3, shapes=BIG) as w:
        w.commits(1)
        plane, said = w.lane(0).plane, []
        say = lambda run, part, f=plane._say_part_ready: (said.append(part), f(run, part))  # noqa: E731
        monkeypatch.setattr(plane, "_say_part_ready", say)
        w.sessions[0].release()
        w.commits(3)
        assert said == [*range(11), ALL_PARTS]


def test_replicas_of_another_layout_stand_in_chains_of_their_own():
    with chain(4, engines=[ToyEngine(n) for n in (2, 1, 2, 1)]) as w:
        for version in (1, 2):
            assert kinds(w.commits(version)) == ["peer", "peer", "relay", "relay"]
        assert w.order() == [[], [], [0], [1]]


FORMS = {
    "a chain": (dict(trainers=1, workers=1, host_pull=True, shapes=BIG), ["peer", "relay", "relay"], {}),
    "a chain whose first replica receives columns":
        (dict(host_pull=True), ["gloo+peer", "relay", "relay"], {"shortest": 1 << 20, "step": 64}),
    "a ring": (dict(workers=1, shapes=BIG), ["gloo+relay"] * 3, {"step": 256}),
    "a ring of two workers": (dict(shapes=BIG), ["gloo+relay"] * 3, {"step": 256}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_parts_are_handed_on_as_they_come_and_each_byte_comes_once(monkeypatch, form):
    """Also in a verified refit, over routes that are opened once."""
    how, routes, sizes = FORMS[form]
    monkeypatch.setattr(relay_place, "PART_BYTES", 2048 if form == "a chain" else 100)
    monkeypatch.setattr(peer_host, "SHORTEST", sizes.get("shortest", 2))
    monkeypatch.setattr(relay, "GRAIN", 8)
    monkeypatch.setitem(p2p.STEP_BYTES, "cpu", sizes.get("step", p2p.STEP_BYTES["cpu"]))
    with World(**dict(trainers=2, workers=2, replicas=3, relay=True) | how) as w:
        one, heard, lane, opened = w.commits(1).outcomes[0].bytes_moved, [], w.lane(2), w.epochs()
        monkeypatch.setattr(lane, "part_ready", lambda m, f=lane.part_ready: (heard.append(m.part), f(m)))
        for version, verify in ((2, False), (3, True)):
            heard.clear()
            w.sessions[0].prepare()  # all arm: else the last one may begin when everything is there
            until_true(w.armed)
            report = w.commits(version, verify=verify)
            came = [sum(n for kind, n in x.items() if kind != "relay") for x in ways(report)]
            assert kinds(report) == routes and [sum(x.values()) for x in ways(report)] == [one] * 3 and sum(came) == one
            assert "ring" not in form or max(came) < 0.4 * one, came
            parts = [p for p in heard if p != ALL_PARTS]
            assert parts == sorted(set(parts)) and len(parts) > 4
        assert w.order() == ([[1, 2], [0, 2], [0, 1]] if "ring" in form else [[], [0], [1]]) and w.epochs() == opened
        w.sources[0].move()
        assert kinds(w.commits(4)) == routes


@pytest.mark.parametrize("pulled", [False, True], ids=["ring", "chain"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_hand_bytes_on_also_when_staged_refits_and_others_take_turns(replicas, pulled, caplog):
    """Each then offers other storages. One that opened its routes by what another had offered before once found that memory freed."""
    with World(2, 2, replicas, relay=True, host_pull=pulled) as w:
        orders = []
        for version in range(1, 7):
            report = w.commits(version, stage=version % 2 == 0)
            orders.append(w.order())
            assert sum("relay" in x for x in ways(report)) == replicas - pulled
        assert orders == orders[:1] * 6
    assert "takes all its bytes from the trainers" not in caplog.text
