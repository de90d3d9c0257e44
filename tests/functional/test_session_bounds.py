"""How long a call may take beyond its deadline, whoever is slow or silent: never more than CALL_GRACE_S (coordinator/deadlines.py).
And what its clocks tell."""

import threading
import time

from tests.support.proc import PATIENCE
from tests.support.world import ToyEngine, World, good, right, until_true
from xfer import errors as e
from xfer.coordinator import deadlines as bounds
from xfer.direct.plane import DirectPlane
from xfer.participants import refit

SLACK_S = 3.0 * PATIENCE
"""Of a busy machine."""


def ended(world: World, kind, text: str, deadline_s: float, grace_s: float = bounds.CALL_GRACE_S, **kw) -> list:
    t0 = time.monotonic()
    out = world.refit(2, deadline_s=deadline_s, **kw)
    took = time.monotonic() - t0
    assert took < deadline_s + grace_s + SLACK_S, f"took {took:.1f} s"
    for r in out:
        assert isinstance(r, kind) and text in str(r), repr(r)
    return out


def test_trainers_do_not_wait_for_an_engine_that_comes_back_late_but_the_next_refit_does():
    """Also in other orders: tests/unit/test_coordinator_cases.py."""
    with World(trainers=2, deadline_s=40.0) as w:
        good(w.refit(1))
        engine, come_back = w.engines[0], threading.Event()
        resume = engine.resume
        engine.resume = lambda timeout: (come_back.wait(30), resume(timeout))
        ended(w, e.DeadlineExceeded, "not back in service", 1.0, bounds.ANSWER_GRACE_S)
        engine.resume = resume
        threading.Timer(0.5, come_back.set).start()
        report = good(w.refit(3))
        right(w, 3)
        assert report.version == 3 and engine.label == "3" and not engine.paused


def never_ending(world: World, i: int) -> tuple[threading.Event, threading.Event]:
    """The lane of trainer `i` does not listen to anybody once it moves bytes. (it does, let it end)"""
    moves, end = threading.Event(), threading.Event()
    routed = world.sessions[i]._party.lanes[0].plane._routed
    run = routed.run
    routed.run = lambda *args: (moves.set(), end.wait(60), run(*args))
    return moves, end


def test_a_lane_that_does_not_stop_is_told_apart(monkeypatch):
    """Its parameters may still be read, so they must be neither written nor freed: PeerLost says so, and xfer keeps them."""
    monkeypatch.setattr(refit, "STOP_GRACE_S", 1.0)
    with World(trainers=2, deadline_s=20.0) as w:
        good(w.refit(1))
        moves, end = never_ending(w, 1)
        t0 = time.monotonic()
        out = w.refit(2, deadline_s=1.0)
        assert time.monotonic() - t0 < 1.0 + bounds.CALL_GRACE_S + SLACK_S
        assert isinstance(out[0], e.DeadlineExceeded) and isinstance(out[1], e.PeerLost), out
        assert moves.is_set() and not out[1].drained and w.sessions[1].side._kept and not w.sessions[0].side._kept
        end.set()


def test_a_lane_that_does_not_stop_when_the_hub_is_lost_is_told_apart(monkeypatch):
    monkeypatch.setattr(refit, "STOP_GRACE_S", 1.0)
    with World(trainers=2, deadline_s=20.0) as w:
        good(w.refit(1))
        moves, end = never_ending(w, 1)
        out = []
        call = threading.Thread(target=lambda: out.extend(w.refit(2)))
        call.start()
        # Not when it is let go: one that has not begun to move bytes by the time the coordinator is lost never does, and has stopped.
        assert moves.wait(20)
        w.sessions[1]._party.channel.close()
        call.join(30)
        assert isinstance(out[1], e.PeerLost) and not out[1].drained and w.sessions[1].side._kept, out
        end.set()


def test_a_hub_that_says_nothing_does_not_hold_its_trainers():
    with World(trainers=2, deadline_s=20.0) as w:
        good(w.refit(1))
        go_on = threading.Event()
        w.sources[0].drain = lambda: w.sessions[0]._server.loop.call_soon_threadsafe(lambda: go_on.wait(60))
        ended(w, e.DeadlineExceeded, "no answer in time", 1.0)
        go_on.set()
        w.sources[0].drain = lambda: None


def test_a_call_does_not_take_the_link_of_an_engine_that_joins_for_a_transfer_that_does_not_stop(monkeypatch):
    """It is of a replica that was lost in this very refit, so that its lane has been let go in it."""
    moved, linking, go_on, opened = (threading.Event() for _ in range(4))
    open_routes, answers = DirectPlane._open_routes, []

    def slow(one, *a):
        if one.side.role == "worker" and one.replica == 0 and opened.is_set():
            linking.set()
            go_on.wait(30)
        return open_routes(one, *a)

    monkeypatch.setattr(DirectPlane, "_open_routes", slow)
    with World(1, 1, 2) as w:
        good(w.refit(1))
        opened.set()
        for engine in w.engines:
            run_recipes = engine.takers[0].run_recipes
            engine.takers[0].run_recipes = lambda run=run_recipes: (moved.wait(30), run())
        t = threading.Thread(target=lambda: answers.extend(w.refit(2, min_replicas=1)))
        t.start()
        coordinator = w.sessions[0]._server.coordinator
        until_true(
            lambda: coordinator.refit and [r.phase.value for r in coordinator.refit.parts.values()] == ["moving"] * 2,
            20,
        )
        w.engines[0].sessions[0]._party.channel.close()
        w.controllers[0].close()
        w.engines[0] = ToyEngine(1)
        w.controllers[0] = w.serve(w.engines[0], 0)
        assert linking.wait(10)
        moved.set()
        t.join(30)
        go_on.set()
        assert [o.committed for o in good(answers).outcomes] == [False, True]
        good(w.refit(3))
        right(w, 3)
