"""Judge measured figures by the goals: which are met, by how much, and which were not measured.

    python -m benchmarks.goals FILE.json ...                # files that the GPU benchmarks wrote with --out
    python -m benchmarks.goals --run DIR [--minutes 9]      # run what this machine's GPUs can show, then judge it
    python -m benchmarks.goals --list [--gpus N]            # print the commands that --run would run

Files are those of benchmarks.gpu, gpu_session, packed_gpu and layerwise_gpu, or JSON that nests several of them under names.
Of several results for one goal the last is shown; --all shows each. --run starts only steps that end in time and skips those
whose file is in DIR, so that the same command continues an earlier run. The file of a failed step is renamed
NAME.part.json. Session and packed steps need vLLM. Exit code 1: a goal is missed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import command


@dataclass(frozen=True)
class Judged:
    """A figure and its goal: `ours` at most `limit`, or at least `limit` if `least`. `how` names the measured figures."""

    goal: str
    ours: float
    limit: float
    how: str
    least: bool = False

    @property
    def met(self) -> bool:
        return self.ours >= self.limit if self.least else self.ours <= self.limit

    def line(self, where: str) -> str:
        sign, verdict = (">=", "<=")[not self.least], "met" if self.met else "**missed**"
        return f"| {self.goal} | {self.ours:.5g} | {sign} {self.limit:.5g} | {verdict} | {self.how} | {where} |"


# ---- goals, by kind of result

PEER_MS = {"4b": 10.6, "30b": 81.0, "replicas": 160.0, "30b-4+4": 43.0}
"""By case of benchmarks.gpu."""
WITHIN_A_TENTH = ("colocated", "30b-colocated2", "colocated8", "30b-ep2tp2", "30b-ep4", "30b-pp2ep2", "235b")
"""Cases of benchmarks.gpu with a goal of 1.1 times the floor of the same run."""
SESSION_MS = {("4b", 2, 1): 12.0, ("30b", 2, 1): 84.0, ("30b", 1, 2): 168.0}
"""The transfer clock, by (model, TP of an engine, replicas), where trainers have their own GPUs."""
REFITS = ("refit", "verified", "zero bytes", "one replica", "relay chain")
MIB = float(1 << 20)


def transport(found: dict) -> Iterator[Judged]:
    """Results of benchmarks.gpu: the data plane alone."""
    for case in found["cases"]:
        if "ms" not in case:
            continue
        name, ms = case["case"], {k: statistics.median(v) for k, v in case["ms"].items()}
        floor, peer, what = ms.get("floor"), ms.get("peer"), f"data plane, {name}"
        yield Judged(f"{what}: wrong elements", sum(case["wrong"].values()), 0, f"{len(case['wrong'])} ways compared")
        if name in PEER_MS:
            yield Judged(f"{what}: peer, ms", peer, PEER_MS[name], f"floor {floor:.2f}")
        if name in WITHIN_A_TENTH:
            yield Judged(f"{what}: peer / floor", peer / floor, 1.1, f"{peer:.2f} / {floor:.2f} ms")
        if "p2p" in ms and "nccl" in ms:
            how = f"{ms['nccl']:.2f} / {ms['p2p']:.2f} ms"
            yield Judged(f"{what}: p2p, of NCCL's rate", ms["nccl"] / ms["p2p"], 0.85, how, True)
        rows = {k: v for k, v in ms.items() if k.startswith("relay")}
        if rows and "one destination pulls" in ms:
            best, one = min(rows, key=rows.get), ms["one destination pulls"]
            how = f"{rows[best]:.2f} ({best}) / {one:.2f} ms"
            yield Judged(f"{what}: relay / one copy out", rows[best] / one, 1.15, how)
        if (extra := case.get("extra_bytes", {}).get("p2p")) is not None:
            yield Judged(f"{what}: memory of p2p, MiB", extra / MIB, 512.0, "beside NCCL's own")


def session(found: dict) -> Iterator[Judged]:
    """Results of benchmarks.gpu_session: whole refits of a real vLLM."""
    from benchmarks import gpu_session

    meta, raw = found["meta"], found["raw"]
    a = gpu_session.parser().parse_args(shlex.split(meta["command"])[3:])
    if a.layers or a.model == "toy" and a.trainers != "nothing":
        return  # the goals are for full-size models
    workers = (a.tp if a.trainers != "one" else 1) * a.replicas
    apart = meta["gpus"] >= workers + (a.ranks or workers)
    what = f"{a.model}, {a.trainers}, TP{a.tp}" + (f" x {a.replicas}" if a.replicas > 1 else "")
    what += "" if apart else f", on {meta['gpus']} GPU" + "s" * (meta["gpus"] > 1)
    mid = {name: _clocks(raw[name]) for name in REFITS if name in raw}
    floor = None
    if "floor" in raw and "refit" in mid:
        floor = gpu_session.copied_ms(raw["refit"][0]["scalars"]["bytes"], workers, raw["floor"])
    compared = [text for name, text in found["rows"] if name == "every byte compared"]
    if compared:
        wrong = sum("wrong: none" not in text for text in compared)
        yield Judged(f"{what}: comparisons of every byte that failed", wrong, 0, f"of {len(compared)}")
    if (plain := mid.get("refit")) is not None:
        beside = f"floor {floor:.2f}" if floor else "no floor in this run"
        if apart and (limit := SESSION_MS.get((a.model, a.tp, a.replicas))):
            yield Judged(f"{what}: transfer, ms", plain["transfer_s"], limit, beside)
        elif floor:
            how = f"{plain['transfer_s']:.2f} / {floor:.2f} ms"
            yield Judged(f"{what}: transfer / floor", plain["transfer_s"] / floor, 1.1, how)
        if checked := mid.get("verified"):
            how = f"{checked['transfer_s']:.2f} / {plain['transfer_s']:.2f} ms"
            more = checked["transfer_s"] / plain["transfer_s"]
            yield Judged(f"{what}: verified / plain transfer", more, 1.1 if apart else 1.25, how)
        noop = raw.get("no-op backend, as long and as often as a refit")
        if noop:
            trips = statistics.median(r["all"] for r in noop)
            how = f"vLLM's round trips {trips:.2f} + transfer {plain['transfer_s']:.2f} + 0.5"
            yield Judged(f"{what}: outage, ms", plain["outage_s"], trips + plain["transfer_s"] + 0.5, how)
    if zero := mid.get("zero bytes"):
        yield Judged(f"{what}: zero bytes, armed to decided, ms", zero["transfer_s"], 0.5, "transfer clock")
    if "relay chain" in mid and "one replica" in mid:
        row, one = (mid[k]["transfer_s"] for k in ("relay chain", "one replica"))
        replicas = max(2, meta["gpus"] - 1)
        yield Judged(
            f"{what}: {replicas} replicas in a relay chain / one", row / one, 1.15, f"{row:.2f} / {one:.2f} ms"
        )


def _clocks(rows: list[dict]) -> dict[str, float]:
    """Medians of a report's clocks, milliseconds."""
    return {k: statistics.median(1e3 * r["scalars"][k] for r in rows) for k in ("transfer_s", "outage_s", "call_s")}


