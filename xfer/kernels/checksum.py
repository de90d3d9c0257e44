"""Checksums of canonical tensors by position: what senders read and what engines hold, compared as one number.

Each element contributes mix(bits of its destination-typed value, its linear index in the canonical tensor, the
tensor), and contributions are added modulo 2**64. So the sum over all senders' rows for a taker equals the sum over
the taker's own fragments, however either side cuts the tensors and in whatever order it walks them, while an element
that is wrong, missing, doubled or in the wrong place changes it.

mix is the finalizer of splitmix64, a bijection of 64-bit words, over `bits + G * (index + 1) + salt(tensor)` with G
odd. A single wrong element therefore always changes the sum, and so do all but about one in 2**64 of any other set of
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
import torch

from xfer.errors import LayoutError
from xfer.kernels.strided import bounds
from xfer.kernels.torch_impl import Space, TorchRows, torch_dtype
from xfer.plan.program import DTYPES, ITEMSIZE, MAX_DIMS, Op

CHUNK = 1 << 18
"""Elements worked on at once: the scratch is three int64 arrays of this length, 6 MiB, whatever the tensors' sizes."""

_G, _C1, _C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def checksum_rows(rows: np.ndarray, roots: Sequence[torch.Tensor], side: str, shapes: Sequence[Sequence[int]]) -> int:
    """The checksum, 0 <= c < 2**64, of `rows` (dtype ROW) as they lie in this rank's storages.

    side: "src" reads the rows' sources and converts them to the destination dtype first, "dst" reads destinations.
    shapes[t]: shape of canonical tensor t, at most MAX_DIMS dims. FILL rows have no canonical place and count nothing.
    LayoutError when a row lies outside its storage. One device synchronisation, at the end.
    """
    return Sums(rows, np.zeros(len(rows), np.int64), 1, roots, side, shapes).values()[0]


class Sums:
    """Checksums of several sets of rows, bound once: all Python per row happens here, `values` may be called again and
    again. On CUDA one kernel reads everything (checksum_triton.py), as on the CPU torch does.

    slot[i]: the set of row i, 0..slots-1. Other arguments and errors: as for `checksum_rows`.
    """

    def __init__(self, rows: np.ndarray, slot: np.ndarray, slots: int, roots, side: str, shapes):
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
            from xfer.kernels.checksum_triton import TritonSums

            where = [placed(r, side, shapes) for r in self._rows]
            self._fast = TritonSums(self._rows, self._slot, slots, roots, side, where)
            self._rows, self._slot = self._rows[self._fast.odd], self._slot[self._fast.odd]

    def values(self) -> list[int]:
        """By set, 0 <= c < 2**64. A device synchronisation per set."""
        if self._fast is not None:
            self._fast.launch()
        out = [self._slowly(self._rows[self._slot == k]) for k in range(self._slots)]
        if self._fast is not None:
            out = [(a + b) % _WORD for a, b in zip(out, self._fast.values())]
        return out

    def _slowly(self, rows: np.ndarray) -> int:
        if not len(rows):
            return 0
        mixer = _Mixer(self._roots)
        for r in rows:
            if (where := placed(r, self._side, self._shapes)) is not None:
                own, final = DTYPES[r[f"{self._side}_dtype"]], DTYPES[r["dst_dtype"]]
                mixer.add(own, final, int(r[f"{self._side}_root"]), *where)
        return mixer.value()


def placed(row, side: str, shapes: Sequence[Sequence[int]]) -> tuple[int, int, list[tuple[int, int, int]]] | None:
    """(byte offset, key, dims) of a row: where its first element lies, what is added to that element's bits, and per dim
    (extent, byte stride, key step), outermost first, merged where the next one continues. None for an empty row."""
    extent, strides = row["extent"].tolist(), row[f"{side}_strides"].tolist()
    if 0 in extent:
        return None
    tensor, offset = int(row["tensor"]), int(row[f"{side}_offset"])
    canonical = _index_strides(shapes[tensor], extent)
    key = _G * (1 + sum(o * c for o, c in zip(row["origin"].tolist(), canonical))) + _mix_int(tensor + 1)
    dims: list[tuple[int, int, int]] = []
    for n, s, c in zip(extent, strides, canonical):
        if n == 1:
            continue
        if s < 0:  # walk upwards in memory and backwards in the tensor
            offset, key, s, c = offset + (n - 1) * s, key + _G * (n - 1) * c, -s, -c
        if dims and dims[-1][1:] == (n * s, n * c * _G):
            dims[-1] = (dims[-1][0] * n, s, c * _G)
        else:
            dims.append((n, s, c * _G))
    return offset, key, dims


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


