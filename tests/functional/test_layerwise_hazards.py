"""What has gone wrong in layer-wise gathers elsewhere, and what users do to them: right parameters or a typed error, never
old parameters unnoticed. Every case compares bit for bit with a twin model that every rank steps by itself.
"""

from __future__ import annotations

import pytest

from tests.support.layerwise_ranks import Ranks, started
from tests.support.proc import Family

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from started(tmp_path_factory.mktemp("layerwise-hazards"))


def run(ranks, name: str) -> list:
    return [x["what"] for x in ranks.ask("hazard", "fine", name=name)]


@pytest.mark.parametrize(
    "name",
    [
        "started_twice_finished_twice",
        "drained_between_backward_and_step",
        "one_rank_evaluates",
        "skipped_module",
        "state_dict_is_current",
        "unannounced_but_watched",
    ],
)
def test_parameters_are_always_those_of_the_last_step(ranks, name):
    run(ranks, name)


def test_draining_what_is_in_flight_loses_nothing(ranks):
    """Some buckets were in flight and some not started, and every rank lacked something: else this proves nothing."""
    seen = run(ranks, "drained_in_flight")
    assert all(x["stale"] for x in seen)
    assert {"in flight", "stale"} <= set().union(*(x["states"] for x in seen))


def test_modules_in_another_order_even_on_some_ranks_only(ranks):
    assert all(n > 0 for n in run(ranks, "another_order"))


def test_a_forward_past_the_hooks_is_an_error_on_every_rank(ranks):
    for text in run(ranks, "without_hooks"):
        assert "no hook had asked for" in text and "blocks.0.up.weight" in text


def test_ranks_that_own_nothing(ranks):
    assert sorted(run(ranks, "few_parameters")) == [0, 0, 0, 1]


def test_experts_over_their_own_groups_and_one_norm(ranks):
    assert all(x == [4, 2] for x in run(ranks, "experts_over_halves"))


def test_memory_that_was_replaced_is_an_error_on_every_rank(ranks):
    assert all("late.weight" in x for x in run(ranks, "changed_memory"))


def test_the_wire_carries_only_what_a_rank_lacks_however_skewed(ranks):
    seen = run(ranks, "wire")
    assert max(lacked for _, lacked, _ in seen) > 5 * min(lacked for _, lacked, _ in seen)
    for received, lacked, total in seen:
        assert lacked <= received <= 1.02 * lacked
        assert lacked < total


def test_ranks_with_other_models_are_told_apart(ranks):
    assert all("disagree" in x for x in run(ranks, "different_models"))


def test_a_plan_takes_owners_as_sources_before_any_gather_and_everybody_after_a_drain(ranks):
    for seen in run(ranks, "refit_sources"):
        assert seen["before"] and seen["owners"]["lacking"], "nothing was on its way: this proves nothing"
        assert seen["owners"]["wrong"] == seen["all"]["wrong"] == []
        senders = seen["owners"]["senders"]
        assert {n: senders[n] for n in seen["owner"]} == {n: [r] for n, r in seen["owner"].items()}
        assert set(senders) - set(seen["owner"]) == {"frozen"}
        assert seen["all"]["lacking"] == []
        assert set(seen["all"]["senders"]) == set(senders)
        assert len({r for ranks in seen["all"]["senders"].values() for r in ranks}) == 4


def test_a_rank_that_dies_in_a_gather(tmp_path):
    """Everybody else has a typed error by the deadline, and has it again at every later use."""
    with Family(tmp_path) as family:
        three = Ranks(family, 3)
        for c in three.ranks:
            c.say(do="dying", victim=1)
        assert three.ranks[1].expect("ended", timeout=120)["code"] == 7
        for c in (three.ranks[0], three.ranks[2]):
            seen = c.expect("survived", timeout=120)["seen"]
            assert len(seen) == 3
            assert {kind for kind, _ in seen} <= {"PeerLost", "DeadlineExceeded"}
            assert all("bucket" in text for _, text in seen)