def packed(found: dict) -> Iterator[Judged]:
    """Results of benchmarks.packed_gpu: whole tensors in buckets."""
    from benchmarks.lib.packed_ranks import FLAT, PACKED, RAW

    bucket = found["meta"]["bucket"]
    for case in found["cases"]:
        rows = {r["way"]: r for r in case["rows"] if r.get("ms")}
        ms = {way: statistics.median(r["ms"]) for way, r in rows.items()}
        compared = [r["wrong"] for r in rows.values() if r["wrong"] is not None]
        yield Judged(f"packed, {case['case']}: wrong elements", sum(compared), 0, f"{len(compared)} ways compared")
        fast, what = FLAT if case["case"] == "colocated" else PACKED, f"packed, {case['case']}"
        if fast not in ms:
            continue
        if "one by one" in ms:
            how = f"{ms['one by one']:.1f} / {ms[fast]:.1f} ms"
            yield Judged(f"{what}: one by one / {fast}", ms["one by one"] / ms[fast], 8.0, how, True)
        if RAW in ms:
            how = f"{ms[RAW]:.1f} / {ms[fast]:.1f} ms"
            yield Judged(f"{what}: of NCCL's broadcast rate", ms[RAW] / ms[fast], 0.9, how, True)
        yield Judged(f"{what}: memory, buckets", max(rows[fast]["extra_bytes"]) / bucket, 2.0, "largest rank")


