"""The loop against two `vllm serve` processes: one is killed, the other goes on; it is started again and rejoins.

    .venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_grpo_http.py

The loop is the example's own, started by torchrun; each step's samples must carry the step's version, or it ends.
"""

import secrets
from pathlib import Path

import pytest

from examples.common.ports import free_port
from examples.grpo import model
from examples.grpo.replicas import healthy
from tests.support.grpo_processes import Group, Steps, torchrun, until
from tests.support.proc import PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(Path(p).exists() for p in PYTHON.values()), reason="scripts/setup.sh has not been run"),
]


def test_a_killed_replica_rejoins(tmp_path):
    model.write("dense", str(tmp_path / "model"))
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{p}" for p in ports]
    groups: list[Group] = []

    def start(i: int) -> Group:
        command = ["examples/grpo/serve.sh", str(tmp_path / "model"), str(ports[i]), "--dtype", "float32"]
        command += ["--num-gpu-blocks-override", "600"]  # of 1 GiB each server would touch all
        groups.append(Group(f"serve{i}", command, tmp_path))
        return groups[-1]

    try:
        servers = [start(0), start(1)]
        until(lambda: all(map(healthy, urls)), "both servers are up", *servers)
        flags = f"--model {tmp_path}/model --tp 2 --pp 1 --serve {urls[0]} --serve {urls[1]} --steps 100000"
        flags += f" --rendezvous tcp://127.0.0.1:{free_port()}"
        loop = Group("loop", torchrun(free_port(), 2, flags), tmp_path, XFER_TOKEN=secrets.token_hex(16))
        groups.append(loop)
        steps = Steps(loop)

        def away(n: int, more: int, since: int):
            return lambda: sum(a == n for _, a in steps.read()[since:]) >= more

        until(away(0, 3, 0), "three steps with both", loop, *servers)
        before = len(steps.seen)
        servers[1].kill()
        until(away(1, 3, before), "three steps without the dead one", loop, servers[0])
        servers[1] = start(1)
        until(lambda: healthy(urls[1]), "it is up again", *servers)
        since = len(steps.read())
        until(away(0, 3, since), "three steps with both again", loop, *servers)
        assert steps.numbers == list(range(len(steps.seen)))  # none was left out
    finally:
        for g in reversed(groups):
            g.kill()
