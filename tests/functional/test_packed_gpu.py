"""benchmarks.packed_gpu at toy size: every way of sending whole tensors leaves the right bytes at both workers.

On CPUs this rehearses what runs on GPUs: the same processes, gathers, buffers and comparisons. The times mean nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.gpu_job import SHARED
from tests.support.proc import ROOT

NOT_COMPARED = ("NCCL broadcast", "loads alone, a slice and a copy per tensor")
VLLM = "vLLM's packed broadcast"
LOADERS = ("", ", a slice and a copy per tensor", ", as Bridge exports")
WAYS = {
    "colocated": {"one by one", "bucketed gather"} | {"bucketed + flattened" + x for x in LOADERS},
    "apart": {"one by one", *NOT_COMPARED} | {"packed broadcast" + x for x in LOADERS},
}


def ran(case: str, device: str, out: Path, *more: str) -> list[dict]:
    how = [*more, *([] if find_spec("vllm") else ["--no-vllm"])]
    how += ["--model", "toy", "--cases", case, "--repeats", "2", "--no-direct", "--seconds", "240"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.packed_gpu", "--device", device, *how, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [r for r in json.loads(out.read_text())["cases"][0]["rows"] if "ms" in r]


def are_right(rows: list[dict], case: str) -> None:
    assert {r["way"] for r in rows} >= WAYS[case]
    for r in rows:
        assert r["wrong"] == (None if r["way"] in NOT_COMPARED else 0), r


@pytest.mark.gpu
@pytest.mark.parametrize("case, gpus", [("colocated", 2), ("apart", 4)])
def test_every_way_leaves_the_right_bytes_on_gpus(case, gpus, tmp_path):
    fewer = torch.cuda.device_count() < gpus
    if fewer and (not SHARED or not torch.cuda.is_available()):
        pytest.skip(f"{gpus} GPUs of one host are needed, or XFER_SHARE_GPUS=1")
    rows = ran(case, "cuda", tmp_path / "out.json", *(["--share"] if fewer else []))
    are_right(rows, case)
    assert find_spec("vllm") is None or case != "apart" or VLLM in {r["way"] for r in rows}
    assert all(max(r["extra_bytes"]) > 0 for r in rows if r["way"] not in ("one by one", *NOT_COMPARED))


@pytest.mark.slow
@pytest.mark.parametrize("case", WAYS)
def test_every_way_leaves_the_right_bytes_on_cpus(case, tmp_path):
    are_right(ran(case, "cpu", tmp_path / "out.json"), case)
