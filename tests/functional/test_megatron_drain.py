"""The order between Megatron's optimizer and a refit: parameters in flight are finished, and training does not
notice."""

from __future__ import annotations

from math import log

import pytest

from tests.functional.megatron_launch import seen_in_launches

pytestmark = pytest.mark.trainer

OVERLAPPED = ["qwen3-dp4", "qwen3-pp2-vpp2-align", "qwen3_moe-ep2"]
CASES = [*OVERLAPPED, "qwen3_moe-pp2-no-overlap"]


def cases(names: list[str]):
    """Dense and expert data parallelism in every run, pipelines in slow ones."""
    wide = [pytest.param(n, marks=pytest.mark.slow) if "pp2" in n else n for n in names]
    return pytest.mark.parametrize("case", wide)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return seen_in_launches("drains", tmp_path_factory.mktemp("megatron-drain"))


@cases(OVERLAPPED)
def test_without_drain_a_refit_ships_stale_parameters(seen, case):
    """If this fails, Megatron has changed and the other tests here prove nothing."""
    assert seen(case)["without"]["wrong"]


@cases(CASES)
def test_drained_parameters_are_the_optimizers(seen, case):
    for when in ("drained", "at_end"):
        x = seen(case)[when]
        assert (x["wrong"], x["missing"], x["unknown"]) == ([], [], []), when


@cases(CASES)
def test_a_rank_that_drains_alone_waits_for_its_peers_and_not_beyond_its_deadline(seen, case):
    """Nothing interrupts a gather, so it goes on until the peers call too; then every parameter is right."""
    x = seen(case)
    assert x["ended_alone"] == (case not in OVERLAPPED)
    assert (x["late"]["wrong"], x["late"]["missing"], x["late"]["unknown"]) == ([], [], [])


@cases(CASES)
def test_draining_leaves_training_bit_for_bit_alone(seen, case):
    x = seen(case)
    assert x["losses"] == x["undisturbed"]


def test_the_toy_trainer_really_learns(seen):
    """bf16 parameters, distributed Adam, both overlaps, tp2 pp2 ep2 etp1."""
    x = seen("learns")
    assert x["overlapped"] and x["dtypes"] == ["torch.bfloat16"]
    assert x["losses"][0] == pytest.approx(log(160), abs=1.0)
    assert x["losses"][-1] < 0.4 * x["losses"][0]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_context_parallel_ranks_train_the_same_model(seen, family):
    """So what a refit reads from them came out of a real forward and backward."""
    x = seen(f"{family}-context-parallel")
    assert x["cut"] == pytest.approx(x["whole"], abs=2e-4)
    assert x["whole"][-1] < x["whole"][0]
