"""`xfer plan`: what a refit would move and how long it would take, without a GPU and without weights.

This module has the arguments and the tables. describe.py reads descriptions, layouts/ the layouts, plan_report.py computes the numbers,
and html.py draws the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column

from xfer.cli import output
from xfer.cli.examples import FOLDER, MODELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xfer.cli.describe import Described
    from xfer.cli.layouts.processes import Framework, TracedSide
    from xfer.cli.plan_report import Report

MOST_LINKS = 8
PREDICTED = (
    "All seconds are predicted. Those of traffic between hosts (NICs, rails, waves) were never compared with a measurement; inside one "
    "host of H200s two measured refits took 3 and 13 % longer than predicted."
)
HELP = "\n\n".join([
    "Plan a refit without a GPU and without weights: bytes, busiest links, predicted seconds, and what is refused.",
    "Layouts are read by the frameworks' own code, every different rank once: Megatron-Core's as Megatron-Bridge builds "
    "and exports it, vLLM's as its loader fills it. Both check their description before any rank is read. CONFIG is a Hugging Face "
    f"config.json, its folder, or one of {', '.join(MODELS)}; no checkpoint is needed, and none is read.",
    '[bold]Example:[/bold] xfer plan --trainer "qwen3-4b world=8 tp=2 pp=2" --engine "tp=4 replicas=2" --html plan.html',
    "[bold]Trainer:[/bold] CONFIG, world, tp, pp, vpp, cp, dp, ep, etp and order, or Megatron-Core's names of them, such as "
    "tensor_model_parallel_size; provider.NAME=VALUE for fields of Bridge's model provider (uneven stages, say).",
    "[bold]Engine:[/bold] CONFIG (default: the trainer's), tp, pp, dp, ep=true for expert parallelism, or vLLM's names of them, such "
    "as tensor_parallel_size; replicas; keep as xfer.serve() has it, drop and narrow as xfer.connect() has them, with commas; "
    "args.NAME=VALUE for further EngineArgs of vLLM.",
    f"[bold]Fabric:[/bold] a TOML or JSON file of hosts and links, as {escape(str(FOLDER / 'fabric.toml'))}. Without one: hosts of 8 GPUs, "
    "NVLink, a 400 Gb/s NIC per GPU. Trainers sit on the first GPUs, engines on the hosts after them, unless the file's \\[ranks] says "
    "otherwise.",
    f"[bold]All in one file:[/bold] xfer plan {escape(str(FOLDER / 'job.toml'))}, with "
    '\\[trainer] config = "…", world = 8, tp = 2; \\[engine] tp = 4, '
    'replicas = 2; and above them fabric = "fabric.toml", or the fabric\'s own tables as \\[\\[fabric.host]]. Paths count '
    "from the file; options replace its parts.",
    "Exit code 2: the description or an option has mistakes, and all of them were listed. 1: xfer or a framework refuses it.",
])  # fmt: skip


def plan_refit(
    job: Annotated[str | None, typer.Argument(help="a file with all three instead, TOML or JSON")] = None,
    trainer: Annotated[str | None, typer.Option(help='"CONFIG world=N tp=… pp=… ep=… etp=…"')] = None,
    engine: Annotated[str | None, typer.Option(help='"CONFIG tp=… replicas=N"')] = None,
    fabric: Annotated[str | None, typer.Option(help="TOML or JSON of hosts, links and, if wanted, places")] = None,
    html: Annotated[str | None, typer.Option(help="write a page to look at: timeline, links, traffic")] = None,
    json_: output.JsonFile = None,
    bucket_mib: Annotated[
        int, typer.Option(help="largest message; sessions use 240 on GPUs, 64 on CPUs", min=1, max=1 << 40)
    ] = 240,
    relay: Annotated[
        bool, typer.Option("--relay", help="replicas and workers of a host hand bytes on, as with Direct(relay=True)")
    ] = False,
    trainer_python: output.TrainerPython = None,
    engine_python: output.EnginePython = None,
    jobs: Annotated[int, typer.Option(help="processes that trace ranks, per side", min=1, max=64)] = 1,
    cache: output.Cache = None,
) -> None:
    """Runs `xfer plan`; HELP describes it."""
    from xfer.cli.describe import describe
    from xfer.cli.layouts.processes import look
    from xfer.cli.plan_report import Header, make_report
    from xfer.plan.planner import plan_replicas
    from xfer.transport.p2p import WAVE_BYTES

    bucket = bucket_mib << 20
    with output.told_errors(output.WRONG):
        told = describe(trainer, engine, fabric, job, output.wrong_files(html, json_))
    with output.told_errors(json_=json_, refused=True):
        with output.counting() as count:
            frameworks = both(*look({"trainer": trainer_python, "engine": engine_python}))
            sources, destinations = traced(told, frameworks, cache, count, jobs)
            plans = plan_replicas(
                sources.catalog,
                sources.ranks,
                destinations.ranks,
                told.site,
                bucket_bytes=bucket,
                wave_bytes=max(WAVE_BYTES["cuda"], bucket),  # as sessions on GPUs have it
                drop=told.engine.drop,
                narrow=told.engine.narrow,
                relay=relay,
                told=lambda done: count("replicas planned", done, told.engine.replicas),
            )
        header = Header(
            told.trainer.config.title,
            str(told.trainer),
            str(told.engine),
            told.fabric,
            (
                f"Layouts traced by the frameworks' own code: {sources.classes} different trainer ranks, {destinations.classes} "
                f"different workers. Messages of at most {bucket_mib} MiB.",
                PREDICTED,
                *["Replicas on the same hosts, and workers of a host, hand bytes on to each other."] * relay,
                *_quantized(sources),
            ),
        )
        report = make_report(header, sources.catalog, plans, told.site, relay=relay)
    if json_ != "-":
        show(report)
    output.write_data(json_, "plan", report)
    if html is not None:
        from xfer.cli.html import page

        output.write_text(html, page(report))
        if json_ != "-":
            output.say(f"page: {html}")


def both(found: Mapping[str, Framework], missing: Mapping[str, str]) -> Mapping[str, Framework]:
    """`found`, if it has both sides. Else the command ends with the lines of `missing` for the other side."""
    from xfer.errors import XferError

    with output.told_errors(output.WRONG):
        if bad := [line for side, line in missing.items() if side not in found]:
            raise XferError("layouts are read by the frameworks' own code, and it was not found", bad)
    return found


def traced(
    told: Described,
    frameworks: Mapping[str, Framework],
    cache: str | None,
    count: Callable[[str, int, int], None],
    jobs: int = 1,
) -> tuple[TracedSide, TracedSide]:
    """Layouts of both sides."""
    from xfer.cli.layouts.processes import Tracer, cache_folder

    def progress(side: str, done: int, of: int) -> None:
        count(f"{side}: different ranks traced", done, of)

    folder = cache_folder() if cache is None else Path(cache) if cache else None
    return Tracer(frameworks, jobs=jobs, cache=folder, progress=progress).trace(told.trainer, told.engine)


def _quantized(sources: TracedSide) -> list[str]:
    """A line about what trainers quantize, if engines serve block FP8."""
    from xfer.direct.quantized import ROOT
    from xfer.plan.explain import size

    matrices = {s.of for s in sources.catalog.specs if s.of}
    most = max(root.nbytes for i in sources.ranks for root in i.roots if root.name == ROOT) if matrices else 0
    return [
        f"Engines serve {len(matrices):,} matrices in block FP8. Trainers quantize them before they are ready, each into at most "
        f"{size(most)} of scratch; that time is not predicted."
    ] * bool(matrices)


def show(r: Report) -> None:
    """Prints the tables of a report."""
    from xfer.cli.html import seconds
    from xfer.cli.plan_report import byte_rows
    from xfer.plan.explain import size

    h = r.header
    output.say(h.model, "bold")
    output.say(f"{r.tensors:,} tensors, {size(r.model_bytes)}")
    output.say(
        f"{r.trainers} trainers ({h.trainer}) -> {r.replicas} x {r.workers} engine workers ({h.engine}), {r.hosts} hosts",
    )
    output.say(f"fabric: {h.fabric}")
    for note in h.notes:
        output.say(note)

    def table(title: str, rows: list[tuple[str, str, str]]) -> None:
        columns = Column(overflow="fold"), Column(justify="right", no_wrap=True), Column(overflow="fold", style="dim")
        output.say("")
        output.show_table(columns, rows, title, show_header=False, title_style="bold")

    table("bytes", byte_rows(r))
    said = {
        "control": "ready to first byte, last byte to decision",
        "pull": "inside NVLink islands, beside pack, wire and unpack",
        "pack": "that no wire time hides",
        "unpack": "that no wire time hides",
        "relay": "until every replica has what others take for it",
        "fill": "constants",
    }
    table("predicted seconds", [
        *((name, seconds(s), said.get(name, "")) for name, s in r.phases),
        ("transfer", seconds(r.transfer_s), "all ready to decided; pauses and resumes of engines come on top"),
        ("floor", seconds(r.floor_s), "the busiest link alone: no schedule of these bytes is faster"),
    ])  # fmt: skip
    table("busiest links", [(b.name, seconds(b.seconds), size(b.nbytes)) for b in r.busiest[:MOST_LINKS]])
