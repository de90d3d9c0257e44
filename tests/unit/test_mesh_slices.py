"""The part of a tensor that a rank holds: as torch says for torch's placements, and as a numpy oracle says for all."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as tp
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from tests.support.examples import EXAMPLES
from tests.support.trace_maps import addresses
from xfer.errors import LayoutError, Unsupported
from xfer.mesh import (
    Interleaved,
    MeshInfo,
    Replicate,
    Segmented,
    Shard,
    StridedShard,
    from_torch,
    local_layout,
    local_shape,
)
from xfer.mesh.placement import PlacementRecord
from xfer.trace.declared import declared_fragments

# ---- the oracle: it cuts arrays and computes no indices


def chunks(a: np.ndarray, n: int, dim: int) -> list[np.ndarray]:
    parts = [c.numpy() for c in torch.chunk(torch.from_numpy(a), n, dim)] if a.shape[dim] else []
    return parts + [a.take([], axis=dim)] * (n - len(parts))


def segments(a: np.ndarray, sizes, dim: int) -> list[np.ndarray]:
    return np.split(a, np.cumsum(sizes)[:-1], axis=dim) if len(sizes) else []


def cut(a: np.ndarray, p, size: int, index: int) -> np.ndarray:
    """The local part of `a` under one placement over one axis."""
    if isinstance(p, Replicate):
        return a
    if isinstance(p, Shard):
        return chunks(a, size, p.dim)[index]
    if isinstance(p, StridedShard):
        return np.concatenate([chunks(s, size, p.dim)[index] for s in chunks(a, p.split_factor, p.dim)], p.dim)
    if isinstance(p, Segmented):
        copies = p.copies or (1,) * len(p.segments)
        parts = segments(a, p.segments, p.dim)
        return np.concatenate([chunks(s, size // c, p.dim)[index // c] for s, c in zip(parts, copies)], p.dim)
    by_segment = [np.split(s, p.groups, axis=p.dim) for s in segments(a, p.segments, p.dim)]
    by_group = [np.concatenate(parts, p.dim) for parts in zip(*by_segment)]
    mine = chunks(np.arange(p.groups), size, 0)[index]
    return np.concatenate([a.take([], axis=p.dim), *(by_group[g] for g in mine)], p.dim)


def local_part(full: np.ndarray, mesh: MeshInfo, placements, rank: int) -> np.ndarray:
    for p, size, index in zip(placements, mesh.sizes, mesh.coordinate(rank)):
        full = cut(full, p, size, index)
    return full


def boxes_of(shape, mesh: MeshInfo, placements, rank: int) -> list:
    """(box of the global tensor, its origin in the local one) of all that `rank` holds."""
    return [(b.box, b.at) for b in local_layout(shape, mesh, placements, rank).boxes]


def read(full: np.ndarray, shape, boxes) -> np.ndarray:
    """The local array that `boxes` describe; each local element must be written once."""
    local, written = np.full(shape, -1, full.dtype), np.zeros(shape, int)
    for box, at in boxes:
        here = tuple(slice(a, a + e) for a, e in zip(at, box.extent))
        local[here] = full[tuple(slice(o, o + e) for o, e in zip(box.origin, box.extent))]
        written[here] += 1
    assert (written == 1).all()
    return local


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
    """One fused placement, alone on its dim, on one axis of a random mesh; torch's on the others."""
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
    rest = [Replicate() if getattr(p, "dim", None) == dim else p for p in placements]
    return (
        (*shape[:dim], sum(parts), *shape[dim + 1 :]),
        mesh,
        (*rest[:axis], fused, *rest[axis + 1 :]),
    )


# ---- tests


