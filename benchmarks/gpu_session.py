"""Time whole refits between GPU processes: real sessions, a real vLLM, full-size shapes, random weights.

    python -m benchmarks.gpu_session [--model 4b|30b|toy] [--trainers plain|megatron|nothing|packed|mapped|one]
        [--tp 2] [--replicas 1] [--ranks N] [--layers N] [--repeats 12] [--offline] [--no-compile]
        [--staged] [--changed 0.01] [--sent] [--out FILE]

--replicas engines (vLLM's AsyncLLM, or its LLM with --offline) run on the first --tp GPUs each, trainers on the next GPUs, or
on the engines' GPUs where there are no more. There are --ranks trainer ranks, or as many as engine workers. Trainers of 30b
(Qwen3-30B-A3B) hold their share of the experts whole (EP) and cut everything else (TP).

Prints the copy engines' time for the same bytes between the same GPUs, measured before anything else runs
(benchmarks.gpu_floor); the clocks of xfer's reports (transfer, outage, call); vLLM's own round trips with an empty update; the
cost of verification; and device memory by cudaMemGetInfo around everything that xfer opens. Before and after the timed refits
every byte of the engines is compared with what vLLM's own loader makes of the same weights (for Megatron: of Bridge's export).
With --staged, refits of all bytes and of each share --changed of the elements, each blocking and staged, beside the no-op round
trips and a copy of the same bytes within a worker's GPU. --sent: trainers' memory cannot be mapped, so NCCL carries all bytes; a
GPU for each rank.

--trainers:
  plain          tensors cut as Megatron-Core cuts them
  megatron       Megatron-Core and Bridge, a GPU for each rank, one optimizer step before every verified refit; TransformerEngine
                 if it is installed, else its stand-in; the output says which. At the end the engine's tokens are compared with
                 those of a fresh engine that loads Bridge's export. Use --no-compile: two engines that torch.compile has compiled
                 do not round alike, with xfer or without
  nothing        plain, with an engine that keeps all but one norm: a refit of almost no bytes, the cost of the protocol
  one            one trainer and a replica on each other GPU: one replica alone, all from the trainer, all in a relay chain.
                 On two GPUs the second replica shares the trainer's GPU
  packed         plain, by the packed route: broadcast, then the engine's own loader
  mapped         the same with buckets mapped on the engine's own GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from benchmarks.lib import command
from examples.common import toy
from tests.support.gpu_job import BLOCK_FP8, NO_HANDLES, Job, config

QWEN3_4B = dict(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1000000.0,
)  # fmt: skip
AS_A_REFIT = {"took_ms": 12.0, "pause_ms": 3.0}
"""How long workers stay in an empty update, and how long the engine rests before the next one. Processes that have slept
that long wake up more slowly, so that these round trips compare with those of a refit."""
ALL_BUT_A_NORM = ("*layers*", "*embed*", "*lm_head*")
"""The last norm, some KiB, still moves: a torn engine refuses to answer because that tensor is NaN until the refit is over."""
QWEN3_30B = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    max_position_embeddings=40960, rope_theta=1000000.0,
)  # fmt: skip
MODELS = {"4b": ("qwen3_tied", QWEN3_4B), "30b": ("qwen3_moe", QWEN3_30B), "toy": ("qwen3", {})}


def copied_ms(nbytes: float, workers: int, floor: dict) -> float:
    """Milliseconds of copy engines for `nbytes` shared equally by `workers`, at the rate that benchmarks.gpu_floor found."""
    return nbytes / workers / floor["gb_per_s"] / 1e6


def middle(values) -> str:
    values = sorted(values)
    return f"{statistics.median(values):.2f} ({values[0]:.2f}-{values[-1]:.2f})"


class Bench:
    def __init__(self, args):
        self.args = args
        family, override = MODELS[args.model]
        self.experts = "num_experts" in override
        self.tp = 1 if args.trainers == "one" else args.tp
        if args.layers:
            override = {**override, "num_hidden_layers": args.layers}
        self.config = config(family, **override) if args.model == "toy" else toy.config(family, **override)
        if args.fp8:
            self.config |= BLOCK_FP8
        self.alike = dict(eager=args.eager, compiled=not args.no_compile, asynchronous=not args.offline)
        self.rows: list[tuple[str, str]] = []
        self.raw: dict = {}
        self.began = time.monotonic()

    def say(self, what: str, value: object) -> None:
        self.rows.append((what, str(value)))
        print(f"[{time.monotonic() - self.began:5.0f} s] {what}: {value}", flush=True)

    def timed(self, job: Job, name: str, **how) -> list[dict]:
        reports = job.refit(times=self.args.repeats + 2, timeout=250, **how)["reports"][2:]
        ms = {k: [1e3 * r["scalars"][k] for r in reports] for k in ("transfer_s", "outage_s", "call_s")}
        self.raw[name] = [{k: r[k] for k in ("scalars", "phases")} for r in reports]
        for k, v in ms.items():
            self.say(f"{name}, {k.removesuffix('_s')} ms", middle(v))
        for k in sorted(reports[0]["scalars"]):
            if k.startswith("route/") and k.endswith("_s"):
                self.say(f"{name}, {k} ms", middle([1e3 * r["scalars"][k] for r in reports]))
        for k in (
            "arm_s",
            "stage_s",
            "apply_s",
            "verify_s",
            "drain_s",
            "pause_s",
            "start_s",
            "update_s",
            "finish_s",
            "reset_caches_s",
            "resume_s",
        ):
            if k in reports[0]["scalars"]:
                self.say(f"{name}, {k} ms", middle([1e3 * r["scalars"][k] for r in reports]))
        nbytes = int(reports[0]["scalars"]["bytes"])
        self.say(f"{name}, bytes", nbytes)
        if "floor" in self.raw:
            workers = int(reports[0]["scalars"]["committed"]) * self.tp
            self.say(f"{name}, copy engines for its bytes, ms", f"{copied_ms(nbytes, workers, self.raw['floor']):.2f}")
        self.say(f"{name}, routes", reports[-1]["routes"])
        return reports

    def floor(self, sources: list[int], destinations: list[int]) -> None:
        """Run benchmarks.gpu_floor in a process of its own, so that its memory is free afterwards."""
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            command = [sys.executable, "-m", "benchmarks.gpu_floor", "--out", out.name]
            command += ["--sources", *map(str, sources), "--destinations", *map(str, destinations)]
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            except subprocess.SubprocessError as e:
                return self.say("copy engines: failed", f"{e}: {str(e.stderr or '').strip()[-300:]}")
            self.raw["floor"] = json.loads(Path(out.name).read_text())
        self.say(
            "copy engines, GB/s per worker", f"{self.raw['floor']['gb_per_s']:.1f}, GPUs {sources} -> {destinations}"
        )

    def judge(self, engine, **what) -> None:
        wrong = engine.ask("wrong", "judged", timeout=300, **what)
        bad = [w for w in wrong["wrong"] if w]
        self.say(
            "every byte compared", f"{sum(wrong['bytes'])} bytes, wrong: {bad or 'none'} ({wrong['seconds']:.1f} s)"
        )

    def memory(self, job: Job, engines) -> list[int]:
        """MiB per GPU of trainers, then workers: memory outside torch's allocator plus what it has allocated."""
        mine = [(m["beside"] + m["allocated"]) >> 20 for m in job.good("memory", "memory")]
        theirs = [w for e in engines for w in e.ask("memory", "memory")["workers"]]
        return [*mine, *((a + b) >> 20 for a, b in theirs)]

    def run(self) -> None:
        args = self.args
        with (
            tempfile.TemporaryDirectory(prefix="xfer-bench-", dir=args.work or None) as work,
            Job(work, self.config) as job,
        ):
            try:
                if args.trainers == "one":
                    self.floor([torch.cuda.device_count() - 1], [0])
                    return self.one(job)
                if args.staged:
                    self.copy_rate()
                if args.trainers in ("plain", "megatron"):
                    self.floor(self.trainers_on(), sum(self.places(), []))
                engines = [job.engine(f"engine{i}", on, **self.alike) for i, on in enumerate(self.places())]
                how = {"nothing": self.nothing, "plain": self.plain, "megatron": self.megatron}
                how.get(args.trainers, self.packed)(job, engines)
            except BaseException:
                for c in job.family.children:
                    print(f"---- {c.name}\n{c.tail(40)}", flush=True)
                raise

    def places(self) -> list[list[int]]:
        """The GPUs of each engine."""
        tp = self.args.tp
        return [list(range(i * tp, (i + 1) * tp)) for i in range(self.args.replicas)]

    def trainers_on(self, shared: bool = False) -> list[int]:
        """The GPUs of the trainer ranks: those after the engines', or the engines' own if there are no others or if `shared`."""
        taken, count = sum(self.places(), []), torch.cuda.device_count()
        free = [g for g in range(count) if g not in taken] if not shared else []
        ranks = self.args.ranks or len(taken)
        if self.args.trainers == "megatron" and ranks > len(free):
            free += taken  # its own NCCL refuses two ranks on one GPU
        return [(free or taken)[i % len(free or taken)] for i in range(ranks)]

    def light(self, job: Job, engines, gpus: list[int]) -> None:
        """Start plain trainers with the weights of seed 1, and wait for the engines."""
        job.start_trainers(gpus, **(NO_HANDLES if self.args.sent else {}))
        job.plain(experts=self.experts)
        for engine in engines:
            self.say("engine started, s", f"{engine.started(400)['seconds']:.0f}")
        job.good("set", "set", seed=1)

    def plain(self, job: Job, engines) -> None:
        self.light(job, engines, self.trainers_on())
        before = self.memory(job, engines)
        t0 = time.monotonic()
        job.meet(engines)
        self.say("connect, s", f"{time.monotonic() - t0:.1f}")
        opened = self.memory(job, engines)
        job.refit()
        after = self.memory(job, engines)
        job.refit(verify=True)
        verified = self.memory(job, engines)
        took = [[b - a for a, b in zip(before, x)] for x in (opened, after, verified)]
        self.say(
            "device memory by xfer, MiB: trainers, workers",
            "connected {}, after a refit {}, after a verified one {}".format(*took),
        )
        for engine in engines:
            self.judge(engine, config=self.config, seed=1)
        engine = engines[0]
        engine.ask("noop", "did nothing", times=3)
        self.timed(job, "refit")
        for name, how in (("no-op backend", {}), ("no-op backend, as long and as often as a refit", AS_A_REFIT)):
            noop = engine.ask("noop", "did nothing", times=self.args.repeats, **how)["rows"]
            for k in noop[0]:
                self.say(f"{name}, {k} ms", middle([r[k] for r in noop]))
            self.raw[name] = noop
        self.timed(job, "verified", verify=True)
        self.timed(job, "refit again")
        if self.args.staged:
            self.staged(job, noop)
        for engine in engines:
            engine.ask("scramble", "scrambled", seed=3)
        job.refit(2, verify=True, stage=self.args.staged)
        for engine in engines:
            self.judge(engine, config=self.config, seed=2)
        if self.experts:
            return  # experts share one storage, which the checks below would split
        job.good("move", "moved")
        t0 = time.monotonic()
        job.refit(1, verify=True)
        self.say("a refit after storages moved (and new values set), s", f"{time.monotonic() - t0:.2f}")
        self.judge(engine, config=self.config, seed=1)
        t0 = time.monotonic()
        got = job.good("offload", "offloaded")
        self.say("release, offload and back, s", f"{time.monotonic() - t0:.2f}; freed {[g['back'] >> 20 for g in got]} MiB "
                 f"of {[g['bytes'] >> 20 for g in got]}")  # fmt: skip
        job.refit(verify=True)
        self.judge(engine, config=self.config, seed=1)
        print(job.trainers[0].tail(3))

    def staged(self, job: Job, noop: list[dict]) -> None:
        """All bytes and what changed, each blocking and staged. `noop`: round trips of the no-op backend, ms."""
        cases: dict[str, dict] = {"dense, blocking": {}, "dense, staged": dict(stage=True)}
        for share in self.args.changed:
            how, staged = dict(delta="auto", change=share), f"{share:.1%} changed, staged"
            cases |= {f"{share:.1%} changed, blocking": how, staged: dict(how, stage=True)}
        reports = {}
        for name, how in cases.items():
            reports[name] = self.timed(job, name, pause=0.1, **how)[-1]
            self.say(f"{name}, scratch, bytes", int(reports[name]["scalars"]["scratch_bytes"]))
        trips = statistics.median(r["all"] for r in noop)
        self.say("no-op round trips, ms", f"{trips:.2f}")
        nbytes = reports["dense, staged"]["scalars"]["bytes"] / self.tp / self.args.replicas
        copy = nbytes / self.raw["copy_gb_per_s"] / 1e6
        self.say("a copy within a worker's GPU, ms", f"{copy:.2f}")
        for name in cases:
            if name.endswith("staged"):
                goal = trips + (1.1 * copy if name.startswith("dense") else 3.0)
                outage = statistics.median(1e3 * r["scalars"]["outage_s"] for r in self.raw[name])
                self.say(f"{name}, outage ms, and the goal", f"{outage:.2f}, {goal:.2f}")

    def copy_rate(self) -> None:
        """GB/s of a copy from memory of one GPU to memory of the same GPU, before anything else runs there."""
        source = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda:0")
        into, took = torch.empty_like(source), []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            into.copy_(source)
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end))
        self.raw["copy_gb_per_s"] = source.numel() / min(took) / 1e6
        self.say("a copy within a GPU, GB/s", f"{self.raw['copy_gb_per_s']:.0f}")
        del source, into
        torch.cuda.empty_cache()

    def nothing(self, job: Job, engines) -> None:
        self.light(job, engines, self.trainers_on())
        job.meet(engines, keep=ALL_BUT_A_NORM, drop=ALL_BUT_A_NORM)
        self.timed(job, "zero bytes")

    def one(self, job: Job) -> None:
        gpus = torch.cuda.device_count()
        on = range(max(2, gpus - 1))
        engines = [job.engine(f"engine{i}", [i], **{**self.alike, "asynchronous": False}) for i in on]
        job.start_trainers([gpus - 1])
        job.plain()
        for e in engines:
            self.say("engine started, s", f"{e.started(400)['seconds']:.0f}")
        job.good("set", "set", seed=1)
        for name, some, relay in (
            ("one replica", engines[:1], False),
            ("each from the trainer", engines, False),
            ("relay chain", engines, True),
        ):
            job.meet(some, relay=relay)
            job.refit(2, verify=True)
            job.refit(1, verify=True)
            for e in some:
                self.judge(e, config=self.config, seed=1)
            self.timed(job, name)
            self.timed(job, f"{name}, verified", verify=True)
            job.good("close", "closed")

    def packed(self, job: Job, engines) -> None:
        mapped = self.args.trainers == "mapped"
        self.light(job, engines, self.trainers_on(mapped))
        before = self.memory(job, engines)
        job.meet(engines, route="packed", colocated=mapped)
        job.refit(verify=True)
        after = self.memory(job, engines)
        self.say("device memory by xfer, MiB: trainers, workers", [b - a for a, b in zip(before, after)])
        for engine in engines:
            self.judge(engine, config=self.config, seed=1)
        self.timed(job, "packed refit")
        for engine in engines:
            engine.ask("scramble", "scrambled", seed=3)
        job.refit(2, verify=True)
        for engine in engines:
            self.judge(engine, config=self.config, seed=2)

    def megatron(self, job: Job, engines) -> None:
        from safetensors.torch import save_file

        from examples.common import toy

        (engine,) = engines
        device = torch.device("cuda", self.trainers_on()[0])
        made = {n: toy.tensor(n, s, d, 1, device).cpu() for n, s, d in toy.specs(self.config)}
        save_file(made, str(job.folder / "model.safetensors"), metadata={"format": "pt"})
        del made
        torch.cuda.empty_cache()
        self.say("checkpoint written, bytes", (job.folder / "model.safetensors").stat().st_size)
        theirs = [*os.environ.get("XFER_SITE_TRAINER", "").split(":"), *sys.path]
        te = PathFinder.find_spec("transformer_engine", theirs) is not None
        self.say("TransformerEngine", "installed" if te else "not installed: its stand-in, examples/common/te_twin.py")
        job.start_trainers(self.trainers_on())
        ranks = len(job.trainers)
        layout = dict(tp=ranks, distopt=True, bucket_size=40_000_000, lr=1e-4)
        if self.experts:
            layout |= dict(ep=ranks, etp=1)
        job.good("megatron", "built", timeout=240, folder=str(job.folder), layout=layout)
        self.say("engine started, s", f"{engine.started(400)['seconds']:.0f}")
        before = self.memory(job, engines)
        t0 = time.monotonic()
        job.meet(engines)
        self.say("connect, s", f"{time.monotonic() - t0:.1f}")
        job.refit(verify=True)
        after = self.memory(job, engines)  # before the judge, whose own memory stays with torch
        self.judge(engine, folder=str(job.folder))
        self.say("device memory by xfer, MiB: trainers, workers", [b - a for a, b in zip(before, after)])
        tokens = engine.observe()["outputs"]
        for k in range(2):
            loss = job.good("step", "stepped")[0]["loss"]
            report = job.refit(verify=True)
            self.say(
                f"step {k + 1}",
                f"loss {loss:.4f}; {report['routes']}; transfer {1e3 * report['scalars']['transfer_s']:.2f} ms",
            )
        out = Path(job.work) / "export"
        job.good("export", "exported", timeout=240, folder=str(out))
        self.judge(engine, folder=str(out))
        self.say("tokens changed with the weights", engine.observe()["outputs"] != tokens)
        self.timed(job, "refit")
        self.timed(job, "verified", verify=True)
        self.judge(engine, folder=str(out))
        tokens = engine.observe()["outputs"]
        job.stop_trainers()  # their memory is the fresh engine's
        fresh = job.engine("fresh", engine.on, model=str(out), load_format="auto", **self.alike)
        fresh.started(400)
        anew = fresh.observe()[
            "outputs"
        ]  # once: a second answer would come in part from its prefix cache, in other batches
        equal = "equal" if anew == tokens else f"differ: {anew}, not {tokens}"
        self.say("tokens and logprobs of a fresh engine on Bridge's export", equal)


