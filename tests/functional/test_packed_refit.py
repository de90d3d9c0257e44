"""The packed route, live: real Megatron-Core + Bridge trainers gather buckets, a real vLLM loads them, bit for bit.

The truth is the same as in test_refit_e2e.py: a fresh vLLM that loads what Bridge exported at that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.common import toy
from examples.common.ports import free_port
from tests.functional.test_refit_e2e import Stage, differ, on_all
from tests.support.proc import PYTHON

pytestmark = pytest.mark.skipif(
    not all(Path(p).exists() for p in PYTHON.values()), reason="scripts/setup.sh has not been run"
)
PLAIN = dict(distopt=False, overlap=False)


@dataclass(frozen=True)
class Case:
    """`layout`: of the four trainer ranks; `engines`: one dict per replica; `bucket`: bytes, small enough for many buckets."""

    family: str
    layout: dict
    engines: tuple[dict, ...]
    bucket: int = 96 << 10
    colocated: bool = False

    @property
    def name(self) -> str:
        def flat(d: dict) -> str:
            return "-".join(f"{k}{d[k]}" for k in ("tp", "pp", "vpp", "ep", "etp", "cp") if d.get(k))

        way = ", shared memory" * self.colocated
        return f"{self.family}: {flat(self.layout)} -> {' + '.join(flat(e) for e in self.engines)}{way}"


CASES = [Case("qwen3", dict(tp=2, pp=2, **PLAIN), (dict(tp=2),))]
SLOW = [
    Case("deepseek_v3", dict(tp=2, pp=2, ep=2, etp=1, distopt=True), (dict(tp=2),)),
    Case("qwen3_tied", dict(tp=2, pp=2, **PLAIN), (dict(tp=1),), colocated=True),
    Case("qwen3_moe", dict(tp=2, ep=2, etp=2, **PLAIN), (dict(tp=2), dict(tp=1))),
    Case("qwen3_moe", dict(tp=2, pp=2, ep=2, etp=1, **PLAIN), (dict(tp=2, ep=True),), colocated=True),
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("packed"))
    yield stage
    stage.family.__exit__()


def run(case: Case, stage: Stage, tmp_path: Path) -> None:
    model = tmp_path / "model"
    toy.write_checkpoint(case.family, model)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    engines = [stage.engine(f"{tmp_path.name}-engine{i}") for i in range(len(case.engines))]
    try:
        for e, layout in zip(engines, case.engines, strict=True):
            e.say(do="start", model=str(model), load_format="dummy", **layout)
        stage.trained("built", do="build", folder=str(model), layout=case.layout)
        for e in engines:
            e.expect("started", timeout=240)
        for i, e in enumerate(engines):
            e.say(do="serve", rendezvous=rendezvous, replica=i)
        how = dict(route="packed", bucket_bytes=case.bucket, deadline_s=120.0, colocated=case.colocated)
        stage.trained("connected", do="connect", rendezvous=rendezvous, replicas=len(engines), **how)
        exports, seen = [], []
        for step in (1, 2):
            stage.trained("stepped", do="step")
            reports = stage.trained("refitted", do="refit", verify=True)
            assert all(r["verified"] and r["committed"] == len(engines) for r in reports), reports
            exports.append(str(tmp_path / f"export{step}"))
            stage.trained("exported", do="export", folder=exports[-1])
            seen.append(on_all(engines, "observed", do="observe"))
        stage.trained("closed", do="close")
    finally:
        for e in engines:
            e.stop()
    for i, layout in enumerate(case.engines):
        stage.truth.say(do="truth", folders=exports, layout=layout)
        for step in (0, 1):
            want, got = stage.truth.expect("observed", timeout=240), seen[step][i]
            assert got["version"] == step + 1
            assert not differ(want, got), f"after refit {step + 1}, replica {i}: {differ(want, got)[:10]}"
            assert got["outputs"] == want["outputs"], f"after refit {step + 1}, replica {i}"
        same = seen[0][i]["checksums"].keys() - set(differ(*(s[i] for s in seen)))
        assert not same, f"not changed by training, so the second refit proved nothing of them: {sorted(same)}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_packed_refit_equals_a_fresh_load_of_the_export(case, stage, tmp_path):
    with stage.case():
        run(case, stage, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda c: c.name)
def test_packed_refit_equals_a_fresh_load_of_the_export_wide(case, stage, tmp_path):
    with stage.case():
        run(case, stage, tmp_path)
