"""Real Megatron-Core models under a layer-wise optimizer: the same bits whether gathers are overlapped or not, and the losses
of one process that sees all the data. Four processes over gloo, fp32 and bf16, dense and MoE.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from examples.common import toy
from tests.support import layerwise_model as lm
from tests.support.marks import BOTH
from tests.support.proc import Family
from tests.support.refit_stage import stage_of, two_refits_are_fresh_loads

pytestmark = pytest.mark.trainer

SMALL = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
FP32 = dict(SMALL, torch_dtype="float32")
MLA = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96, n_routed_experts=4, moe_intermediate_size=32)
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
        ("mla", "deepseek_v3", dict(MLA, torch_dtype="float32")),
        ("odd", "qwen3_tied", dict(FP32, vocab_size=130)),
        ("dense fp16", "qwen3_tied", dict(SMALL, torch_dtype="float16")),
    ):
        toy.write_checkpoint(family, work / name, seed=3, **more)
        made[name] = str(work / name)
    return made


@pytest.fixture
def ranks(tmp_path):
    """Four new processes for each test: Megatron's groups outlive their layout, with some 50 threads each time."""
    with Family(tmp_path) as family:
        yield family.ranks("layerwise_megatron", 4, "rank")


@pytest.fixture(scope="module")
def two(work):
    """Two ranks, for tests that run in CI."""
    (work / "two").mkdir()
    with Family(work / "two") as family:
        yield family.ranks("layerwise_megatron", 2, "rank")


@pytest.fixture(scope="module")
def alone(work, folders):
    """Losses of one process, by model."""
    (work / "one").mkdir()
    with Family(work / "one") as family:
        one = family.ranks("layerwise_megatron", 1, "rank")

        @cache
        def losses(name: str, copies: int, steps: int) -> dict:
            layout = dict(overlap=False, copies=copies)
            return one.ask("train", "trained", folder=folders[name], layout=layout, steps=steps)[0]

        yield losses


def both(ranks, folder: str, steps: int, layout: dict, **way) -> list[dict]:
    """What ranks say of training by overlapped gathers, which has the bits of a blocking one."""
    blocking = dict(layout, overlap=False)
    a = ranks.ask("train", "trained", folder=folder, layout=blocking, steps=steps)
    b = ranks.ask("train", "trained", folder=folder, layout={**layout, **way}, steps=steps)
    assert [x["digest"] for x in a] == [x["digest"] for x in b]
    assert a[0]["losses"] == b[0]["losses"]
    assert all(x["stale"] == 0 for x in a)
    return b


def test_a_moe_is_trained_bit_for_bit_as_with_a_blocking_gather(two, folders):
    b = both(two, folders["moe"], 4, {})
    assert all(x["stale"] == 4 and x["buckets"] > 2 for x in b)
    assert b[0]["losses"][-1] < b[0]["losses"][0]


HAZARDS = [
    ("owners_offer_each_tensor_once_and_gather_nothing", "dense"),
    ("fences_come_before_each_step_and_one_that_fails_costs_only_that_step", "dense"),
    ("megatrons_scheduler_leaves_each_group_its_own_rates_and_decay", "dense"),
    *(("a_matrix_is_cut_where_its_shape_says_so_whatever_it_is_marked_as", model) for model in ("moe", "mla")),
]


@pytest.mark.parametrize("name, model", HAZARDS)
def test_hazards(two, folders, name, model):
    two.ask(name, folder=folders[model])


def layout(sizes: str) -> dict:
    """Parallel sizes by their names: "tp2 ep4". Without one of them there are data-parallel copies of the model."""
    return {name: int(n) for name, n in re.findall(r"([a-z]+)(\d)", sizes)}


FEW = 10
RUNS = [  # model, layout, data-parallel ranks, steps
    ("dense", "dp", 4, STEPS),
    ("moe", "ep2", 4, STEPS),
    ("moe bf16", "ep2", 4, STEPS),
    ("dense fp16", "tp2", 2, STEPS),
    ("dense", "tp2", 2, FEW),
    ("dense", "pp2", 2, FEW),  # the embedding is on both stages
    ("deep", "pp2 vpp2", 2, FEW),
    ("dense", "cp2", 2, FEW),
    ("moe", "tp2 ep2 etp1", 2, FEW),
    ("moe", "tp2 etp2", 2, FEW),
    ("mla", "tp2 etp2", 2, FEW),
    ("moe", "pp2 ep2", 2, FEW),
    ("moe", "ep4", 4, FEW),
]


