"""Data-parallel ranks of vLLM's CPU engine exchange tokens for experts by gathers and sums of unequal parts, which its CPU
communicator lacks in 0.32 (DeviceCommunicatorBase raises NotImplementedError). Here they are made of those that it has.

For tests of engines only; not here: anything about weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def install() -> None:
    """In the worker, before a group is made. Leaves a vLLM alone that has them."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name, method in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if name not in vars(CpuCommunicator):
            setattr(CpuCommunicator, name, method)


def _all_gatherv(self, input_, dim: int = 0, sizes: list[int] | None = None):
    """`sizes`: number of rows of each rank, the same for all tensors of a list."""
    if isinstance(input_, list):
        return [_all_gatherv(self, t, dim, sizes) for t in input_]
    if dim != 0:
        raise NotImplementedError("only dim 0")
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Sums are taken in float32, which two ranks do in any order alike."""
    if dim != 0:
        raise NotImplementedError("only dim 0")
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.float()  # a copy, unless it is float32 already
    total = total.clone() if total is input_ else total
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].to(input_.dtype)
