"""`xfer plan`: what a refit would move and how long it would take, without a GPU and without weights.

This module has the arguments, the progress bar and the tables. describe.py reads descriptions, layouts/ the layouts,
plan_report.py computes the numbers, and html.py draws the page.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from xfer.cli.examples import FOLDER, MODELS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

    from xfer.cli.describe import Described
    from xfer.cli.layouts.processes import TracedSide
    from xfer.cli.plan_report import Report

WRONG, REFUSED = 2, 1
"""Exit codes: mistakes in the description or an option; a refit that is refused."""
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
    json_: Annotated[
        str | None, typer.Option("--json", help="write the same as data; - for standard output, and no tables")
    ] = None,
    bucket_mib: Annotated[
        int, typer.Option(help="largest message; sessions use 240 on GPUs, 64 on CPUs", min=1, max=1 << 40)
    ] = 240,
    relay: Annotated[
        bool, typer.Option("--relay", help="replicas on the same hosts hand bytes on, as with Direct(relay=True)")
    ] = False,
    trainer_python: Annotated[str | None, typer.Option(help="Python with Megatron-Bridge; default: this one")] = None,
    engine_python: Annotated[str | None, typer.Option(help="Python with vLLM; default: this one")] = None,
    jobs: Annotated[int, typer.Option(help="processes that trace ranks, per side", min=1, max=64)] = 1,
    cache: Annotated[
        str | None,
        typer.Option(help='folder of layouts traced before; "" for none; default: in $XFER_CACHE or ~/.cache/xfer'),
    ] = None,
) -> None:
    """Runs `xfer plan`; HELP describes it."""
    from rich.console import Console

    from xfer.cli.describe import describe
    from xfer.errors import XferError

    out, err = Console(), Console(stderr=True)
    bad = wrong_files(html, json_)
    try:
        told = describe(trainer, engine, fabric, job)
    except XferError as e:
        bad = [*e.violations, *bad]
    if bad:
        say(err, str(XferError("this cannot be planned as described", bad)))
        raise typer.Exit(WRONG)
    pythons = {"trainer": trainer_python, "engine": engine_python}
    try:
        report = _plan(told, pythons, jobs, cache, bucket_mib << 20, relay, err)
    except XferError as e:
        if json_ is not None:
            refused = {"kind": type(e).__name__, "message": e.message, "violations": e.violations, "where": e.where}
            write_text(json_, json.dumps({"refused": refused}, indent=1), out, err)
        say(err, f"refused: {type(e).__name__}: {e}")
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if json_ != "-":
        show(report, out)
    if json_ is not None:
        write_text(json_, json.dumps({"plan": report.to_data()}, indent=1), out, err)
    if html is not None:
        from xfer.cli.html import page

        write_text(html, page(report), out, err)
        if json_ != "-":
            say(out, f"page: {html}")


def _plan(
    told: Described,
    pythons: dict[str, str | None],
    jobs: int,
    cache: str | None,
    bucket: int,
    relay: bool,
    err: Console,
) -> Report:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from xfer import logs
    from xfer.cli.layouts.processes import Tracer, cache_folder
    from xfer.cli.plan_report import Header, make_plans, make_report
    from xfer.errors import XferError
    from xfer.transport.p2p import WAVE_BYTES

    folder = cache_folder() if cache is None else Path(cache) if cache else None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=err, transient=True, disable=not err.is_terminal))
        lines: dict[str, TaskID] = {}
        if not err.is_terminal:  # a line from time to time in a bar's place
            logs.show()
            stack.enter_context(
                logs.while_waiting(lambda: ", ".join(map(_line, bar.tasks)) or "starting the frameworks")
            )

        def count(text: str, done: int, of: int) -> None:
            if text not in lines:
                lines[text] = bar.add_task(text, total=of)
            bar.update(lines[text], completed=done, total=of)

        def progress(side: str, done: int, of: int) -> None:
            count(f"{side}: different ranks traced", done, of)

        tracer = Tracer(pythons, jobs=jobs, cache=folder, progress=progress)
        try:
            tracer.look()
        except XferError as e:
            say(err, str(e))
            raise typer.Exit(WRONG) from None
        sources, destinations = tracer.trace(told.trainer, told.engine)
        plans = make_plans(
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
            f"different workers. Messages of at most {bucket >> 20} MiB.",
            PREDICTED,
            *["Replicas on the same hosts hand bytes on to each other."] * relay,
            *_quantized(sources),
        ),
    )
    return make_report(header, sources.catalog, plans, told.site, relay=relay)


def _line(task: Task) -> str:
    return f"{task.description} {task.completed:.0f}/{task.total:.0f}"


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


def show(r: Report, console: Console) -> None:
    """Prints the tables of a report."""
    from rich.table import Table
    from rich.text import Text

    from xfer.cli.html import seconds
    from xfer.plan.explain import size

    h = r.header
    say(console, h.model, "bold")
    say(console, f"{r.tensors:,} tensors, {size(r.model_bytes)}")
    say(
        console,
        f"{r.trainers} trainers ({h.trainer}) -> {r.replicas} x {r.workers} engine workers ({h.engine}), {r.hosts} hosts",
    )
    say(console, f"fabric: {h.fabric}")
    for note in h.notes:
        say(console, note)

    def table(title: str, rows: list[tuple[str, str, str]]) -> None:
        t = Table(title=title, title_justify="left", show_header=False, title_style="bold")
        t.add_column(overflow="fold")
        t.add_column(justify="right", no_wrap=True)
        t.add_column(overflow="fold", style="dim")
        for row in rows:
            t.add_row(*(Text(plain(c)) for c in row))
        console.print()
        console.print(t)

    def times(part: int) -> str:
        return f"{part / r.nbytes:.1f}x" if r.nbytes else "-"

    c, low, high = r.byte_classes, min(r.bytes_per_replica), max(r.bytes_per_replica)
    table("bytes", [
        ("a replica", size(high) if low == high else f"{size(low)} to {size(high)}", ""),
        ("all replicas", size(r.nbytes), f"{size(r.between_hosts)} between hosts, {size(r.pulled_bytes)} inside NVLink islands"),
        ("a full broadcast", size(r.broadcast_bytes), f"{times(r.broadcast_bytes)} of that"),
        ("most sent by a rank", size(r.most_out.nbytes), f"{r.most_out.rank}; mean {size(round(r.most_out.mean))}"),
        ("most received by a rank", size(r.most_in.nbytes), f"{r.most_in.rank}; mean {size(round(r.most_in.mean))}"),
        ("straight into place", size(c["written"]), f"{r.pieces_direct:,} pieces"),
        ("staged, then computed", size(c["staged"]), f"{r.pieces_staged:,} pieces through {size(c['scratch'])} of scratch"),
        ("filled", size(c["filled"]), f"{r.fills:,} constant regions"),
        ("kept", size(c["kept"]), "; ".join(map(str, r.kept))),
        ("messages", f"{r.messages:,}", f"in {r.waves:,} waves, the largest {size(r.largest_message)}"),
        *(("cast", "", x) for x in r.casts),
        *([("dropped, as asked", f"{len(r.dropped):,}", ", ".join(r.dropped[:4]))] if r.dropped else []),
    ])  # fmt: skip
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


def plain(text: str) -> str:
    """`text` without control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def say(console: Console, text: str, style: str = "") -> None:
    """Prints text literally: neither markup nor control characters in it have an effect."""
    from rich.text import Text

    console.print(Text(plain(text), style=style), soft_wrap=True)


def wrong_files(*paths: str | None) -> list[str]:
    """One line for each path at which no file can be written; - is standard output."""
    return [f"{p} cannot be written: {why}" for p in paths if p not in (None, "-") and (why := _closed(Path(p)))]


def _closed(path: Path) -> str:
    """Why no file can be written there; "" if one can. Asked before a plan is made, which may take minutes."""
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "permission denied"
    except OSError as e:
        return str(e.strerror)


def write_text(path: str, text: str, out: Console, err: Console) -> None:
    if path == "-":
        typer.echo(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as e:
        say(err, f"{path} cannot be written: {e.strerror}")
        raise typer.Exit(WRONG) from None
