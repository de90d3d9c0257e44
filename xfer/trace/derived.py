"""Tensors that trainers derive from a checkpoint tensor because an engine serves it in another form.

There is one such form: a matrix in FP8 with a scale per block of BLOCK x BLOCK elements, as checkpoints of DeepSeek-V3 have it.
It is two tensors, values and scales. In a catalog they stand beside the tensor that they are derived from, and a plan moves
them like any other. kernels/quantize.py computes them by a rule, whose name is in their specs. A trainer that keeps its weights in
this form itself has them already (`scales_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

from xfer.errors import Unsupported
from xfer.mesh.box import Ints
from xfer.trace.fragment import Fragment, TensorSpec

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


def scales_of(values: Fragment, shape: Ints, width: int, root: str, offset: int, strides: Sequence[int]) -> Fragment:
    """Return where the scales of a box of a matrix lie, for a parameter that is kept in block FP8.

    The parameter has a block grid of its own, which starts at its first element, and a checkpoint tensor has another one. A scale
    of the one is a scale of the other where each block of the checkpoint tensor lies within one block of the parameter.

    Args:
        values: The box, one byte per element; its offset counts from the parameter's first element.
        shape: Shape of the matrix.
        width: Columns of the parameter, whose rows are dense.
        root: Storage of the parameter's scales.
        offset: Byte of its first scale there.
        strides: Bytes from one scale to the next, down and across.

    Returns:
        A box of the grid of the matrix, under the name of the matrix.

    Raises:
        Unsupported: The box is not made of whole blocks of the matrix, each in one block of the parameter. The message does not name
            the tensor.
    """
    if len(shape) != 2 or values.steps:
        raise Unsupported(
            f"has shape {list(shape)}, and lies in FP8 parameters otherwise than in plain boxes of a matrix"
        )
    first = divmod(values.offset, width)
    at = {1: 1, width: 0}  # stride of the values -> dim of the parameter
    dims = [at.get(s) if n > 1 else None for n, s in zip(values.extent, values.strides)]
    ok = True
    for d, o, n, whole in zip(dims, values.origin, values.extent, shape):
        begins = 0 if d is None else first[d] % BLOCK
        ok &= n == 1 or d is not None
        ok &= o % BLOCK == 0 and (n % BLOCK == 0 or o + n == whole)  # whole blocks of the matrix
        ok &= begins == 0 or begins + n <= BLOCK  # each in one block of the parameter
    if not ok:
        box = " x ".join(f"{o}:{o + n}" for o, n in zip(values.origin, values.extent))
        raise Unsupported(
            f"{box} of {list(shape)} lie at row {first[0]}, column {first[1]} of a parameter in FP8, and so not in whole blocks of "
            f"{BLOCK}x{BLOCK}: no scale of the trainer is a scale of this tensor; keep this layer in bf16 in the trainer, or cut it "
            f"at multiples of {BLOCK}"
        )
    extent = block_grid(values.extent)
    return Fragment(
        values.tensor,
        tuple(o // BLOCK for o in values.origin),
        extent,
        root,
        offset + sum(x // BLOCK * s for x, s in zip(first, strides)),
        tuple(strides[d] if d is not None and n > 1 else 0 for d, n in zip(dims, extent)),
        SCALES,
    )
