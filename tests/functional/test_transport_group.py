"""Links: bytes, deadlines, aborts, lost peers. Nothing here waits longer than it says."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.proc import PATIENCE
from tests.support.row_worlds import row
from tests.support.threads import all_good, memory_store, run_ranks, soon
from tests.support.world import until_true
from tests.support.world_processes import Process
from xfer import background
from xfer.errors import DeadlineExceeded, PeerLost
from xfer.plan.program import Program
from xfer.transport.group import Aborted
from xfer.transport.links import open_group
from xfer.transport.nccl import NcclLink
from xfer.transport.p2p import P2P

SO_MAX_PACING_RATE = 47  # of Linux, in bytes/s; Python has no name for it
FLOOD = torch.ones(64 << 20, dtype=torch.uint8)  # more than socket buffers hold: a send of it blocks


def links(n: int):
    store = memory_store()
    return all_good(run_ranks(n, lambda r: open_group(store, r, n, 20.0, labels=[f"trainer {i}" for i in range(n)])))


def test_any_dtype_travels_and_the_default_group_is_untouched():
    a, b = links(2)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        sent = torch.arange(60).reshape(3, 20).to(dtype)
        got, both = torch.zeros_like(sent), (sent, torch.zeros_like(sent))

        def rank(r, sent=sent, got=got, both=both):
            if r == 0:
                a.send(sent, 1, 3, soon())
            else:
                b.recv(got, 0, 3, soon())
            (a, b)[r].broadcast(both[r], 0, soon())

        all_good(run_ranks(2, rank))
        for arrived in (got, both[1]):
            assert torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8))
    assert not dist.is_initialized()


@pytest.mark.parametrize("call, args", [("send", (1, 0)), ("recv", (1, 0)), ("broadcast", (0,))])
def test_what_is_not_contiguous_is_refused_because_gloo_would_send_other_bytes(call, args):
    with pytest.raises(ValueError, match="contiguous"):
        getattr(links(2)[0], call)(torch.zeros(4, 8).t(), *args, soon())


def blocked_in(call) -> Future:
    """The call, in a thread that does not keep this process."""
    done = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return done


def is_freed(link, blocked: Future) -> None:
    """An abort of the link ends a call that waits, at once."""
    began = time.monotonic()
    link.abort()
    assert type(blocked.exception(10)) is Aborted and time.monotonic() - began < PATIENCE


def _stalls(conn, store: str, nbytes: int) -> None:
    """Another process, which is stopped while it sends, a quarter of the message a second."""
    link = open_group(dist.FileStore(store, 2), 1, 2, 20.0)
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as s:  # OSError: no socket
            s.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, nbytes // 4)
    link.send(torch.ones(nbytes, dtype=torch.uint8), 0, 0, time.monotonic() + 60.0)


def test_abort_frees_a_wait_for_a_message_of_which_a_part_has_come_and_no_more_comes(tmp_path):
    store, nbytes = str(tmp_path / "store"), 16 << 20
    sender = Process(_stalls, store, nbytes)
    try:
        link = open_group(dist.FileStore(store, 2), 0, 2, 20.0)
        got = torch.zeros(nbytes, dtype=torch.uint8)
        received = blocked_in(lambda: link.recv(got, 1, 0, time.monotonic() + 60.0))
        until_true(lambda: bool(got[0]))
        sender.signal(signal.SIGSTOP)
        time.sleep(0.1)  # what it had sent arrives
        is_freed(link, received)
        there = got.count_nonzero()
        assert there < nbytes
        sender.signal(signal.SIGCONT)
        time.sleep(1.0)  # it goes on sending
        assert got.count_nonzero() == there
        link.close()
    finally:
        sender.stop()


@pytest.mark.parametrize(
    "call, args", [("recv", (torch.zeros(100), 1, 0)), ("send", (FLOOD, 2, 0)), ("broadcast", (torch.zeros(100), 1))]
)
def test_abort_from_another_thread_frees_at_once(call, args):
    a, _b, _c = links(3)
    blocked = blocked_in(lambda: getattr(a, call)(*args, soon()))
    time.sleep(0.2)
    is_freed(a, blocked)
    with pytest.raises(Aborted):
        a.send(torch.zeros(1), 1, 0, soon())


def test_after_an_abort_no_byte_arrives_in_live_storage():
    """A receive straight into storage is pending; the abort returns; then the sender sends."""
    a, b = links(2)
    live, flood = torch.zeros(1 << 20), torch.zeros_like(FLOOD)
    b.post([(live, 0, 0)], ())
    b.post([(flood, 0, 1)], ())
    a.post((), [(FLOOD, 1, 1)])  # in full flight when the abort comes
    time.sleep(0.01)
    b.abort()
    at = int(flood.count_nonzero())
    with pytest.raises(PeerLost):
        a.send(torch.ones(1 << 20), 1, 0, soon(5))
    time.sleep(0.2)
    assert int(live.count_nonzero()) == 0 and int(flood.count_nonzero()) == at


# ---- NCCL, by a double, since there is no GPU here


class Communicator:
    """A double of ProcessGroupNCCL. How deep a thread is in groups is NCCL's, not a communicator's, and only the outermost end launches.
    `at`: what a call does first, by its name. `calls`: their names and the streams that were current."""

    depth, streams, made = threading.local(), threading.local(), []

    def __init__(self, *_, **at):
        self.at, self.calls, self.queued, self.launched, self.aborted = at, [], [], [], False
        self.made.append(self)
        at.get("made", lambda: None)()

    def __getattr__(self, name: str):
        def call(*args):
            self.at.get(name, lambda: None)()
            self.calls.append((name, current_stream()))
            if name == "_start_coalescing":
                self.depth.n = getattr(self.depth, "n", 0) + 1
            elif name == "_end_coalescing":
                self.depth.n -= 1
                if not self.depth.n:
                    self.launched, self.queued = self.launched + self.queued, []
            elif name == "abort":
                self.aborted = True
            elif self.aborted:
                raise RuntimeError("NCCL communicator was aborted on rank 0.")
            elif name in ("send", "recv"):
                self.queued.append(args[1])
            return SimpleNamespace(wait=lambda: call())

        return call


def current_stream(device=None):
    """A property of the thread, which begins as the device's default."""
    return getattr(Communicator.streams, "now", "default")


