"""The GPU-only packages that Megatron builds its layers on, reduced to the parameters of those layers.

Megatron-Core wraps TransformerEngine's layers, and Megatron-Bridge maps checkpoints to the names of their parameters;
Megatron's own layers without TransformerEngine have other names, which Bridge cannot export. TransformerEngine,
mamba-ssm and flash-linear-attention cannot be installed without CUDA. So `declare` puts modules in their place that
hold the layers below. A layer here has the parameters of the real one, with the same names, shapes and marks, and no
forward. Class names, sizes per rank and marks of the layers that a model consists of are still Megatron-Core's own:
its wrappers derive from these classes as they derive from the real ones.

The declared packages take precedence over installed ones, so that a plan does not depend on the host it is made on.
Triton is the exception: torch uses an installed one, so it is declared only where it is missing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

TE_VERSION = "2.9.0"
"""The oldest TransformerEngine that Megatron-Core 0.16 asks for; it decides which arguments Megatron-Core passes."""


PACKAGES = ["transformer_engine", "mamba_ssm", "fla"]
"""The packages that are declared. A test that builds real layers of one of them takes it out first."""


class _LinearBase(torch.nn.Module):
    """Common part of linear layers: sizes of one rank, and marks of parameters.

    TransformerEngine marks every weight as cut over ranks: along dim 1 in a row-parallel layer, else along dim 0, even
    if the layer is not parallel.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **_: object,
    ):
        super().__init__()
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.use_bias, self.parallel_mode, self.sequence_parallel = bias, parallel_mode, sequence_parallel
        self._new = functools.partial(torch.empty, dtype=params_dtype, device=device)

    def _add_weight(self, suffix: str = "") -> None:
        weight = torch.nn.Parameter(self._new(self.out_features, self.in_features))
        _mark_cut(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(f"weight{suffix}", weight)
        if self.use_bias:
            bias = torch.nn.Parameter(self._new(self.out_features))
            if self.parallel_mode == "column":
                _mark_cut(bias, 0)
            elif self.parallel_mode == "row":
                _mark(bias, sequence_parallel=self.sequence_parallel)
            self.register_parameter(f"bias{suffix}", bias)

    def _add_norm(self, name: str) -> None:
        parameter = torch.nn.Parameter(self._new(self.in_features))
        _mark(parameter, sequence_parallel=self.sequence_parallel)
        self.register_parameter(name, parameter)


def _mark(parameter: torch.nn.Parameter, **marks: bool | int) -> None:
    """Sets attributes of a parameter that Megatron reads."""
    vars(parameter).update(marks)


def _mark_cut(parameter: torch.nn.Parameter, dim: int) -> None:
    _mark(parameter, tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


class Linear(_LinearBase):
    """Parameters `weight` [out, in] and, with `bias`, `bias` [out]."""

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self._add_weight()


class LayerNormLinear(Linear):
    """A linear layer with the norm before it: `layer_norm_weight` [in] and, for LayerNorm, `layer_norm_bias` [in]."""

    def __init__(self, *sizes: int, normalization: str = "LayerNorm", **options: Any):
        super().__init__(*sizes, **options)
        self._add_norm("layer_norm_weight")
        if normalization == "LayerNorm":
            self._add_norm("layer_norm_bias")


class GroupedLinear(_LinearBase):
    """One `weight{i}` [out, in] and, with `bias`, one `bias{i}` [out] for each expert."""

    def __init__(self, num_gemms: int, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self._add_weight(str(i))


class DotProductAttention(torch.nn.Module):
    """With learnable sinks, `softmax_offset` [heads of this rank] in float32; else no parameter."""

    def __init__(self, num_attention_heads: int, *_, softmax_type: str = "vanilla", tp_size: int = 1, **__: object):
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_attention_heads // tp_size))


class RMSNorm(torch.nn.Module):
    """`weight` [hidden]. mamba-ssm's gated norm has the same parameters, and takes `dtype` for `params_dtype`.

    Megatron-Core gives the size as `hidden_size` up to 0.16 and as `normalized_shape` from 0.17 on.
    """

    def __init__(
        self,
        hidden_size: int | None = None,
        *_,
        normalized_shape: int | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **__: object,
    ):
        super().__init__()
        size = cast(int, normalized_shape if hidden_size is None else hidden_size)  # callers give one of the two
        for name in self._names:
            parameter = torch.nn.Parameter(torch.empty(size, dtype=params_dtype or dtype, device=device))
            _mark(parameter, sequence_parallel=sequence_parallel)
            self.register_parameter(name, parameter)

    _names: tuple[str, ...] = ("weight",)


class LayerNorm(RMSNorm):
    """`weight` [hidden] and `bias` [hidden]."""

    _names = ("weight", "bias")


def get_cpu_offload_context(*_: object, **__: object) -> tuple[contextlib.AbstractContextManager, None]:
    """Stands in for a function that Megatron-Core calls when it builds a block, whether or not activations are offloaded."""
    return contextlib.nullcontext(), None


_CONTENTS: dict[str, tuple[type | Callable, ...]] = {
    "transformer_engine.pytorch": (Linear, LayerNormLinear, GroupedLinear, DotProductAttention, RMSNorm, LayerNorm),
    "transformer_engine.pytorch.cpu_offload": (get_cpu_offload_context,),
    "mamba_ssm.ops.triton.layernorm_gated": (RMSNorm,),
}
"""Everything in the declared packages that building a model uses. All else is `_Unused`."""


@functools.cache
def declare() -> None:
    """Puts the declared packages in place for the life of this process. Must run before Megatron is imported."""
    # torch asks for triton when this is imported, and must not find a declared one.
    import torch._dynamo  # noqa: F401

    packages = list(PACKAGES)
    if importlib.util.find_spec("triton") is None:
        packages.append("triton")
    if early := [p for p in ("megatron.core", *packages) if p in sys.modules]:
        raise RuntimeError(f"imported before gpu_packages.declare(): {early}")
    sys.meta_path.insert(0, _Finder(packages))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]):
        self._packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        vars(module).update({item.__name__: item for item in _CONTENTS.get(module.__name__, ())})


class _Module(types.ModuleType):
    """A declared module. Every name that it does not hold is an `_Unused` class."""

    __version__ = TE_VERSION

    def __getattr__(self, name: str) -> type:
        return _unused(name)


class _Unused(type):
    """Classes that Megatron names while it is imported, as base, annotation or decorator, and never uses on a CPU.

    Each attribute is another such class. Called with a function, as a decorator is, the class returns the function;
    called otherwise, it returns a decorator.
    """

    def __getattr__(cls, name: str) -> type:
        return _unused(name)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function


def _unused(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unused(name, (), {})
