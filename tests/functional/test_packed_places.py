"""Colocated buffers are keyed by their place: a worker maps those of the trainer on its own GPU. GPUs here are made-up UUIDs,
and buffers shared memory; everything else is what runs on GPUs. And exports in lockstep.
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
from tests.support.world import good, right, until_true
from xfer import errors as e
from xfer.packed.lockstep import Lockstep
from xfer.packed.plane import PackedPlane
from xfer.packed.shared import exporters_of, nearest

places = st.lists(st.sampled_from(["GPU-a", "GPU-b", "GPU-c", "GPU-d"]), min_size=1, max_size=9)


@given(places, st.sampled_from(["GPU-a", "GPU-b", "GPU-z"]))
def test_each_gpu_has_one_exporter_and_a_worker_maps_that_of_its_gpu_else_trainer_0s(trainers, mine):
    found = exporters_of(trainers)
    there = [trainers[r] for r in found]
    assert found[0] == 0 and found == sorted(found) and sorted(there) == sorted(set(trainers))
    assert all(trainers.index(trainers[r]) == r for r in found), "the first trainer of each place"
    exporter = nearest(mine, there)
    assert there[exporter] == mine if mine in there else exporter == 0


class Placed(PackedWorld):
    """Three trainers on GPUs a, b, a; three workers on b, a, and one where no trainer is."""

    PLACES = {"trainer": ("GPU-a", "GPU-b", "GPU-a"), "worker": ("GPU-b", "GPU-a", "GPU-c")}


@pytest.fixture
def world(monkeypatch):
    place = property(lambda plane: Placed.PLACES[plane.side.role][plane.side.index])
    monkeypatch.setattr(PackedPlane, "place", place)
    shapes = {"layers.0.w": (24, 12), "layers.1.w": (24, 12), "embed": (36, 9), "norm": (12,)}
    with Placed(trainers=3, workers=3, colocated=True, shapes=shapes) as w:
        yield w


def test_every_worker_gets_its_bytes_from_the_exporter_of_its_gpu(world):
    w = world
    for v in (1, 2):
        good(w.refit(v))
        right(w, v)
    assert [s.side.pump.exports for s in w.sessions] == [True, True, False]
    assert w.sessions[2].party.lanes[0].plane.extra_bytes == 0, "a rank that exports nothing has no buffers"
    # Trainer 1 has other weights now, as it never would, to show which exporter each worker loads from.
    for rank, version in enumerate((3, 8, 3)):
        w.streams[rank].version = version
    good(w.refit(None))
    assert [t.wrong(v) for t, v in zip(w.engines[0].takers, (8, 3, 3), strict=True)] == [[], [], []]


@pytest.mark.parametrize(
    "what, kind, words",
    [
        ("trainer:1:wave:raise@2", e.XferError, "injected fault"),
        ("trainer:1:checksum:raise", e.VerificationError, "worker 0: trainers sent checksum"),
    ],
)
def test_what_goes_wrong_at_one_exporter_is_an_error_on_all(world, fault, what, kind, words):  # noqa: F811
    good(world.refit(1))
    fault(what)
    results = world.refit(2)
    fault("")
    torn(world, results, kind, words)


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
        Lockstep(torch.device("cpu"), seconds=1.0).run([meets, hangs, meets])
    release.set()
    until_true(lambda: ended)
    assert len(ended) == 1, "the one that waited at its collective has left; the third had not begun"