@settings(max_examples=EXAMPLES, deadline=None)
@given(torch_layouts())
@example(((10,), MeshInfo.grid(tp=4), (Shard(0),)))
@example(((3,), MeshInfo.grid(tp=4), (Shard(0),)))
@example(((8, 8), MeshInfo.grid(dp=2, tp=2), (StridedShard(0, 2), Shard(0))))
def test_shards_are_where_torch_puts_them(layout):
    shape, mesh, placements = layout
    theirs = tuple(
        tp.Replicate() if p == Replicate()
        else tp.Shard(p.dim) if isinstance(p, Shard)
        else tp._StridedShard(p.dim, split_factor=p.split_factor)
        for p in placements
    )  # fmt: skip
    assert from_torch(theirs) == placements
    for rank in mesh.ranks.ravel():
        size, offset = _compute_local_shape_and_global_offset(shape, mesh.sizes, list(mesh.coordinate(rank)), theirs)
        boxes = boxes_of(shape, mesh, placements, rank)
        assert local_shape(shape, mesh, placements, rank) == size
        assert bool(boxes) == (0 not in size)
        if boxes:
            assert boxes[0][1] == (0,) * len(shape) and boxes[0][0].origin == offset


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(st.one_of(torch_layouts(), fused_layouts()), st.integers(0, 64), st.booleans())
@example(((24,), MeshInfo.grid(tp=4), (Segmented(0, (16, 4, 4)),)), 0, False)
@example(((20,), MeshInfo.grid(tp=4), (Segmented(0, (16, 2, 2), (1, 2, 2)),)), 4, True)
@example(((24, 3), MeshInfo.grid(tp=2), (Interleaved(0, (16, 4, 4), 4),)), 0, True)
def test_fragments_address_the_oracles_local_tensors_and_cover_everything(layout, offset, transposed):
    shape, mesh, placements = layout
    full = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    held = np.zeros(shape, int)
    for rank in mesh.ranks.ravel():
        expected = local_part(full, mesh, placements, rank)
        storage = np.zeros(offset + 4 * expected.size, np.uint8)
        local = np.ndarray(expected.shape, np.int32, storage, offset, order="F" if transposed else "C")
        local[...] = expected
        assert local_layout(shape, mesh, placements, rank).shape == expected.shape
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


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 4),
    st.data(),
)
def test_several_axes_cut_the_segments_of_one_dim(widths, groups, first, second, data):
    """Over two axes: segments each again (Segmented), the fused local dim as it lies (Shard), or whole groups."""
    segs = tuple(w * groups for w in widths)
    mesh, full = MeshInfo.grid(a=first, b=second), np.arange(sum(segs))
    kind = data.draw(st.sampled_from(["segments", "as it lies", "groups"]))
    fused = Interleaved(0, segs, groups) if kind == "groups" else Segmented(0, segs)
    for rank in mesh.ranks.ravel():
        i, j = mesh.coordinate(rank)
        if kind == "groups":  # one row per group
            whole = np.concatenate([s.reshape(groups, -1) for s in segments(full, segs, 0)], 1)
            want = chunks(chunks(whole, first, 0)[i], second, 0)[j].reshape(-1)
        else:
            mine = [chunks(s, first, 0)[i] for s in segments(full, segs, 0)]
            again = [chunks(s, second, 0)[j] for s in mine]
            want = np.concatenate(again) if kind == "segments" else chunks(np.concatenate(mine), second, 0)[j]
        placements = (fused, Shard(0) if kind == "as it lies" else fused)
        got = read(full, want.shape, boxes_of(full.shape, mesh, placements, rank))
        np.testing.assert_array_equal(got, want)


def test_all_faults_of_a_layout_come_at_once():
    mesh = MeshInfo.grid(dp=2, tp=3)
    with pytest.raises(LayoutError) as e:
        local_layout((8, 6), mesh, (Shard(2), Segmented(0, (4, 3), (2,)), Replicate()), 0, "fc1")
    text = "\n".join(e.value.violations)
    assert len(e.value.violations) == 5 and "3 placements for the 2 axes" in text and "no dim 2" in text
    assert "add up to 7" in text and "1 copies for 2 segments" in text and "copies 2 does not divide" in text
    for p in [Interleaved(0, (5, 3), 2), Interleaved(0, (8,), 0), StridedShard(0, 0), "tp", Segmented(0, (9, -1))]:
        with pytest.raises(LayoutError, match="fc1"):
            local_layout((8, 6), mesh, (Replicate(), p), 0, "fc1")
    assert local_shape((8, 6), mesh, (Replicate(), Shard(-1)), 0) == (8, 2), "negative dims count from the end"
    with pytest.raises(LayoutError, match="no dtype"):
        declared_fragments("w", (8, 6), "float7", mesh, (Replicate(), Replicate()), 0, "root")
    with pytest.raises(LayoutError, match="strides"):
        declared_fragments("w", (8, 6), "int8", mesh, (Replicate(), Replicate()), 0, "root", (1,))


@pytest.mark.parametrize("kind, fields", [("Partial", {}), ("Shard", {}), ("Shard", {"dim": (1,)}), ("type", {})])
def test_records_that_are_no_placement_are_refused(kind, fields):
    with pytest.raises(LayoutError):
        PlacementRecord(kind, fields).placement()


def test_placements_of_torch_that_are_none_here_are_refused_by_name():
    with pytest.raises(Unsupported) as e:
        from_torch((tp.Partial(), tp.Shard(0), tp.Partial("avg"), object()))
    assert len(e.value.violations) == 3 and "avg" in str(e.value) and "object" in str(e.value)
    assert from_torch((Segmented(0, (1,)), tp.Replicate())) == (Segmented(0, (1,)), Replicate())
