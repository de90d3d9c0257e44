"""What the packed route gathers over gloo: from FSDP2 modules, DTensors and plain tensors what torch's own `full_tensor()` gives, and
from real Megatron-Core + Bridge what Bridge exports. The ranks and their assertions are tests/support/packed_tensors.py and
packed_bridge.py."""

from __future__ import annotations

import pytest

from tests.support.proc import Family

pytestmark = pytest.mark.trainer


BRIDGE = [
    ("stale", 2, dict(cases=["replaced"])),  # noticed on both stages
    # Adapters were attached, process groups made again, parameters offloaded, a router's bias turned fp32: all ranks make tasks anew.
    ("stale", 2, dict(cases=["lora", "regrouped", "offloaded", "flipped"])),
    ("values", 4, {}),
    # Bridge yields a fused tensor with the last of its experts: split over buckets it would never come. What it keeps when a gather
    # fails must not be in the next one, where the first expert would find the others' old weights.
    ("fused", 2, {}),
]


def gather(work, do: str, world: int, module: str, **what) -> None:
    with Family(work) as family:
        family.ranks(module, world, side="here", PYTHONWARNINGS="ignore").ask(do, timeout=420, **what)


def test_buckets_hold_what_torch_gathers(tmp_path):
    gather(tmp_path, "tensors", 3, "packed_tensors")


@pytest.mark.slow
@pytest.mark.parametrize("do, world, what", BRIDGE)
def test_buckets_hold_what_bridge_exports(tmp_path, do, world, what):
    gather(tmp_path, do, world, "packed_bridge", folder=str(tmp_path), **what)
