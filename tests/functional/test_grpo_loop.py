"""The loop as its documentation starts it: torchrun and HTTP by examples/grpo/run.sh. Slurm: test_slurm.py; Ray: test_grpo_ray.py."""

import json
import re
import statistics
from pathlib import Path

import pytest

from examples.grpo.gate import Row, read_curve
from tests.support.grpo_processes import Group
from tests.support.marks import BOTH
from tests.support.proc import PATIENCE, PYTHON

pytestmark = [pytest.mark.slow, BOTH]


def run(work: Path, *words: str, **env: str) -> list[Row]:
    """Its curve, when it ended well and every step was of the version that the step has."""
    command = ["examples/grpo/run.sh", *words, "--device", "cpu", "--out", str(work / "out.json")]
    group = Group("run", command, work, WORK=str(work), TRAINER_PYTHON=PYTHON["trainer"], **env)
    try:
        code = group.process.wait(900 * PATIENCE)
    finally:
        group.kill()
    said = group.log.read_text()
    assert code == 0, said[-6000:]
    rows = read_curve(work / "curve.jsonl")
    assert [r.version for r in rows] == [str(i) for i in range(len(rows))]
    assert json.loads((work / "out.json").read_text())["totals"]["steps"] == len(rows)
    assert len(re.findall(r"^step .* reward .* KL ", said, re.M)) == len(rows)
    assert ("(100.0%)" in re.findall(r"^refits moved .*", said, re.M)[0]) == ("--delta" not in words)
    shares = [x for line in re.findall(r"^elements that a step changed: (.*)", said, re.M) for x in line.split()]
    assert len(shares) == len(rows) * ("--delta" in words) and all(0 < float(x[:-1]) < 100 for x in shares), shares
    return rows


@pytest.mark.parametrize("kind, steps, reached", [("dense", 40, 0.3), ("moe", 25, 0.25)])
def test_reward_rises_and_the_gate_holds(tmp_path, kind, steps, reached):
    rows = run(tmp_path, kind, "--steps", str(steps))
    first, last = (statistics.mean(r.reward for r in part) for part in (rows[:5], rows[-5:]))
    assert len(rows) == steps and first < 0.15 and last > reached, (first, last)
    assert all(1 <= r.error < 1.0001 and r.kl >= 0 for r in rows), rows


def test_an_async_llm_samples(tmp_path):
    rows = run(tmp_path, "dense", "--steps", "3", "--in-flight", "drain")
    assert len(rows) == 3 and all(1 <= r.error < 1.0001 for r in rows), rows


def test_the_shape_of_qwen3_06b_at_two_layers(tmp_path):
    """The line of the GPU run (docs/guide.md) on a CPU: bf16, one vLLM of two ranks beside two trainer ranks, which send what changed."""
    small = "--set num_hidden_layers=2 --set hidden_size=128 --digits 4 --prompts 2 --answers 4 --micro-batches 2 --steps 3 --delta"
    rows = run(tmp_path, "0.6b", *small.split())
    assert len(rows) == 3 and all(1 <= r.error < 1.2 for r in rows), rows
