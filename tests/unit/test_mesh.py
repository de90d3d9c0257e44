"""Meshes are values and hold the frameworks' own groups; ranks hold the parts of tensors that torch and a numpy oracle say."""

from dataclasses import astuple
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as tp
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from tests.support.examples import EXAMPLES
from tests.support.fake_group import one_rank
from tests.support.trace_maps import addresses
from xfer.errors import LayoutError, Unsupported
from xfer.mesh import (
    EngineParallel,
    Interleaved,
    MeshInfo,
    MeshRecord,
    Replicate,
    Segmented,
    Shard,
    StridedShard,
    TrainerParallel,
    from_torch,
    local_layout,
    local_shape,
)
from xfer.mesh.placement import PlacementRecord, checked
from xfer.trace.declared import declared_fragments

NAMES = ("pp", "dp", "cp", "tp")
PAIR = MeshInfo.grid(tp=2)
BIG = 1 << 63


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    n = int(np.prod(sizes))
    table = draw(st.lists(st.integers(-5, 10**12), min_size=n, max_size=n, unique=True))
    return MeshInfo(draw(st.permutations(NAMES))[: len(sizes)], np.array(table).reshape(sizes))


@settings(max_examples=EXAMPLES, deadline=None)
@given(meshes(), st.data())
def test_every_rank_is_found_where_the_table_has_it(mesh, data):
    flat = mesh.ranks.ravel().tolist()
    assert all(mesh.ranks[mesh.coordinate(r)] == r and r in mesh for r in flat)
    assert all(mesh.coordinate(r) is None and r not in mesh for r in range(-10, 0) if r not in flat)

    rank = data.draw(st.sampled_from(flat))
    here = mesh.coordinate(rank)
    axes = data.draw(st.permutations(mesh.axes))[: data.draw(st.integers(0, mesh.ndim))]
    groups = mesh.groups(axes)
    assert sorted(groups.ravel()) == sorted(flat) and groups.shape[1] == np.prod([mesh.size(a) for a in axes])
    (mine,) = (g for g in groups.tolist() if rank in g)
    for r in mine:  # only the coordinates along `axes` differ inside a group
        assert all(x == y for x, y, name in zip(mesh.coordinate(r), here, mesh.axes) if name not in axes)
    along = [tuple(mesh.coordinate(r)[mesh.index(a)] for a in axes) for r in mine]
    assert along == sorted(along), "the first of the axes is the slowest"
    turned = mesh.transpose(order := data.draw(st.permutations(mesh.axes)))
    assert turned.axes == tuple(order) and turned.coordinate(rank) == tuple(here[mesh.index(a)] for a in order)


@settings(max_examples=EXAMPLES, deadline=None)
@given(meshes())
def test_records_survive_the_wire_and_equality_is_by_value(mesh):
    wire = msgspec.msgpack.encode(mesh.to_record())
    back = MeshInfo.from_record(msgspec.msgpack.decode(wire, type=MeshRecord))
    assert back == mesh and hash(back) == hash(mesh)
    table = np.array(mesh.ranks)
    same, other = (MeshInfo(mesh.axes, t) for t in (table, table + 1))
    table[...] = 7
    assert same == mesh != other, "a mesh does not follow the array that it was made from"
    with pytest.raises(ValueError):
        mesh.ranks[...] = 9
    if mesh.ndim:
        assert MeshInfo(("other", *mesh.axes[1:]), mesh.ranks) != mesh


