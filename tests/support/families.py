"""Toy configurations of model families, for tests of both sides. Data only; what is true of a family is found by running it. Sizes are the
smallest that still tell dims apart: no two dims of a fused weight are equal, KV heads are fewer than some tensor-parallel sizes, and vLLM
pads the vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from xfer.engines.hf_spec import canonical_specs
from xfer.mesh.parallel import EngineParallel, TrainerParallel
from xfer.trace.fragment import TensorSpec

Config = dict[str, object]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """What both sides of a family need.

    Attributes:
        engine, trainer: The layouts that are tested; the figures of the first of each stand in docs/architectures.md. No
            engine layout: the row is about what only trainers have, or vLLM has no class of it for the CPU.
        fp32, int32: Globs of the tensors that checkpoints keep in float32, and of their tables of int32.
        names: The checkpoint's tensors, where transformers has no model of the family.
        published: From transformers' names to those of the published checkpoint.
        partly: Globs of Megatron's parameters of which Bridge exports only some rows.
        provider: Fields of Bridge's model provider.
        since: The oldest Megatron-Bridge that has it; default: every one that is tested.
        slow: Only the wide matrix loads it into an engine. Its first layout takes long, or others go through the same code.
    """

    name: str
    config: Config
    engine: tuple[EngineParallel, ...]
    trainer: tuple[TrainerParallel, ...] = ()
    fp32: tuple[str, ...] = ()
    names: Shapes = field(default_factory=dict)
    partly: tuple[str, ...] = ()
    published: Callable[[Shapes], Shapes] = dict
    provider: Config = field(default_factory=dict)
    since: str = ""
    slow: bool = False
    int32: tuple[str, ...] = ()


_BASE: Config = dict(
    vocab_size=252, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=192, max_position_embeddings=512, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    torch_dtype="bfloat16", tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip
_LOCAL: Config = dict(num_local_experts=8, num_experts_per_tok=2)
_CHOSEN: Config = dict(num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
_EXPERTS: Config = dict(_CHOSEN, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[])
_ROUTED: Config = dict(_CHOSEN, n_routed_experts=8, n_shared_experts=1)
_ONE_GROUP: Config = dict(n_group=1, topk_group=1)
_DEEPSEEK: Config = dict(
    _ROUTED, num_key_value_heads=4, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=48,
    qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, num_nextn_predict_layers=0, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
)  # fmt: skip
_NEMOTRON_H: Config = dict(
    mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16, n_groups=4, conv_kernel=4, chunk_size=16, mlp_hidden_act="relu2",
    layer_norm_epsilon=1e-5, expand=2, num_hidden_layers=4,
)  # fmt: skip
_NEMOTRON_MOE: Config = dict(
    **_NEMOTRON_H, **_ROUTED, **_ONE_GROUP, moe_shared_expert_intermediate_size=96, routed_scaling_factor=2.5,
    hybrid_override_pattern="ME*E",
)  # fmt: skip
_GEMMA: Config = dict(
    tie_word_embeddings=True, query_pre_attn_scalar=32, sliding_window=64, hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip
_ALTERNATING: Config = dict(
    layer_types=["sliding_attention", "full_attention"], sliding_window=64, sliding_window_pattern="LG",
)  # fmt: skip
_GATED_DELTA: Config = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4,
)  # fmt: skip
_QWEN3_NEXT: Config = dict(
    **_GATED_DELTA, **_EXPERTS, shared_expert_intermediate_size=96, full_attention_interval=2, partial_rotary_factor=0.5,
)  # fmt: skip
_QWEN3_5: Config = dict(
    _GATED_DELTA, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1], mrope_interleaved=True,
    partial_rotary_factor=0.25),
)  # fmt: skip
_TOWER: Config = dict(
    depth=2, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=128, spatial_merge_size=2,
)  # fmt: skip
_SEES: Config = dict(vision_start_token_id=3, vision_end_token_id=4, image_token_id=5, video_token_id=6)
_QWEN3_5_TOWER: Config = dict(
    vision_config=dict(_TOWER, model_type="qwen3_5_vision", patch_size=16, num_position_embeddings=16), **_SEES,
)  # fmt: skip
_INDEXER: Config = dict(index_topk=16, index_head_dim=64, index_n_heads=4, indexer_rope_interleave=True)
_MAMBA: Config = dict(mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
_DEEPSEEK_V4: Config = dict(
    _ROUTED, num_hidden_layers=4, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, q_lora_rank=48, o_groups=4, o_lora_rank=32,
    compress_ratios=[0, 4, 128, 0], compress_rope_theta=160000.0, rope_theta=10000.0, sliding_window=64, index_n_heads=4,
    index_head_dim=128, index_topk=16, hc_mult=2, hc_sinkhorn_iters=2, hc_eps=1e-6, expert_dtype="bf16",
    num_hash_layers=1, swiglu_limit=10.0, scoring_func="sqrtsoftplus", topk_method="noaux_tc", routed_scaling_factor=1.5,
    num_nextn_predict_layers=0, rope_scaling=dict(type="yarn", rope_type="yarn", rope_theta=10000.0, factor=2.0, beta_fast=32,
    beta_slow=1, original_max_position_embeddings=256),
)  # fmt: skip
_NO_PADDING: Config = dict(make_vocab_size_divisible_by=4)
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
_TWO_DENSE, _TWO_SPARSE = _DENSE[::2], _SPARSE[:3:2]
_DRAFTED = (T(world=4, tp=2, ep=2, etp=1), T(world=2, tp=2), T(world=4, tp=2, pp=2), _SPARSE[0])
"""The first without stages: Bridge's own gather refuses the copy of the embedding that the MTP layer's stage has."""


BY_NAME: dict[str, Family] = {}
_ABSENT = object()


def _family(name: str, kind: str, architecture: str, engine, trainer=(), fp32=(), inner=None, **more) -> Family:
    """`more`: fields of the config, and the other ones of Family. `inner`: of a `text_config`, beside a vision tower."""
    own = {k: more.pop(k) for k in Family.__dataclass_fields__ if k in more}
    base = _BASE if inner is None else {"torch_dtype": _BASE["torch_dtype"], "text_config": {**_BASE, **inner}}
    made = {**base, "model_type": kind, "architectures": [architecture], **more}
    config = {k: v for k, v in made.items() if v is not _ABSENT}
    return BY_NAME.setdefault(name, Family(name, config, engine, trainer, fp32, **own))


def _drafted(name: str, of: str, published: Callable[[Shapes], Shapes], trainer: tuple = _DRAFTED, **more) -> Family:
    """The family `of` with the layers that predict one more token, which only trainers have. `more` as in `_family`."""
    own, base = {k: more.pop(k) for k in Family.__dataclass_fields__ if k in more}, BY_NAME[of]
    own |= dict(engine=(), trainer=trainer, published=published, slow=False, config={**base.config, **more})
    return BY_NAME.setdefault(name, replace(base, name=name, **own))


def _weights(at: str = "", **shapes: tuple[int, ...]) -> Shapes:
    return {f"{at}{name}.weight": shape for name, shape in shapes.items()}


def _mlp(at: str, width: int) -> Shapes:
    return _weights(at, gate_proj=(width, 128), up_proj=(width, 128), down_proj=(128, width))


def _norms(*names: str) -> Shapes:
    return _weights(**dict.fromkeys(names, (128,)))


def _below(at: str, shapes: Shapes) -> Shapes:
    return {at + name: shape for name, shape in shapes.items()}


def _part(shapes: Shapes, at: str) -> Shapes:
    return {name.removeprefix(at): shape for name, shape in shapes.items() if name.startswith(at)}


def _next_layer(known: Shapes, norm: str = "shared_head.norm") -> Shapes:
    """Has a layer after the last one, with the tensors of that, which predicts one more token."""
    last = max(int(name.split(".")[2]) for name in known if name.startswith("model.layers."))
    out = _norms("enorm", "hnorm", norm) | _weights(eh_proj=(128, 256)) | _part(known, f"model.layers.{last}.")
    return {**known, **_below(f"model.layers.{last + 1}.", out)}


def _next_ending(known: Shapes) -> Shapes:
    return _next_layer(known, "final_layernorm")


def _outside(known: Shapes) -> Shapes:
    """Has the same outside of the model's layers, as Qwen's."""
    at = max(name[: name.index("self_attn.")] for name in known if "layers." in name and "self_attn." in name)
    out = _norms("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden") | _weights(fc=(128, 256))
    return {**known, **_below("mtp.", out | _below("layers.0.", _part(known, at)))}


def _nemotron_mtp(known: Shapes) -> Shapes:
    """Has the attention layer and the last MoE layer again, outside of the model's layers."""
    attention, experts = (_part(known, f"backbone.layers.{i}.") for i in (2, 3))
    first = attention | _norms("enorm", "hnorm") | _weights(eh_proj=(128, 256))
    return {**known, **_below("mtp.layers.0.", first), **_below("mtp.layers.1.", experts | _norms("final_layernorm"))}


