"""vLLM's weight offloading: layers whose weights lie in host memory between forwards, outside the module tree. What a refit
writes to the tree there is overwritten by the next forward, so such engines are refused. Here is only how they are told.
"""

from __future__ import annotations

from typing import Any

from xfer.errors import Unsupported


def refuse_offloaded(vllm_config: Any) -> None:
    """Unsupported, naming each setting that keeps weights elsewhere."""
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
