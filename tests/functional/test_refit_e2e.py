"""Real Megatron-Core + Bridge trainers refit a real vLLM, bit for bit, after the first and after a second optimizer step.

The truth is a fresh vLLM that loads what Megatron-Bridge exported at that step: every parameter digest, every greedy token and
its logprob must be equal. Between the two refits every live byte but the kept ones is overwritten with noise, so a refit that
left anything out cannot pass; and prompts are asked before and after, so a stale prefix cache cannot either.

One launch of four trainer ranks serves all cases, one after the other, since imports cost more than a toy's work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.proc import PYTHON, Family, free_port
from xfer.testing import toy

pytestmark = pytest.mark.skipif(
    not all(__import__("os").path.exists(p) for p in PYTHON.values()), reason="scripts/setup.sh has not been run"
)


@dataclass(frozen=True)
class Case:
    """`layout`: of the trainer (4 ranks); `engines`: one dict per replica; `model`: overrides of the family's config."""

    family: str
    layout: dict
    engines: tuple[dict, ...]
    model: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        def flat(d):
            return "-".join(f"{k}{v}" if not isinstance(v, bool) else k for k, v in d.items() if v)

        return (
            f"{self.family}: {flat({k: v for k, v in self.layout.items() if k in ('tp', 'pp', 'vpp', 'ep', 'etp', 'cp', 'distopt')})} -> "
            + " + ".join(flat(e) for e in self.engines)
        )


PLAIN = dict(distopt=False, overlap=False)
CASES = [
    Case("qwen3", dict(tp=2, pp=2, **PLAIN), (dict(tp=2),)),
    Case(
        "qwen3_tied",
        dict(tp=1, pp=2, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3, distopt=True),
        (dict(tp=1),),
    ),
    Case("qwen3_moe", dict(tp=2, ep=2, etp=2, distopt=True), (dict(tp=2, ep=True), dict(tp=1))),
    Case("deepseek_v3", dict(tp=2, pp=2, ep=2, etp=1, distopt=True), (dict(tp=2),)),
    # TP above the number of KV heads, and a vocabulary that each side pads to another size.
    Case(
        "qwen3",
        dict(tp=2, pp=2, vpp=2, distopt=True, should_pad_vocab=True, make_vocab_size_divisible_by=40, load=False),
        (dict(tp=4),),
        dict(num_key_value_heads=2, vocab_size=250),
    ),
]
SLOW = [
    Case("qwen3_tied", dict(tp=2, pp=2, distopt=True), (dict(tp=2),)),
    Case("qwen3_moe", dict(tp=2, pp=2, ep=2, etp=1, **PLAIN), (dict(tp=2),)),
    Case("qwen3_moe", dict(tp=1, pp=1, ep=4, distopt=True), (dict(tp=4, ep=True),)),
    Case("qwen3_moe", dict(tp=1, pp=2, vpp=2, ep=2, distopt=True), (dict(tp=2, ep=True),)),
    Case("deepseek_v3", dict(tp=2, ep=2, etp=2, distopt=True), (dict(tp=2, ep=True),)),
    Case(
        "deepseek_v3",
        dict(tp=1, pp=4, distopt=True, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
        (dict(tp=1),),
    ),
    Case("qwen3", dict(tp=2, pp=1, cp=2, distopt=True), (dict(tp=1), dict(tp=2))),
    Case("qwen3", dict(tp=4, pp=1, **PLAIN), (dict(tp=2),)),
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Four trainer ranks that build one case after the other, and an engine process that tells the truth."""
    token = "end to end token"
    with Family(tmp_path_factory.mktemp("e2e")) as family:
        port = str(free_port())
        trainers = [
            family.start(
                f"trainer{r}",
                "trainer",
                "megatron_main",
                RANK=str(r),
                LOCAL_RANK=str(r),
                WORLD_SIZE="4",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                XFER_TOKEN=token,
            )
            for r in range(4)
        ]
        truth = family.start("truth", "engine", "vllm_main", XFER_TOKEN=token)
        for c in (*trainers, truth):
            c.expect("up", timeout=180)
        yield family, trainers, truth, token


def on_all(children, *kinds, timeout=240.0, **command):
    for c in children:
        c.say(**command)
    return [c.expect(*kinds, timeout=timeout) for c in children]


def run(case: Case, stage, tmp_path) -> None:
    family, trainers, truth, token = stage
    model = tmp_path / "model"
    toy.write_checkpoint(case.family, model, **case.model)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    engines = [
        family.start(f"engine{i}-{abs(hash(case.name)) % 9999}", "engine", "vllm_main", XFER_TOKEN=token)
        for i in range(len(case.engines))
    ]
    try:
        for e, layout in zip(engines, case.engines):
            e.say(do="start", model=str(model), load_format="dummy", **layout)
        on_all(trainers, "built", do="build", folder=str(model), layout=case.layout)
        for e in engines:
            e.expect("started", timeout=240)
        for i, e in enumerate(engines):
            e.say(do="serve", rendezvous=rendezvous, replica=i)
        on_all(trainers, "connected", do="connect", rendezvous=rendezvous, replicas=len(engines))
        exports, seen = [], []
        for step in (1, 2):
            losses = on_all(trainers, "stepped", do="step")
            reports = on_all(trainers, "refitted", do="refit", verify=True)
            assert all(r["verified"] and r["committed"] == len(engines) for r in reports), reports
            assert losses[0]["loss"] > 0
            exports.append(str(tmp_path / f"export{step}"))
            on_all(trainers, "exported", do="export", folder=exports[-1])
            seen.append(on_all(engines, "observed", do="observe"))
            if step == 1:
                kept = on_all(engines, "scrambled", do="scramble", seed=step)
        assert [k["kept"] for k in on_all(engines, "kept", do="kept")] == [k["kept"] for k in kept]
        on_all(trainers, "closed", do="close")
    finally:
        for e in engines:
            e.stop()
    for i, layout in enumerate(case.engines):
        truth.say(do="truth", folders=exports, layout=layout)
        for step in (0, 1):
            want, got = truth.expect("observed", timeout=240), seen[step][i]
            assert got["version"] == str(step + 1)
            wrong = [
                k
                for k in want["checksums"].keys() | got["checksums"].keys()
                if want["checksums"].get(k) != got["checksums"].get(k)
            ]
            assert not wrong, f"after refit {step + 1}, replica {i}: {sorted(wrong)[:10]}"
            assert got["outputs"] == want["outputs"], f"after refit {step + 1}, replica {i}"
    assert seen[0][0]["checksums"] != seen[1][0]["checksums"], (
        "training changed nothing: the second refit proved nothing"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_refit_equals_a_fresh_load_of_the_export(case, stage, tmp_path):
    run(case, stage, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda c: c.name)
def test_refit_equals_a_fresh_load_of_the_export_wide(case, stage, tmp_path):
    run(case, stage, tmp_path)
