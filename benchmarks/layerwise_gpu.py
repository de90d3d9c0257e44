"""Check layer-wise optimizers on the GPUs of one host bit for bit, and time how much of the gather is hidden.

    python -m benchmarks.layerwise_gpu [--ranks 2 4] [--out results.json]     starts the ranks, one run per number
    torchrun --nproc-per-node 4 -m benchmarks.layerwise_gpu                   one number of ranks, without `dead`
    python -m benchmarks.layerwise_gpu --toy --ranks 2                        the same code on a CPU, over gloo

Parts, in the order in which they run:
  exact     a small transformer in fp32, and one with bf16 matrices and fp32 vectors: losses and parameters of every way to
            gather equal those of the blocking gather bit for bit; in fp32 also those of DDP where every rank steps all
            parameters, and nearly those of one process
  overlap   2.3 B parameters in bf16 under DDP: what a gather adds to the forward, blocking and overlapped, by device events
            and by the profiler's timeline; bytes lacked, bytes planned and bytes counted by NVLink
  skew      `overlap` with one owner of nearly all parameters
  pull      `overlap` with copies out of the owners' memory by copy engines (route="pull")
  narrow    `overlap` with few thread blocks for the gather; runs only if named
  megatron  the same network, batch and inner optimizers under Megatron-Core's LayerWiseDistributedOptimizer, if it can be
            imported; it runs late, so that its failure costs no other part
  dead      one rank is killed in a gather, in processes of its own
Needs torch, numpy and msgspec. --out is written after every part.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib import command as commands
from benchmarks.lib import layerwise_dead as dead
from benchmarks.lib import layerwise_launch as launching
from benchmarks.lib.layerwise_net import Clock, Net, Shape, batch, loss_of, repeatable
from benchmarks.lib.layerwise_results import Exact, Overlap, flat, medians, summary, table
from benchmarks.lib.layerwise_step import Step, before, travelled
from xfer.layerwise import LayerWiseOptimizer, Muon, ParamGroup

SMALL, TOY_SMALL = Shape(6, 512, 1024, 8, 128), Shape(2, 64, 128, 2, 16)
LARGE, TOY_LARGE = Shape(28, 2560, 32768, 4, 2048), Shape(3, 128, 512, 2, 32)
SECONDS = {"exact": 80, "overlap": 36, "skew": 28, "pull": 30, "narrow": 28, "megatron": 23, "dead": 30}
"""Seconds of each part on 4 and 8 H200s; those of pull and narrow are estimates."""
START_S = 20
"""Estimated seconds until all ranks have started."""
PARTS = tuple(SECONDS)
DEFAULT = [p for p in PARTS if p != "narrow"]
DEPTHS = (1, 2, 4)
ROUTES = ("broadcast", "pull")
DEADLINE_S, DEATH_S = 300.0, 8.0


class Rank:
    """One process of a run. All parts are collective."""

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
        self.word = torch.zeros(1, device=self.device)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Wait until all ranks' devices are idle, then go on together."""
        self.sync()
        dist.barrier()
        self.sync()

    def abreast(self) -> None:
        """Let no rank's device go on before all have come here. Hosts do not wait: in training they run ahead by a whole
        update, so that their work meanwhile is free."""
        if self.cuda:
            dist.all_reduce(self.word)
        else:
            self.meet()

    def ddp(self, net: torch.nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(net, device_ids=[self.device.index] if self.cuda else None)

    def slowest(self, ms: list[float]) -> list[float]:
        """The greatest of all ranks, element by element."""
        t = torch.tensor(ms, dtype=torch.float64, device=self.device)
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return t.tolist()

    def late(self, until: float) -> bool:
        """Whether any rank's time.monotonic() is past its `until`; all ranks get the same answer."""
        return self.slowest([time.monotonic() - until])[0] > 0.0

    def everybody(self, x) -> list:
        out = [None] * self.size
        dist.all_gather_object(out, x)
        return out

    # ---- exact

    def exact(self, keep: Callable[[list[dict]], None]) -> None:
        """Train both models in all ways; `keep` gets the results so far after each model."""
        repeatable(True)
        shape, steps = (SMALL, self.args.steps) if self.cuda else (TOY_SMALL, 6)
        ways = {
            "blocking": dict(overlap=False, route="broadcast"),
            "overlapped": dict(route="broadcast"),
            "depth 4": dict(prefetch_depth=4, route="broadcast"),
            "staged": dict(rehome=False),
            "to owners, blocking": dict(overlap=False, reduce="to_owners", route="broadcast"),
            "to owners": dict(reduce="to_owners", route="broadcast"),
            "pulled": dict(route="pull"),
            "pulled, to owners": dict(route="pull", reduce="to_owners"),
        }
        out = []
        for model, vector in (("fp32", torch.float32), ("bf16 and fp32", torch.float32)):
            matrix = torch.float32 if model == "fp32" else torch.bfloat16
            new = lambda: Net(shape, self.device, matrix, vector)  # noqa: B023, E731
            seen = {way: self._train(new(), shape, steps, **options) for way, options in ways.items()}
            distance = None
            if model == "fp32":  # bf16 models have masters only on their owners: nothing else trains alike
                seen["every rank steps everything"] = self._train(new(), shape, steps, owners=False)
                one = self._alone(new(), shape, steps)
                distance = max(abs(a - b) / b for a, b in zip(seen["blocking"][0], one))
            # Reducing to owners sums gradients in another order: compare those ways with each other.
            truth = {w: seen["to owners, blocking" if "to owners" in w else "blocking"] for w in seen}
            differ = tuple(w for w in seen if seen[w] != truth[w])
            losses = seen["blocking"][0]
            out.append(Exact(model, self.size, steps, tuple(seen), differ, losses[0], losses[-1], distance))
            keep([asdict(x) for x in out])
        repeatable(False)

    def _train(
        self, net: Net, shape: Shape, steps: int, owners: bool = True, **options
    ) -> tuple[list[float], list[str]]:
        """Losses, and the digests of all ranks' parameters."""
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

    def overlap(self, skewed: bool = False, ctas: int | None = None, pull: bool = False) -> Overlap | str:
        """Measure one kind of gather; a text says why it cannot be measured."""
        shape, net, module = self.large()
        optimizer = LayerWiseOptimizer(
            module,
            groups(net, compute=torch.bfloat16, skew=self.size if skewed else 0, fused=self.cuda),
            bucket_bytes=(self.args.bucket_mb << 20) if self.cuda else 50_000,
            deadline_s=DEADLINE_S,
            max_ctas=ctas,
            route="pull" if pull else "broadcast",
        )
        if pull and not optimizer.gather.pulls:
            optimizer.close()
            return "ranks cannot read each other's memory here"
        gather = optimizer.gather
        begin = gather.begin

        def way(name: str) -> Callable[[], None]:
            def choose() -> None:
                gather.overlap = "depth" in name  # blocking: nothing begins before the step is over
                gather.prefetch_depth = int(name.split()[1]) if "depth" in name else 1
                gather.blank = "nan" in name
                gather.begin = (lambda: None) if name == "none" else begin

            return choose

        depths = DEPTHS[:1] if skewed or ctas else DEPTHS[:2] if pull else DEPTHS
        names = ["none", "blocking", *(f"depth {d}" for d in depths)]
        if not (skewed or ctas):
            names.append("depth 1 nan")  # guard="nan", the default: overwrite stale parameters first
        step = Step(self, shape, module, optimizer, lambda hook: before(gather, hook))
        forward, whole, lines = step.measure({n: way(n) for n in names}, self.args.rounds)
        gather.overlap, gather.begin, gather.blank = False, begin, False
        gather.drain()
        gather.stats.reset()
        step.once()
        planned = gather.stats.received
        seen = travelled(self, lambda: optimizer.synchronize(masters=False))  # without gradients
        owned = optimizer.ownership["dense"].nbytes
        received = self.everybody(planned)
        optimizer.close()
        return Overlap(
            "skewed owners" if skewed else f"xfer, {ctas} blocks" if ctas else "xfer, pulled" if pull else "xfer",
            self.size,
            sum(p.numel() for p in net.parameters()),
            len(gather.buckets),
            owned,
            *medians(forward, whole),
            tuple(received),
            tuple(sum(owned) - n for n in owned),
            seen,
            lines,
        )


def groups(
    net: Net, lr: float = 1e-3, compute: torch.dtype | None = None, skew: int = 0, fused: bool = False
) -> list[ParamGroup]:
    """Muon for the blocks' matrices, Adam for the rest.

    skew: the number of ranks, of which the last owns nearly everything; 0: costs decide. fused: Adam in few launches; a
    dozen launches for each of 200 vectors would let the owner's host fall behind its device.
    """
    inside = {id(p) for p in net.blocks.parameters() if p.dim() == 2}
    matrices = [p for p in net.parameters() if id(p) in inside]
    rest = [p for p in net.parameters() if id(p) not in inside]
    muon = {"lr": lr, "compute_dtype": compute}
    adam = {"lr": lr, "fused": True} if fused else {"lr": lr, "foreach": False}
    if not skew:
        return [
            ParamGroup(matrices, Muon, muon, cost="newton_schulz"),
            ParamGroup(rest, torch.optim.Adam, adam),
        ]
    dear = [p for p in rest if p.dim() == 1][: skew - 1]  # one for each other rank, more costly than all the rest
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
    """Run one rank's parts; returns what `table` shows."""
    rank = Rank(args)
    if "dead" in args.parts:  # alone, see `launch`
        shape, bucket = (SMALL, 2 << 20) if rank.cuda else (TOY_SMALL, 20_000)
        dead.live_through(
            rank.rank,
            rank.size,
            rank.device,
            shape,
            groups,
            args.how,
            DEATH_S,
            bucket,
            Path(args.survivors),
            args.route,
        )
    result: dict = {"ranks": rank.size, "what": machine(rank), "skipped": {}, "seconds": {}}

    def keep(part: str, found) -> None:
        """Write figures after every part and within long ones: a later part may fail or be stopped."""
        result[part] = found
        write()

    def write() -> None:
        if rank.rank == 0 and args.out:
            launching.keep(args.out, result)

    for part in (p for p in PARTS if p in args.parts):
        began = time.monotonic()
        if part == "exact":
            rank.exact(lambda found: keep("exact", found))
        else:
            if part == "megatron":
                found = megatron(rank)
            else:
                found = rank.overlap(part == "skew", args.ctas if part == "narrow" else None, part == "pull")
            if isinstance(found, str):
                result["skipped"][part] = found
            else:
                keep(part, flat(found))
        gc.collect()
        if rank.cuda:
            torch.cuda.empty_cache()
        result["seconds"][part] = round(time.monotonic() - began, 1)
        write()
        if rank.rank == 0:
            print(f"# {part} on {rank.size} ranks: {result['seconds'][part]:.0f} s")
            print("\n".join(table({"ranks": rank.size, "what": part, "skipped": {}} | pick(result, part))), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return result


def pick(result: dict, part: str) -> dict:
    """The entries that `table` needs for one part."""
    return {part: result[part]} if part in result else {"skipped": result["skipped"]}


def megatron(rank: Rank) -> Overlap | str:
    """Measure Megatron's own gather; a text says why it cannot be measured."""
    from benchmarks.lib.layerwise_megatron import measure, unavailable, version

    if why := unavailable(rank.cuda):
        return why
    shape = LARGE if rank.cuda else TOY_LARGE
    new = lambda: Net(shape, rank.device, torch.bfloat16, torch.bfloat16)  # noqa: E731
    forward, whole, lines, buckets, owned = measure(
        rank,
        shape,
        (rank.args.bucket_mb << 20) if rank.cuda else 50_000,
        new,
        lambda net: groups(net, compute=torch.bfloat16, fused=rank.cuda),
        lambda t, announce: Step(rank, shape, t, t, announce),
        rank.args.rounds,
    )
    total, none = sum(owned), ()
    return Overlap(
        f"Megatron-Core {version()}", rank.size, total // 2, buckets, tuple(owned), *medians(forward, whole), none, none, none, lines
    )  # fmt: skip


def machine(rank: Rank) -> dict:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if rank.cuda:
        found |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def launch(args) -> int:
    """Run every number of ranks in turn.

    Exit code 1: a run failed, a way differs, or a death was not reported. Exit code 2: `megatron` is named and cannot run.
    """
    launching.stopped_is_an_exit()
    if args.parts and "megatron" in args.parts and (why := launching.lacking(not args.toy)):
        print(f"# megatron: {why}: put Megatron-Core 0.17 or later on PYTHONPATH, or leave this part out", flush=True)
        return 2
    args.parts = args.parts or DEFAULT
    bad = 0
    numbers = {"--steps": args.steps, "--rounds": args.rounds, "--bucket-mb": args.bucket_mb, "--ctas": args.ctas,
               "--limit": args.limit}  # fmt: skip
    passed = [word for flag, value in numbers.items() for word in (flag, str(value))]
    passed += ["--toy"] * args.toy + (["--traces", args.traces] if args.traces else [])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(args.out) if args.out else Path(folder) / "all.json"
        if not args.append:
            out.unlink(missing_ok=True)
        try:
            for n in args.ranks:
                command = [sys.executable, "-m", "benchmarks.layerwise_gpu", *passed, "--out", str(out)]
                parts = [p for p in PARTS if p in args.parts and p != "dead"]
                if parts:
                    failed = launching.run([*command, "--parts", *parts], n, args.deadline or allowed(parts))
                    if failed:
                        print(f"# {n} ranks: {failed}", flush=True)
                        bad = 1
                if "dead" in args.parts and n > 1:
                    bad |= _deaths(args, command, n, out, Path(folder))
        finally:  # also when stopped: show what is known
            runs = json.loads(out.read_text()) if out.exists() else []
            for r in runs:
                print("\n".join(table(r)), flush=True)
            print("\n".join(summary(runs)), flush=True)
    bad |= any(x["differ"] for r in runs for x in r.get("exact", ()))
    return int(bad)


def _deaths(args, command: list[str], n: int, out: Path, folder: Path) -> int:
    found, began = [], time.monotonic()
    for how, route in ((how, route) for route in args.route_dead for how in args.how_dead):
        survivors = folder / f"{n} {how} {route}"
        survivors.mkdir()
        words = ["--parts", "dead", "--how", how, "--route", route, "--survivors", str(survivors)]
        failed = launching.run([*command, *words], n, allowed(["dead"]), frozenset({dead.victim(n)}))
        x = dead.collect(survivors, how, n, DEATH_S, route)
        print("\n".join([f"# {n} ranks, dead: {failed}"] * bool(failed) + dead.lines(dead.flat(x))), flush=True)
        found.append(dead.flat(x))
        seconds = {"dead": round(time.monotonic() - began, 1)}
        launching.keep(out, {"ranks": n, "skipped": {}, "seconds": seconds, "dead": found})
    return int(any(x["verdict"] for x in found))


def allowed(parts: list[str]) -> float:
    """Seconds after which the ranks of one run are ended."""
    return 15.0 + 1.4 * expected(parts)


def expected(parts: list[str]) -> float:
    return START_S * any(p != "dead" for p in parts) + sum(SECONDS[p] for p in parts)


def main() -> int:
    each = ", ".join(f"{part} {s}" for part, s in SECONDS.items())
    options = commands.parser("layerwise_gpu", __doc__)
    options.epilog = f"Seconds on 4 and 8 H200s, per number of ranks: {START_S} to start, then {each}."
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, one run each")
    options.add_argument("--parts", nargs="+", choices=PARTS, help="default: all but narrow")
    options.add_argument("--steps", type=int, default=50, help="steps of `exact`")
    options.add_argument("--rounds", type=int, default=6, help="timed steps per way")
    options.add_argument("--limit", type=float, default=20.0, help="seconds of a part after which no round starts")
    options.add_argument("--bucket-mb", type=int, default=64, help="MiB of a bucket")
    options.add_argument("--ctas", type=int, default=8, help="thread blocks of a gather in `narrow`")
    options.add_argument(
        "--how-dead", nargs="+", choices=list(dead.HOW), default=["killed"], help="what happens to the rank in `dead`"
    )
    options.add_argument(
        "--route-dead", nargs="+", choices=ROUTES, default=ROUTES[:1], help="routes of the gather in `dead`"
    )
    options.add_argument(
        "--deadline",
        type=float,
        default=0.0,
        help="the longest that one run may take, seconds; default: 1.4 times the estimate, and 15",
    )
    options.add_argument("--out", default="", help="write all figures there after every part, JSON")
    options.add_argument("--append", action="store_true", help="keep figures of other runs in --out")
    options.add_argument("--traces", default="", help="folder for the ranks' timelines")
    options.add_argument("--toy", action="store_true", help="on a CPU, over gloo, at toy size")
    options.add_argument("--how", default="killed", help=argparse.SUPPRESS)
    options.add_argument("--route", default="broadcast", help=argparse.SUPPRESS)
    options.add_argument("--survivors", default="", help=argparse.SUPPRESS)
    args = options.parse_args()
    if "RANK" not in os.environ:
        return launch(args)
    launching.end_with_launcher()
    args.parts = args.parts or DEFAULT
    if not args.survivors:
        args.parts = [p for p in args.parts if p != "dead"]
    result = run_rank(args)
    if int(os.environ["RANK"]) == 0 and not args.out:
        print("\n".join([*table(result), *summary([result])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
