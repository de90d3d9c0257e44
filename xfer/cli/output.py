"""Helpers of several commands: options, literal text, tables, progress, JSON files, and exits with an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

WRONG, REFUSED = 2, 1
"""Exit codes: mistakes in the call; what was asked for is refused, or shows problems."""
JsonFile = Annotated[
    str | None, typer.Option("--json", help="write all of it as data; - for standard output, and nothing else there")
]
TrainerPython = Annotated[str | None, typer.Option(help="Python with Megatron-Bridge; default: this one")]
EnginePython = Annotated[str | None, typer.Option(help="Python with vLLM; default: this one")]
Cache = Annotated[
    str | None,
    typer.Option(help='folder of layouts traced before; "" for none; default: in $XFER_CACHE or ~/.cache/xfer'),
]


def plain(text: str) -> str:
    """Return `text` without control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def say(text: str, style: str = "", *, err: bool = False, head: str = "") -> None:
    """Print text literally: neither markup nor control characters in it have an effect. With `head`, the style applies to it alone."""
    shown = Text(head, style).append(plain(text), "default") if head else Text(plain(text), style)
    Console(stderr=err).print(shown, soft_wrap=True)


def right(name: str) -> Column:
    return Column(name, justify="right", overflow="fold")


def show_table(
    columns: Iterable[str | Column], rows: Iterable[Sequence[str]], title: str = "", least: int = 0, **more: Any
) -> None:
    """Prints literal cells, at least `least` columns of text wide. more: as for rich's Table."""
    columns = (c if isinstance(c, Column) else Column(c, overflow="fold") for c in columns)
    table = Table(*columns, title=Text(plain(title)) if title else None, title_justify="left", **more)
    for row in rows:
        table.add_row(*(Text(plain(c)) for c in row))
    Console(width=max(Console().width, least)).print(table)


@contextmanager
def counting() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows progress: (what, done, of). Without a terminal, it writes a log line from time to time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from xfer import logs

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    tasks: dict[str, TaskID] = {}

    def line() -> str:
        lines = (f"{t.description} {t.completed:.0f}/{t.total:.0f}" for t in bar.tasks)
        return ", ".join(lines) or "starting the frameworks"

    def count(what: str, done: int, of: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=of)
        bar.update(tasks[what], completed=done, total=of)

    err = Console(stderr=True)
    if not err.is_terminal:
        logs.show()
    with (
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
        nullcontext() if err.is_terminal else logs.while_waiting(line),
    ):
        yield count


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


def write_text(path: str, text: str) -> None:
    if path == "-":
        typer.echo(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as e:
        say(f"{path} cannot be written: {e.strerror}", err=True)
        raise typer.Exit(WRONG) from None


def write_data(path: str | None, kind: str, data: object, indent: int | None = 1) -> None:
    """Writes {kind: data} as JSON, if a path is given. data: dataclasses, or types that JSON has."""
    import msgspec

    if path is not None:
        write_text(path, json.dumps({kind: msgspec.to_builtins(data)}, indent=indent))


def refuse_options(bad: Sequence[str]) -> None:
    if bad:
        raise typer.BadParameter("; ".join(bad))


@contextmanager
def told_errors(code: int = REFUSED, json_: str | None = None, refused: bool = False) -> Iterator[None]:
    """Inside, an XferError is printed and ends the command. refused: print it as a refusal, and write it as JSON too."""
    from xfer.errors import XferError

    try:
        yield
    except XferError as e:
        name = type(e).__name__
        if refused:
            what = {"kind": name, "message": e.message, "violations": e.violations, "where": e.where}
            write_data(json_, "refused", what)
        say(f"refused: {name}: {e}" if refused else str(e), "red", err=True)
        raise typer.Exit(code) from None
