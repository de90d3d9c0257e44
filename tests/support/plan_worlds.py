"""Random small worlds for tests of the planner: tensors, trainers' storages, engines' storages, and the expected result.

The oracle follows from fragments and checkpoint tensors alone. It shares no code with xfer.plan: storages are byte
arrays, regions are index arithmetic, casts are torch's. Programs are run by row_worlds.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.links import fabrics
from tests.support.row_worlds import apply_world, cut, wire_bytes
from tests.support.trace_maps import places
from xfer.mesh.box import row_major
from xfer.plan import intersect
from xfer.plan.fabric import Site
from xfer.plan.inventory import Inventory, Kept, engine_inventory, trainer_inventory
from xfer.plan.planner import PlanOptions, SubPlan, plan_replica
from xfer.plan.program import DTYPES, LAG, Op, Program
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Root, Span, TensorSpec

quick = settings(max_examples=EXAMPLES // 4 + 1, deadline=None, suppress_health_check=list(HealthCheck))
PORTIONS = st.sampled_from([(0, 1 << 20), (1 << 30, 1 << 20), (1 << 30, 3), (6, 5)])
"""Boxes are compared together or tensor by tensor, and in portions of any size, which are chosen by speed only."""
SIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "int64": 8}


def in_portions(sizes: tuple[int, int]):
    return patch.multiple(intersect, FEW=sizes[0], AT_ONCE=sizes[1])


def cast(bits: np.ndarray, src: str, dst: str) -> np.ndarray:
    """Elements as uint8 [n, size of src] -> uint8 [n, size of dst]."""
    value = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1)).view(getattr(torch, src))
    return value.to(getattr(torch, dst)).view(torch.uint8).numpy().reshape(-1, SIZE[dst])


def dense(tensor: str, shape, dtype: str, root: str = "w", offset: int = 0) -> Fragment:
    """The whole tensor, row-major."""
    strides = tuple(s * SIZE[dtype] for s in row_major(shape))
    return Fragment(tensor, (0,) * len(shape), tuple(shape), root, offset, strides, dtype)


def source(
    catalog: Catalog, fragments: Iterable[Fragment], roots: Mapping[str, int], rank: int = 0, host: str = ""
) -> Inventory:
    """A trainer's inventory. roots: bytes by name."""
    found = [Root(*r) for r in roots.items()]
    return trainer_inventory(catalog, rank=rank, host=host, roots=found, fragments=fragments)


def destination(
    catalog: Catalog, fragments: Iterable[Fragment], roots: Mapping[str, int], rank: int = 0, host: str = "", **more
) -> Inventory:
    """A worker's inventory. All bytes of `roots` are live, unless `more` has another footprint."""
    live = {"footprint": [Span(name, 0, nbytes) for name, nbytes in roots.items()]}
    found = [Root(*r) for r in roots.items()]
    return engine_inventory(catalog, rank=rank, host=host, roots=found, fragments=fragments, **{**live, **more})


@dataclass
class Side:
    """One rank: storages as bytes, and what lies in them."""

    storage: dict[str, np.ndarray] = field(default_factory=dict)
    fragments: list[Fragment] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    footprint: list[Span] = field(default_factory=list)

    @property
    def roots(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.storage.items()}


@dataclass
class World:
    catalog: Catalog
    values: dict[str, np.ndarray]  # checkpoint name -> uint8 [elements, item] in the trainers' dtype
    held: dict[str, str]  # checkpoint name -> the trainers' dtype
    trainers: list[Side]
    workers: list[Side]
    options: PlanOptions

    def sources(self) -> list[Inventory]:
        return [source(self.catalog, s.fragments, s.roots, i) for i, s in enumerate(self.trainers)]

    def destinations(self) -> list[Inventory]:
        names = [t.name for t in self.catalog.specs]
        more = [dict(fills=s.fills, footprint=s.footprint, kept=s.kept, reads=names) for s in self.workers]
        sides = enumerate(zip(self.workers, more))
        return [destination(self.catalog, s.fragments, s.roots, i, **m) for i, (s, m) in sides]

    def plan(self, options: PlanOptions | None = None) -> SubPlan:
        return plan_replica(self.catalog, self.sources(), self.destinations(), options or self.options)

    def box(self, f: Fragment) -> np.ndarray:
        """The trainers' bits of a fragment's box, uint8 [elements, item]."""
        spec = next(s for s in self.catalog.specs if s.name == f.tensor)
        item = SIZE[self.held[f.tensor]]
        cut = tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))
        return self.values[f.tensor].reshape(*spec.shape, item)[cut].reshape(-1, item)

    def load_trainers(self) -> None:
        for side in self.trainers:
            for f in side.fragments:
                side.storage[f.root][places(f.offset, f.extent, f.strides, SIZE[f.dtype])] = self.box(f)

    def expected(self, side: Side) -> dict[str, np.ndarray]:
        """What a refit must leave in a worker's storages."""
        out = {n: b.copy() for n, b in side.storage.items()}
        for f in side.fragments:
            out[f.root][places(f.offset, f.extent, f.strides, SIZE[f.dtype])] = cast(
                self.box(f), self.held[f.tensor], f.dtype
            )
        for f in side.fills:
            out[f.root][places(f.offset, f.extent, f.strides, len(f.bits))] = np.frombuffer(f.bits, np.uint8)
        return out


