"""Time what a trainer rank does to know what changed, on a GPU: copies of its weights, or marks that its optimizer sets.

    python -m benchmarks.marks [--changed 0.001 0.01 0.1] [--layers 36] [--repeats 10] [--out marks.json]

One rank holds weights with the shapes of Qwen3-4B in bf16, all in one storage as in Megatron-Core's buffers, and fp32 masters. In each step
this share of the masters changes, anywhere, and all are copied into the weights. Medians in milliseconds until the device is done:

  step      `copy_` of each tensor, as without xfer, and the copies that compare, write and mark
  refit     the comparison with copies, and the checksums that find writes without marks
  keep      what follows a refit: copies are brought up to date, or marks are cleared

and, for both, bytes that the rank keeps. Bits are checked: weights are those of `copy_`, and marks are those of a comparison.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.lib import command
from benchmarks.quantize import attention, mlp
from xfer.direct.remembered import Remembered
from xfer.kernels import written
from xfer.kernels.marks import places
from xfer.plan.program import DTYPE_CODE, ROW

HIDDEN, VOCABULARY, PIECE = 2560, 151936, 1 << 26


class Weights:
    """The weights of a rank and their masters: a `Writer` of kernels/written.py, once it is announced."""

    def __init__(self, layers: int):
        layer = [*attention(HIDDEN, 32, 8), *mlp(HIDDEN, 9728), (HIDDEN,), (HIDDEN,)]
        sizes = [torch.Size(s).numel() for s in [(VOCABULARY, HIDDEN), *layers * layer]]
        self.whole = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
        self.masters_whole = torch.empty(sum(sizes), device="cuda")
        for piece in self.masters_whole.split(PIECE):
            piece.normal_(0, 0.02)
        self.params, self.masters = self.whole.split(sizes), self.masters_whole.split(sizes)
        self.roots = [self.whole.view(torch.uint8)]
        row = np.zeros(1, ROW)
        row["src_dtype"], row["extent"], row["src_strides"] = DTYPE_CODE["bfloat16"], 1, 2
        row["extent"][:, -1] = len(self.whole)
        self.plans = {"all": row}

    def writes(self) -> tuple[torch.Tensor, ...]:
        return self.params

    def change(self, share: float) -> None:
        """As a step of an optimizer does with its masters."""
        for piece in self.masters_whole.split(PIECE):
            piece[torch.rand(len(piece), device="cuda") < share] *= 1.01

    def copy(self) -> None:
        for p, m in zip(self.params, self.masters):
            p.copy_(m)

    def write(self) -> None:
        written.write(zip(self.params, self.masters))


def timed(call: Callable[[], object]) -> float:
    """Milliseconds until the device has done it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def series(weights: Weights, write: Callable[[], None], share: float, repeats: int) -> dict:
    """Refits one after the other, each after a step."""
    kept, ms, wrong = Remembered(), {"step": [], "refit": [], "keep": []}, 0
    kept.keep(1, weights.roots, weights.plans, pulled=True, sends=False)
    for k in range(repeats + 2):
        before = weights.whole.clone()
        weights.change(share)
        ms["step"].append(timed(write))
        ms["refit"].append(timed(lambda: kept.compare(weights.roots)))
        wrong += sum(int((p != m.to(p.dtype)).sum()) for p, m in zip(weights.params, weights.masters))
        wrong += wrong_marks(kept.marks.tensor, weights.whole, before)
        del before
        ms["keep"].append(timed(lambda k=k: kept.keep(k + 2, weights.roots, weights.plans, pulled=True, sends=False)))
    return {"ms": {name: some[2:] for name, some in ms.items()}, "bytes": kept.nbytes, "wrong": wrong}


def wrong_marks(marks: torch.Tensor, now: torch.Tensor, before: torch.Tensor) -> int:
    """The number of granules of the one storage whose mark and comparison differ."""
    wrong, bits = 0, marks[int(places([now.nbytes])[0]) :]
    for at in range(0, len(now), PIECE):
        differs = (now[at : at + PIECE] != before[at : at + PIECE]).view(-1, 16).any(1)
        here = bits[at // 128 :][: -(-len(differs) // 8)]
        said = (here[:, None] >> torch.arange(8, device=here.device, dtype=torch.uint8)) & 1
        wrong += int((said.view(-1)[: len(differs)].bool() != differs).sum())
    return wrong


def main() -> None:
    p = command.parser("marks", __doc__)
    p.add_argument("--changed", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="shares of the elements")
    p.add_argument("--layers", type=int, default=36)
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--out", default="", help="write the figures as JSON")
    a = p.parse_args()
    weights = Weights(a.layers)
    print(f"{len(weights.params)} tensors, {weights.whole.nbytes:,} bytes", flush=True)
    found = []
    for name, write in (("copies", weights.copy), ("marks", weights.write)):
        if name == "marks":
            written.announce(weights)
            print(f"spans: {timed(lambda: written.spans_of(weights.roots)):.2f} ms", flush=True)
        for share in a.changed:
            weights.copy()
            one = series(weights, write, share, a.repeats)
            found.append({"kept": name, "changed": share, **one})
            figures = ", ".join(f"{k} {statistics.median(v):.3f} ms" for k, v in one["ms"].items())
            print(f"{name}, {share:.1%}: {figures}; {one['bytes']:,} bytes kept; {one['wrong']} wrong", flush=True)
            torch.cuda.empty_cache()
    if a.out:
        Path(a.out).write_text(json.dumps(command.facts("marks", results=found)))
    if any(one["wrong"] for one in found):
        raise SystemExit("weights or marks are wrong")


if __name__ == "__main__":
    main()
