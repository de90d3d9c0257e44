"""The README's first command, with fewer steps: it must end well, and say so, on any machine that runs the tests."""

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.support.proc import PATIENCE, PYTHON, ROOT

pytestmark = pytest.mark.skipif(
    not all(os.path.exists(p) for p in PYTHON.values()), reason="scripts/setup.sh has not been run"
)


def test_the_demo_ends_with_a_live_engine_that_equals_a_fresh_one(tmp_path):
    """And says without a terminal what it is at: its table can only be printed at the end."""
    command = [sys.executable, "-m", "examples.demo.run", "--steps", "2", "--work", tmp_path / "demo"]
    for side in ("trainer", "engine"):
        command += [f"--{side}-python", PYTHON[side]]
    came: list[tuple[float, str]] = []
    with open(tmp_path / "errors", "w+") as errors:
        demo = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        late = threading.Timer(420 * PATIENCE, demo.terminate)  # it then ends what it started
        late.start()
        came += [(time.monotonic(), line) for line in demo.stdout]
        ended, code = time.monotonic(), demo.wait()
        late.cancel()
        errors.seek(0)
        assert code == 0, ("".join(line for _, line in came) + errors.read())[-4000:]
    said = " ".join("".join(line for _, line in came).split())  # its lines are broken where the terminal's width is
    assert "2 refits, every one verified: yes" in said and "tokens and logprobs equal" in said, said
    order = ["starting 4 trainer", "connected", "step 1: loss", "step 2: loss", "starting a fresh vLLM"]
    at = [next((when for when, line in came if words in line), ended) for words in order]
    assert at == sorted(at) and ended - at[-1] > 2.0, (
        "each is said when it happens: a fresh vLLM takes seconds to start"
    )
