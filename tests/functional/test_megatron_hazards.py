"""What silently breaks kept addresses and conversion tasks is noticed; what cannot be done right is refused by name.

The cases run in one child process (megatron_hazards.py), because running Megatron on a CPU patches the process.
"""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

from tests.functional.megatron_launch import launch
from xfer.errors import RebindError
from xfer.trace.slots import Slots, walk

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron-hazards")
    launch("megatron_hazards.py", str(folder), world=1, folder=folder)
    cases = json.loads((folder / "hazards.json").read_text())

    def look(name):
        assert "crash" not in cases[name], cases[name]["crash"]
        return cases[name]

    return look


# -- swapped under our feet --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["replaced_parameter", "repointed_data"])
def test_a_moved_parameter_needs_only_new_addresses(seen, case):
    x = seen(case)
    assert (x["quiet"], x["state"], x["settled"]) == ("same", "moved", "same")
    assert x["stale"], "the old addresses still gave the right values: the case proves nothing"
    assert x["right"]


@pytest.mark.parametrize("case", ["repointed_out_of_the_buffer", "other_strides", "replaced_module"])
def test_another_layout_has_to_be_read_again(seen, case):
    x = seen(case)
    assert (x["quiet"], x["state"], x["settled"], x["right"]) == ("same", "changed", "same", True)


def test_offloaded_weights_are_named(seen):
    x = seen("offloaded_storage")["error"]
    assert x["kind"] == "RebindError"
    assert len(x["violations"]) == 1 and "linear_proj.weight" in x["violations"][0]


def test_the_router_bias_is_followed_through_its_dtypes(seen):
    x = seen("router_bias_turns_fp32")
    assert x["states"] == ["changed", "changed"]
    assert x["dtypes"] == [["float32"], ["bfloat16"], ["float32"]]
    assert x["canonical"] == ["float32"]  # the checkpoint's, whatever the parameter is at the moment
    assert x["right"]


# -- refused by name ---------------------------------------------------------------------------------------------------


def test_sequential_experts_are_refused(seen):
    x = seen("sequential_experts")
    assert x["kind"] == "Unsupported" and len(x["violations"]) == 4
    assert all("SequentialMLP" in v and "moe_grouped_gemm" in v for v in x["violations"])


def test_settings_that_rearrange_live_weights_are_refused_all_at_once(seen):
    x = seen("interleaved_gate_and_up")
    assert x["kind"] == "Unsupported" and len(x["violations"]) == 3
    assert [v.split(": ")[1].split("=")[0] for v in x["violations"]] == [
        "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size",
        "gtp_weight_remat_size",
    ]


def test_tied_embeddings_with_virtual_stages_are_refused(seen):
    x = seen("tied_with_virtual_stages")
    assert x["kind"] == "Unsupported" and "virtual" in x["violations"][0]


def test_quantized_parameters_are_refused_all_at_once(seen):
    x = seen("quantized_parameters")
    assert x["kind"] == "Unsupported" and len(x["violations"]) == 8
    assert all("_Quantized" in v for v in x["violations"])


def test_a_checkpoint_without_gate_or_up_is_refused(seen):
    """Bridge itself exports neither, and only logs it."""
    x = seen("checkpoint_lacks_gate_and_up")
    assert x["kind"] == "LayoutError"
    assert [v.partition(".mlp")[0] for v in x["violations"]] == ["0:decoder.layers.1", "0:decoder.layers.2"]


def test_shapes_that_disagree_with_the_checkpoint_are_named(seen):
    x = seen("another_checkpoint")
    assert x["kind"] == "LayoutError" and len(x["violations"]) == 12
    assert all("192" in v and "160" in v for v in x["violations"])


# -- accepted ----------------------------------------------------------------------------------------------------------


def test_a_bridge_made_from_a_config_needs_names(seen):
    x = seen("config_alone")
    assert x["kind"] == "LayoutError" and "hf_names" in x["text"]
    assert x["same"]


def test_padding_rows_of_the_vocabulary_are_in_no_fragment(seen):
    assert seen("padded_vocabulary_without_headers")["rows"] == [150, 150]


def test_a_tied_head_is_one_canonical_tensor(seen):
    assert seen("tied_checkpoint_that_lists_a_head")["names"] == ["model.embed_tokens.weight"]


def test_an_fp32_trainer_keeps_the_checkpoints_dtypes(seen):
    x = seen("fp32_trainer")
    assert (x["canonical"], x["live"]) == (["bfloat16"], ["float32"])


@pytest.mark.parametrize("case", ["eight_ranks_qwen3_moe", "eight_ranks_deepseek"])
def test_eight_ranks_hold_every_element_equally_often(seen, case):
    x = seen(case)
    assert (x["missing"], x["uneven"], x["outside"]) == ([], [], [])


# -- slots, without Megatron -------------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.BatchNorm1d(4)})


def test_slots_keep_nothing_alive():
    m = model()
    slots = Slots([m], walk([m]))
    slots.bind()
    dead = weakref.ref(m["a"].weight)
    m["a"].weight = torch.nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert dead() is None
    layer = weakref.ref(m["b"])
    m["b"] = torch.nn.BatchNorm1d(4)
    gc.collect()
    assert slots.check() == "changed"
    del slots
    gc.collect()
    assert layer() is None


def test_every_way_of_losing_a_tensor_is_listed_at_once():
    m = model()
    slots = Slots([m], walk([m]))
    slots.bind()
    m["a"].weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    m["a"].bias.untyped_storage().resize_(0)
    del m["b"]._buffers["running_mean"]
    with pytest.raises(RebindError) as e:
        slots.check()
    assert len(e.value.violations) == 3


def test_parameters_of_one_storage_share_a_root():
    m = model()
    flat = torch.zeros(20)
    m["a"].weight.data, m["a"].bias.data = flat[:16].view(4, 4), flat[16:]
    slots = Slots([m], walk([m]))
    bound = slots.bind()
    places = {name: (p.root, p.offset) for name, p in bound.places.items()}
    assert places["0:a.weight"] == ("0:a.weight", 0) and places["0:a.bias"] == ("0:a.weight", 64)
    assert bound.tensors["0:a.weight"].data_ptr() == flat.data_ptr()
    assert {r.name: r.nbytes for r in bound.roots}["0:a.weight"] == 80
