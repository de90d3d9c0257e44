"""Count the tokens that refits cost: a real vLLM AsyncLLM decodes under load while a trainer trains and refits it.

    python -m benchmarks.tokens [--model 4b|toy] [--modes "dense" "delta staged" ...] [--changed 0.001 0.01 0.05 0.1]
        [--requests 64] [--tokens 512] [--step-ms 600] [--pairs 10] [--out FILE]
    python -m benchmarks.tokens --beside [--model 4b] [--requests 8 64] [--out FILE]

The engine has one GPU (CUDA graphs, random weights), the trainer another one. Requests are greedy, stream, have a fixed length, and
the next one begins where one ends. The trainer's steps are matrix products of --step-ms. Steps with a refit before them and
steps without take turns, so that both are measured under the same load. A step must last longer than the engine needs to compute the
keys and values of running requests again; otherwise the next step, without a refit, makes too few tokens. Before each refit the last
bit of a share of the elements (--changed) is flipped, anywhere.

Modes: dense and delta (`delta="auto"`); alone, the call blocks the trainer; "staged" (`stage=True`) brings bytes while the engine
serves; "publish" returns at once, with a fence after the step; "keep_cache" is that `pause_mode` of the engine, without which vLLM
computes the keys and values of running requests again; "nothing" refits an engine that keeps all but one norm, which costs what no
way of bringing bytes can save. A mode that the session refuses or does not know is left out, and the reason is printed. Dense
modes do not depend on --changed and run with the first share only.

Tokens lost per refit = tokens per second of the step without a refit x seconds of the interval with one - tokens that came in
it; mean of the pairs, and the standard error. Gaps lie between two tokens of one request. Outage is the controller's clock. The JSON
has tokens for each second, and at 10 ms around the refits.

--beside: how much slower decode is while bytes come to its GPU, by who copies: a thread of the engine's worker (pull), another process
on the engine's GPU (pull), the trainer's process (push), by copy engine or by a kernel; and the same loops with copies of 4 KiB, which
cost the host as much and move nothing.

With XFER_TIMELINE=FOLDER in the environment it also prints the moments of the trainer's call, mode by mode.

Without a GPU a toy runs on the CPU. It shows that the benchmark works; its figures mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib import command
from xfer import timeline
from xfer.cli import timelines

MODES: dict[str, tuple[bool, dict[str, Any]]] = {
    "nothing": (False, {}),
    "nothing keep_cache": (False, {}),
    "dense": (False, {}),
    "delta": (False, {"delta": "auto"}),
    "dense staged": (False, {"stage": True}),
    "delta staged": (False, {"stage": True, "delta": "auto"}),
    "dense publish": (True, {}),
    "delta publish": (True, {"delta": "auto"}),
    "dense staged publish": (True, {"stage": True}),
    "delta staged publish": (True, {"stage": True, "delta": "auto"}),
    "dense keep_cache": (False, {}),
    "dense staged keep_cache": (False, {"stage": True}),
    "delta keep_cache": (False, {"delta": "auto"}),
    "delta staged keep_cache": (False, {"stage": True, "delta": "auto"}),
    "dense publish keep_cache": (True, {}),
    "dense staged publish keep_cache": (True, {"stage": True}),
}
"""By name: whether it publishes, and the arguments."""
BUCKET_S, BEFORE_S, AFTER_S = 0.01, 0.05, 0.3
BUFFER = 1 << 30
TINY = dict(piece=4096, pause_s=0.0007)
"""As many copies in a second as of 256 MiB at the rate of NVLink."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "engine's worker, pull, copy engine": ("engine", dict(push=False)),
    "engine's worker, pull, kernel": ("engine", dict(push=False, kernel=True)),
    "engine's worker, pull, 4 KiB": ("engine", dict(push=False, **TINY)),
    "another process on the engine's GPU, pull, copy engine": ("other", dict(push=False)),
    "another process on the engine's GPU, pull, kernel": ("other", dict(push=False, kernel=True)),
    "another process on the engine's GPU, pull, 4 KiB": ("other", dict(push=False, **TINY)),
    "trainer, push, copy engine": ("trainer", dict(push=True)),
    "trainer, push, kernel": ("trainer", dict(push=True, kernel=True)),
    "trainer, push, 4 KiB": ("trainer", dict(push=True, **TINY)),
}
"""By name: which process copies, and how (`token_copies.Copier.begin`)."""


