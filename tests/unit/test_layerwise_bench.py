"""Arithmetic of scripts/bench_layerwise_gpu.py: what of a gather lies bare on a profiler's timeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench_layerwise_net import timeline, uncovered

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda x: (x[0], x[0] + x[1])), max_size=12)


@given(SPANS, SPANS)
def test_what_is_uncovered_is_what_counting_points_gives(spans, cover):
    points = lambda those: {t for a, b in those for t in range(a, b)}  # noqa: E731
    assert uncovered(spans, cover) == len(points(spans) - points(cover))


def test_a_trace_has_gathers_told_from_reductions_and_other_kernels(tmp_path):
    kernel = lambda name, ts, dur: {"cat": "kernel", "name": name, "ts": ts, "dur": dur}  # noqa: E731
    events = [
        kernel("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0.0, 1000.0),
        kernel("gemm", 500.0, 2000.0),
        kernel("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2400.0, 600.0),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5000.0, 900.0),
        {"cat": "cpu_op", "name": "nccl:broadcast", "ts": 0.0, "dur": 9000.0},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    seen = timeline(tmp_path / "trace.json", steps=2)
    assert (seen.gather_ms, seen.exposed_ms) == (0.8, 0.5)
    (tmp_path / "none.json").write_text(json.dumps({"traceEvents": events[1:2]}))
    with pytest.raises(ValueError, match="gemm"):
        timeline(tmp_path / "none.json", steps=2)
