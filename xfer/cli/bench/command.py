"""`xfer bench`: arguments, table and JSON. run.py measures."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xfer.cli.plan import REFUSED, WRONG, say, write_text, wrong_files

if TYPE_CHECKING:
    from rich.console import Console

    from xfer.cli.bench.run import Job, RouteResult

WIDTH = 100
"""Columns that the table needs."""
HELP = "\n\n".join([
    "Time refits of your model between processes of this host, on its GPUs or without, beside their floor.",
    "TRAINER and ENGINE are described as for [bold]xfer plan[/bold], and their layouts are read in the same way, by Megatron-Bridge's and "
    "vLLM's own code. The processes then hold storages of those layouts with made-up bytes, and no framework: sessions, routes, checksums "
    "and commits are the real ones, but no engine pauses requests and nothing is quantized or computed.",
    '[bold]Example:[/bold] xfer bench --trainer "qwen3-4b world=2 tp=2" --engine "tp=2" --json bench.json',
    "[bold]Routes:[/bold] pull (workers read the trainers' memory), nccl or gloo (sent and received), packed (whole tensors). Without "
    "--route, all that the device can.",
    "[bold]Floor:[/bold] of pull, raw copies of as many bytes between the same devices; of nccl and gloo, torch's send and receive "
    "between the same pairs. After the first and the last refit every element of every worker is compared.",
    "Exit code 2: the description or an option has mistakes. 1: refused, a route failed, or an element was wrong.",
])  # fmt: skip


def bench_refits(
    trainer: Annotated[str, typer.Option(help='"CONFIG world=N tp=… pp=… ep=… etp=…"')],
    engine: Annotated[str, typer.Option(help='"tp=… replicas=N"')] = "tp=1",
    route: Annotated[list[str] | None, typer.Option(help="pull, nccl, gloo or packed; may come again")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where torch has a GPU")] = None,
    repeats: Annotated[int, typer.Option(help="timed refits, after two that are not", min=1, max=10_000)] = 10,
    deadline: Annotated[float, typer.Option(help="seconds to connect, and for each refit")] = 300.0,
    json_: Annotated[
        str | None, typer.Option("--json", help="write all of it as data; - for standard output, and no table")
    ] = None,
    trainer_python: Annotated[str | None, typer.Option(help="Python with Megatron-Bridge; default: this one")] = None,
    engine_python: Annotated[str | None, typer.Option(help="Python with vLLM; default: this one")] = None,
    cache: Annotated[
        str | None,
        typer.Option(help='folder of layouts traced before; "" for none; default: in $XFER_CACHE or ~/.cache/xfer'),
    ] = None,
) -> None:
    """Runs `xfer bench`; HELP describes it."""
    import torch
    from rich.console import Console

    from xfer.arguments import wrong_seconds
    from xfer.cli.bench.run import ROUTES, bench
    from xfer.cli.describe import describe
    from xfer.errors import XferError

    logging.getLogger("xfer").setLevel(logging.WARNING)  # controllers are in this process, and log each refit
    out, err = Console(), Console(stderr=True)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus else "cpu")
    bad = wrong_files(json_) + wrong_seconds("--deadline", deadline)
    if device not in ROUTES:
        bad.append(f"--device {device}: cuda or cpu")
    elif device == "cuda" and not gpus:
        bad.append("--device cuda: torch sees no GPU")
    can = ROUTES.get(device, ())
    bad += [f"--route {r}: on this device {', '.join(can)}" for r in route or () if can and r not in can]
    try:
        told = describe(trainer, engine)
    except XferError as e:
        bad = [*e.violations, *bad]
    if bad:
        say(err, str(XferError("this cannot be measured as described", bad)))
        raise typer.Exit(WRONG)
    try:
        job = _traced(told, {"trainer": trainer_python, "engine": engine_python}, cache, err)
        devices = [f"cuda:{i % gpus}" if device == "cuda" else "cpu" for i in range(job.world)]
        results = [bench(job, r, devices, repeats, deadline, lambda text: say(err, text)) for r in route or can]
    except XferError as e:
        say(err, f"refused: {type(e).__name__}: {e}")
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    title = f"{told.trainer.config.title}: {told.trainer} -> {job.replicas} x {told.engine}"
    if json_ != "-":
        show(title, job, devices, results, out)
    if json_ is not None:
        data = {
            "title": title,
            "repeats": repeats,
            "devices": devices,
            **_machine(),
            "routes": [asdict(r) for r in results],
        }
        write_text(json_, json.dumps({"bench": data}, indent=1), out, err)
    if any(r.error or r.wrong for r in results):
        raise typer.Exit(REFUSED)


def _traced(told: Any, pythons: dict[str, str | None], cache: str | None, err: Console) -> Job:
    from xfer.cli.bench.run import Job
    from xfer.cli.layouts.processes import Tracer, cache_folder
    from xfer.errors import XferError

    say(err, "layouts: both frameworks read them, which takes seconds to minutes the first time")
    tracer = Tracer(pythons, cache=cache_folder() if cache is None else Path(cache) if cache else None)
    try:
        tracer.look()
    except XferError as e:
        say(err, str(e))
        raise typer.Exit(WRONG) from None
    of = told.engine
    return Job(*tracer.trace(told.trainer, of), of.replicas, of.drop, of.narrow)


def _machine() -> dict[str, Any]:
    """What a reader of the figures needs to know of this host. No name or address of it."""
    import torch

    import xfer
    from xfer.cli.doctor.look import look

    seen = look()
    with open("/proc/cpuinfo") as f:
        cpu = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), platform.machine())
    return {
        "versions": {"xfer": xfer.__version__, "python": platform.python_version(), "torch": torch.__version__, **seen.versions},
        "hardware": {"cpu": cpu, "cpus": os.cpu_count(), "gpus": [g.name for g in seen.gpus], "peers": [g.peers for g in seen.gpus]},
        "settings": dict(seen.settings),
    }  # fmt: skip


def show(title: str, job: Job, devices: Sequence[str], results: Sequence[RouteResult], console: Console) -> None:
    """Prints the table of medians, in milliseconds."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from xfer.plan.explain import size

    say(console, title, "bold")
    say(console, f"trainers on {', '.join(devices[: job.trainers])}; workers on {', '.join(devices[job.trainers :])}")
    table = Table(title="medians, ms", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    columns = ("route", "bytes", "floor", "refit", "/ floor", "GB/s", "verified", "call", "first", "bits")
    for name in columns:
        table.add_column(name, justify="left" if name in ("route", "bits") else "right", no_wrap=True)

    def ms(values: Sequence[float]) -> str:
        return f"{1e3 * statistics.median(values):.2f}" if values else "-"

    for r in results:
        if r.error:
            table.add_row(r.route, *["-"] * (len(columns) - 2), "failed")
            continue
        ratio = statistics.median(r.transfer_s) / statistics.median(r.floor_s) if r.floor_s else 0.0
        cells = (
            r.route, size(r.bytes), ms(r.floor_s), ms(r.transfer_s), f"{ratio:.2f}" if ratio else "-", f"{r.gb_per_s:.3g}",
            ms(r.verified_s), ms(r.call_s), ms([r.first_s]), "all equal" if not r.wrong else f"{r.wrong:,} wrong",
        )  # fmt: skip
        table.add_row(*(Text(c) for c in cells))
    Console(file=console.file, width=max(console.width, WIDTH)).print(table)
    for r in results:
        for text in (r.error, r.floor_error and f"no floor: {r.floor_error}", *(f"wrong: {x}" for x in r.examples)):
            if text:
                say(console, f"{r.route}: {text}", "red")
        carried = r.carried or {}
        if carried and r.route != "packed" and {r.route} != {{"peer": "pull"}.get(c, c) for c in carried}:
            how = ", ".join(f"{size(n)} by {name}" for name, n in carried.items())
            why = [line.strip() for line in r.explained.splitlines() if "not pulled" in line]
            say(console, "\n  ".join((f"{r.route}: carried {how}", *why[:4])))
