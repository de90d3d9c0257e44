"""Replicas that join during refits, changes and failures, with real participants as threads.

Each test was a defect once. Orders of messages alone are in test_session.py and test_session_cases.py.
"""

import threading
import time

import pytest

from examples.common.ports import free_port
from tests.functional.test_session_changes import export
from tests.support import world
from tests.support.cpu_peer import peers
from tests.support.world import TOKEN, ToyEngine, ToySource, ToyTaker, World, good, raised, right, until_true
from xfer import errors as e
from xfer.direct import sums
from xfer.direct import trainer as direct_trainer
from xfer.direct.plane import DirectPlane
from xfer.participants import lane, refit
from xfer.participants.worker import WorkerSession
from xfer.rendezvous import client
from xfer.transport import routes

pytestmark = pytest.mark.usefixtures(peers.__name__)


@pytest.mark.parametrize("host_pull", [True, False])
def test_a_trainer_that_gives_up_on_a_silent_coordinator_leaves_links_of_joiners_alone(monkeypatch, host_pull):
    """It once stopped them without a word, so that the workers of the replica that joined could never take part."""
    monkeypatch.setattr(world, "HOST_PULL", host_pull)
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    link, link_on, silent = lane.Lane._open, threading.Event(), threading.Event()

    def late(self, message):
        assert self.replica != 1 or self._role == "trainer" or link_on.wait(20)
        link(self, message)

    with World(trainers=2, replicas=2) as w:
        w.commits(1)
        w.leave(1)
        monkeypatch.setattr(lane.Lane, "_open", late)
        w.come(1)
        until_true(lambda: w.phase(1) == "linking")
        until_true(lambda: all(s.lanes[1]._now is s.lanes[1]._stop for s in w.sessions))  # begun
        epoch = w.epochs()[1]
        w.later(lambda: silent.wait(20))
        w.fails(2, e.PeerLost if host_pull else e.DeadlineExceeded, min_replicas=1, deadline_s=0.5)
        silent.set()
        link_on.set()
        w.controllers[1].wait_ready(10.0)
        assert w.epochs()[1] == epoch
        for version in (3, 4):
            assert w.commits(version).committed == 2


HELD = {
    "sums are bound": (sums.Sums, "__init__"),
    "a trainer has opened": (direct_trainer.DirectTrainer, "opened"),
    "routes are found": (routes, "find_ways"),
}


@pytest.mark.parametrize(
    ("held", "change"),
    [
        ("sums are bound", "move"),
        ("routes are found", "move"),
        *(("a trainer has opened", c) for c in ("move", "turn", "export")),
    ],
)
def test_what_trainers_hold_may_change_while_a_replica_links(monkeypatch, held, change):
    """The change comes while a thread that links stands at `held`. What was made for the old storages was kept for the new ones;
    where they had another form, the replica could never take part again."""
    monkeypatch.setattr(world, "HOST_PULL", False)  # where bytes are sent trainers sum in a lane's thread
    where, name = HELD[held]
    real, opening = getattr(where, name), threading.Event()

    def late(*a, **k):
        opening.set()
        until_true(lambda: all(s.side._binding > b for s, b in zip(w.sessions, bindings)))
        return real(*a, **k)

    with World(trainers=2, replicas=2, drop=("extra",)) as w:
        w.commits(1)
        w.leave(1)
        bindings = [s.side._binding for s in w.sessions]
        with monkeypatch.context() as patch:
            patch.setattr(where, name, late)
            w.come(1)
            assert opening.wait(10)
            for source in w.sources:
                {"move": source.move, "turn": source.turn, "export": lambda s=source: export(s)}[change]()
            # The coordinator hears of it when the link is open: else it plans anew at once.
            patch.setattr(refit.computing, "compute", lambda *a: until_true(lambda: w.phase(1) != "linking") and 0.0)
            assert w.commits(2).committed == 2
        assert [s.error for s in w.engines[1].sessions] == [None] * 2
        assert w.commits(3).committed == 2


