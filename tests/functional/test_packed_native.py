"""xfer's gather as the source of vLLM's own transfer backends. Those need GPUs to run; here is what a CPU can show: vLLM's
own check of a source, its own packing and unpacking, and its own typed messages take what xfer gives.
"""

from __future__ import annotations

import pytest
import torch

from xfer.trainers.dtensor import TensorTrainer

pytestmark = pytest.mark.engine


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(9, 5, bias=True), torch.nn.Linear(5, 7)).to(torch.bfloat16)
    m.register_buffer("scale", torch.arange(3, dtype=torch.float32))
    return m


def test_vllm_finds_that_what_is_declared_is_what_comes_at_every_sync(module):
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerWeightTransferEngine,
        NCCLWeightTransferUpdateInfo,
    )

    from xfer.trainers.weight_source import weight_source

    source = weight_source(TensorTrainer(module), bucket_bytes=256)
    for step in range(3):
        with torch.no_grad():
            module[0].weight.add_(1)
            if step == 1:  # objects replaced between two syncs
                module[1].weight = torch.nn.Parameter(module[1].weight.detach() * 2)
            if step == 2:  # another dtype
                module.scale = module.scale.double()
        meta = source.metadata()
        got = dict(NCCLTrainerWeightTransferEngine._checked_iter(source, meta))
        want = dict(module.named_parameters()) | dict(module.named_buffers())
        assert got.keys() == want.keys()
        for name, tensor in got.items():
            assert tensor.dtype == want[name].dtype and torch.equal(tensor, want[name])
        NCCLWeightTransferUpdateInfo(
            names=[m.name for m in meta],
            dtype_names=[str(m.dtype).split(".")[-1] for m in meta],
            shapes=[list(m.shape) for m in meta],
        )
        assert [n for g in source.groups() for n in g]  # vLLM's own grouping runs over it


def test_vllm_packs_and_unpacks_what_comes(module):
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

    from xfer.trainers.weight_source import weight_source

    source, got = weight_source(TensorTrainer(module)), {}
    stream = iter(source)
    while (chunk := pack_tensors(stream, lambda item: item[1].detach().clone(), 64)) is not None:
        parts = unpack_tensor(chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes)
        got |= {name: tensor.clone() for name, tensor in parts}
    want = dict(module.named_parameters()) | dict(module.named_buffers())
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
