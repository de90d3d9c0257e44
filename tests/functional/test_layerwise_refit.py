"""A real vLLM is refitted right after a layer-wise step: from the owners, before any gather; and, the plain way, from everybody
after a drain. The truth is a fresh vLLM that loads what Bridge exported at that step.
"""

from __future__ import annotations

import pytest

from examples.common import toy
from tests.support.marks import BOTH
from tests.support.refit_stage import stage_of, two_refits_are_fresh_loads

pytestmark = [pytest.mark.slow, BOTH]
# One bucket in flight and all others not even started: the state in which non-owners hold old bytes.
LAYOUT = dict(ep=2, options=dict(bucket_bytes=50_000, prefetch_depth=1))


stage = stage_of("layerwise_megatron")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sources", ["owners", "all"])
def test_refits_from_owners_and_after_a_drain(stage, tmp_path, sources, tp):
    toy.write_checkpoint("qwen3_moe", tmp_path / "model", seed=3, num_hidden_layers=2, num_experts=4)

    def watched(engines, refit) -> list[dict]:
        reports = refit()
        for r in reports:
            stale = r["before"].count("stale")
            assert stale, "the gather was over before the refit began"
            assert r["sent"] > 0
            if sources == "owners":
                assert r["after"].count("stale") == stale, "the refit has gathered"
            else:
                assert set(r["after"]) == {"current"}
        return reports

    how = dict(build=dict(layout=LAYOUT), engines=[dict(tp=tp)], watched=watched)
    how |= dict(frozen=["*norm.weight"])  # a step of Adam may be less than a bf16 norm can show
    how |= dict(sources=sources, narrow=["*"], deadline_s=300.0)
    two_refits_are_fresh_loads(stage, tmp_path, model=tmp_path / "model", **how)
