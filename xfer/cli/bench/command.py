"""`xfer bench`: arguments, table and JSON. run.py measures."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xfer.cli import output
from xfer.cli.plan import both, traced

if TYPE_CHECKING:
    from xfer.cli.bench.run import Job, Place, RouteResult

WIDTH = 100
"""Columns that the table needs."""
HELP = "\n\n".join([
    "Time refits of your model between processes of one host or several, on GPUs or without, beside their floor.",
    "TRAINER and ENGINE are described as for [bold]xfer plan[/bold], and their layouts are read in the same way, by Megatron-Bridge's and "
    "vLLM's own code. The processes then hold storages of those layouts with made-up bytes, and no framework: sessions, routes, checksums "
    "and commits are the real ones, but no engine pauses requests and nothing is quantized or computed.",
    '[bold]Example:[/bold] xfer bench --trainer "qwen3-4b world=2 tp=2" --engine "tp=2" --json bench.json',
    "[bold]Several hosts:[/bold] the same command on each, at the same time, with the job's XFER_TOKEN in the environment:",
    'xfer bench --trainer "qwen3-4b world=8 tp=2" --engine "tp=4 replicas=2" --rendezvous tcp://10.0.0.1:29600 --size 2',
    "The one that has this address listens, prints the table and writes the JSON. It and those after it by name have the trainers, the "
    "rest the engines. A host that has a framework reads that side's layouts.",
    "[bold]Routes:[/bold] pull (workers read the trainers' memory), nccl or gloo (sent and received), packed (whole tensors). Without "
    "--route, all that the device can; pull only where a host has trainers and engines.",
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
    deadline: Annotated[float, typer.Option(help="seconds to connect, for each refit, and for hosts to come")] = 300.0,
    rendezvous: Annotated[str | None, typer.Option(help="tcp://HOST:PORT, of the first of several hosts")] = None,
    size: Annotated[int, typer.Option(help="with --rendezvous: hosts in all, one command for each", min=1)] = 2,
    trainer_hosts: Annotated[
        int | None,
        typer.Option(help="hosts that have trainers; SIZE: all have both sides; default: by numbers of ranks", min=1),
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="XFER_TOKEN", help="with --rendezvous: the job's token")] = None,
    json_: output.JsonFile = None,
    trainer_python: output.TrainerPython = None,
    engine_python: output.EnginePython = None,
    cache: output.Cache = None,
) -> None:
    """Runs `xfer bench`; HELP describes it."""
    import torch

    import xfer
    from xfer.arguments import wrong_seconds
    from xfer.cli.bench.hosts import Attendance, BenchHost, meeting
    from xfer.cli.bench.run import ROUTES, Job, bench, placed, start_rank
    from xfer.cli.children import Process
    from xfer.cli.describe import describe
    from xfer.cli.layouts.processes import Framework, look
    from xfer.plan.fabric import host_identity
    from xfer.rendezvous.channel import parse_address

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus else "cpu")
    bad = output.wrong_files(json_) + wrong_seconds("--deadline", deadline)
    if device not in ROUTES:
        bad.append(f"--device {device}: cuda or cpu")
    elif device == "cuda" and not gpus:
        bad.append("--device cuda: torch sees no GPU")
    can = list(ROUTES.get(device, ()))
    bad += [f"--route {r}: on this device {', '.join(can)}" for r in route or () if can and r not in can]
    if rendezvous is None:
        size, token = 1, secrets.token_hex(16)
    bad += _wrong_meeting(rendezvous, token, size, trainer_hosts)
    if size > 1 and trainer_hosts != size:
        can = [r for r in can if r != "pull"]
        if "pull" in (route or ()):
            bad.append(f"--route pull: --trainer-hosts {size} is needed, else no host has both sides")
    with output.told_errors(output.WRONG):
        told = describe(trainer, engine, more=bad)
    routes, secret = route or can, str(token)
    say = partial(output.say, err=True)
    found, missing = look({"trainer": trainer_python, "engine": engine_python})
    asked = {
        "--trainer": trainer, "--engine": engine, "--route": " ".join(routes), "--device": device, "--repeats": str(repeats),
        "--deadline": f"{deadline:g}", "--size": str(size), "--trainer-hosts": str(trainer_hosts or ""), "xfer": xfer.__version__,
    }  # fmt: skip
    frameworks = {side: dict(f.versions) for side, f in found.items()}
    mine = Attendance(host_identity(), asked, gpus, frameworks, _machine())

    def start(kind: str, name: str, task: Any) -> Process:
        return start_rank(secret, name, task) if kind == "rank" else found[kind].start(name, task)

    with (
        output.told_errors(json_=json_, refused=True),
        meeting(rendezvous, secret, size, deadline, BenchHost(mine, start), say) as hosts,
    ):
        say("layouts: both frameworks read them, which takes seconds to minutes the first time")
        readers = {
            side: Framework(versions, partial(h.start, side))
            for h in reversed(hosts) for side, versions in h.has.frameworks.items()
        }  # fmt: skip
        with output.counting() as count:
            sides = traced(told, both(readers, missing), cache, count)
        logging.getLogger("xfer").setLevel(logging.WARNING)  # controllers are in this process, and log each refit
        job = Job(*sides, told.engine.replicas, told.engine.drop, told.engine.narrow)
        places = placed(job, hosts, trainer_hosts, device)
        at = parse_address(rendezvous)[0] if rendezvous else "127.0.0.1"
        results = [bench(job, r, places, at, secret, repeats, deadline, say) for r in routes]
        title = f"{told.trainer.config.title}: {told.trainer} -> {job.replicas} x {told.engine}"
        if json_ != "-":
            show(title, job, places, results)
        on = {"host": [hosts.index(p.host) for p in places], "devices": [p.device for p in places]}
        data = {"title": title, "repeats": repeats, **on, "hosts": [h.has.machine for h in hosts], "routes": results}
        output.write_data(json_, "bench", data)
        if any(r.error or r.wrong for r in results):
            raise typer.Exit(output.REFUSED)


def _wrong_meeting(rendezvous: str | None, token: str | None, size: int, trainer_hosts: int | None) -> list[str]:
    """One line for each mistake in what concerns several hosts."""
    from xfer.errors import XferError
    from xfer.rendezvous.channel import check_token, parse_address

    bad = []
    if (trainer_hosts or 1) > size:
        bad.append(f"--trainer-hosts {trainer_hosts}: at most {size}, the number of hosts")
    if rendezvous is not None:
        try:
            parse_address(rendezvous)
            check_token(token or "")
        except XferError as e:
            bad.append(e.message if token else f"{e.message}: set XFER_TOKEN")
    return bad


def _machine() -> dict[str, Any]:
    """Facts of this host for readers of the figures, without its name and address."""
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


def show(title: str, job: Job, places: Sequence[Place], results: Sequence[RouteResult]) -> None:
    """Prints the table of medians, in milliseconds."""
    from rich.box import SIMPLE_HEAD

    from xfer.plan.explain import size

    output.say(title, "bold")
    for side, some in (("trainers", places[: job.trainers]), ("workers", places[job.trainers :])):
        on: dict[str, list[str]] = {}
        for p in some:
            on.setdefault(p.host.has.name, []).append(p.device)
        output.say(f"{side} on " + "; ".join(f"{host} {', '.join(devices)}" for host, devices in on.items()))

    def ms(values: Sequence[float]) -> str:
        return f"{1e3 * statistics.median(values):.2f}" if values else "-"

    columns = ("bytes", "floor", "refit", "/ floor", "GB/s", "verified", "call", "first")
    rows = []
    for r in results:
        ratio = statistics.median(r.transfer_s) / statistics.median(r.floor_s) if r.floor_s and r.transfer_s else 0.0
        cells = (
            size(r.bytes), ms(r.floor_s), ms(r.transfer_s), f"{ratio:.2f}" if ratio else "-", f"{r.gb_per_s:.3g}",
            ms(r.verified_s), ms(r.call_s), ms([r.first_s]), "all equal" if not r.wrong else f"{r.wrong:,} wrong",
        )  # fmt: skip
        rows.append((r.route, *(["-"] * len(columns) + ["failed"] if r.error else cells)))
    output.show_table(
        ("route", *map(output.right, columns), "bits"), rows, "medians, ms", WIDTH, box=SIMPLE_HEAD, pad_edge=False
    )
    for r in results:
        for text in (r.error, r.floor_error and f"no floor: {r.floor_error}", *(f"wrong: {x}" for x in r.examples)):
            if text:
                output.say(f"{r.route}: {text}", "red")
        carried = r.carried or {}
        if carried and r.route != "packed" and {r.route} != {{"peer": "pull"}.get(c, c) for c in carried}:
            how = ", ".join(f"{size(n)} by {name}" for name, n in carried.items())
            why = [line.strip() for line in r.explained.splitlines() if "not pulled" in line]
            output.say("\n  ".join((f"{r.route}: carried {how}", *why[:4])))
