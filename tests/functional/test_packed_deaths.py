"""The packed route when processes are killed or stand still between buckets, in the middle of the trainers' gather over gloo. What must
hold is what test_session_deaths.py says."""

from __future__ import annotations

import pytest

from tests.functional.test_session_deaths import FAR, GRACE_S, at, failed, good, no_mix, right, starts_again
from tests.support.packed_processes import PackedProcessWorld
from tests.support.proc import PATIENCE

STANDS = ["DeadlineExceeded", "PeerLost"]
"""The second says that parameters may still be read: the gather is in somebody else's call and cannot be stopped."""
SHARED = pytest.param(True, marks=pytest.mark.slow)
BOTH = pytest.mark.parametrize("colocated", [False, SHARED], ids=["broadcast", "shared memory"])


@pytest.fixture
def world(tmp_path, request):
    colocated = request.node.callspec.params.get("colocated", False) if hasattr(request.node, "callspec") else False
    how = dict(trainers=3, workers=2, replicas=1, deadline_s=FAR * PATIENCE)
    with PackedProcessWorld(tmp_path, colocated=colocated, **how) as w:
        good(w.meet())
        good(w.refit(1))
        right(w, 1)
        yield w


@BOTH
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sender_that_is_killed_between_buckets(world, colocated, rank):
    """Rank 0 dies after some buckets have been sent, rank 1 somewhere in the same gather."""
    w = world
    w.fault("trainers", "trainer:0:wave:kill@3" if rank == 0 else "trainer:1:moving:kill@1")
    w.begin(2, deadline_s=FAR)
    answers = w.answers([i for i in range(3) if i != rank])
    failed(answers, ["PeerLost"], within=FAR / 2)
    for a in answers:  # a rank whose collective with the dead one was not closed says that its gather goes on
        assert f"trainer {rank}" in a["text"] or "did not stop" in a["text"], a
    assert w.trainers[rank].dead()
    assert no_mix(w) == [False] or rank, "bytes of two versions are never served"
    starts_again(w)


@BOTH
def test_a_worker_that_is_killed_between_buckets(world, colocated):
    w = world
    at(w, "worker", 1, "wave", "kill")
    w.begin(2, deadline_s=FAR)
    failed(w.answers(), ["PeerLost", "EngineLost"], "replica 0", within=FAR / 2)
    assert w.replicas[0].workers[1].dead() and no_mix(w) == [False]
    w.restart(0)
    good(w.refit(4))
    right(w, 4)


@pytest.mark.slow
@BOTH
def test_a_gather_that_stands_still_ends_refits_by_their_deadlines_and_gathers_stay_in_step(world, colocated, tmp_path):
    """The other ranks wait in a collective that nothing frees. Once it goes on, all three gathers run to their ends, on every rank."""
    w, here = world, tmp_path / "stand"
    here.touch()
    w.trainers[1].value("arrange", stand=str(here))
    for version, deadline in ((2, 6.0 * PATIENCE), (3, 2.0 * PATIENCE)):  # in the first, buckets have to arrive
        w.begin(version, deadline_s=deadline)
        failed(w.answers(), STANDS, within=deadline + GRACE_S)
        assert no_mix(w) == [False], "some buckets had arrived"
    w.begin(4, deadline_s=6 * FAR * PATIENCE)
    here.unlink()
    good(w.answers(timeout=7 * FAR * PATIENCE))
    right(w, 4)
    good(w.refit(5))
    right(w, 5)


def test_what_one_rank_cannot_export_is_said_by_all_and_nobody_is_left_in_a_collective(world):
    w = world
    w.trainers[2].value("arrange", state="changed", refuse="layers.9.w: has no mapping")
    w.begin(2, deadline_s=FAR)
    failed(w.answers(), ["LayoutError"], "trainer 2", "layers.9.w: has no mapping", within=FAR / 2)
    good(w.refit(3))
    right(w, 3)
