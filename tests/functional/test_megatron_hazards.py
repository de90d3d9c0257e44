"""Changes that silently break kept addresses and conversion tasks are noticed; models that cannot be read right are refused by name.

The cases with Megatron run in one child process, with their assertions: megatron_hazards.py.
"""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch

from tests.support.proc import ROOT, Family
from xfer.errors import RebindError
from xfer.trace.slots import Slots, walk

pytestmark = pytest.mark.trainer
CASES = re.findall(r"^@case\ndef (\w+)", (ROOT / "tests/support/megatron_hazards.py").read_text(), re.M)


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("megatron-hazards")) as family:
        (rank,) = family.ranks("megatron_hazards", 1, side="here", PYTHONWARNINGS="ignore")
        yield rank


@pytest.mark.parametrize("case", CASES)
def test_hazards(rank, case, tmp_path):
    rank.ask("hazard", name=case, folder=str(tmp_path))


# ---- slots, without Megatron


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.BatchNorm1d(4)})


def test_slots_keep_nothing_alive():
    m = model()
    slots = Slots([m], walk([m]))
    slots.bind()
    dead = weakref.ref(m["a"].weight)
    m["a"].weight = torch.nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert dead() is None
    layer = weakref.ref(m["b"])
    m["b"] = torch.nn.BatchNorm1d(4)
    gc.collect()
    assert slots.check() == "changed"
    del slots
    gc.collect()
    assert layer() is None


def test_every_way_of_losing_a_tensor_is_listed_at_once():
    m = model()
    slots = Slots([m], walk([m]))
    slots.bind()
    m["a"].weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    m["a"].bias.untyped_storage().resize_(0)
    del m["b"]._buffers["running_mean"]
    with pytest.raises(RebindError) as e:
        slots.check()
    assert len(e.value.violations) == 3
