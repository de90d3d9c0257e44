"""Checksums on CUDA: the sums of checksum.py by one kernel over a table of tiles, and bound once.

The same numbers as the torch twin, bit for bit. A tile is `rows` runs of `width` elements of one row; it names where
they lie and where in the canonical tensor they belong. What the kernel cannot read (values that are not aligned to
their size, conversions that Triton rounds differently) the twin adds. Not here: what a checksum means (checksum.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from xfer.kernels.triton_impl import _TL, CASTS, _aligned, _multiprocessors, _to_bfloat16
from xfer.plan.program import DTYPES, ITEMSIZE

COLUMNS = 8
"""int64 words of a tile: root | slot << 32, byte offset, key, width | rows << 32, stride and key step between rows,
stride and key step between elements. Strides in elements; keys wrap."""
TILE = 1 << 15
"""Elements of a tile."""
PROGRAMS_PER_SM, BLOCK, WARPS = 8, 2048, 8
_INTEGER = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}


@triton.jit
def _mixed(x):
    """splitmix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _bits(x, OWN: tl.constexpr, FINAL: tl.constexpr, AS: tl.constexpr):
    """The element as the destination's dtype, its bits sign-extended (bytes: zero-extended) to 64."""
    if OWN != FINAL:
        if OWN == tl.bfloat16:
            x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        if FINAL == tl.bfloat16:
            x = _to_bfloat16(x.to(tl.float32))
        else:
            x = x.to(tl.float64 if OWN == tl.float64 else tl.float32).to(FINAL)
        x = x.to(AS, bitcast=True)
    if AS == tl.uint8:
        return x.to(tl.uint8, bitcast=True).to(tl.uint64)
    return x.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _sum_tiles(
    bases, tiles, count, counter, out,
    LOAD: tl.constexpr, OWN: tl.constexpr, FINAL: tl.constexpr, AS: tl.constexpr, DENSE: tl.constexpr,
    BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    i = tl.atomic_add(counter, 1)
    while i < count:
        t = tiles + i.to(tl.int64) * COLS
        place = tl.load(t)
        src = (tl.load(bases + (place & 0xFFFFFFFF)) + tl.load(t + 1)).to(tl.pointer_type(LOAD))
        key = tl.load(t + 2).to(tl.uint64, bitcast=True)
        shape = tl.load(t + 3)
        width = (shape & 0xFFFFFFFF).to(tl.int32)
        rows = (shape >> 32).to(tl.int32)
        unit_key = tl.load(t + 7).to(tl.uint64, bitcast=True)
        unit = tl.load(t + 6)
        total = tl.zeros([BLOCK], tl.uint64)
        if rows == 1:
            keys = (
                key + lane.to(tl.uint64) * unit_key
            )  # stepped on by addition: a 64-bit product costs most of the rest
            step = unit_key * BLOCK
            for at in range(0, width, BLOCK):
                c = at + lane
                keep = c < width
                x = tl.load(src + (c if DENSE else c * unit), mask=keep)
                total += tl.where(keep, _mixed(_bits(x, OWN, FINAL, AS) + keys), tl.zeros([BLOCK], tl.uint64))
                keys += step
        else:
            row = tl.load(t + 4)
            row_key = tl.load(t + 5).to(tl.uint64, bitcast=True)
            for at in range(0, rows * width, BLOCK):
                u = at + lane
                r = u // width
                c = u - r * width
                keep = u < rows * width
                x = tl.load(src + (r * row + (c if DENSE else c * unit)), mask=keep)
                x = _bits(x, OWN, FINAL, AS) + key + c.to(tl.uint64) * unit_key + r.to(tl.uint64) * row_key
                total += tl.where(keep, _mixed(x), tl.zeros([BLOCK], tl.uint64))
        tl.atomic_add(out + (place >> 32), tl.sum(total.to(tl.int64, bitcast=True), 0))
        i = tl.atomic_add(counter, 1)


class TritonSums:
    """Checksums of several sets of rows (`slot[i]`: the set of row i, 0..slots-1) as they lie in `roots`.

    placed: per row, where it lies and belongs, by `checksum.placed`. `launch` reads; `add_to` brings the sums.
    """

    def __init__(self, rows, slot: np.ndarray, slots: int, roots: Sequence[torch.Tensor], side: str, placed):
        self.device, self._roots = roots[0].device, roots
        self._bases = torch.tensor([t.data_ptr() for t in roots], dtype=torch.int64).to(self.device)
        self._out = torch.zeros(slots, dtype=torch.int64, device=self.device)
        kinds: dict[tuple[str, str, bool], list[np.ndarray]] = {}
        odd = np.zeros(len(rows), bool)
        for i, (r, where) in enumerate(zip(rows, placed)):
            own, final = DTYPES[r[f"{side}_dtype"]], DTYPES[r["dst_dtype"]]
            if where is None:
                continue
            if own != final and (own, final) not in CASTS or not _aligned(r, side, roots, ITEMSIZE[own]):
                odd[i] = True
                continue
            tiles = _tiles(int(slot[i]), int(r[f"{side}_root"]), *where, ITEMSIZE[own])
            kinds.setdefault((own, final, bool((tiles[:, 6] == 1).all())), []).append(tiles)
        self.odd = odd
        """Rows that the twin must add."""
        self._tables = [
            (
                kind,
                torch.from_numpy(np.concatenate(some)).to(self.device),
                torch.zeros(1, dtype=torch.int32).to(self.device),
            )
            for kind, some in sorted(kinds.items())
        ]
        self.scratch_bytes = sum(t.nbytes for _, t, _ in self._tables)
        for table in self._tables:  # compiled and loaded now, not in the first refit: see triton_impl._Launch.load
            self._run(*table, count=0)

    def launch(self) -> None:
        self._out.zero_()
        for table in self._tables:
            self._run(*table)

    def values(self) -> list[int]:
        """Of the last launch, 0 <= v < 2**64. One device synchronisation."""
        return [v % (1 << 64) for v in self._out.tolist()]

    def _run(self, kind, tiles: torch.Tensor, counter: torch.Tensor, count: int | None = None) -> None:
        own, final, dense = kind
        counter.zero_()
        n = tiles.shape[0]
        programs = max(1, min(n, PROGRAMS_PER_SM * _multiprocessors(self.device)))
        as_integer = _INTEGER[ITEMSIZE[final]]
        load = _TL[own] if own != final else _TL[as_integer]
        args = (self._bases, tiles, n if count is None else count, counter, self._out)
        final_tl = _TL[final] if own != final else load
        as_tl = tl.uint8 if as_integer == "uint8" else _TL[as_integer]
        if self.device.type != "cuda":  # the interpreter
            _sum_tiles[(programs,)](*args, load, load, final_tl, as_tl, dense, BLOCK, COLUMNS, num_warps=WARPS)
            return
        with torch.cuda.device(self.device):
            _sum_tiles[(programs,)](*args, load, load, final_tl, as_tl, dense, BLOCK, COLUMNS, num_warps=WARPS)


def _tiles(slot: int, root: int, offset: int, key: int, dims: Sequence[tuple[int, int, int]], item: int) -> np.ndarray:
    """int64 [n, COLUMNS] over one row. dims: (extent, byte stride, index stride times G), outermost first."""
    dims = [(1, 0, 0)] * (2 - len(dims)) + list(dims)
    at = np.array([offset], np.int64)
    keys = np.array([key % (1 << 64)], np.uint64)

    def spread(counts: int, stride: int, step: int) -> None:
        nonlocal at, keys
        k = np.arange(counts, dtype=np.int64)
        at = (at[:, None] + k * stride).reshape(-1)
        keys = (keys[:, None] + k.astype(np.uint64) * np.uint64(step % (1 << 64))).reshape(-1)

    with np.errstate(over="ignore"):
        for n, s, c in dims[:-2]:
            spread(n, s, c)
        (rows, row, row_key), (width, unit, unit_key) = dims[-2:]
        if width > TILE:  # long runs one row at a time, cut along the run
            spread(rows, row, row_key)
            parts = [(1, TILE)] * (width // TILE) + [(1, width % TILE)] * bool(width % TILE)
            spread(len(parts), TILE * unit, TILE * unit_key)
        else:
            per = max(1, TILE // width)
            parts = [(per, width)] * (rows // per) + [(rows % per, width)] * bool(rows % per)
            spread(len(parts), per * row, per * row_key)
    out = np.empty((len(at), COLUMNS), np.int64)
    shape = np.array([w | r << 32 for r, w in parts], np.int64)
    out[:, 0] = root | slot << 32
    out[:, 1], out[:, 2], out[:, 3] = at, keys.view(np.int64), np.tile(shape, len(at) // len(shape))
    out[:, 4], out[:, 5] = row // item, _wrapped(row_key)
    out[:, 6], out[:, 7] = unit // item if width > 1 else 1, _wrapped(unit_key)
    return out


def _wrapped(x: int) -> int:
    x %= 1 << 64
    return x - (1 << 64) if x >> 63 else x