def _minimax(known: Shapes) -> Shapes:
    """transformers also gives MLPs that have no experts the name of those that have."""
    return {re.sub(r"block_sparse_moe(?=\.(\w+_proj|fc\d)\.)", "mlp", name): shape for name, shape in known.items()}


def _mimo_mtp(known: Shapes) -> Shapes:
    """Has a dense sliding-window layer outside of the model's layers."""
    layer = _part(known, "model.layers.1.").items()
    out = {n: s for n, s in layer if n.startswith(("self_attn.", "input_layernorm."))} | _mlp("mlp.", 192)
    out |= _norms("enorm", "hnorm", "pre_mlp_layernorm", "final_layernorm") | _weights(eh_proj=(128, 256))
    return {**known, **_below("model.mtp.layers.0.", out)}


def _step() -> Shapes:
    """Step-3.5-Flash: experts are stacked, and sliding-window layers have twice the heads."""
    out = _weights(embed_tokens=(252, 128), norm=(128,))
    for at, heads in (("layers.0.", 4), ("layers.1.", 8)):
        wide = dict(q_proj=(heads * 32, 128), o_proj=(128, heads * 32), g_proj=(heads, 128))
        out |= _weights(at + "self_attn.", k_proj=(64, 128), v_proj=(64, 128), q_norm=(32,), k_norm=(32,), **wide)
        out |= _weights(at, input_layernorm=(128,), post_attention_layernorm=(128,))
    out |= _mlp("layers.0.mlp.", 192) | _mlp("layers.1.share_expert.", 96)
    out |= {name: (8, *shape) for name, shape in _mlp("layers.1.moe.", 64).items()}
    out |= {"layers.1.moe.gate.weight": (8, 128), "layers.1.moe.router_bias": (8,)}
    return _weights(lm_head=(252, 128)) | _below("model.", out)


