"""Real vLLM engines in the processes that torchrun starts (distributed_executor_backend="external_launcher", as TRL and verl have them)."""

import secrets

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support.proc import Family  # noqa: E402
from tests.support.refit_job import Trainers, good  # noqa: E402


@pytest.mark.slow
def test_each_process_of_a_launcher_that_holds_a_whole_engine_is_a_replica(tmp_path):
    toy.write_checkpoint("qwen3", tmp_path / "model", seed=1)
    token, rendezvous = secrets.token_hex(16), f"tcp://127.0.0.1:{free_port()}"
    with Family(tmp_path) as family:
        engines = family.ranks("external_main", 2, "engine", "engine", XFER_TOKEN=token)
        trainers = Trainers(family, 1, token)
        engines.ask("start", "started", model=str(tmp_path / "model"))
        trainers.build(toy.config("qwen3"))
        for replica, engine in enumerate(engines):
            engine.ask("serve", "serving", rendezvous=rendezvous, replica=replica)
        truth = engines.ask("observe", "observed")
        good(trainers.connect(rendezvous, replicas=2))
        for seed in (2, 1):
            report = good(trainers.refit(seed, verify=True))
            assert report["verified"] and report["committed"] == [True, True]
            now = engines.ask("observe", "observed")
            same = [all(n[k] == t[k] for k in ("outputs", "checksums")) for n, t in zip(now, truth, strict=True)]
            assert same == [seed == 1] * 2
