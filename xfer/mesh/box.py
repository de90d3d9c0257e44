"""Boxes: the axis-aligned regions of a checkpoint tensor. Origin and extent per dim, in elements. Nothing about storage here."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """`origin[d] <= i < origin[d] + extent[d]` for every dim d."""

    origin: Ints
    extent: Ints

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.extent)

    @property
    def end(self) -> Ints:
        return tuple(o + e for o, e in zip(self.origin, self.extent))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when no element is common."""
        lo = tuple(map(max, self.origin, other.origin))
        ext = tuple(h - low for h, low in zip(map(min, self.end, other.end), lo))
        return Box(lo, ext) if min(ext, default=1) > 0 else None

    def without(self, other: Box) -> list[Box]:
        """Disjoint boxes that cover what `other` leaves of this box."""
        hole = self.intersect(other)
        if hole is None:
            return [self]
        out = []
        o, e = self.origin, self.extent
        for k, (ho, he) in enumerate(zip(hole.origin, hole.extent)):
            if ho > o[k]:
                out.append(Box(o, (*e[:k], ho - o[k], *e[k + 1 :])))
                o, e = (*o[:k], ho, *o[k + 1 :]), (*e[:k], e[k] - (ho - o[k]), *e[k + 1 :])
            if ho + he < o[k] + e[k]:
                out.append(Box((*o[:k], ho + he, *o[k + 1 :]), (*e[:k], o[k] + e[k] - ho - he, *e[k + 1 :])))
                e = (*e[:k], he, *e[k + 1 :])
        return out


def whole(shape: Ints) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Ints) -> Ints:
    """Element strides of a contiguous tensor of `shape`; ValueError-free for zero dims (sizes 0 give stride products of 0)."""
    out, n = [], 1
    for s in reversed(shape):
        out.append(n)
        n *= s
    return tuple(reversed(out))
