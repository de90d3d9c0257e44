"""Block FP8 in numpy, by the definition in xfer/kernels/block_fp8.py: the oracle of its tests. Values are looked up in a table."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from xfer.kernels.block_fp8 import ScaleRule

SIDE = 128


def _decoded(code: int) -> float:
    """A positive number of float8_e4m3fn: 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


NUMBERS = np.array([_decoded(code) for code in range(0x7F)])  # 0x7E: 448; 0x7F is NaN
_BETWEEN = (NUMBERS[1:] + NUMBERS[:-1]) / 2


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes (uint8) of float32 numbers."""
    size = np.abs(x).astype(np.float64)
    code = np.searchsorted(_BETWEEN, size)  # a tie goes to the smaller number,
    tie = (code < 0x7E) & (size == _BETWEEN[np.minimum(code, 0x7D)])
    code += tie & (code % 2 == 1)  # unless the larger one is even
    code = np.where(np.signbit(x), code + 0x80, code)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to bfloat16, as float32."""
    low = np.ascontiguousarray(x, np.float32).view(np.uint32)
    down = low & np.uint32(0xFFFF0000)
    rest = low & np.uint32(0xFFFF)
    up = (rest > 0x8000) | ((rest == 0x8000) & (low >> 16 & 1 == 1))
    rounded = np.where(up, down + np.uint32(0x10000), down).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def block_scale(amax: np.float32, rule: ScaleRule) -> np.float32:
    """The scale of a block by its largest absolute value, which may be NaN."""
    if np.isnan(amax) or np.isinf(amax):
        return np.float32(amax)
    amax = max(amax, np.float32(1e-4))
    if rule is ScaleRule.IEEE:
        return np.float32(amax / np.float32(448))
    scale = 2.0**-40  # 1e-4 needs a larger one
    while float(amax) / scale > 464:
        scale *= 2
    return np.float32(scale)


def quantized(weight: np.ndarray, rule: ScaleRule, row0: int = 0, col0: int = 0):
    """(codes uint8 [R, C], scales and amax float32) of a float32 array, its first element at (row0, col0) of a block."""
    x = to_bfloat16(weight)
    rows, columns = x.shape
    down, across = (-(-(row0 + rows) // SIDE), -(-(col0 + columns) // SIDE)) if x.size else (0, 0)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((down, across), np.float32)
    largest = scales.copy()
    with np.errstate(all="ignore"):
        for i, j in np.ndindex(scales.shape):
            top, left = i * SIDE - row0, j * SIDE - col0
            some = np.s_[max(0, top) : top + SIDE, max(0, left) : left + SIDE]
            largest[i, j] = np.max(np.abs(x[some]))  # keeps NaN
            scales[i, j] = block_scale(largest[i, j], rule)
            codes[some] = to_e4m3(x[some] * (np.float32(1) / scales[i, j]))
    return codes, scales, largest


def te_quantized(weight: np.ndarray, pow2: bool):
    """(codes, scales) by the arithmetic of TransformerEngine's blockwise scaling: its scale is 448 / amax, rounded down to a power of
    two with `pow2`, values are multiplied by it, and its inverse is kept."""
    x, codes = to_bfloat16(weight), np.zeros(weight.shape, np.uint8)
    scales = np.zeros([-(-n // SIDE) for n in x.shape], np.float32)
    for i, j in np.ndindex(scales.shape):
        some = np.s_[i * SIDE : (i + 1) * SIDE, j * SIDE : (j + 1) * SIDE]
        amax = np.max(np.abs(x[some]))
        scale = np.float32(448) / amax if amax else np.float32(1)
        if pow2:
            scale = (np.array(scale).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
        codes[some], scales[i, j] = to_e4m3(x[some] * scale), np.float32(1) / scale
    return codes, scales


NATIVE = {"native": False, "native, powers of two": True}
"""Names of trainers that keep weights in FP8 themselves -> whether their scales are powers of two."""
_OF_WEIGHTS = dict(
    num_bits=8, type="float", strategy="block", block_structure=[SIDE, SIDE], symmetric=True, dynamic=False
)
_OF_INPUTS = dict(num_bits=8, type="float", strategy="group", group_size=SIDE, symmetric=True, dynamic=True)
CONFIGS = {
    "fp8": dict(fmt="e4m3", activation_scheme="dynamic", weight_block_size=[SIDE, SIDE]),
    "compressed-tensors": dict(
        format="float-quantized",
        config_groups={"all": dict(targets=["Linear"], weights=_OF_WEIGHTS, input_activations=_OF_INPUTS)},
        ignore=["lm_head"],
    ),
}
ENGINES = {
    method: dict(hf_overrides={"quantization_config": {"quant_method": method, **config}})
    for method, config in CONFIGS.items()
}
"""By quant_method: EngineArgs with which vLLM serves a bf16 model in block FP8. Its sizes per rank must be multiples of 128."""
ENGINE = ENGINES["fp8"]
SCALES = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}
"""What such checkpoints append to the name of a matrix for that of its scales."""


def serialized(
    tensors: Mapping[str, torch.Tensor],
    wanted: Iterable[tuple[str, str]],
    native: str = "",
    suffix: str = SCALES["fp8"],
) -> dict[str, torch.Tensor]:
    """A checkpoint in block FP8, as vLLM loads one: some matrices, each by the rule that is given, with scales beside them. `native`:
    in NATIVE, as such a trainer quantizes them; a rule then only says which scales an engine takes."""
    out = dict(tensors)
    for name, rule in wanted:
        weight = tensors[name].float().numpy()
        if native and not name.endswith("mlp.gate.weight"):  # a router, which TransformerEngine does not have
            codes, scales = te_quantized(weight, NATIVE[native])
        else:
            codes, scales, _ = quantized(weight, ScaleRule(rule))
        out[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        out[name + suffix] = torch.from_numpy(np.ascontiguousarray(scales))
    return out


def serialize(folder: str, rule: str = "ieee", method: str = "fp8") -> str:
    """Write the checkpoint in `folder` in block FP8, for vLLM's Qwen3 and DeepSeek-V3 models, into another one, and return that."""
    out, tensors = f"{folder}-fp8", {}
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(path)
    wide = [n for n, t in tensors.items() if t.dtype is not torch.float8_e4m3fn]
    latent = any(n.endswith("_with_mqa.weight") for n in wide)  # such models have their router in bf16
    matrices = [n for n in wide if n.endswith(("_proj.weight", "_with_mqa.weight" if latent else "mlp.gate.weight"))]
    quantized = serialized(tensors, ((n, rule) for n in matrices), suffix=SCALES[method])
    save_file(quantized, f"{out}/model.safetensors", {"format": "pt"})
    return out
