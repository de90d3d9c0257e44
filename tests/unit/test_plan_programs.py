"""Programs do what the fragments say: every byte right and written once, the same plan on every rank, within the bounds."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.plan_worlds import PORTIONS, dense, destination, execute, in_portions, quick, source, worlds
from xfer.errors import LayoutError, Unsupported
from xfer.plan.inventory import Inventory, Kept
from xfer.plan.part import PlanPart
from xfer.plan.planner import PlanOptions, SubPlan, plan_replica
from xfer.plan.program import ITEM, ROW, Op, row_wire_bytes
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Span, TensorSpec


@given(st.booleans().flatmap(worlds), PORTIONS)
@settings(quick, max_examples=EXAMPLES // 2 + 1)
def test_every_destination_byte_is_right_and_written_once(world, portions):
    with in_portions(portions):
        plan = world.plan()
    out, count = execute(plan, world)
    for w, side in enumerate(world.workers):
        want = world.expected(side)
        for root in side.storage:
            assert np.array_equal(out[w][root], want[root])
            for k in (k for k in side.kept if k.root == root):
                count[w][root][k.start : k.stop] += 1
            assert (count[w][root] == 1).all()


@given(worlds())
@quick
def test_ranks_have_their_rows_in_waves_and_messages_within_the_bounds(world):
    plan, options = world.plan(), world.options
    everything = {r.tobytes(): {int(r["src"]), int(r["dst"])} for rows in plan.rows() for r in rows}
    assert len(everything) == sum(map(len, plan.rows()))
    flow: dict[tuple[str, int, int], int] = {}
    for rank in plan.ranks:
        program = plan.program(rank)
        assert program.waves == plan.waves
        assert {row for row, ends in everything.items() if rank in ends} == {r.tobytes() for r in program.rows}
        order = program.rows[["wave", "src", "dst", "wire"]]
        assert np.array_equal(np.sort(order, order=["wave", "src", "dst", "wire"]), order)
        assert (program.rows["wave"] < max(plan.waves, 1)).all()
        assert not program.rows["turn"][program.rows["op"] == Op.FILL].any()
        for strides in (program.rows["src_strides"], program.rows["dst_strides"]):
            assert not strides[program.rows["extent"] == 1].any()  # one way to write a row down
        for m in program.sends():
            assert m.nbytes <= options.bucket_bytes and m.nbytes == row_wire_bytes(m.rows).sum()
            for key in (("out", m.src, m.wave), ("in", m.dst, m.wave)):
                flow[key] = flow.get(key, 0) + m.nbytes
    assert max(flow.values(), default=0) <= options.wave_bytes


@given(st.booleans().flatmap(worlds), st.randoms(use_true_random=False))
@quick
def test_the_plan_does_not_depend_on_the_order_of_anything(world, rng: random.Random):
    one, tables = world.plan(), [i.content() for i in (*world.sources(), *world.destinations())]
    for side in (*world.trainers, *world.workers):
        items = list(side.storage.items())
        rng.shuffle(items)
        side.storage = dict(items)
        for part in (side.fragments, side.fills, side.kept, side.footprint):
            rng.shuffle(part)
    two = world.plan()
    assert one.digest == two.digest and one.key == two.key
    assert tables == [i.content() for i in (*world.sources(), *world.destinations())]
    assert all(one.program(r).digest() == two.program(r).digest() for r in one.ranks)


@given(st.booleans().flatmap(worlds))
@quick
def test_a_plan_survives_bytes_and_so_do_inventories(world):
    plan = world.plan()
    for rank in plan.ranks:
        part = PlanPart.of(plan, rank)
        again, mine = PlanPart.from_bytes(part.to_bytes()), plan.program(rank)
        assert again.to_bytes() == part.to_bytes() and again.explain() == plan.explain()
        assert (again.key, again.digest, again.summary) == (plan.key, plan.digest, plan.summary)
        assert (again.program.rank, again.program.waves, again.trainers) == (rank, mine.waves, plan.trainers)
        assert np.array_equal(again.program.rows, mine.rows) and again.workers == plan.workers
    for inv in (*world.sources(), *world.destinations()):
        back = Inventory.from_bytes(inv.to_bytes())
        assert (back.digest(), back.rank, back.host, back.roots) == (inv.digest(), inv.rank, inv.host, inv.roots)
        assert [*back.table.fragments(world.catalog, inv.roots)] == [*inv.table.fragments(world.catalog, inv.roots)]
        assert (back.fills, back.footprint, back.kept, back.reads) == (inv.fills, inv.footprint, inv.kept, inv.reads)


@given(worlds(relay=True))
@quick
def test_what_workers_of_a_host_need_alike_enters_it_once(world):
    """Pieces that several of them need, byte for byte, from sources on other hosts."""
    plan, alone, hosts = world.plan(), world.plan(replace(world.options, relay=False)), world.options.hosts
    moved = np.concatenate([np.zeros(0, ROW), *plan.rows()])
    moved = moved[moved["op"] != Op.FILL]
    handed = moved[moved["src"] >= plan.trainers]
    assert bool(len(handed)) == bool((moved["common"] > 0).any())
    for r in handed:
        assert hosts[r["src"]] == hosts[r["dst"]] and r["op"] == Op.COPY
    wants: dict[tuple, list[int]] = {}
    for rows in alone.rows():
        seen: dict[tuple, int] = {}
        for r in rows[rows["op"] != Op.FILL]:
            far = bool(hosts) and hosts[r["src"]] != hosts[r["dst"]]
            wire, item = row_wire_bytes(r[None])[0], ITEM[r["dst_dtype"]]
            for i in np.ndindex(*r["extent"]) if far and wire == r["extent"].prod() * item else ():
                key = hosts[r["dst"]], int(r["tensor"]), int(r["dst_dtype"]), *(r["origin"] + i).tolist()
                seen[key] = seen.get(key, 0) + item
        for key, n in seen.items():
            wants.setdefault(key, []).append(n)
    again = sum(sum(some) - max(some) for some in wants.values())
    saved = alone.summary.nbytes - plan.summary.nbytes
    assert saved == row_wire_bytes(handed).sum() and saved <= again
    boxes = [sorted((f.tensor, f.origin, f.extent, f.dtype) for f in w.fragments) for w in world.workers]
    assert saved == again or any(b != boxes[0] for b in boxes)
    assert sum(plan.summary.bytes_in) == sum(alone.summary.bytes_in)


@given(worlds())
@quick
def test_the_summary_counts_what_the_rows_say(world):
    plan = world.plan()
    s, rows = plan.summary, np.concatenate([np.zeros(0, ROW), *plan.rows()])
    moved = rows[rows["op"] != Op.FILL]
    nbytes = row_wire_bytes(moved)
    assert s.bytes_out == tuple(int(nbytes[moved["src"] == r].sum()) for r in range(plan.trainers))
    assert s.bytes_in == tuple(int(nbytes[moved["dst"] == r].sum()) for r in plan.ranks[plan.trainers :])
    assert s.messages == sum(1 for r in plan.ranks for _ in plan.program(r).sends())
    assert s.fills == (rows["op"] == Op.FILL).sum() and s.nbytes == nbytes.sum()
    for w, c in enumerate(s.classes):
        mine = rows[rows["dst"] == plan.trainers + w]
        written = mine["extent"].prod(axis=1) * ITEM[mine["dst_dtype"]]
        fills = mine["op"] == Op.FILL
        assert (c.written, c.filled) == (written[~fills].sum(), written[fills].sum())
        assert c.footprint == c.written + c.filled + c.staged + c.kept
    assert f"{plan.digest[:12]}" in plan.explain() and all(isinstance(v, float) for v in s.scalars().values())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(s), type=type(s)) == s


# ---- one fixed world, changed one thing at a time

CATALOG = Catalog((TensorSpec("a", (8, 16), "bfloat16"), TensorSpec("b", (16,), "float32")))


def trainer(rank=0, host="", *, nbytes=256, offset=0, strides=(32, 2), root="w", rows=8) -> Inventory:
    held = [Fragment("a", (0, 0), (rows, 16), root, offset, strides, "bfloat16"), dense("b", (16,), "float32", "n")]
    return source(CATALOG, held, {root: nbytes, "n": 64}, rank, host)


def worker(rank=0, host="", *, bits=b"\0\0", keep="scale", reads=("a", "b"), pad=16) -> Inventory:
    wanted = [dense("a", (8, 16), "bfloat16"), dense("b", (16,), "float32", "n")]
    fills, kept = [Fill("w", 256, (pad,), (2,), "bfloat16", bits)], [Kept("n", 64, 68, keep)]
    return destination(CATALOG, wanted, {"w": 256 + 2 * pad, "n": 68}, rank, host, fills=fills, kept=kept, reads=reads)


def plan(first: Inventory | None = None, *workers: Inventory, **options) -> SubPlan:
    """A plan for two trainers and one worker, unless others are given."""
    return plan_replica(CATALOG, [first or trainer(), trainer(1)], workers or [worker()], PlanOptions(**options))


def test_any_change_of_the_inputs_changes_the_digest():
    firsts = [
        {},
        {"nbytes": 512},
        {"nbytes": 512, "offset": 256},
        {"offset": 224, "strides": (-32, 2)},
        {"root": "v"},
        {"rows": 4},
    ]
    destinations = [{"bits": b"\0\1"}, {"pad": 17}, {"keep": "other"}]
    options = dict(
        bucket_bytes=1 << 20,
        wave_bytes=1 << 28,
        drop=("x",),
        narrow=("x",),
        hosts=("x", "y", "y"),
        rotation=1,
        align_bytes=64,
    )
    made = [plan(trainer(**f)) for f in firsts] + [plan(None, worker(**t)) for t in destinations]
    made += [plan(**{name: value}) for name, value in options.items()] + [plan(None, worker(), worker(1))]
    made += [plan_replica(CATALOG, [trainer()], [worker()])]
    assert len({p.digest for p in made}) == len(made) == 18


def test_what_is_no_input_does_not_change_the_digest():
    assert plan().digest == plan(trainer(host="x"), worker(host="z", reads=("b", "a", "a"))).digest
    assert plan(drop=("q", "p", "p")).digest == plan(drop=("p", "q")).digest
    assert plan(hosts=("x", "y", "y")).digest == plan(hosts=(7, 3, 3)).digest
    assert trainer(0, "h").digest() == trainer(3, "g").digest() and worker(0).digest() == worker(1).digest()


def test_sources_share_a_tensor_that_all_of_them_hold():
    catalog = Catalog((TensorSpec("big", (64, 1024), "bfloat16"),))
    inputs = ([dense("big", (64, 1024), "bfloat16")], {"w": 1 << 17})
    ranks = [source(catalog, *inputs, r) for r in range(4)], [destination(catalog, *inputs, r) for r in range(3)]
    s = plan_replica(catalog, *ranks).summary
    assert s.imbalance <= 1.01 and s.nbytes == 3 << 17 and s.broadcast_bytes == 3 << 17
    for last, remote in (("c", 0), ("d", 1 << 17)):  # a holder on the worker's host sends, where there is one
        hosts = PlanOptions(hosts=("a", "b", "b", "c", "a", "b", last))
        assert plan_replica(catalog, *ranks, hosts).summary.remote_bytes == remote


def test_inputs_that_do_not_belong_together_are_refused_by_name():
    a, b = dense("a", (8, 16), "bfloat16"), dense("b", (16,), "float32", offset=1)
    stranger = source(Catalog(CATALOG.specs[:1]), [a], {"w": 256}, 1)
    with pytest.raises(LayoutError, match="trainer 1.*catalog") as e:
        plan_replica(CATALOG, [trainer(), stranger], [worker(1)])
    assert len(e.value.violations) == 2  # the worker's rank as well
    with pytest.raises(LayoutError, match="hosts: 2 given for 3"):
        plan(hosts=("a", "b"))
    with pytest.raises(LayoutError, match="no engine inventory"):
        plan_replica(CATALOG, [trainer()], [])
    wide = source(CATALOG, [dense("a", (8, 16), "float32")], {"w": 512}, 1)
    with pytest.raises(LayoutError, match="a: bfloat16 in trainer 0, float32 in trainer 1"):
        plan_replica(CATALOG, [trainer(), wide], [worker()])
    with pytest.raises(LayoutError) as e:
        source(CATALOG, [a, b], {"w": 64})
    assert len(e.value.violations) == 2
    beyond = replace(trainer(), table=replace(trainer().table, origin=trainer().table.origin + 1))
    with pytest.raises(LayoutError, match="trainer 0: a: box .* outside shape"):
        plan(beyond)
    with pytest.raises(LayoutError, match="gone"):
        source(CATALOG, [dense("b", (16,), "float32", "gone")], {"w": 64})
    wrong = dict(align_bytes=4, bucket_bytes=8, wave_bytes=8, remote_cost=0, rotation=-1)
    for name, value in (("align_bytes", 12), *wrong.items()):
        with pytest.raises(ValueError, match=name):
            PlanOptions(**{name: value})


def test_too_many_dims_are_refused_by_name():
    catalog = Catalog((TensorSpec("deep", (1,) * 7, "int8"), TensorSpec("flat", (1,), "int8")))
    with pytest.raises(Unsupported, match="deep: 7 dims"):
        source(catalog, [dense("deep", (1,) * 7, "int8")], {"w": 8})
    flat = [dense("flat", (1,), "int8")], {"w": 1}
    with pytest.raises(Unsupported, match="deep"):
        plan_replica(catalog, [source(catalog, *flat)], [destination(catalog, *flat)])


def test_of_an_engine_whose_loader_computes_only_what_lies_in_live_storages_can_be_read():
    """What a recipe has read may not be there any more."""
    wanted = [dense("a", (8, 16), "bfloat16"), dense("b", (16,), "float32", "scratch/b")]
    roots = {"w": 256, "scratch/b": 64}
    made = destination(CATALOG, wanted, roots, footprint=[Span("w", 0, 256)], recipes=["r"]).as_source()
    assert made.side == "trainer" and not made.recipes
    assert [CATALOG.tensors[t].name for t in made.table.tensor] == ["a"]
