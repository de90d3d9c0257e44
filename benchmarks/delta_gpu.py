"""Time pulls of what changed beside pulls of everything, from one GPU to another.

    python -m benchmarks.delta_gpu [--gb 8] [--storages 300] [--changed 0.001 0.01 0.05 0.1 0.5] [--repeats 10] [--json FILE]

The trainer's storages are bf16 tensors of random bits on GPU 0, the engine's lie on GPU 1, all in one process; with one GPU both lie on
it. Before each pull this share of the elements, anywhere, gets new values. Columns, medians:
  compare, ms   setting the marks, which a trainer does before it is ready
  update, ms    bringing the copies up to date by the marks, after the refit
  all, ms       a pull of everything, as of `refit()`
  changed, ms   a pull as of `refit(delta="auto")`: it looks at the marks and takes what is marked, or everything
  MB            bytes that this pull moved
After each pull all bytes are compared; `wrong` counts the storages that differ.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.lib import command
from xfer.kernels.marks import ChangeMarks
from xfer.plan.program import DTYPE_CODE, MAX_DIMS, ROW, Op
from xfer.transport.peer import Export, Mapping, Pull

WAIT_S = 60.0
HEADS = ("changed", "compare, ms", "update, ms", "all, ms", "changed, ms", "changed / all", "MB", "wrong")


@dataclass(frozen=True)
class Measured:
    """One line. Milliseconds; `moved`: bytes."""

    changed: float
    compare_ms: float
    update_ms: float
    all_ms: float
    changed_ms: float
    moved: int
    wrong: int

    def cells(self) -> tuple[str, ...]:
        times = (self.compare_ms, self.update_ms, self.all_ms, self.changed_ms)
        ratio = self.changed_ms / self.all_ms
        return (
            f"{self.changed:.1%}", *(f"{t:.2f}" for t in times), f"{ratio:.3f}", f"{self.moved / 1e6:,.1f}", str(self.wrong)
        )  # fmt: skip


class Pair:
    """A trainer's and an engine's storages, of equal sizes, with all that a pull between them needs."""

    def __init__(self, nbytes: int, storages: int):
        there, here = torch.device("cuda", 0), torch.device("cuda", int(torch.cuda.device_count() > 1))
        sizes = [nbytes // storages // 4096 * 4096] * storages
        self.source = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=there) for n in sizes]
        self.copies = [t.clone() for t in self.source]
        self.marks = ChangeMarks(sizes, there)
        self.target = [torch.zeros(n, dtype=torch.uint8, device=here) for n in sizes]
        torch.cuda.set_device(here)
        self._export = Export(0, self.source, there, self.marks.tensor)
        mapping = Mapping(1, here)
        mapping.open(self._export.to_bytes(), 0, range(storages))
        rows = np.zeros(storages, ROW)
        rows["op"], rows["dst"], rows["extent"] = Op.COPY, 1, 1
        rows["src_dtype"] = rows["dst_dtype"] = DTYPE_CODE["bfloat16"]
        rows["extent"][:, MAX_DIMS - 1] = np.array(sizes) // 2
        rows["src_strides"][:, MAX_DIMS - 1] = rows["dst_strides"][:, MAX_DIMS - 1] = 2
        rows["src_root"] = rows["dst_root"] = range(storages)
        self._pull = Pull(rows, mapping, self.target)
        self._there, self._here, self._base = there, here, 0

    def step(self, share: float) -> None:
        """Give this share of the elements new values."""
        with torch.cuda.device(self._there):
            for t in self.source:
                bits = t.view(torch.int16)
                bits.bitwise_xor_((torch.rand(len(bits), device=self._there) < share).to(torch.int16))
        torch.cuda.synchronize(self._there)

    def compare(self) -> float:
        """Mark, and return the seconds."""
        return self._timed(lambda: self.marks.compare(self.source, self.copies, 1))

    def update(self) -> float:
        """Bring the copies up to date, and return the seconds."""
        return self._timed(lambda: self.marks.update(self.source, self.copies))

    def pull(self, by_marks: bool) -> tuple[float, int]:
        """Pull, and return the seconds and the bytes."""
        torch.cuda.synchronize(self._here)
        began, until = time.perf_counter(), time.monotonic() + WAIT_S
        self._pull.choose(int(by_marks), until)
        self._pull.begin()
        moved = self._pull.finish(until).bytes_in
        return time.perf_counter() - began, moved

    def wrong(self) -> int:
        """How many storages differ."""
        return sum(not torch.equal(a.to(self._here), b) for a, b in zip(self.source, self.target))

    def _timed(self, work) -> float:
        with torch.cuda.device(self._there):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
        return time.perf_counter() - began


def measured(pair: Pair, share: float, repeats: int) -> Measured:
    """One line; the first of the repeats is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ("compare", "update", "all", "changed")}
    moved = wrong = 0
    for _ in range(repeats + 1):
        pair.step(share)
        times["compare"].append(pair.compare())
        seconds, moved = pair.pull(True)
        times["changed"].append(seconds)
        wrong += pair.wrong()
        times["update"].append(pair.update())
        times["all"].append(pair.pull(False)[0])
    ms = {name: statistics.median(t[1:]) * 1e3 for name, t in times.items()}
    return Measured(share, ms["compare"], ms["update"], ms["all"], ms["changed"], moved, wrong)


def main() -> int:
    p = command.parser("delta_gpu", __doc__)
    p.add_argument("--gb", type=float, default=8.0, help="gigabytes of weights")
    p.add_argument("--storages", type=int, default=300)
    p.add_argument("--changed", type=float, nargs="+", default=[0.001, 0.01, 0.05, 0.1, 0.5])
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    pair = Pair(int(a.gb * 1e9), a.storages)
    pair.pull(False)
    print(" | ".join(HEADS))
    rows = []
    for share in a.changed:
        rows.append(measured(pair, share, a.repeats))
        print(" | ".join(rows[-1].cells()), flush=True)
    if a.json:
        meta = command.facts("delta_gpu", gb=a.gb, storages=a.storages)
        a.json.write_text(json.dumps({"meta": meta, "delta_gpu": [asdict(m) for m in rows]}) + "\n")
    return int(any(m.wrong for m in rows))


if __name__ == "__main__":
    sys.exit(main())
