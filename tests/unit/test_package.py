"""What a user meets before any code runs: dependencies, import cost, the promises of the README and of docs/status.md."""

import ast
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
SETUP = read_toml((ROOT / "pyproject.toml").read_text())
CODE = "\n".join(p.read_text() for p in sorted((ROOT / "xfer").rglob("*.py")))
SPOKEN = re.sub(r'"\s*\n\s*f?"', "", CODE)
"""The code of xfer, with texts in one piece that lines or `f"` cut."""
ERRORS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.XferError)]


def test_the_core_needs_only_torch_numpy_and_small_pure_packages():
    deps = SETUP["project"]["dependencies"]
    assert sorted(re.split("[<>=~!]", d)[0] for d in deps) == ["msgspec", "numpy", "rich", "tomli", "torch", "typer"]
    assert "tomli>=2,<3; python_version < '3.11'" in deps, "newer Pythons have it as tomllib"


def test_the_package_index_names_the_frameworks_that_the_readme_begins_with():
    frameworks = re.findall(r"\((\S+), (\S+)\)", README.split("\n\n")[1])
    described = SETUP["project"]["description"]
    assert len(frameworks) == 2 and all(name in described for pair in frameworks for name in pair)


def test_the_version_stands_in_one_place():
    """`xfer.__version__`, from which setuptools makes the wheel's; the change log begins with it."""
    project, dynamic = SETUP["project"], SETUP["tool"]["setuptools"]["dynamic"]
    assert project["name"] == "xfer-refit" and "version" not in project and project["dynamic"] == ["version"]
    assert dynamic["version"] == {"attr": "xfer.__version__"}
    assert md.version("xfer-refit") == xfer.__version__, "an older installation: run scripts/setup.sh"
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == xfer.__version__
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


IMPORTS = """
import sys, time
frameworks = ("megatron", "vllm", "transformers")
began = time.process_time()
import xfer
assert time.process_time() - began < 1.0
assert not {*frameworks, "torch", "triton"} & {*sys.modules}
import xfer.mesh, xfer.trace, xfer.plan.planner, xfer.api, xfer.coordinator.messages
from xfer import nccl_xfer_refit, connect, serve
import torch, torch.distributed
import xfer.participants.trainer, xfer.participants.worker, xfer.transport.p2p, xfer.trainers.megatron
assert not {*frameworks} & {*sys.modules}
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
"""


def test_import_is_quick_and_touches_nothing_heavy():
    subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, check=True, timeout=120)


def test_all_of_the_api_is_seen_by_who_looks_for_it():
    """By `dir` and tab completion, and in the first page of `help`."""
    assert {*xfer.__all__, "errors"} <= {*dir(xfer)}
    assert [n for n in xfer.__all__ if not re.search(rf"\b{n}\b", xfer.__doc__)] == []
    assert all(getattr(xfer, n) is not None for n in xfer.__all__)


def test_type_checkers_read_what_users_import():
    """They take as public what a literal `__all__` lists; of names made by `__getattr__` they know nothing."""
    assert (ROOT / "xfer/py.typed").exists()
    assert "py.typed" in SETUP["tool"]["setuptools"]["package-data"]["xfer"], "not installed"
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
    assert not re.search(r"^\s*(from|import) (tests|examples|benchmarks)\b", CODE, re.M)
    code = (
        "import runpy, sys; sys.argv = ['xfer', 'plan', '--help']\n"
        "import xfer.cli, xfer.cli.layouts.processes\n"
        "assert xfer.__file__.startswith(sys.path[1]), xfer.__file__\n"
        "try: runpy.run_module('xfer', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert not {'tests', 'examples', 'benchmarks'} & {m.partition('.')[0] for m in sys.modules}"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path, env=env, timeout=120, check=True)


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


# ---- what pages say


def under(heading: str, page: str) -> str:
    """What a page of docs/ says under a heading."""
    return (ROOT / "docs" / page).read_text().split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]


