"""What the packed route gathers from ranks over gloo: from FSDP2 modules, DTensors and plain tensors what torch's own `full_tensor()`
gives, and from real Megatron-Core + Bridge what Bridge exports, also where conversion tasks went stale. The ranks and their
assertions are tests/support/packed_tensors.py and packed_bridge.py.
"""

from __future__ import annotations

import pytest

from tests.support.proc import Family

pytestmark = pytest.mark.trainer


def run(work, do: str, world: int = 2, module: str = "packed_bridge", **what) -> None:
    with Family(work) as family:
        family.ranks(module, world, side="here", PYTHONWARNINGS="ignore").ask(do, timeout=420, **what)


@pytest.mark.parametrize("kind", ["fsdp", "tensors"])
def test_buckets_hold_what_torch_gathers(tmp_path, kind):
    run(tmp_path, kind, 3, "packed_tensors")


@pytest.mark.slow
def test_a_replaced_parameter_is_noticed_on_both_stages(tmp_path):
    run(tmp_path, "stale", folder=str(tmp_path), cases=["replaced"])


@pytest.mark.slow
def test_tasks_that_went_stale_are_made_anew_on_all_ranks(tmp_path):
    """Adapters were attached, process groups made again, parameters offloaded, a router's bias turned fp32."""
    run(tmp_path, "stale", folder=str(tmp_path), cases=["lora", "regrouped", "offloaded", "flipped"])


@pytest.mark.slow
def test_buckets_hold_what_bridge_exports(tmp_path):
    run(tmp_path, "values", 4, folder=str(tmp_path))


@pytest.mark.slow
def test_experts_that_the_checkpoint_has_fused_are_exported_in_one_call(tmp_path):
    """Bridge yields such a tensor with the last of its experts: split over buckets it would never come. What it keeps when a gather
    fails must not be in the next one, where the first expert would find the others' old weights."""
    run(tmp_path, "fused", folder=str(tmp_path))
