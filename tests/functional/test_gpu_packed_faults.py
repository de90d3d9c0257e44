"""The packed route on GPUs when a process fails between two buckets, mapped over CUDA IPC and broadcast by NCCL. The checks are those
of test_gpu_faults.py; test_packed_deaths.py does this over gloo and shared memory.
"""

from __future__ import annotations

import pytest

from tests.support.gpu_job import BESIDE, gpus, nccl_host

pytest.importorskip("vllm")

from tests.support.gpu_faults import FAR, Bench, Route

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]
PACKED = dict(route="packed", bucket_bytes=64 << 20)
"""Some ten buckets."""
WAYS = {
    "mapped": Route("packed", (0, 0), connect=dict(PACKED, colocated=True)),
    "broadcast": Route("packed", (0, 0), env=nccl_host("t"), engine_env=nccl_host("e"), connect=PACKED),
}
RAISED = ("XferError", "RefitFailed")


@pytest.fixture(
    scope="module", params=[pytest.param(w, marks=pytest.mark.xdist_group(f"packed faults {w}")) for w in WAYS]
)
def bench(request, tmp_path_factory):
    b = Bench(tmp_path_factory.mktemp(f"packed_faults_{request.param}"), WAYS[request.param])
    with b.job:
        yield b


@pytest.fixture
def b(bench):
    bench.ensure()
    return bench


@pytest.mark.parametrize("who", [pytest.param("trainer", marks=pytest.mark.slow), "worker"])
def test_who_fails_between_buckets_ends_the_refit_and_the_same_processes_make_the_next(b, who):
    """The link is aborted under a broadcast, or under a worker that waits for the next bucket; all of it is opened anew."""
    for _ in range(2):
        b.begin("trainers" if who == "trainer" else "engine", f"{who}:0:wave:raise@3", deadline_s=FAR)
        b.failed([0, 1], RAISED, "injected fault", within=FAR / 2)
        b.torn_or_untouched()
        b.only_these_ended()
        b.right()


@pytest.mark.parametrize(
    "rank, point",
    [
        pytest.param(0, "wave:kill@3", id="sends"),
        pytest.param(1, "moving:kill@1", id="is read by the other", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_is_killed_between_buckets(b, rank, point):
    """The engine has mapped its buffers, or waits in NCCL for a bucket; the other trainer waits for it in a collective, or has
    mapped its storages."""
    before = b.memory(rank)
    b.begin("trainers", f"trainer:{rank}:{point}", deadline_s=FAR)
    b.failed(b.others(rank), ("PeerLost",), within=FAR / 2, drained=False)
    b.only_these_ended(b.trainers[rank])
    if rank == 0:  # else nothing may have been sent yet
        b.torn_or_untouched()
    b.meet_anew()
    b.right()
    after = b.memory(rank)
    if (
        b.route.connect.get("colocated") and not BESIDE
    ):  # what a dead one had exported is memory again; NCCL keeps some of its own
        assert after["free"] >= before["free"] - after["allocated"] // 2, (before, after)


def test_a_worker_that_is_killed_between_buckets(b):
    """The trainers' session lives on; another engine takes the replica's place."""
    before = b.memory(0, gpu=0)["free"]
    b.begin("engine", "worker:0:wave:kill@3", deadline_s=FAR)
    b.failed([0, 1], ("PeerLost", "EngineLost"), "replica 0", within=FAR / 2)
    b.replaced_engine(before)
