"""The two-node smoke run under a real slurmctld and real slurmds: submitted, waited for, judged by the gate's own result.

.venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_slurm.py
"""

import subprocess
from pathlib import Path

import pytest

from tests.support.proc import PATIENCE, PYTHON, ROOT
from tests.support.slurm_cluster import Cluster, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(Path(p).exists() for p in PYTHON.values()), reason="scripts/setup.sh has not been run"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as made:
        made.env |= {f"{side.upper()}_PYTHON": python for side, python in PYTHON.items()}
        yield made


def logs(work: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in sorted(work.glob("*.log")))


def test_two_nodes_train_and_sample_and_the_gate_holds(cluster, tmp_path):
    done = subprocess.run(
        [ROOT / "tests/functional/slurm_smoke.sh", tmp_path],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=900 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
    result = dict(line.split() for line in (tmp_path / "result").read_text().splitlines())
    assert int(result["steps"]) == 4
    assert 0 <= float(result["mean(exp|d|)-1"]) < 1e-4 and 0 <= float(result["kl"]) < 1e-6, result


@pytest.mark.parametrize(
    "words, says",
    [
        (["--config", "no-such"], "no config 'no-such'; there are: smoke"),
        (
            ["--config", "30b-ep4tp2dp2-to-tp4dp4"],
            "2 nodes of trainers and 2 of engines, the job has 1: sbatch --nodes=4",
        ),
    ],
)
def test_a_job_that_cannot_work_says_what_to_change(cluster, tmp_path, words, says):
    command = ["sbatch", "--wait", "--nodes=1", f"--output={tmp_path}/job.log", "scripts/slurm/refit.sbatch", *words]
    done = subprocess.run(
        command, env={**cluster.env, "XFER_WORK": str(tmp_path)}, cwd=ROOT, capture_output=True, timeout=120 * PATIENCE
    )
    assert done.returncode == 2 and says in (tmp_path / "job.log").read_text()
