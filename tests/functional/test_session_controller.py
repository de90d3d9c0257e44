"""What a controller finds when it comes to an engine, and what it leaves when a refit comes to nothing.

The engine is a small stand-in (tests/support/world.py); where the in-process `LLM` is meant, its real handle and gate
stand before it.
"""

import re
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.proc import PATIENCE
from tests.support.world import TOKEN, ToyEngine, ToySource, World, free_port, good, until_true
from xfer.coordinator import coordinator
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import LEAVE_S
from xfer.engines.handles import OfflineLLM
from xfer.engines.remote import CallableEngine
from xfer.errors import DeadlineExceeded, EngineLost, HandshakeError, LayoutError, Unsupported, XferError
from xfer.participants.controller import MIXED, Controller
from xfer.participants.worker import WorkerSession
from xfer.rendezvous.channel import Channel
from xfer.routes import worker_side


class ToyLLM:
    """A ToyEngine behind the methods of vLLM's `LLM`."""

    def __init__(self, toy: ToyEngine):
        self.toy = toy
        parallel = SimpleNamespace(world_size=len(toy.takers))
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=parallel), reset_encoder_cache=lambda: None
        )
        self.init_weight_transfer_engine = lambda d: toy.init(d["init_info"], 0)
        self.start_weight_update = lambda: toy.start_update(0)
        self.update_weights = lambda d: toy.update(d["update_info"], 0)
        self.finish_weight_update = lambda: toy.finish(None, 0)
        self.update_weight_version = lambda text: toy.set_version(text, 0)
        self.get_weight_version = lambda: toy.get_version(0)
        self.reset_prefix_cache = lambda **_: True


def failing(world: World) -> Exception:
    """One refit that ends before a byte moves, after the engine was armed for it."""
    world.sources[0].fail = RuntimeError("stopped by the test")
    world.sessions[0].prepare()
    until_true(lambda: world.engines[0].log.count("update") > world.controllers[0].refits)
    out = world.refit(9)[0]
    world.sources[0].fail = None
    assert isinstance(out, Exception)
    until_true(lambda: world.sessions[0]._server.coordinator.refit is None and world.engines[0].log[-1] != "update")
    time.sleep(0.2)
    return out


def test_an_owner_who_stays_in_serving_costs_that_refit_only():
    world = World(trainers=1)
    toy = ToyEngine(2)
    world.engines = [toy]
    serve = world.serve
    world.serve = lambda _, r: serve(OfflineLLM(ToyLLM(toy)), r)
    with world:
        assert world.refit(1)[0].committed == 1
        inside, leave = threading.Event(), threading.Event()

        def owner():
            with world.controllers[0].serving():
                inside.set()
                leave.wait(30)

        thread = threading.Thread(target=owner, daemon=True)
        thread.start()
        inside.wait(5)
        late = world.refit(2, deadline_s=1.0)[0]
        assert isinstance(late, XferError) and ("serving()" in str(late) or "pausing" in str(late)), late
        leave.set()
        thread.join(5)
        assert world.refit(3)[0].committed == 1
        with world.controllers[0].serving():
            assert not any(t.wrong(3) for t in toy.takers)


def test_a_session_that_an_earlier_controller_left_open_is_known():
    world = World(trainers=1)
    toy = ToyEngine(2)
    toy.open = True  # as vLLM's workers are after a controller that died between start and finish
    world.engines = [toy]
    with world:
        world.controllers[0].wait_ready(10)
        assert "session was open" in toy.log
        assert world.refit(1)[0].committed == 1


@pytest.mark.parametrize(("found", "left"), [("checkpoint-900", "checkpoint-900"), ("xfer:mixed", "xfer:unknown")])
def test_a_refit_that_came_to_nothing_leaves_the_label_that_it_found(found, left):
    world = World(trainers=1)
    toy = ToyEngine(2)
    toy.label = found
    world.engines = [toy]
    with world:
        failing(world)
        assert (toy.label, toy.paused) == (left, False)
        assert world.refit(1, version="a")[0].committed == 1
        failing(world)
        assert (toy.label, toy.paused) == ("a", False)


def test_an_engine_that_was_started_without_weights_serves_after_its_first_commit():
    world = World(trainers=1)
    toy = ToyEngine(2)
    for taker in toy.takers:
        taker.began_with = "nothing"
    world.engines = [toy]
    with world:
        controller = world.controllers[0]
        controller.wait_ready(5)
        assert toy.paused
        with pytest.raises(EngineLost, match="no weights"), controller.serving():
            pass
        with pytest.raises(DeadlineExceeded):
            controller.wait_version(timeout_s=0.1)
        failing(world)
        assert toy.paused, "a refit that wrote nothing must not let random weights serve"
        with pytest.raises(EngineLost, match="no weights"), controller.serving():
            pass
        assert world.refit(1)[0].committed == 1
        assert controller.wait_version(timeout_s=5) == 1 and not toy.paused
        with controller.serving():
            assert not any(t.wrong(1) for t in toy.takers)


