"""Time syncs of whole tensors on the GPUs of one host, in several ways, beside the direct route.

    python -m benchmarks.packed_gpu --out results.json          # 4 GPUs with NVLink; needs vLLM unless --no-vllm
    python -m benchmarks.packed_gpu --quick --out quick.json    # only the rows with goals
    python -m benchmarks.packed_gpu --device cpu --model toy    # the same code over gloo and shared memory, in seconds

Qwen3-30B-A3B has 18,867 tensors, 61 GB; 2 trainers have Megatron's layout (TP2, EP2) and 2 engine workers vLLM's (TP2). After
each way every byte of the workers is compared on the device. Milliseconds from the last rank's start to the last rank's end,
median. --out is written after every row. A way that fails ends its own processes; new processes run the others. Everything
ends after --seconds.

colocated: trainer k and worker k share GPU k
  bucketed + flattened   xfer: each trainer packs messages from both trainers' storages into two buffers that it exports once;
                         bucket k + 1 is packed while bucket k is loaded
  one by one             one all-gather per tensor on both trainers, as Megatron-Bridge gathers; one CUDA IPC handle of torch
                         and one answer per tensor
  bucketed gather        one exchange per bucket, one handle per tensor, one message per bucket
  ..., a slice and a copy per tensor   flattened, with the other loader
  ..., as Bridge exports               flattened, gathered by Bridge's calls in lockstep, as for trainers that cannot be traced
apart: one GPU per rank; trainer 0 sends to both workers
  NCCL broadcast         messages of the same sizes; nothing is gathered, packed or loaded
  packed broadcast       xfer: bucket k + 1 is packed while bucket k is broadcast and bucket k - 1 loaded
  one by one             one all-gather and one NCCL broadcast per tensor
  ..., a slice and a copy per tensor; ..., as Bridge exports   as above
  vLLM's packed broadcast   vLLM's packing over the same communicator, of tensors gathered as above
  loads alone            the loader on bytes that are already there
direct: xfer's direct route for the same layouts and GPUs (benchmarks.gpu), and its copy-engine floor

Two loaders stand in for an engine's load_weights: one planned launch per bucket, about the fastest that a wire can show; and a
slice and a copy per tensor, the least that engines do. "first" is the first run, which plans. Extra memory is what torch
allocates beside the weights, on the largest rank; NCCL's own memory is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from benchmarks import gpu
from benchmarks.lib import command
from benchmarks.lib.layouts import MODELS, Model
from benchmarks.lib.packed_ranks import BRIDGE, FLAT, PACKED, RAW, SLICED, TRAINERS, VLLM, WAYS, WORKERS, rank_main

SHAPES = {
    **{short: Model.named(name) for short, name in MODELS.items()},
    "toy": Model("toy MoE", 4, 256, 4, 2, 128, 128, 2048, False, experts=16, expert_ffn=128),
    "many": Model(
        "as many tensors as Qwen3-30B-A3B, tiny", 48, 64, 4, 2, 16, 16, 2048, False, experts=128, expert_ffn=16
    ),
}
"""many: to measure the host's work per tensor."""
CASES = {"colocated": (0, 1, 0, 1), "apart": (0, 1, 2, 3)}
"""GPUs of trainers 0 and 1 and workers 0 and 1."""
DIRECT = {"colocated": "30b-colocated2", "apart": "30b"}


QUICK = {"colocated": (FLAT, "one by one"), "apart": (RAW, PACKED)}
LEAST_S = 25.0
"""No step starts with less time left: its processes take that long to start."""


class Clock:
    def __init__(self, seconds: float):
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._until - time.monotonic()


class Ranks:
    """The processes of one case. They start early and wait, so that the next case does not wait for them."""

    def __init__(self, case: str, ways: list[str], a: argparse.Namespace):
        context = mp.get_context("spawn")
        self.size, self.a = TRAINERS + WORKERS, a
        self.answers, self.go = context.Queue(), context.Event()
        self._store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
        pairs = [context.Pipe() for _ in range(TRAINERS)]
        ends = [a_ for a_, _ in pairs] + [b for _, b in pairs]
        self.processes = [
            context.Process(
                target=rank_main,
                args=(r, case, CASES[case], SHAPES[a.model], a, ways, self._store.port, ends[r], self.answers, self.go),
                daemon=True,
            )
            for r in range(self.size)
        ]
        for p in self.processes:
            p.start()

    def run(self, clock: Clock, note) -> str:
        """Run all ways and call `note(found)` after each; returns "" or the error."""
        self.go.set()
        over: set[int] = set()
        # The first way includes the start of the ranks.
        until = time.monotonic() + min(self.a.way_seconds + LEAST_S, clock.left)
        try:
            while len(over) < self.size:
                try:
                    rank, found = self.answers.get(timeout=max(0.1, min(2.0, until - time.monotonic())))
                except queue.Empty:
                    ended = {r: p.exitcode for r, p in enumerate(self.processes) if r not in over}
                    if dead := {r: code for r, code in ended.items() if code is not None}:
                        return f"ranks {sorted(dead)} ended with {list(dead.values())}"
                    if time.monotonic() > until:
                        return f"no answer in time from {sorted(set(range(self.size)) - over)}"
                    continue
                if isinstance(found, str):
                    return f"rank {rank}: {found}"
                if found is None:
                    over.add(rank)
                else:
                    note(found)
                    until = time.monotonic() + min(self.a.way_seconds, clock.left)
        finally:
            self.end(5 if len(over) == self.size else 0.1)
        return ""

    def end(self, seconds: float = 0.1) -> None:
        for p in self.processes:
            p.join(seconds)
            if p.is_alive():
                p.kill()
                p.join(5)


