"""Toy configurations of model families, for tests of both sides. Data only; what is true of a family is found by running
it.

Sizes are the smallest that still tell dims apart: no two dims of a fused weight are equal, KV heads are fewer than some
tensor-parallel sizes, and the vocabulary is padded by vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from xfer.mesh.parallel import EngineParallel, TrainerParallel

Config = dict[str, object]


@dataclass(frozen=True)
class Family:
    """`fp32`: globs of the tensors that checkpoints keep in float32. `engine`, `trainer`: the layouts that are tested;
    the first of each is the one whose figures stand in docs/architectures.md. No trainer layout: Bridge 0.3.1 has no
    bridge for it. No engine layout: vLLM imports such a model only beside torchvision, of which there is no build here.
    """

    name: str
    config: Config
    engine: tuple[EngineParallel, ...]
    trainer: tuple[TrainerParallel, ...] = ()
    fp32: tuple[str, ...] = ()


_BASE: Config = dict(
    vocab_size=252, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=192, max_position_embeddings=512, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2,
    pad_token_id=0, torch_dtype="bfloat16", tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip
_EXPERTS: Config = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[],
)  # fmt: skip
_DEEPSEEK: Config = dict(
    num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=64,
    n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=32,
    qk_rope_head_dim=32, v_head_dim=32, num_nextn_predict_layers=0, routed_scaling_factor=2.5, scoring_func="sigmoid",
    topk_method="noaux_tc", norm_topk_prob=True, moe_layer_freq=1,
)  # fmt: skip
_NEMOTRON_H: Config = dict(
    mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16, n_groups=4, conv_kernel=4, chunk_size=16,
    mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, expand=2, num_hidden_layers=4,
)  # fmt: skip
_NEMOTRON_MOE: Config = dict(
    _NEMOTRON_H, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
    moe_shared_expert_intermediate_size=96, norm_topk_prob=True, n_group=1, topk_group=1, routed_scaling_factor=2.5,
    hybrid_override_pattern="ME*E",
)  # fmt: skip
_GEMMA: Config = dict(
    tie_word_embeddings=True, query_pre_attn_scalar=32, sliding_window=64, hidden_activation="gelu_pytorch_tanh"
)
_BIAS = ("*.e_score_correction_bias",)

E, T = EngineParallel, TrainerParallel
_TP = (E(tp=2), E(), E(tp=4), E(tp=2, pp=2))
"""4 > 2 KV heads, which are then replicated."""
_TP_ONE_STAGE = (E(tp=2), E(), E(tp=4))
_TP2 = (E(tp=2), E())
_EP = (E(tp=2, ep=True), E(), E(tp=2), E(tp=4, ep=True), E(tp=2, dp=2, ep=True), E(tp=2, pp=2))
_DENSE = (T(world=4, tp=2, pp=2), T(world=4, tp=4), T(world=4, tp=2))
_SPARSE = (
    T(world=4, tp=2, pp=2, ep=2, etp=1),
    T(world=4, ep=4, etp=1),
    T(world=4, tp=2, ep=2, etp=2),
    T(world=8, tp=2, pp=2, ep=2, etp=2),
)


def _family(
    name: str, kind: str, architecture: str, engine: tuple, trainer: tuple = (), fp32: tuple = (), **config: object
) -> Family:
    made = {**_BASE, "model_type": kind, "architectures": [architecture], **config}
    return Family(name, {k: v for k, v in made.items() if v is not _ABSENT}, engine, trainer, fp32)


def _tower(name: str, kind: str, architecture: str, engine: tuple, trainer: tuple, inner: Config, **outer) -> Family:
    """A language model below a `text_config`, beside a vision tower."""
    made = {"model_type": kind, "architectures": [architecture], "torch_dtype": _BASE["torch_dtype"]}
    return Family(name, {**made, "text_config": {**_BASE, **inner}, **outer}, engine, trainer)


_ABSENT = object()

FAMILIES = (
    _family("Llama", "llama", "LlamaForCausalLM", _TP, _DENSE),
    _family("Mistral", "mistral", "MistralForCausalLM", _TP, _DENSE),
    _family("Qwen2", "qwen2", "Qwen2ForCausalLM", _TP, _DENSE),
    _family("Qwen3", "qwen3", "Qwen3ForCausalLM", _TP, _DENSE),
    _family("Qwen3, tied", "qwen3", "Qwen3ForCausalLM", _TP, _DENSE, tie_word_embeddings=True),
    _family(
        "Gemma", "gemma", "GemmaForCausalLM", _TP, _DENSE, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"
    ),
    _family("Gemma2", "gemma2", "Gemma2ForCausalLM", _TP, _DENSE, **_GEMMA),
    _family("Gemma3", "gemma3_text", "Gemma3ForCausalLM", _TP, _DENSE, **_GEMMA),
    _family("Phi-3", "phi3", "Phi3ForCausalLM", _TP),
    _family("OLMo2", "olmo2", "Olmo2ForCausalLM", _TP_ONE_STAGE),
    _family("GLM-4", "glm4", "Glm4ForCausalLM", _TP, attention_bias=True, partial_rotary_factor=0.5),
    _family(
        "StarCoder2", "starcoder2", "Starcoder2ForCausalLM", _TP_ONE_STAGE, hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
    ),
    _family("GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", _TP2, hidden_act="gelu"),
    _family(
        "Falcon", "falcon", "FalconForCausalLM", _TP2, head_dim=_ABSENT, new_decoder_architecture=True, num_kv_heads=2,
        multi_query=False, bias=False, alibi=False, parallel_attn=True,
    ),
    _family(
        "GPT-2", "gpt2", "GPT2LMHeadModel", _TP2, n_embd=128, n_head=4, n_layer=2, n_positions=512,
        tie_word_embeddings=True,
    ),
    _family(
        "Nemotron", "nemotron", "NemotronForCausalLM", _TP, _DENSE, hidden_act="relu2", norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    _family("Mixtral", "mixtral", "MixtralForCausalLM", _EP, num_local_experts=8, num_experts_per_tok=2),
    _family(
        "Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM", _EP, **_EXPERTS, shared_expert_intermediate_size=96
    ),
    _family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", _EP, _SPARSE, **_EXPERTS),
    _family("OLMoE", "olmoe", "OlmoeForCausalLM", _EP, _SPARSE, **{**_EXPERTS, "num_key_value_heads": 4}),
    _family(
        "GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM", _EP, _SPARSE, _BIAS, num_hidden_layers=4, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1, first_k_dense_replace=1,
        norm_topk_prob=True, use_qk_norm=True, partial_rotary_factor=0.5, num_nextn_predict_layers=0,
        routed_scaling_factor=1.0, attention_bias=True,
    ),
    _family(
        "DeepSeek-V2", "deepseek_v2", "DeepseekV2ForCausalLM", _EP, _SPARSE,
        **{**_DEEPSEEK, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1},
    ),
    _family("DeepSeek-V3", "deepseek_v3", "DeepseekV3ForCausalLM", _EP, _SPARSE, _BIAS, **_DEEPSEEK),
    _family(
        "gpt-oss", "gpt_oss", "GptOssForCausalLM", (*_EP[:3], E(tp=2, dp=2, ep=True), E(tp=2, pp=2)), _SPARSE[:2],
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, sliding_window=64, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(
            rope_type="yarn", factor=2.0, rope_theta=150000.0, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=256, truncate=False,
        ),
    ),
    _family(
        "MiniMax-M2", "minimax_m2", "MiniMaxM2ForCausalLM", _EP[:3], num_local_experts=8, num_experts_per_tok=2,
        intermediate_size=64, use_qk_norm=True, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True,
    ),
    _family(
        "ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _EP[:3], moe_num_experts=8, moe_k=2,
        moe_intermediate_size=64, moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=1,
        moe_layer_interval=1,
    ),
    _family(
        "Mamba2", "mamba2", "Mamba2ForCausalLM", _TP2, num_heads=8, head_dim=32, state_size=16, n_groups=2, expand=2,
        conv_kernel=4, chunk_size=16,
    ),
    _family(
        "Nemotron-H", "nemotron_h", "NemotronHForCausalLM", _TP, (*_DENSE[:1], T(world=2, tp=2)), ("*.A_log",),
        **_NEMOTRON_H, mlp_bias=False, hybrid_override_pattern="M-*-",
    ),
    _family(
        "Nemotron-H MoE (Nano 3)", "nemotron_h", "NemotronHForCausalLM", _EP, (*_SPARSE[:1], _SPARSE[2]),
        ("*.A_log", *_BIAS), **_NEMOTRON_MOE,
    ),
    _family(
        "LFM2", "lfm2", "Lfm2ForCausalLM", _TP2, layer_types=["conv", "full_attention"], conv_L_cache=3, conv_dim=128,
        block_dim=128, conv_bias=False, block_multiple_of=32, block_ff_dim=192, block_auto_adjust_ff_dim=False,
        norm_eps=1e-5,
    ),
    _family(
        "Falcon-H1", "falcon_h1", "FalconH1ForCausalLM", _TP2, mamba_n_heads=8, mamba_d_head=32, mamba_d_ssm=256,
        mamba_d_state=16, mamba_n_groups=2, mamba_d_conv=4, mamba_chunk_size=16, mamba_expand=2,
    ),
    _family(
        "Jamba", "jamba", "JambaForCausalLM", _TP2, num_experts=8, num_experts_per_tok=2, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16, mamba_d_conv=4,
        mamba_expand=2, mamba_dt_rank=8,
    ),
    _family(
        "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM", _EP[:4], (*_SPARSE[:1], _SPARSE[2]), **_EXPERTS,
        shared_expert_intermediate_size=96, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, full_attention_interval=2,
        layer_types=["linear_attention", "full_attention"], partial_rotary_factor=0.5,
    ),
    _family(
        "Granite 4 hybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM", _EP[:4],
        layer_types=["mamba", "attention"], num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=96,
        intermediate_size=64, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2,
        mamba_d_conv=4, mamba_chunk_size=16, attention_multiplier=1.0, embedding_multiplier=1.0, logits_scaling=1.0,
        residual_multiplier=1.0, position_embedding_type="rope",
    ),
    _family(
        "Qwen2.5-VL", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", (), (_DENSE[0], _DENSE[2]),
        rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]},
        vision_config=dict(
            depth=2, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=128, patch_size=14,
            spatial_merge_size=2, window_size=112, fullatt_block_indexes=[1],
        ),
        vision_start_token_id=3, vision_end_token_id=4, image_token_id=5, video_token_id=6,
    ),
    _tower(
        "Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration", (), (_DENSE[0], _DENSE[2]),
        dict(
            model_type="qwen3_vl_text",
            rope_scaling={"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True},
        ),
        vision_config=dict(
            model_type="qwen3_vl", depth=2, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=128,
            patch_size=16, spatial_merge_size=2, num_position_embeddings=16, deepstack_visual_indexes=[0],
        ),
        vision_start_token_id=3, vision_end_token_id=4, image_token_id=5, video_token_id=6,
    ),
)  # fmt: skip

_WITH_CODE_OF_THEIR_OWN = {"nemotron_h": "NemotronHForCausalLM"}


def register() -> None:
    """transformers 4 does not know these families."""
    from xfer.testing.te_everywhere import stand_in_config

    for kind, architecture in _WITH_CODE_OF_THEIR_OWN.items():
        stand_in_config(kind, architecture)


def text(p: EngineParallel | TrainerParallel) -> str:
    """ "tp2 pp2": the sizes above 1."""
    if isinstance(p, EngineParallel):
        sizes = {"tp": p.tp, "pp": p.pp, "dp": p.dp}
        return " ".join([f"{k}{v}" for k, v in sizes.items() if v > 1] + ["ep"] * p.ep) or "tp1"
    dp = p.dp if p.dp > 1 else 1
    sizes = {"tp": p.tp, "pp": p.pp, "vpp": p.vpp or 1, "dp": dp, "ep": p.ep, "etp": p.etp if p.ep > 1 else 1}
    return " ".join(f"{k}{v}" for k, v in sizes.items() if v > 1) or "tp1"
