"""Whole-tensor syncs on the GPUs of one host, in the steps in which the field went, beside the direct route: one command.

    python scripts/bench_packed_gpu.py --out results.json        # 4 GPUs of one NVLink host; needs torch, triton, numpy, msgspec
    python scripts/bench_packed_gpu.py --device cpu --model toy  # the same code over gloo and shared memory, in seconds

Qwen3-30B-A3B's tensors (18,867 of them, 61 GB), 2 trainers with Megatron's layout (TP2, EP2) and 2 takers with vLLM's (TP2).
Every way is followed by a comparison of all bytes of the takers on their device. Milliseconds from the last rank's start to
the last rank's end, median.

colocated: trainer k and taker k share GPU k; whole tensors on both trainers, as Megatron-Bridge gathers them
  one by one             one all-gather, one CUDA-IPC handle of torch's and one answer per tensor
  bucketed gather        one exchange per bucket, a handle per tensor still, one message per bucket
  bucketed + flattened   xfer: one exchange per round, two buffers exported once per GPU, bucket k + 1 gathered while k is loaded
  flattened, parts to trainer 0   the same, as FSDP2 and DTensor trainers gather: taker 1 copies from the other GPU
apart: a GPU for each rank; trainer 0 sends to both takers
  one by one             one all-gather and one NCCL broadcast per tensor
  packed broadcast       xfer: bucket k + 1 is gathered while bucket k is broadcast and bucket k - 1 loaded
  packed, parts to trainer 0   the same, as FSDP2 and DTensor trainers gather: nobody but trainer 0 has whole tensors
  NCCL broadcast         the same messages, nothing gathered, packed or loaded
  vLLM's packed broadcast      vLLM's own packing over the same communicator, gathered as above; where vLLM can be imported
direct: xfer's direct route for the same layouts and GPUs (scripts/bench_gpu.py), copy-engine floor beside it

The loader is a slice and a copy per parameter; an engine's own does more. Extra memory is what torch had beside the weights,
of the largest rank; NCCL's own is not in it. Not here: the ranks (bench_packed_ranks.py), sessions.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp
from bench_packed_ranks import TAKERS, TRAINERS, rank_main
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


def one_case(case: str, a: argparse.Namespace, note) -> str:
    """ "" when it went through, else what went wrong. `note(found)` hears of every way as it is done."""
    context = mp.get_context("spawn")
    answers = context.Queue()
    size = TRAINERS + TAKERS
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
    pairs = [context.Pipe() for _ in range(TRAINERS)]
    ends = [a_ for a_, _ in pairs] + [b for _, b in pairs]
    ranks = [
        context.Process(
            target=rank_main,
            args=(r, case == "apart", CASES[case], SHAPES[a.model], a, store.port, ends[r], answers),
            daemon=True,
        )
        for r in range(size)
    ]
    for p in ranks:
        p.start()
    over: set[int] = set()
    until = time.monotonic() + a.case_seconds
    try:
        while len(over) < size:
            try:
                rank, found = answers.get(timeout=max(0.1, min(2.0, until - time.monotonic())))
            except queue.Empty:
                if dead := [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in over]:
                    return f"ranks {dead} ended with {[ranks[r].exitcode for r in dead]}"
                if time.monotonic() > until:
                    return f"no answer in {a.case_seconds:g} s from {sorted(set(range(size)) - over)}"
                continue
            if isinstance(found, str):
                return f"rank {rank}: {found}"
            if found is None:
                over.add(rank)
            else:
                note(found)
    finally:
        for p in ranks:
            p.join(5 if len(over) == size else 0.1)
            if p.is_alive():
                p.kill()
    return ""


def direct(case: str, a: argparse.Namespace, note) -> str:
    """Rows of scripts/bench_gpu.py for the same layouts on the same GPUs."""
    if a.device != "cuda" or a.model != "30b":
        note(dict(way="direct", refused="on GPUs and for the 30b model only"))
        return ""
    import bench_gpu

    how = argparse.Namespace(
        repeats=a.repeats, sweep=[], steps=[], buckets=[], bulk=[], packed=False, case_seconds=a.case_seconds
    )
    found = bench_gpu.one_case(DIRECT[case], how)
    if "error" in found:
        return found["error"]
    for name, what in (("peer", "direct: peer"), ("p2p", "direct: p2p over NCCL"), ("floor", "copy-engine floor")):
        if name in found["ms"]:
            extra = [found["extra_bytes"].get(name, 0)]
            note(dict(way=what, ms=found["ms"][name], wrong=found["wrong"].get(name), extra_bytes=extra))
    return ""


def line(found: dict, nbytes: int, bucket: int) -> str:
    if "details" in found:
        return "\n".join(["", *found["details"], ""])
    if why := found.get("refused"):
        return f"| {found['way']} | not run: {why} | | | | |"
    ms, extra = found["ms"], max(found["extra_bytes"])
    mid = statistics.median(ms)
    wrong = "-" if found["wrong"] is None else found["wrong"]
    return (
        f"| {found['way']} | {mid:,.1f} | {min(ms):,.1f}-{max(ms):,.1f} ({len(ms)}) | {nbytes / mid / 1e6:.2f} "
        f"| {wrong} | {extra / 2**20:,.0f} MiB = {extra / bucket:.2f} buckets |"
    )


def ratios(rows: list[dict]) -> list[str]:
    mid = {r["way"]: statistics.median(r["ms"]) for r in rows if "ms" in r}
    out = []
    for slow, fast in (
        ("one by one", "bucketed gather"), ("one by one", "bucketed + flattened"), ("one by one", "packed broadcast"),
        ("one by one", "flattened, parts to trainer 0"), ("one by one", "packed, parts to trainer 0"),
        ("packed broadcast", "direct: peer"), ("bucketed + flattened", "direct: peer"),
    ):  # fmt: skip
        if slow in mid and fast in mid:
            out.append(f"{slow} {mid[slow]:,.1f} ms / {fast} {mid[fast]:,.1f} ms = {mid[slow] / mid[fast]:.2f}")
    for packed in ("packed broadcast", "packed, parts to trainer 0", "vLLM's packed broadcast"):
        if packed in mid and (raw := mid.get("NCCL broadcast")):
            share = f"{raw / mid[packed] * 100:.0f} % of its rate"
            out.append(f"NCCL broadcast {raw:,.1f} ms / {packed} {mid[packed]:,.1f} ms = {share}")
    return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--model", choices=sorted(SHAPES), default="")
    p.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    p.add_argument("--ways", nargs="*", default=[], help="only ways with one of these words in them")
    p.add_argument("--bucket", type=int, default=0, help="bytes; default 1 GiB, 1 MiB for toy shapes")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--slow-repeats", type=int, default=1, help="of ways that send tensor by tensor")
    p.add_argument("--direct", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--case-seconds", type=float, default=250)
    p.add_argument("--out", default="")
    a = p.parse_args()
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
        if torch.cuda.device_count() < 4 and "apart" in a.cases or torch.cuda.device_count() < 2:
            raise SystemExit(f"{torch.cuda.device_count()} GPUs: colocated needs 2, apart 4")
        meta |= {"gpu": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    print(json.dumps(meta), flush=True)
    results, failed = [], False
    for case in a.cases:
        rows: list[dict] = []
        result = {"case": case, "gpus": CASES[case], "rows": rows}
        results.append(result)
        print(f"\n## {case}: GPUs {CASES[case]}, {nbytes / 1e9:.2f} GB, buckets of {a.bucket / 2**20:g} MiB\n")
        print("| what | median ms | min-max (n) | GB/s of the model | wrong elements | extra memory |")
        print("|---|---|---|---|---|---|", flush=True)

        def note(found: dict, rows=rows) -> None:
            rows.append(found)
            print(line(found, nbytes, a.bucket), flush=True)
            if a.out:
                Path(a.out).write_text(json.dumps({"meta": meta, "cases": results}, indent=1))

        for step in (one_case, direct) if a.direct else (one_case,):
            if error := step(case, a, note):
                result.setdefault("errors", []).append(error)
                print(f"\n{case}, {step.__name__}: {error}\n", flush=True)
                failed = True
        failed |= any(r.get("wrong") for r in rows)
        result["ratios"] = ratios(rows)
        print("\n" + "\n".join(result["ratios"]), flush=True)
        if a.out:
            Path(a.out).write_text(json.dumps({"meta": meta, "cases": results}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
