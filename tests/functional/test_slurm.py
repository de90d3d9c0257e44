"""The loop under a real slurmctld and real slurmds, on three nodes of one host, and on emulated hosts. Without a Slurm: what the job of
every named config would start.

    .venvs/trainer/bin/python -m pytest -q tests/functional/test_slurm.py               # every config, dry: seconds
    .venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_slurm.py       # the jobs; root, slurm-wlm and munge
"""

import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.grpo_processes import steps_of, until
from tests.support.marks import BOTH
from tests.support.proc import PATIENCE, PYTHON, ROOT, environment
from tests.support.slurm_cluster import Cluster, missing


def slow_job(test):
    for mark in (pytest.mark.slow, BOTH, pytest.mark.skipif(missing() is not None, reason=str(missing()))):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=3) as made:
        yield made


@pytest.fixture(scope="module")
def network():
    if why := hosts.missing():
        pytest.skip(why)
    with hosts.Cluster(4, mbit=200) as made:
        yield made


@pytest.fixture(scope="module")
def apart(tmp_path_factory, network):
    """Each node is a host with a name, process ids and a network card of its own, by whose address jobs go."""
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", hosts=network.hosts) as made:
        made.env["XFER_INTERFACE"] = "nic0"
        yield made


def logs(work: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in sorted(work.glob("*.log")))


def the_gate_held(done: subprocess.CompletedProcess, work: Path) -> None:
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs(work)}"
    result = dict(line.split() for line in (work / "result").read_text().splitlines())
    assert int(result["steps"]) == 4
    assert 0 <= float(result["mean(exp|d|)-1"]) < 1e-4 and 0 <= float(result["kl"]) < 1e-6, result


def batch(cluster, work: Path, *words: str, **how) -> subprocess.CompletedProcess:
    """`sbatch` of the loop's script; `words`: options of sbatch, then of the script."""
    at = next(i for i, word in enumerate(words) if not word.startswith("--") or word == "--config")
    options = [f"--output={work}/job.log", *words[:at]]
    how |= dict(XFER_WORK=str(work), VLLM_LOGGING_LEVEL="INFO")  # whose lines are looked for
    return cluster.run("sbatch", *options, "scripts/slurm/refit.sbatch", *words[at:], timeout=900 * PATIENCE, **how)


@slow_job
def test_two_nodes_train_and_sample_and_the_gate_holds(cluster, tmp_path):
    the_gate_held(cluster.run("tests/functional/slurm_smoke.sh", str(tmp_path), timeout=900 * PATIENCE), tmp_path)


@slow_job
def test_trainers_on_two_hosts_refit_a_vllm_on_each_of_two_others(network, apart, tmp_path):
    before = [network.bytes_in(h) for h in network.hosts]
    the_gate_held(batch(apart, tmp_path, "--wait", "--nodes=4", "--config", "smoke-apart", "--verify"), tmp_path)
    came = [network.bytes_in(h) - b for h, b in zip(network.hosts, before)]
    refits = 5 * 4 * 102_848  # the first one and one a step, each of all parameters in fp32
    assert all(refits < n < 1.1 * refits for n in came[2:]), came
    said = (tmp_path / "trainer-0.log").read_text()
    assert all(f"replica {i} has joined: 1 worker on h{2 + i}" in said for i in range(2))


@slow_job
@pytest.mark.parametrize("where", ["cluster", "apart"])
def test_one_vllm_over_two_nodes(request, tmp_path, where):
    """As a replica of tp 32 lies over four: each node's workers join by themselves, and only the first answers."""
    made = request.getfixturevalue(where)
    the_gate_held(batch(made, tmp_path, "--wait", "--nodes=3", "--config", "smoke-over-nodes"), tmp_path)
    first, other = ((tmp_path / f"engine-{i}.log").read_text() for i in range(2))
    assert "rollout 0 serves version" in first and "rollout" not in other
    assert "Worker_TP0" in first and "Worker_TP1" in other


