"""A write that marks, as a Triton kernel: compare, write, set bits and bring the checksum up to date in one pass. Its twin and what it is
for: written.py."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from xfer.kernels.bits import WORD
from xfer.kernels.checksum import FACTORS, MIXES
from xfer.kernels.checksum_triton import _add_to, _weighed
from xfer.kernels.marks_triton import WARPS, _on
from xfer.kernels.triton_impl import _to_bfloat16

TILE_WORDS, AT_ONCE = 64, 4
"""Words of marks, 512 elements each, of which a program looks at the bytes, and at whose it looks at once."""


@triton.jit(do_not_specialize=["start", "n", "salt0", "salt1"])
def _write(
    into, value, marks, sums, factors, start, n, salt0, salt1,
    BFLOAT16: tl.constexpr, A: tl.constexpr, B: tl.constexpr, TILE_WORDS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """into: int16 [n], at byte `start` of its storage, a multiple of 16. value: float32 [n]. marks: int32, of the storage's first granules.
    sums: int32 [2]. factors: int32 [2, 8]."""
    start = start.to(tl.int64)
    n = n.to(tl.int64)
    first = start // 1024 + tl.program_id(0).to(tl.int64) * TILE_WORDS
    word = tl.arange(0, AT_ONCE)
    eight = tl.arange(0, 64)
    element = tl.arange(0, 8)
    factors0 = tl.load(factors + element)[None, None, :]
    factors1 = tl.load(factors + 8 + element)[None, None, :]
    total0 = tl.zeros([AT_ONCE], tl.uint32)
    total1 = tl.zeros([AT_ONCE], tl.uint32)
    left = (start + 2 * n + 1023) // 1024 - first
    for at in range(0, tl.minimum(left, TILE_WORDS), AT_ONCE):
        group = (first + at + word)[:, None] * 64 + eight[None, :] - start // 16
        i = group[:, :, None] * 8 + element[None, None, :]
        keep = (i >= 0) & (i < n)
        old = tl.load(into + i, mask=keep, other=0)
        x = tl.load(value + i, mask=keep, other=0.0)
        if BFLOAT16:
            new = _to_bfloat16(x).to(tl.int16, bitcast=True)
        else:
            new = x.to(tl.float16).to(tl.int16, bitcast=True)
        differs = keep & (new != old)
        tl.store(into + i, new, mask=differs)
        change = tl.where(differs, new.to(tl.int32) - old.to(tl.int32), 0)
        some = tl.max(differs.to(tl.int32), axis=2)
        w = group.to(tl.uint32)
        total0 += tl.sum(
            _weighed(tl.sum(change * factors0, axis=2).to(tl.uint32), some != 0, w, salt0.to(tl.uint32), A), axis=1
        )
        total1 += tl.sum(
            _weighed(tl.sum(change * factors1, axis=2).to(tl.uint32), some != 0, w, salt1.to(tl.uint32), B), axis=1
        )
        granules = tl.max(tl.reshape(some, [AT_ONCE, 32, 2]), axis=2)
        bits = tl.sum(granules << tl.arange(0, 32)[None, :], axis=1)
        tl.atomic_or(marks + first + at + word, bits, mask=bits != 0)  # a word may be another span's, too
    _add_to(sums, total0, total1)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    return torch.tensor(FACTORS, dtype=torch.int64).to(torch.int32).to(device)  # wraps


def write(
    into: torch.Tensor, value: torch.Tensor, marks: torch.Tensor, sums: torch.Tensor, start: int, salts: tuple[int, int]
) -> None:
    """Write on the current stream, as `Written.write`.

    Args:
        into: The tensor of a span, bfloat16 or float16, contiguous.
        value: float32, contiguous, of the same shape.
        marks: uint8, the bits of the storage.
        sums: int32 [2], the checksum of the span.
        start: The first byte of the span in its storage, a multiple of 16.
        salts: Of the span.
    """
    n = into.numel()
    words = -(-(start + 2 * n) // WORD) - start // WORD
    with _on(into.device):
        _write[(-(-words // TILE_WORDS),)](
            into.detach().view(torch.int16), value, marks[: len(marks) // 4 * 4].view(torch.int32), sums,
            _factors(into.device), start, n, *salts, into.dtype == torch.bfloat16, *MIXES, TILE_WORDS, AT_ONCE, num_warps=WARPS,
        )  # fmt: skip
