"""Digests of boxes that several trainers hold: all such boxes are compared, and every bit of them counts. Sums of the bytes that a trainer
sends, and checksums of a worker that begin while bytes move."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.plan_worlds import PORTIONS, SIZE, World, in_portions, quick, source, worlds
from tests.support.row_worlds import Heap, row
from tests.support.trace_maps import places
from tests.unit.test_kernels_checksum import checksum_rows
from xfer.direct import holders
from xfer.direct.early import FIRST, EarlySums, first_storages, whole_storages
from xfer.direct.sums import SourceSums
from xfer.errors import ProtocolError
from xfer.kernels.checksum import Sums
from xfer.plan.checksum import added
from xfer.plan.holders import HELD, differences
from xfer.plan.inventory import footprint_rows
from xfer.plan.part import PlanPart
from xfer.plan.program import Op, row_wire_bytes
from xfer.plan.relay import in_parts
from xfer.plan.table import padded_shapes
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, TensorSpec


def cells(origin, extent) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + e) for o, e in zip(origin, extent, strict=True))))


def held_by(world: World) -> tuple[dict[tuple, set[int]], set[tuple]]:
    """(canonical tensor, element) -> the trainers that hold it; and those that some worker wants."""
    wanted, out = set(), defaultdict(set)
    for inv in (*world.sources(), *world.destinations()):
        for t, o, e in zip(inv.table.tensor.tolist(), inv.table.origin.tolist(), inv.table.extent.tolist()):
            for at in cells(o, e):
                if inv.side == "engine":
                    wanted.add((t, at))
                else:
                    out[t, at].add(inv.rank)
    return out, wanted


def told(world: World) -> dict[int, bytes]:
    """Return what each trainer reports of its storages in a verified refit."""
    plan, shapes, out = world.plan(), padded_shapes(world.catalog), {}
    for inv in world.sources():
        part = PlanPart.from_bytes(PlanPart.of(plan, inv.rank).to_bytes())
        roots = [torch.from_numpy(world.trainers[inv.rank].storage[r.name]) for r in inv.roots]
        sums = holders.SharedSums(part.shared, roots, shapes)
        out[inv.rank] = sums.told(sums.sums.values())
    return out


@given(worlds(), PORTIONS)
@quick
def test_what_is_compared_is_all_that_several_trainers_hold_of_what_workers_take(world, portions):
    """Boxes are compared whole where a worker takes a part of them, and on all holders."""
    with in_portions(portions):
        plan = world.plan()
    seen: dict[tuple, set[tuple[int, int]]] = defaultdict(set)
    for rank in range(len(world.trainers)):
        mine = set()
        for r in plan.shared(rank):
            for at in cells(r["origin"].tolist(), r["extent"].tolist()):
                key = int(r["tensor"]), at
                assert key not in mine, "counted twice"
                mine.add(key)
                seen[key].add((rank, int(r["dst"])))
    holders_of, wanted = held_by(world)
    assert {k for k, ranks in holders_of.items() if len(ranks) > 1 and k in wanted} <= seen.keys()
    numbers = {}
    for key, v in seen.items():
        ranks, (number,) = {rank for rank, _ in v}, {number for _, number in v}
        assert ranks == holders_of[key] and len(ranks) > 1
        assert numbers.setdefault(number, ranks) == ranks, "one number, one set"
    assert not len(plan.shared(len(world.trainers))), "workers hold nothing to compare"


@given(worlds(), st.data())
@quick
def test_one_byte_that_differs_on_one_holder_is_told_with_its_tensor_and_no_other_is(world, data):
    world.load_trainers()
    assert differences(told(world), world.catalog) == []
    holders_of, wanted = held_by(world)
    shared = sorted(k for k in wanted if len(holders_of[k]) > 1)
    assume(shared)
    tensor, at = data.draw(st.sampled_from(shared))
    rank = data.draw(st.sampled_from(sorted(holders_of[tensor, at])))
    (inv,) = (i for i in world.sources() if i.rank == rank)
    t = inv.table
    rows = [
        i for i in range(len(t)) if t.tensor[i] == tensor and at in cells(t.origin[i].tolist(), t.extent[i].tolist())
    ]
    for i in rows:  # a box that lies twice on one rank: both, since only one of them is read
        byte = int(t.offset[i] + (np.array(at) - t.origin[i]) @ t.strides[i])
        world.trainers[rank].storage[inv.roots[t.root[i]].name][byte] ^= data.draw(st.integers(1, 255), label="bits")
        if len({inv.roots[t.root[i]].name for i in rows}) == 1:
            break
    (line,) = differences(told(world), world.catalog)
    assert line.startswith(f"{world.catalog.tensors[tensor].name}: one content on ")
    assert str(rank) in line


def entries(**digests: dict[int, int]) -> tuple[dict[int, bytes], Catalog]:
    """digests: of one box of each tensor, by rank."""
    catalog = Catalog(tuple(TensorSpec(n, (4,), "int8") for n in sorted(digests)))
    out: dict[int, bytes] = defaultdict(bytes)
    for name, by_rank in digests.items():
        for rank, digest in by_rank.items():
            out[rank] += np.array([(catalog.index[name], 7, digest)], HELD).tobytes()
    return out, catalog


def test_there_is_one_line_for_each_way_to_differ():
    many = {f"layer{i}": {0: 5, 1: 6, 2: 5} for i in range(12)}
    raw, catalog = entries(a={0: 1, 1: 1}, b={0: 1, 1: 2, 2: 3}, **many)
    assert differences(raw, catalog) == [
        "b: one content on trainer 0, another on trainer 1, another on trainer 2",
        "12 tensors, such as layer0, layer1, layer10: one content on trainers 0, 2, another on trainer 1",
    ]
    raw, catalog = entries(x={r: r // 20 for r in range(40)})
    (line,) = differences(raw, catalog)
    assert line.count("and 12 more") == 2
    for broken in (raw[0][:-1], np.array([(9, 7, 1)], HELD).tobytes()):
        with pytest.raises(ProtocolError):
            differences({0: broken}, catalog)
    assert differences({0: b"", 1: b""}, catalog) == []


# ---- the sample


def sampled(value: torch.Tensor, seed: int = 0, drop=()) -> bytes:
    """The sample of a rank that holds `value` whole, in a storage with its dims in any order, padded, some of them reversed."""
    item, name, shape = value.element_size(), str(value.dtype).removeprefix("torch."), tuple(value.shape)
    catalog, heap = Catalog((TensorSpec("w", shape, name),)), Heap(np.random.default_rng(seed), 1)
    _, offset, strides = heap.place("src", shape, item, True).values()
    (storage,) = heap.storages()
    storage[places(offset, shape, strides, item)] = value.reshape(-1).view(torch.uint8).view(-1, item).numpy()
    made = source(catalog, [Fragment("w", (0,) * value.dim(), shape, "s", offset, strides, name)], {"s": len(storage)})
    return holders.sample(catalog, made, [torch.from_numpy(storage)], drop)


SEEDS = st.integers(0, 2**32 - 1)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.sampled_from(sorted(SIZE)), SEEDS, SEEDS)
@quick
def test_a_sample_depends_on_values_and_not_on_where_they_lie(shape, dtype, here, there):
    n = int(np.prod(shape)) * SIZE[dtype]
    value = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(here))
    sample, other = (sampled(v.view(getattr(torch, dtype)).view(shape), here) for v in (value, value ^ 1))
    assert sampled(value.view(getattr(torch, dtype)).view(shape), there) == sample != other
    assert len(sample) == HELD.itemsize


def test_a_sample_is_small_and_spread_over_the_box():
    value = torch.zeros(5000, 300, dtype=torch.int16)
    plain = sampled(value)
    for rows in (slice(0, 200), slice(2400, 2600), slice(4800, 5000)):
        for columns in (slice(0, 20), slice(280, 300)):
            changed = value.clone()
            changed[rows, columns] = 1
            assert sampled(changed) != plain
    assert sampled(value, drop=("w",)) == b""


# ---- sums of bytes that are sent

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
