"""`Refit.release()` beside replicas that come, go and fail: nobody maps what is let go of, and nobody is lost by it.

The plain cases are in test_session_routes.py. CUDA IPC is played by tests/support/cpu_peer.py.
"""

import time

import pytest

from tests.functional.test_session_routes import good, peers, right  # noqa: F401
from tests.support import cpu_peer
from tests.support.world import ToyEngine, World


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
        while w.sessions[0]._hub.replicas[0].state != "lost":
            time.sleep(0.01)
        for rank in ranks:
            w.sessions[rank].release()
        w.engines[0] = ToyEngine(2)
        w.controllers[0] = w.serve(w.engines[0], 0)
        w.controllers[0].wait_ready(15.0)
        for version in (2, 3):
            assert good(w.refit(version)).committed == 2
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
        until = time.monotonic() + 10
        while w.sessions[0]._hub.replicas[0].state != state and time.monotonic() < until:
            time.sleep(0.01)
        w.sessions[0].release()
        assert not cpu_peer.MAPPED
