"""Trainers whose bridge is mbridge's (ISEEKYAN/mbridge): what xfer says of live storages is what its export yields, bit for bit.

On Megatron-Core 0.16 mbridge 0.15.1 gathers the down-projections of MLA over tensor-parallel ranks, which all hold them whole, since
they carry the mark of a weight that is cut. It then exports them twice as large, and xfer refuses that. Newer ones do not mark them.

The witnesses are those of test_trainer_families.py, and mbridge's own export on one rank.
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
    found = [PYTHON["trainer"], "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('mbridge') is None)"]
    if subprocess.run(found, env=environment(**paths)).returncode:
        pytest.skip("no mbridge in the trainer's environment, nor in the folder that XFER_MBRIDGE_SITE names")
    yield from _asking(tmp_path_factory.mktemp("mbridge"), **paths)


@pytest.mark.parametrize("family, number", LAYOUTS)
def test_a_layout_holds_what_mbridge_exports(family, number, ask):
    error = ask("mbridge", name=family, number=number)["error"]
    marked = too_new("0.6")  # the Bridge that goes with a Megatron-Core of that time
    twice = marked and family == "DeepSeek-V3" and BY_NAME[family].trainer[number].tp > 1
    assert ("shape disagrees with the checkpoint's" in error) if twice else not error, error