def _ling() -> Shapes:
    """Ling 2: query, key and value are one tensor."""
    out = _weights(word_embeddings=(252, 128), norm=(128,)) | _mlp("layers.0.mlp.", 192)
    for at in ("layers.0.", "layers.1."):
        out |= _weights(at, input_layernorm=(128,), post_attention_layernorm=(128,))
        own = dict(query_layernorm=(32,), key_layernorm=(32,))
        out |= _weights(at + "attention.", query_key_value=(256, 128), dense=(128, 128), **own)
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(8))):
        out |= _mlp(f"layers.1.mlp.{expert}.", 64)
    out |= {"layers.1.mlp.gate.weight": (8, 128), "layers.1.mlp.gate.expert_bias": (8,)}
    return _weights(lm_head=(252, 128)) | _below("model.", out)


def _deepseek_v4() -> Shapes:
    """DeepSeek-V4: keys of two layers are compressed, and a table of tokens chooses the first layer's experts."""
    out = _weights(embed=(252, 128), norm=(128,), head=(252, 128))
    out |= {"hc_head_fn": (2, 256), "hc_head_base": (2,), "hc_head_scale": (1,)}
    for layer, ratio in enumerate((0, 4, 128, 0)):
        at = f"layers.{layer}."
        low = dict(wq_a=(48, 128), wq_b=(2048, 48), wkv=(512, 128), wo_a=(128, 512), wo_b=(128, 128))
        out |= _weights(at + "attn.", q_norm=(48,), kv_norm=(512,), **low) | {at + "attn.attn_sink": (4,)}
        if ratio:
            out |= _compressor(at + "attn.compressor.", ratio, 512)
        if ratio == 4:
            out |= _weights(at + "attn.indexer.", wq_b=(512, 48), weights_proj=(4, 128))
            out |= _compressor(at + "attn.indexer.compressor.", ratio, 128)
        gate = {"bias": (8,)} if layer else {"tid2eid": (252, 2)}
        out |= _below(at + "ffn.gate.", {"weight": (8, 128), **gate})
        for expert in ("shared_experts", *(f"experts.{e}" for e in range(8))):
            out |= _weights(f"{at}ffn.{expert}.", w1=(64, 128), w2=(128, 64), w3=(64, 128))
        out |= _weights(at, attn_norm=(128,), ffn_norm=(128,))
        for part in ("attn", "ffn"):
            out |= {f"{at}hc_{part}_fn": (8, 256), f"{at}hc_{part}_base": (8,), f"{at}hc_{part}_scale": (3,)}
    return out


