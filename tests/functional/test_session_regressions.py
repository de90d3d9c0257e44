"""Defects of the protocol that were found once, each as the steps that showed it. Most let wrong bytes commit in silence."""

import contextlib
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from tests.functional.test_session_protocol import failed, fault, good, right  # noqa: F401
from tests.support.world import TOKEN, ToyEngine, ToyLayout, ToySource, ToyTaker, World, trainer_session
from xfer import errors as e
from xfer.coordinator import messages as m
from xfer.coordinator.state import Options
from xfer.direct.plane import DirectPlane
from xfer.participants.lane import Lane
from xfer.plan.inventory import trainer_inventory
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.layouts import Shelf
from xfer.rendezvous.server import GREETERS, Server
from xfer.testing.ports import free_port
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.traced import Traced
from xfer.transport.group import GlooLink
from xfer.transport.p2p import P2P


def transpose(source: ToySource, name: str = "layers.0.w") -> None:
    """Other strides, same values: only a new plan reads it rightly."""
    source.params[name] = source.params[name].t().contiguous().t()


@pytest.mark.parametrize("verify", [True, False])
def test_a_layout_change_told_in_a_failed_attempt_is_not_forgotten(verify):
    with World() as w:
        good(w.refit(1))
        transpose(w.sources[0])
        w.sources[1].fail = RuntimeError("boom")
        failed(w.refit(2), Exception, w, 10, time.monotonic(), "boom")
        w.sources[1].fail = None
        good(w.refit(3, verify=verify))
        right(w, 3)


def test_a_worker_whose_layout_changed_while_the_attempt_ended_is_replanned():
    with World() as w:
        good(w.refit(1))
        taker = w.engines[0].takers[0]
        taker.live["layers.0.w"] = taker.live["layers.0.w"].t().contiguous().t()
        drain = w.sources[1].drain

        def late_and_broken():
            time.sleep(1.0)
            raise RuntimeError("boom")

        w.sources[1].drain = late_and_broken
        failed(w.refit(2), Exception, w, 10, time.monotonic(), "boom")
        w.sources[1].drain = drain
        good(w.refit(3, verify=False))
        right(w, 3)


def test_a_layout_change_told_after_its_attempt_was_over_is_not_forgotten():
    """The worker does not say it again: every later refit was refused, as its routes were of a plan that it had not made."""
    with World() as w:
        good(w.refit(1))
        taker = w.engines[0].takers[0]
        taker.live["layers.0.w"] = taker.live["layers.0.w"].t().contiguous().t()
        look = taker.check

        def slow() -> str:
            time.sleep(7.0)
            taker.check = look
            return look()

        taker.check = slow
        failed(w.refit(2, deadline_s=1.0), e.DeadlineExceeded, w, 10, time.monotonic())
        good(w.refit(3, verify=False))
        right(w, 3)


class Widening(ToySource):
    """Exports `embed` as float32 from some point on: another catalog."""

    wide = False

    def read(self):
        layout = super().read()
        if not self.wide:
            return layout
        specs = tuple(TensorSpec(s.name, s.shape, "float32") if s.name == "embed" else s for s in layout.traced.specs)
        fragments = tuple(
            Fragment(f.tensor, f.origin, f.extent, f.root, f.offset, tuple(2 * s for s in f.strides), "float32")
            if f.tensor == "embed"
            else f
            for f in layout.traced.fragments
        )
        return ToyLayout(Traced(specs, fragments), layout.roots, layout.tensors)


def test_a_catalog_that_changes_is_planned_anew_and_refused_every_time_until_it_fits():
    w = World()
    w.sources = [Widening(i, 2) for i in range(2)]
    with w:
        good(w.refit(1))
        for s in w.sources:
            s.wide, s.params["embed"] = True, s.params["embed"].float()
        for version in (2, 3):
            failed(w.refit(version), e.CoverageError, w, 10, time.monotonic(), "embed")
            right(w, 1)
        for s in w.sources:
            s.wide, s.params["embed"] = False, s.params["embed"].bfloat16()
        good(w.refit(4))
        right(w, 4)


def test_a_layout_that_could_not_be_read_is_read_again():
    with World() as w:
        good(w.refit(1))
        s = w.sources[0]
        old = dict(s.shapes)
        s.params = {k: v.clone() for k, v in s.params.items()}
        s.shapes = {**old, "extra": (4, 4)}
        s.params["extra"] = torch.zeros(2, 4, dtype=torch.bfloat16)
        for version in (2, 3):
            failed(w.refit(version), e.CoverageError, w, 10, time.monotonic(), "extra")
        del s.params["extra"]
        s.shapes = old
        good(w.refit(4))
        right(w, 4)


