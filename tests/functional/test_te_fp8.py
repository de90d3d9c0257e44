"""Megatron-Core trainers whose parameters the real TransformerEngine keeps in FP8 refit a real vLLM in block FP8. The truth is a fresh vLLM
that loads the trainer's own bytes and scales as Bridge exports them (tests/support/fp8_export.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.common import toy
from examples.common.ports import free_port
from tests.functional.test_refit_e2e import WIDE, WIDE_MOE
from tests.functional.test_trainer_families import with_transformer_engine
from tests.support import block_fp8
from tests.support.marks import BOTH
from tests.support.refit_stage import Stage, two_refits_are_fresh_loads

pytestmark = [pytest.mark.slow, BOTH]
FP32_SCALES = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}


CASES = {  # by the layouts of the trainer (4 ranks) and of the replica
    "qwen3: tp2 -> tp2": ("qwen3", dict(tp=2), dict(tp=2), dict(WIDE, hidden_size=384)),
    "qwen3: tp1-pp2 -> tp1": ("qwen3", dict(tp=1, pp=2), dict(tp=1), WIDE),
    "qwen3_moe: tp2-ep2-etp1 -> tp2": ("qwen3_moe", dict(tp=2, ep=2, etp=1), dict(tp=2), WIDE_MOE),
    "qwen3_moe: tp2-ep2-etp2 -> tp2-epTrue": ("qwen3_moe", dict(tp=2, ep=2, etp=2), dict(tp=2, ep=True), WIDE_MOE),
}
"""With the distributed optimizer and overlap_param_gather, the defaults of Trainer."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[Stage]:
    paths = with_transformer_engine()
    stage = Stage(tmp_path_factory.mktemp("stage"), "te_fp8_main", trainer_env={**paths, **FP32_SCALES})
    yield stage
    stage.family.__exit__()


@pytest.mark.parametrize(("family", "layout", "engine", "sizes"), CASES.values(), ids=CASES)
def test_engines_hold_the_trainers_own_bytes_after_each_step(family, layout, engine, sizes, stage, tmp_path):
    model = tmp_path / "model"
    toy.write_checkpoint(family, model, **sizes)

    def watched(engines, refit):
        reports = refit()
        assert all("native" in r["rules"] for r in reports), reports
        return reports

    two_refits_are_fresh_loads(
        stage, tmp_path, model=model, build=dict(layout=layout), engines=({**engine, **block_fp8.ENGINE},),
        watched=watched, as_served=block_fp8.serialize,  # of the routers, which are in bf16
    )  # fmt: skip


@pytest.mark.parametrize(
    "sizes, route, said",
    [
        (dict(WIDE, head_dim=64), {},
         ["k_proj.weight: ", "of [128, 256] lie at row 128", "no scale of the trainer is a scale of this tensor"]),
        (WIDE, dict(route="packed"), ["the packed route does not read weights in FP8", "is a Float8BlockwiseQTensor"]),
    ],
    ids=["heads of 64", "packed"],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused_by_name(sizes, route, said, stage, tmp_path):
    """With heads of 64, a block of linear_qkv has keys and values. No engine is needed to tell."""
    toy.write_checkpoint("qwen3", tmp_path, **sizes)
    with stage.case():
        stage.trainers.ask("build", "built", folder=str(tmp_path), layout=dict(tp=2))
        where = f"tcp://127.0.0.1:{free_port()}"
        for r in stage.trainers.ask("connect", "raised", rendezvous=where, replicas=1, deadline_s=60.0, **route):
            assert r["type"] == "Unsupported" and all(x in r["text"] for x in said), r


def test_an_engine_in_bf16_is_refused_by_the_tensors_name(stage, tmp_path):
    """xfer does not dequantize. All ranks learn it, and the engine, before a byte moves."""
    model = tmp_path / "model"
    toy.write_checkpoint("qwen3", model, **WIDE)
    with stage.case():
        engine = stage.engine("bf16")
        engine.ask("start", "started", model=str(model), load_format="dummy")
        stage.trainers.ask("build", "built", folder=str(model), layout=dict(tp=2))
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        engine.say(do="serve", rendezvous=rendezvous, replica=0, deadline_s=60.0)
        for r in stage.trainers.ask("connect", "raised", rendezvous=rendezvous, replicas=1, deadline_s=60.0):
            assert r["type"] == "CoverageError", r
            assert "down_proj.weight: float8_e4m3fn in the trainer, bfloat16 in rank 4 (engine worker 0)" in r["text"]
            assert "serve it in block FP8 too" in r["text"]
        engine.stop()
