"""Refuses settings of vLLM with which a refit would succeed and the engine would still compute with old weights.

Both routes check the configuration before they read the model. processed.py checks the live model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from xfer.errors import Unsupported

TRUSTED = "XFER_TRUST_CONNECTORS"
"""Variable in an engine's environment: comma-separated class names of connectors whose caches the engine's owner resets, or
which keep nothing."""
PLAIN_CACHES = ("auto", "bfloat16", "float16", "float32")
"""vLLM's names of KV caches that are not quantized."""


def refuse_settings(vllm_config: Any, workers: int = 0) -> None:
    """Refuse settings that the functions below describe.

    Args:
        vllm_config: The engine's configuration.
        workers: Number of workers of the replica, as its controller counts them; 0: unknown.

    Raises:
        Unsupported: It names the settings.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    # The workers of a dense model see data_parallel_size=1. With a hybrid load balancer they cannot find the true number.
    if workers and (_external(parallel) or getattr(parallel, "data_parallel_size", 1) > 1):
        refuse_unreached(parallel, workers)
    refuse_offloaded(vllm_config)
    refuse_shared_weights(vllm_config)
    refuse_calculated_scales(getattr(vllm_config, "cache_config", None))
    refuse_kept_results(vllm_config)


def has_drafter(vllm_config: Any) -> bool:
    """Return whether an engine drafts with a second model. One that looks drafts up in the prompt (ngram) does not: vLLM then has the
    served model's configuration in the place of a drafter's."""
    config: Any = getattr(vllm_config, "speculative_config", None)
    return getattr(config, "draft_model_config", None) is not None and not config.method.startswith("ngram")


def refuse_unreached(parallel_config: Any, workers: int) -> None:
    """Refuse a vLLM client that reaches fewer than `workers` workers.

    Behind a load balancer of data-parallel ranks, a client reaches only the ranks of its host, or only its own rank. A refit
    would wait for the others until its deadline.
    """
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
    """Refuse an engine of several processes, each with one worker and an `LLM`.

    A refit pauses an engine between two batches. Each of these processes has batches and a pause of its own, so one could wait
    in an all-reduce for another that is already paused.
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


def refuse_offloaded(vllm_config: Any) -> None:
    """Refuse weights of layers that vLLM keeps in host memory between forwards.

    That memory is outside the module tree: the next forward would overwrite what a refit writes to the tree.
    """
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


def refuse_shared_weights(vllm_config: Any) -> None:
    """Refuse weights that vLLM maps from the memory of a daemon.

    Other engines map the same memory, even while they serve, and a restarted engine takes it for the checkpoint. The loader
    may have read the disk instead; the setting does not show it, so such engines are refused too.
    """
    configs = {"load_format": getattr(vllm_config, "load_config", None)}
    spec = getattr(vllm_config, "speculative_config", None)
    # Without a draft_load_config, a drafter loads as the model does.
    configs["draft_load_config"] = getattr(spec, "draft_load_config", None)
    bad = [
        f'{name}: ipc_cache maps a daemon\'s memory into this engine; set "mode": "copy" in its model_loader_extra_config, or load '
        "otherwise"
        for name, config in configs.items()
        if config is not None
        and getattr(config, "load_format", "") == "ipc_cache"
        and (config.model_loader_extra_config or {}).get("mode", "zero_copy") != "copy"
    ]
    if bad:
        raise Unsupported("this engine's weights may lie in memory that other engines serve from", bad)


def refuse_calculated_scales(cache_config: Any) -> None:
    """Refuse scales of a quantized KV cache that vLLM before 0.32 computes in the first forward and then keeps.

    They come from the weights of that moment, which may be the random ones of load_format="dummy".
    """
    kind = getattr(cache_config, "cache_dtype", "auto")
    if getattr(cache_config, "calculate_kv_scales", False) and kind not in PLAIN_CACHES:
        raise Unsupported(
            f"the scales of this engine's KV cache ({kind}) are calculated once, from the first weights, and stay after refits",
            ["start vLLM without calculate_kv_scales: scales are 1 then, or the checkpoint's"],
        )


def refuse_kept_results(vllm_config: Any) -> None:
    """Refuse KV and encoder connectors that keep results of old weights and that vLLM does not reset.

    vLLM's scheduler reports success for a connector without `reset_cache`, and the keys of such caches carry no version of
    the weights. So this checks whether the class has that method. If a connector's own reset fails, the refit fails
    (Handle.reset_caches).
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
            "after a refit this engine would load results of older weights from caches that vLLM does not reset",
            [
                *bad,
                f"start vLLM without it; or, if it keeps nothing from one request to the next or you empty it yourself at every "
                f"refit, name the class in {TRUSTED} where vLLM is started",
            ],
        )


def _unreset(kv: Any) -> Iterator[tuple[str, str]]:
    """Yield (class, reason) of each connector that vLLM does not reset."""
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
