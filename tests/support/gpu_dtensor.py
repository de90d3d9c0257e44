"""What each rank of tests/functional/test_gpu_xferdtensor.py does."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from tests.functional.test_xferdtensor import EXAMPLES, any_mesh_to_any_mesh, part_of, raises
from tests.support.gpu_ranks import run_all
from xfer import dtensor, dtensor_routes
from xfer.errors import PeerLost, PlanMismatch, Unsupported
from xfer.mesh import MeshInfo, Replicate, Shard
from xfer.transport.peer import Pull

MOVES = EXAMPLES // 8


def spawn(size: int, folder, backend: str, part: str, seconds: float = 150.0) -> list[dict]:
    """What `part` returned on each of `size` ranks, which share two GPUs evenly."""
    run_all(_main, size, (size, str(folder), backend, part), seconds)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(size)]


def _main(rank: int, size: int, folder: str, backend: str, part: str) -> None:
    device = torch.device("cuda", rank * 2 // size)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    plans, open_ways = [], dtensor_routes.find_ways

    def noted(*args, **kwargs):
        ways = open_ways(*args, **kwargs)
        plans.append(ways.plan)
        return ways

    dtensor_routes.find_ways = noted
    found = globals()[part](rank, size, device, plans)
    with open(f"{folder}/rank{rank}.json", "w") as f:
        json.dump(found, f)
    dtensor.forget()
    dist.destroy_process_group()


def _both_ways(plans) -> dict:
    return {"pulled": sum(p.pulled_in for p in plans), "sent": sum(p.p2p_in for p in plans)}


def by_both_routes(rank, size, device, plans) -> dict:
    """Random moves by mapped memory and then over NCCL; what is kept in between."""
    any_mesh_to_any_mesh(rank, MOVES, size, device, 300)
    mapped = _both_ways(plans)
    plans.clear()
    any_mesh_to_any_mesh(rank, MOVES, size, device, 300, peer=False)
    over_nccl = _both_ways(plans)
    for peer in (None, False):
        _dtypes(rank, size, device, peer)
        _kept(rank, size, device, plans, peer)
    _refused(rank, size, device)
    return {"mapped": mapped, "nccl": over_nccl}


def by_mapped_memory(rank, size, device, plans) -> dict:
    """Ranks that share GPUs: all is mapped, and what must not be is refused on all ranks."""
    any_mesh_to_any_mesh(rank, MOVES, size, device, 300)
    mapped = _both_ways(plans)
    _kept(rank, size, device, plans, None)
    mesh, full = MeshInfo.line("x", range(size)), torch.ones(8, 8, device=device)
    move = (full.chunk(size)[rank].clone(), mesh, [Shard(0)], torch.zeros_like(full), mesh, [Replicate()])
    raises(Unsupported, "ranks share a GPU", *move, peer=False)
    dtensor.xferdtensor(*move)
    assert torch.equal(move[3], full)
    return {"mapped": mapped}


def _dtypes(rank, size, device, peer) -> None:
    """Uneven shards of a few MiB, bits of any pattern, casts."""
    mesh, back = MeshInfo.line("x", range(size)), MeshInfo.line("x", reversed(range(size)))
    bits = torch.randint(0, 256, (1021, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)).to(device)
    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64, torch.bool):
        full = bits % 2 == 1 if kind == torch.bool else bits.view(kind)
        src, want = part_of(full, mesh, [Shard(0)], rank), part_of(full, back, [Shard(1)], rank)
        got = torch.zeros_like(want.view(torch.uint8)).view(kind)
        dtensor.xferdtensor(src, mesh, [Shard(0)], got, back, [Shard(1)], peer=peer)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), kind
    full = torch.randn(515, 33, generator=torch.Generator().manual_seed(1)).to(device)
    src, got = part_of(full, mesh, [Shard(0)], rank), torch.zeros(515, 33, dtype=torch.bfloat16, device=device)
    dtensor.xferdtensor(src, mesh, [Shard(0)], got, back, [Replicate()], narrow=True, peer=peer)
    assert torch.equal(got, full.bfloat16())


def _kept(rank, size, device, plans, peer) -> None:
    """A second call opens nothing, new values arrive at once after an unfinished write, and storages may move."""
    mesh = MeshInfo.line("x", range(size))
    full = torch.arange(4096 * 4096, device=device).view(4096, 4096).int()
    src, got = torch.empty_like(full.chunk(size)[rank]), torch.empty_like(full.chunk(size, 1)[rank])
    state, version = dtensor_routes.state_of(None), 0
    dtensor.forget()

    def move(src, got, expected: int) -> None:
        nonlocal version
        version += 1
        plans.clear()
        torch.cuda._sleep(20_000_000)  # what writes the source and the destination has not begun when the call comes
        torch.add(full.chunk(size)[rank], version, out=src)
        got.fill_(-1)
        dtensor.xferdtensor(src, mesh, [Shard(0)], got, mesh, [Shard(1)], peer=peer)
        assert torch.equal(got, full.chunk(size, 1)[rank] + version)
        assert len(plans) == expected, (peer, version, plans)

    move(src, got, 1)
    move(src, got, 0)
    move(src, torch.empty_like(got), 0)  # a destination may lie anywhere
    move(src, got, 0)
    other = torch.empty_like(src) if rank == 0 else src
    move(other, got, 1 if peer is None else 0)  # another source is mapped by all ranks; over NCCL it need not be
    move(src, got, 0)
    move(other, got, 0)
    if peer is None:
        kept, before = len(state.routes), torch.cuda.memory_allocated()
        del other
        for _ in range(5):
            move(src, got, 0)
        assert rank or torch.cuda.memory_allocated() <= before - src.nbytes, "a source that its owner let go of is held"
        assert len(state.routes) < kept
    dtensor.forget()
    assert not state.routes and not state.links
    move(src, got, 1)


def _refused(rank, size, device) -> None:
    """Errors on all ranks before anything moves; a read that fails on one rank fails on all; the next call is whole."""
    mesh = MeshInfo.line("x", range(size))
    full = torch.rand(512, 512, device=device, generator=torch.Generator(device).manual_seed(3))
    got = torch.zeros(512, 512 // size, device=device)
    move = (full.chunk(size)[rank].clone(), mesh, [Shard(0)], got, mesh, [Shard(1)])
    raises(PlanMismatch, "narrow", *move, narrow=rank == 1)
    dtensor.xferdtensor(*move)
    finish = Pull.finish

    def stopped(self, *args):
        self.stop()
        return finish(self, *args)

    try:
        if rank == 1:
            Pull.finish = stopped
        try:
            dtensor.xferdtensor(*move)
            raise AssertionError("a stopped pull was not an error")
        except PeerLost as e:
            assert ("stopped here" if rank == 1 else "rank 1: failed while bytes moved") in str(e)
    finally:
        Pull.finish = finish
    got.zero_()
    dtensor.xferdtensor(*move)
    assert torch.equal(got, full.chunk(size, 1)[rank])
