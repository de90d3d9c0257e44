"""Time the quantizer of block FP8 on a GPU, beside a copy of as many bytes, and compare its bits with the torch twin.

    python -m benchmarks.quantize [--ranks 4b 30b-ep2] [--dtype bfloat16] [--rules ieee pow2] [--repeats 10] [--out quantize.json]

A rank holds the quantized weights of a trainer rank with the shapes of Qwen3-4B (TP1) or Qwen3-30B-A3B (a share of the experts), all
experts apart, as views of one buffer with random values. Three figures, medians of calls in turn: `floor`, copies on the device of
as many bytes (pieces of 1 GiB, half read and half written); `one pass`, amax, scales and values at once, which is what a rank does
that holds whole blocks; `two passes`, amax first, and values by it, as for blocks that ranks share. GB/s are bytes read plus bytes
written: with bfloat16 3 an element in one pass, 5 in two. --warps and --registers try other settings of the kernel.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from benchmarks.lib import command
from xfer.kernels.block_fp8 import TorchQuantizer
from xfer.kernels.quantize import ScaleRule, WeightBox, grid, quantizer

PIECE = 1 << 30
GOAL_GB_PER_S = 2400


def attention(hidden: int, heads: int, groups: int) -> list[tuple[int, int]]:
    """q, k, v, o with heads of 128."""
    return [(heads * 128, hidden), (groups * 128, hidden), (groups * 128, hidden), (hidden, heads * 128)]


def mlp(hidden: int, inner: int) -> list[tuple[int, int]]:
    return [(inner, hidden), (inner, hidden), (hidden, inner)]


def shapes(rank: str) -> list[tuple[int, int]]:
    """Of all quantized weights of a rank: "4b", or "30b-epN"."""
    model, _, ep = rank.partition("-ep")
    if model == "4b" and not ep:
        return 36 * (attention(2560, 32, 8) + mlp(2560, 9728))
    if model == "30b" and ep.isdigit() and 128 % int(ep) == 0:
        return 48 * (attention(2048, 32, 4) + 128 // int(ep) * mlp(2048, 768))
    raise SystemExit(f"no rank {rank!r}: 4b, or 30b-epN with N a divisor of 128")


def boxes(rank: str, dtype: torch.dtype) -> list[WeightBox]:
    """As views of one buffer each, with random weights."""
    found = shapes(rank)
    grids = [grid(s) for s in found]
    weights = torch.empty(sum(r * c for r, c in found), dtype=dtype, device="cuda")
    for part in weights.split(1 << 28):
        part.normal_(0, 0.02)
    values = torch.empty(weights.numel(), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scales = torch.empty(sum(a * b for a, b in grids), device="cuda")
    cut = ([r * c for r, c in found], [a * b for a, b in grids])
    return [
        WeightBox(w.view(s), v.view(s), x.view(g))
        for w, v, x, s, g in zip(weights.split(cut[0]), values.split(cut[0]), scales.split(cut[1]), found, grids)
    ]


def floor(some: list[WeightBox], nbytes: int) -> Callable[[], None]:
    """Reads nbytes / 2 of the weights and writes as many."""
    source = torch.empty(0, dtype=torch.uint8, device="cuda").set_(some[0].weight.untyped_storage())
    pieces = source[: nbytes // 2].split(PIECE)
    into = torch.empty(2, PIECE, dtype=torch.uint8, device="cuda")

    def run() -> None:
        for i, piece in enumerate(pieces):
            into[i % 2, : piece.numel()].copy_(piece)

    return run


def times(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds on the device."""
    out: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            torch.cuda.synchronize()
            out[name].append(began.elapsed_time(ended))
    return {name: ms[2:] for name, ms in out.items()}


def wrong(some: list[WeightBox], rule: ScaleRule) -> int:
    """Bytes of values and scales that differ from the twin's."""
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    for b in some:
        twin = replace(b, values=torch.empty_like(b.values), scales=torch.empty_like(b.scales), amax=None)
        TorchQuantizer([twin], rule).run()
        for ours, theirs in ((b.values, twin.values), (b.scales, twin.scales)):
            count += (ours.view(torch.uint8) != theirs.view(torch.uint8)).sum()
    return int(count)


