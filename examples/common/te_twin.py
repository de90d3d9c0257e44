"""CPU stand-ins for TransformerEngine's modules. They stand in ONLY where TransformerEngine is not installed.

Why they exist: Bridge's parameter mappings are written for TransformerEngine's parameter names
(`linear_qkv.layer_norm_weight`, `experts.linear_fc1.weight7`), and its AutoMapping tells column-, row-parallel and
replicated apart by the *class name* of the module. Megatron's own non-TE layers name parameters differently, and Bridge
cannot export their experts at all. These modules have the class names, parameter names, shard shapes and attributes of
the real ones, so what is traced here is what is traced on a GPU trainer; also marks that say less than they seem to: TE marks
every weight as cut along dim 0, unless it is itself told that the layer is row parallel. They are slow, and they know nothing
of fp8 or fusion.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none


class TEColumnParallelLinear(ColumnParallelLinear):
    """Same parameters as Megatron's; the name is what Bridge looks at. Adapters ask for this shard's sizes."""

    in_features = property(lambda self: self.input_size)
    out_features = property(lambda self: self.output_size_per_partition)


class TERowParallelLinear(RowParallelLinear):
    """Same parameters as Megatron's; the name is what Bridge looks at. Adapters ask for this shard's sizes."""

    in_features = property(lambda self: self.input_size_per_partition)
    out_features = property(lambda self: self.output_size)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm's weight and the column-parallel weight behind it, in one module."""

    in_features = property(lambda self: self.input_size)
    out_features = property(lambda self: self.output_size_per_partition)
    return_layernorm_output = False  # an adapter sets it, since it takes what the norm gives
    ub_overlap_ag = True  # so an adapter gathers sequence-parallel input itself, and does not ask for TE's version

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        bias = torch.zeros(input_size, dtype=config.params_dtype) if config.normalization == "LayerNorm" else None
        self.register_parameter("layer_norm_bias", None if bias is None else torch.nn.Parameter(bias))
        if bias is not None:
            self.layer_norm_bias.sequence_parallel = config.sequence_parallel

    def forward(self, x, *args, **kwargs):
        weight, eps = self.layer_norm_weight, self.config.layernorm_epsilon
        if self.config.normalization == "RMSNorm":
            x = F.rms_norm(x, weight.shape, weight, eps)
        else:
            x = F.layer_norm(x, weight.shape, weight, self.layer_norm_bias, eps)
        out, bias = super().forward(x, *args, **kwargs)
        return ((out, x), bias) if self.return_layernorm_output else (out, bias)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _sharded(self, prefix, {"weight": 0, "bias": 0}, sharded_offsets, metadata)


class TELinear(torch.nn.Module):
    """Duplicated linear (MLA's down projections): the full weight on every TP rank."""

    def __init__(
        self, input_size, output_size, *, parallel_mode=None, config, init_method, bias=False, tp_group=None, **_
    ):
        super().__init__()
        if parallel_mode not in (None, "duplicated") or bias:
            raise NotImplementedError(f"TELinear twin with parallel_mode={parallel_mode!r}, bias={bias}")
        self.config, self.parallel_mode = config, None
        self.in_features, self.out_features = input_size, output_size
        self.tp_group = self._tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.weight.sequence_parallel = config.sequence_parallel
        with torch.no_grad():
            init_method(self.weight)

    def forward(self, x):
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _sharded(self, prefix, None, sharded_offsets, metadata)


