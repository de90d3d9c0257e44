"""Quantize weights to block FP8: boxes of weights are bound once, and a call writes all of them. block_fp8.py defines the bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Protocol

import torch

from xfer.kernels.block_fp8 import BLOCK, WEIGHT_DTYPES, ScaleRule, TorchQuantizer, WeightBox, grid

__all__ = ["Quantizer", "ScaleRule", "WeightBox", "grid", "quantizer"]


class Quantizer(Protocol):
    """Boxes bound to their tensors. On GPUs all Python work is done at binding; the calls only launch, on the current stream."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the kernels' tables on the GPU."""

    def measure(self) -> None:
        """Writes the `amax` of every box that has one."""

    def run(self) -> None:
        """Writes values and scales of every box that has them, by its `amax` if it has one."""


def quantizer(boxes: Sequence[WeightBox], rule: ScaleRule) -> Quantizer:
    """Binds boxes to their tensors. On GPUs a call launches one kernel for each kind of box, however many boxes there are.

    Args:
        boxes: All on one device.
        rule: How scales follow from largest values.

    Raises:
        ValueError: A tensor of a box has the wrong dtype, shape, strides or device. The error lists all of them.
    """
    _check(boxes)
    boxes = [b for b in boxes if b.weight.numel()]
    if boxes and boxes[0].weight.is_cuda and find_spec("triton") is not None:
        from xfer.kernels.quantize_triton import TritonQuantizer

        return TritonQuantizer(boxes, rule)
    return TorchQuantizer(boxes, rule)


def _check(boxes: Sequence[WeightBox]) -> None:
    wrong = [f"box {i}: {line}" for i, b in enumerate(boxes) for line in _wrong(b, boxes[0].weight.device)]
    if wrong:
        raise ValueError("\n  - ".join(["these boxes of weights cannot be quantized", *wrong]))


def _wrong(b: WeightBox, device: torch.device) -> Iterator[str]:
    if b.weight.dim() != 2 or b.weight.dtype not in WEIGHT_DTYPES:
        yield f"weight is {b.weight.dtype} {tuple(b.weight.shape)}, not bfloat16 or float32 [R, C]"
        return
    if not (0 <= b.row0 < BLOCK and 0 <= b.col0 < BLOCK):
        yield f"begins at ({b.row0}, {b.col0}) of a block of {BLOCK} x {BLOCK}"
        return
    if (b.values is None) != (b.scales is None) or (b.values is None and b.amax is None):
        yield "needs values and scales, or amax, or all three"
    for name, t, dtype, shape in (
        ("values", b.values, torch.float8_e4m3fn, tuple(b.weight.shape)),
        ("scales", b.scales, torch.float32, b.grid),
        ("amax", b.amax, torch.float32, b.grid),
    ):
        if t is None:
            continue
        if t.dtype != dtype or tuple(t.shape) != shape:
            yield f"{name} is {t.dtype} {tuple(t.shape)}, not {dtype} {shape}"
        elif t.shape[1] > 1 and t.stride(1) != 1:
            yield f"{name} has strides {t.stride()}, but its rows must be dense"
    devices = {str(t.device) for t in (b.weight, b.values, b.scales, b.amax) if t is not None}
    if devices != {str(device)}:
        yield f"is on {', '.join(sorted(devices))}, and box 0 on {device}"
