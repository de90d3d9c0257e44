"""The loop with Ray actors: versions, gate, reward, and not a byte of a refit in Ray's object store. It wants ray (with grpcio) in both
environments, or in a folder that PYTHONPATH names."""

import importlib
import os
import subprocess
import sys
from types import ModuleType

import pytest

from tests.support.grpo_processes import trained
from tests.support.marks import BOTH
from tests.support.proc import PYTHON, ROOT

STEPS = 4


@pytest.fixture
def ray_main(monkeypatch):
    """The module, with a Ray that says how it was started; as the real one, it joins no cluster and takes its CPUs, too."""
    started, found = [], []

    def init(address=None, **options):
        if address == "auto" and not (found or os.environ.get("RAY_ADDRESS")):
            raise ConnectionError("no cluster")
        if address != "local" and "num_cpus" in options:
            raise ValueError("num_cpus must not be given to a cluster that runs")
        started.append((address, options))

    parts = {"ray": dict(init=init), "ray.util": {}, "ray.util.placement_group": dict(placement_group=None)}
    parts["ray.util.scheduling_strategies"] = dict(PlacementGroupSchedulingStrategy=None)
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "examples.grpo.ray_main", raising=False)
    yield importlib.import_module("examples.grpo.ray_main"), started, found
    sys.modules.pop("examples.grpo.ray_main", None)


@pytest.mark.parametrize("address", [None, "local", "10.0.0.1:6379"])
@pytest.mark.parametrize("runs", [False, True])
def test_a_cluster_that_is_there_is_joined_and_else_one_is_started(ray_main, monkeypatch, address, runs):
    module, started, found = ray_main
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    found += [1] * runs
    module.start_ray(4)
    (where, options), own = started[0], address == "local" or address is None and not runs
    assert len(started) == 1 and (where, options.get("num_cpus")) == (("local", 4) if own else ("auto", None))
    assert options.get("log_to_driver", True), "what an actor raised would be seen nowhere"


@pytest.mark.parametrize("path, gpus", [(None, False), ("/elsewhere", True)])
def test_actors_find_this_repository_and_compile_where_there_are_gpus(ray_main, monkeypatch, path, gpus):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path:
        monkeypatch.setenv("PYTHONPATH", path)
    given = ray_main[0].variables(gpus)
    assert given["PYTHONPATH"].split(os.pathsep) == [os.getcwd(), *([path] if path else [])]
    assert ("TORCHDYNAMO_DISABLE" in given) == ("XFER_CPU_RESIDENT" in given) == (not gpus)


PATHS = ":".join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)


def _without_ray() -> list[str]:
    """Environments that cannot import it."""
    env = {**os.environ, "PYTHONPATH": PATHS}
    asked = {side: [python, "-c", "import grpc, ray"] for side, python in PYTHON.items()}
    return [side for side, words in asked.items() if subprocess.run(words, env=env, capture_output=True).returncode]


def _version(python: str) -> str:
    return subprocess.run([python, "-V"], capture_output=True, text=True, timeout=60).stdout.rpartition(".")[0]


def test_engines_with_another_version_of_python_are_refused(ray_main, tmp_path):
    ray_main[0].refuse_another_version(sys.executable)
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    with pytest.raises(SystemExit, match="Ray runs one version of Python: this one is 3.*python is 3.9"):
        ray_main[0].refuse_another_version(str(other))


@pytest.mark.slow
@BOTH
def test_weights_never_pass_through_the_object_store(tmp_path):
    """The driver reads Ray's own count around every refit and stops at the first byte. Here it got to its end and counted every refit."""
    if gone := _without_ray():
        pytest.skip(f"ray and grpcio are not importable in the environments {gone}; a folder in PYTHONPATH will do")
    if len({_version(python) for python in PYTHON.values()}) > 1:
        pytest.skip("Ray runs one version of Python: TRAINER=0.16.1 scripts/setup.sh makes both environments with 3.11")
    words = f"--engine-python {PYTHON['engine']} --work {tmp_path} --steps {STEPS} --engine-tp 1".split()
    command = [PYTHON["trainer"], "-m", "examples.grpo.ray_main", *words]
    rows, said = trained("ray", command, tmp_path, PYTHONPATH=PATHS)
    assert len(rows) == STEPS and f"{STEPS + 1} refits put 0 bytes into Ray's object store" in said
