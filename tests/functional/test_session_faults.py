"""A rank raises, hangs, does not call, or loses the coordinator: all calls end in a typed error, in time, and the next refit commits.

Ranks are threads. Processes that die: test_session_deaths.py. Pulls that do not end: test_session_routes.py.
"""

import threading
import time

import pytest

from tests.functional.test_session_protocol import fault  # noqa: F401
from tests.support import cpu_peer
from tests.support.proc import PATIENCE
from tests.support.world import World, right, until_true
from xfer import errors as e
from xfer.coordinator import deadlines as bounds
from xfer.coordinator import messages as m
from xfer.coordinator import state
from xfer.participants import refit
from xfer.rendezvous import client
from xfer.rendezvous.client import RendezvousClient
from xfer.transport.p2p import P2P

SLACK_S = 3.0 * PATIENCE
"""Delay that a busy machine may add."""


@pytest.mark.parametrize("pulled", [False, True])
def test_a_rank_that_raises_at_any_point_ends_the_refit_for_all_and_the_next_is_whole(fault, pulled):  # noqa: F811
    """Before its first write an engine serves its old version on; after it, it is out of service until the next refit."""
    with World(trainers=2, host_pull=pulled) as w:
        for version, text in enumerate(
            ["trainer:1:drain", "trainer:1:enter", "worker:0:arm", "trainer:1:moving", "trainer:1:wave", "trainer:1:done",
             "worker:0:moving", "worker:0:wave", "worker:0:done", "worker:0:commit"], 1
        ):  # fmt: skip
            w.commits(2 * version)
            engine, (role, rank, point) = w.engines[0], text.split(":")
            fault(f"{text}:raise@1")
            out = w.fails(2 * version + 1, e.XferError, f"injected fault at {point}")
            assert all(f"{role} {rank}" in str(r) for r in out), out
            if point in ("drain", "enter", "arm") or role == "trainer" and w.controllers[0].error is None:
                assert not engine.paused and not engine.open and engine.label == str(version), text
                right(w, 2 * version)
            else:
                assert w.controllers[0].error is not None and engine.paused, text
            fault("")
        w.commits(100)


@pytest.mark.parametrize("late", ["to raise", "to tell"])
def test_ranks_hear_the_cause_of_a_closed_connection(monkeypatch, late):
    """Other ranks report the broken link before the rank that raised reports its error."""
    run, say, raises = P2P.run, RendezvousClient.try_send, threading.Event()

    def runs(self, *args, **kwargs):
        if self.link.rank != 1 or not raises.is_set():
            return run(self, *args, **kwargs)
        self.link.abort(5.0)
        time.sleep(0.1 if late == "to raise" else 0.0)
        raise RuntimeError("out of memory")

    def says(self, message, *args):
        if late == "to tell" and isinstance(message, m.Failed) and self.label == "trainer 1":
            time.sleep(0.1)
        say(self, message, *args)

    monkeypatch.setattr(P2P, "run", runs)
    monkeypatch.setattr(RendezvousClient, "try_send", says)
    with World(trainers=2) as w:
        w.commits(1)
        raises.set()
        w.fails(2, e.XferError, "[trainer 1] RuntimeError: out of memory")
        raises.clear()
        w.commits(3)


# ---- ranks that do not call


def test_a_drain_that_waits_for_ranks_that_do_not_call_ends_at_the_deadline_and_names_them():
    """Megatron's overlapped gathers wait so under data parallelism; here an event stands for the gather."""
    with World(trainers=4) as w:
        w.commits(1)
        gathered = threading.Event()
        drains = [s.drain for s in w.sources]
        for i, s in enumerate(w.sources):
            s.drain = gathered.set if i % 2 else lambda: gathered.wait(60)
        missing = [f"trainer {i}: it has not called nccl_xfer_refit()" for i in (1, 3)]
        w.fails(2, e.DeadlineExceeded, *missing, "do not train", within=10, ranks=[0, 2], deadline_s=1.0)
        assert not w.engines[0].paused and not gathered.is_set()
        right(w, 1)
        w.fails(None, e.DeadlineExceeded, "trainer", within=10, ranks=[1, 3])  # the same call, late
        for s, drain in zip(w.sources, drains):
            s.drain = drain
        w.commits(3)


