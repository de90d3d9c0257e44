"""What two GPUs of one host can bring to each other: rates of xfer's kernel, of copy engines and of both side by side.

    python scripts/bench_gpu_wire.py [--gib 3] [--repeats 7] [--out wire.json]       # 2 GPUs with NVLink; half a minute

Pulls (the taker's GPU works) and pushes (the giver's does), one way and both ways at once; one run, runs of some MiB, runs spread
over the storage, rows cut out of wider ones. One process, both GPUs mapped into each other; each way is launched as one graph, as
pulls are. Random bytes; 64 pieces of each way, or all, are compared after it. GB/s per direction, by the median. Not here: planned
programs and other routes (bench_gpu.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from xfer.kernels import long_runs
from xfer.kernels.triton_impl import TritonRows, multiprocessors
from xfer.plan.program import DTYPE_CODE, ROW, Op
from xfer.transport import cuda_driver as driver

MIB = 1 << 20
ROW_BYTES = 768
"""Of rows cut out of rows twice as wide: w2 of Qwen3-30B-A3B at TP2."""


@dataclass(frozen=True)
class Shape:
    """`run`: bytes of a piece; `spread`: pieces in another order on either side; `strided`: rows of ROW_BYTES."""

    name: str
    run: int = 0
    spread: bool = False
    strided: bool = False

    def rows(self, total: int) -> np.ndarray:
        """dtype ROW, of `total` bytes; whole pieces only."""
        run = self.run or total
        n = total // run
        rows = np.zeros(n, ROW)
        rows["op"], rows["src_dtype"], rows["dst_dtype"] = Op.COPY, DTYPE_CODE["uint8"], DTYPE_CODE["uint8"]
        rows["dst"], rows["extent"], rows["src_strides"], rows["dst_strides"] = 1, 1, 1, 1
        at = np.arange(n, dtype=np.int64)
        rows["dst_offset"] = at * run
        rows["src_offset"] = (np.random.default_rng(0).permutation(n) if self.spread else at) * run
        rows["extent"][:, -1] = run
        if self.strided:
            rows["src_offset"] *= 2
            rows["extent"][:, -2:] = run // ROW_BYTES, ROW_BYTES
            rows["src_strides"][:, -2], rows["dst_strides"][:, -2] = 2 * ROW_BYTES, ROW_BYTES
        return rows


class Way:
    """`rows` from GPU `giver` to the other, by the GPU `on`."""

    def __init__(self, buffers, giver: int, on: int, rows: np.ndarray, programs: int, copied: float, least: int):
        self.device = torch.device("cuda", on)
        source, target = buffers[giver][0], buffers[1 - giver][1]
        self._source, self._target, self._rows = source, target, rows
        left, right = (driver.tensor_at(t.data_ptr(), t.numel(), self.device) for t in (source, target))
        self.nbytes = int(rows["extent"].prod(axis=1).sum())
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()
            how = dict(programs=programs, copied=copied, long_bytes=least)
            self._bound = TritonRows(rows, [right], "local", [left], **how)
            with torch.cuda.stream(self._stream):
                self._graph = driver.Graph(self._stream, self._bound.copy)

    def begin(self) -> None:
        with torch.cuda.device(self.device):
            self._graph.launch(self._stream)

    def end(self) -> None:
        torch.cuda.synchronize(self.device)

    def wrong(self) -> int:
        """Bytes of some 64 pieces that are not what they should be; the target is scrambled afterwards."""
        bad = 0
        for r in self._rows[:: max(1, len(self._rows) // 64)]:
            n, a, b = int(r["extent"].prod()), int(r["src_offset"]), int(r["dst_offset"])
            rows, width = r["extent"][-2:].tolist()
            want = self._source[a:].as_strided((rows, width), (int(r["src_strides"][-2]), 1)).to(self._target.device)
            bad += int((want.reshape(-1) != self._target[b : b + n]).sum())
        self._target.random_(0, 255)
        torch.cuda.synchronize(self._target.device)
        return bad


def rate(ways: list[Way], repeats: int) -> tuple[float, list[float]]:
    """(GB/s of the slower direction by the median, ms)."""
    ms = []
    for _ in range(repeats + 2):
        for w in ways:
            w.end()
        t0 = time.perf_counter()
        for w in ways:
            w.begin()
        for w in ways:
            w.end()
        ms.append((time.perf_counter() - t0) * 1e3)
    return ways[0].nbytes / statistics.median(ms[2:]) / 1e6, ms[2:]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gib", type=float, default=3.0, help="bytes of each way, GiB")
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--out", default="")
    a = p.parse_args()
    total = int(a.gib * (1 << 30)) // (6 * MIB) * (6 * MIB)
    buffers = []
    for g in range(2):
        source = torch.randint(0, 255, (2 * total,), dtype=torch.uint8, device=f"cuda:{g}")
        buffers.append((source, torch.zeros(total, dtype=torch.uint8, device=f"cuda:{g}")))
    for g in range(2):  # torch lets the GPUs read each other at the first copy between them
        buffers[g][1][:16].copy_(buffers[1 - g][0][:16])
        torch.cuda.synchronize(g)
    sms = multiprocessors(torch.device("cuda", 0))
    meta = {
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(), "bytes": total,
    }  # fmt: skip
    print(json.dumps(meta), flush=True)

    def runs(mib: float) -> Shape:  # in one order they would be joined into one
        return Shape(f"runs of {mib} MiB, spread", int(mib * MIB), spread=True)

    one, small = Shape("one run"), runs(1.5)
    strided = Shape(f"rows of {ROW_BYTES} bytes out of wider ones", 3 * MIB // 2, strided=True)
    engine, kernel = (1.0, MIB), (0.0, MIB)
    cases = [(s, "kernel", n, *kernel) for s in (one, small, strided) for n in (sms, 4 * sms)]
    cases += [(one, "copy engine", sms, *engine), (small, "copy engine", sms, *engine)]
    cases += [(runs(n), "copy engine", sms, *engine) for n in (4, 10, 24, 64)]
    cases += [
        (runs(n), f"both, {share:.0%} copied", programs, share, MIB)
        for n, programs, shares in ((4, sms, (0.65,)), (10, sms, (0.65,)), (64, sms, (0.65,)), (24, sms, (0.5, 0.6, 0.65, 0.7, 0.8)))
        for share in shares
    ]  # fmt: skip
    cases += [(runs(24), "both, 65% copied", 4 * sms, 0.65, MIB)]
    results = []
    print(
        "\n| what | by | programs | pull | push | pull, both ways | push, both ways | wrong |\n|---|---|---|---|---|---|---|---|"
    )
    for shape, by, programs, share, least in cases:
        rows, found, wrong = shape.rows(total), {}, 0
        for both in (False, True):
            for name in ("pull", "push"):
                givers = (0, 1) if both else (0,)
                ways = [Way(buffers, g, g if name == "push" else 1 - g, rows, programs, share, least) for g in givers]
                rated, ms = rate(ways, a.repeats)
                wrong += sum(w.wrong() for w in ways)
                found[name + (", both ways" if both else "")] = {"GB/s": rated, "ms": ms}
        results.append({"shape": shape.name, "by": by, "programs": programs, "rates": found, "wrong": wrong})
        rates = " | ".join(f"{r['GB/s']:.0f}" for r in found.values())
        print(f"| {shape.name} | {by} | {programs} | {rates} | {wrong} |", flush=True)
        if a.out:
            Path(a.out).write_text(
                json.dumps({"meta": meta, "long_bytes": long_runs.LONG_BYTES, "rates": results}, indent=1)
            )


if __name__ == "__main__":
    main()
