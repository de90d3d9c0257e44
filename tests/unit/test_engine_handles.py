"""Handles with fake engines: the order of calls, deadlines, and states from which vLLM does not recover by itself."""

import asyncio
import gc
import json
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import xfer
from examples.common.ports import free_port
from tests.support.http import serving
from tests.support.world import until_true
from xfer.engines.choose_handle import handle_for
from xfer.engines.gate import Gate
from xfer.engines.handles import AsyncEngine, OfflineLLM
from xfer.engines.remote import CallableEngine, HttpEngine
from xfer.errors import DeadlineExceeded, EngineLost, Unsupported, XferError
from xfer.participants.engine import EngineHandle

T = 5.0


class EngineDeadError(Exception):
    """vLLM's has this name."""


class FakeVllm:
    """vLLM's rules of a weight update: start twice, update or finish without a start raise; an error in finish leaves it active."""

    def __init__(self, workers=2):
        self.log, self.active, self.paused, self.version = [], False, False, "default"
        self.fail, self.block, self.refused, self.world = "", {}, [], workers

    def do(self, call, *args):
        self.log.append((call, *args))
        if call in self.block:
            self.block[call].wait(30)
        if call in ("start_weight_update", "update_weights", "finish_weight_update"):
            if self.active == (call == "start_weight_update"):
                self.refused.append(call)
                raise RuntimeError(f"{call} while a weight update is {'' if self.active else 'not '}active")
            self.active = True
        if call == self.fail:
            self.fail, self.active = "", call != "update_weights"
            raise (ValueError if call == "update_weights" else EngineDeadError)(f"{call} broke")
        if call == "finish_weight_update":
            self.active = False
        if call in ("pause_generation", "resume_generation"):
            self.paused = call == "pause_generation"
        if call == "update_weight_version":
            (self.version,) = args
        return {"is_paused": self.paused, "reset_prefix_cache": True}.get(call)

    @property
    def calls(self):
        return [c[0] for c in self.log]


class Fake:
    """An engine whose methods are those of its core."""

    def __init__(self, core):
        self.core = core

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._do(name, *args, *sorted(kwargs.items()))

    def _do(self, *call):
        return self.core.do(*call)


class FakeLLM(Fake):
    def __init__(self, core, **parallel):
        super().__init__(core)
        self.llm_engine = Fake(core)
        self.llm_engine.vllm_config = configured(world_size=core.world, **parallel)


def configured(**parallel):
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel))


class FakeAsync(Fake):
    """Its core runs one call after the other, as vLLM's engine core does."""

    def __init__(self, core, ranks=2):
        super().__init__(core)
        self.thread = ThreadPoolExecutor(1)
        self.vllm_config = configured(world_size_across_dp=core.world, data_parallel_size=ranks)

    async def _do(self, *call):
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.core.do, *call)

    async def pause_generation(self, *, mode, clear_cache):
        return await self._do("pause_generation", mode, clear_cache)

    async def resume_generation(self):
        return await self._do("resume_generation")

    async def collective_rpc(self, name, kwargs):
        return await self._do(name, *kwargs.values())


class FakeActor(Fake):
    def get_world_size(self):
        return self.core.world

    def __getattr__(self, name):
        if name not in {*CallableEngine._METHODS.values(), *CallableEngine._OPTIONAL.values()}:
            raise AttributeError(name)
        return super().__getattr__(name)


@contextmanager
def http_engine(core, **how):
    """Each request has the headers that the handle was given."""
    routes, heads, key = {"/pause": "pause_generation", "/resume": "resume_generation"}, [], "Bearer of this test"

    def answer(method, url, body):
        path, _, query = url.partition("?")
        args = [query] * bool(query) + (list(json.loads(body).values()) if body else [])
        if path == "/get_world_size":
            return 200, {"world_size": core.world}
        try:
            value = core.do(routes.get(path, path[1:]), *args)
        except Exception as e:
            return 500, {"error": str(e)}
        return 200, {"is_paused": value} if path == "/is_paused" else {"success": True}

    with serving(answer, heads=heads) as (url,):
        yield handle_for(url, headers={"Authorization": key}, **how)
    assert {h["Authorization"] for h in heads} == {key}


