"""The packed route between torch's own FSDP2 and real vLLM engines of two kinds: one whose weights lie as they were loaded, and
one that processes them after loading (on CPUs vLLM packs them into other memory), which goes through vLLM's layer-wise reload.

The truth is a fresh vLLM of the same kind that loads what torch itself gathered and saved at that step. The direct route
refuses an engine of the second kind, since what it writes would never be read.
"""

from __future__ import annotations

import pytest

from examples.common import toy
from tests.support.marks import BOTH
from tests.support.refit_stage import stage_of, two_refits_are_fresh_loads

pytestmark = [pytest.mark.slow, BOTH]
SMALL = dict(num_hidden_layers=2, vocab_size=1003, intermediate_size=198)
"""Nothing that is cut divides evenly."""
HOW = dict(engines=[dict(tp=1)], scramble=False, route="packed", bucket_bytes=64 << 10, deadline_s=180.0)


loaded = stage_of("fsdp_main", 2, XFER_CPU_RESIDENT="1")
processed = stage_of("fsdp_main", 2, XFER_CPU_RESIDENT="0")


@pytest.mark.parametrize("engine", ["loaded", "processed"])
@pytest.mark.parametrize(
    "dtype, colocated",
    [("bfloat16", False), ("bfloat16", True), ("float32", False)],
    ids=["bf16", "shared memory", "fp32"],
)
def test_two_refits_are_fresh_loads(request, engine, tmp_path, dtype, colocated):
    toy.write_checkpoint("qwen3", tmp_path / "model", **SMALL)
    build = dict(scheme="fsdp", dtype=dtype)
    stage = request.getfixturevalue(engine)
    frozen = ["*proj.weight"] * (engine == "processed")  # vLLM has emptied them; answers tell what lies elsewhere
    two_refits_are_fresh_loads(
        stage, tmp_path, model=tmp_path / "model", build=build, colocated=colocated, frozen=frozen, **HOW
    )
