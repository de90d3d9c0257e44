"""Controllers: the states in which they find an engine, and the state in which a refit without effect leaves it."""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest

from tests.functional.test_session_changes import unreadable
from tests.support.simulation import Killed, simulated
from tests.support.world import TOKEN, ToyEngine, World, free_port, good, until_true
from xfer.background import BackgroundCall
from xfer.coordinator import coordinator
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import LEAVE_S
from xfer.coordinator.events import Disconnected, Received
from xfer.engines.handles import OfflineLLM
from xfer.engines.remote import CallableEngine
from xfer.errors import DeadlineExceeded, EngineLost, LayoutError, Unsupported, XferError
from xfer.participants.controller import MIXED, PAUSED, Controller
from xfer.participants.worker import WorkerSession
from xfer.rendezvous.server import Server
from xfer.sglang.engines import _Forwarder
from xfer.sglang.plugin import CALL

pytestmark = pytest.mark.usefixtures(simulated.__name__)


class ToyLLM:
    """A ToyEngine behind the methods of vLLM's `LLM`."""

    def __init__(self, toy: ToyEngine):
        self.toy = toy
        parallel = SimpleNamespace(world_size=len(toy.takers))
        config = SimpleNamespace(parallel_config=parallel)
        self.llm_engine = SimpleNamespace(vllm_config=config, reset_encoder_cache=lambda: None)
        self.init_weight_transfer_engine = lambda d: toy.init(d["init_info"], 0)
        self.start_weight_update = lambda: toy.start_update(0)
        self.update_weights = lambda d: toy.update(d["update_info"], 0)
        self.finish_weight_update = lambda: toy.finish(None, 0)
        self.update_weight_version = lambda text: toy.set_version(text, 0)
        self.get_weight_version = lambda: toy.get_version(0)
        self.reset_prefix_cache = lambda **_: True


def world(*engines: ToyEngine, **how) -> World:
    """One trainer, and these engines (one of a worker, if none is given)."""
    engines = engines or (ToyEngine(1),)
    return World(trainers=1, replicas=len(engines), engines=list(engines), **how)


def behind(handle, w: World) -> World:
    """Its controllers call this handle in the place of an engine."""
    serve = w.serve
    w.serve = lambda _, replica: serve(handle, replica)
    return w


def serves(controller: Controller) -> bool:
    try:
        with controller.serving():
            return True
    except EngineLost:
        return False


def failing(w: World) -> None:
    """A refit that ends before a byte moves, after the engine was armed for it."""
    w.sources[0].fail = RuntimeError("stopped by the test")
    w.sessions[0].prepare()
    until_true(lambda: w.engines[0].log.count("update") > w.controllers[0].refits)
    w.fails(9, XferError, "stopped by the test")
    w.sources[0].fail = None
    until_true(lambda: w.coordinator.refit is None and w.engines[0].log[-1] != "update")
    time.sleep(0.2)


def test_an_owner_that_stays_in_serving_costs_that_refit_only():
    toy = ToyEngine(2)
    with behind(OfflineLLM(ToyLLM(toy)), world(toy)) as w:
        w.commits(1)
        with w.controllers[0].serving():
            (late,) = w.fails(2, XferError, deadline_s=1.0)
        assert "serving()" in str(late) or "pausing" in str(late), late
        w.commits(3)
        assert serves(w.controllers[0])


# ---- what a controller finds


def test_an_engine_with_a_drafter_is_joined_again_after_a_controller_died_in_a_refit():
    """vLLM's workers keep the update open, and a second start would raise and leave later answers out of step."""
    toy, drafts = ToyEngine(2), []

    def start(draft: bool):
        if toy.open:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        drafts.append(draft)
        toy.start_update(0)

    for died in (False, True):
        llm = ToyLLM(toy)
        llm.start_weight_update, llm.start_draft_weight_update = lambda: start(False), lambda: start(True)
        llm.collective_rpc = lambda method: [True, True]
        if died:
            toy.open, toy.label = True, MIXED
        with behind(OfflineLLM(llm), world(toy)) as w:
            w.controllers[0].wait_ready(5)
            assert drafts.count(True) == 1, "it was handed over once, and the workers have it"
            w.commits(1)


