"""Megatron-Core and Megatron-Bridge on one or two GPUs: refits between optimizer steps; the engine is compared with vLLM's own
loader and with a fresh engine that loads what Bridge exports.
"""

from __future__ import annotations

from functools import partial

import pytest

from examples.common import toy
from tests.support.gpu_job import Engine, Job, config, gpus, megatron, nccl_host

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() < 1, reason="needs a GPU"),
    pytest.mark.skipif(not megatron(), reason="needs Megatron-Core and Bridge: name their site in XFER_SITE_TRAINER"),
]
LAYOUTS = {"tp2": ("qwen3", dict(tp=2)), "pp2": ("qwen3", dict(pp=2)), "ep2": ("qwen3_moe", dict(ep=2, etp=1))}
LAST = min(gpus(), 2) - 1
"""The second rank's GPU. On the first's GPU the ranks are two hosts to Megatron's NCCL; the engine still reads their memory."""
APART = {} if LAST else nccl_host("trainer{rank}")


def following(job: Job, family: str, layout: dict, **connect) -> Engine:
    """An engine that has met two ranks of Megatron, which begin with a checkpoint of seed 1."""
    toy.write_checkpoint(family, job.folder, seed=1, **job.config)
    build = partial(job.good, "megatron", "built", timeout=240, folder=str(job.folder), layout=layout)
    return job.pair([0, LAST], dict(eager=True), APART, build, **connect)


def holds_the_export(job: Job, engine: Engine, name: str) -> str:
    """Checks that the engine holds what Bridge exports now. Returns the folder of the export."""
    out = str(job.work / name)
    job.good("export", "exported", timeout=240, folder=out)
    assert engine.wrong(folder=out) == [[]], name
    return out


@pytest.mark.parametrize("name", ["tp2", *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n != "tp2")])
def test_an_engine_follows_training(name, tmp_path):
    """The distributed optimizer gathers parameters late: each refit comes right after `step()`, while they are stale."""
    family, layout = LAYOUTS[name]
    with Job(tmp_path, config(family)) as job:
        engine = following(job, family, layout)
        job.verified()
        assert engine.wrong(folder=str(job.folder)) == [[]]
        before = engine.tokens()
        for _ in range(2):
            job.good("step", "stepped")
            engine.ask("scramble", "scrambled", seed=3)
            job.verified()
        out = holds_the_export(job, engine, "export")
        after = engine.tokens()
        assert after != before, "training must change the answers, or the tokens prove nothing"
        fresh = job.engine("fresh", [LAST], model=out, load_format="auto", eager=True)
        fresh.started()
        assert fresh.tokens() == after


@pytest.mark.skipif(LAST < 1, reason="needs two GPUs: all bytes that lie on the engine's own GPU are copied")
def test_an_engine_takes_what_the_optimizer_marks(tmp_path):
    """Steps so small that few bits change. What a step changes is marked while it is written, so there are no copies to compare with."""
    with Job(tmp_path, config("qwen3")) as job:
        engine = following(job, "qwen3", dict(tp=2, lr=2e-7), fenced=True)
        whole = job.refit(verify=True, delta="auto")
        for _ in range(3):
            job.good("step", "stepped")
            got = job.good("refit", "refitted", verify=True, delta="auto")
            assert all(r["verified"] and all(r["committed"]) for r in got)
            assert 0 < got[0]["bytes"] < whole["bytes"] / 3, got[0]["routes"]
            assert sum(r["extra"] for r in got) < whole["bytes"] / 4, "copies are as large as the weights"
        holds_the_export(job, engine, "export")


SMALL = dict(route="packed", bucket_bytes=1 << 20)
PACKED = {
    "mapped": (dict(SMALL, colocated=True), "by copies out of the trainers' storages"),
    "broadcast": (SMALL, "by copies out of the trainers' storages"),
    "broadcast, by Bridge's export": (dict(SMALL, export=True), "exported whole by the trainers' framework"),
}
ON_ONE = {
    "tp1, tied": ("qwen3_tied", [0], dict(distopt=False, overlap=False)),
    "tp2, tied": ("qwen3_tied", [0, 0], dict(tp=2)),
    "ep2": ("qwen3_moe", [0, 0], dict(ep=2, etp=1)),
}


@pytest.mark.parametrize("name", ["ep2", *(pytest.param(n, marks=pytest.mark.slow) for n in ON_ONE if n != "ep2")])
def test_whole_tensors_from_megatron_on_the_engines_gpu(name, tmp_path):
    """Two refits by each way of the packed route, with steps between; Bridge's own export of the last weights is the truth."""
    family, on, layout = ON_ONE[name]
    with Job(tmp_path, config(family)) as job:
        toy.write_checkpoint(family, job.folder, seed=1, **job.config)
        engine = job.engine("engine", [0], env=nccl_host("e"), eager=True)
        job.start_trainers(on, **nccl_host("t{rank}"), TORCHDYNAMO_DISABLE="1")
        job.good("megatron", "built", timeout=240, folder=str(job.folder), layout=layout)
        engine.started()
        answers = []
        for i, (connect, way) in enumerate(PACKED.values()):
            job.meet([engine], **connect)
            for step in range(2):
                job.good("step", "stepped")
                if answers:  # before the first commit it does not serve
                    engine.ask("scramble", "scrambled", seed=step + 3)
                report = job.verified()
                assert way in report["plan"], report
                holds_the_export(job, engine, f"export{i}{step}")
                answers.append(engine.tokens())
            job.good("close", "closed")
        assert answers[0] != answers[-1], "training must change the answers, or the tokens prove nothing"
