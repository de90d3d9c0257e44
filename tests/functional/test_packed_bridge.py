"""What the packed route gathers from real Megatron-Core + Bridge ranks over gloo is what Bridge exports, bit for bit, and
conversion tasks that went stale are noticed on all ranks. The ranks are tests/support/packed_bridge.py.

A task of Bridge keeps parameter objects, and shapes and dtypes of all pipeline stages. Each stale case changes one thing as
training frameworks do and looks at both: what kept tasks give, and what the check finds.
"""

from __future__ import annotations

import json

import pytest

from tests.functional.megatron_launch import launch

pytestmark = pytest.mark.trainer
VALUES = [
    "qwen3-tp2-pp2-lora",
    "deepseek_v3-tp2-pp2-ep2-etp1",
    "qwen3-tp2-pp2",
    "qwen3_tied-tp2-pp2",
    "qwen3_moe-tp2-ep2-etp2",
    "qwen3_moe-tp2-pp2-ep2-etp1",
    "deepseek_v3-pp2-ep2",
    "qwen3-padded-vpp2",
]
STALE = {
    "applied": "a module whose tensors were all replaced",
    "lora": "adapters that were attached are merged",
    "regrouped": "groups that were made again: mappings keep those that were there when they were made",
    "offloaded": "parameters that came back elsewhere: tasks follow them, places that were kept do not",
    "flipped": "a router bias that turned fp32 is sent as fp32",
    "empty": "parameters without bytes are named, and found again when they are back",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Returns what all ranks found in a case; runs all cases of its mode at once, when the first of them is asked for."""
    folders = {}

    def found(mode: str, name: str, world: int, names: list[str]) -> list[dict]:
        key = (mode, *names)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"packed-{mode}")
            launch("../support/packed_bridge.py", mode, str(folders[key]), *names, world=world, folder=folders[key])
        return json.loads((folders[key] / f"{name}.json").read_text())

    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_buckets_hold_what_bridge_exports(ran, name):
    """After a first and a second optimizer step."""
    for rank, x in enumerate(ran("values", name, 4, VALUES)):
        assert x["wrong"] == [[], []], (rank, x)
        assert x["state"] == "same" and x["built"] == 1, "an optimizer step changes values, not tasks"
        assert x["groups"] > 3 and x["messages"] >= x["groups"] and x["longest"] <= x["limit"]
        assert x["collectives"] <= 10, "one group's collectives are run together"
        assert "deepseek" not in name or "float32" in x["dtypes"], "the router's bias stays fp32"
        parts = x["parts"]
        assert not any(parts["wrong"]), (rank, parts)
        assert bool(parts["why"]) == ("lora" in name), "what is computed goes by Bridge's export, all else by its trace"
        if "lora" not in name:
            assert parts["longest"] <= x["limit"] * 7 // 8 and parts["groups"] > 3 and len(parts["wrong"]) == 3


@pytest.mark.slow
def test_experts_that_the_checkpoint_has_fused_are_exported_in_one_call(ran):
    """Bridge yields such a tensor with the last of its experts: split over buckets it would never come. What it keeps when a gather
    fails must not be in the next one, where the first expert would find the others' old weights."""
    ranks = ran("fused", "fused", 2, [])
    assert [x["short"] for x in ranks] == ["tried to allocate", "told to stop"]
    for x in ranks:
        assert x["wrong"] == [[], [], []], x
        assert x["keys"] == x["together"] == 8, (
            "weights and biases of two projections in two layers, each whole in a group"
        )
        assert x["silent"] >= x["keys"] and x["groups"] > 3


# ---- tasks that went stale


def test_a_replaced_parameter_gives_old_weights_on_both_stages_without_the_check(ran):
    ranks = ran("stale", "replaced", 2, ["replaced"])
    assert [x["states"] for x in ranks] == [["same"], ["moved"]], "only the stage that owns it can see it"
    assert all(len(x["without"][0]) == 1 for x in ranks)
    assert all(x["right"] == [[]] and x["built"] == [2] for x in ranks), "all ranks build anew when one has to"


@pytest.mark.slow
@pytest.mark.parametrize("name", STALE, ids=STALE.get)
def test_tasks_that_went_stale_are_made_anew(ran, name):
    ranks = ran("stale", name, 2, list(STALE))
    for x in ranks:
        assert not any(x["right"]), "with the check, ranks gather what a fresh export gives"
        assert set(x["built"]) == {2}, "all ranks build anew when one has to"
    if name == "offloaded":
        assert [x["states"] for x in ranks] == [["same", "same"], ["moved", "moved"]]
        assert all(x["writes"] == [False, True] and x["without"][0] == [] for x in ranks)
        assert ranks[0]["without"][1], "without the check, what somebody else wrote there would be sent"
    elif name == "empty":
        assert ranks[0]["error"] == "" and "has no bytes" in ranks[1]["error"]
    else:
        assert any(x["states"] != ["same"] for x in ranks)
    if name == "flipped":
        assert all(x["dtypes"] == [["bfloat16"], ["bfloat16", "float32"]] for x in ranks)
    elif name not in ("offloaded", "empty"):
        assert all(x["without"][0] for x in ranks), "without the check, old weights"
    if name == "regrouped":
        assert all("is not registered" in x["without"][0][0] for x in ranks)
