"""Coverage: whatever is taken away from a complete layout, the plan is refused and the refusal names it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.support.plan_worlds import places, worlds
from xfer.errors import CoverageError, Unsupported
from xfer.mesh.box import Box, whole
from xfer.plan import intersect as intersect_module
from xfer.plan import intervals as iv
from xfer.plan.coverage import cast_kind
from xfer.plan.intersect import Stack, cut_range, find_atoms, intersect, missing
from xfer.plan.inventory import Kept, engine_inventory, trainer_inventory
from xfer.plan.planner import PlanOptions, plan_replica
from xfer.plan.program import ITEMSIZE
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Root, Span, TensorSpec

EXAMPLES = max(1, int(os.environ.get("XFER_EXAMPLES", "200")))
quick = settings(max_examples=EXAMPLES // 8 + 1, deadline=None, suppress_health_check=list(HealthCheck))


def plan(world, options=None):
    return plan_replica(world.catalog, world.sources(), world.takers(), options or world.options)


# ---- whole layouts with a part missing


@given(worlds(), st.data())
@quick
def test_bytes_that_nobody_holds_any_more_are_named(world, data):
    wanted = [(w, f) for w, side in enumerate(world.workers) for f in side.fragments]
    assume(wanted)
    w, f = data.draw(st.sampled_from(wanted))
    box = Box(f.origin, f.extent)
    for side in world.trainers:  # every holder of any byte of it is dropped
        side.fragments = [
            s for s in side.fragments if s.tensor != f.tensor or not box.intersect(Box(s.origin, s.extent))
        ]
    with pytest.raises(CoverageError) as e:
        plan(world)
    name = world.catalog.grouped(f.tensor)[0]
    assert any(v.startswith(name) and "held by no trainer" in v for v in e.value.violations)
    assert any(f"engine worker {w}" in v or "like it" in v for v in e.value.violations)


@given(worlds(), st.data())
@quick
def test_bytes_that_no_fragment_writes_any_more_would_stay_stale(world, data):
    side = data.draw(st.sampled_from(world.workers))
    assume(side.fragments)
    gone = data.draw(st.sampled_from(side.fragments))
    side.fragments.remove(gone)
    with pytest.raises(CoverageError) as e:
        plan(world)
    assert any(v.startswith(f"{gone.root} bytes ") and "would stay stale" in v for v in e.value.violations)


@given(worlds(), st.data())
@quick
def test_a_model_refitted_by_half_is_never_planned(world, data):
    """Half of one worker's tensors are not traced: whatever the half is, the plan is refused."""
    side = data.draw(st.sampled_from(world.workers))
    assume(side.fragments)
    keep = data.draw(st.integers(0, len(side.fragments) - 1))
    side.fragments = data.draw(st.permutations(side.fragments))[:keep]
    with pytest.raises(CoverageError, match="nothing was moved"):
        plan(world)


@given(worlds(), st.data())
@quick
def test_two_writers_of_a_byte_are_named(world, data):
    side = data.draw(st.sampled_from(world.workers))
    assume(side.fragments)
    f = data.draw(st.sampled_from(side.fragments))
    kind = data.draw(st.sampled_from(["fragment", "kept"]))
    if kind == "fragment":
        side.fragments.append(f)
    else:
        at = int(places(f.offset, f.extent, f.strides, 1).min())
        side.kept.append(Kept(f.root, at, at + 1, "because I say so"))
    with pytest.raises(CoverageError) as e:
        plan(world)
    line = next(v for v in e.value.violations if "claimed more than once" in v)
    assert line.startswith(f.root) and (kind == "fragment" or "because I say so" in line)


