"""`Refit.release()` beside replicas that come, go and fail: nobody maps what is let go of, and nobody is lost by it.

The plain cases are in test_session_routes.py. CUDA IPC is played by tests/support/cpu_peer.py.
"""

import threading
import time

import pytest

from tests.functional.test_session_routes import peers  # noqa: F401
from tests.support import cpu_peer
from tests.support.memory import Watched
from tests.support.packed_world import PackedWorld
from tests.support.proc import PATIENCE
from tests.support.world import SHAPES, ToyEngine, ToySource, World, good, right, until_true
from xfer import Declared, MeshInfo, TensorTrainer
from xfer.coordinator import messages as m
from xfer.direct.plane import DirectPlane
from xfer.errors import DeadlineExceeded
from xfer.mesh.placement import Shard
from xfer.packed.plane import PackedPlane
from xfer.participants.lane import Lane


@pytest.mark.parametrize("host_pull", [True, False])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_replica_that_joins_while_weights_are_released_is_refitted_when_they_are_back(monkeypatch, host_pull, ranks):
    """Engines are restarted while they sample, and colocated trainers have let go of their weights by then."""
    monkeypatch.setattr("tests.support.world.HOST_PULL", host_pull)
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        w.controllers[0].close()
        for s in w.engines[0].sessions:
            s.close()
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[0].phase.value == "lost")
        for rank in ranks:
            w.sessions[rank].release()
        w.engines[0] = ToyEngine(2)
        w.controllers[0] = w.serve(w.engines[0], 0)
        w.controllers[0].wait_ready(15.0)
        for version in (2, 3):
            assert good(w.refit(version)).committed == 2
            right(w, version)


class Views(ToySource):
    """As a TensorTrainer whose caller gives other objects over the same bytes at every call."""

    def __init__(self, rank: int, world: int):
        super().__init__(rank, world)
        mesh = MeshInfo.line("trainers", range(world))
        self.adapter = TensorTrainer(
            lambda: {n: t.view(t.shape) for n, t in self.params.items()},
            declared={n: Declared(s, mesh, (Shard(0),)) for n, s in SHAPES.items() if len(s) > 1},
            rank=rank,
            world=world,
        )
        for name in ("drain", "read", "check", "rebind", "let_go"):
            setattr(self, name, getattr(self.adapter, name))


def test_a_callable_that_makes_views_opens_no_route_anew_and_holds_nothing_after_a_release(monkeypatch):
    opened, open_routes = [], DirectPlane._open_routes
    monkeypatch.setattr(DirectPlane, "_open_routes", lambda lane, *a: (opened.append(lane), open_routes(lane, *a))[1])
    with World(trainers=2, sources=[Views(i, 2) for i in range(2)]) as w:
        for version in (1, 2, 3):
            opened.clear()
            good(w.refit(version))
            right(w, version)
            assert not opened or version == 1, "a warm refit was a cold one"
        old = [Watched(t) for source in w.sources for t in source.params.values()]
        for source, session in zip(w.sources, w.sessions, strict=True):
            session.release()
            source.params = {n: t.clone() for n, t in source.params.items()}
        assert not any(m.held for m in old)
        for version in (4, 5):
            good(w.refit(version))
            right(w, version)


def no_lock() -> None:
    raise RuntimeError("no lock")


@pytest.mark.parametrize("state", ["lost", "failed"])
def test_release_unmaps_what_workers_of_lost_and_failed_replicas_have_mapped(state):
    """They live on, connected, and what they have mapped stays taken however the trainer frees it."""
    w = World(trainers=1)
    w.engines = [ToyEngine(2)]
    if state == "failed":
        w.engines[0].takers[0].choose_lock = no_lock
    with w:
        if state == "lost":
            good(w.refit(1))
            assert cpu_peer.MAPPED
            w.controllers[0].close()
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[0].phase.value == state)
        w.sessions[0].release()
        assert not cpu_peer.MAPPED


