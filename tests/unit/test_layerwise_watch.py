"""Deadlines over NCCL without a GPU: the watching thread and the wire that it watches, and the streams that wait for bytes. NCCL and the
device are made up: their operations wait until the test lets them go on. With real ones: `dead` of benchmarks/layerwise_gpu.py."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.support.layerwise_half import Half, layers
from tests.support.proc import PATIENCE
from tests.support.threads import all_good, run_ranks
from xfer.errors import DeadlineExceeded
from xfer.layerwise import ParamGather, pulls
from xfer.layerwise import wire as wires
from xfer.layerwise.megatron import MegatronLayerWise
from xfer.layerwise.watch import DeadlineWatch
from xfer.transport import nccl as nccl_links
from xfer.transport.nccl import NcclLink


class Sign:
    """An event of a device, or a collective that arrives when the test says so."""

    def __init__(self):
        self.come, self.waiting = False, []

    def arrive(self) -> None:
        self.come = True
        for stream in self.waiting:
            stream.run()

    def wait(self) -> None:
        Stream.now.stream.wait_event(self)

    def record(self) -> None:
        Stream.now.stream.put(self.arrive)


class Stream:
    """Operations in order. Each runs once those before it have run and the sign has come for which the stream waits. The stream that
    `torch.cuda.stream` made current on a thread gets its operations."""

    now = threading.local()

    def __init__(self):
        self.todo: list[Sign | Callable[[], object]] = []

    def put(self, do: Callable[[], object]) -> None:
        self.todo.append(do)
        self.run()

    def wait_event(self, sign: Sign) -> None:
        self.todo.append(sign)
        sign.waiting.append(self)
        self.run()

    def record_event(self) -> Sign:
        event = Sign()
        self.put(event.arrive)
        return event

    def run(self) -> None:
        while self.todo and (not isinstance(self.todo[0], Sign) or self.todo[0].come):
            first = self.todo.pop(0)
            if not isinstance(first, Sign):
                first()

    def synchronize(self) -> None:
        assert not self.todo


@contextlib.contextmanager
def on(stream: Stream):
    Stream.now.stream = stream
    yield
    Stream.now.stream = None


class Nccl:
    """A process group whose broadcasts arrive when the test says so."""

    def __init__(self):
        self.works: list[Sign] = []
        self.tensors: list[torch.Tensor] = []
        self.at_abort: list[torch.Tensor] = []
        self.aborted = threading.Event()

    def _start_coalescing(self) -> None: ...

    def broadcast(self, tensors: list[torch.Tensor], options) -> None:
        self.tensors += tensors

    def _end_coalescing(self) -> Sign:
        self.works.append(Sign())
        return self.works[-1]

    def abort(self) -> None:
        self.at_abort = [t.clone() for t in self.tensors]
        for w in self.works:
            w.arrive()
        self.aborted.set()


@pytest.fixture
def wire(monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(wires, "_NUMBERS", 4)
    made = []

    def make(deadline_s: float) -> wires.Wire:
        w = wires.Wire.__new__(wires.Wire)  # its own __init__ needs a device
        made.append(w)
        w._link = NcclLink(None, 0, 1, 1.0, torch.device("cpu"), ("rank 0",))
        w._link._pg = Nccl()
        w.rank, w.size, w.device, w.lost, w._who = 0, 2, torch.device("cuda", 0), None, "rank 0"
        w.behind, w._closed = [], False
        w.deadline_s, w._notes, w._spare = deadline_s, Stream(), Stream()
        word, w._numbers, w._seen = torch.zeros(1, dtype=torch.int32), torch.arange(4, dtype=torch.int32), 0
        note = lambda number, non_blocking: Stream.now.stream.put(lambda: word.copy_(number))  # noqa: E731
        w._note, w._read = SimpleNamespace(copy_=note), word.numpy()
        w._watch = DeadlineWatch(deadline_s, w._arrived, w._expire)
        return w

    yield make
    for w in made:
        w.close()
        assert not w._watch


def test_missing_bytes_become_nans_before_the_abort_and_copies_behind_it_too_and_every_use_raises(wire):
    """The copies go on when nothing holds them any more."""
    w, behind = wire(0.5 * PATIENCE), Stream()  # time for all that is queued here to be queued before the abort
    mine, theirs, here, copied = (torch.ones(8, dtype=torch.bfloat16) for _ in range(4))
    bytes_of = lambda t: t.view(torch.uint8)  # noqa: E731
    nccl, w.behind = w._link._pg, [behind]
    nccl.allreduce = lambda tensors: nccl._end_coalescing()
    waited: list[Stream] = []

    def wait_stream(stream: Stream) -> None:
        """The abort has let it go on. Its last copy ends while it is waited for."""
        stream.synchronize()
        copied.fill_(3.0)
        waited.append(stream)

    w._spare.wait_stream = wait_stream
    w.broadcasts([(1, bytes_of(here))], lambda: "bucket 0")
    nccl.works[0].arrive()
    began = time.monotonic()
    w.broadcasts([(0, bytes_of(mine)), (1, bytes_of(theirs))], lambda: "bucket 1")
    w.broadcasts([(1, bytes_of(theirs))], lambda: "bucket 2")
    sign = w.meet(lambda: "the sign", [bytes_of(copied)], torch.zeros(1, dtype=torch.int32))
    with on(behind):
        sign.wait()
    behind.put(lambda: copied.fill_(3.0))
    assert nccl.aborted.wait(30 * PATIENCE) and time.monotonic() - began >= 0.5 * PATIENCE
    assert torch.equal(mine, torch.ones_like(mine)) and torch.equal(here, torch.ones_like(here))
    assert theirs.isnan().all() and nccl.at_abort[2].view(torch.bfloat16).isnan().all()
    for use in (w.check, lambda: w.broadcasts([(1, bytes_of(theirs))], lambda: "")):
        with pytest.raises(DeadlineExceeded, match="bucket 1") as e:
            use()
        assert "bucket 0" not in str(e.value) and "waiting at a barrier" in str(e.value)
    w.close()
    assert waited == [behind] and copied.isnan().all()


def test_the_count_of_arrivals_wraps_around(wire):
    w, t = wire(30.0 * PATIENCE), torch.zeros(8, dtype=torch.uint8)
    nccl = w._link._pg
    for i in range(11):  # of which the word in memory tells four apart
        w.broadcasts([(1, t)], lambda: "bucket")
        nccl.works[-1].arrive()
        with w._watch._change:  # under which the watch asks too
            assert w._arrived() == i + 1
    assert w.lost is None and not nccl.aborted.is_set()
    w.close()
    assert nccl.aborted.is_set() and w.lost is None and not t.any()


@pytest.mark.parametrize("stuck, patience", [(False, 30 * PATIENCE), (True, 0.05)])
def test_an_abort_waits_for_a_group_of_messages_that_is_being_started_but_not_for_one_that_is_stuck(
    wire, monkeypatch, stuck, patience
):
    """A group that is closed over a communicator that was freed meanwhile may crash the process."""
    monkeypatch.setattr(nccl_links, "POSTED_S", patience)
    late = 0.5 * PATIENCE
    w, seen, theirs = wire(late), [], torch.ones(8, dtype=torch.bfloat16)
    nccl = w._link._pg
    w.broadcasts([(1, torch.zeros(8, dtype=torch.uint8))], lambda: "bucket 0")
    end = nccl._end_coalescing

    def slow():
        seen.append(nccl.aborted.wait(30 * PATIENCE if stuck else late + 0.5))  # bucket 0 is late meanwhile
        return end()

    nccl._end_coalescing = slow
    w.broadcasts([(1, theirs.view(torch.uint8))], lambda: "bucket 1")
    assert nccl.aborted.wait(30 * PATIENCE) and seen == [stuck]
    assert theirs.isnan().all(), "what was being started is on its way like all else"


def test_nothing_is_started_once_a_wire_is_lost(wire):
    """The wire is lost between its check and the start."""
    w = wire(30.0 * PATIENCE)
    nccl, said = w._link._pg, DeadlineExceeded("late", ["bucket 0"], where="rank 0")
    w._link._group = lambda: setattr(w, "lost", said) or nccl
    with pytest.raises(DeadlineExceeded, match="late"):
        w.broadcasts([(1, torch.zeros(8, dtype=torch.uint8))], lambda: "bucket 1")
    assert not nccl.works and not nccl.tensors and not w._watch.missing()


def test_a_rank_that_gave_up_before_the_name_was_told_opens_no_link(monkeypatch):
    """The last rank comes after the deadline, and lets the call go on for whose result nobody waits any more."""
    come, told = threading.Event(), threading.Event()
    monkeypatch.setattr(wires, "_name", lambda *_: come.wait(30 * PATIENCE) and told.set() or "name")
    monkeypatch.setattr(wires, "open_group", lambda *_, **__: pytest.fail("a link was opened"))
    for name, value in (("get_rank", 0), ("get_world_size", 2), ("get_process_group_ranks", [0, 1])):
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    with pytest.raises(DeadlineExceeded, match="did not all meet"):
        wires.Wire.over(object(), torch.device("cpu"), 0.2)
    come.set()
    assert told.wait(30 * PATIENCE)


def test_copies_out_of_owners_memory_begin_when_all_have_stepped_and_are_waited_for(wire, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Sign)
    here = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    w, stepped, over, asked = wire(30.0 * PATIENCE), Sign(), Sign(), []
    w.size, w.device = 3, torch.device("cpu")
    w.meet = lambda what, received, word: asked.append(received) or (stepped if len(asked) == 1 else over)
    shares = [SimpleNamespace(owner=r, nbytes=8, home=torch.tensor(-1.0), members=()) for r in (0, 1, 2, 1)]
    theirs = {1: torch.tensor([10.0, 11.0]), 2: torch.tensor([20.0])}
    numbers = {id(s): n for s, n in zip(shares, (0, 0, 0, 1))}
    mapping = Mock()
    mapping.read_into = lambda rank, root, into: Stream.now.stream.put(lambda: into.copy_(theirs[rank][root]))
    p = pulls.Pulls(w, None, mapping, numbers, shares, Stream())
    assert w.behind == [p.stream]
    p.begin()
    works = pulls.start_in_order([(p, shares[:2]), (p, shares[2:])])
    assert asked == [[s.home for s in shares[1:]]]
    for work in works:
        work.wait()

    def not_before(sign: Sign) -> list:
        """What parameters are once this stream goes on, which waits for the sign."""
        values, seen = lambda: [s.home.item() for s in shares], []
        before = values()
        here.put(lambda: seen.append(values()))
        assert not seen and values() == before
        sign.arrive()
        return seen[0]

    assert not_before(stepped) == [-1.0, 10.0, 20.0, 11.0]
    p.end()
    with on(here):
        p.meet()
    not_before(over)  # others may still copy out of this rank's memory
    p.unmap()
    assert mapping.close.called
    w.behind = []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("guard", ["nan", "first", "always"])
def test_every_stream_that_reads_a_bucket_waits_for_it_and_the_first_only_once(monkeypatch, guard, capturing):
    """Shared experts run beside the routed ones. Nothing of a graph that is captured waits for work outside of it."""
    now: list[Stream] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: now[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    net = layers(2)
    o = Half(net, guard=guard, bucket_bytes=1 << 20)
    o.train(101.0)
    o.drain()
    assert [b.landed for b in o.gather.buckets] == [None], "on CPUs there are no streams"
    o.wire.device = o._device = torch.device("cuda", 0)
    for _ in range(2):
        main, side, work = Stream(), Stream(), Sign()
        work.wait = lambda work=work: now[-1].wait_event(work)
        monkeypatch.setattr(o.wire, "broadcasts", lambda moves, what, work=work: [work])
        now.append(main)
        o.gather.begin()
        for stream, module in ((side, net[0]), (main, net[1]), (main, net[1]), (side, net[0])):
            now.append(stream)
            module(torch.ones(1, 4))
            assert bool(stream.todo) == (not capturing or stream is side)
        assert work.waiting == [side]
        work.arrive()
        assert not main.todo and not side.todo


def test_megatrons_norm_over_all_ranks_has_the_deadline_of_the_gather(monkeypatch):
    """Its default group has another one, of half an hour. Both ranks are threads here; the second never sums."""
    store = dist.HashStore()
    ends = all_good(run_ranks(2, lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=30))))
    monkeypatch.setattr(dist, "all_reduce", lambda t, async_op: ends[0].allreduce([t]))
    one = MegatronLayerWise.__new__(MegatronLayerWise)
    one._trained, one.gather = [("w", torch.zeros(1))], ParamGather([], deadline_s=0.5, label="rank 0")
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="not within"):
            one.gather.check()
            one.gather.guarded(lambda: one._total(torch.ones(())), "the norm of all gradients")
    ends[1].allreduce([torch.ones(())]).wait()  # lets go of the first
