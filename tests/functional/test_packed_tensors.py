"""The packed route's gather from FSDP2 modules, DTensors and plain tensors on three gloo ranks, which compare it with torch's own
`full_tensor()`: tests/support/packed_tensors.py.
"""

from __future__ import annotations

import pytest

from tests.functional.megatron_launch import launch


@pytest.mark.trainer
def test_buckets_hold_what_torch_gathers(tmp_path):
    launch("../support/packed_tensors.py", world=3, folder=tmp_path)
