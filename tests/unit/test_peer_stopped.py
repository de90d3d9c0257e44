"""How a pull that was stopped begins again, and how long a rank waits for its device without a link, or for a copy out of scratch.

Without a GPU: streams only note what they are asked. Live: test_gpu_routes.py.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support.row_worlds import row
from xfer.errors import DeadlineExceeded
from xfer.plan.program import ROW, Program
from xfer.transport.group import Aborted
from xfer.transport.peer import Mapping, Pull
from xfer.transport.routes import NoLink
from xfer.transport.scratch import Held, Scratch

GPU = torch.device("cuda", 0)
BEHIND = ("pull", "waits for", "aside")
noted: list[tuple] = []


class Stream:
    def __init__(self, device=None, priority=0):
        self.name = "aside" if priority else "pull"

    def wait_stream(self, other):
        noted.append((self.name, "waits for", other.name))

    def synchronize(self):
        raise AssertionError("a wait of the host without an end")


class Event:
    done = True

    def record(self, stream=None):
        noted.append(("an event",))

    def query(self):
        return self.done


@pytest.fixture(autouse=True)
def device(monkeypatch):
    noted.clear()
    current = Stream()
    current.name = "current"
    for name, double in dict(
        Stream=Stream, Event=Event, current_stream=lambda device=None: current, stream=lambda stream: nullcontext()
    ).items():
        monkeypatch.setattr(torch.cuda, name, double)


def test_a_pull_begins_behind_what_stopped_the_one_before(monkeypatch):
    """Another stream writes the word that stops a pull. If it came to the next pull, that one would end without its bytes and without
    an error. Nor may anything else have the word's memory by then."""
    for name, make in dict(zeros=torch.zeros, ones=torch.ones).items():
        monkeypatch.setattr(torch, name, lambda n, dtype, make=make, **where: make(n, dtype=dtype))
    used = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: used.append((id(t), stream.name)))
    monkeypatch.setattr(Pull, "_bind", lambda *_: None)
    monkeypatch.setattr(Pull, "_recorded", lambda self, k: lambda: noted.append(("launched",)))
    pull = Pull(np.empty(0, ROW), Mapping(0, GPU), [])
    assert (id(pull._abort), "aside") in used
    pull.begin()
    pull.finish(time.monotonic() + 5)
    assert BEHIND not in noted, "a pull that was not stopped costs no more than before"
    pull.begin()
    pull.stop()
    with pytest.raises(Aborted):
        pull.finish(time.monotonic() + 5)
    noted.clear()
    pull.begin()
    assert BEHIND in noted[: noted.index(("launched",))]
    pull.finish(time.monotonic() + 5)


def test_a_rank_that_only_pulls_waits_for_its_device_by_the_deadline():
    """For its own copies and constants, which go by no link."""
    link = NoLink(1, 2, GPU, ["trainer 0", "replica 0 worker 0"])
    link.finish(time.monotonic() + 5)
    with patch.object(Event, "done", False), pytest.raises(DeadlineExceeded, match="replica 0 worker 0"):
        link.finish(time.monotonic() + 0.05)


def test_a_copy_out_of_scratch_is_waited_for_by_the_deadline_and_keeps_a_rank_from_being_drained():
    live = [torch.zeros(64, dtype=torch.uint8)]
    scratch = Scratch(Program(1, 1, row((64,), src_dtype="uint8", dst=1)), live, 64, "a worker", None)
    scratch.roots[0].fill_(7)
    scratch.device = GPU
    held = Held(scratch)
    with patch.object(Event, "done", False):
        with pytest.raises(DeadlineExceeded, match="replica 0 worker 0"):
            held.apply(time.monotonic() + 0.05, "replica 0 worker 0")
        assert not held.drained
    assert held.drained and (live[0] == 7).all()
