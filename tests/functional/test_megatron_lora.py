"""Megatron-Bridge's LoRA on real Megatron-Core models: what a refit reads is what Bridge merges and exports, bit for
bit, in every parallel layout. One launch of four ranks trains all cases (megatron_lora.py); here is what must be true.

One of them goes all the way to a real vLLM in test_refit_e2e.py.
"""

from __future__ import annotations

import json

import pytest

from tests.functional.megatron_launch import launch

pytestmark = [pytest.mark.trainer, pytest.mark.slow]

CASES = {  # how many tensors Bridge exports, and how many of them an adapter changes in a step
    "tp2-pp2-vpp2": (47, 28),
    "tp4": (47, 28),
    "tp2-dp2-no-distopt": (47, 28),
    "canonical-tp2-pp2": (47, 28),
    "some-tp2": (47, 7),
    "moe-tp2-ep2-etp2": (135, 112),
    "moe-tp2-pp2-ep2-etp1": (135, 112),
    "moe-ep4": (135, 112),
    "mla-tp2-ep2": (129, 96 + 3),  # and the balancing biases of three layers, which are no weights
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron-lora")
    launch("megatron_lora.py", str(folder), world=4, folder=folder)

    def read(name: str) -> dict:
        found = json.loads((folder / f"{name}.json").read_text())
        assert "error" not in found, found["text"]
        return found

    return read


@pytest.mark.parametrize("case", CASES)
def test_scratch_holds_what_bridge_merges(seen, case):
    tensors, adapted = CASES[case]
    steps = seen(case)["steps"]
    for s in steps:
        assert s["compared"] == dict(tensors=tensors, wrong=[], missing=[], unknown=[])
        assert s["state"] == "same"
    assert steps[1]["changed"] == adapted, "training did not change what it should have, so the second look says little"
    trained = {name for rank in seen(case)["ranks"] for name in rank["trained"]}
    assert len(trained) == adapted - 3 * (case == "mla-tp2-ep2"), "what requires grad, merged, is what changed"


@pytest.mark.parametrize("case", CASES)
def test_each_rank_keeps_its_share_only(seen, case):
    """Bridge gathers every weight whole; what is computed here is no more than what this rank has of the weights."""
    ranks = seen(case)["ranks"]
    for r in ranks:
        assert 0 < r["scratch"] <= r["local"] * 1.02, r
        assert r["gathered"] < r["local"] // 2, "factors, not weights"
        assert r["ops"] == ["aten.add.Tensor", "aten.mm.default", "aten.mul.Tensor"]


@pytest.mark.parametrize("case", CASES)
def test_scratch_is_bounded_and_a_replaced_adapter_is_noticed(seen, case):
    for (refused, fits, replaced), r in zip(seen(case)["limits"], seen(case)["ranks"], strict=True):
        need = r["scratch"] + r["gathered"]
        assert refused.startswith("Unsupported") and f"takes {need} bytes" in refused and not fits
        assert replaced in ("moved", "changed"), "in a storage of its own, or no longer in the optimizer's"


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_that_is_scaled_anew_is_another_layout(seen, case):
    """The scale is a constant of the recipes; what is read after it was changed is again what Bridge merges."""
    found = seen(case)["rescaled"]
    assert found["states"] == [["changed", "same"]] * 4
    assert found["compared"] == dict(tensors=CASES[case][0], wrong=[], missing=[], unknown=[])


def test_process_groups_that_were_made_again_are_those_that_factors_are_gathered_over(seen):
    """Not a parameter has changed, and every later refit would have failed; none may begin while there are no groups."""
    found = seen("regrouped")
    for without, stale, states in found["ranks"]:
        assert without.startswith("RebindError") and "initialize_model_parallel()" in without
        assert stale.startswith("KeyError"), stale
        assert states == ["same", "changed", "same"]
    assert found["compared"] == dict(tensors=47, wrong=[], missing=[], unknown=[])
    assert found["alone"] == ["same"] * 4, "who gathers nothing needs none"


def test_magnitudes_that_bridge_would_leave_out_are_refused_by_name(seen):
    for text in seen("dora")["refused"]:
        assert "trained tensors that would never reach an engine" in text and "weight_magnitude" in text, text
