"""The loop as its documentation starts it: torchrun and HTTP by examples/grpo/run.sh. Slurm: test_slurm.py; Ray: test_grpo_ray.py."""

import json
import re
import statistics
from pathlib import Path

import pytest

from examples.grpo.gate import Row
from tests.support.grpo_processes import trained
from tests.support.marks import BOTH
from tests.support.proc import PYTHON

pytestmark = [pytest.mark.slow, BOTH]


def run(work: Path, words: str, steps: int, most: float = 1.0001) -> list[Row]:
    command = f"examples/grpo/run.sh {words} --steps {steps} --device cpu --out {work}/out.json".split()
    rows, said = trained("run", command, work, most, WORK=str(work), TRAINER_PYTHON=PYTHON["trainer"])
    assert len(rows) == json.loads((work / "out.json").read_text())["totals"]["steps"] == steps
    assert ("(100.0%)" in re.findall(r"^refits moved .*", said, re.M)[0]) == ("--delta" not in words)
    shares = [x for line in re.findall(r"^elements that a step changed: (.*)", said, re.M) for x in line.split()]
    assert len(shares) == steps * ("--delta" in words) and all(0 < float(x[:-1]) < 100 for x in shares), shares
    return rows


@pytest.mark.parametrize("kind, steps, reached", [("dense", 40, 0.3), ("moe", 25, 0.25)])
def test_reward_rises_and_the_gate_holds(tmp_path, kind, steps, reached):
    rows = run(tmp_path, kind, steps)
    first, last = (statistics.mean(r.reward for r in part) for part in (rows[:5], rows[-5:]))
    assert first < 0.15 and last > reached, (first, last)


def test_an_async_llm_samples(tmp_path):
    run(tmp_path, "dense --in-flight drain", 3)


def test_the_shape_of_qwen3_06b_at_two_layers(tmp_path):
    """The line of the GPU run (docs/guide.md) on a CPU: bf16, one vLLM of two ranks beside two trainer ranks, which send what changed."""
    small = "--set num_hidden_layers=2 --set hidden_size=128 --digits 4 --prompts 2 --answers 4 --micro-batches 2"
    run(tmp_path, f"0.6b {small} --delta", 3, most=1.2)
