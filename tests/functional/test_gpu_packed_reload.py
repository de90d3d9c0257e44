"""The packed route into engines that vLLM quantizes to FP8 while it loads, which the direct route refuses. After refits, bytes of
all parameters and tokens are those of a fresh engine that loads the same checkpoint.
"""

from __future__ import annotations

import pytest

from examples.common import toy
from tests.support.gpu_job import Job, config, gpus

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]
FP8 = dict(eager=True, load_format="auto", quantization="fp8", max_num_seqs=1, enable_prefix_caching=False)
"""One request at a time, none of it from the cache: activations are scaled by the largest of all that is computed together, so what an
answer is depends on who is beside it."""
ENGINES = {"dense": ("qwen3", FP8), "experts": ("qwen3_moe", dict(FP8, moe_backend="triton"))}


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.slow), "experts"])
def test_refits_of_an_engine_that_quantizes_are_fresh_loads(kind, tmp_path):
    family, how = ENGINES[kind]
    with Job(tmp_path, config(family)) as job:
        toy.write_checkpoint(family, job.folder, seed=1, **job.config)
        engine = job.pair([0, 0], how, route="packed", colocated=True, bucket_bytes=1 << 20)
        assert engine.ask("layerwise", "layerwise")["workers"] == [True]
        digests = [engine.ask("digests", "digests")["workers"]]
        for seed in (1, 2):
            job.verified(seed)
            digests.append(engine.ask("digests", "digests")["workers"])
        assert all(x != y for x, y in zip(digests, digests[1:]))
        out = tmp_path / "export"
        job.good("export", "exported", folder=str(out))
        engine.is_as_fresh(str(out), **how)