def test_an_engine_that_was_started_without_weights_serves_after_its_first_commit(monkeypatch):
    """A call that asks while the version arrives is not told that there are no weights."""
    toy, asked, set_ = ToyEngine(2), [], Controller._set
    for taker in toy.takers:
        taker.began_with = "nothing"

    def set_late(controller, *a, **kw):
        if kw.get("version") == 1:
            asked.append(BackgroundCall(lambda: (controller.wait_ready(5), controller.wait_version("1", 5))[1]))
            asked[0].ended(time.monotonic() + 0.3)  # long enough to be told something wrong
        set_(controller, *a, **kw)

    monkeypatch.setattr(Controller, "_set", set_late)
    with world(toy) as w:
        controller = w.controllers[0]
        controller.wait_ready(5)
        assert toy.paused and not serves(controller)
        with pytest.raises(DeadlineExceeded, match="the first refit brings them"):
            controller.wait_version(timeout_s=0.1)
        failing(w)
        assert toy.paused and not serves(controller), "a refit that wrote nothing must not let random weights serve"
        w.commits(1)
        assert asked[0].take(time.monotonic() + 5) == controller.wait_version(timeout_s=5) == 1
        assert not toy.paused and serves(controller)


def test_only_caches_of_whole_versions_outlive_a_refit_and_only_where_the_owner_says_so():
    """Somebody resumes the engine by force whenever it is paused. `kept`: what its caches were computed with."""
    events = ("no weights", "", "a refit that wrote nothing", "a torn engine", "", "another controller", "")
    for keeps, befores in ((True, events), (False, events[:2])):
        toy, kept, version = ToyEngine(2), [], 0
        toy.keeps_caches, toy.reset_caches = keeps, lambda timeout, kept=kept: kept.clear()
        taker = toy.takers[1]
        taker.began_with = "nothing"
        with world(toy) as w:
            w.controllers[0].wait_ready(5)
            for before in befores:
                kept.append(taker.holds if version == 0 else version)
                if before == "a refit that wrote nothing":
                    failing(w)
                elif before == "a torn engine":
                    taker.run_recipes = lambda: 1 / 0
                    w.fails(9, XferError, "ZeroDivisionError")
                    until_true(lambda: w.controllers[0].torn)
                    kept.append(taker.holds)
                    del taker.run_recipes
                elif before == "another controller":
                    w.leave(0)
                    w.come(0, toy).wait_ready(5)
                earlier, version = [*kept], version + 1
                w.commits(version)
                whole = before in ("", "a refit that wrote nothing")
                assert kept == (earlier if keeps and whole else []), before
                assert not keeps or not whole or version - 1 in kept


def test_a_sampler_waits_for_weights_that_are_not_too_old():
    """Also where the version that it waits for was skipped. A text is no number, so it is never recent enough."""
    with world(ToyEngine(2)) as w:
        controller = w.controllers[0]
        for weights, version in enumerate((3, "seven", 8), 1):
            w.commits(weights, version=version)
            if version == 8:
                assert controller.wait_version(at_least=5, timeout_s=5) == controller.wait_version(at_least=8) == 8
            else:
                with pytest.raises(DeadlineExceeded, match="a version that a refit brought from 5 on"):
                    controller.wait_version(at_least=5, timeout_s=0.01)


@pytest.mark.parametrize(
    ("holds", "in_step"), [("whole", True), ("mix", False), ("mix", True), ("nothing", True), ("whole", False)]
)
def test_an_engine_whose_replica_cannot_join_serves_only_what_is_whole(holds, in_step):
    """A refit of the other replicas does not put a mix or random weights into service either."""
    toy = ToyEngine(1)
    taker = toy.takers[0]
    toy.label, toy.in_step, taker.read, taker.began_with = "default", in_step, unreadable, holds
    if holds == "mix":
        toy.label, toy.paused, taker.began_with = MIXED, True, "whole"
        taker.engage_lock()
    with world(ToyEngine(1), toy, deadline_s=6.0, wait=False) as w:
        w.controllers[0].wait_ready(5)
        with pytest.raises(LayoutError, match="cannot take it"):
            w.controllers[1].wait_ready(5)
        for _ in range(2):
            assert toy.paused == (holds != "whole") and (toy.label == "default") == (holds == "whole")
            assert w.controllers[1].error is not None
            assert [o.committed for o in w.refit(1, min_replicas=1, deadline_s=3.0)[0].outcomes] == [True, False]
            time.sleep(0.2)


