"""Every family that docs/architectures.md lists for trainers: what xfer says of live storages is what Bridge exports.

Two witnesses share nothing with the trace: Bridge's import and export on a model of one rank, and Megatron-Core's
`sharded_state_dict()`, by which ranks of every layout get their weights from that model.
`XFER_WRITE_DOCS=1` with `--slow` writes the table anew (scripts/architectures.sh).
"""

from __future__ import annotations

import os

import pytest

from tests.support import architectures
from tests.support.families import FAMILIES, text
from tests.support.proc import PYTHON
from tests.support.proc import Family as Children

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.slow,  # minutes: the default suite has the engines' side
    pytest.mark.skipif(not all(map(os.path.exists, PYTHON.values())), reason="scripts/setup.sh has not been run"),
]
TRAINED = [f for f in FAMILIES if f.trainer]
LAYOUTS = [
    pytest.param(f, i, id=f"{f.name} {text(p)}", marks=pytest.mark.slow)
    for f in TRAINED
    for i, p in enumerate(f.trainer)
]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """One process for all: importing Megatron costs more than a toy."""
    with Children(tmp_path_factory.mktemp("families")) as children:
        trainer = children.start("trainer", "trainer", "family_trainer")

        def say(do: str, **what) -> dict:
            trainer.say(do=do, **what)
            return trainer.expect(do, timeout=600)

        yield say


@pytest.mark.parametrize("family, number", LAYOUTS)
def test_a_layout_holds_what_bridge_exports(family, number, ask):
    seen = ask("layout", name=family.name, number=number)
    if number == 0:
        architectures.check("trainers", tuple(seen["row"]))