class _GroupedLinear(torch.nn.Module):
    """weight{i} and, with `bias`, bias{i} for each local expert, cut over expert-TP along `cut`.

    The bias of a row-parallel layer is whole on every rank. The token dispatcher communicates.
    """

    cut: int

    def __init__(
        self, num_gemms, input_size, output_size, *, config, init_method, bias, is_expert=True, pg_collection, **_
    ):
        super().__init__()
        if not is_expert:
            raise NotImplementedError("grouped linear twin outside experts")
        self.config, self.num_gemms, self.use_bias, self.groups = config, num_gemms, bias, pg_collection
        self._tp_group, shards = pg_collection.expt_tp, pg_collection.expt_tp.size()
        explicit = pg_collection.ep.size() > 1 or shards > 1  # Megatron cuts then, and tells TE nothing of it
        shape = [output_size, input_size]
        shape[self.cut] //= shards
        self.out_features, self.in_features = shape
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0 if explicit else self.cut, stride=1)
            weight.allreduce = not explicit  # False: gradients go over expert-DP
            with torch.no_grad():
                init_method(weight)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(
                    f"bias{i}", torch.nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                )

    def forward(self, x, m_splits):
        if self.use_bias:
            raise NotImplementedError("grouped linear twin with a bias can be built, but not run")
        parts = torch.split(x, m_splits)
        return torch.cat([F.linear(p, getattr(self, f"weight{i}")) for i, p in enumerate(parts)]), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        out, n = {}, self.num_gemms
        first, total = self.groups.ep.rank() * n, self.groups.ep.size() * n
        cuts = {"weight": self.cut, **({"bias": 0} if self.cut == 0 else {})}
        for i in range(n):
            made = make_sharded_tensors_for_checkpoint(
                {kind: getattr(self, f"{kind}{i}") for kind in ("weight", "bias")[: 1 + self.use_bias]},
                prefix,
                cuts,
                (*sharded_offsets, (len(sharded_offsets), first + i, total)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
            for name, shard in made.items():
                shard.replica_id = (*shard.replica_id[:2], self.groups.expt_dp.rank())
                out[f"{name}{i}"] = shard
        return out


class TEColumnParallelGroupedLinear(_GroupedLinear):
    cut = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    cut = 1


class TEDotProductAttention(DotProductAttention):
    """Causal attention by torch's kernel; serves MLA as well, whose value heads are narrower than its key heads.

    Under context parallelism a rank has the queries of its two chunks of the sequence and gathers all keys and values
    (TE's cp_comm_type "all_gather"); gradients of those are summed on their way back.
    """

    def __init__(self, config, *args, k_channels=None, v_channels=None, pg_collection, **kwargs):
        kwargs.pop("cp_comm_type", None)
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron's own attention refuses more, and does nothing else with it
        super().__init__(alone, *args, pg_collection=pg_collection, **kwargs)
        self.config, self.cp_group = config, pg_collection.cp

    def forward(self, query, key, value, attention_mask=None, **_):
        visible = None
        if self.cp_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(t, group=self.cp_group) for t in (key, value))
            at = _positions(self.cp_group.size(), query.shape[0]).to(query.device)
            visible = at.flatten() <= at[self.cp_group.rank(), :, None]  # [queries, keys], keys in the order of ranks
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [s, b, h, d] -> [b, h, s, d]
        if q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def _positions(ranks: int, per_rank: int) -> torch.Tensor:
    """int64 [ranks, per_rank]: which tokens each context-parallel rank has. Megatron cuts a sequence into 2n chunks and
    gives rank r the chunks r and 2n - 1 - r (megatron.core.utils.get_batch_on_this_cp_rank)."""
    chunks = torch.arange(ranks * per_rank).view(2 * ranks, -1)
    return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], dim=1)


def _sharded(module, prefix, cuts, offsets, metadata):
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        cuts,
        offsets,
        tp_group=module.tp_group,
        dp_cp_group=(metadata or {}).get("dp_cp_group"),
    )


class TENorm:
    """Megatron's own norm of torch. `has_residual` asks TransformerEngine to add in the same kernel, and changes no result."""

    def __new__(cls, *args, has_residual: bool = False, **kwargs):
        return WrappedTorchNorm(*args, **kwargs)


TWINS = {
    twin.__name__: twin
    for twin in (
        TELinear,
        TEColumnParallelLinear,
        TERowParallelLinear,
        TELayerNormColumnParallelLinear,
        TEColumnParallelGroupedLinear,
        TERowParallelGroupedLinear,
        TEDotProductAttention,
        TENorm,
    )
} | {"TEActivationOp": None}


def install() -> None:
    """Megatron's own TE layer specs build from these modules from now on. RuntimeError where TransformerEngine
    exists.

    Without TE its names hold instances of MagicMock, or nothing, in every module that imported them. Megatron and Bridge build
    layers of them and compare with them, so all of these modules are given the twins.
    """
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import attention, multi_latent_attention
    from megatron.core.transformer.moe import moe_layer

    from examples.common.megatron_cpu import has_transformer_engine, name_te_kernels

    if has_transformer_engine():
        raise RuntimeError("TransformerEngine is installed: use it, not its stand-ins")
    name_te_kernels()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            vars(module).update({n: twin for n, twin in TWINS.items() if n in vars(module)})
    gpt_layer_specs.TESpecProvider, gpt_layer_specs.TENorm = provider.TESpecProvider, TENorm
    provider.is_te_min_version = lambda *_: True  # there is no version to ask for
    for module in (attention, multi_latent_attention, moe_layer):
        module.HAVE_TE, module.TELinear, module.TENorm = True, TELinear, TENorm
        module.TEColumnParallelLinear = TEColumnParallelLinear
    if utils := sys.modules.get("megatron.bridge.peft.utils"):  # Bridge's adapters tell layers apart by TE's classes
        utils.HAVE_TE = True
        utils.TELinear, utils.TELayerNormColumnParallelLinear = TELinear, TELayerNormColumnParallelLinear
        utils.TECL = (TEColumnParallelLinear, TELayerNormColumnParallelLinear, TEColumnParallelGroupedLinear)
        utils.TERL = (TERowParallelLinear, TERowParallelGroupedLinear)
