"""Controllers: the states in which they find an engine, and the state in which a refit without effect leaves it."""

import contextlib
import itertools
import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from tests.functional.test_session_changes import unreadable
from tests.support.simulation import Killed, simulated
from tests.support.world import TOKEN, ToyEngine, World, free_port, until_true
from xfer.background import BackgroundCall
from xfer.coordinator import coordinator
from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import LEAVE_S
from xfer.coordinator.events import Disconnected, Received
from xfer.engines.handles import OfflineLLM
from xfer.engines.remote import CallableEngine
from xfer.errors import DeadlineExceeded, EngineLost, Unsupported, XferError
from xfer.participants.controller import MIXED, PAUSED, Controller
from xfer.participants.worker import WorkerSession
from xfer.rendezvous.server import Server

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


class Engine(ToyEngine):
    """`served`: what its workers held whenever it was resumed. `kept`: what its caches were computed with. `at_init`: whether it was paused
    when it was last told to join, and its label. `calls`: after how many calls of a refit its controller is killed."""

    def __init__(self, workers: int = 2, holds: str = "whole"):
        super().__init__(workers)
        self.label, self.served, self.kept, self.calls = "default", set(), [], 0
        for name in ("pause", "set_version", "start_update", "finish", "reset_caches", "resume"):
            setattr(self, name, partial(self._carry_out, getattr(self, name)))
        for taker in self.takers:
            taker.began_with = holds

    def _carry_out(self, call, *args, **how):
        call(*args, **how)
        if self.calls:
            self.calls -= 1
            if not self.calls:
                raise Killed

    def init(self, info, timeout):
        self.at_init = self.paused, self.label
        super().init(info, timeout)

    def hand_over_drafter(self, timeout):
        self._did("drafter")

    def resume(self, timeout):
        self.served |= {taker.holds for taker in self.takers}
        super().resume(timeout)

    def reset_caches(self, timeout):
        super().reset_caches(timeout)
        self.kept.clear()


def world(*engines: ToyEngine, **how) -> World:
    """One trainer, and these engines (one of a worker, if none is given)."""
    engines = engines or (ToyEngine(1),)
    return World(trainers=1, replicas=len(engines), engines=list(engines), **how)


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
    """Its drafter is handed over once, by an empty update, when it joins."""
    toy = ToyEngine(2)
    behind = ToyLLM(toy)
    behind.collective_rpc = lambda method: [method == "supports_draft_weight_updates"] * 2
    behind.start_draft_weight_update = lambda: (toy._did("drafter"), toy.start_update(0))
    w, llm = world(toy), OfflineLLM(behind)
    w.serve = lambda _, replica, serve=w.serve: serve(llm, replica)
    with w:
        w.commits(1)
        assert toy.log[:3] == ["drafter", "start", "finish"] and toy.log.count("drafter") == 1
        with w.controllers[0].serving():
            (late,) = w.fails(2, XferError, deadline_s=1.0)
        assert "serving()" in str(late) or "pausing" in str(late), late
        w.commits(3)
        assert serves(w.controllers[0])


# ---- what a controller finds


def happens(what: str | int, w: World, toy: Engine) -> None:
    """Before a commit. A number: the controller is killed after so many calls of a refit, and another one comes."""
    taker = toy.takers[1]
    if what == "no weights":
        with pytest.raises(DeadlineExceeded, match="the first refit brings them"):
            w.controllers[0].wait_version(timeout_s=0.1)
        failing(w)
    elif what == "a refit that wrote nothing":
        failing(w)
    elif what == "a torn engine":
        taker.run_recipes = lambda: 1 / 0
        w.fails(9, XferError, "ZeroDivisionError")
        until_true(lambda: w.controllers[0].torn)
        toy.kept.append(taker.holds)
        del taker.run_recipes
        failing(w)
    elif what == "a reset that failed":  # the weights are whole and new, the caches come from those before
        toy.fail["reset"] = XferError("cache blocks are held")
        w.fails(9, XferError, "could not be resumed", deadline_s=5.0)
        until_true(lambda: w.controllers[0].torn)
    elif isinstance(what, int):
        toy.calls = what
        w.fails(9, XferError, "replica 0 controller", deadline_s=5.0)
        until_true(lambda: not w.controllers[0]._thread.is_alive())
        assert toy.paused == (what < 7), what
        w.controllers[0] = w.serve(toy, 0)
        w.controllers[0].wait_ready(5)


EVENTS = ["no weights", "", "a refit that wrote nothing", "a torn engine", "", "another controller", ""]