def test_all_violations_come_at_once():
    catalog = Catalog(tuple(TensorSpec(n, (4,), "int8") for n in "abcd"))
    source = trainer_inventory(
        catalog, rank=0, host="", roots=[Root("s", 16)],
        fragments=[Fragment(n, (0,), (4,), "s", 4 * i, (1,), "int8") for i, n in enumerate("acd")],
    )  # fmt: skip
    taker = engine_inventory(
        catalog, rank=0, host="", roots=[Root("t", 32)],
        fragments=[Fragment("a", (0,), (4,), "t", 0, (1,), "int8"), Fragment("b", (0,), (4,), "t", 2, (1,), "int8")],
        footprint=[Span("t", 0, 10)], reads=["a", "b"],
    )  # fmt: skip
    with pytest.raises(CoverageError) as e:
        plan_replica(catalog, [source], [taker])
    assert [v.split(":")[0] for v in e.value.violations] == ["b [0", "c", "d", "t bytes 2..4", "t bytes 6..10"]
    assert "a [0:4]" in e.value.violations[3] and "b [0:4]" in e.value.violations[3]
    excused = PlanOptions(drop=("c", "d*"))
    with pytest.raises(CoverageError) as e:
        plan_replica(catalog, [source], [taker], excused)
    assert len(e.value.violations) == 3  # drop excuses c and d, and nothing else


def experts(e: int = 4, read: int = 4):
    catalog = Catalog(tuple(TensorSpec(f"layers.0.experts.{i}.w", (2,), "int8") for i in range(e)))
    held = [Fragment(f"layers.0.experts.{i}.w", (0,), (2,), "s", 2 * i, (1,), "int8") for i in range(e)]
    source = trainer_inventory(catalog, rank=0, host="", roots=[Root("s", 2 * e)], fragments=held)
    taker = engine_inventory(
        catalog, rank=0, host="", roots=[Root("s", 2 * e)], fragments=held[:read], footprint=[Span("s", 0, 2 * read)]
    )
    return catalog, [source], [taker]


def test_single_experts_without_a_taker_are_named_by_their_checkpoint_names():
    assert plan_replica(*experts()).summary.nbytes == 8
    with pytest.raises(CoverageError) as e:
        plan_replica(*experts(read=2))
    assert [v.split(":")[0] for v in e.value.violations] == ["layers.0.experts.2.w", "layers.0.experts.3.w"]
    for drop in (("layers.0.experts.*.w",), ("layers.0.experts.2.w", "layers.0.experts.3.w")):
        assert plan_replica(*experts(read=2), PlanOptions(drop=drop)).summary.nbytes == 4


def test_every_class_of_bytes_is_counted():
    catalog = Catalog((TensorSpec("a", (4,), "int8"),))
    source = trainer_inventory(
        catalog, rank=0, host="", roots=[Root("s", 4)], fragments=[Fragment("a", (0,), (4,), "s", 0, (1,), "int8")]
    )
    parts = dict(
        roots=[Root("t", 20), Root("scratch/0", 4)],
        fragments=[Fragment("a", (0,), (4,), r, 0, (1,), "int8") for r in ("t", "scratch/0")],
        fills=[Fill("t", 4, (2,), (1,), "int8", b"\1")],
        staged=[Span("t", 6, 9)],
        kept=[Kept("t", 9, 10, "scale")],
        footprint=[Span("t", 0, 10), Span("t", 2, 4)],
    )
    done = plan_replica(catalog, [source], [engine_inventory(catalog, rank=0, host="", **parts)])
    c = done.summary.classes[0]
    assert (c.footprint, c.written, c.filled, c.staged, c.kept, c.aliased, c.scratch, c.outside) == (
        10,
        4,
        2,
        3,
        1,
        2,
        4,
        0,
    )
    assert (done.summary.direct, done.summary.staged) == (1, 1) and "kept 1 B: scale" in done.explain()
    for missing_part in ("fills", "staged", "kept"):
        less = engine_inventory(catalog, rank=0, host="", **{**parts, missing_part: ()})
        with pytest.raises(CoverageError, match="would stay stale"):
            plan_replica(catalog, [source], [less])


def test_nobody_is_told_to_keep_a_storage_that_is_half_sent():
    catalog = Catalog((TensorSpec("a", (4,), "int8"),))
    held = [Fragment("a", (0,), (4,), "s", 0, (1,), "int8")]
    source = trainer_inventory(catalog, rank=0, host="", roots=[Root("s", 4)], fragments=held)
    taker = engine_inventory(
        catalog, rank=0, host="", roots=[Root("s", 6), Root("t", 2)], fragments=held,
        footprint=[Span("s", 0, 6), Span("t", 0, 2)],
    )  # fmt: skip
    with pytest.raises(CoverageError, match="would stay stale") as e:
        plan_replica(catalog, [source], [taker])
    half, none = e.value.violations
    assert half.startswith("s bytes 4..6") and "keep=" not in half and half.endswith("send these too")
    assert none.startswith("t bytes 0..2") and "keep=" in none


