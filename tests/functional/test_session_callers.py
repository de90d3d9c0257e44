"""What callers of nccl_xfer_refit() do to each other and to themselves: some call and some do not, two threads call at once,
arguments are wrong or differ, somebody leaves early. Every such call ends in a typed error, in time, and the next is whole."""

import threading
import time

import pytest

from tests.functional.test_session_protocol import failed, good, right
from tests.support.world import World
from xfer import errors as e


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
        s.drain = lambda: (time.sleep(2.5), order.append("old"))
        failed(w.refit(2, deadline_s=1.0), e.DeadlineExceeded, w, 10, time.monotonic(), "made whole")
        assert not order
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
        w.sources[1].fail = None
        good(w.refit(3))
        right(w, 3)
