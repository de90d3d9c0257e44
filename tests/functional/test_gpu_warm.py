"""A warm refit on GPUs allocates no memory, waits for no tensor on the host and calls no Python function per tensor. Without a GPU,
test_warm_refit.py counts the calls.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.support.gpu_job import NO_HANDLES, Job, config, gpus, nccl_host

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]
FEW, MANY = 2, 14
"""Layers; each has some eight tensors in the engine."""
MORE = 6 * (MANY - FEW)
"""Tensors that the larger model has more, at least."""


ENVIRONMENTS = {"peer": ({}, {}), "nccl": ({**NO_HANDLES, **nccl_host("trainer{rank}")}, nccl_host("engine"))}
"""Of trainers and engine. To NCCL each of them is a host of its own."""


def watched(folder, layers: int, route: str) -> dict[bool, dict[str, list[dict]]]:
    """Of each trainer and each worker, in one warm refit, plain and verified."""
    folder.mkdir()
    out = {}
    trainers_env, engine_env = ENVIRONMENTS[route]
    with Job(folder, config("qwen3", num_hidden_layers=layers)) as job:
        engine = job.pair([0, 0], dict(env=engine_env, eager=True), trainers_env)
        for verify in (False, True):
            for seed in (1, 2):
                job.refit(seed, verify=verify)
            job.good("set", "set", seed=3)
            job.good("watch", "watching")
            engine.ask("watch", "watching")
            report = job.refit(verify=verify)
            workers = engine.ask("unwatch", "watched")["workers"]
            trainers = job.good("unwatch", "watched")
            assert f"route/{route}_bytes" in report["scalars"], report["routes"]
            assert all(report["committed"]) and engine.wrong(config=job.config, seed=3) == [[]]
            out[verify] = {"trainer": trainers, "worker": workers}
    return out


@pytest.mark.parametrize("route", ENVIRONMENTS)
def test_a_warm_refit_allocates_nothing_and_does_nothing_per_tensor(route, tmp_path):
    """Verified it asks for a few bytes in which constants are compared, as many for many tensors."""
    few, many = (watched(tmp_path / f"{n}", n, route) for n in (FEW, MANY))
    for verify, who in itertools.product((False, True), ("trainer", "worker")):
        for a, b in zip(few[verify][who], many[verify][who], strict=True):
            assert b["allocations"] <= a["allocations"] and (verify or not a["allocations"]), (who, a, b)
            more = Counter(b["functions"]) - Counter(a["functions"])
            assert b["calls"] < a["calls"] + MORE, (who, a["calls"], b["calls"], more.most_common(12))
            assert b["syncs"] < a["syncs"] + MORE and b["syncs"] < 10, (who, a, b)
