"""Real Megatron-Core models under a layer-wise optimizer on GPUs: 50 steps over NCCL give the same bits with a blocking gather,
with broadcasts that overlap the forward, and with copies out of the owners' memory. Four ranks on two GPUs are, to NCCL, of
two hosts.

    python -m pytest -m gpu tests/functional/test_gpu_layerwise.py
"""

from __future__ import annotations

import pytest

from tests.support.gpu_job import gpus, megatron, site
from tests.support.layerwise_ranks import Ranks
from tests.support.proc import Family
from xfer.testing import toy

GPUS = gpus()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
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
SMALLER = dict(bucket_bytes=40_000)
OVERLAPPED = [
    dict(SMALLER, **way) for way in (dict(route="broadcast"), dict(route="pull"), dict(route="pull", guard="nan"))
]


def started(family: Family, world: int) -> Ranks:
    # Dynamo has nothing to do with gathers and takes longer than all the steps; cuBLAS must add in one order.
    env = {**site("trainer"), "TORCHDYNAMO_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return Ranks(family, world, "layerwise_megatron", **env)


@pytest.mark.parametrize("world", [2, 4])
def test_fifty_steps_of_megatron_core_are_those_of_a_blocking_gather(world, tmp_path):
    for name, (model, sizes, _) in CASES.items():
        toy.write_checkpoint(model, tmp_path / name, seed=3, **sizes)
    for folder in ("ranks", "alone"):
        (tmp_path / folder).mkdir()
    with Family(tmp_path / "ranks") as family, Family(tmp_path / "alone") as single:
        ranks, alone = started(family, world), started(single, 1)
        for name, (_, _, layout) in CASES.items():
            way = dict(folder=str(tmp_path / name), steps=STEPS)
            blocking = ranks.ask("train", "trained", layout=dict(layout, overlap=False, options=SMALLER), **way)
            losses = blocking[0]["losses"]
            assert losses[-1] < 0.6 * losses[0], name
            for options in OVERLAPPED:
                got = ranks.ask("train", "trained", layout=dict(layout, options=options), **way)
                assert [x["digest"] for x in got] == [x["digest"] for x in blocking], (name, options)
                assert got[0]["losses"] == losses and all(x["stale"] == STEPS and x["buckets"] > 2 for x in got)
                assert all(bool(x["pulled"]) == (options["route"] == "pull") for x in got), (name, options)
            if "fp32" in name:  # 16-bit sums of other batches round otherwise
                (one,) = alone.ask("train", "trained", layout=dict(overlap=False, copies=world), **way)
                assert losses == pytest.approx(one["losses"], rel=2e-3), name
                assert blocking[0]["norm"] == pytest.approx(one["norm"], rel=1e-4), name