@contextmanager
def running_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


KINDS = {
    "offline": OfflineLLM, "async": AsyncEngine, "async ranks": AsyncEngine, "http": HttpEngine, "actor": CallableEngine,
}  # fmt: skip


@contextmanager
def handle_of(kind, **how):
    core = FakeVllm()
    if kind == "offline":
        yield handle_for(FakeLLM(core), **how), core
    elif kind.startswith("async"):
        with running_loop() as loop:
            yield handle_for(FakeAsync(core, 1 + (kind == "async ranks")), loop=loop, in_order=True, **how), core
    elif kind == "http":
        with http_engine(core, **how) as handle:
            yield handle, core
    else:
        yield handle_for(FakeActor(core)), core


def write(handle, core, ahead=False):
    """Make a controller's calls up to the end of `update`. It knows that end `ahead` of the answer, and sends what follows."""
    hang = core.block["update_weights"] = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            handle.pause(T)
            handle.set_version("xfer:mixed", T)
            handle.start_update(T, then={"attempt": 1} if ahead else None)
            updating = pool.submit(handle.update, {"attempt": 1}, T)
            until_true(lambda: core.calls[-1] == "update_weights")
            if ahead:
                handle.finish_ahead(not handle.keeps_caches)
        finally:
            hang.set()
        updating.result(T)


def refit(handle, core, version, ahead=False):
    write(handle, core, ahead)
    handle.finish(version, T)
    if not handle.keeps_caches:
        handle.reset_caches(T)
    handle.resume(T)


def owner(handle, call):
    how = {"mode": "keep", "clear_cache": False} if call == "pause" else {}
    asyncio.run_coroutine_threadsafe(getattr(handle.engine, f"{call}_generation")(**how), handle._loop).result(T)


CACHES = ("reset_prefix_cache", "reset_encoder_cache")
"""Not that of processed images, which holds nothing that weights computed: a request on its way counts on it."""
CALLS = dict(
    pause="pause_generation", start="start_weight_update", update="update_weights", finish="finish_weight_update"
)  # fmt: skip
LATE = ("pause is late", "start is late", "update is late")
FAILURES = ("start fails", "update fails", "finish fails", *LATE, "torn", "torn ahead")
PAUSES = (
    "their pause", "their resume", "their resume in a refit", "a pause of a dead controller", "their pause in a refit",
)  # fmt: skip
STEPS = (*FAILURES, *PAUSES, "no session", "commit", "commit ahead")


def fails(handle, core, how):
    """Make one refit that does not end."""
    name, _, what = how.partition(" ")
    if what == "fails":
        core.fail = CALLS[name]
        dead = name != "update" and not isinstance(handle, HttpEngine)  # a server says no more than that it failed
        with pytest.raises(XferError, match=name) as error:
            refit(handle, core, "lost", ahead=name == "start")
        assert type(error.value) is (EngineLost if dead else XferError)
        if name == "start":  # an update that was sent behind it is forgotten
            handle.get_version(T)
            assert handle.in_order == (core.calls[-2] == "update_weights")
            core.active = False  # the fake fails late
    elif name == "torn":
        write(handle, core, what == "ahead")
        handle.get_version(T)
        last = "finish_weight_update" if handle.keeps_caches else "reset_prefix_cache"
        assert (core.calls[-2] == last) == (handle.in_order and what == "ahead")
    else:
        if name == "update":
            handle.start_update(T)
        elif name == "pause":
            handle.ask_paused(T)
        else:
            handle.finish(None, T)
        late = {"pause": handle.pause, "start": handle.start_update, "update": partial(handle.update, {})}[name]
        hang = core.block[CALLS[name]] = threading.Event()
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            late(0.02)
        until_true(lambda: core.calls[-1] == CALLS[name])
        with pytest.raises(DeadlineExceeded, match="earlier call"):
            handle.set_version("too early", 0.02)
        assert core.calls[-1] == CALLS[name]  # nothing was sent behind it
        hang.set()
        until_true(handle._outstanding.future.done)
        core.block = {}
    assert core.version not in ("lost", "too early")