@pytest.mark.parametrize(
    ("how", "holds"),
    [("the replica cannot join", "nothing"), ("the trainers leave", "whole"), ("it is closed", "nothing")],
)
def test_a_wait_for_a_version_ends_when_none_can_come_any_more_and_says_why(how, holds):
    """Before it or in it; a deadline that passes meanwhile says what is known."""
    world = World(trainers=1, workers=1, replicas=2, deadline_s=8.0, wait=False)
    world.engines = [ToyEngine(1), ToyEngine(1)]
    taker = world.engines[1].takers[0]
    taker.began_with = holds
    if how == "the replica cannot join":
        taker.read = unreadable
    with world:
        controller, raised = world.controllers[1], []
        if how != "the replica cannot join":
            controller.wait_ready(5)

        def wait():
            try:
                controller.wait_version(timeout_s=60)
            except XferError as e:
                raised.append(e)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        time.sleep(0.2)
        if how == "the trainers leave":
            world.sessions[0].close()
        elif how == "it is closed":
            controller.close()
        thread.join(5)
        why = {"the replica cannot join": "cannot take it", "the trainers leave": "gone|left|closed|lost"}
        assert raised and not isinstance(raised[0], DeadlineExceeded), raised
        assert re.search(why.get(how, "was closed before"), str(raised[0])), raised
        with pytest.raises(type(raised[0])):
            controller.wait_version("5", timeout_s=60)
        if how == "it is closed":
            assert type(raised[0]) is Unsupported, "an EngineLost would be waited for: the next refit mends most"
            with pytest.raises(Unsupported, match="was closed by its owner"):
                controller.wait_ready(60)


def test_a_wait_that_ends_at_its_deadline_tells_what_keeps_the_replica_back():
    world = World(trainers=1)
    world.engines = [ToyEngine(2)]
    for taker in world.engines[0].takers:
        taker.began_with = "nothing"
    with world:
        world.controllers[0].wait_ready(5)
        with pytest.raises(DeadlineExceeded) as late:
            world.controllers[0].wait_version(timeout_s=0.1)
        assert "the first refit brings them" in str(late.value)


def test_verification_sees_constants_that_were_not_written(monkeypatch):
    """Padding comes from no tensor of the checkpoint, so checksums of tensors do not count it."""
    with World(trainers=1) as world:
        assert world.refit(1, verify=True)[0].verified
        for taker in world.engines[0].takers:
            taker.live["embed"][-1] = 5.0
        monkeypatch.setattr("xfer.kernels.torch_impl.TorchRows.fill", lambda self: None)
        assert "constants" in str(world.refit(2, verify=True)[0])
        monkeypatch.undo()
        assert world.refit(3, verify=True)[0].committed == 1


def unreadable(_):
    raise LayoutError("this engine cannot take it", ["by the test"])


@pytest.mark.parametrize(
    ("holds", "in_step"), [("whole", True), ("mix", False), ("mix", True), ("nothing", True), ("whole", False)]
)
def test_an_engine_whose_replica_cannot_join_serves_only_what_is_whole(holds, in_step):
    """Nor does a refit of the other replicas, which arms it in vain, let a mix or random weights serve."""
    world = World(trainers=1, workers=1, replicas=2, deadline_s=6.0, wait=False)
    world.engines = [ToyEngine(1), ToyEngine(1)]
    toy, taker = world.engines[1], world.engines[1].takers[0]
    toy.label, toy.in_step, taker.read, taker.began_with = "default", in_step, unreadable, holds
    if holds == "mix":
        toy.label, toy.paused, taker.began_with = MIXED, True, "whole"
        taker.engage_lock()
    with world:
        controller = world.controllers[1]
        world.controllers[0].wait_ready(5)
        with pytest.raises(LayoutError, match="cannot take it"):
            controller.wait_ready(5)
        for _ in range(2):
            assert toy.paused == (holds != "whole")
            assert (toy.label == "default") == (holds == "whole") and controller.error is not None
            outcomes = world.refit(1, min_replicas=1, deadline_s=3.0)[0].outcomes
            assert [o.committed for o in outcomes] == [True, False]
            time.sleep(0.3)


