"""A real transformers model under PyTorch's own FSDP2 refits a real vLLM, bit for bit, after each of two AdamW steps, and nobody holds a
whole parameter on the way. The truth is a fresh vLLM that loads what torch itself gathered and saved (its loader rounds fp32 to bf16).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from examples.common import toy
from tests.support import block_fp8
from tests.support.marks import BOTH
from tests.support.refit_stage import stage_of, two_refits_are_fresh_loads

pytestmark = BOTH
WORLD = 4
# Nothing that is cut divides by four, the vocabulary not even by two.
ODD = dict(num_hidden_layers=2, vocab_size=100_003, intermediate_size=198)
WHOLE = ODD["vocab_size"] * 128 * 2
"""Bytes of the largest parameter in the engine's dtype."""


@dataclass(frozen=True)
class Case:
    """`scheme`: of fsdp_main. `evaluate`: run a forward between step and refit, after which parameters lie whole."""

    scheme: str
    dtype: str
    tp: int = 2
    family: str = "qwen3"
    evaluate: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}: {self.scheme} {self.dtype} -> tp{self.tp}" + " after a forward" * self.evaluate

    @property
    def how(self) -> dict:
        narrow = ["*"] if self.dtype == "float32" else []
        return dict(build=dict(scheme=self.scheme, dtype=self.dtype), narrow=narrow)


SLOW = [
    Case("fsdp", "bfloat16"),
    Case("hsdp", "float32"),
    Case("fsdp over tp", "bfloat16"),
    Case("fsdp over tp", "float32", tp=1),
    Case("fsdp", "float32", family="qwen3_tied"),
]
CASES = [Case("fsdp", "float32", evaluate=True), *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]


stage = stage_of("fsdp_main", WORLD)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_an_fsdp2_refit_equals_a_fresh_load_of_what_torch_saved(case, stage, tmp_path):
    folder = tmp_path / "model"
    checkpoint = toy.write_checkpoint(case.family, folder, **ODD)

    def trained() -> None:
        is_what_it_says(case, [x["shards"] for x in stage.trainers.ask("shards", "cut")])
        if case.evaluate:
            assert all(e["whole"] > 0 for e in stage.trainers.ask("evaluate", "evaluated"))

    def watched(engines, refit) -> list[dict]:
        engines.ask("watch", "watching")
        reports = refit()
        moved_shards_only(case, checkpoint, reports, engines.ask("grown", "grown")[0]["bytes"])
        return reports

    how = dict(engines=[dict(tp=case.tp)], trained=trained, watched=watched, bucket_bytes=1 << 20)
    two_refits_are_fresh_loads(stage, tmp_path, model=folder, **case.how, **how)


def is_what_it_says(case: Case, shards: list[list]) -> None:
    """torch cut the model as the case's name promises: unevenly, on two axes, strided."""
    rows = [{n: shape[0] for n, shape, _ in rank} for rank in shards]
    kinds = {n: placements for n, _, placements in shards[0]}
    embedding, gate = "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"
    assert len({r[embedding] for r in rows}) > 1, "every rank holds as many rows"
    assert len({r[gate] for r in rows}) > 1 or case.scheme == "hsdp"
    axes = {len(p) for p in kinds.values()}
    assert axes == {"fsdp": {1}, "hsdp": {2}, "fsdp over tp": {1, 2}}[case.scheme]
    assert any("_StridedShard" in x or x.startswith("_S(") for x in kinds[gate]) == (case.scheme == "fsdp over tp")
    assert ("lm_head.weight" in kinds) == (case.family != "qwen3_tied")


def moved_shards_only(case: Case, checkpoint: dict[str, torch.Tensor], reports: list[dict], grown: list[int]) -> None:
    """Each worker got its share, each trainer sent about as much, and no process grew by the largest parameter, as a gather of it would."""
    share = sum(t.numel() * (1 if t.dim() > 1 else case.tp) * 2 for t in checkpoint.values())
    sent = [r["sent"] for r in reports]
    assert {r["bytes"] for r in reports} == {share} == {sum(sent)} and max(sent) < 1.1 * share / WORLD
    assert len(grown) == case.tp
    assert max(*grown, *(r["grown"] for r in reports)) < WHOLE, (grown, [r["grown"] for r in reports])
    assert max(r["extra"] for r in reports) < WHOLE // 2


BLOCKS = dict(
    num_hidden_layers=2, vocab_size=1003, hidden_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2
)
"""Engines in FP8 take these sizes. FSDP2 over four ranks cuts most matrices inside blocks of 128 rows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, intermediate",
    [
        (Case("fsdp", "float32"), 768),  # 192 rows a rank
        (Case("fsdp over tp", "bfloat16", tp=1), 640),  # also 320 columns a rank
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_ranks_that_share_blocks_refit_an_engine_in_fp8(case, intermediate, stage, tmp_path):
    """The truth quantizes what torch gathered, whole matrices by the oracle in numpy."""
    toy.write_checkpoint(case.family, tmp_path / "model", **BLOCKS, intermediate_size=intermediate)

    def trained() -> None:
        for cut in stage.trainers.ask("shards", "cut"):
            shapes = {n: shape for n, shape, _ in cut["shards"]}
            assert any(n % 128 for n in shapes["model.layers.0.mlp.down_proj.weight"])

    how = dict(engines=[dict(tp=case.tp, **block_fp8.ENGINE)], as_served=block_fp8.serialize, trained=trained)
    two_refits_are_fresh_loads(stage, tmp_path, model=tmp_path / "model", **case.how, **how)


# ---- the packed route

SMALL = dict(num_hidden_layers=2, vocab_size=1003, intermediate_size=198)
"""Nothing that is cut divides evenly."""
HOW = dict(engines=[dict(tp=1)], scramble=False, route="packed", bucket_bytes=64 << 10, deadline_s=180.0)


loaded = stage_of("fsdp_main", 2, XFER_CPU_RESIDENT="1")
processed = stage_of("fsdp_main", 2, XFER_CPU_RESIDENT="0")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loaded", "processed"])
@pytest.mark.parametrize(
    "dtype, colocated",
    [("bfloat16", False), ("bfloat16", True), ("float32", False)],
    ids=["bf16", "shared memory", "fp32"],
)
def test_packed_refits_equal_fresh_loads_also_where_vllm_processes_weights_after_loading(
    request, engine, tmp_path, dtype, colocated
):
    """On CPUs vLLM packs such weights into other memory, so a refit goes through its layer-wise reload; the direct route refuses it."""
    toy.write_checkpoint("qwen3", tmp_path / "model", **SMALL)
    build = dict(scheme="fsdp", dtype=dtype)
    stage = request.getfixturevalue(engine)
    frozen = ["*proj.weight"] * (engine == "processed")  # vLLM has emptied them; answers tell what lies elsewhere
    two_refits_are_fresh_loads(
        stage, tmp_path, model=tmp_path / "model", build=build, colocated=colocated, frozen=frozen, **HOW
    )
