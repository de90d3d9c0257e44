"""Programs do what the fragments say: every byte right and written once, the same plan on every rank, within the bounds."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.plan_worlds import PORTIONS, dense, destination, execute, in_portions, placed, quick, source, worlds
from xfer.errors import LayoutError, Unsupported
from xfer.plan.fabric import Fabric, Site
from xfer.plan.inventory import Inventory, Kept
from xfer.plan.part import PlanPart
from xfer.plan.planner import Drafts, PlanOptions, SubPlan, plan_replica
from xfer.plan.program import ITEM, ROW, Op, row_wire_bytes
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Span, TensorSpec


@given(st.booleans().flatmap(worlds), PORTIONS, st.data())
@settings(quick, max_examples=EXAMPLES // 2 + 1)
def test_each_byte_comes_right_and_once_within_the_bounds_and_the_summary_counts_it(world, portions, data):
    """Whether workers hand bytes on or not, and whether the links between ranks are known or not."""
    if data.draw(st.booleans()):
        data.draw(placed(world, 1))
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

    options, s, rows = world.options, plan.summary, np.concatenate([np.zeros(0, ROW), *plan.rows()])
    assert len({r.tobytes() for r in rows}) == len(rows)
    flow: Counter[tuple[str, int, int]] = Counter()
    streams: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in plan.ranks:
        program = plan.program(rank)
        mine = rows[(rows["src"] == rank) | (rows["dst"] == rank)]
        assert program.waves == plan.waves and {r.tobytes() for r in program.rows} == {r.tobytes() for r in mine}
        order = program.rows[["wave", "src", "dst", "wire"]]
        assert np.array_equal(np.sort(order, order=["wave", "src", "dst", "wire"]), order)
        for m in program.sends():
            assert m.nbytes == row_wire_bytes(m.rows).sum()
            streams[m.src, m.dst].append(m.nbytes)
            flow["out", m.src, m.wave] += m.nbytes
            flow["in", m.dst, m.wave] += m.nbytes
    if not options.relay:  # what workers hand on is beside what the schedule says
        sizes = [n for stream in streams.values() for n in stream]
        assert max(sizes, default=0) <= options.bucket_bytes and max(flow.values(), default=0) <= options.wave_bytes
        assert (s.messages, s.largest_message) == (len(sizes), max(sizes, default=0))
        assert not any(n % options.align_bytes for stream in streams.values() for n in stream[:-1])
        assert not sizes or {wave for *_, wave in flow} == set(range(plan.waves))  # none is empty
    assert (rows["wave"] < max(plan.waves, 1)).all() and not rows["turn"][rows["op"] == Op.FILL].any()
    for strides in (rows["src_strides"], rows["dst_strides"]):
        assert not strides[rows["extent"] == 1].any()  # one way to write a row down

    moved = rows[rows["op"] != Op.FILL]
    nbytes = row_wire_bytes(moved)
    known = options.site.hosts(options.replica) if options.site else options.hosts
    hosts = np.array(known or [0] * len(plan.ranks))
    assert (s.nbytes, s.fills) == (nbytes[moved["src"] < plan.trainers].sum(), len(rows) - len(moved))
    assert s.bytes_out == tuple(int(nbytes[moved["src"] == r].sum()) for r in range(plan.trainers))
    assert s.bytes_in == tuple(int(nbytes[moved["dst"] == r].sum()) for r in plan.ranks[plan.trainers :])
    assert s.remote_bytes == nbytes[hosts[moved["src"]] != hosts[moved["dst"]]].sum()
    for w, c in enumerate(s.classes):
        mine = rows[rows["dst"] == plan.trainers + w]
        written = mine["extent"].prod(axis=1) * ITEM[mine["dst_dtype"]]
        fills = mine["op"] == Op.FILL
        assert (c.written, c.filled) == (written[~fills].sum(), written[fills].sum())
        assert c.footprint == c.written + c.filled + c.staged + c.kept
    assert plan.digest[:12] in plan.explain() and all(isinstance(v, float) for v in s.scalars().values())


@given(st.booleans().flatmap(worlds), st.randoms(use_true_random=False))
@quick
def test_plans_and_inventories_survive_bytes_and_depend_on_the_order_of_nothing(world, rng: random.Random):
    plan, inventories = world.plan(), [*world.sources(), *world.destinations()]
    for rank in plan.ranks:
        part = PlanPart.of(plan, rank)
        again, mine = PlanPart.from_bytes(part.to_bytes()), plan.program(rank)
        assert again.to_bytes() == part.to_bytes() and again.explain() == plan.explain()
        assert (again.key, again.digest, again.summary) == (plan.key, plan.digest, plan.summary)
        assert (again.program.rank, again.program.waves, again.trainers) == (rank, mine.waves, plan.trainers)
        assert np.array_equal(again.program.rows, mine.rows) and again.workers == plan.workers
    for inv in inventories:
        back = Inventory.from_bytes(inv.to_bytes())
        assert (back.digest(), back.rank, back.host, back.roots) == (inv.digest(), inv.rank, inv.host, inv.roots)
        assert [*back.table.fragments(world.catalog, inv.roots)] == [*inv.table.fragments(world.catalog, inv.roots)]
        assert (back.fills, back.footprint, back.kept, back.reads) == (inv.fills, inv.footprint, inv.kept, inv.reads)
    for side in (*world.trainers, *world.workers):
        items = list(side.storage.items())
        rng.shuffle(items)
        side.storage = dict(items)
        for part in (side.fragments, side.fills, side.kept, side.footprint):
            rng.shuffle(part)
    two = world.plan()
    assert plan.digest == two.digest and plan.key == two.key
    assert [i.content() for i in inventories] == [i.content() for i in (*world.sources(), *world.destinations())]
    assert all(plan.program(r).digest() == two.program(r).digest() for r in plan.ranks)


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
    uncut = world.plan(replace(world.options, relay=False, bucket_bytes=1 << 30, wave_bytes=1 << 30))
    box = ["tensor", "dst_dtype", "origin", "extent"]  # of fragments that lie side by side one row is made
    boxes = [sorted(str(r) for r in rows[rows["op"] != Op.FILL][box]) for rows in uncut.rows()]
    assert saved == again or any(b != boxes[0] for b in boxes)
    assert sum(plan.summary.bytes_in) == sum(alone.summary.bytes_in)


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


FABRIC, SLOWER = (Fabric.uniform(2, 4, nvlink=400, nic=n) for n in (50, 49))
SITE = Site(FABRIC, (0, 1), ((4,), (5,)))


def test_the_digest_changes_with_every_input_and_with_nothing_else():
    firsts = [
        {},
        {"nbytes": 512},
        {"nbytes": 512, "offset": 256},
        {"offset": 224, "strides": (-32, 2)},
        {"root": "v"},
        {"rows": 4},
    ]
    destinations = [{"bits": b"\0\1"}, {"pad": 17}, {"keep": "other"}]
    options = [
        dict(bucket_bytes=1 << 20), dict(wave_bytes=1 << 28), dict(drop=("x",)), dict(narrow=("x",)), dict(hosts=("x", "y", "y")),
        dict(rotation=1), dict(align_bytes=64), dict(site=SITE), dict(site=SITE, replica=1),
        dict(site=Site(FABRIC, (0, 4), ((5,), (6,)))), dict(site=replace(SITE, fabric=SLOWER)),
    ]  # fmt: skip
    made = [plan(trainer(**f)) for f in firsts] + [plan(None, worker(**t)) for t in destinations]
    made += [plan(**o) for o in options] + [
        plan(None, worker(), worker(1)),
        plan_replica(CATALOG, [trainer()], [worker()]),
    ]
    assert len({p.digest for p in made}) == len(made) == 22
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


A, B = dense("a", (8, 16), "bfloat16"), dense("b", (16,), "float32", offset=1)
DEEP = Catalog((TensorSpec("deep", (1,) * 7, "int8"), TensorSpec("flat", (1,), "int8")))
FLAT = [dense("flat", (1,), "int8")], {"w": 1}
UNEVEN = Site(FABRIC, (0, 1), ((4,), (5, 6)))


def beyond() -> Inventory:
    table = trainer().table
    return replace(trainer(), table=replace(table, origin=table.origin + 1))


@pytest.mark.parametrize(
    "made, faults, said",
    [
        (lambda: plan_replica(CATALOG, [trainer(), source(Catalog(CATALOG.specs[:1]), [A], {"w": 256}, 1)], [worker(1)]), 2,
         "trainer 1.*catalog"),  # the worker's rank as well
        (lambda: plan(hosts=("a", "b")), 1, "hosts: 2 given for 3"),
        (lambda: plan_replica(CATALOG, [trainer()], []), 1, "no engine inventory"),
        (lambda: plan_replica(CATALOG, [trainer(), source(CATALOG, [dense("a", (8, 16), "float32")], {"w": 512}, 1)], [worker()]), 1,
         "a: bfloat16 in trainer 0, float32 in trainer 1"),
        (lambda: source(CATALOG, [A, B], {"w": 64}), 2, ""),
        (lambda: plan(beyond()), 2, "trainer 0: a: box .* outside shape"),
        (lambda: source(CATALOG, [dense("b", (16,), "float32", "gone")], {"w": 64}), 1, "gone"),
        (lambda: source(DEEP, [dense("deep", (1,) * 7, "int8")], {"w": 8}), 1, "deep: 7 dims"),
        (lambda: plan_replica(DEEP, [source(DEEP, *FLAT)], [destination(DEEP, *FLAT)]), 1, "deep"),
        (lambda: plan(site=Site(FABRIC, (0, 1, 2), ((4,),))), 1, "there are 2 and 1"),
        (lambda: plan(site=Site(FABRIC, (0, 1), ((4, 5),))), 1, "there are 2 and 1"),
        (lambda: plan(site=UNEVEN, replica=1), 1, "2 workers of replica 1; there are 2 and 1"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_belong_together_are_refused_by_name(made, faults, said):
    with pytest.raises(Unsupported if said.startswith("deep") else LayoutError, match=said) as e:
        made()
    assert len(e.value.violations) == faults, e.value


def test_drafts_refuse_a_replica_of_another_size_than_the_one_before():
    drafts, inputs = Drafts(), (CATALOG, [trainer(), trainer(1)], [worker()])
    drafts.plan(*inputs, PlanOptions(site=UNEVEN))
    with pytest.raises(LayoutError, match="2 workers of replica 1; there are 2 and 1"):
        drafts.plan(*inputs, PlanOptions(site=UNEVEN, replica=1))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(align_bytes=12), dict(align_bytes=4), dict(bucket_bytes=8), dict(wave_bytes=8), dict(remote_cost=0), dict(rotation=-1),
        dict(site=SITE, replica=2), dict(site=SITE, hosts=("a", "a", "b")),
    ],
)  # fmt: skip
def test_options_out_of_range_or_against_each_other_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PlanOptions(**wrong)


def test_of_an_engine_whose_loader_computes_only_what_lies_in_live_storages_can_be_read():
    """What a recipe has read may not be there any more."""
    wanted = [dense("a", (8, 16), "bfloat16"), dense("b", (16,), "float32", "scratch/b")]
    roots = {"w": 256, "scratch/b": 64}
    made = destination(CATALOG, wanted, roots, footprint=[Span("w", 0, 256)], recipes=["r"]).as_source()
    assert made.side == "trainer" and not made.recipes
    assert [CATALOG.tensors[t].name for t in made.table.tensor] == ["a"]
