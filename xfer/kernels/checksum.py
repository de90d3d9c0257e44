"""Checksums of checkpoint tensors by position, to compare what sources send with what engines hold, as one number.

The number is two sums modulo 2**32, k = 0 in its low half and k = 1 in its high half. Each element adds to sum k

    weight[k](tensor, index) * (bits[k] + PLUS[k])

where `index` is its linear index in the checkpoint tensor. So the sum over all sources' rows for a destination equals the
sum over the destination's own fragments, however either side cuts the tensors and in whatever order it reads them, while an
element that is wrong, missing, doubled or in the wrong place changes it.

bits: those of the value in the destination's dtype. 2 bytes: extended to 32 with their sign, for both k. 4 bytes: b ^ (b >> 16), for both.
8 bytes: low and high half of splitmix64's finalizer. 1 byte: elements 2i and 2i + 1 are element i of a tensor of 2 bytes. So the
first adds weight[k](tensor, i) * (byte + PLUS[k]), the byte extended with zeros, and the second weight[k](tensor, i) * 256 * byte,
extended with its sign. Pairs that lie as such are read as 2 bytes.
weight: (h[k](index // 8 + salt[k](tensor)) | 1) * FACTORS[k][index % 8], with h[k] a mixing bijection of 32-bit words. Weights
are odd, so a single wrong element always changes the number; any other set of changes passes with a chance of about one
in 2**62, or in 2**32 where all of them are swaps of signs in bf16 (differences of 2**15 leave 16 bits of either sum).
In groups of eight, and in halves of 32 bits, because products of 64 bits and a mix per element cost several times what
memory does, on GPUs too: a group that lies whole and in order needs one mix. Any other element finds its own weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
import torch

from xfer.errors import LayoutError
from xfer.kernels.bits import INTEGERS
from xfer.kernels.strided import bounds
from xfer.kernels.torch_impl import Space, TorchRows, torch_dtype
from xfer.plan.checksum import added, joined
from xfer.plan.program import DTYPES, ITEMSIZE, MAX_DIMS, Op

CHUNK = 1 << 18
"""Elements worked on at once: the scratch is a few int32 arrays of this length, whatever the tensors' sizes."""

GROUP = 8
PAIR = "int16"
"""Dtype as which two bytes of a tensor are read."""
_G, _C1, _C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD, _HALF = 1 << 64, 1 << 32
MIXES = (((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0)), ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0)))
"""h[k]: x ^= x >> shift; x *= odd (0: not)."""
PLUS = (0x3C6EF372, 0xA54FF53A)
"""Different, so that no bits count nothing in both sums."""


