"""Colocated buffers are keyed by where they are: a worker maps those of the trainer on its own GPU. GPUs here are made-up UUIDs,
and buffers shared memory; everything else is what runs on GPUs.
"""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.functional.test_packed_session import torn
from tests.functional.test_session_protocol import fault  # noqa: F401
from tests.support.packed_world import PackedWorld
from tests.support.world import good, right
from xfer import errors as e
from xfer.packed.lockstep import Lockstep
from xfer.packed.plane import PackedPlane
from xfer.packed.shared import exporters_of, nearest

places = st.lists(st.sampled_from(["GPU-a", "GPU-b", "GPU-c", "GPU-d"]), min_size=1, max_size=9)


@given(places)
def test_each_gpu_has_one_exporter_its_first_trainer_and_trainer_0_is_one(trainers):
    found = exporters_of(trainers, True)
    assert found[0] == 0 and found == sorted(found)
    assert sorted(trainers[r] for r in found) == sorted(set(trainers))
    assert all(trainers.index(trainers[r]) == r for r in found)
    assert exporters_of(trainers, False) == [0]


@given(places, st.sampled_from(["GPU-a", "GPU-b", "GPU-z"]))
def test_a_worker_maps_what_is_on_its_gpu_and_else_trainer_0s(trainers, mine):
    there = [trainers[r] for r in exporters_of(trainers, True)]
    found = nearest(mine, there)
    assert there[found] == mine if mine in there else found == 0


class Placed(PackedWorld):
    """Three trainers on GPUs a, b, a; three workers on b, a, and one where no trainer is."""

    TRAINERS, WORKERS = ("GPU-a", "GPU-b", "GPU-a"), ("GPU-b", "GPU-a", "GPU-c")

    def _connect_one(self, i: int):
        super()._connect_one(i)
        self.sessions[i].side.pump._buffers.place = self.TRAINERS[i]

    def lanes(self, side: str) -> list[PackedPlane]:
        if side == "trainers":
            return [s.party.lanes[0].plane for s in self.sessions]
        return [s._lane_.plane for s in self.engines[0].sessions]


@pytest.fixture
def world(monkeypatch):
    def place(lane: PackedPlane) -> str:
        return (Placed.TRAINERS if lane.pump is not None else Placed.WORKERS)[lane.side.index]

    monkeypatch.setattr(PackedPlane, "place", property(place))
    shapes = {"layers.0.w": (24, 12), "layers.1.w": (24, 12), "embed": (36, 9), "norm": (12,)}
    with Placed(trainers=3, workers=3, colocated=True, shapes=shapes) as w:
        yield w


def test_every_worker_gets_its_bytes_from_the_exporter_of_its_gpu(world):
    w = world
    for v in (1, 2):
        good(w.refit(v))
        right(w, v)
    assert [s.side.pump.exports for s in w.sessions] == [True, True, False]
    assert [lane._mine for lane in w.lanes("workers")] == [(1,), (0,), (0,)]
    assert [lane._mine for lane in w.lanes("trainers")] == [(3, 4), (2,), ()]
    assert w.sessions[2].party.lanes[0].plane.extra_bytes == 0, "who exports nothing has no buffers"
    # To see whose bytes came: trainer 1 has others now, as it never would.
    for rank, version in enumerate((3, 8, 3)):
        w.streams[rank].version = version
    good(w.refit(None))
    assert [t.wrong(v) for t, v in zip(w.engines[0].takers, (8, 3, 3), strict=True)] == [[], [], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exporter_that_fails_between_buckets_is_an_error_on_all(world, fault, rank):  # noqa: F811
    w = world
    good(w.refit(1))
    fault(f"trainer:{rank}:wave:raise@2")
    results = w.refit(2)
    fault("")
    torn(w, results, e.XferError, "injected fault")


def test_bytes_that_another_exporter_spoils_are_never_committed(world, fault):  # noqa: F811
    w = world
    good(w.refit(1))
    fault("trainer:1:checksum:raise")
    results = w.refit(2)
    fault("")
    torn(w, results, e.VerificationError, "worker 0: trainers sent checksum")


# ---- exports in lockstep


def test_a_call_that_comes_to_no_collective_is_given_up_and_the_others_end():
    ended, release = [], threading.Event()

    def hangs():
        release.wait(60)

    def meets():
        try:
            torch.distributed.broadcast(torch.zeros(1), 0)
        except e.PeerLost as error:
            ended.append(error)
            raise

    with pytest.raises(e.DeadlineExceeded, match="neither ended nor came to a collective"):
        Lockstep(torch.device("cpu"), seconds=2.0).run([meets, hangs, meets])
    release.set()
    for _ in range(600):
        if ended:
            break
        threading.Event().wait(0.05)
    assert len(ended) == 1, "the one that stood at its collective has left; the third had not begun"
