"""The refit protocol, driven over real sockets: what is promised when all goes well, and when each part fails.

The engine and the trainer are small stand-ins (tests/support/world.py); coordinator, channels, planner, transport and checksums are
the real ones. The same failures with real processes and a real vLLM are in test_refit_errors.py.
"""

import pickle
import threading
import time

import pytest
import torch

from examples.common.ports import free_port
from tests.support.proc import PATIENCE
from tests.support.world import TOKEN, ToyEngine, ToySource, World, failed, good, right, trainer_session, until_true
from xfer import errors as e
from xfer.coordinator import deadlines
from xfer.coordinator import messages as m
from xfer.coordinator.coordinator import _RULES, Coordinator
from xfer.coordinator.deadlines import CALL_GRACE_S
from xfer.coordinator.state import Options
from xfer.participants import faults
from xfer.rendezvous.channel import dial
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.server import Server
from xfer.transport.p2p import P2P


@pytest.fixture
def fault(monkeypatch):
    faults._passed.clear()

    def set_fault(text: str, hang_s: float = 60.0):
        faults._passed.clear()
        monkeypatch.setenv("XFER_FAULT", text)
        monkeypatch.setenv("XFER_FAULT_HANG_S", str(hang_s))

    yield set_fault
    monkeypatch.delenv("XFER_FAULT", raising=False)