def execute(plan, world: World) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """Runs all programs on copies of the workers' storages. Returns storages and write counts per byte."""
    T, inventories = len(world.trainers), (*world.sources(), *world.destinations())
    names = [[r.name for r in i.roots] for i in inventories]
    storages = [[s.storage[n] for n in some] for s, some in zip((*world.trainers, *world.workers), names)]
    programs = [plan.program(rank) for rank in range(len(storages))]
    sent = {(m.wave, m.src, m.dst): m for p in programs for m in p.sends()}
    assert len(sent) == sum(1 for p in programs for _ in p.sends())
    count = [[np.zeros(len(s), int) for s in some] for some in storages]
    for p in programs[T:]:
        for m in p.receives():
            # Both ends derive the same message.
            assert m.rows.tobytes() == sent.pop((m.wave, m.src, m.dst)).rows.tobytes()
            filled = np.zeros(m.nbytes, int)
            for r in m.rows:
                src, dst = DTYPES[r["src_dtype"]], DTYPES[r["dst_dtype"]]
                assert r["op"] == (Op.COPY if src == dst else Op.CAST) and r["wire"] % min(SIZE[src], SIZE[dst]) == 0
                filled[r["wire"] : r["wire"] + wire_bytes(r)] += 1
            assert (filled == 1).all()
        for r in p.rows[p.rows["dst"] == p.rank]:
            at = places(r["dst_offset"], r["extent"], r["dst_strides"], SIZE[DTYPES[r["dst_dtype"]]])
            np.add.at(count[p.rank][r["dst_root"]], at.reshape(-1), 1)
    assert not sent  # every message that is sent is received
    before = [storages]  # what ranks hold when a wave begins
    for wave in range(max(1, plan.waves)):
        now = [Program(p.rank, 1, p.rows[p.rows["wave"] == wave]) for p in programs]
        before.append(apply_world(now, before[-1], before[max(0, wave - LAG + 1)]))
    out = before[-1]
    return tuple([dict(zip(names[w], some[w])) for w in range(T, len(names))] for some in (out, count))


# ---- strategies


@st.composite
def layouts(draw, extent, item: int):
    """(offset, strides, bytes, gap) of a region: dims permuted, some reversed, elements perhaps one apart (gap)."""
    order = draw(st.permutations(range(len(extent))))
    gap = draw(st.integers(0, 9)) == 0
    step, strides, offset = item * (1 + gap), [0] * len(extent), 0
    for d in order:
        strides[d] = step
        step *= extent[d]
        if draw(st.integers(0, 3)) == 0:  # stored in reverse
            offset += (extent[d] - 1) * strides[d]
            strides[d] = -strides[d]
    return offset, tuple(0 if e == 1 else s for e, s in zip(extent, strides)), step, gap


def partitions(shape):
    """Disjoint boxes (origin, extent) that cover a shape; uneven."""
    made = st.builds(cut, st.builds(np.random.default_rng, st.integers(0, 2**16)), st.just(shape), st.integers(0, 3))
    return made.map(lambda boxes: [box[:2] for box in boxes])


@st.composite
def sub_boxes(draw, shape):
    low = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple(low), tuple(draw(st.integers(1, n - o)) for o, n in zip(low, shape))


@st.composite
def place(draw, side: Side, roots: int, tensor: str, origin, extent, dtype: str, engine: bool):
    """Appends a fragment to one of `roots` storages of a side, which grows by it."""
    root = f"p{draw(st.integers(0, roots - 1))}"
    data = side.storage.get(root, np.zeros(0, np.uint8))
    slack = draw(st.sampled_from([0, 0, 0, 8]))
    at = len(data) + slack
    offset, strides, nbytes, gap = draw(layouts(extent, SIZE[dtype]))
    side.storage[root] = np.concatenate([data, np.full(slack + nbytes, 0xA5, np.uint8)])
    side.fragments.append(Fragment(tensor, origin, extent, root, at + offset, strides, dtype))
    if not engine:
        return
    side.footprint.append(Span(root, len(data), at + nbytes))
    if slack:
        side.kept.append(Kept(root, len(data), at, "slack"))
    if gap:
        item = SIZE[dtype]
        n = int(np.prod(extent, dtype=int))
        if n == 1 and nbytes == 2 * item or n > 1:
            side.fills.append(Fill(root, at + item, (n,), (2 * item,), dtype, bytes(range(1, item + 1))))