@pytest.mark.slow
@pytest.mark.parametrize("model, sizes, copies, steps", RUNS)
def test_steps_equal_blocking_and_one_process(ranks, folders, alone, model, sizes, copies, steps):
    """16-bit parameters have masters; their sums of other batches round otherwise than one process."""
    scaled = dict(options=dict(loss_scale=256.0)) if "fp16" in model else {}
    b = both(ranks, folders[model], steps, layout(sizes) | scaled)
    if steps == STEPS:
        assert b[0]["losses"][-1] < (0.6 if "16" in model else 0.5) * b[0]["losses"][0]
    if "16" not in model:
        one = alone(model, copies, steps)
        assert b[0]["losses"] == pytest.approx(one["losses"], rel=2e-3)
        if steps == STEPS:
            assert all(x["stale"] == STEPS and x["buckets"] > 2 for x in b)
            assert b[0]["norm"] == pytest.approx(one["norm"], rel=1e-4)
            assert b[0]["groups"] == ([4] if sizes == "dp" else [4, 2])


@pytest.mark.slow
def test_copies_out_of_the_owners_memory_give_the_same_bits(ranks, folders):
    """Dense parameters over four ranks, experts over pairs."""
    b = both(ranks, folders["moe"], FEW, layout("ep2"), options=dict(route="pull"))
    if not any(x["pulled"] for x in b):
        pytest.skip("processes may not read each other's memory here")
    assert all(x["pulled"] == 2 and x["stale"] == FEW for x in b)


# ---- checkpoints at other layouts


def at(name: str) -> dict:
    """A layout on which all ranks see the same global batch."""
    sizes = layout(name)
    return dict(sizes, copies=sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1))


def losses(ranks) -> list[float]:
    return ranks.ask("step", "stepped", steps=2)[0]["losses"]


def saved(ranks, path, source=None, **way) -> dict[str, torch.Tensor]:
    """All that a checkpoint has that is saved after a build, and either two steps or a load of another checkpoint."""
    ranks.ask("build", "built", **way)
    if source is None:
        losses(ranks)
    else:
        ranks.ask("load", "loaded", folder=str(source), steps=2)
    settled = {x["settled"] for x in ranks.ask("save", "saved", folder=str(path))}
    alone = way["layout"]["copies"] == len(ranks)
    assert source or settled == {alone}, "saving gathers nothing; without copies nothing is to gather"
    return lm.content(path)


def resharded(ranks, folder: str, work, a: str, others: list[str], rel: float = 1e-3) -> None:
    first = saved(ranks, work / f"from {a}", folder=folder, layout=at(a))
    want = losses(ranks)
    assert sum(k.endswith("/momentum_buffer") for k in first) > 10 and sum(k.endswith("/exp_avg") for k in first) > 2
    for b in others:
        second = saved(ranks, work / f"from {a} by {b}", work / f"from {a}", folder=folder, layout=at(b))
        assert first.keys() == second.keys()
        wrong = [k for k in first if not torch.equal(first[k], second[k])]
        assert not wrong, f"{a} -> {b}: {wrong[:5]}"
        assert losses(ranks) == pytest.approx(want, rel=rel), f"{a} -> {b}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_loaded_at_another_layout(two, folders, tmp_path):
    resharded(two, folders["moe"], tmp_path, "dp", ["ep2", "tp2", "pp2"])


