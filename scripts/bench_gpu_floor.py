"""What copy engines take for the bytes of a refit, with nothing else on the GPUs: the floor beside which refits are timed.

    python scripts/bench_gpu_floor.py --sources 2 3 --takers 0 1 [--gib 4] [--repeats 10] [--out floor.json]

Each taker gets --gib GiB out of all sources' memory, as much from each, in pieces of 256 MiB, a stream per source, sources in an
order of its own. One process with all GPUs mapped into each other; a source on the taker's own GPU is a copy within it. Random bytes,
the last pieces of each source compared. Prints and writes milliseconds and GB/s per taker, by the median. Not here: rates of
pushes, runs and rows (bench_gpu_wire.py), planned programs (bench_gpu.py). bench_gpu_session.py runs it before its engines start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

PIECE = 256 << 20


@dataclass(frozen=True)
class Copy:
    """`nbytes` into taker `taker` out of source `source` (places in the lists of ranks), `at` bytes into its share of that source."""

    taker: int
    source: int
    at: int
    nbytes: int


def copies(takers: int, sources: int, nbytes: int, piece: int = PIECE) -> list[Copy]:
    """Of `nbytes` per taker, in the order in which they are asked for: round by round, so that no engine waits for another's queue."""
    share, out = -(-nbytes // sources), []
    for at in range(0, share, piece):
        for turn in range(sources):
            for taker in range(takers):
                source = (taker + turn) % sources
                mine = min(share, max(0, nbytes - source * share))  # the last source has what is left
                if at < mine:
                    out.append(Copy(taker, source, at, min(piece, mine - at)))
    return out


class Floor:
    def __init__(self, sources: list[int], takers: list[int], nbytes: int):
        from xfer.kernels import cuda_driver as driver

        self.gpus = sorted({*sources, *takers})
        share = -(-nbytes // len(sources))
        self.given = [torch.randint(0, 255, (share,), dtype=torch.uint8, device=f"cuda:{g}") for g in sources]
        # Where the bytes land matters to nobody: two pieces of each source, one after the other, as in a double buffer.
        self.taken = [
            torch.zeros((len(sources), 2, min(PIECE, share)), dtype=torch.uint8, device=f"cuda:{g}") for g in takers
        ]
        for taken in self.taken:
            for given in self.given:
                # torch lets a GPU reach another at the first copy between them: both ways, whichever the driver asks for.
                taken[0, 0, :16].copy_(given[:16].to(taken.device).to(given.device))
        self.sync()
        self.seen = [[driver.tensor_at(g.data_ptr(), g.numel(), t.device) for g in self.given] for t in self.taken]
        self.streams = [[torch.cuda.Stream(t.device) for _ in sources] for t in self.taken]
        self.order = copies(len(takers), len(sources), nbytes)

    def sync(self) -> None:
        for g in self.gpus:
            torch.cuda.synchronize(g)

    def place(self, c: Copy) -> torch.Tensor:
        return self.taken[c.taker][c.source, c.at // PIECE % 2, : c.nbytes]

    def run(self) -> float:
        """Milliseconds."""
        self.sync()
        began = time.perf_counter()
        for c in self.order:
            with torch.cuda.stream(self.streams[c.taker][c.source]):
                self.place(c).copy_(self.seen[c.taker][c.source][c.at : c.at + c.nbytes], non_blocking=True)
        self.sync()
        return 1e3 * (time.perf_counter() - began)

    def wrong(self) -> int:
        """Bytes of the last piece of each source in each taker that are not the source's."""
        last = {(c.taker, c.source): c for c in self.order}
        return sum(
            int((self.place(c) != self.given[c.source][c.at : c.at + c.nbytes].to(self.place(c).device)).sum())
            for c in last.values()
        )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sources", type=int, nargs="+", required=True, help="the GPU of each trainer rank")
    p.add_argument("--takers", type=int, nargs="+", required=True, help="the GPU of each engine worker")
    p.add_argument("--gib", type=float, default=4.0, help="bytes per taker, GiB")
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--out", default="")
    a = p.parse_args()
    nbytes = int(a.gib * (1 << 30)) // 512 * 512
    floor = Floor(a.sources, a.takers, nbytes)
    ms = [floor.run() for _ in range(a.repeats + 2)][2:]
    found = {
        "sources": a.sources, "takers": a.takers, "bytes_per_taker": nbytes, "ms": ms, "wrong": floor.wrong(),
        "gb_per_s": nbytes / statistics.median(ms) / 1e6,
    }  # fmt: skip
    print(
        json.dumps({**found, "ms": round(statistics.median(ms), 3), "gb_per_s": round(found["gb_per_s"], 1)}),
        flush=True,
    )
    if a.out:
        Path(a.out).write_text(json.dumps(found))
    if found["wrong"]:
        raise SystemExit(f"{found['wrong']} bytes differ from the sources")


if __name__ == "__main__":
    main()