def test_a_call_waits_for_the_gathers_that_the_last_one_left_behind():
    with World(trainers=2) as w:
        w.commits(1)
        s, order, gathered = w.sources[0], [], threading.Event()
        s.drain = lambda: (gathered.wait(20), order.append("old"))
        text = "trainer 0: it has called, and is not ready: it finishes"
        out = w.fails(2, e.DeadlineExceeded, text, within=10, deadline_s=0.5)
        assert "do not train" in str(out[0]) and not order
        s.drain = lambda: order.append("new")
        threading.Timer(0.3, gathered.set).start()
        w.commits(3)
        assert order == ["old", "new"]


# ---- lanes and coordinators that do not answer


@pytest.mark.parametrize("hub_is_lost", [False, True])
def test_a_lane_that_does_not_stop_is_told_apart(monkeypatch, hub_is_lost):
    """Its parameters may still be read, and must be neither written nor freed: PeerLost says so, and xfer keeps them alive."""
    monkeypatch.setattr(refit, "STOP_GRACE_S", 1.0)
    with World(trainers=2, deadline_s=20.0) as w:
        w.commits(1)
        moves, end, routed = threading.Event(), threading.Event(), w.sessions[1].lanes[0].plane._routed
        run = routed.run
        routed.run = lambda *args: (moves.set(), end.wait(60), run(*args))
        began = time.monotonic()
        results = w.start(2, deadline_s=20.0 if hub_is_lost else 1.0)
        # Not when it is let go: a lane that has not begun to move bytes by the time the coordinator is lost never does.
        assert moves.wait(20)
        if hub_is_lost:
            w.sessions[1].party.channel.close()
        first, second = results(30)
        assert time.monotonic() - began < 1.0 + bounds.CALL_GRACE_S + SLACK_S
        assert isinstance(second, e.PeerLost) and not second.drained and w.sessions[1].side._kept
        assert hub_is_lost or isinstance(first, e.DeadlineExceeded) and not w.sessions[0].side._kept, first
        end.set()


def test_a_trainer_that_lost_the_hub_before_its_go_does_not_take_its_parameters_for_free(monkeypatch):
    """Workers are let go first, and may pull from a rank that has not heard of it."""
    monkeypatch.setattr("tests.support.world.HOST_PULL", True)
    monkeypatch.setitem(cpu_peer.routes.PEERS, "cpu", cpu_peer)
    with World(trainers=2, workers=1) as w:
        w.commits(1)
        cpu_peer.Hold.begin(deaf=True)
        send = state.Client.send
        unless_go = lambda c, x: None if isinstance(x, m.Go) and c.label == "trainer 1" else send(c, x)  # noqa: E731
        monkeypatch.setattr(state.Client, "send", unless_go)
        results = w.start(2, deadline_s=2.0)
        assert cpu_peer.Hold.reached.wait(10)
        w.sessions[1].party.channel.close()  # what it sees of the coordinator's end
        until_true(lambda: not w.sessions[1]._busy.locked())
        assert len(w.sessions[1].side._kept) == 1
        cpu_peer.Hold.clear()
        out = results(30)
        assert isinstance(out[1], e.PeerLost) and not out[1].drained


def test_a_trainer_that_gave_up_on_a_hub_that_stood_still_says_so(monkeypatch):
    """It has broken its links. The coordinator saw that refit commit, and once started the next one over them."""
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    with World(trainers=2, workers=1) as w:
        w.commits(1)
        engine, go_on = w.engines[0], threading.Event()
        resume = engine.resume
        engine.resume = lambda t: (w.later(lambda: go_on.wait(30)), resume(t))
        w.fails(2, e.DeadlineExceeded, deadline_s=1.0)
        engine.resume = resume
        go_on.set()
        until_true(lambda: w.coordinator.refit is None)
        w.commits(3)


def test_an_outcome_that_came_while_a_trainer_trained_is_heard_however_late(monkeypatch):
    monkeypatch.setattr(refit, "CALL_GRACE_S", 0.2)
    with World(trainers=2) as w:
        w.commits(1)
        returned = threading.Event()
        w.engines[0].takers[0].installs_after(returned)
        assert all(r.pending for r in w.refit(2, wait="sources"))
        returned.set()
        for s in w.sessions:
            until_true(lambda s=s: any(isinstance(x, m.Outcome) for x in list(s.party.inbox.queue)))
            # As if the optimizer step took longer than the deadline of the refit before it and its grace.
            s.pending.until = s.pending.ends = time.monotonic() - 1.0
        for version in (3, 4):
            w.commits(version, deadline_s=5.0)
