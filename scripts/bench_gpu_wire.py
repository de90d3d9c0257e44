"""What two GPUs of one host can bring to each other: rates of xfer's kernel, of copy engines and of both side by side.

    python scripts/bench_gpu_wire.py [--gib 3] [--repeats 7] [--out wire.json]       # 2 GPUs with NVLink; half a minute

Pulls (the taker's GPU works) and pushes (the giver's does), one way and both ways at once; one run, runs of some MiB spread over
the storage, rows cut out of wider ones, and experts (two thirds runs, one third such rows). One process, both GPUs mapped into each
other, a thread for each way; kernels are launched as a graph and copies beside it, as pulls do. Random bytes; 64 pieces of each
way, or all, are compared after it. GB/s per direction, by the median. Not here: planned programs and other routes (bench_gpu.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from xfer.kernels import cuda_driver as driver
from xfer.kernels.long_runs import NOTHING, PULLED, Rule
from xfer.plan.program import DTYPE_CODE, ROW, Op

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """`run`: bytes of a piece; `spread`: pieces in another order on either side; `row`: pieces are rows of so many bytes, cut out of
    rows twice as wide; `whole`: so much of the bytes is in runs of a piece all the same."""

    name: str
    run: int = 0
    spread: bool = False
    row: int = 0
    whole: float = 0.0

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
        if self.row:
            rows["src_offset"] *= 2
            cut = rows[int(self.whole * n) :]
            cut["extent"][:, -2:] = run // self.row, self.row
            cut["src_strides"][:, -2], cut["dst_strides"][:, -2] = 2 * self.row, self.row
        return rows


class Way:
    """`rows` from GPU `giver` to the other, by the GPU `on`."""

    def __init__(self, buffers, giver: int, on: int, rows: np.ndarray, programs: int, copied: Rule):
        self.device = torch.device("cuda", on)
        source, target = buffers[giver][0], buffers[1 - giver][1]
        self._source, self._target, self._rows = source, target, rows
        left, right = (driver.tensor_at(t.data_ptr(), t.numel(), self.device) for t in (source, target))
        self.nbytes = int(rows["extent"].prod(axis=1).sum())
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()
            from xfer.kernels.triton_impl import TritonRows  # not above: --help needs no Triton

            self._bound = TritonRows(rows, [right], "local", [left], programs=programs, copied=copied)
            with torch.cuda.stream(self._stream):
                self._graph = driver.Graph(self._stream, self._bound.move)

    def begin(self) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._bound.copy(lambda: self._graph.launch(self._stream))

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
    with ThreadPoolExecutor(len(ways)) as threads:
        for _ in range(repeats + 2):
            for w in ways:
                w.end()
            t0 = time.perf_counter()
            list(threads.map(Way.begin, ways))
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
    from xfer.kernels.triton_impl import multiprocessors

    sms = multiprocessors(torch.device("cuda", 0))
    meta = {
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(), "bytes": total,
    }  # fmt: skip
    print(json.dumps(meta), flush=True)

    def runs(mib: float) -> Shape:  # in one order they would be joined into one
        return Shape(f"runs of {mib} MiB, spread", int(mib * MIB), spread=True)

    def engine(share: float) -> Rule:
        return Rule(share, least=256 << 10)

    one, wide = Shape("one run"), Shape("rows of 768 bytes, one pitch", 3 * MIB // 2, row=768)
    tp2, tp4 = (
        Shape(f"experts: runs of {n / MIB} MiB, rows of {row} bytes, spread", n, spread=True, row=row, whole=2 / 3)
        for n, row in ((3 * MIB // 2, 768), (3 * MIB // 4, 384))
    )
    lone = [
        one,
        runs(0.75),
        runs(1.5),
        runs(6),
        runs(24),
        wide,
        replace(wide, name=wide.name.replace("768", "384"), row=384),
    ]
    cases = [(s, "kernel", n, NOTHING) for s in (one, runs(1.5), wide) for n in (sms, 4 * sms)]
    cases += [(s, "copy engine", sms, engine(1.0)) for s in lone]
    cases += [
        (s, f"both, {share:.0%} copied", sms, engine(share))
        for s in (runs(0.75), runs(1.5), runs(6), runs(24))
        for share in (0.5, 0.65, 0.8)
    ]
    cases += [(s, "kernel", sms, NOTHING) for s in (tp2, tp4)]
    cases += [(s, "both, as pulls do", n, PULLED) for s in (tp2, tp4) for n in (sms // 2, sms, 4 * sms)]
    results = []
    print(
        "\n| what | by | programs | pull | push | pull, both ways | push, both ways | wrong |\n|---|---|---|---|---|---|---|---|"
    )
    for shape, by, programs, rule in cases:
        rows, found, wrong = shape.rows(total), {}, 0
        for both in (False, True):
            for name in ("pull", "push"):
                givers = (0, 1) if both else (0,)
                ways = [Way(buffers, g, g if name == "push" else 1 - g, rows, programs, rule) for g in givers]
                rated, ms = rate(ways, a.repeats)
                wrong += sum(w.wrong() for w in ways)
                found[name + (", both ways" if both else "")] = {"GB/s": rated, "ms": ms}
        results.append({"shape": shape.name, "by": by, "programs": programs, "rates": found, "wrong": wrong})
        rates = " | ".join(f"{r['GB/s']:.0f}" for r in found.values())
        print(f"| {shape.name} | {by} | {programs} | {rates} | {wrong} |", flush=True)
        if a.out:
            Path(a.out).write_text(json.dumps({"meta": meta, "rule": asdict(PULLED), "rates": results}, indent=1))


if __name__ == "__main__":
    main()
