"""Whole worlds in one process: every row of the table of refits that NeMo-RL reports, at its true parallel shape, with real Megatron-Core
+ Bridge ranks and vLLM models of toy widths. Weights come from the checkpoint by Bridge's import and Megatron's resharding, the truth from
vLLM's loader, so no reading of a layout can be wrong on both sides alike. Every replica is refitted twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import block_fp8, families
from tests.support.marks import BOTH
from tests.support.proc import ROOT, Family
from xfer.mesh.parallel import EngineParallel

pytestmark = [pytest.mark.slow, BOTH]
VERSIONS = 2

SMALL = dict(vocab_size=152, bos_token_id=1, eos_token_id=2, hidden_size=64, intermediate_size=64, head_dim=32)


def published(name: str, **narrowed: object) -> dict:
    """The config of a published model, narrowed; its heads, KV heads and experts are those of the model unless they are given."""
    return {**json.loads((ROOT / f"xfer/cli/examples/{name}.json").read_text()), **SMALL, **narrowed}


FP32 = ["*.e_score_correction_bias"]
HYBRID = dict(
    mamba_head_dim=8, ssm_state_size=16, expand=8, chunk_size=16, moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=64,
)  # fmt: skip
NANO = dict(num_hidden_layers=8, hybrid_override_pattern="MEM*EME-", **HYBRID)
SUPER = dict(num_hidden_layers=12, hybrid_override_pattern="MEM*EMEMEM*E", moe_latent_size=48, **HYBRID)
DEEPSEEK_V3 = dict(
    num_hidden_layers=16, moe_intermediate_size=32, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, n_routed_experts=32,  # of 256: the fewest of which EP16 gives each rank more than one
)  # fmt: skip
WIDE = dict(hidden_size=320, head_dim=128, intermediate_size=512)
WIDE_EXPERTS = dict(num_hidden_layers=2, num_experts=16, moe_intermediate_size=256, **WIDE)
MODELS: dict[str, dict] = {
    name: dict(config=published(of, **narrowed), fp32=fp32)
    for name, of, fp32, narrowed in (
        ("4B", "qwen3-4b", [], dict(num_hidden_layers=4, intermediate_size=128)),
        ("30B-A3B", "qwen3-30b-a3b", [], dict(num_hidden_layers=4, moe_intermediate_size=32)),
        ("235B-A22B", "qwen3-235b-a22b", [], dict(num_hidden_layers=14, moe_intermediate_size=32)),
        ("DeepSeek-V3", "deepseek-v3", FP32, DEEPSEEK_V3),
        ("4B FP8", "qwen3-4b", [], dict(num_hidden_layers=4, **WIDE)),
        ("30B-A3B FP8", "qwen3-30b-a3b", [], WIDE_EXPERTS),
        ("nano-v3", "nemotron-3-nano-30b-a3b", [*FP32, "*.A_log"], NANO),
        ("super-v3", "nemotron-3-super-120b-a12b", [*FP32, "*.A_log"], SUPER),
    )
}
"""What an engine writes a checkpoint of. fp32: globs of the tensors that the checkpoint keeps in float32. Engines of the FP8 ones are in
block FP8."""


@dataclass(frozen=True)
class Row:
    """`trainer`, `engine`: parallelism; `native`: in block_fp8.NATIVE, for trainers with weights in FP8; `provider`: fields of Bridge's."""

    model: str
    trainer: dict
    engine: dict
    replicas: int = 1
    native: str = ""
    provider: dict = field(default_factory=dict)

    @property
    def options(self) -> dict:
        """EngineArgs."""
        return block_fp8.ENGINE if self.model.endswith("FP8") else {}

    @property
    def name(self) -> str:
        def text(sizes: dict) -> str:
            return "x".join(f"{k.upper()}{'' if v is True else v}" for k, v in sizes.items() if v != 1) or "TP1"

        own = f", {self.native}" * bool(self.native)
        return f"{self.model} {text(self.trainer)} to {self.replicas} of {text(self.engine)}{own}"


