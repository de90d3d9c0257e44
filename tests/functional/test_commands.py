"""Every command that a page shows is run here, or its arguments are read by the program's own parser and `ELSEWHERE` names its test."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import typer

from benchmarks.goals import STEPS
from tests.support.marks import BOTH
from tests.support.proc import PATIENCE, ROOT
from xfer.cli import app, plan
from xfer.cli.bench import command as bench
from xfer.cli.describe import describe
from xfer.cli.doctor import command as doctor

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/RESULTS.md"]
STARTS = r"(xfer|python|torchrun|pip|export|srun|docker|kubectl|bash|pre-commit|\S*\.venvs/\S+|(scripts|examples|tests)/\S+\.sh)"
COMMAND = re.compile(rf"([A-Z_]+=\S+ )*{STARTS}( |$)")
OUTPUT = ("trainer   on entry", "trainer   storages hold", "coord.    the joiner's layouts", "listening at tcp://")
"""First lines of indented blocks that are neither commands nor Python: protocols, and lines of a log."""
PROSE = re.compile(r"xfer simulate$|scripts/bench_NAME\.py|python -m benchmarks\.<name>|\S*\.venvs/\S+python$")
"""Between backticks, but no commands: those that are not there, and patterns."""
ELSEWHERE = {
    "scripts/demo.sh": "scripts/nightly.sh",
    "scripts/test.sh": ".ci/run",
    "scripts/matrix.sh": "scripts/nightly.sh",
    "scripts/pythons.sh": "scripts/nightly.sh",
    "scripts/nightly.sh": "CONTRIBUTING.md",  # by hand, or every night
    "scripts/setup.sh": "scripts/test.sh",
    "scripts/architectures.sh": "docs/architectures.md",
    "scripts/te_site.sh": "docs/guide.md",  # on hosts with CUDA's libraries
    "scripts/slurm/configs.sh": "tests/functional/test_slurm.py",
    "scripts/slurm/refit.sbatch": "tests/functional/test_slurm.py",
    "tests/functional/slurm_smoke.sh": "tests/functional/test_slurm.py",
    "examples/grpo/run.sh": "tests/functional/test_grpo_loop.py",
    "examples/muon_layerwise.py": "tests/functional/test_layerwise_scripts.py",
    "sglang.launch_server": "tests/support/sglang_live.py",
    "examples.grpo.ray_main": "tests/functional/test_grpo_loop.py",
    **dict.fromkeys(
        map("examples.integrations.{}".format, ("nemo_rl_sync", "ray_async", "skyrl_sync", "trl_grpo", "verl_sync")),
        "tests/functional/test_integrations.py",
    ),
    "tests.support.sglang_live": "tests/functional/test_sglang.py",
    "tests.support.house": "scripts/test.sh",
    "xfer status": "tests/functional/test_log_lines.py",
    "xfer timeline": "tests/functional/test_timeline.py",
}
"""Files that run what takes long or needs something that this machine may lack."""
YOURS = re.compile(
    r"(\S+/bin/)?pip (install|uninstall) |([A-Z_]+=\S+ )*vllm serve |"
    r"export [A-Z_]+=|pre-commit install|srun |docker |kubectl |XFER_TIMELINE=\S+ \.\.\.$"
)
"""What changes the reader's machine, or begins with a job of the reader's."""
SETTING = re.compile(r"\+*[\w.]+=\S+$")
"""One of another framework's configuration."""


FENCED = re.compile(r"^```.*?^```", re.S | re.M)


def blocks(text: str) -> Iterator[list[str]]:
    """Indented blocks of a page, without fenced ones and lists."""
    for block in re.split(r"\n\s*\n", FENCED.sub("", text).replace(" \\\n", " ")):
        lines = block.strip("\n").splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            yield [line.strip() for line in lines]


def shown(page: Path) -> Iterator[str]:
    """Commands in fenced blocks of a shell, in indented blocks and between backticks."""
    text = page.read_text()
    fenced = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, flags=re.S | re.M)
    lines = [line for block in fenced for line in block.replace(" \\\n", " ").splitlines()]
    lines += [line for block in blocks(text) for line in block]
    lines += [line for line in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)) if not PROSE.match(line)]
    yield from filter(COMMAND.match, lines)


def without_comment(line: str) -> str:
    return re.sub(r"\s{2,}#.*| # .*", "", line)


def plain(command: str) -> list[str]:
    """The words of a command: without comment, with options in brackets, and with the first of alternatives."""
    command = (
        re.sub(r"\[(-[^\]]*)\]", r"\1", without_comment(command))
        .replace("trainer|engine", "trainer")
        .replace(" ...", "")
    )
    words = shlex.split(command.replace(".venvs/{trainer,engine}/", ".venvs/trainer/"))
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


