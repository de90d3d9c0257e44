"""Block FP8 on CUDA: the arithmetic of block_fp8.py by one kernel over a table of blocks, and bound once.

The same bits as the torch twin. One program takes one block: it reads it into registers, finds the largest absolute value, and writes
the scale and the values, so that a weight is read once and each value written once. Boxes stand in one table and blocks in another,
8 bytes each, so that thousands of small experts are one launch. Not here: what a scale is (block_fp8.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
import triton
import triton.language as tl

from xfer.kernels.block_fp8 import BLOCK, FLOOR, LARGEST, ScaleRule, WeightBox
from xfer.kernels.triton_impl import _to_bfloat16

COLUMNS = 11
"""int64 words of a box: address of the weight, its row and column stride; addresses and row strides of values, scales and amax; shape
(rows << 32 | columns), place of its first element in the first block (row0 << 32 | col0). Strides in elements."""
WARPS, REGISTERS = 8, 80
"""Warps of a program, and most registers of a thread: three programs fit on a multiprocessor of an H100, and nothing is spilled."""
UNITS = (16, 1)
"""Elements in a row that one thread reads and writes together: 16 where addresses, strides, widths and col0 are multiples of it."""
FUSED, MEASURE, FROM_AMAX = range(3)
"""What a launch does: all in one pass; only amax; values and scales by amax."""
_MAX_SIDE, _MAX_BOXES = 1 << 20, 1 << 23
"""Blocks of a box in each direction, and boxes: what a word of the table of blocks (box << 40 | down << 20 | across) can hold."""
_MAX_STRIDE = 1 << 23
"""Elements between two rows or columns of a box: offsets inside a block are 32 bits."""
_FLOOR_BITS = int(np.float32(FLOOR).view(np.int32))


@triton.jit
def _scale_of(amax, POW2: tl.constexpr, FLOOR_BITS: tl.constexpr, MOST: tl.constexpr):
    """(scale, 1 / scale) of a block. amax: the bits of its largest absolute value, int32."""
    bits = tl.maximum(amax, FLOOR_BITS)
    if POW2:
        power = (((bits + 0x17FFFF) >> 23) - 8) << 23
        scale = tl.where(bits < 0x7F800000, power, bits).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), MOST)
    scale = tl.where(bits > 0x7F800000, 0x7FC00000, scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _e4m3(x, HARDWARE: tl.constexpr):
    """Bits of float8_e4m3fn, by block_fp8.py's rounding. HARDWARE: GPUs since compute capability 8.9 convert just so; the interpreter
    rounds halves up."""
    if HARDWARE:
        out = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # 2**14 has steps of 2**-9, as subnormals of e4m3 have: the sum rounds.
        tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        value = tl.minimum(tl.where(size < 0x3C800000, tiny, normal), 0x7E) | ((bits >> 24) & 0x80)
        out = tl.where(size > 0x7F800000, 0x7F, value).to(tl.uint8)
    return out


@triton.jit(do_not_specialize=["count"])
def _quantize(
    boxes, blocks, count,
    WORD: tl.constexpr, UNIT: tl.constexpr, PART: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
    FLOOR_BITS: tl.constexpr, MOST: tl.constexpr, SIDE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One block. WORD: uint16 or uint32, the bits of bfloat16 or float32."""
    i = tl.program_id(0)
    if i < count:
        place = tl.load(blocks + i)
        box = boxes + (place >> 40) * COLS
        down = (place >> 20) & 0xFFFFF
        across = place & 0xFFFFF
        shape = tl.load(box + 9)
        first = tl.load(box + 10)
        # Where the block begins, in the box: before its first element where the box begins inside the block.
        row = (down * SIDE - (first >> 32)).to(tl.int32)
        column = tl.multiple_of((across * SIDE - (first & 0xFFFFFFFF)).to(tl.int32), UNIT)
        width = tl.multiple_of((shape & 0xFFFFFFFF).to(tl.int32), UNIT)
        rows = tl.arange(0, SIDE)[:, None]
        columns = tl.arange(0, SIDE)[None, :]
        keep = (
            (row + rows >= 0)
            & (row + rows < (shape >> 32).to(tl.int32))
            & (column + columns >= 0)
            & (column + columns < width)
        )
        weight = tl.multiple_of(tl.load(box).to(tl.pointer_type(WORD)), UNIT * WORD.primitive_bitwidth // 8)
        stride = tl.multiple_of(tl.load(box + 1), UNIT)
        if UNIT == 1:
            step = tl.load(box + 2)
            at = rows * stride.to(tl.int32) + columns * step.to(tl.int32)
            weight += row * stride + column * step
        else:
            at = rows * stride.to(tl.int32) + columns
            weight += row * stride + column
        x = tl.load(weight + at, mask=keep, other=0)
        if WORD == tl.uint32:
            x = _to_bfloat16(x.to(tl.float32, bitcast=True)).to(tl.uint16, bitcast=True)
        x = x.to(tl.uint32) << 16
        if PART != 2:
            amax = tl.max((x & 0x7FFFFFFF).to(tl.int32, bitcast=True), axis=None)  # as integers NaN is the largest
            amax = tl.where(amax > 0x7F800000, 0x7FC00000, amax)
        if PART != 0:
            shared = tl.load(box + 7).to(tl.pointer_type(tl.int32)) + down * tl.load(box + 8) + across
            if PART == 1:
                tl.atomic_max(shared, amax, sem="relaxed")
            else:
                amax = tl.load(shared)
        if PART != 1:
            scale, inverse = _scale_of(amax, POW2, FLOOR_BITS, MOST)
            tl.store(tl.load(box + 5).to(tl.pointer_type(tl.float32)) + down * tl.load(box + 6) + across, scale)
            values = tl.multiple_of(tl.load(box + 3).to(tl.pointer_type(tl.uint8)), UNIT)
            stride = tl.multiple_of(tl.load(box + 4), UNIT)
            values += row * stride + column
            into = rows * stride.to(tl.int32) + columns
            tl.store(values + into, _e4m3(x.to(tl.float32, bitcast=True) * inverse, HARDWARE), mask=keep)


@dataclass(frozen=True, slots=True)
class _BlockTable:
    """Boxes that one launch can take together, and their tables on the device."""

    dtype: torch.dtype
    unit: int
    boxes: torch.Tensor  # int64 [n, COLUMNS]
    blocks: torch.Tensor  # int64 [blocks of all boxes]

    def launch(self, part: int, pow2: bool, hardware: bool, count: int | None = None) -> None:
        word = tl.uint16 if self.dtype == torch.bfloat16 else tl.uint32
        n = self.blocks.shape[0] if count is None else count
        _quantize[(max(1, n),)](
            self.boxes, self.blocks, n, word, self.unit, part, pow2, hardware, _FLOOR_BITS, LARGEST, BLOCK, COLUMNS,
            num_warps=WARPS, maxnreg=REGISTERS if self.unit > 1 and self.dtype == torch.bfloat16 else None,
        )  # fmt: skip


class TritonQuantizer:
    """As `Quantizer`, of boxes that are checked and not empty. hardware: None where the device decides."""

    def __init__(self, boxes: Sequence[WeightBox], rule: ScaleRule, hardware: bool | None = None):
        self._held, self._pow2 = list(boxes), rule is ScaleRule.POW2
        self._device = boxes[0].weight.device
        if hardware is None:
            hardware = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) >= (8, 9)
        self._hardware = hardware
        self._amax = [b.amax for b in boxes if b.amax is not None]
        self._measured = self._kinds([b for b in boxes if b.amax is not None])
        written = [b for b in boxes if b.values is not None]
        self._written = [
            *((FUSED, kind) for kind in self._kinds([b for b in written if b.amax is None])),
            *((FROM_AMAX, kind) for kind in self._kinds([b for b in written if b.amax is not None])),
        ]
        # Compiled and loaded now, not in the first refit: see triton_impl._Launch.load.
        self._launch([(MEASURE, kind) for kind in self._measured], count=0)
        self._launch(self._written, count=0)

    @property
    def scratch_bytes(self) -> int:
        kinds = [*self._measured, *(kind for _, kind in self._written)]
        return sum(kind.boxes.nbytes + kind.blocks.nbytes for kind in kinds)

    def measure(self) -> None:
        if self._amax:
            torch._foreach_zero_(self._amax)
            self._launch([(MEASURE, kind) for kind in self._measured])

    def run(self) -> None:
        self._launch(self._written)

    def _launch(self, kinds: Sequence[tuple[int, _BlockTable]], count: int | None = None) -> None:
        # Triton launches on the thread's current device.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for part, kind in kinds:
                kind.launch(part, self._pow2, self._hardware, count)

    def _kinds(self, boxes: Sequence[WeightBox]) -> list[_BlockTable]:
        sorted_boxes: dict[tuple[str, int], list[WeightBox]] = {}
        for b in boxes:
            sorted_boxes.setdefault((str(b.weight.dtype), _unit(b)), []).append(b)
        out = []
        for (_, unit), some in sorted(sorted_boxes.items()):
            tables = np.array([_words(b) for b in some], np.int64), _blocks([b.grid for b in some])
            out.append(_BlockTable(some[0].weight.dtype, unit, *(torch.from_numpy(t).to(self._device) for t in tables)))
        return out


