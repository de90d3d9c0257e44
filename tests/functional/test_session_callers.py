"""What callers of nccl_xfer_refit() do to each other and to themselves: some call and some do not, two threads call at once,
arguments are wrong or differ, somebody leaves early. Every such call ends in a typed error, in time, and the next is whole."""

import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import xfer
from examples.common.ports import free_port
from tests.support.connect import flat_connect
from tests.support.world import TOKEN, ToyEngine, ToySource, World, failed, good, right, trainer_session, until_true
from xfer import errors as e
from xfer.coordinator import messages as m
from xfer.participants.trainer import TrainerSession
from xfer.rendezvous.channel import Channel

ROOT = Path(__file__).resolve().parents[2]


class NoDevMode(BaseHTTPRequestHandler):
    """`vllm serve` without VLLM_SERVER_DEV_MODE."""

    def do_GET(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("wait", [True, False])
def test_a_server_that_cannot_be_controlled_is_named_by_connect_at_once(wait):
    """Else all ranks would wait to their deadline and be asked whether anybody serves."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NoDevMode) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        rendezvous, refits = f"tcp://127.0.0.1:{free_port()}", {}

        def connect(rank: int):
            time.sleep(1.0 * rank)  # late, and told the same
            refits[rank] = flat_connect(
                trainer=ToySource(rank, 2), rendezvous=rendezvous, token=TOKEN, deadline_s=20.0, wait=wait,
                engines=[f"http://127.0.0.1:{server.server_port}"], cache_dir=None,
            )  # fmt: skip

        def run(i: int):
            connect(i)
            time.sleep(1.0)
            return xfer.nccl_xfer_refit(refits[i], deadline_s=5.0)

        t0 = time.monotonic()
        out = World(trainers=2).on_all(run)
        assert time.monotonic() - t0 < 15
        for raised in out:
            assert isinstance(raised, e.XferError) and "VLLM_SERVER_DEV_MODE=1" in str(raised), raised
        for r in refits.values():
            r.close()
        server.shutdown()


def test_controllers_that_were_made_before_an_engine_was_refused_give_their_places_back():
    rendezvous, made, again = f"tcp://127.0.0.1:{free_port()}", ToyEngine(1), ToyEngine(1)
    for engine, seconds in ((made, 0.5), (again, 1.0)):  # servers that come up late
        engine.workers = lambda timeout, seconds=seconds: time.sleep(seconds) or 1
    connect = dict(trainer=ToySource(0, 1), rendezvous=rendezvous, token=TOKEN, deadline_s=8.0, cache_dir=None)
    with pytest.raises(e.Unsupported, match="URL"):
        flat_connect(engines=[made, "10.0.0.2:8000"], **connect)
    with flat_connect(engines=[again], **connect) as refit:
        assert xfer.nccl_xfer_refit(refit).committed == 1
    assert not again.takers[0].wrong(0) and made.takers[0].wrong(0)


@pytest.mark.parametrize(("wait", "late_s"), [(True, 1.0), (False, 0.0), (False, 1.0)])
def test_what_is_no_engine_is_named_to_all_ranks(wait, late_s):
    """Rank 0 sees it before it waits for anything; to the others it had just left."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"

    def run(i: int):
        time.sleep(late_s * i)
        connect = dict(
            trainer=ToySource(i, 2), rendezvous=rendezvous, token=TOKEN, deadline_s=20.0, cache_dir=None, wait=wait
        )
        with flat_connect(engines=[object()], **connect) as refit:
            return xfer.nccl_xfer_refit(refit)

    began = time.monotonic()
    for raised in World(trainers=2).on_all(run):
        assert isinstance(raised, e.Unsupported) and "object.pause_generation" in str(raised), raised
    assert time.monotonic() - began < 15


AWAY = {
    "an engine with another token": (2, dict(token=TOKEN + "?"), {}, "running.*\n.*rejected: a caller with another token, last from"),
    "a trainer of another world": (2, {}, dict(trainer=ToySource(1, 3)), "trainer 1: it was rejected\n.*there are 3 trainer"),
}  # fmt: skip


@pytest.mark.parametrize("case", AWAY)
def test_who_waits_in_vain_is_told_who_was_turned_away_meanwhile(monkeypatch, case):
    """It has its own error, in its own log, perhaps on another host; the others were asked whether it runs at all. All of them are
    told, also where the deadline of rank 0, which knows, comes last."""
    opened = TrainerSession.open
    monkeypatch.setattr(TrainerSession, "open", lambda s, wait: (time.sleep(0.0 if s.index else 0.3), opened(s, wait)))
    world, serve, theirs, told = AWAY[case]
    common = dict(rendezvous=f"tcp://127.0.0.1:{free_port()}", token=TOKEN)
    connect = dict(common, deadline_s=4.0, cache_dir=None)

    def run(i: int):
        if i < world:
            return flat_connect(**dict(connect, trainer=ToySource(i, world)) | (theirs if i else {}))
        controller = xfer.serve(ToyEngine(1), **common | serve, deadline_s=20.0)
        try:
            controller.wait_ready()
        finally:
            controller.close()

    out = World(trainers=world + bool(serve)).on_all(run)
    for vain in out[:-1]:
        assert isinstance(vain, e.DeadlineExceeded) and re.search(told, str(vain)), vain
    assert isinstance(out[-1], e.HandshakeError)


def test_a_hub_that_reads_late_why_trainer_0_gives_up_still_tells_the_others(monkeypatch):
    start = Channel.start

    def slow(channel, got, ended):
        start(channel, lambda x: (time.sleep(0.3 * isinstance(x, m.Failed)), got(x)), ended)

    monkeypatch.setattr(Channel, "start", slow)
    connect = dict(rendezvous=f"tcp://127.0.0.1:{free_port()}", token=TOKEN, deadline_s=4.0, cache_dir=None)
    for vain in World(trainers=2).on_all(lambda i: flat_connect(trainer=ToySource(i, 2), **connect)):
        assert isinstance(vain, e.DeadlineExceeded) and "replicas [0] have not joined" in str(vain), vain


def after(seconds: float, call):
    return lambda: (time.sleep(seconds), call())


def test_a_drain_that_waits_for_ranks_that_do_not_call_ends_at_the_deadline_and_names_them():
    """As Megatron's overlapped gathers do with data parallelism; here an event stands for the gather."""
    with World(trainers=4) as w:
        good(w.refit(1))
        gathered = threading.Event()
        drains = [s.drain for s in w.sources]
        for i, s in enumerate(w.sources):
            s.drain = gathered.set if i % 2 else lambda: gathered.wait(60)
        t0 = time.monotonic()
        out = w.refit(2, ranks=[0, 2], deadline_s=1.5)
        failed(out, e.DeadlineExceeded, w, 10, t0, "trainer 3: it has not called nccl_xfer_refit()")
        assert "trainer 1: it has not called" in str(out[0]) and "do not train" in str(out[0])
        assert not w.engines[0].paused
        right(w, 1)
        assert not gathered.is_set()
        failed(w.refit(ranks=[1, 3]), e.DeadlineExceeded, w, 10, time.monotonic(), "trainer")  # the same call, late
        for s, drain in zip(w.sources, drains):
            s.drain = drain
        good(w.refit(3))
        right(w, 3)


def test_a_call_waits_for_the_gathers_that_the_last_one_left_behind():
    with World(trainers=2) as w:
        good(w.refit(1))
        s, order = w.sources[0], []
        s.drain = after(2.5, lambda: order.append("old"))
        out = w.refit(2, deadline_s=1.0)
        failed(
            out, e.DeadlineExceeded, w, 10, time.monotonic(), "trainer 0: it has called, and is not ready: it finishes"
        )
        assert "do not train" in str(out[0]) and not order
        s.drain = lambda: order.append("new")
        good(w.refit(3))
        assert order == ["old", "new"]
        right(w, 3)


@pytest.mark.parametrize("raised", [RuntimeError("NCCL says no"), e.RebindError("layer 3 was offloaded")])
def test_what_a_drain_raises_is_typed_and_told_everywhere(raised):
    with World(trainers=3) as w:
        good(w.refit(1))
        w.sources[1].fail = raised
        kind = type(raised) if isinstance(raised, e.XferError) else e.XferError
        out = w.refit(2)
        failed(out, kind, w, 10, time.monotonic(), str(raised))
        assert "trainer 1" in str(out[0]) and "trainer 1" in str(out[1])
        engine = w.engines[0]
        assert not engine.paused and not engine.open and engine.label == "1"
        right(w, 1)
        w.sources[1].fail = None
        good(w.refit(3))
        right(w, 3)


BAD = [
    dict(version="x" * 300),
    dict(version=""),
    dict(version="a\ud800"),
    dict(version="xfer:mixed"),
    dict(version=1.5),
    dict(deadline_s=-1.0),
    dict(deadline_s=0),
    dict(deadline_s=float("inf")),
    dict(deadline_s=float("nan")),
    dict(min_replicas=-1),
    dict(min_replicas=2),
    dict(wait="decision"),
]


def test_arguments_that_cannot_work_are_refused_and_cost_one_call():
    with World(trainers=2) as w:
        good(w.refit(1))
        for bad in BAD:
            t0 = time.monotonic()
            failed(w.refit(2, **bad), e.XferError, w, 10, t0, f"{next(iter(bad))}=")
            assert not w.engines[0].paused
        with pytest.raises(e.XferError) as caught:
            w.sessions[0].refit(version="", deadline_s=-1, min_replicas=9)
        assert len(caught.value.violations) == 3, "all at once"
        failed(w.refit(ranks=[1]), e.XferError, w, 10, time.monotonic(), "version=")  # the same call of the other rank
        good(w.refit(3))
        right(w, 3)


@pytest.mark.parametrize("more", [{}, dict(verify=np.bool_(True), version=np.int64(7)), dict(verify=1, deadline_s=30)])
def test_arguments_of_kinds_that_python_takes_for_equal_are_taken(more):
    with World(trainers=2) as w:
        report = good(w.refit(1, **({"verify": False} | more)))
        right(w, 1)
        assert report.verified == bool(more.get("verify")) and report.version == more.get("version", 1)


def test_ranks_that_ask_for_different_refits_or_sessions_are_told_what_differs():
    """All that can differ: tests/unit/test_coordinator_cases.py."""
    w = World(trainers=2, replicas=2)
    with w:
        good(w.refit(1))
        t0 = time.monotonic()
        out = w.on_all(lambda i: w.sessions[i].refit(verify=not i))
        failed(out, e.PlanMismatch, w, 10, t0, "verify=True")
        assert "trainer 1: verify=False" in str(out[0])
        good(w.refit(2))
        right(w, 2)
    w.rendezvous = f"tcp://127.0.0.1:{free_port()}"
    connect = dict(deadline_s=3.0, bucket_bytes=4096, drop=(), narrow=(), cache_dir=None)

    def run(i):
        s = trainer_session(w.sources[i], w.rendezvous, TOKEN, replicas=1 + i, **connect)
        try:
            s.open(True)
        finally:
            s.close()

    failed(w.on_all(run), e.HandshakeError, w, 10, time.monotonic(), "replicas is '2', trainer 0 has '1'")


def test_two_threads_of_one_rank_cannot_refit_at_once():
    with World(trainers=2) as w:
        good(w.refit(1))
        go_on, inside = threading.Event(), threading.Event()
        w.sources[0].drain = lambda: (inside.set(), go_on.wait(10))
        out: list = []
        first = threading.Thread(target=lambda: out.extend(w.refit(2)))
        first.start()
        assert inside.wait(10)
        for second in (w.sessions[0].refit, w.sessions[0].release):
            with pytest.raises(e.Unsupported, match="another thread"):
                second()
        go_on.set()
        first.join()
        good(out)
        right(w, 2)
        good(w.refit(3))
        right(w, 3)


@pytest.mark.parametrize(("order", "slow"), [((0, 1), "run_recipes"), ((1, 0), "release_lock")])
def test_leaving_after_the_sources_were_free_finishes_that_refit_first(order, slow):
    """The engine would lose its rendezvous with half of a version in it, and stay out of service."""
    with World(trainers=2) as w:
        good(w.refit(1))
        returned = threading.Event()
        for t in w.engines[0].takers:
            late = after(0.5, getattr(t, slow))
            setattr(t, slow, lambda late=late: (returned.wait(20), late()))
        assert all(r.pending for r in w.refit(2, wait="sources", verify=False))
        returned.set()
        for i in order:
            w.sessions[i].close()
        assert w.controllers[0].version == 2 and w.controllers[0].error is None and not w.engines[0].paused
        right(w, 2)


def test_the_next_call_and_leaving_raise_what_became_of_a_refit_that_nobody_waited_for():
    w = World(trainers=2, replicas=2).connect()
    good(w.refit(1))
    for version in (2, 3):
        returned = threading.Event()

        def fail(returned=returned):
            returned.wait(20)  # or the calls might hear of it before they return
            raise RuntimeError("a recipe failed")

        for t in w.engines[1].takers:
            t.run_recipes = fail
        assert all(r.pending for r in w.refit(version, wait="sources", verify=False))
        returned.set()
        if version == 2:
            failed(w.refit(), e.XferError, w, 10, time.monotonic(), "a recipe failed")
            for t in w.engines[1].takers:
                del t.run_recipes
            good(w.refit(2))  # that call is used up on all ranks: their numbers are in step
            right(w, 2)
    for s in reversed(w.sessions):
        with pytest.raises(e.XferError, match="a recipe failed"):
            s.close()
    right(w, 3, [0])
    w.close()


def test_a_message_that_the_other_end_would_refuse_is_not_sent():
    for bad in (
        m.Enter(1, "x" * 300, False, 1, 1.0),
        m.Enter(1, "a", False, -1, 1.0),
        m.Enter(1, "a\ud800", False, 1, 1.0),
    ):
        with pytest.raises(e.ProtocolError, match="Enter cannot be sent"):
            m.encode(bad)
    assert (
        "surrogates" in m.decode(m.encode(m.Failed(m.WireError.of(ValueError("surrogates \udcff"), "x")))).error.message
    )


def test_a_prepare_that_nobody_followed_costs_the_next_refit_nothing():
    """The engine goes back to work at the deadline, and neither the number nor the label is used up."""
    with World(trainers=2) as w:
        good(w.refit(1))
        w.shorten(1.0)
        for n in (2, 3):
            w.sessions[n % 2].prepare()
            until_true(lambda n=n: w.engines[0].log.count("update") == n)
            until_true(lambda: w.sessions[0]._server.coordinator.refit is None, 15)
            assert not w.engines[0].paused and w.engines[0].label == "1"
        report = good(w.refit(2, deadline_s=20.0, wait="sources"))
        assert report.version == 2
        assert good(w.refit(3, deadline_s=20.0)).version == 3
        right(w, 3)


def test_labels_go_on_from_what_the_engines_have_had():
    """Failed calls use up none; those of the caller count; trainers that restart begin after them."""
    with World(trainers=2) as w:
        assert good(w.refit(1)).version == 1
        w.sources[0].fail = RuntimeError("boom")
        failed(w.refit(2), e.XferError, w, 10, time.monotonic(), "boom")
        w.sources[0].fail = None
        assert [good(w.refit(2, version=v)).version for v in (None, 7, "step", None)] == [2, 7, "step", 8]
        for s in reversed(w.sessions):
            s.close()
        for c in w.controllers:
            c.close()
        engine, w.engines, w.controllers = w.engines[0], [], []
    assert engine.label == "8"
    with World(trainers=1, engines=[engine]) as w:
        assert good(w.refit(3)).version == 9 and engine.label == "9"
        right(w, 3)


class ReadTogether(ToySource):
    """As with `probe=`: reading a layout is a collective. A barrier stands for it."""

    reads_together = True
    all_here = threading.Barrier(2)

    def read(self):
        self.all_here.wait(60)
        return super().read()


@pytest.fixture
def together():
    ReadTogether.all_here = threading.Barrier(2)
    yield [ReadTogether(i, 2) for i in range(2)]
    ReadTogether.all_here.abort()


def test_a_layout_that_is_read_together_is_not_read_again_by_one_rank_alone(together):
    w = World(trainers=2)
    w.sources = together
    with w:
        good(w.refit(1))
        w.sources[1].params["embed"] = w.sources[1].params["embed"].t().contiguous().t()
        failed(w.refit(2), e.RebindError, w, 10, time.monotonic(), "connect again")
        right(w, 1)


@pytest.mark.parametrize("reason", ["refused", "absent"])
def test_a_layout_that_is_read_together_does_not_hold_a_rank_whose_peer_does_not_come(together, reason):
    w = World(trainers=2)
    w.rendezvous = f"tcp://127.0.0.1:{free_port()}"
    equal = dict(replicas=1, deadline_s=4.0, bucket_bytes=4096, drop=(), narrow=(), cache_dir=None)

    def connect(i):
        s = trainer_session(together[i], w.rendezvous, TOKEN, **(equal | (dict(replicas=2) if i == 1 else {})))
        try:
            s.open(True)
        finally:
            s.close()

    out = w.on_all(connect, ranks=[0, 1] if reason == "refused" else [0])
    kind, text = (e.HandshakeError, "replicas is ") if reason == "refused" else (e.DeadlineExceeded, "trainer 1")
    failed(out, kind, w, 15, time.monotonic(), text)


def test_a_rank_that_owns_nothing_takes_part(tmp_path):
    """In a process of its own, which also has to end well: threads that hold C++ frames at exit abort it."""
    script = tmp_path / "job.py"
    script.write_text(
        "from tests.support.world import *\n"
        "class Nothing(ToySource):\n"
        "    def read(self):\n"
        "        self._ptrs = self._now()\n"
        "        return ToyLayout(Traced((), ()), (), {})\n"
        "class All(ToySource):\n"
        "    def rows(self, n): return 0, n\n"
        "w = World(trainers=2, deadline_s=30.0)\n"
        "w.sources = [Nothing(0, 2), All(1, 2)]\n"
        "w.connect()\n"
        "assert all(r.committed == 1 for r in w.refit(1)) and not any(t.wrong(1) for t in w.engines[0].takers)\n"
    )
    job = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0 and not job.stderr, job.stderr


def test_what_is_called_after_closing_says_that_it_was_closed_here():
    """And not that a peer or a connection is lost, after which one would call again; whoever is inside hears it, too."""
    w = World(trainers=2).connect()
    good(w.refit(1))
    out: list = []
    alone = threading.Thread(target=lambda: out.extend(w.refit(2, ranks=[1])))
    alone.start()
    until_true(lambda: 1 in getattr(w.sessions[0]._server.coordinator.refit, "entered", ()))
    controller, (first, second) = w.controllers[0], w.sessions
    second.close()
    alone.join(30)
    assert isinstance(out[0], e.PeerLost) and "by this process itself" in str(out[0]), out
    for _ in range(2):
        w.close()
    calls = [
        (s, call)
        for s in w.sessions
        for call in (lambda s=s: s.refit(), s.prepare, s.release, s.explain, lambda s=s: s.refit(version=""))
    ]
    calls += [(None, call) for call in (controller.wait_ready, controller.wait_version, lambda: enter(controller))]
    answers = [(s, error) for s, call in calls for error in said(call)]
    assert len(answers) == len(calls)
    for s, error in answers:
        assert type(error) is e.Unsupported and "was closed" in error.message, error
        assert ("xfer.serve(" if s is None else "xfer.connect()") in error.violations[0], error
    assert [s.version for s in (first, second)] == [1, 1], "what was so stays so"
    enter(controller, force=True)


def said(call) -> list[e.XferError]:
    try:
        call()
    except e.XferError as error:
        return [error]
    return []


def enter(controller, **how) -> None:
    with controller.serving(**how):
        pass
