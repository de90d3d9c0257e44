"""Random exports over several ranks: what each rank's trace claims is exactly what lies in its parameters. The same program runs
simulated with real numbers for all ranks at once, under `ExportWatch` for each rank alone, and from the fragments.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.fake_group import one_rank
from tests.support.plan_worlds import Side, World, dense, execute
from tests.support.replay import export, storage_bytes, trace_export
from tests.support.threads import Gather, all_good, run_ranks
from tests.support.trace_maps import element_map
from tests.support.trace_steps import move
from xfer.errors import LayoutError, Unsupported
from xfer.plan.planner import PlanOptions
from xfer.trace.catalog import Catalog
from xfer.trace.collectives import objects_stay_home
from xfer.trace.export import ExportWatch, twin
from xfer.trace.fragment import Span, TensorSpec
from xfer.trace.probe import export_fragments, numbers

SHAPES = {"qkv": (8, 6), "fc": (4, 6), "bias": (4,)}
LOCAL = "permute narrow clone swap flatten gather select stack".split()
SHARED = "allgather allgather0 allgather_into broadcast scatter alltoall gathered each".split()


def step(ops: list[str]) -> st.SearchStrategy:
    return st.tuples(st.sampled_from(ops), st.integers(0, 997), st.integers(0, 997))


def several(ops: list[str], most: int) -> st.SearchStrategy:
    return st.integers(0, most).flatmap(lambda n: st.lists(step(ops), min_size=n, max_size=n))


shared_once = st.builds(lambda a, b, c: a + [b] + c, several(LOCAL, 4), step(SHARED), several(LOCAL, 4))
programs = st.one_of(shared_once, several(LOCAL + SHARED * 2, 8))


class Alone:
    """One rank of the world, through torch.distributed."""

    def __init__(self, world: int):
        self.world, self.rank = world, dist.get_rank()

    def all_gather(self, x):
        slots = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world)]
        dist.all_gather(slots, x.contiguous())
        return slots

    def all_gather_into(self, x):
        out = torch.empty(self.world * x.shape[0], *x.shape[1:], dtype=x.dtype, device="meta")
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    def broadcast(self, x, src):
        mine = x.clone() if self.rank == src else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.broadcast(mine, src)
        return mine

    def scatter(self, x, src):
        parts = [p.contiguous() for p in torch.stack([x] * self.world).unbind(0)] if self.rank == src else None
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.scatter(out, parts, src)
        return out

    def all_to_all(self, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out


@dataclass
class Together:
    """A rank that is a thread among all others, with real tensors: what the collectives mean."""

    world: int
    rank: int
    gather: Gather

    def all_gather(self, x):
        return self.gather(self.rank, x)

    def all_gather_into(self, x):
        return torch.cat(self.all_gather(x))

    def broadcast(self, x, src):
        return self.all_gather(x)[src]

    scatter = broadcast

    def all_to_all(self, x):
        return torch.cat([y.chunk(self.world)[self.rank] for y in self.all_gather(x)])


def run(program: list, params: dict[str, torch.Tensor], comm) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields exported tensors."""
    for name, x in params.items():
        for k, (op, i, j) in enumerate(program):
            small = x.numel() * comm.world <= 400
            if op in LOCAL:
                x = move(op, i, j, x)
            elif op in ("broadcast", "scatter"):
                x = getattr(comm, op)(x, i % comm.world)
            elif op == "alltoall" and x.numel() >= comm.world:
                x = comm.all_to_all(x.reshape(-1)[: x.numel() // comm.world * comm.world].contiguous())
            elif op in ("allgather", "allgather0") and small:
                x = torch.cat(comm.all_gather(x), i % x.dim() if op == "allgather" else 0)
            elif op == "allgather_into" and small:
                x = comm.all_gather_into(x)
            elif op == "gathered":  # one exported tensor per slot, as experts are
                yield from ((f"{name}.{k}.{r}", slot) for r, slot in enumerate(comm.all_gather(x)))
            elif op == "each" and small:  # a reassembly row by row
                x = torch.stack(comm.all_gather(x), 1).flatten(0, 1)
        yield name, x


def held_by(rank: int) -> dict[str, torch.Tensor]:
    """Parameters whose every element is its own provenance."""
    return {n: numbers(rank * len(SHAPES) + k, s) for k, (n, s) in enumerate(SHAPES.items())}


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(programs, st.integers(1, 4))
def test_every_rank_claims_exactly_what_it_holds(program, world):
    """With one collective on the way. After a second one over the same ranks, a peer's slot holds my data again, which
    nobody claims: still nothing wrong is claimed, and the gap is for the coverage check to find."""
    once = sum(op in SHARED for op, _, _ in program) <= 1
    everyone, gather = [held_by(r) for r in range(world)], Gather(world)
    real = all_good(run_ranks(world, lambda r: dict(run(program, everyone[r], Together(world, r, gather)))))
    for rank in range(world):
        mine = {rank * len(SHAPES) + k: (n, "int64") for k, n in enumerate(SHAPES)}
        with one_rank(rank, world):
            watch = ExportWatch({n: twin(p) for n, p in everyone[rank].items()})
            sources = {n: t for n, t in zip(SHAPES, watch.sources.values())}
            traced = trace_export(watch, run(program, sources, Alone(world)))
        assert not traced.recipes and not traced.casts
        out = {n: torch.full_like(x, -1).contiguous() for n, x in real[rank].items()}
        export(traced, everyone[rank], out)
        for name, ids in real[rank].items():
            own = (ids >> 40) // len(SHAPES) == rank
            claims = own if once else out[name] >= 0
            assert bool(own[claims].all()) and torch.equal(out[name], torch.where(claims, ids, -1))
            if not once:
                continue
            spec = TensorSpec(name, tuple(ids.shape), "int64")  # the second source of fragments agrees with the first
            claimed = [f for f in traced.fragments if f.tensor == name]
            assert set(element_map(claimed)) == set(element_map(export_fragments(spec, ids, mine)))
        assert set(traced.reads) | set(traced.unread) == set(SHAPES)


def one(stream, world: int = 2, rank: int = 0, sources=None):
    with one_rank(rank, world):
        watch = ExportWatch(sources or {"w": torch.empty(4, 4, device="meta")})
        return trace_export(watch, stream(watch.sources["w"]))


def test_a_gathered_and_joined_tensor_stays_one_piece():
    """`cat(dim=1)` of all ranks' shards must not fall into a piece per row."""

    def stream(w):
        slots = [torch.empty_like(w) for _ in range(4)]
        dist.all_gather(slots, w)
        yield "full", torch.cat(slots, 1)

    traced = one(stream, 4, 1, {"w": torch.empty(4096, 64, dtype=torch.bfloat16, device="meta")})
    (f,) = traced.fragments
    assert f.origin == (0, 64) and f.extent == (4096, 64) and f.strides == (128, 2) and f.root == "w"
    assert traced.specs == (TensorSpec("full", (4096, 256), "bfloat16"),)


def test_a_computation_with_what_another_rank_broadcast_is_refused_by_name():
    """Gathered data can be gathered again (test_trace_owned.py), and broadcast data cannot be asked for."""

    def stream(w):
        slots, theirs = [torch.empty_like(w) for _ in range(2)], torch.empty_like(w)
        dist.all_gather(slots, w)
        dist.broadcast(theirs, 1)
        yield "merged", w + torch.mm(slots[0], theirs)
        yield "theirs", slots[1] * 2  # rank 1 answers for this one
        yield "fine", slots[0]

    with pytest.raises(LayoutError) as e:
        one(stream)
    assert [v[:7] for v in e.value.violations] == ["merged:"]


def test_a_reduction_is_refused_and_everything_else_still_noted():
    def stream(w):
        yield "ok", w
        dist.all_reduce(w)

    with one_rank(0, 2):
        watch = ExportWatch({"w": torch.empty(4, 4, device="meta")})
        with pytest.raises(LayoutError, match="cannot be followed") as e:
            trace_export(watch, stream(watch.sources["w"]))
        assert "a reduction over 2 ranks" in e.value.violations[0]
        assert [f.tensor for f in watch.result(strict=False).fragments] == ["ok"]


def test_all_offenders_are_listed_at_once():
    def stream(w):
        yield "a", torch.rand(4, device="meta")
        yield "b", w
        yield "b", w[:2]
        yield "negated", torch._neg_view(w)
        yield "c", torch.cat([w, torch.zeros(1, 4, device="meta")])

    with pytest.raises(LayoutError) as e:
        one(stream)
    assert [v[0] for v in e.value.violations] == ["a", "b", "n", "c"]


ASKED = {  # of another rank, by one collective or another
    "broadcast": lambda mine, theirs, w: dist.broadcast(theirs, 1),
    "gathered": lambda mine, theirs, w: dist.all_gather([theirs, torch.empty_like(mine)], mine),
    "gathered into": lambda mine, theirs, w: dist.all_gather_into_tensor(torch.zeros(8, dtype=mine.dtype), mine),
    "scattered": lambda mine, theirs, w: dist.scatter(theirs, None, 1),
    "all to all": lambda mine, theirs, w: dist.all_to_all_single(theirs, mine),
    "a parameter's": lambda mine, theirs, w: dist.all_gather(
        [theirs], w.view(-1)[:4].to(mine.dtype), group=dist.new_group([0])
    ),
}


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
@pytest.mark.parametrize("index", ASKED)
def test_numbers_that_other_ranks_would_send_decide_nothing(index, kind):
    """Rows in an order that ranks tell one another as real numbers."""

    def stream(w):
        mine, theirs = torch.tensor([3, 1, 2, 0]).to(kind), torch.zeros(4, dtype=kind)
        dist.broadcast(mine, 0)  # mine to send: these are the numbers
        ASKED[index](mine, theirs, w)
        yield "x", w[theirs.long()]

    with pytest.raises(LayoutError, match="of another rank decide"):
        one(stream)


def test_numbers_that_a_rank_sends_to_itself_are_what_it_sent():
    def stream(w):
        mine = torch.tensor([3, 1, 2, 0])
        slots, joined, all_to_all = [torch.zeros_like(mine)], torch.zeros_like(mine), torch.zeros_like(mine)
        dist.all_gather(slots, mine)
        dist.all_gather_into_tensor(joined, mine)
        dist.all_to_all_single(all_to_all, mine)
        dist.broadcast(mine, 0)
        for name, index in {"a": slots[0], "b": joined, "c": all_to_all, "d": mine}.items():
            yield name, w[index]

    w, out = torch.randn(4, 4), {n: torch.zeros(4, 4) for n in "abcd"}
    export(one(stream, world=1), {"w": w}, out)
    assert all(torch.equal(x, w[[3, 1, 2, 0]]) for x in out.values())


@pytest.mark.parametrize("held, exported", [("int16", "bfloat16"), ("float16", "bfloat16"), ("bfloat16", "float16")])
def test_bits_that_are_exported_as_another_dtype_arrive_as_they_are(held, exported):
    p = (torch.arange(24, dtype=torch.int16) * 977).view(getattr(torch, held)).view(4, 6)
    traced = one(lambda w: [("x", w.view(getattr(torch, exported)).t())], sources={"w": twin(p)})
    here = Side({"w": storage_bytes(p).numpy()}, list(traced.fragments))
    there = Side({"e": np.zeros(48, np.uint8)}, [dense("x", (6, 4), exported, "e")], footprint=[Span("e", 0, 48)])
    world = World(Catalog(traced.specs), {}, {"x": exported}, [here], [there], PlanOptions())
    out, _ = execute(world.plan(), world)
    assert not traced.casts and out[0]["e"].tobytes() == p.t().contiguous().view(torch.uint8).numpy().tobytes()


def test_a_task_that_raises_leaves_the_watch_usable():
    with one_rank(0, 2):
        watch = ExportWatch({"w": torch.empty(4, 4, device="meta")})
        for name in ("one", "two"):
            try:
                with watch:
                    watch.note_export(name, watch.sources["w"].clone())
                    raise KeyError(name)
            except KeyError as e:
                watch.errors.append(f"{name}: {e}")
        assert len(watch.errors) == 2
        assert {f.tensor for f in watch.result(strict=False).fragments} == {"one", "two"}


def test_receive_buffers_are_meta_and_indices_are_real():
    with one_rank(1, 2):
        w = torch.empty(4, 4, device="meta")
        with ExportWatch({"w": w}) as watch:
            buffer = torch.empty((4, 4), dtype=torch.float32, device="cpu")
            dist.broadcast(buffer, 0)
            index = torch.cat([torch.arange(2, 4), torch.arange(0, 2)])
            assert buffer.device.type == "meta" and index.tolist() == [2, 3, 0, 1]
            assert watch.note_export("x", torch.cat([buffer, w[index].to("cpu")]))
            assert not watch.note_export("theirs", buffer)
        traced = watch.result()
    assert [s.name for s in traced.specs] == ["x"]
    assert {(f.origin, f.offset) for f in traced.fragments} == {((4, 0), 32), ((6, 0), 0)}


def test_object_collectives_are_answered_at_home():
    with one_rank(1, 3), objects_stay_home():
        for mine, empty in (({"a": 1}, None), ([1], [])):
            out = [0, 0, 0]
            dist.all_gather_object(out, mine)
            assert out == [empty, mine, empty]
        held = ["x"]
        dist.broadcast_object_list(held, src=1)
        assert held == ["x"]
        with pytest.raises(Unsupported, match="rank 0"):
            dist.broadcast_object_list(held, src=0)


def test_twins_keep_layout_and_attributes_and_refuse_subclasses():
    p = torch.nn.Parameter(torch.empty(4, 6).t())
    p.partition_dim = 1
    t = twin(p)
    assert (t.shape, t.stride(), t.storage_offset(), t.partition_dim) == (p.shape, p.stride(), 0, 1) and t.is_meta

    class Quantized(torch.Tensor):
        pass

    with pytest.raises(Unsupported, match="Quantized"):
        twin(torch.empty(2).as_subclass(Quantized))
