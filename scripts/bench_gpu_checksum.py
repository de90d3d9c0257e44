"""How fast a GPU checks 4 GB: the launch of one side, median of 10.     python scripts/bench_gpu_checksum.py"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from tests.support.row_worlds import row
from xfer.kernels.checksum import Sums


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    shape, count = (9728, 2560), 80
    roots = [torch.randint(0, 256, (shape[0] * shape[1] * 2,), dtype=torch.uint8, device="cuda") for _ in range(count)]
    for name, strides in (("contiguous", None), ("columns of a wider matrix", (5120, 2))):
        extent = shape if strides is None else (shape[0], 1280)
        rows = np.concatenate(
            [row(extent, src_strides=strides, src_root=i, tensor=i, dst_root=i) for i in range(count)]
        )
        sums = Sums(rows, np.zeros(count, np.int64), 1, roots, "src", [shape] * count)
        ms = []
        for _ in range(12):
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            sums.values()
            ms.append(1e3 * (time.perf_counter() - t0))
        n = count * extent[0] * extent[1] * 2
        mid = statistics.median(ms[2:])
        print(
            f"checksum, {name}: {n / 1e9:.2f} GB in {mid:.2f} ms ({min(ms):.2f}-{max(ms[2:]):.2f}), {n / mid / 1e6:.0f} GB/s"
        )


if __name__ == "__main__":
    main()