def parser() -> argparse.ArgumentParser:
    p = command.parser("gpu_session", __doc__)
    p.add_argument("--model", choices=sorted(MODELS), default="4b")
    p.add_argument("--trainers", choices=["plain", "megatron", "nothing", "packed", "mapped", "one"], default="plain")
    p.add_argument("--tp", type=int, default=2, help="GPUs of an engine")
    p.add_argument("--replicas", type=int, default=1, help="engines")
    p.add_argument("--ranks", type=int, default=0, help="trainer ranks; default: as many as engine workers")
    p.add_argument("--layers", type=int, default=0, help="layers of the model; default: all")
    p.add_argument("--repeats", type=int, default=12)
    p.add_argument("--fp8", action="store_true", help="the engine serves block FP8, and bf16 trainers quantize")
    p.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile: starts faster")
    p.add_argument("--no-compile", action="store_true", help="CUDA graphs without torch.compile")
    p.add_argument(
        "--staged", action="store_true", help="staged refits beside blocking ones, of all bytes and of changes"
    )
    p.add_argument("--changed", type=float, nargs="+", default=[0.01], help="with --staged: shares of the elements")
    p.add_argument("--sent", action="store_true", help="trainers' memory cannot be mapped: NCCL carries all bytes")
    p.add_argument("--offline", action="store_true", help="vLLM's LLM instead of AsyncLLM")
    p.add_argument("--work", default="", help="folder for checkpoints and logs")
    p.add_argument("--out", default="", help="write all figures there, JSON")
    return p


def main() -> None:
    p = parser()
    args = p.parse_args()
    if args.trainers == "megatron" and args.replicas > 1:
        p.error("--trainers megatron is of one engine")
    if (args.staged or args.sent) and args.trainers != "plain":
        p.error("--staged and --sent go with --trainers plain")
    if args.trainers in ("one", "packed", "mapped", "nothing") and args.model == "30b":
        p.error("--model 30b goes with --trainers plain or megatron")
    if args.trainers == "one" and torch.cuda.device_count() < 2:
        p.error("--trainers one wants two GPUs")
    import triton
    import vllm

    meta = command.facts("gpu_session", triton=triton.__version__, vllm=vllm.__version__)
    print(json.dumps(meta), flush=True)
    bench = Bench(args)
    try:
        bench.run()
    finally:
        print("\n| what | value |\n|---|---|")
        print("\n".join(f"| {a} | {b} |" for a, b in bench.rows), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps({"meta": meta, "rows": bench.rows, "raw": bench.raw}, indent=1))


if __name__ == "__main__":
    main()