def wrong_fills(rows: np.ndarray, roots: Sequence[torch.Tensor]) -> int:
    """How many FILL rows of `rows` do not hold their constant in this rank's storages. They come from no tensor, so no
    checksum of tensors counts them; here their bits are compared. One device synchronisation."""
    rows = rows[rows["op"] == Op.FILL]
    return TorchRows(rows, roots, "dst", roots).wrong_fills() if len(rows) else 0


class _Mixer:
    def __init__(self, roots: Sequence[torch.Tensor]):
        self.spaces = [Space(r) for r in roots]
        device = roots[0].device
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self.work = torch.empty(CHUNK, dtype=torch.int64, device=device)
        self.spare = torch.empty(CHUNK, dtype=torch.int64, device=device)

    def value(self) -> int:
        return int(self.total.item()) % _WORD

    def add(self, own: str, final: str, root: int, offset: int, key: int, dims: list[tuple[int, int, int]]) -> None:
        self._walk(self.spaces[root], own, final, offset, key, dims)

    def _walk(
        self, space: Space, own: str, final: str, offset: int, key: int, dims: list[tuple[int, int, int]]
    ) -> None:
        """Cuts the outermost dim until a part fits into a chunk."""
        inner = 1
        for n, _, _ in dims[1:]:
            inner *= n
        if not dims or dims[0][0] * inner <= CHUNK:
            self._chunk(space, own, final, offset, key, dims)
            return
        n, s, c = dims[0]
        step = max(1, CHUNK // inner)
        for at in range(0, n, step):
            m = min(step, n - at)
            part = [(m, s, c), *dims[1:]] if m > 1 else dims[1:]
            self._walk(space, own, final, offset + at * s, key + at * c, part)

    def _chunk(
        self, space: Space, own: str, final: str, offset: int, key: int, dims: list[tuple[int, int, int]]
    ) -> None:
        extent, strides = [n for n, _, _ in dims], [s for _, s, _ in dims]
        item = ITEMSIZE[own]
        if space.aligned(offset, strides, item):
            value = space.view(_BITS[item] if own == final else torch_dtype(own), offset, extent, strides)
        else:
            loose = space.view(torch.uint8, offset, [*extent, item], [*strides, 1]).reshape(-1)
            value = loose.clone().view(_BITS[item] if own == final else torch_dtype(own)).view(extent)
        if own != final:
            value = value.to(torch_dtype(final)).contiguous()
            value = value.reshape(-1).view(_BITS[ITEMSIZE[final]]).view(extent)
        count = value.numel()
        x, t = self.work[:count].view(extent), self.spare[:count].view(extent)
        x.copy_(value)
        x.add_(_signed(key))
        for d, (n, _, c) in enumerate(dims):
            along = torch.arange(n, dtype=torch.int64, device=x.device).mul_(_signed(c))
            x.add_(along.view([n if k == d else 1 for k in range(len(dims))]))
        _mix(x, t)
        self.total.add_(x.sum())


def _index_strides(shape: Sequence[int], extent: Sequence[int]) -> list[int]:
    """Element strides of the canonical tensor, one per column of a row."""
    if len(shape) > MAX_DIMS:
        raise LayoutError(f"a canonical tensor of shape {tuple(shape)} has more than {MAX_DIMS} dims")
    full = [1] * (len(extent) - len(shape)) + [int(n) for n in shape]
    return [*accumulate(reversed(full[1:]), int.__mul__, initial=1)][::-1]


def _mix(x: torch.Tensor, t: torch.Tensor) -> None:
    """splitmix64's finalizer in place; `t` is scratch. int64 wraps, and its >> is arithmetic, hence the masks."""
    for shift, factor in ((30, _C1), (27, _C2), (31, None)):
        torch.bitwise_right_shift(x, shift, out=t)
        t.bitwise_and_((1 << (64 - shift)) - 1)
        x.bitwise_xor_(t)
        if factor is not None:
            x.mul_(_signed(factor))


def _mix_int(x: int) -> int:
    x = x * _G % _WORD
    x = (x ^ (x >> 30)) * _C1 % _WORD
    x = (x ^ (x >> 27)) * _C2 % _WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    x %= _WORD
    return x - _WORD if x >= _WORD >> 1 else x
