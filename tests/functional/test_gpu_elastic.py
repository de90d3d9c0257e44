"""A vLLM engine on GPUs that joins while the trainers are inside a step: another engine gives it its weights, by mapped memory. Every byte
is compared with what vLLM's own loader makes of the weights.
"""

from __future__ import annotations

import pytest

from examples.common.ports import free_port
from tests.support.gpu_job import SHARED, Job, config, gpus
from tests.support.refit_job import until

pytest.importorskip("vllm")
GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]


@pytest.mark.skipif(GPUS < 3 and not SHARED, reason="needs three GPUs, or XFER_SHARE_GPUS=1")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_engine_that_joins_while_trainers_are_inside_a_step_holds_every_byte_of_another_engine(tmp_path, family):
    with Job(tmp_path, config(family)) as job:
        donor, joiner = job.engine("donor", [0], eager=True), job.engine("joiner", [1], eager=True)
        job.start_trainers([2])
        job.plain()
        for e in (donor, joiner):
            e.started()
        at = f"tcp://127.0.0.1:{free_port()}"
        donor.ask("serve", "serving", rendezvous=at, replica=0)
        job.good("connect", "connected", rendezvous=at, replicas=2, wait=False)
        donor.ask("ready", "ready")
        assert job.refit(1, verify=True, version=1, min_replicas=1)["committed"] == [True, False]
        job.good("set", "set", seed=2)  # as a step does; from here on the trainers call nothing
        joiner.ask("serve", "serving", rendezvous=at, replica=1)
        joiner.ask("ready", "ready")
        until(lambda: joiner.ask("state", "state")["version"] == 1, 60, "another engine's weights come")
        for e in (donor, joiner):
            assert e.wrong(config=job.config, seed=1) == [[]]
        assert donor.observe()["outputs"] == joiner.observe()["outputs"]
        assert all(job.refit(2, verify=True, version=2)["committed"])
        for e in (donor, joiner):
            assert e.wrong(config=job.config, seed=2) == [[]]
