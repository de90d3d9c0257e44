"""Copies on one GPU with the checksums of what they wrote, in one launch: a sum reads bytes back while they are in the GPU's cache.

Where trainer and engine share a GPU a sum after the copies reads as many bytes from memory as the copies did. Here tiles of copies,
by where they write, and tiles of sums stand in one queue, a sum some way behind the copies that it needs. Programs take both from a
counter, so what a sum waits for was begun before it, by programs that wait for nothing: no program waits for one that does not run.
Measured in benchmarks/RESULTS.md. Not here: tables of tiles (tiles.py, checksum_triton.py), what a checksum is
(checksum.py), all that goes into no such launch (triton_impl.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from xfer.kernels.checksum_triton import COLUMNS as SUM_COLUMNS
from xfer.kernels.checksum_triton import Lent, _add_to, _group_words, _weighed
from xfer.kernels.tiles import COLUMNS

UNIT = 16
"""Bytes that these copies move at once; tables of other units are no part of this."""
BEHIND = 256
"""Copy tiles between the last that a sum needs and the sum. Fewer, and sums wait for copies under way; more, and what they read has
left the cache."""
MOST = 64
"""Copy tiles that a sum may need. One that needs more, such as a sum over narrow columns, is added by the kernel of checksum_triton.py."""
WARPS, COPY_BLOCK, SUM_BLOCK = 8, 1024, 512


@triton.jit(do_not_specialize=["entries"])
def _copy_and_sum(
    queue, entries, counter, done, abort, src_bases, dst_bases, copies, sums, needs, factors, out,
    LOAD: tl.constexpr, AS: tl.constexpr, GROUP: tl.constexpr, PLUS0: tl.constexpr, PLUS1: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, COPY: tl.constexpr, SUM: tl.constexpr, COLS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """queue: int32 [entries]; k >= 0 is copy tile k, k < 0 sum tile -1 - k. done: int32 by copy tile. needs: int32 [sum tiles, 2],
    from which copy tile to which. The bodies are those of triton_impl.py, of rows of whole units, and checksum_triton.py, of groups."""
    word = tl.arange(0, 4)
    copied = tl.arange(0, COPY)
    summed = tl.arange(0, SUM)
    element = tl.arange(0, GROUP)
    factors0 = tl.load(factors + element)[None, :]
    factors1 = tl.load(factors + 8 + element)[None, :]
    i = tl.atomic_add(counter, 1)
    while i < entries:
        k = tl.load(queue + i)
        if k >= 0:
            t = copies + k.to(tl.int64) * COLS
            roots = tl.load(t)
            src = (tl.load(src_bases + (roots & 0xFFFFFFFF)) + tl.load(t + 1)).to(tl.pointer_type(tl.int32))
            dst = (tl.load(dst_bases + (roots >> 32)) + tl.load(t + 2)).to(tl.pointer_type(tl.int32))
            src = tl.multiple_of(src, 16)
            dst = tl.multiple_of(dst, 16)
            shape = tl.load(t + 3)
            width = (shape & 0xFFFFFFFF).to(tl.int32)
            n = width * (shape >> 32).to(tl.int32)
            src_row = tl.load(t + 4)
            dst_row = tl.load(t + 5)
            for at in range(0, n, COPY):
                u = at + copied
                keep = (u < n)[:, None] & (word < 4)[None, :]
                r = u // width
                c = (u - r * width).to(tl.int64)
                a = ((r * src_row + c) * 4)[:, None] + word[None, :]
                b = ((r * dst_row + c) * 4)[:, None] + word[None, :]
                tl.store(dst + b, tl.load(src + a, mask=keep, eviction_policy="evict_first"), mask=keep)
            tl.debug_barrier()  # all threads have stored before one says so
            tl.atomic_add(done + k, 1, sem="release")
        else:
            j = -1 - k
            for w in range(tl.load(needs + 2 * j), tl.load(needs + 2 * j + 1)):
                seen = tl.atomic_add(done + w, 0, sem="acquire")
                # A stopped pull leaves copies out. One thread looks for all, or they would part at the barriers.
                while seen == 0:
                    seen = tl.atomic_add(done + w, 0, sem="acquire") + tl.atomic_add(abort, 0, sem="relaxed")
            tl.debug_barrier()  # no thread reads before one has seen it
            t = sums + j.to(tl.int64) * SUM_COLS
            place = tl.load(t)
            held = (tl.load(dst_bases + (place & 0xFFFFFFFF)) + tl.load(t + 1)).to(tl.pointer_type(LOAD))
            held = tl.multiple_of(held, 16)
            first = tl.load(t + 2).to(tl.uint32)
            shape = tl.load(t + 3)
            width = (shape & 0xFFFFFFFF).to(tl.int32)
            n = width * (shape >> 32).to(tl.int32)
            magic = (((width - 1).to(tl.int64) + 0x100000000) // width).to(tl.uint32)
            row = tl.load(t + 4)
            row_step = tl.load(t + 5).to(tl.uint32)
            salts = tl.load(t + 8)
            salt0 = salts.to(tl.uint32)
            salt1 = (salts >> 32).to(tl.uint32)
            total0 = tl.zeros([SUM], tl.uint32)
            total1 = tl.zeros([SUM], tl.uint32)
            for at in range(0, n, SUM):
                u = at + summed
                r = tl.umulhi(u.to(tl.uint32), magic).to(tl.int32)
                g = u - r * width
                keep = u < n
                where = ((r * row + g) * GROUP)[:, None] + element[None, :]
                raw = tl.load(held + where, mask=keep[:, None], other=0, eviction_policy="evict_first")
                x, y = _group_words(raw, factors0, factors1, LOAD, LOAD, AS, PLUS0, PLUS1)
                group = first + r.to(tl.uint32) * row_step + g.to(tl.uint32)
                total0 += _weighed(x, keep, group, salt0, A)
                total1 += _weighed(y, keep, group, salt1, B)
            _add_to(out + 2 * (place >> 32), total0, total1)
        i = tl.atomic_add(counter, 1)
        i += (tl.atomic_add(abort, 0, sem="relaxed") != 0).to(
            tl.int32
        ) * 0x40000000  # past the end, whatever `entries` is


@dataclass(frozen=True, slots=True)
class Order:
    """copies: int64, the tiles of copies in the order of the addresses that they write. queue, needs: see the kernel; they use the tiles'
    numbers in this order. taken: bool per tile of sums: False if it needs too many copies."""

    copies: np.ndarray
    queue: np.ndarray
    needs: np.ndarray
    taken: np.ndarray


def ordered(copies: np.ndarray, sums: np.ndarray, group: int) -> Order:
    """copies, sums: tiles as in tiles.py (of units of 16 bytes) and checksum_triton.py (of groups of `group` bytes)."""
    low, high = _span(copies[:, 0] >> 32, copies[:, 2], copies[:, 3], copies[:, 5] * UNIT, UNIT)
    by_place = np.argsort(low, kind="stable")
    low, high = low[by_place], np.maximum.accumulate(high[by_place])
    begin, end = _span(sums[:, 0] & 0xFFFFFFFF, sums[:, 1], sums[:, 3], sums[:, 4] * group, group)
    first, last = np.searchsorted(high, begin, "right"), np.searchsorted(low, end, "left")
    taken = last - first <= MOST
    needs = np.stack([first, np.maximum(first, last)], axis=1)[taken]
    when = np.concatenate([np.arange(len(low)), needs[:, 1] - 0.5 + BEHIND])
    what = np.concatenate([np.arange(len(low)), -1 - np.arange(len(needs))])
    return Order(by_place, what[np.argsort(when, kind="stable")].astype(np.int32), needs.astype(np.int32), taken)


def _span(root, offset, shape, pitch, unit) -> tuple[np.ndarray, np.ndarray]:
    """First byte of two-dimensional tiles and the byte behind their last, in one line of numbers for all storages."""
    width, rows = shape & 0xFFFFFFFF, shape >> 32
    far, at = (rows - 1) * pitch, (root << 44) + offset
    return at + np.minimum(far, 0), at + np.maximum(far, 0) + width * unit


class SummedCopies:
    """A table of copies and the sums that were lent for it, on their device. Both name the same destination storages alike."""

    def __init__(self, copies: torch.Tensor, order: Order, lent: Lent, programs: int):
        device = copies.device
        self._lent = lent
        self.tiles = copies[torch.from_numpy(order.copies).to(device)]
        self._queue, self._needs = (torch.from_numpy(x).to(device) for x in (order.queue, order.needs))
        self._words = torch.zeros(1 + len(self.tiles), dtype=torch.int32, device=device)  # the counter, and who is done
        self._programs = max(1, min(programs, len(order.queue)))

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(t.nbytes for t in (self.tiles, self._queue, self._needs, self._words, self._lent.tiles))

    def run(self, src: torch.Tensor, dst: torch.Tensor, abort: torch.Tensor | None, entries: int | None = None) -> None:
        """src, dst: addresses of the storages. abort: see `TritonRows`; where it stopped this, sums mean nothing. On the current
        stream, and when the device has done with the sums of the run before, which this clears. entries: 0 compiles and loads."""
        self._words.zero_()
        self._lent.out.zero_()
        kind = self._lent
        _copy_and_sum[(self._programs,)](
            self._queue, self._queue.shape[0] if entries is None else entries, self._words, self._words[1:], abort, src, dst,
            self.tiles, kind.tiles, self._needs, kind.factors, kind.out, *kind.constants, COPY_BLOCK, SUM_BLOCK, COLUMNS, SUM_COLUMNS,
            num_warps=WARPS,
        )  # fmt: skip