def test_an_engine_that_was_armed_when_the_trainers_died_serves_again_when_they_are_back():
    world = World(trainers=1, workers=1)
    world.connect()
    toy = world.engines[0]
    assert world.refit(1)[0].committed == 1
    world.sessions[0].prepare()
    coordinator = world.sessions[0]._server.coordinator
    until_true(lambda: coordinator.refit and coordinator.refit.parts[0].armed)
    server = world.sessions[0]._server
    server.closing = True  # the process is gone: it says nothing more to anybody
    server.close()
    until_true(lambda: world.controllers[0].error, 20)
    assert toy.paused and "may hold a mix" in str(world.controllers[0].error)
    with pytest.raises(EngineLost), world.controllers[0].serving():
        pass
    world.close()
    again = World(trainers=1, workers=1)
    again.engines = [toy]
    with again:
        again.controllers[0].wait_ready(5)
        assert (toy.paused, toy.label, again.controllers[0].error) == (False, "xfer:unknown", None)
        assert not toy.takers[0].wrong(1)


@pytest.mark.parametrize("in_step", [False, True])
def test_a_controller_that_was_closed_while_it_joined_leaves_its_place_and_its_engine(in_step):
    world = World(trainers=1, workers=1, deadline_s=8.0)
    world.rendezvous = f"tcp://127.0.0.1:{free_port()}"
    slow, up = ToyEngine(1), threading.Event()
    slow.in_step, slow.workers = in_step, lambda timeout: up.wait(timeout) and 1
    ghost = world.serve(slow, 0)
    ghost.close()
    up.set()
    ghost._thread.join(5)
    assert not ghost._thread.is_alive() and ghost._party is None

    world.engines, world.wait = [ToyEngine(1)], False
    first = world.engines[0]
    first.in_step = in_step
    reading, go = threading.Event(), threading.Event()
    read = first.takers[0].read
    first.takers[0].read = lambda catalog: (reading.set(), go.wait(5), read(catalog))[2]
    with world:
        assert reading.wait(5) and first.paused == in_step
        threading.Timer(0.2, go.set).start()
        world.controllers[0].close()
        world.controllers[0]._thread.join(5)
        assert not first.paused
        world.controllers[0] = world.serve(ToyEngine(1), 0)
        world.controllers[0].wait_ready(5)


def test_ranks_that_wait_for_one_another_are_paused_before_a_worker_is_kept_in_the_call_that_joins():
    world = World(trainers=1)
    toy = ToyEngine(2)
    toy.in_step, toy.label, init, then = True, "default", toy.init, []
    toy.init = lambda info, timeout: (then.append((toy.paused, toy.label)), init(info, timeout))
    world.engines = [toy]
    with world:
        world.controllers[0].wait_ready(5)
        assert then == [(True, "xfer:paused")] and (toy.paused, toy.label) == (False, "default")
        assert world.refit(1)[0].committed == 1


class Apart(ToyEngine):
    """Data-parallel ranks of an engine that somebody resumed just before `update` was called, if `resumed` says so: the later rank is in
    a step, which ends when the earlier one takes part, and that one is in the call."""

    def __init__(self, later: int):
        super().__init__(2)
        self.in_step, self.later, self.resumed = True, later, False

    def update(self, info, timeout):
        if not self.resumed:
            return super().update(info, timeout)
        self._did("update")
        self.resumed = False
        for rank in (1 - self.later, self.later):
            self.sessions[rank].receive(info["attempt"], info["deadline_s"])


@pytest.mark.parametrize("later", [0, 1])
def test_data_parallel_ranks_that_did_not_come_together_are_paused_and_called_again(monkeypatch, later):
    monkeypatch.setattr("xfer.coordinator.commit.APART_S", 0.2)
    toy = Apart(later)
    with World(trainers=1, engines=[toy]) as world:
        world.controllers[0].wait_ready(5)
        toy.log.clear()
        good(world.refit(1))
        once = list(toy.log)
        toy.log.clear()
        toy.resumed = True
        good(world.refit(2))
        assert once == ["pause", "start", "update", "finish", "reset", "resume"]
        assert toy.log == ["pause", "start", "update", "pause", "update", "finish", "reset", "resume"]
        assert not any(t.wrong(2) for t in toy.takers)
        toy.log.clear()
        good(world.refit(3))
        assert toy.log == once


class InStep(CallableEngine):
    def ranks_in_step(self, timeout=0.0):
        return True