@pytest.mark.parametrize("route", ["direct", "packed"])
def test_one_that_did_not_answer_holds_up_no_later_release(monkeypatch, route):
    """A late pull, a replica that has not come, routes opened anew meanwhile: whoever was asked in vain is asked again."""
    late, plane = [True], DirectPlane if route == "direct" else PackedPlane
    monkeypatch.setattr(plane, "unmapped", property(lambda p: not (late and p.side.role == "worker")))
    made = World if route == "direct" else PackedWorld
    with made(trainers=1, workers=1) as w:
        good(w.refit(1))
        w.sessions[0].deadline_s = 1.0
        with pytest.raises(DeadlineExceeded):
            w.sessions[0].release()
        w.sessions[0].deadline_s = w.deadline_s
        good(w.refit(2))
        late.clear()
        for version in (3, 4):
            w.sessions[0].release()
            good(w.refit(version))
            right(w, version)


def test_release_needs_nothing_of_a_replica_that_has_not_come():
    w = PackedWorld(trainers=1, workers=1, replicas=2, deadline_s=5.0, wait=False)
    serve = w.serve
    w.serve = lambda engine, i: serve(engine, i) if i == 0 else None
    w.connect()
    w.controllers[0].wait_ready(5.0)
    w.sessions[0].release()
    w.controllers[1] = serve(w.engines[1], 1)
    w.controllers[1].wait_ready(5.0)
    assert good(w.refit(2)).committed == 2
    right(w, 2)
    w.sessions[0].release()
    w.close()


def test_an_answer_to_a_release_that_was_given_up_is_none_to_the_next(monkeypatch):
    """It comes late and lies in the inbox, while a refit has opened routes again: the trainer freed what was still mapped."""
    close, seconds = Lane._close_routes, [0.8]
    monkeypatch.setattr(Lane, "_close_routes", lambda lane: (time.sleep(seconds[0]), close(lane)))
    with World(trainers=1, workers=1, deadline_s=10.0) as w:
        good(w.refit(1))
        w.sessions[0].deadline_s = 0.4
        with pytest.raises(DeadlineExceeded):
            w.sessions[0].release()
        until_true(lambda: any(isinstance(x, m.Released) for x in list(w.sessions[0]._party.inbox.queue)))
        seconds[0], w.sessions[0].deadline_s = 0.3, 10.0
        returned = threading.Event()
        w.engines[0].takers[0].installs_after(returned)
        assert all(r.pending for r in w.refit(2, wait="sources")), "it takes nothing from the inbox"
        returned.set()
        assert cpu_peer.MAPPED
        w.sessions[0].release()
        assert not cpu_peer.MAPPED
        good(w.refit(3))
        right(w, 3)


def test_a_release_that_was_given_up_while_a_replica_was_planned_closes_nothing_of_a_later_refit(monkeypatch):
    plan, post, go_on, asked = Lane._plan, Lane.post, threading.Event(), []
    with World(trainers=1, workers=1, replicas=2) as w:
        good(w.refit(1))
        coordinator = w.sessions[0]._server.coordinator
        w.controllers[1].close()
        for s in w.engines[1].sessions:
            s.close()
        until_true(lambda: coordinator.replicas[1].phase.value == "lost")
        monkeypatch.setattr(Lane, "_plan", lambda lane, x: (lane._role == "trainer" or go_on.wait(60), plan(lane, x)))
        monkeypatch.setattr(Lane, "post", lambda lane, x: (asked.append(x), post(lane, x)))
        w.engines[1] = ToyEngine(1)
        w.controllers[1] = w.serve(w.engines[1], 1)
        until_true(
            lambda: coordinator.replicas[1].phase.value == "planning" and w.sessions[0]._party.lanes[1].wait_idle(0.0)
        )
        w.sessions[0].deadline_s = 0.3
        with pytest.raises(DeadlineExceeded, match="unmap"):
            w.sessions[0].release()
        w.sessions[0].deadline_s = w.deadline_s
        good(w.refit(2, min_replicas=1, deadline_s=2.0 * PATIENCE))  # the replica that joins is waited for so long
        go_on.set()
        w.controllers[1].wait_ready(20.0)
        time.sleep(0.2)
        assert not any(isinstance(x, m.CloseRoutes) for x in asked)
        assert good(w.refit(3)).committed == 2
        right(w, 3)