@contextmanager
def in_stream(stream):
    before, Communicator.streams.now = current_stream(), stream
    yield
    Communicator.streams.now = before


@pytest.fixture
def nccl(monkeypatch):
    """Doubles of torch.cuda, which has no call that waits for the device, and of ProcessGroupNCCL: these calls come at its calls."""
    event = lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True)  # noqa: E731
    cuda = SimpleNamespace(Event=event, set_device=lambda device: None, Stream=lambda device: object())
    cuda.stream, cuda.current_stream = in_stream, current_stream
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(Communicator, "made", [])

    def makes(**at) -> None:
        kind = partial(Communicator, **at)
        kind.Options = lambda: SimpleNamespace(config=SimpleNamespace())
        monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)

    return makes


def over(pg: Communicator) -> NcclLink:
    link = NcclLink(None, 0, 1, 1.0, torch.device("cpu"), ("trainer 0",))
    link._pg = pg
    return link


@pytest.mark.parametrize("fails", [False, True])
def test_a_caller_that_aborts_a_communicator_knows_whether_its_kernels_have_ended(fails):
    """NCCL's own abort takes its time. The first caller need not wait for it, later ones must not believe that it is over."""
    end = threading.Event()

    def abort() -> None:
        end.wait(20)
        if fails:
            raise RuntimeError("NCCL error: unhandled cuda error")

    link = over(Communicator(abort=abort))
    assert link.drained(), "it has not been aborted"
    t0 = time.monotonic()
    link.abort(0.0)
    assert time.monotonic() - t0 < 5 and not link.drained()
    with pytest.raises(Aborted):  # at once, however long the communicator takes to end
        link.post([WORD], [])
    assert time.monotonic() - t0 < 5
    later = blocked_in(link.abort)
    with pytest.raises(TimeoutError):
        later.result(0.2)  # bytes may still be written
    end.set()
    later.result(10)
    assert link.drained(5.0) == (not fails)
    link.close()


def test_opening_a_link_touches_no_stream_of_the_trainers(nccl):
    """Whose work may wait for what this link waits for."""
    nccl()
    link = NcclLink(None, 0, 2, 5.0, torch.device("cpu"), ("trainer 0", "worker 0"))
    (pg,) = Communicator.made
    opened = len(pg.calls)
    link.warm([1])
    used = [stream for name, stream in pg.calls if name in ("broadcast", "_end_coalescing", "send", "recv")]
    assert len(pg.calls) > opened > 0 and used and len({id(s) for s in used}) == 1 and "default" not in used
    link.close()


