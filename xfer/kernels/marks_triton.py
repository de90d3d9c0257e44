"""Marks as Triton kernels: setting them, bringing copies up to date by them, and copying only what is marked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from xfer.kernels.bits import WORD
from xfer.kernels.tiles import COLUMNS, Table

if TYPE_CHECKING:  # it needs what is here
    from xfer.kernels.marks import ByteRange

TILE_WORDS, AT_ONCE = 64, 8
"""Words of marks that a program sets, and that it sets at once. A word needs 1 KiB of each storage."""
UNITS_AT_ONCE = 2048
"""Units of 16 bytes that a program of `MarkedCopies` looks at at once."""
WARPS = 8
_WORDS = {16: (tl.int32, 4), 8: (tl.int32, 2), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}


@triton.jit
def _compare(tiles, marks, counts, UPDATE: tl.constexpr, AT_ONCE: tl.constexpr):
    """tiles: int64 [n, 6]: storage, addresses of its first byte and of that of its copy, bytes (a multiple of 4; 0: there is no copy),
    words, place of the first word in `marks`. UPDATE: copy what is marked from the new to the old storage, instead of marking."""
    t = tiles + tl.program_id(0).to(tl.int64) * 6
    now = tl.load(t + 1).to(tl.pointer_type(tl.int32))
    old = tl.load(t + 2).to(tl.pointer_type(tl.int32))
    n = (tl.load(t + 3) // 4).to(tl.int32)
    words = tl.load(t + 4).to(tl.int32)
    now = tl.multiple_of(now, 16)
    old = tl.multiple_of(old, 16)
    bits = marks + tl.load(t + 5)
    word = tl.arange(0, AT_ONCE)
    bit = tl.arange(0, 32)
    element = tl.arange(0, 8)
    total = tl.zeros([AT_ONCE], tl.int32)
    for at in range(0, words, AT_ONCE):
        i = ((at + word)[:, None, None] * 32 + bit[None, :, None]) * 8 + element[None, None, :]
        here = at + word < words
        was = tl.load(bits + at + word, mask=here, other=0)
        marked = (was[:, None] >> bit[None, :]) & 1
        if UPDATE:
            keep = (i < n) & (marked != 0)[:, :, None]
            tl.store(old + i, tl.load(now + i, mask=keep, other=0), mask=keep)
        else:
            a = tl.load(now + i, mask=i < n, other=0)
            b = tl.load(old + i, mask=i < n, other=0)
            marked |= tl.max((a != b).to(tl.int32), axis=2)
            tl.store(bits + at + word, tl.sum(marked << bit[None, :], axis=1), mask=here)
            total += tl.sum(marked, axis=1)
    if not UPDATE:
        tl.atomic_add(counts + tl.load(t), tl.sum(total, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def _copy_marked(
    src_bases, dst_bases, bit_bases, tiles, count, counter, abort, moved,
    WORD: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr, HERE: tl.constexpr,
):  # fmt: skip
    """As `_copy_tiles` of triton_impl.py, of units in marked granules only. moved: int64 by source storage, to which the bytes are
    added. HERE: the bytes are read at their places in the destination, in storages of `src_bases` that are laid out as it is."""
    lane = tl.arange(0, BLOCK)
    word = tl.arange(0, VEC)
    i = tl.atomic_add(counter, 1)
    while i < count:
        t = tiles + i.to(tl.int64) * COLS
        roots = tl.load(t)
        root = roots & 0xFFFFFFFF
        offset = tl.load(t + 1)
        dst_root = roots >> 32
        place = tl.load(t + 2)
        if HERE:
            src = (tl.load(src_bases + dst_root) + place).to(tl.pointer_type(WORD))
        else:
            src = (tl.load(src_bases + root) + offset).to(tl.pointer_type(WORD))
        dst = (tl.load(dst_bases + dst_root) + place).to(tl.pointer_type(WORD))
        src = tl.multiple_of(src, UNIT)
        dst = tl.multiple_of(dst, UNIT)
        bits = tl.load(bit_bases + root).to(tl.pointer_type(tl.int32))
        shape = tl.load(t + 3)
        width = (shape & 0xFFFFFFFF).to(tl.int32)
        n = width * (shape >> 32).to(tl.int32)
        src_row = tl.load(t + 4)
        dst_row = tl.load(t + 5)
        some = tl.zeros([BLOCK], tl.int32)
        for at in range(0, n, BLOCK):
            u = at + lane
            r = u // width
            c = (u - r * width).to(tl.int64)
            a = r * src_row + c
            granule = (offset + a * UNIT) >> 5
            marked = (tl.load(bits + (granule >> 5), mask=u < n, other=0) >> (granule & 31).to(tl.int32)) & 1
            some += marked
            keep = (marked != 0)[:, None] & (word < VEC)[None, :]
            b = r * dst_row + c
            got = tl.load(src + ((b if HERE else a) * VEC)[:, None] + word[None, :], mask=keep, other=0)
            tl.store(dst + (b * VEC)[:, None] + word[None, :], got, mask=keep)
        tl.atomic_add(moved + root, tl.sum(some, axis=0).to(tl.int64) * UNIT)
        i = tl.atomic_add(counter, 1)
        i += (tl.load(abort, volatile=True) != 0).to(tl.int32) * 0x40000000  # past the end, whatever `count` is


class MarkKernels:
    """Storages, copies of parts of them and their marks, bound to each other.

    Args:
        now, before: See `ChangeMarks.compare`.
        marks: The marks, flat uint8.
        places: See `marks.places`.
        parts: Those of which `before` are copies.
        others: The rest of the storages, whose marks are counted only.

    Attributes:
        rest: Numbers of the parts that these kernels leave out: all parts of storages that are not aligned to 16 bytes, or have a length
            that 4 does not divide.
    """

    def __init__(
        self,
        now: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
        marks: torch.Tensor,
        places: np.ndarray,
        parts: Sequence[ByteRange],
        others: Sequence[ByteRange],
    ):
        pairs = [(part.of(now), copy) for part, copy in zip(parts, before, strict=True)]
        odd = {p.root for p, (a, b) in zip(parts, pairs) if a.data_ptr() % 16 or b.data_ptr() % 16 or a.numel() % 4}
        self.rest = [i for i, part in enumerate(parts) if part.root in odd]
        tiles = [
            _tiles(part, now, copy, places)
            for part, copy in (*zip(parts, before), *((part, None) for part in others))
            if part.root not in odd
        ]
        device = marks.device
        table = np.concatenate(tiles) if tiles else np.empty((0, 6), np.int64)
        self._tiles = torch.from_numpy(np.ascontiguousarray(table)).to(device)
        self._held = (*now, *before)
        self._bits = marks[: len(marks) // 4 * 4].view(torch.int32)
        self._counts = marks[8 : 8 * (1 + len(now))].view(torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._tiles.nbytes

    def compare(self) -> None:
        """Set the bits, and add to the counts."""
        self._run(False)

    def update(self) -> None:
        """Copy marked granules to the copies."""
        self._run(True)

    def _run(self, update: bool) -> None:
        if len(self._tiles):
            with _on(self._tiles.device):
                _compare[(len(self._tiles),)](self._tiles, self._bits, self._counts, update, AT_ONCE, num_warps=WARPS)


def _tiles(part: ByteRange, now: Sequence[torch.Tensor], copy: torch.Tensor | None, places: np.ndarray) -> np.ndarray:
    """Tiles of `_compare` over a part, which begins at a word of marks; int64 [n, 6]."""
    step, n = TILE_WORDS * WORD, part.stop - part.start
    at = np.arange(0, n, step)
    some = np.minimum(step, n - at)
    there = np.zeros_like(at) if copy is None else copy.data_ptr() + at
    columns = (
        np.full_like(at, part.root), now[part.root].data_ptr() + part.start + at, there, some * (copy is not None),
        -(-some // WORD), places[part.root] // 4 + (part.start + at) // WORD,
    )  # fmt: skip
    return np.stack(columns, axis=1)


class MarkedCopies:
    """Tables of plain copies (tiles.py) of which only units in marked granules are copied.

    Args:
        tables: The copies.
        bits: int64 [source storages]: the address of each storage's marks.
        programs: Number of programs of a launch.

    Attributes:
        moved: int64 [source storages]: bytes that the last run copied out of each.
    """

    def __init__(self, tables: Sequence[Table], bits: torch.Tensor, programs: int):
        self._bits, self._programs, device = bits, programs, bits.device
        self._tables = [(t.unit, torch.from_numpy(t.tiles).to(device)) for t in tables if len(t.tiles)]
        self._words = torch.zeros(max(1, len(self._tables)) + 1, dtype=torch.int32, device=device)  # counters, and a 0
        self.moved = torch.zeros(max(1, len(bits)), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(t.nbytes for _, t in self._tables) + self._words.nbytes + self.moved.nbytes + self._bits.nbytes

    def run(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        abort: torch.Tensor | None,
        count: int | None = None,
        here: bool = False,
    ) -> None:
        """Copy on the current stream.

        Args:
            src, dst: Addresses of the storages, int64.
            abort: See `TritonRows`; None: the copies cannot be stopped.
            count: 0 compiles and loads the kernels.
            here: `src` are storages laid out as those of `dst`, into which an earlier run has copied.
        """
        self._words.zero_()
        self.moved.zero_()
        with _on(self._bits.device):
            for k, (unit, tiles) in enumerate(self._tables):
                word, vec = _WORDS[unit]
                _copy_marked[(max(1, min(self._programs, len(tiles))),)](
                    src, dst, self._bits, tiles, len(tiles) if count is None else count, self._words[k:],
                    self._words[-1:] if abort is None else abort,
                    self.moved, word, vec, unit, UNITS_AT_ONCE, COLUMNS, here, num_warps=WARPS,
                )  # fmt: skip


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
