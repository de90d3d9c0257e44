"""xfer's gather as the source of vLLM's own transfer backends. Those need GPUs to run; on a CPU vLLM's own check of a source, its
packing and unpacking, and its typed messages accept what xfer gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import pytest
import torch

from xfer.trainers.dtensor import TensorTrainer
from xfer.trainers.weight_source import weight_source

pytestmark = pytest.mark.engine


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(9, 5, bias=True), torch.nn.Linear(5, 7)).to(torch.bfloat16)
    m.register_buffer("scale", torch.arange(3, dtype=torch.float32))
    return m


def same(got: dict, module: torch.nn.Module) -> None:
    want = dict(module.named_parameters()) | dict(module.named_buffers())
    assert got.keys() == want.keys()
    assert all(got[n].dtype == want[n].dtype and torch.equal(got[n], want[n]) for n in want)


def test_vllm_finds_that_tensors_match_their_declaration_at_every_sync(module):
    from vllm.distributed.weight_transfer import nccl_engine as nccl

    source = weight_source(TensorTrainer(module), bucket_bytes=256)
    for step in range(3):
        with torch.no_grad():
            module[0].weight.add_(1)
            if step == 1:  # objects replaced between two syncs
                module[1].weight = torch.nn.Parameter(module[1].weight.detach() * 2)
            if step == 2:  # another dtype
                module.scale = module.scale.double()
        meta = source.metadata()
        same(dict(nccl.NCCLTrainerWeightTransferEngine._checked_iter(source, meta)), module)
        nccl.NCCLWeightTransferUpdateInfo(
            names=[m.name for m in meta],
            dtype_names=[str(m.dtype).split(".")[-1] for m in meta],
            shapes=[list(m.shape) for m in meta],
        )
        assert [n for g in source.groups() for n in g], "vLLM's own grouping runs over it"


class NewerSource(ABC):
    """What vLLM 0.33.0 asks of a `WeightSource`; its backends drive `iter_full`."""

    def __init_subclass__(cls):
        assert isinstance(cls.__dict__["metadata"], cached_property)

    @property
    @abstractmethod
    def metadata(self): ...

    def iter_full(self):
        raise NotImplementedError


def test_a_source_has_the_form_that_a_newer_vllm_asks_for(module, monkeypatch):
    from vllm.distributed.weight_transfer import base

    monkeypatch.setattr(base, "WeightSource", NewerSource)
    source = weight_source(TensorTrainer(module), bucket_bytes=256)
    for _ in range(2):
        with torch.no_grad():
            module[0].weight.add_(1)
        got = dict(source.iter_full())
        same(got, module)
        assert [(m.name, m.dtype, m.shape) for m in source.metadata] == [(n, t.dtype, t.shape) for n, t in got.items()]


def test_vllm_packs_and_unpacks_the_tensors(module):
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

    stream, got = iter(weight_source(TensorTrainer(module))), {}
    while (chunk := pack_tensors(stream, lambda item: item[1].detach().clone(), 64)) is not None:
        parts = unpack_tensor(chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes)
        got |= {name: tensor.clone() for name, tensor in parts}
    same(got, module)
