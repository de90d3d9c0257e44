"""How xfer is laid out, measured on its source text. Prints the table of what the layout is to be, with today's figures.

    python -m tests.support.house

Reads syntax trees only and imports nothing of xfer. tests/unit/test_architecture.py holds what must not get worse.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTROL = ("coordinator", "rendezvous", "participants")
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__version__", "errors", "logs", "ending", "sources", "tested"),
    ("background", "agreement", "pending", "turns", "faults"),
    ("mesh",),
    ("trace",),
    ("plan",),
    ("kernels",),
    ("transport",),
    ("timeline",),
    ("coordinator",),
    ("report", "observers"),
    ("rendezvous",),
    ("arguments",),
    ("participants",),
    ("direct", "packed"),
    ("routes",),
    ("layerwise",),
    ("engines", "trainers"),
    ("sglang",),
    ("dtensor", "dtensor_claims", "dtensor_exchange", "dtensor_routes", "api", "metrics"),
    ("integrations",),
    ("cli", "__init__", "__main__"),
)
"""Top-level modules and packages of xfer, lowest first. Each may import those before it, and itself. Two packages in one line may not
import each other; two modules may."""


@dataclass(frozen=True)
class Import:
    """`source` imports `target`, both full names of modules of xfer. `typing_only`: under `if TYPE_CHECKING`."""

    source: str
    target: str
    line: int
    typing_only: bool

    @property
    def packages(self) -> tuple[str, str]:
        return package_of(self.source), package_of(self.target)

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def package_of(module: str) -> str:
    """First part of a name below `xfer`."""
    return module.split(".")[1] if "." in module else "__init__"


def level(package: str) -> int:
    """Place of a package in `LAYERS`; -1 if it has none."""
    return next((i for i, names in enumerate(LAYERS) if package in names), -1)


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Full name -> path and syntax tree, of all modules of xfer."""
    found = {}
    for path in sorted((ROOT / "xfer").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path, ast.parse(path.read_text(), str(path))
    return found


def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Modules of xfer that an import statement loads."""
    if isinstance(node, ast.Import):
        named = [a.name for a in node.names]
    elif node.module and node.module.split(".")[0] == "xfer":
        named = [full if (full := f"{node.module}.{a.name}") in modules() else node.module for a in node.names]
    else:
        named = []
    return ["xfer.__version__" if name == "xfer" else name for name in named if name in modules()]


@cache
def imports() -> tuple[Import, ...]:
    """All imports between modules of xfer, also those inside functions."""
    found = []
    for name, (_, tree) in modules().items():
        nodes = list(ast.walk(tree))
        checked = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        typing_only = {id(x) for n in checked for s in n.body for x in ast.walk(s)}
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                some = dict.fromkeys(targets(node))
                found += [Import(name, target, node.lineno, id(node) in typing_only) for target in some]
    return tuple(found)


def against_the_flow() -> list[Import]:
    """Imports of a higher layer, or of another package of the same layer. Those for type checkers are left out."""
    return [
        i for i in imports()
        if not i.typing_only and (here := level(i.packages[0])) <= (there := level(i.packages[1]))
        and i.packages[0] != i.packages[1] and (here < there or (ROOT / "xfer" / i.packages[0]).is_dir())
    ]  # fmt: skip


def circles() -> list[list[str]]:
    """Sets of modules that import each other, directly or around."""
    reached: dict[str, set[str]] = {name: set() for name in modules()}
    for i in imports():
        if not i.typing_only and i.source != i.target:
            reached[i.source].add(i.target)
    for middle in reached:  # Warshall's closure
        for targets_of in reached.values():
            if middle in targets_of:
                targets_of |= reached.get(middle, set())
    circle_of = ({m for m in reached[n] if n in reached.get(m, ())} for n in reached if n in reached[n])
    return sorted(map(list, {tuple(sorted(c)) for c in circle_of}))


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(module, class) for all classes of xfer, those inside functions and classes too."""
    for name, (_, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield name, node


def repeated_names() -> dict[str, list[str]]:
    """Name -> the modules that define a class of it, for names with more than one. A leading underscore does not count."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, node in classes():
        places[node.name.lstrip("_")].append(module)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


@cache
def imported_names(module: str) -> dict[str, str]:
    """Name in a module -> full name in xfer, of all that it imports from xfer."""
    nodes = [n for n in ast.walk(modules()[module][1]) if isinstance(n, ast.ImportFrom)]
    return {
        a.asname or a.name: f"{n.module}.{a.name}"
        for n in nodes
        if (n.module or "").startswith("xfer")
        for a in n.names
    }


def inherited_across_packages() -> dict[str, str]:
    """ "module.Class" -> "module.Base" where the base lies in another package and is no Protocol, ABC or exception."""
    defined = {f"{module}.{node.name}": node for module, node in classes()}
    found = {}
    for module, node in classes():
        names = imported_names(module)
        for base in node.bases:
            first, *rest = ast.unparse(base).split("[")[0].split(".")
            full = ".".join([names.get(first, first), *rest])
            if full in defined and package_of(full) not in (package_of(module), "errors"):
                kinds = {ast.unparse(b).split("[")[0].split(".")[-1] for b in defined[full].bases}
                if not kinds & {"Protocol", "ABC"}:
                    found[f"{module}.{node.name}"] = full
    return found


def most_branches() -> tuple[int, str]:
    """Branches of the function of the control plane that has most, and its place. ruff counts them, and pyproject.toml's limit holds
    them."""
    command = ["check", "--select", "PLR0912", "--config", "lint.pylint.max-branches=1", "--output-format", "concise"]
    ruff, places = Path(sys.executable).with_name("ruff"), [f"xfer/{p}" for p in CONTROL]
    said = subprocess.run([ruff, *command, *places], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"^(\S+\.py:\d+):.*\((\d+) > 1\)$", said, re.M)
    return max((int(n), place) for place, n in found)


def bare_states() -> set[str]:
    """Strings with which the control plane compares an attribute called phase, state or status."""
    found = set()
    for name, (_, tree) in modules().items():
        if package_of(name) not in CONTROL:
            continue
        for n in ast.walk(tree):
            if isinstance(n, ast.Compare) and re.search(r"(phase|state|status)$", ast.unparse(n.left)):
                consts = [c for right in n.comparators for c in ast.walk(right) if isinstance(c, ast.Constant)]
                found |= {f"{ast.unparse(n.left)} {c.value!r}" for c in consts if isinstance(c.value, str)}
    return found


def lines_of(paths: list[Path]) -> int:
    return sum(len(p.read_text().splitlines()) for p in paths)


# ---- the table

NOUNS = re.compile(r"_*(\w*Refits?|RefitCall|Calls?|Attempts?|Run|Visit|Feed|\w*Outcome(Msg)?)")
"""Names of classes that mean one refit, or a part of it."""
FAILING = re.compile(r"_?(fail|failed|failed_early|lose|lost|torn|abort|give_up)(_\w+)?")
"""Names of functions of the coordinator by which a refit fails."""


def rows() -> Iterator[tuple[str, str, str]]:
    """(what, today, target) for each row."""
    control = [path for name, (path, _) in modules().items() if package_of(name) in CONTROL]
    yield "control plane: lines / modules", f"{lines_of(control):,} / {len(control)}", "<= 4,900 / about 21"
    yield "import circles / imports against the flow", f"{len(circles())} / {len(against_the_flow())}", "<= 3 / 0"
    pairs = [("participants", "packed"), ("participants", "engines"), ("engines", "packed")]
    counts = [len({i.target for i in imports() if i.packages == pair}) for pair in pairs]
    yield "participants -> packed, participants -> engines, engines -> packed", ", ".join(map(str, counts)), "0"
    coordinator = [tree for name, (_, tree) in modules().items() if package_of(name) == "coordinator"]
    functions = [n.name for t in coordinator for n in ast.walk(t) if isinstance(n, ast.FunctionDef)]
    failing = f"{len([n for n in functions if FAILING.fullmatch(n)])}; {len(bare_states())}"
    yield "functions by which a refit fails; bare state strings", failing, "one `fail`; 0"
    most, where = most_branches()
    yield "most branches of one control-plane function", f"{most} ({where.removeprefix('xfer/')})", "<= 12"
    yield "class names that mean several things", str(len(repeated_names())), "<= 5"
    nouns = sorted({n.name for m, n in classes() if package_of(m) in (*CONTROL, "api") and NOUNS.fullmatch(n.name)})
    yield "nouns for one refit", f"{len(nouns)} ({', '.join(nouns)})", "3"
    tests = [*(ROOT / "tests/functional").glob("test_session*.py"), *(ROOT / "tests/unit").glob("test_session*.py")]
    tests += [*(ROOT / "tests/unit").glob("test_coordinator*.py"), *(ROOT / "tests/support").glob("simulat*.py")]
    yield "tests of the protocol: lines", f"{lines_of(tests):,}", "<= 2,500"
    connect = next(n for n in modules()["xfer.api"][1].body if isinstance(n, ast.FunctionDef) and n.name == "connect")
    assigned = [n for n in modules()["xfer"][1].body if isinstance(n, ast.Assign)]
    names = next(ast.literal_eval(n.value) for n in assigned if ast.unparse(n.targets[0]) == "__all__")
    today = f"{len([*connect.args.args, *connect.args.kwonlyargs])} / {len(names)}"
    yield "`connect()` parameters / names in `xfer`", today, "about 9 / about 9 (+ layerwise, + tensor level)"
    yield "mypy errors", "0: the step `types` fails at any", "0 in mesh, plan, the control plane; < 100 elsewhere"
    yield "minutes of CI on 2 cores", "the last line of scripts/test.sh", "<= 15"
    yield "docstrings that had to be read twice (sample of 50)", "judged by readers", "0"
    yield "files of docs/results", str(len([*(ROOT / "docs/results").glob("*")])), "0"
    yield "commit subjects, last 50: median / longest", subjects(), "<= 60 / 72"
    package = [path for path, _ in modules().values()]
    yield "lines / modules of xfer", f"{lines_of(package):,} / {len(package)}", "about 27,000 / 120"
    yield "lines of tests", f"{lines_of([*(ROOT / 'tests').rglob('*.py')]):,}", "about 26,000"


def subjects() -> str:
    """Lengths of the subjects of commits that are no merges."""
    log = subprocess.run(
        ["git", "log", "-50", "--no-merges", "--format=%s"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    lengths = [len(s) for s in log.stdout.splitlines()]
    return f"{statistics.median(lengths):.0f} / {max(lengths)}" if lengths else "no history here"


def main() -> None:
    table = [("what", "today", "target"), *rows()]
    widths = [max(len(r[k]) for r in table) for k in (0, 2)]
    for what, today, target in table:
        print(f"{what:{widths[0]}} | {target:{widths[1]}} | {today}")


if __name__ == "__main__":
    main()
