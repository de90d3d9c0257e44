"""`xferdtensor` beside plain send/recv of the same bytes and `DTensor.redistribute`, on the GPUs of one host.

    python -m benchmarks.xferdtensor --gpus 2 --mib 1024 --repeats 10

One process per GPU; one bfloat16 tensor of random values; cases:
  shard rows to shard columns   Shard(0) -> Shard(1) on one mesh of all GPUs
  gather                        Shard(0) -> Replicate() on that mesh
  hand over                     the first half of the GPUs, Shard(0) -> the other half, Shard(1); DTensor has no such call
Rows of a case:
  send/recv       the same bytes between the same pairs, a contiguous message each, in one group (NCCL; gloo on CPUs)
  redistribute    DTensor.redistribute, which allocates its result
  xfer, peer      xferdtensor; destinations read mapped memory
  xfer, link      xferdtensor(peer=False): everything over its own link (NCCL; gloo on CPUs)
Milliseconds from the last rank's start to the last rank's end, median of the repeats; GB/s are what the busiest GPU receives.
Destinations are overwritten before each repeat and compared with the expected bits after it. `first` is the first call, which
plans and opens routes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.lib import command
from xfer.dtensor import forget, xferdtensor
from xfer.mesh import MeshInfo
from xfer.mesh.placement import from_torch
from xfer.mesh.slices import local_layout

COLUMNS = 8192


@dataclass(frozen=True)
class Case:
    """A move between two meshes; one mesh where both lists of ranks are equal."""

    name: str
    sources: list[int]
    source: list
    destinations: list[int]
    destination: list


def cases(ranks: int) -> list[Case]:
    every, half = list(range(ranks)), ranks // 2
    return [
        Case("shard rows to shard columns", every, [Shard(0)], every, [Shard(1)]),
        Case("gather", every, [Shard(0)], every, [Replicate()]),
        Case("hand over", every[:half], [Shard(0)], every[half:], [Shard(1)]),
    ]


class Bench:
    """One rank of one case."""

    def __init__(self, rank: int, case: Case, mib: int, device: torch.device):
        self.rank, self.case, self.device = rank, case, device
        shape = (max(dist.get_world_size(), (mib << 20) // 2 // COLUMNS), COLUMNS)
        self.full = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.meshes = [MeshInfo.line("x", r) for r in (case.sources, case.destinations)]
        self.src, want = (self._part(m, p) for m, p in zip(self.meshes, (case.source, case.destination)))
        self.dst = None if want is None else torch.empty_like(want)
        self.pairs = self._pairs()

    def _boxes(self, mesh: MeshInfo, placements, rank: int):
        layout = local_layout(tuple(self.full.shape), mesh, from_torch(placements), rank)
        return [] if layout is None else [b.box for b in layout.boxes]

    def _part(self, mesh: MeshInfo, placements) -> torch.Tensor | None:
        for box in self._boxes(mesh, placements, self.rank):
            return self.full[tuple(slice(o, o + e) for o, e in zip(box.origin, box.extent))].contiguous()
        return None

    def _pairs(self) -> dict[tuple[int, int], int]:
        """Bytes by (source rank, destination rank), of what a destination does not hold itself."""
        out = {}
        for d in self.case.destinations:
            for s in self.case.sources:
                for a in self._boxes(self.meshes[0], self.case.source, s):
                    for b in self._boxes(self.meshes[1], self.case.destination, d):
                        low = np.maximum(a.origin, b.origin)
                        high = np.minimum(np.add(a.origin, a.extent), np.add(b.origin, b.extent))
                        if s != d and (high > low).all():
                            out[s, d] = out.get((s, d), 0) + 2 * int((high - low).prod())
        return out

    def new_values(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        bits = self.full.view(torch.int16)
        bits.random_(-(1 << 15), 1 << 15, generator=generator)
        part = self._part(self.meshes[0], self.case.source)
        if part is not None:
            self.src.copy_(part)
        if self.dst is not None:
            self.dst.view(torch.int16).fill_(0x5A5A)

    def check(self, got: torch.Tensor | None) -> None:
        want = self._part(self.meshes[1], self.case.destination)
        if want is not None and not torch.equal(got.view(torch.int16), want.view(torch.int16)):
            raise SystemExit(f"rank {self.rank}: {self.case.name}: the destination has wrong bits")

    # ---- rows

    def send_recv(self) -> Callable[[], None]:
        messages = []
        for (s, d), n in sorted(self.pairs.items()):
            if self.rank in (s, d):
                buffer = torch.zeros(n, dtype=torch.uint8, device=self.device)
                messages.append((dist.isend, buffer, d) if self.rank == s else (dist.irecv, buffer, s))

        def run() -> None:
            if messages:
                for work in dist.batch_isend_irecv([dist.P2POp(*m) for m in messages]):
                    work.wait()

        return run

    def redistribute(self, mesh: DeviceMesh) -> Callable[[], torch.Tensor]:
        source = DTensor.from_local(self.src, mesh, self.case.source, run_check=False)
        return lambda: source.redistribute(mesh, self.case.destination).to_local()

    def xfer(self, peer: bool | None) -> Callable[[], torch.Tensor | None]:
        def run() -> torch.Tensor | None:
            xferdtensor(
                self.src, self.meshes[0], self.case.source, self.dst, self.meshes[1], self.case.destination, peer=peer
            )
            return self.dst

        return run

    # ---- the clock

    def seconds(self, call: Callable) -> tuple[float, torch.Tensor | None]:
        self._wait()
        dist.barrier()
        begin = time.perf_counter()
        got = call()
        self._wait()
        ends = [None] * dist.get_world_size()
        dist.all_gather_object(ends, (begin, time.perf_counter()))
        return max(b for _, b in ends) - max(a for a, _ in ends), got

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measured(self, call: Callable, repeats: int, checked: bool = True) -> tuple[float, float]:
        """Seconds of the first call, median seconds of `repeats` more after another one."""
        took = []
        for k in range(repeats + 2):
            self.new_values(k)
            seconds, got = self.seconds(call)
            if checked:
                self.check(got)
            took.append(seconds)
        return took[0], statistics.median(took[2:])


def main(rank: int, args: argparse.Namespace, folder: str) -> None:
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, init_method=f"file://{folder}/store", rank=rank, world_size=args.gpus)
    mesh = DeviceMesh(args.device, list(range(args.gpus)))
    peer = None if args.device == "cuda" else True
    for mib in args.mib:
        for case in cases(args.gpus):
            bench = Bench(rank, case, mib, device)
            into = [sum(n for (_, d), n in bench.pairs.items() if d == r) for r in case.destinations]
            if rank == 0:
                print(f"\n{case.name}: {mib} MiB, the busiest GPU receives {max(into) / 1e6:.1f} MB", flush=True)
                print(f"  {'':14}{'first ms':>10}{'ms':>10}{'GB/s':>8}")
            rows = [("send/recv", bench.send_recv(), False), ("xfer, peer", bench.xfer(peer), True)]
            rows.append(("xfer, link", bench.xfer(False), True))
            if case.sources == case.destinations:
                rows.insert(1, ("redistribute", bench.redistribute(mesh), True))
            for name, call, checked in rows:
                first, median = bench.measured(call, args.repeats, checked)
                if rank == 0:
                    rate = f"{max(into) / median / 1e9:8.1f}"
                    print(f"  {name:14}{1e3 * first:10.3f}{1e3 * median:10.3f}{rate}", flush=True)
            forget()
            del bench, rows, call
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    about = command.parser("xferdtensor", __doc__)
    about.add_argument("--gpus", type=int, default=2, help="processes, one per GPU")
    about.add_argument("--mib", type=int, nargs="+", default=[1024, 1], help="MiB of the whole tensor")
    about.add_argument("--repeats", type=int, default=10)
    about.add_argument("--backend", help="of the process group; default: cpu:gloo,cuda:nccl, on CPUs gloo")
    about.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = about.parse_args()
    args.backend = args.backend or ("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    return args


if __name__ == "__main__":
    options = parse()
    if options.device == "cuda":
        where = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        print(f"{options.gpus} of {torch.cuda.device_count()} x {', '.join(where)}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(main, (options, place), options.gpus)
