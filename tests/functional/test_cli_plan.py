"""`xfer plan` from a config.json alone, end to end: Megatron-Core and Bridge in one process, vLLM in another, no weights.

The judge is the declared layouts of benchmarks/lib/layouts.py, which no framework and no trace has a part in: they must move
the same bytes from and to the same ranks.
"""

import json
import re
import shlex
import time
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks import plan_predictions
from benchmarks.lib import layouts
from examples.common import toy
from tests.support import block_fp8
from tests.support.families import FAMILIES
from tests.support.marks import BOTH
from tests.support.proc import PYTHON
from xfer import logs
from xfer.cli import app
from xfer.cli.plan_report import Header, make_report
from xfer.mesh.parallel import TrainerParallel
from xfer.plan.fabric import Fabric, Site
from xfer.plan.planner import plan_replicas
from xfer.transport.p2p import WAVE_BYTES

pytestmark = BOTH
SIZES = dict(world=8, tp=2, pp=2, ep=2, etp=1)
TRAINERS = " ".join(f"{name}={n}" for name, n in SIZES.items())
WIDE = dict(hidden_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
WIDE |= dict(moe_intermediate_size=256, num_experts=16)  # in FP8 each rank's part consists of whole blocks
# As many as vLLM pads them to: declared engines have no padding.
MOE = toy.FAMILIES["qwen3_moe"] | WIDE | {"vocab_size": 256}


COUNTED = "tensors model_bytes bytes_per_replica nbytes broadcast_bytes most_out most_in between_hosts matrix hosts floor_s".split()
IN_FP8 = "args.hf_overrides=" + shlex.quote(json.dumps(block_fp8.ENGINE["hf_overrides"]))


def xfer_plan(folder: Path, *args: str, code: int = 0) -> tuple[str, dict, float]:
    """What it printed, its JSON, seconds. It ends with `code`; layouts are kept in `folder`."""
    began, data = time.monotonic(), folder / "plan.json"
    command = ["plan", "--json", str(data), "--cache", str(folder / "kept"), *args]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    return done.output, json.loads(data.read_text()), time.monotonic() - began


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    hybrid = next(f for f in FAMILIES if f.name == "Nemotron-H MoE (Nano 3)").config
    made = {"moe": MOE, "dense": toy.FAMILIES["qwen3"], "tied": toy.FAMILIES["qwen3_tied"], "hybrid": hybrid}
    for name, config in made.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def declared(folder: Path, *, fp8: bool = False) -> dict:
    """The same refit from declared layouts."""
    (folder / "toy.json").write_text(json.dumps(MOE))
    with patch.object(layouts, "CONFIGS", folder):
        model = layouts.Model.named("toy")
    catalog, *sides = plan_predictions.ranks(model, TrainerParallel(**SIZES), 2, fp8=fp8, folded=False)
    site = Site.packed(Fabric.uniform(2, 8, nvlink=396 * 10**9, nic=48_500_000_000, local=1600 * 10**9), 8, 2, 2)
    plans = plan_replicas(catalog, *sides, site, bucket_bytes=240 << 20, wave_bytes=WAVE_BYTES["cuda"])
    return msgspec.json.decode(msgspec.json.encode(make_report(Header("", "", "", ""), catalog, plans, site)))


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_plan_from_two_descriptions_is_that_of_declared_layouts(folder, monkeypatch, caplog, fp8):
    """Where no terminal shows a bar, the log says how far it is. Trainers quantize what the engine's own loader takes in FP8."""
    monkeypatch.setattr(logs, "EVERY_S", 1.0)
    caplog.set_level("INFO", "xfer")
    page, more = folder / "plan.html", f" {IN_FP8}" * fp8
    sides = ("--trainer", f"{folder}/moe {TRAINERS}", "--engine", f"tp=2 replicas=2{more}")
    text, data, first = xfer_plan(folder, *sides, "--html", str(page))
    assert re.search(r"trainer: different ranks traced \d/4.*, for \d+ s", caplog.text), caplog.text
    got, want = data["plan"], declared(folder, fp8=fp8)
    assert {k: got[k] for k in COUNTED} == {k: want[k] for k in COUNTED}
    assert got["byte_classes"]["written"] == got["nbytes"]
    assert "4 different trainer ranks, 2 different workers" in text and "moe (Qwen3MoeForCausalLM)" in text
    assert page.read_text().startswith("<!doctype html>") and "moe (Qwen3MoeForCausalLM)" in page.read_text()
    quantized = "Engines serve 212 matrices in block FP8. Trainers quantize them before they are ready"
    assert (quantized in " ".join(text.split())) == fp8

    # Kept layouts: no framework is started again, and another fabric or number of replicas needs none.
    again = (*sides[:3], f"tp=2 replicas=3{more}", "--trainer-python", PYTHON["trainer"])
    _, more, second = xfer_plan(folder, *again)
    assert more["plan"]["nbytes"] == 3 * got["bytes_per_replica"][0]
    assert second < first / 2, (first, second)


@pytest.mark.slow
def test_a_published_row_in_fp8_moves_what_a_declared_one_does(folder):
    sides = ("--trainer", "qwen3-4b world=8 tp=2", "--engine", f"tp=4 replicas=2 {IN_FP8}")
    _, data, _ = xfer_plan(folder, *sides)
    (want,) = plan_predictions.reports("4B FP8 TP2xDP4 -> TP4xDP2", [240])
    assert data["plan"]["nbytes"] == want.nbytes and data["plan"]["floor_s"] == want.floor_s
    assert abs(data["plan"]["most_in"]["nbytes"] / 1.103e9 - 1) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer, engine, said",
    [
        ("tied world=2 pp=2", "tp=1", []),  # the last stage has a copy of the embedding, which Megatron-Core moves by itself
        # A hybrid with experts: Bridge knows it, and the trainers' transformers 4 does not. The engine's names its tensors.
        ("hybrid world=4 tp=2 ep=4 etp=1", "tp=2 replicas=2", ["staged, then computed", "(NemotronHForCausalLM)"]),
    ],
)  # fmt: skip
def test_models_that_a_framework_treats_in_its_own_way_are_planned(folder, trainer, engine, said):
    text, data, _ = xfer_plan(folder, "--trainer", f"{folder}/{trainer}", "--engine", engine)
    assert data["plan"]["nbytes"] == sum(data["plan"]["bytes_per_replica"]) > 0
    assert all(words in text for words in said), text


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer, engine, kind, said",
    [
        ("dense world=1", "tp=1 args.quantization=fp8_per_block", "Unsupported", []),  # an engine that quantizes while it loads
        ("moe world=1", "{}/dense tp=1", "LayoutError", []),  # an engine of another model, in its own process
        # Four layers do not go into three stages, nor four heads over three workers: in the frameworks' own words, together.
        ("dense world=3 pp=3", "tensor_parallel_size=3", "XferError",
         ["Megatron-Core and Bridge: .*pipeline", "vLLM: .*attention heads"]),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_by_xfer_or_by_the_frameworks(folder, trainer, engine, kind, said):
    sides = ("--trainer", f"{folder}/{trainer}", "--engine", engine.format(folder))
    text, data, _ = xfer_plan(folder, *sides, code=1)
    assert f"refused: {kind}" in text and "Traceback" not in text, text
    assert "fp8" not in engine or "weights in this form need scales and layouts that xfer does not move" in " ".join(
        text.split()
    )
    refused = data["refused"]
    assert refused["kind"] == kind and (len(refused["violations"]) == len(said) or not said), refused
    assert all(re.match(words, v, re.S) for words, v in zip(said, refused["violations"]))
