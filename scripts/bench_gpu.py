"""What a refit costs on the GPUs of one host, beside what the hardware and the usual way cost, all in one run.

    python scripts/bench_gpu.py [--cases 4b 30b replicas colocated relay] [--repeats 10] [--out results.json]

Cases are in bench_gpu_cases.py; without --cases those for as many GPUs as there are (1, 4 or 8). One process per rank;
real plans of full-size declared layouts (bench_shapes.py); every weight random, every byte of the takers compared on the
device after each route. Rows of a case:
  floor      copy engines: each taker copies its bytes out of mapped sources in pieces of 256 MiB, a stream per source
  peer       xfer, takers pull by copy engines and one kernel
  p2p        xfer over NCCL
  nccl       plain NCCL send/recv of the same bytes between the same pairs, messages of 1 GiB
  packed     gather + packed broadcast of every tensor + slice and copy: the usual way
  relay      one trainer, replicas in a row: each byte leaves the trainer once, and then goes from each to the next; its
             floor is one taker's copy alone
Milliseconds from the last rank's start to the last rank's end, median.
Not here: pausing engines, the session's protocol (bench_gpu_session.py); NeMo-RL's own transfer and NCCL's M2N, which want
nccl4py and an NCCL newer than the 2.28 of the hosts at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp
from bench_gpu_cases import CASES, usable
from bench_shapes import MODELS, View, engine, overlap, trainer
from torch.distributed import PrefixStore, TCPStore

from xfer.kernels.bulk import Shape
from xfer.kernels.long_runs import NOTHING, Rule
from xfer.plan.inventory import engine_inventory, trainer_inventory
from xfer.plan.planner import PlanOptions, plan_replica
from xfer.plan.program import Program
from xfer.plan.relay import relay
from xfer.trace.catalog import Catalog
from xfer.transport.group import open_group
from xfer.transport.p2p import P2P, STEP_BYTES, WAVE_BYTES
from xfer.transport.peer import Pull
from xfer.transport.relay import open_relay
from xfer.transport.routes import NoLink, exchange_over_store, open_routes

PIECE, MESSAGE = 256 << 20, 1 << 30
SLOW_REPEATS = 3


class Bench:
    """One rank of one case."""

    def __init__(self, rank: int, case: str, args, port: int):
        what = CASES[case]
        gpus, trainers = what.gpus, what.trainers.ranks
        self.rank, self.case, self.args = rank, what, args
        self.size = len([g for g in gpus if g is not None])
        self.device = torch.device("cuda", gpus[rank])
        torch.cuda.set_device(self.device)
        self.shared = len(set(g for g in gpus if g is not None)) < self.size
        self.store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120))
        self.control = open_group(PrefixStore("control", self.store), rank, self.size, 120.0)
        self.m, self.trainers = MODELS[what.model], trainers
        t0 = time.perf_counter()
        self.catalog = Catalog.union([("bench", self.m.specs())])
        self.specs = {s.name: (i, s) for i, s in enumerate(self.catalog.specs)}
        self.layouts = [trainer(self.m, r, what.trainers) for r in range(trainers)]
        self.layouts += [engine(self.m, r % what.tp, what.tp) for r in range(what.takers)]
        plan = self._plan()
        self.plan_s = time.perf_counter() - t0
        rows = plan.program(rank).rows
        self.program = Program(rank, plan.waves, rows[(rows["dst"] < self.size) & (rows["src"] < self.size)])
        self.mine = self.layouts[rank]
        self.roots = [torch.empty(r.nbytes, dtype=torch.uint8, device=self.device) for r in self.mine.roots()]
        self.view = View(self.mine, self.roots)
        self.taker = rank >= trainers
        if not self.taker:
            self.view.write(self.specs, self.device)
        self.source_bytes = self._bytes("src", "dst")
        self.taken_bytes = self._bytes("dst", "src")
        self.bytes = sum(self.source_bytes.values())
        self.result = {
            "case": case,
            "model": self.m.name,
            "layouts": str(what),
            "plan_s": self.plan_s,
            "rows": len(self.program.rows),
        }
        self.result |= {"ranks_on_gpus": gpus, "bytes_per_taker": self.bytes, "ms": {}, "wrong": {}, "extra_bytes": {}}
        torch.cuda.synchronize()

    def _plan(self, bucket_bytes: int = STEP_BYTES["cuda"], wave_bytes: int = WAVE_BYTES["cuda"]):
        names = [s.name for s in self.catalog.specs]
        sources, takers = [], []
        for i, x in enumerate(self.layouts):
            k = i - self.trainers
            common = dict(host="", roots=x.roots(), fragments=x.fragments)
            if k < 0:
                sources.append(trainer_inventory(self.catalog, rank=i, **common))
            else:
                takers.append(engine_inventory(self.catalog, rank=k, footprint=x.footprint(), reads=names, **common))
        return plan_replica(
            self.catalog, sources, takers, PlanOptions(bucket_bytes=bucket_bytes, wave_bytes=wave_bytes)
        )

    def _bytes(self, other: str, own: str) -> dict[int, int]:
        """By peer: bytes of the program, all dtypes being equal."""
        rows = self.program.rows[self.program.rows[own] == self.rank]
        n = rows["extent"].prod(axis=1) * 2
        return {int(p): int(n[rows[other] == p].sum()) for p in sorted(set(rows[other].tolist())) if p >= 0}

    # ---- clocks and checks

    def meet(self) -> None:
        token = torch.zeros(1)
        for r in range(self.size):
            self.control.broadcast(token, r, soon())

    def gather(self, value: float) -> list[float]:
        out = []
        for r in range(self.size):
            t = torch.tensor([value], dtype=torch.float64)
            self.control.broadcast(t, r, soon())
            out.append(float(t))
        return out

    def timed(self, name: str, work: Callable[[], object], repeats: int) -> None:
        spent = []
        for k in range(repeats + 2):
            torch.cuda.synchronize()
            self.meet()
            began = time.monotonic()  # one clock for all processes of a host
            work()
            torch.cuda.synchronize()
            ended = time.monotonic()
            seconds = max(self.gather(ended)) - max(self.gather(began))
            if k >= 2 or repeats == 1:
                spent.append(seconds)
        self.result["ms"][name] = [s * 1e3 for s in spent]

    def checked(self, name: str, work: Callable[[], object]) -> None:
        """Every byte of the takers, after one run over poisoned storages."""
        if self.taker:
            for t in self.roots:
                t.fill_(0x5A)
        torch.cuda.synchronize()
        self.meet()
        work()
        torch.cuda.synchronize()
        self.meet()
        wrong = self.view.wrong(self.specs, self.device) if self.taker else 0
        self.result["wrong"][name] = int(sum(self.gather(wrong)))

    def free(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    # ---- the rows of a case

    def run(self) -> dict:
        repeats = self.args.repeats
        none = NoLink(self.rank, self.size, self.device)
        free = self.free()
        t0 = time.perf_counter()
        exchange = exchange_over_store(self.store, self.rank, self.size)
        peer = open_routes(none, self.program, self.roots, exchange)
        self.result["open_peer_s"] = time.perf_counter() - t0
        self.result["extra_bytes"]["peer"] = peer.extra_bytes
        self.result["extra_bytes"]["peer, device"] = free - self.free()
        self.checked("peer", lambda: peer.run(soon()))
        if self.case.relay:
            self._relay(peer, exchange)
            peer.close()
            self.meet()
            return self.result
        floor = self._floor(peer.mapping) if self.taker else idle
        for _ in range(2):  # twice: the spread of the same thing
            self.timed("floor" if "floor" not in self.result["ms"] else "floor again", floor, repeats)
            self.timed("peer" if "peer" not in self.result["ms"] else "peer again", lambda: peer.run(soon()), repeats)
        for also, how in self._others():
            self.timed(f"peer{also}", self._pulling(peer, **how), repeats)
        for text in self.args.bulk:
            self._bulk(peer, Shape(*map(int, text.split("x"))))
        if not self.shared and self.args.wire:
            free = self.free()
            link = open_group(PrefixStore("data", self.store), self.rank, self.size, 120.0, self.device)
            self._nccl(link)
            self.result["extra_bytes"]["nccl's own, device"] = free - self.free()
            p2p = P2P(link, self.program, self.roots)
            self.result["extra_bytes"]["p2p"] = p2p.extra_bytes
            self.checked("p2p", lambda: p2p.run(soon()))
            self.timed("p2p", lambda: p2p.run(soon()), repeats)
            self.timed("nccl", lambda: self._contiguous(link), repeats)
            self.timed("p2p again", lambda: p2p.run(soon()), repeats)
            for mib in self.args.buckets:
                plan = self._plan(mib << 20, 0).program(self.rank)
                other = P2P(link, plan, self.roots, step_bytes=mib << 20, direct_bytes=mib << 20)
                name = f"p2p, {mib} MiB buckets and steps"
                self.result["extra_bytes"][name] = other.extra_bytes
                self.timed(name, lambda other=other: other.run(soon()), repeats)
                del other, plan
                torch.cuda.empty_cache()
            for mib in self.args.steps:
                other = P2P(link, self.program, self.roots, step_bytes=mib << 20, direct_bytes=mib << 20)
                self.timed(f"p2p, {mib} MiB a step", lambda other=other: other.run(soon()), 5)
                del other
            if self.args.packed:
                bucket = torch.empty(MESSAGE, dtype=torch.uint8, device=self.device)
                self.checked("packed", lambda: self._packed(link, bucket))
                self.timed("packed", lambda: self._packed(link, bucket), SLOW_REPEATS)
            self.meet()
            link.close()
        peer.close()
        self.meet()
        return self.result

    def _relay(self, peer, exchange) -> None:
        first = self.rank == self.trainers
        self.timed("floor", self._floor(peer.mapping) if first else idle, self.args.repeats)
        self.timed("one taker pulls", (lambda: peer.run(soon())) if first else idle, self.args.repeats)
        self.timed("peer", lambda: peer.run(soon()), SLOW_REPEATS)
        takers = range(self.trainers, self.size)
        rows = self._plan().program(takers[0]).rows
        labels = [f"rank {r}" for r in range(self.size)]
        for parts, (also, how) in product(self.args.parts, [("", {}), *self._others()]):
            programs = dict(zip(takers, relay(rows[rows["dst"] == takers[0]], takers, parts)))
            mine = programs.get(self.rank, Program(self.rank, 0, rows[:0]))
            way = open_relay(mine, self.roots, takers, labels, self.device, exchange, **how)
            name = f"relay, {parts} parts{also}"
            self.result["extra_bytes"][name] = way.extra_bytes
            self.checked(name, lambda way=way: way.run(soon()))
            self.timed(name, lambda way=way: way.run(soon()), self.args.repeats)
            way.close()
            self.meet()

    def _floor(self, mapping) -> Callable[[], None]:
        scratch = torch.empty(PIECE * 2, dtype=torch.uint8, device=self.device)
        streams = {r: torch.cuda.Stream(self.device) for r in self.source_bytes}
        largest = {r: max(mapping.roots[r].values(), key=lambda t: t.numel()) for r in self.source_bytes}
        order = sorted(self.source_bytes, key=lambda r: (r - self.rank) % self.trainers)  # rotated per taker

        def floor() -> None:
            left = dict(self.source_bytes)
            while any(left.values()):
                for i, r in enumerate(order):
                    n = min(PIECE, left[r], largest[r].numel())
                    if n:
                        at = (self.source_bytes[r] - left[r]) % (largest[r].numel() - n + 1) // 512 * 512
                        with torch.cuda.stream(streams[r]):
                            scratch[i % 2 * PIECE : i % 2 * PIECE + n].copy_(largest[r][at : at + n], non_blocking=True)
                        left[r] -= n

        return floor

    def _others(self) -> list[tuple[str, dict]]:
        """Other ways to pull that were asked for: (what to call it, what `Pull` takes)."""
        out = [(f", turns of {mib} MiB", {"burst": mib << 20}) for mib in self.args.bursts]
        shares = [(f", {s:.0%} copied at most", {"copied": Rule(s)}) for s in self.args.copied]
        programs = [(f", {n:g} programs a multiprocessor", {"programs": self._programs(n)}) for n in self.args.sweep]
        return out + shares + programs + [(a + b, x | y) for (a, x), (b, y) in product(shares, programs)]

    def _programs(self, per_sm: float) -> int:
        return int(per_sm * torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _pulling(self, peer, **how) -> Callable[[], None]:
        """A pull of the same rows, bound otherwise; nothing on ranks that pull nothing."""
        if peer.pull is None:
            return idle
        pull = Pull(self.program.rows[self.program.rows["dst"] == self.rank], peer.mapping, self.roots, **how)

        def work() -> None:
            pull.begin()
            pull.finish(soon())

        return work

    def _bulk(self, peer, shape: Shape) -> None:
        name = (
            f"bulk copies, {shape.stages} stages of {shape.stage >> 10} KiB, {shape.ahead} ahead, {shape.per_sm} blocks"
        )
        work = self._pulling(peer, bulk=shape, copied=NOTHING)
        self.checked(name, work)
        self.timed(name, work, self.args.repeats)

    def _nccl(self, link) -> None:
        peers = sorted({*self.source_bytes, *self.taken_bytes})
        link.warm(peers)
        self.into = {
            r: torch.empty(min(MESSAGE, n), dtype=torch.uint8, device=self.device) for r, n in self.source_bytes.items()
        }
        self.out = max(self.roots, key=lambda t: t.numel())

    def _contiguous(self, link) -> None:
        left_in, left_out = dict(self.source_bytes), dict(self.taken_bytes)
        while any(left_in.values()) or any(left_out.values()):
            receives, sends = [], []
            for left, messages, into in ((left_in, receives, True), (left_out, sends, False)):
                for r, n in left.items():
                    n = min(n, MESSAGE)
                    if n:
                        buffer = self.into[r] if into else self.out[left[r] % 4096 * 512 :]
                        messages.append((buffer[:n], r, 0))
                        left[r] -= n
            pending, also = link.post(receives, sends)
            for p in (*pending, *also):
                p.wait(soon())
        link.finish(soon())

    def _packed(self, link, bucket) -> None:
        """Every piece from the first rank that holds it, in buckets, to all; takers copy their share out of it."""
        wanted: dict[str, list] = {}
        for f in self.mine.fragments if self.taker else ():
            wanted.setdefault(f.tensor, []).append(f)
        seen = set()
        for owner in range(self.trainers):
            batch, used = [], 0
            for f in self.layouts[owner].fragments:
                if (f.tensor, f.origin, f.extent) in seen or not all(f.extent):
                    continue
                seen.add((f.tensor, f.origin, f.extent))
                n = 2
                for e in f.extent:
                    n *= e
                if used + n > bucket.numel():
                    self._bucket(link, bucket, owner, batch, wanted)
                    batch, used = [], 0
                batch.append((f, used, n))
                used += -(-n // 512) * 512
            self._bucket(link, bucket, owner, batch, wanted)

    def _bucket(self, link, bucket, owner: int, batch: list, wanted: dict) -> None:
        if self.rank == owner:
            for f, at, n in batch:
                bucket[at : at + n].view(torch.int16).view(f.extent).copy_(self.view.of(f))
        if batch:
            link.broadcast(bucket[: batch[-1][1] + batch[-1][2]], owner, soon())
        for f, at, n in batch:
            for mine in wanted.get(f.tensor, ()):
                if (cut := overlap(mine, f.origin, f.extent)) is not None:
                    piece = bucket[at : at + n].view(torch.int16).view(f.extent)
                    self.view.of(mine)[cut[0]].copy_(piece[cut[1]])


def soon() -> float:
    return time.monotonic() + 60


def idle() -> None:
    pass


def rank_main(rank: int, case: str, args, port: int, answers) -> None:
    import traceback

    try:
        answers.put((rank, Bench(rank, case, args, port).run()))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    time.sleep(0.3)


def one_case(case: str, args) -> dict:
    size = len([g for g in CASES[case].gpus if g is not None])
    context = mp.get_context("spawn")
    answers = context.Queue()
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
    ranks = [
        context.Process(target=rank_main, args=(r, case, args, store.port, answers), daemon=True) for r in range(size)
    ]
    for p in ranks:
        p.start()
    found: dict[int, dict] = {}
    until = time.monotonic() + args.case_seconds
    try:
        while len(found) < size:
            try:
                rank, value = answers.get(timeout=max(0.1, until - time.monotonic()))
            except Exception:
                return {
                    "case": case,
                    "error": f"no answer in {args.case_seconds} s from {set(range(size)) - set(found)}",
                }
            if isinstance(value, str):
                return {"case": case, "error": f"rank {rank}: {value}"}
            found[rank] = value
    finally:
        for p in ranks:
            p.join(2)
            if p.is_alive():
                p.kill()
    out = found[size - 1]
    out["extra_bytes"] = {
        k: max(v["extra_bytes"].get(k, 0) for v in found.values())
        for k in sorted({k for v in found.values() for k in v["extra_bytes"]})
    }
    out["bytes_per_taker"] = max(v["bytes_per_taker"] for v in found.values())
    return out


def show(r: dict) -> list[str]:
    if "error" in r:
        return [f"## {r['case']}: failed", r["error"]]
    n = r["bytes_per_taker"]
    floor = statistics.median(r["ms"]["floor"])
    nccl = statistics.median(r["ms"]["nccl"]) if "nccl" in r["ms"] else None
    lines = [
        f"## {r['case']}: {r['model']}, {r['layouts']}, ranks on GPUs {r['ranks_on_gpus']}, {n / 1e9:.2f} GB per taker, "
        f"plan {r['plan_s']:.1f} s, {r['rows']} rows",
        "", "| what | median ms | min-max | GB/s per taker | x floor | of nccl's rate | wrong elements |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, ms in r["ms"].items():
        mid = statistics.median(ms)
        wrong = r["wrong"].get(name.removesuffix(" again"), "-")
        share = f"{nccl / mid * 100:.0f} %" if nccl else "-"
        lines.append(
            f"| {name} | {mid:.2f} | {min(ms):.2f}-{max(ms):.2f} | {n / mid / 1e6:.0f} | {mid / floor:.3f} "
            f"| {share} | {wrong} |"
        )
    extra = ", ".join(f"{k} {v / 2**20:.0f} MiB" for k, v in r["extra_bytes"].items())
    return [*lines, "", f"Extra memory, largest rank: {extra}. Opening the peer route: {r['open_peer_s']:.2f} s."]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", choices=sorted(CASES))
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--sweep", nargs="*", type=float, default=[], help="pulls by so many programs a multiprocessor")
    p.add_argument(
        "--bulk", nargs="*", default=[], help="pulls by the bulk copy engine: STAGE bytes x STAGES x AHEAD x blocks"
    )
    p.add_argument("--steps", nargs="*", type=int, default=[], help="other step sizes of p2p to try, MiB")
    p.add_argument(
        "--buckets", nargs="*", type=int, default=[], help="plans of other buckets, p2p in steps as long, MiB"
    )
    p.add_argument(
        "--copied", nargs="*", type=float, default=[0.0], help="other shares of the bytes for copy engines, at most"
    )
    p.add_argument("--bursts", nargs="*", type=int, default=[], help="pulls in long turns of each sender, MiB")
    p.add_argument("--parts", nargs="*", type=int, default=[32, 64, 128], help="of relays")
    p.add_argument(
        "--wire", action=argparse.BooleanOptionalAction, default=True, help="p2p, NCCL's own rate, the packed way"
    )
    p.add_argument("--packed", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--case-seconds", type=float, default=150)
    p.add_argument("--out", default="")
    return p


def main() -> None:
    args, gpus = parser().parse_args(), torch.cuda.device_count()
    cases = usable(args.cases, gpus)
    import triton

    meta = {
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "gpus": gpus,
        "gpu": torch.cuda.get_device_name(0) if gpus else "", "torch": torch.__version__, "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())), "triton": triton.__version__,
        "python": platform.python_version(), "nvls": os.environ.get("NCCL_NVLS_ENABLE", ""),
    }  # fmt: skip
    print(json.dumps(meta), flush=True)
    results = []
    for case in cases:
        results.append(one_case(case, args))
        print("\n".join(show(results[-1])) + "\n", flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps({"meta": meta, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