@settings(max_examples=max(EXAMPLES // 8, 5), deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: np.prod(s) <= 24), data=st.data())
def test_device_meshes_are_read_as_they_are(sizes, data):
    from torch.distributed.device_mesh import DeviceMesh

    ranks = data.draw(st.permutations(range(24)))[: int(np.prod(sizes))]
    names = data.draw(st.sampled_from([None, NAMES[: len(sizes)]]))
    with one_rank(3, 24):
        ours = MeshInfo.from_device_mesh(DeviceMesh("cpu", np.array(ranks).reshape(sizes), mesh_dim_names=names))
    assert ours.sizes == tuple(sizes) and ours.ranks.ravel().tolist() == list(ranks)
    assert ours.axes == (names or tuple(f"axis{d}" for d in range(len(sizes))))


# ---- parallelism

# Which axes of which mesh make each process group that Megatron creates.
GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": ["tp"],
    "PIPELINE_MODEL_PARALLEL_GROUP": ["pp"],
    "CONTEXT_PARALLEL_GROUP": ["cp"],
    "DATA_PARALLEL_GROUP": ["dp"],
    "DATA_PARALLEL_GROUP_WITH_CP": ["dp", "cp"],
    "MODEL_PARALLEL_GROUP": ["pp", "tp"],
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": ["cp", "tp"],
    "EXPERT_MODEL_PARALLEL_GROUP": ["ep"],
    "EXPERT_TENSOR_PARALLEL_GROUP": ["etp"],
    "EXPERT_DATA_PARALLEL_GROUP": ["edp"],
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": ["ep", "etp"],
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": ["pp", "ep", "etp"],
}

TRAINERS = [
    TrainerParallel(world=1),
    TrainerParallel(world=8, tp=2, cp=2, pp=2),
    TrainerParallel(world=8, tp=2, ep=4, etp=1),
    TrainerParallel(world=16, tp=4, pp=2, vpp=2, ep=2, etp=2),
    TrainerParallel(world=16, tp=1, cp=4, pp=2, ep=8),
    TrainerParallel(world=24, tp=2, cp=3, dp=2, pp=2, ep=3),
    TrainerParallel(world=16, tp=2, etp=4, ep=2),
    TrainerParallel(world=16, tp=2, pp=2, order="tp-cp-ep-pp-dp"),
    TrainerParallel(world=32, tp=2, cp=2, pp=2, ep=2, etp=4),
]


def megatron_groups(p: TrainerParallel, monkeypatch) -> dict[str, list[tuple[int, ...]]]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    made: dict[str, list[tuple[int, ...]]] = {}
    real = dist.new_group

    def new_group(ranks=None, *args, group_desc=None, **kwargs):
        made.setdefault(group_desc, []).append(tuple(ranks))
        kwargs.pop("backend", None), kwargs.pop("pg_options", None)
        return real(ranks, backend="fake", group_desc=group_desc, **kwargs)

    with one_rank(0, p.world), monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        try:
            more = dict(expert_model_parallel_size=p.ep, expert_tensor_parallel_size=p.etp, context_parallel_size=p.cp)
            more |= dict(order=p.order, create_gloo_process_groups=False)
            parallel_state.initialize_model_parallel(p.tp, p.pp, p.vpp, **more)
        finally:
            parallel_state.destroy_model_parallel()
    return made


@pytest.mark.trainer
@pytest.mark.parametrize(
    "p", TRAINERS, ids=lambda p: f"w{p.world}tp{p.tp}cp{p.cp}pp{p.pp}ep{p.ep}etp{p.etp}{p.order[-2:]}"
)
def test_trainer_meshes_hold_megatrons_own_groups(p, monkeypatch):
    pytest.importorskip("megatron.core")
    made = megatron_groups(p, monkeypatch)
    assert p.dense().size() == p.expert().size() == p.world
    for description, axes in GROUPS.items():
        mesh = p.expert() if description.startswith("EXPERT") else p.dense()
        axes = [a for a in mesh.axes if a in axes]  # slowest first, in the order at hand
        assert sorted(map(tuple, mesh.groups(axes).tolist())) == sorted(made[description]), description


def vllm_groups(p: EngineParallel, monkeypatch) -> dict[str, list[list[int]]]:
    """The rank lists that vLLM hands to the makers of its groups: kind -> groups."""
    import vllm.config
    from vllm.distributed import parallel_state

    made: dict[str, list[list[int]]] = {}

    def record(group_ranks, local_rank, backend, *, group_name, **_):
        made[group_name] = group_ranks
        return SimpleNamespace(rank_in_group=0, world_size=1)

    parallel = SimpleNamespace(data_parallel_size=p.dp, enable_elastic_ep=False, enable_eplb=False, use_all2all=False)
    config = SimpleNamespace(parallel_config=parallel, model_config=None, engram_config=None)
    with one_rank(0, p.world), monkeypatch.context() as patch:
        patch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
        patch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0))
        patch.setattr(parallel_state, "init_model_parallel_group", record)
        for name in [n for n in vars(parallel_state) if n.startswith("_") and n[1:].isupper()]:
            patch.setattr(parallel_state, name, None)
        parallel_state.initialize_model_parallel(p.tp, p.pp, p.pcp, 1, backend="fake")
    return made