def last_cells(heading: str) -> list[str]:
    """The last column of the table under a heading of the status page."""
    rows = re.findall(r"^\|.*\| *(.+?) *\|$", under(heading, "status.md"), re.M)
    assert len(rows) > 2, heading
    return rows[2:]


def test_what_works_names_tests_that_exist():
    """As path::name."""
    for cell in last_cells("What works today"):
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", cell)
        assert named, f"no test named in {cell}"
        assert [x for x in named if (f"def {x[1]}(" if x[1] else "") not in (ROOT / x[0]).read_text()] == []


def test_what_does_not_work_is_refused_in_the_words_that_pages_quote_or_said_to_be_silent():
    cells = last_cells("What does not work yet")
    assert [c for c in cells if "`" not in c and "not there" not in c] == []
    faults = re.findall(
        r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text().split("\n## XF100")[1], re.M
    )
    quoted = [words for c in cells for words in re.findall(r"`([^`]+)`", c)]
    assert len(faults) > 30 and [words for words in faults + quoted if words not in SPOKEN] == [], (
        "nothing in xfer says this"
    )


def test_tests_run_in_the_environment_that_they_need():
    """Kernels run in Triton's interpreter, by a list of scripts/test.sh; the tests of vLLM are marked `engine` or `gpu`."""
    script, me = (ROOT / "scripts/test.sh").read_text(), Path(__file__).resolve()
    text = {p: p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p.resolve() != me}
    kernels = [str(p.relative_to(ROOT)) for p, t in text.items() if "TRITON_INTERPRET" in t]
    assert "TRITON_INTERPRET=1" in script and kernels and [p for p in kernels if p not in script] == []
    imports = re.compile(r"""(importorskip|find_spec)\(.vllm.\)|^ *(from|import) vllm""", re.M)
    engines = {p.name: t for p, t in text.items() if imports.search(t)}
    assert engines and [name for name, t in engines.items() if not re.search(r"mark\.(engine|gpu)", t)] == []


def test_the_readme_is_a_front_door():
    """Short; all that it leaves out is a link away, and what it and the status page name exists."""
    assert README.count("\n") < 150
    assert all(f"docs/{p}.md" in README for p in ("status", "guide", "troubleshooting", "faq", "how", "design"))
    named = re.findall(r"scripts/[\w./-]+\.sh", README + (ROOT / "docs/status.md").read_text())
    named += re.findall(r"\((docs/[\w./-]+)", README)
    assert named and [path for path in named if not (ROOT / path).exists()] == []


def test_the_status_page_counts_the_families_of_their_page():
    page = (ROOT / "docs/architectures.md").read_text()
    engines, trainers = (
        len(re.findall(r"^\| (?!family |---)", page.split(f"<!-- {side} -->")[1].split("<!-- end")[0], re.M))
        for side in ("engines", "trainers")
    )
    assert f"layouts of {engines} engine and {trainers} trainer families" in (ROOT / "docs/status.md").read_text()


def test_the_guide_names_every_variable_that_is_read_and_every_error_and_nothing_else():
    read = set(re.findall(r"""["'](XFER_[A-Z_]+)["']""", CODE))
    assert set(re.findall(r"`(XFER_[A-Z_]+)`", under("Environment variables", "guide.md"))) == read
    assert set(re.findall(r"`([A-Z]\w+)`", under("When a call raises", "guide.md"))) == {c.__name__ for c in ERRORS}


def test_each_code_is_one_class_and_has_a_section_of_the_troubleshooting_page():
    """In the order of the codes, so that a reader finds it; each says why it happens and what to do."""
    codes = {c.code: c.__name__ for c in ERRORS}
    assert len(codes) == len(ERRORS) and all(re.fullmatch(r"XF[1-9]\d\d", code) for code in codes)
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert re.findall(r"^## (XF\d+) (\w+)$", page, re.M) == sorted(codes.items())
    for section in re.split(r"^## XF", page, flags=re.M)[1:]:
        assert re.search(r"^\*\*Cause\.\*\* ", section, re.M) and re.search(r"^\*\*What to do\.\*\* ", section, re.M)