def test_a_worker_that_fails_to_install_leaves_a_torn_engine_and_a_living_hub(fault):  # noqa: F811
    with World() as w:
        good(w.refit(1))
        fault("worker:1:commit:raise")
        failed(w.refit(2), e.XferError, w, 10, time.monotonic(), "injected fault")
        assert w.controllers[0].error is not None
        fault("")
        good(w.refit(3))
        right(w, 3)


def test_a_trainer_that_is_lost_while_workers_install_costs_the_next_refit_not_this_one():
    """The decision is taken and all workers carry it out: their replica holds one whole version and serves it."""
    with World(trainers=3) as w:
        good(w.refit(1))
        go_on = threading.Event()
        for t in w.engines[0].takers:
            t.release_lock = lambda release=t.release_lock: (go_on.wait(10), release())
        out: list = []
        call = threading.Thread(target=lambda: out.extend(w.refit(2)))
        call.start()
        coordinator = w.sessions[0]._server.coordinator
        while coordinator.refit is None or coordinator.refit.parts[0].phase.value != "committing":
            time.sleep(0.001)
        w.sessions[2]._party.channel.close()
        while coordinator.failure is None:
            time.sleep(0.001)
        go_on.set()
        call.join()
        assert [r.committed for r in out[:2]] == [1, 1] and isinstance(out[2], e.PeerLost)
        w.controllers[0].wait_version("2", 5.0)
        assert w.controllers[0].error is None and not w.engines[0].paused and w.engines[0].label == "2"
        right(w, 2)
        failed(w.refit(ranks=[0, 1]), e.PeerLost, w, 5, time.monotonic(), "trainer 2")


def test_a_byte_that_is_wrong_in_the_engine_is_refused_with_verify_and_only_then(monkeypatch):
    """In the live storage itself, after the transfer; no checksum is faked."""
    with World(trainers=2) as w:
        good(w.refit(1))
        run = P2P.run

        def flip_one_bit(self, *args):
            out = run(self, *args)
            if self.link.rank == 2:  # the first worker
                w.engines[0].takers[0].live["layers.0.w"].view(torch.int16)[3, 2] ^= 1
            return out

        monkeypatch.setattr(P2P, "run", flip_one_bit)
        failed(w.refit(2, verify=True), e.VerificationError, w, 15, time.monotonic(), "worker 0")
        assert w.engines[0].paused and w.controllers[0].error is not None
        good(w.refit(3, verify=False))
        assert [t.wrong(3) for t in w.engines[0].takers] == [["layers.0.w"], []], "what verify is for"
        monkeypatch.undo()
        good(w.refit(4, verify=True))
        right(w, 4)


def test_prepare_while_the_last_refit_is_still_being_settled_is_kept_for_later():
    with World() as w:
        good(w.refit(1))
        engine, reset = w.engines[0], w.engines[0].reset_caches
        go_on = threading.Event()
        engine.reset_caches = lambda timeout: (go_on.wait(20), reset(timeout))
        assert all(r.pending for r in w.refit(2, wait="sources"))
        w.sessions[0].prepare()
        time.sleep(0.3)
        assert w.sessions[0]._server.coordinator.failure is None and w.sessions[0]._server.coordinator.refit.number == 2
        engine.reset_caches = reset
        go_on.set()
        good(w.refit(3))
        right(w, 3)


class SlowToRead(ToyTaker):
    def read(self, catalog):
        time.sleep(1.0)
        return super().read(catalog)


def connected_while_the_last_replica_joins(trainers: int, replicas: int) -> World:
    """Its workers still read their layout, so no trainer has heard of a plan for it."""
    w = World(trainers=trainers, replicas=replicas)
    w.rendezvous = f"tcp://127.0.0.1:{free_port()}"
    w.sources = [ToySource(i, trainers) for i in range(trainers)]
    w.engines = [ToyEngine(2) for _ in range(replicas)]
    w.engines[-1].takers = [SlowToRead(i, 2) for i in range(2)]
    w.sessions = [None] * trainers

    def connect(i):
        w.sessions[i] = s = trainer_session(
            w.sources[i],
            w.rendezvous,
            TOKEN,
            replicas=replicas,
            deadline_s=20.0,
            bucket_bytes=4096,
            drop=(),
            narrow=(),
            cache_dir=None,
        )
        s.open(False)

    w.on_all(connect)
    for i, engine in enumerate(w.engines):
        w.controllers.append(w.serve(engine, i))
        if i < replicas - 1:
            w.controllers[i].wait_ready(20.0)
    while w.sessions[0]._server.coordinator.replicas[replicas - 1].controller is None:
        time.sleep(0.01)
    return w


def test_a_refit_that_starts_while_a_replica_is_joining_waits_for_it():
    w = connected_while_the_last_replica_joins(trainers=1, replicas=1)
    good(w.refit(1))
    right(w, 1)
    w.close()


