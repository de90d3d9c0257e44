"""Time a whole refit on CPUs beside the alternatives: 4 trainer processes and a real vLLM of 2 workers on this host.

    .venvs/engine/bin/python -m benchmarks.cpu [--layers 18] [--layout tp4|fsdp4] [--repeats 5] [--awex PYTHON]

All rows are of one run, take turns, and use tensors of the same shapes and cuts. Medians of the slowest rank's seconds, and of
the processor seconds of all ranks together, which depend less on the machine's other load:

  raw      gloo send/recv of the bytes that xfer moves, between the same pairs: the floor
  ours     the warm nccl_xfer_refit call of the trainers: pause, transfer into live weights, commit, resume
  usual    gather on every trainer (DTensor.full_tensor), pack, broadcast to the workers, vLLM's own load_weights; a raw gloo
           broadcast of the same buffers shows whether the broadcast is a fair one
  awex     awex 0.9.0's plan and point-to-point transfer on synthetic metadata, in six processes of its own

Plans: six processes plan at once; the slowest rank's time counts. It starts with all descriptions in memory as Python objects
(ours: decoded inventories with known digests; awex: ParameterMeta) and ends with what this rank sends or receives. Ours
includes the check of the inventories, the proof that every byte has one writer, the division among senders, the schedule, the
plan's digest and this rank's rows; awex's is its build_local_transfer_plan. "first" is the first plan of a process; for
ours that of the session, and the exchange of layouts is shown apart, since awex's exchange of metadata does not run here.
Imports, traces and cached plans are in none of these times.

awex needs an environment with awex==0.9.0, megatron-core, transformers, aiohttp, psutil and cloudpickle; without --awex this
interpreter is tried. The weights that ours and the usual way leave in vLLM are compared by vLLM's own checksums.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from math import prod
from pathlib import Path

from benchmarks.lib import command
from benchmarks.lib.cpu_ranks import MARK, TRAINERS, WORKERS, config, cut_dim
from examples.common import toy
from examples.common.ports import free_port

ROOT = Path(__file__).resolve().parents[1]


class Child:
    """A process that gets orders as JSON lines and answers in marked JSON lines."""

    def __init__(self, name: str, command: list[str], work: Path, **env: str):
        self.name, self.log = name, work / f"{name}.log"
        with open(self.log, "w") as log:
            self.proc = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                start_new_session=True, env={**os.environ, **ENV, **env},
            )  # fmt: skip
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.proc.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line[len(MARK) :]))
        self.answers.put(None)

    def say(self, **command) -> None:
        self.proc.stdin.write(json.dumps(command) + "\n")
        self.proc.stdin.flush()

    def hear(self, seconds: float = 600.0) -> dict:
        try:
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            answer = None
        if answer is None:
            raise SystemExit(f"{self.name} ended or is late:\n{self.log.read_text(errors='replace')[-3000:]}")
        return answer

    def stop(self) -> None:
        try:
            os.killpg(self.proc.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.proc.wait(10)


ENV = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "XFER_CPU_RESIDENT": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT),
}  # fmt: skip


def cuts(specs, layout: str) -> dict:
    """Both sides for lib/cpu_awex.py: per tensor and rank offset, shape and cut dim; and which tensors vLLM fuses."""

    def parts(name, shape, dim, n):
        size = list(shape)
        if dim is not None:
            size[dim] //= n
        return [
            dict(offset=[r * size[d] if d == dim else 0 for d in range(len(shape))], shape=size, dim=dim)
            for r in range(n)
        ]

    out = [
        dict(
            name=n,
            shape=s,
            train=parts(n, s, cut_dim(layout, n, s), TRAINERS),
            infer=parts(n, s, cut_dim("tp4", n, s), WORKERS),
        )
        for n, s, _ in specs
    ]
    fused: dict[str, list[str]] = {}
    for n, _, _ in specs:
        for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
            if n.endswith(f".{part}_proj.weight"):
                fused.setdefault(n.replace(f".{part}_proj", f".{whole}_proj"), []).append(n)
    return dict(train_world=TRAINERS, infer_world=WORKERS, tensors=out, fused=list(fused.values()))


class Bench:
    def __init__(self, args: argparse.Namespace, work: Path):
        self.args, self.work = args, work
        self.specs = toy.specs(config(args.layers))
        self.full = sum(prod(s) * d.itemsize for _, s, d in self.specs)
        self.children: list[Child] = []
        self.seconds: dict[str, list[float]] = {}
        self.said: dict[str, list[dict]] = {}

    def start(self) -> None:
        token, model = secrets.token_hex(16), self.work / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config(self.args.layers)))
        options = dict(layers=self.args.layers, layout=self.args.layout, bucket=self.args.bucket)
        me, at = [sys.executable, "-m", "benchmarks.lib.cpu_ranks"], str(free_port())
        self.engine = self._child("engine", [*me, "engine", json.dumps(dict(model=str(model)))], XFER_TOKEN=token)
        self.trainers = [
            self._child(f"trainer{r}", [*me, "trainer", str(r), str(TRAINERS), at, json.dumps(options)])
            for r in range(TRAINERS)
        ]
        for c in (self.engine, *self.trainers):
            c.hear()
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        self.engine.say(do="serve", rendezvous=rendezvous)
        self.engine.hear()
        self.met = self._all(
            self.trainers, do="connect", rendezvous=rendezvous, token=token, host_pull=self.args.host_pull
        )
        self._all(self.trainers, do="ours", verify=True)  # warms links up and replaces dummy weights
        self.engine.say(do="bench_open", path=f"{self.work}/store", layers=self.args.layers, bucket=self.args.bucket)
        self._all(self.trainers, do="open", path=f"{self.work}/store")
        self.met += self.engine.hear()["answers"]

    def start_awex(self) -> str:
        """Start six ranks of awex and let them plan; returns "" or why it cannot run."""
        python = self.args.awex or sys.executable
        probe = subprocess.run(
            [python, "-W", "ignore", "-c", "import awex.transfer.transfer_plan, importlib.metadata as m; print(m.version('awex'))"],
            capture_output=True, text=True, env={**os.environ, **ENV},
        )  # fmt: skip
        if probe.returncode:
            return f"not importable by {python} ({(probe.stderr.strip().splitlines() or ['?'])[-1]}); see --awex"
        self.awex_version = probe.stdout.split()[-1]
        path, at = self.work / "layout.json", str(free_port())
        path.write_text(json.dumps(cuts(self.specs, self.args.layout)))
        me = [python, "-m", "benchmarks.lib.cpu_awex"]
        self.awex = [self._child(f"awex{r}", [*me, str(r), at, str(path)]) for r in range(TRAINERS + WORKERS)]
        self.awex_met = [c.hear() for c in self.awex]
        return ""

    def _child(self, name: str, command: list[str], **env: str) -> Child:
        self.children.append(Child(name, command, self.work, **env))
        return self.children[-1]

    def _all(self, children: list[Child], **command) -> list[dict]:
        for c in children:
            c.say(**command)
        return [c.hear() for c in children]

    def _ask(self, do: str) -> list:
        self.engine.say(do=do)
        return self.engine.hear()["answers"]

    # ---- one turn of each

    def ours(self, verify: bool = False) -> list[dict]:
        before = self._ask("bench_cpu")
        said = self._all(self.trainers, do="ours", verify=verify)
        return [*said, *(dict(cpu=b["cpu"] - a["cpu"]) for a, b in zip(before, self._ask("bench_cpu")))]

    def verified(self) -> list[dict]:
        return self.ours(True)

    def both(self, do: str) -> list[dict]:
        self.engine.say(do=f"bench_{do}")
        said = self._all(self.trainers, do=do)
        return [*said, *self.engine.hear()["answers"]]

    def raw(self) -> list[dict]:
        return self.both("raw")

    def usual(self) -> list[dict]:
        return self.both("usual")

    def raw_broadcast(self) -> list[dict]:
        return self.both("raw_broadcast")

    def awex_refit(self) -> list[dict]:
        return self._all(self.awex, do="awex")

    def plan(self) -> list[dict]:
        return self.both("plan")

    def awex_plan(self) -> list[dict]:
        return self._all(self.awex, do="plan")

    def turns(self, repeats: int, *works) -> None:
        """Run `works` in turns. The first turn of each does not count."""
        for turn in range(repeats + 1):
            for work in works:
                said = work()
                if turn:
                    name = work.__name__
                    self.seconds.setdefault(name, []).append(max(s.get("seconds", 0.0) for s in said))
                    self.said.setdefault(name, []).append(said)

    def same_bytes(self) -> None:
        """Require that the usual way and ours leave the same bytes in every parameter of both workers."""
        before = self._ask("compute_weight_checksums")
        self._all(self.trainers, do="fill", seed=1)
        self.usual()
        theirs = self._ask("compute_weight_checksums")
        self._ask("bench_scramble")
        self.ours(True)
        if self._ask("compute_weight_checksums") != theirs or theirs == before:
            raise SystemExit("ours and load_weights left different bytes in vLLM's parameters")

    def stop(self) -> None:
        for c in self.children:
            c.stop()

    # ---- results

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def phase(self, name: str, key: str, pick=max) -> float:
        return statistics.median(pick(s[key] for s in said if key in s) for said in self.said[name])

    def report(self, no_awex: str) -> None:
        raw = self.median("raw")
        moved = self.met[0]["bytes"]
        gathered = sum(
            prod(s) * d.itemsize * (TRAINERS - 1)
            for n, s, d in self.specs
            if cut_dim(self.args.layout, n, s) is not None
        )
        spread = WORKERS * self.full
        print(
            f"{self.args.layout}, {TRAINERS} trainers -> vLLM tp{WORKERS}: {len(self.specs)} tensors, {self.full / 1e9:.2f} GB"
            f" in bf16, {moved / 1e9:.2f} GB into the workers; median of {self.args.repeats}\n"
        )
        rows = [
            ("raw gloo send/recv", "raw", moved),
            ("ours: nccl_xfer_refit", "ours", moved),
            ("ours, verified", "verified", moved),
            ("gather + broadcast + load_weights", "usual", gathered + spread),
        ]
        if not no_awex:
            rows.append((f"awex {self.awex_version} point-to-point", "awex_refit", moved))
        for name, turn, nbytes in rows:
            seconds, cpu = self.median(turn), self.phase(turn, "cpu", sum)
            print(
                f"  {name:36s} {seconds * 1e3:9.1f} ms  {seconds / raw:6.2f}x raw  {cpu:6.2f} s of processors"
                f"  {nbytes / 1e9:6.2f} GB moved"
            )
        print(
            f"\n  ours: transfer {self.phase('ours', 'transfer_s') * 1e3:.0f} ms of it, "
            f"outage {self.phase('ours', 'outage_s') * 1e3:.0f} ms; connect {max(m['seconds'] for m in self.met[:TRAINERS]):.1f} s once"
        )
        rate = self.median("raw_broadcast") / self.phase("usual", "broadcast")
        verdict = "valid" if rate >= 0.7 else "NOT VALID: below 70 %"
        ms = {k: f"{self.phase('usual', k) * 1e3:.0f} ms" for k in ("gather", "pack", "broadcast", "load")}
        print(
            f"  usual: gather {ms['gather']}, pack {ms['pack']}, broadcast {ms['broadcast']} "
            f"({rate:.0%} of raw gloo broadcast's rate: {verdict}), load_weights {ms['load']}\n"
            f"         {(gathered + spread) / moved:.2f}x our bytes; "
            f"{(gathered / TRAINERS + spread) / moved:.2f}x if only one trainer gathered"
        )

        first, both = max(m["plan_s"] for m in self.met), max(m["plan_s"] + m["exchange_s"] for m in self.met)
        plan, cpu = self.median("plan"), self.phase("plan", "cpu", sum)
        print(
            f"  plan by six processes at once, layouts given, slowest rank: ours {plan * 1e3:.1f} ms ({cpu * 1e3:.0f} ms of "
            f"processors; the first {first * 1e3:.0f} ms, with the exchange of layouts before it {both * 1e3:.0f} ms)"
        )
        if no_awex:
            print(f"  awex: {no_awex}")
        else:
            theirs, cpu = self.median("awex_plan"), self.phase("awex_plan", "cpu", sum)
            first, pieces = max(m["plan_s"] for m in self.awex_met), max(m["pieces"] for m in self.awex_met)
            print(
                f"  awex's {theirs * 1e3:.1f} ms ({cpu * 1e3:.0f} ms of processors; the first {first * 1e3:.0f} ms; {pieces} pieces)"
            )


def main() -> None:
    parser = command.parser("cpu", __doc__)
    parser.add_argument("--layers", type=int, default=18, help="layers of the model, 100 MB each")
    parser.add_argument("--layout", choices=("tp4", "fsdp4"), default="tp4", help="how trainers cut tensors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=128 << 20, help="bytes of a packed broadcast")
    parser.add_argument("--awex", help="a Python that can import awex 0.9.0")
    parser.add_argument("--host-pull", action="store_true", help="workers read the trainers' memory themselves")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children have their own sessions: stop them
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        try:
            bench.start()
            bench.same_bytes()
            no_awex = bench.start_awex()
            works = [bench.raw, bench.ours, bench.verified, bench.usual, bench.raw_broadcast, bench.plan]
            bench.turns(args.repeats, *works, *([] if no_awex else [bench.awex_refit, bench.awex_plan]))
            if not no_awex and (wrong := [n for c in bench._all(bench.awex, do="check") for n in c["wrong"]]):
                raise SystemExit(f"awex left other bytes in {wrong[:3]}")
            bench.report(no_awex)
        finally:
            bench.stop()


if __name__ == "__main__":
    main()
