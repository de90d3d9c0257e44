"""docs/architectures.md: tables whose rows are made by the tests that prove them. A test makes its family's row and `check`s that it
stands in the page; with XFER_WRITE_DOCS=1 it puts it there instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.support.families import FAMILIES, Family, text

PAGE = Path(__file__).resolve().parents[2] / "docs/architectures.md"
Row = tuple[str, ...]
TRAINERS: Row = ("family", "Bridge class", "layouts", "direct", "staged", "left out", "Bridge from")
HEADS: dict[str, Row] = {
    "engines": ("family", "vLLM class", "layouts", "direct", "staged", "filled", "kept"),
    "trainers": TRAINERS,
    "older trainers": TRAINERS,
}
NEWEST, OLDER = ("0.19.2", "0.6.2"), ("0.16.1", "0.3.1")
"""Megatron-Core and Megatron-Bridge of the two tables of trainers. The second has only the rows that differ."""


def check(table: str, row: Row, same: bool = False) -> None:
    """AssertionError, saying how to make the page anew, when it has another row for this family. same: it needs none there."""
    before, inside, after = re.split(f"(?s)(?<=<!-- {table} -->\n)(.*?)(?=\n<!-- end of {table} -->)", PAGE.read_text())
    lines = [tuple(c.strip() for c in line.strip().strip("|").split("|")) for line in inside.splitlines()[2:]]
    rows = {r[0]: r for r in lines}
    if os.environ.get("XFER_WRITE_DOCS") == "1":
        rows |= {row[0]: None if same else row}
        kept = [rows[f.name] for f in FAMILIES if rows.get(f.name)]
        made = ["| " + " | ".join(r) + " |" for r in (HEADS[table], ("---",) * len(HEADS[table]), *kept)]
        PAGE.write_text(before + "\n".join(made) + after)
    else:
        found = rows.get(row[0])
        assert same or found == row, (
            f"docs/architectures.md says {found}; it is {row}. scripts/architectures.sh writes it anew"
        )


def check_trainers(row: Row) -> None:
    """`check` in the table of the installed pair of Megatron-Core and Megatron-Bridge, if it has one."""
    installed = tuple(version(name) for name in ("megatron-core", "megatron-bridge"))
    if installed == NEWEST:
        check("trainers", row)
    elif installed == OLDER:
        line = "| " + " | ".join(row) + " |\n"
        check("older trainers", row, same=line in PAGE.read_text().partition("<!-- end of trainers -->")[0])


def engine_row(family: Family, model: str, layout, tensors) -> Row:
    """`layout`: EngineLayout of the last rank of the family's first layout."""
    from xfer.plan.inventory import SCRATCH

    live = [f for f in layout.traced.fragments if not f.root.startswith(SCRATCH)]
    names = {f.tensor for f in live}
    staged = sorted({n for r in layout.traced.recipes for n in r.sources})
    ops = sorted({short(op) for r in layout.traced.recipes for op in r.ops})
    casts = sorted({" to ".join((c.dtypes[0], c.dtypes[-1])) for c in layout.traced.casts})
    direct = f"{len(names)} tensors, {len(live)} boxes" + (f"; cast {', '.join(casts)}" if casts else "")
    kept = kinds({k.reason.split(":")[0] for k in layout.kept})
    made = f"{kinds(staged)}: {', '.join(ops)}" if staged else "-"
    layouts = ", ".join(map(text, family.engine))
    return family.name, model, layouts, direct, made, str(len(layout.traced.fills) or "-"), kept or "-"


def short(op: str) -> str:
    return op.removeprefix("aten.").split(".")[0].rstrip("_")


def kinds(names: Iterable[str]) -> str:
    """Last components of names, with numbers starred: what kind of tensors they are."""
    return ", ".join(sorted({re.sub(r"\d+", "*", n.rsplit(".", 1)[-1]) for n in names}))


def trainer_row(family: Family, bridge: str, world, layouts, left: Iterable[str]) -> Row:
    """`world`: of the family's first layout; `layouts`: one per class of its ranks."""
    boxes = sum(len(world.classes[c].table) for c in world.class_of)
    recipes = [r for layout in layouts for r in layout.traced.recipes]
    ops = sorted({short(op) for r in recipes for op in r.ops})
    direct = f"{len(world.catalog.specs)} tensors, {boxes} boxes on {len(world.class_of)} ranks"
    made = f"{', '.join(sorted({starred(r.target) for r in recipes}))}: {', '.join(ops)}" if recipes else "-"
    layouts, absent = ", ".join(map(text, family.trainer)), ", ".join(dict.fromkeys(map(starred, left)))
    return family.name, bridge, layouts, direct, made, absent or "-", family.since or "0.3"


def starred(name: str) -> str:
    return re.sub(r"\d+", "*", name)
