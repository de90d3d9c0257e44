"""Refuses live models that vLLM processed after loading: a new layout of weights, or tensors that attention computed from them.

copies.py finds other tensors outside parameters and buffers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from xfer.engines import vllm_cpu
from xfer.engines.copies import variants
from xfer.errors import Unsupported

_AS_LOADED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
_MOE_AS_LOADED = ("TRITON", "BATCHED_TRITON")
_ELSE = "or have vLLM's own loader make them from whole tensors: connect(route=xfer.Packed())"


def refuse_processed(model: torch.nn.Module, prefix: str = "") -> None:
    """Refuse modules whose live weights may have another layout than the loaded ones.

    Some processing keeps shape and dtype (FlashInfer swaps the halves of w13), so the result does not show it. This function
    therefore accepts only the methods that are known to leave weights alone.

    Raises:
        Unsupported: It names every such module.
    """
    bad: list[str] = []
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if method is None:
            continue
        method = getattr(method, "old_quant_method", method)  # wrapped around another for LoRA and elastic experts
        kind = type(method).__name__
        if kind not in _AS_LOADED:
            bad.append(
                f"{prefix}{name}: {kind}: weights in this form need scales and layouts that xfer does not move; start vLLM "
                f"without quantization, {_ELSE}"
            )
        elif hasattr(method, "unquantized_backend"):
            backend = getattr(method.unquantized_backend, "name", str(method.unquantized_backend))
            if backend == "CPU" and not vllm_cpu.installed():
                bad.append(f"{prefix}{name}: experts packed for the CPU; set XFER_CPU_RESIDENT=1 where vLLM is started")
            elif backend != "CPU" and backend not in _MOE_AS_LOADED:
                bad.append(
                    f"{prefix}{name}: MoE backend {backend} lays experts out anew; start vLLM with moe_backend='triton', {_ELSE}"
                )
    bad += _copies_in_attention(model)
    if bad:
        raise Unsupported("this engine processed its weights after loading them", bad)


def _copies_in_attention(model: torch.nn.Module) -> list[str]:
    """One line per tensor that an attention implementation computed after loading and keeps (FlashInfer: sinks in fp32).

    An implementation is not a module, so no layout contains the tensor, and a refit of the parameter would not change it.
    """
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    bad = []
    for name, module in model.named_modules():
        for part in variants(module):
            definers = [c for c in type(part).__mro__ if "process_weights_after_loading" in vars(c)]
            if not definers or inspect.isabstract(definers[0]):  # none but the abstract base's, which does nothing
                continue
            bad += [
                f"{name}: {type(part).__name__} computed {key} from weights and refits cannot reach it; "
                "start vLLM with another attention backend"
                for key, t in vars(part).items()
                if isinstance(t, torch.Tensor) and t.is_floating_point() and t.untyped_storage()._cdata not in own
            ]
    return bad
