"""benchmarks.packed_gpu at toy size: every way of sending whole tensors leaves the right bytes at both workers.

On CPUs this rehearses what runs on GPUs: the same processes, gathers, buffers and comparisons. The times mean nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.gpu_job import SHARED
from tests.support.proc import ROOT

NOT_COMPARED = ("NCCL broadcast", "loads alone, a slice and a copy per tensor")
GPUS = {"colocated": 2, "apart": 4}
LOADERS = ("", ", a slice and a copy per tensor", ", as Bridge exports")
WAYS = {
    "colocated": {"one by one", "bucketed gather"} | {"bucketed + flattened" + x for x in LOADERS},
    "apart": {"one by one", *NOT_COMPARED} | {"packed broadcast" + x for x in LOADERS},
}


@pytest.mark.parametrize("case", WAYS)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_every_way_leaves_the_right_bytes(device, case, tmp_path):
    how, there = (
        ["--model", "toy", "--cases", case, "--repeats", "2", "--no-direct", "--seconds", "240"],
        tmp_path / "out.json",
    )
    how += [] if find_spec("vllm") else ["--no-vllm"]
    if device == "cuda" and torch.cuda.device_count() < GPUS[case]:
        if not SHARED or not torch.cuda.is_available():
            pytest.skip(f"{GPUS[case]} GPUs of one host are needed, or XFER_SHARE_GPUS=1")
        how.append("--share")
    command = [sys.executable, "-m", "benchmarks.packed_gpu", "--device", device, *how, "--out", str(there)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [r for r in json.loads(there.read_text())["cases"][0]["rows"] if "ms" in r]
    ways = {r["way"] for r in rows}
    assert ways >= WAYS[case]
    for r in rows:
        assert r["wrong"] == (None if r["way"] in NOT_COMPARED else 0), r
    if device == "cuda":
        assert find_spec("vllm") is None or case != "apart" or "vLLM's packed broadcast" in ways
        assert all(max(r["extra_bytes"]) > 0 for r in rows if r["way"] not in ("one by one", *NOT_COMPARED))
