"""The packed route between torch's own FSDP2 and real vLLM engines of two kinds: one whose weights lie as they were loaded, and
one that processes them after loading (on CPUs vLLM packs them into other memory), which goes through vLLM's layer-wise reload.

The truth is a fresh vLLM of the same kind that loads what torch itself gathered and saved at that step. The direct route
refuses an engine of the second kind, since what it writes would never be read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.common import toy
from examples.common.ports import free_port
from tests.support.proc import PYTHON, Family

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(Path(p).exists() for p in PYTHON.values()), reason="scripts/setup.sh has not been run"),
]
TOKEN = "token of the packed engines"
WORLD = 2
SMALL = dict(num_hidden_layers=2, vocab_size=1003, intermediate_size=198)
"""Nothing that is cut divides evenly."""
PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("packed-engines")) as family:
        ranks = family.ranks("fsdp_main", WORLD, XFER_TOKEN=TOKEN)
        on_all(ranks, "up")
        yield family, ranks


def on_all(children, kind: str, **command) -> list[dict]:
    if command:
        for c in children:
            c.say(**command)
    said = [c.expect(kind, "raised", timeout=PATIENCE_S) for c in children]
    assert not (bad := [e["text"] for e in said if e["kind"] == "raised"]), bad
    return said


@pytest.mark.parametrize("colocated", [False, True], ids=["broadcast", "shared memory"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("resident", [True, False], ids=["as loaded", "processed after loading"])
def test_two_refits_are_fresh_loads(trainers, tmp_path, resident, dtype, colocated):
    if dtype == "float32" and colocated:
        pytest.skip("the dtype changes nothing about how messages travel")
    family, ranks = trainers
    model = tmp_path / "model"
    toy.write_checkpoint("qwen3", model, **SMALL)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    where = dict(XFER_TOKEN=TOKEN, XFER_CPU_RESIDENT=str(int(resident)))
    engine = family.start(f"engine-{tmp_path.name}", "engine", "vllm_main", **where)
    try:
        on_all([engine], "up")
        engine.say(do="start", model=str(model), load_format="dummy", tp=1)
        on_all(ranks, "built", do="build", folder=str(model), scheme="fsdp", dtype=dtype)
        on_all([engine], "started")
        engine.say(do="serve", rendezvous=rendezvous)
        how = dict(route="packed", colocated=colocated, bucket_bytes=64 << 10, deadline_s=180.0)
        on_all(ranks, "connected", do="connect", rendezvous=rendezvous, **how)
        exports, seen = [], []
        for step in (1, 2):
            on_all(ranks, "stepped", do="step")
            reports = on_all(ranks, "refitted", do="refit", verify=True)
            assert all(r["verified"] and r["committed"] == 1 and r["version"] == step for r in reports), reports
            exports.append(str(tmp_path / f"export{step}"))
            on_all(ranks, "exported", do="export", folder=exports[-1])
            seen += on_all([engine], "observed", do="observe")
        on_all(ranks, "closed", do="close")
    finally:
        engine.stop()
    truth = family.start(f"truth-{tmp_path.name}", "engine", "vllm_main", **where)
    try:
        on_all([truth], "up")
        truth.say(do="truth", folders=exports, layout=dict(tp=1))
        for step, got in enumerate(seen, 1):
            want = truth.expect("observed", timeout=PATIENCE_S)
            assert got["version"] == step and got["checksums"].keys() == want["checksums"].keys()
            wrong = [k for k in want["checksums"] if want["checksums"][k] != got["checksums"][k]]
            assert not wrong, f"after refit {step}: {wrong[:10]}"
            assert got["outputs"] == want["outputs"], f"after refit {step}"
    finally:
        truth.stop()
    assert seen[0]["outputs"] != seen[1]["outputs"], "the second step changed what it answers"
