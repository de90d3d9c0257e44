"""Cases of xferdtensor, which four gloo ranks run at once (proc.obey). The judges are torch's own DTensor.redistribute where it can make
the move, slices of the full tensor everywhere else.
"""

import os
import random
import re
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as tt
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.examples import EXAMPLES
from tests.support.proc import emit, obey
from xfer import dtensor, dtensor_routes
from xfer.dtensor import xferdtensor
from xfer.dtensor_exchange import RankExchange
from xfer.errors import CoverageError, DeadlineExceeded, LayoutError, PeerLost, PlanMismatch, Unsupported
from xfer.mesh import Interleaved, MeshInfo, Replicate, Segmented, Shard, StridedShard, local_layout
from xfer.transport import peer_host

WORLD = 4


# ---------------------------------------------------------------- what cases are made of


def part_of(full, mesh, placements, rank):
    """The local tensor of `rank`, assembled from slices of the full one; None when it is not in the mesh."""
    layout = local_layout(tuple(full.shape), mesh, placements, rank)
    if layout is None:
        return None
    out = torch.empty(layout.shape, dtype=full.dtype, device=full.device)
    for b in layout.boxes:
        here = tuple(slice(a, a + e) for a, e in zip(b.at, b.box.extent))
        out[here] = full[tuple(slice(o, o + e) for o, e in zip(b.box.origin, b.box.extent))]
    return out


def strided_like(t, rng):
    """An uninitialised tensor of t's shape in odd storage: permuted, offset, with foreign elements between its own."""
    order = rng.sample(range(t.dim()), t.dim())
    wide = torch.full([t.shape[d] * 2 + 3 for d in order], 77, dtype=t.dtype, device=t.device)
    view = wide[
        tuple(slice(1, 1 + 2 * t.shape[d], 2) if rng.random() < 0.5 else slice(2, 2 + t.shape[d]) for d in order)
    ]
    back = [order.index(d) for d in range(t.dim())]
    return view.permute(back), wide


def values(shape, dtype=torch.float32):
    return torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape).to(dtype)


def random_mesh(rng, world=WORLD):
    sizes = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1), (4, 1), (3, 1)]
    sizes = rng.choice([s for s in sizes if np.prod(s) <= world])
    ranks = rng.sample(range(world), int(np.prod(sizes)))
    return MeshInfo([f"m{i}" for i in range(len(sizes))], np.array(ranks).reshape(sizes))