def ways_of(case: str, a: argparse.Namespace) -> list[str]:
    some = (QUICK if a.quick else WAYS)[case]
    return [w for w in some if (a.vllm or w != VLLM) and (not a.ways or any(x in w for x in a.ways))]


def all_ways(case: str, a: argparse.Namespace, clock: Clock, note, ranks: Ranks | None = None) -> list[str]:
    """Run the ways of `case`; returns the errors. After a failure or a hang the remaining ways run in new processes."""
    ways = ways_of(case, a)
    errors = []
    while ways and clock.left > LEAST_S:
        done: list[str] = []

        def heard(found: dict, done=done) -> None:
            if "details" not in found:
                done.append(found["way"])
            note(found)

        error, ranks = (ranks or Ranks(case, ways, a)).run(clock, heard), None
        ways = [w for w in ways if w not in done]
        if error and ways:
            note(dict(way=ways[0], refused=f"broke: {error.strip().splitlines()[-1][:200]}"))
            errors.append(f"{ways.pop(0)}: {error}")
        elif error:
            errors.append(error)
    if ranks is not None:
        ranks.end()
    for way in ways:
        note(dict(way=way, refused="no time was left"))
    return errors + [f"{w}: no time was left" for w in ways]


def direct(case: str, a: argparse.Namespace, clock: Clock, note) -> list[str]:
    """Rows of benchmarks.gpu for the same layouts on the same GPUs."""
    if a.device != "cuda" or a.model != "30b" or a.share:
        note(dict(way="direct", refused="needs a GPU per rank and the 30b model"))
        return []
    if clock.left < LEAST_S:
        note(dict(way="direct", refused="no time was left"))
        return ["direct: no time was left"]
    how = gpu.parser().parse_args(["--no-packed"])
    how.repeats, how.case_seconds = a.repeats, min(a.way_seconds * 2, clock.left)
    try:
        found = gpu.one_case(DIRECT[case], how)
    except Exception as e:
        return [f"direct: {type(e).__name__}: {e}"]
    if "error" in found:
        note(dict(way="direct", refused=f"broke: {str(found['error']).strip().splitlines()[-1][:200]}"))
        return [f"direct: {found['error']}"]
    for name, what in (("peer", "direct: peer"), ("p2p", "direct: p2p over NCCL"), ("floor", "copy-engine floor")):
        if name in found["ms"]:
            extra = [found["extra_bytes"].get(name, 0)]
            note(dict(way=what, ms=found["ms"][name], wrong=found["wrong"].get(name), extra_bytes=extra))
    return []


def line(found: dict, nbytes: int, bucket: int) -> str:
    if "details" in found:
        return "\n".join(["", *found["details"], ""])
    if why := found.get("refused"):
        return f"| {found['way']} | not run: {why} | | | | |"
    ms, extra = found["ms"], max(found["extra_bytes"])
    mid = statistics.median(ms)
    wrong = "-" if found["wrong"] is None else found["wrong"]
    first = f", first {found['first_ms']:,.0f}" if found.get("first_ms") else ""
    said = f" ({found['said']})" if found.get("said") else ""
    return (
        f"| {found['way']}{said} | {mid:,.1f} | {min(ms):,.1f}-{max(ms):,.1f} ({len(ms)}{first}) | {nbytes / mid / 1e6:.2f} "
        f"| {wrong} | {extra / 2**20:,.0f} MiB = {extra / bucket:.2f} buckets |"
    )


def ratios(rows: list[dict]) -> list[str]:
    mid = {r["way"]: statistics.median(r["ms"]) for r in rows if r.get("ms")}
    out = []
    for fast in ("bucketed gather", FLAT, FLAT + SLICED, FLAT + BRIDGE, PACKED, PACKED + SLICED, PACKED + BRIDGE):
        if "one by one" in mid and fast in mid:
            slow = mid["one by one"]
            out.append(f"one by one {slow:,.1f} ms / {fast} {mid[fast]:,.1f} ms = {slow / mid[fast]:.2f}")
    for packed in (PACKED, PACKED + SLICED, PACKED + BRIDGE, VLLM):
        if packed in mid and (raw := mid.get(RAW)):
            share = f"{raw / mid[packed] * 100:.0f} % of its rate"
            out.append(f"{RAW} {raw:,.1f} ms / {packed} {mid[packed]:,.1f} ms = {share}")
    for packed in (FLAT, PACKED):
        if packed in mid and (fast := mid.get("direct: peer")):
            out.append(f"{packed} {mid[packed]:,.1f} ms / direct: peer {fast:,.1f} ms = {mid[packed] / fast:.2f}")
    return out


