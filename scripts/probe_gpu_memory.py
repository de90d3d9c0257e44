"""Where the device memory goes that opening the peer route takes: `cudaMemGetInfo` after each of its parts.

    python scripts/probe_gpu_memory.py [--gib 4] [--storages 200]          needs two GPUs

One process offers storages, one maps and pulls them; both print what each part took, in MiB, beside torch's allocator.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.multiprocessing as mp

from tests.support.row_worlds import row
from xfer.kernels import bind
from xfer.transport.peer import Export, Mapping, Pull


class Laps:
    def __init__(self, device):
        self.device, self.rows = device, []
        self.before = self.used()

    def used(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def lap(self, name: str) -> None:
        now = self.used()
        self.rows.append(f"{name} {(now - self.before) / 2**20:.0f}")
        self.before = now


def rank(r: int, args, pipe) -> None:
    device = torch.device("cuda", r)
    torch.cuda.set_device(device)
    n = (args.gib << 30) // args.storages // 256 * 256
    roots = [torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(args.storages)]
    roots[0][:64].cpu()
    laps = Laps(device)
    if r == 0:
        export = Export(0, roots, device)
        laps.lap("export")
        pipe.send(export.to_bytes())
        pipe.recv()
        laps.lap("while mapped and pulled")
        del export
    else:
        torch.ones(8, device=device).add_(1).cpu()
        laps.lap("torch's first kernel")
        mapping = Mapping(1, device)
        mapping.open(pipe.recv(), 0, list(range(args.storages)))
        laps.lap("map")
        streams = [torch.cuda.Stream(device) for _ in range(2)]
        torch.ones(1, dtype=torch.int32, pin_memory=True)
        laps.lap("streams, pinned word")
        one = bind(row((4096,), src_dtype="uint8", src=1, dst=1), [roots[0], roots[1]], "local")
        laps.lap("a first Triton kernel, loaded")
        one.copy()
        laps.lap("launched")
        rows = np.concatenate(
            [row((n,), src_dtype="uint8", src=0, dst=1, src_root=i, dst_root=i) for i in range(args.storages)]
        )
        pull = Pull(rows, mapping, roots)
        laps.lap("pull bound")
        pull.begin()
        pull.finish(1e18)
        laps.lap("pulled")
        pull.begin()
        pull.finish(1e18)
        laps.lap("pulled again")
        from xfer.kernels import triton_impl

        for name in ("_copy_tiles", "_convert_tiles"):
            for caches in getattr(triton_impl, name).device_caches.values():
                for k in caches[0].values():
                    laps.rows.append(f"[{name}: {k.n_regs} registers, {k.n_spills} spills, {k.metadata.shared} shared]")
        del pull, streams
        mapping.close()
        laps.lap("unmapped")
        pipe.send(b"")
    print(f"rank {r}, {args.storages} storages of {n / 2**20:.1f} MiB: " + ", ".join(laps.rows), flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gib", type=int, default=4)
    p.add_argument("--storages", type=int, default=200)
    args = p.parse_args()
    context = mp.get_context("spawn")
    ends = context.Pipe()
    ranks = [context.Process(target=rank, args=(r, args, ends[r])) for r in range(2)]
    for x in ranks:
        x.start()
    for x in ranks:
        x.join(120)


if __name__ == "__main__":
    main()
