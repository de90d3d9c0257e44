"""Keeps the weights of vLLM's CPU engine in their parameters, for tests on machines without a GPU only.

After loading, vLLM's CPU worker packs every linear weight into a oneDNN or SGL kernel object and leaves an *empty*
parameter behind. It also replaces expert weights by packed ones, sometimes of the same shape. No kernel reads what a refit
writes to such parameters: the engine would go on serving the old weights while every checksum is right. Unquantised GPU
engines do neither. To test on the CPU what happens on GPUs, the weights must stay in their parameters, and every call
must read them there.

`install` replaces the functions by which vLLM packs. Other kernels then compute the outputs (F.linear, a loop over
experts): they are slower, and equal bit for bit only to those of another engine with resident weights. This is off
unless XFER_CPU_RESIDENT=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from xfer.errors import Unsupported
from xfer.trace.derived import BLOCK

_installed = False


def installed() -> bool:
    """Return whether CPU weights of this process stay in their parameters."""
    return _installed


_OTHERWISE = "this vLLM packs CPU weights in another way than the one xfer can turn off"


def install() -> None:
    """Replace the functions by which vLLM packs weights. Idempotent. Models that were built before stay packed.

    Raises:
        Unsupported: This vLLM does not have all of these functions. None is replaced.
    """
    global _installed
    if _installed:
        return
    import vllm._custom_ops  # noqa: F401  (chooses its library by the CPU's features, which must happen before they are denied below)
    from vllm.model_executor.layers import utils

    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError as e:
        raise Unsupported(_OTHERWISE, [str(e)]) from e
    swaps = [
        (utils, "dispatch_cpu_unquantized_gemm", _leave_in_parameter),  # its callers import it by name at call time
        (CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None),
        (CPUUnquantizedExperts, "apply", _apply_experts),
        # With AMX, MLA packs kv_b_proj inside its attention backend. Deny AMX, so that vLLM chooses the backend that reads
        # the parameter on every machine.
        (torch.cpu, "_is_amx_tile_supported", lambda: False),
        # With bf16, gated delta nets read packed weights of causal convolutions. Deny that too.
        (torch.cpu, "_is_avx512_bf16_supported", lambda: False),
        *_block_fp8(),
    ]
    missing = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in swaps if not hasattr(owner, name)]
    if missing:
        raise Unsupported(_OTHERWISE, missing)
    for owner, name, replacement in swaps:
        setattr(owner, name, replacement)
    _installed = True


class _CpuLayer(Protocol):
    """A layer of vLLM's CPU engine. It computes its output by `cpu_linear(x, weight, bias)`."""

    cpu_linear: Callable[..., torch.Tensor]


def _leave_in_parameter(layer: _CpuLayer, remove_weight: bool) -> None:
    """Replaces the packing of one linear or embedding layer: its `cpu_linear(x, weight, bias)` reads the parameter.

    vLLM also calls this for causal convolutions, whose kernels read the parameter in any case.
    """
    del remove_weight
    layer.cpu_linear = F.linear


def _block_fp8() -> list[tuple[type, str, object]]:
    """Replacements for block FP8, whose own kernels need AMX and pack. A vLLM without them has no such CPU engine.

    Weights and scales stay as the checkpoint has them, and activations stay in bf16.
    """
    try:
        from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:
        return []
    if not hasattr(cpu_moe, "CPUExpertsFp8"):
        return []
    return [
        (CPUFp8BlockScaledMMKernel, "is_supported", classmethod(lambda cls, compute_capability=None: (True, None))),
        (CPUFp8BlockScaledMMKernel, "process_weights_after_loading", lambda self, layer: None),
        (CPUFp8BlockScaledMMKernel, "apply_weights", _apply_block_fp8),
        (cpu_moe, "prepare_fp8_moe_layer_for_cpu", lambda w13, w2: (w13, w2)),
        (cpu_moe.CPUExpertsFp8, "_supports_current_device", staticmethod(lambda: True)),
        (cpu_moe.CPUExpertsFp8, "apply", _apply_fp8_experts),
    ]


def _dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight` [..., R, C] in e4m3 times its scales [..., ceil R/128, ceil C/128], in `dtype`."""
    rows, cols = weight.shape[-2:]
    spread = scale.repeat_interleave(BLOCK, dim=-2)[..., :rows, :].repeat_interleave(BLOCK, dim=-1)[..., :cols]
    return (weight.to(torch.float32) * spread).to(dtype)


def _apply_block_fp8(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None, **_) -> torch.Tensor:
    """Compute a linear layer from its live weight and scales. The signature is vLLM's."""
    params = self._get_layer_params(layer)
    scale = params.weight_scale if params.weight_scale_inv is None else params.weight_scale_inv
    return F.linear(x, _dequantized(params.weight, scale, x.dtype), bias)


def _apply_fp8_experts(self, output, hidden_states, w1, w2, *args, **more) -> None:
    """Do `_apply_experts` with FP8 weights and the scales that lie beside them."""
    dtype = hidden_states.dtype
    w1, w2 = _dequantized(w1, self.w1_scale, dtype), _dequantized(w2, self.w2_scale, dtype)
    _apply_experts(self, output, hidden_states, w1, w2, *args, **more)


def _apply_experts(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, *_, **__
) -> None:
    """Compute the experts of this rank one by one from the live weights. The signature is vLLM's.

    hidden_states [T, H]; w1 [E, 2I, H] gate above up; w2 [E, H, I]; topk_* [T, K]; output [T, H] = sum over the local
    experts of weight * w2 @ (act(gate) * up). Sums are kept in float32, in expert order, so that runs repeat exactly.
    """
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": F.gelu}
    act = known.get(activation.value)
    if act is None:
        raise Unsupported(f"resident CPU experts do not know the activation {activation.value!r}")
    local = topk_ids.long()
    if expert_map is not None:
        local = expert_map.to(local.device).long()[local]  # -1: that expert lives on another rank
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        token, choice = (local == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        bias1 = None if self.w1_bias is None else self.w1_bias[expert]
        bias2 = None if self.w2_bias is None else self.w2_bias[expert]
        gate, up = F.linear(hidden_states[token], w1[expert], bias1).chunk(2, dim=-1)
        out = F.linear(act(gate) * up, w2[expert], bias2)
        total.index_add_(0, token, out.float() * topk_weights[token, choice, None].float())
    output.copy_(total)
