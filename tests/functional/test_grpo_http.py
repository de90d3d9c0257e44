"""The loop against two `vllm serve` processes: one is killed, the other goes on; it is started again and rejoins.

    .venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_grpo_http.py

The loop is the example's own, started by torchrun; each step's samples must carry the step's version, or it ends.
"""

import os
import queue
import re
import secrets
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from examples.grpo import model
from examples.grpo.replicas import healthy
from tests.support.proc import PATIENCE, PYTHON, ROOT, environment
from xfer.testing.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(Path(p).exists() for p in PYTHON.values()), reason="scripts/setup.sh has not been run"),
]


class Group:
    """A process, and all that it starts, with its output in a log and its lines in a queue."""

    def __init__(self, name: str, command: list[str], work: Path, **env: str):
        self.log = work / f"{name}.log"
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(ENGINE_PYTHON=PYTHON["engine"], **env), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self.log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                self.lines.put(line)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(20)


def until(condition, what: str, *groups: Group, seconds: float = 300) -> None:
    end = time.monotonic() + seconds * PATIENCE
    while not condition():
        dead = [g for g in groups if g.process.poll() is not None]
        if dead or time.monotonic() > end:
            raise AssertionError(
                f"{what}: not within {seconds} s\n" + "\n".join(g.log.read_text()[-4000:] for g in groups)
            )
        time.sleep(0.1)


def test_a_killed_replica_rejoins(tmp_path):
    model.write("dense", str(tmp_path / "model"))
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{p}" for p in ports]
    groups: list[Group] = []

    def start(i: int) -> Group:
        command = ["examples/grpo/serve.sh", str(tmp_path / "model"), str(ports[i]), "--dtype", "float32"]
        groups.append(Group(f"serve{i}", command, tmp_path))
        return groups[-1]

    try:
        servers = [start(0), start(1)]
        until(lambda: all(map(healthy, urls)), "both servers are up", *servers)
        flags = f"--nproc-per-node 2 --master-port {free_port()} -m examples.grpo.train --model {tmp_path}/model --tp 2 --pp 1"
        flags += f" --serve {urls[0]} --serve {urls[1]} --rendezvous tcp://127.0.0.1:{free_port()} --steps 100000"
        command = [PYTHON["trainer"], "-m", "torch.distributed.run", *flags.split()]
        loop = Group("loop", command, tmp_path, XFER_TOKEN=secrets.token_hex(16))
        groups.append(loop)
        steps: list[tuple[int, int]] = []  # number, replicas away

        def read() -> bool:
            while not loop.lines.empty():
                if found := re.match(r"step +(\d+) .*? ms(?:  (\d) replicas away)?", loop.lines.get()):
                    steps.append((int(found[1]), int(found[2] or 0)))
            return bool(steps)

        def away(n: int, more: int, since: int):
            return lambda: read() and sum(a == n for _, a in steps[since:]) >= more

        until(away(0, 3, 0), "three steps with both", loop, *servers)
        before = len(steps)
        servers[1].kill()
        until(away(1, 3, before), "three steps without the dead one", loop, servers[0])
        servers[1] = start(1)
        until(lambda: healthy(urls[1]), "it is up again", *servers)
        since = len(steps)
        until(away(0, 3, since), "three steps with both again", loop, *servers)
        assert [n for n, _ in steps] == list(range(len(steps)))  # none was left out
    finally:
        for g in reversed(groups):
            g.kill()