def _words(b: WeightBox) -> tuple[int, ...]:
    """The box's row of the table."""
    ends = [(0, 0) if t is None else (t.data_ptr(), t.stride(0)) for t in (b.values, b.scales, b.amax)]
    (rows, columns), strides = b.weight.shape, _strides(b.weight)
    if max(*strides, ends[0][1] if rows > 1 else 0) >= _MAX_STRIDE:
        raise ValueError(
            f"elements of a box are {_MAX_STRIDE} or more apart: {tuple(b.weight.shape)}, strides {strides}"
        )
    return b.weight.data_ptr(), *strides, *(x for end in ends for x in end), rows << 32 | columns, b.row0 << 32 | b.col0


def _strides(t: torch.Tensor) -> tuple[int, int]:
    """Row and column stride, in elements; 0 over a single row or column, where torch's stride can be anything."""
    row, column = (stride if n > 1 else 0 for n, stride in zip(t.shape, t.stride()))
    return row, column


def _unit(b: WeightBox) -> int:
    """The largest of UNITS that divides all that the kernel takes for a multiple of it."""
    if b.weight.shape[1] > 1 and b.weight.stride(1) != 1:
        return 1
    common = gcd(b.weight.shape[1], b.col0)
    for t in (b.weight, b.values):
        if t is not None:
            common = gcd(common, t.data_ptr() // t.element_size(), _strides(t)[0])
    return next(unit for unit in UNITS if common % unit == 0)


def _blocks(grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [sum of down * across]: box << 40 | down << 20 | across."""
    if len(grids) > _MAX_BOXES or max(map(max, grids)) > _MAX_SIDE:
        raise ValueError(f"more than {_MAX_BOXES} boxes, or {_MAX_SIDE * BLOCK} rows or columns in one")
    down, across = np.array(grids, np.int64).T
    each = down * across
    box = np.repeat(np.arange(len(grids)), each)
    k = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
    return box << 40 | k // across[box] << 20 | k % across[box]