# ---- dtypes


def held(checkpoint: str, trainer: str, engine: str):
    """One tensor: the catalog, the trainer and the worker that hold it in these dtypes."""
    catalog = Catalog((TensorSpec("bias", (4,), checkpoint),))

    def fragment(dtype):
        return Fragment("bias", (0,), (4,), "w", 0, (ITEMSIZE[dtype],), dtype), [Root("w", 4 * ITEMSIZE[dtype])]

    (f, r), (g, q) = fragment(trainer), fragment(engine)
    source = trainer_inventory(catalog, rank=0, host="", roots=r, fragments=[f])
    taker = engine_inventory(catalog, rank=0, host="", roots=q, fragments=[g], footprint=[Span("w", 0, q[0].nbytes)])
    return catalog, source, taker


@pytest.mark.parametrize(
    "checkpoint,trainer,engine,verdict",
    [
        ("bfloat16", "bfloat16", "bfloat16", "plain"),
        ("bfloat16", "bfloat16", "float32", "plain"),  # widening
        ("bfloat16", "float32", "bfloat16", "plain"),  # trained in fp32, the checkpoint is bf16
        ("float32", "float32", "bfloat16", "asked"),  # a router bias
        ("float32", "float64", "bfloat16", "asked"),
        ("bfloat16", "float32", "float16", "asked"),
        ("bfloat16", "bfloat16", "float16", "asked"),
        ("int32", "int32", "int64", "plain"),
        ("int64", "int64", "int32", "never"),
        ("float32", "float32", "int32", "never"),
        ("uint8", "uint8", "bfloat16", "never"),
        ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "never"),
        ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "plain"),
    ],
)
def test_what_may_be_cast(checkpoint, trainer, engine, verdict):
    catalog, source, taker = held(checkpoint, trainer, engine)
    if verdict == "plain":
        assert len(plan_replica(catalog, [source], [taker]).summary.casts) == (trainer != engine)
        return
    with pytest.raises(CoverageError, match=f"bias: {trainer}"):
        plan_replica(catalog, [source], [taker])
    asked = PlanOptions(narrow=("b*",))
    if verdict == "asked":
        assert plan_replica(catalog, [source], [taker], asked).summary.casts[0].example == "bias"
    else:
        with pytest.raises(CoverageError, match="no such conversion"):
            plan_replica(catalog, [source], [taker], asked)


def test_a_widening_cast_keeps_every_value():
    finite = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
    for a, x in finite.items():
        for b, y in finite.items():
            exact = np.finfo(x).nmant <= np.finfo(y).nmant
            assert (cast_kind(a, b) in ("equal", "widening")) == exact


def survives(narrow: str, wide: str) -> bool:
    """Whether values of `narrow` come back from `wide`: its largest, its least, and all last bits of 1 to 2."""
    dtype = getattr(torch, narrow)
    f = torch.finfo(dtype)
    values = torch.tensor([f.max, f.tiny, f.smallest_normal, 1 + f.eps, 2 - f.eps, f.tiny * f.eps], dtype=dtype)
    return torch.equal(values.to(getattr(torch, wide)).to(dtype), values)


def test_no_cast_that_loses_bits_of_trainer_and_checkpoint_passes_unasked():
    for checkpoint, trainer, engine in product(("bfloat16", "float16", "float32", "float64"), repeat=3):
        catalog, source, taker = held(checkpoint, trainer, engine)
        try:
            plan_replica(catalog, [source], [taker])
            unasked = True
        except CoverageError as e:
            unasked = False
            assert f"{trainer} in the" in str(e) and f"{checkpoint} in the" in str(e) and "narrow=" in str(e)
            assert plan_replica(catalog, [source], [taker], PlanOptions(narrow=("bias",))).summary.nbytes
        assert unasked == (survives(trainer, engine) or survives(checkpoint, engine)), (checkpoint, trainer, engine)


# ---- boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=EXAMPLES // 2 + 1, deadline=None)
def test_cut_boxes_are_the_range_in_order(extent, data):
    origin = [data.draw(st.integers(0, 5)) for _ in extent]
    n = int(np.prod(extent))
    a, b = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    number = np.full([o + e for o, e in zip(origin, extent)], -1)
    number[tuple(slice(o, None) for o in origin)] = np.arange(n).reshape(extent)
    boxes = cut_range(origin, extent, a, b)
    got = [number[tuple(slice(o, o + e) for o, e in zip(*box))].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *got]), np.arange(a, b))
    assert len(boxes) <= 2 * len(extent) - 1


