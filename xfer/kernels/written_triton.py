"""Writes that mark, as a Triton kernel: compare, write, set bits and bring checksums up to date in one pass over any number of tensors.
Its twin and what it is for: written.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
import triton
import triton.language as tl

from xfer.kernels.bits import WORD
from xfer.kernels.checksum import FACTORS, GROUP, MIXES, salts
from xfer.kernels.checksum_triton import _add_to, _weighed
from xfer.kernels.marks import ByteRange, SpanWrite
from xfer.kernels.marks_triton import _on
from xfer.kernels.triton_impl import _to_bfloat16

TILE_WORDS, AT_ONCE, WARPS = 256, 4, 8
"""Words of marks of a program's tile (each for 512 elements), words that it handles at once, and its warps."""


@triton.jit
def _write(
    tiles, marks, sums, factors,
    BFLOAT16: tl.constexpr, WHOLE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A tile begins where a word of marks begins, which may be before the tensor.

    tiles: int64 [programs, 9]: address of the tile's first element, and of that element's value (float32); groups of 8 elements that are
    before the tensor; elements to the end of the tile; number of the first group in the tensor, below 0 before it; place of the word in
    `marks`; the span, and its two salts. marks: int32. sums: int32 [spans, 2]. factors: int32 [2, 8]. WHOLE: tensors are whole groups, and
    values begin at multiples of 16 bytes."""
    t = tiles + tl.program_id(0).to(tl.int64) * 9
    into = tl.load(t).to(tl.pointer_type(tl.int16))
    value = tl.load(t + 1).to(tl.pointer_type(tl.float32))
    low = tl.load(t + 2).to(tl.int32)
    n = tl.load(t + 3).to(tl.int32)
    first = tl.load(t + 4).to(tl.int32)
    bits = marks + tl.load(t + 5)
    span = tl.load(t + 6)
    salt0 = tl.load(t + 7).to(tl.uint32)
    salt1 = tl.load(t + 8).to(tl.uint32)
    into = tl.multiple_of(into, 16)
    if WHOLE:
        value = tl.multiple_of(value, 16)
    word = tl.arange(0, AT_ONCE)
    eight = tl.arange(0, 64)
    element = tl.arange(0, 8)
    factors0 = tl.load(factors + element)[None, None, :]
    factors1 = tl.load(factors + 8 + element)[None, None, :]
    total0 = tl.zeros([AT_ONCE], tl.uint32)
    total1 = tl.zeros([AT_ONCE], tl.uint32)
    for at in range(0, (n + 511) // 512, AT_ONCE):
        group = (at + word)[:, None] * 64 + eight[None, :]
        i = group[:, :, None] * 8 + element[None, None, :]
        if WHOLE:  # all elements of a group are kept or none, so that eight are loaded at once
            keep = ((group >= low) & (group < n // 8))[:, :, None] & (element < 8)[None, None, :]
        else:
            keep = (group >= low)[:, :, None] & (i < n)
        old = tl.load(into + i, mask=keep, other=0)
        x = tl.load(value + i, mask=keep, other=0.0)
        if BFLOAT16:
            new = _to_bfloat16(x).to(tl.int16, bitcast=True)
        else:
            new = x.to(tl.float16).to(tl.int16, bitcast=True)
        differs = keep & (new != old)
        some = tl.max(differs.to(tl.int32), axis=2)
        if WHOLE:
            tl.store(into + i, new, mask=(some != 0)[:, :, None] & (element < 8)[None, None, :])
        else:
            tl.store(into + i, new, mask=differs)
        change = tl.where(differs, new.to(tl.int32) - old.to(tl.int32), 0)
        w = (first + group).to(tl.uint32)
        x0 = tl.sum(change * factors0, axis=2).to(tl.uint32)
        x1 = tl.sum(change * factors1, axis=2).to(tl.uint32)
        total0 += tl.sum(_weighed(x0, some != 0, w, salt0, A), axis=1)
        total1 += tl.sum(_weighed(x1, some != 0, w, salt1, B), axis=1)
        granules = tl.max(tl.reshape(some, [AT_ONCE, 32, 2]), axis=2)
        marked = tl.sum(granules << tl.arange(0, 32)[None, :], axis=1)
        tl.atomic_or(bits + at + word, marked, mask=marked != 0, sem="relaxed")  # a word may be another span's, too
    _add_to(sums + span * 2, total0, total1)


class MarkedWrites:
    """Writes into spans, bound to their addresses.

    Args:
        writes: The writes, into tensors of one device.
        spans: See `Written`.
        places: See `marks.places`.
    """

    def __init__(self, writes: Sequence[SpanWrite], spans: Sequence[ByteRange], places: np.ndarray):
        def kind(w: SpanWrite) -> tuple[bool, bool]:
            return w.into.dtype == torch.bfloat16, w.into.numel() % GROUP == 0 and w.value.data_ptr() % 16 == 0

        device = writes[0].into.device
        self._launches = []
        for constants, some in groupby(sorted(writes, key=kind), kind):
            tiles = np.concatenate([_tiles(w, spans[w.span], places) for w in some])
            self._launches.append((constants, torch.from_numpy(tiles).to(device)))
        self._factors = torch.tensor(FACTORS, dtype=torch.int64).to(torch.int32).to(device)  # wraps

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(tiles.nbytes for _, tiles in self._launches)

    def run(self, bits: torch.Tensor, sums: torch.Tensor) -> None:
        """Write on the current stream.

        Args:
            bits: The marks, flat uint8.
            sums: int32 [spans, 2], the checksums of the spans.
        """
        words = bits[: len(bits) // 4 * 4].view(torch.int32)
        with _on(bits.device):
            for constants, tiles in self._launches:
                _write[(len(tiles),)](tiles, words, sums, self._factors, *constants, *MIXES, AT_ONCE, num_warps=WARPS)


def _tiles(w: SpanWrite, span: ByteRange, places: np.ndarray) -> np.ndarray:
    """Tiles of `_write`; int64 [n, 9]."""
    words = np.arange(span.start // WORD, -(-span.stop // WORD), TILE_WORDS)
    at = (words * WORD - span.start) // 2  # elements from the beginning of the span; below 0 in the first tile
    columns = (
        w.into.data_ptr() + 2 * at, w.value.data_ptr() + 4 * at, np.maximum(0, -at) // GROUP,
        np.minimum(TILE_WORDS * WORD // 2, w.into.numel() - at), at // GROUP, places[span.root] // 4 + words,
        *(np.full_like(at, x) for x in (w.span, *salts(w.span))),
    )  # fmt: skip
    return np.stack(columns, axis=1)
