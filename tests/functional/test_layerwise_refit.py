"""A real vLLM is refitted right after a layer-wise step: from the owners, before any gather; and, the plain way, from everybody
after a drain. The truth is a fresh vLLM that loads what Bridge exported at that step.
"""

from __future__ import annotations

import os

import pytest

from examples.common import toy
from examples.common.ports import free_port
from tests.support.layerwise_ranks import Ranks
from tests.support.proc import PYTHON, Family

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(os.path.exists, PYTHON.values())), reason="scripts/setup.sh has not been run"),
]
TOKEN = "token of the layer-wise tests"
MODEL = dict(num_hidden_layers=2, num_experts=4)


@pytest.mark.parametrize("tp", [1, 2])
def test_refits_from_owners_and_after_a_drain(tmp_path, tp):
    folder = tmp_path / "model"
    toy.write_checkpoint("qwen3_moe", folder, seed=3, **MODEL)
    with Family(tmp_path) as family:
        engine = family.start("engine", "engine", "vllm_main", XFER_TOKEN=TOKEN)
        engine.say(do="start", model=str(folder), load_format="dummy", tp=tp)
        trainers = Ranks(family, 4, "layerwise_megatron", XFER_TOKEN=TOKEN)
        # One bucket in flight and all others not even started: the state in which non-owners hold old bytes.
        layout = dict(ep=2, options=dict(bucket_bytes=50_000, prefetch_depth=1))
        trainers.ask("build", "built", folder=str(folder), layout=layout, timeout=600)
        trainers.ask("step", "stepped", steps=1)
        engine.expect("started", timeout=900)
        exports, seen = [], []
        for number, sources in enumerate(("owners", "all"), 1):
            rendezvous = f"tcp://127.0.0.1:{free_port()}"
            engine.say(do="serve", rendezvous=rendezvous)
            trainers.ask("connect", "connected", sources=sources, rendezvous=rendezvous, narrow=["*"], deadline_s=300.0)
            engine.expect("serving", timeout=300)
            trainers.ask("step", "stepped", steps=1)
            reports = trainers.ask("refit", "refitted", verify=True)
            assert all(r["verified"] for r in reports)
            assert all("stale" in r["before"] for r in reports), "the gather was over before the refit began"
            for r in reports:
                if sources == "owners":
                    assert r["after"].count("stale") == r["before"].count("stale") > 0, "the refit has gathered"
                else:
                    assert set(r["after"]) == {"current"}
            assert all(r["sent"] > 0 for r in reports)
            engine.say(do="observe")
            seen.append(engine.expect("observed", timeout=300))
            exports.append(str(tmp_path / f"export{number}"))
            trainers.ask("export", "exported", folder=exports[-1])
            trainers.ask("close", "closed")
        engine.stop()
        truth = family.start("truth", "engine", "vllm_main", XFER_TOKEN=TOKEN)
        truth.say(do="truth", folders=exports, layout=dict(tp=tp))
        for got in seen:
            want = truth.expect("observed", timeout=900)
            wrong = [k for k in want["checksums"] if want["checksums"][k] != got["checksums"].get(k)]
            assert not wrong and len(got["checksums"]) == len(want["checksums"]), sorted(wrong)[:10]
            assert got["outputs"] == want["outputs"]
        assert seen[0]["checksums"] != seen[1]["checksums"]
