"""Layer-wise optimizers on the GPUs of one host: right to the bit, and how much of the gather of parameters is hidden.

    python scripts/bench_layerwise_gpu.py [--ranks 2 4] [--out results.json]     starts the ranks itself, once per number
    torchrun --nproc-per-node 4 scripts/bench_layerwise_gpu.py                   one number of ranks
    python scripts/bench_layerwise_gpu.py --toy --ranks 2                        the same code on a CPU, over gloo, at toy size

Parts:
  exact     a small transformer in fp32, and one with bf16 matrices and fp32 vectors: losses and parameters of every way of
            gathering, bit for bit those of the blocking one; in fp32 also those of DDP in which every rank steps
            everything, and near one process
  overlap   2.3 B parameters in bf16 under DDP: what a gather adds to the forward, blocking and overlapped, by device events and
            by the profiler's timeline, the same bytes each time; bytes received for bytes lacked
  narrow    that again with few thread blocks for the gather
  skew      that again with one owner of nearly everything
  megatron  the same network, batch and inner optimizers under Megatron-Core's own LayerWiseDistributedOptimizer, where it can
            be imported (bench_layerwise_megatron.py)
Needs torch, numpy and msgspec. Not here: engines, refits.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from bench_layerwise_net import Clock, Net, Shape, Timeline, batch, loss_of, repeatable, timeline
from bench_layerwise_results import Exact, Overlap, flat, medians, table
from torch.nn.parallel import DistributedDataParallel

from xfer.layerwise import LayerWiseOptimizer, Muon, ParamGroup
from xfer.testing.ports import free_port

SMALL, TOY_SMALL = Shape(6, 512, 1024, 8, 128), Shape(2, 64, 128, 2, 16)
LARGE, TOY_LARGE = Shape(28, 2560, 32768, 4, 2048), Shape(3, 128, 512, 2, 32)
PARTS = ("exact", "overlap", "narrow", "skew", "megatron")
DEPTHS = (1, 2, 4)
DEADLINE_S = 300.0


class Rank:
    """One process of a run. Every part is collective."""

    def __init__(self, args):
        self.args, self.cuda = args, not args.toy
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        if self.cuda:
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if self.cuda else "gloo", timeout=timedelta(seconds=DEADLINE_S))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.clock = Clock(self.cuda)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks' devices are idle, and all go on at the same time."""
        self.sync()
        dist.barrier()
        self.sync()

    def ddp(self, net: torch.nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(net, device_ids=[self.device.index] if self.cuda else None)

    def slowest(self, ms: list[float]) -> list[float]:
        """Element by element the greatest of all ranks."""
        t = torch.tensor(ms, dtype=torch.float64, device=self.device)
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return t.tolist()

    def everybody(self, x) -> list:
        out = [None] * self.size
        dist.all_gather_object(out, x)
        return out

    # ---- exact

    def exact(self) -> list[Exact]:
        repeatable(True)
        shape, steps = (SMALL, self.args.steps) if self.cuda else (TOY_SMALL, 6)
        ways = {
            "blocking": dict(overlap=False),
            "overlapped": {},
            "depth 4": dict(prefetch_depth=4),
            "staged": dict(rehome=False),
            "to owners, blocking": dict(overlap=False, reduce="to_owners"),
            "to owners": dict(reduce="to_owners"),
        }
        out = []
        for model, vector in (("fp32", torch.float32), ("bf16 and fp32", torch.float32)):
            matrix = torch.float32 if model == "fp32" else torch.bfloat16
            new = lambda: Net(shape, self.device, matrix, vector)  # noqa: B023, E731
            seen = {way: self._train(new(), shape, steps, **options) for way, options in ways.items()}
            distance = None
            if model == "fp32":  # 16-bit ones have masters on their owners only, so nothing else trains alike
                seen["every rank steps everything"] = self._train(new(), shape, steps, owners=False)
                one = self._alone(new(), shape, steps)
                distance = max(abs(a - b) / b for a, b in zip(seen["blocking"][0], one))
            # Reduced to owners, gradients are summed in another order: that pair is compared with itself.
            truth = {w: seen["to owners, blocking" if "to owners" in w else "blocking"] for w in seen}
            differ = tuple(w for w in seen if seen[w] != truth[w])
            losses = seen["blocking"][0]
            out.append(Exact(model, self.size, steps, tuple(seen), differ, losses[0], losses[-1], distance))
        repeatable(False)
        return out

    def _train(
        self, net: Net, shape: Shape, steps: int, owners: bool = True, **options
    ) -> tuple[list[float], list[str]]:
        """Losses, and digests of all ranks' parameters."""
        own = options.get("reduce") == "to_owners"
        module = net if own else self.ddp(net)
        if owners:
            bucket = (2 << 20) if self.cuda else 20_000
            optimizers = [
                LayerWiseOptimizer(module, groups(net), bucket_bytes=bucket, deadline_s=DEADLINE_S, **options)
            ]
        else:
            optimizers = [g.optimizer([{"params": list(g.params)}], **g.options) for g in groups(net)]
        losses = []
        for step in range(steps):
            loss = loss_of(module, batch(shape, step, self.rank, self.device))
            for o in optimizers:
                o.zero_grad()
            loss.backward()
            for o in optimizers:
                o.step()
            total = loss.detach().double()
            dist.all_reduce(total)
            losses.append(total.item() / self.size)
        if owners:
            late = not optimizers[0].gather.settled
            if late is not options.get("overlap", True):
                raise RuntimeError(f"{options}: buckets on their way after the last step: {late}")
            optimizers[0].close()
        return losses, self.everybody(digest(net))

    def _alone(self, net: Net, shape: Shape, steps: int) -> list[float]:
        """Every rank for itself with the data of all."""
        optimizers = [g.optimizer([{"params": list(g.params)}], **g.options) for g in groups(net)]
        losses = []
        for step in range(steps):
            net.zero_grad()
            each = [loss_of(net, batch(shape, step, r, self.device)) for r in range(self.size)]
            loss = torch.stack(each).mean()
            loss.backward()
            for o in optimizers:
                o.step()
            losses.append(loss.item())
        return losses

    # ---- overlap

    def large(self) -> tuple[Shape, Net, DistributedDataParallel]:
        shape = LARGE if self.cuda else TOY_LARGE
        net = Net(shape, self.device, torch.bfloat16, torch.bfloat16)
        return shape, net, self.ddp(net)

    def overlap(self, skewed: bool = False, ctas: int | None = None) -> Overlap:
        shape, net, module = self.large()
        optimizer = LayerWiseOptimizer(
            module,
            groups(net, compute=torch.bfloat16, skew=self.size if skewed else 0),
            bucket_bytes=(self.args.bucket_mb << 20) if self.cuda else 50_000,
            deadline_s=DEADLINE_S,
            max_ctas=ctas,
        )
        gather = optimizer.gather
        begin = gather.begin

        def way(name: str) -> Callable[[], None]:
            def choose() -> None:
                gather.overlap = name != "blocking"
                gather.prefetch_depth = int(name.split()[-1]) if "depth" in name else 1
                gather.begin = (lambda: None) if name == "none" else begin

            return choose

        depths = DEPTHS[:1] if skewed or ctas else DEPTHS
        names = ["none", "blocking", *(f"depth {d}" for d in depths)]
        step = Step(self, shape, module, optimizer, lambda hook: _before(gather, hook))
        forward, whole, lines = step.measure({n: way(n) for n in names}, self.args.rounds if not skewed else 3)
        gather.overlap, gather.begin = False, begin
        gather.drain()
        gather.stats.reset()
        step.once()
        owned = optimizer.ownership["dense"].nbytes
        received = self.everybody(gather.stats.received)
        optimizer.close()
        return Overlap(
            "skewed owners" if skewed else f"xfer, {ctas} blocks" if ctas else "xfer",
            self.size,
            sum(p.numel() for p in net.parameters()),
            len(gather.buckets),
            owned,
            *medians(forward, whole),
            tuple(received),
            tuple(sum(owned) - n for n in owned),
            lines,
        )


def _before(gather, hook: Callable[[], None]) -> None:
    """Have `hook` called at the beginning of every `gather.begin`, whichever it is by then; undone by `gather.begin = …`."""
    inner = gather.begin

    def begin() -> None:
        hook()
        inner()

    gather.begin = begin


class Step:
    """Training steps of a large network, with clocks around what follows the owners' updates.

    announce: called once per step with a function that has to run after the inner optimizers' steps and before anything of the
    gather starts.
    """

    def __init__(self, rank: Rank, shape: Shape, module, optimizer, announce: Callable[[Callable[[], None]], None]):
        self.rank, self.shape, self.module, self.optimizer, self.announce = rank, shape, module, optimizer, announce
        self.number, self.loss = 0, None

    def forward(self) -> torch.Tensor:
        self.number += 1
        return loss_of(self.module, batch(self.shape, self.number, self.rank.rank, self.rank.device))

    def once(self) -> None:
        loss = self.forward()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def timed(self) -> float:
        """Milliseconds from the end of all ranks' updates to the end of the next forward. Leaves a step half done, as it
        found it: with a loss to go back from."""
        marks = []

        def here() -> None:
            self.rank.meet()  # a slow owner is not a slow gather
            marks.append(self.rank.clock.mark())

        self.optimizer.zero_grad()
        self.loss.backward()
        self.announce(here)
        self.optimizer.step()
        self.loss = self.forward()
        end = self.rank.clock.mark()
        self.rank.sync()
        return self.rank.clock.ms(marks[0], end)

    def measure(self, ways: dict[str, Callable[[], None]], rounds: int):
        """(forward ms, whole step ms, timelines), by way; ways take turns."""
        for name in list(ways) * 2:  # allocators, and the order of buckets
            ways[name]()
            self.once()
        self.loss = self.forward()
        forward = {n: [] for n in ways}
        for _ in range(rounds):
            for name, choose in ways.items():
                choose()
                forward[name].append(self.timed())
        lines = {}
        if self.rank.cuda:
            for name, choose in ways.items():
                if name != "none":
                    lines[name] = self.rank.everybody(self._profiled(choose, name))
        self.loss.backward()
        self.loss = None
        whole = {n: [] for n in ways}
        for _ in range(max(2, rounds // 4)):
            for name, choose in ways.items():
                self.rank.meet()
                began = time.perf_counter()
                for _ in range(2):
                    choose()
                    self.once()
                self.rank.sync()
                whole[name].append((time.perf_counter() - began) * 1e3 / 2)
        slowest = self.rank.slowest
        return {n: slowest(x) for n, x in forward.items()}, {n: slowest(x) for n, x in whole.items()}, lines

    def _profiled(self, choose: Callable[[], None], name: str, steps: int = 2) -> Timeline:
        from torch.profiler import ProfilerActivity, profile

        with tempfile.TemporaryDirectory() as folder:
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                for _ in range(steps):
                    choose()
                    self.timed()
            trace = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(trace))
            keep = self.rank.args.traces
            if keep and self.rank.rank == 0:
                Path(keep).mkdir(parents=True, exist_ok=True)
                slug = f"{self.rank.size}_{type(self.optimizer).__name__}_{name.replace(' ', '_')}.json"
                (Path(keep) / slug).write_bytes(trace.read_bytes())
            try:
                return timeline(trace, steps)
            except ValueError as e:  # the others go on, so this rank does too
                print(f"# rank {self.rank.rank}, {name}: {e}", flush=True)
                return Timeline(math.nan, math.nan)


def groups(net: Net, lr: float = 1e-3, compute: torch.dtype | None = None, skew: int = 0) -> list[ParamGroup]:
    """Muon for the blocks' matrices, Adam for the rest. skew: that many ranks, of which the last owns nearly everything."""
    inside = {id(p) for p in net.blocks.parameters() if p.dim() == 2}
    matrices = [p for p in net.parameters() if id(p) in inside]
    rest = [p for p in net.parameters() if id(p) not in inside]
    muon, adam = {"lr": lr, "compute_dtype": compute}, {"lr": lr, "foreach": False}
    if not skew:
        return [
            ParamGroup(matrices, Muon, muon, cost="newton_schulz"),
            ParamGroup(rest, torch.optim.Adam, adam),
        ]
    dear = [p for p in rest if p.dim() == 1][: skew - 1]  # one for each other rank, priced above all that there is
    rest = [p for p in rest if all(p is not d for d in dear)]
    return [
        ParamGroup(matrices, Muon, muon, cost=lambda shape: 1.0),
        ParamGroup(rest, torch.optim.Adam, adam, cost=lambda shape: 1.0),
        ParamGroup(dear, torch.optim.Adam, adam, cost=lambda shape: 1e30),
    ]


def digest(net: torch.nn.Module) -> str:
    h = hashlib.sha256()
    for p in net.parameters():
        h.update(p.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()


# ---- runs


def run_rank(args) -> dict:
    """What one process does, and what `table` shows of it."""
    rank = Rank(args)
    result: dict = {"ranks": rank.size, "what": machine(rank), "skipped": {}}
    for part in args.parts:
        began = time.monotonic()
        if part == "exact":
            result[part] = [asdict(x) for x in rank.exact()]
        elif part == "megatron":
            found = megatron(rank)
            if isinstance(found, str):
                result["skipped"][part] = found
            else:
                result[part] = flat(found)
        else:
            result[part] = flat(rank.overlap(part == "skew", args.ctas if part == "narrow" else None))
        gc.collect()
        if rank.cuda:
            torch.cuda.empty_cache()
        if rank.rank == 0:  # after every part: what comes later may fail, or be cut off
            if args.out:
                Path(args.out).write_text(json.dumps(result, indent=1))
            print(f"# {part} on {rank.size} ranks: {time.monotonic() - began:.0f} s")
            print("\n".join(table({"ranks": rank.size, "what": part, "skipped": {}} | pick(result, part))), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return result


def pick(result: dict, part: str) -> dict:
    """What `table` needs to show one part."""
    return {part: result[part]} if part in result else {"skipped": result["skipped"]}


def megatron(rank: Rank) -> Overlap | str:
    """What Megatron's own gather costs, or why it cannot be told."""
    from bench_layerwise_megatron import measure, unavailable, version

    if why := unavailable(rank.cuda):
        return why
    shape = LARGE if rank.cuda else TOY_LARGE
    new = lambda: Net(shape, rank.device, torch.bfloat16, torch.bfloat16)  # noqa: E731
    forward, whole, lines, buckets, owned = measure(
        rank,
        shape,
        (rank.args.bucket_mb << 20) if rank.cuda else 50_000,
        new,
        lambda net: groups(net, compute=torch.bfloat16),
        lambda t, announce: Step(rank, shape, t, t, announce),
        rank.args.rounds,
    )
    total, none = sum(owned), ()
    return Overlap(
        f"Megatron-Core {version()}", rank.size, total // 2, buckets, tuple(owned), *medians(forward, whole), none, none, lines
    )  # fmt: skip


def machine(rank: Rank) -> dict:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if rank.cuda:
        found |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def launch(args) -> int:
    """Every number of ranks in turn; `args.out` is written after each, and beside it a file per number after every part.
    Exit code 1 when a run fails or anything differs."""
    results, bad = [], 0
    numbers = {"--steps": args.steps, "--rounds": args.rounds, "--bucket-mb": args.bucket_mb, "--ctas": args.ctas}
    passed = [word for flag, value in numbers.items() for word in (flag, str(value))]
    passed += ["--parts", *args.parts] + ["--toy"] * args.toy + (["--traces", args.traces] if args.traces else [])
    settings = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "PYTHONWARNINGS": "ignore",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(args.out) if args.out else Path(folder) / "all.json"
        whole.parent.mkdir(parents=True, exist_ok=True)
        for n in args.ranks:
            out = whole.with_name(f"{whole.stem}_{n}{whole.suffix}")
            settings |= {"WORLD_SIZE": str(n), "MASTER_PORT": str(free_port())}
            command = [sys.executable, __file__, *passed, "--out", str(out)]
            out.unlink(missing_ok=True)
            ranks = [
                subprocess.Popen(command, env=os.environ | settings | {"RANK": str(r), "LOCAL_RANK": str(r)})
                for r in range(n)
            ]
            failed = _wait(ranks, args.deadline)
            if out.exists():
                results.append(json.loads(out.read_text()))
                whole.write_text(json.dumps(results, indent=1))
            if failed:
                print(f"# {n} ranks: {failed}", flush=True)
                bad = 1
    bad |= any(x["differ"] for r in results for x in r.get("exact", ()))
    for r in results:
        print("\n".join(table(r)), flush=True)
    return int(bad)


def _wait(ranks: list[subprocess.Popen], seconds: float) -> str:
    """Until all have ended, one has failed, or it is too late; what went wrong."""
    until, why = time.monotonic() + seconds, ""
    while any(p.poll() is None for p in ranks) and not why:
        if any(p.poll() for p in ranks):
            why = "a rank failed"
        elif time.monotonic() > until:
            why = f"not done within {seconds:.0f} s"
        else:
            time.sleep(0.2)
    for p in ranks:
        if p.poll() is None and why:
            p.kill()
        p.wait()
    return why or ("a rank failed" if any(p.returncode for p in ranks) else "")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, one run each")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--steps", type=int, default=50, help="of `exact`")
    options.add_argument("--rounds", type=int, default=8, help="timed steps per way")
    options.add_argument("--bucket-mb", type=int, default=64)
    options.add_argument("--ctas", type=int, default=8, help="thread blocks that a gather may take in `narrow`")
    options.add_argument("--deadline", type=float, default=270.0, help="seconds per number of ranks")
    options.add_argument("--out", default="", help="file for all figures, JSON")
    options.add_argument("--traces", default="", help="folder for rank 0's timelines")
    options.add_argument("--toy", action="store_true", help="on a CPU, over gloo, at toy size")
    args = options.parse_args()
    if "RANK" not in os.environ:
        return launch(args)
    result = run_rank(args)
    if int(os.environ["RANK"]) == 0 and not args.out:
        print("\n".join(table(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
