"""Checksums on CUDA: the sums of checksum.py by one kernel over a table of tiles, and bound once.

The same numbers as the torch twin, bit for bit. A tile is `rows` runs of `width` elements of one row; it has their place in
the storage and in the checkpoint tensor. The twin adds what the kernel cannot read (values that are not aligned to their
size, conversions that Triton rounds differently). Not here: what a checksum means (checksum.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from xfer.kernels.checksum import FACTORS, GROUP, MIXES, PAIR, PLUS, Placed, _signed
from xfer.kernels.triton_impl import _BITS, _TL, CASTS, _to_bfloat16, multiprocessors
from xfer.plan.checksum import joined
from xfer.plan.program import DTYPES, ITEMSIZE

if TYPE_CHECKING:  # it needs what is here
    from xfer.kernels.summed_copies import Order

COLUMNS = 9
"""int64 words of a tile: root | slot << 32, byte offset, first index, width | rows << 32, stride and index step between
rows, stride and index step between units, salts (second << 32). Units are groups or elements; strides, widths and indices
count them."""
TILE = 1 << 15
"""Units of a tile, at most; its square is below 2**32, which `magic` needs."""
PROGRAMS_PER_SM, WARPS = 4, 8
LENT_TILE = 1 << 13
"""Most units of a tile that another kernel sums: the bytes that it copied for a tile must still be in the cache. 128 KiB of bf16."""
BLOCK = {True: 512, False: 1024}
"""Units at a time, of groups (two 16-byte loads a thread in bf16) and of elements."""


@triton.jit
def _mixed(x):
    """splitmix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _weight(x, H: tl.constexpr):
    """checksum.py's h, made odd. x: uint32."""
    for k in tl.static_range(3):
        x = x ^ (x >> H[k][0])
        if H[k][1] != 0:
            x = x * tl.full([], H[k][1], tl.uint32)
    return x | 1


