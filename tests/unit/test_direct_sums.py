"""Sums of the bytes that a trainer sends, and checksums of a worker that begin while bytes move."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plan_worlds import quick, worlds
from tests.support.row_worlds import row
from tests.support.sums import checksum_rows
from xfer.direct.early import FIRST, EarlySums, first_storages, whole_storages
from xfer.direct.sums import SourceSums
from xfer.kernels.checksum import Sums
from xfer.plan.checksum import added
from xfer.plan.inventory import footprint_rows
from xfer.plan.part import PlanPart
from xfer.plan.program import Op, row_wire_bytes
from xfer.plan.relay import in_parts
from xfer.plan.table import padded_shapes

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def made(device: str, elements: int) -> tuple[torch.Tensor, SimpleNamespace, SourceSums]:
    """(values, a plan that sends all of them to worker 0 of two, the sums)."""
    value = torch.randn(elements, dtype=torch.bfloat16, device=device)
    rows = row(tuple(value.shape), dst=1)
    program, none = SimpleNamespace(rows=rows), np.zeros((0, 2), np.int32)
    plan = SimpleNamespace(program=program, trainers=1, workers=2, shared=rows[:0], handed_on=none)
    return value, plan, SourceSums(0, [value.view(torch.uint8)], [(elements,)])


def expected(value: torch.Tensor) -> list[int]:
    return [checksum_rows(row(tuple(value.shape)), [value.view(torch.uint8)], "src", [(value.numel(),)]), 0]


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


# ---- begun while bytes move

STORAGES = 5


@st.composite
def rows(draw):
    """(rows that are pulled, other rows), of one taker."""
    made = [[], []]
    for k in range(draw(st.integers(1, 12))):
        size, root = draw(st.integers(0, 40)), draw(st.integers(0, STORAGES - 1))
        r = row((size,), src=0, dst=1, tensor=k)
        r["dst_root"], r["dst_offset"] = root, 128 * k
        if draw(st.integers(0, 5)) == 0:
            r["op"] = Op.FILL
        made[draw(st.integers(0, 3)) == 0].append(r)
    empty = row((0,), src=0, dst=1)[:0]
    return tuple(np.concatenate([empty, *some]) for some in made)


def test_three_of_four_equal_storages_come_first():
    """The others are written by another route, or come in the last part."""
    some = np.concatenate([row((4096,), src=0, dst=1, tensor=k) for k in range(4)])
    some["dst_root"] = range(4)
    assert first_storages(some, some[:0]).tolist() == [0, 1, 2]
    assert first_storages(some, some[1:2]).tolist() == [0, 2, 3]
    for parts, others, want in ((4, some[:0], (2, [0, 1, 2])), (8, some[1:2], (5, [0, 2]))):
        part, first = whole_storages(in_parts(some, parts), others)
        assert (part, first.tolist()) == want
    assert not len(whole_storages(in_parts(some, 1), some[:0])[1])


@given(rows(), st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_the_sum_is_that_of_all_rows_whatever_comes_later(worlds, parts):
    """What comes after the first storages are whole writes in none of them. `parts`: of a relay chain; 0 without one."""
    pulled, others = worlds
    pulled = pulled[pulled["op"] != Op.FILL]
    pulled = in_parts(pulled, parts) if parts else pulled
    everything, shapes = np.concatenate([pulled, others]), [(40,)] * 12
    final = [torch.randint(0, 255, (2048,), dtype=torch.uint8) for _ in range(STORAGES)]
    roots = [torch.zeros_like(t) for t in final]
    if parts:
        part, first = whole_storages(pulled, others)
        assert not len(first) or part < pulled["wave"].max()
        gate = EarlySums(everything, roots, shapes, first, part)
    else:
        first, nbytes = first_storages(pulled, others), row_wire_bytes(pulled)
        assert nbytes[np.isin(pulled["dst_root"], first)].sum() <= FIRST * nbytes.sum()
        assert not np.isin(others["dst_root"][others["op"] != Op.FILL], first).any()
        gate = EarlySums(everything, roots, shapes, first)
        pulled = gate.parts(pulled)
    for wave in sorted(set(pulled["wave"].tolist())):
        for r in pulled[pulled["wave"] == wave]:
            live, want = (t[r["dst_root"]] for t in (roots, final))
            at = slice(r["dst_offset"], r["dst_offset"] + int(row_wire_bytes(r[None])[0]))
            live[at] = want[at]
        gate.after(wave, None)
    for live, t in zip(roots, final):
        live.copy_(t)
    assert gate.value() == checksum_rows(everything, final, "dst", shapes)
