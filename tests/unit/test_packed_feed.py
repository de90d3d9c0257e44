"""Gathers of the packed route, one after the other, as lanes see them: threads and buffers are the real ones; there are no links."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock, call

import pytest
import torch

from tests.support.packed_world import Knobs, ToyStream
from tests.support.threads import soon
from tests.support.world import ToySource, until_true
from xfer.errors import DeadlineExceeded, XferError
from xfer.packed import feed as feed_module
from xfer.packed.buffer import Buffers, wire_sum
from xfer.packed.feed import Feed, Pump
from xfer.packed.plan import ALIGN
from xfer.packed.source import PackedSource
from xfer.participants.data_plane import Stop

NEVER = Stop()


def pumped(messages: int, colocated: bool = False) -> tuple[ToyStream, Pump]:
    """Each tensor fills a message."""
    stream = ToyStream(ToySource(0, 1, {f"t{k}": (ALIGN // 2,) for k in range(messages)}), Knobs())
    stream.version = 1
    return stream, Pump(PackedSource(stream, ALIGN, colocated), "trainer 0")


def taken(feed: Feed, stream: ToyStream, replicas: tuple[int, ...], keep: int = 0) -> list[torch.Tensor]:
    """Take every message, and release all but the last `keep`."""
    out, specs = [], stream.read()
    for k, spec in enumerate(specs):
        out.append(feed.take(k, soon(), NEVER))
        assert torch.equal(out[k].view(torch.bfloat16), ToySource.value(spec.name, spec.shape, stream.version))
        for replica in replicas:
            assert feed.sum_of(k, soon(), NEVER) == wire_sum(out[k], k)
            if k < len(specs) - keep:
                feed.release(k, replica)
    return out[len(out) - keep :]


def whole(pump: Pump, stream: ToyStream, attempt: int) -> Feed:
    """A gather of one replica, from its beginning to its end."""
    feed = pump.join(attempt, (0,), 0)
    taken(feed, stream, (0,))
    feed.wait_over(soon(), NEVER)
    feed.leave(0)
    return feed


@pytest.mark.parametrize("colocated", [False, True], ids=["broadcast", "shared memory"])
@pytest.mark.parametrize("messages", [1, 2, 5])
def test_what_is_still_being_sent_is_not_written_over_by_the_next_gather(monkeypatch, messages, colocated):
    """Replicas of one attempt that are armed together share a gather, which sums each message once. One that is armed at another time has
    a gather of its own, and the same two buffers."""
    counted = Mock(side_effect=wire_sum)
    monkeypatch.setattr(feed_module, "wire_sum", counted)
    stream, pump = pumped(messages, colocated)
    pump.join(1, (0, 1), 0)
    first = pump.join(1, (0, 1), 1)
    held = taken(first, stream, (0, 1), keep=min(2, messages))
    assert [number for (_, number), _ in counted.call_args_list] == [*range(messages)]
    assert first.over.wait(20), "parameters are read to the end, and may change"
    wanted = [t.clone() for t in held]
    stream.version = 2
    second = pump.join(1, (2,), 2)
    until_true(lambda: "an earlier one" in second.doing)
    first.leave(0)
    with pytest.raises(DeadlineExceeded, match="the trainers to agree") as e:
        second.plan(time.monotonic() + 0.2, NEVER)
    assert "an earlier one" in e.value.violations[0]
    assert all(map(torch.equal, held, wanted))
    first.leave(1)
    taken(second, stream, (2,))
    second.wait_over(soon(), NEVER)


def test_when_one_of_two_threads_returns_all_buffers_and_storages_are_dropped(monkeypatch):
    """Two lanes at once: one that went on would report that it has unmapped, and both would close a buffer's file."""
    stream, pump = pumped(3, colocated=True)
    feed = whole(pump, stream, 1)
    inside, go_on, within, over = threading.Event(), threading.Event(), [], []
    monkeypatch.setattr(stream, "forget", lambda: (within.append(1), inside.set(), go_on.wait(20)), raising=False)
    first, second = (threading.Thread(target=lambda: (pump.forget(), over.append(1))) for _ in range(2))
    first.start()
    assert inside.wait(20) and pump.extra_bytes > 0
    second.start()
    second.join(0.2)
    assert len(within) == 1 and not over
    go_on.set()
    first.join(20)
    second.join(20)
    assert len(over) == 2 and pump.extra_bytes == 0 and not feed._ready, "a view of a buffer keeps it"


def test_views_of_plans_that_are_gone_are_not_kept():
    stream, pump = pumped(3)
    for attempt in range(1, 6):
        pump.source.doubt()
        whole(pump, stream, attempt)
    assert pump.source.built == 5 and len(pump._buffers._views) == 3


def test_a_rank_without_memory_for_its_buffers_stops_all_ranks_at_the_first_group(monkeypatch):
    stream, pump = pumped(3, colocated=True)
    go_on = Mock(side_effect=pump.source.go_on)
    monkeypatch.setattr(pump.source, "go_on", go_on)
    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "begin", Mock(side_effect=torch.OutOfMemoryError("tried to allocate 2 GiB")))
        feed = pump.join(1, (0,), 0)
        with pytest.raises(XferError, match="tried to allocate 2 GiB"):
            feed.plan(soon(), NEVER)
        assert feed.over.wait(20)
    assert go_on.mock_calls == [call(True)], "or the others would wait for this rank at the first group"
    feed.leave(0)
    whole(pump, stream, 2)
