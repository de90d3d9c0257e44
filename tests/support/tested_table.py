"""The table of tested versions in docs/status.md. `python -m tests.support.tested_table` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from xfer.tested import MATRIX, Cell

PAGE = Path(__file__).resolve().parents[2] / "docs/status.md"
HEAD = ("on", "trainers", "engines", "one command", "what it runs")
PLACE = re.compile(r"(?s)(?<=<!-- tested versions -->\n)(.*?)(?=\n<!-- end of tested versions -->)")


def table() -> str:
    rows = (HEAD, ("---",) * len(HEAD), *map(row, MATRIX))
    return "\n".join("| " + " | ".join(r) + " |" for r in rows)


def row(cell: Cell) -> tuple[str, ...]:
    trainer, engine = cell.trainer, cell.engine
    if trainer is None:
        trained = "plain modules"
    else:
        more = f", TransformerEngine {trainer.transformer_engine}" if trainer.transformer_engine else ""
        trained = f"{trainer}{more}, Python {trainer.python}, torch {trainer.torch}"
    return (
        cell.where,
        trained,
        f"{engine}, Python {engine.python}, torch {engine.torch}",
        f"`{cell.command}`",
        cell.result,
    )


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: table(), PAGE.read_text()))
