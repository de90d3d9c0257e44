"""Megatron-Core trainers whose parameters are in FP8 (`fp8_param_gather`, blockwise scaling by TransformerEngine) refit engines in block
FP8 with their own bytes and scales. The judge is Bridge's export of these (fp8_export.py), loaded by vLLM's own loader.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field

import pytest

from examples.common import toy
from tests.support.block_fp8 import serialize
from tests.support.gpu_job import BLOCK_FP8, Job, config, gpus, megatron, nccl_host, transformer_engine

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() < 1, reason="needs a GPU"),
    pytest.mark.skipif(not megatron(), reason="needs Megatron-Core and Bridge: name their site in XFER_SITE_TRAINER"),
    pytest.mark.skipif(not transformer_engine(), reason="needs TransformerEngine: name its site in XFER_SITE_TRAINER"),
]
MEGATRON = dict(fp8="e4m3", fp8_recipe="blockwise", fp8_param=True, ddp=dict(fp8_param_gather=True), lr=1e-3)
SIZES = dict(hidden_size=384, head_dim=128, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
"""Three blocks across, so that TransformerEngine pads rows of scales, and whole heads are whole blocks."""
EXPERTS = dict(SIZES, moe_intermediate_size=256, num_experts=16)
"""vLLM quantizes the router, too, whose kernel wants multiples of 16. The trainer has it in bf16."""
FP32_SCALES = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}


@dataclass(frozen=True)
class Case:
    """`trainers`: their GPUs; `layout`: of Trainer; `env`: of the trainers, whose scales are powers of two without FP32_SCALES."""

    name: str
    trainers: tuple[int, ...]
    layout: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    experts: bool = False

    @property
    def engine(self) -> dict:
        return dict(eager=True, moe_backend="triton") if self.experts else dict(eager=True)

    @property
    def rules(self) -> list[str]:
        return ["native", "ieee"] if self.experts else ["native"]


CASES = [
    Case("one GPU for both", (0,), dict(distopt=True, overlap=True), FP32_SCALES),
    Case("one GPU for both, scales powers of two, no distributed optimizer", (0,), dict(distopt=False, overlap=False)),
    Case("experts, one GPU for both", (0,), dict(distopt=True, overlap=True), FP32_SCALES, experts=True),
    Case("tp2", (0, 1), dict(tp=2), FP32_SCALES),
    Case("experts, ep2", (0, 1), dict(ep=2, distopt=True, overlap=True), FP32_SCALES, experts=True),
    Case("dp2, parameters gathered late", (0, 1), dict(), FP32_SCALES),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_an_engine_holds_the_bytes_of_fp8_parameters(case: Case, tmp_path):
    if len(set(case.trainers)) > gpus():
        pytest.skip(f"needs {len(set(case.trainers))} GPUs")
    family, sizes = ("qwen3_moe", EXPERTS) if case.experts else ("qwen3", SIZES)
    served = config(family, **sizes, **BLOCK_FP8)
    trained = {k: v for k, v in served.items() if k not in BLOCK_FP8}
    with Job(tmp_path, served) as job:
        start = tmp_path / "start"
        toy.write_checkpoint(family, start, seed=1, **trained)
        engine = job.engine("engine", [0], **case.engine)
        apart = nccl_host("trainer{rank}") if len(case.trainers) > 1 else {}
        job.start_trainers(list(case.trainers), CUDA_DEVICE_MAX_CONNECTIONS="1", **apart, **case.env)
        layout = {**MEGATRON, **case.layout}
        built = job.good("megatron", "built", timeout=300, folder=str(start), layout=layout, task=dict(seq=128))
        assert {"Float8BlockwiseQTensor"} <= set(built[0]["kinds"]), built
        engine.started()
        job.meet([engine])
        answers = []
        for step in range(3):
            if step:
                job.good("step", "stepped", timeout=240)
                engine.ask("scramble", "scrambled", seed=step)
            report = job.verified()
            assert report["rules"] == case.rules, report
            assert "and sends them out of its parameters, rule native" in report["plan"]
            exported = tmp_path / f"export{step}"
            job.good("export_fp8", "exported", timeout=240, folder=str(exported))
            shutil.copy(job.folder / "config.json", exported / "config.json")
            out = serialize(str(exported))  # of routers
            assert engine.wrong(folder=out) == [[]], (case.name, step)
            answers.append(engine.tokens())
        assert answers[0] != answers[-1], "training must change the answers, or the tokens prove nothing"
        assert json.loads((exported / "config.json").read_text())["quantization_config"]
        fresh = job.engine("fresh", [0], model=out, load_format="auto", **case.engine)
        fresh.started()
        assert fresh.tokens() == answers[-1]


def test_an_engine_in_bf16_is_refused_by_name(tmp_path):
    """xfer does not dequantize. The trainer lives on, and an engine in block FP8 joins the next session."""
    plain = config("qwen3", **SIZES)
    with Job(tmp_path, plain) as job:
        start = tmp_path / "start"
        toy.write_checkpoint("qwen3", start, seed=1, **plain)
        engine = job.engine("engine", [0], eager=True)
        job.start_trainers([0], CUDA_DEVICE_MAX_CONNECTIONS="1")
        job.good("megatron", "built", timeout=300, folder=str(start), layout=MEGATRON, task=dict(seq=128))
        engine.started()
        said = "float8_e4m3fn in the trainer, bfloat16 in .*serve it in block FP8 too"
        with pytest.raises(AssertionError, match=said):
            job.meet([engine])
