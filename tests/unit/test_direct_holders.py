"""Digests of boxes that several trainers hold: all such boxes are compared, and every bit of them counts."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.plan_worlds import PORTIONS, SIZE, World, in_portions, quick, source, worlds
from xfer.direct import holders
from xfer.errors import ProtocolError
from xfer.plan.holders import HELD, differences
from xfer.plan.part import PlanPart
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


def sampled(value: torch.Tensor, order: list[int], back: list[int], drop=()) -> bytes:
    """The sample of a rank that holds `value` whole, in a storage with its dims in this order, some of them reversed."""
    item, name = value.element_size(), str(value.dtype).removeprefix("torch.")
    catalog = Catalog((TensorSpec("w", tuple(value.shape), name),))
    laid = value.flip(back).permute(order).contiguous()
    strides, step = [0] * value.dim(), item
    for d in reversed(order):
        strides[d], step = step, step * value.shape[d]
    offset = sum((value.shape[d] - 1) * strides[d] for d in back)
    strides = [0 if n == 1 else -s if d in back else s for d, (n, s) in enumerate(zip(value.shape, strides))]
    fragment = Fragment("w", (0,) * value.dim(), tuple(value.shape), "s", offset, tuple(strides), name)
    made = source(catalog, [fragment], {"s": value.nbytes})
    return holders.sample(catalog, made, [laid.reshape(-1).view(torch.uint8)], drop)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.sampled_from(sorted(SIZE)), st.data())
@quick
def test_a_sample_depends_on_values_and_not_on_where_they_lie(shape, dtype, data):
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    n = int(np.prod(shape)) * SIZE[dtype]
    value = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=g).view(getattr(torch, dtype)).view(shape)
    order = data.draw(st.permutations(range(len(shape))))
    back = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    plain = sampled(value, list(range(len(shape))), [])
    assert sampled(value, list(order), back) == plain and len(plain) == HELD.itemsize
    other = value.view(torch.uint8) ^ 1
    assert sampled(other.view(value.dtype), list(order), back) != plain


def test_a_sample_is_small_and_spread_over_the_box():
    value = torch.zeros(5000, 300, dtype=torch.int16)
    plain = sampled(value, [0, 1], [])
    for rows in (slice(0, 200), slice(2400, 2600), slice(4800, 5000)):
        for columns in (slice(0, 20), slice(280, 300)):
            changed = value.clone()
            changed[rows, columns] = 1
            assert sampled(changed, [0, 1], []) != plain
    assert sampled(value, [0, 1], [], drop=("w",)) == b""
