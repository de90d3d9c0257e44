"""Define weights in block FP8 to the bit: float8_e4m3fn values, and one float32 scale for each block of 128 x 128.

    amax   = largest |x| of the block, x in bfloat16 (float32 weights are rounded first), at least 1e-4
    scale  = amax / 448                                                      ScaleRule.IEEE
           = the smallest power of two with amax / scale <= 464              ScaleRule.POW2
    value  = e4m3(x * (1 / scale))

Each operation rounds float32 to nearest, ties to even, and so does the conversion to e4m3, which saturates at 448. IEEE is what vLLM's
`per_block_cast_to_fp8` computes without torch.compile on a CPU. POW2 survives DeepGEMM's requantization to power-of-two scales
unchanged: 464 is the largest number that rounds to 448, and with a limit of 448 a block whose largest value rounds to 224 would get
half its scale when it is quantized again.

A NaN makes its whole block NaN, with a NaN scale; an infinity makes it an infinite scale, with NaN for infinities and zeros for the
rest. So a diverged trainer shows in the engine. A NaN is 0x7FC00000 in scales and 0x7F in values. Weights that are zero or tiny keep
their sign.

This file has what callers bind and the torch twin. Not here: the kernel for GPUs (quantize_triton.py), the choice between both
(quantize.py), which tensors are quantized, which ranks share a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from xfer.trace.derived import BLOCK, block_grid

FLOOR = 1e-4
"""The least amax of a block, so that blocks of zeros have a scale."""
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)
CHUNK = 1 << 20
"""Elements that the torch twin works on at once, about: its scratch is a few float32 tensors of this size."""


class ScaleRule(Enum):
    """How a block's scale follows from its largest absolute value."""

    IEEE = "ieee"
    POW2 = "pow2"

    @staticmethod
    def of_all(rules: Iterable[ScaleRule | None]) -> ScaleRule | None:
        """The one rule that suits parts of a model: POW2 where some part needs it. None if no part is in FP8."""
        return max((r for r in rules if r is not None), key=lambda r: r is ScaleRule.POW2, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class WeightBox:
    """A box of a weight, and where its blocks go. Its first element lies at (row0, col0) of its first block.

    Attributes:
        weight: [R, C], bfloat16 or float32, any strides. A stack of experts is one box for each expert.
        values: [R, C], float8_e4m3fn, dense rows; None where the box is only measured.
        scales: float32, `grid(...)`, dense rows; None where values is.
        amax: float32, `grid(...)`, dense rows: largest absolute value of each block, 0 for zeros. Given where other boxes have a part
            of these blocks: `Quantizer.measure` writes it, the caller takes the maximum over ranks, and `run` reads it. Viewed as
            int32 its elements have the same order, with NaN as the largest. Boxes of one rank that share a block share its element.
            None where no other box has a part of these blocks.
        row0, col0: 0 to 127.
    """

    weight: torch.Tensor
    values: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    row0: int = 0
    col0: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        return grid(self.weight.shape, self.row0, self.col0)


def grid(shape: Sequence[int], row0: int = 0, col0: int = 0) -> tuple[int, int]:
    """Blocks that a box touches, (down, across): the shape of its scales."""
    down, across = block_grid(tuple(start + n if n else 0 for start, n in zip((row0, col0), shape, strict=True)))
    return down, across


class TorchQuantizer:
    """As `Quantizer`, in torch on any device, of boxes that are checked and not empty: the twin that the kernel is tested against."""

    scratch_bytes = 0

    def __init__(self, boxes: Sequence[WeightBox], rule: ScaleRule):
        self._boxes, self._rule = list(boxes), rule

    def measure(self) -> None:
        shared = [(b, b.amax) for b in self._boxes if b.amax is not None]
        for _, amax in shared:
            amax.zero_()
        for b, amax in shared:
            torch.maximum(amax, _amax(b), out=amax)

    def run(self) -> None:
        for b in self._boxes:
            if b.values is not None and b.scales is not None:
                _quantize(b, b.values, b.scales, _amax(b) if b.amax is None else b.amax, self._rule)


def scales_of(amax: torch.Tensor, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, 1 / scales) by blocks' largest absolute values, float32."""
    amax = amax.clamp_min(FLOOR)  # keeps NaN
    if rule is ScaleRule.IEEE:
        scales = amax / torch.full_like(amax, LARGEST)  # by a number, torch multiplies with its reciprocal on GPUs
    else:
        # amax = m * 2**e gives 2**(e - 8), or 2**(e - 7) where m > 464 / 256 = 1.8125: then the sum carries into the exponent.
        bits = amax.view(torch.int32)
        power = (((bits + 0x17FFFF) >> 23) - 8) << 23
        scales = torch.where(amax.isfinite(), power.view(torch.float32), amax)
    scales = torch.where(scales.isnan(), torch.nan, scales)
    return scales, torch.ones_like(scales) / scales


def _amax(b: WeightBox) -> torch.Tensor:
    """float32 [down, across]."""
    down, across = b.grid
    out = b.weight.new_empty(down, across, dtype=torch.int32)
    for first, x in _block_rows(b):
        bits = (x.view(torch.int16) & 0x7FFF).amax(1).amax(-1)  # as integers, NaN is the largest
        out[first : first + len(bits)] = bits.masked_fill_(bits > 0x7F80, 0x7FC0).to(torch.int32) << 16
    return out.view(torch.float32)


def _quantize(b: WeightBox, values: torch.Tensor, into: torch.Tensor, amax: torch.Tensor, rule: ScaleRule) -> None:
    scales, inverse = scales_of(amax, rule)
    into.copy_(scales)
    rows, columns = b.weight.shape
    for first, x in _block_rows(b):
        y = x * inverse[first : first + len(x), None, :, None]
        # The first keeps NaN, and without it torch before 2.13 makes NaN of what is too large; the second makes all NaN the same one.
        y.clamp_(-LARGEST, LARGEST).nan_to_num_(nan=torch.nan)
        begin = first * BLOCK - b.row0
        y = y.view(len(x) * BLOCK, -1)[max(0, -begin) : rows - begin, b.col0 : b.col0 + columns]
        values[max(0, begin) : max(0, begin) + len(y)].copy_(y)


def _block_rows(b: WeightBox) -> Iterator[tuple[int, torch.Tensor]]:
    """(first block, bfloat16 [n, 128, across, 128]) of parts of the box, filled up with zeros to whole blocks."""
    (down, across), columns = b.grid, b.weight.shape[1]
    per = max(1, CHUNK // (across * BLOCK * BLOCK))
    for first in range(0, down, per):
        n = min(per, down - first)
        begin = first * BLOCK - b.row0
        part = b.weight.detach()[max(0, begin) : begin + n * BLOCK].to(torch.bfloat16)
        if part.shape != (n * BLOCK, across * BLOCK):
            whole = part.new_zeros(n * BLOCK, across * BLOCK)
            top = max(0, -begin)
            whole[top : top + len(part), b.col0 : b.col0 + columns] = part
            part = whole
        yield first, part.reshape(n, BLOCK, across, BLOCK)
