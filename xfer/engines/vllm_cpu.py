"""Keeps the weights of vLLM's CPU engine in their parameters. For tests on machines without a GPU, and for nothing
else.

After loading, vLLM's CPU worker packs every linear weight into a oneDNN or SGL kernel object and leaves an *empty*
parameter behind, and replaces expert weights by packed ones of, at times, the same shape. What a refit writes into such
parameters is never read: the engine would go on serving the old weights with every checksum green. Unquantised GPU
engines do neither, so to test on CPU what happens on GPUs, the weights must stay where the loader put them and be read
from there at each call.

`install` swaps the two places where vLLM packs. Outputs are those of other kernels then (F.linear, a loop over
experts): slower, and equal bit for bit only to another engine that runs resident too. It is off unless
XFER_CPU_RESIDENT=1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xfer.errors import Unsupported

_installed = False


def installed() -> bool:
    """Whether CPU weights of this process stay in their parameters."""
    return _installed


def install() -> None:
    """Idempotent. Must run before a model is built; models built before keep their packed weights.

    Raises Unsupported when this vLLM does not have the functions that are swapped, rather than leaving half of them
    packed.
    """
    global _installed
    if _installed:
        return
    import vllm._custom_ops  # noqa: F401  (chooses its library by what the CPU can do: before that is denied below)
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    swaps = [
        (utils, "dispatch_cpu_unquantized_gemm", _leave_in_parameter),  # its callers import it by name at call time
        (CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None),
        (CPUUnquantizedExperts, "apply", _apply_experts),
        # With AMX, MLA packs kv_b_proj inside its attention backend. vLLM asks torch whether the CPU has it; say no, so
        # that it takes the backend that reads the parameter, whatever machine the tests run on.
        (torch.cpu, "_is_amx_tile_supported", lambda: False),
        # Likewise for the packed weights of causal convolutions, which gated delta nets read where the CPU has bf16.
        (torch.cpu, "_is_avx512_bf16_supported", lambda: False),
    ]
    missing = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in swaps if not hasattr(owner, name)]
    if missing:
        raise Unsupported("this vLLM packs CPU weights in another way than the one xfer can turn off", missing)
    for owner, name, replacement in swaps:
        setattr(owner, name, replacement)
    _installed = True


def _leave_in_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stands in for the packing of one linear or embedding layer: its `cpu_linear(x, weight, bias)` reads what it is
    given. Causal convolutions come here too, and are read from their weight anyhow."""
    del remove_weight
    layer.cpu_linear = F.linear


def _apply_experts(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, *_, **__
) -> None:
    """The experts of this rank, one at a time, straight from the live weights; the signature is vLLM's.

    hidden_states [T, H]; w1 [E, 2I, H] gate above up; w2 [E, H, I]; topk_* [T, K]; output [T, H] = sum over the local
    experts of weight * w2 @ (act(gate) * up). Sums are kept in float32, in expert order, so that runs repeat exactly.
    """
    act = {"silu": F.silu, "gelu": F.gelu}.get(activation.value)
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
