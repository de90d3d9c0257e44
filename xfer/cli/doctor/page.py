"""Prints a checkup: two tables and the findings, on one page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from xfer.cli.doctor.addresses import gloo_addresses, interface_of, nccl_interfaces, uses_nccl
from xfer.cli.doctor.facts import Checkup, Finding, HostFacts, Level, NetworkPath
from xfer.cli.output import right, say, show_table
from xfer.errors import by_kind
from xfer.logs import counted

MOST_PATHS = 30
"""Rows of the table of paths. More of them are summed up; `--json` has all."""
SHOWN = 8
"""Processes that are named in a line."""
STYLES = {Level.PROBLEM: "bold red", Level.WARNING: "yellow", Level.OK: "green"}
SCHEMA = 1


def to_data(checkup: Checkup, findings: Sequence[Finding]) -> dict[str, object]:
    """The JSON of a checkup. `schema` rises when a field is renamed or removed."""
    numbers = {"problems": _number(findings, Level.PROBLEM), "warnings": _number(findings, Level.WARNING)}
    known = {"hosts": checkup.hosts, "paths": checkup.paths, "memory": checkup.memory}
    return {**numbers, "findings": findings, **known, "schema": SCHEMA}


def _number(findings: Sequence[Finding], level: Level) -> int:
    return sum(f.level is level for f in findings)


def show(checkup: Checkup, findings: Sequence[Finding]) -> None:
    _hosts(checkup.hosts)
    _paths(checkup.paths)
    for level in STYLES:
        _findings(level, [f for f in findings if f.level is level])
    style = next(style for level, style in STYLES.items() if level is Level.OK or _number(findings, level))
    processes = "1 process" if len(checkup.hosts) == 1 else f"{len(checkup.hosts)} processes"
    problems, warnings = (counted(_number(findings, v), v.value) for v in (Level.PROBLEM, Level.WARNING))
    say(f"{processes}: {problems}, {warnings}", style)


def _findings(level: Level, findings: Sequence[Finding]) -> None:
    """Findings of one level, those that say the same in one line."""
    same: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for f in findings:
        same[f.topic, f.advice, f.said].append(f.where)
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (topic, advice, said), wheres in same.items():
        more = f" and {len(wheres) - SHOWN} more" if len(wheres) > SHOWN else ""
        grouped[topic, advice].append(f"{', '.join(wheres[:SHOWN])}{more}: {said}")
    for (topic, advice), lines in grouped.items():
        for line in by_kind(lines):
            say(f"{topic}: {line}", STYLES[level], head=f"{level.value:8} ")
        if advice:
            say(f"{'':9}{advice}")


def _hosts(hosts: Sequence[HostFacts]) -> None:
    rows = []
    for f in hosts:
        gloo = ", ".join(f"{a} {i.name}" if (i := interface_of(f, a)) else a for a in gloo_addresses(f))
        nccl = ", ".join(f"{i.addresses[0]} {i.name}" for i in nccl_interfaces(f)) if uses_nccl(f) else "no GPU"
        rows.append(
            (
                f.label,
                str(f.pid),
                gloo,
                nccl,
                f.gpu_kinds or "none",
                *(f.versions.get(n, "-") for n in ("torch", "NCCL")),
            )
        )
    columns = ("host", right("pid"), "gloo listens at", "NCCL listens at", "GPUs", "torch", "NCCL")
    show_table(columns, rows)


def _paths(measured: Sequence[NetworkPath]) -> None:
    if not measured:
        return
    # The slowest paths, and those that do not work, first where not all are shown.
    few = len(measured) <= MOST_PATHS
    some = measured if few else sorted(measured, key=lambda m: (not m.error, m.gb_per_s))[:MOST_PATHS]
    rows = [
        (
            m.source, m.destination, m.address, ", ".join(m.users), f"{m.round_trip_s * 1e6:,.0f}" if m.round_trip_s else "-",
            str(m.path_mtu or "-"), f"{m.gb_per_s:.3f}" if m.nbytes else m.error or "-",
        )
        for m in some
    ]  # fmt: skip
    numbers = map(right, ("round trip, us", "path MTU", "GB/s by TCP"))
    show_table(("from", "to", "address", "of", *numbers), rows)
    if len(some) < len(measured):
        say(f"the slowest {len(some)} of {len(measured)} paths; --json has all")
