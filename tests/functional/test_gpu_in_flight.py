"""The example's sampling that does not stop for a refit, on a GPU, with a vLLM that does not say which weights made a token (0.25):
a sample is of one version all the same.

    python -m pytest -m gpu tests/functional/test_gpu_in_flight.py
"""

from __future__ import annotations

import time

import pytest

from examples.common.ports import free_port
from tests.support.gpu_job import Job, config, gpus, site
from tests.support.proc import PATIENCE

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]

LONG = 480


def test_drained_and_aborted_samples_are_of_one_version(tmp_path):
    with Job(tmp_path, config("qwen3")) as job:
        flight = job.family.start(
            "flight", "engine", "gpu_in_flight", **site("engine"), XFER_TOKEN=job.token, VLLM_USE_FLASHINFER_SAMPLER="0"
        )

        def tell(do: str, kind: str, **more) -> dict:
            flight.say(do=do, **more)
            return flight.expect(kind)

        job.start_trainers([0])
        job.plain()
        flight.expect("up")
        tell("start", "started", model=str(job.folder), max_model_len=512)
        for policy in ("drain", "abort"):
            rendezvous = f"tcp://127.0.0.1:{free_port()}"
            tell("serve", "serving", policy=policy, rendezvous=rendezvous)
            job.good("connect", "connected", rendezvous=rendezvous, replicas=1)
            old = str(job.refit(1)["version"])
            job.good("set", "set", seed=2)
            tell("ask", "asked", tokens=LONG)
            end = time.monotonic() + 60 * PATIENCE
            while not 3 < tell("under_way", "under way")["tokens"] < LONG // 2:
                assert time.monotonic() < end
            new = str(job.refit()["version"])
            said = tell("answer", "answered")
            (tokens, versions), (now, of_now) = said["got"], said["now"]
            assert old != new == said["version"] and of_now == [new] and len(tokens) == len(now) == LONG
            if policy == "drain":
                assert versions == [old] and said["again"] == 0 and tokens != now
            else:
                assert versions == [new] and said["again"] >= 1 and tokens == now
            job.good("close", "closed")
            tell("leave", "left")
