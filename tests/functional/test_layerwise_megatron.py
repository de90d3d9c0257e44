"""Real Megatron-Core models under a layer-wise optimizer: the same bits whether gathers are overlapped or not, and the losses
of one process that sees all the data. Four processes over gloo, fp32 and bf16, dense and MoE.
"""

from __future__ import annotations

import pytest

from tests.support.layerwise_ranks import Ranks
from tests.support.proc import Family
from xfer.testing import toy

pytestmark = pytest.mark.trainer

SMALL = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
FP32 = dict(SMALL, torch_dtype="float32")
STEPS = 50


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("layerwise-megatron")


@pytest.fixture(scope="module")
def folders(work):
    made = {}
    for name, family, more in (
        ("dense", "qwen3_tied", FP32),
        ("moe", "qwen3_moe", dict(FP32, num_experts=4, moe_intermediate_size=32)),
        ("moe bf16", "qwen3_moe", dict(SMALL, num_experts=4, moe_intermediate_size=32)),
        ("deep", "qwen3", dict(FP32, num_hidden_layers=4)),
    ):
        toy.write_checkpoint(family, work / name, seed=3, **more)
        made[name] = str(work / name)
    return made


@pytest.fixture(scope="module")
def ranks(work):
    with Family(work) as family:
        yield Ranks(family, 4, "layerwise_megatron")


@pytest.fixture(scope="module")
def alone(work, folders):
    """Losses of one process, by model."""
    (work / "one").mkdir()
    with Family(work / "one") as family:
        one = Ranks(family, 1, "layerwise_megatron")
        seen = {}

        def losses(name: str, copies: int, steps: int) -> dict:
            if (name, copies) not in seen:
                layout = dict(overlap=False, copies=copies)
                (seen[name, copies],) = one.ask("train", "trained", folder=folders[name], layout=layout, steps=steps)
            return seen[name, copies]

        yield losses


def both(ranks, folder: str, steps: int, **layout):
    a = ranks.ask("train", "trained", folder=folder, layout=dict(layout, overlap=False), steps=steps)
    b = ranks.ask("train", "trained", folder=folder, layout=dict(layout, overlap=True), steps=steps)
    assert [x["digest"] for x in a] == [x["digest"] for x in b]
    assert a[0]["losses"] == b[0]["losses"]
    assert all(x["stale"] == 0 for x in a)
    return a, b


def test_a_moe_is_trained_bit_for_bit_as_with_a_blocking_gather(ranks, folders):
    _, b = both(ranks, folders["moe"], 4, ep=2)
    assert all(x["stale"] == 4 and x["buckets"] > 2 for x in b)
    assert b[0]["groups"] == [4, 2]
    assert b[0]["losses"][-1] < b[0]["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("model, layout", [("dense", {}), ("moe", dict(ep=2))])
def test_fifty_steps_equal_blocking_and_one_process(ranks, folders, alone, model, layout):
    _, b = both(ranks, folders[model], STEPS, **layout)
    one = alone(model, 4, STEPS)
    assert all(x["stale"] == STEPS and x["buckets"] > 2 for x in b)
    assert b[0]["groups"] == ([4, 2] if layout else [4])
    assert b[0]["losses"] == pytest.approx(one["losses"], rel=2e-3)
    assert b[0]["norm"] == pytest.approx(one["norm"], rel=1e-4)
    assert b[0]["losses"][-1] < 0.5 * b[0]["losses"][0]


WIDE = [
    ("dense", dict(tp=2), 2, 10),
    ("deep", dict(pp=2, vpp=2), 2, 10),
    ("dense", dict(cp=2), 2, 10),
    ("moe", dict(tp=2, ep=2, etp=1), 2, 10),
    ("moe", dict(pp=2, ep=2), 2, 10),
    ("moe", dict(ep=4), 4, 10),
]


@pytest.mark.slow
@pytest.mark.parametrize("model, layout, copies, steps", WIDE)
def test_other_layouts(ranks, folders, alone, model, layout, copies, steps):
    _, b = both(ranks, folders[model], steps, **layout)
    one = alone(model, copies, steps)
    assert b[0]["losses"] == pytest.approx(one["losses"][:steps], rel=2e-3)


@pytest.mark.slow
def test_bf16_moe_with_masters(ranks, folders):
    _, b = both(ranks, folders["moe bf16"], STEPS, ep=2)
    assert b[0]["losses"][-1] < 0.6 * b[0]["losses"][0]
