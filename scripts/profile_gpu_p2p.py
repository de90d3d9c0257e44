"""Where the time of p2p over NCCL goes: one warm run under torch's profiler, per rank.

    python scripts/profile_gpu_p2p.py [--case 4b] [--mib 128]

Prints, per rank: the host's time until all was enqueued, the run's time, and what NCCL's and our kernels took; then a
stretch of the timeline from the middle of the run (start and length in microseconds, stream, kernel).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.multiprocessing as mp
from bench_gpu import Bench, soon
from bench_gpu_cases import CASES
from torch.distributed import PrefixStore, TCPStore

from xfer.transport.group import open_group
from xfer.transport.p2p import P2P


def rank_main(rank: int, args, port: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    from xfer.transport import p2p as p2p_module

    if args.programs:
        p2p_module.BESIDE_WIRE = args.programs
    bench = Bench(rank, args.case, args, port)
    link = open_group(PrefixStore("data", bench.store), rank, bench.size, 120.0, bench.device)
    plan = bench._plan(args.mib << 20, 0).program(rank)
    p2p = P2P(link, plan, bench.roots, step_bytes=args.mib << 20, direct_bytes=args.mib << 20)
    enqueued = [0.0]
    finish = link.finish

    def noted(deadline):
        enqueued[0] = time.perf_counter()
        finish(deadline)

    link.finish = noted
    for _ in range(4):
        bench.meet()
        p2p.run(soon())
    rows = []
    for _ in range(5):
        torch.cuda.synchronize()
        bench.meet()
        t0 = time.perf_counter()
        p2p.run(soon())
        rows.append((1e3 * (enqueued[0] - t0), 1e3 * (time.perf_counter() - t0)))
    bench.meet()
    with profile(
        activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU] if args.cpu else [ProfilerActivity.CUDA]
    ) as prof:
        p2p.run(soon())
        torch.cuda.synchronize()
    kernels = sorted((e for e in prof.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    total: dict[str, list[float]] = {}
    for e in kernels:
        total.setdefault(e.name[:40], []).append(e.time_range.elapsed_us())
    out = [
        f"rank {rank}, {args.mib} MiB, programs {args.programs or 'default'}: {len(p2p._steps)} steps, host ms until enqueued / all: "
        + ", ".join(f"{a:.2f}/{b:.2f}" for a, b in rows)
    ]
    out += [
        f"  {k}: {len(v)} x {sum(v) / len(v):.0f} us" for k, v in sorted(total.items(), key=lambda kv: -sum(kv[1]))[:6]
    ]
    if args.timeline and rank in (0, bench.size - 1) and kernels:
        base = kernels[0].time_range.start
        middle = kernels[len(kernels) // 2 :][:22]
        out += [f"    {e.time_range.start - base:9.0f} +{e.time_range.elapsed_us():6.0f} {e.name[:34]}" for e in middle]
    if args.cpu and rank == 0:
        out.append(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=40))
    for r in range(bench.size):
        bench.meet()
        if r == rank:
            print("\n".join(out), flush=True)
    time.sleep(0.3)
    os._exit(0)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--case", choices=sorted(CASES), default="4b")
    p.add_argument("--mib", type=int, default=128)
    p.add_argument("--programs", type=int, default=0, help="of a pack or unpack kernel; default: as the library has it")
    p.add_argument("--timeline", action="store_true")
    p.add_argument("--cpu", action="store_true", help="the host's side too; slows the run")
    args = p.parse_args()
    size = len([g for g in CASES[args.case].gpus if g is not None])
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [mp.get_context("spawn").Process(target=rank_main, args=(r, args, store.port)) for r in range(size)]
    for x in ranks:
        x.start()
    for x in ranks:
        x.join(90)
        if x.is_alive():
            x.kill()


if __name__ == "__main__":
    main()