def test_a_torn_engine_of_which_only_whole_workers_came_stays_out(monkeypatch):
    """Its label decides until all workers have joined."""
    join, toy = WorkerSession._join, ToyEngine(2)

    def unless_second(session):
        if session.index == 1:
            raise DeadlineExceeded("no xfer rendezvous answered")
        return join(session)

    monkeypatch.setattr(WorkerSession, "_join", unless_second)
    toy.label, toy.paused = MIXED, True
    toy.takers[1].engage_lock()
    with world(toy, wait=False, deadline_s=2.0) as w:
        with pytest.raises(XferError):
            w.controllers[0].wait_ready(10)
        assert toy.paused and toy.label == MIXED and w.controllers[0].torn


def test_an_engine_that_was_left_between_commit_and_reset_drops_its_caches_before_it_serves():
    """Its weights are whole and new, and its caches come from those before."""
    toy = ToyEngine(2)
    with world(toy) as w:
        w.commits(1)
        toy.fail["reset"] = XferError("cache blocks are held")
        with pytest.raises(XferError, match="could not be resumed"):
            good(w.refit(2, deadline_s=5.0))
        until_true(lambda: w.controllers[0].torn)
        assert toy.paused and all(taker.holds == "whole" for taker in toy.takers)
        w.leave(0)
        del toy.log[:]
        w.come(0, toy).wait_ready(5)
        assert toy.log == ["pause", "reset", "resume"] and not toy.paused


class Dying:
    """A ToyEngine whose controller is killed when `calls` of a refit's calls have reached the engine."""

    def __init__(self, toy: ToyEngine):
        self.toy, self.calls = toy, -1

    def __getattr__(self, name: str):
        call = getattr(self.toy, name)
        if name not in ("pause", "set_version", "start_update", "finish", "reset_caches", "resume"):
            return call

        def then_die(*args, **how):
            call(*args, **how)
            self.calls -= 1
            if self.calls == 0:
                raise Killed

        return then_die


@pytest.mark.parametrize("trainers", ["live on", "are killed too"])
def test_the_next_controller_resumes_an_engine_whose_controller_was_killed_in_a_refit(trainers):
    """At any point between its pause and its resume: also where the label is that of a version, and the pause could be its owner's."""
    for calls in range(1, 8):
        toy = ToyEngine(2)
        toy.label, engine = "default", Dying(toy)
        with behind(engine, world(toy)) as w:
            w.commits(1)
            engine.calls = calls
            w.fails(2, XferError, "replica 0 controller", deadline_s=5.0)
            until_true(lambda: not w.controllers[0]._thread.is_alive())
            assert toy.paused == (calls < 7), calls
            if trainers == "live on":
                w.controllers[0] = w.serve(toy, 0)
                serves_again(w, toy)
        if trainers != "live on":
            with world(toy) as w:
                serves_again(w, toy)


def serves_again(w: World, toy: ToyEngine) -> None:
    w.controllers[0].wait_ready(5)
    whole = all(taker.holds == "whole" for taker in toy.takers)
    assert (toy.paused, toy.label in (MIXED, PAUSED)) == (not whole, not whole)
    if whole:
        stays_paused_by_its_owner(w, toy)
    version = str(w.commits(3).version)
    assert (toy.paused, toy.label) == (False, version)
    stays_paused_by_its_owner(w, toy)


def stays_paused_by_its_owner(w: World, toy: ToyEngine) -> None:
    until_true(lambda: not any(taker.paused for taker in toy.takers))
    toy.paused = True
    w.leave(0)
    w.come(0, toy).wait_ready(5)
    assert toy.paused
    toy.paused = False


class ToySGLang(_Forwarder):
    """A ToyEngine behind the routes of SGLang's server, which does not say whether it is paused."""

    def __init__(self, toy: ToyEngine):
        super().__init__("retract")
        self.toy, self.served = toy, []

    def _ask(self, route: str, **body):
        toy = self.toy
        if route == "get_weights_by_name":
            asked = json.loads(body["name"].removeprefix(CALL))
            return [1.0] if asked["call"] == "workers" else getattr(toy, asked["call"])(asked["info"], 0)
        if route == "continue_generation":
            self.served.append(toy.takers[0].holds)
        calls = {
            "pause_generation": toy.pause, "continue_generation": toy.resume, "begin_weight_update": toy.start_update,
            "end_weight_update": lambda timeout: toy.finish(None, timeout),
            "update_weight_version": lambda timeout: toy.set_version(body["new_version"], timeout),
        }  # fmt: skip
        return calls[route](0) if route in calls else True

    def get_weight_version(self):
        return self.toy.label