UNEVEN = dict(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1)
"""94 layers do not go into 8 stages either."""
DEFAULT = [
    Row("4B", dict(world=8), dict(tp=8)),
    Row("4B", dict(world=8, pp=2), dict(tp=4), 2),
    Row("4B", dict(world=8, tp=2, pp=2), dict(tp=4), 2),
    Row("30B-A3B", dict(world=16, pp=2, ep=8, etp=1), dict(tp=8), 2),
    Row("nano-v3", dict(world=16, tp=2, ep=8, etp=1), dict(tp=4), 4),
]
SLOW = [
    Row("4B", dict(world=8), dict(tp=1), 8),
    Row("4B", dict(world=8, pp=4), dict(tp=4), 2),
    Row("4B", dict(world=8, tp=2), dict(tp=4), 2),
    Row("30B-A3B", dict(world=16, tp=2, ep=4, etp=1), dict(tp=4), 4),
    Row("30B-A3B", dict(world=16, tp=2, ep=4, etp=2), dict(tp=4), 4),
    Row("30B-A3B", dict(world=16, tp=2, pp=2, ep=4, etp=1), dict(tp=4), 4),
    Row("30B-A3B", dict(world=16, pp=2, ep=8, etp=1), dict(tp=2), 8),
    Row("235B-A22B", dict(world=128, tp=4, pp=8, ep=16, etp=1), dict(tp=8), 16, provider=UNEVEN),
    Row("DeepSeek-V3", dict(world=256, pp=16, ep=16, etp=1), dict(tp=32), 8),
    # Not in the table: engines with experts over DP x TP, pipeline stages, and both; virtual stages on the trainer.
    Row("30B-A3B", dict(world=16, tp=2, pp=2, vpp=2, ep=4, etp=1), dict(tp=2, dp=4, ep=True)),
    Row("30B-A3B", dict(world=8, tp=4, ep=4, etp=2), dict(tp=2, pp=2, dp=2, ep=True)),
    Row("nano-v3", dict(world=8, tp=4, ep=2, etp=2), dict(tp=2, dp=2, ep=True)),
]
if not families.too_new("0.6"):  # the first Bridge that maps the latent projections of experts
    SLOW.append(Row("super-v3", dict(world=32, tp=8, pp=2, ep=8, etp=1), dict(tp=8), 2))
FP8 = [
    Row("4B FP8", dict(world=8), dict(tp=1), 8),
    Row("4B FP8", dict(world=8), dict(tp=4), 2),
    Row("4B FP8", dict(world=8, pp=2), dict(tp=4), 2),
    Row("4B FP8", dict(world=8, pp=4), dict(tp=4), 2),
    Row("4B FP8", dict(world=8, tp=2), dict(tp=4), 2),
    Row("30B-A3B FP8", dict(world=16, tp=2, pp=2, ep=4, etp=1), dict(tp=2), 8),
    Row("30B-A3B FP8", dict(world=16, pp=2, ep=8, etp=1), dict(tp=2), 8),
    Row("30B-A3B FP8", dict(world=16, ep=8, etp=1), dict(tp=2), 8),
]
"""The trainers are in bf16 and quantize; the truth is what vLLM loads from a checkpoint that an oracle in numpy quantized."""
OWN_FP8 = [
    Row("4B FP8", dict(world=8, tp=2), dict(tp=4), 2, "native"),
    Row("4B FP8", dict(world=8, pp=2), dict(tp=4), 2, "native, powers of two"),
    Row("30B-A3B FP8", dict(world=16, tp=2, pp=2, ep=4, etp=1), dict(tp=2), 8, "native"),
    Row("30B-A3B FP8", dict(world=16, ep=4, etp=2, tp=2), dict(tp=2, ep=True), 1, "native"),
]
"""The trainers keep weights in FP8, as TransformerEngine has them; the truth is what it makes of each whole matrix, in numpy."""
ROWS = [*DEFAULT, *SLOW, *FP8, *OWN_FP8]
EVERY = [DEFAULT[2]]
"""Rows whose ranks are traced one by one as well."""


