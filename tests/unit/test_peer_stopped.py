"""What a pull asks of streams when it was stopped and begins again, and how long a rank without a link waits for its device.

Without a GPU: streams only note what they are asked. Live: test_gpu_routes.py.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch

from xfer.errors import DeadlineExceeded
from xfer.plan.program import ROW
from xfer.transport.group import Aborted
from xfer.transport.peer import Mapping, Pull
from xfer.transport.routes import NoLink

GPU = torch.device("cuda", 0)
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


@pytest.fixture
def device(monkeypatch):
    noted.clear()
    current = Stream()
    current.name = "current"
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.fixture
def pull(device, monkeypatch):
    """Of no rows: what they are bound to is another test's."""
    word = {name: getattr(torch, name) for name in ("zeros", "ones")}
    for name, make in word.items():
        monkeypatch.setattr(torch, name, lambda n, dtype, make=make, **where: make(n, dtype=dtype))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, stream: noted.append((id(t), "is used on", stream.name))
    )
    with (
        patch.object(Pull, "_bind"),
        patch.object(Pull, "_recorded", lambda self, k: lambda: noted.append(("launched",))),
    ):
        return Pull(np.empty(0, ROW), Mapping(0, GPU), [])


def test_a_pull_begins_behind_what_stopped_the_one_before(pull):
    """The word that stops a pull is written by another stream. Landing in the next pull it would end that one without its bytes, and
    without an error."""
    behind = ("pull", "waits for", "aside")
    pull.begin()
    pull.finish(time.monotonic() + 5)
    assert behind not in noted, "a pull that nobody stopped costs no more than before"
    pull.begin()
    pull.stop()
    with pytest.raises(Aborted):
        pull.finish(time.monotonic() + 5)
    noted.clear()
    pull.begin()
    assert behind in noted[: noted.index(("launched",))]
    pull.finish(time.monotonic() + 5)


def test_memory_of_the_word_is_nobody_elses_while_a_stop_may_still_write_it(pull):
    assert (id(pull._abort), "is used on", "aside") in noted


def test_a_rank_that_only_pulls_waits_for_its_device_by_the_deadline(device, monkeypatch):
    """For its own copies and constants, which go by no link."""
    link = NoLink(1, 2, GPU, ["trainer 0", "replica 0 worker 0"])
    link.finish(time.monotonic() + 5)
    monkeypatch.setattr(Event, "done", False)
    with pytest.raises(DeadlineExceeded, match="replica 0 worker 0"):
        link.finish(time.monotonic() + 0.05)
