"""Megatron-Core models under a layer-wise optimizer on GPUs: blocking gathers, broadcasts that overlap the forward, and copies out
of the owners' memory give the same bits. Two ranks need one GPU; four ranks need four, or XFER_SHARE_GPUS=1.
"""

from __future__ import annotations

import pytest

from examples.common import toy
from tests.support.gpu_job import SHARED, gpus, megatron, site
from tests.support.proc import Children, Family

GPUS = gpus()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a GPU"),
    pytest.mark.skipif(not megatron(), reason="needs Megatron-Core: name its site in XFER_SITE_TRAINER"),
]

SMALL = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = dict(num_experts=4, moe_intermediate_size=32)
STEPS = 50
CASES = {
    "dense fp32": ("qwen3_tied", dict(SMALL, torch_dtype="float32"), {}),
    "moe fp32, ep2": ("qwen3_moe", dict(SMALL, **EXPERTS, torch_dtype="float32"), dict(ep=2)),
    "moe bf16, ep2": ("qwen3_moe", dict(SMALL, **EXPERTS), dict(ep=2)),
}
CUT = {
    "dense fp32, tp2": ("qwen3_tied", dict(SMALL, torch_dtype="float32"), dict(tp=2)),
    "dense fp32, pp2, the embedding on both stages": ("qwen3_tied", dict(SMALL, torch_dtype="float32"), dict(pp=2)),
    "dense fp16, tp2": ("qwen3_tied", dict(SMALL, torch_dtype="float16"), dict(tp=2)),
}
FEW = 10
SMALLER = dict(bucket_bytes=40_000)
OVERLAPPED = [
    dict(SMALLER, **way) for way in (dict(route="broadcast"), dict(route="pull"), dict(route="pull", guard="first"))
]


def started(family: Family, world: int) -> Children:
    if world > 2 and world > GPUS and not SHARED:
        pytest.skip(f"needs {world} GPUs, or XFER_SHARE_GPUS=1: on one they take turns, minutes for what takes seconds")
    # Dynamo has nothing to do with gathers and takes longer than all the steps; cuBLAS must add in one order, and fp32 as fp32:
    # TransformerEngine multiplies it in TF32, and by such an error routers choose other experts.
    exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
    env = {**site("trainer"), "TORCHDYNAMO_DISABLE": "1", **exact}
    return family.ranks("layerwise_megatron", world, "rank", **env)


@pytest.fixture
def folder(tmp_path):
    """Of a checkpoint to start from."""

    def made(model: str, sizes: dict) -> str:
        toy.write_checkpoint(model, tmp_path / "model", seed=3, **sizes)
        return str(tmp_path / "model")

    return made


@pytest.fixture
def alone(tmp_path):
    """The same training on one rank, which sees the data of all."""
    (tmp_path / "alone").mkdir()
    with Family(tmp_path / "alone") as family:
        yield lambda **way: started(family, 1).ask("train", "trained", **way)[0]


def equal(ranks: Children, layout: dict, ways: list[dict], **way) -> dict:
    """What rank 0 says of a blocking gather, and the others like it, which every other way of gathering has to equal."""
    more = layout.pop("options", {})
    first, *_ = blocking = ranks.ask(
        "train", "trained", layout=dict(layout, overlap=False, options=SMALLER | more), **way
    )
    for options in ways:
        got = ranks.ask("train", "trained", layout=dict(layout, options=options | more), **way)
        assert [x["digest"] for x in got] == [x["digest"] for x in blocking], options
        assert got[0]["losses"] == first["losses"], options
        assert all(x["stale"] == way["steps"] and x["buckets"] > 2 for x in got), (options, got)
        assert all(bool(x["pulled"]) == (options["route"] == "pull") for x in got), options
    return first


@pytest.mark.parametrize(
    "case", ["dense fp32", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "dense fp32")]
)
@pytest.mark.parametrize("world", [2, 4])
def test_fifty_steps_of_megatron_core_are_those_of_a_blocking_gather(world, case, tmp_path, folder, alone):
    model, sizes, layout = CASES[case]
    way = dict(folder=folder(model, sizes), steps=STEPS)
    (tmp_path / "ranks").mkdir()
    with Family(tmp_path / "ranks") as family:
        blocking = equal(started(family, world), dict(layout), OVERLAPPED, **way)
    assert blocking["losses"][-1] < 0.6 * blocking["losses"][0]
    if "fp32" in case:  # 16-bit sums of other batches round otherwise
        one = alone(layout=dict(overlap=False, copies=world), **way)
        assert blocking["losses"] == pytest.approx(one["losses"], rel=2e-3)
        assert blocking["norm"] == pytest.approx(one["norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT)
def test_so_are_those_of_models_that_are_cut(case, tmp_path, folder, alone):
    """Two halves of a model, each of two data-parallel ranks. Muon gathers over tensor-parallel ranks what it updates."""
    model, sizes, layout = CUT[case]
    way = dict(folder=folder(model, sizes), steps=FEW)
    scaled = dict(options=dict(loss_scale=256.0)) if "fp16" in case else {}
    (tmp_path / "ranks").mkdir()
    with Family(tmp_path / "ranks") as family:
        blocking = equal(started(family, 4), {**layout, **scaled}, OVERLAPPED[:2], **way)
    assert blocking["losses"][-1] < blocking["losses"][0]
    if "fp32" in case:
        one = alone(layout=dict(overlap=False, copies=2), **way)
        assert blocking["losses"] == pytest.approx(one["losses"], rel=2e-3)


def test_a_checkpoint_that_was_saved_during_a_gather_goes_on_bit_for_bit(tmp_path, folder):
    way = dict(folder=folder(*CASES["dense fp32"][:2]), layout=dict(options=SMALLER))
    (tmp_path / "ranks").mkdir()
    with Family(tmp_path / "ranks") as family:
        ranks = started(family, 2)
        ranks.ask("build", "built", **way)
        ranks.ask("step", "stepped", steps=3)
        ranks.ask("save", "saved", folder=str(tmp_path / "saved"))
        want = ranks.ask("step", "stepped", steps=3)
        ranks.ask("build", "built", **way)
        ranks.ask("load", "loaded", folder=str(tmp_path / "saved"), steps=3)
        assert [x["losses"] for x in ranks.ask("step", "stepped", steps=3)] == [x["losses"] for x in want]
