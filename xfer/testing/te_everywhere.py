"""Megatron-Bridge with CPU stand-ins wherever its families ask for TransformerEngine, mamba-ssm or flash-linear-attention.

te_twin.py serves models whose layers come from Megatron's own provider of TE layers. Other families name TE's classes
in layer specs of their own (Gemma, OLMoE, Nemotron-H) or derive from them, which happens while they are imported; so
here the stand-ins are put in place before Bridge is. Mamba and gated-delta layers need two GPU packages to be built at
all: their norm gets a stand-in with the same parameters, their kernels one that refuses to run. Layouts read from such
models are those of real ones; their forward is not.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types

import torch

from xfer.testing import megatron_cpu


@functools.cache
def import_bridge():
    """`megatron.bridge.AutoBridge`. Idempotent; must come before anything else of Bridge is imported."""
    megatron_cpu.install()
    if megatron_cpu.has_transformer_engine():
        return megatron_cpu.import_bridge()
    _put_te_twins()
    stand_ins = _gpu_packages()
    sys.modules.update(stand_ins)
    try:
        return megatron_cpu.import_bridge()
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


def stand_in_config(kind: str, architecture: str) -> None:
    """Lets AutoConfig read configs of a family that this transformers does not know: its code comes with its checkpoints.
    Bridge asks of it only what its class is called, so none of that code is needed. Idempotent."""
    from transformers import AutoConfig, PretrainedConfig

    brought = {"model_type": kind, "auto_map": {"AutoModelForCausalLM": f"modeling_{kind}.{architecture}"}}
    AutoConfig.register(kind, type(f"{kind}_config", (PretrainedConfig,), brought), exist_ok=True)


def _put_te_twins() -> None:
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    from xfer.testing import te_twin

    class Biased:
        """Grouped experts that may have a bias each: cut with the rows of a column-parallel weight, else whole."""

        def __init__(self, num_gemms, input_size, output_size, *, bias, pg_collection, config, **more):
            super().__init__(
                num_gemms, input_size, output_size, bias=False, pg_collection=pg_collection, config=config, **more
            )
            self.use_bias = bias
            rows = output_size // (pg_collection.expt_tp.size() if self.cut == 0 else 1)
            for i in range(num_gemms if bias else 0):
                self.register_parameter(
                    f"bias{i}", torch.nn.Parameter(torch.zeros(rows, dtype=config.params_dtype))
                )  # fmt: skip

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            out = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            n = self.num_gemms
            first, total = self.groups.ep.rank() * n, self.groups.ep.size() * n
            for i in range(n if self.use_bias else 0):
                made = make_sharded_tensors_for_checkpoint(
                    {"bias": getattr(self, f"bias{i}")},
                    prefix,
                    {"bias": 0} if self.cut == 0 else None,
                    (*sharded_offsets, (len(sharded_offsets), first + i, total)),
                    tp_group=self.groups.expt_tp,
                    dp_cp_group=(metadata or {}).get("dp_cp_group"),
                )
                out[f"{prefix}bias{i}"] = made[f"{prefix}bias"]
            return out

    # Bridge tells modules apart by the names of their classes.
    column = type("TEColumnParallelGroupedLinear", (Biased, te_twin.TEColumnParallelGroupedLinear), {})
    row = type("TERowParallelGroupedLinear", (Biased, te_twin.TERowParallelGroupedLinear), {})

    class Provider(te_twin.TwinProvider):
        def grouped_mlp_modules(self, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm):
            return TEGroupedMLP, MLPSubmodules(linear_fc1=column, linear_fc2=row)

    for name in (
        "TELinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear",
        "TEDotProductAttention",
    ):  # fmt: skip
        setattr(te, name, getattr(te_twin, name))
    te.TENorm, te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear = WrappedTorchNorm, column, row
    provider.TESpecProvider = te_twin.TwinProvider = Provider  # te_twin.install() puts its own in place again


class _GatedNorm(torch.nn.Module):
    """Parameters of mamba-ssm's gated RMSNorm."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))


def _gpu_packages() -> dict[str, types.ModuleType]:
    def kernel(*_, **__):
        raise NotImplementedError("this model can be built without a GPU, but not run")

    contents: dict[str, dict[str, object]] = {
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": kernel},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": _GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": kernel,
            "mamba_split_conv1d_scan_combined": kernel,
        },
        "fla.modules.l2norm": {"l2norm": kernel},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": kernel},
    }
    for name in list(contents):
        parts = name.split(".")
        for i in range(1, len(parts)):
            contents.setdefault(".".join(parts[:i]), {})
    made = {}
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        vars(module).update(attributes)
        made[name] = module
    return made
