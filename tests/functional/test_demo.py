"""The README's first command, with fewer steps: it must end well, and say so, on any machine that runs the tests."""

import os
import subprocess
import sys

import pytest

from tests.support.proc import PATIENCE, PYTHON, ROOT

pytestmark = pytest.mark.skipif(
    not all(os.path.exists(p) for p in PYTHON.values()), reason="scripts/setup.sh has not been run"
)


def test_the_demo_ends_with_a_live_engine_that_equals_a_fresh_one(tmp_path):
    command = [sys.executable, ROOT / "examples/demo/run.py", "--steps", "2", "--work", tmp_path / "demo"]
    for side in ("trainer", "engine"):
        command += [f"--{side}-python", PYTHON[side]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=420 * PATIENCE)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    said = " ".join(done.stdout.split())  # its lines are broken where the terminal's width is
    assert "2 refits, every one verified: yes" in said and "tokens and logprobs equal" in said, said