def spoil(some: list[WeightBox]) -> None:
    """Fill the outputs with NaN, so that nothing of a former run is compared."""
    for b in (some[0].values, some[0].scales):
        torch.empty(0, dtype=torch.uint8, device="cuda").set_(b.untyped_storage()).fill_(0x7F)


def measured(rank: str, dtype: torch.dtype, rule: ScaleRule, repeats: int) -> dict:
    some = boxes(rank, dtype)
    elements = sum(b.weight.numel() for b in some)
    amax = torch.empty(sum(b.scales.numel() for b in some), device="cuda").split([b.scales.numel() for b in some])
    shared = [replace(b, amax=a.view(b.scales.shape)) for b, a in zip(some, amax)]
    began = time.perf_counter()
    one = quantizer(some, rule)
    torch.cuda.synchronize()
    bound_s = time.perf_counter() - began
    two = quantizer(shared, rule)

    def both() -> None:
        two.measure()
        two.run()

    different = 0
    for call in (one.run, both):
        spoil(some)
        call()
        different += wrong(some, rule)
    once = elements * (dtype.itemsize + 1)
    ms = times({"floor": floor(some, once), "one pass": one.run, "two passes": both}, repeats)
    nbytes = {"floor": once, "one pass": once, "two passes": once + elements * dtype.itemsize}
    return {
        "rank": rank, "dtype": str(dtype), "rule": rule.value, "tensors": len(some), "elements": elements, "bound_s": bound_s,
        "table_bytes": one.scratch_bytes, "wrong": different, "ms": ms,
        "gb_per_s": {name: nbytes[name] / statistics.median(ms[name]) / 1e6 for name in ms},
    }  # fmt: skip


def main() -> None:
    p = command.parser("quantize", __doc__)
    p.add_argument(
        "--ranks",
        nargs="+",
        default=["4b", "30b-ep2"],
        help="4b, 30b-epN: takes 3 bytes of memory an element, 5 in float32",
    )
    p.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights")
    p.add_argument("--rules", nargs="+", choices=[r.value for r in ScaleRule], default=[r.value for r in ScaleRule])
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--warps", type=int, nargs="+", default=[], help="of a program, in turn")
    p.add_argument("--registers", type=int, nargs="+", default=[], help="of a thread, at most, in turn; 0: no limit")
    p.add_argument("--out", default="", help="write the figures as JSON")
    a = p.parse_args()
    from xfer.kernels import quantize_triton as kernel

    found = []
    settings = product(a.warps or [kernel.WARPS], a.registers or [kernel.REGISTERS])
    for (warps, registers), rank, rule in product(list(settings), a.ranks, a.rules):
        kernel.WARPS, kernel.REGISTERS = warps, registers or None
        one = measured(rank, getattr(torch, a.dtype), ScaleRule(rule), a.repeats)
        found.append(one | {"warps": warps, "registers": registers})
        torch.cuda.empty_cache()
        print(
            f"{rank} {a.dtype} {rule}, {one['tensors']} tensors, {warps} warps, {registers} registers: "
            + ", ".join(
                f"{name} {statistics.median(ms):.3f} ms = {one['gb_per_s'][name]:.0f} GB/s"
                for name, ms in one["ms"].items()
            )
            + f"; bound in {one['bound_s']:.2f} s, tables {one['table_bytes'] / 1e6:.1f} MB; {one['wrong']} bytes wrong",
            flush=True,
        )
    if a.out:
        Path(a.out).write_text(json.dumps(command.facts("quantize", goal_gb_per_s=GOAL_GB_PER_S, results=found)))
    if any(one["wrong"] for one in found):
        raise SystemExit("bytes differ from the twin's")
    slow = [one for one in found if one["gb_per_s"]["one pass"] < GOAL_GB_PER_S]
    print(f"goal of {GOAL_GB_PER_S} GB/s in one pass: missed by {len(slow)} of {len(found)}")


if __name__ == "__main__":
    main()
