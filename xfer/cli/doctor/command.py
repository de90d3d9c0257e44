"""`xfer doctor`: its arguments."""

from __future__ import annotations

from typing import Annotated

import typer

from xfer.cli import output

HELP = "\n\n".join([
    "Check this machine, and the network between several, before a job. Prints one page; exit code 1 if there are problems.",
    "[bold]One machine:[/bold] xfer doctor. Interfaces and what names resolve to, RDMA ports, limits, /dev/shm, GPUs and which of them "
    "read each other's memory, versions.",
    "[bold]Several:[/bold] the same command on each, at the same time, with the job's XFER_TOKEN in the environment:",
    "xfer doctor --rendezvous tcp://10.0.0.1:29600 --size 2",
    "The one that has this address listens. Then also: versions and variables that must agree, reachability both ways, round trips, "
    "clocks, a rate by TCP for every pair, and on one machine whether processes read each other's memory. All print the same page.",
    "Run it as the job runs: in its container, with its environment and its Python, trainers' and engines' side.",
])  # fmt: skip


def check_hosts(
    rendezvous: Annotated[
        str | None, typer.Option(help="tcp://HOST:PORT, as the job's; no session may be using it now")
    ] = None,
    size: Annotated[int, typer.Option(help="with --rendezvous: processes in all, one for each machine", min=1)] = 2,
    token: Annotated[str | None, typer.Option(envvar="XFER_TOKEN", help="the job's token")] = None,
    listen: Annotated[
        bool,
        typer.Option("--listen", help="listen here though HOST is not an address of this machine (NAT, a service)"),
    ] = False,
    timeout: Annotated[float, typer.Option(help="seconds that all processes have to come")] = 60.0,
    seconds: Annotated[
        float, typer.Option(help="seconds for which each rate is measured; 0: none", min=0, max=30)
    ] = 0.5,
    json_: output.JsonFile = None,
) -> None:
    """Runs `xfer doctor`; HELP describes it."""
    from xfer.arguments import wrong_seconds
    from xfer.cli.doctor.checks import examine
    from xfer.cli.doctor.facts import Checkup, Level, problem
    from xfer.cli.doctor.look import look
    from xfer.cli.doctor.meeting import Terms, attend
    from xfer.cli.doctor.page import show, to_data
    from xfer.errors import XferError
    from xfer.rendezvous.channel import check_token, parse_address

    bad = wrong_seconds("--timeout", timeout) + output.wrong_files(json_)
    if rendezvous is None and listen:
        bad.append("--listen goes with --rendezvous")
    try:
        if rendezvous is not None:
            parse_address(rendezvous)
            check_token(token or "")
    except XferError as e:
        bad.append(e.message if token else f"{e.message}: set XFER_TOKEN")
    output.refuse_options(bad)
    if rendezvous is None:
        checkup = Checkup((look(),))
    else:
        facts, terms = (
            look(parse_address(rendezvous)[0]),
            Terms(rendezvous, token or "", size, timeout, seconds, listen),
        )
        output.say(f"waiting for {size} processes at {rendezvous}, {timeout:g} s at most", err=True)
        try:
            checkup = attend(terms, facts)
        except XferError as e:
            checkup = Checkup((facts,), failures=(problem("meeting", rendezvous, e.message, "; ".join(e.violations)),))
    findings = examine(checkup)
    if json_ != "-":
        show(checkup, findings)
    output.write_data(json_, "doctor", to_data(checkup, findings))
    if any(f.level is Level.PROBLEM for f in findings):
        raise typer.Exit(output.REFUSED)