def layerwise(found: list[dict]) -> Iterator[Judged]:
    """Results of benchmarks.layerwise_gpu: gathers beside the next forward."""
    from benchmarks.lib.layerwise_results import HIDDEN_GOAL, WIRE_GOAL, bare_ms, wire_ratio

    for r in found:
        what = f"layer-wise, {r['ranks']} ranks"
        for x in r.get("exact", ()):
            how = f"{x['steps']} steps, {len(x['ways'])} ways"
            yield Judged(f"{what}: {x['model']}, ways that differ", float(len(x["differ"])), 0.0, how)
        ours = {part: r[part] for part in ("overlap", "pull") if part in r}
        hidden = {(part, way): share for part, x in ours.items() for way, share in x["hidden"].items()}
        if hidden:
            part, way = max(hidden, key=hidden.get)
            x = ours[part]["exposed_ms"]
            how = f"{part}, {way}: {x[way]:.2f} of {x['blocking']:.2f} ms exposed"
            yield Judged(f"{what}: hidden, by events", hidden[part, way], HIDDEN_GOAL, how, True)
        for part, x in ours.items():
            bare = bare_ms(x)
            if len(bare) > 1 and "blocking" in bare:
                way = min((w for w in bare if w != "blocking"), key=bare.get)
                how = f"{way}: {bare[way]:.2f} of {bare['blocking']:.2f} ms exposed"
                yield Judged(
                    f"{what}: hidden, by the timeline, {part}", 1 - bare[way] / bare["blocking"], HIDDEN_GOAL, how, True
                )
        for part in ("overlap", "pull", "skew"):
            if part in r and any(r[part]["lacked"]):
                yield Judged(f"{what}: bytes planned / lacked, {part}", wire_ratio(r[part]), WIRE_GOAL, "largest rank")


def results(found: object) -> Iterator[tuple[str, dict | list]]:
    """Every benchmark's result nested in `found`, with its path of keys."""
    if isinstance(found, list) and found and isinstance(found[0], dict) and "ranks" in found[0]:
        yield "", found
    elif isinstance(found, dict) and "meta" in found and ("cases" in found or "raw" in found):
        yield "", found
    elif isinstance(found, dict | list):
        for name, inner in found.items() if isinstance(found, dict) else enumerate(found):
            for below, result in results(inner):
                yield f"{name}: {below}".rstrip(": ") if below else str(name), result


def judged(result: dict | list) -> list[Judged]:
    if isinstance(result, list):
        return list(layerwise(result))
    if "raw" in result:
        return list(session(result))
    return list((packed if "bucket" in result["meta"] else transport)(result))


# ---- running them


@dataclass(frozen=True)
class Step:
    """One benchmark command of --run.

    gpus, most: the numbers of GPUs on which it is worth running. seconds: the longest it may take, with starts of engines.
    """

    name: str
    gpus: int
    seconds: int
    command: str
    most: int = 64


STEPS = (
    Step("session4b", 4, 220, "gpu_session --tp 2 --repeats 10"),
    Step("session30b", 4, 280, "gpu_session --model 30b --tp 2 --repeats 10"),
    Step("replicas30b", 4, 280, "gpu_session --model 30b --tp 1 --replicas 2 --repeats 10"),
    Step("colocated30b", 4, 280, "gpu_session --model 30b --tp 4 --repeats 10", most=4),
    Step("row", 2, 240, "gpu_session --tp 1 --trainers one --eager --repeats 10"),
    Step("transport", 4, 420, "gpu --repeats 10", most=4),
    Step("transport8", 8, 560, "gpu --repeats 10"),
    Step("packed", 4, 290, "packed_gpu --seconds 235"),
    Step("layerwise", 4, 260, "layerwise_gpu --ranks 4 --parts overlap pull exact megatron", most=4),
    Step("layerwise8", 8, 260, "layerwise_gpu --ranks 8 --parts overlap pull exact megatron"),
    Step("zero", 1, 120, "gpu_session --tp 1 --model toy --eager --trainers nothing --repeats 30"),
    Step("pair", 2, 200, "gpu_session --tp 1 --repeats 10", most=3),
    Step("transport2", 2, 300, "gpu --repeats 10", most=3),
    Step("layerwise2", 2, 200, "layerwise_gpu --ranks 2 --parts overlap pull exact", most=3),
    Step("one", 1, 200, "gpu_session --tp 1 --trainers plain --repeats 10", most=1),
)
"""In the order in which they run."""
ENDING_S = 20.0
"""Seconds for an interrupted benchmark to end its engines."""