def test_a_pause_that_ends_after_its_controller_is_known_for_ours_by_the_next_one(monkeypatch):
    """A rank in the middle of a long step, say: the engine pauses when nobody waits for that any more."""
    monkeypatch.setattr("xfer.participants.controller.SETTLE_GRACE_S", 0.2)
    toy, over = ToyEngine(1), threading.Event()
    toy.label = "default"
    engine = ToyLLM(toy)
    engine.get_world_size, engine.is_paused = lambda: 1, lambda: toy.paused
    engine.pause_generation = lambda: (over.wait(10), toy.pause(0))
    engine.resume_generation = lambda: toy.resume(0)
    world = World(trainers=1, workers=1, wait=False, engines=[toy], deadline_s=8.0)
    world.serve = lambda _, r: Controller(InStep(engine), world.rendezvous, TOKEN, replica=r, deadline_s=0.5)
    with world:
        with pytest.raises(DeadlineExceeded, match="did not answer pause"):
            world.controllers[0].wait_ready(5)
        world.controllers[0].close()
        over.set()
        until_true(lambda: toy.paused)
        world.controllers[0] = Controller(InStep(engine), world.rendezvous, TOKEN, replica=0, deadline_s=8.0)
        world.controllers[0].wait_ready(5)
        assert (toy.paused, toy.label) == (False, "xfer:unknown")
        good(world.refit(1))
        assert not toy.paused


def test_who_has_closed_a_controller_may_serve_at_once(monkeypatch):
    """However late the rendezvous reads that the old one left. The new one was refused: the replica had a controller already."""
    receive = Channel._receive

    def late(channel):
        message = receive(channel)
        if isinstance(message, m.Leave):
            time.sleep(0.3)
        return message

    monkeypatch.setattr(Channel, "_receive", late)
    with World(trainers=1, workers=1) as w:
        good(w.refit(1))
        w.controllers[0].close()
        w.controllers[0] = w.serve(w.engines[0], 0)
        w.controllers[0].wait_ready(10)
        good(w.refit(2))
        assert not w.engines[0].takers[0].wrong(2)


def test_a_rendezvous_that_is_stopped_keeps_nobody_from_leaving(monkeypatch):
    with World(trainers=1, workers=1) as w:
        good(w.refit(1))
        rule = coordinator._ALL, lambda *a: None  # as far as the controller can see
        monkeypatch.setitem(coordinator._RULES, m.Leave, rule)
        began = time.monotonic()
        w.controllers[0].close()
        assert time.monotonic() - began < 2 * PATIENCE + LEAVE_S


def test_an_engine_with_a_drafter_is_joined_again_after_a_controller_died_in_a_refit():
    """vLLM refuses to open an update while one is open, and by that all later answers would be out of step."""
    toy, drafts = ToyEngine(2), []

    def start(draft: bool):
        if toy.open:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        drafts.append(draft)
        toy.start_update(0)

    for died in (False, True):
        llm = ToyLLM(toy)
        llm.start_weight_update = lambda: start(False)
        llm.start_draft_weight_update = lambda: start(True)
        llm.collective_rpc = lambda method: [True, True]
        if died:
            toy.open, toy.label = True, MIXED
        world = World(trainers=1)
        world.engines, serve = [toy], world.serve
        world.serve = lambda _, r, llm=llm, serve=serve: serve(OfflineLLM(llm), r)
        with world:
            world.controllers[0].wait_ready(5)
            assert drafts.count(True) == 1, "it was handed over once, and the workers have it"
            assert world.refit(1)[0].committed == 1


def test_a_worker_beyond_its_replica_is_refused_by_name_and_the_others_go_on():
    """As vLLM's offline data parallelism counted its workers: by the rank that their process has among several."""
    world = World(trainers=1, workers=1, replicas=2, deadline_s=8.0, wait=False)
    world.engines = [ToyEngine(1), ToyEngine(1)]
    odd = world.engines[1]

    def init(info, timeout):
        who = (info["replica"], 1, info["workers"], info["rendezvous"], info["token"], info["deadline_s"])
        odd.sessions = [WorkerSession(odd.takers[0], worker_side, *who)]
        odd.sessions[0].join()

    odd.init = init
    with world:
        world.controllers[0].wait_ready(5)
        with pytest.raises(HandshakeError, match="worker 1 of 1: an engine that was started as one rank of several"):
            world.controllers[1].wait_ready(5)
        outcomes = world.refit(1, min_replicas=1)[0].outcomes
        assert [o.committed for o in outcomes] == [True, False]