HELP = "\n\n".join((plan.HELP, doctor.HELP, bench.HELP))
HELPED = re.findall(r"(?<=Example:\[/bold\] )xfer .*|^xfer (?:doctor|bench).*", HELP, flags=re.M)
SHOWN = {command for line in chain(HELPED, *map(shown, PAGES)) for command in line.split(" && ")}
ALL = sorted(command for command in SHOWN if not YOURS.match(command))


def starting(*words: str) -> list[list[str]]:
    return [p for p in map(plain, ALL) if any(p[: len(w.split())] == w.split() for w in words)]


def modules() -> dict[str, list[list[str]]]:
    """Arguments with which pages run Python modules, by module."""
    out: dict[str, list[list[str]]] = {}
    for words in map(plain, ALL):
        if re.search(r"(^|/)python$", words[0]) and words[1] == "-m":
            out.setdefault(words[2], []).append(words[3:])
    return out


def test_indented_blocks_are_commands_code_or_known_output():
    """A command that begins with an unknown word would be skipped in silence."""
    unknown = []

    def known(line: str) -> bool:
        return bool(COMMAND.match(line) or YOURS.match(without_comment(line)) or SETTING.match(line))

    for page in PAGES:
        for lines in blocks(page.read_text()):
            if all(map(known, lines)) or lines[0].startswith(OUTPUT):
                continue
            try:
                ast.parse("\n".join(lines))
            except SyntaxError:
                unknown.append((page.name, lines[0]))
    assert len(ALL) > 80 and unknown == []


def test_every_command_has_a_rule():
    """A program of this repository, with a check below or a file that runs it."""
    for command in ALL:
        words = plain(command)
        program = words[0].rpartition("/")[2]
        if program == "python":
            assert words[1] == "-m", command  # modules: below
        elif program != "xfer":
            name = next(w for w in words if w.endswith(".py")) if program == "torchrun" else words[program == "bash"]
            assert (ROOT / name).exists() and name in ELSEWHERE, command
    for name, by in ELSEWHERE.items():
        assert any(name in c for c in ALL), f"no page shows {name}"
        of_xfer = name.startswith("xfer ")
        run = f'"{name[5:]}"' if of_xfer else Path(name).name if "/" in name else name.rpartition(".")[2]
        assert run in (ROOT / by).read_text(), f"{by} does not run {name}"


@pytest.mark.parametrize("words", starting("xfer"), ids=" ".join)
def test_commands_of_xfer_have_options_that_exist(words, monkeypatch, tmp_path):
    monkeypatch.setenv("XFER_TOKEN", "a" * 16)
    command = typer.main.get_command(app)
    name, given = (words[1:] or [""])[0], words[2:]
    if name in ("", "--help"):
        return
    known = command.commands[name]
    options = {o for param in known.params for o in param.opts} | {"--help"}
    assert [w for w in given if w.startswith("--") and w not in options] == []
    if any(not w.startswith("-") for w in given):  # more than the mention of an option
        known.make_context(name, [str(tmp_path) if w.startswith("/tmp/") else w for w in given])
    if "--trainer" in given:
        monkeypatch.chdir(ROOT)
        describe(given[given.index("--trainer") + 1], given[given.index("--engine") + 1])


SCRIPTS = sorted({p.relative_to(ROOT).as_posix() for p in ROOT.glob("scripts/*.sh")} | {"examples/grpo/run.sh"})


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_explain_themselves_and_have_the_options_that_pages_give_them(script):
    """`--help` of each, which changes nothing, has all options and words that a page shows."""
    done = subprocess.run([ROOT / script, "--help"], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert done.returncode == 0 and done.stdout, done.stderr
    told = done.stdout
    if script.endswith("run.sh"):  # it hands options on
        told += (ROOT / "examples/grpo/train.py").read_text() + (ROOT / "examples/grpo/run.sh").read_text()
    if script == "scripts/test.sh":  # and pytest's
        told += "-k"
    options = {w for words in starting(script) for w in words[1:] if w.startswith("-")} - {"--help"}
    assert [o for o in sorted(options) if o not in told] == []


RAY = "examples.grpo.ray_main"
PARSE = """
import argparse, json, runpy, sys
class Read(BaseException): pass
read = argparse.ArgumentParser.parse_args
def parse_args(self, *words, **more):
    read(self, *words, **more)
    raise Read
argparse.ArgumentParser.parse_args = parse_args
for module, given in json.load(sys.stdin):
    sys.argv = [module, *given]
    try: runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Read: print("@ read", module)
    except SystemExit as e: print("@", e.code, module, given)
"""
BENCHMARKS = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem != "__init__")


