"""What each rank of tests/functional/test_gpu_xferdtensor.py does."""

from __future__ import annotations

import json
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.dtensor_cases import any_mesh_to_any_mesh, failed_on_one, kept_and_followed, part_of, raises
from tests.support.examples import EXAMPLES
from tests.support.gpu_ranks import run_all
from xfer import dtensor, dtensor_routes
from xfer.errors import Unsupported
from xfer.mesh import MeshInfo, Replicate, Shard
from xfer.transport.peer import Pull

MOVES = EXAMPLES // 2


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


def _stopped(pull, *args):
    pull.stop()
    return _finish(pull, *args)


_finish = Pull.finish


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
        kept_and_followed(rank, size, device, plans, peer)
    failed_on_one(rank, size, device, patch.object(Pull, "finish", _stopped), "stopped here")
    return {"mapped": mapped, "nccl": over_nccl}


def by_mapped_memory(rank, size, device, plans) -> dict:
    """Ranks that share GPUs: all is mapped, and what must not be is refused on all ranks."""
    any_mesh_to_any_mesh(rank, MOVES, size, device, 300)
    mapped = _both_ways(plans)
    kept_and_followed(rank, size, device, plans, None)
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
