"""Changes that silently break kept addresses and conversion tasks are noticed; models that cannot be read right are refused by name. The
cases run in one child process, with their assertions: megatron_hazards.py.
"""

from __future__ import annotations

import re

import pytest

from tests.support.proc import ROOT, Family

pytestmark = pytest.mark.trainer
CASES = re.findall(r"^def (\w+)\(folder\)", (ROOT / "tests/support/megatron_hazards.py").read_text(), re.M)


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("megatron-hazards")) as family:
        (rank,) = family.ranks("megatron_hazards", 1, side="here", PYTHONWARNINGS="ignore")
        yield rank


@pytest.mark.parametrize("case", CASES)
def test_hazards(rank, case, tmp_path):
    rank.ask("hazard", name=case, folder=str(tmp_path))
