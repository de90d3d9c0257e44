"""Training with owners is training: the same bits as when every rank steps everything, however the gather is done.

Four processes over gloo, a toy transformer with a tied head and a frozen parameter, Muon and Adam, 50 steps.
"""

from __future__ import annotations

import pytest

from tests.support.layerwise_ranks import started

pytestmark = pytest.mark.trainer
STEPS = 50

WAYS = {
    "blocking": dict(overlap=False),
    "overlapped": dict(),
    "depth 3": dict(prefetch_depth=3),
    "copied": dict(rehome=False),
    "watched": dict(guard="always"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from started(tmp_path_factory.mktemp("layerwise"))


@pytest.fixture(scope="module")
def truth(ranks):
    """Every rank steps everything, under DDP; and one process with all the data."""
    one = ranks.ask("train", "trained", how="one", steps=STEPS)
    return ranks.ask("train", "trained", how="everywhere", steps=STEPS), one[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_without_owners(ranks, truth, way):
    everywhere, one = truth
    seen = ranks.ask("train", "trained", how="owners", steps=STEPS, **WAYS[way])
    assert len({x["digest"] for x in everywhere}) == 1
    assert {x["digest"] for x in seen} == {everywhere[0]["digest"]}
    assert all(x["losses"] == everywhere[0]["losses"] for x in seen)
    assert seen[0]["losses"] == pytest.approx(one["losses"], rel=2e-4)
    assert all(x["distance"] < 1e-3 for x in seen)
    assert seen[0]["losses"][-1] < 0.5 * seen[0]["losses"][0]
    assert seen[0]["buckets"] > 3
    assert all(x["stale"] == (0 if way == "blocking" else STEPS) for x in seen)
    assert all(x["unexpected"] == 0 for x in seen)


def test_gradients_reduced_to_owners_only(ranks, truth):
    """Another order of summation than DDP's, so equal bits between the two gathers, and close to one process."""
    _, one = truth
    a = ranks.ask("train", "trained", how="owners", steps=STEPS, ddp=False, overlap=False)
    b = ranks.ask("train", "trained", how="owners", steps=STEPS, ddp=False)
    assert len({x["digest"] for x in a + b}) == 1
    assert a[0]["losses"] == b[0]["losses"] == pytest.approx(one["losses"], rel=2e-4)


def test_bf16_fp16_and_fp32_in_one_model(ranks):
    a = ranks.ask("train", "trained", how="owners", steps=STEPS, model="mixed", overlap=False)
    b = ranks.ask("train", "trained", how="owners", steps=STEPS, model="mixed")
    assert len({x["digest"] for x in a + b}) == 1
    assert a[0]["losses"] == b[0]["losses"]
    assert b[0]["losses"][-1] < 0.5 * b[0]["losses"][0]
