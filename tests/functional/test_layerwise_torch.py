"""Plain torch under a layer-wise optimizer, in four processes over gloo: a toy transformer with a tied head, Muon and Adam. Training in
any way, and random programs of a user's calls, have the bits of a twin model under DDP that every rank steps whole."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support import layerwise_model as lm
from tests.support.layerwise_main import HAZARDS
from tests.support.proc import PATIENCE, Family
from xfer.layerwise import LayerWiseOptimizer, checkpoint

pytestmark = pytest.mark.trainer
STEPS, EARLY = 50, 10
PROGRAMS = int(os.environ.get("XFER_PROGRAMS", "5"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("layerwise")) as family:
        yield family.ranks("layerwise_main", 4, "rank")


WAYS = [
    *((STEPS, dict(model="plain", overlap=overlap)) for overlap in (False, True)),
    *((n, dict(model="mixed", overlap=overlap)) for n in (EARLY, STEPS) for overlap in (False, True)),
    *((EARLY, how) for how in (dict(rehome=False), dict(guard="always"))),  # the random programs have the other options
    # The embedding and the first norm are Adam's, which steps before Muon. By copies only the first bucket is sent.
    *((EARLY, dict(bucket_bytes=1, prefetch_depth=3, **route)) for route in ({}, dict(route="pull"))),
    *((n, dict(route="pull", **more)) for n in (EARLY, STEPS) for more in ({}, dict(overlap=False), dict(guard="first", prefetch_depth=2))),
]  # fmt: skip


@pytest.mark.parametrize(
    "steps, options",
    [
        pytest.param(n, how, marks=[pytest.mark.slow] * (n == STEPS and how.get("model") != "plain"), id=f"{n} {how}")
        for n, how in WAYS
    ],
)
def test_every_way_of_gathering_has_the_bits_of_training_without_owners(ranks, steps, options):
    seen = ranks.ask("train", "trained", steps=steps, **options)
    if options.get("route") == "pull" and not any(x["pulled"] for x in seen):
        pytest.skip("processes may not read each other's memory here")
    assert not any(x["wrong"] for x in seen) and all(a == b for x in seen for a, b in x["losses"])
    assert seen[0]["buckets"] > 3 and not any(x["unexpected"] for x in seen)
    assert all(x["stale"] == steps * options.get("overlap", True) for x in seen)
    if steps == STEPS:
        assert all(x["losses"][-1][0] < 0.5 * x["losses"][0][0] for x in seen)
    if "bucket_bytes" in options:
        assert all(x["ahead"] == [1 if x["pulled"] else 3] * steps for x in seen), "gathers begin beside a step"
    elif "route" in options:
        assert all(x["pulled"] == 1 and x["received"] == pytest.approx(x["lacked"], rel=0.02) for x in seen)


def test_parameters_are_those_of_the_last_step_whatever_users_call_in_whatever_order(ranks):
    seen = [x for seed in range(PROGRAMS) for x in ranks.ask("program", "ran", seed=seed)]
    assert {"stale", "in flight", "current"} == {s for x in seen for s in x["states"]}
    assert any(x["unexpected"] for x in seen), "modules never ran in another order: this proves little"


@pytest.mark.parametrize("name", [f.__name__ for f in HAZARDS])
def test_hazards(ranks, name):
    ranks.ask(name, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_four_ranks_saved_during_a_gather_is_loaded_in_one_process(ranks, tmp_path):
    saved = ranks.ask("checkpointed", "saved", folder=str(tmp_path / "1"), steps=5)
    net = lm.Transformer(seed=99)
    optimizer = LayerWiseOptimizer(net, lm.groups(net))
    checkpoint.load(optimizer, tmp_path / "1")
    assert {x["saved"] for x in saved} == {lm.digest(net)}
    checkpoint.save(optimizer, tmp_path / "2")
    first, second = lm.content(tmp_path / "1"), lm.content(tmp_path / "2")
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
        two = family.ranks("layerwise_main", 2, "rank")
        for c in two:
            c.say(do="dying", victim=1, how=how, route=route, deadline_s=deadline_s)
        if how == "ends":
            assert two[1].expect("ended", timeout=120)["code"] == 7
        said = two[0].expect("survived", timeout=120)
        kinds = {"DeadlineExceeded"} if how == "stops" else {"PeerLost", "DeadlineExceeded"}
        assert len(said["seen"]) == 3 and {kind for kind, _ in said["seen"]} <= kinds
        assert route == "pull" or all("bucket" in text for _, text in said["seen"])
        assert said["seconds"] < deadline_s + 10.0
        two[1].kill()  # a stopped one would not see that its pipe is closed
