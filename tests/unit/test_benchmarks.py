"""Benchmarks run where they are small, what they count is right, and goals judge results by their own figures."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import goals, plan_predictions
from benchmarks.gpu_floor import copies
from benchmarks.lib.layerwise_dead import Dead, Survivor, Use
from benchmarks.lib.layerwise_net import timeline, uncovered
from benchmarks.lib.packed_ranks import FLAT, PACKED, RAW
from benchmarks.tokens import Tokens, measured
from tests.support.proc import PATIENCE, ROOT


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120 * PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_rendezvous_is_measured_with_simulated_clients():
    size = "--trainers 2 --replicas 3 --workers 2 --processes 1 --refits 2".split()
    found = json.loads(run("-m", "benchmarks.coordinator", *size, "--tree", str(ROOT), "--json"))
    assert found["xfer"] == str(ROOT) and found["participants"] == 8
    assert (found["replicas_committed"], found["replicas_committed_after_losses"]) == (3, 1)


@pytest.mark.parametrize(
    "command, sizes",
    [
        ("wake --rests 0 --repeats 20", [None, None]),
        ("messages --counts 1 3 --bytes 512 4096 --repeats 3 --ranks 3", [512, 4096]),
    ],
)
def test_messages_are_timed(tmp_path, command, sizes):
    """Between two processes, and by their number and size."""
    run("-m", *f"benchmarks.{command} --out {tmp_path}/x.json".split())
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [r.get("bytes") for r in rows] == sizes
    assert all(0 < t < 1e6 for r in rows for t in r.get("us", [r.get("median_us")]))


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


# ---- goals


def transport(wrong: int = 0, **ms: float) -> dict:
    return {"meta": {}, "cases": [{"case": "4b", "ms": {k: [v] for k, v in ms.items()}, "wrong": {"peer": wrong}}]}


def session(command: str, gpus: int, floor: float = 0.0, text: str = "9 bytes, wrong: none (0.1 s)", **transfer: float):
    raw = {
        name: [{"scalars": {**dict.fromkeys(("transfer_s", "outage_s", "call_s"), ms / 1e3), "bytes": 8e9}}]
        for name, ms in transfer.items()
    }
    if floor:
        raw["floor"] = {"gb_per_s": 4e9 / floor / 1e6}
    command = f"python -m benchmarks.gpu_session {command}"
    return {"meta": {"command": command, "gpus": gpus}, "rows": [["every byte compared", text]], "raw": raw}


def packed(wrong: int = 0) -> dict:
    def case(name: str, wrong: int = 0, **ms: float) -> dict:
        rows = [{"way": w, "ms": [v], "wrong": 0, "extra_bytes": [1, 20]} for w, v in ms.items()]
        rows[0]["wrong"] = wrong
        return {"case": name, "rows": rows}

    apart = case("apart", wrong, **{"one by one": 1500.0, PACKED: 180.0, RAW: 160.0})
    return {"meta": {"bucket": 10}, "cases": [apart, case("colocated", **{"one by one": 1000.0, FLAT: 100.0})]}


OVERLAP = {
    "exposed_ms": {"blocking": 10.0, "depth 1": 1.5}, "hidden": {"depth 1": 0.85}, "received": [102, 0], "lacked": [100, 0],
    "timeline": {"blocking": [{"exposed_ms": 9.0}, {"exposed_ms": 10.0}], "depth 1": [{"exposed_ms": 2.5}, {"exposed_ms": 1.0}]},
}  # fmt: skip
LAYERWISE = [
    {"ranks": 2, "overlap": OVERLAP, "exact": [{"model": "fp32", "steps": 50, "ways": ["a", "b"], "differ": ["b"]}]}
]
RELAY = dict(floor=10.0, peer=10.5, p2p=180.0, nccl=170.0)
RELAY |= {"one destination pulls": 155.0, "relay, 64 parts": 181.0, "relay, 128 parts": 169.0}
CHAIN = {"one replica": 20.0, "relay chain": 24.0}


@pytest.mark.parametrize(
    "results, missed, figures",
    [
        (transport(floor=10.0, peer=10.6, p2p=20.0, nccl=17.0), set(), {}),
        (transport(floor=10.0, peer=10.61, p2p=20.0, nccl=17.0), {"data plane, 4b: peer, ms"}, {}),
        (transport(floor=10.0, peer=10.6, p2p=20.1, nccl=17.0), {"data plane, 4b: p2p, of NCCL's rate"}, {}),
        (transport(1, floor=10.0, peer=10.6, p2p=20.0, nccl=17.0), {"data plane, 4b: wrong elements"}, {}),
        (transport(**RELAY), set(), {"one copy out": 1.09}),
        (session("--tp 2", 4, floor=10.2, refit=12.1, verified=13.0), {"4b, plain, TP2: transfer, ms"}, {"verified / plain": 1.07}),
        (session("--model 30b --tp 2", 2, floor=10.0, refit=10.9), set(), {"30b, plain, TP2, on 2 GPUs: transfer / floor": 1.09}),
        (session("--tp 2", 4, text="9 bytes, wrong: ['layers.0'] (0.1 s)", refit=11.0),
         {"4b, plain, TP2: comparisons of every byte that failed"}, {}),
        (session("--tp 1 --trainers one", 3, **CHAIN), {"4b, one, TP1: 2 replicas in a relay chain / one"}, {"relay chain / one": 1.2}),
        (packed(), {"packed, apart: of NCCL's broadcast rate"}, {f"colocated: one by one / {FLAT}": 10, "colocated: memory, buckets": 2.0}),
        (packed(3), {"packed, apart: of NCCL's broadcast rate", "packed, apart: wrong elements"}, {}),
        (LAYERWISE, {"layer-wise, 2 ranks: fp32, ways that differ", "layer-wise, 2 ranks: hidden, by the timeline, overlap"},
         {"hidden, by events": 0.85, "by the timeline": 0.75, "bytes planned / lacked": 1.02}),
        (session("--model toy --tp 1 --trainers nothing", 1, **{"zero bytes": 0.55}),
         {"toy, nothing, TP1, on 1 GPU: zero bytes, armed to decided, ms"}, {}),
        (session("--model toy --tp 2", 4, refit=1.0), None, {}),
        (session("--tp 2 --layers 16", 4, refit=1.0), None, {}),
    ],
)  # fmt: skip
def test_results_are_judged_by_their_own_figures(results, missed, figures):
    """missed: None where no goal is for this size."""
    found = goals.judged(results)
    assert {j.goal for j in found if not j.met} == (missed or set()) and any(j.met for j in found) == (
        missed is not None
    )
    for goal, figure in figures.items():
        (ours,) = {round(j.ours, 2) for j in found if goal in j.goal}
        assert ours == figure, (goal, ours)


def test_a_missed_goal_is_printed_and_the_exit_code_is_1(tmp_path, capsys, monkeypatch):
    file, missed = tmp_path / "x.json", transport(1, floor=10.0, peer=10.6, p2p=20.0, nccl=17.0)
    file.write_text(json.dumps({"a day": {"a run": missed, "more": [{"ranks": 2}]}, "note": "text"}))
    monkeypatch.setattr(sys, "argv", ["goals", str(file)])
    assert goals.main() == 1
    assert "wrong elements |" in capsys.readouterr().out.partition("**missed**")[0].splitlines()[-1]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 9))
def test_every_destination_gets_its_bytes_once_and_destinations_take_turns(destinations, sources, nbytes, piece):
    out = copies(destinations, sources, nbytes, piece)
    share = -(-nbytes // sources)
    for destination in range(destinations):
        got = Counter((c.source, c.at + i) for c in out if c.destination == destination for i in range(c.nbytes))
        assert sum(got.values()) == nbytes and set(got.values()) == {1}
        assert all(at < share for _, at in got)
    assert all(0 < c.nbytes <= piece for c in out)
    if nbytes >= sources * sources:  # else some sources have nothing
        assert [c.destination for c in out[:destinations]] == list(range(destinations))
        assert len({c.source for c in out[:destinations]}) == min(destinations, sources)


# ---- layer-wise gathers: a profiler's timeline, and a rank's death

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda x: (x[0], x[0] + x[1])), max_size=12)


@given(SPANS, SPANS)
def test_what_is_uncovered_is_what_counting_points_gives(spans, cover):
    points, hidden = ({t for a, b in those for t in range(a, b)} for those in (spans, cover))
    assert uncovered(spans, cover) == len(points - hidden)


GATHER = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, ts: float, dur: float, stream: int = 7) -> dict:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def copy(ts: float, stream: int, way: str) -> dict:
    return kernel(f"Memcpy {way} (Device -> Device)", ts, 400.0, stream) | {"cat": "gpu_memcpy"}


BROADCAST = [
    kernel(GATHER, 0.0, 1000.0), kernel("gemm", 500.0, 2000.0), kernel(GATHER, 2400.0, 600.0), kernel(REDUCE, 5000.0, 900.0),
    {"cat": "cpu_op", "name": "nccl:broadcast", "ts": 0.0, "dur": 9000.0},
]  # fmt: skip
COPIED = [
    BROADCAST[1], copy(300.0, 20, "PtoP"), copy(4000.0, 21, "DtoD"), copy(8000.0, 7, "DtoD"), copy(9000.0, 22, "DtoH"),
]  # fmt: skip
"""300 to 500 and 4000 to 4400 are exposed."""


@pytest.mark.parametrize(
    "events, gather_ms, exposed_ms", [(BROADCAST, 1.6, 1.0), (COPIED, 0.8, 0.6), ([BROADCAST[1]], None, None)]
)
def test_a_gather_is_told_from_reductions_and_other_kernels(tmp_path, events, gather_ms, exposed_ms):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    with nullcontext() if gather_ms else pytest.raises(ValueError, match="gemm"):
        seen = timeline(trace)
        assert (seen.gather_ms, seen.exposed_ms) == (gather_ms, exposed_ms)


def survivor(rank: int, error: str = "DeadlineExceeded", **more) -> Survivor:
    facts = dict(freed_s=8.1, loss=math.nan, uses=(Use("step", error, "text"),), device_computes=True, wrong_bytes=0)
    return Survivor(rank, **(facts | more))


@pytest.mark.parametrize(
    "seen, missing, wrong",
    [
        (survivor(0), (), ""),
        (survivor(0, error="PeerLost", loss=None), (), ""),
        (survivor(0, error=""), (), "step: no error"),
        (survivor(0, error="RuntimeError"), (), "step: RuntimeError"),
        (survivor(0, freed_s=30.0), (), "30.0 s"),
        (survivor(0, loss=2.5), (), "gave 2.5"),
        (survivor(0, device_computes=False), (), "does not compute"),
        (survivor(0, wrong_bytes=4), (), "4 bytes"),
        (survivor(0), (1,), "rank 1: no result"),
    ],
)
def test_a_death_was_told_only_if_nobody_hung_or_went_on(seen, missing, wrong):
    assert wrong in (verdict := Dead("killed", 3, 8.0, (seen,), missing).verdict) and bool(verdict) is bool(wrong)