RESHARDS = [
    ("moe", "dp", ["ep2", "ep4", "tp2", "pp2 ep2"]),
    ("moe", "ep2", ["dp", "ep4", "tp2 ep4 etp1", "tp2 pp2"]),
    ("moe", "ep4", ["dp", "ep2", "pp2"]),
    ("moe", "tp2 ep2 etp1", ["ep4", "pp2 ep2", "tp2"]),
    ("moe", "pp2 ep2", ["dp", "tp2 pp2 ep2 etp1"]),
    ("moe", "tp2 pp2", ["ep2", "tp2 ep4 etp1"]),
    ("deep", "pp2 vpp2", ["dp", "cp2", "tp2 pp2"]),
    ("deep", "cp2", ["pp2 vpp2", "tp2"]),
    ("dense", "pp2", ["dp", "tp2 pp2"]),  # the embedding is on two stages
    ("dense", "tp2", ["pp2", "tp2 pp2"]),
    ("moe bf16", "ep2", ["dp", "tp2 ep4 etp1"]),
    ("mla", "dp", ["tp2", "ep2"]),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("model, a, others", RESHARDS)
def test_the_reshard_matrix(ranks, folders, tmp_path, model, a, others):
    """fp32 masters are saved, so 16-bit parameters lose nothing. The router's biases of `mla` are buffers, which training changes."""
    resharded(ranks, folders[model], tmp_path, a, others, rel=2e-2 if "bf16" in model else 1e-3)
    first = lm.content(tmp_path / f"from {a}")
    assert {v.dtype for k, v in first.items() if k.endswith("/param")} == {torch.float32}
    trained = {k.rpartition("/")[0] for k in first if not k.endswith("/param")}
    buffers = [v for k, v in first.items() if k.removesuffix("/param") not in trained]
    assert bool(buffers) == (model == "mla") and all(v.any() for v in buffers)


@pytest.mark.parametrize("a, b", [("dp", "tp2"), pytest.param("tp2", "pp2", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_padded_vocabulary_is_loaded_where_the_padding_is_another(two, folders, tmp_path, a, b):
    """130 rows are 144, and 288 at tp2, where one rank has nothing but padding. Where both have padding it moves too."""
    padded = dict(load=False, should_pad_vocab=True, make_vocab_size_divisible_by=144)
    way = {name: dict(folder=folders["odd"], layout=dict(at(name), provider=padded)) for name in (a, b)}
    first = saved(two, tmp_path / "first", **way[a])
    want = losses(two)
    padding = {k for k in first if "/padding/" in k and first[k].dim()}
    assert {k.rpartition("/")[2] for k in padding} == {"param", "exp_avg", "exp_avg_sq"}
    for source, target, name in (("first", "there", b), ("there", "back", a), ("first", "again", a)):
        again = saved(two, tmp_path / target, tmp_path / source, **way[name])
        assert {k for k in first if "/padding/" not in k} == {k for k in again if "/padding/" not in k}
        wrong = [k for k in first if "/padding/" not in k and not torch.equal(first[k], again[k])]
        assert not wrong, f"{a} -> {name}: {wrong[:5]}"
        rows = {"tp2": 158}.get(name, 14)
        for k in padding:
            moved = min(rows, len(first[k]), 14 if source == "there" else rows)
            assert again[k].shape[0] == rows and torch.equal(again[k][:moved], first[k][:moved])
            assert not again[k][moved:].any()
    assert losses(two) == pytest.approx(want, rel=1e-3), "other padding is other losses: Megatron's softmax counts it"


# ---- refits right after a step: from the owners, before any gather; and, the plain way, from everybody after a drain

stage = stage_of("layerwise_megatron")


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sources", ["owners", "all"])
def test_refits_from_owners_and_after_a_drain(stage, tmp_path, sources, tp):
    toy.write_checkpoint("qwen3_moe", tmp_path / "model", seed=3, num_hidden_layers=2, num_experts=4)

    def watched(engines, refit) -> list[dict]:
        reports = refit()
        for r in reports:
            stale = r["before"].count("stale")
            assert stale, "the gather was over before the refit began"
            assert r["sent"] > 0
            if sources == "owners":
                assert r["after"].count("stale") == stale, "the refit has gathered"
            else:
                assert set(r["after"]) == {"current"}
        return reports

    # One bucket in flight and all others not even started: the state in which non-owners hold old bytes.
    few = dict(ep=2, options=dict(bucket_bytes=50_000, prefetch_depth=1))
    how = dict(build=dict(layout=few), engines=[dict(tp=tp)], watched=watched)
    how |= dict(frozen=["*norm.weight"])  # a step of Adam may be less than a bf16 norm can show
    how |= dict(sources=sources, narrow=["*"], deadline_s=300.0)
    two_refits_are_fresh_loads(stage, tmp_path, model=tmp_path / "model", **how)