def test_modules_take_the_arguments_that_pages_and_the_goals_give_them_and_benchmarks_explain_themselves():
    """Read by their own parsers, without a GPU, Triton or an engine. One needs a package that is not here: its text has the options."""
    given = [
        (name, words) for name, calls in modules().items() if name not in ("pytest", *ELSEWHERE) for words in calls
    ]
    for step in STEPS:
        name, *words = shlex.split(step.command)
        given.append((f"benchmarks.{name}", [*words, "--out", "x.json"]))
    options = {w for words in modules()[RAY] for w in words if w.startswith("--")}
    text = (ROOT / RAY.replace(".", "/")).with_suffix(".py").read_text()
    assert len(given) > 30 and options and [o for o in options if o not in text] == []
    asked = [*given, *((f"benchmarks.{name}", ["--help"]) for name in BENCHMARKS)]
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT, timeout=120 * PATIENCE,
    )  # fmt: skip
    said = re.split(r"^@ (.*)\n", done.stdout, flags=re.M)
    assert not done.returncode and len(said) == 2 * len(asked) + 1, done.stderr[-2000:]
    assert said[1 : 2 * len(given) : 2] == [f"read {name}" for name, _ in given], done.stderr[-2000:]
    for name, told in zip(BENCHMARKS, said[2 * len(given) :: 2]):
        doc = (ROOT / "benchmarks" / f"{name}.py").read_text().split('"""')[1]
        assert f"usage: python -m benchmarks.{name} " in told and doc.strip() in told, (name, told)


def test_pages_name_all_benchmarks_and_only_those_that_exist():
    pages = [
        *PAGES,
        *ROOT.glob("benchmarks/**/*.md"),
        *(p for d in ("benchmarks", "xfer") for p in ROOT.glob(f"{d}/**/*.py")),
    ]
    named = {n for p in pages for n in re.findall(r"-m benchmarks\.([a-z]\w*)", p.read_text())}
    assert named - {"lib"} == {*BENCHMARKS}


@pytest.mark.parametrize("words", [w for w in modules()["pytest"]], ids=" ".join)
def test_commands_of_pytest_name_files_and_tests_that_exist(words):
    paths = [w for w in words if w.startswith("tests/")]
    files = [f for w in paths for f in ([ROOT / w] if "*" not in w else ROOT.glob(w))]
    assert bool(paths) == bool(files) and all(f.exists() for f in files)
    text = "\n".join(f.read_text() for f in files if f.suffix == ".py")
    marker = dict(zip(words, words[1:])).get("-m", "")
    for mark in re.findall(r"(?<!not )\b(slow|gpu|engine)\b", marker) if text else ():
        assert f"mark.{mark}" in text or mark == "gpu" and "tests.support.marks" in text, (mark, words)
    chosen = dict(zip(words, words[1:])).get("-k", "")
    assert all(part in text for part in re.findall(r"\w+", chosen) if part not in ("or", "and", "not"))


QUICK = ["xfer version", "xfer doctor", "xfer plan --help"]
LONGER = "python -m benchmarks.packed_gpu --device cpu"
"""Those that need no GPU, no other machine and no environment but this one, and that no other test runs."""


def run(words: list[str], seconds: float) -> subprocess.CompletedProcess:
    module = {"python": [sys.executable], "xfer": [sys.executable, "-m", "xfer"]}[words[0]]
    return subprocess.run([*module, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=seconds * PATIENCE)


@pytest.mark.parametrize("command", [*QUICK, pytest.param(LONGER, marks=pytest.mark.slow)])
def test_commands_run(command):
    """`xfer doctor` may find problems on this machine: exit code 1."""
    words = command.split()
    assert any([re.sub(r"^\S*/python$", "python", p[0]), *p[1:]] == words for p in map(plain, ALL)), "no page shows it"
    done = run(words, 120 if command in QUICK else 300)
    assert done.returncode in (0, int(command == "xfer doctor")) and done.stdout, done.stderr[-2000:]


@BOTH
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [w for w in starting("xfer plan") if "--trainer" in w], ids=lambda w: " ".join(w)[:60]
)
def test_plans_that_pages_show_are_made(words, tmp_path):
    """With both environments, as printed; files go to another folder."""
    done = run([str(tmp_path / w) if w.endswith(".html") else w for w in words], 600)
    assert done.returncode == 0 and "busiest link" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
