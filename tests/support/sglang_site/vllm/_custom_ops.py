"""The names that SGLang imports. It calls none of them on a CPU without AMX."""

from __future__ import annotations


def _absent(*args: object, **kwargs: object) -> None:
    raise RuntimeError("an operator of vLLM was called: it is a stand-in here")


rotary_embedding = rms_norm = fused_add_rms_norm = _absent