@pytest.mark.parametrize(("keeps", "events"), [(True, EVENTS), (False, [*EVENTS, "a reset that failed", *range(1, 8)])])
def test_an_engine_serves_whole_versions_only_and_caches_outlive_them_only_where_its_owner_says_so(
    monkeypatch, keeps, events
):
    """Caches of anything but a whole version never do. Where a controller was killed between its pause and its resume, the next one resumes
    what is whole, also where the label is that of a version and the pause could be the owner's; what the owner has paused stays so."""
    set_, asked, version, toy = Controller._set, [], 0, Engine(2, "nothing")

    def set_late(controller, *a, **kw):
        if kw.get("version") == 1:  # a call that asks while it arrives is not told that there are no weights
            asked.append(BackgroundCall(lambda: (controller.wait_ready(5), controller.wait_version("1", 5))[1]))
            asked[0].ended(time.monotonic() + 0.3)
        set_(controller, *a, **kw)

    monkeypatch.setattr(Controller, "_set", set_late)
    toy.keeps_caches = keeps
    with world(toy) as w:
        w.controllers[0].wait_ready(5)
        for event in events:
            toy.kept.append(version or "nothing")
            happens(event, w, toy)
            stale = event == "a reset that failed"
            whole = not stale and all(taker.holds == "whole" for taker in toy.takers)
            assert (toy.paused, toy.label in (MIXED, PAUSED), serves(w.controllers[0])) == (not whole, not whole, whole)
            if anew := stale or event == "another controller" or isinstance(event, int):
                until_true(lambda: not (whole and any(taker.paused for taker in toy.takers)))  # noqa: B023
                toy.paused = True
                w.leave(0)
                toy.log.clear()
                w.come(0, toy).wait_ready(5)
                assert toy.paused != stale and (not stale or toy.log == ["pause", "reset", "resume"])
                toy.paused = toy.paused and not whole
            earlier, version = [*toy.kept], version + 1
            report = w.commits(version)
            # Of a controller that has just come, nobody knows what its engine's caches come from.
            assert toy.kept == (earlier if keeps and whole and not anew else []) and not toy.paused, event
            assert w.controllers[0].wait_version(timeout_s=5) == report.version and serves(w.controllers[0])
    assert asked[0].take(time.monotonic() + 5) == 1 and toy.served == {"whole"}


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


UNJOINED = {"a worker does not come": "no layout yet from worker 1", "its layout cannot be read": "cannot take it"}


@pytest.mark.parametrize("joins", ["it joins", *UNJOINED])
@pytest.mark.parametrize("in_step", [False, True])
def test_an_engine_whose_controller_comes_anew_serves_if_and_only_if_all_of_it_is_whole(monkeypatch, in_step, joins):
    """By what its workers say, and by its label for those that do not come. A refit of other replicas puts nothing into service. What xfer
    has paused is paused while it joins: an SGLang server, which does not say that it is paused, would be resumed then."""
    join, gone = WorkerSession._join, joins == "a worker does not come"

    def unless_second(session):
        if gone and session.index == 1:
            raise DeadlineExceeded("by the test")
        return join(session)

    monkeypatch.setattr(WorkerSession, "_join", unless_second)
    for label, all_of_it in itertools.product(("default", MIXED, PAUSED), (True, False)):
        # A controller may have died just before it set another label.
        holds = "whole" if all_of_it else "mix" if label == MIXED else "nothing"
        toy, ours = Engine(2, holds), label != "default"
        toy.label, toy.in_step, toy.paused, toy.open = label, in_step, ours, label == MIXED
        if holds == "mix":
            toy.takers[1].engage_lock()
        if joins == "its layout cannot be read":
            toy.takers[1].read = unreadable
        whole, labels = all_of_it and not (gone and ours), ["xfer:unknown" if ours else "default"]
        if not whole:  # without a layout, its replica is not known to hold nothing
            labels = [MIXED if label == MIXED else PAUSED] + [MIXED] * (joins == "its layout cannot be read")
        with world(Engine(1), toy, wait=False, deadline_s=2.0 if gone else 6.0) as w:
            w.controllers[0].wait_ready(5)
            with contextlib.nullcontext() if joins == "it joins" else pytest.raises(XferError, match=UNJOINED[joins]):
                w.controllers[1].wait_ready(10)
            # After a death in a refit vLLM's update is open: its workers have their drafter, and another start would raise.
            assert ("drafter" in toy.log, "session was open" in toy.log) == (not toy.open, toy.open), (label, holds)
            if ours or in_step:
                assert toy.at_init == (True, MIXED if label == MIXED else PAUSED)
            for _ in range(2):
                assert (toy.paused, w.controllers[1].torn) == (not whole, not whole), (label, holds)
                assert toy.label in labels, (label, holds)
                if joins != "it joins":
                    assert w.controllers[1].error is not None
                    outcomes = w.refit(1, min_replicas=1, deadline_s=3.0)[0].outcomes
                    assert [o.committed for o in outcomes] == [True, False]
                    time.sleep(0.2)
            if joins == "it joins":
                assert w.commits(1).committed == 2 and (toy.paused, toy.label) == (False, "1")
        assert toy.served <= {"whole"}, (label, holds)