def family_row(f: families.Family) -> Row:
    t, e = f.trainer[0], f.engine[0]
    trainer = dict(world=t.world, tp=t.tp, pp=t.pp, ep=t.ep, etp=t.etp)
    return Row(f"toy {f.name}", trainer, dict(tp=e.tp, pp=e.pp, dp=e.dp, ep=e.ep))


FAMILIES = [f for f in families.FAMILIES if f.trainer and f.engine and not families.too_new(f.since)]
MODELS |= {f"toy {f.name}": dict(family=f.name) for f in FAMILIES}


class Stage:
    """One trainer and one engine process for all rows; the trainer works ahead of the engine."""

    def __init__(self, work: Path, family: Family, rows: list[Row]):
        self.work, self.rows, self.told = work, rows, 0
        self.engine = family.start("engine", "engine", "world_engine")
        self.trainer = family.start("trainer", "trainer", "family_trainer")
        for model in dict.fromkeys(r.model for r in rows):
            self.engine.ask("checkpoint", timeout=600, folder=self.folder(model), **MODELS[model])
        self.traced: dict[str, dict] = {}
        for row in rows:
            how = dict(parallel=row.trainer, provider=row.provider, versions=VERSIONS, every=row in EVERY)
            if row.options:
                asked = dict(folder=self.folder(row.model), parallel=row.engine, options=row.options)
                how |= dict(deriving=self.engine.ask("forms", timeout=600, **asked)["forms"], native=row.native)
                assert how["deriving"]
            self.trainer.say(do="row", folder=self.folder(row.model), world=self.file(row), **how)

    def folder(self, model: str) -> str:
        return str(self.work / f"model{list(MODELS).index(model)}")

    def file(self, row: Row) -> str:
        return str(self.work / f"{self.rows.index(row)}.world")

    def trace(self, row: Row) -> dict:
        """What the trainer says of a row; rows come in the order in which they were asked for."""
        while self.told <= self.rows.index(row):
            self.traced[self.rows[self.told].name] = self.trainer.expect("row", timeout=3600)
            self.told += 1
        return self.traced[row.name]

    def refit(self, row: Row) -> dict:
        self.trace(row)
        how = dict(parallel=row.engine, replicas=row.replicas, options=row.options, native=row.native)
        return self.engine.ask("row", timeout=3600, folder=self.folder(row.model), world=self.file(row), **how)


@pytest.fixture(scope="module")
def stage(request, tmp_path_factory):
    asked = [i.callspec.params["row"] for i in request.session.items if "row" in getattr(i, "fixturenames", ())]
    rows = list({r.name: r for r in asked if isinstance(r, Row)}.values())
    work = tmp_path_factory.mktemp("world")
    with Family(work) as family:
        yield Stage(work, family, rows)


@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in ROWS])
def test_replicas_hold_what_vllm_would_load(stage, row):
    seen = stage.refit(row)
    assert seen["wrong"] == []
    assert seen["alike"] == [], "two versions of the weights that no comparison can tell apart"
    assert len(seen["moved"]) == VERSIONS * row.replicas and len(set(seen["moved"])) == 1 and seen["moved"][0] > 0
    assert (seen["ranks"], seen["workers"]) == (row.trainer["world"], EngineParallel(**row.engine).world)


@pytest.mark.parametrize(
    "row", [pytest.param(Row(f"toy {f.name}", vars(f.trainer[0]), vars(f.engine[0])), id=f.name) for f in FAMILIES]
)
def test_every_family_goes_from_trainer_to_engine(stage, row):
    """The first layouts of both tables in docs/architectures.md, one refitting the other."""
    test_replicas_hold_what_vllm_would_load(stage, row)


@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in EVERY])
def test_ranks_of_one_class_hold_the_same(stage, row):
    """A world traced rank by rank is the one that was traced class by class."""
    seen = stage.trace(row)
    assert seen["classes"] < seen["ranks"] and seen["unlike"] == []
