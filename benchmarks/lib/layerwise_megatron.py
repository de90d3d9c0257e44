"""Megatron-Core's own layer-wise gather on the network of benchmarks.layerwise_gpu, blocking and overlapped.

Parameters, batch, inner optimizers (xfer's Muon, torch's Adam) and clocks are the same. Owners, buffers, hooks and gathers
are Megatron's: LayerWiseDistributedOptimizer without a parameter layout, with its all-gather of uneven sizes. Needs
Megatron-Core 0.17 or later, which needs Python 3.12 or later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.lib.layerwise_net import Net, Shape


def unavailable(cuda: bool) -> str | None:
    """Why Megatron's gather cannot run here, None if it can. Call it before anything of Megatron is imported."""
    try:
        if not cuda:
            from examples.common import megatron_cpu

            megatron_cpu.install()
            dist.all_gather = _uneven
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.optimizer import layer_wise_optimizer  # noqa: F401
    except ImportError as e:
        return f"not importable ({e})"
    if not hasattr(param_and_grad_buffer, "_LayerwiseAllGatherHandle"):
        return "older than 0.17, which gathers in step() only"
    return None


def version() -> str:
    import megatron.core

    return megatron.core.__version__


class Trained:
    """The network under Megatron's DDP and layer-wise optimizer: both the module and the optimizer of a `Step`."""

    def __init__(self, net: Net, groups: list, overlap: bool, bucket_bytes: int):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer import TransformerConfig

        trained = self

        class Announced(LayerWiseDistributedOptimizer):
            def allgather_params(self) -> None:  # the blocking gather
                trained.announce()
                if trained.gathers:
                    super().allgather_params()

        self.overlap, self.gathers, self.announce = overlap, True, lambda: None
        shape = dict(num_layers=len(net.blocks), hidden_size=net.embed.weight.shape[1], num_attention_heads=1)
        self.module = DistributedDataParallel(
            TransformerConfig(**shape, bf16=True),
            DistributedDataParallelConfig(
                overlap_grad_reduce=True,
                overlap_param_gather=overlap,
                use_distributed_optimizer=False,
                bucket_size=bucket_bytes // 2,  # elements of 16 bits
            ),
            net,
        )
        base = [g.optimizer([{"params": list(g.params), **_plain()}], **g.options) for g in groups]
        config = OptimizerConfig(bf16=True, lr=1e-3, clip_grad=0.0, overlap_param_gather=overlap)
        self.optimizer = Announced(
            base, config, ProcessGroupCollection.use_mpu_process_groups(), model_chunks=[self.module]
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)

    def zero_grad(self) -> None:
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.module.finish_grad_sync()
        self.optimizer.step()
        if self.overlap:  # gathers begin with the next forward
            self.announce()

    @property
    def buckets(self) -> int:
        return sum(len(g.buckets) for g in self.module.bucket_groups)


def _plain() -> dict:
    """The entries that Megatron's optimizers expect in a parameter group."""
    return dict(is_expert_parallel=False, is_decoupled_lr=False, wd_mult=1.0, lr_mult=1.0)


def measure(
    rank, shape: Shape, bucket_bytes: int, new: Callable[[], Net], groups: Callable[[Net], list], step_of, rounds: int
):
    """(forward ms, whole step ms, timelines), see Step.measure, the number of buckets, and bytes owned by rank."""
    import megatron.core.parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    mpu.initialize_model_parallel()
    if rank.cuda:
        model_parallel_cuda_manual_seed(1)
    forward, whole, lines = {}, {}, {}
    for overlap in (False, True):
        net = new()
        t = Trained(net, groups(net), overlap, bucket_bytes)

        def announce(hook, t=t) -> None:
            t.announce = hook

        def way(gathers: bool, t=t) -> Callable[[], None]:
            def choose() -> None:
                t.gathers, t.announce = gathers, lambda: None

            return choose

        ways = {"depth 1": way(True)} if overlap else {"none": way(False), "blocking": way(True)}
        seen = step_of(t, announce).measure(ways, rounds)
        for into, one in zip((forward, whole, lines), seen):
            into |= one
        owned = [sum(p.numel() * 2 for p in ps) for ps in t.optimizer.dp_cp_params_list]
        buckets = t.buckets
        del net, t, way, announce, ways, seen
        gc.collect()
        if rank.cuda:
            torch.cuda.empty_cache()
    mpu.destroy_model_parallel()
    return forward, whole, lines, buckets, owned


def _uneven(outputs: list, mine: torch.Tensor, group=None, async_op: bool = False):
    """An all-gather of uneven sizes, which gloo lacks: one broadcast per rank, for rehearsals without a GPU."""
    ranks = dist.get_process_group_ranks(group)
    at = ranks.index(dist.get_rank())
    outputs[at].copy_(mine)
    works = [dist.broadcast(t, r, group=group, async_op=True) for r, t in zip(ranks, outputs)]
    if not async_op:
        for w in works:
            w.wait()
        return None
    return works[-1]
