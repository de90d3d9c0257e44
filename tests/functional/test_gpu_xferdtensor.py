"""`xferdtensor` on real GPUs: bits, what is kept between calls, errors; by mapped memory and over NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu_dtensor import spawn

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_gpus_by_mapped_memory_and_over_nccl(backend, tmp_path):
    for found in spawn(2, tmp_path, backend, "by_both_routes"):
        assert found["mapped"]["pulled"] and not found["mapped"]["sent"]
        assert found["nccl"]["sent"] and not found["nccl"]["pulled"]


def test_ranks_that_share_gpus_by_mapped_memory_alone(tmp_path):
    for found in spawn(4, tmp_path, "gloo", "by_mapped_memory"):
        assert found["mapped"]["pulled"] and not found["mapped"]["sent"]