@pytest.mark.parametrize("together", [False, True], ids=["read alone", "read together"])
@pytest.mark.parametrize("wait", [False, True])
def test_a_replica_that_fails_before_the_trainers_have_read_is_left_out_like_one_that_fails_later(
    monkeypatch, wait, together
):
    """Unless they wait for all replicas: then they hear why it cannot come."""
    failed, read, join = threading.Event(), ToySource.read, WorkerSession._join

    def after(source):
        failed.wait(20)
        time.sleep(1.0 if together else 0.0)  # longer than what is pointless is waited for
        return read(source)

    def refused(session):
        if session.replica == 1:
            session.index = 1  # of one
            try:
                return join(session)
            finally:
                failed.set()
        return join(session)

    monkeypatch.setattr(ToySource, "read", after)
    monkeypatch.setattr(ToySource, "reads_together", together)
    monkeypatch.setattr("xfer.participants.trainer.STOP_GRACE_S", 0.3)
    monkeypatch.setattr(WorkerSession, "_join", refused)
    world = World(trainers=1, workers=1, replicas=2, deadline_s=20.0, wait=wait)
    if wait:
        with pytest.raises(HandshakeError):
            world.connect()
        return
    with world:
        world.controllers[0].wait_ready(20)
        assert [o.committed for o in world.refit(1, min_replicas=1)[0].outcomes] == [True, False]


def test_a_torn_engine_of_which_only_whole_workers_came_stays_out(monkeypatch):
    """What its label says counts until all workers have spoken."""
    join = WorkerSession._join

    def unless_second(session):
        if session.index == 1:
            raise DeadlineExceeded("no xfer rendezvous answered")
        return join(session)

    monkeypatch.setattr(WorkerSession, "_join", unless_second)
    engine = ToyEngine(2)
    engine.label, engine.paused = MIXED, True
    engine.takers[1].engage_lock()
    w = World(trainers=1, wait=False, deadline_s=3.0, engines=[engine]).connect()
    with pytest.raises(XferError):
        w.controllers[0].wait_ready(10)
    assert engine.paused and engine.label == MIXED and w.controllers[0].torn
    w.close()


def test_a_replica_of_which_a_worker_found_no_lock_is_not_told_to_be_ready():
    """The worker says so after the plan. Other orders, also within a refit: tests/unit/test_coordinator_cases.py."""
    with World(trainers=1, replicas=2) as world:
        assert world.refit(1)[0].committed == 2
        coordinator, toy = world.sessions[0]._server.coordinator, ToyEngine(2)
        world.controllers[1].close()
        until_true(lambda: coordinator.replicas[1].phase.value == "lost")

        def no_lock() -> None:
            world.later(lambda: time.sleep(0.5))  # the coordinator reads this worker's word late
            raise RuntimeError("no lock")

        toy.takers[1].choose_lock, world.engines[1] = no_lock, toy
        world.controllers[1] = world.serve(toy, 1)
        with pytest.raises(XferError, match="no lock"):
            world.controllers[1].wait_ready(10.0)
        assert coordinator.replicas[1].phase.value == "failed"
        late = world.refit(3)[0]
        assert isinstance(late, XferError) and "no lock" in str(late)
        assert not toy.paused and not any(t.wrong(3) for t in world.engines[0].takers)


def test_a_controller_that_is_closed_before_it_pauses_to_join_leaves_its_engine_alone():
    """Its owner was not kept waiting, since nothing was paused yet; and no later one would know that the pause is not for good."""
    world = World(trainers=1, workers=1, deadline_s=8.0, wait=False, engines=[ToyEngine(1)])
    toy, asked, go = world.engines[0], threading.Event(), threading.Event()
    toy.in_step, get_version = True, toy.get_version
    toy.get_version = lambda timeout: (asked.set(), go.wait(10), get_version(timeout))[2]
    with world:
        assert asked.wait(5)
        world.controllers[0].close()
        go.set()
        world.controllers[0]._thread.join(5)
        assert not world.controllers[0]._thread.is_alive() and toy.log == [] and toy.label == ""


def test_who_asks_in_the_moment_in_which_a_version_comes_is_not_told_what_was_before(monkeypatch):
    """That the engine was torn is over, and why it was is not, for a moment."""
    world, told, set_ = World(trainers=1, workers=1), [], Controller._set

    def ask(controller) -> None:
        try:
            controller.wait_ready(5)
            told.append(controller.wait_version("1", 5))
        except XferError as e:
            told.append(e)

    def set_late(controller, *a, **kw):
        if kw.get("version") == 1:
            threads.append(threading.Thread(target=ask, args=(controller,)))
            threads[0].start()
            threads[0].join(0.3)  # long enough to be told something wrong
        set_(controller, *a, **kw)

    threads: list[threading.Thread] = []
    world.engines = [ToyEngine(1)]
    world.engines[0].takers[0].began_with = "nothing"
    with world:
        monkeypatch.setattr(Controller, "_set", set_late)
        good(world.refit(1))
        threads[0].join(5)
    assert told == [1]
