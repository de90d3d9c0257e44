"""Whole worlds in one process: every bf16 row of the table of refits that NeMo-RL reports, at its true parallel shape.

Real Megatron-Core + Bridge ranks and real vLLM models at toy hidden sizes, with the true numbers of heads, KV heads and
experts. The trainers' weights come from the checkpoint by Bridge's own import and Megatron's own resharding, the truth
from vLLM's own loader, so no reading of a layout can be wrong on both sides alike. Every replica is refitted twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_BASE = dict(
    vocab_size=152,
    hidden_size=64,
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
_QWEN3_MOE = dict(
    _BASE,
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    intermediate_size=64,
    moe_intermediate_size=32,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
_NEMOTRON_H = dict(
    _BASE,
    model_type="nemotron_h",
    architectures=["NemotronHForCausalLM"],
    mamba_num_heads=64,
    mamba_head_dim=8,
    ssm_state_size=16,
    n_groups=8,
    conv_kernel=4,
    chunk_size=16,
    expand=8,
    mlp_hidden_act="relu2",
    layer_norm_epsilon=1e-5,
    use_bias=False,
    use_conv_bias=True,
    mamba_proj_bias=False,
    mlp_bias=False,
    num_attention_heads=32,
    num_key_value_heads=2,
    intermediate_size=64,
    n_routed_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=64,
    n_shared_experts=1,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.5,
)
CONFIGS: dict[str, tuple[dict, list[str]]] = {
    "4B": (
        dict(
            _BASE,
            model_type="qwen3",
            architectures=["Qwen3ForCausalLM"],
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=128,
            tie_word_embeddings=True,
        ),
        [],
    ),
    "30B-A3B": (dict(_QWEN3_MOE, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4), []),
    "235B-A22B": (dict(_QWEN3_MOE, num_hidden_layers=14, num_attention_heads=64, num_key_value_heads=4), []),
    "DeepSeek-V3": (
        dict(
            _BASE,
            model_type="deepseek_v3",
            architectures=["DeepseekV3ForCausalLM"],
            num_hidden_layers=16,
            num_attention_heads=128,
            num_key_value_heads=128,
            intermediate_size=64,
            moe_intermediate_size=32,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_layer_freq=1,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            num_nextn_predict_layers=0,
        ),
        ["*.e_score_correction_bias"],
    ),
    "nano-v3": (
        dict(_NEMOTRON_H, num_hidden_layers=8, hybrid_override_pattern="MEM*EME-"),
        ["*.e_score_correction_bias", "*.A_log"],
    ),
}


@dataclass(frozen=True)
class Row:
    model: str
    trainer: dict
    engine: dict
    replicas: int = 1
    provider: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        def text(d):
            return "x".join(f"{k.upper()}{v}" for k, v in d.items() if v != 1)

        return f"{self.model} {text(self.trainer)} -> {text(self.engine)}xDP{self.replicas}"


ROWS = [
    Row("4B", dict(world=8), dict(tp=1), 8),
    Row("4B", dict(world=8), dict(tp=8)),
    Row("4B", dict(world=8, pp=2), dict(tp=4), 2),
    Row("4B", dict(world=8, pp=4), dict(tp=4), 2),
    Row("4B", dict(world=8, tp=2, pp=2), dict(tp=4), 2),
    Row("4B", dict(world=8, tp=2), dict(tp=4), 2),
    Row("30B-A3B", dict(world=16, tp=2, ep=4, etp=1), dict(tp=4), 4),
    Row("30B-A3B", dict(world=16, tp=2, ep=4, etp=2), dict(tp=4), 4),
    Row("30B-A3B", dict(world=16, tp=2, pp=2, ep=4, etp=1), dict(tp=4), 4),
    Row("30B-A3B", dict(world=16, pp=2, ep=8, etp=1), dict(tp=2), 8),
    Row("30B-A3B", dict(world=16, pp=2, ep=8, etp=1), dict(tp=8), 2),
    Row(
        "235B-A22B",
        dict(world=128, tp=4, pp=8, ep=16, etp=1),
        dict(tp=8),
        16,
        dict(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
    ),
    Row("DeepSeek-V3", dict(world=256, pp=16, ep=16, etp=1), dict(tp=32), 8),
    Row("nano-v3", dict(world=16, tp=2, ep=8, etp=1), dict(tp=4), 4),
]
