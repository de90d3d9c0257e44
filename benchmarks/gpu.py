"""Time a refit's data plane on the GPUs of one host, beside the hardware's floor, NCCL and a packed broadcast.

    python -m benchmarks.gpu [--cases 4b 30b replicas colocated relay] [--repeats 10] [--out results.json]

Without --cases it runs the cases for the number of GPUs (1, 2, 4 or 8). One process per rank runs the real plan of a
full-size declared layout. Every weight is random; after each route every byte of the destinations is compared on the device.
Rows of a case, in milliseconds from the last rank's start to the last rank's end, median:
  floor      copy engines: each destination copies its bytes out of mapped sources in pieces of 256 MiB, a stream per source
  peer       xfer: destinations pull with copy engines and one kernel
  p2p        xfer over NCCL
  nccl       plain NCCL send/recv of the same bytes between the same pairs, in messages of 1 GiB
  packed     gather and broadcast every tensor in buckets, then slice and copy
  relay      one trainer and a chain of replicas: each byte leaves the trainer once; the floor is one destination's copy
Engines, pauses and commits are measured by benchmarks.gpu_session.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.distributed import PrefixStore, TCPStore

from benchmarks.lib import command
from benchmarks.lib.layouts import MODELS, Model, View, all_ways, engine, overlap, trainer
from benchmarks.lib.relay import open_relay, relay
from xfer.kernels.long_runs import Rule
from xfer.mesh.parallel import EngineParallel, TrainerParallel
from xfer.plan.planner import PlanOptions, plan_replica
from xfer.plan.program import Program
from xfer.transport.links import open_group
from xfer.transport.p2p import P2P, STEP_BYTES, WAVE_BYTES
from xfer.transport.peer import Pull
from xfer.transport.routes import NoLink, exchange_over_store, open_routes

PIECE, MESSAGE = 256 << 20, 1 << 30
SLOW_REPEATS = 3


@dataclass(frozen=True)
class Case:
    """Trainer ranks first, then `workers` engine workers: `workers / tp` replicas.

    gpus: the GPU of each rank; None: the rank takes no part. relay: every worker is a replica, and replicas pass on what
    they pull from one trainer.
    """

    model: str
    trainers: TrainerParallel
    tp: int
    workers: int
    gpus: tuple[int | None, ...]
    relay: bool = False

    def __str__(self) -> str:
        of, replicas = self.trainers, self.workers // self.tp
        cut = {"TP": of.tp, "EP": of.ep, "ETP": of.etp, "PP": of.pp}
        cuts = "".join(f"{k}{n}" for k, n in cut.items() if n > 1) or "whole"
        return f"{cuts} on {of.world} -> TP{self.tp}" + (f" x {replicas}" if replicas > 1 else "")


ONE = TrainerParallel(world=1)
_APART = {n: tuple(range(n)) for n in (4, 8)}
CASES = {
    "4b": Case("4b", all_ways(2), 2, 2, _APART[4]),
    "30b": Case("30b", all_ways(2), 2, 2, _APART[4]),
    "replicas": Case("30b", all_ways(2), 1, 2, _APART[4]),
    "colocated": Case("30b", all_ways(4), 4, 4, (*_APART[4], *_APART[4])),
    "relay": Case("30b", ONE, 1, 3, _APART[4], relay=True),
    # Two GPUs: one trainer and the first of two workers; or both trainers on one GPU and both workers on the other.
    "4b-pair": Case("4b", ONE, 2, 2, (0, 1, None)),
    "30b-pair": Case("30b", ONE, 2, 2, (0, 1, None)),
    "30b-stacked": Case("30b", all_ways(2), 2, 2, (0, 0, 1, 1)),
    "30b-colocated2": Case("30b", all_ways(2), 2, 2, (0, 1, 0, 1)),
    # Eight GPUs.
    "30b-4+4": Case("30b", all_ways(4), 4, 4, _APART[8]),
    "30b-ep2tp2": Case("30b", TrainerParallel(world=4, tp=2, ep=2, etp=2), 2, 4, _APART[8]),
    "30b-ep4": Case("30b", TrainerParallel(world=4, ep=4, etp=1), 2, 4, _APART[8]),
    "30b-pp2ep2": Case("30b", TrainerParallel(world=4, ep=2, pp=2, etp=1), 4, 4, _APART[8]),
    "235b": Case("235b", all_ways(4), 4, 4, _APART[8]),
    "relay7": Case("30b", ONE, 1, 7, _APART[8], relay=True),
    "colocated8": Case("30b", TrainerParallel(world=8, tp=4, ep=8, etp=1), 8, 8, (*_APART[8], *_APART[8])),
}
DEFAULT = {
    8: ("30b-4+4", "30b-ep2tp2", "30b-ep4", "30b-pp2ep2", "235b", "relay7", "colocated8"),
    4: ("4b", "30b", "replicas", "colocated", "relay"),
    1: ("4b-pair", "30b-pair", "30b-stacked", "30b-colocated2"),
}
"""Cases by the least number of GPUs that they are meant for."""


def usable(names: list[str] | None, gpus: int) -> list[str]:
    """Those of `names`, or of the default cases for `gpus` GPUs, that `gpus` GPUs can run."""
    names = names or DEFAULT[max((n for n in DEFAULT if n <= gpus), default=1)]
    return [n for n in names if max(g for g in CASES[n].gpus if g is not None) < gpus]


class Bench:
    """One rank of one case."""

    def __init__(self, rank: int, case: str, args, port: int):
        what = CASES[case]
        gpus, trainers = what.gpus, what.trainers.world
        self.rank, self.case, self.args = rank, what, args
        self.size = len([g for g in gpus if g is not None])
        self.device = torch.device("cuda", gpus[rank])
        torch.cuda.set_device(self.device)
        self.shared = len(set(g for g in gpus if g is not None)) < self.size
        self.store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120))
        self.control = open_group(PrefixStore("control", self.store), rank, self.size, 120.0)
        self.m, self.trainers = Model.named(MODELS[what.model]), trainers
        t0 = time.perf_counter()
        self.catalog = self.m.catalog()
        self.specs = {s.name: (i, s) for i, s in enumerate(self.catalog.specs)}
        self.layouts = [trainer(self.m, what.trainers, r) for r in range(trainers)]
        self.layouts += [engine(self.m, EngineParallel(tp=what.tp), r % what.tp) for r in range(what.workers)]
        plan = self._plan()
        self.plan_s = time.perf_counter() - t0
        rows = plan.program(rank).rows
        self.program = Program(rank, plan.waves, rows[(rows["dst"] < self.size) & (rows["src"] < self.size)])
        self.mine = self.layouts[rank]
        self.roots = [torch.empty(r.nbytes, dtype=torch.uint8, device=self.device) for r in self.mine.roots()]
        self.view = View(self.mine, self.roots)
        self.destination = rank >= trainers
        if not self.destination:
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
        self.result |= {
            "ranks_on_gpus": gpus,
            "bytes_per_destination": self.bytes,
            "ms": {},
            "wrong": {},
            "extra_bytes": {},
        }
        torch.cuda.synchronize()

    def _plan(self, bucket_bytes: int = STEP_BYTES["cuda"], wave_bytes: int = WAVE_BYTES["cuda"]):
        sources = [x.trainer(self.catalog, i) for i, x in enumerate(self.layouts[: self.trainers])]
        destinations = [x.engine(self.catalog, i) for i, x in enumerate(self.layouts[self.trainers :])]
        return plan_replica(
            self.catalog, sources, destinations, PlanOptions(bucket_bytes=bucket_bytes, wave_bytes=wave_bytes)
        )

    def _bytes(self, other: str, own: str) -> dict[int, int]:
        """Bytes of the program by peer; all tensors are bf16."""
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
        """Poison the destinations' storages, run once, and compare every byte."""
        if self.destination:
            for t in self.roots:
                t.fill_(0x5A)
        torch.cuda.synchronize()
        self.meet()
        work()
        torch.cuda.synchronize()
        self.meet()
        wrong = self.view.wrong(self.specs, self.device) if self.destination else 0
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
        floor = self._floor(peer.mapping) if self.destination else idle
        for _ in range(2):  # twice, to show the spread of equal runs
            self.timed("floor" if "floor" not in self.result["ms"] else "floor again", floor, repeats)
            self.timed("peer" if "peer" not in self.result["ms"] else "peer again", lambda: peer.run(soon()), repeats)
        for also, how in self._others():
            self.timed(f"peer{also}", self._pulling(peer, **how), repeats)
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
        self.timed("one destination pulls", (lambda: peer.run(soon())) if first else idle, self.args.repeats)
        self.timed("peer", lambda: peer.run(soon()), SLOW_REPEATS)
        destinations = range(self.trainers, self.size)
        rows = self._plan().program(destinations[0]).rows
        labels = [f"rank {r}" for r in range(self.size)]
        for parts, (also, how) in product(self.args.parts, [("", {}), *self._others()]):
            programs = dict(zip(destinations, relay(rows[rows["dst"] == destinations[0]], destinations, parts)))
            mine = programs.get(self.rank, Program(self.rank, 0, rows[:0]))
            way = open_relay(mine, self.roots, destinations, labels, self.device, exchange, **how)
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
        order = sorted(self.source_bytes, key=lambda r: (r - self.rank) % self.trainers)  # rotated per destination

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
        """The other ways to pull that the command line asks for: (suffix of the row's name, arguments of `Pull`)."""
        out = [(f", turns of {mib} MiB", {"burst": mib << 20}) for mib in self.args.bursts]
        shares = [(f", {s:.0%} copied at most", {"copied": Rule(s)}) for s in self.args.copied]
        programs = [(f", {n:g} programs a multiprocessor", {"programs": self._programs(n)}) for n in self.args.sweep]
        return out + shares + programs + [(a + b, x | y) for (a, x), (b, y) in product(shares, programs)]

    def _programs(self, per_sm: float) -> int:
        return int(per_sm * torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _pulling(self, peer, **how) -> Callable[[], None]:
        """A pull of the same rows with other arguments; nothing on ranks that do not pull."""
        if peer.pull is None:
            return idle
        pull = Pull(self.program.rows[self.program.rows["dst"] == self.rank], peer.mapping, self.roots, **how)

        def work() -> None:
            pull.begin()
            pull.finish(soon())

        return work

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
        """The first rank that holds a piece broadcasts it in a bucket; destinations copy their part of it."""
        wanted: dict[str, list] = {}
        for f in self.mine.fragments if self.destination else ():
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
    out["bytes_per_destination"] = max(v["bytes_per_destination"] for v in found.values())
    return out


def show(r: dict) -> list[str]:
    if "error" in r:
        return [f"## {r['case']}: failed", r["error"]]
    n = r["bytes_per_destination"]
    floor = statistics.median(r["ms"]["floor"])
    nccl = statistics.median(r["ms"]["nccl"]) if "nccl" in r["ms"] else None
    lines = [
        f"## {r['case']}: {r['model']}, {r['layouts']}, ranks on GPUs {r['ranks_on_gpus']}, {n / 1e9:.2f} GB per destination, "
        f"plan {r['plan_s']:.1f} s, {r['rows']} rows",
        "", "| what | median ms | min-max | GB/s per destination | x floor | of nccl's rate | wrong elements |",
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
    p = command.parser("gpu", __doc__)
    p.add_argument("--cases", nargs="+", choices=sorted(CASES))
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--sweep", nargs="*", type=float, default=[], help="also pull with N programs per multiprocessor")
    p.add_argument("--steps", nargs="*", type=int, default=[], help="also run p2p with these step sizes, MiB")
    p.add_argument("--buckets", nargs="*", type=int, default=[], help="also run p2p with these buckets and steps, MiB")
    p.add_argument(
        "--copied", nargs="*", type=float, default=[0.0], help="also pull with at most this share by copy engines"
    )
    p.add_argument("--bursts", nargs="*", type=int, default=[], help="also pull in turns of this size per sender, MiB")
    p.add_argument("--parts", nargs="*", type=int, default=[32, 64, 128], help="parts of a relay")
    p.add_argument("--wire", action=argparse.BooleanOptionalAction, default=True, help="run p2p, nccl and packed")
    p.add_argument("--packed", action=argparse.BooleanOptionalAction, default=True, help="run packed")
    p.add_argument("--case-seconds", type=float, default=150, help="the longest that a case may take")
    p.add_argument("--out", default="", help="write all figures there, JSON")
    return p


def main() -> None:
    args, gpus = parser().parse_args(), torch.cuda.device_count()
    cases = usable(args.cases, gpus)
    if not cases:
        raise SystemExit(f"{gpus} GPUs: too few for any of the cases asked for")
    import triton

    meta = command.facts("gpu", triton=triton.__version__)
    print(json.dumps(meta), flush=True)
    results = []
    for case in cases:
        results.append(one_case(case, args))
        print("\n".join(show(results[-1])) + "\n", flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps({"meta": meta, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
