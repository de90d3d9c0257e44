"""Tensors that trainers derive from a checkpoint tensor because an engine serves it in another form.

There is one such form: a matrix in FP8 with a scale per block of BLOCK x BLOCK elements, as checkpoints of DeepSeek-V3 have it.
It is two tensors, values and scales. In a catalog they stand beside the tensor that they are derived from, and a plan moves
them like any other. kernels/quantize.py computes them by a rule, whose name is in their specs.
"""

from __future__ import annotations

from xfer.mesh.box import Ints
from xfer.trace.fragment import TensorSpec

BLOCK = 128
"""Rows and columns of a block."""
VALUES, SCALES = "float8_e4m3fn", "float32"


def block_grid(shape: Ints) -> Ints:
    """The number of blocks in each dim; the last block may be cut off."""
    return tuple(-(-n // BLOCK) for n in shape)


def quantized(base: TensorSpec, rule: str) -> tuple[TensorSpec, TensorSpec]:
    """Return the specs of the values [R, C] and of the scales [ceil R/128, ceil C/128] of matrix `base`."""
    name = f"{base.name}|fp8-{rule}"
    return (
        TensorSpec(name, base.shape, VALUES, of=base.name, rule=rule),
        TensorSpec(f"{name}-scales", block_grid(base.shape), SCALES, of=base.name, rule=rule),
    )
