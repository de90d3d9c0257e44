"""The loop as its documentation starts it: torchrun and HTTP by examples/grpo/run.sh, or actors of Ray; and processes of it that are
killed and started again. Under Slurm: test_slurm.py."""

import json
import os
import re
import secrets
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.common.ports import free_port
from examples.grpo import model
from examples.grpo.gate import Row
from examples.grpo.replicas import healthy
from tests.support.grpo_processes import Group, printed, steps_of, trained, until
from tests.support.marks import BOTH
from tests.support.proc import PYTHON, ROOT

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


def test_weights_never_pass_through_rays_object_store(tmp_path):
    """The driver reads Ray's own count around every refit and stops at the first byte. Here it got to its end and counted every refit. Ray
    (with grpcio) is in both environments, or in a folder that PYTHONPATH names."""
    path, steps = ":".join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p), 4
    ask = ["-c", "import grpc, ray, sys; print(sys.version_info[:2])"]
    how = dict(env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    found = {subprocess.run([python, *ask], **how).stdout for python in PYTHON.values()}
    if len(found) > 1 or "" in found:
        pytest.skip("wants ray, grpcio and one version of Python in both environments: TRAINER=0.16.1 scripts/setup.sh")
    words = f"--engine-python {PYTHON['engine']} --work {tmp_path} --steps {steps} --engine-tp 1".split()
    command = [PYTHON["trainer"], "-m", "examples.grpo.ray_main", *words]
    rows, said = trained("ray", command, tmp_path, PYTHONPATH=path)
    assert len(rows) == steps and f"{steps + 1} refits put 0 bytes into Ray's object store" in said


# ---- processes that come back


@pytest.fixture
def start(tmp_path):
    """Starts a program of the job. All of them end with the test."""
    model.write("dense", str(tmp_path / "model"))
    token = secrets.token_hex(16)
    with ExitStack() as ends:

        def start(name: str, command: list[str]) -> Group:
            group = Group(name, command, tmp_path, XFER_TOKEN=token)
            ends.callback(group.kill)
            return group

        yield start


def rollout(work: Path, rendezvous: str, port: int, replica: int = 0) -> list[str]:
    words = f"--model {work}/model --tp 1 --rendezvous {rendezvous} --listen 127.0.0.1:{port} --replica {replica}"
    return [PYTHON["engine"], "-m", "examples.grpo.rollout", *words.split()]


def server(work: Path, port: int) -> list[str]:
    more = "--dtype float32 --num-gpu-blocks-override 600"  # of 1 GiB each server would touch all
    return ["examples/grpo/serve.sh", f"{work}/model", str(port), *more.split()]


def loop(work: Path, rendezvous: str, flags: str) -> list[str]:
    """Two ranks."""
    command = f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()} -m examples.grpo.stand_ins examples.grpo.train"
    command += f" --model {work}/model --tp 2 --pp 1 --rendezvous {rendezvous} --curve {work}/curve {flags}"
    return [PYTHON["trainer"], *command.split()]


def test_trainers_come_back_to_a_rollout_that_kept_running(start, tmp_path):
    rendezvous, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    flags = f"--rollout http://127.0.0.1:{port} --save {tmp_path}/saved --save-every 3 --steps"
    engine = start("rollout", rollout(tmp_path, rendezvous, port))
    first = start("first", loop(tmp_path, rendezvous, f"{flags} 100000"))
    until(lambda: len(printed(first)) > 4, "five steps", engine, first)
    first.kill()
    saved = int((tmp_path / "saved/latest").read_text())
    assert saved >= 3 and [step for step, _ in printed(first)][:5] == list(range(5))

    second = start("second", loop(tmp_path, rendezvous, f"{flags} {saved + 3}"))
    until(lambda: len(printed(second)) == 3, "three steps more", engine)
    assert [step for step, _ in printed(second)] == [saved, saved + 1, saved + 2]
    assert second.process.wait(120) == 0 and engine.process.poll() is None
    versions = [r.version for r in steps_of(tmp_path / "curve")[-3:]]
    assert versions == [f"{saved + i}@{saved}" for i in range(3)], "a version is one set of weights"


@pytest.mark.parametrize("kind", ["rollout", "serve"])
def test_a_killed_replica_comes_back(start, tmp_path, kind):
    """Two replicas of rollout.py, or two `vllm serve`."""
    rendezvous, ports = f"tcp://127.0.0.1:{free_port()}", [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{p}" for p in ports]

    def replica(i: int) -> Group:
        command = server(tmp_path, ports[i]) if kind == "serve" else rollout(tmp_path, rendezvous, ports[i], i)
        return start(f"replica{i}", command)

    replicas = [replica(0), replica(1)]
    if kind == "serve":
        until(lambda: all(map(healthy, urls)), "both servers are up", *replicas)
    flags = "--steps 100000 " + " ".join(f"--{kind} {url}" for url in urls)
    trainers = start("loop", loop(tmp_path, rendezvous, flags))

    def wait(away: int, what: str, *processes) -> None:
        since = len(printed(trainers))
        until(lambda: sum(n == away for _, n in printed(trainers)[since:]) >= 3, what, trainers, *processes)

    wait(0, "three steps with both", *replicas)
    replicas[1].kill()
    wait(1, "three steps without the dead one", replicas[0])
    replicas[1] = replica(1)
    if kind == "serve":
        until(lambda: healthy(urls[1]), "it is up again", *replicas)
    wait(0, "three steps with both again", *replicas)
    steps = [step for step, _ in printed(trainers)]
    assert steps == list(range(len(steps))), "no step was left out"
    assert steps_of(tmp_path / "curve")
