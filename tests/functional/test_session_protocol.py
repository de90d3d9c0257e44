"""The refit protocol, driven over real sockets: what is promised when all goes well, and when each part fails.

The engine and the trainer are small stand-ins (tests/support/world.py); coordinator, channels, planner, transport and checksums are
the real ones. The same failures with real processes and a real vLLM are in test_refit_errors.py.
"""

import pickle
import threading
import time

import pytest
import torch

from tests.support.world import TOKEN, ToyEngine, ToySource, World, trainer_session, until_true
from xfer import errors as e
from xfer.coordinator import messages as m
from xfer.coordinator.state import Options
from xfer.participants import faults
from xfer.participants.report import RefitReport
from xfer.rendezvous.channel import dial
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.server import Server
from xfer.testing.ports import free_port
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


def good(results) -> RefitReport:
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results[0]


def right(world: World, version: int, replicas=None) -> None:
    for i, engine in enumerate(world.engines):
        if replicas is None or i in replicas:
            assert [t.wrong(version) for t in engine.takers] == [[] for _ in engine.takers], f"replica {i}"


def test_three_refits_in_a_row_each_give_the_new_weights():
    with World(trainers=3, workers=2) as w:
        for v in (1, 2, 3):
            report = good(w.refit(v))
            right(w, v)
            assert report.version == v and report.committed == 1 and report.verified
            assert w.engines[0].label == str(v) and w.controllers[0].version == v
        assert w.engines[0].log == ["pause", "start", "update", "finish", "reset", "resume"] * 3
        assert all(s.drained == 3 for s in w.sources)


