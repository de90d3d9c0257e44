"""Trainers whose bridge is mbridge's (ISEEKYAN/mbridge): what xfer says of live storages is what its export yields on one rank, bit for
bit. On Megatron-Core 0.16 mbridge 0.15.1 gathers MLA's whole down-projections, which are marked as cut, and exports them twice as large.
"""

import os
import subprocess

import pytest

from tests.functional.test_trainer_families import _asking
from tests.support.families import BY_NAME, text, too_new
from tests.support.proc import PYTHON, ROOT, environment

FAMILIES = ("Llama", "Qwen3", "Qwen3, tied", "Qwen3-MoE", "DeepSeek-V3")
QUICK = (("Qwen3", 0), ("Qwen3-MoE", 0))
LAYOUTS = [
    pytest.param(f, i, id=f"{f} {text(p)}", marks=[] if (f, i) in QUICK else pytest.mark.slow)
    for f in FAMILIES
    for i, p in enumerate(BY_NAME[f].trainer)
]
PATHS = os.pathsep.join(p for p in (str(ROOT), os.environ.get("XFER_MBRIDGE_SITE", "")) if p)

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.skipif(not all(map(os.path.exists, PYTHON.values())), reason="scripts/setup.sh has not been run"),
]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    paths = {"PYTHONPATH": PATHS}
    found = "import importlib.util as u, sys; sys.exit(u.find_spec('mbridge') is None)"
    if subprocess.run([PYTHON["trainer"], "-c", found], env=environment(**paths)).returncode:
        pytest.skip("no mbridge in the trainer's environment, nor in the folder that XFER_MBRIDGE_SITE names")
    yield from _asking(tmp_path_factory.mktemp("mbridge"), **paths)


@pytest.mark.parametrize("family, number", LAYOUTS)
def test_a_layout_holds_what_mbridge_exports(family, number, ask):
    error = ask("mbridge", name=family, number=number)["error"]
    marked = too_new("0.6")  # the Bridge that goes with a Megatron-Core of that time
    twice = marked and family == "DeepSeek-V3" and BY_NAME[family].trainer[number].tp > 1
    assert ("shape disagrees with the checkpoint's" in error) if twice else not error, error
