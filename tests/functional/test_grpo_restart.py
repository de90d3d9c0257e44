"""Trainers are killed, and started again from their checkpoint: they meet the rollout that kept running, and go on. And a rollout
is killed: the other goes on, and it comes back.

    .venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_grpo_restart.py
"""

import secrets
from pathlib import Path

import pytest

from examples.common.ports import free_port
from examples.grpo import model
from examples.grpo.gate import read_curve
from tests.support.grpo_processes import Group, Steps, torchrun, until
from tests.support.proc import PYTHON

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


def test_a_killed_rollout_comes_back(tmp_path):
    """Two replicas of rollout.py. Each step's samples must carry the step's version, or the loop ends."""
    model.write("dense", str(tmp_path / "model"))
    token = dict(XFER_TOKEN=secrets.token_hex(16))
    rendezvous, listen = f"tcp://127.0.0.1:{free_port()}", [f"127.0.0.1:{free_port()}" for _ in range(2)]
    groups: list[Group] = []

    def start(i: int) -> Group:
        command = f"-m examples.grpo.rollout --model {tmp_path}/model --tp 1 --rendezvous {rendezvous} --listen {listen[i]} --replica {i}"
        groups.append(Group(f"rollout{i}", [PYTHON["engine"], *command.split()], tmp_path, **token))
        return groups[-1]

    try:
        rollouts = [start(0), start(1)]
        flags = (
            f"--model {tmp_path}/model --tp 2 --pp 1 --rendezvous {rendezvous} --steps 100000 --curve {tmp_path}/curve"
        )
        flags += "".join(f" --rollout http://{at}" for at in listen)
        loop = Group("loop", torchrun(free_port(), 2, flags), tmp_path, **token)
        groups.append(loop)
        steps = Steps(loop)

        def away(n: int, more: int, since: int):
            return lambda: sum(a == n for _, a in steps.read()[since:]) >= more

        until(away(0, 3, 0), "three steps with both", loop, *rollouts)
        since = len(steps.seen)
        rollouts[1].kill()
        until(away(1, 3, since), "three steps without the dead one", loop, rollouts[0])
        since = len(steps.read())
        rollouts[1] = start(1)
        until(away(0, 3, since), "three steps with both again", loop, *rollouts)
        assert steps.numbers == list(range(len(steps.seen)))  # none was left out
        assert all(r.error < 1.0001 for r in read_curve(tmp_path / "curve")[:-1])
    finally:
        for g in reversed(groups):
            g.kill()
