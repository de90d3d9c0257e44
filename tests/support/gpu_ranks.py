"""Ranks as processes on GPUs: `spawn`, and the functions that it runs on each rank for test_gpu_routes.py."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.distributed import HashStore, PrefixStore, TCPStore

from examples.common.ports import free_port
from tests.support.row_worlds import apply_world, fresh_sources, random_world, row
from xfer.errors import XferError
from xfer.kernels import cuda_driver, long_runs
from xfer.plan.program import Program
from xfer.transport.links import open_group
from xfer.transport.p2p import P2P
from xfer.transport.peer import Export, Mapping, Pull
from xfer.transport.routes import NoLink, exchange_over_store, open_routes


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


START_S, SEED_S = 75.0, 4.0
"""Seconds for ranks to start and to do what takes no seeds, and for each seed."""


def run_all(main: Callable, size: int, args: tuple, seconds: float) -> None:
    """Runs `main(rank, *args)` in `size` processes, and raises the traceback of one that failed. All end in `seconds`."""
    context = mp.spawn(main, args, size, join=False)
    until = time.monotonic() + seconds
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < until, f"ranks did not end in {seconds:g} s"
    finally:
        for p in context.processes:
            if p.is_alive():
                p.kill()


def _main(rank: int, size: int, port: int, part: str, kwargs: dict, env: dict, folder: str) -> None:
    os.environ.update(env.get(rank, {}))
    device = torch.device("cuda", rank * torch.cuda.device_count() // size)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    Path(folder, str(rank)).write_bytes(pickle.dumps(globals()[part](rank, size, store, device, **kwargs)))


def spawn(part: str, size: int, env: dict | None = None, **kwargs) -> list:
    """Return the results of `part(rank, size, store, device, **kwargs)` in `size` processes. `env`: rank -> variables."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        seconds = START_S + SEED_S * len(kwargs.get("seeds", ()))
        run_all(_main, size, (size, port, part, kwargs, env or {}, folder), seconds)
        del store
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]


def tensors(storages, device):
    return [torch.from_numpy(r.copy()).to(device) for r in storages]


def agree(got, want) -> None:
    for i, (g, w) in enumerate(zip(got, want)):
        g = g.cpu().numpy()
        if not np.array_equal(g, w):
            at = np.flatnonzero(g != w)
            raise AssertionError(f"storage {i}: {len(at)} of {len(w)} differ, first at {at[:5]}")


def worlds(rank, size, store, device, *, route: str, seeds: list[int], long_bytes: int = 0, batches: bool = True):
    """Random programs, twice each with new sources. long_bytes: copy engines take runs, and boxes of rows, from this size on.
    batches: whether the driver knows them. Returns (pulled bytes, p2p bytes, runs and boxes that copy engines were given)."""
    runs, boxes, kind = [], [], cuda_driver.CopyBatch

    class Counted(kind):
        def __init__(self, *some):
            super().__init__(*some)
            runs.extend(some[0])
            boxes.extend(some[1])

    cuda_driver.CopyBatch = Counted
    if not batches:
        cuda_driver._batch_call = lambda: None
    if long_bytes:
        some = long_runs.Rule(0.8, least=long_bytes, box_bytes=2 * long_bytes, row_bytes=4, cut_bytes=8)
        long_runs.PULLED = long_runs.READ_TOO = some
    link = NoLink(rank, size, device) if route == "peer" else open_group(store, rank, size, 60.0, device)
    pulled = sent = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        programs, storages = random_world(rng, size, 3, 40)
        roots = tensors(storages[rank], device)
        exchange = exchange_over_store(store, rank, size, f"s{seed}")
        if route == "p2p":
            sizes = {"step_bytes": [64, 300, 1 << 20][seed % 3], "direct_bytes": [40, 1 << 20][seed % 2]}
            mover = P2P(link, programs[rank], roots, **sizes)
        else:
            mover = open_routes(link, programs[rank], roots, exchange, step_bytes=300, direct_bytes=1 << 20)
            # Ranks may be threads of one process, and none may wait for the device while another records a graph.
            exchange_over_store(store, rank, size, f"bound{seed}")(b"")
        for again in range(2):
            if again:
                sent_by = [p.rows[p.rows["src"] == k] for k, p in enumerate(programs)]
                storages = [fresh_sources(rng, rows, s) for rows, s in zip(sent_by, storages, strict=True)]
                for t, r in zip(roots, storages[rank]):
                    t.copy_(torch.from_numpy(r))
            torch.cuda.synchronize()
            exchange_over_store(store, rank, size, f"ready{seed}.{again}")(b"")
            stats = mover.run(soon())
            exchange_over_store(store, rank, size, f"done{seed}.{again}")(b"")
            agree(roots, apply_world(programs, storages)[rank])
            if route != "p2p":
                pulled, sent = pulled + mover.report.pulled_bytes, sent + mover.report.p2p_bytes
                assert mover.export is None or not mover.export.stale()
            else:
                sent += stats.bytes_in
        if route != "p2p":
            mover.close()
            exchange_over_store(store, rank, size, f"closed{seed}")(b"")
    link.close()
    return pulled, sent, len(runs), len(boxes)


