"""xferdtensor over real processes: four gloo ranks run every case of tests/support/dtensor_cases.py."""

import re

import pytest

from tests.support.examples import EXAMPLES
from tests.support.proc import ROOT, Family

SOURCE = (ROOT / "tests/support/dtensor_cases.py").read_text()
CASES = re.findall(r"^def (\w+)\(rank(?:, \w+=.*)?\):", SOURCE, re.M)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("xferdtensor")) as family:
        yield family.ranks("dtensor_cases", 4, side="here")


@pytest.mark.parametrize("name", CASES)
def test(name, ranks):
    ranks.ask("run", "right", name=name, timeout=120 + EXAMPLES)