@st.composite
def worlds(draw, relay: bool = False):
    """1 to 4 trainers and 1 to 3 workers of 1 to 3 tensors, some of them groups of experts. Trainers and workers may widen. `relay`:
    workers hand bytes on; there are up to 5, which often need the same boxes."""
    specs: list[TensorSpec] = []
    held: dict[str, str] = {}
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(["bfloat16", "float32", "float16", "int8", "int64"]))
        mine = draw(st.sampled_from([dtype, dtype, "float32"])) if dtype in ("bfloat16", "float16") else dtype
        experts = draw(st.sampled_from([0, 0, 0, 2, 3, 4]))
        names = [f"layers.{i}.experts.{e}.w" for e in range(experts)] or [f"t.{i}"]
        specs += [TensorSpec(n, shape, dtype) for n in names]
        held |= dict.fromkeys(names, mine)
    catalog = Catalog(tuple(sorted(specs)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    values = {}
    for s in specs:
        n = int(np.prod(s.shape, dtype=int))
        real = rng.standard_normal(n).astype(np.float32).view(np.uint8)
        whole = rng.integers(0, 256, (n, SIZE[s.dtype]), np.uint8)
        values[s.name] = whole if "int" in s.dtype else cast(real, "float32", held[s.name])

    trainers = [Side() for _ in range(draw(st.integers(1, 4)))]
    for s in specs:
        for origin, extent in draw(partitions(s.shape)):
            for t in draw(st.lists(st.integers(0, len(trainers) - 1), min_size=1, unique=True)):
                draw(place(trainers[t], 2, s.name, origin, extent, held[s.name], False))
        if draw(st.integers(0, 4)) == 0:  # a trainer also holds a box that is cut otherwise
            draw(place(draw(st.sampled_from(trainers)), 2, s.name, *draw(sub_boxes(s.shape)), held[s.name], False))
    workers = [Side() for _ in range(draw(st.integers(1, 5 if relay else 3)))]
    for w, s in product(workers, specs):
        if relay and w is not workers[0] and draw(st.booleans()):
            for f in [f for f in workers[0].fragments if f.tensor == s.name]:
                draw(place(w, 3, s.name, f.origin, f.extent, f.dtype, True))
            continue
        dtype = draw(st.sampled_from([s.dtype, "float32"])) if s.dtype in ("bfloat16", "float16") else s.dtype
        whole = ((0,) * len(s.shape), s.shape)
        one = sub_boxes(s.shape).map(lambda box: [box])
        for origin, extent in draw(st.one_of(st.sampled_from([[whole], [whole] * 2, []]), partitions(s.shape), one)):
            draw(place(w, 3, s.name, origin, extent, dtype, True))
    bucket = draw(st.sampled_from([8, 16, 64, 1024]))
    ranks = len(trainers) + len(workers)
    hosts = draw(st.one_of(st.just(()), st.tuples(*[st.sampled_from("ab")] * ranks)))
    if relay and draw(st.booleans()):
        hosts = (*"t" * len(trainers), *draw(st.tuples(*[st.sampled_from("aaab")] * len(workers))))
    options = PlanOptions(
        relay=relay,
        bucket_bytes=bucket, wave_bytes=bucket + draw(st.integers(0, 2 * bucket)), align_bytes=8,
        hosts=hosts, rotation=draw(st.integers(0, 3)),
    )  # fmt: skip
    world = World(catalog, values, held, trainers, workers, options)
    world.load_trainers()
    return world


@st.composite
def placed(draw, world: World, replicas: int) -> Site:
    """Places the ranks of a world on a fabric with room for so many replicas or more, perhaps on the same GPUs, and plans for one."""
    trainers, workers = len(world.trainers), len(world.workers)
    fabric = draw(fabrics().filter(lambda f: f.gpus >= max(trainers, replicas * workers)))
    every = st.permutations(range(fabric.gpus))
    at = draw(every)
    mine = tuple(tuple(at[i : i + workers]) for i in range(0, fabric.gpus - workers + 1, workers))
    site = Site(fabric, tuple(draw(every)[:trainers]), mine)
    world.options = replace(world.options, hosts=(), site=site, replica=draw(st.integers(0, len(mine) - 1)))
    return site
