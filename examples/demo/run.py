"""Starts the demo's processes and shows their events in a table. Trainer and engine live in different virtual environments.

    python -m examples.demo.run --trainer-python PY --engine-python PY [--steps 5]        # from the repository's root

Exit code 0 only if every refit was verified and, at the end, the live engine and a fresh engine that loaded Megatron-Bridge's
exported checkpoint have the same bytes in every parameter and generate the same tokens with the same logprobs.
"""

import argparse
import os
import queue
import secrets
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

from rich.console import Console
from rich.live import Live
from rich.table import Table

from examples.common.ports import free_port
from examples.demo.events import parse
from examples.demo.model import write_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRAINERS = 4
NUMBERS = ("step", "loss", "serves", "MB moved (broadcast)", "transfer", "outage")
PHASES = "drain arm pause pack wire unpack verify finish reset_caches resume".split()


class Process:
    """One child: its events go to `events`, its other output to a log."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], work: Path, events: queue.Queue):
        self.log = work / f"{name}.log"
        self.name, self._log = name, open(self.log, "w")
        self.proc = Popen(
            command, stdout=PIPE, stdin=PIPE, stderr=self._log, text=True, env=env, cwd=ROOT, start_new_session=True
        )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def _read(self, events: queue.Queue) -> None:
        for line in self.proc.stdout:
            event = parse(line)
            if event is None:
                self._log.write(line)
                self._log.flush()
            else:
                events.put((self.name, event))
        events.put((self.name, {"kind": "ended", "code": self.proc.wait()}))

    def say(self, text: str) -> None:
        self.proc.stdin.write(text + "\n")
        self.proc.stdin.flush()

    def stop(self) -> None:
        """Ends the process and all that it started: vLLM's workers outlive a parent that is killed."""
        if self.proc.poll() is None:
            self.proc.terminate()
            with suppress(TimeoutExpired):
                self.proc.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self.proc.pid, signal.SIGKILL)
        self.proc.wait(10)


