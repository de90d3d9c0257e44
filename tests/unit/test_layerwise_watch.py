"""Deadlines over NCCL without a GPU: what the watching thread tells, and that everybody hears of it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from tests.support.proc import PATIENCE
from xfer.errors import DeadlineExceeded
from xfer.layerwise import LayerWiseOptimizer, ParamGroup
from xfer.layerwise.watch import Watch


class Device:
    """Counts what has arrived, as a stream would; and what a watch said."""

    def __init__(self, deadline_s: float):
        self.arrived = 0
        self.said: list[list] = []
        self.expired = threading.Event()
        self.watch = Watch(deadline_s, lambda: self.arrived, self._expire)

    def _expire(self, missing: list) -> None:
        self.said.append(missing)
        self.expired.set()


def test_what_is_late_is_told_once_with_all_behind_it_and_not_before_its_deadline():
    device, began = Device(0.3), time.monotonic()
    posts = [device.watch.post(lambda i=i: f"bucket {i}", [torch.zeros(i)]) for i in range(4)]
    device.arrived = 1
    assert device.expired.wait(30 * PATIENCE)
    assert time.monotonic() - began >= 0.3
    (missing,) = device.said
    assert missing == posts[1:] and [p.what() for p in missing] == ["bucket 1", "bucket 2", "bucket 3"]
    assert [p.received[0].numel() for p in missing] == [1, 2, 3]
    device.watch.close()
    assert len(device.said) == 1


def test_what_arrives_is_forgotten():
    device = Device(0.2)
    for n in range(1, 9):
        device.watch.post(lambda: "")
        device.arrived = n
        assert not device.expired.wait(0.05)  # together longer than the deadline
    device.watch.close()
    assert not device.said and not device.watch._posts


def test_a_watch_that_is_closed_says_nothing_and_leaves_no_thread():
    device = Device(0.2)
    device.watch.post(lambda: "")
    device.watch.close()
    assert not device.watch._thread.is_alive() and not device.said


class Lost:
    """A wire that was aborted by its watch."""

    def __init__(self):
        self.lost = DeadlineExceeded("not exchanged in time", ["bucket 0"], where="rank 0")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("use", ["step", "drain", "state_dict", "close"])
def test_whoever_uses_a_gather_whose_wire_was_aborted_hears_of_it(use):
    """Forwards and backwards too, which need peers: tests/functional/test_layerwise_torch.py."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), torch.optim.Adam)])
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.gather._wires = [Lost()]
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(1 if use == "close" else 2):  # close() lets go all the same, so afterwards nothing is left to ask
        with pytest.raises(DeadlineExceeded, match="not exchanged in time"):
            (net if use == "state_dict" else optimizer).__getattribute__(use)()
    assert all(torch.equal(a, p) for a, p in zip(before, net.parameters()))