@pytest.mark.parametrize(("label", "holds"), [("default", "whole"), (MIXED, "mix"), (PAUSED, "nothing")])
def test_an_sglang_server_that_xfer_has_paused_stays_so_while_it_joins_again(label, holds):
    toy = ToyEngine(1)
    toy.label, toy.paused, toy.takers[0].began_with = label, label != "default", holds
    engine = ToySGLang(toy)
    with behind(CallableEngine(engine), world(toy)) as w:
        w.controllers[0].wait_ready(5)
        assert toy.paused == (label != "default")
        w.commits(1)
        assert not toy.paused and set(engine.served) == {"whole"}


def test_a_sampler_hears_that_a_worker_is_gone_and_gets_no_version_that_nobody_serves():
    with world() as w:
        w.commits(1)
        controller = w.controllers[0]
        assert controller.wait_version(timeout_s=5) == 1
        w.engines[0].sessions[0].close()
        until_true(lambda: controller.error is not None)
        assert controller.version is None
        with pytest.raises(XferError, match="worker 0"):
            controller.wait_version(at_least=1, timeout_s=5)


@pytest.mark.parametrize(
    ("how", "holds", "why"),
    [("the replica cannot join", "nothing", "cannot take it"), ("the trainers leave", "whole", "gone|left|closed|lost"),
     ("it is closed", "nothing", "was closed before")],
)  # fmt: skip
def test_a_wait_for_a_version_ends_when_none_can_come_any_more_and_says_why(how, holds, why):
    toy = ToyEngine(1)
    toy.takers[0].began_with = holds
    if how == "the replica cannot join":
        toy.takers[0].read = unreadable
    with world(ToyEngine(1), toy, deadline_s=8.0, wait=False) as w:
        controller = w.controllers[1]
        if how != "the replica cannot join":
            controller.wait_ready(5)
        wait = BackgroundCall(lambda: controller.wait_version(timeout_s=60))
        time.sleep(0.2)
        if how == "the trainers leave":
            w.sessions[0].close()
        elif how == "it is closed":
            controller.close()
        assert wait.ended(time.monotonic() + 5) and re.search(why, str(wait.error)), wait.error
        assert not isinstance(wait.error, DeadlineExceeded)
        with pytest.raises(type(wait.error)):
            controller.wait_version("5", timeout_s=60)
        if how == "it is closed":
            assert type(wait.error) is Unsupported, "an EngineLost would be waited for: the next refit mends most"
            with pytest.raises(Unsupported, match="was closed by its owner"):
                controller.wait_ready(60)


# ---- data-parallel ranks that step together


class Apart(ToyEngine):
    """Two data-parallel ranks. `resumed`: another client resumes the engine just before `update`. Then the later rank is in a step
    that ends only when the earlier one, which is in the call already, takes part."""

    def __init__(self, later: int):
        super().__init__(2)
        self.in_step, self.later, self.resumed = True, later, False
        self.label, self.at_init = "default", []

    def init(self, info, timeout):
        self.at_init.append((self.paused, self.label))
        super().init(info, timeout)

    def update(self, info, timeout):
        if not self.resumed:
            return super().update(info, timeout)
        self._did("update")
        self.resumed = False
        for rank in (1 - self.later, self.later):
            self.sessions[rank].receive(info["attempt"], info["deadline_s"])


@pytest.mark.parametrize("later", [0, 1])
def test_data_parallel_ranks_that_did_not_come_together_are_paused_and_called_again(monkeypatch, later):
    """They are also paused before the call in which a worker joins."""
    monkeypatch.setattr("xfer.coordinator.commit.APART_S", 0.2)
    toy = Apart(later)
    with world(toy) as w:
        w.controllers[0].wait_ready(5)
        assert toy.at_init == [(True, "xfer:paused")] and (toy.paused, toy.label) == (False, "default")
        once = ["pause", "start", "update", "finish", "reset", "resume"]
        for version, resumed in ((1, False), (2, True), (3, False)):
            toy.log.clear()
            toy.resumed = resumed
            w.commits(version)
            again = ["pause", "start", "update", "pause", "update", "finish", "reset", "resume"]
            assert toy.log == (again if resumed else once)


