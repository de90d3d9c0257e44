"""Strided regions: where the elements of a tensor view lie in one storage. Pure integer arithmetic, no torch.

A `Region` is what a meta tensor tells about itself (offset, sizes, strides), without its storage. All numbers of
one region are in one unit: elements while tracing, bytes once it describes a storage of a fragment. How regions of
a scratch tensor are traced back through what was written there: compose.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from xfer.errors import LayoutError
from xfer.mesh.box import Ints, row_major


@dataclass(frozen=True, slots=True)
class Region:
    """Element `i` lies at `offset + sum(i[d] * strides[d])`. Strides are not negative, as in torch."""

    offset: int
    shape: Ints
    strides: Ints

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def last(self) -> int:
        """The largest address in the region; meaningless when it is empty."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides))

    def shifted(self, by: int) -> Region:
        return Region(self.offset + by, self.shape, self.strides)

    def scaled(self, by: int) -> Region:
        """The same places counted in a unit `by` times smaller (elements to bytes)."""
        return Region(self.offset * by, self.shape, tuple(s * by for s in self.strides))

    def meets(self, other: Region) -> bool:
        """Whether the two address spans overlap; the elements themselves may still be disjoint."""
        return self.offset <= other.last and other.offset <= self.last

    def expanded(self, shape: Ints) -> Region:
        """Broadcast to `shape` by torch's rules: missing leading dims and dims of size 1 get stride 0. LayoutError
        where torch would refuse."""
        lead = len(shape) - len(self.shape)
        if lead < 0 or any(n not in (1, m) for n, m in zip(self.shape, shape[lead:])):
            raise LayoutError(f"{list(self.shape)} cannot be broadcast to {list(shape)}")
        strides = (0,) * lead + tuple(0 if n == 1 else s for n, s in zip(self.shape, self.strides))
        return Region(self.offset, tuple(shape), strides)

    @property
    def dense(self) -> bool:
        """Whether the elements in row-major order are consecutive addresses."""
        shape, strides = coalesce(self.shape, self.strides)
        return not shape or (len(shape) == 1 and strides[0] == 1)


@lru_cache(maxsize=4096)
def contiguous(shape: Ints, offset: int = 0) -> Region:
    """The region of a row-major tensor."""
    return Region(offset, tuple(shape), row_major(shape))


@lru_cache(maxsize=4096)
def constant(shape: Ints) -> Region:
    """Every element at address 0: the source region of a single value."""
    return Region(0, tuple(shape), (0,) * len(shape))


def coalesce(shape: Ints, *strides: Ints) -> tuple[Ints, ...]:
    """Drop dims of size 1 and join neighbours that are one run in *every* stride list; the order of elements stays."""
    dims: list[tuple[int, ...]] = []
    for d in zip(shape, *strides):
        if d[0] == 1:
            continue
        if dims and all(p == s * d[0] for p, s in zip(dims[-1][1:], d[1:])):
            dims[-1] = (dims[-1][0] * d[0], *d[1:])
        else:
            dims.append(d)
    return tuple(zip(*dims)) if dims else ((),) * (1 + len(strides))