COLUMNS = ("tensor", "origin", "extent", "signature", "hold_first", "hold_row")
PIECES = ("atom", "want", "origin", "extent")


@given(worlds())
@quick
def test_boxes_compared_together_or_tensor_by_tensor_meet_alike(world):
    """Which of the two ways a tensor goes, and in which portions, is a matter of speed."""
    stack, wants = Stack.of([i.table for i in world.sources()]), Stack.of([i.table for i in world.takers()])
    found = []
    for few, at_once in ((0, 1 << 20), (1 << 30, 1 << 20), (1 << 30, 3), (6, 5)):
        with patch.multiple(intersect_module, FEW=few, AT_ONCE=at_once):
            atoms = find_atoms(stack)
            pieces = intersect(atoms, wants)
        found.append([*(getattr(atoms, n) for n in COLUMNS), *(getattr(pieces, n) for n in PIECES)])
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other))


@given(worlds())
@quick
def test_atoms_are_disjoint_and_know_all_holders(world):
    sources, takers = world.sources(), world.takers()
    stack, wants = Stack.of([i.table for i in sources]), Stack.of([i.table for i in takers])
    atoms = find_atoms(stack)
    pieces = intersect(atoms, wants)

    def cut(o, e):
        return tuple(slice(a, a + n) for a, n in zip(o, e))

    shape = {t: [1] * (6 - len(s.shape)) + list(s.shape) for t, s in enumerate(world.catalog.tensors)}
    held = {(t, c): np.zeros(s, bool) for t, s in shape.items() for c in range(len(sources))}
    for row, c in enumerate(stack.class_of_row()):
        held[int(stack.table.tensor[row]), int(c)][cut(stack.table.origin[row], stack.table.extent[row])] = True
    seen = {t: np.zeros(s, int) for t, s in shape.items()}
    for a, t in enumerate(atoms.tensor.tolist()):
        box = cut(atoms.origin[a], atoms.extent[a])
        seen[t][box] += 1
        members = atoms.signatures[atoms.signature[a]]
        for c in range(len(sources)):
            assert held[t, c][box].all() if c in members else not held[t, c][box].any()
        for row, c in zip(atoms.hold_row[atoms.hold_first[a] : atoms.hold_first[a + 1]].tolist(), members):
            assert stack.first[c] <= row < stack.first[c + 1]
            low = stack.table.origin[row] <= atoms.origin[a]
            assert (
                low.all()
                and (atoms.origin[a] + atoms.extent[a] <= stack.table.origin[row] + stack.table.extent[row]).all()
            )
    for t in shape:
        assert np.array_equal(seen[t], np.any([held[t, c] for c in range(len(sources))], axis=0).astype(int))
    for row in range(len(wants.table)):
        t = int(wants.table.tensor[row])
        got = np.zeros(shape[t], int)
        for p in np.flatnonzero(pieces.want == row):
            got[cut(pieces.origin[p], pieces.extent[p])] += 1
        mask = np.zeros(shape[t], bool)
        mask[cut(wants.table.origin[row], wants.table.extent[row])] = True
        assert np.array_equal(got, (seen[t] & mask).astype(int))


@given(worlds(), st.data())
@quick
def test_missing_is_what_no_source_has(world, data):
    for side in world.trainers:
        side.fragments = [f for f in side.fragments if data.draw(st.booleans())]
    stack, wants = Stack.of([i.table for i in world.sources()]), Stack.of([i.table for i in world.takers()])
    told = dict(missing(intersect(find_atoms(stack), wants), wants))
    for row in range(len(wants.table)):
        box = Box(tuple(wants.table.origin[row].tolist()), tuple(wants.table.extent[row].tolist()))
        mask = np.zeros(box.end, int)
        mask[tuple(slice(o, None) for o in box.origin)] = 1
        for s in np.flatnonzero(stack.table.tensor == wants.table.tensor[row]):
            mask[tuple(slice(o, o + e) for o, e in zip(stack.table.origin[s], stack.table.extent[s]))] = 0
        for part in told.get(row, []):
            mask[tuple(slice(o, o + e) for o, e in zip(part.origin, part.extent))] -= 1
        assert not mask.any()


