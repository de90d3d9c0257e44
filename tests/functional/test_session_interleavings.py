"""Threads of real participants that meet in the wrong moment: joins beside refits, calls that give up, storages that move.

Each was a defect once. Orders of messages alone are in tests/unit/test_coordinator.py and test_coordinator_cases.py.
"""

import threading
import time
from dataclasses import replace

import pytest

from tests.functional.test_session_regressions import transpose
from tests.functional.test_session_routes import epochs, move, peers  # noqa: F401
from tests.support import cpu_peer, world
from tests.support.world import ToyEngine, ToyLayout, ToySource, World, good, right, until_true
from xfer import errors as e
from xfer.coordinator import messages as m
from xfer.coordinator import state
from xfer.direct import sums
from xfer.direct import trainer as direct_trainer
from xfer.participants import computing, lane, refit
from xfer.plan.cache import PlanCache
from xfer.rendezvous import client
from xfer.transport import routes


def leave(w: World, replica: int) -> None:
    w.controllers[replica].close()
    for s in w.engines[replica].sessions:
        s.close()
    gone = w.sessions[0]._server.coordinator.replicas[replica]
    until_true(lambda: gone.phase.value == "lost" and not gone.workers)


def test_a_replica_that_joins_beside_a_refit_holds_up_none_of_its_trainers(monkeypatch):
    """Their lanes link for it; what committed was told as "its parameters may still be read"."""
    monkeypatch.setattr(refit, "STOP_GRACE_S", 0.3)
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        w.sessions[0].prepare()
        until_true(lambda: w.sessions[0]._server.coordinator.refit is not None)
        link, link_on = lane.Lane._open, threading.Event()

        def late(self, message):
            assert self.replica != 1 or self._role == "trainer" or link_on.wait(20)
            link(self, message)

        monkeypatch.setattr(lane.Lane, "_open", late)
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[1].phase.value == "linking")
        assert good(w.refit(2, min_replicas=1)).committed == 1
        assert w.engines[0].takers[0].wrong(2) == []
        link_on.set()
        w.controllers[1].wait_ready(15.0)


def test_an_outcome_that_came_while_a_trainer_trained_is_heard_however_late(monkeypatch):
    monkeypatch.setattr(refit, "CALL_GRACE_S", 0.2)
    with World(trainers=2) as w:
        good(w.refit(1))
        returned = threading.Event()
        w.engines[0].takers[0].installs_after(returned)
        assert all(r.pending for r in w.refit(2, wait="sources"))
        returned.set()
        for s in w.sessions:
            until_true(lambda s=s: any(isinstance(x, m.Outcome) for x in list(s._party.inbox.queue)))
            # As if the optimizer step took longer than the deadline of the refit before it and its grace.
            s.pending.until = s.pending.ends = time.monotonic() - 1.0
        for version in (3, 4):
            good(w.refit(version, deadline_s=5.0))
            right(w, version)


def test_a_trainer_that_gave_up_on_a_hub_that_stood_still_says_so(monkeypatch):
    """It has broken its links, and the coordinator, for which that refit went well, let workers begin the next one over them."""
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    with World(trainers=2, workers=1) as w:
        good(w.refit(1))
        coordinator, engine, go_on = w.sessions[0]._server.coordinator, w.engines[0], threading.Event()
        resume = engine.resume
        engine.resume = lambda t: (w.later(lambda: go_on.wait(30)), resume(t))
        assert all(isinstance(r, e.DeadlineExceeded) for r in w.refit(2, deadline_s=1.0))
        engine.resume = resume
        go_on.set()
        until_true(lambda: coordinator.refit is None)
        good(w.refit(3))
        right(w, 3)


