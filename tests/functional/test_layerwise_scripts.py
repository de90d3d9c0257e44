"""The example of a layer-wise optimizer under torchrun, and the GPU benchmark at toy size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.common.ports import free_port
from tests.support.proc import PATIENCE, ROOT, environment

pytestmark = [pytest.mark.trainer, pytest.mark.slow]


def output(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300 * PATIENCE
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def example(*options: str) -> list[str]:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    text = output(*torchrun, "examples/muon_layerwise.py", "--steps", "40", *options)
    return [line for line in text.splitlines() if line.startswith("step")]


def test_the_example_has_the_same_loss_curve_overlapped_and_blocking():
    a, b = example(), example("--blocking")
    assert a == b and len(a) > 15
    losses = [float(line.split("loss")[1].split()[0]) for line in a]
    assert losses[-1] < 0.7 * losses[0]


def test_the_gpu_benchmark_at_toy_size(tmp_path):
    out = tmp_path / "results.json"
    text = output("-m", "benchmarks.layerwise_gpu", "--toy", "--ranks", "2", "--rounds", "2", "--out", str(out))
    (found,) = json.loads(Path(out).read_text())
    assert [x["differ"] for x in found["exact"]] == [[], []]
    assert found["overlap"]["received"] == found["overlap"]["lacked"] and found["overlap"]["travelled"] == []
    assert "by NVLink's counters: not available" in text
    dear, cheap = found["skew"]["lacked"]
    assert found["skew"]["received"] == [dear, cheap] and dear > 20 * cheap
    assert [x["verdict"] for x in found["dead"]] == [""] and len(found["dead"][0]["survivors"]) == 1
    assert "ALL EQUAL" in text and "ALL RIGHT" in text
    assert found.get("megatron") or "older than 0.17" in found["skipped"]["megatron"]
