"""Things that happen while others do: joins beside refits that fail, answers that come late, processes of a former life.

Each was a defect once. In test_session_regressions.py are those of a single line of events.
"""

import contextlib
import threading
import time
from dataclasses import replace

import pytest

from tests.functional.test_session_regressions import Widening, connected_while_the_last_replica_joins, transpose
from tests.functional.test_session_routes import epochs, good, move, peers, right  # noqa: F401
from tests.support import cpu_peer, world
from tests.support.world import ToyEngine, ToyLayout, ToySource, ToyTaker, World, until_true
from xfer import errors as e
from xfer.coordinator import coordinator as coordinator_module
from xfer.coordinator import deadlines as bounds
from xfer.coordinator import messages as m
from xfer.coordinator import state
from xfer.coordinator.events import Timers
from xfer.coordinator.failures import heard
from xfer.coordinator.refit import Refit
from xfer.direct import sums
from xfer.direct import trainer as direct_trainer
from xfer.participants import computing, faults, lane, refit
from xfer.participants.worker import WorkerSession
from xfer.plan.cache import PlanCache
from xfer.rendezvous import client as party
from xfer.transport import routes


def leave(w: World, replica: int) -> None:
    w.controllers[replica].close()
    for s in w.engines[replica].sessions:
        s.close()
    gone = w.sessions[0]._server.coordinator.replicas[replica]
    until_true(lambda: gone.phase.value == "lost" and not gone.workers)


def slow(monkeypatch, step: str, seconds: float, of) -> None:
    """A lane takes its time over a step, where `of(lane)`."""
    done = getattr(lane.Lane, step)
    monkeypatch.setattr(lane.Lane, step, lambda self, x: (time.sleep(seconds if of(self) else 0), done(self, x)))


@pytest.mark.parametrize("step", ["_plan", "_open"])
def test_a_refit_that_fails_while_a_replica_joins_leaves_it_joining(monkeypatch, step):
    """It was given up, and nobody told it: its workers waited for their own deadline, and each later refit for it."""
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        slow(monkeypatch, step, 0.7, lambda lane: lane.replica == 1)
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        state = {"_plan": "planning", "_open": "linking"}[step]
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[1].phase.value == state)
        w.sources[1].fail = RuntimeError("boom")
        assert all("boom" in str(r) for r in w.refit(2, min_replicas=1))
        w.sources[1].fail = None
        assert good(w.refit(3)).committed == 2
        right(w, 3)


@contextlib.contextmanager
def running(w: World, version: int):
    """A refit whose trainers are not ready before the end of this. Yields the coordinator and where its reports will be."""
    go_on, out, coordinator = threading.Event(), [], w.sessions[0]._server.coordinator
    drain = w.sources[0].drain
    w.sources[0].drain = lambda: (go_on.wait(30), drain())
    t = threading.Thread(target=lambda: out.extend(w.refit(version, min_replicas=1)), daemon=True)
    t.start()
    until_true(lambda: coordinator.refit is not None and len(coordinator.refit.parts[0].armed) == w.workers)
    try:
        yield coordinator, out
    finally:
        go_on.set()
        t.join(30)
        w.sources[0].drain = drain


