"""What a warm refit costs the processes on GPUs besides moving bytes: no memory, no wait of the host for each tensor, no Python
for each tensor. Real vLLM, which shares one GPU with two trainers.

    python -m pytest -m gpu tests/functional/test_gpu_warm.py

Without a GPU the calls of Python are counted by test_warm_refit.py.
"""

from __future__ import annotations

import pytest

from tests.support.gpu_job import Job, config, gpus

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]
FEW, MANY = 2, 14
"""Layers; each has some eight tensors in the engine."""
MORE = 6 * (MANY - FEW)
"""Tensors that the larger model has more, at least."""


def watched(folder, layers: int) -> dict[str, list[dict]]:
    """Of each trainer and each worker, in one warm refit."""
    folder.mkdir()
    with Job(folder, config("qwen3", num_hidden_layers=layers)) as job:
        engine = job.engine("engine", [0], eager=True)
        job.start_trainers([0, 0])
        job.plain()
        engine.started()
        job.meet([engine])
        for seed in (1, 2):
            job.refit(seed)
        job.good("set", "set", seed=3)
        job.good("watch", "watching")
        engine.ask("watch", "watching")
        report = job.refit()
        workers = engine.ask("unwatch", "watched")["workers"]
        trainers = job.good("unwatch", "watched")
        assert all(report["committed"]) and engine.wrong(config=job.config, seed=3) == [[]]
    return {"trainer": trainers, "worker": workers}


def test_a_warm_refit_allocates_nothing_and_does_nothing_per_tensor(tmp_path):
    few, many = watched(tmp_path / "few", FEW), watched(tmp_path / "many", MANY)
    print(few, many)
    for who in few:
        for a, b in zip(few[who], many[who], strict=True):
            assert a["allocations"] == b["allocations"] == 0, (who, a, b)
            assert b["calls"] < a["calls"] + MORE, (who, a, b)
            assert b["syncs"] < a["syncs"] + MORE and b["syncs"] < 10, (who, a, b)