def random_placements(rng, mesh, shape):
    out = []
    for size in mesh.sizes:
        dim = rng.randrange(len(shape))
        n, kind = shape[dim], rng.choice([Shard, Shard, Replicate, StridedShard, Segmented, Interleaved])
        if kind is Replicate:
            out.append(kind())
        elif kind is StridedShard:
            out.append(kind(dim, rng.randint(1, 3)))
        elif kind is Shard or any(isinstance(p, (Segmented, Interleaved)) and p.dim == dim for p in out):
            out.append(Shard(dim))
        elif kind is Segmented:
            a = rng.randint(0, n)
            b = rng.randint(0, n - a)
            out.append(kind(dim, (a, b, n - a - b), (1, size, 1) if rng.random() < 0.3 else ()))
        else:
            groups = rng.choice([g for g in (1, 2, 3, 4) if n % g == 0])
            a = rng.randint(0, n // groups) * groups
            out.append(kind(dim, (a, n - a), groups))
    return tuple(out)


def torch_placements(rng, mesh, shape):
    return [rng.choice([tt.Replicate(), *(tt.Shard(d) for d in range(len(shape)))]) for _ in range(mesh.ndim)]


# ---------------------------------------------------------------- cases: each runs on every rank at once


def equals_dtensor_redistribute(rank):
    """Every move on one mesh that torch can make, even and uneven, between DTensors and between plain tensors."""
    rng = random.Random(1)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))]
    for _ in range(EXAMPLES // 4):
        mesh = rng.choice(meshes)
        shape = [rng.randint(1, 11) for _ in range(rng.randint(1, 3))]
        source = tt.distribute_tensor(values(shape), mesh, torch_placements(rng, mesh, shape))
        placements = torch_placements(rng, mesh, shape)
        want = source.redistribute(mesh, placements)
        got = torch.zeros_like(want)
        xferdtensor(source, None, None, got, None, None)
        assert torch.equal(got.to_local(), want.to_local()), (shape, source.placements, placements)
        plain = torch.zeros_like(want.to_local())
        xferdtensor(source.to_local(), mesh, source.placements, plain, mesh, placements, global_shape=shape)
        assert torch.equal(plain, want.to_local()), (shape, source.placements, placements)


def fsdp_order_equals_torch(rank):
    """FSDP2's strided shards, read from DTensors whose dim was cut by the later mesh axis first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = values((8, 3))
    dp, tp = mesh.get_coordinate()
    local = full.chunk(2)[tp].chunk(2)[dp]  # tp first
    source = tt.DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2), tt.Shard(0)], run_check=False)
    assert torch.equal(source.full_tensor(), full)
    got = tt.DTensor.from_local(torch.zeros(8, 3), mesh, [tt.Replicate()] * 2, run_check=False)
    xferdtensor(source, None, None, got, None, None)
    assert torch.equal(got.to_local(), full)

    # The same layout as newer torch may also write it: plain shards, and the order of the axes beside them.
    from torch.distributed.tensor import _dtensor_spec as spec

    if hasattr(spec, "ShardOrderEntry"):
        meta = spec.TensorMeta(full.shape, full.stride(), full.dtype)
        order = (spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        written = spec.DTensorSpec(mesh, (tt.Shard(0), tt.Shard(0)), tensor_meta=meta, shard_order=order)
        got.to_local().zero_()
        xferdtensor(tt.DTensor(local, written, requires_grad=False), None, None, got, None, None)
        assert torch.equal(got.to_local(), full)


def any_mesh_to_any_mesh(rank, count=EXAMPLES // 4, world=WORLD, device="cpu", largest=12, **options):
    """Meshes of different ranks, shapes and sizes, overlapping or not, all placements, odd strides on both sides."""
    rng = random.Random(2)
    for i in range(max(count, 10)):
        shape = tuple(rng.choice([1, 2, 4, 6, 9, largest]) for _ in range(rng.randint(1, 3)))
        meshes = random_mesh(rng, world), random_mesh(rng, world)
        placements = [random_placements(rng, m, shape) for m in meshes]
        full = values(shape, rng.choice([torch.bfloat16, torch.float32, torch.uint8, torch.int64])).to(device)
        odd = [rng.random() < 0.4 for _ in range(2)]
        seed = rng.random()
        src = part_of(full, meshes[0], placements[0], rank)
        want = part_of(full, meshes[1], placements[1], rank)
        mine = random.Random(f"{seed} {rank}")
        if src is not None and odd[0]:
            src = strided_like(src, mine)[0].copy_(src)
        got = None
        if want is not None:
            got, memory = strided_like(want, mine) if odd[1] else 2 * [torch.full_like(want, 99)]
            between = torch.ones_like(memory, dtype=torch.bool)
            between.as_strided(got.shape, got.stride(), got.storage_offset())[...] = False
            before = memory[between].clone()
        shape_said = shape if rng.random() < 0.5 else None  # local shapes tell it too
        xferdtensor(src, meshes[0], placements[0], got, meshes[1], placements[1], global_shape=shape_said, **options)
        if want is not None:
            assert torch.equal(got, want), (i, shape, meshes, placements)
            assert torch.equal(memory[between], before), "bytes between the destination's own were written"


def disjoint_meshes_of_dtensors(rank):
    """A DTensor of ranks 0, 1 to one of ranks 2, 3: each rank knows only its own side."""
    left, right = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [3, 2])
    full, src, dst = values((5, 6)), None, None
    if rank < 2:
        whole = dict(shape=full.shape, stride=full.stride())
        src = tt.DTensor.from_local(full.chunk(2)[rank], left, [tt.Shard(0)], run_check=False, **whole)
    else:
        dst = tt.DTensor.from_local(torch.zeros(5, 3), right, [tt.Shard(1)], run_check=False)
    xferdtensor(src, None, None, dst, None, None)
    assert dst is None or torch.equal(dst.to_local(), full.chunk(2, 1)[3 - rank])


def a_rank_copies_what_it_holds_from_itself(rank):
    """Replicas on all ranks, shards wanted on two of them: nothing goes over the wire, though others could send."""
    full = values((4096, 3))
    got = full.new_zeros(2048, 3) if rank < 2 else None
    everyone, two = MeshInfo.line("dp", range(4)), MeshInfo.line("tp", [0, 1])
    moves, real = [], dtensor._plan
    with patch.object(dtensor, "_plan", lambda *args: moves.append(real(*args)) or moves[-1]):
        xferdtensor(full, everyone, [Replicate()], got, two, [Shard(0)])
    assert got is None or torch.equal(got, full.chunk(2)[rank])
    rows = moves[0].program.rows
    assert (rows["src"] == rank).all() and (rows["dst"] == rank).all()
    assert rows["extent"].prod(axis=1).sum() == (got.numel() if rank < 2 else 0), "each element is copied once"


def casts_follow_the_destination(rank):
    a, b = MeshInfo.line("x", [0, 1]), MeshInfo.line("x", [1, 2, 3])
    full = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    half = full.bfloat16()
    src = half.chunk(2)[rank] if rank < 2 else None
    dst = torch.zeros(7, 4) if rank > 0 else None
    xferdtensor(src, a, [Shard(0)], dst, b, [Replicate()])
    assert dst is None or torch.equal(dst, half.float())
    src = full.chunk(2)[rank] if rank < 2 else None
    dst = torch.zeros(7, 4, dtype=torch.bfloat16) if rank > 0 else None
    raises(CoverageError, "narrow", src, a, [Shard(0)], dst, b, [Replicate()])
    assert dst is None or not dst.any(), "nothing may move before an error"
    xferdtensor(src, a, [Shard(0)], dst, b, [Replicate()], narrow=True)
    assert dst is None or torch.equal(dst, half)


def a_backward_through_a_destination_that_was_overwritten_raises(rank):
    """As after any write in place; it would compute gradients with the new values."""
    mesh = MeshInfo.line("x", range(WORLD))
    for peer in (False, True):
        for _ in range(2):  # the first call, and one that finds its routes
            into = torch.nn.Parameter(torch.ones(8, 2))
            loss = (into * into).sum()
            xferdtensor(values((2, 2)), mesh, [Shard(0)], into, mesh, [Replicate()], peer=peer)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    with torch.inference_mode():  # such tensors have no versions
        into = torch.zeros(8, 2)
        xferdtensor(values((2, 2)), mesh, [Shard(0)], into, mesh, [Replicate()])
        assert torch.equal(into[2:4], into[:2])


@contextmanager
def reading():
    """Runs of a byte are read from sources' memory too. Yields the plan of each opening of routes."""
    opened, plans = dtensor_routes.find_ways, []

    def noted(*args, **kwargs):
        ways = opened(*args, **kwargs)
        plans.append(ways.plan)
        own = peer_host.takes(ways.rest.local()).any() and kwargs["allow_peer"] is not False
        assert not own, "a rank reads its own rows as it reads those of others"
        return ways

    with patch.object(dtensor_routes, "find_ways", noted), patch.object(peer_host, "SHORTEST", 1):
        yield plans


def any_mesh_to_any_mesh_by_reading(rank):
    with reading() as plans:
        any_mesh_to_any_mesh(rank, EXAMPLES // 8, peer=True)
    assert any(p.pulled_in for p in plans)


def routes_are_kept_and_followed(rank):
    for peer in (True, False):
        with reading() as plans:
            kept_and_followed(rank, WORLD, "cpu", plans, peer)


def kept_and_followed(rank, size, device, plans, peer):
    """Routes are opened once for each set of sources, whatever the destination, and hold no memory that nobody uses. On GPUs new values
    arrive at once after an unfinished write. plans: that of each opening of routes."""
    mesh, side = MeshInfo.line("x", range(size)), 64 if device == "cpu" else 4096
    full = values((side, side), torch.int32).to(device)
    state, version, read = dtensor_routes.state_of(None), 0, peer is not False

    def move(src, got, opened):
        nonlocal version
        version += 1
        plans.clear()
        if device != "cpu":
            # What writes the source and the destination has not begun when the call comes.
            torch.cuda._sleep(20_000_000)
        torch.add(full.chunk(size)[rank], version, out=src)
        real = RankExchange.exchange
        with patch.object(RankExchange, "exchange", autospec=True, side_effect=real) as exchanged:
            xferdtensor(src, mesh, [Shard(0)], got.fill_(-1), mesh, [Shard(1)], peer=peer)
        sizes = [len(call.args[1]) for call in exchanged.call_args_list]
        assert torch.equal(got, full.chunk(size, 1)[rank] + version)
        assert len(plans) == opened, (peer, version, plans)
        if device == "cpu" and not opened:  # a rank says so, moves, and hears that all have read
            assert sizes == ([40, 2] if read else [40])
        assert opened != 1 or max(sizes) > 100, "a layout, or where the source lies"

    dtensor.forget()
    src, got = torch.empty_like(full.chunk(size)[rank]), torch.empty_like(full.chunk(size, 1)[rank])
    move(src, got, 1)
    for there in (got, torch.empty_like(got), got):  # a destination may lie anywhere
        move(src, there, 0)
    other = src.clone() if rank == 0 else src
    move(other, got, int(read))  # another source is mapped by all ranks; over NCCL it need not be
    assert not read or plans[0].pulled_in and plans[0].pulled_out
    move(src, got, 0)
    move(other, got, 0)
    if read:
        gone, kept = StorageWeakRef(other.untyped_storage()), len(state.routes)
        del other
        for _ in range(5):
            move(src, got, 0)
        assert gone.expired() == (rank == 0), "a source that its owner let go of is held"
        assert len(state.routes) < kept
    dtensor.forget()
    assert not state.routes and not state.links
    move(src, got, 1)


def message_buffers_are_kept_for_the_last_routes_only(rank):
    mesh = MeshInfo.line("x", range(4))
    dtensor.forget()
    with patch.object(dtensor_routes, "KEPT_BUFFER_BYTES", 0):
        for n in (8, 12, 16):
            xferdtensor(values((n // 4, n)), mesh, [Shard(0)], torch.zeros(n, n // 4), mesh, [Shard(1)], peer=False)
    *old, last = (r.routed for r in dtensor_routes.state_of(None).routes.values())
    assert old == [None, None] and last.extra_bytes > 0


def a_failed_read_is_told_to_every_rank(rank):
    broken = patch.object(peer_host, "_read", side_effect=OSError(3, "no such process"))
    with reading():
        failed_on_one(rank, WORLD, "cpu", broken, "no such process", peer=True)


def failed_on_one(rank, size, device, broken, why, **options):
    """A read that fails on rank 1 (inside `broken`, by an error that says `why`) fails on all; so does a wrong call; the next one is
    whole."""
    mesh, full = MeshInfo.line("x", range(size)), values((16 * size, 16 * size)).to(device)
    got = torch.zeros(16 * size, 16, device=device)
    move = (full.chunk(size)[rank].clone(), mesh, [Shard(0)], got, mesh, [Shard(1)])
    raises(PlanMismatch, "narrow", *move, narrow=rank == 1, **options)
    xferdtensor(*move, **options)
    with broken if rank == 1 else nullcontext():
        raises(PeerLost, why if rank == 1 else "rank 1: failed while bytes moved", *move, **options)
    got.zero_()
    xferdtensor(*move, **options)
    assert torch.equal(got, full.chunk(size, 1)[rank])
    raises(LayoutError, "rank 1 passed", *move[:3], got[:9] if rank == 1 else got, *move[4:], **options)
    xferdtensor(*move, **options)


def subgroups_number_their_own_ranks(rank):
    group = dist.new_group([1, 2, 3])
    mesh = DeviceMesh("cpu", [2, 3])  # global ranks: 1 and 2 of the group
    outside = DeviceMesh("cpu", [0, 2])
    if rank == 0:
        return
    full = values((6,))
    src = full.chunk(2)[rank - 2] if rank >= 2 else None
    dst = torch.zeros(6) if rank == 1 else None
    xferdtensor(src, mesh, [tt.Shard(0)], dst, MeshInfo.line("x", [0]), [Replicate()], group)
    assert dst is None or torch.equal(dst, full)
    raises(LayoutError, "rank 0", src, outside, [tt.Shard(0)], dst, MeshInfo.line("x", [0]), [Replicate()], group)


def nothing_and_scalars(rank):
    mesh, one = MeshInfo.line("x", range(4)), MeshInfo.line("x", [3])
    got = torch.zeros(()) if rank == 3 else None
    xferdtensor(torch.tensor(5.0), mesh, [Replicate()], got, one, [Replicate()])
    assert got is None or got.item() == 5
    xferdtensor(torch.zeros(0, 4), mesh, [Shard(0)], torch.zeros(0, 1), mesh, [Shard(1)])
    # 2 rows over 4 ranks: two shards are empty, whatever shape the caller gives to nothing
    src = torch.full((1, 3), float(rank)) if rank < 2 else torch.zeros(0)
    got = torch.zeros(2, 3) if rank == 3 else None
    xferdtensor(src, mesh, [Shard(0)], got, one, [Replicate()], global_shape=(2, 3))
    assert got is None or got.tolist() == [[0.0] * 3, [1.0] * 3]
    # A source may be expanded: one value in storage, many in the tensor
    src = torch.tensor([float(rank)]).expand(2, 3)
    wide = torch.zeros(8, 3) if rank == 3 else None
    xferdtensor(src, mesh, [Shard(0)], wide, one, [Replicate()])
    assert wide is None or wide[:, 2].tolist() == [r for r in range(4) for _ in (0, 1)]


def raises(kind, text, *args, **kwargs):
    with pytest.raises(kind, match=re.escape(text)):
        xferdtensor(*args, **kwargs)


def disagreement_is_told_to_every_rank(rank):
    """Whatever one rank alone gets wrong, all ranks raise, nothing moves, and the group works on."""
    mesh = MeshInfo.line("x", range(4))
    src, dst = values((2, 8)), torch.zeros(8, 2)
    good = (src, mesh, [Shard(0)], dst, mesh, [Shard(1)])
    xferdtensor(*good)  # cached: the same descriptions must not shadow the faults below
    dst.zero_()

    other = [Replicate()] if rank == 2 else [Shard(1)]
    raises(PlanMismatch, "ranks [2] say", *good[:5], other)
    raises(PlanMismatch, "narrow", *good, narrow=rank == 1)
    raises(PlanMismatch, "peer", *good, peer=rank == 1)
    raises(PlanMismatch, "shape", *good, global_shape=(8, 8 + rank))
    raises(
        LayoutError, "rank 3 passed [5, 2]", *good[:3], dst if rank != 3 else dst[:5], *good[4:], global_shape=(8, 8)
    )
    raises(LayoutError, "rank 1 is in the mesh and passed no tensor", src if rank != 1 else None, *good[1:])
    small = MeshInfo.line("x", [0, 1])
    raises(LayoutError, "rank 3 passed a tensor and is not in the mesh", *good[:4], small, good[5])
    raises(LayoutError, "the mesh has rank 9", *good[:4], MeshInfo.line("x", [0, 1, 2, 9]), good[5])
    raises(LayoutError, "add up to 7", *good[:5], [Segmented(1, (3, 4))], global_shape=(8, 8))
    raises(LayoutError, "the tensors differ", *good[:3], values((8, 3)), *good[4:])
    raises(LayoutError, "no rank gave mesh", src, None, None, *good[3:])
    raises(LayoutError, "share memory", *good[:3], src.view(8, 2) if rank == 0 else dst, *good[4:])
    memory = np.zeros(80, np.float32)  # seen through two storages, neither of which begins where the other does
    ahead, behind = (torch.from_numpy(memory[at : at + src.numel()]).view(src.shape) for at in (0, 8))
    raises(LayoutError, "share memory", ahead, *good[1:3], behind.view(dst.shape) if rank == 0 else dst, *good[4:])
    torch_mesh = init_device_mesh("cpu", (4,))
    pending = tt.DTensor.from_local(src, torch_mesh, [tt.Partial() if rank == 1 else tt.Replicate()], run_check=False)
    raises(Unsupported, "Partial", pending, None, None, *good[3:])
    raises(Unsupported, "meta", src.to("meta") if rank == 0 else src, *good[1:])
    wide = torch.zeros(1, 2).expand(8, 2) if rank == 0 else dst
    raises(LayoutError, "overlaps itself", *good[:3], wide, *good[4:])

    assert not dst.any()
    xferdtensor(*good)
    assert dst[:, 0].tolist() == [r * 8 + 2 * rank for r in (0, 1)] * 4


def plans_that_differ_never_run(rank):
    """Same descriptions, another plan on one rank (another xfer, a bug): all ranks hear of it, nothing moves."""

    mesh = MeshInfo.line("x", range(4))
    dst = torch.zeros(12, 1)
    move = (values((3, 4)), mesh, [Shard(0)], dst, mesh, [Shard(1)])
    real = dtensor._plan
    other = {"side_effect": lambda *args: replace(real(*args), digest=b"x" * 16)}
    with patch.object(dtensor, "_plan", **other) if rank == 1 else nullcontext():
        raises(PlanMismatch, "rank 1: " + (b"x" * 16).hex(), *move)
    with patch.object(dtensor, "_plan", side_effect=RuntimeError("no memory")) if rank == 1 else nullcontext():
        kind, why = (RuntimeError, "no memory") if rank == 1 else (PlanMismatch, "rank 1: could not plan")
        raises(kind, why, *move)
    assert not dst.any()
    xferdtensor(*move)
    assert dst.any()


def zz_ranks_that_do_not_come(rank):
    """A late rank raises DeadlineExceeded, at the first meeting and at later ones; a dead rank raises PeerLost at once."""
    first, known = dist.new_group([0, 1]), dist.new_group([0, 1])
    dying = dist.new_group([2, 3])
    mesh = MeshInfo.line("x", [0, 1])
    move = (values((2,)), mesh, [Shard(0)], torch.zeros(2), mesh, [Shard(0)])
    if rank > 1:
        xferdtensor(*move, dying)
        if rank == 3:
            return os._exit
        raises(PeerLost, "rank 1 of the group is gone", *move, dying, timeout=60)
        return None
    xferdtensor(*move, known)
    for group in (first, known):
        start = time.monotonic()
        if rank == 0:
            raises(DeadlineExceeded, "not all ranks", *move, group, timeout=0.5)
            assert 0.4 < time.monotonic() - start < 5
    store = dist.distributed_c10d._get_default_store()
    return store.set("late", "") if rank == 0 else store.wait(["late"], timedelta(seconds=60))


def run(name: str) -> None:
    leave = globals()[name](dist.get_rank())
    emit("right")
    if leave:
        leave(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    obey(run)
