"""Sums of the bytes that a trainer sends: bound once per plan, and taken when they are begun, or else when asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_worlds import quick, worlds
from tests.support.row_worlds import row
from tests.support.sums import checksum_rows
from xfer.direct.sums import SourceSums
from xfer.kernels.checksum import Sums
from xfer.plan.checksum import added
from xfer.plan.inventory import footprint_rows
from xfer.plan.part import PlanPart
from xfer.plan.table import padded_shapes


def whole(value: torch.Tensor, **columns):
    """One row over a dense tensor, both ends alike."""
    return row(tuple(value.shape), src_dtype="bfloat16", **columns)


GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def made(device: str, elements: int) -> tuple[torch.Tensor, SimpleNamespace, SourceSums]:
    """(values, a plan that sends all of them to worker 0 of two, the sums)."""
    value = torch.randn(elements, dtype=torch.bfloat16, device=device)
    rows = whole(value, dst=1)
    program, none = SimpleNamespace(rows=rows), np.zeros((0, 2), np.int32)
    plan = SimpleNamespace(program=program, trainers=1, workers=2, shared=rows[:0], handed_on=none)
    return value, plan, SourceSums(0, [value.view(torch.uint8)], [(elements,)])


def expected(value: torch.Tensor) -> list[int]:
    return [checksum_rows(whole(value), [value.view(torch.uint8)], "src", [(value.numel(),)]), 0]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_sums_are_of_the_bytes_when_asked_for_and_are_bound_once(device):
    value, plan, sums = made(device, 1 << 16)
    assert sums.values(0, plan, 1) == expected(value)
    held = sums.bind(0, plan)
    value.add_(1)
    assert sums.values(0, plan, 2) == expected(value) and sums.bind(0, plan) is held
    other = SimpleNamespace(**vars(plan))
    assert sums.bind(0, other) is not held and sums.replicas == {0}
    sums.begin({0: plan}, 3)  # the plan is gone: not begun
    assert sums.values(0, other, 3) == expected(value)
    SourceSums(0, [], []).begin({0: plan}, 1)
    sums.end()


@given(st.booleans().flatmap(worlds))
@quick
def test_the_sums_of_all_trainers_are_those_of_the_bytes_that_each_worker_is_to_hold(world):
    """Whether it gets them from a trainer or from another worker."""
    plan, shapes = world.plan(), padded_shapes(world.catalog)
    sent = [0] * plan.workers
    for inv, side in zip(world.sources(), world.trainers):
        roots = [torch.from_numpy(side.storage[r.name]) for r in inv.roots]
        part = PlanPart.from_bytes(PlanPart.of(plan, inv.rank).to_bytes())
        sent = list(map(added, sent, SourceSums(inv.rank, roots, shapes).values(0, part, 1)))
    for inv, side, value in zip(world.destinations(), world.workers, sent):
        want = world.expected(side)
        roots = [torch.from_numpy(want[r.name]) for r in inv.roots]
        assert Sums.of_one(footprint_rows(inv), roots, "dst", shapes).values() == [value]


@pytest.mark.parametrize("device", [GPU])
def test_sums_that_were_begun_are_of_that_moment_and_of_that_attempt_only(device):
    value, plan, sums = made(device, 1 << 28)
    aside = torch.cuda.Stream()
    sums.bind(0, plan)
    old = expected(value)
    sums.begin({0: plan}, 1)
    value.add_(1)  # on the same stream, so after the sum: whoever reads anew sees it
    new = expected(value)
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        assert sums.values(0, plan, 1) == old != new
        assert sums.values(0, plan, 1) == new, "taken once"
    sums.begin({0: plan}, 2)
    value.add_(1)
    torch.cuda.synchronize()
    newest = expected(value)
    assert sums.values(0, plan, 3) == newest != new, "of another attempt"
    for attempt in (4, 5):  # 4 never asks; 5 begins on another stream, at once
        with torch.cuda.stream(aside):
            aside.wait_stream(torch.cuda.default_stream())
            sums.begin({0: plan}, attempt)
    sums.begin({0: plan}, 6)
    assert sums.values(0, plan, 6) == newest
    sums.begin({0: plan}, 7)
    sums.end()
    assert sums.values(0, plan, 7) == newest
