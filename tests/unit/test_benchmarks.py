"""Every benchmark prints its help on any machine, pages name only benchmarks that exist, and small ones run."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import plan_predictions
from benchmarks.tokens import Tokens, measured
from tests.support.proc import PATIENCE, ROOT

NAMES = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem != "__init__")
HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try: runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as e: print("@", name, e.code)
"""


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120 * PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_benchmark_prints_its_help_without_gpu_triton_or_engine():
    told = dict(zip(NAMES, re.split(r"^@ \w+ 0$", run("-c", HELP, *NAMES), flags=re.M)))
    for name, text in told.items():
        doc = (ROOT / "benchmarks" / f"{name}.py").read_text().split('"""')[1]
        assert f"usage: python -m benchmarks.{name} " in text and doc.strip() in text, (name, text)


def test_pages_name_only_benchmarks_that_exist():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.*"), *ROOT.glob("xfer/**/*.py")]
    named = {
        n for p in pages if p.suffix in (".md", ".py") for n in re.findall(r"-m benchmarks\.([a-z]\w*)", p.read_text())
    }
    assert named - {"lib"} == {*NAMES}


def test_the_rendezvous_is_measured_with_simulated_clients():
    size = "--trainers 2 --replicas 3 --workers 2 --processes 1 --refits 2".split()
    found = json.loads(run("-m", "benchmarks.coordinator", *size, "--tree", str(ROOT), "--json"))
    assert found["xfer"] == str(ROOT) and found["participants"] == 8
    assert (found["replicas_committed"], found["replicas_committed_after_losses"]) == (3, 1)


def test_a_message_between_two_processes_is_timed(tmp_path):
    run("-m", "benchmarks.wake", "--rests", "0", "--repeats", "20", "--out", str(tmp_path / "wake.json"))
    rows = json.loads((tmp_path / "wake.json").read_text())["rows"]
    assert len(rows) == 2 and all(0 < r["median_us"] < 1e6 for r in rows)


def test_the_cost_of_messages_is_timed(tmp_path):
    some = ("--counts", "1", "3", "--bytes", "512", "4096", "--repeats", "3")
    run("-m", "benchmarks.messages", *some, "--ranks", "3", "--out", str(tmp_path / "messages.json"))
    rows = json.loads((tmp_path / "messages.json").read_text())["rows"]
    assert [r["bytes"] for r in rows] == [512, 4096] and all(t > 0 for r in rows for t in r["us"])


def test_tokens_that_a_refit_costs_are_counted_beside_steps_without_one():
    """Two requests, a token each every 10 ms, and nothing for 40 ms of each call of 100 ms."""
    rows, came = [], []
    for i in range(8):
        t = 10.0 + i * 0.5
        rows.append([i % 2 == 0, t, t + (0.1 if i % 2 == 0 else 0.0), t + 0.45, t + 0.45, t + 0.5])
    outages = [(r[1], r[1] + 0.04) for r in rows if r[0]]
    for request in range(2):
        at = 9.005 + np.arange(0, 5.5, 0.01)
        came += [(t, 1, request) for t in at if not any(a <= t < b for a, b in outages)]
    tokens = Tokens(np.array(sorted(came)))
    row = measured("dense", 0.01, {"rows": rows, "reports": [{"bytes": 5.0, "outage_s": 0.04}]}, tokens)
    assert row.per_second == pytest.approx(200) and row.lost == pytest.approx(8) and row.outage == 40
    assert row.gap_p50 == pytest.approx(10) and row.gap_max == pytest.approx(50) and row.calm_p99 == pytest.approx(10)
    assert row.call == pytest.approx(100) and row.step == pytest.approx(450) and row.step_beside == pytest.approx(350)
    assert row.around[4] == pytest.approx(200) and row.around[6] == 0 and row.refits == 4


def test_bytes_that_a_host_needs_are_counted_once():
    """Four workers of Qwen3-4B share norms alone: together they need the model, however many replicas they are of."""
    catalog, _, workers, _ = plan_predictions.job("4B DP8 -> TP4xDP2")
    model = sum(math.prod(s.shape) * 2 for s in catalog.specs)
    assert plan_predictions.distinct(workers) == plan_predictions.distinct([*workers, *workers]) == model
    assert 0 < sum(plan_predictions.distinct([w]) for w in workers) - model < model / 1000


def test_links_to_results_lead_to_a_heading():
    headings = re.findall(r"^#+ (.+)$", (ROOT / "benchmarks/RESULTS.md").read_text(), re.M)
    there = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    linked = {a for p in pages for a in re.findall(r"benchmarks/RESULTS\.md#([\w-]+)", p.read_text())}
    assert linked and linked <= there
