"""What MegatronTrainer says of live storages is what Megatron-Bridge exports from them, bit for bit, whatever the
layout.

Launches of four gloo ranks train every layout with real Megatron-Core models, optimizers and schedules
(megatron_worker.py); the tests below read what it saw.
"""

from __future__ import annotations

import pytest

from tests.functional.megatron_launch import seen_in_launches

pytestmark = pytest.mark.trainer

CASES = [
    "qwen3-tp2-pp2-vpp2",
    "qwen3_tied-tp2-pp2",
    "qwen3-tp2-dp2",
    "qwen3-pp2-uneven",
    "qwen3-pp2-cp2-no-distopt",
    "qwen3_moe-tp2-ep2-etp2",
    "deepseek_v3-tp2-pp2-ep2-etp1",
    "qwen3-padded-vocab",
]
"""Each kind of layout and each family once; `SLOW` has the wide matrix."""
SLOW = [
    "qwen3-tp2-pp2",
    "qwen3-tp4",
    "qwen3-tp2-dp2-no-distopt",
    "qwen3-tp2-cp2",
    "qwen3_moe-ep2-cp2",
    "deepseek_v3-tp2-cp2",
    "qwen3_moe-tp2-pp2-ep2-etp1",
    "qwen3_moe-ep4",
    "qwen3_moe-ep2-dp",
    "deepseek_v3-ep2-no-distopt",
]
every_case = pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return seen_in_launches("values", tmp_path_factory.mktemp("megatron-values"))


@every_case
def test_fragments_hold_what_bridge_exports(seen, case):
    """Before training and, through the very same views, after two optimizer steps."""
    x = seen(case)
    assert "error" not in x, x["text"]
    for when in ("before", "after"):
        assert x[when]["tensors"] > 40
        assert (x[when]["wrong"], x[when]["missing"], x[when]["unknown"]) == ([], [], []), when
    assert x["losses"][1] < x["losses"][0]  # the second look saw other weights than the first


@every_case
def test_every_byte_of_every_parameter_is_in_one_fragment(seen, case):
    x = seen(case)
    # A tied copy is exported by the stage that embeds; rows of padding are in no checkpoint.
    excused = {"qwen3_tied": "output_layer", "qwen3-padded": ("embed", "output_layer")}
    allowed = next((v for k, v in excused.items() if case.startswith(k)), ())
    allowed = (allowed,) if isinstance(allowed, str) else allowed
    left = [b for rank in x["unowned"] for b in rank if not any(a in b for a in allowed)]
    assert left == []
    if allowed:
        assert any(x["unowned"]), "the excuse is not needed any more"


@every_case
def test_the_layout_stays_where_it_was(seen, case):
    x = seen(case)
    assert x["state"] == "same"
    assert all(x["stable"]), "two reads of one layout differ"
    assert all(x["specs_as_on_disk"]), "a canonical shape or dtype is not the checkpoint's"
    assert x["recipes"] == 0
    assert all(n.endswith("e_score_correction_bias") for n in x["frozen"]), (
        "all but what balances experts requires grad"
    )
