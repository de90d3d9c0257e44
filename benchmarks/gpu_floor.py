"""Time copy engines on the bytes of a refit with nothing else on the GPUs: the floor beside which refits are timed.

    python -m benchmarks.gpu_floor --sources 2 3 --destinations 0 1 [--gib 4] [--repeats 10] [--out floor.json]

Each destination copies --gib GiB, an equal share from each source's memory, in pieces of 256 MiB, with one stream per source.
One process maps all GPUs into each other. A source on the destination's own GPU is a copy within it. Bytes are random, and
the last piece of each pair is compared. Prints milliseconds and GB/s per destination, medians. benchmarks.gpu_session runs
this before it starts its engines.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lib import command

PIECE = 256 << 20


@dataclass(frozen=True)
class Copy:
    """Copy `nbytes` at offset `at` of the destination's share of a source. Both are positions in the lists of GPUs."""

    destination: int
    source: int
    at: int
    nbytes: int


def copies(destinations: int, sources: int, nbytes: int, piece: int = PIECE) -> list[Copy]:
    """The copies of `nbytes` per destination, in the order of their launch.

    Destinations begin with different sources and change them piece by piece, so that no two copy engines share a source.
    """
    share, out = -(-nbytes // sources), []
    for at in range(0, share, piece):
        for turn in range(sources):
            for destination in range(destinations):
                source = (destination + turn) % sources
                mine = min(share, max(0, nbytes - source * share))  # the last source has the remainder
                if at < mine:
                    out.append(Copy(destination, source, at, min(piece, mine - at)))
    return out


class Floor:
    def __init__(self, sources: list[int], destinations: list[int], nbytes: int):
        from xfer.kernels import cuda_driver as driver

        self.gpus = sorted({*sources, *destinations})
        share = -(-nbytes // len(sources))
        self.given = [torch.randint(0, 255, (share,), dtype=torch.uint8, device=f"cuda:{g}") for g in sources]
        # Two pieces per source, used in turn: the place of a copied byte does not matter here.
        self.taken = [
            torch.zeros((len(sources), 2, min(PIECE, share)), dtype=torch.uint8, device=f"cuda:{g}")
            for g in destinations
        ]
        for taken in self.taken:
            for given in self.given:
                # torch enables access between two GPUs at their first copy: copy both ways.
                taken[0, 0, :16].copy_(given[:16].to(taken.device).to(given.device))
        self.sync()
        self.seen = [[driver.tensor_at(g.data_ptr(), g.numel(), t.device) for g in self.given] for t in self.taken]
        self.streams = [[torch.cuda.Stream(t.device) for _ in sources] for t in self.taken]
        self.order = copies(len(destinations), len(sources), nbytes)

    def sync(self) -> None:
        for g in self.gpus:
            torch.cuda.synchronize(g)

    def place(self, c: Copy) -> torch.Tensor:
        return self.taken[c.destination][c.source, c.at // PIECE % 2, : c.nbytes]

    def run(self) -> float:
        """Copy everything once; milliseconds."""
        self.sync()
        began = time.perf_counter()
        for c in self.order:
            with torch.cuda.stream(self.streams[c.destination][c.source]):
                self.place(c).copy_(self.seen[c.destination][c.source][c.at : c.at + c.nbytes], non_blocking=True)
        self.sync()
        return 1e3 * (time.perf_counter() - began)

    def wrong(self) -> int:
        """The number of wrong bytes in the last piece of each pair."""
        last = {(c.destination, c.source): c for c in self.order}
        return sum(
            int((self.place(c) != self.given[c.source][c.at : c.at + c.nbytes].to(self.place(c).device)).sum())
            for c in last.values()
        )


def main() -> None:
    p = command.parser("gpu_floor", __doc__)
    p.add_argument("--sources", type=int, nargs="+", required=True, help="the GPU of each trainer rank")
    p.add_argument("--destinations", type=int, nargs="+", required=True, help="the GPU of each engine worker")
    p.add_argument("--gib", type=float, default=4.0, help="bytes per destination, GiB")
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--out", default="")
    a = p.parse_args()
    nbytes = int(a.gib * (1 << 30)) // 512 * 512
    floor = Floor(a.sources, a.destinations, nbytes)
    ms = [floor.run() for _ in range(a.repeats + 2)][2:]
    found = {
        "sources": a.sources, "destinations": a.destinations, "bytes_per_destination": nbytes, "ms": ms, "wrong": floor.wrong(),
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