class Sums:
    """Checksums of several sets of rows, bound once; `values` may be called any number of times. On CUDA one kernel adds all
    rows that it can read (checksum_triton.py); torch adds the others, and on the CPU all of them, row by row in Python.

    Args:
        rows: dtype ROW. FILL rows have no place in a checkpoint tensor and count nothing.
        slot: the set of row i, 0..slots-1.
        roots: this rank's storages, flat uint8 tensors.
        side: "src" reads the rows' sources and converts them to the destination's dtype first, "dst" reads destinations.
        shapes: shapes[t] is the shape of checkpoint tensor t, at most MAX_DIMS dims.

    Raises:
        LayoutError: a row lies outside its storage.
    """

    def __init__(self, rows: np.ndarray, slot: np.ndarray, slots: int, roots, side: str, shapes, *, lent: bool = False):
        """lent: in tiles that another kernel can take over (`lend`)."""
        if side not in ("src", "dst"):
            raise ValueError(f"side must be src or dst, not {side!r}")
        some = rows["op"] != Op.FILL
        self._rows, self._slot, self._slots = rows[some], np.asarray(slot)[some], slots
        self._roots, self._side, self._shapes = roots, side, shapes
        self._fast = None
        if not len(self._rows):
            return
        _refuse_outside(self._rows, roots, side)
        if roots[0].is_cuda and find_spec("triton") is not None:
            from xfer.kernels.checksum_triton import LENT_TILE, TILE, TritonSums

            where = [placed(r, side, shapes) for r in self._rows]
            self._fast = TritonSums(self._rows, self._slot, slots, roots, side, where, LENT_TILE if lent else TILE)
            self._rows, self._slot = self._rows[self._fast.odd], self._slot[self._fast.odd]

    @classmethod
    def of_one(cls, rows: np.ndarray, roots, side: str, shapes, *, lent: bool = False) -> Sums:
        """Checksums with all rows in one set."""
        return cls(rows, np.zeros(len(rows), np.int64), 1, roots, side, shapes, lent=lent)

    def values(self) -> list[int]:
        """The checksum of each set, 0 <= c < 2**64. One device synchronisation, at the end."""
        self.begin()
        return self.ended()

    def lend(self, order):
        """See `TritonSums.lend`; None where torch sums. From then on call `begin` after the kernel that took tiles over."""
        return None if self._fast is None else self._fast.lend(order)

    def begin(self) -> None:
        """On CUDA: begins to read, on the current stream, without a wait. On the CPU `ended` reads."""
        if self._fast is not None:
            self._fast.launch()

    def ended(self) -> list[int]:
        """The checksums that `begin` began; call it on a stream that runs after that one."""
        out = self._slowly() if len(self._rows) else np.zeros(self._slots, np.uint64)
        if self._fast is not None:
            out = added(out, self._fast.values())
        return out.tolist()

    def _slowly(self) -> np.ndarray:
        mixer = _Mixer(self._roots, self._slots)
        for r, slot in zip(self._rows, self._slot.tolist()):
            if (where := placed(r, self._side, self._shapes)) is not None:
                own, final = DTYPES[r[f"{self._side}_dtype"]], DTYPES[r["dst_dtype"]]
                if ITEMSIZE[own] == ITEMSIZE[final] == 1 and (pairs := where.in_pairs()) is not None:
                    own, final, where = PAIR, PAIR, pairs
                mixer.add(slot, own, final, int(r[f"{self._side}_root"]), where)
        return mixer.values()


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of a checksum: byte `offset` of its first element and its `index` in the checkpoint tensor, the tensor's two salts,
    and per dim (extent, byte stride, step of the index), outermost first; dims that continue each other are merged."""

    offset: int
    index: int
    salts: tuple[int, int]
    dims: tuple[tuple[int, int, int], ...]

    @property
    def grouped(self) -> bool:
        """Whether the row consists of whole groups of eight elements, each in order."""
        if not self.dims or self.index % GROUP:
            return False
        n, _, step = self.dims[-1]
        return step == 1 and n % GROUP == 0 and all(c % GROUP == 0 for _, _, c in self.dims[:-1])

    def in_pairs(self) -> Placed | None:
        """This row of single bytes as a row of pairs (dtype PAIR). None if it cuts a pair."""
        if not self.dims or self.index % 2:
            return None
        *outer, (n, s, step) = self.dims
        if (s, step) != (1, 1) or n % 2 or any(c % 2 for _, _, c in outer):
            return None
        return Placed(
            self.offset, self.index // 2, self.salts, (*((m, t, c // 2) for m, t, c in outer), (n // 2, 2, 1))
        )

    def part(self, start: int, count: int) -> Placed:
        """The part of this row with indices `start` to `start + count` of the outermost dim."""
        (_, s, c), *rest = self.dims
        dims = ((count, s, c), *rest) if count > 1 else tuple(rest)
        return Placed(self.offset + start * s, self.index + start * c, self.salts, dims)


def placed(row, side: str, shapes: Sequence[Sequence[int]]) -> Placed | None:
    """Where a row of a program lies in its storage and in the checkpoint tensor. None for an empty row."""
    extent, strides = row["extent"].tolist(), row[f"{side}_strides"].tolist()
    if 0 in extent:
        return None
    tensor, offset = int(row["tensor"]), int(row[f"{side}_offset"])
    steps = _index_strides(shapes[tensor], extent)
    index = sum(o * c for o, c in zip(row["origin"].tolist(), steps))
    dims: list[tuple[int, int, int]] = []
    for n, s, c in zip(extent, strides, steps):
        if n == 1:
            continue
        if s < 0:  # walk upwards in memory and backwards in the tensor
            offset, index, s, c = offset + (n - 1) * s, index + (n - 1) * c, -s, -c
        if dims and dims[-1][1:] == (n * s, n * c):
            dims[-1] = (dims[-1][0] * n, s, c)
        else:
            dims.append((n, s, c))
    return Placed(offset, index, salts(tensor), tuple(dims))


def salts(tensor: int) -> tuple[int, int]:
    """The salts of a tensor's number, one for each half of a sum."""
    return _halves(mix_int(tensor + 1))