def commits(handle, core, version, ahead, mode, paused):
    """Make a refit that ends. `paused`: whether the engine's owner has paused it."""
    caches = () if handle.keeps_caches else CACHES
    handle.ask_paused(T)
    began = len(core.log)
    refit(handle, core, version, ahead)
    handle.resume(T)  # once too often
    calls = core.calls[began:]
    assert core.version == version and not core.active and not handle.session_open
    assert all(calls.count(c) == 1 for c in ("update_weights", *caches)), calls
    # The first one may have closed an older session.
    finished = len(calls) - 1 - calls[::-1].index("finish_weight_update")
    last = [calls.index("update_weights"), finished, *map(calls.index, caches)]
    end = caches[1:] or ("update_weight_version",)
    assert last == sorted(last) and core.calls[-1] in ("is_paused", "resume_generation", *end), calls
    assert calls.index("start_weight_update") < last[0] and core.paused == paused
    if isinstance(handle, OfflineLLM):  # its pause is the gate, which nobody else has
        assert not {"pause_generation", "resume_generation"} & {*calls}
    else:
        assert "is_paused" not in calls[: calls.index("pause_generation")], "asked after the engine had been asked"
        assert calls.count("resume_generation") == (not paused)
    said = [str(call).replace("'", "").lower() for call in core.log[began:]]
    assert caches or not [x for x in said if "reset" in x or "keep_cache" in x]
    if isinstance(handle, CallableEngine):  # the object behind it forwards calls without arguments
        return
    for call in said:
        asked = re.findall("pause_generation.*?(keep|wait).*false", call)
        assert not call.startswith("(pause_generation") or asked == [mode.removesuffix("_cache")], call
        assert "reset_prefix" not in call or re.search("reset_running_requests(=|, )true", call), call


@pytest.mark.parametrize("kind", KINDS)
@given(st.booleans(), st.lists(st.sampled_from(STEPS), max_size=5), st.sampled_from(["keep", "wait", "keep_cache"]))
@settings(max_examples=40, derandomize=True, phases=[Phase.explicit, Phase.generate])
@example(True, [], "keep")
@example(False, ["pause is late"], "keep")  # pause mode "wait" and a long request: it ends after the refit has given up
@example(False, ["their pause", "torn", "their resume"], "keep")
@example(False, ["their resume in a refit", "their pause", "a pause of a dead controller"], "keep")
@example(False, ["their pause in a refit", "their resume", "torn"], "keep")
@example(False, ["torn ahead"], "keep")  # a cache that was dropped before the next weights came would be served then
@example(False, ["start is late"], "keep")
@example(False, ["start fails"], "keep")
@example(False, ["finish fails", "update fails"], "keep")
def test_whatever_failed_before_the_next_refit_commits(kind, left_open, steps, mode):
    """No call is sent that vLLM refuses: later replies would be out of step. A handle ends its own pauses and no others: vLLM's sleep is a
    pause too. `left_open`: an earlier controller left an update active."""
    mode = mode.replace("wait", "keep") if kind == "offline" else mode  # an LLM's requests wait between its steps
    with handle_of(kind, pause_mode=mode) as (handle, core):
        assert handle.keeps_caches == (mode == "keep_cache" and kind != "actor")
        assert type(handle) is KINDS[kind] and isinstance(handle, EngineHandle)
        assert handle.workers(T) == 2 and handle_for(handle) is handle
        handle.init({"replica": 0}, T)
        handle.resume(T)
        assert core.calls[-1] == "init_weight_transfer_engine", "it was not paused"
        gated, theirs = kind == "offline", False
        if left_open:
            core.active = True
            handle.assume_open_session()
        for n, step in enumerate([*steps, "commit", "commit ahead", "commit"]):
            if "commit" in step:
                commits(handle, core, f"v{n}", step == "commit ahead", mode, theirs)
            elif step == "no session" and not (core.active or handle.session_open):
                with pytest.raises(XferError, match="start_update"):
                    handle.update({}, T)
                handle.finish(None, T)
            elif step in FAILURES and not (gated and step == "pause is late"):
                fails(handle, core, step)
            elif gated:
                continue
            elif step == "their pause" and not core.paused:
                core.paused = theirs = True
            elif step == "their resume" and theirs:
                core.paused = theirs = False
            elif step == "their resume in a refit" and not theirs:
                handle.pause(T)
                core.paused = False
                handle.pause(T)
                assert core.paused, "the second pause corrects it"
                core.paused, asked = False, len(core.log)
                handle.resume(T)
                no_ranks = kind == "async"  # that wait for one another
                assert no_ranks or "resume_generation" not in core.calls[asked:]
            elif step == "their pause in a refit" and kind.startswith("async"):
                # Other engines do not tell it from the refit's.
                for call in ("pause", "resume", "pause")[2 * theirs :]:
                    handle.pause(T)
                    owner(handle, call)
                    handle.resume(T)
                    assert core.paused == (call == "pause")
                theirs = True
            elif step == "a pause of a dead controller":
                if kind.startswith("async"):  # the object keeps the owner's pause in a refit, for later controllers too
                    owner(handle, "resume")
                core.paused, theirs = True, False
                handle.assume_paused()
        assert core.refused == []