def test_a_communicator_that_was_being_made_when_the_caller_gave_up_is_not_connected(nccl):
    """The abort comes before there is anything to abort. It once waited for its peers for good, in memory of the GPU."""
    making, go_on, before = threading.Event(), threading.Event(), set(background._given_up)
    nccl(made=lambda: (making.set(), go_on.wait(20)))
    with pytest.raises(Aborted):
        NcclLink(None, 0, 2, 20.0, torch.device("cpu"), ("trainer 0", "worker 0"), making.is_set)
    (left,) = background._given_up - before
    go_on.set()
    assert left._left.wait(20) and [name for name, _ in Communicator.made[0].calls] == ["abort"]


WORD = torch.zeros(8, dtype=torch.uint8), 1, 0
"""A message to or from rank 1."""


@pytest.mark.parametrize("raises", ["the communicator's own error", "an abort from another thread"])
def test_what_ends_a_post_leaves_no_group_of_this_thread_open(raises, monkeypatch):
    """Or messages over the next communicator would be reported as moved and never be launched. An abort that comes later waits for the
    post, and only for a while."""
    monkeypatch.setattr("xfer.transport.nccl.POSTED_S", 0.2)

    def begun() -> None:
        if raises.startswith("an abort"):
            link.abort(5.0)
            assert link.drained(), "waited for this post for ever"
        pg.aborted = True

    pg = Communicator(_start_coalescing=begun)
    link = over(pg)
    with pytest.raises((Aborted, PeerLost)):
        link.post([WORD], [WORD])
    after = Communicator()
    over(after).post([WORD], [WORD])
    assert after.launched == [1, 1] and not Communicator.depth.n
    beside = Communicator(recv=lambda: (late.abort(0.0), time.sleep(0.05)))
    late = over(beside)
    late.post([WORD], [])
    assert beside.launched == [1] and late.drained(5.0) and beside.aborted, "aborted, but behind the post"


# ---- deadlines and ends


def test_a_deadline_names_the_rank_that_was_waited_for():
    a, _b = links(2)
    t0 = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="trainer 1"):
        a.recv(torch.zeros(10), 1, 0, soon(0.3))
    assert 0.2 < time.monotonic() - t0 < 1.5 * PATIENCE


class Broken(dist.Store):
    def wait(self, *args):
        raise PeerLost("the rendezvous is gone")

    set = get = wait


def test_a_link_opens_by_its_deadline_or_raises_why_not():
    """Also what its store raises. A thread that waits inside gloo for a dead peer cannot be freed; the rank must not hang with it."""
    t0, given_up = time.monotonic(), threading.Event()
    with pytest.raises(PeerLost, match="rendezvous is gone"):
        open_group(Broken(), 0, 2, 5.0)
    with pytest.raises(DeadlineExceeded):
        open_group(memory_store(1.0), 0, 2, 1.0)
    assert time.monotonic() - t0 < 5
    before, t0 = set(background._given_up), time.monotonic()
    threading.Timer(0.3, given_up.set).start()
    with pytest.raises(Aborted, match="cancelled"):
        open_group(memory_store(2.0 * PATIENCE), 0, 2, 2.0 * PATIENCE, cancelled=given_up.is_set)
    assert 0.2 < time.monotonic() - t0 < 1.5 * PATIENCE
    (left,) = background._given_up - before
    assert left._left.wait(20.0) and left not in background._given_up  # the thread that was left behind ends by itself


def test_closing_lets_finished_messages_arrive_and_others_go_on():
    a, b, c = links(3)
    sent, got = torch.randint(0, 255, (8 << 20,), dtype=torch.uint8), torch.zeros(8 << 20, dtype=torch.uint8)

    def rank(r):
        if r == 0:
            a.send(sent, 1, 0, soon())
            a.close()
        elif r == 1:
            time.sleep(0.2)
            b.recv(got, 0, 0, soon())
            b.send(got, 2, 0, soon())
        else:
            c.recv(got.clone(), 1, 0, soon())

    all_good(run_ranks(3, rank))
    assert torch.equal(sent, got)


def test_a_link_of_one_rank_runs_its_local_rows():
    link = open_group(memory_store(), 0, 1, 1.0)
    t = torch.cat([torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)])
    P2P(link, Program(0, 0, row((32,), dst_offset=64)), [t]).run(soon())
    assert int(t.sum()) == 128
    link.abort()
    link.close()