class InStep(CallableEngine):
    def ranks_in_step(self, timeout=0.0):
        return True


def test_a_pause_that_ends_after_its_controller_is_known_for_ours_by_the_next_one(monkeypatch):
    """A rank may be in a long step: the engine then pauses after the controller has given up."""
    monkeypatch.setattr("xfer.participants.controller.SETTLE_GRACE_S", 0.2)
    toy, over = ToyEngine(1), threading.Event()
    toy.label = "default"
    llm = ToyLLM(toy)
    llm.get_world_size, llm.is_paused = lambda: 1, lambda: toy.paused
    llm.pause_generation = lambda: (over.wait(10), toy.pause(0))
    llm.resume_generation = lambda: toy.resume(0)
    w = world(toy, wait=False, deadline_s=8.0)
    w.serve = lambda _, r, s=0.5: Controller(InStep(llm), w.rendezvous, TOKEN, replica=r, deadline_s=s)
    with w:
        with pytest.raises(DeadlineExceeded, match="did not answer pause"):
            w.controllers[0].wait_ready(5)
        w.controllers[0].close()
        over.set()
        until_true(lambda: toy.paused)
        w.controllers[0] = w.serve(toy, 0, 8.0)
        w.controllers[0].wait_ready(5)
        assert (toy.paused, toy.label) == (False, "xfer:unknown")
        w.commits(1)
        assert not toy.paused


# ---- controllers that are closed


@pytest.mark.parametrize("in_step", [False, True])
def test_a_controller_that_was_closed_while_it_joined_leaves_its_place_and_its_engine(in_step):
    w = world(wait=False, deadline_s=8.0)
    w.rendezvous, slow, up = f"tcp://127.0.0.1:{free_port()}", ToyEngine(1), threading.Event()
    slow.in_step, slow.workers = in_step, lambda timeout: up.wait(timeout) and 1
    ghost = w.serve(slow, 0)
    ghost.close()
    up.set()
    ghost._thread.join(5)
    assert not ghost._thread.is_alive() and ghost._party is None

    first, reading, go = w.engines[0], threading.Event(), threading.Event()
    first.in_step, read = in_step, first.takers[0].read
    first.takers[0].read = lambda catalog: (reading.set(), go.wait(5), read(catalog))[2]
    with w:
        assert reading.wait(5) and first.paused == in_step
        threading.Timer(0.2, go.set).start()
        w.controllers[0].close()
        w.controllers[0]._thread.join(5)
        assert not first.paused
        w.come(0, ToyEngine(1)).wait_ready(5)


def test_a_controller_that_is_closed_before_it_pauses_to_join_leaves_its_engine_alone():
    """`close()` does not wait, since nothing was paused yet; a later controller could not tell that such a pause is xfer's."""
    toy, asked, go = ToyEngine(1), threading.Event(), threading.Event()
    toy.in_step, get_version = True, toy.get_version
    toy.get_version = lambda timeout: (asked.set(), go.wait(10), get_version(timeout))[2]
    with world(toy, wait=False, deadline_s=8.0) as w:
        assert asked.wait(5)
        w.controllers[0].close()
        go.set()
        w.controllers[0]._thread.join(5)
        assert not w.controllers[0]._thread.is_alive() and toy.log == [] and toy.label == ""


def test_an_engine_may_be_served_again_as_soon_as_its_controller_is_closed(monkeypatch):
    """However late the rendezvous reads that the old one left. The new one was once refused beside it."""
    feed = Server.feed

    def late(server, event):
        if isinstance(event, Disconnected) or isinstance(event, Received) and isinstance(event.message, m.Leave):
            server.loop.call_later(0.3, feed, server, event)
        else:
            feed(server, event)

    with world() as w:
        w.commits(1)
        monkeypatch.setattr(Server, "feed", late)
        w.controllers[0].close()
        w.come(0, w.engines[0]).wait_ready(10)
        w.commits(2)


def test_a_rendezvous_that_is_stopped_keeps_no_controller_from_leaving(monkeypatch):
    with world() as w:
        w.commits(1)
        rule = coordinator._ALL, lambda *a: None  # as far as the controller can see
        monkeypatch.setitem(coordinator._RULES, m.Leave, rule)
        began = time.monotonic()
        w.controllers[0].close()
        assert time.monotonic() - began < 2 + LEAVE_S
