"""Trainers are killed, and started again from their checkpoint: they meet the rollout that kept running, and go on.

.venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_grpo_restart.py
"""

import secrets
from pathlib import Path

import pytest

from examples.grpo import model
from examples.grpo.gate import read_curve
from tests.support.grpo_processes import Group, Steps, torchrun, until
from tests.support.proc import PYTHON
from xfer.testing.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(Path(p).exists() for p in PYTHON.values()), reason="scripts/setup.sh has not been run"),
]


def test_trainers_come_back_to_a_rollout_that_kept_running(tmp_path):
    model.write("dense", str(tmp_path / "model"))
    token = dict(XFER_TOKEN=secrets.token_hex(16))
    rendezvous, listen = f"tcp://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = f"--model {tmp_path}/model --tp 2 --pp 1 --rollout http://{listen} --rendezvous {rendezvous} --save {tmp_path}/saved"
    flags += f" --save-every 3 --curve {tmp_path}/curve"
    command = f"-m examples.grpo.rollout --model {tmp_path}/model --tp 1 --rendezvous {rendezvous} --listen {listen}"
    groups = [Group("rollout", [PYTHON["engine"], *command.split()], tmp_path, **token)]
    try:
        groups.append(Group("first", torchrun(free_port(), 2, f"{flags} --steps 100000"), tmp_path, **token))
        first = Steps(groups[-1])
        until(lambda: len(first.numbers) > 4, "five steps", *groups)
        groups[-1].kill()
        saved = int((tmp_path / "saved/latest").read_text())
        assert saved >= 3 and first.numbers[:5] == list(range(5))

        groups[1] = Group("second", torchrun(free_port(), 2, f"{flags} --steps {saved + 3}"), tmp_path, **token)
        second = Steps(groups[-1])
        until(lambda: len(second.numbers) == 3, "three steps more", groups[0])
        assert second.numbers == [saved, saved + 1, saved + 2]
        assert groups[-1].process.wait(120) == 0
        rows = read_curve(tmp_path / "curve")
        assert [r.version for r in rows[-3:]] == [
            f"{i}@{saved}" for i in second.numbers
        ]  # a version is one set of weights
        assert all(r.error < 1.0001 for r in rows)
        assert groups[0].process.poll() is None
    finally:
        for g in reversed(groups):
            g.kill()
