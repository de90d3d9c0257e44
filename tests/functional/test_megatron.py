"""MegatronTrainer finds in live storages what Megatron-Bridge exports from them, bit for bit, in any layout, LoRAs merged; gathers in
flight are finished first; a probe says the same as the trace; what would silently break this is noticed or refused. Ranks run real
Megatron-Core; their assertions are in megatron_worker.py and megatron_hazards.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.proc import ROOT, Family

pytestmark = pytest.mark.trainer
PLAIN = dict(distopt=False, overlap=False)


def case(family: str, *marks, **keywords):
    sizes = " ".join(f"{k}{keywords[k]}" for k in ("tp", "pp", "vpp", "cp", "ep", "etp") if k in keywords)
    how = " no distopt" * (not keywords.get("distopt", True)) + " no overlap" * (not keywords.get("overlap", True))
    how += " layerwise" * keywords.get("layerwise", False)
    return pytest.param({"family": family, **keywords}, id=f"{family} {sizes}{how}".strip(), marks=marks)


def run(name: str, folder: Path, **arguments) -> None:
    with Family(folder) as family:
        ranks = family.ranks("megatron_worker", 4, side="here", PYTHONWARNINGS="ignore")
        ranks.ask(name, timeout=420, folder=str(folder / "model"), **arguments)


slow = pytest.mark.slow
VALUES = [  # what test_refit_e2e.py has, end to end, is in the wide matrix only
    case("qwen3_tied", tp=2, pp=2, excused=["output_layer"]),
    case("qwen3", pp=2, cp=2, distopt=False, num_layers_in_first_pipeline_stage=1),
    case("deepseek_v3", tp=2, pp=2, ep=2, etp=1),
    case(
        "qwen3", tp=4, should_pad_vocab=True, make_vocab_size_divisible_by=64, load=False, config={"vocab_size": 150},
        excused=["embed", "output_layer"],
    ),
    case("qwen3", slow, pp=2, num_layers_in_first_pipeline_stage=1),
    case("qwen3", slow, pp=2, cp=2, distopt=False),
    case("qwen3", slow, tp=2, pp=2, vpp=2),
    case("qwen3_moe", slow, tp=2, ep=2, etp=2),
    case("qwen3", slow, tp=2),
    case("qwen3", slow, tp=2, pp=2),
    case("qwen3", slow, tp=4),
    case("qwen3", slow, tp=2, **PLAIN),
    case("qwen3", slow, tp=2, cp=2),
    case("qwen3_moe", slow, tp=2, ep=2, etp=1, cp=2),
    case("deepseek_v3", slow, tp=2, cp=2),
    case("qwen3_moe", slow, tp=2, pp=2, ep=2, etp=1),
    case("qwen3_moe", slow, ep=4),
    case("qwen3_moe", slow, ep=2),
    case("deepseek_v3", slow, tp=2, ep=2, etp=1, distopt=False),
]  # fmt: skip


@pytest.mark.parametrize("arguments", VALUES)
def test_fragments_hold_what_bridge_exports(arguments, tmp_path):
    run("values", tmp_path, **{"config": {}, "excused": [], **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        case("qwen3_moe", tp=2, ep=2, etp=1),  # dense parameters have two data-parallel ranks, experts one
        case("qwen3", slow, tp=2, pp=2),
        case("qwen3_moe", slow, ep=2, overlap=False),
    ],
)
def test_writes_of_the_distributed_optimizer_are_marked_and_all_others_found(arguments, tmp_path):
    run("marks", tmp_path, seed=1, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        case("qwen3_moe", slow, ep=2),  # dense and expert data parallelism
        case("qwen3_moe", slow, ep=2, layerwise=True),
        case("qwen3", slow),
        case("qwen3", slow, pp=2, vpp=2, align_param_gather=True),
        case("qwen3_moe", slow, pp=2, overlap=False),
    ],
)
def test_drained_parameters_are_the_optimizers_and_training_does_not_notice(arguments, tmp_path):
    run("drains", tmp_path, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        case("qwen3_moe", tp=2, pp=2, ep=2, etp=1),
        case("deepseek_v3", slow, tp=2, ep=2, etp=1),
        case("qwen3", slow, tp=2, pp=2),
    ],
)
def test_a_probe_says_the_same_as_the_trace_and_stands_in_for_it(arguments, tmp_path):
    run("probes", tmp_path, **arguments)


# ---- LoRA. One goes all the way to a real vLLM: test_staged.py

DENSE, SPARSE = dict(tensors=47, changes=28), dict(tensors=135, changes=112)
LORA = [
    case("qwen3", tp=2, pp=2, vpp=2, **DENSE),
    case("qwen3", tp=4, **DENSE),
    case("qwen3", tp=2, **PLAIN, **DENSE),
    case("qwen3", tp=2, pp=2, canonical=True, **DENSE),
    # Adapters on some modules only: what has none is sent from where it lies.
    case("qwen3", tp=2, targets=["*.layers.1.*.linear_qkv", "linear_fc2"], tensors=47, changes=7),
    # One adapter for all experts of a rank; with overlap, Megatron's DDP misses gradients of it and asserts.
    case("qwen3_moe", tp=2, ep=2, etp=2, **PLAIN, **SPARSE),
    case("qwen3_moe", tp=2, pp=2, ep=2, etp=1, **PLAIN, **SPARSE),
    case("qwen3_moe", ep=4, **PLAIN, **SPARSE),
    case(
        "deepseek_v3", tp=2, ep=2, etp=1, **PLAIN, tensors=129, changes=96 + 3, biases=3,
        targets=["linear_proj", "linear_fc1", "linear_fc2", "linear_q_down_proj", "linear_kv_up_proj"],
    ),
]  # fmt: skip


@slow
@pytest.mark.parametrize("arguments", LORA)
def test_scratch_holds_what_bridge_merges(arguments, tmp_path):
    run("merged", tmp_path, **arguments)


@slow
@pytest.mark.parametrize("name", ["regrouped", "ungrouped", "dora"])
def test_lora_hazards(name, tmp_path):
    run(name, tmp_path)


# ---- in one process for all, whose one rank has no peers

HAZARDS = re.findall(r"^def (\w+)\(folder\)", (ROOT / "tests/support/megatron_hazards.py").read_text(), re.M)


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("megatron-hazards")) as family:
        (rank,) = family.ranks("megatron_hazards", 1, side="here", PYTHONWARNINGS="ignore")
        yield rank


@pytest.mark.parametrize("case", HAZARDS)
def test_hazards(rank, case, tmp_path):
    rank.ask("hazard", name=case, folder=str(tmp_path))
