"""The peer route on GPUs, without one: memory that cannot be read, a pull that begins after a stop, and waits for the device.

The driver's answers are made up, and streams only note what they are asked. Live: test_gpu_refit.py, test_gpu_routes.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

from tests.support.row_worlds import row
from tests.support.threads import memory_store, run_ranks, soon
from xfer.errors import DeadlineExceeded, Unsupported
from xfer.kernels import cuda_driver
from xfer.plan.program import ROW, Program
from xfer.transport import peer, routes
from xfer.transport.group import Aborted
from xfer.transport.scratch import Held, Scratch

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("expandable", [True, False, None], ids=["expandable", "other", "no snapshot"])
def test_what_a_source_says_of_memory_that_has_no_handle(expandable):
    """cudaMallocAsync and pluggable allocators have none. torch is asked once for a snapshot."""
    roots, asked = [torch.zeros(64, dtype=torch.uint8) for _ in range(5)], []

    def allocation(pointer: int) -> cuda_driver.Allocation:
        return cuda_driver.Allocation(pointer, 64, pointer, exportable=pointer == roots[0].data_ptr())

    def snapshot() -> list[dict]:
        asked.append(1)
        if expandable is None:
            raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")
        there = [dict(address=t.data_ptr() - 8, total_size=80, is_expandable=expandable) for t in roots]
        return [*there, dict(address=1, total_size=1, is_expandable=True)]

    with (
        patch.multiple(cuda_driver, allocation=allocation, export=lambda base: bytes(64)),
        patch.object(torch.cuda, "memory_snapshot", snapshot),
        patch.object(peer, "uuid_of", lambda device: "GPU"),
    ):
        assert not peer.Export(0, roots[:1], torch.device("cpu")).offer.places[0].reason
        before = len(asked)
        places = msgspec.msgpack.decode(peer.Export(0, roots, torch.device("cpu")).to_bytes(), type=peer.Offer).places
    assert len(asked) == before + 1
    assert places[0].allocation == 0 and not places[0].reason
    for p in places[1:5]:
        assert p.allocation < 0 and "IPC" in p.reason
        assert ("expandable segments" in p.reason) == bool(expandable) and ("sleeps" in p.reason) != bool(expandable)


@pytest.mark.parametrize("shared", [True, False])
def test_every_rank_reports_why_a_link_cannot_carry_what_is_not_read(shared):
    """Only rank 2 knows why."""
    store, why = memory_store(), "replica 0 worker 0 from trainer 1: it lies in expandable segments"

    def opened(rank: int):
        refused = (why, "and so on") if rank == 2 else ()
        return routes.open_link(store, rank, 3, 20.0, GPU, [f"rank {r}" for r in range(3)], refused=refused)

    uuids = iter(["a", "b", "b" if shared else "c"])
    with (
        patch.object(peer, "uuid_of", lambda device: next(uuids)),
        patch.object(routes, "open_group", lambda store, rank, *rest: f"link of {rank}"),
    ):
        got = run_ranks(3, opened)
    if not shared:
        assert got == [f"link of {r}" for r in range(3)]
        return
    for e in got:
        assert isinstance(e, Unsupported) and "ranks share a GPU" in str(e), e
        assert why in str(e) and "and so on" not in str(e) and "PYTORCH_ALLOC_CONF" in str(e), e


# ---- a stopped pull, and waits


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


@pytest.fixture
def device(monkeypatch):
    noted.clear()
    current = Stream()
    current.name = "current"
    some = dict(current_stream=lambda device=None: current, stream=lambda stream: nullcontext())
    with patch.multiple(torch.cuda, Stream=Stream, Event=Event, **some):
        yield


def test_a_pull_begins_behind_what_stopped_the_one_before(device, monkeypatch):
    """Another stream writes the word that stops a pull. In the next pull it would end that without its bytes and without an error."""
    for name, make in dict(zeros=torch.zeros, ones=torch.ones).items():
        monkeypatch.setattr(torch, name, lambda n, dtype, make=make, **where: make(n, dtype=dtype))
    used = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: used.append((id(t), stream.name)))
    monkeypatch.setattr(peer.Pull, "_bind", lambda *_: None)
    monkeypatch.setattr(peer.Pull, "_recorded", lambda self, k: lambda: noted.append(("launched",)))
    pull = peer.Pull(np.empty(0, ROW), peer.Mapping(0, GPU), [])
    assert (id(pull._abort), "aside") in used
    pull.begin()
    pull.finish(soon(5))
    assert BEHIND not in noted, "a pull that was not stopped costs no more than before"
    pull.begin()
    pull.stop()
    with pytest.raises(Aborted):
        pull.finish(soon(5))
    noted.clear()
    pull.begin()
    assert BEHIND in noted[: noted.index(("launched",))]
    pull.finish(soon(5))


def test_a_rank_that_only_pulls_waits_for_its_device_by_the_deadline(device):
    """For its own copies and constants, which go by no link."""
    link = routes.NoLink(1, 2, GPU, ["trainer 0", "replica 0 worker 0"])
    link.finish(soon(5))
    with patch.object(Event, "done", False), pytest.raises(DeadlineExceeded, match="replica 0 worker 0"):
        link.finish(soon(0.05))


def test_a_copy_out_of_scratch_is_waited_for_by_the_deadline_and_keeps_a_rank_from_being_drained(device):
    live = [torch.zeros(64, dtype=torch.uint8)]
    scratch = Scratch(Program(1, 1, row((64,), src_dtype="uint8", dst=1)), live, 64, "a worker", None)
    scratch.roots[0].fill_(7)
    scratch.device = GPU
    held = Held(scratch)
    with patch.object(Event, "done", False):
        with pytest.raises(DeadlineExceeded, match="replica 0 worker 0"):
            held.apply(soon(0.05), "replica 0 worker 0")
        assert not held.drained
    assert held.drained and (live[0] == 7).all()
