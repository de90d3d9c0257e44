"""SGLang as an engine, in an environment of its own (docs/sglang.md): layouts byte for byte against `load_weights`, and live engines."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.common.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tests" / "support" / "sglang_site"
FAMILIES = ("Llama", "Qwen3", "Qwen3-MoE", "DeepSeek-V3")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here: docs/sglang.md says how"
)


def started(module: str, *args: object) -> subprocess.Popen:
    env = {
        **os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # SGLang wants a core for each rank to be named
    }  # fmt: skip
    command = [sys.executable, "-m", f"tests.support.{module}", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(*processes: subprocess.Popen) -> list[list[dict]]:
    """The JSON lines that each process printed."""
    outputs = [p.communicate(timeout=600) for p in processes]
    for p, (_, errors) in zip(processes, outputs, strict=True):
        assert p.returncode == 0, errors[-5000:]
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]


@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (2, 2)])
def test_a_layout_writes_what_sglang_loads(tp, ep):
    """On every rank. The ranks have SGLang's own groups, over gloo."""
    port = free_port()
    for lines in ended(*(started("sglang_rank", port, tp, ep, rank, *FAMILIES) for rank in range(tp))):
        assert sorted(line["family"] for line in lines) == sorted(FAMILIES)
        for line in lines:
            assert line["differ"] == [] and line["bytes"] > line["kept"], line


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, tp, options, door",
    [
        ("qwen3", 1, {}, ()),
        ("qwen3", 2, {}, ()),
        ("qwen3_moe", 2, {}, ()),
        ("qwen3", 1, {"dp_size": 2}, ()),
        ("qwen3", 1, {}, ("in_place",)),
        ("qwen3", 1, {}, ("http",)),
        ("qwen3", 1, {"dp_size": 2}, ("http",)),
    ],
    ids=["tp1", "tp2", "moe-tp2", "dp2", "in_place", "server", "server-dp2"],
)
def test_a_live_engine_answers_as_a_new_one_with_the_same_weights(family, tp, options, door):
    """Requests run during both refits. A torn engine answers NaN. Paused in place, it keeps its caches over a refit of a whole version."""
    [[out]] = ended(started("sglang_live", family, tp, json.dumps(options), *door))

    def said(name: str) -> list[tuple[list, list]]:
        return [(a["tokens"], a["logprobs"]) for a in out[name]]

    assert said("second") == said("repaired") == said("fresh") and said("second") != said("again")
    assert (said("again") == said("first")) == ("in_place" not in door)
    assert out["first"][0]["tokens"] != out["second"][0]["tokens"], "the weights made no difference"
    for name, version in (("first", "default"), ("second", "1"), ("again", "2")):
        assert {a["version"] for a in out[name]} == {version}
    for refit in ("second", "again"):
        assert out[f"report of {refit}"] == {"committed": 1, "verified": True}
        assert out[f"beside {refit}"] == [len(a["tokens"]) for a in out["first"]]
    assert all(p is None or math.isnan(p) for a in out["torn"] for p in a["logprobs"])


@pytest.mark.slow
def test_sglang_itself_serves_no_expert_parallel_model_on_a_cpu():
    """When this fails, its live test belongs into the table above."""
    process = started("sglang_live", "qwen3_moe", 2, json.dumps({"ep_size": 2}))
    _, errors = process.communicate(timeout=600)
    assert process.returncode and "standard.py" in errors and "No accelerator" in errors, errors[-3000:]