@pytest.mark.parametrize("stop", ["cancel", "give_up"])
def test_a_go_that_this_rank_will_not_follow_is_refused_aloud(stop):
    """Since its link is broken by itself alone, or since its call has raised before the coordinator let it go."""
    with World(trainers=2, workers=1) as w:
        good(w.refit(1))
        begin, lost, coordinator = w.sources[0].drain, e.PeerLost("stopped"), w.sessions[0]._server.coordinator
        of = w.sessions[1]._party.lanes[0]

        def drain() -> None:
            until_true(
                lambda: 1 in getattr(coordinator.refit, "drained", ())
            )  # after its Ready; no Go comes before the other's
            of.cancel(lost, None) if stop == "cancel" else of.give_up(2, lost)
            begin()

        w.sources[0].drain = drain
        began = time.monotonic()
        assert all(isinstance(r, e.PeerLost) for r in w.refit(2, deadline_s=15.0))
        assert time.monotonic() - began < 8
        w.sources[0].drain = begin
        good(w.refit(3))
        right(w, 3)


@pytest.mark.parametrize("host_pull", [True, False])
def test_a_trainer_that_gives_up_on_a_silent_hub_leaves_links_of_joiners_alone(monkeypatch, host_pull):
    """It stopped them and said so to nobody: the joiner's workers could never take part, and had to be served anew."""
    monkeypatch.setattr(world, "HOST_PULL", host_pull)
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        coordinator, link = w.sessions[0]._server.coordinator, lane.Lane._open
        silent, link_on = threading.Event(), threading.Event()

        def late(self, message):
            assert self.replica != 1 or self._role == "trainer" or link_on.wait(20)
            link(self, message)

        monkeypatch.setattr(lane.Lane, "_open", late)
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        until_true(lambda: coordinator.replicas[1].phase.value == "linking")
        until_true(lambda: all(s._party.lanes[1]._now is s._party.lanes[1]._stop for s in w.sessions))  # begun
        epoch = coordinator.replicas[1].epoch
        w.later(lambda: silent.wait(20))
        out = w.refit(2, min_replicas=1, deadline_s=0.5)
        assert all(isinstance(r, e.PeerLost if host_pull else e.DeadlineExceeded) for r in out), out
        silent.set()
        link_on.set()
        w.controllers[1].wait_ready(10.0)
        assert coordinator.replicas[1].epoch == epoch
        for version in (3, 4):
            assert good(w.refit(version)).committed == 2
            right(w, version)


def test_a_trainer_that_lost_the_hub_before_its_go_does_not_take_its_parameters_for_free(monkeypatch):
    """Workers are let go first, and may pull from a rank that has not heard of it."""
    with World(trainers=2, workers=1) as w:
        good(w.refit(1))
        cpu_peer.Hold.begin(deaf=True)
        send = state.Client.send
        monkeypatch.setattr(
            state.Client,
            "send",
            lambda c, x: None if isinstance(x, m.Go) and c.label == "trainer 1" else send(c, x),
        )
        out: list = []
        t = threading.Thread(target=lambda: out.extend(w.refit(2, deadline_s=5.0)))
        t.start()
        assert cpu_peer.Hold.reached.wait(10)
        w.sessions[1]._party.channel.close()  # what it sees of the coordinator's end
        until_true(lambda: not w.sessions[1]._busy.locked())
        assert len(w.sessions[1].side._kept) == 1
        t.join(30)
        assert isinstance(out[1], e.PeerLost) and not out[1].drained
        cpu_peer.Hold.clear()


def test_closing_after_prepare_leaves_an_engine_in_service():
    w = World(trainers=1, deadline_s=10.0).connect()
    good(w.refit(1))
    for s in w.engines[0].sessions:
        s._stopped = lambda a, stopped=s._stopped: (time.sleep(0.3), stopped(a))[1]
    w.sessions[0].prepare()
    coordinator = w.sessions[0]._server.coordinator
    until_true(lambda: coordinator.refit is not None and len(coordinator.refit.parts[0].armed) == w.workers)
    w.sessions[0].close()
    until_true(lambda: not w.engines[0].paused)
    assert w.engines[0].label == "1" and w.controllers[0].version == 1
    w.close()