def test_a_tensor_cut_differently_by_its_holders_is_still_shared_by_all():
    spec = TensorSpec("t", (64, 64), "int64")
    catalog = Catalog((spec,))

    def source(rank, box):
        f = Fragment("t", box.origin, box.extent, "w", 0, (8 * box.extent[1], 8), "int64")
        return trainer_inventory(catalog, rank=rank, host="", roots=[Root("w", 8 * box.size)], fragments=[f])

    boxes = [whole((64, 64)), Box((0, 0), (64, 40)), Box((0, 24), (64, 40)), Box((10, 10), (50, 50))]
    f = Fragment("t", (0, 0), (64, 64), "w", 0, (512, 8), "int64")
    taker = engine_inventory(
        catalog, rank=0, host="", roots=[Root("w", 1 << 15)], fragments=[f], footprint=[Span("w", 0, 1 << 15)]
    )
    s = plan_replica(catalog, [source(i, b) for i, b in enumerate(boxes)], [taker], PlanOptions(align_bytes=8)).summary
    assert s.imbalance <= 1.01


# ---- bytes


@st.composite
def regions(draw):
    out = []
    for _ in range(draw(st.integers(0, 5))):
        extent = draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))
        strides = draw(st.lists(st.integers(-12, 12), min_size=3, max_size=3))
        item = draw(st.sampled_from([1, 2, 4]))
        out.append(
            (
                draw(st.integers(200, 230)),
                tuple(extent),
                tuple(s * draw(st.sampled_from([1, item])) for s in strides),
                item,
            )
        )
    return out


def table(rows):
    columns = [np.array([r[i] for r in rows], np.int64) for i in range(4)]
    return columns[0], columns[1].reshape(-1, 3), columns[2].reshape(-1, 3), columns[3]


@given(regions(), regions())
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


def test_interleaved_regions_cost_no_run_per_element():
    """Gate and up rows interleaved element by element over 2^20 elements: one run once both are there."""
    n = 1 << 20
    halves = [(2 * i, (1, 1, n), (0, 0, 4), 2) for i in range(2)]
    assert len(iv.runs(*table(halves))) == 1
    transposed = [(0, (1, 512, 2048), (0, 2, 1024), 2)]
    assert len(iv.runs(*table(transposed))) == 1


def test_regions_of_more_runs_than_can_be_proven_are_refused():
    with pytest.raises(Unsupported, match="separate byte runs"):
        iv.runs(*table([(0, (1, 1, 1 << 40), (0, 0, 4), 2)]))


def test_classes_of_equal_takers_are_reported_once():
    catalog, sources, takers = experts()
    taker = takers[0]
    lost = replace(sources[0], table=sources[0].table.take(np.arange(0)))
    with pytest.raises(CoverageError) as e:
        plan_replica(catalog, [lost], [taker, replace(taker, rank=1)])
    assert len(e.value.violations) == 1 and "and 1 like it" in e.value.violations[0]


def test_a_layout_that_is_too_scattered_to_be_proven_names_tensor_and_worker(monkeypatch):
    monkeypatch.setattr(iv, "MAX_RUNS", 15)
    catalog = Catalog((TensorSpec("few", (2, 2), "bfloat16"), TensorSpec("many", (4, 4), "bfloat16")))
    every_other = [
        Fragment("many", (0, 0), (4, 4), "w", 0, (16, 4), "bfloat16"),
        Fragment("few", (0, 0), (2, 2), "v", 0, (8, 2), "bfloat16"),
    ]
    roots = [Root("w", 64), Root("v", 16)]
    source = trainer_inventory(catalog, rank=0, host="", roots=roots, fragments=every_other)
    live = [Span("w", 0, 64), Span("v", 0, 16)]
    taker = engine_inventory(catalog, rank=0, host="", roots=roots, fragments=every_other, footprint=live)
    with pytest.raises(Unsupported, match="18 separate byte runs") as e:
        plan_replica(catalog, [source], [taker])
    assert e.value.violations == (
        "rank 1 (engine worker 0): many: 16 of them lie apart",
        "rank 1 (engine worker 0): few: 2 of them lie apart",
    )
