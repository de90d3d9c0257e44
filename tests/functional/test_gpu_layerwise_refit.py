"""Layer-wise optimizers of two ranks on one GPU: refits from the owners beside the gather, and checkpoints."""

from __future__ import annotations

import pytest

from examples.common import toy
from tests.support.gpu_job import Job, check, config, gpus, megatron, site
from tests.support.layerwise_ranks import Ranks
from tests.support.proc import Family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]

HOLD_S = 6.0
"""For so long a gather's copies are held up: a verified refit of a toy takes a fraction of it."""


def test_a_refit_from_owners_ends_while_the_gather_goes_on(tmp_path):
    """The gather is held up on the device, behind the step. Who waits for the device before *ready* waits for the gather."""
    pytest.importorskip("vllm")
    with Job(tmp_path, config("qwen3")) as job:
        engine = job.engine("engine", [0], eager=True)
        # Streams that share a queue of the device would wait for what is held up.
        job.start_trainers([0, 0], module="gpu_layerwise", CUDA_DEVICE_MAX_CONNECTIONS="32")
        engine.started()
        built = job.good("build", "built", config=job.config)
        assert all(b["pulled"] == 1 and b["buckets"] > 2 and b["owned"] > 0 for b in built), built
        job.meet([engine])
        answers = []
        for seed, hold_s in ((1, 0.0), (2, 0.0), (3, HOLD_S), (4, 0.0)):
            stepped = job.good("step", "stepped", seed=seed, hold_s=hold_s)
            refitted = job.good("refit", "refitted", verify=True)
            if hold_s:
                assert all(s["coming"] > 0 for s in stepped), "nothing was held up: this proves nothing"
                assert all(r["coming"] > 0 for r in refitted), f"the refit has waited for the gather: {refitted}"
            assert all(r["sent"] > 0 for r in refitted), "both ranks own something"
            answers.append(check(job, [engine], seed, refitted[0], "peer"))
            drained = job.good("drained", "drained", seed=seed)
            assert [(d["wrong"], d["coming"]) for d in drained] == [([], 0)] * 2, drained
        assert len({str(a) for a in answers}) == 4, "other weights must answer otherwise, or the tokens prove nothing"
        job.good("close", "closed")


@pytest.mark.skipif(not megatron(), reason="needs Megatron-Core and Bridge: name their site in XFER_SITE_TRAINER")
def test_an_engine_follows_owners_of_megatron_core(tmp_path):
    """What it holds then is what Bridge exports after the gather, byte for byte."""
    pytest.importorskip("vllm")
    with Job(tmp_path, config("qwen3")) as job:
        toy.write_checkpoint("qwen3", job.folder, seed=1, **job.config)
        engine = job.engine("engine", [0], eager=True)
        job.start_trainers(
            [0, 0], module="layerwise_megatron", TORCHDYNAMO_DISABLE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8"
        )
        layout = dict(options=dict(bucket_bytes=200_000))
        job.good("build", "built", timeout=240, folder=str(job.folder), layout=layout)
        engine.started()
        job.meet([engine])
        for number in range(2):
            job.good("step", "stepped", steps=1)
            refitted = job.good("refit", "refitted", verify=True)
            assert all(r["verified"] and r["sent"] > 0 and "in flight" in r["before"] for r in refitted), refitted
            out = tmp_path / f"export{number}"
            job.good("export", "exported", timeout=240, folder=str(out))
            assert engine.wrong(folder=str(out)) == [[]]


CASES = [
    ({"fused": True}, "float32"),
    ({"capturable": True}, "float32"),
    ({}, "float32"),
    ({"fused": True}, "bfloat16"),
]


def test_a_checkpoint_goes_on_bit_for_bit_also_with_fused_and_capturable_kernels(tmp_path):
    """They read their count of steps on the device."""
    (tmp_path / "ranks").mkdir()
    with Family(tmp_path / "ranks") as family:
        ranks = Ranks(family, 2, "gpu_layerwise", **site("trainer"), XFER_GPU="0")
        for i, (how, dtype) in enumerate(CASES):
            folder = tmp_path / f"checkpoint {i}"
            for got in ranks.ask("checkpointed", "gone on", folder=str(folder), how=how, dtype=dtype, timeout=60):
                assert got["digests"][0] == got["digests"][1] and got["losses"][0] == got["losses"][1], (how, got)
                assert set(map(tuple, got["devices"])) <= {("cuda" if how else "cpu",), ()}, (how, got)
