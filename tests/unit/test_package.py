"""What a user meets before any code runs: dependencies, import cost, the promises of the README and of docs/status.md."""

import ast
import functools
import importlib.metadata as md
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import xfer
from xfer import errors
from xfer.plan.fabric_file import read_toml

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
STATUS = (ROOT / "docs/status.md").read_text()


def test_the_core_needs_only_torch_numpy_and_small_pure_packages():
    text = (ROOT / "pyproject.toml").read_text()
    deps = re.search(r"^dependencies = \[(.*?)\]", text, re.S | re.M).group(1)
    names = sorted(re.findall(r'"([A-Za-z0-9_.-]+?)[<>=~!]', deps))
    assert names == ["msgspec", "numpy", "rich", "tomli", "torch", "typer"]
    assert "tomli>=2,<3; python_version < '3.11'" in deps, "newer Pythons have it as tomllib"


def test_the_package_index_names_the_frameworks_that_the_readme_begins_with():
    frameworks = re.findall(r"\((\S+), (\S+)\)", README.split("\n\n")[1])
    described = read_toml((ROOT / "pyproject.toml").read_text())["project"]["description"]
    assert len(frameworks) == 2 and all(name in described for pair in frameworks for name in pair)


def test_the_version_stands_in_one_place():
    """`xfer.__version__`, from which setuptools makes the wheel's; the change log begins with it."""
    setup = read_toml((ROOT / "pyproject.toml").read_text())
    project = setup["project"]
    assert project["name"] == "xfer-refit" and "version" not in project and project["dynamic"] == ["version"]
    assert setup["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "xfer.__version__"}
    assert md.version("xfer-refit") == xfer.__version__, "an older installation: run scripts/setup.sh"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and newest[1] == xfer.__version__
    # Another project of that name on the package index had 0.2.9: a lower number here would look like an update there.
    assert tuple(map(int, xfer.__version__.split("."))) > (0, 2, 9)


def test_install_commands_name_the_distribution():
    """`pip install xfer` would install another project."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "xfer").rglob("*.py")]
    pages += [p for folder in ("examples", "scripts") for p in (ROOT / folder).rglob("*.*")]
    files = [p for p in pages if p.is_file() and p.parent.name != "__pycache__"]  # where other processes write
    wrong = re.compile(r"""(?:pip3?|uv)\s+(?:install|add)\b[^\n`]*["'\s](xfer)(?![\w./-])""")
    assert wrong.search("pip install 'xfer[vllm]'") and not wrong.search('pip install "xfer-refit[vllm] @ git+URL"')
    assert [f"{p}: {found[0]}" for p in files if (found := wrong.search(p.read_text(errors="replace")))] == []


def test_files_for_other_tools_are_read_by_them():
    """Workflows, hooks and the site's settings are YAML, and the commands that they run exist."""
    files = [*ROOT.glob(".github/workflows/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "mkdocs.yml"]
    read = {p.name: yaml.safe_load(p.read_text()) for p in files}
    assert {"ci.yml", "docs.yml", "release.yml"} < read.keys()
    jobs = {f"{name}: {j}": job for name, flow in read.items() for j, job in flow.get("jobs", {}).items()}
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in runs and all("timeout-minutes" in job for job in jobs.values())
    hooks = [hook["entry"] for repo in read[".pre-commit-config.yaml"]["repos"] for hook in repo["hooks"]]
    ours = [c.split()[0] for c in (*runs, *hooks) if c.startswith((".ci", "scripts"))]
    assert len(ours) > 2 and [c for c in ours if not os.access(ROOT / c, os.X_OK)] == []
    pages = yaml.safe_dump(read["mkdocs.yml"]["nav"])
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if p.name not in pages]
    assert missing == [], "give each page a place in mkdocs.yml"


def test_import_is_quick_and_touches_nothing_heavy():
    code = (
        "import sys, time; t = time.process_time(); import xfer; s = time.process_time() - t\n"
        "heavy = [m for m in ('torch', 'megatron', 'vllm', 'transformers', 'triton') if m in sys.modules]\n"
        "import xfer.mesh, xfer.trace, xfer.plan.planner, xfer.api, xfer.coordinator.messages\n"
        "from xfer import nccl_xfer_refit, connect, serve\n"
        "more = [m for m in ('megatron', 'vllm', 'transformers') if m in sys.modules]\n"
        "import torch, torch.distributed as d\n"
        "import xfer.participants.trainer, xfer.participants.worker, xfer.transport.p2p, xfer.trainers.megatron\n"
        "more += [m for m in ('megatron', 'vllm', 'transformers') if m in sys.modules]\n"
        "print(s, heavy, more, d.is_initialized(), torch.cuda.is_initialized())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=120
    )
    out = out.stdout.split()
    assert float(out[0]) < 1.0
    assert out[1:] == ["[]", "[]", "False", "False"], out


def test_all_of_the_api_is_seen_by_who_looks_for_it():
    """By `dir` and tab completion, and in the first page of `help`."""
    assert {*xfer.__all__, "errors"} <= {*dir(xfer)}
    assert [n for n in xfer.__all__ if not re.search(rf"\b{n}\b", xfer.__doc__)] == []
    assert all(getattr(xfer, n) is not None for n in xfer.__all__)


def test_type_checkers_read_what_users_import():
    """They take as public what a literal `__all__` lists; of names made by `__getattr__` they know nothing."""
    setup = (ROOT / "pyproject.toml").read_text()
    assert (ROOT / "xfer/py.typed").exists() and re.search(r'^xfer = \["py.typed"\]$', setup, re.M), "not installed"
    top = ast.parse((ROOT / "xfer/__init__.py").read_text()).body
    (listed,) = (n.value for n in top if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    (checked,) = (n for n in top if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    named = {a.asname or a.name for n in checked.body for a in n.names}
    assert {*ast.literal_eval(listed), "errors"} == named == {*xfer._HOME}
    assert not [n for n in top if isinstance(n, ast.FunctionDef) and n.name == "__getattr__"]


def test_the_wheel_is_the_package_and_works_without_tests_and_examples(tmp_path):
    """Built as pip builds it, unpacked, and run from a folder that has nothing else of this repository."""
    pytest.importorskip("setuptools", minversion="77")
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "xfer", source / "xfer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, *"-m pip wheel -q --no-deps --no-build-isolation --no-index -w".split(), str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    folders = {p.name for p in site.iterdir()}
    assert "xfer" in folders and all(n == "xfer" or n.endswith(".dist-info") for n in folders), folders

    def files(root: Path) -> set[str]:
        return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts}

    assert files(site / "xfer") == files(ROOT / "xfer")
    wrong = re.compile(r"^\s*(from|import) (tests|examples|benchmarks)\b", re.M)
    assert [str(p) for p in (ROOT / "xfer").rglob("*.py") if wrong.search(p.read_text())] == []
    code = (
        "import runpy, sys; sys.argv = ['xfer', 'plan', '--help']\n"
        "import xfer.cli, xfer.cli.layouts.processes\n"
        "assert xfer.__file__.startswith(sys.path[1]), xfer.__file__\n"
        "try: runpy.run_module('xfer', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('tests', 'examples', 'benchmarks')])"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout[-400:] + done.stderr[-400:]


@pytest.mark.parametrize("adapter", [xfer.TensorTrainer, xfer.MegatronTrainer, xfer.LayerWiseTrainer])
def test_every_adapter_is_what_connect_says_that_it_takes(adapter):
    """To a type checker: a method of the protocol that one lacks, or an attribute that is a property of it, refuses all calls."""
    from xfer.participants.trainer import Source

    asked = {n for n, v in vars(Source).items() if callable(v) and not n.startswith("_")}
    assert {"drain", "read", "check", "rebind"} <= asked and [n for n in sorted(asked) if not hasattr(adapter, n)] == []
    assert [n for n in Source.__annotations__ if isinstance(vars(adapter).get(n), property)] == []


def test_the_engine_plugin_is_an_entry_point():
    """Once in each copy of the metadata: a checkout's own may be found beside that of the installed package."""
    copies = [d.entry_points for d in md.distributions() if d.metadata["Name"] == "xfer-refit"]
    found = [[e.value for e in c if (e.group, e.name) == ("vllm.general_plugins", "xfer")] for c in copies]
    assert found and found == [["xfer.engines.vllm_plugin:register"]] * len(copies), "pip install -e ."


def table(title: str) -> list[list[str]]:
    part = STATUS.split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip().strip("|") for line in part.splitlines() if line.startswith("|")]
    rows = [[c.strip() for c in line.split("|")] for line in lines]
    assert len(rows) > 2, f"no table under {title}"
    return rows[2:]


def test_what_works_names_tests_that_exist_and_what_does_not_is_refused_in_these_words_or_said_to_be_silent():
    """The last column names the tests that prove a row, as path::name, or quotes what a user sees."""
    for *_, last in table("What works today"):
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", last)
        assert named, f"no test named in {last}"
        assert [x for x in named if x[1] and f"def {x[1]}(" not in (ROOT / x[0]).read_text()] == []
        assert all((ROOT / path).exists() for path, _ in named), named
    for *_, last in table("What does not work yet"):
        quoted = re.findall(r"`([^`]+)`", last)
        assert quoted or "not there" in last, last
        assert [words for words in quoted if words not in spoken()] == [], "nothing in xfer says this"


@functools.cache
def spoken() -> str:
    """The code of xfer, with texts in one piece that lines or `f"` cut."""
    source = "\n".join(p.read_text() for p in (ROOT / "xfer").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_the_troubleshooting_page_quotes_what_xfer_says():
    page = (ROOT / "docs/troubleshooting.md").read_text().split("\n## XF100", 1)[1]
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(quoted) > 30 and [words for words in quoted if words not in spoken()] == []


def test_tests_run_in_the_environment_that_they_need():
    """Kernels run in Triton's interpreter, by a list of scripts/test.sh; the tests of vLLM are marked `engine` or `gpu`."""
    script, me = (ROOT / "scripts/test.sh").read_text(), Path(__file__).resolve()
    text = {p: p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p.resolve() != me}
    kernels = [str(p.relative_to(ROOT)) for p, t in text.items() if "TRITON_INTERPRET" in t]
    assert "TRITON_INTERPRET=1" in script and kernels and [p for p in kernels if p not in script] == []
    imports = re.compile(r"""(importorskip|find_spec)\(.vllm.\)|^ *(from|import) vllm""", re.M)
    engines = {p.name: t for p, t in text.items() if imports.search(t)}
    assert engines and [name for name, t in engines.items() if not re.search(r"mark\.(engine|gpu)", t)] == []


def test_files_that_the_readme_names_exist():
    named = re.findall(r"(scripts/[\w./-]+\.sh)", README + STATUS) + re.findall(r"\((docs/[\w./-]+)", README)
    assert named and [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_a_front_door():
    """Short, and all that it leaves out is a link away."""
    assert README.count("\n") < 150
    assert all(f"docs/{p}.md" in README for p in ("status", "guide", "troubleshooting", "faq", "how", "design"))


def test_the_status_page_counts_the_families_of_their_page():
    page = (ROOT / "docs/architectures.md").read_text()
    rows = {
        side: len(re.findall(r"^\| (?!family |---)", page.split(f"<!-- {side} -->")[1].split("<!-- end")[0], re.M))
        for side in ("engines", "trainers")
    }
    assert f"layouts of {rows['engines']} engine and {rows['trainers']} trainer families" in STATUS


def test_every_variable_that_is_read_stands_in_the_guide():
    """And none that is not read."""
    told = (ROOT / "docs/guide.md").read_text().split("## Environment variables", 1)[1].split("\n## ", 1)[0]
    text = "\n".join(p.read_text() for p in (ROOT / "xfer").rglob("*.py"))
    assert set(re.findall(r"`(XFER_[A-Z_]+)`", told)) == set(re.findall(r"""["'](XFER_[A-Z_]+)["']""", text))


def test_the_guide_says_of_every_error_what_to_do():
    told = (ROOT / "docs/guide.md").read_text().split("## When a call raises", 1)[1].split("\n## ", 1)[0]
    kinds = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.XferError)}
    assert set(re.findall(r"`([A-Z]\w+)`", told)) == kinds
