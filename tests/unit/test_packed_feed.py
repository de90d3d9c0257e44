"""Gathers of the packed route, one after the other, as lanes see them: threads and buffers are the real ones, links are not here."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from xfer.errors import DeadlineExceeded, XferError
from xfer.packed import feed as feed_module
from xfer.packed.feed import Feed, Pump
from xfer.packed.plan import ALIGN, TaskSize
from xfer.packed.source import PackedSource
from xfer.trace.fragment import TensorSpec


class Numbers:
    """See source.WeightStream: tensor k is full of 10 * version + k, and fills a message."""

    rank, world, device = 0, 1, torch.device("cpu")

    def __init__(self, messages: int):
        self.version = 1
        self.specs = tuple(TensorSpec(f"t{k}", (ALIGN,), "uint8") for k in range(messages))

    def drain(self) -> None: ...

    def read(self):
        return self.specs

    def check(self) -> str:
        return "same"

    def build(self):
        return tuple(TaskSize(k, (spec,)) for k, spec in enumerate(self.specs))

    def tensors(self, group):
        for spec in group.tensors:
            yield spec.name, torch.full(spec.shape, self.holds(int(spec.name[1:])), dtype=torch.uint8)

    def holds(self, k: int) -> int:
        return 10 * self.version + k


def pumped(messages: int, colocated: bool = False) -> tuple[Numbers, Pump]:
    stream = Numbers(messages)
    return stream, Pump(PackedSource(stream, ALIGN, colocated=colocated), "trainer 0")


def soon() -> float:
    return time.monotonic() + 20.0


def never():
    return None


def taken(feed: Feed, stream: Numbers, replica: int, keep: int = 0) -> list[torch.Tensor]:
    """Takes every message, and releases all but the last `keep`."""
    out = []
    for k in range(len(stream.specs)):
        data = feed.take(k, soon(), never)
        assert data.tolist() == [stream.holds(k)] * ALIGN
        out.append(data)
        if k < len(stream.specs) - keep:
            feed.release(k, replica)
    return out[len(out) - keep :]


@pytest.mark.parametrize("colocated", [False, True], ids=["broadcast", "shared memory"])
@pytest.mark.parametrize("messages", [1, 2, 5])
def test_what_is_still_being_sent_is_not_written_over_by_the_next_gather(messages, colocated):
    """Two replicas of one attempt that are armed at different times have a gather each, and the same two buffers."""
    stream, pump = pumped(messages, colocated)
    first = pump.join(1, (0,), 0)
    held = taken(first, stream, 0, keep=min(2, messages))
    assert first.over.wait(20), "parameters are read to the end, and may change"
    wanted = [t.clone() for t in held]
    stream.version = 2
    second = pump.join(1, (1,), 1)
    until = soon()
    while "an earlier one" not in second.doing and time.monotonic() < until:
        time.sleep(0.001)
    with pytest.raises(DeadlineExceeded, match="the trainers to agree") as e:
        second.plan(time.monotonic() + 0.2, never)
    assert "an earlier one" in e.value.violations[0]
    assert all(map(torch.equal, held, wanted))
    first.leave(0)
    taken(second, stream, 1)
    second.wait_over(soon(), never)
    second.leave(1)


def test_a_message_is_summed_once_for_all_replicas(monkeypatch):
    stream, pump = pumped(4)
    summed, real = [], feed_module.wire_sum
    monkeypatch.setattr(feed_module, "wire_sum", lambda data, number: summed.append(number) or real(data, number))
    feeds = [pump.join(1, (0, 1), replica) for replica in (0, 1)]
    for k in range(4):
        for replica, feed in enumerate(feeds):
            data = feed.take(k, soon(), never)
            assert feed.sum_of(k, soon(), never) == real(data, k)
            if replica:
                feed.release(k, 0)
                feed.release(k, 1)
    assert summed == [0, 1, 2, 3]
    for replica, feed in enumerate(feeds):
        feed.wait_over(soon(), never)
        feed.leave(replica)


def test_released_buffers_are_held_by_no_gather_that_is_over():
    stream, pump = pumped(3)
    feed = pump.join(1, (0,), 0)
    taken(feed, stream, 0)
    feed.wait_over(soon(), never)
    feed.leave(0)
    assert pump.extra_bytes > 0
    pump.forget()
    assert pump.extra_bytes == 0 and not feed._ready, "a view of a buffer keeps it"


def test_all_is_let_go_of_when_it_returns_though_another_thread_came_first(monkeypatch):
    """Two lanes at once: one that went on would say that it has unmapped, and both would close a buffer's file."""
    stream, pump = pumped(1, colocated=True)
    taken(pump.join(1, (0,), 0), stream, 0)
    assert pump.wait_over(20.0)
    inside, go_on, within, over = threading.Event(), threading.Event(), [], []
    monkeypatch.setattr(stream, "forget", lambda: (within.append(1), inside.set(), go_on.wait(20)), raising=False)
    first, second = (threading.Thread(target=lambda: (pump.forget(), over.append(1))) for _ in range(2))
    first.start()
    assert inside.wait(20)
    second.start()
    second.join(0.2)
    assert len(within) == 1 and not over
    go_on.set()
    first.join(20)
    second.join(20)
    assert len(over) == 2 and pump.extra_bytes == 0


def test_views_of_plans_that_are_gone_are_not_kept():
    stream, pump = pumped(3)
    for attempt in range(1, 6):
        pump.source._stale = True
        feed = pump.join(attempt, (0,), 0)
        taken(feed, stream, 0)
        feed.wait_over(soon(), never)
        feed.leave(0)
    assert pump.source.built == 5 and len(pump._buffers._views) == 3


def test_a_rank_without_memory_for_its_buffers_stops_all_ranks_at_the_first_group(monkeypatch):
    stream, pump = pumped(3, colocated=True)
    said, left, real, reserve = [], [1], pump.source.go_on, type(pump._buffers).reserve

    def short(self, longest):
        if left:
            left.pop()
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        reserve(self, longest)

    monkeypatch.setattr(pump.source, "go_on", lambda stop: said.append(stop) or real(stop))
    monkeypatch.setattr(type(pump._buffers), "reserve", short)
    feed = pump.join(1, (0,), 0)
    with pytest.raises(XferError, match="tried to allocate 2 GiB"):
        feed.plan(soon(), never)
    assert feed.over.wait(20) and said == [True], "or the others would wait for this rank at the first group"
    feed.leave(0)
    again = pump.join(2, (0,), 0)
    taken(again, stream, 0)
    again.wait_over(soon(), never)
    again.leave(0)