def _compressor(at: str, ratio: int, width: int) -> Shapes:
    rows = width * (2 if ratio == 4 else 1)  # windows of 4 tokens overlap
    return {at + "ape": (ratio, rows), **_weights(at, wkv=(rows, 128), wgate=(rows, 128), norm=(width,))}


FAMILIES = (
    _family("Llama", "llama", "LlamaForCausalLM", _TP, _DENSE),
    _family("Mistral", "mistral", "MistralForCausalLM", _TP, _DENSE),
    _family("Qwen2", "qwen2", "Qwen2ForCausalLM", _TP, _DENSE),
    _family("Qwen3", "qwen3", "Qwen3ForCausalLM", _TP, _DENSE),
    _family("Qwen3, tied", "qwen3", "Qwen3ForCausalLM", _TP, _DENSE, tie_word_embeddings=True),
    _family("Gemma", "gemma", "GemmaForCausalLM", _TP, _DENSE, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"),
    _family("Gemma2", "gemma2", "Gemma2ForCausalLM", _TP, _DENSE, **_GEMMA),
    _family("Gemma3", "gemma3_text", "Gemma3ForCausalLM", _TP, _DENSE, **_GEMMA),
    _family("Gemma3n", "gemma3n_text", "Gemma3nForCausalLM", _TP_ONE_STAGE, **_GEMMA, num_kv_shared_layers=2, num_hidden_layers=4,
            vocab_size_per_layer_input=252, hidden_size_per_layer_input=16, laurel_rank=16, altup_num_inputs=2,
            layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0]),
    _family("Gemma4", "gemma4_text", "Gemma4ForCausalLM", _TP, _DENSE[1:], provider=_NO_PADDING, **{**_GEMMA, **_ALTERNATING},
            vocab_size_per_layer_input=252, hidden_size_per_layer_input=16, since="0.6"),
    _family("Gemma4, K is V (31B)", "gemma4_text", "Gemma4ForCausalLM", _TP, _DENSE[1:], provider=_NO_PADDING,
            partly=("*.linear_qkv.weight",), **{**_GEMMA, **_ALTERNATING}, hidden_size_per_layer_input=0, attention_k_eq_v=True,
            num_global_key_value_heads=1, global_head_dim=64, since="0.6"),
    _family("Gemma4 MoE (26B-A4B)", "gemma4_text", "Gemma4ForCausalLM", _EP, _SPARSE, partly=("*.linear_qkv.weight",),
            **{**_GEMMA, **_ALTERNATING}, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
            global_head_dim=64, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64, since="0.6"),
    _family("Phi-3", "phi3", "Phi3ForCausalLM", _TP),
    _family("OLMo2", "olmo2", "Olmo2ForCausalLM", _TP_ONE_STAGE),
    _family("OLMo3", "olmo3", "Olmo3ForCausalLM", _TP_ONE_STAGE, **_ALTERNATING, slow=True),
    _family("SmolLM3", "smollm3", "SmolLM3ForCausalLM", _TP_ONE_STAGE, tie_word_embeddings=True, slow=True),
    _family("Command A (Cohere2)", "cohere2", "Cohere2ForCausalLM", _TP, **_ALTERNATING, layer_norm_eps=1e-5, logit_scale=0.25,
            tie_word_embeddings=True, slow=True),
    _family("EXAONE 4", "exaone4", "Exaone4ForCausalLM", _TP, **_ALTERNATING),
    _family("Seed-OSS", "seed_oss", "SeedOssForCausalLM", _TP, attention_bias=True, slow=True),
    _family("Apertus", "apertus", "ApertusForCausalLM", _TP, hidden_act="xielu", rope_parameters=dict(rope_type="llama3",
            factor=8.0, rope_theta=12e6, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256),
            slow=True),
    _family("Jais 2", "jais2", "Jais2ForCausalLM", _TP_ONE_STAGE, _DENSE, since="0.6", hidden_act="relu2", layer_norm_eps=1e-5),
    _family("GLM-4", "glm4", "Glm4ForCausalLM", _TP, attention_bias=True, partial_rotary_factor=0.5, slow=True),
    _family("StarCoder2", "starcoder2", "Starcoder2ForCausalLM", _TP_ONE_STAGE, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5,
            slow=True),
    _family("GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", _TP2, hidden_act="gelu", slow=True),
    _family("Falcon", "falcon", "FalconForCausalLM", _TP2, head_dim=_ABSENT, new_decoder_architecture=True, num_kv_heads=2,
            multi_query=False, bias=False, alibi=False, parallel_attn=True),
    _family("GPT-2", "gpt2", "GPT2LMHeadModel", _TP2, n_embd=128, n_head=4, n_layer=2, n_positions=512, tie_word_embeddings=True),
    _family("Nemotron", "nemotron", "NemotronForCausalLM", _TP, _DENSE, hidden_act="relu2", norm_eps=1e-5,
            partial_rotary_factor=0.5),
    _family("Llama 4", "llama4_text", "Llama4ForCausalLM", _EP[:5], num_local_experts=8, num_experts_per_tok=1,
            interleave_moe_layer_step=2, intermediate_size=64, intermediate_size_mlp=192, use_qk_norm=True),
    _family("Mixtral", "mixtral", "MixtralForCausalLM", _EP, **_LOCAL),
    _family("Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM", _EP, **_EXPERTS, shared_expert_intermediate_size=96, slow=True),
    _family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", _EP, _SPARSE, **_EXPERTS),
    _family("OLMoE", "olmoe", "OlmoeForCausalLM", _EP, _SPARSE, **{**_EXPERTS, "num_key_value_heads": 4}, slow=True),
    _family("GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM", _EP, _SPARSE, _BIAS, num_hidden_layers=4, **_ROUTED, **_ONE_GROUP,
            first_k_dense_replace=1, use_qk_norm=True, partial_rotary_factor=0.5, routed_scaling_factor=1.0, attention_bias=True,
            num_nextn_predict_layers=0),
    _drafted("GLM-4.5 with its MTP layer", "GLM-4.5", _next_layer, num_nextn_predict_layers=1),
    _family("DeepSeek-V2", "deepseek_v2", "DeepseekV2ForCausalLM", _EP, _SPARSE,
            **{**_DEEPSEEK, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1}),
    _family("DeepSeek-V3", "deepseek_v3", "DeepseekV3ForCausalLM", _EP, _SPARSE, _BIAS, **_DEEPSEEK),
    _family("Kimi-K2", "kimi_k2", "DeepseekV3ForCausalLM", _EP, _SPARSE, _BIAS, **_DEEPSEEK),
    _drafted("DeepSeek-V3 with its MTP layer", "DeepSeek-V3", _next_layer, num_nextn_predict_layers=1, since="0.6"),
    _family("GLM-4.7-Flash", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", _EP[:5], _SPARSE, _BIAS, **{**_DEEPSEEK, "n_group": 1},
            since="0.6"),
    _family("EXAONE MoE", "exaone_moe", "ExaoneMoeForCausalLM", _EP, _SPARSE, _BIAS, **_ALTERNATING, **_EXPERTS, **_ONE_GROUP,
            num_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, since="0.6"),
    _family("dots.llm1", "dots1", "Dots1ForCausalLM", _EP, fp32=_BIAS, **_ROUTED, **_ONE_GROUP, first_k_dense_replace=1,
            routed_scaling_factor=2.5, sliding_window=None, slow=True),
    _family("Hunyuan 3", "hy_v3", "HYV3ForCausalLM", _EP[:5], _SPARSE, _BIAS, **_EXPERTS, expert_hidden_dim=64,
            num_shared_experts=1, first_k_dense_replace=1, qk_norm=True, route_norm=True, router_scaling_factor=2.5, since="0.6",
            slow=True),
    _drafted("Hunyuan 3 with its MTP layer", "Hunyuan 3", _next_ending, num_nextn_predict_layers=1),
    _family("MiMo-V2", "mimo_v2_flash", "MiMoV2FlashForCausalLM", _EP, _SPARSE, _BIAS, **_CHOSEN, **_ONE_GROUP,
            n_routed_experts=8, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=[0, 1],
            hybrid_layer_pattern=[0, 1], layernorm_epsilon=1e-5, v_head_dim=16, swa_num_attention_heads=4,
            swa_num_key_value_heads=4, swa_head_dim=32, swa_v_head_dim=16, sliding_window_size=64, sliding_window=64,
            attention_bias=False, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, partial_rotary_factor=0.5,
            attention_value_scale=0.707, rope_theta=5e6, swa_rope_theta=10000.0, since="0.6"),
    _drafted("MiMo-V2 with its MTP layer", "MiMo-V2", _mimo_mtp),
    _family("Mellum", "mellum", "MellumForCausalLM", _EP[:5], _SPARSE, since="0.6", **_EXPERTS, sliding_window=64,
            layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse"], slow=True),
    _family("LFM2-MoE", "lfm2_moe", "Lfm2MoeForCausalLM", _EP[:4], layer_types=["conv", "full_attention"], conv_L_cache=3,
            conv_bias=False, num_dense_layers=1, num_experts=8, **_CHOSEN, use_expert_bias=True, norm_eps=1e-5),
    _family("AFMoE (Trinity)", "afmoe", "AfmoeForCausalLM", _EP[:5], **_ALTERNATING, num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=64, num_shared_experts=1, num_dense_layers=1, score_func="sigmoid", route_norm=True,
            route_scale=1.0, **_ONE_GROUP, mup_enabled=True),
    _family("Phi-3.5-MoE", "phimoe", "PhiMoEForCausalLM", _EP, **_LOCAL, attention_bias=True, lm_head_bias=True,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0), slow=True),
    _family("Step-3.5", "step3p5", "Step3p5ForCausalLM", _EP[:5], _SPARSE, ("*.router_bias",), partly=("*.linear_qkv.weight",),
            num_attention_groups=2, moe_num_experts=8, moe_top_k=2, moe_intermediate_size=64, share_expert_dim=96,
            moe_layers_enum="1", use_head_wise_attn_gate=True, use_moe_router_bias=True, need_fp32_gate=True,
            num_nextn_predict_layers=0, use_qk_norm=True, norm_expert_weight=True, moe_router_activation="sigmoid",
            sliding_window=64, rope_theta=10000.0, layer_types=["full_attention", "sliding_attention"],
            attention_other_setting=dict(attention_type="sliding_attention", num_attention_heads=8, num_attention_groups=2,
            head_dim=32), names=_step(), since="0.6"),
    _family("Ling 2 (Bailing V2)", "bailing_moe", "BailingMoeV2ForCausalLM", _EP, _SPARSE, ("*.expert_bias",), **_EXPERTS,
            num_shared_experts=1, moe_shared_expert_intermediate_size=64, first_k_dense_replace=1, **_ONE_GROUP,
            score_function="sigmoid", moe_router_enable_expert_bias=True, router_dtype="fp32", use_bias=False, use_qkv_bias=False,
            use_qk_norm=True, use_rmsnorm=True, embedding_dropout=0.0,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0), names=_ling(), since="0.6"),
    _drafted("Ling 2 with its MTP layer", "Ling 2 (Bailing V2)", _next_ending, num_nextn_predict_layers=1),
    _family("DeepSeek-V3.2", "deepseek_v32", "DeepseekV32ForCausalLM", _EP, _SPARSE, _BIAS, **_DEEPSEEK, **_INDEXER, since="0.6"),
    _family("GLM-5", "glm_moe_dsa", "GlmMoeDsaForCausalLM", _EP, _SPARSE, _BIAS, **{**_DEEPSEEK, "n_group": 1}, **_INDEXER,
            since="0.6"),
    _drafted("GLM-5 with its MTP layer", "GLM-5", _next_layer, num_nextn_predict_layers=1, provider=dict(mtp_num_layers=1)),
    _family("DeepSeek-V4", "deepseek_v4", "DeepseekV4ForCausalLM", _EP, fp32=("*hc_*", "*.attn_sink", "*.ape", "*.gate.bias"),
            int32=("*.tid2eid",), names=_deepseek_v4(), **_DEEPSEEK_V4),
    _family("gpt-oss", "gpt_oss", "GptOssForCausalLM", (*_EP[:3], E(tp=2, dp=2, ep=True), E(tp=2, pp=2)), _SPARSE[:2], **_LOCAL,
            intermediate_size=96, sliding_window=64, attention_bias=True, layer_types=["sliding_attention", "full_attention"],
            rope_parameters=dict(rope_type="yarn", factor=2.0, rope_theta=150000.0, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=256, truncate=False)),
    _family("MiniMax-M2", "minimax_m2", "MiniMaxM2ForCausalLM", _EP[:3], _SPARSE, **_LOCAL, intermediate_size=64,
            use_qk_norm=True, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True, since="0.6"),
    _family("ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _EP[:3], _SPARSE, moe_num_experts=8, moe_k=2,
            moe_intermediate_size=64, moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=1,
            moe_layer_interval=1, since="0.6"),
    _family("Mamba2", "mamba2", "Mamba2ForCausalLM", _TP2, num_heads=8, head_dim=32, state_size=16, n_groups=2, expand=2,
            conv_kernel=4, chunk_size=16),
    _family("Nemotron-H", "nemotron_h", "NemotronHForCausalLM", _TP, (*_DENSE[:1], T(world=2, tp=2)), ("*.A_log",), **_NEMOTRON_H,
            mlp_bias=False, hybrid_override_pattern="M-*-"),
    _family("Nemotron-H MoE (Nano 3)", "nemotron_h", "NemotronHForCausalLM", _EP, _TWO_SPARSE, ("*.A_log", *_BIAS),
            **_NEMOTRON_MOE, slow=True),
    _family("Nemotron-H MoE, latent experts (Super 3)", "nemotron_h", "NemotronHForCausalLM", _EP, _TWO_SPARSE,
            ("*.A_log", *_BIAS), **_NEMOTRON_MOE, moe_latent_size=80, since="0.6"),
    _drafted("Nemotron-H MoE, latent experts, with its MTP layers", "Nemotron-H MoE, latent experts (Super 3)", _nemotron_mtp,
             num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E"),
    _family("LFM2", "lfm2", "Lfm2ForCausalLM", _TP2, layer_types=["conv", "full_attention"], conv_L_cache=3, conv_dim=128,
            block_dim=128, conv_bias=False, block_multiple_of=32, block_ff_dim=192, block_auto_adjust_ff_dim=False,
            norm_eps=1e-5),
    _family("Falcon-H1", "falcon_h1", "FalconH1ForCausalLM", _TP2, _TWO_DENSE, mamba_n_heads=8, mamba_d_head=32, mamba_d_ssm=256,
            mamba_n_groups=2, mamba_chunk_size=16, mamba_rms_norm=True, mamba_norm_before_gate=False, **_MAMBA, since="0.6",
            slow=True),
    _family("Zamba2", "zamba2", "Zamba2ForCausalLM", _TP2, head_dim=_ABSENT, num_key_value_heads=4, num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1, n_mamba_heads=8, mamba_ngroups=2, **_MAMBA,
            chunk_size=16, adapter_rank=8, use_mem_rope=True, use_shared_attention_adapter=False, tie_word_embeddings=True,
            hidden_act="gelu", slow=True),
    _family("Jamba", "jamba", "JambaForCausalLM", _TP2, num_experts=8, num_experts_per_tok=2, attn_layer_period=2,
            attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, **_MAMBA, mamba_dt_rank=8),
    _family("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM", _EP[:4], _TWO_SPARSE, **_QWEN3_NEXT),
    _drafted("Qwen3-Next with its MTP layer", "Qwen3-Next", _outside, provider=dict(mtp_num_layers=1)),
    _family("Granite 4 hybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM", _EP[:4], layer_types=["mamba", "attention"],
            **_LOCAL, shared_intermediate_size=96, intermediate_size=64, mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1,
            mamba_chunk_size=16, **_MAMBA, attention_multiplier=1.0, embedding_multiplier=1.0, logits_scaling=1.0,
            residual_multiplier=1.0, position_embedding_type="rope", slow=True),
    _family("Qwen2.5-VL", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _TP, _TWO_DENSE,
            rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}, vision_config=dict(_TOWER, patch_size=14, window_size=112,
            fullatt_block_indexes=[1]), **_SEES, slow=True),
    _family("Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration", _TP, _TWO_DENSE, inner=dict(model_type="qwen3_vl_text",
            rope_scaling={"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True}),
            vision_config=dict(_TOWER, model_type="qwen3_vl", patch_size=16, num_position_embeddings=16,
            deepstack_visual_indexes=[0]), **_SEES),
    _family("Qwen3.5, text", "qwen3_5_text", "Qwen3_5ForCausalLM", _TP, _TWO_DENSE, **_QWEN3_5, since="0.6", slow=True),
    _drafted("Qwen3.5, text, with its MTP layer", "Qwen3.5, text", _outside, (_DENSE[2], _DENSE[0]), mtp_num_hidden_layers=1),
    _family("Qwen3.5-MoE, text", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _EP, _TWO_SPARSE, **_QWEN3_5, **_EXPERTS,
            shared_expert_intermediate_size=96, since="0.6", slow=True),
    _drafted("Qwen3.5-MoE, text, with its MTP layer", "Qwen3.5-MoE, text", _outside, mtp_num_hidden_layers=1),
    _family("MiniMax-M3", "minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", (), _SPARSE,
            inner=dict(model_type="minimax_m3_vl_text", intermediate_size=64, dense_intermediate_size=192,
            shared_intermediate_size=96, **_LOCAL, rotary_dim=16, moe_layer_freq=[0, 1],
            layer_types=["full_attention", "minimax_m3_sparse"], index_n_heads=4, index_head_dim=64),
            vision_config=dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=56),
            projector_hidden_size=128, fp32=("*.gate.weight", *_BIAS), published=_minimax, since="0.6"),
    _family("Qwen3.5", "qwen3_5", "Qwen3_5ForConditionalGeneration", _TP, _TWO_DENSE,
            inner=dict(_QWEN3_5, model_type="qwen3_5_text"), **_QWEN3_5_TOWER, since="0.6"),
    _family("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _EP, _TWO_SPARSE, inner=dict(_QWEN3_5, **_EXPERTS,
            model_type="qwen3_5_moe_text", shared_expert_intermediate_size=96), **_QWEN3_5_TOWER, since="0.6"),
)  # fmt: skip


