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

from examples.common.ports import free_port
from tests.support.world import (
    TOKEN,
    ToyEngine,
    ToyLayout,
    ToySource,
    ToyTaker,
    World,
    failed,
    good,
    right,
    trainer_session,
)
from xfer import errors as e
from xfer.coordinator import messages as m
from xfer.coordinator.state import Options
from xfer.participants.lane import Lane
from xfer.plan.inventory import trainer_inventory
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.server import GREETERS, Server
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.traced import Traced
from xfer.transport.group import GlooLink
from xfer.transport.p2p import P2P


def transpose(source: ToySource, name: str = "layers.0.w") -> None:
    """Other strides, same values: only a new plan reads it rightly."""
    source.params[name] = source.params[name].t().contiguous().t()


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


def test_exports_that_change_are_planned_anew_and_refused_every_time_until_they_fit():
    w = World()
    w.sources = [Widening(i, 2) for i in range(2)]
    with w:
        good(w.refit(1))
        for wide, kind in (((0,), e.LayoutError), ((0, 1), e.CoverageError)):  # trainers disagree; engines disagree
            for s in w.sources:
                s.wide = s.rank in wide
                s.params["embed"] = s.params["embed"].float() if s.wide else s.params["embed"].bfloat16()
            for version in (2, 3):
                failed(w.refit(version), kind, w, 10, time.monotonic(), "embed")
                right(w, 1)
        for s in w.sources:
            s.wide, s.params["embed"] = False, s.params["embed"].bfloat16()
        good(w.refit(4))
        right(w, 4)


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


def test_all_ranks_hear_why_trainer_0_refuses_however_late_they_are():
    """One comes later, when trainer 0 has left; one still reads its layout then. They found the rendezvous gone."""
    w = World(trainers=3)
    w.rendezvous, w.sessions = f"tcp://127.0.0.1:{free_port()}", [None] * 3
    w.sources = [ToySource(i, 3) for i in range(3)]
    read = w.sources[2].read

    def refuse():
        raise e.Unsupported("layer 1 cannot be read")

    w.sources[0].read, w.sources[2].read = refuse, lambda: (time.sleep(1.5), read())[1]

    def come(i):
        time.sleep(1.0 * (i == 1))
        try:
            w._connect_one(i)
        finally:
            w.sessions[i].close()  # as xfer.connect does

    began = time.monotonic()
    failed(w.on_all(come), e.Unsupported, w, 10, began, "layer 1 cannot be read")


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


def test_a_caller_that_comes_as_the_rendezvous_closes_is_let_go_at_once():
    """Its connection was accepted and forgotten, so that a trainer which connected again waited 20 s for a greeting."""
    rendezvous, at, go_on = f"tcp://127.0.0.1:{(port := free_port())}", threading.Event(), threading.Event()
    server = Server(rendezvous, TOKEN, Options(1, 1, 20.0, 4096))
    server.loop.call_soon_threadsafe(lambda: (at.set(), go_on.wait(10)))
    assert at.wait(10)
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as caller:
        closing = threading.Thread(target=server.close)
        closing.start()
        time.sleep(0.2)  # until it has asked the thread that stands still
        go_on.set()
        closing.join(20)
        with contextlib.suppress(ConnectionError):
            assert not caller.recv(1)


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
