"""Replicas that join during refits, changes and failures, with real participants as threads.

Each test was a defect once. Orders of messages alone are in tests/functional/test_session.py and test_session_cases.py.
"""

import threading
import time

import pytest

from examples.common.ports import free_port
from tests.support import world
from tests.support.cpu_peer import peers
from tests.support.world import TOKEN, ToySource, World, raised, right
from xfer import errors as e
from xfer.participants.worker import WorkerSession
from xfer.transport import routes

pytestmark = pytest.mark.usefixtures(peers.__name__)


def test_a_replica_that_could_not_be_linked_costs_the_others_nothing_when_storages_move(monkeypatch):
    with World(trainers=1, replicas=2) as w:
        w.commits(1)
        w.leave(1)
        with monkeypatch.context() as patch:
            patch.setattr(routes, "find_ways", lambda *a, **k: 1 / 0)
            with pytest.raises(e.XferError, match="division"):
                w.come(1).wait_ready(10.0)
        w.leave(1)
        w.sources[0].move()
        w.commits(2, [0], min_replicas=1)
        opened = w.epochs()[0]
        for version in (3, 4):
            w.commits(version, [0], min_replicas=1)
            assert w.epochs()[0] == opened


@pytest.mark.parametrize(("wait", "together"), [(False, False), (False, True), (True, False)])
def test_a_replica_that_fails_before_the_trainers_have_read_is_left_out_like_one_that_fails_later(
    monkeypatch, wait, together
):
    """Unless they wait for all replicas: then they hear the reason. `together`: ranks read in one collective. The worker says that it
    is worker 1 of 1, as with vLLM's offline data parallelism."""
    failed, read, join = threading.Event(), ToySource.read, WorkerSession._join

    def refused(session):
        session.index = session.replica
        try:
            return join(session)
        finally:
            if session.replica:
                failed.set()

    def late(source):
        assert failed.wait(20)
        time.sleep(0.5 if together else 0.0)  # longer than trainers wait for a connect that cannot succeed
        return read(source)

    monkeypatch.setattr(WorkerSession, "_join", refused)
    monkeypatch.setattr(ToySource, "read", late)
    monkeypatch.setattr(ToySource, "reads_together", together)
    monkeypatch.setattr("xfer.participants.trainer.STOP_GRACE_S", 0.2)
    w = World(trainers=1, workers=1, replicas=2, wait=wait)
    text = "worker 1 of 1: an engine that was started as one rank of several"
    if wait:
        with pytest.raises(e.HandshakeError, match=text):
            w.connect()
        return
    with w:
        w.controllers[0].wait_ready(20)
        with pytest.raises(e.HandshakeError, match=text):
            w.controllers[1].wait_ready(5)
        assert [o.committed for o in w.refit(1, min_replicas=1)[0].outcomes] == [True, False]


# ---- layouts that all trainers read in one collective, as with `probe=`


class ReadTogether(ToySource):
    """A barrier stands for the collective."""

    reads_together = True
    all_here = threading.Barrier(2)

    def read(self):
        self.all_here.wait(60)
        return super().read()


@pytest.fixture
def together(monkeypatch):
    monkeypatch.setattr(ReadTogether, "all_here", threading.Barrier(2))
    yield [ReadTogether(i, 2) for i in range(2)]
    ReadTogether.all_here.abort()


def test_a_layout_that_is_read_together_is_not_read_again_by_one_rank_alone(together):
    with World(trainers=2, sources=together) as w:
        w.commits(1)
        w.sources[1].turn()
        w.fails(2, e.RebindError, "connect again")
        right(w, 1)


@pytest.mark.parametrize("reason", ["refused", "absent"])
def test_a_layout_that_is_read_together_does_not_hold_a_rank_whose_peer_does_not_come(together, reason):
    w = World(trainers=2, sources=together, deadline_s=2.0, sessions=[None] * 2)
    w.rendezvous = f"tcp://127.0.0.1:{free_port()}"

    def connect(i):
        s = world.trainer_session(w.sources[i], w.rendezvous, TOKEN, replicas=1 + i, deadline_s=w.deadline_s)
        try:
            s.open(True)
        finally:
            s.close()

    out = w.on_all(connect, ranks=[0, 1] if reason == "refused" else [0])
    kind, text = (e.HandshakeError, "replicas is ") if reason == "refused" else (e.DeadlineExceeded, "trainer 1")
    raised(out, kind, text)