@pytest.mark.parametrize("step", ["read", "plan"])
@pytest.mark.parametrize("when", ["before", "within", "again"])
def test_a_joiner_that_fails_within_a_refit_hears_why_at_once(monkeypatch, when, step):
    """`when` it came: as the refit began, later, or once more after it had died in that refit. Whoever joined waited for its
    whole deadline otherwise, inside the engine's call."""
    why, read_on, plan = "tensors of this engine are others", threading.Event(), lane.Lane._plan

    class Failing(ToyTaker):
        def read(self, catalog):
            assert read_on.wait(15)
            if step == "read" and self.rank == 1:
                raise e.LayoutError(why)
            return super().read(catalog)

    def refuse(self, inputs):
        if step == "plan" and self._role == "worker" and self.replica == 1 and self._index == 1:
            raise e.LayoutError(why)
        plan(self, inputs)

    with World(trainers=1, replicas=2) as w, contextlib.ExitStack() as stack:
        good(w.refit(1))

        def serve() -> None:
            monkeypatch.setattr(lane.Lane, "_plan", refuse)
            w.engines[1] = ToyEngine(2)
            w.engines[1].takers = [Failing(i, 2) for i in range(2)]
            w.controllers[1] = w.serve(w.engines[1], 1)
            until_true(lambda: len(w.sessions[0]._server.coordinator.replicas[1].workers) == 2)

        if when != "again":
            leave(w, 1)
        if when == "before":
            serve()
        coordinator, out = stack.enter_context(running(w, 2))
        if when == "again":
            until_true(lambda: len(coordinator.refit.parts[1].armed) == 2)
            leave(w, 1)
        if when != "before":
            serve()
        began = time.monotonic()
        read_on.set()
        with pytest.raises(e.LayoutError, match=why):
            w.controllers[1].wait_ready(15.0)
        assert time.monotonic() - began < w.deadline_s / 2
        assert all(isinstance(s.error, e.LayoutError) for s in w.engines[1].sessions)
        assert coordinator.replicas[1].phase.value == "failed" and not w.engines[1].paused
        stack.close()
        assert good(out).committed == 1
        assert not any(t.wrong(2) for t in w.engines[0].takers)
        assert [str(r).count(why) for r in w.refit(3)] == [1], "it is told as long as it is not served anew"
        monkeypatch.undo()
        w.controllers[1].close()
        until_true(lambda: coordinator.replicas[1].controller is None)
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        w.controllers[1].wait_ready(15.0)
        assert good(w.refit(4)).committed == 2
        right(w, 4)