class Tokens:
    """When tokens came.

    Args:
        came: (monotonic seconds, tokens, request), in order of time; shape [n, 3].
    """

    def __init__(self, came: np.ndarray):
        self.at, self.count, self.request = came[:, 0], came[:, 1], came[:, 2]
        self._sum = np.concatenate([[0.0], np.cumsum(self.count)])
        order = np.lexsort((self.at, self.request))
        same = self.request[order][1:] == self.request[order][:-1]
        self.gap_end = self.at[order][1:][same]
        self.gap = np.diff(self.at[order])[same]

    def between(self, begin: float, end: float) -> float:
        """Tokens that came in [begin, end)."""
        a, b = np.searchsorted(self.at, [begin, end])
        return float(self._sum[b] - self._sum[a])

    def gaps(self, spans: list[tuple[float, float]]) -> np.ndarray:
        """Seconds between two outputs of a request's stream, of those that ended in these spans."""
        here = np.zeros(len(self.gap_end), dtype=bool)
        for begin, end in spans:
            here |= (self.gap_end >= begin) & (self.gap_end < end)
        return self.gap[here]

    def buckets(self, begin: float, end: float, seconds: float) -> list[float]:
        """Tokens in each part of [begin, end) that is so long."""
        edges = np.arange(begin, end + seconds / 2, seconds)
        return [self.between(a, b) for a, b in zip(edges, edges[1:])]