def fitting(gpus: int) -> list[Step]:
    return [s for s in STEPS if s.gpus <= gpus <= s.most]


def run(folder: Path, gpus: int, minutes: float) -> list[str]:
    """Run the steps that fit; returns the names of those for which there is no time."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell's "&"; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder.mkdir(parents=True, exist_ok=True)
    left, ends = [], time.monotonic() + 60 * minutes
    for step in fitting(gpus):
        out = folder / f"{step.name}.json"
        if out.exists():
            continue
        if time.monotonic() + step.seconds + ENDING_S > ends:
            left.append(step.name)
            continue
        words = [sys.executable, "-m", *shlex.split(f"benchmarks.{step.command}"), "--out", str(out)]
        print("+ " + shlex.join(words), flush=True)
        with open(folder / f"{step.name}.log", "w") as log:
            ended = _ended(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT), step.seconds)
        if ended:
            print(f"{step.name}: {ended}; the end of its log:")
            print("\n".join((folder / f"{step.name}.log").read_text(errors="replace").splitlines()[-15:]), flush=True)
            if out.exists():  # judged now, and run again next time
                out.rename(folder / f"{step.name}.part.json")
    return left


def _ended(bench: subprocess.Popen, seconds: float) -> str:
    """Wait for `bench`; returns "" or what went wrong. A late one is interrupted, to end its processes, before it is killed."""
    try:
        code = bench.wait(seconds)
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        bench.send_signal(signal.SIGINT)
    try:
        bench.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        bench.kill()
        bench.wait()
    return f"not over after {seconds:g} s"


def main() -> int:
    p = command.parser("goals", __doc__)
    p.add_argument("files", nargs="*", type=Path, help="JSON of earlier runs")
    p.add_argument("--run", type=Path, metavar="DIR", help="folder for results and logs")
    p.add_argument("--minutes", type=float, default=9.0, help="the longest that this --run may take")
    p.add_argument(
        "--gpus", type=int, default=None, help="the number of GPUs to plan for; default: those of this machine"
    )
    p.add_argument("--all", action="store_true", help="show every result of a goal, not only the last")
    p.add_argument("--list", action="store_true", help="print the commands of --run")
    a = p.parse_args()
    if not (a.files or a.run or a.list):
        p.error("give result files, --run DIR or --list")
    if a.run or a.list:
        import torch

        gpus = torch.cuda.device_count() if a.gpus is None else a.gpus
        if not gpus:
            p.error("this machine has no GPU; --list --gpus N prints the commands for N GPUs")
        if a.list:
            print("\n".join(f"{s.name:14} {s.seconds:4} s  python -m benchmarks.{s.command}" for s in fitting(gpus)))
            return 0
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not available on every host
        left = run(a.run, gpus, a.minutes)
        if left:
            print(f"no time for {', '.join(left)}: run the same command again")
        a.files += sorted(a.run.glob("*.json"))
    rows = [
        (j, f"{path.name}{', ' + name if name else ''}")
        for path in a.files
        for name, result in results(json.loads(path.read_text()))
        for j in judged(result)
    ]
    if not a.all:
        rows = list({j.goal: (j, where) for j, where in rows}.values())
    print("\n| goal | measured | asked | | figures | result |\n|---|---|---|---|---|---|")
    print("\n".join(j.line(where) for j, where in sorted(rows, key=lambda row: row[0].goal.partition(":")[0])))
    return int(any(not j.met for j, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