def _refuse_outside(rows: np.ndarray, roots: Sequence[torch.Tensor], side: str) -> None:
    low, high = bounds(rows, side)
    index = rows[f"{side}_root"]
    outside = [
        f"tensor {rows['tensor'][i]}: bytes {low[i]}..{high[i]} of storage {r}"
        for i, r in enumerate(index.tolist())
        if not 0 <= r < len(roots) or low[i] < 0 or high[i] > roots[r].numel()
    ]
    if outside:
        raise LayoutError("checksummed rows reach outside their storages", outside)


class Constants:
    """The FILL rows of `rows`, bound once. They belong to no tensor, so no checksum covers them; here their bits in this
    rank's storages are compared."""

    def __init__(self, rows: np.ndarray, roots: Sequence[torch.Tensor]):
        rows = rows[rows["op"] == Op.FILL]
        self._bound = TorchRows(rows, roots, "dst", roots) if len(rows) else None

    def wrong(self) -> int:
        """How many rows do not hold their constant. One device synchronisation, none where there are no rows."""
        return self._bound.wrong_fills() if self._bound is not None else 0


class _Mixer:
    """Adds rows to the sums of `slots` sets."""

    def __init__(self, roots: Sequence[torch.Tensor], slots: int):
        self.spaces = [Space(r) for r in roots]
        self.device = roots[0].device
        self.totals = torch.zeros(slots, 2, dtype=torch.int64, device=self.device)
        self.work = [torch.empty(CHUNK, dtype=torch.int32, device=self.device) for _ in range(4)]
        self.factors = torch.tensor(FACTORS, dtype=torch.int64).to(torch.int32).to(self.device)  # wraps

    def values(self) -> np.ndarray:
        """uint64 [slots]."""
        return joined(*self.totals.cpu().numpy().astype(np.uint64).T)

    def add(self, slot: int, own: str, final: str, root: int, where: Placed) -> None:
        """Cuts the outermost dim until a part fits into a chunk."""
        inner = 1
        for n, _, _ in where.dims[1:]:
            inner *= n
        if not where.dims or where.dims[0][0] * inner <= CHUNK:
            self._chunk(self.totals[slot], self.spaces[root], own, final, where)
            return
        n = where.dims[0][0]
        step = max(1, CHUNK // inner)
        for at in range(0, n, step):
            self.add(slot, own, final, root, where.part(at, min(step, n - at)))

    def _chunk(self, totals: torch.Tensor, space: Space, own: str, final: str, where: Placed) -> None:
        extent, strides = [n for n, _, _ in where.dims], [s for _, s, _ in where.dims]
        item = ITEMSIZE[own]
        if space.aligned(where.offset, strides, item):
            value = space.view(INTEGERS[item] if own == final else torch_dtype(own), where.offset, extent, strides)
        else:
            loose = space.view(torch.uint8, where.offset, [*extent, item], [*strides, 1]).reshape(-1)
            value = loose.clone().view(INTEGERS[item] if own == final else torch_dtype(own)).view(extent)
        if own != final:
            value = value.to(torch_dtype(final)).contiguous()
            value = value.reshape(-1).view(INTEGERS[ITEMSIZE[final]]).view(extent)
        if value.dtype == torch.int64:
            mixed = value.clone()
            mix(mixed, torch.empty_like(mixed))
            words = [mixed.to(torch.int32), (mixed >> 32).to(torch.int32)]
        else:
            word = self.work[0][: value.numel()].view(extent).copy_(value)
            if value.dtype == torch.int32:
                word.bitwise_xor_(torch.bitwise_right_shift(word, 16).bitwise_and_(0xFFFF))
            words = [word, word]
        for k in range(2):
            totals[k] += self._sum(k, words[k], where, single=value.element_size() == 1)

    def _sum(self, k: int, words: torch.Tensor, where: Placed, single: bool) -> torch.Tensor:
        """int64, to be taken modulo 2**32. single: the words are bytes."""
        out = self.work[1]
        if where.grouped and not single:
            count = words.numel() // GROUP
            w, sums = words.reshape(-1, GROUP), out[:count]
            if w.is_cuda:  # which has no product of integer matrices
                sums.copy_((w * self.factors[k]).sum(1))
            else:
                torch.mv(w, self.factors[k], out=sums)
            sums.add_(_signed(PLUS[k] * sum(FACTORS[k]), 32))
            dims = [*((n, c // GROUP) for n, _, c in where.dims[:-1]), (where.dims[-1][0] // GROUP, 1)]
            group = self._index(where.index // GROUP, dims, count)
        else:
            count = words.numel()
            sums = torch.add(words.reshape(-1), _signed(PLUS[k], 32), out=out[:count])
            index = self._index(
                where.index % (2 * GROUP * _HALF), [(n, c) for n, _, c in where.dims], count, torch.int64
            )
            if single:
                second = words.reshape(-1).to(torch.int8).to(torch.int32).mul_(256)
                torch.where(index % 2 == 1, second, sums, out=sums)
                index.bitwise_right_shift_(1)
            sums.mul_(self.factors[k][index & (GROUP - 1)])
            group = self.work[2][:count].copy_(index.bitwise_right_shift_(GROUP.bit_length() - 1))
        group.add_(_signed(where.salts[k], 32))
        spare = self.work[3][:count]
        for shift, factor in MIXES[k]:
            torch.bitwise_right_shift(group, shift, out=spare)
            group.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
            if factor:
                group.mul_(_signed(factor, 32))
        return sums.mul_(group.bitwise_or_(1)).sum(dtype=torch.int64)

    def _index(self, first: int, dims: Sequence[tuple[int, int]], count: int, dtype=torch.int32) -> torch.Tensor:
        """[count]: first + the steps of dims, (extent, step), modulo the dtype's size."""
        bits = 32 if dtype == torch.int32 else 64
        flat = self.work[2][:count] if bits == 32 else torch.empty(count, dtype=dtype, device=self.device)
        out = flat.view([n for n, _ in dims]).fill_(_signed(first, bits))
        for d, (n, c) in enumerate(dims):
            along = torch.arange(n, dtype=torch.int64, device=self.device).mul_(c).to(dtype)
            out.add_(along.view([n if k == d else 1 for k in range(len(dims))]))
        return flat


def _index_strides(shape: Sequence[int], extent: Sequence[int]) -> list[int]:
    """Element strides of the checkpoint tensor, one per column of a row."""
    if len(shape) > MAX_DIMS:
        raise LayoutError(f"a checkpoint tensor of shape {tuple(shape)} has more than {MAX_DIMS} dims")
    full = [1] * (len(extent) - len(shape)) + [int(n) for n in shape]
    return [*accumulate(reversed(full[1:]), int.__mul__, initial=1)][::-1]


def mix(x: torch.Tensor, t: torch.Tensor) -> None:
    """splitmix64's finalizer in place; `t` is scratch. int64 wraps, and its >> is arithmetic, hence the masks."""
    for shift, factor in ((30, _C1), (27, _C2), (31, None)):
        torch.bitwise_right_shift(x, shift, out=t)
        t.bitwise_and_((1 << (64 - shift)) - 1)
        x.bitwise_xor_(t)
        if factor is not None:
            x.mul_(_signed(factor))


def mix_int(x: int) -> int:
    x = x * _G % _WORD
    x = (x ^ (x >> 30)) * _C1 % _WORD
    x = (x ^ (x >> 27)) * _C2 % _WORD
    return x ^ (x >> 31)


def _signed(x: int, bits: int = 64) -> int:
    x %= 1 << bits
    return x - (1 << bits) if x >> (bits - 1) else x


def _halves(x: int) -> tuple[int, int]:
    return x % _HALF, x >> 32


FACTORS = tuple(tuple(_halves(mix_int(0x1000 + j))[k] | 1 for j in range(GROUP)) for k in range(2))
"""By k: odd, 0 < f < 2**32, one for each place in a group."""
