"""Faults on GPUs in the middle of a refit, by pull and by NCCL: processes of a real vLLM and plain trainers are killed or stopped.

After each case every process that is left has raised a typed error in time, no other process has ended, the engine answers NaN
or as before, and the next refit is right in every byte. A route's cases share an engine, which the last case kills.
"""

from __future__ import annotations

import pytest

from tests.support.gpu_job import BESIDE, gpus

pytest.importorskip("vllm")

from tests.support.gpu_faults import FAR, GRACE_S, SHORT, Bench, route

GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]
LATE = ("DeadlineExceeded", "PeerLost")
"""PeerLost where the rendezvous is silent: a trainer whose memory is read then cannot know that the readers have ended."""
IN_THE_MIDDLE = {"peer": "moving", "nccl": "wave"}
"""The point at which a trainer dies: a part of its bytes is then on the way."""
LAST, FIRST = "last", "first"
"""Trainers; the first has the rendezvous in its process."""


@pytest.fixture(
    scope="module", params=[pytest.param(r, marks=pytest.mark.xdist_group(f"faults {r}")) for r in ("peer", "nccl")]
)
def bench(request, tmp_path_factory):
    way = route(request.param, GPUS)
    b = Bench(tmp_path_factory.mktemp(f"faults_{way.name}"), way)
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


@pytest.mark.parametrize("which", [pytest.param(LAST, marks=pytest.mark.slow), FIRST])
def test_a_trainer_that_is_killed(b, which):
    """A new trainer in its place gets its memory, which the engine had mapped."""
    rank = rank_of(b, which)
    mine, before = b.memory(rank)["allocated"], b.room(rank)
    b.begin("trainers", f"trainer:{rank}:{IN_THE_MIDDLE[b.route.name]}:kill@1", deadline_s=FAR)
    b.failed(b.others(rank), ("PeerLost",), f"trainer {rank}", within=FAR / 2, drained=rank > 0)
    b.only_these_ended(b.trainers[rank])
    b.torn_or_untouched()
    b.meet_anew()
    b.right()
    assert BESIDE or (after := b.room(rank)) >= before - mine // 2, (before, after, mine)


@pytest.mark.parametrize("which", [LAST, pytest.param(FIRST, marks=pytest.mark.slow)])
def test_a_trainer_that_is_stopped_and_goes_on(b, which):
    """Nothing is started again: the same processes make the next refit."""
    rank = rank_of(b, which)
    b.begin("trainers", f"trainer:{rank}:moving:stop@1", deadline_s=SHORT)
    b.stopped(rank)
    try:
        b.failed(b.others(rank), LATE, f"trainer {rank}", within=SHORT + GRACE_S, drained=rank > 0)
        b.torn_or_untouched()
    finally:
        b.let_go_on(rank)
    b.failed([rank], LATE, within=FAR, drained=False)
    b.only_these_ended()
    b.right()


@pytest.mark.parametrize(
    "give_back", [pytest.param(False, id="to torch", marks=pytest.mark.slow), pytest.param(True, id="to the device")]
)
def test_storages_made_again_where_they_lay(b, give_back):
    made = b.remade(give_back)
    assert give_back or all(m["same"] for m in made), made
    b.right()


def test_an_engine_that_is_killed_while_it_takes(b):
    """The trainers' session lives on, and so does the controller's process; another engine takes the replica's place."""
    before = b.memory(0, gpu=0)["free"]
    b.begin("engine", "worker:0:wave:kill@1", deadline_s=FAR)
    b.failed(list(range(len(b.trainers))), ("PeerLost", "EngineLost"), "replica 0", within=FAR / 2)
    b.replaced_engine(before)