@slow_job
@pytest.mark.parametrize("every", [3, 10**6], ids=["checkpoint", "before-the-first"])
def test_a_requeued_job_goes_on_from_its_checkpoint(cluster, tmp_path, every):
    """The second start has another token and other ports, and its engines have the weights of the last checkpoint, if there is one."""

    def told(*command: str) -> str:
        return cluster.run(*command, check=True).stdout

    def state() -> str:
        return f"{told('scontrol', 'show', 'job')}\n{logs(tmp_path)}"

    def within(condition, what: str, seconds: float = 400):
        return until(condition, what, seconds=seconds, told=state)

    curve = partial(steps_of, tmp_path / "curve.jsonl")
    words = f"--parsable --nodes=2 --config smoke --steps 100000 --save-every {every} --prompts 4 --answers 4"
    done = batch(cluster, tmp_path, *words.split(), check=True)
    job = done.stdout.strip()
    try:
        within(lambda: len(curve()) > 7, "eight steps")
        told("scontrol", "requeue", job)
        within(lambda: "JobState=PENDING" in told("scontrol", "show", "job", job), "the job is queued again", 120)
        latest = tmp_path / "checkpoints/latest"
        before, saved = len(curve()), int(latest.read_text()) if latest.exists() else 0
        assert saved >= 6 if every == 3 else not saved
        told("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes
        rows = within(lambda: curve()[before + 5 :] and curve()[before:], "six steps more")
        want = [(s, f"{s}@{saved}" if saved else str(s)) for s in range(saved, saved + 6)]
        assert [(r.step, r.version) for r in rows[:6]] == want, "a step is left out, or made twice under one name"
        assert "Restarts=1" in told("scontrol", "show", "job", job)
    finally:
        told("scancel", job)
        within(lambda: not told("squeue", "-h", "-j", job).strip(), "the job has ended", 120)


@slow_job
def test_a_job_of_too_few_nodes_says_how_many_it_takes(cluster, tmp_path):
    done = batch(cluster, tmp_path, "--wait", "--nodes=1", "--config", "30b-ep4tp2dp2-to-tp4dp4")
    says = "2 nodes of trainers and 2 of engines, the job has 1: sbatch --nodes=4"
    assert done.returncode == 2 and says in (tmp_path / "job.log").read_text()


# -- without a Slurm


def configs() -> list[str]:
    command = ["bash", "-c", "source scripts/slurm/configs.sh; configs"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()


def dry(name: str, models: str = "/models") -> subprocess.CompletedProcess:
    command = ["bash", "scripts/slurm/refit.sbatch", "--config", name, "--dry-run", "--steps", "3"]
    env = environment(TRAINER_PYTHON=sys.executable, ENGINE_PYTHON=sys.executable, XFER_MODELS=models)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60 * PATIENCE)


def options(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        if word == "-w" or word.startswith("--"):
            name, _, value = word.partition("=")
            found.setdefault(name, []).extend([value] if value else [])
        elif found:
            found[name].append(word)
    return found


@BOTH
def test_what_every_config_would_start_is_what_its_name_says():
    """Shapes of both sides against the name, nodes against shapes, a URL for each replica, and options that train.py takes."""
    asked, built = [], []
    for name in configs():
        done = dry(name)
        assert done.returncode == 0, done.stderr
        (engine,) = (shlex.split(x) for x in done.stdout.splitlines() if "engine.sh" in x)
        (trainer,) = (shlex.split(x) for x in done.stdout.splitlines() if "trainer.sh" in x)
        at = trainer.index("scripts/slurm/trainer.sh")
        nodes, per_node, *words = trainer[at + 1 :]
        asked.append(words)
        given, world = options(words), int(nodes) * int(per_node)
        sizes = {k: int(given[f"--{k}"][0]) for k in ("tp", "pp", "ep", "etp")}
        assert world % (sizes["tp"] * sizes["pp"]) == 0 == world % (sizes["ep"] * sizes["etp"] * sizes["pp"])
        of_engines, of_trainers = options(engine), options(trainer[:at])
        over = 4 if name == "deepseek_v3-pp16ep16-to-tp32dp8" else 2 if name == "smoke-over-nodes" else 1
        replicas, rest = divmod(int(of_engines["--ntasks"][0]), over)
        a_node = max(1, replicas * over // int(of_engines["--nodes"][0]))
        assert not rest and int(of_engines["--ntasks-per-node"][0]) == a_node
        assert len(set(given["--rollout"])) == replicas and given["--steps"][-1] == "3"
        assert not set(of_engines["-w"][0].split(",")) & set(of_trainers["-w"][0].split(","))
        assert len(of_engines["-w"][0].split(",")) == int(of_engines["--nodes"][0])
        if name.startswith("smoke"):
            continue
        shapes = (re.findall("([a-z]+)([0-9]+)", part) for part in name.split("-", 1)[1].split("-to-"))
        said, of_engine = ({k: int(v) for k, v in shape} for shape in shapes)
        assert {k: v for k, v in sizes.items() if k in said} == {k: v for k, v in said.items() if k in sizes}
        assert all(v == 1 for k, v in sizes.items() if k not in said)
        if "dp" in said and "ep" not in said:
            assert world == sizes["tp"] * sizes["pp"] * said["dp"]
        assert replicas == of_engine.get("dp", 1), name
        assert "/".join(given["--model"][0].split("/")[:2]) == "/models"
        assert float(given["--lr"][0]) < 1e-4 and given["--gate"] == ["inf"] and "--save" not in given  # no toy's
        shape = json.loads((ROOT / f"xfer/cli/examples/{given['--model'][0].split('/')[2].lower()}.json").read_text())
        built.append((shape["num_hidden_layers"], sizes["pp"], given.get("--provider", [])))
    assert len(asked) >= 16
    for refused, why in (
        (dry("no-such"), "no config 'no-such'; there are: smoke"),
        (dry("30b-fp8-ep8pp2-to-tp2dp8"), "take the bf16 row, '30b-ep8pp2-to-tp2dp8'"),
        (dry("4b-dp8-to-dp8", models=""), "set XFER_MODELS"),
    ):
        assert refused.returncode == 2 and why in refused.stderr and not refused.stdout, refused
    done = subprocess.run(
        [PYTHON["trainer"], "-c", CHECK], input=json.dumps([asked, built]), cwd=ROOT, env=environment(), capture_output=True,
        text=True, timeout=120 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


CHECK = """
import json, sys
import torch
from examples.grpo.train import arguments, field
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
asked, built = json.load(sys.stdin)
for words in asked:
    arguments().parse_args(words)
for layers, pp, more in built:
    plain = dict(num_layers=layers, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=pp)
    config = TransformerConfig(**plain, pipeline_dtype=torch.bfloat16, **dict(map(field, more)))
    stages = [get_num_layers_to_build(config, pp_rank=i) for i in range(pp)]
    assert sum(stages) == layers and min(stages) > 0, (stages, layers)
"""
"""Whether train.py takes the options, and Megatron each model's layers over that many stages, by its own arithmetic."""