def test_a_worker_that_comes_after_another_has_failed_hears_why_at_once(monkeypatch):
    """The others were told when that one failed; who said hello later waited for its whole deadline, inside the engine's call."""
    with World(trainers=1, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        replica, join = w.sessions[0]._server.coordinator.replicas[1], WorkerSession._join

        def comes_late(session):
            if session.index == 0:
                until_true(lambda: replica.phase.value == "failed")
            join(session)

        class Failing(ToyTaker):
            def read(self, catalog):
                if self.rank == 1:
                    raise e.LayoutError("tensors of this engine are others")
                return super().read(catalog)

        monkeypatch.setattr(WorkerSession, "_join", comes_late)
        w.engines[1] = ToyEngine(2)
        w.engines[1].takers = [Failing(i, 2) for i in range(2)]
        began = time.monotonic()
        w.controllers[1] = w.serve(w.engines[1], 1)
        with pytest.raises(e.LayoutError, match="tensors of this engine are others"):
            w.controllers[1].wait_ready(w.deadline_s + 10)
        assert time.monotonic() - began < w.deadline_s / 2
        assert all(isinstance(s.error, e.LayoutError) for s in w.engines[1].sessions)
        assert good(w.refit(2, min_replicas=1)).committed == 1
        assert not any(t.wrong(2) for t in w.engines[0].takers)


def test_a_trainer_that_comes_after_a_replica_has_failed_hears_why():
    """It waited for the replica until its deadline, or heard only that those trainers left who had been told."""
    heard: dict[int, str] = {}

    class Late(World):
        def _connect_one(self, i: int):
            if i == 1:
                until_true(
                    lambda: self.sessions[0] and self.sessions[0]._server.coordinator.replicas[0].error is not None
                )
            try:
                super()._connect_one(i)
            except e.XferError as error:
                heard[i] = str(error)
                raise

    class Refusing(ToyEngine):
        def init(self, info, timeout):
            raise RuntimeError("the engine refused")

    began = time.monotonic()
    with pytest.raises(e.EngineLost):
        (w := Late(trainers=2, engines=[Refusing(2)])).connect()
    assert time.monotonic() - began < w.deadline_s / 2
    assert [i for i in range(2) if "the engine refused" not in heard[i]] == [], heard


@pytest.mark.parametrize("at_once", [True, False])
def test_trainers_whose_layouts_all_change_while_a_replica_links_cost_it_one_link(monkeypatch, at_once):
    """Each says of the same link that it is of a layout that is gone. The second one ended the refit that the first one's word
    had let go on."""
    go_on = threading.Event()
    monkeypatch.setattr(refit.computing, "compute", lambda *a: (told.wait(10), 0.0)[1])
    told = threading.Event()
    with World(trainers=3, replicas=2) as w:
        told.set()
        good(w.refit(1))
        told.clear()
        leave(w, 1)
        link = lane.Lane._open

        def late(self, message):
            if self.replica == 1 and self._role == "trainer":
                assert go_on.wait(10)
                time.sleep(0.0 if at_once else 0.3 * self._index)
            link(self, message)

        monkeypatch.setattr(lane.Lane, "_open", late)
        coordinator = w.sessions[0]._server.coordinator
        said: list = []
        senders, _ = coordinator_module._RULES[m.Failed]
        spy = senders, lambda co, c, x: (said.append((c.label, x.epoch)), heard(co, c, x))
        monkeypatch.setitem(coordinator_module._RULES, m.Failed, spy)
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        until_true(lambda: coordinator.replicas[1].phase.value == "linking")
        for s in w.sources:
            transpose(s)
        out: list = []
        t = threading.Thread(target=lambda: out.extend(w.refit(2)), daemon=True)
        t.start()
        until_true(
            lambda: all(s.side.inventory != s._told[1] for s in w.sessions)
        )  # they have looked, and told nobody yet
        go_on.set()
        until_true(lambda: coordinator.replicas[1].phase.value == "ready")
        time.sleep(1.0)
        told.set()
        t.join(30)
        assert len({epoch for _, epoch in said}) == 1 and said[0][1] > 0
        assert good(out).committed == 2
        right(w, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_trainers_that_do_not_agree_what_to_gather_end_the_refit_and_not_a_link(monkeypatch, replicas):
    """It is no word about the link of the replica that joins meanwhile, also where that is the only one."""
    w = connected_while_the_last_replica_joins(trainers=2, replicas=replicas)
    link, go_on = lane.Lane._open, threading.Event()

    def late(self, message):
        if self._role == "worker" and self.replica == replicas - 1:
            assert go_on.wait(15)
        link(self, message)

    monkeypatch.setattr(lane.Lane, "_open", late)
    last = w.sessions[0]._server.coordinator.replicas[replicas - 1]
    until_true(lambda: last.phase.value == "linking")
    epoch = last.epoch
    with monkeypatch.context() as patch:

        def odd(*a):
            raise e.PlanMismatch("trainer ranks would gather different tensors from each other")

        patch.setattr(refit.computing, "compute", odd)
        assert all(isinstance(r, e.PlanMismatch) for r in w.refit(1))
    go_on.set()
    w.controllers[-1].wait_ready(10.0)
    assert last.epoch == epoch and not last.relink, "its link is whole"
    good(w.refit(2))
    right(w, 2)
    w.close()


def test_a_replica_that_joins_beside_a_refit_holds_up_none_of_its_trainers(monkeypatch):
    """Their lanes link for it; what committed was told as "its parameters may still be read"."""
    monkeypatch.setattr(refit, "STOP_GRACE_S", 0.3)
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        w.sessions[0].prepare()
        until_true(lambda: w.sessions[0]._server.coordinator.refit is not None)
        slow(monkeypatch, "_open", 2.0, lambda lane: lane._role == "worker" and lane.replica == 1)
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[1].phase.value == "linking")
        assert good(w.refit(2, min_replicas=1)).committed == 1
        assert w.engines[0].takers[0].wrong(2) == []
        w.controllers[1].wait_ready(15.0)


def test_an_outcome_that_came_while_a_trainer_trained_is_heard_however_late(monkeypatch):
    monkeypatch.setattr(refit, "CALL_GRACE_S", 0.2)
    with World(trainers=2) as w:
        good(w.refit(1))
        returned = threading.Event()
        w.engines[0].takers[0].installs_after(returned)
        assert all(r.pending for r in w.refit(2, wait="sources", deadline_s=2.5))
        returned.set()
        time.sleep(3.0)  # an optimizer step, longer than the deadline of the refit before it and its grace
        for version in (3, 4):
            good(w.refit(version, deadline_s=5.0))
            right(w, version)


def test_a_trainer_that_gave_up_on_a_hub_that_stood_still_says_so(monkeypatch):
    """It has broken its links, and the coordinator, for which that refit went well, let workers begin the next one over them."""
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
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        coordinator, silent, link_on, link = (
            w.sessions[0]._server.coordinator,
            threading.Event(),
            threading.Event(),
            lane.Lane._open,
        )

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


def test_exports_that_disagree_end_the_refit_and_not_the_session():
    w = World(trainers=2)
    w.sources = [Widening(i, 2) for i in range(2)]
    with w:
        good(w.refit(1))
        s = w.sources[0]
        s.wide, s.params["embed"] = True, s.params["embed"].float()
        for _ in range(2):
            assert all(isinstance(r, e.LayoutError) for r in w.refit(2))
        s.wide, s.params["embed"] = False, s.params["embed"].bfloat16()
        good(w.refit(3))
        right(w, 3)


def test_workers_of_a_replicas_former_life_do_not_speak_for_its_present_one():
    class Slow(ToyTaker):
        seconds = 0.8

        def read(self, catalog):
            time.sleep(self.seconds)
            return super().read(catalog)

    class Slower(Slow):
        seconds = 2.0

    with World(trainers=1, replicas=2) as w:
        good(w.refit(1))
        leave(w, 1)
        old, new = ToyEngine(2), ToyEngine(2)
        old.takers, new.takers = [Slow(i, 2) for i in range(2)], [Slower(i, 2) for i in range(2)]
        first = w.serve(old, 1)
        until_true(lambda: len(w.sessions[0]._server.coordinator.replicas[1].workers) == 2)
        first.close()  # its process is restarted while its workers read
        until_true(lambda: w.sessions[0]._server.coordinator.replicas[1].phase.value == "lost")
        w.engines[1] = new
        w.controllers[1] = w.serve(new, 1)
        w.controllers[1].wait_ready(15.0)
        assert good(w.refit(2)).committed == 2
        right(w, 2)


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_closing_after_prepare_leaves_an_engine_in_service(late_s):
    w = World(trainers=1, deadline_s=10.0).connect()
    good(w.refit(1))
    for s in w.engines[0].sessions:
        s._stopped = lambda a, stopped=s._stopped: (time.sleep(late_s), stopped(a))[1]
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


def test_a_replica_whose_plan_is_stale_when_a_refit_ends_early_joins_all_the_same(monkeypatch):
    w = connected_while_the_last_replica_joins(trainers=2, replicas=1)
    slow(monkeypatch, "_plan", 1.0, lambda lane: lane._role == "worker")
    replica = w.sessions[0]._server.coordinator.replicas[0]
    until_true(lambda: replica.phase.value == "planning")
    transpose(w.sources[0])
    drain = w.sources[1].drain
    w.sources[1].drain = lambda: (until_true(lambda: replica.stale), 1 / 0)
    assert all(isinstance(r, e.XferError) for r in w.refit(1))
    w.sources[1].drain = drain
    w.controllers[0].wait_ready(10.0)
    good(w.refit(2))
    right(w, 2)
    w.close()


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
    wait = computing.Meeting._wait

    def late(meeting, *a):
        wait(meeting, *a)
        until_true(meeting._over)

    with World(trainers=2, sources=[Meets(i, 2) for i in range(2)], deadline_s=15.0) as w:
        good(w.refit(1))
        for s in w.sources:
            s.digest, s.breaks, s.went_on = "same" if agree else f"of {s.rank}", bool(s.rank), False
        began = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(computing.Meeting, "_wait", late)
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


def test_timers_come_in_order_and_what_is_over_is_let_go_of():
    timers, said = Timers(), []
    for when, of in ((3.0, None), (1.0, None), (2.0, "over"), (1.0, "there")):
        timers.at(when, lambda when=when, of=of: said.append((when, of)), of)
    timers.drop("over")
    assert timers.next == 1.0
    for action in timers.due(2.5):
        action()
    assert said == [(1.0, None), (1.0, "there")] and timers.next == 3.0
    assert timers.due(2.9) == [] and len(timers.due(3.0)) == 1 and timers.next is None


def test_an_attempt_that_is_over_leaves_no_deadline_behind():
    with World(deadline_s=600.0) as w:
        good(w.refit(1))
        coordinator = w.sessions[0]._server.coordinator
        far = [t for t in coordinator.timers._heap if t[0] > time.monotonic() + 100]
        for version in range(2, 12):
            good(w.refit(version))
        assert len([t for t in coordinator.timers._heap if t[0] > time.monotonic() + 100]) <= len(far)
        assert not any(isinstance(t[3], Refit) for t in coordinator.timers._heap)


@contextlib.contextmanager
def undoing(w: World, monkeypatch):
    """A coordinator that was silent beyond the ends of all ranks' calls of attempt 2 undoes them, as long as this goes on."""
    # For so long trainers wait for a controller: on a busy machine the attempt could be over before it is looked at.
    monkeypatch.setattr("xfer.coordinator.commit.ANSWER_GRACE_S", 30.0)
    coordinator, engine, silent, undone, begun = (
        w.sessions[0]._server.coordinator,
        w.engines[0],
        *(threading.Event() for _ in range(3)),
    )
    pause, resume = engine.pause, engine.resume
    # Not before the coordinator has read that the callers gave up, or bytes might move and there would be nothing to resume.
    engine.pause = lambda t: (until_true(lambda: coordinator.refit.parts[0].phase.value != "arming"), pause(t))
    engine.resume = lambda t: (begun.set(), undone.wait(20), resume(t))
    w.later(lambda: silent.wait(20))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(party, "SILENCE_S", 0.5)
            out = w.refit(2, deadline_s=0.5)
        assert all("no answer in time" in str(r) for r in out), out
        silent.set()
        assert begun.wait(10)
        engine.pause = pause
        yield
    finally:
        silent.set()
        undone.set()
        engine.pause, engine.resume = pause, resume


def calling(w: World, ranks, **how) -> tuple[threading.Thread, list]:
    """These call, and the coordinator has heard all that they have to say for now."""
    calls, out, heard = w.sessions[0]._server.coordinator.refits, [], set()
    on_ready, number = calls.ready, 1 + max(w.sessions[i].attempt for i in ranks)
    # Of an earlier call, which had its error before it was ready, that word may come only now.
    calls.ready = lambda client, msg: (on_ready(client, msg), heard.add((client.hello.index, msg.attempt)))
    thread = threading.Thread(target=lambda: out.extend(w.refit(3, ranks=ranks, **how)), daemon=True)
    thread.start()
    until_true(lambda: out or heard >= {(i, number) for i in ranks})
    calls.ready = on_ready
    return thread, out


def has_begun(coordinator, number: int) -> bool:
    """It may be over by now."""
    running = coordinator.refit
    return number in coordinator.refits.finished or running is not None and running.number == number


@pytest.mark.parametrize("early", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("change", [None, move, transpose])
def test_a_call_that_comes_while_a_silent_hub_undoes_the_one_before_begins_when_it_has(monkeypatch, early, change):
    """Whichever ranks call before that and after; the first were refused, and the others with them."""
    with World(trainers=2) as w:
        good(w.refit(1))
        with undoing(w, monkeypatch):
            for s in w.sources if change else ():
                change(s)
            thread, out = calling(w, early)
            assert not out and w.sessions[0]._server.coordinator.refit.number == 2
        until_true(lambda: has_begun(w.sessions[0]._server.coordinator, 3))
        out += w.refit(ranks=[i for i in range(2) if i not in early])
        thread.join(30)
        assert {r.version for r in [good(out), *out]} == {2}
        right(w, 3)
        good(w.refit(4))
        right(w, 4)


def test_a_call_that_cannot_begin_by_its_deadline_says_what_was_still_undone(monkeypatch):
    with World(trainers=2) as w:
        good(w.refit(1))
        with undoing(w, monkeypatch):
            began = time.monotonic()
            thread, out = calling(w, (0,), deadline_s=0.8)
            thread.join(30)
            out += w.refit(ranks=[1])  # the same call, of a rank that comes later
            assert time.monotonic() - began < 0.8 + bounds.CALL_GRACE_S and len(out) == 2
            for error in out:
                assert isinstance(error, e.DeadlineExceeded) and "could not begin" in error.message, error
                assert "replica 0 controller: resuming" in str(error), error
            thread, out = calling(w, (0, 1))  # and the one after that waits again
        thread.join(30)
        good(out)
        right(w, 3)


def test_a_call_that_waits_hears_at_once_that_another_rank_has_failed_in_it(monkeypatch):
    with World(trainers=2) as w:
        good(w.refit(1))
        with undoing(w, monkeypatch):
            thread, out = calling(w, (0,))
            (bad,) = w.refit(ranks=[1], min_replicas=-1)
            thread.join(10)  # what is undone takes longer
            assert all("min_replicas=-1" in str(r) for r in [bad, *out]) and len(out) == 1, out
        good(w.refit(4))
        right(w, 4)


def test_a_rank_that_calls_anew_without_a_word_ends_the_call_that_it_left(monkeypatch):
    """It was interrupted before it had told the coordinator: nobody would have come to that attempt, and all would have waited for it."""
    with World(trainers=2) as w:
        good(w.refit(1))
        coordinator, point, left = w.sessions[0]._server.coordinator, faults.point, []

        def interrupted(who, index, where):
            if (index, where) == (0, "enter") and not left:
                left.append(index)
                raise KeyboardInterrupt
            point(who, index, where)

        monkeypatch.setattr(faults, "point", interrupted)
        assert isinstance(w.refit(2, ranks=[0])[0], KeyboardInterrupt)
        waits: list = []
        other = threading.Thread(target=lambda: waits.extend(w.refit(2, ranks=[1])), daemon=True)
        other.start()
        until_true(lambda: coordinator.refit is not None)
        out: list = []
        anew = threading.Thread(target=lambda: out.extend(w.refit(3, ranks=[0])), daemon=True)
        anew.start()
        other.join(8)
        assert waits and "trainer 0 has left refit 2" in str(waits[0]), waits
        out += w.refit(ranks=[1])
        anew.join(30)
        good(out)
        right(w, 3)


def test_a_rank_that_raises_while_no_replica_is_there_is_told_to_who_is_inside_at_once():
    with World(trainers=3) as w:
        good(w.refit(1))
        leave(w, 0)
        coordinator, out = w.sessions[0]._server.coordinator, []
        inside = threading.Thread(target=lambda: out.extend(w.refit(2, ranks=[0])), daemon=True)
        inside.start()
        until_true(lambda: coordinator.refit is not None)
        w.sources[1].fail, began = RuntimeError("boom"), time.monotonic()
        out += w.refit(2, ranks=[1])
        inside.join(30)
        assert time.monotonic() - began < w.deadline_s / 2
        assert len(out) == 2 and all("boom" in str(r) for r in out), out
        assert "boom" in str(w.refit(2, ranks=[2])[0])
