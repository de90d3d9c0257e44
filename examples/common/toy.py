"""Tiny Hugging Face checkpoints that both Megatron-Bridge and vLLM's CPU backend accept. Imports neither.

A family is a config; the tensors' names and shapes follow from it in closed form (`specs`), so that both environments,
with their different transformers, write the very same files. Sizes are as small as the strictest of both sides allows:
vLLM's CPU attention wants head_dim 32 or more, its CPU MLA wants kv_lora_rank + qk_rope_head_dim = 576, Megatron wants
heads, KV heads and vocabulary divisible by TP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import torch

Config = dict[str, object]

_BASE: Config = dict(
    vocab_size=160,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    hidden_act="silu",
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    attention_bias=False,
    bos_token_id=1,
    eos_token_id=2,
    torch_dtype="bfloat16",
    tie_word_embeddings=False,
)
_QWEN3: Config = {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
FAMILIES: dict[str, Config] = {
    "qwen3": _QWEN3,
    "qwen3_tied": {**_QWEN3, "tie_word_embeddings": True},
    "qwen3_moe": {
        **_BASE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {
        **{k: v for k, v in _BASE.items() if k != "head_dim"},
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",  # vLLM reads it; transformers 4 has no such key
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
}

Spec = tuple[str, tuple[int, ...], torch.dtype]


def config(family: str, **override: object) -> Config:
    """The HF config of a family; KeyError lists the families."""
    if family not in FAMILIES:
        raise KeyError(f"no toy family {family!r}; there are {sorted(FAMILIES)}")
    return {**FAMILIES[family], **override}


def specs(cfg: Config) -> list[Spec]:
    """(name, shape, dtype) of every tensor of the checkpoint of `cfg`, in the order of the layers."""
    return list(_specs(cfg))


def _specs(c: Config) -> Iterator[Spec]:
    dtype = getattr(torch, c["torch_dtype"])
    hidden = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), dtype
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, shape in {**_attention(c), **_mlp(c, i)}.items():
            # The bias that balances experts is kept in fp32 by DeepSeek's own checkpoints.
            yield at + name, shape, torch.float32 if name.endswith("correction_bias") else dtype
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", (hidden,), dtype
    yield "model.norm.weight", (hidden,), dtype
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden), dtype


def _attention(c: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        q_rank, kv_rank = c["q_lora_rank"], c["kv_lora_rank"]
        shapes = {
            "q_a_proj": (q_rank, hidden),
            "q_a_layernorm": (q_rank,),
            "q_b_proj": (heads * (nope + rope), q_rank),
            "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
            "kv_a_layernorm": (kv_rank,),
            "kv_b_proj": (heads * (nope + v), kv_rank),
            "o_proj": (hidden, heads * v),
        }
    else:
        dim, kv = c["head_dim"], c["num_key_value_heads"]
        shapes = {
            "q_proj": (heads * dim, hidden),
            "k_proj": (kv * dim, hidden),
            "v_proj": (kv * dim, hidden),
            "o_proj": (hidden, heads * dim),
            "q_norm": (dim,),
            "k_norm": (dim,),
        }
    return {f"self_attn.{k}.weight": s for k, s in shapes.items()}


def _mlp(c: Config, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = c["hidden_size"]

    def gated(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return {f"{prefix}.{k}.weight": s for k, s in shapes.items()}

    experts = c.get("num_experts") or c.get("n_routed_experts")
    if not experts or layer < c.get("first_k_dense_replace", 0):
        return gated("mlp", c["intermediate_size"])
    out = {"mlp.gate.weight": (experts, hidden)}
    if c.get("topk_method") == "noaux_tc":
        out["mlp.gate.e_score_correction_bias"] = (experts,)
    for e in range(experts):
        out |= gated(f"mlp.experts.{e}", c["moe_intermediate_size"])
    if c.get("n_shared_experts"):
        out |= gated("mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
    return out


def tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Random weights that train: norms near 1, matrices at 1/sqrt(fan-in). The same bits in all processes with such a device."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "little")
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(number), device=device)
    if "norm" in name.rsplit(".", 2)[-2]:
        x.mul_(0.1).add_(1)
    elif len(shape) == 1:
        # Megatron's Float16Module rounds this fp32 bias to bf16 once, so give it a value that survives that.
        x = x.mul_(0.01).to(torch.bfloat16)
    else:
        x.div_(sqrt(shape[1]))
    return x.to(dtype)


def tensors(cfg: Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint; each depends on its name and `seed` only."""
    return {name: tensor(name, shape, dtype, seed) for name, shape, dtype in specs(cfg)}


def write_checkpoint(family: str, folder: str | Path, *, seed: int = 0, **override: object) -> dict[str, torch.Tensor]:
    """config.json and model.safetensors in `folder`; `override` replaces config keys. Returns the tensors."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cfg = config(family, **override)
    (folder / "config.json").write_text(json.dumps(cfg, indent=1))
    made = tensors(cfg, seed)
    save_file(made, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return made