def test_each_worker_receives_exactly_the_bytes_of_its_written_class():
    with World(trainers=2, workers=2) as w:
        o = good(w.refit(1)).outcomes[0]
        per_worker = sum(torch.Size(s).numel() // (2 if len(s) > 1 else 1) for s in w.shapes.values()) * 2
        assert o.bytes_per_worker == (per_worker, per_worker)
        assert o.bytes_moved == 2 * per_worker


def test_two_replicas_are_served_at_once_and_reported_apart():
    with World(trainers=2, workers=2, replicas=2) as w:
        report = good(w.refit(1))
        right(w, 1)
        assert [o.committed for o in report.outcomes] == [True, True]


def test_version_labels_are_the_callers():
    with World() as w:
        report = good(w.refit(5, version="step-5"))
        assert report.version == "step-5" and w.engines[0].label == "step-5"


def test_a_moved_storage_is_rebound_and_a_changed_layout_replanned():
    with World(trainers=2) as w:
        good(w.refit(1))
        s = w.sources[1]
        s.params["layers.0.w"] = s.params["layers.0.w"].clone()  # moved
        good(w.refit(2))
        right(w, 2)
        wide = torch.zeros(s.params["embed"].shape[0], 40, dtype=torch.bfloat16)
        wide[:, :8] = s.params["embed"]
        s.params["embed"] = wide[:, :8]  # other strides, other storage size
        good(w.refit(3))
        right(w, 3)


def test_an_engine_that_moved_its_storage_is_replanned():
    with World() as w:
        good(w.refit(1))
        t = w.engines[0].takers[0]
        t.live["layers.0.w"] = torch.zeros_like(t.live["layers.0.w"])
        good(w.refit(2))
        right(w, 2)


def failed(results, kind, world: World, within: float, since: float, text: str = "") -> None:
    assert time.monotonic() - since < within, f"took {time.monotonic() - since:.1f} s"
    for r in results:
        assert isinstance(r, kind), repr(r)
        assert text in str(r), str(r)


def test_a_rank_that_raises_stops_everyone_with_its_error_and_the_engine_serves_on():
    with World(trainers=3) as w:
        good(w.refit(1))
        w.sources[2].fail = e.RebindError("layer 3 was offloaded", where="trainer 2")
        t0 = time.monotonic()
        failed(w.refit(2), e.RebindError, w, 10, t0, "layer 3 was offloaded")
        assert not w.engines[0].paused and not w.engines[0].open and w.engines[0].label == "1"
        right(w, 1)
        w.sources[2].fail = None
        good(w.refit(3))
        right(w, 3)


def test_calling_on_some_ranks_only_ends_at_the_deadline_and_names_the_missing():
    with World(trainers=3) as w:
        good(w.refit(1))
        w.shorten(3.0)
        t0 = time.monotonic()
        failed(
            w.refit(2, ranks=[0, 2]), e.DeadlineExceeded, w, 15, t0, "trainer 1: it has not called nccl_xfer_refit()"
        )
        right(w, 1)
        assert not w.engines[0].paused
        late = w.refit(ranks=[1])  # the same attempt, too late: answered at once with the same error
        failed(late, e.DeadlineExceeded, w, 5, time.monotonic() - 0.0)
        good(w.refit(3))
        right(w, 3)


def test_ranks_that_ask_for_different_versions_are_told_so():
    with World(trainers=2) as w:
        good(w.refit(1))
        out = w.on_all(
            lambda i: w.sessions[i].refit(
                version=f"v{i}", verify=False, wait="commit", min_replicas=None, deadline_s=None
            )
        )
        failed(out, e.PlanMismatch, w, 10, time.monotonic(), "different refits")
        good(w.refit(2))
        right(w, 2)


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


@pytest.mark.parametrize("point", ["moving", "wave", "done"])
@pytest.mark.parametrize("who", ["trainer:1", "worker:0"])
@pytest.mark.parametrize("pulled", [False, True], ids=["sent", "pulled"])
def test_a_fault_in_the_middle_leaves_the_replica_unservable_until_the_next_refit(fault, who, point, pulled):
    """Also where workers read the trainers' memory themselves, and a few rows are sent all the same."""
    with World(trainers=2, host_pull=pulled) as w:
        good(w.refit(1))
        fault(f"{who}:{point}:raise@1")
        t0 = time.monotonic()
        failed(w.refit(2), e.XferError, w, 15, t0, "injected fault")
        if who == "trainer:1" and point == "moving" and w.controllers[0].error is None:
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


@pytest.mark.parametrize("who", ["trainer:1", "worker:1"])
def test_a_rank_that_hangs_while_bytes_move_ends_at_the_deadline(fault, who):
    with World(trainers=2, deadline_s=15.0) as w:
        good(w.refit(1))
        fault(f"{who}:moving:hang", hang_s=6.0)
        t0 = time.monotonic()
        out = w.refit(2, deadline_s=2.0)
        failed(out, e.DeadlineExceeded, w, 30, t0, "still moving")
        fault("")
        time.sleep(5.0)
        good(w.refit(3))
        right(w, 3)


def test_one_replica_fails_and_the_other_goes_on(fault):
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        w.engines[1].fail["start"] = RuntimeError("the engine refused")
        out = w.refit(2, min_replicas=1)
        report = good(out)
        assert [o.committed for o in report.outcomes] == [True, False] and "the engine refused" in str(
            report.outcomes[1].error
        )
        right(w, 2, [0])
        right(w, 1, [1])
        good(w.refit(3))
        right(w, 3)


def test_a_trainer_that_is_gone_is_named_to_all_others():
    with World(trainers=3) as w:
        good(w.refit(1))
        w.sessions[2]._party.channel.close()
        t0 = time.monotonic()
        failed(w.refit(2, ranks=[0, 1]), e.PeerLost, w, 10, t0, "trainer 2")
        assert not w.engines[0].paused
        right(w, 1)


def test_an_engine_that_is_gone_ends_its_replica_only_and_can_rejoin():
    with World(trainers=2, replicas=2) as w:
        good(w.refit(1))
        for s in w.engines[1].sessions:
            s._party.channel.close()
        w.controllers[1].close()
        time.sleep(0.3)
        report = good(w.refit(2, min_replicas=1))
        assert [o.committed for o in report.outcomes] == [True, False]
        right(w, 2, [0])
        w.engines[1] = ToyEngine(2)
        w.controllers[1] = w.serve(w.engines[1], 1)
        w.controllers[1].wait_ready(10.0)
        good(w.refit(3))
        right(w, 3)


def test_sources_are_free_before_the_commit_when_asked():
    with World(trainers=2) as w:
        returned, taker = threading.Event(), w.engines[0].takers[0]
        run_recipes = taker.run_recipes
        taker.run_recipes = lambda: (returned.wait(20), run_recipes())  # no commit before the calls have returned
        out = w.refit(1, wait="sources")
        returned.set()
        assert all(r.pending for r in out)
        good(w.refit(2))
        right(w, 2)


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
        until = time.monotonic() + 5
        while not w.engines[0].paused and time.monotonic() < until:
            time.sleep(0.01)
        assert w.engines[0].paused
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
    until = time.monotonic() + 15
    while threading.active_count() > before + 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert threading.active_count() <= before + 2, [t.name for t in threading.enumerate()]


def test_status_tells_who_is_there_and_who_is_waited_for():
    from typer.testing import CliRunner

    from xfer.cli import app

    with World(trainers=2, deadline_s=20.0) as w:
        good(w.refit(1))
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


def test_status_with_a_wrong_token_says_so():
    from typer.testing import CliRunner

    from xfer.cli import app

    with World(trainers=1) as w:
        out = CliRunner().invoke(app, ["status", w.rendezvous, "--token", "some other token"])
        assert out.exit_code == 1 and "token" in out.output


def test_a_hub_that_is_lost_mid_refit_leaves_nobody_serving_a_mix():
    """The controller cannot know whether its workers had begun to write: it must not resume."""
    with World(trainers=2) as w:
        good(w.refit(1))
        w.sessions[0].prepare()
        until = time.monotonic() + 5
        while "update" not in w.engines[0].log[6:] and time.monotonic() < until:
            time.sleep(0.01)
        w.sessions[0]._server.close()
        assert w.controllers[0]._thread.join(15.0) is None and not w.controllers[0]._thread.is_alive()
        assert w.engines[0].paused
        with pytest.raises(e.EngineLost), w.controllers[0].serving():
            pass


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
