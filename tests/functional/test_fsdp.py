"""A real transformers model under PyTorch's own FSDP2 refits a real vLLM, bit for bit, after a first and a second AdamW
step, and nobody holds a whole parameter on the way.

The truth is a fresh vLLM that loads what torch itself gathered and saved at that step; where the trainer is fp32, vLLM's
loader rounds that file to bf16. Between the two refits every live byte is overwritten with noise. One parameter is far
larger than all that a refit may allocate, so that a gather of it would show in the kernel's count of resident pages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import torch

from examples.common import toy
from examples.common.ports import free_port
from tests.support.proc import PYTHON, Family

pytestmark = pytest.mark.skipif(
    not all(map(os.path.exists, PYTHON.values())), reason="scripts/setup.sh has not been run"
)

WORLD = 4
TOKEN = "token of the fsdp tests"
# Nothing that is cut divides by four, the vocabulary not even by two.
ODD = dict(num_hidden_layers=2, vocab_size=100_003, intermediate_size=198)
WHOLE = ODD["vocab_size"] * 128 * 2
"""Bytes of the largest parameter in the engine's dtype."""


@dataclass(frozen=True)
class Case:
    """`scheme`: of fsdp_main. `evaluate`: run a forward between step and refit, after which parameters lie whole."""

    scheme: str
    dtype: str
    tp: int = 2
    family: str = "qwen3"
    evaluate: bool = False
    model: dict = field(default_factory=lambda: dict(ODD))

    @property
    def name(self) -> str:
        return f"{self.family}: {self.scheme} {self.dtype} -> tp{self.tp}" + " after a forward" * self.evaluate


SLOW = [
    Case("fsdp", "bfloat16"),
    Case("hsdp", "float32"),
    Case("fsdp over tp", "bfloat16"),
    Case("fsdp over tp", "float32", tp=1),
    Case("fsdp", "float32", family="qwen3_tied"),
]
CASES = [Case("fsdp", "float32", evaluate=True), *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Four trainer ranks that build one case after the other, and an engine process that tells the truth."""
    with Family(tmp_path_factory.mktemp("fsdp")) as family:
        trainers = family.ranks("fsdp_main", WORLD, XFER_TOKEN=TOKEN)
        truth = family.start("truth", "engine", "vllm_main", XFER_TOKEN=TOKEN)
        for c in (*trainers, truth):
            c.expect("up", timeout=600)
        yield family, trainers, truth


def on_all(children, *kinds, timeout=600.0, **command):
    for c in children:
        c.say(**command)
    said = [c.expect(*kinds, "raised", timeout=timeout) for c in children]
    assert not (bad := [e["text"] for e in said if e["kind"] == "raised"]), bad
    return said


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_an_fsdp2_refit_equals_a_fresh_load_of_what_torch_saved(case, stage, tmp_path):
    family, trainers, truth = stage
    folder = tmp_path / "model"
    checkpoint = toy.write_checkpoint(case.family, folder, **case.model)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    engine = family.start(f"engine-{case.name}".replace(" ", "_"), "engine", "vllm_main", XFER_TOKEN=TOKEN)
    try:
        engine.say(do="start", model=str(folder), load_format="dummy", tp=case.tp)
        built = on_all(trainers, "built", do="build", folder=str(folder), scheme=case.scheme, dtype=case.dtype)
        is_what_it_says(case, [b["shards"] for b in built])
        engine.expect("started", timeout=600)
        engine.say(do="serve", rendezvous=rendezvous)
        narrow = ["*"] if case.dtype == "float32" else []
        on_all(trainers, "connected", do="connect", rendezvous=rendezvous, narrow=narrow, bucket_bytes=1 << 20)
        exports, seen = [], []
        for step in (1, 2):
            on_all(trainers, "stepped", do="step")
            if case.evaluate:
                assert all(e["whole"] > 0 for e in on_all(trainers, "evaluated", do="evaluate"))
            on_all([engine], "watching", do="watch")
            reports = on_all(trainers, "refitted", do="refit", verify=True)
            moved_shards_only(case, checkpoint, reports, on_all([engine], "grown", do="grown")[0]["bytes"])
            exports.append(str(tmp_path / f"export{step}"))
            on_all(trainers, "exported", do="export", folder=exports[-1])
            seen += on_all([engine], "observed", do="observe")
            if step == 1:
                on_all([engine], "scrambled", do="scramble", seed=step)
        on_all(trainers, "closed", do="close")
    finally:
        engine.stop()
    truth.say(do="truth", folders=exports, layout=dict(tp=case.tp))
    for step, got in enumerate(seen, 1):
        want = truth.expect("observed", timeout=600)
        assert got["version"] == step
        wrong = [k for k in want["checksums"] if want["checksums"][k] != got["checksums"].get(k)]
        assert not wrong and len(got["checksums"]) == len(want["checksums"]), (
            f"after refit {step}: {sorted(wrong)[:10]}"
        )
        assert got["outputs"] == want["outputs"], f"after refit {step}"
    assert seen[0]["checksums"] != seen[1]["checksums"], "training changed nothing: the second refit proved nothing"


def is_what_it_says(case: Case, shards: list[list]) -> None:
    """torch cut the model as the case's name promises: unevenly, on two axes, strided."""
    rows = [{n: shape[0] for n, shape, _ in rank} for rank in shards]
    kinds = {n: placements for n, _, placements in shards[0]}
    embedding, gate = "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"
    assert len({r[embedding] for r in rows}) > 1, "every rank holds as many rows"
    assert len({r[gate] for r in rows}) > 1 or case.scheme == "hsdp"
    axes = {len(p) for p in kinds.values()}
    assert axes == {"fsdp": {1}, "hsdp": {2}, "fsdp over tp": {1, 2}}[case.scheme]
    assert any("_StridedShard" in x or x.startswith("_S(") for x in kinds[gate]) == (case.scheme == "fsdp over tp")
    assert ("lm_head.weight" in kinds) == (case.family != "qwen3_tied")


def moved_shards_only(case: Case, checkpoint: dict[str, torch.Tensor], reports: list[dict], grown: list[int]) -> None:
    """Each worker got its share and no more, each trainer sent about as much as the others, and no process grew by
    the largest parameter."""
    share = sum(t.numel() * (1 if t.dim() > 1 else case.tp) * 2 for t in checkpoint.values())
    for r in reports:
        assert r["verified"] and r["committed"] == 1 and r["bytes"] == share
    sent = [r["sent"] for r in reports]
    assert sum(sent) == share and max(sent) < 1.1 * share / WORLD
    assert len(grown) == case.tp
    for what, n in [
        *((f"trainer {i}", r["grown"]) for i, r in enumerate(reports)),
        *((f"worker {i}", n) for i, n in enumerate(grown)),
    ]:
        assert n < WHOLE, f"{what} grew by {n} bytes in a refit; a whole parameter has {WHOLE}"
    assert max(r["extra"] for r in reports) < WHOLE // 2