def main() -> int:
    p = command.parser("packed_gpu", __doc__)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--model", choices=sorted(SHAPES), default="")
    p.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["apart", "colocated"])
    p.add_argument("--quick", action="store_true", help="only the rows with goals, 80 s on 4 H200s")
    p.add_argument("--ways", nargs="*", default=[], help="only ways whose name contains one of these")
    p.add_argument("--bucket", type=int, default=0, help="bytes; default: 1 GiB, 1 MiB for toy shapes")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--slow-repeats", type=int, default=1, help="repeats of the ways that send tensor by tensor")
    p.add_argument(
        "--programs", type=int, default=0, help="programs of a copy kernel; default: 64 apart, all colocated"
    )
    p.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True, help="run vLLM's packed broadcast")
    p.add_argument("--direct", action=argparse.BooleanOptionalAction, default=True, help="run the direct route")
    p.add_argument(
        "--share",
        action="store_true",
        help="a rehearsal in which ranks share GPUs; its times mean nothing",
    )
    p.add_argument(
        "--seconds", type=float, default=0, help="the longest that all may take; default: 235, with --quick 78"
    )
    p.add_argument(
        "--way-seconds", type=float, default=0, help="the longest that one way may take; default: 45, with --quick 25"
    )
    p.add_argument("--out", default="", help="write all figures there, JSON")
    a = p.parse_args()
    a.seconds, a.way_seconds = a.seconds or (78 if a.quick else 235), a.way_seconds or (25 if a.quick else 45)
    clock = Clock(a.seconds)
    a.model = a.model or ("30b" if a.device == "cuda" else "toy")
    a.bucket = a.bucket or (1 << 20 if a.model in ("toy", "many") else 1 << 30)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    specs = list(SHAPES[a.model].specs())
    nbytes = sum(2 * torch.Size(s.shape).numel() for s in specs)
    meta = command.facts("packed_gpu", model=SHAPES[a.model].name, tensors=len(specs), bytes=nbytes, bucket=a.bucket)
    if a.device == "cuda":
        if any(VLLM in ways_of(case, a) for case in a.cases) and find_spec("vllm") is None:
            raise SystemExit("vLLM cannot be imported: put its folder on PYTHONPATH, or give --no-vllm")
        there, needed = torch.cuda.device_count(), max(1 + max(CASES[case]) for case in a.cases)
        if there < (1 if a.share else needed):
            raise SystemExit(f"{there} GPUs: colocated needs 2, apart 4; --share rehearses on fewer")
    print(json.dumps(meta), flush=True)
    results = [{"case": case, "gpus": CASES[case], "rows": [], "errors": [], "ratios": []} for case in a.cases]
    ready = {case: Ranks(case, ways, a) for case in a.cases if (ways := ways_of(case, a))}
    steps: list[tuple] = [(partial(all_ways, ranks=ready.get(r["case"])), "", r) for r in results]
    if a.direct:
        steps += [(direct, ", direct", r) for r in results if not (a.quick and r["case"] == "colocated")]
    for step, what, result in steps:
        case, rows = result["case"], result["rows"]
        title = f"{case}: GPUs {CASES[case]}, {nbytes / 1e9:.2f} GB, buckets of {a.bucket / 2**20:g} MiB{what}"
        print(f"\n## {title}, {clock.left:.0f} s left\n")
        print("| what | median ms | min-max (n) | GB/s of the model | wrong elements | extra memory |")
        print("|---|---|---|---|---|---|", flush=True)

        def note(found: dict, rows=rows, result=result) -> None:
            rows.append(found)
            print(line(found, nbytes, a.bucket), flush=True)
            result["ratios"] = ratios(rows)
            written(a.out, meta, results)

        for error in step(case, a, clock, note):
            result["errors"].append(error)
            print(f"\n{case}: {error}\n", flush=True)
        result["ratios"] = ratios(rows)
        print("\n" + "\n".join(result["ratios"]), flush=True)
        written(a.out, meta, results)
    print(f"\n{a.seconds - clock.left:.0f} s in all", flush=True)
    return int(any(r["errors"] or any(x.get("wrong") for x in r["rows"]) for r in results))


def written(out: str, meta: dict, results: list[dict]) -> None:
    if out:
        Path(out).write_text(json.dumps({"meta": meta, "cases": results}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
