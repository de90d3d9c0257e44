"""What `weight_source` says where vLLM's own classes are not to be had; with them: tests/functional/test_packed_native.py."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from xfer.errors import Unsupported
from xfer.trainers.dtensor import TensorTrainer
from xfer.trainers.weight_source import weight_source

BASE = "vllm.distributed.weight_transfer.base"


@pytest.mark.parametrize("base", [None, ModuleType(BASE)], ids=["no vLLM", "vLLM 0.25"])
def test_a_vllm_without_weight_sources_is_refused_by_its_version(monkeypatch, base):
    for name in (BASE.rsplit(".", n)[0] for n in range(4)):
        monkeypatch.setitem(sys.modules, name, base and ModuleType(name))
    with pytest.raises(Unsupported, match="vLLM 0.26 or later"):
        weight_source(TensorTrainer(torch.nn.Linear(2, 2)))