def test_a_server_that_listens_later_is_waited_for_and_one_without_its_routes_is_refused():
    port = free_port()
    handle = HttpEngine(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineLost, match="cannot be reached"):
        handle.workers(0.2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(handle.workers, 30.0)
        time.sleep(0.7)
        with serving(lambda *_: (200, {"world_size": 3}), port=port):
            assert waits.result(30) == 3
    with serving(lambda *_: (404, "")) as (url,), pytest.raises(Unsupported, match="VLLM_SERVER_DEV_MODE=1"):
        HttpEngine(url).workers(T)


@pytest.mark.parametrize(
    "version, asked", [("0.26.0", False), ("0.27.1", False), ("0.28.0", True), ("0.32.1rc1", True)]
)
def test_workers_that_cannot_say_whether_they_have_a_drafter_are_not_asked(version, asked):
    """vLLM 0.26 and 0.27 have the route for drafters, and their workers do not know the question."""
    said = {
        "/openapi.json": {"paths": {"/start_draft_weight_update": {}}},
        "/version": {"version": version},
        "/collective_rpc": {"results": ["True", "True"]},
    }
    with serving(lambda method, path, body: (200, said.get(path, {}))) as (url,):
        assert HttpEngine(url).hand_over_drafter(T) is asked


@pytest.mark.parametrize("waits", [True, False], ids=["the owner waits", "the owner does not wait"])
def test_pauses_and_resumes_of_data_parallel_ranks_do_not_overlap(waits):
    """The owner makes some and handles make others; each data-parallel rank runs a call between its own steps."""
    core, sent, asked = FakeVllm(), [], []
    ended = core.block["pause_generation"] = threading.Event()

    class Engine(FakeAsync):
        async def is_paused(self):
            return core.paused

        async def _do(self, *args):
            sent.append(args[0].partition("_")[0])
            return await super()._do(*args)

    class Refits(AsyncEngine):
        def _send(self, call, **args):
            sending = super()._send(call, **args)
            asked.append(call)
            return sending

    with running_loop() as loop, ThreadPoolExecutor(1) as pool:
        engine = Engine(core)
        seen, first, second = weakref.ref(engine), Refits(engine, loop), AsyncEngine(engine, loop)

        def owner(call, **how):
            return asyncio.run_coroutine_threadsafe(getattr(seen(), call)(**how), loop)

        pausing = owner("pause_generation", mode="keep", clear_cache=False)
        until_true(lambda: sent == ["pause"])
        if not waits:
            pausing.cancel()
        refit = pool.submit(first.pause, T)
        until_true(lambda: "pause" in asked)
        resuming = owner("resume_generation")
        time.sleep(0.1)
        assert sent == ["pause"]
        ended.set()
        resuming.result(T)
        refit.result(T)
        assert sent == ["pause", "pause", "resume"] and not core.paused
        owner("resume_generation").result(T)
        assert len(sent) == 3, "it was not paused"
        second.pause(T)
        second.resume(T)
        assert sent[3:] == ["pause", "resume"]
        del first, second, engine, refit
        until_true(lambda: seen() is None)  # vLLM's engines end their processes when they are let go of


def vllms(core, module="vllm.v1.engine.async_llm", **methods):
    """A FakeAsync with methods that this module defines."""
    for method in methods.values():
        method.__module__ = module
    return type("Engine", (FakeAsync,), methods)(core)


@pytest.mark.parametrize(
    "module, called", [("vllm.v1.engine.async_llm", "pause_scheduler"), ("somebodys.wrapper", "pause_generation")]
)
def test_an_async_engine_is_paused_by_its_core_which_does_not_sleep(module, called):
    """`AsyncLLM.pause_generation` sleeps for 20 ms after that, in every refit."""
    core = FakeVllm()

    async def paused(self, *, mode, clear_cache):
        return await self._do("pause_generation", mode, clear_cache)

    async def pause_scheduler_async(*, mode, clear_cache):
        return await engine._do("pause_scheduler", mode, clear_cache)

    engine = vllms(core, module, pause_generation=paused)
    engine.engine_core = SimpleNamespace(pause_scheduler_async=pause_scheduler_async)
    with running_loop() as loop:
        handle = AsyncEngine(engine, loop, pause_mode="wait")
        refit(handle, core, "v1")
    assert core.log[:2] == [("is_paused",), (called, "wait", False)] and not handle.in_order


@pytest.mark.parametrize("answers", [(True, True, True), (True, True, False), (False, True, True)])
def test_every_data_parallel_rank_must_have_dropped_its_cache(answers):
    """vLLM 0.25 asks all ranks and returns the answer of the first."""
    asked = []

    async def ask(*args, engine):
        asked.append((engine, *args))
        return answers[engine]

    async def first(self, **_):
        return answers[0]

    engine = vllms(FakeVllm(), reset_prefix_cache=first)
    engine.engine_core = SimpleNamespace(core_engines=range(len(answers)), _call_utility_async=ask)
    engine.vllm_config.model_config = SimpleNamespace(is_multimodal_model=False, is_encoder_decoder=False)
    llm = FakeLLM(FakeVllm())
    llm.reset_prefix_cache = lambda **_: all(answers)
    with running_loop() as loop:
        for handle in (AsyncEngine(engine, loop), OfflineLLM(llm)):
            if all(answers):
                handle.reset_caches(T)
            else:
                with pytest.raises(XferError, match="prefix cache"):
                    handle.reset_caches(T)
    assert asked == [(rank, "reset_prefix_cache", True, True) for rank in range(len(answers))]


@pytest.mark.parametrize("again", [False, True], ids=["one handle", "a later handle"])
def test_an_offline_refit_and_the_owner_wait_for_each_other_unless_a_worker_hangs(again):
    """A controller may be closed, and its LLM served again, while another thread of the owner generates."""
    core = FakeVllm()
    llm = FakeLLM(core)
    earlier = handle = OfflineLLM(llm)
    if again:
        handle = OfflineLLM(llm)
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with earlier.hold(), earlier.hold():  # re-entrant
            inside.set()
            leave.wait(10)

    def owner(come_in: bool) -> threading.Thread:
        inside.clear()
        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        assert inside.wait(5 if come_in else 0.2) == come_in
        return thread

    owner(True)
    with pytest.raises(DeadlineExceeded, match="inside serving"):
        handle.pause(0.2)
    leave.set()
    handle.pause(T)  # waits for the first call too
    handle.start_update(T)
    hang = core.block["update_weights"] = threading.Event()
    waiting = owner(False)
    with pytest.raises(DeadlineExceeded):
        handle.update({}, 0.1)
    assert waiting.is_alive()
    with pytest.raises(DeadlineExceeded):
        handle.stay_paused(0.1)
    waiting.join(T)
    assert not waiting.is_alive()
    hang.set()  # the worker answers: the next refit keeps owners out again
    handle.finish(None, T)
    handle.pause(T)
    waiting = owner(False)
    handle.resume(T)
    waiting.join(T)
    assert not waiting.is_alive()


@pytest.mark.parametrize("called", [False, True])
def test_an_engine_and_its_thread_end_with_the_handle(called):
    threads = threading.active_count()
    llm = FakeLLM(FakeVllm())
    seen = weakref.ref(llm)
    handle = OfflineLLM(llm)
    if called:
        handle.workers(T)
    del handle, llm
    until_true(lambda: gc.collect() >= 0 and seen() is None and threading.active_count() <= threads)


def test_the_gate_admits_one_at_a_time():
    gate, inside, most = Gate(), 0, 0

    def user():
        nonlocal inside, most
        for _ in range(50):
            with gate.entered():
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=user) for _ in range(4)]
    [t.start() for t in threads]
    for _ in range(20):
        gate.close()
        assert inside == 0
        gate.open()
    [t.join(10) for t in threads]
    assert most == 1
    with pytest.raises(RuntimeError):
        gate.open()