@pytest.mark.engine
@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 3, 1), (2, 2, 3, 1), (2, 3, 2, 2)], ids=str
)
def test_engine_meshes_hold_vllms_own_groups(sizes, ep, monkeypatch):
    pytest.importorskip("vllm")
    tp, pp, dp, pcp = sizes
    p = EngineParallel(tp=tp, pp=pp, dp=dp, ep=ep, pcp=pcp)
    made = vllm_groups(p, monkeypatch)
    dense, expert = p.dense(), p.expert()
    for axis in ("tp", "pp", "dp", "pcp"):
        assert sorted(dense.groups([axis]).tolist()) == sorted(made[axis])
    assert sorted(expert.groups(["pp"]).tolist()) == sorted(made["pp"])
    assert sorted(expert.groups(["ep" if ep else "etp"]).tolist()) == sorted(made["ep"])
    assert expert.size("etp" if ep else "ep") == 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(*[st.integers(1, 3)] * 6)
def test_trainer_meshes_are_two_views_of_the_same_ranks(tp, pp, cp, dp, ep, etp):
    world = tp * pp * cp * dp
    if world % (etp * ep * pp):
        with pytest.raises(LayoutError, match=f"multiple of etp.* = {etp * ep * pp}"):
            TrainerParallel(world=world, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)
        return
    p = TrainerParallel(world=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    dense, expert = p.dense(), p.expert()
    assert p.dp == dp and dense == MeshInfo.grid(pp=pp, dp=dp, cp=cp, tp=tp)
    assert expert.sizes == (pp, p.edp, ep, etp)
    assert (dense.ranks.ravel() == expert.ranks.ravel()).all()
    assert (dense.groups(["pp"]) == expert.groups(["pp"])).all(), "a layer's experts live where the layer lives"


# ---- the oracle: what is left of the indices of a dim, one axis after the other


def chunks(index: np.ndarray, n: int) -> list[np.ndarray]:
    parts = [c.numpy() for c in torch.chunk(torch.from_numpy(index), n)] if len(index) else []
    return parts + [index[:0]] * (n - len(parts))


def cut(index: np.ndarray, p, size: int, at: int) -> np.ndarray:
    """Under one placement over one axis."""
    if isinstance(p, Shard):
        return chunks(index, size)[at]
    if isinstance(p, StridedShard):
        return np.concatenate([chunks(part, size)[at] for part in chunks(index, p.split_factor)])

    def within(start: int, length: int) -> np.ndarray:
        return index[(index >= start) & (index < start + length)]

    parts = list(zip(np.cumsum((0, *p.segments)), p.segments))
    if isinstance(p, Segmented):
        copies = p.copies or (1,) * len(parts)
        return np.concatenate([chunks(within(*part), size // c)[at // c] for part, c in zip(parts, copies)])
    widths = [(start, n // p.groups) for start, n in parts]
    groups = [np.concatenate([within(start + g * n, n) for start, n in widths]) for g in range(p.groups)]
    groups = [g for g in groups if len(g)]  # an axis before this one may have taken some
    return np.concatenate([index[:0], *(groups[g] for g in chunks(np.arange(len(groups)), size)[at])])


def local_part(full: np.ndarray, mesh: MeshInfo, placements, rank: int) -> np.ndarray:
    left = [np.arange(n) for n in full.shape]
    for p, size, at in zip(placements, mesh.sizes, mesh.coordinate(rank)):
        if not isinstance(p, Replicate):
            left[p.dim] = cut(left[p.dim], p, size, at)
    return full[np.ix_(*left)]


# ---- generated layouts


@st.composite
def torch_layouts(draw):
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    one = st.one_of(st.just(Replicate()), st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 4)))
    mesh = MeshInfo([f"m{i}" for i in range(len(sizes))], 100 + np.arange(np.prod(sizes)).reshape(sizes))
    return tuple(shape), mesh, tuple(draw(one) for _ in sizes)


@st.composite
def fused_layouts(draw):
    """A fused placement on one axis of a random mesh, or on several, or its local dim cut as it lies by later ones; torch's elsewhere."""
    shape, mesh, placements = draw(torch_layouts())
    axis, dim = draw(st.integers(0, mesh.ndim - 1)), draw(st.integers(0, len(shape) - 1))
    size = mesh.sizes[axis]
    groups = draw(st.integers(1, 4))
    parts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    if draw(st.booleans()):
        parts = [groups * s for s in parts]
        fused = Interleaved(dim, parts, groups)
    else:
        divisors = st.sampled_from([c for c in range(1, size + 1) if size % c == 0])
        fused = Segmented(dim, parts, draw(st.sampled_from([(), tuple(draw(divisors) for _ in parts)])))
    later = [Replicate()] if getattr(fused, "copies", ()) else [fused, Shard(dim)]
    on_dim = [[Replicate()]] * axis + [[fused]] + [later] * mesh.ndim
    made = [
        p if i != axis and getattr(p, "dim", None) != dim else draw(st.sampled_from(on_dim[i]))
        for i, p in enumerate(placements)
    ]
    return (*shape[:dim], sum(parts), *shape[dim + 1 :]), mesh, tuple(made)


def torch_says(shape, mesh: MeshInfo, placements, rank: int) -> tuple:
    """(local shape, offset) of a rank."""
    made = {Replicate: tp.Replicate, Shard: tp.Shard, StridedShard: lambda d, n: tp._StridedShard(d, split_factor=n)}
    theirs = tuple(made[type(p)](*astuple(p)) for p in placements)
    assert from_torch(theirs) == placements
    return _compute_local_shape_and_global_offset(shape, mesh.sizes, list(mesh.coordinate(rank)), theirs)


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(st.one_of(torch_layouts(), fused_layouts()), st.integers(0, 64), st.booleans())
@example(((10,), MeshInfo.grid(tp=4), (Shard(0),)), 0, False)
@example(((3,), MeshInfo.grid(tp=4), (Shard(0),)), 0, False)
@example(((8, 8), MeshInfo.grid(dp=2, tp=2), (StridedShard(0, 2), Shard(0))), 0, False)
@example(((24,), MeshInfo.grid(tp=4), (Segmented(0, (16, 4, 4)),)), 0, False)
@example(((20,), MeshInfo.grid(tp=4), (Segmented(0, (16, 2, 2), (1, 2, 2)),)), 4, True)
@example(((24, 3), MeshInfo.grid(tp=2), (Interleaved(0, (16, 4, 4), 4),)), 0, True)
@example(((36,), MeshInfo.grid(a=3, b=2), (Interleaved(0, (18, 9, 9), 9),) * 2), 0, False)
@example(((14,), MeshInfo.grid(a=3, b=2), (Segmented(0, (9, 5)), Shard(0))), 0, False)
def test_fragments_address_what_torch_and_the_oracle_say_and_cover_everything(layout, offset, transposed):
    shape, mesh, placements = layout
    full = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    held = np.zeros(shape, int)
    for rank in mesh.ranks.ravel():
        expected = local_part(full, mesh, placements, rank)
        storage = np.zeros(offset + 4 * expected.size, np.uint8)
        local = np.ndarray(expected.shape, np.int32, storage, offset, order="F" if transposed else "C")
        local[...] = expected
        found = local_layout(shape, mesh, placements, rank)
        assert found.shape == local_shape(shape, mesh, placements, rank) == expected.shape
        if not any(isinstance(p, (Segmented, Interleaved)) for p in placements):
            size, origin = torch_says(shape, mesh, placements, rank)
            assert expected.shape == size
            assert [(b.at, b.box.origin) for b in found.boxes][:1] == (
                [] if 0 in size else [((0,) * len(shape), origin)]
            )
        seen: list[int] = []
        strides = local.strides if transposed else None
        for f in declared_fragments("w", shape, "int32", mesh, placements, rank, "root", strides, offset):
            assert (f.tensor, f.root, f.dtype) == ("w", "root", "int32")
            assert all(s == 0 for s, e in zip(f.strides, f.extent) if e == 1)
            part = np.ndarray(f.extent, np.int32, storage, f.offset, f.strides)
            np.testing.assert_array_equal(part, full[tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))])
            seen += addresses(f.offset, f.extent, f.strides).tolist()
        assert sorted(seen) == list(range(offset, len(storage), 4))  # each local element once
        np.add.at(held.reshape(-1), expected.reshape(-1), 1)
    # Each element lies on as many ranks as the replicated axes multiply to, more only where a segment asks for copies.
    times = np.prod([n for n, p in zip(mesh.sizes, placements) if isinstance(p, Replicate)], dtype=int)
    copied = {c for p in placements if isinstance(p, Segmented) for c in p.copies} | {1}
    assert set(np.unique(held)) <= {times * c for c in copied}
    assert local_layout(shape, mesh, placements, rank=99) is None
    assert declared_fragments("w", shape, "int32", mesh, placements, 99, "root") == ()
    sent = msgspec.msgpack.encode([PlacementRecord.of(p) for p in placements])
    assert tuple(r.placement() for r in msgspec.msgpack.decode(sent, type=list[PlacementRecord])) == placements


# ---- what is refused

FC1 = ((8, 6), MeshInfo.grid(dp=2, tp=3))
WHOLE = (Replicate(), Replicate())


def cut_rows(p, shape=(4,)) -> None:
    checked(shape, PAIR, (p,))


def cut_fc1(*placements) -> None:
    local_layout(*FC1, placements, 0, "fc1")


REFUSED = [
    (lambda: MeshInfo(("tp", "tp", ""), np.array([[1, 2], [2, 1]])), 5, "3 axis names|'tp' appears 2|''|rank 1 |rank 2 "),
    (lambda: MeshInfo(("a",), np.zeros((0,), int)), 1, ""),
    (lambda: MeshInfo(("a",), np.array([0.5])), 1, ""),
    (lambda: MeshInfo(("a", "b"), [[1, 2], [3]]), 0, ""),
    (lambda: MeshInfo(("a",), [None, 1]), 1, ""),
    (lambda: MeshInfo(("a",), [BIG, 1]), 1, ""),
    (lambda: MeshInfo(("a",), np.array([BIG + 1, 1], np.uint64)), 1, ""),
    (lambda: MeshInfo((["a"], ["a"]), [[0, 1]]), 2, ""),
    (lambda: MeshInfo(None, [0, 1]), 0, ""),
    (lambda: MeshInfo.from_record(MeshRecord(("a",), (3,), (1, 2))), 0, ""),
    (lambda: MeshInfo.from_record(MeshRecord(("a",), (-1,), (1, 2))), 0, ""),
    (lambda: MeshInfo.from_record(MeshRecord(("a",), (1,), (1 << 80,))), 0, ""),
    (lambda: MeshInfo.line("a", ["x"]), 1, ""),
    (lambda: MeshInfo.line("a", [0.5]), 1, ""),
    (lambda: MeshInfo.grid(tp=True), 1, ""),
    (lambda: PAIR.size("pp"), 0, ""),
    (lambda: PAIR.groups(["tp", "tp"]), 0, ""),
    (lambda: PAIR.transpose([]), 0, ""),
    (lambda: PAIR.transpose([1, "tp"]), 0, ""),
    (lambda: TrainerParallel(world=6, tp=4, ep=5, etp=1, vpp=2), 3, ""),
    (lambda: TrainerParallel(world=0, tp=-1, order="tp-dp"), 3, ""),
    (lambda: TrainerParallel(world=8, tp=2, dp=2), 1, "world is 8"),
    (lambda: TrainerParallel(world=16, tp=2, pp=2, ep=4, etp=1, order="tp-cp-ep-pp-dp"), 1, "put pp last"),
    (lambda: EngineParallel(tp=0, dp=True), 2, ""),
    (lambda: cut_rows(Shard("x")), 1, ""),
    (lambda: cut_rows(StridedShard(0, 1.5)), 1, ""),
    (lambda: cut_rows(Segmented(0, (2, "a"))), 1, ""),
    (lambda: cut_rows(Segmented(0, (2, 2), (1, None))), 1, ""),
    (lambda: cut_rows(Interleaved(0, (2, 2), None)), 1, ""),
    (lambda: cut_rows(Shard(0), ("4",)), 1, ""),
    (lambda: cut_fc1(Shard(2), Segmented(0, (4, 3), (2,)), Replicate()), 5,
     "3 placements for the 2 axes|no dim 2|add up to 7|1 copies for 2 segments|copies 2 does not divide"),
    (lambda: cut_fc1(Replicate(), Interleaved(0, (5, 3), 2)), 2, "fc1"),
    (lambda: cut_fc1(Replicate(), Interleaved(0, (8,), 0)), 1, "fc1"),
    (lambda: cut_fc1(Replicate(), StridedShard(0, 0)), 1, "fc1"),
    (lambda: cut_fc1(Replicate(), "tp"), 1, "fc1"),
    (lambda: cut_fc1(Replicate(), Segmented(0, (9, -1))), 1, "fc1"),
    (lambda: declared_fragments("w", FC1[0], "float7", FC1[1], WHOLE, 0, "root"), 0, "no dtype"),
    (lambda: declared_fragments("w", FC1[0], "int8", FC1[1], WHOLE, 0, "root", (1,)), 0, "strides"),
    (PlacementRecord("Partial", {}).placement, 0, ""),
    (PlacementRecord("Shard", {}).placement, 0, ""),
    (PlacementRecord("Shard", {"dim": (1,)}).placement, 0, ""),
    (PlacementRecord("type", {}).placement, 0, ""),
]  # fmt: skip


@pytest.mark.parametrize("made, faults, said", REFUSED)
def test_what_is_no_mesh_no_placement_or_no_parallelism_is_a_layout_error_with_all_faults(made, faults, said):
    with pytest.raises(LayoutError) as e:
        made()
    assert len(e.value.violations) == faults, e.value
    assert all(words in str(e.value) for words in said.split("|"))


def test_placements_of_torch_that_are_none_here_are_refused_by_name():
    with pytest.raises(Unsupported) as e:
        from_torch((tp.Partial(), tp.Shard(0), tp.Partial("avg"), object()))
    assert len(e.value.violations) == 3 and "avg" in str(e.value) and "object" in str(e.value)
    assert from_torch((Segmented(0, (1,)), tp.Replicate())) == (Segmented(0, (1,)), Replicate())


def test_negative_dims_count_from_the_end():
    assert local_shape(*FC1, (Replicate(), Shard(-1)), 0) == (8, 2)
