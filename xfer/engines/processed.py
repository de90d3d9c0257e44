"""Finds how vLLM has processed a live model after loading: modules that it may have laid out anew. It refuses other processing.

relaid.py reads the new layouts. copies.py finds other tensors outside parameters and buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from xfer.engines import vllm_cpu
from xfer.engines.copies import variants
from xfer.errors import Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace.derived import BLOCK

_AS_LOADED = (
    "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod",
    "Fp8KVCacheMethod", "CompressedTensorsKVCacheMethod",  # scales of the KV cache, which are buffers of the attention
)  # fmt: skip
_MOE_AS_LOADED = ("TRITON", "BATCHED_TRITON")
_IN_SCHEME = "CompressedTensorsLinearMethod"
"""A method whose settings are in the scheme of the module."""
_FP8 = ("Fp8LinearMethod", "Fp8MoEMethod", _IN_SCHEME, "CompressedTensorsW8A8Fp8MoEMethod")
"""Methods that may serve block FP8 as a quantized checkpoint has it. The layout depends on the kernel."""
_FP8_AS_LOADED = (
    "CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel", "BlockWiseTorchFP8ScaledMMLinearKernel",
    "TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS",
)  # fmt: skip
"""Kernels of linear layers and backends of experts that leave values and scales as they are loaded."""
_DEEP_GEMM = (
    "DeepGemmFp8BlockScaledMMKernel", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DEEPGEMM", "BATCHED_DEEPGEMM",
)  # fmt: skip
"""Kernels and backends that quantize again after loading, with scales that are powers of two, unless E8M0 is turned off."""
_CPU = ("CPUFp8BlockScaledMMKernel", "CPU")
PROCESSED = "this engine processed its weights after loading them"
ELSE = "or have vLLM's own loader make them from whole tensors: connect(route=xfer.Packed())"
ELSE_FP8 = "or let it quantize while it loads (quantization='fp8_per_block'), with connect(route=xfer.Packed())"
_UNSCALED = (
    "use connect(route=xfer.Direct()), or an engine that quantizes while it loads (quantization='fp8_per_block')"
)
_RESIDENT = "set XFER_CPU_RESIDENT=1 where vLLM is started"


@dataclass(frozen=True, slots=True)
class Relaid:
    """A module of experts whose backend may lay them out anew.

    Attributes:
        name: Its path in its model.
        backend: vLLM's name of the backend.
        fp8: Whether its weights are in block FP8.
    """

    name: str
    backend: str
    fp8: bool


@dataclass(frozen=True, slots=True)
class Processed:
    """The result of `read_processed`.

    Attributes:
        rule: The rule by which weights have to be quantized for this model; None if it serves none in FP8. POW2 if DeepGEMM
            quantizes again, which does not change weights with such scales.
        relaid: The modules whose layout has to be read from their own processing.
    """

    rule: ScaleRule | None
    relaid: tuple[Relaid, ...]


def quant_method(module: torch.nn.Module) -> Any:
    """The method of vLLM that made a module's weights; None if it has none."""
    method = getattr(module, "quant_method", None)
    return getattr(method, "old_quant_method", method)  # for LoRA and elastic experts, one method wraps another


def backend_of(method: Any) -> str:
    """vLLM's name of the kernels of a method for experts; "" for other methods."""
    backend = getattr(method, "unquantized_backend", getattr(method, "fp8_backend", None))
    return "" if backend is None else getattr(backend, "name", str(backend))


def read_processed(model: torch.nn.Module, prefix: str = "") -> Processed:
    """Say how vLLM processed the modules of a live model.

    Some processing keeps shape and dtype (FlashInfer swaps the halves of w13), so the result does not show it. This function
    therefore has lists of methods and kernels that leave weights alone. relaid.py reads other backends of experts.

    Raises:
        Unsupported: It names every module with a method or kernel of another kind.
    """
    bad: list[str] = []
    rules: set[ScaleRule] = set()
    relaid: list[Relaid] = []
    for name, module in model.named_modules():
        method = quant_method(module)
        if method is None:
            continue
        kind = type(method).__name__
        if kind in _FP8:
            verdict = _block_fp8(kind, getattr(module, "scheme", method) if kind == _IN_SCHEME else method)
            if isinstance(verdict, ScaleRule):
                rules.add(verdict)
            elif isinstance(verdict, _Backend):
                rules.add(ScaleRule.IEEE)
                relaid.append(Relaid(name, verdict.name, fp8=True))
            else:
                bad.append(f"{prefix}{name}: {verdict}")
        elif kind not in _AS_LOADED:
            bad.append(
                f"{prefix}{name}: {kind}: weights in this form need scales and layouts that xfer does not move: it moves bf16, and "
                f"block FP8 [128, 128] as a checkpoint has it; {ELSE}"
            )
        elif backend := backend_of(method):
            if backend == "CPU" and not vllm_cpu.installed():
                bad.append(f"{prefix}{name}: experts packed for the CPU; {_RESIDENT}")
            elif backend != "CPU" and backend not in _MOE_AS_LOADED:
                relaid.append(Relaid(name, backend, fp8=False))
    bad += _copies_in_attention(model)
    if bad:
        raise Unsupported(PROCESSED, bad)
    return Processed(ScaleRule.of_all(rules), tuple(relaid))