@dataclass(frozen=True)
class Row:
    """One mode at one share of changed elements. Times are milliseconds, medians unless they say otherwise."""

    mode: str
    changed: float
    refits: int
    bytes: float
    call: float
    fence: float
    outage: float
    transfer: float
    per_second: float  # tokens, in steps without a refit
    lost: float  # tokens per refit, mean
    lost_error: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    calm_p99: float  # the p99 of gaps in steps without a refit
    step: float  # in steps without a refit
    step_beside: float
    extra_bytes: float
    around: list[float]  # tokens per second in parts of BUCKET_S around the call, mean over the refits
    seconds: list[float]  # tokens in each second

    HEAD = (
        "mode", "changed", "MB", "call", "fence", "outage", "tokens/s", "tokens lost", "gap p50", "p99", "longest",
        "p99 without", "step", "beside it",
    )  # fmt: skip

    def line(self) -> str:
        cells = (
            self.mode, f"{self.changed:.1%}", f"{self.bytes / 1e6:.1f}", f"{self.call:.1f}", f"{self.fence:.1f}",
            f"{self.outage:.1f}", f"{self.per_second:.0f}", f"{self.lost:.0f} ± {self.lost_error:.0f}", f"{self.gap_p50:.1f}",
            f"{self.gap_p99:.1f}", f"{self.gap_max:.1f}", f"{self.calm_p99:.1f}", f"{self.step:.1f}", f"{self.step_beside:.1f}",
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


def measured(mode: str, changed: float, said: dict, tokens: Tokens) -> Row:
    """Put together what the trainer and the engine noted in one mode. `said`: the answer of `token_trainer.Rank.intervals`."""
    rows, reports = [(bool(r[0]), *map(float, r[1:])) for r in said["rows"]], said["reports"]
    with_, without = [r for r in rows if r[0]], [r for r in rows if not r[0]]
    rate = [tokens.between(r[1], r[5]) / (r[5] - r[1]) for r in without]
    lost = [s * (r[5] - r[1]) - tokens.between(r[1], r[5]) for s, r in zip(rate, with_)]
    spans = [[(r[1], r[5]) for r in some] for some in (with_, without)]
    gaps, calm = (1e3 * tokens.gaps(s) for s in spans)

    def ms(some: list, a: int, b: int) -> float:
        return 1e3 * statistics.median(r[b] - r[a] for r in some)

    def of(key: str) -> float:
        return statistics.median(r.get(key, 0.0) for r in reports) if reports else float("nan")

    around = np.mean([tokens.buckets(r[1] - BEFORE_S, r[1] + AFTER_S, BUCKET_S) for r in with_], axis=0) / BUCKET_S
    return Row(
        mode, changed, len(with_), of("bytes"), ms(with_, 1, 2), ms(with_, 3, 4), 1e3 * of("outage_s"), 1e3 * of("transfer_s"),
        statistics.mean(rate), statistics.mean(lost), statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else 0.0,
        *(float(np.percentile(gaps, p)) for p in (50, 99, 100)), float(np.percentile(calm, 99)),
        ms(without, 2, 3), ms(with_, 2, 3), of("extra_bytes"), [round(float(x), 1) for x in around],
        tokens.buckets(rows[0][1], rows[-1][5], 1.0),
    )  # fmt: skip


def call_in_parts(first: int, last: int) -> str:
    """Medians of the trainer's moments in these refits of the last session, after its call; that of a publish "returns"."""
    moments, _ = timelines.of_session(timelines.read(Path(os.environ[timeline.VARIABLE])))
    some = [x for x in moments if first <= x.attempt <= last and x.who == "trainer 0"]
    found = [x for host in timelines.typical(some).values() for x in host]
    return "ms after the call: " + ", ".join(f"{1e3 * x.at:.2f} {x.what} (at most {1e3 * x.most:.2f})" for x in found)


class Bench:
    """Starts both sides, and asks them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.gpu, self.began = args, torch.cuda.device_count() > 1, time.monotonic()
        self.found: dict[str, Any] = {"modes": [], "refused": {}, "beside": []}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def run(self) -> None:
        from benchmarks.gpu_session import MODELS
        from examples.common import toy
        from tests.support.gpu_job import Engine, Job

        a = self.args
        family, sizes = MODELS[a.model]
        config = toy.config(family, **(sizes if sizes else dict(head_dim=64, hidden_size=256, vocab_size=512)))
        if a.layers:
            config["num_hidden_layers"] = a.layers
        module = "benchmarks.lib.token_trainer"
        with tempfile.TemporaryDirectory(prefix="xfer-tokens-") as work, Job(Path(work), config) as job:
            try:
                env = {} if self.gpu else {"TORCHDYNAMO_DISABLE": "1", "XFER_CPU_RESIDENT": "1"}
                self.engine = Engine(
                    job, "engine", [0] if self.gpu else [], env, "benchmarks.lib.token_engine", model=str(job.folder),
                    **self.engine_options(),
                )  # fmt: skip
                job.start_trainers([1 if self.gpu else 0], module=module)
                (trainer,) = job.trainers
                self.trainer, self.path = trainer, str(job.work / "tokens.npy")
                if a.beside:
                    job.trainers = []
                    job.start_trainers([0], module=module)
                    self.other, job.trainers = job.trainers[0], [trainer]
                else:
                    self.say(f"trainer: {trainer.ask('build', timeout=120, config=config)['bytes'] / 1e9:.2f} GB")
                    trainer.ask("calibrate", step_ms=a.step_ms)
                self.say(f"engine started in {self.engine.started(400)['seconds']:.0f} s")
                if a.beside:
                    return self.beside()
                job.engines.append(self.engine)
                self.modes(job)
            except BaseException:
                for c in job.family.children:
                    print(f"---- {c.name}\n{c.tail(40)}", flush=True)
                raise

    def engine_options(self) -> dict[str, Any]:
        a, most = self.args, max(self.args.requests)
        length = a.tokens + 64
        if not self.gpu:
            return dict(cpu=True, tp=1, max_num_seqs=most, max_model_len=length, num_gpu_blocks_override=64 * most)
        sizes = sorted({1, 2, 4, 8, 16, 32, 64, most})
        return dict(
            max_num_seqs=most, max_model_len=length, kv_cache_memory_bytes=8 << 30, eager=a.eager,
            worker_extension_cls="benchmarks.lib.token_copies.Probe",
            **({} if a.eager else {"compilation_config": {"cudagraph_capture_sizes": sizes}}),
        )  # fmt: skip

    def load(self, requests: int) -> None:
        self.engine.ask("load", "load", requests=requests, tokens=self.args.tokens)
        time.sleep(self.args.warm_s)

    def unload(self) -> Tokens:
        self.engine.ask("unload", "unload", path=self.path)
        return Tokens(np.load(self.path))

    # ---- modes

    def modes(self, job: Any) -> None:
        from benchmarks.gpu_session import ALL_BUT_A_NORM

        a, met = self.args, None
        for mode in a.modes:
            publish, how = MODES[mode]
            pause = "keep_cache" if "keep_cache" in mode else "keep"
            left = ALL_BUT_A_NORM if mode.startswith("nothing") else ()
            if (pause, left) != met:
                if met:
                    job.good("close", "closed")
                job.meet([self.engine], serve=dict(pause_mode=pause), keep=left, drop=left)
                self.trainer.ask("refit", "refitted")  # the first weights
                met = pause, left
            for changed in a.changed if "delta" in mode else a.changed[:1]:
                self.load(a.requests[0])
                said = self.trainer.ask(
                    "intervals", timeout=250, how=how, publish=publish, share=changed, pairs=a.pairs
                )
                tokens = self.unload()
                if "refused" in said:
                    self.found["refused"][mode] = said["refused"]
                    self.say(f"{mode}: left out: {said['refused']}")
                    break
                row = measured(mode, changed, said, tokens)
                self.found["modes"].append(asdict(row) | {"rows": said["rows"], "reports": said["reports"]})
                self.say(row.line())
                if os.environ.get(timeline.VARIABLE):
                    self.say(call_in_parts(*said["refits"]))

    # ---- copies beside decode

    def window(self, seconds: float) -> tuple[float, float]:
        begin = time.monotonic()
        time.sleep(seconds)
        return begin, time.monotonic()

    def beside(self) -> None:
        a = self.args
        copiers = {"engine": self.engine, "other": self.other, "trainer": self.trainer}
        handles = {name: c.ask("offer", "offer", nbytes=BUFFER)["handle"] for name, c in copiers.items()}
        for requests in a.requests:
            self.load(requests)
            alone, rows = [self.window(a.window_s)], []
            for way, (who, how) in WAYS.items():
                theirs = handles["engine" if how["push"] else "trainer"]
                copiers[who].ask("copy", "copy", handle=theirs, **how)
                time.sleep(0.2)
                span = self.window(a.window_s)
                rows.append((way, span, copiers[who].ask("copied", "copied")["rate"]))
                time.sleep(0.2)
                alone.append(self.window(a.window_s / 2))
            tokens = self.unload()

            def rate(span: tuple[float, float], tokens: Tokens = tokens) -> float:
                return tokens.between(*span) / (span[1] - span[0])

            for (way, span, moved), before, after in zip(rows, alone, alone[1:]):
                free, p99 = (rate(before) + rate(after)) / 2, 1e3 * float(np.percentile(tokens.gaps([span]), 99))
                row = dict(
                    requests=requests, way=way, gb_per_s=moved, alone=free, beside=rate(span), slower=1 - rate(span) / free,
                    gap_p99=p99, alone_gap_p99=1e3 * float(np.percentile(tokens.gaps([before, after]), 99)),
                )  # fmt: skip
                self.found["beside"].append(row)
                self.say(f"{requests} requests, {way}: {row['slower']:.1%} slower at {moved:.0f} GB/s")

    def table(self) -> str:
        if self.found["beside"]:
            head = (
                "requests",
                "who copies, how",
                "GB/s",
                "tokens/s alone",
                "beside",
                "slower",
                "gap p99 alone",
                "beside",
            )
            lines = [
                f"| {r['requests']} | {r['way']} | {r['gb_per_s']:.0f} | {r['alone']:.0f} | {r['beside']:.0f} | {r['slower']:.1%} | "
                f"{r['alone_gap_p99']:.1f} | {r['gap_p99']:.1f} |"
                for r in self.found["beside"]
            ]  # fmt: skip
        else:
            head = Row.HEAD
            fields = {f: None for f in Row.__dataclass_fields__}
            lines = [Row(**{f: m[f] for f in fields}).line() for m in self.found["modes"]]
        return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def arguments() -> argparse.Namespace:
    p = command.parser("tokens", __doc__)
    gpus = torch.cuda.device_count()
    p.add_argument("--beside", action="store_true", help="copies beside decode, without refits; needs two GPUs")
    p.add_argument("--model", choices=["4b", "30b", "toy"], default="4b" if gpus > 1 else "toy")
    p.add_argument("--layers", type=int, default=0, help="fewer layers than the model has")
    p.add_argument("--modes", nargs="+", choices=[*MODES], default=[*MODES], metavar="MODE", help=", ".join(MODES))
    p.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.001, 0.05, 0.1] if gpus > 1 else [0.01])
    p.add_argument(
        "--requests", type=int, nargs="+", default=None, help="at a time; default 64, and 8 and 64 with --beside"
    )
    p.add_argument("--tokens", type=int, default=512 if gpus > 1 else 96, help="length of an answer")
    p.add_argument("--step-ms", type=float, default=600.0 if gpus > 1 else 250.0)
    p.add_argument("--pairs", type=int, default=10 if gpus > 1 else 4, help="steps with a refit, and as many without")
    p.add_argument("--warm-s", type=float, default=1.5, help="seconds of load before anything is measured")
    p.add_argument("--window-s", type=float, default=2.0, help="seconds of each measurement of --beside")
    p.add_argument("--eager", action="store_true", help="no CUDA graphs, no compilation")
    p.add_argument("--out", type=Path, default=None, help="file for the figures, as JSON")
    a = p.parse_args()
    if gpus == 1 or a.beside and not gpus:
        p.error("two GPUs are needed: one of the engine, one of the trainer")
    a.requests = a.requests or ([8, 64] if a.beside else [64 if gpus > 1 else 4])
    return a


def main() -> None:
    a = arguments()
    bench = Bench(a)
    bench.run()
    print("\n" + bench.table())
    for mode, why in bench.found["refused"].items():
        print(f"left out: {mode}: {why}")
    if not bench.gpu:
        print("on the CPU: this shows that the benchmark works; the figures mean little")
    if a.out:
        a.out.write_text(json.dumps({"meta": command.facts("tokens"), **bench.found}) + "\n")


if __name__ == "__main__":
    main()
