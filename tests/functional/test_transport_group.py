"""Links: bytes, deadlines, aborts, lost peers. Nothing here waits longer than it says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.proc import PATIENCE
from tests.support.row_worlds import row
from tests.support.threads import MemoryStore, all_good, run_ranks
from xfer import background
from xfer.errors import DeadlineExceeded, PeerLost
from xfer.plan.program import Program
from xfer.transport import group
from xfer.transport.group import Aborted
from xfer.transport.links import open_group
from xfer.transport.nccl import NcclLink
from xfer.transport.p2p import P2P

BIG = 64 << 20  # more than socket buffers hold: a send of it blocks


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def links(n: int, store=None):
    store = store or MemoryStore()
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


def test_what_is_not_contiguous_is_refused_because_gloo_would_send_other_bytes(monkeypatch):
    a, b = links(2)
    strided = torch.arange(32, dtype=torch.uint8).reshape(4, 8).t()
    for call in (
        lambda: a.send(strided, 1, 0, soon()),
        lambda: a.recv(strided, 1, 0, soon()),
        lambda: a.broadcast(strided, 0, soon()),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            call()
    # Without the check: no error, and not the bytes of the view in its own order.
    monkeypatch.setattr(group, "bytes_of", lambda t: t)
    got = [strided, torch.zeros(8, 4, dtype=torch.uint8)]
    all_good(run_ranks(2, lambda r: (a, b)[r].broadcast(got[r], 0, soon())))
    assert not torch.equal(got[1], strided)


@pytest.mark.parametrize("blocked", ["recv", "send", "broadcast"])
def test_abort_from_another_thread_frees_at_once(blocked):
    a, _b, _c = links(3)
    raised, data = [], torch.zeros(BIG, dtype=torch.uint8)

    def block():
        try:
            if blocked == "recv":
                a.recv(torch.zeros(100), 1, 0, soon())
            elif blocked == "send":
                a.send(data, 2, 0, soon())
            else:
                a.broadcast(torch.zeros(100), 1, soon())
        except Exception as e:
            raised.append(e)

    t = threading.Thread(target=block, daemon=True)
    t.start()
    time.sleep(0.2)
    t0 = time.monotonic()
    a.abort()
    t.join(5)
    assert time.monotonic() - t0 < 1.0 * PATIENCE and not t.is_alive()
    assert [type(e) for e in raised] == [Aborted]
    with pytest.raises(Aborted):
        a.send(torch.zeros(1), 1, 0, soon())


def test_after_an_abort_no_byte_arrives_in_live_storage():
    """A receive straight into storage is pending; the abort returns; then the sender sends."""
    a, b = links(2)
    live = torch.zeros(1 << 20, dtype=torch.uint8)
    b.post([(live, 0, 0)], ())
    half = torch.ones(BIG, dtype=torch.uint8)
    flood = torch.zeros(BIG, dtype=torch.uint8)
    b.post([(flood, 0, 1)], ())
    a.post((), [(half, 1, 1)])  # in full flight when the abort comes
    time.sleep(0.01)
    b.abort()
    at = int(flood.count_nonzero())
    with pytest.raises(PeerLost):
        a.send(torch.ones(1 << 20, dtype=torch.uint8), 1, 0, soon(5))
    time.sleep(0.2)
    assert int(live.count_nonzero()) == 0 and int(flood.count_nonzero()) == at


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_aborts_a_communicator_knows_whether_its_kernels_have_ended(fails):
    """NCCL's own abort takes its time; a double of it, since there is no GPU here. The first caller need not wait for it, later
    ones must not believe that it is over."""
    link, end = NcclLink(None, 0, 1, 1.0, torch.device("cpu"), ("trainer 0",)), threading.Event()

    def abort() -> None:
        end.wait(20)
        if fails:
            raise RuntimeError("NCCL error: unhandled cuda error")

    link._pg = SimpleNamespace(abort=abort)
    assert link.drained(), "nobody has aborted it"
    t0 = time.monotonic()
    link.abort(0.0)
    assert time.monotonic() - t0 < 5 and not link.drained()
    later = threading.Thread(target=link.abort)
    later.start()
    later.join(0.2)
    assert later.is_alive(), "came back while bytes may still be written"
    end.set()
    later.join(10)
    assert not later.is_alive() and link.drained(5.0) == (not fails)
    link.close()


class Streams:
    """A double of torch.cuda's streams: the current one is a property of the thread, and begins as the device's default."""

    def __init__(self):
        self._of = threading.local()
        self.Event = lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True)
        self.set_device = lambda device: None

    def current_stream(self, device=None):
        return getattr(self._of, "now", "default")

    Stream = staticmethod(lambda device: object())

    @contextmanager
    def stream(self, stream):
        before, self._of.now = self.current_stream(), stream
        yield
        self._of.now = before


def test_opening_a_link_touches_no_stream_of_the_trainers(monkeypatch):
    """Whose work may wait for what this link waits for. Nor does it wait for the device: `Streams` has no such call."""
    streams, seen = Streams(), []

    class Group:
        Options = lambda: SimpleNamespace(config=SimpleNamespace())  # noqa: E731

        def __init__(self, *args):
            self._start_coalescing = self.eager_connect_single_device = self.abort = lambda *args: None
            self.broadcast = self._end_coalescing = self.send = self.recv = self.word

        def word(self, *args):
            seen.append(streams.current_stream())
            return SimpleNamespace(wait=lambda: seen.append(streams.current_stream()))

    monkeypatch.setattr(torch, "cuda", streams)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    link = NcclLink(None, 0, 2, 5.0, torch.device("cpu"), ("trainer 0", "worker 0"))
    opened = len(seen)
    link.warm([1])
    assert len(seen) > opened > 0 and len({id(s) for s in seen}) == 1 and "default" not in seen
    link.close()


def test_a_communicator_that_was_being_made_when_the_caller_gave_up_is_not_connected(monkeypatch):
    """The abort comes before there is anything to abort. It once waited for its peers for good, in memory of the GPU."""
    making, go_on, seen = threading.Event(), threading.Event(), []

    class Group:
        Options = lambda: SimpleNamespace(config=SimpleNamespace())  # noqa: E731

        def __init__(self, *args):
            making.set()
            go_on.wait(20)
            self.abort = lambda: seen.append("aborted")
            self.eager_connect_single_device = lambda device: seen.append("connects")
            self.broadcast = lambda *args: seen.append("speaks")

    monkeypatch.setattr(torch, "cuda", Streams())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    before = set(threading.enumerate())
    with pytest.raises(Aborted):
        NcclLink(None, 0, 2, 20.0, torch.device("cpu"), ("trainer 0", "worker 0"), making.is_set)
    (left,) = [t for t in threading.enumerate() if t not in before and t.name == "xfer-background"]
    go_on.set()
    left.join(20)
    assert not left.is_alive() and seen == ["aborted"]


class Grouped:
    """A double of ProcessGroupNCCL: how deep a thread is in groups is NCCL's, not a communicator's, and only the outermost end launches."""

    depth = threading.local()

    def __init__(self):
        self.queued, self.launched, self.aborted = [], [], False

    def _start_coalescing(self):
        self.depth.n = getattr(self.depth, "n", 0) + 1

    def message(self, data, peer, tag):
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        self.queued.append(peer)

    send = recv = message

    def _end_coalescing(self):
        self.depth.n -= 1
        if not self.depth.n:
            self.launched, self.queued = self.launched + self.queued, []

    def abort(self):
        self.aborted = True


@pytest.mark.parametrize("raises", ["the communicator's own error", "an abort from another thread"])
def test_what_ends_a_post_leaves_no_group_of_this_thread_open(raises, monkeypatch):
    """Or messages over the next communicator would be reported as moved and never be launched. An abort lets a post end; one that
    does not end is aborted all the same."""

    def over(pg) -> NcclLink:
        link = NcclLink(None, 0, 1, 1.0, torch.device("cpu"), ("trainer 0",))
        link._pg = pg
        return link

    monkeypatch.setattr("xfer.transport.nccl.POSTED_S", 0.2)
    pg, word = Grouped(), torch.zeros(8, dtype=torch.uint8)
    link, start = over(pg), pg._start_coalescing

    def and_then() -> None:
        start()
        if raises.startswith("an abort"):
            link.abort(5.0)
            assert link.drained(), "waited for this post for ever"
        pg.aborted = True

    pg._start_coalescing = and_then
    with pytest.raises((Aborted, PeerLost)):
        link.post([(word, 1, 0)], [(word, 1, 0)])
    after = Grouped()
    over(after).post([(word, 1, 0)], [(word, 1, 1)])
    assert after.launched == [1, 1] and not Grouped.depth.n
    late, end = over(Grouped()), threading.Event()
    late._pg.abort = lambda: end.wait(10)
    late.abort(0.0)
    began = time.monotonic()
    with pytest.raises(Aborted):  # at once, however long the communicator takes to end
        late.post([(word, 1, 0)], [])
    assert time.monotonic() - began < 5
    end.set()
    beside, posted = over(Grouped()), threading.Event()
    beside._pg.message = lambda *args: (beside.abort(0.0), posted.set(), time.sleep(0.05))
    beside._pg.recv = beside._pg.message
    pg = beside._pg
    beside.post([(word, 1, 0)], [])
    assert posted.is_set() and beside.drained(5.0) and pg.aborted, "aborted, but behind the post"


def test_a_deadline_names_who_was_waited_for():
    a, _b = links(2)
    t0 = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="trainer 1"):
        a.recv(torch.zeros(10), 1, 0, soon(0.3))
    assert 0.2 < time.monotonic() - t0 < 1.5 * PATIENCE


def test_a_group_that_does_not_fill_up_is_a_deadline():
    t0 = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        open_group(MemoryStore(1.0), 0, 2, 1.0)
    assert time.monotonic() - t0 < 5


def test_a_link_that_is_being_opened_can_be_given_up():
    """Who waits inside gloo for a peer that died there is freed by nothing; the rank must not hang with it."""
    t0, given_up = time.monotonic(), threading.Event()
    threading.Timer(0.3, given_up.set).start()
    with pytest.raises(Aborted, match="cancelled"):
        open_group(MemoryStore(2.0 * PATIENCE), 0, 2, 2.0 * PATIENCE, cancelled=given_up.is_set)
    assert 0.2 < time.monotonic() - t0 < 1.5 * PATIENCE
    (left,) = background._given_up
    left.join(20.0)  # the thread that was left behind ends by itself
    assert not left.is_alive() and not background._given_up


def test_a_store_that_raises_passes_its_error_on():
    class Broken(MemoryStore):
        def wait(self, keys, timeout: timedelta | None = None):
            raise PeerLost("the rendezvous is gone")

        get = wait

    with pytest.raises(PeerLost, match="rendezvous is gone"):
        open_group(Broken(), 0, 2, 5.0)


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
    link = open_group(MemoryStore(), 0, 1, 1.0)
    t = torch.cat([torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)])
    P2P(link, Program(0, 0, row((32,), dst_offset=64)), [t]).run(soon())
    assert int(t.sum()) == 128
    link.abort()
    link.close()


RANK = """
    import os, sys, time
    import numpy as np, torch
    from torch.distributed import FileStore, PrefixStore
    from tests.support.row_worlds import row
    from xfer.plan.program import Program
    from xfer.transport.links import open_group
    from xfer.transport.p2p import P2P

    path, rank, fault, deadline = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    store = FileStore(path, -1)
    labels = ("trainer 0", "trainer 1", "engine 0 worker 0")
    link = open_group(PrefixStore("e1", store), rank, 3, 30, labels=labels)
    # Each rank sends to each other in 64 waves.
    size = 1 << 16
    rows, at = [], [0] * 3
    for wave in range(64):
        for src in range(3):
            for dst in range(3):
                if src != dst:
                    rows.append(row((size // 2,), src=src, dst=dst, wave=wave, dst_root=1, dst_offset=at[dst]))
                    at[dst] += size
    rows = np.concatenate(rows)
    mine = rows[(rows["src"] == rank) | (rows["dst"] == rank)]
    roots = [torch.full((size,), rank + 1, dtype=torch.uint8), torch.zeros(max(at), dtype=torch.uint8)]
    transfer = P2P(link, Program(rank, 64, mine), roots)
    transfer.run(time.monotonic() + 30)

    def hook(wave, nbytes):
        if wave == 20 and rank == 2:
            if fault == "die":
                os._exit(9)
            time.sleep(3600)

    began = time.monotonic()
    try:
        transfer.run(began + deadline, progress=hook)
        print("finished", flush=True)
    except Exception as e:
        text = str(e).replace(chr(10), " | ")
        print(type(e).__name__, f"{time.monotonic() - began:.3f}", text, sep="\\t", flush=True)
    link.close()
    two = open_group(PrefixStore("e2", store), rank, 2, 30, labels=labels[:2])
    got = torch.zeros(4)
    if rank:
        two.recv(got, 0, 0, time.monotonic() + 10)
    else:
        two.send(torch.arange(4.0), 1, 0, time.monotonic() + 10)
    print("again", got.tolist(), flush=True)
"""


@pytest.mark.parametrize("fault, kinds", [("die", {"PeerLost"}), ("hang", {"DeadlineExceeded", "PeerLost"})])
def test_survivors_of_a_process_that_dies_or_hangs_say_so_in_time_and_meet_again(tmp_path, fault, kinds):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    command = [sys.executable, str(script), str(tmp_path / "store")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    procs = [
        subprocess.Popen([*command, str(r), fault, "1.0"], stdout=subprocess.PIPE, text=True, env=env) for r in range(3)
    ]
    try:
        outs = [p.communicate(timeout=90)[0].splitlines() for p in procs[:2]]
    finally:
        for p in procs:
            p.kill()
            p.wait()
    for out in outs:
        kind, seconds, text = out[0].split("\t")
        assert kind in kinds and float(seconds) < 3.0 * PATIENCE
        assert "engine 0 worker 0" in text or kind == "PeerLost"
        assert "wave" in text
        assert out[1].startswith("again")
    assert any("engine 0 worker 0" in out[0] for out in outs)
    assert outs[1][1] == "again [0.0, 1.0, 2.0, 3.0]"