def without_scales(model: torch.nn.Module, names: Iterable[str], made: Container[str] = ()) -> list[str]:
    """One line per parameter that takes FP8 weights with scales beside it, if no tensor of the checkpoint is named like its scales.

    vLLM would load the weights, and dequantize them by the scales of an earlier load.

    Args:
        names: The checkpoint's tensors.
        made: Parameters whose scales are made here.
    """
    bad, names = [], list(names)
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False)) if type(quant_method(module)).__name__ in _FP8 else {}
        for name, p in own.items():
            scales = [n.removeprefix(name) for n in own if n.startswith(name) and n != name]
            if p.dtype is not torch.float8_e4m3fn or f"{path}.{name}" in made:
                continue
            if scales and not any(n.endswith(tuple(scales)) for n in names):
                bad.append(
                    f"{path}.{name}: is FP8 with scales in {name}{scales[0]}, and trainers send none; {_UNSCALED}"
                )
    return bad


@dataclass(frozen=True, slots=True)
class _Backend:
    name: str


def _block_fp8(kind: str, method: Any) -> ScaleRule | _Backend | str:
    """The rule for a layer of this method (compressed-tensors: its scheme), the backend that may have laid it out anew, or why its
    weights cannot be written in place."""
    block = getattr(method, "weight_block_size", None)
    if list(block or ()) != [BLOCK, BLOCK]:
        what = f"blocks of {list(block)}" if block else "scales per tensor or per channel"
        return f"{kind}: {what}; xfer moves block FP8 [{BLOCK}, {BLOCK}] only; {ELSE_FP8}"
    if getattr(method, "weight_scale_refine", None) is not None:
        return f"{kind}: scales of finer blocks than the checkpoint's; cut experts at multiples of {BLOCK}, {ELSE_FP8}"
    backend = backend_of(method)
    kernel = backend or type(method.fp8_linear).__name__
    if kernel in _FP8_AS_LOADED:
        return ScaleRule.IEEE
    if kernel in _CPU:
        return ScaleRule.IEEE if vllm_cpu.installed() else f"{kernel}: weights packed for the CPU; {_RESIDENT}"
    if kernel in _DEEP_GEMM:
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10:
            return f"{kernel}: scales are packed four to an int32 on this GPU; {ELSE_FP8}"
        return ScaleRule.POW2 if _requantizes() else ScaleRule.IEEE
    if backend:
        return _Backend(backend)
    return f"{kernel} repacks FP8 weights; start vLLM with linear_backend='cutlass', {ELSE_FP8}"


def _requantizes() -> bool:
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return is_deep_gemm_e8m0_used()


def _copies_in_attention(model: torch.nn.Module) -> list[str]:
    """One line per tensor that an attention implementation computed after loading and keeps (FlashInfer: sinks in fp32).

    An implementation is not a module, so no layout contains the tensor, and a refit of the parameter would not change it.
    """
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    bad = []
    for name, module in model.named_modules():
        for part in variants(module):
            definers = [c for c in type(part).__mro__ if "process_weights_after_loading" in vars(c)]
            if not definers or inspect.isabstract(definers[0]):  # none but the abstract base's, which does nothing
                continue
            bad += [
                f"{name}: {type(part).__name__} computed {key} from weights and refits cannot reach it; "
                "start vLLM with another attention backend"
                for key, t in vars(part).items()
                if isinstance(t, torch.Tensor) and t.is_floating_point() and t.untyped_storage()._cdata not in own
            ]
    return bad