def test_calls_that_would_block_the_engines_own_loop_are_refused():
    async def on_the_loop():
        with pytest.raises(Unsupported, match="own event loop"):
            AsyncEngine(FakeAsync(FakeVllm()), asyncio.get_running_loop()).start_update(T)
        controller = xfer.serve(
            FakeAsync(FakeVllm()), rendezvous="tcp://127.0.0.1:9", token="a long token", deadline_s=1.0
        )
        for wait in (controller.wait_ready, controller.wait_version):
            with pytest.raises(Unsupported, match="own event loop") as refused:
                wait(T)
            assert "asyncio.to_thread(controller.wait_ready)" in refused.value.violations[0]
        with pytest.raises(XferError) as missing:
            await asyncio.to_thread(controller.wait_ready, T)
        assert not isinstance(missing.value, Unsupported)
        controller.close()

    asyncio.run(on_the_loop())


def test_what_no_handle_can_drive_is_refused_with_what_it_needs():
    core = FakeVllm()
    part = FakeLLM(core, distributed_executor_backend="external_launcher")
    for engine, *needs in (
        (FakeAsync(core), "event loop"),
        (object(), "object.pause_generation"),
        ("somewhere", "URL"),
        ("http://user:s3cret@127.0.0.1:9", "headers="),
        (part, "external_launcher", "replica=RANK", "CallableEngine"),
    ):
        with pytest.raises(Unsupported) as refused:
            handle_for(engine)
        said = str(refused.value)
        assert all(word in said for word in needs) and "s3cret" not in said, said


