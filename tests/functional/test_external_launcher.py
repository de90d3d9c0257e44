"""vLLM engines in the processes that torchrun starts (distributed_executor_backend="external_launcher", as TRL and verl have them):
real vLLM, plain trainers.
"""

import secrets

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support.proc import Family  # noqa: E402
from tests.support.refit_job import Trainers, good  # noqa: E402
from tests.support.refit_stage import on_all  # noqa: E402


def test_each_process_of_a_launcher_that_holds_a_whole_engine_is_a_replica(tmp_path):
    toy.write_checkpoint("qwen3", tmp_path / "model", seed=1)
    token, rendezvous = secrets.token_hex(16), f"tcp://127.0.0.1:{free_port()}"
    job = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), XFER_TOKEN=token)
    with Family(tmp_path) as family:
        engines = [
            family.start(f"engine{r}", "engine", "external_main", RANK=str(r), LOCAL_RANK=str(r), **job)
            for r in range(2)
        ]
        trainers = Trainers(family, 1, token)
        on_all(engines, "started", do="start", model=str(tmp_path / "model"))
        trainers.build(toy.config("qwen3"))
        for replica, engine in enumerate(engines):
            engine.say(do="serve", rendezvous=rendezvous, replica=replica)
            engine.expect("serving")
        truth = on_all(engines, "observed", do="observe")
        good(trainers.connect(rendezvous, replicas=2))
        for seed in (2, 1):
            report = good(trainers.refit(seed, verify=True))
            assert report["verified"] and report["committed"] == [True, True]
            now = on_all(engines, "observed", do="observe")
            same = [all(n[k] == t[k] for k in ("outputs", "checksums")) for n, t in zip(now, truth, strict=True)]
            assert same == [seed == 1] * 2
