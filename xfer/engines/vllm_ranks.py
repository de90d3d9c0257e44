"""The layout of any worker of a vLLM replica, read in one process, with vLLM built for CPUs or for GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from xfer.engines.meta_model import fake_rank, make_config

if TYPE_CHECKING:
    from xfer.mesh.parallel import EngineParallel


@contextmanager
def rank_of(hf_config: str | Mapping, parallel: EngineParallel, rank: int, **options: object) -> Iterator[object]:
    """Yields the VllmConfig of one worker, inside vLLM's groups as that worker sees them.

    Args:
        hf_config: a folder with config.json, or its contents.
        parallel: sizes of one replica.
        rank: number of the worker, in vLLM's order.
        options: further EngineArgs.
    """
    _build_as_on_gpus()
    config = make_config(hf_config, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp, ep=parallel.ep, **options)
    with fake_rank(config, rank):
        yield config


@functools.cache
def _build_as_on_gpus() -> None:
    """On its CPU platform, lets vLLM build the layers that it builds on GPUs.

    On CPUs vLLM has one kind of experts, which packs weights after loading and needs a gate, and no sparse attention. No
    layer runs here, and the kernel of a layer does not change how the loader fills weights. Experts get the Triton
    backend, which keeps weights as they were loaded; an engine on GPUs needs it for refits, too. Some classes make CUDA
    events while they are built, for which vLLM's worker on CPUs has placeholders.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    with suppress(ImportError):  # releases without such classes
        import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, backend_to_kernel_cls
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    _fp8_as_on_gpus()
    triton = UnquantizedMoeBackend.TRITON
    method.select_unquantized_moe_backend = lambda moe_config: (triton, backend_to_kernel_cls(triton)[0])
    check, choose = FusedMoEConfig.__post_init__, CpuPlatform.get_attn_backend_cls.__func__

    def checked(self) -> None:
        try:
            check(self)
        except NotImplementedError:  # experts without a gate: the last thing that vLLM checks
            if self.is_act_and_mul:
                raise

    def chosen(cls, selected_backend, attn_selector_config, **more):
        # On a processor with AMX vLLM would choose a backend without sparse attention.
        asked = AttentionBackendEnum.CPU_MLA if attn_selector_config.use_mla else selected_backend
        return choose(cls, asked, attn_selector_config._replace(use_sparse=False), **more)

    FusedMoEConfig.__post_init__ = checked
    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def _fp8_as_on_gpus() -> None:
    """Give block FP8 the Triton kernels, too: those for CPUs need AMX, and repack weights after loading. Parameters for scales of the
    KV cache are left out: vLLM deletes them after loading."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear import TritonFp8BlockScaledMMKernel as kernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, backend_to_kernel_cls
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.platforms.interface import PlatformEnum

    triton = Fp8MoeBackend.TRITON
    BaseKVCacheMethod.create_weights = lambda self, layer: None
    kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [kernel]
    fp8.select_fp8_moe_backend = lambda *args, **more: (triton, backend_to_kernel_cls(triton)[0])
