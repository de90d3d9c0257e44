"""Processes of the loop are killed and started again: trainers go on from their checkpoint, and a replica rejoins."""

import secrets
from pathlib import Path

import pytest

from examples.common.ports import free_port
from examples.grpo import model
from examples.grpo.replicas import healthy
from tests.support.grpo_processes import Groups, Steps, steps_of, torchrun, until
from tests.support.marks import BOTH
from tests.support.proc import PYTHON

pytestmark = [pytest.mark.slow, BOTH]


@pytest.fixture
def groups(tmp_path):
    model.write("dense", str(tmp_path / "model"))
    with Groups(tmp_path, XFER_TOKEN=secrets.token_hex(16)) as made:
        yield made


def rollout(work: Path, rendezvous: str, port: int, replica: int = 0) -> list[str]:
    words = f"--model {work}/model --tp 1 --rendezvous {rendezvous} --listen 127.0.0.1:{port} --replica {replica}"
    return [PYTHON["engine"], "-m", "examples.grpo.rollout", *words.split()]


def server(work: Path, port: int) -> list[str]:
    more = "--dtype float32 --num-gpu-blocks-override 600"  # of 1 GiB each server would touch all
    return ["examples/grpo/serve.sh", f"{work}/model", str(port), *more.split()]


def loop(work: Path, rendezvous: str, flags: str) -> list[str]:
    common = f"--model {work}/model --tp 2 --pp 1 --rendezvous {rendezvous} --curve {work}/curve"
    return torchrun(free_port(), 2, f"{common} {flags}")


def test_trainers_come_back_to_a_rollout_that_kept_running(groups, tmp_path):
    rendezvous, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    flags = f"--rollout http://127.0.0.1:{port} --save {tmp_path}/saved --save-every 3 --steps"
    engine = groups.start("rollout", rollout(tmp_path, rendezvous, port))
    first = Steps(groups.start("first", loop(tmp_path, rendezvous, f"{flags} 100000")))
    until(lambda: len(first.numbers) > 4, "five steps", engine, first.loop)
    first.loop.kill()
    saved = int((tmp_path / "saved/latest").read_text())
    assert saved >= 3 and first.numbers[:5] == list(range(5))

    second = Steps(groups.start("second", loop(tmp_path, rendezvous, f"{flags} {saved + 3}")))
    until(lambda: len(second.numbers) == 3, "three steps more", engine)
    assert second.numbers == [saved, saved + 1, saved + 2]
    assert second.loop.process.wait(120) == 0 and engine.process.poll() is None
    rows = steps_of(tmp_path / "curve")
    assert [r.version for r in rows[-3:]] == [f"{i}@{saved}" for i in second.numbers], "a version is one set of weights"


@pytest.mark.parametrize("kind", ["rollout", "serve"])
def test_a_killed_replica_comes_back(groups, tmp_path, kind):
    """Two replicas of rollout.py, or two `vllm serve`."""
    rendezvous, ports = f"tcp://127.0.0.1:{free_port()}", [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{p}" for p in ports]

    def start(i: int):
        command = server(tmp_path, ports[i]) if kind == "serve" else rollout(tmp_path, rendezvous, ports[i], i)
        return groups.start(f"replica{i}", command)

    replicas = [start(0), start(1)]
    if kind == "serve":
        until(lambda: all(map(healthy, urls)), "both servers are up", *replicas)
    flags = "--steps 100000 " + " ".join(f"--{kind} {url}" for url in urls)
    steps = Steps(groups.start("loop", loop(tmp_path, rendezvous, flags)))

    def wait(away: int, what: str, *processes) -> None:
        since = len(steps.read())
        until(lambda: sum(n == away for _, n in steps.read()[since:]) >= 3, what, steps.loop, *processes)

    wait(0, "three steps with both", *replicas)
    replicas[1].kill()
    wait(1, "three steps without the dead one", replicas[0])
    replicas[1] = start(1)
    if kind == "serve":
        until(lambda: healthy(urls[1]), "it is up again", *replicas)
    wait(0, "three steps with both again", *replicas)
    numbers = steps.numbers
    assert numbers == list(range(len(numbers))), "no step was left out"
    assert steps_of(tmp_path / "curve")