class Show:
    """The table and a note of what is going on; without a terminal, which a live table needs, one line per event."""

    def __init__(self, console: Console):
        self.console, self.rows, self.note = console, {}, ""
        self.began = time.monotonic()

    def phase(self, note: str) -> None:
        self.note = note
        self.line(note)

    def line(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(f"{time.monotonic() - self.began:4.0f} s  {text}", soft_wrap=True, highlight=False)

    def refitted(self, e: dict) -> None:
        self.note = "training"
        self.rows[e["version"]] = {**self.rows.get(e["version"], {}), **e}
        ms = [1000 * e["scalars"][k] for k in ("transfer_s", "outage_s")]
        self.line(
            f"step {e['step']}: loss {e['loss']:.2f}, version {e['version']}, {e['bytes'] / 1e6:.2f} MB moved, "
            f"transfer {ms[0]:.0f} ms, outage {ms[1]:.0f} ms, {'verified' if e['verified'] else 'NOT VERIFIED'}"
        )

    def table(self) -> Table:
        t = Table(
            title=f"Megatron-Core tp2 pp2 ep2 -> vLLM tp2 · {time.monotonic() - self.began:.0f} s · {self.note}",
            title_justify="left",
            pad_edge=False,
        )
        for name in (*NUMBERS, "verified", "5 6 7 8 continues"):
            justify = "right" if name in NUMBERS else "center" if name == "verified" else "left"
            t.add_column(name, justify=justify, no_wrap=True)
        for r in self.rows.values():
            s = r.get("scalars", {})
            moved = f"{r['bytes'] / 1e6:.2f} ({r['broadcast'] / 1e6:.2f})" if "bytes" in r else ""
            ms = {k: f"{1000 * s[k]:.0f} ms" if k in s else "" for k in ("transfer_s", "outage_s")}
            t.add_row(
                str(r.get("step", "")),
                f"{r['loss']:.2f}" if "loss" in r else "",
                str(r["version"]),
                moved,
                ms["transfer_s"],
                ms["outage_s"],
                "yes" if r.get("verified") else "",
                " ".join(map(str, r.get("tokens", [])[:6])),
            )
        return t


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer-python", default=str(ROOT / ".venvs/trainer/bin/python"))
    parser.add_argument("--engine-python", default=str(ROOT / ".venvs/engine/bin/python"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--work", default=str(ROOT / ".demo"), help="where the model, the export and the logs go")
    parser.add_argument("--svg", help="also write the final table as a picture")
    parser.add_argument("--plan", action="store_true", help="print what moves where")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    work = Path(args.work).absolute()
    shutil.rmtree(work, ignore_errors=True)
    write_model(work / "model")
    common = {
        **os.environ, "XFER_TOKEN": secrets.token_hex(16), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "XFER_CPU_RESIDENT": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    events: queue.Queue = queue.Queue()
    procs: list[Process] = []
    show = Show(console)
    truths: list[dict] = []

    def start(name: str, python: str, module: str, *options: object, **env: str) -> Process:
        command = [python, "-m", f"examples.demo.{module}", *map(str, options)]
        procs.append(Process(name, command, {**common, **env}, work, events))
        return procs[-1]

    show.phase("starting 4 trainer processes and a vLLM engine (imports take a while)")
    try:
        model, export = work / "model", work / "export"
        engine = start("engine", args.engine_python, "engine", "--model", model, "--rendezvous", rendezvous)
        job = dict(WORLD_SIZE=str(TRAINERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        for rank in range(TRAINERS):
            start(
                f"trainer{rank}", args.trainer_python, "trainer",
                "--model", model, "--export", export, "--rendezvous", rendezvous, "--steps", args.steps,
                RANK=str(rank), LOCAL_RANK=str(rank), **job,
            )  # fmt: skip
        with Live(console=console, refresh_per_second=4, get_renderable=show.table):
            exported, done = 0, False
            while not done:
                name, event = events.get(timeout=600)
                kind = event["kind"]
                if kind == "built" and event["rank"] == 0:
                    show.phase("the trainers have built their model")
                elif kind == "ready":
                    show.phase("the engine is ready")
                elif kind == "connected" and event["plan"]:
                    show.phase("connected: training begins")
                    if args.plan:
                        console.print(event["plan"])
                elif kind == "refit":
                    show.refitted(event)
                elif kind == "tokens":
                    row = show.rows.setdefault(event["version"], {"version": event["version"]})
                    row["tokens"] = event["outputs"][0][0]
                elif kind == "exported":
                    exported += 1
                    if exported == TRAINERS:
                        show.phase("asking the live engine for its bytes")
                        engine.say("finish")
                elif kind == "truth":
                    truths.append(event)
                    if len(truths) == 1:
                        show.phase("starting a fresh vLLM on Bridge's exported checkpoint")
                        start("fresh", args.engine_python, "engine", "--model", export, "--check")
                    else:
                        done = True
                        show.phase("done")
                elif kind == "ended" and event["code"] != 0:
                    raise SystemExit(f"{name} ended with code {event['code']}:\n" + tail(work / f"{name}.log"))
    finally:
        for p in procs:
            p.stop()
    if not console.is_terminal:
        console.print()  # there the table ends without a line break
    if args.svg:
        picture = Console(record=True, width=108, file=open(os.devnull, "w"))
        picture.print(show.table())
        picture.save_svg(args.svg, title="scripts/demo.sh")
    live, fresh = truths
    names = live["checksums"].keys() | fresh["checksums"].keys()
    wrong = sorted(k for k in names if live["checksums"].get(k) != fresh["checksums"].get(k))
    verified = all(r.get("verified") for r in show.rows.values() if "step" in r)
    same = live["outputs"] == fresh["outputs"]
    refits = [r["scalars"] for r in show.rows.values() if "scalars" in r]
    middle = {p: 1000 * sorted(r.get(f"{p}_s", 0.0) for r in refits)[len(refits) // 2] for p in PHASES}
    console.print(
        "milliseconds by phase, median of all refits: "
        + ", ".join(f"{p.replace('_', ' ')} {t:.1f}" for p, t in middle.items())
    )
    console.print(f"{args.steps} refits, every one verified: {'yes' if verified else 'NO'}")
    console.print(
        f"live engine against a fresh vLLM of the exported checkpoint: {len(live['checksums']) - len(wrong)} of {len(fresh['checksums'])} "
        f"parameter digests equal, tokens and logprobs {'equal' if same else 'DIFFERENT'}"
    )
    for k in wrong[:10]:
        console.print(f"  differs: {k}")
    console.print(f"{time.monotonic() - show.began:.0f} s; logs in {work}")
    return 0 if verified and same and not wrong else 1


def tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text().splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
