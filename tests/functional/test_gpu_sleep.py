"""An engine with vLLM's sleep mode and CUDA graphs, refitted while only its weights are awake."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.gpu_job import Engine, Job, check, config, gpus

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("sleep"), pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]


@dataclass(frozen=True)
class Stage:
    """`answers`: of the weights of each seed, from an engine that never slept."""

    job: Job
    engine: Engine
    answers: dict[int, list]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("sleep"), config("qwen3")) as job:
        engine = job.pair(engine=dict(enable_sleep_mode=True))
        answers = {s: check(job, [engine], s, job.refit(s, verify=True), "peer") for s in (1, 2)}
        assert answers[1] != answers[2]
        yield Stage(job, engine, answers)


@pytest.mark.parametrize("level", [1, 2])
def test_a_refit_while_only_the_weights_are_awake(stage, level):
    """Level 1 brings the old weights back, level 2 memory that holds anything; then noise lies in all that a refit must write."""
    job, engine = stage.job, stage.engine
    check(job, [engine], 1, job.refit(1, verify=True), "peer")
    kept = engine.ask("kept", "kept")["kept"]
    engine.ask("sleep", "asleep", level=level)
    job.good("set", "set", seed=2)
    for got in job.all("refit", "refitted", deadline_s=30.0):
        assert got["kind"] == "raised" and got["type"] == "Unsupported" and got["seconds"] < 30, got
        assert "this engine sleeps" in got["text"] and "wake_up" in got["text"] and got["drained"], got
    engine.ask("wake", "awake", tags=["weights"])
    assert engine.ask("kept", "kept")["kept"] == kept
    if level == 1:
        assert engine.wrong(config=job.config, seed=1) == [[]]
    assert engine.ask("scramble", "scrambled", seed=level)["kept"] == kept
    report = job.refit(verify=True)
    engine.ask("wake", "awake", tags=["kv_cache"])
    assert check(job, [engine], 2, report, "peer") == stage.answers[2]
    assert engine.ask("kept", "kept")["kept"] == kept
