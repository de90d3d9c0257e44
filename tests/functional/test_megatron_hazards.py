"""Changes that silently break kept addresses and conversion tasks are noticed; models that cannot be read right are refused by name.

The cases with Megatron run in one child process, with their assertions: megatron_hazards.py.
"""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch

from tests.functional.megatron_launch import launch
from xfer.errors import RebindError
from xfer.trace.slots import Slots, walk

pytestmark = pytest.mark.trainer
CASES = re.findall(r"^@case\ndef (\w+)", Path(__file__).with_name("megatron_hazards.py").read_text(), re.M)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron-hazards")
    launch("megatron_hazards.py", str(folder), world=1, folder=folder)
    return json.loads((folder / "hazards.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_hazards(failures, case):
    assert not failures[case], failures[case]


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