# ---- the worker's half of vLLM's calls


@pytest.mark.engine
def test_an_in_process_worker_is_called_on_its_own_device(monkeypatch):
    """The device of a new thread is cuda:0, and a thread of xfer calls an `LLM` whose worker is in the same process."""
    from xfer.engines.vllm_worker import XferWeightTransferEngine

    thread, calls = threading.local(), []

    def called(name):
        return lambda *args: calls.append((name, getattr(thread, "device", "cuda:0")))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(thread, "device", str(device)))
    worker = XferWeightTransferEngine.__new__(XferWeightTransferEngine)
    worker.device, worker.session = torch.device("cuda:1"), SimpleNamespace(receive=called("receive"))
    worker.parallel_config, worker.workers = SimpleNamespace(rank=0, world_size=1), 1
    monkeypatch.setattr(worker, "_join", called("join"))
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=None),
        init_weight_transfer_engine=lambda request: worker.init_transfer_engine(request["init_info"]),
        start_weight_update=called("vLLM's start"),
        finish_weight_update=called("vLLM's finish"),
        update_weights=lambda request: worker.update_weights(request["update_info"]),
    )
    handle = OfflineLLM(llm)
    handle.init({}, 10.0)
    handle.start_update(10.0)
    handle.update({"attempt": 1, "deadline_s": 1.0}, 10.0)
    handle.update({"no such": "field"}, 10.0)  # logged, since after an error vLLM's executor mixes up later answers
    assert calls == [(name, "cuda:1") for name in ("join", "vLLM's start", "receive")]
