"""Bridges that users write for families that Megatron-Bridge 0.6.2 does not list, as its `MegatronModelBridge` says: a provider made of
the Hugging Face config, and a map of names. Importing this module registers them. Nothing of xfer takes part.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.bridge.models.glm_moe_dsa.glm5_bridge import GLM5Bridge
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel

_COMMON = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.mlp.linear_fc2.weight": "model.layers.*.mlp.down_proj.weight",
}


def _renamed(names: dict[str, str]) -> list[AutoMapping]:
    return [AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in names.items()]


def _qkv(kind: str) -> QKVMapping:
    q, k, v = (f"model.layers.*.self_attn.{x}_proj.{kind}" for x in "qkv")
    return QKVMapping(megatron_param=f"decoder.layers.*.self_attention.linear_qkv.{kind}", q=q, k=k, v=v)


def _gated(ours: str, theirs: str) -> GatedMLPMapping:
    return GatedMLPMapping(megatron_param=ours, gate=f"{theirs}.gate_proj.weight", up=f"{theirs}.up_proj.weight")


@MegatronModelBridge.register_bridge(source="Jais2ForCausalLM", target=GPTModel, model_type="jais2")
class Jais2Bridge(MegatronModelBridge):
    """LayerNorm, biases everywhere but in the head, squared ReLU without a gate."""

    CONFIG_MAPPING = [*MegatronModelBridge.CONFIG_MAPPING, ("layer_norm_eps", "layernorm_epsilon")]

    def provider_bridge(self, hf_pretrained):
        provider = super().provider_bridge(hf_pretrained)
        provider.normalization, provider.gated_linear_unit = "LayerNorm", False
        provider.add_bias_linear = provider.add_qkv_bias = True
        provider.hidden_dropout, provider.autocast_dtype = 0.0, torch.bfloat16
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        names = {**_COMMON, "decoder.layers.*.mlp.linear_fc1.weight": "model.layers.*.mlp.up_proj.weight"}
        biases = {k.removesuffix("weight") + "bias": v.removesuffix("weight") + "bias" for k, v in names.items()}
        for name in ("embedding.word_embeddings.bias", "output_layer.bias"):
            del biases[name]
        return MegatronMappingRegistry(*_renamed({**names, **biases}), _qkv("weight"), _qkv("bias"))


@MegatronModelBridge.register_bridge(source="MellumForCausalLM", target=GPTModel, model_type="mellum")
class MellumBridge(MegatronModelBridge):
    """As Qwen3-MoE, but each layer says whether it is dense and whether its attention slides."""

    def provider_bridge(self, hf_pretrained):
        provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
        provider.normalization, provider.gated_linear_unit = "RMSNorm", True
        provider.add_bias_linear = provider.add_qkv_bias = False
        provider.qk_layernorm, provider.hidden_dropout, provider.autocast_dtype = True, 0.0, torch.bfloat16
        provider.window_size = (config.sliding_window, 0)
        provider.window_attn_skip_freq = [int(kind == "sliding_attention") for kind in config.layer_types]
        provider.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
        provider.moe_layer_freq = [int(kind == "sparse") for kind in config.mlp_layer_types]
        provider.moe_grouped_gemm, provider.moe_token_dispatcher_type = True, "alltoall"
        provider.moe_router_load_balancing_type, provider.moe_router_pre_softmax = "aux_loss", not config.norm_topk_prob
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        experts = "decoder.layers.*.mlp.experts"
        names = {
            **_COMMON,
            "decoder.layers.*.self_attention.q_layernorm.weight": "model.layers.*.self_attn.q_norm.weight",
            "decoder.layers.*.self_attention.k_layernorm.weight": "model.layers.*.self_attn.k_norm.weight",
            "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
            "decoder.layers.*.mlp.router.weight": "model.layers.*.mlp.gate.weight",
            f"{experts}.linear_fc2.weight*": "model.layers.*.mlp.experts.*.down_proj.weight",
        }
        return MegatronMappingRegistry(
            *_renamed(names),
            _qkv("weight"),
            _gated("decoder.layers.*.mlp.linear_fc1.weight", "model.layers.*.mlp"),
            _gated(f"{experts}.linear_fc1.weight*", "model.layers.*.mlp.experts.*"),
        )


@MegatronModelBridge.register_bridge(
    source="DeepseekV32ForCausalLM", target=GPTModel, provider=MLAModelProvider, model_type="deepseek_v32"
)
class DeepSeekV32Bridge(GLM5Bridge):
    """DeepSeek-V3 with the sparse attention of GLM-5, of which Bridge has a bridge. Positions are stretched as in DeepSeek-V3."""

    def provider_bridge(self, hf_pretrained):
        provider, plain = (
            super().provider_bridge(hf_pretrained),
            MegatronModelBridge.provider_bridge(self, hf_pretrained),
        )
        for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim"):
            setattr(provider, name, getattr(plain, name))
        # transformers 5.12 has a default of another name
        provider.num_moe_experts = hf_pretrained.config.n_routed_experts
        return provider
