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
    if side not in ("src", "dst"):
        raise ValueError(f"side must be src or dst, not {side!r}")
    rows = rows[rows["op"] != Op.FILL]
    if not len(rows):
        return 0
    low, high = bounds(rows, side)
    index = rows[f"{side}_root"]
    outside = [
        f"tensor {rows['tensor'][i]}: bytes {low[i]}..{high[i]} of storage {r}"
        for i, r in enumerate(index.tolist())
        if not 0 <= r < len(roots) or low[i] < 0 or high[i] > roots[r].numel()
    ]
    if outside:
        raise LayoutError("checksummed rows reach outside their storages", outside)
    mixer = _Mixer(roots)
    columns = [rows[c].tolist() for c in ("tensor", f"{side}_dtype", "dst_dtype", f"{side}_root", f"{side}_offset")]
    arrays = [rows[c].tolist() for c in ("origin", "extent", f"{side}_strides")]
    for tensor, own, final, root, offset, origin, extent, strides in zip(*columns, *arrays):
        if 0 not in extent:
            mixer.add(tensor, DTYPES[own], DTYPES[final], root, offset, origin, extent, strides, shapes[tensor])
    return mixer.value()


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

    def add(self, tensor, own, final, root, offset, origin, extent, strides, shape) -> None:
        canonical = _index_strides(shape, extent)
        key = _G * (1 + sum(o * c for o, c in zip(origin, canonical))) + _mix_int(tensor + 1)
        dims: list[tuple[int, int, int]] = []  # extent, byte stride, index stride
        for n, s, c in zip(extent, strides, canonical):
            if n == 1:
                continue
            if s < 0:  # walk upwards in memory and backwards in the tensor
                offset, key, s, c = offset + (n - 1) * s, key + _G * (n - 1) * c, -s, -c
            if dims and dims[-1][1:] == (n * s, n * c):
                dims[-1] = (dims[-1][0] * n, s, c)
            else:
                dims.append((n, s, c))
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
            self._walk(space, own, final, offset + at * s, key + _G * at * c, part)

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
            along = torch.arange(n, dtype=torch.int64, device=x.device).mul_(_signed(_G * c))
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
