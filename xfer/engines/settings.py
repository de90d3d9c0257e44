"""Settings of a vLLM with which a refit would end well and the engine would still compute with old weights, told from its
configuration, before anything of a model is read. Both routes ask. Not here: what is told from a live model (processed.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from xfer.engines.offload import refuse_offloaded
from xfer.errors import Unsupported

TRUSTED = "XFER_TRUST_CONNECTORS"
"""In an engine's environment: class names, with commas, of connectors whose caches the engine's owner answers for."""


def refuse_settings(vllm_config: Any, workers: int = 0) -> None:
    """Unsupported, naming settings; see each. `workers`: of the replica, as its controller counts them; 0: unknown."""
    parallel = getattr(vllm_config, "parallel_config", None)
    # In the workers of a dense model vLLM hides how many data-parallel ranks there are; behind a hybrid balancer nothing tells then.
    if workers and (_external(parallel) or getattr(parallel, "data_parallel_size", 1) > 1):
        refuse_unreached(parallel, workers)
    refuse_offloaded(vllm_config)
    refuse_shared_weights(vllm_config)
    refuse_calculated_scales(getattr(vllm_config, "cache_config", None))
    refuse_kept_results(vllm_config)


def refuse_unreached(parallel_config: Any, workers: int) -> None:
    """`workers` where vLLM's client, which is behind a load balancer of data-parallel ranks, reaches its own host's only, or its
    own rank's: the others would be waited for."""
    if not getattr(parallel_config, "local_engines_only", False):
        return
    ranks = 1 if _external(parallel_config) else max(1, parallel_config.data_parallel_size_local)
    if (reached := parallel_config.world_size * ranks) < workers:
        raise Unsupported(
            f"this engine's client reaches {reached} of its {workers} workers: its data-parallel ranks are balanced from outside",
            [
                "start vLLM with its own load balancer (no --data-parallel-rank, --data-parallel-external-lb or "
                "--data-parallel-hybrid-lb), so that one client reaches all of them"
            ],
        )


def refuse_part(vllm_config: Any) -> None:
    """Unsupported for an engine of several processes, each with one worker and an `LLM`.

    A refit pauses an engine between two batches. Here every process has its own batches and its own pause, so one could wait in an
    all-reduce for another that is paused already.
    """
    parallel: Any = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and parallel.world_size > 1:
        raise Unsupported(
            f"this LLM holds one worker of an engine of {parallel.world_size} processes, and reaches no other "
            "(distributed_executor_backend='external_launcher')",
            [
                "start the engine in one process, with distributed_executor_backend='mp', and call xfer.serve() there",
                "or give each process a whole engine (tensor_parallel_size=1), with serve(replica=RANK) and connect(replicas=WORLD_SIZE)",
                "or call xfer.serve() in one process only, with an object that forwards vLLM's calls to the LLM of every process, "
                "while none of them generates (CallableEngine in xfer/engines/remote.py)",
            ],
        )


def _external(parallel_config: Any) -> bool:
    return getattr(parallel_config, "data_parallel_external_lb", False)


def refuse_shared_weights(vllm_config: Any) -> None:
    """Weights mapped from a daemon of vLLM's that other engines map, too, also one that is not paused, and that a restarted engine
    takes for the checkpoint. Also where the loader may have read the disk instead, which its setting does not say."""
    configs = {"load_format": getattr(vllm_config, "load_config", None)}
    spec = getattr(vllm_config, "speculative_config", None)
    configs["draft_load_config"] = getattr(
        spec, "draft_load_config", None
    )  # without one a drafter loads as the model does
    bad = [
        f'{name}: ipc_cache maps a daemon\'s memory into this engine; set "mode": "copy" in its model_loader_extra_config, or load '
        "otherwise"
        for name, config in configs.items()
        if getattr(config, "load_format", "") == "ipc_cache"
        and (config.model_loader_extra_config or {}).get("mode", "zero_copy") != "copy"
    ]
    if bad:
        raise Unsupported("this engine's weights may lie in memory that other engines serve from", bad)


def refuse_calculated_scales(cache_config: Any) -> None:
    """vLLM before 0.32 takes scales of a quantized KV cache from the first forward and then keeps them: from the weights of that day,
    be they the random ones of load_format="dummy"."""
    kind = getattr(cache_config, "cache_dtype", "auto")
    if getattr(cache_config, "calculate_kv_scales", False) and kind not in ("auto", "bfloat16", "float16", "float32"):
        raise Unsupported(
            f"the scales of this engine's KV cache ({kind}) are calculated once, from the first weights, and stay after refits",
            ["start vLLM without calculate_kv_scales: scales are 1 then, or the checkpoint's"],
        )


def refuse_kept_results(vllm_config: Any) -> None:
    """KV and encoder connectors that keep what old weights computed where no reset of vLLM's reaches it.

    Its scheduler takes a connector that has no `reset_cache` for one that was reset, and keys of such caches carry no version
    of weights. So the class is asked whether it has one. A connector's own word that it did not work is another matter: that
    fails the refit (Handle.reset_caches).
    """
    trusted = {name.strip() for name in os.environ.get(TRUSTED, "").split(",")}
    bad: list[str] = []
    kv = getattr(vllm_config, "kv_transfer_config", None)
    for name, why in _unreset(kv) if kv is not None and kv.kv_connector else ():
        bad += [] if name in trusted else [f"kv_transfer_config: {name} {why}"]
    ec = getattr(vllm_config, "ec_transfer_config", None)
    if ec is not None and ec.ec_connector and ec.ec_connector not in trusted:
        bad.append(f"ec_transfer_config: {ec.ec_connector}: vLLM has no reset for encoder connectors")
    if bad:
        raise Unsupported(
            "what older weights computed would be loaded again after a refit, from caches that vLLM does not reset",
            [
                *bad,
                f"start vLLM without it; or, if it keeps nothing from one request to the next or you empty it yourself at every "
                f"refit, name the class in {TRUSTED} where vLLM is started",
            ],
        )


def _unreset(kv: Any) -> Iterator[tuple[str, str]]:
    """(class, why) of a connector, or of each in one that has several."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    kind, extra = KVConnectorFactory.get_connector_class(kv), kv.kv_connector_extra_config or {}
    for inner in extra.get("connectors", ()):
        yield from _unreset(KVTransferConfig(**{"engine_id": kv.engine_id, **inner}))
    if kind.reset_cache is KVConnectorBase_V1.reset_cache:
        yield kind.__name__, "has no reset_cache()"
    elif tiers := extra.get("secondary_tiers"):
        names = ", ".join(str(t.get("type", t)) if isinstance(t, dict) else str(t) for t in tiers)
        yield kind.__name__, f"resets its first tier only, not the secondary ones ({names})"