def test_three_refits_in_a_row_each_give_the_new_weights():
    with World(trainers=3, workers=2, replicas=2) as w:
        for v, label in ((1, None), (2, "step-2"), (3, 3)):
            report = good(w.refit(v, version=label))
            right(w, v)
            assert report.version == (label or v) and report.committed == 2 and report.verified
            assert [e.label for e in w.engines] == [str(label or v)] * 2 and w.controllers[0].version == report.version
        assert w.engines[0].log == ["pause", "start", "update", "finish", "reset", "resume"] * 3
        assert all(s.drained == 3 for s in w.sources)
        per_worker = sum(torch.Size(s).numel() // (2 if len(s) > 1 else 1) for s in w.shapes.values()) * 2
        for o in report.outcomes:  # exactly the bytes of the written class
            assert o.bytes_per_worker == (per_worker, per_worker) and o.bytes_moved == 2 * per_worker


def test_in_a_large_job_a_rank_says_done_once_for_all_replicas(monkeypatch):
    monkeypatch.setattr(deadlines, "HOLD_PAIRS", 1)
    monkeypatch.setattr(deadlines, "HOLD_S", 5.0 * PATIENCE)
    said, done = [], Coordinator._done
    monkeypatch.setitem(
        _RULES, m.Done, (("trainer", "worker"), lambda co, c, x: said.append((c.label, x)) or done(co, c, x))
    )
    with World(trainers=3, workers=2, replicas=2) as w:
        for v in (1, 2):
            said.clear()
            assert good(w.refit(v)).committed == 2
            right(w, v)
            assert sorted(label for label, _ in said if label.startswith("trainer")) == [
                f"trainer {i}" for i in range(3)
            ]
            assert all(sorted(x.replicas) == [0, 1] for label, x in said if label.startswith("trainer"))


def test_an_engine_that_moved_its_storage_or_changed_its_layout_is_replanned():
    with World() as w:
        good(w.refit(1))
        t = w.engines[0].takers[0]
        t.live["layers.0.w"] = torch.zeros_like(t.live["layers.0.w"])
        good(w.refit(2))
        right(w, 2)
        t.live["layers.0.w"] = t.live["layers.0.w"].t().contiguous().t()  # the same values, in another order
        good(w.refit(3))
        right(w, 3)


def test_a_checksum_that_fails_never_commits_and_the_engine_holds_nan(fault):
    with World() as w:
        good(w.refit(1))
        fault("worker:1:checksum:flip")
        failed(w.refit(2), e.VerificationError, w, 15, time.monotonic(), "worker 1")
        engine = w.engines[0]
        assert engine.paused and w.controllers[0].error is not None and engine.label == "xfer:mixed"
        assert all(torch.isnan(t.live["norm"]).all() for t in engine.takers)
        with pytest.raises(e.EngineLost), w.controllers[0].serving():
            pass
        fault("")
        good(w.refit(3))
        right(w, 3)
        assert not engine.paused and w.controllers[0].error is None


def test_a_digest_that_differs_on_one_rank_moves_nothing(fault):
    fault("trainer:1:digest:flip@1")
    with pytest.raises(e.PlanMismatch, match="trainer 1"):
        World(trainers=3).connect()


@pytest.mark.parametrize(
    ("fault_at", "pulled"),
    [
        *((f"{who}:{point}", False) for who in ("trainer:1", "worker:0") for point in ("moving", "wave", "done")),
        ("worker:1:commit", False),
        ("trainer:1:moving", True),
        ("worker:0:wave", True),
        ("worker:0:done", True),
    ],
)
def test_a_fault_in_the_middle_leaves_the_replica_unservable_until_the_next_refit(fault, fault_at, pulled):
    """Also where workers read the trainers' memory themselves, and a few rows are sent all the same."""
    with World(trainers=2, host_pull=pulled) as w:
        good(w.refit(1))
        fault(f"{fault_at}:raise@1")
        t0 = time.monotonic()
        failed(w.refit(2), e.XferError, w, 15, t0, "injected fault")
        if fault_at == "trainer:1:moving" and w.controllers[0].error is None:
            right(w, 1)  # it raised before any worker had begun to write
        else:
            assert w.controllers[0].error is not None and w.engines[0].paused
        fault("")
        good(w.refit(3))
        right(w, 3)


@pytest.mark.parametrize("late", ["to raise", "to tell"])
def test_why_a_connection_closed_comes_before_that_it_did(monkeypatch, late):
    """What others tell of a rank that raises is here first, and their replica's part is over by then."""
    run, say, raises = P2P.run, RendezvousClient.try_send, threading.Event()

    def runs(self, *args, **kwargs):
        if self.link.rank != 1 or not raises.is_set():
            return run(self, *args, **kwargs)
        self.link.abort(5.0)
        if late == "to raise":
            time.sleep(0.1)
        raise RuntimeError("out of memory")

    def says(self, message, *args):
        if late == "to tell" and isinstance(message, m.Failed) and self.label == "trainer 1":
            time.sleep(0.1)
        say(self, message, *args)

    monkeypatch.setattr(P2P, "run", runs)
    monkeypatch.setattr(RendezvousClient, "try_send", says)
    with World(trainers=2) as w:
        good(w.refit(1))
        raises.set()
        failed(w.refit(2), e.XferError, w, 15, time.monotonic(), "[trainer 1] RuntimeError: out of memory")
        raises.clear()
        good(w.refit(3))
        right(w, 3)


def test_a_rank_that_hangs_while_bytes_move_ends_at_the_deadline(fault):
    """A trainer that hangs: test_session_deaths.py."""
    with World(trainers=2, deadline_s=15.0) as w:
        good(w.refit(1))
        fault("worker:1:moving:hang", hang_s=4.0)
        t0 = time.monotonic()
        failed(w.refit(2, deadline_s=1.0), e.DeadlineExceeded, w, 1.0 + CALL_GRACE_S, t0, "still moving")
        fault("")
        until_true(lambda: w.engines[0].sessions[1]._lane_.wait_idle(0.0))
        good(w.refit(3))
        right(w, 3)


def test_what_became_of_a_refit_whose_caller_did_not_wait_stands_in_the_next_report():
    """A replica that is missing for a long time would be seen by nobody, and a logger drew zeros for what was not known."""
    with World(trainers=2, replicas=2) as w:
        first, returned, taker = good(w.refit(1)), threading.Event(), w.engines[0].takers[0]
        run_recipes = taker.run_recipes
        taker.run_recipes = lambda: (returned.wait(20), run_recipes())
        w.engines[1].fail["pause"] = RuntimeError("engine 1 is broken")
        out = w.refit(2, wait="sources", min_replicas=1)
        returned.set()
        unknown = {f"xfer/{k}" for k in ("transfer_s", "outage_s", "bytes", "gb_per_s", "committed", "replicas")}
        assert all(r.pending and r.before is None for r in out) and unknown & out[0].flatten().keys() == set()
        with pytest.raises(e.XferError):
            w.sessions[0].refit(wait="never")
        w.refit(ranks=[1], deadline_s=0.5)
        for report in w.refit(3):
            assert (report.committed, report.before.committed, report.before.version) == (2, 1, 2), report
            assert "engine 1 is broken" in str(report.before.outcomes[1].error)
            told = report.flatten()
            assert (told["xfer/committed"], told["xfer/before/committed"], told["xfer/before/replicas"]) == (2, 1, 2)
            assert first.flatten().keys() <= told.keys() and "xfer/before/transfer_s" in told
            assert all(k.replace("/", "_").isidentifier() for k in told), "some loggers take no other names"
            assert pickle.loads(pickle.dumps(report)).before.version == 2
        assert good(w.refit(4)).before is None


def test_engines_serve_until_the_first_trainer_enters_and_prepare_arms_them_early():
    with World(trainers=2) as w:
        good(w.refit(1))
        n = len(w.engines[0].log)
        time.sleep(0.5)
        assert len(w.engines[0].log) == n and not w.engines[0].paused
        w.sessions[0].prepare()
        until_true(lambda: w.engines[0].paused)
        good(w.refit(2))
        right(w, 2)


def test_a_wrong_token_and_a_wrong_world_are_refused():
    with World(trainers=2) as w:
        with pytest.raises(e.HandshakeError, match="token"):
            trainer_session(
                ToySource(1, 2),
                w.rendezvous,
                "not the right token",
                replicas=1,
                deadline_s=5.0,
                bucket_bytes=4096,
                drop=(),
                narrow=(),
                cache_dir=None,
            )
        with pytest.raises(e.HandshakeError, match="trainer ranks") as caught:
            trainer_session(
                ToySource(5, 6),
                w.rendezvous,
                TOKEN,
                replicas=1,
                deadline_s=5.0,
                bucket_bytes=8192,
                drop=(),
                narrow=(),
                cache_dir=None,
            )
        assert len(caught.value.violations) == 4  # all of them at once: world, rank, deadline, bucket size
        good(w.refit(1))
        right(w, 1)


def test_tensors_that_do_not_fit_are_all_named_at_connect():
    w = World(trainers=2)
    w.engines = [ToyEngine(2, {**w.shapes, "layers.0.w": (24, 14), "extra": (4, 4)})]
    with pytest.raises(e.XferError) as caught:
        w.connect()
    assert "layers.0.w" in str(caught.value) or "extra" in str(caught.value)


def test_nothing_is_left_behind():
    """Threads end with the sessions: a job may connect and close many times in one process."""
    before = threading.active_count()
    for _ in range(2):
        with World() as w:
            good(w.refit(1))
    until_true(lambda: threading.active_count() <= before + 2, 15)


def test_status_tells_who_is_there_and_who_is_waited_for():
    from typer.testing import CliRunner

    from xfer.cli import app

    with World(trainers=2, deadline_s=20.0) as w:
        good(w.refit(1))
        stranger = CliRunner().invoke(app, ["status", w.rendezvous, "--token", "some other token"])
        assert stranger.exit_code == 1 and "token" in stranger.output
        idle = CliRunner().invoke(app, ["status", w.rendezvous, "--token", TOKEN])
        assert idle.exit_code == 0 and "replica 0: ready version 1" in idle.output
        results = []
        one = threading.Thread(target=lambda: results.extend(w.refit(2, ranks=[0])))
        one.start()
        until = time.monotonic() + 10
        while "has not called" not in (
            busy := CliRunner().invoke(app, ["status", w.rendezvous, "--token", TOKEN]).output
        ):
            assert time.monotonic() < until, busy
            time.sleep(0.1)
        assert "trainer 1" in busy and "refit attempt 2" in busy
        results.extend(w.refit(ranks=[1]))
        one.join()
        good(results)
        right(w, 2)


@pytest.mark.parametrize("inside", [True, False])
def test_who_has_proved_the_token_when_the_hub_closes_is_not_left_waiting(inside):
    """It has said nothing yet, or is about to be let in: for its whole deadline it waited for a welcome."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    server, ended = Server(rendezvous, TOKEN, Options(1, 1, 20.0, 4096)), threading.Event()
    prove = server.proven
    late = lambda connection: setattr(server, "closing", True) or prove(connection)  # noqa: E731
    server.proven = prove if inside else late
    channel = dial(rendezvous, TOKEN, 5.0)
    channel.start(lambda message: None, lambda reason: ended.set())
    server.close()
    assert ended.wait(5)


def test_a_hub_that_hears_late_that_trainer_0_leaves_still_undoes_the_refit():
    """Its engine was told nothing, and had to take the worst for granted though no byte had moved."""
    with World(1, 1) as w:
        good(w.refit(1))
        coordinator, go_on, engine = w.sessions[0]._server.coordinator, threading.Event(), w.engines[0]
        w.sources[0].drain = lambda: go_on.wait(20)
        t = threading.Thread(target=w.refit)
        t.start()
        until_true(lambda: coordinator.refit and coordinator.refit.parts[0].armed)
        w.later(lambda: time.sleep(1.0))
        w.sessions[0].close()
        go_on.set()
        t.join(30)
        until_true(lambda: not engine.paused)
        assert w.controllers[0].error is None
        right(w, 1)