@pytest.mark.parametrize("host_pull", [True, False])
@pytest.mark.parametrize("released", [(0,), (0, 1)])
def test_a_replica_that_joins_while_weights_are_released_is_refitted_when_they_are_back(
    monkeypatch, host_pull, released
):
    """Engines restart while they sample; colocated trainers have released their weights by then."""
    monkeypatch.setattr(world, "HOST_PULL", host_pull)
    with World(trainers=2, replicas=2) as w:
        w.commits(1)
        w.leave(0)
        for rank in released:
            w.sessions[rank].release()
        w.come(0).wait_ready(15.0)
        for version in (2, 3):
            assert w.commits(version).committed == 2


@pytest.mark.parametrize("fails", ["compute", "inventory"])
def test_a_trainer_that_failed_before_it_told_of_changed_exports_tells_them_later(monkeypatch, fails):
    """A replica that joins meanwhile gets them too."""
    made, failed = direct_trainer.trainer_inventory, []

    def once(*a, **k):
        if k["rank"] == 1 and not failed:
            failed.append(True)
            raise MemoryError("once")
        return made(*a, **k)

    with World(trainers=2, replicas=2, drop=("extra",)) as w:
        w.commits(1)
        w.leave(1)
        for s in w.sources:
            export(s)
        with monkeypatch.context() as patch:
            if fails == "compute":
                patch.setattr(refit.computing, "compute", lambda *a: 1 / 0)
            else:
                patch.setattr(direct_trainer, "trainer_inventory", once)
            w.fails(2, e.XferError, "once" if fails == "inventory" else "division", min_replicas=1)
        controller = w.come(1)
        if fails == "compute":
            controller.wait_ready(10.0)
        else:  # the next call tells what there is to plan from
            until_true(lambda: w.phase(1) == "joining" and len(w.coordinator.replicas[1].workers) == 2)
        assert w.commits(3).committed == 2


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


def test_a_call_does_not_take_the_link_of_an_engine_that_joins_for_a_transfer_that_does_not_stop(monkeypatch):
    """The replica was lost in the same refit, in which its lane had begun to move bytes."""
    moved, linking, go_on, begun = (threading.Event() for _ in range(4))
    open_routes = DirectPlane._open_routes

    def slow(one, *a):
        if one.side.role == "worker" and one.replica == 0 and begun.is_set():
            linking.set()
            go_on.wait(30)
        return open_routes(one, *a)

    monkeypatch.setattr(DirectPlane, "_open_routes", slow)
    monkeypatch.setattr(world, "HOST_PULL", False)
    with World(1, 1, 2) as w:
        w.commits(1)
        begun.set()
        for engine in w.engines:
            run_recipes = engine.takers[0].run_recipes
            engine.takers[0].run_recipes = lambda run=run_recipes: (moved.wait(30), run())
        results = w.start(2, min_replicas=1)
        parts = until_true(lambda: w.coordinator.refit).parts
        until_true(lambda: [r.phase.value for r in parts.values()] == ["moving"] * 2, 20)
        w.lose(0)
        w.come(0)
        assert linking.wait(10)
        moved.set()
        report = good(results(30))
        go_on.set()
        assert [o.committed for o in report.outcomes] == [False, True]
        w.commits(3)


class SlowToRead(ToyTaker):
    def read(self, catalog):
        time.sleep(0.5)
        return super().read(catalog)


@pytest.mark.parametrize("replicas", [1, 2])
def test_sources_are_not_free_while_a_replica_that_is_waited_for_has_yet_to_join(replicas):
    """Its workers still read their layout, so it has no lane on any trainer. A caller that went by lanes would train on, and the
    replica would commit the next weights under this version, with every checksum right."""
    engines = [ToyEngine(2) for _ in range(replicas)]
    engines[-1].takers = [SlowToRead(i, 2) for i in range(2)]
    with World(trainers=2, replicas=replicas, wait=False, engines=engines) as w:
        for c in w.controllers[:-1]:
            c.wait_ready(20.0)
        until_true(lambda: w.coordinator.replicas[replicas - 1].controller is not None)
        returned = threading.Event()
        w.engines[0].takers[0].installs_after(returned)  # no commit before the calls have returned
        assert all(r.pending for r in w.refit(1, wait="sources"))
        returned.set()
        for s in w.sources:
            s.set(2)  # the next optimizer step
        for c in w.controllers:  # the one that joined is not the last to commit
            c.wait_version("1", 15.0)
        right(w, 1)
        w.commits(3)


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
