"""benchmarks.layerwise_gpu: how it reads a profiler's timeline and judges a rank's death."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.layerwise_dead import Dead, Survivor, Use
from benchmarks.lib.layerwise_net import timeline, uncovered

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda x: (x[0], x[0] + x[1])), max_size=12)


@given(SPANS, SPANS)
def test_what_is_uncovered_is_what_counting_points_gives(spans, cover):
    points = lambda those: {t for a, b in those for t in range(a, b)}  # noqa: E731
    assert uncovered(spans, cover) == len(points(spans) - points(cover))


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
