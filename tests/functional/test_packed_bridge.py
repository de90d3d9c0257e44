"""What the packed route gathers from real Megatron-Core + Bridge ranks is what Bridge exports, also where conversion tasks went
stale. The ranks and their assertions are tests/support/packed_bridge.py.
"""

from __future__ import annotations

import pytest

from tests.functional.megatron_launch import launch

pytestmark = pytest.mark.trainer


def run(folder, mode: str, *names: str, world: int = 2) -> None:
    launch("../support/packed_bridge.py", mode, str(folder), *names, world=world, folder=folder)


def test_a_replaced_parameter_is_noticed_on_both_stages(tmp_path):
    run(tmp_path, "stale", "replaced")


@pytest.mark.slow
def test_tasks_that_went_stale_are_made_anew_on_all_ranks(tmp_path):
    """Adapters were attached, process groups made again, parameters offloaded, a router's bias turned fp32."""
    run(tmp_path, "stale", "lora", "regrouped", "offloaded", "flipped")


@pytest.mark.slow
def test_buckets_hold_what_bridge_exports(tmp_path):
    run(tmp_path, "values", world=4)


@pytest.mark.slow
def test_experts_that_the_checkpoint_has_fused_are_exported_in_one_call(tmp_path):
    """Bridge yields such a tensor with the last of its experts: split over buckets it would never come. What it keeps when a gather
    fails must not be in the next one, where the first expert would find the others' old weights."""
    run(tmp_path, "fused")