@pytest.mark.parametrize("where, step, state", [(Shelf, "plan", "planning"), (DirectPlane, "_open_routes", "linking")])
def test_a_layout_that_changes_while_a_replica_joins_is_planned_at_once(monkeypatch, where, step, state):
    """Nobody answers for the old one any more: who planned from it waited for the whole deadline, and a link of it was refused."""
    replicas: list = []
    done = getattr(where, step)

    def late(self, *a):
        until = time.monotonic() + 10
        while not (replicas and (replicas[0].stale or replicas[0].epoch > 1)) and time.monotonic() < until:
            time.sleep(0.01)
        return done(self, *a)

    monkeypatch.setattr(where, step, late)
    w = connected_while_the_last_replica_joins(trainers=2, replicas=1)
    replica = w.sessions[0]._server.coordinator.replicas[0]
    until = time.monotonic() + 10
    while replica.phase.value != state and time.monotonic() < until:
        time.sleep(0.01)
    assert replica.phase.value == state
    replicas.append(replica)
    transpose(w.sources[0])
    began = time.monotonic()
    good(w.refit(1))
    assert time.monotonic() - began < 8
    right(w, 1)
    w.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_sources_are_not_free_while_a_replica_that_is_waited_for_has_yet_to_join(replicas):
    """It has no lane on any trainer then. Whoever went by lanes would train on, and it would commit the next weights
    under this version, with every checksum right."""
    w = connected_while_the_last_replica_joins(trainers=2, replicas=replicas)
    returned, taker = threading.Event(), w.engines[0].takers[0]
    run_recipes = taker.run_recipes
    taker.run_recipes = lambda: (returned.wait(20), run_recipes())  # no commit before the calls have returned
    out = w.refit(1, wait="sources")
    returned.set()
    assert all(r.pending for r in out), out
    for s in w.sources:
        s.set(2)  # the next optimizer step
    for c in w.controllers:  # the one that joined is not the last to commit
        c.wait_version("1", 15.0)
    right(w, 1)
    good(w.refit(3))
    right(w, 3)
    w.close()


def test_without_its_second_lock_a_replica_is_not_refitted():
    w = World()
    w.engines = [ToyEngine(2)]

    def none():
        raise e.XferError("no small tensor of this model turns every output NaN")

    w.engines[0].takers[0].choose_lock = none
    with w:
        failed(w.refit(1), e.XferError, w, 10, time.monotonic(), "no small tensor")
        assert not w.engines[0].paused or w.controllers[0].error is not None


def test_with_no_replica_left_a_refit_fails_at_once():
    with World() as w:
        good(w.refit(1))
        w.engines[0].sessions[0]._party.channel.close()
        time.sleep(0.3)
        t0 = time.monotonic()
        failed(w.refit(2), e.PeerLost, w, w.deadline_s / 2, t0, "worker 0")


def test_a_failure_after_sources_were_free_keeps_attempts_in_step(fault):  # noqa: F811
    with World(deadline_s=8.0) as w:
        good(w.refit(1))
        fault("trainer:1:done:raise@1")
        first = w.refit(2, wait="sources")
        fault("")
        if any(isinstance(r, BaseException) for r in first) and not all(isinstance(r, BaseException) for r in first):
            failed(
                w.refit(3), e.XferError, w, 10, time.monotonic(), "injected fault"
            )  # the others hear of it with the next call
        elif not any(isinstance(r, BaseException) for r in first):
            failed(w.refit(3), e.XferError, w, 10, time.monotonic(), "injected fault")
        good(w.refit(4))
        right(w, 4)


def test_a_calls_own_deadline_may_be_longer_than_connects():
    with World(deadline_s=4.0) as w:
        good(w.refit(1))
        drain = w.sources[1].drain
        w.sources[1].drain = lambda: time.sleep(15.0)  # beyond connect's deadline and the workers' grace
        good(w.refit(2, deadline_s=60.0))
        w.sources[1].drain = drain
        right(w, 2)


def test_min_replicas_holds_when_sources_were_awaited():
    with World(replicas=2) as w:
        good(w.refit(1))
        w.engines[1].fail["pause"] = RuntimeError("engine 1 is broken")
        out = w.refit(2, wait="sources", min_replicas=1)
        assert not any(isinstance(r, BaseException) for r in out), out
        good(w.refit(3))


@pytest.mark.parametrize("say", [b"", b"xfer\x01"])
def test_strangers_that_do_not_prove_the_token_hold_nobody_up(say):
    """More of them than the door has room for. They are turned away; a client that has the token comes in at once."""
    with World() as w:
        port = int(w.rendezvous.rsplit(":", 1)[1])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * GREETERS)]
        for s in idle:
            with contextlib.suppress(OSError):
                s.sendall(say)
        t0 = time.monotonic()
        RendezvousClient(w.rendezvous, TOKEN, "observer", deadline_s=10.0).close()
        assert time.monotonic() - t0 < 5.0
        good(w.refit(1))
        assert len(w.sessions[0]._server.unproven) <= GREETERS
        for s in idle:
            s.close()
        good(w.refit(2))


