"""The loop with Ray actors, by its one command: versions, gate, reward, and not a byte of a refit in Ray's object store.

    .venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_grpo_ray.py

Wants ray (with grpcio) in both environments, or in a folder that PYTHONPATH names.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from examples.grpo.gate import read_curve
from tests.support.proc import PATIENCE, PYTHON, ROOT, environment

STEPS = 4
PATHS = ":".join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)


def _without_ray() -> list[str]:
    """Environments that cannot import it."""
    return [
        side
        for side, python in PYTHON.items()
        if subprocess.run([python, "-c", "import grpc, ray"], env={**os.environ, "PYTHONPATH": PATHS}, capture_output=True).returncode
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not all(Path(p).exists() for p in PYTHON.values()), reason="scripts/setup.sh has not been run")
def test_weights_never_pass_through_the_object_store(tmp_path):
    """The driver reads Ray's own count around every refit, after a probe of 1 MiB has shown that it counts; it stops at the first
    byte. What is asserted here is that it got to its end and counted every refit."""
    if gone := _without_ray():
        pytest.skip(f"ray and grpcio are not importable in the environments {gone}; a folder in PYTHONPATH will do")
    command = (
        f"-m examples.grpo.ray_main --engine-python {PYTHON['engine']} --work {tmp_path} --steps {STEPS} --engine-tp 1"
    )
    done = subprocess.run(
        [PYTHON["trainer"], *command.split()], cwd=ROOT, env=environment(PYTHONPATH=PATHS), capture_output=True, text=True,
        timeout=900 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"{STEPS + 1} refits put 0 bytes into Ray's object store" in done.stdout
    assert len(re.findall(r"^step .* reward .* KL ", done.stdout, re.M)) == STEPS
    rows = read_curve(tmp_path / "curve.jsonl")
    assert [r.version for r in rows] == [str(i) for i in range(STEPS)]
    assert all(1 <= r.error < 1.0001 and r.kl >= 0 for r in rows), rows
