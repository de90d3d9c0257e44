"""Every family that docs/architectures.md lists for trainers: what xfer says of live storages is what Bridge exports from a model of one
rank, of which ranks of every layout get their weights by Megatron-Core's `sharded_state_dict()`. Neither witness knows the trace.
`XFER_WRITE_DOCS=1` with `--slow` writes the table anew (scripts/architectures.sh).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import architectures, trainer_layouts
from tests.support.families import FAMILIES, text, too_new
from tests.support.proc import PYTHON, ROOT, environment
from tests.support.proc import Family as Children

TE_SITE = os.environ.get("XFER_TE_SITE", str(ROOT / ".venvs/te"))
"""Made by scripts/te_site.sh."""

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.slow,  # minutes: the default suite has the engines' side
    pytest.mark.skipif(not all(map(os.path.exists, PYTHON.values())), reason="scripts/setup.sh has not been run"),
]


def _needs(since: str) -> list:
    why = f"Megatron-Bridge {since} is the first that has this family"
    return [pytest.mark.skip(reason=why)] * too_new(since)


LAYOUTS = [
    pytest.param(f, i, id=f"{f.name} {text(p)}", marks=_needs(f.since))
    for f in FAMILIES
    for i, p in enumerate(f.trainer)
]


def _asking(folder: Path, **env: str) -> Iterator[Callable[..., dict]]:
    """One process for all: importing Megatron costs more than a toy."""
    with Children(folder) as children:
        yield partial(children.start("trainer", "trainer", "family_trainer", **env).ask, timeout=600)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    yield from _asking(tmp_path_factory.mktemp("families"))


def with_transformer_engine() -> dict[str, str]:
    """Environment in which trainers import TransformerEngine, from their own packages or from a folder beside them. Skips without one."""
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), TE_SITE))}
    # torch first, as in trainers: it loads NCCL, which TransformerEngine's core needs and does not find.
    asks = "import torch, transformer_engine.pytorch"
    how = dict(env=environment(**paths), capture_output=True, text=True)
    tried = subprocess.run([PYTHON["trainer"], "-c", asks], **how)
    if tried.returncode:
        why = tried.stderr.strip().splitlines()[-1]
        pytest.skip(f"no TransformerEngine to import ({why}); scripts/te_site.sh brings one for torch with CUDA 13")
    return paths


@pytest.fixture(scope="module")
def ask_real(tmp_path_factory):
    """Builds TransformerEngine's own layers."""
    paths = with_transformer_engine()
    yield from _asking(tmp_path_factory.mktemp("families-te"), XFER_TEST_TE="real", **paths)


@pytest.mark.parametrize("family, number", LAYOUTS)
def test_a_layout_holds_what_bridge_exports(family, number, ask):
    seen = ask("layout", name=family.name, number=number)
    if number == 0:
        architectures.check_trainers(tuple(seen["row"]))


@pytest.mark.parametrize("family, number", LAYOUTS)
def test_real_transformer_engine_has_the_layout_of_its_stand_in(family, number, ask, ask_real):
    """Every parameter has the same name, shape and dtype, and the same parts of checkpoint tensors at the same places."""
    real, declared = (a("layout", name=family.name, number=number)["parts"] for a in (ask_real, ask))
    for ours, theirs in zip(declared, real, strict=True):
        assert ours == theirs, {n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)}


@pytest.mark.parametrize(
    "layout", [pytest.param(x, id=x.name, marks=_needs(x.family.since)) for x in trainer_layouts.LAYOUTS]
)
def test_a_layout_of_stages_and_experts_holds_what_bridge_exports_or_is_refused(layout, ask):
    error = ask("tried", name=layout.name)["error"]
    assert layout.refused in error if layout.refused else not error