def test_who_comes_after_trainer_0_has_refused_hears_why():
    """They used to find the rendezvous gone, and knocked until their deadline."""
    w = World(trainers=3)
    w.rendezvous, w.sessions = f"tcp://127.0.0.1:{free_port()}", [None] * 3
    w.sources = [ToySource(i, 3) for i in range(3)]

    def refuse():
        raise e.Unsupported("layer 1 cannot be read")

    w.sources[0].read = refuse

    def come_late(i):
        time.sleep(i)
        try:
            w._connect_one(i)
        finally:
            w.sessions[i].close()  # as xfer.connect does

    began = time.monotonic()
    failed(w.on_all(come_late), e.Unsupported, w, 10, began, "layer 1 cannot be read")


def test_lanes_that_plan_their_first_replicas_at_once_do_not_crash_the_process():
    """A trainer with two replicas died of it, at random: two threads had msgspec look at one class for the first time."""
    layout = ToySource(0, 1).read()
    catalog = Catalog.union([("trainer 0", layout.traced.specs)])
    made = trainer_inventory(catalog, rank=0, host="", roots=layout.roots, fragments=layout.traced.fragments)
    code = """
        import os, sys, threading
        from xfer.plan.inventory import Inventory

        def first_time(data):
            sys.setswitchinterval(1e-6)
            together = threading.Barrier(8)
            threads = [threading.Thread(target=lambda: (together.wait(), Inventory.from_bytes(data))) for _ in range(8)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            os._exit(0)

        children = [os.fork() or first_time(bytes.fromhex(sys.argv[1])) for _ in range(40)]
        sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), made.to_bytes().hex()]
    assert subprocess.run(command, timeout=120).returncode == 0


@pytest.mark.parametrize("seconds", [0.5, 1.5, 3.0])
def test_who_still_reads_its_layout_while_trainer_0_refuses_hears_why(seconds):
    """It found the connection closed when it wanted to say what it had read, and raised that."""
    w = World(trainers=2)
    w.rendezvous, w.sessions = f"tcp://127.0.0.1:{free_port()}", [None] * 2
    w.sources = [ToySource(i, 2) for i in range(2)]
    read = w.sources[1].read

    def refuse():
        raise e.Unsupported("layer 1 cannot be read")

    def take_long():
        time.sleep(seconds)
        return read()

    w.sources[0].read, w.sources[1].read = refuse, take_long

    def come(i):
        try:
            w._connect_one(i)
        finally:
            w.sessions[i].close()

    began = time.monotonic()
    failed(w.on_all(come), e.Unsupported, w, 10, began, "layer 1 cannot be read")


def test_what_the_hub_said_last_arrives_though_it_has_not_read_what_it_was_sent():
    """A socket that is closed with bytes unread takes back what the other side has not read of its own."""
    w = World(trainers=2)
    w.rendezvous = f"tcp://127.0.0.1:{free_port()}"
    coordinator = Server(w.rendezvous, TOKEN, Options(2, 1, 20.0, 4096))
    one = RendezvousClient(w.rendezvous, TOKEN, "trainer", index=0, size=2, deadline_s=10.0)
    other = RendezvousClient(w.rendezvous, TOKEN, "trainer", index=1, size=2, deadline_s=10.0)
    one.send(m.Failed(m.WireError.of(e.Unsupported("layer 1 cannot be read"), "trainer 0")))
    with pytest.raises(e.Unsupported, match="layer 1 cannot be read"):
        for i in range(100):
            if i == 3:
                threading.Thread(target=coordinator.close).start()
            other.send(m.Specs(b"x" * 1_000_000))
            time.sleep(0.02)
    one.close()
    other.close()


def test_no_thread_is_inside_a_link_when_close_has_returned(monkeypatch):
    """A trainer died by std::terminate at its end: the coordinator takes leave by closing, the thread that read that freed the
    lane's link, in C++, and came back when the interpreter was gone."""
    inside, abort = [], GlooLink.abort

    def slow(link, seconds=0.0):
        name = threading.current_thread().name
        inside.append(name)
        time.sleep(1.0 if name.startswith("xfer-read") else 0.0)
        abort(link)
        inside.remove(name)

    stop = Lane.stop
    monkeypatch.setattr(GlooLink, "abort", slow)
    monkeypatch.setattr(
        Lane, "stop", lambda lane: (time.sleep(0.3), stop(lane))
    )  # so that the coordinator has answered before
    w = World().connect()
    good(w.refit(1))
    w.sessions[1].close()
    assert inside == []
    w.close()
    assert inside == []
