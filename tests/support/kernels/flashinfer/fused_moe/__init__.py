"""The kernel in torch. CUDA graphs can capture it."""

import torch
import torch.nn.functional as F

trtllm_fp4_block_scale_moe = None
BLOCK = 128


def cutlass_fused_moe(
    *, input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, quant_scales, output, ep_rank,
    use_deepseek_fp8_block_scale, **_,
):  # fmt: skip
    """output [T, H] = sum over the rank's experts of scale * w2 @ (silu(gate) * up).

    input [T, H]; token_* [T, K]; fc1_expert_weights [E, 2I, H], up above gate; fc2_expert_weights [E, H, I]; quant_scales: in block
    FP8, those of both.
    """
    total = torch.zeros(input.shape, dtype=torch.float32, device=input.device)
    count = len(fc1_expert_weights)
    for e in range(count):
        w1, w2 = fc1_expert_weights[e], fc2_expert_weights[e]
        if use_deepseek_fp8_block_scale:
            w1, w2 = (_dequantized(w, s[e]).to(input.dtype) for w, s in zip((w1, w2), quant_scales))
        up, gate = F.linear(input, w1).chunk(2, dim=-1)
        share = (token_final_scales * (token_selected_experts == ep_rank * count + e)).sum(-1, keepdim=True)
        total += F.linear(F.silu(gate) * up, w2).float() * share
    output.copy_(total)
    return output


def _dequantized(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    spread = scales.repeat_interleave(BLOCK, 0)[: w.shape[0]].repeat_interleave(BLOCK, 1)[:, : w.shape[1]]
    return w.float() * spread