def more(w: World) -> None:
    """Trainers export one tensor more."""
    for s in w.sources:
        s.shapes = s.shapes | {"extra": (4, 4)}
        s.set(0)


def test_a_replica_that_joins_while_exports_are_changed_and_untold_is_linked_by_the_next_refit(monkeypatch):
    with World(trainers=2, replicas=2, drop=("extra",)) as w:
        good(w.refit(1))
        leave(w, 1)
        more(w)
        with monkeypatch.context() as patch:
            patch.setattr(refit.computing, "compute", lambda *a: 1 / 0)
            assert all(isinstance(r, e.XferError) for r in w.refit(2))
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        w.controllers[1].wait_ready(10.0)
        assert good(w.refit(3)).committed == 2
        right(w, 3)


def test_a_trainer_that_could_not_answer_a_catalog_once_answers_the_next(monkeypatch):
    made, failed = direct_trainer.trainer_inventory, []

    def once(*a, **k):
        if k["rank"] == 1 and not failed:
            failed.append(True)
            raise MemoryError("once")
        return made(*a, **k)

    with World(drop=("extra",)) as w:
        good(w.refit(1))
        more(w)
        monkeypatch.setattr(direct_trainer, "trainer_inventory", once)
        assert all("once" in str(r) for r in w.refit(2))
        good(w.refit(3))
        right(w, 3)


