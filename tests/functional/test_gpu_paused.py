"""Trainers whose weights lie in virtual memory that is paused while they are not needed, as slime and miles do it: a refit or
connect before they are resumed is an error that names them.
"""

from __future__ import annotations

from functools import partial

import pytest

from examples.common.ports import free_port
from tests.support.gpu_job import Job, check, config, gpus, nccl_host

pytest.importorskip("vllm")
GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Such memory gives out no handles, so that all bytes go by NCCL; on one GPU each process is a host of its own to it."""
    apart = [nccl_host("trainer{rank}"), nccl_host("engine")] if GPUS == 1 else [{}, {}]
    with Job(tmp_path_factory.mktemp("paused"), config("qwen3")) as job:
        yield job, job.pair([GPUS - 1], dict(env=apart[1]), apart[0], partial(job.plain, pausable=True))


def refused(results: list[dict]) -> None:
    for got in results:
        assert got["kind"] == "raised" and got["type"] == "RebindError" and got["seconds"] < 30, got
        assert "there is no memory behind parameters" in got["text"] and ".weight: paused" in got["text"], got


def test_paused_weights_are_refused_by_name_and_resumed_ones_are_read(stage):
    job, engine = stage
    answers = check(job, [engine], 1, job.refit(1, verify=True), "nccl")
    job.good("pause", "paused")
    refused(job.all("refit", "refitted", deadline_s=30.0))
    assert engine.wrong(config=job.config, seed=1) == [[]] and [engine.observe()["outputs"]] == answers
    job.good("resume", "resumed")
    check(job, [engine], 2, job.refit(2, verify=True), "nccl")


def test_paused_weights_cannot_connect(stage):
    job, engine = stage
    job.good("close", "closed")
    job.good("pause", "paused")
    refused(job.all("connect", "connected", rendezvous=f"tcp://127.0.0.1:{free_port()}", replicas=1, deadline_s=30.0))
    job.good("resume", "resumed")
    job.good("set", "set", seed=3)
    job.meet([engine])
    check(job, [engine], 3, job.refit(3, verify=True), "nccl")