def specs_of(family: Family) -> tuple[TensorSpec, ...]:
    """The tensors of its checkpoint, by the engine environment's transformers: the trainers' does not know all families."""

    def kept(name: str) -> str | None:
        kinds = {"float32": family.fp32, "int32": family.int32}
        return next((kind for kind, globs in kinds.items() if any(fnmatchcase(name, p) for p in globs)), None)

    specs = () if family.names else canonical_specs(family.config)
    shapes, dtypes = family.names or {s.name: s.shape for s in specs}, {s.name: s.dtype for s in specs}
    named = sorted(family.published(shapes).items())
    return tuple(TensorSpec(n, s, kept(n) or dtypes.get(n, "bfloat16")) for n, s in named)


def register() -> None:
    """The trainers' transformers does not know all families, nor does Bridge. Bridge must have been imported."""
    from xfer.trainers.megatron_ranks import make_known

    if not too_new("0.6"):
        importlib.import_module("tests.support.user_bridges")

    for family in FAMILIES:
        make_known(family.config)


def register_configs() -> None:
    """The engines' transformers does not know these families; vLLM asks for no more than what their configs say."""
    from transformers import AutoConfig, DeepseekV3Config, PretrainedConfig
    from transformers import conversion_mapping as names

    for kind, base in {"bailing_moe": PretrainedConfig, "kimi_k2": DeepseekV3Config}.items():
        AutoConfig.register(kind, type(f"{kind}_config", (base,), {"model_type": kind}), exist_ok=True)
    of_deepseek = names.get_checkpoint_conversion_mapping("deepseek_v3")
    names.register_checkpoint_conversion_mapping("kimi_k2", of_deepseek, overwrite=True)


@functools.cache
def too_new(since: str) -> bool:
    """Whether the installed Megatron-Bridge is older than that. False where none is installed."""
    try:
        installed = version("megatron-bridge")
    except PackageNotFoundError:
        return False
    return Version(installed) < Version(since or "0")


def text(p: EngineParallel | TrainerParallel) -> str:
    """ "tp2 pp2": the sizes above 1."""
    if isinstance(p, EngineParallel):
        sizes = {"tp": p.tp, "pp": p.pp, "dp": p.dp}
        return " ".join([f"{k}{v}" for k, v in sizes.items() if v > 1] + ["ep"] * p.ep) or "tp1"
    dp = p.dp if p.dp > 1 else 1
    sizes = {"tp": p.tp, "pp": p.pp, "vpp": p.vpp or 1, "dp": dp, "ep": p.ep, "etp": p.etp if p.ep > 1 else 1}
    return " ".join(f"{k}{v}" for k, v in sizes.items() if v > 1) or "tp1"