def test_sums_that_were_bound_while_storages_moved_are_bound_again(monkeypatch):
    """A lane of a replica that joins binds them, on its own thread; they were kept for storages that nobody writes any more."""
    begun, moved, armed = threading.Event(), threading.Event(), threading.Event()

    class Slow(sums.Sums):
        def __init__(self, *a, **k):
            super().__init__(*a, **k)
            if armed.is_set() and not begun.is_set():
                begun.set()
                moved.wait(5)

    monkeypatch.setattr(world, "HOST_PULL", False)
    with World(trainers=1, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        monkeypatch.setattr(sums, "Sums", Slow)
        armed.set()
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        assert begun.wait(10)
        move(w.sources[0])
        side = w.sessions[0].side
        side.rebind = lambda tensors, rebind=side.rebind: (rebind(tensors), moved.set())
        for version in (2, 3):
            assert good(w.refit(version)).committed == 2
            right(w, version)


@pytest.mark.parametrize("change", ["move", "turn", "export"])
def test_what_trainers_hold_may_change_while_a_replica_links(monkeypatch, change):
    """Sums of what the link was opened for were bound to what there was by then; where that had another form, the replica could
    never take part again."""
    opened, opening = direct_trainer.DirectTrainer.opened, threading.Event()

    def late(session, *a):
        opening.set()
        until_true(lambda: session._binding > bindings[session.index])
        opened(session, *a)

    monkeypatch.setattr(world, "HOST_PULL", False)  # where bytes are sent trainers sum in a lane's thread
    with World(trainers=2, replicas=2, drop=("extra",)) as w:
        good(w.refit(1))
        leave(w, 1)
        bindings, replica = [s.side._binding for s in w.sessions], w.sessions[0]._server.coordinator.replicas[1]
        with monkeypatch.context() as patch:
            patch.setattr(direct_trainer.DirectTrainer, "opened", late)
            w.engines[1] = ToyEngine(2)
            w.controllers[1] = w.serve(w.engines[1], 1)
            assert opening.wait(10)
            if change == "export":
                more(w)
            for source in w.sources:
                {"move": move, "turn": transpose, "export": lambda _: None}[change](source)
            # The coordinator hears of it when the link is open: else it plans anew at once.
            patch.setattr(
                refit.computing, "compute", lambda *a: until_true(lambda: replica.phase.value != "linking") and 0.0
            )
            assert good(w.refit(2)).committed == 2
        right(w, 2)
        assert [str(s.error) for s in w.engines[1].sessions] == ["None"] * 2
        assert good(w.refit(3)).committed == 2
        right(w, 3)


@pytest.mark.parametrize("host_pull", [False, True])
def test_storages_may_move_while_the_only_replica_links(monkeypatch, host_pull):
    """As where a source is a callable that makes copies, and connect() did not wait."""
    monkeypatch.setattr(world, "HOST_PULL", host_pull)
    find, opening, looked = routes.find_ways, threading.Event(), threading.Event()
    monkeypatch.setattr(routes, "find_ways", lambda *a, **k: (opening.set(), looked.wait(5), find(*a, **k))[2])
    monkeypatch.setattr(refit.computing, "compute", lambda *a: looked.set() or 0.0)
    with World(trainers=1, wait=False) as w:
        assert opening.wait(10)
        move(w.sources[0])
        for version in (1, 2):
            good(w.refit(version))
            right(w, version)


def test_a_replica_that_could_not_be_linked_costs_the_others_nothing_when_storages_move(monkeypatch):
    with World(trainers=1, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        with monkeypatch.context() as patch:
            patch.setattr(routes, "find_ways", lambda *a, **k: 1 / 0)
            w.controllers[1] = w.serve(ToyEngine(2), 1)
            with pytest.raises(e.XferError, match="division"):
                w.controllers[1].wait_ready(10.0)
        leave(w, 1)
        move(w.sources[0])
        good(w.refit(2, min_replicas=1))
        opened = epochs(w)[0]
        for version in (3, 4):
            good(w.refit(version, min_replicas=1))
            assert w.engines[0].takers[0].wrong(version) == [] and epochs(w)[0] == opened


class Meets(ToySource):
    """Computes with the other rank, of which rank 1 comes last. `breaks`: it fails after that."""

    digest, breaks, went_on = "same", False, False

    def read(self):
        layout = super().read()
        return ToyLayout(replace(layout.traced, gathers=("g",)), layout.roots, layout.tensors)

    def compute(self, meet):
        time.sleep(0.2 * self.rank)
        meet((0, 1), self.digest)
        self.went_on = True
        if self.breaks:
            raise RuntimeError("boom")


@pytest.mark.parametrize("agree", [True, False])
def test_a_rank_that_looks_when_its_attempt_is_over_does_as_the_others_did(monkeypatch, agree):
    """Whether all go on to gather. The coordinator had forgotten that, so it waited to the deadline; and a gather would wait for it."""
    appears = computing.Meeting._appears

    def late(meeting, *a):
        found = appears(meeting, *a)
        until_true(meeting._over)
        return found

    with World(trainers=2, sources=[Meets(i, 2) for i in range(2)], deadline_s=15.0) as w:
        good(w.refit(1))
        for s in w.sources:
            s.digest, s.breaks, s.went_on = "same" if agree else f"of {s.rank}", bool(s.rank), False
        began = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(computing.Meeting, "_appears", late)
            out = w.refit(2)
        assert time.monotonic() - began < 10
        assert all("boom" in str(r) if agree else "would gather different" in str(r) for r in out), out
        assert [s.went_on for s in w.sources] == [agree] * 2
        for s in w.sources:
            s.digest, s.breaks = "same", False
        for version in (3, 4, 5):
            good(w.refit(version))
            right(w, version)
        kept = {key.split("/")[0] for key in w.sessions[0]._server.coordinator.store._values if key.startswith("x")}
        assert kept == {"x5"}, "of the last attempt only"


def test_what_came_from_the_cache_is_not_written_there_again(monkeypatch, tmp_path):
    puts, put = [], PlanCache.put
    monkeypatch.setattr(PlanCache, "put", lambda cache, part: (puts.append(part.key), put(cache, part)))
    for expected in (1, 1):
        with World(trainers=1, cache_dir=str(tmp_path)) as w:
            good(w.refit(1))
        assert len(puts) == expected