@triton.jit
def _words(x, OWN: tl.constexpr, FINAL: tl.constexpr, AS: tl.constexpr):
    """The element as the destination's dtype, and its bits as the two int32 of checksum.py."""
    if OWN != FINAL:
        if OWN == tl.bfloat16:
            x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        if FINAL == tl.bfloat16:
            x = _to_bfloat16(x.to(tl.float32))
        else:
            x = x.to(tl.float64 if OWN == tl.float64 else tl.float32).to(FINAL)
        x = x.to(AS, bitcast=True)
    if AS == tl.int64:
        m = _mixed(x.to(tl.uint64, bitcast=True))
        return m.to(tl.uint32).to(tl.int32, bitcast=True), (m >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    if AS == tl.uint8:
        x = x.to(tl.uint8, bitcast=True).to(tl.int32)
    elif AS == tl.int32:
        u = x.to(tl.uint32, bitcast=True)
        x = (u ^ (u >> 16)).to(tl.int32, bitcast=True)
    else:
        x = x.to(tl.int32)
    return x, x


@triton.jit
def _group_words(raw, factors0, factors1, OWN: tl.constexpr, FINAL: tl.constexpr, AS: tl.constexpr, PLUS0, PLUS1):
    """The two words of each group (a row of `raw`): its elements' words times their factors, added up."""
    x, y = _words(raw, OWN, FINAL, AS)
    return tl.sum(x * factors0, 1).to(tl.uint32) + PLUS0, tl.sum(y * factors1, 1).to(tl.uint32) + PLUS1


@triton.jit
def _weighed(x, keep, group, salt, H: tl.constexpr):
    """What the words of these groups add to a sum; 0 where `keep` is False."""
    return tl.where(keep, x * _weight(group + salt, H), tl.zeros_like(group))


@triton.jit
def _add_to(into, total0, total1):
    tl.atomic_add(into, tl.sum(total0.to(tl.int64), 0).to(tl.int32))
    tl.atomic_add(into + 1, tl.sum(total1.to(tl.int64), 0).to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def _sum_tiles(
    bases, tiles, count, counter, factors, out,
    LOAD: tl.constexpr, OWN: tl.constexpr, FINAL: tl.constexpr, AS: tl.constexpr, GROUP: tl.constexpr,
    PLUS0: tl.constexpr, PLUS1: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """GROUP 1: units are elements and PLUS are checksum.py's. Else units are groups and PLUS are times the sum of factors.
    factors, out: int32 [2, 8] and [slots, 2].
    """
    lane = tl.arange(0, BLOCK)
    if GROUP > 1:
        word = tl.arange(0, GROUP)
        factors0 = tl.load(factors + word)[None, :]
        factors1 = tl.load(factors + 8 + word)[None, :]
    i = tl.atomic_add(counter, 1)
    while i < count:
        t = tiles + i.to(tl.int64) * COLS
        place = tl.load(t)
        src = (tl.load(bases + (place & 0xFFFFFFFF)) + tl.load(t + 1)).to(tl.pointer_type(LOAD))
        first = tl.load(t + 2)
        shape = tl.load(t + 3)
        width = (shape & 0xFFFFFFFF).to(tl.int32)
        n = width * (shape >> 32).to(tl.int32)
        magic = (((width - 1).to(tl.int64) + 0x100000000) // width).to(tl.uint32)  # u // width, for u * width < 2**32
        row = tl.load(t + 4)
        row_step = tl.load(t + 5)
        unit = tl.load(t + 6)
        unit_step = tl.load(t + 7)
        salts = tl.load(t + 8)
        salt0 = salts.to(tl.uint32)
        salt1 = (salts >> 32).to(tl.uint32)
        total0 = tl.zeros([BLOCK], tl.uint32)
        total1 = tl.zeros([BLOCK], tl.uint32)
        if GROUP > 1:
            src = tl.multiple_of(src, 16)
        for at in range(0, n, BLOCK):
            u = at + lane
            r = tl.umulhi(u.to(tl.uint32), magic).to(tl.int32)
            c = u - r * width
            keep = u < n
            if GROUP > 1:
                where = ((r * row + c) * GROUP)[:, None] + word[None, :]
                raw = tl.load(src + where, mask=keep[:, None], other=0)
                x, y = _group_words(raw, factors0, factors1, OWN, FINAL, AS, PLUS0, PLUS1)
                group = first.to(tl.uint32) + r.to(tl.uint32) * row_step.to(tl.uint32) + c.to(tl.uint32)
            else:
                x, y = _words(tl.load(src + (r * row + c * unit), mask=keep, other=0), OWN, FINAL, AS)
                index = first + r * row_step + c * unit_step
                if AS == tl.uint8:  # the second byte of a pair; PLUS is added below
                    second = x.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.int32) * 256
                    odd = (index & 1) == 1
                    x = tl.where(odd, (second.to(tl.uint32) - PLUS0).to(tl.int32), x)
                    y = tl.where(odd, (second.to(tl.uint32) - PLUS1).to(tl.int32), y)
                    index = index >> 1
                x = (x.to(tl.uint32) + PLUS0) * tl.load(factors + (index & 7)).to(tl.uint32)
                y = (y.to(tl.uint32) + PLUS1) * tl.load(factors + 8 + (index & 7)).to(tl.uint32)
                group = (index >> 3).to(tl.uint32)
            total0 += _weighed(x, keep, group, salt0, A)
            total1 += _weighed(y, keep, group, salt1, B)
        _add_to(out + 2 * (place >> 32), total0, total1)
        i = tl.atomic_add(counter, 1)


@dataclass(frozen=True, slots=True)
class Lent:
    """Tiles of whole groups that another kernel sums, into `out`, which it has to clear. constants: LOAD, AS, GROUP, the two PLUS, and
    the two mixes, see `_sum_tiles`."""

    tiles: torch.Tensor
    factors: torch.Tensor
    out: torch.Tensor
    constants: tuple


class TritonSums:
    """Checksums of several sets of rows (`slot[i]`: the set of row i, 0..slots-1) as they lie in `roots`.

    placed: per row, where it lies and belongs, by `checksum.placed`. `launch` reads; `values` brings the sums. tile: units of a tile,
    at most.
    """

    def __init__(
        self, rows, slot: np.ndarray, slots: int, roots: Sequence[torch.Tensor], side: str, placed, tile: int = TILE
    ):
        self.device, self._roots = roots[0].device, roots
        self._lent = False
        self._bases = torch.tensor([t.data_ptr() for t in roots], dtype=torch.int64).to(self.device)
        self._out = torch.zeros(slots, 2, dtype=torch.int32, device=self.device)
        self._factors = torch.tensor(FACTORS, dtype=torch.int64).to(torch.int32).to(self.device)  # wraps
        kinds: dict[tuple[str, str, bool], list[np.ndarray]] = {}
        odd = np.zeros(len(rows), bool)
        for i, (r, where) in enumerate(zip(rows, placed)):
            own, final = DTYPES[r[f"{side}_dtype"]], DTYPES[r["dst_dtype"]]
            if where is None:
                continue
            root = int(r[f"{side}_root"])
            base = roots[root].data_ptr()
            if own != final and (own, final) not in CASTS or not _aligned(where, base, ITEMSIZE[own]):
                odd[i] = True
                continue
            if ITEMSIZE[own] == ITEMSIZE[final] == 1:
                pairs = where.in_pairs()
                if pairs is not None and _aligned(pairs, base, ITEMSIZE[PAIR]):
                    own, final, where = PAIR, PAIR, pairs
            whole = _in_groups(where, base, ITEMSIZE[own], ITEMSIZE[final])
            tiles = _tiles(int(slot[i]), root, where, ITEMSIZE[own], whole, tile)
            kinds.setdefault((own, final, whole), []).append(tiles)
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
        """Sum all tiles that are not lent, on the current stream. Call it after the kernel that sums the lent ones."""
        if not self._lent:
            self._out.zero_()
        for table in self._tables:
            self._run(*table)

    def values(self) -> np.ndarray:
        """uint64 [slots] of the last launch. One device synchronisation."""
        return joined(*self._out.cpu().numpy().astype(np.uint64).T)

    def lend(self, order: Callable[[np.ndarray, int], Order]) -> tuple[Lent, Order] | None:
        """Give the largest table of whole groups that need no conversion to another kernel. It can be done once, and not be undone.
        order: from (tiles, bytes of a group), the tiles that the kernel takes, and their order; the other tiles stay here. Returns None,
        and changes nothing, if there is no such table."""
        if self._lent:
            raise RuntimeError("these sums were lent to another kernel already")
        fit = [i for i, ((own, final, whole), *_) in enumerate(self._tables) if whole and own == final]
        if not fit:
            return None
        most = max(fit, key=lambda i: self._tables[i][1].shape[0])
        kind, tiles, counter = self._tables.pop(most)
        ordered = order(tiles.cpu().numpy(), GROUP * ITEMSIZE[kind[0]])
        taken = torch.from_numpy(ordered.taken).to(self.device)
        if not bool(taken.all()):
            self._tables.append((kind, tiles[~taken], counter))
        load, _, as_tl, *rest = self._constants(kind)
        self._lent = True
        return Lent(tiles[taken], self._factors, self._out, (load, as_tl, *rest)), ordered

    def _run(self, kind, tiles: torch.Tensor, counter: torch.Tensor, count: int | None = None) -> None:
        counter.zero_()
        n = tiles.shape[0]
        programs = max(1, min(n, PROGRAMS_PER_SM * multiprocessors(self.device)))
        load, *kinds = self._constants(kind)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():  # else: the interpreter
            _sum_tiles[(programs,)](
                self._bases, tiles, n if count is None else count, counter, self._factors, self._out,
                load, load, *kinds, BLOCK[kind[2]], COLUMNS, num_warps=WARPS,
            )  # fmt: skip

    @staticmethod
    def _constants(kind) -> tuple:
        """LOAD (and OWN), FINAL, AS, GROUP, the two PLUS, the two mixes."""
        own, final, whole = kind
        as_integer = _BITS[ITEMSIZE[final]]
        load = _TL[own] if own != final else _TL[as_integer]
        final_tl = _TL[final] if own != final else load
        as_tl = tl.uint8 if as_integer == "uint8" else _TL[as_integer]
        plus = [p * (sum(f) if whole else 1) % (1 << 32) for p, f in zip(PLUS, FACTORS)]
        return load, final_tl, as_tl, GROUP if whole else 1, *plus, *MIXES


def _aligned(where: Placed, base: int, item: int) -> bool:
    return (base + where.offset) % item == 0 and all(s % item == 0 for _, s, _ in where.dims)


def _in_groups(where: Placed, base: int, own: int, final: int) -> bool:
    """Whether the kernel can read this row in whole groups, each of them dense and at an address that loads of 16 bytes allow."""
    if final in (1, 8) or not where.grouped or where.dims[-1][1] != own or (base + where.offset) % 16:
        return False
    if where.dims[-1][0] == GROUP:  # one to a row: `_tiles` would step over them
        return False
    return all(s % (GROUP * own) == 0 for _, s, _ in where.dims[:-1])


def _tiles(slot: int, root: int, where: Placed, item: int, whole: bool, tile: int) -> np.ndarray:
    """int64 [n, COLUMNS] over one row."""
    per_unit = GROUP if whole else 1
    dims = [(n, s, c // per_unit) for n, s, c in where.dims]
    if whole:
        dims[-1] = (dims[-1][0] // GROUP, GROUP * item, 1)
    dims = [(1, 0, 0)] * (2 - len(dims)) + dims
    at, index = np.array([where.offset], np.int64), np.array([where.index // per_unit], np.int64)

    def spread(counts: int, stride: int, step: int) -> None:
        nonlocal at, index
        k = np.arange(counts, dtype=np.int64)
        at = (at[:, None] + k * stride).reshape(-1)
        index = (index[:, None] + k * step).reshape(-1)

    for n, s, c in dims[:-2]:
        spread(n, s, c)
    (rows, row, row_step), (width, unit, unit_step) = dims[-2:]
    if width == 1:  # `magic` wants none of these in several rows
        (rows, row, row_step), (width, unit, unit_step) = (1, 0, 0), (rows, row, row_step)
    if width > tile:  # long runs one row at a time, cut along the run
        spread(rows, row, row_step)
        parts = [(1, tile)] * (width // tile) + [(1, width % tile)] * bool(width % tile)
        spread(len(parts), tile * unit, tile * unit_step)
    else:
        per = max(1, tile // width)
        parts = [(per, width)] * (rows // per) + [(rows % per, width)] * bool(rows % per)
        spread(len(parts), per * row, per * row_step)
    out = np.empty((len(at), COLUMNS), np.int64)
    shape = np.array([w | r << 32 for r, w in parts], np.int64)
    out[:, 0], out[:, 1], out[:, 2] = root | slot << 32, at, index
    out[:, 3] = np.tile(shape, len(at) // len(shape))
    out[:, 4], out[:, 5] = row // (item * per_unit), row_step
    out[:, 6], out[:, 7] = unit // (item * per_unit) if width > 1 else 1, unit_step
    out[:, 8] = _signed(where.salts[0] | where.salts[1] << 32)
    return out
