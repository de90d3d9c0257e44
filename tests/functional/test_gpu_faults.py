"""Faults on GPUs in the middle of a refit, on every route: processes are killed, stopped, or fail. Then all others have raised a typed
error in time and live, the engine answers NaN or as before, and the next refit is right in every byte. A route's cases share an engine,
which the last case kills.
"""

from __future__ import annotations

import pytest

from tests.support.gpu_job import BESIDE, BLOCK_FP8, gpus, nccl_host

pytest.importorskip("vllm")

from tests.support.gpu_faults import FAR, GRACE_S, SHORT, Bench, Route, route

GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]
LATE = ("DeadlineExceeded", "PeerLost")
"""PeerLost where the rendezvous is silent: a trainer whose memory is read then cannot know that the readers have ended."""
BUCKETS = dict(route="packed", bucket_bytes=64 << 20)
"""Some ten of them."""
APART = dict(env=nccl_host("t"), engine_env=nccl_host("e"))
WAYS = {
    **{name: route(name, GPUS) for name in ("peer", "nccl")},
    "block FP8": Route("peer", (GPUS - 1,) * 2, served=BLOCK_FP8),
    "mapped": Route("packed", (0, 0), connect=dict(BUCKETS, colocated=True)),
    "broadcast": Route("packed", (0, 0), connect=BUCKETS, **APART),
}
LAST, FIRST = "last", "first"
"""Trainers; the first has the rendezvous in its process."""


@pytest.fixture(scope="module", params=[pytest.param(w, marks=pytest.mark.xdist_group(f"faults {w}")) for w in WAYS])
def bench(request, tmp_path_factory):
    b = Bench(tmp_path_factory.mktemp(f"faults_{request.param}"), WAYS[request.param])
    with b.job:
        yield b


@pytest.fixture
def b(bench):
    bench.ensure()
    return bench


def rank_of(b: Bench, which: str) -> int:
    if which == FIRST and len(b.route.trainers) == 1:
        pytest.skip("there is one trainer only")
    return 0 if which == FIRST else len(b.route.trainers) - 1


def direct(b: Bench) -> None:
    if b.packed:
        pytest.skip("of the direct route")


@pytest.mark.parametrize("which", [pytest.param(LAST, marks=pytest.mark.slow), FIRST])
def test_a_trainer_that_is_killed(b, which):
    """A part of its bytes is on the way. A new trainer in its place gets its memory, which the engine had mapped."""
    rank = rank_of(b, which)
    mine, before = b.memory(rank)["allocated"], b.room(rank)
    buckets = b.packed and not rank  # only the first sends them
    point = "wave:kill@3" if buckets else "wave:kill@1" if b.route.name == "nccl" else "moving:kill@1"
    b.begin("trainers", f"trainer:{rank}:{point}", deadline_s=FAR)
    texts = [] if b.packed else [f"trainer {rank}"]
    b.failed(b.others(rank), ("PeerLost",), *texts, within=FAR / 2, drained=rank > 0 and not b.packed)
    b.only_these_ended(b.trainers[rank])
    if not b.packed or buckets:  # else nothing may have been sent yet
        b.torn()
    b.meet_anew()
    b.right()
    kept = BESIDE or b.packed and not b.route.connect.get("colocated")  # NCCL keeps some memory of its own
    assert kept or (after := b.room(rank)) >= before - mine // 2, (before, after, mine)


def test_a_worker_that_fails_before_it_says_done_leaves_an_engine_that_answers_nan(b):
    """All bytes are written by then, so nothing but the lock keeps the engine from plausible answers."""
    b.begin("engine", "worker:0:done:raise", deadline_s=FAR)
    b.failed(list(range(len(b.trainers))), ("XferError", "RefitFailed"), "injected fault", within=FAR / 2)
    assert b.torn()
    b.only_these_ended()
    b.right()


@pytest.mark.parametrize("which", [LAST, pytest.param(FIRST, marks=pytest.mark.slow)])
def test_a_trainer_that_is_stopped_and_goes_on(b, which):
    """Nothing is started again: the same processes make the next refit."""
    direct(b)
    rank = rank_of(b, which)
    b.begin("trainers", f"trainer:{rank}:moving:stop@1", deadline_s=SHORT)
    b.stopped(rank)
    try:
        b.failed(b.others(rank), LATE, f"trainer {rank}", within=SHORT + GRACE_S, drained=rank > 0)
        b.torn()
    finally:
        b.let_go_on(rank)
    b.failed([rank], LATE, within=FAR, drained=False)
    b.only_these_ended()
    b.right()


@pytest.mark.parametrize(
    "give_back", [pytest.param(False, id="to torch", marks=pytest.mark.slow), pytest.param(True, id="to the device")]
)
def test_storages_made_again_where_they_lay(b, give_back):
    direct(b)
    made = b.remade(give_back)
    assert give_back or all(m["same"] for m in made), made
    b.right()


@pytest.mark.parametrize("who", [pytest.param("trainer", marks=pytest.mark.slow), "worker"])
def test_who_fails_between_buckets_ends_the_refit_and_the_same_processes_make_the_next(b, who):
    """The link is aborted under a broadcast, or under a worker that waits for the next bucket; all of it is opened anew."""
    if not b.packed:
        pytest.skip("of the packed route")
    for _ in range(2):
        b.begin("trainers" if who == "trainer" else "engine", f"{who}:0:wave:raise@3", deadline_s=FAR)
        b.failed([0, 1], ("XferError", "RefitFailed"), "injected fault", within=FAR / 2)
        b.torn()
        b.only_these_ended()
        b.right()


def test_an_engine_that_is_killed_while_it_takes(b):
    """The trainers' session lives on, and so does the controller's process; another engine takes the replica's place."""
    before = b.memory(0, gpu=0)["free"]
    b.begin("engine", f"worker:0:wave:kill@{3 if b.packed else 1}", deadline_s=FAR)
    b.failed(list(range(len(b.trainers))), ("PeerLost", "EngineLost"), "replica 0", within=FAR / 2)
    b.replaced_engine(before)
