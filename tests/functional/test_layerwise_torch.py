"""Plain torch under a layer-wise optimizer: the bits of training without owners, whatever users and networks do to it.

Four processes over gloo, a toy transformer with a tied head and a frozen parameter, Muon and Adam. Training is compared with DDP in
which every rank steps everything; random programs of a user's calls with a twin model that does the same.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.layerwise_main import HAZARDS
from tests.support.layerwise_ranks import Ranks, content
from tests.support.proc import PATIENCE, Family

pytestmark = pytest.mark.trainer
STEPS, EARLY = 50, 10
PROGRAMS = int(os.environ.get("XFER_PROGRAMS", "5"))
wide = [EARLY, pytest.param(STEPS, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("layerwise")) as family:
        yield Ranks(family, 4)


@pytest.fixture(scope="module")
def truth(ranks):
    """Every rank steps everything, under DDP; and one process with all the data."""
    one = ranks.ask("train", "trained", how="one", steps=STEPS)
    return ranks.ask("train", "trained", how="everywhere", steps=STEPS), one[0]


def owners(ranks, steps: int, **options) -> list[dict]:
    return ranks.ask("train", "trained", how="owners", steps=steps, **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_fifty_steps_have_the_bits_of_training_without_owners(ranks, truth, overlap):
    everywhere, one = truth
    seen = owners(ranks, STEPS, overlap=overlap)
    assert len({x["digest"] for x in everywhere}) == 1
    assert {x["digest"] for x in seen} == {everywhere[0]["digest"]}
    assert all(x["losses"] == everywhere[0]["losses"] for x in seen)
    assert seen[0]["losses"] == pytest.approx(one["losses"], rel=2e-4)
    assert all(x["distance"] < 1e-3 for x in seen)
    assert seen[0]["losses"][-1] < 0.5 * seen[0]["losses"][0]
    assert seen[0]["buckets"] > 3
    assert all(x["stale"] == STEPS * overlap and x["unexpected"] == 0 for x in seen)


@pytest.mark.parametrize(
    "options", [dict(prefetch_depth=3), dict(rehome=False), dict(guard="always"), dict(guard="first")], ids=str
)
def test_so_do_other_ways_of_gathering(ranks, truth, options):
    seen = owners(ranks, EARLY, **options)
    assert {x["digest"] for x in seen} == {truth[0][0]["digests"][str(EARLY)]}


@pytest.mark.parametrize("route", ["broadcast", "pull"])
def test_so_do_gathers_that_begin_while_others_are_stepped(ranks, truth, route):
    """The embedding and the first norm are Adam's, which steps before Muon. By copies only the first bucket is sent."""
    seen = owners(ranks, EARLY, bucket_bytes=1, prefetch_depth=3, route=route)
    assert {x["digest"] for x in seen} == {truth[0][0]["digests"][str(EARLY)]}
    assert all(x["ahead"] == [1 if x["pulled"] else 3] * EARLY for x in seen)


@pytest.mark.parametrize("options", [{}, dict(overlap=False), dict(guard="first", prefetch_depth=2)], ids=str)
@pytest.mark.parametrize("steps", wide)
def test_so_do_copies_out_of_the_owners_memory(ranks, truth, steps, options):
    seen = owners(ranks, steps, route="pull", **options)
    if not any(x["pulled"] for x in seen):
        pytest.skip("processes may not read each other's memory here")
    assert {x["digest"] for x in seen} == {truth[0][0]["digests"][str(steps)]}
    assert all(x["pulled"] == 1 and x["received"] == pytest.approx(x["lacked"], rel=0.02) for x in seen)


@pytest.mark.parametrize("steps", wide)
def test_gradients_reduced_to_owners_only(ranks, truth, steps):
    """The order of summation is not DDP's, so the bits of the two gathers are equal, and close to one process."""
    a = owners(ranks, steps, ddp=False, overlap=False)
    b = owners(ranks, steps, ddp=False)
    assert len({x["digest"] for x in a + b}) == 1
    assert a[0]["losses"] == b[0]["losses"] == pytest.approx(truth[1]["losses"][:steps], rel=2e-4)


@pytest.mark.parametrize("steps", wide)
def test_bf16_fp16_and_fp32_in_one_model(ranks, steps):
    """The bits of every rank keeping fp32 masters of everything."""
    a = owners(ranks, steps, model="mixed", overlap=False)
    b = owners(ranks, steps, model="mixed")
    everywhere = ranks.ask("train", "trained", how="everywhere", steps=steps, model="mixed")
    assert len({x["digest"] for x in a + b + everywhere}) == 1
    assert a[0]["losses"] == b[0]["losses"] == everywhere[0]["losses"]
    assert b[0]["losses"][-1] < 0.9 * b[0]["losses"][0]


def test_parameters_are_those_of_the_last_step_whatever_users_call_in_whatever_order(ranks):
    seen = [x for seed in range(PROGRAMS) for x in ranks.ask("program", "ran", seed=seed)]
    assert {"stale", "in flight", "current"} == {s for x in seen for s in x["states"]}
    assert any(x["unexpected"] for x in seen), "modules never ran in another order: this proves little"


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(ranks, name):
    ranks.ask("hazard", "fine", name=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world", [2, 1])
def test_a_checkpoint_saved_during_a_gather_is_loaded_by_another_number_of_ranks(ranks, tmp_path, world):
    """Saved by four: equal bits, and of state too; five steps later still near those of the four."""
    saved = ranks.ask("checkpointed", "saved", folder=str(tmp_path / "saved"), steps=5)
    assert len({x["saved"] for x in saved}) == 1
    folders = dict(folder=str(tmp_path / "saved"), again=str(tmp_path / "2"))
    with Family(tmp_path) as family:
        for x in Ranks(family, world).ask("resumed", "resumed", **folders, steps=5, of=4):
            assert x["loaded"] == saved[0]["saved"]
            got, want = torch.tensor(x["values"]), torch.tensor(saved[0]["values"])
            assert (got - want).norm() < 1e-2 * (want - torch.tensor(x["start"])).norm()
    first, second = content(tmp_path / "saved"), content(tmp_path / "2")
    assert first.keys() == second.keys() and sum(k.endswith("/momentum_buffer") for k in first) > 3
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize(
    "how, route",
    [("ends", "broadcast"), ("stops", "broadcast"), pytest.param("ends", "pull", marks=pytest.mark.slow)],
)
def test_a_rank_that_is_lost_in_a_gather_is_a_typed_error_at_every_later_use(tmp_path, how, route):
    """The connections of a rank that stops stay open: only the deadline tells."""
    deadline_s = (2.0 if how == "stops" else 10.0) * PATIENCE
    with Family(tmp_path) as family:
        two = Ranks(family, 2)
        for c in two.ranks:
            c.say(do="dying", victim=1, how=how, route=route, deadline_s=deadline_s)
        if how == "ends":
            assert two.ranks[1].expect("ended", timeout=120)["code"] == 7
        said = two.ranks[0].expect("survived", timeout=120)
        kinds = {"DeadlineExceeded"} if how == "stops" else {"PeerLost", "DeadlineExceeded"}
        assert len(said["seen"]) == 3 and {kind for kind, _ in said["seen"]} <= kinds
        assert route == "pull" or all("bucket" in text for _, text in said["seen"])
        assert said["seconds"] < deadline_s + 10.0
        two.ranks[1].kill()  # a stopped one would not see that its pipe is closed
