"""Whole-tensor syncs on the GPUs of one host, in the steps in which the field went, beside the direct route: one command.

    python scripts/bench_packed_gpu.py --out results.json        # 4 GPUs of one NVLink host; needs torch, triton, numpy, msgspec,
                                                                 # and vLLM (on PYTHONPATH, say) unless --no-vllm
    python scripts/bench_packed_gpu.py --quick --out quick.json  # only what the goals are about
    python scripts/bench_packed_gpu.py --device cpu --model toy  # the same code over gloo and shared memory, in seconds

Qwen3-30B-A3B's tensors (18,867 of them, 61 GB), 2 trainers with Megatron's layout (TP2, EP2) and 2 takers with vLLM's (TP2).
Every way is followed by a comparison of all bytes of the takers on their device. Milliseconds from the last rank's start to
the last rank's end, median. What is there is written to --out after every row, and what a way breaks does not end the
others: its processes are ended and the rest is run by new ones. All ends after --seconds.

colocated: trainer k and taker k share GPU k
  bucketed + flattened   xfer: each trainer puts messages together in two buffers that are exported once, out of its own and the
                         other's storages; bucket k + 1 while k is loaded
  one by one             whole tensors on both trainers by one all-gather each, as Megatron-Bridge gathers them; one CUDA-IPC
                         handle of torch's and one answer per tensor
  bucketed gather        one exchange per bucket, a handle per tensor still, one message per bucket
  … a slice and a copy per tensor   flattened, with the other loader
  … as Bridge exports    flattened, gathered by what a trainer that cannot be traced falls back to: Bridge's calls in lockstep
apart: a GPU for each rank; trainer 0 sends to both takers
  NCCL broadcast         messages of the same sizes, nothing gathered, packed or loaded
  packed broadcast       xfer: bucket k + 1 is put together while bucket k is broadcast and bucket k - 1 loaded
  one by one             one all-gather and one NCCL broadcast per tensor
  … a slice and a copy per tensor, … as Bridge exports   as above
  vLLM's packed broadcast      vLLM's own packing over the same communicator, of tensors put together as above
  loads alone            that loader on bytes that are there: no wire
direct: xfer's direct route for the same layouts and GPUs (scripts/bench_gpu.py), copy-engine floor beside it

Two loaders stand in for an engine's load_weights: one launch per bucket, planned once, which is about what a wire can show
at all; and a slice and a copy per tensor, which is what engines do at least. "first": the first run, with its planning.
Extra memory is what torch had beside the weights, of the largest rank; NCCL's own is not in it. Not here: the ranks
(bench_packed_ranks.py), sessions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp
from bench_packed_ranks import BRIDGE, FLAT, PACKED, RAW, SLICED, TAKERS, TRAINERS, VLLM, WAYS, rank_main
from bench_shapes import MODELS, Model
from torch.distributed import TCPStore

SHAPES = {
    **MODELS,
    "toy": Model("toy MoE", 4, 256, 4, 2, 128, vocab=2048, experts=16),
    "many": Model("as many tensors as Qwen3-30B-A3B, tiny", 48, 64, 4, 2, 16, vocab=2048, head_dim=16, experts=128),
}
"""many: for what a tensor costs on the host."""
CASES = {"colocated": (0, 1, 0, 1), "apart": (0, 1, 2, 3)}
"""GPUs of trainers 0 and 1 and takers 0 and 1."""
DIRECT = {"colocated": "30b-colocated2", "apart": "30b"}


QUICK = {"colocated": (FLAT, "one by one"), "apart": (RAW, PACKED)}
LEAST_S = 25.0
"""Seconds without which nothing is begun: processes take that long to come up."""


class Clock:
    def __init__(self, seconds: float):
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._until - time.monotonic()


class Ranks:
    """The processes of one case. They come up and wait, so that those of the next case are there when they are needed."""

    def __init__(self, case: str, ways: list[str], a: argparse.Namespace):
        context = mp.get_context("spawn")
        self.size, self.a = TRAINERS + TAKERS, a
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
        """ "" when all ways went through, else what went wrong. `note(found)` hears of every way as it is done."""
        self.go.set()
        over: set[int] = set()
        # The first way has the beginning in it.
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
    """What went wrong. A way that breaks or stands still is left out, and the rest begun anew."""
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
    """Rows of scripts/bench_gpu.py for the same layouts on the same GPUs."""
    if a.device != "cuda" or a.model != "30b" or a.share:
        note(dict(way="direct", refused="on a GPU for each rank and for the 30b model only"))
        return []
    if clock.left < LEAST_S:
        note(dict(way="direct", refused="no time was left"))
        return ["direct: no time was left"]
    import bench_gpu

    how = bench_gpu.parser().parse_args(["--no-packed"])
    how.repeats, how.case_seconds = a.repeats, min(a.way_seconds * 2, clock.left)
    try:
        found = bench_gpu.one_case(DIRECT[case], how)
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
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--model", choices=sorted(SHAPES), default="")
    p.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["apart", "colocated"])
    p.add_argument("--quick", action="store_true", help="the rows that the goals are about, in 80 s on 4 H200s")
    p.add_argument("--ways", nargs="*", default=[], help="only ways with one of these words in them")
    p.add_argument("--bucket", type=int, default=0, help="bytes; default 1 GiB, 1 MiB for toy shapes")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--slow-repeats", type=int, default=1, help="of ways that send tensor by tensor")
    p.add_argument("--programs", type=int, default=0, help="of the GPU's that copy; default 64 apart, all colocated")
    p.add_argument(
        "--vllm", action=argparse.BooleanOptionalAction, default=True, help="with vLLM's own packed broadcast"
    )
    p.add_argument("--direct", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--share",
        action="store_true",
        help="a rehearsal: ranks share the GPUs that are there, and no time means anything",
    )
    p.add_argument("--seconds", type=float, default=0, help="for everything; default 235, --quick 78")
    p.add_argument(
        "--way-seconds", type=float, default=0, help="for one way with its comparison; default 45, --quick 25"
    )
    p.add_argument("--out", default="")
    a = p.parse_args()
    a.seconds, a.way_seconds = a.seconds or (78 if a.quick else 235), a.way_seconds or (25 if a.quick else 45)
    clock = Clock(a.seconds)
    a.model = a.model or ("30b" if a.device == "cuda" else "toy")
    a.bucket = a.bucket or (1 << 20 if a.model in ("toy", "many") else 1 << 30)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    specs = list(SHAPES[a.model].specs())
    nbytes = sum(2 * torch.Size(s.shape).numel() for s in specs)
    meta = {
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "model": SHAPES[a.model].name,
        "tensors": len(specs), "bytes": nbytes, "bucket": a.bucket, "torch": torch.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(), "nvls": os.environ["NCCL_NVLS_ENABLE"],
    }  # fmt: skip
    if a.device == "cuda":
        if any(VLLM in ways_of(case, a) for case in a.cases) and find_spec("vllm") is None:
            raise SystemExit(
                "vLLM cannot be imported here: put the folder that it lies in on PYTHONPATH, or give --no-vllm"
            )
        there, needed = torch.cuda.device_count(), max(1 + max(CASES[case]) for case in a.cases)
        if there < (1 if a.share else needed):
            raise SystemExit(f"{there} GPUs: colocated needs 2, apart 4; --share for a rehearsal on fewer")
        meta |= {"gpu": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
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