@pytest.mark.parametrize(
    ("how", "holds", "why"),
    [("the replica cannot join", "nothing", "cannot take it"), ("the trainers leave", "whole", "gone|left|closed|lost"),
     ("a worker is gone", "whole", "worker 0"), ("it is closed", "nothing", "was closed before")],
)  # fmt: skip
def test_a_wait_for_a_version_ends_when_none_can_come_any_more_and_says_why(how, holds, why):
    """Nor does it get a version that nobody serves any more."""
    toy = Engine(1, holds)
    if how == "the replica cannot join":
        toy.takers[0].read = unreadable
    with world(Engine(1), toy, deadline_s=8.0, wait=False) as w:
        controller = w.controllers[1]
        if how != "the replica cannot join":
            controller.wait_ready(5)
        if how == "a worker is gone":
            w.commits(1)
            assert controller.wait_version(timeout_s=5) == 1
        wait = BackgroundCall(lambda: controller.wait_version("5", timeout_s=60))
        time.sleep(0.2)
        if how == "the trainers leave":
            w.sessions[0].close()
        elif how == "a worker is gone":
            toy.sessions[0].close()
        elif how == "it is closed":
            controller.close()
        assert wait.ended(time.monotonic() + 5) and re.search(why, str(wait.error)), wait.error
        assert not isinstance(wait.error, DeadlineExceeded) and controller.version is None
        for more in ({}, dict(at_least=1)):
            with pytest.raises(type(wait.error)):
                controller.wait_version(timeout_s=60, **more)
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
    with world(toy) as w:
        w.controllers[0].wait_ready(5)
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
@pytest.mark.parametrize("where", ["the engine", "its rendezvous", "the label", "a layout"])
def test_a_controller_that_is_closed_while_it_waits_to_join_leaves_its_place_and_its_engine(where, in_step):
    """Whatever it waits for. `close` waits where something is paused: a later controller could not tell that such a pause is xfer's."""
    toy, asked, go = ToyEngine(1), threading.Event(), threading.Event()
    toy.in_step, w = in_step, world(toy, wait=False, deadline_s=8.0)
    w.rendezvous, early = f"tcp://127.0.0.1:{free_port()}", where in ("the engine", "its rendezvous")
    called = {"the engine": (toy, "workers"), "the label": (toy, "get_version"), "a layout": (toy.takers[0], "read")}
    if where in called:
        of, name = called[where]
        call = getattr(of, name)
        setattr(of, name, lambda *a: (asked.set(), go.wait(10), call(*a))[2])
    with contextlib.closing(w):
        closed = w.serve(toy, 0) if early else w.connect().controllers[0]
        assert where not in called or asked.wait(5)
        assert toy.paused == (in_step and where == "a layout")
        threading.Timer(0.2, go.set).start()
        closed.close()
        closed._thread.join(3)
        assert not closed._thread.is_alive() and not toy.paused and toy.label == ""
        assert where == "a layout" or not toy.log
        if early:
            assert closed._party is None
        else:
            w.come(0, ToyEngine(1)).wait_ready(5)


@pytest.mark.parametrize("heard", ["late", "never"])
def test_a_controller_is_closed_soon_however_late_the_rendezvous_reads_that_it_left(monkeypatch, heard):
    """Its engine may be served again as soon as it is closed. The new controller was once refused beside the old one."""
    feed = Server.feed

    def late(server, event):
        if isinstance(event, Disconnected) or isinstance(event, Received) and isinstance(event.message, m.Leave):
            server.loop.call_later(0.3, feed, server, event)
        else:
            feed(server, event)

    with world() as w:
        w.commits(1)
        if heard == "late":
            monkeypatch.setattr(Server, "feed", late)
        else:  # as far as the controller can see
            monkeypatch.setitem(coordinator._RULES, m.Leave, (coordinator._ALL, lambda *a: None))
        began = time.monotonic()
        w.controllers[0].close()
        assert time.monotonic() - began < 2 + LEAVE_S
        if heard == "late":
            w.come(0, w.engines[0]).wait_ready(10)
            w.commits(2)
