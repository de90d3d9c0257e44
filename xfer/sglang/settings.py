"""SGLang's settings under which a refit would leave old weights, or results of them, behind."""

from __future__ import annotations

from typing import Any

from xfer.errors import Unsupported

REFUSED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("pp_size", (1,), "pipeline stages take a call one after another, and a refit needs all of them at once"),
    ("quantization", (None,), "weights in this form need scales and layouts that xfer does not move"),
    ("enable_eplb", (False,), "this engine moves experts between workers while it serves"),
    ("ep_num_redundant_experts", (0,), "experts that several workers hold are loaded by a map that is not traced"),
    ("enable_lora", (None, False), "adapters wrap layers under other names than the loader's"),
    ("speculative_algorithm", (None,), "a drafter is a second model, which would go on drafting with old weights"),
    ("weight_cache_mode", ("off",), "weights lie in memory that other engines serve from"),
    ("cpu_offload_gb", (0,), "offloaded weights are copied over what a refit wrote"),
    ("offload_group_size", (-1, 0), "offloaded weights are copied over what a refit wrote"),
    ("hicache_storage_backend", (None,), "SGLang does not drop this cache, which keeps results of old weights"),
    ("enable_lmcache", (False,), "SGLang does not drop this cache, which keeps results of old weights"),
    ("enable_flexkv", (False,), "SGLang does not drop this cache, which keeps results of old weights"),
    ("enable_unified_cache_external_linker", (False,), "SGLang does not drop this cache, which keeps results of old weights"),
    ("disaggregation_mode", ("null",), "an engine of separate prefill and decode was not tried"),
)  # fmt: skip
"""(field of ServerArgs, the values that refits allow, the reason). A release without the field is accepted."""


def refuse_settings(runner: Any) -> None:
    """Raise Unsupported that names all settings that stand in the way.

    Args:
        runner: SGLang's ModelRunner.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    refuse(resolving_view(runner.server_args))


def refuse(settings: object) -> None:
    """Do the same for an object with the fields of ServerArgs."""
    bad = []
    for field, allowed, why in REFUSED:
        value = getattr(settings, field, allowed[0])
        if value not in allowed:
            bad.append(f"{field}={value!r}: {why}")
    if bad:
        raise Unsupported("this SGLang engine cannot be refitted", bad)
