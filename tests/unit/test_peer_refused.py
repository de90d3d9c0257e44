"""Why destinations on its GPU cannot read a source's memory; all ranks report it where NCCL cannot help either.

Without a GPU: the driver's answers are made up. Live: test_gpu_refit.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch.distributed import HashStore

from xfer.errors import Unsupported
from xfer.kernels import cuda_driver
from xfer.transport import peer, routes

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("expandable", [True, False, None], ids=["expandable", "other", "no snapshot"])
def test_what_a_source_says_of_memory_that_has_no_handle(expandable):
    """torch is asked once for a snapshot, whatever the number of storages, and not where all have handles. cudaMallocAsync and
    pluggable allocators have none."""
    roots, asked = [torch.zeros(64, dtype=torch.uint8) for _ in range(5)], []

    def allocation(pointer: int) -> cuda_driver.Allocation:
        return cuda_driver.Allocation(pointer, 64, pointer, exportable=pointer == roots[0].data_ptr())

    def snapshot() -> list[dict]:
        asked.append(1)
        if expandable is None:
            raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")
        there = [dict(address=t.data_ptr() - 8, total_size=80, is_expandable=expandable) for t in roots]
        return [*there, dict(address=1, total_size=1, is_expandable=True)]

    with (
        patch.multiple(cuda_driver, allocation=allocation, export=lambda base: bytes(64)),
        patch.object(torch.cuda, "memory_snapshot", snapshot),
        patch.object(peer, "uuid_of", lambda device: "GPU"),
    ):
        assert not peer.Export(0, roots[:1], torch.device("cpu")).offer.places[0].reason
        before = len(asked)
        places = msgspec.msgpack.decode(peer.Export(0, roots, torch.device("cpu")).to_bytes(), type=peer.Offer).places
    assert len(asked) == before + 1
    assert places[0].allocation == 0 and not places[0].reason
    for p in places[1:5]:
        assert p.allocation < 0 and "IPC" in p.reason
        assert ("expandable segments" in p.reason) == bool(expandable) and ("sleeps" in p.reason) != bool(expandable)


@pytest.mark.parametrize("shared", [True, False])
def test_every_rank_reports_why_a_link_cannot_carry_what_is_not_read(shared):
    """Only rank 2 knows why."""
    store, why = HashStore(), "replica 0 worker 0 from trainer 1: it lies in expandable segments"
    store.set_timeout(timedelta(seconds=20))

    def opened(rank: int):
        refused = (why, "and so on") if rank == 2 else ()
        try:
            return routes.open_link(store, rank, 3, 20.0, GPU, [f"rank {r}" for r in range(3)], refused=refused)
        except Unsupported as e:
            return e

    uuids = iter(["a", "b", "b" if shared else "c"])
    with (
        patch.object(peer, "uuid_of", lambda device: next(uuids)),
        patch.object(routes, "open_group", lambda store, rank, *rest: f"link of {rank}"),
        ThreadPoolExecutor(3) as pool,
    ):
        got = list(pool.map(opened, range(3)))
    if not shared:
        assert got == [f"link of {r}" for r in range(3)]
        return
    for e in got:
        assert isinstance(e, Unsupported) and "ranks share a GPU" in str(e), e
        assert why in str(e) and "and so on" not in str(e) and "PYTORCH_ALLOC_CONF" in str(e), e
