"""Refuses vLLM's weight offloading, which keeps the weights of layers in host memory between forwards.

That memory is outside the module tree: the next forward would overwrite what a refit writes to the tree.
"""

from __future__ import annotations

from typing import Any

from xfer.errors import Unsupported


def refuse_offloaded(vllm_config: Any) -> None:
    """Raise Unsupported that names each setting by which weights are offloaded."""
    config = getattr(vllm_config, "offload_config", None)
    if config is None:  # vLLM before it had one
        found = {"cpu_offload_gb": getattr(vllm_config.cache_config, "cpu_offload_gb", 0)}
    else:
        uva, prefetch = config.uva.cpu_offload_gb, config.prefetch.offload_group_size
        found = {
            "cpu_offload_gb": uva if config.offload_backend != "prefetch" else 0,
            "offload_group_size": prefetch if config.offload_backend != "uva" else 0,
        }
    bad = [f"{name}={value:g}: start vLLM without it" for name, value in found.items() if value]
    if bad:
        raise Unsupported("weight offloading keeps weights of this engine where refits cannot reach them", bad)