def one_process(rank, size, store, device, *, ranks: int, seeds: list[int]):
    """`worlds` by pulls, whose ranks are threads of this process, spread over the GPUs. They read storages as they lie, since a
    process cannot open its own handles. Returns what each rank returned."""
    meeting, gpus = HashStore(), max(1, torch.cuda.device_count())
    meeting.set_timeout(timedelta(seconds=60))

    def one(k: int):
        at = torch.device(device.type, k * gpus // ranks)
        if at.type == "cuda":
            torch.cuda.set_device(at)
        return worlds(k, ranks, meeting, at, route="peer", seeds=seeds)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def absent_peer(rank, size, store, device):
    """Rank 1 never runs its program: rank 0 gets a typed error in time, lives on, and a new link works."""
    link = open_group(store, rank, size, 60.0, device)
    n = 1 << 20
    rows = row((n,), src_dtype="uint8", src=1, dst=0)
    roots = [torch.full((n,), rank, dtype=torch.uint8, device=device)]
    outcome, took = "", 0.0
    mover = P2P(link, Program(rank, 1, rows), roots)  # both are there while it connects
    if rank == 0:
        t0 = time.monotonic()
        try:
            mover.run(soon(2.0))
        except XferError as e:
            outcome, took = type(e).__name__, time.monotonic() - t0
    exchange_over_store(store, rank, size, "aborted")(b"")
    link.abort()
    torch.ones(10, device=device).sum().item()
    again = open_group(PrefixStore("again", store), rank, size, 60.0, device)
    if rank < 2:
        P2P(again, Program(rank, 1, rows), roots).run(soon())
    torch.cuda.synchronize()
    good = rank != 0 or bool((roots[0] == 1).all())
    again.close()
    return outcome, took, good


def _buffer(rank, store, size, nbytes, device, name):
    """(storage of rank 0, mapping of it elsewhere)"""
    exchange = exchange_over_store(store, rank, size, name)
    if rank == 0:
        t = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
        export = Export(0, [t], device)
        exchange(export.to_bytes())
        return t, export
    mapping = Mapping(rank, device)
    mapping.open(exchange(b"")[0], 0, [0])
    return None, mapping


def stopped_pull(rank, size, store, device):
    """A pull that is stopped in the middle: typed, drained, quickly; the next one is whole."""
    n = 8 << 30
    kept, other = _buffer(rank, store, size, n, device, "offer")
    out = None
    if rank == 1:
        target = torch.zeros(n, dtype=torch.uint8, device=device)
        pull = Pull(row((n,), src_dtype="uint8", src=0, dst=1), other, [target], programs=2)
        pull.begin()
        time.sleep(0.02)
        threading.Timer(0.02, pull.stop).start()
        t0 = time.monotonic()
        try:
            pull.finish(soon())
            name = "finished"
        except XferError as e:
            name = type(e).__name__
        out = (name, time.monotonic() - t0, int((target[:: 1 << 20] != 0).sum()) < 0.9 * (n >> 20))
        pull.begin()
        pull.finish(soon())
        same = torch.equal(target, other.roots[0][0])
        del pull
        other.close()
        out = (*out, same)
    exchange_over_store(store, rank, size, "end")(b"")
    del kept
    return out


def moved_storage(rank, size, store, device):
    """A freed and newly made storage is noticed even at the same address; a closed mapping keeps no memory."""
    n = 256 << 20
    kept, other = _buffer(rank, store, size, n, device, "offer")
    meet = exchange_over_store(store, rank, size, "meet")
    out = None
    if rank == 0:
        assert not other.stale()
        meet(b"")  # mapped
        meet(b"")  # closed
        before, address = torch.cuda.mem_get_info(device)[0], kept.data_ptr()
        other._roots = ()
        del kept
        torch.cuda.empty_cache()
        back = torch.cuda.mem_get_info(device)[0] - before
        new = torch.zeros(n, dtype=torch.uint8, device=device)
        other._roots = (new,)
        out = (bool(other.stale()), new.data_ptr() == address, back >= n)
    else:
        meet(b"")
        other.close()
        meet(b"")
    meet(b"")
    return out


def given_back(rank, size, store, device):
    """Whether there is memory behind an address: while a tensor lives, and after its segment was given back while its
    addresses stay reserved, as vLLM's sleep mode does it (here: expandable segments)."""
    t = torch.ones(256 << 20, dtype=torch.uint8, device=device)
    address, alive = t.data_ptr(), cuda_driver.mapped(t.data_ptr())
    inside = cuda_driver.mapped(address + (200 << 20))
    del t
    torch.cuda.empty_cache()
    return alive, inside, cuda_driver.mapped(address)
