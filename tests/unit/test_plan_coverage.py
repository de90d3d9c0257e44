"""Coverage: whatever is taken away from a complete layout, the plan is refused and the error names it."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.plan_worlds import PORTIONS, dense, destination, in_portions, quick, source, worlds
from tests.support.trace_maps import places
from xfer.errors import CoverageError, Unsupported
from xfer.mesh.box import Box
from xfer.plan import intervals as iv
from xfer.plan.intersect import Stack, find_atoms, intersect, missing
from xfer.plan.inventory import Kept
from xfer.plan.planner import PlanOptions, plan_replica
from xfer.plan.program import ITEMSIZE
from xfer.plan.table import padded_shapes
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Span, TensorSpec


def violations(catalog, sources, destinations, options=None) -> tuple[str, ...]:
    with pytest.raises(CoverageError, match="nothing was moved") as e:
        plan_replica(catalog, sources, destinations, options or PlanOptions())
    return e.value.violations


# ---- complete layouts with a part missing


@given(worlds(), st.data())
@settings(quick, max_examples=EXAMPLES // 3 + 1)
def test_what_is_taken_away_or_written_twice_is_named(world, data):
    w, side = data.draw(st.sampled_from(list(enumerate(world.workers))))
    assume(side.fragments)
    f = data.draw(st.sampled_from(side.fragments))
    what = data.draw(st.sampled_from(["holders", "fragment", "half", "written twice", "kept too"]))
    if what == "holders":  # of any byte of it
        box = Box(f.origin, f.extent)
        for trainer in world.trainers:
            trainer.fragments = [
                s for s in trainer.fragments if s.tensor != f.tensor or not box.intersect(Box(s.origin, s.extent))
            ]
    elif what == "fragment":
        side.fragments.remove(f)
    elif what == "half":
        keep = data.draw(st.integers(0, len(side.fragments) - 1))
        side.fragments = data.draw(st.permutations(side.fragments))[:keep]
    elif what == "written twice":
        side.fragments.append(f)
    else:
        at = int(places(f.offset, f.extent, f.strides, 1).min())
        side.kept.append(Kept(f.root, at, at + 1, "because I say so"))
    bad = violations(world.catalog, world.sources(), world.destinations(), world.options)
    if what == "holders":
        assert any(v.startswith(world.catalog.grouped(f.tensor)[0]) and "held by no trainer" in v for v in bad)
        assert any(f"engine worker {w}" in v or "like it" in v for v in bad)
    elif what == "fragment":
        assert any(v.startswith(f"{f.root} bytes ") and "would stay stale" in v for v in bad)
    elif what != "half":
        line = next(v for v in bad if "claimed more than once" in v)
        assert line.startswith(f.root) and (what == "written twice" or "because I say so" in line)


def test_all_violations_come_at_once():
    catalog = Catalog(tuple(TensorSpec(n, (4,), "int8") for n in "abcd"))
    held = source(catalog, [dense(n, (4,), "int8", offset=4 * i) for i, n in enumerate("acd")], {"w": 16})
    wanted = [dense("a", (4,), "int8"), dense("b", (4,), "int8", offset=2)]
    worker = destination(catalog, wanted, {"w": 32}, footprint=[Span("w", 0, 10)], reads=["a", "b"])
    bad = violations(catalog, [held], [worker])
    assert [v.split(":")[0] for v in bad] == ["b [0", "c", "d", "w bytes 2..4", "w bytes 6..10"]
    assert "a [0:4]" in bad[3] and "b [0:4]" in bad[3]
    excused = violations(catalog, [held], [worker], PlanOptions(drop=("c", "d*")))
    assert excused == (bad[0], *bad[3:])  # drop excuses c and d, and nothing else


def experts(read: int = 4):
    catalog = Catalog(tuple(TensorSpec(f"layers.0.experts.{i}.w", (2,), "int8") for i in range(4)))
    held = [dense(s.name, (2,), "int8", offset=2 * i) for i, s in enumerate(catalog.specs)]
    worker = destination(catalog, held[:read], {"w": 8}, footprint=[Span("w", 0, 2 * read)])
    return catalog, [source(catalog, held, {"w": 8})], [worker]


def test_single_experts_without_a_worker_are_named_by_their_checkpoint_names():
    assert plan_replica(*experts()).summary.nbytes == 8
    bad = violations(*experts(read=2))
    assert [v.split(":")[0] for v in bad] == ["layers.0.experts.2.w", "layers.0.experts.3.w"]
    for drop in (("layers.0.experts.*.w",), ("layers.0.experts.2.w", "layers.0.experts.3.w")):
        assert plan_replica(*experts(read=2), PlanOptions(drop=drop)).summary.nbytes == 4


def test_classes_of_equal_destinations_are_reported_once():
    catalog, sources, (worker,) = experts()
    lost = replace(sources[0], table=sources[0].table.take(np.arange(0)))
    (line,) = violations(catalog, [lost], [worker, replace(worker, rank=1)])
    assert "and 1 like it" in line


def test_every_class_of_bytes_is_counted():
    catalog = Catalog((TensorSpec("a", (4,), "int8"),))
    sources = [source(catalog, [dense("a", (4,), "int8")], {"w": 4})]
    wanted, roots = [dense("a", (4,), "int8", root) for root in ("w", "scratch/0")], {"w": 20, "scratch/0": 4}
    rest = dict(
        fills=[Fill("w", 4, (2,), (1,), "int8", b"\1")], staged=[Span("w", 6, 9)], kept=[Kept("w", 9, 10, "scale")]
    )
    footprint = [Span("w", 0, 10), Span("w", 2, 4)]
    done = plan_replica(catalog, sources, [destination(catalog, wanted, roots, footprint=footprint, **rest)])
    c = done.summary.classes[0]
    assert (c.footprint, c.written, c.filled, c.staged, c.kept) == (10, 4, 2, 3, 1)
    assert (c.aliased, c.scratch, c.outside) == (2, 4, 0)
    assert (done.summary.direct, done.summary.staged) == (1, 1) and "kept 1 B: scale" in done.explain()
    for part in rest:
        less = destination(catalog, wanted, roots, footprint=footprint, **{**rest, part: ()})
        assert "would stay stale" in violations(catalog, sources, [less])[0]


def test_keep_is_not_proposed_for_a_storage_that_is_half_sent():
    catalog, held = Catalog((TensorSpec("a", (4,), "int8"),)), [dense("a", (4,), "int8")]
    half, none = violations(catalog, [source(catalog, held, {"w": 4})], [destination(catalog, held, {"w": 6, "x": 2})])
    assert half.startswith("w bytes 4..6") and "keep=" not in half and half.endswith("send these too")
    assert none.startswith("x bytes 0..2") and "keep=" in none


# ---- dtypes


def one_tensor(checkpoint: str, trainer: str, engine: str):
    """A catalog, a trainer and a worker of one tensor in these dtypes."""
    catalog = Catalog((TensorSpec("bias", (4,), checkpoint),))
    held, wanted = (
        ([Fragment("bias", (0,), (4,), "w", 0, (ITEMSIZE[d],), d)], {"w": 4 * ITEMSIZE[d]}) for d in (trainer, engine)
    )
    return catalog, [source(catalog, *held)], [destination(catalog, *wanted)]


@pytest.mark.parametrize(
    "held, wanted", [("int64", "int32"), ("float32", "int32"), ("uint8", "bfloat16"), ("float8_e4m3fn", "bfloat16")]
)
def test_no_other_kind_is_converted_even_if_asked(held, wanted):
    inputs = one_tensor(held, held, wanted)
    assert violations(*inputs)[0].startswith(f"bias: {held}")
    assert "no such conversion" in violations(*inputs, PlanOptions(narrow=("b*",)))[0]


def survives(narrow: str, wide: str) -> bool:
    """Whether values of `narrow` come back from `wide`: its largest, its least, and all last bits of 1 to 2."""
    dtype = getattr(torch, narrow)
    f = torch.finfo(dtype)
    values = torch.tensor([f.max, f.tiny, f.smallest_normal, 1 + f.eps, 2 - f.eps, f.tiny * f.eps], dtype=dtype)
    return torch.equal(values.to(getattr(torch, wide)).to(dtype), values)


def test_no_cast_that_loses_bits_of_trainer_and_checkpoint_passes_unasked():
    for held, wanted in (("int32", "int64"), ("float8_e4m3fn", "float8_e4m3fn")):
        assert len(plan_replica(*one_tensor(held, held, wanted)).summary.casts) == (held != wanted)
    for checkpoint, trainer, engine in product(("bfloat16", "float16", "float32", "float64"), repeat=3):
        inputs = one_tensor(checkpoint, trainer, engine)
        if survives(trainer, engine) or survives(checkpoint, engine):
            assert len(plan_replica(*inputs).summary.casts) == (trainer != engine)
            continue
        (line,) = violations(*inputs)
        assert f"{trainer} in the" in line and f"{checkpoint} in the" in line and "narrow=" in line
        assert plan_replica(*inputs, PlanOptions(narrow=("b*",))).summary.casts[0].example == "bias"


# ---- boxes


@given(worlds(), st.data(), PORTIONS)
@quick
def test_of_a_wish_pieces_are_the_held_part_and_missing_is_the_rest(world, data, portions):
    for side in world.trainers:
        side.fragments = [f for f in side.fragments if data.draw(st.integers(0, 3))]
    have, wants = (Stack.of([i.table for i in side]) for side in (world.sources(), world.destinations()))
    with in_portions(portions):
        pieces = intersect(find_atoms(have), wants)
    lacking = dict(missing(pieces, wants))

    def painted(boxes, tensor: int) -> np.ndarray:
        out = np.zeros(padded_shapes(world.catalog)[tensor], int)
        for origin, extent in boxes:
            out[tuple(slice(o, o + n) for o, n in zip(origin, extent))] += 1
        return out

    for row, t in enumerate(wants.table.tensor.tolist()):
        mine, held = pieces.want == row, have.table.tensor == t
        got = painted(zip(pieces.origin[mine], pieces.extent[mine]), t)
        lack = painted(((b.origin, b.extent) for b in lacking.get(row, [])), t)
        wish = painted([(wants.table.origin[row], wants.table.extent[row])], t)
        there = painted(zip(have.table.origin[held], have.table.extent[held]), t) > 0
        assert np.array_equal(got, wish * there) and np.array_equal(lack, wish * ~there)


# ---- bytes


three = [st.tuples(*[numbers] * 3) for numbers in (st.integers(1, 5), st.integers(-12, 12))]
regions = st.lists(st.tuples(st.integers(200, 230), *three, st.sampled_from([1, 2, 4])), max_size=5)


def table(rows):
    columns = [np.array([r[i] for r in rows], np.int64) for i in range(4)]
    return columns[0], columns[1].reshape(-1, 3), columns[2].reshape(-1, 3), columns[3]


@given(regions, regions)
@settings(max_examples=EXAMPLES // 2 + 1, deadline=None)
def test_runs_are_the_bytes_with_their_repeats(a, b):
    def brute(rows):
        return Counter(int(p) for r in rows for p in places(*r).reshape(-1))

    def spread(runs):
        return Counter(int(p) for s, e in zip(runs.start, runs.stop) for p in range(s, e))

    ra, rb = iv.runs(*table(a)), iv.runs(*table(b))
    assert spread(ra) == brute(a)
    twice = iv.overlaps(ra)
    assert set(spread(twice)) == {p for p, n in brute(a).items() if n > 1}
    ua, ub = iv.union(ra.start, ra.stop), iv.union(rb.start, rb.stop)
    assert iv.size(ua) == len(brute(a)) and (ua[0][1:] > ua[1][:-1]).all()
    rest = iv.difference(ua, ub)
    assert {p for s, e in zip(*rest) for p in range(s, e)} == set(brute(a)) - set(brute(b))


def test_interleaved_regions_cost_no_run_per_element_and_more_runs_than_can_be_proven_are_refused(monkeypatch):
    gate_and_up = [(2 * i, (1, 1, 1 << 20), (0, 0, 4), 2) for i in range(2)]
    transposed = [(0, (1, 512, 2048), (0, 2, 1024), 2)]
    assert len(iv.runs(*table(gate_and_up))) == len(iv.runs(*table(transposed))) == 1
    with pytest.raises(Unsupported, match="separate byte runs"):
        iv.runs(*table([(0, (1, 1, 1 << 40), (0, 0, 4), 2)]))
    monkeypatch.setattr(iv, "MAX_RUNS", 15)
    catalog = Catalog((TensorSpec("few", (2, 2), "bfloat16"), TensorSpec("many", (4, 4), "bfloat16")))
    every_other = [
        Fragment(name, (0, 0), (n, n), root, 0, (4 * n, n), "bfloat16")
        for name, n, root in (("many", 4, "w"), ("few", 2, "v"))
    ]
    inputs = catalog, every_other, {"w": 64, "v": 16}
    with pytest.raises(Unsupported, match="18 separate byte runs") as e:
        plan_replica(catalog, [source(*inputs)], [destination(*inputs)])
    assert e.value.violations == (
        "rank 1 (engine worker 0): many: 16 of them lie apart",
        "rank 1 (engine worker 0): few: 2 of them lie apart",
    )
