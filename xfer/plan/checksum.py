"""Checksums as numbers: how those of two disjoint sets of elements are added. kernels/checksum.py computes them."""

from __future__ import annotations

_HALF = 1 << 32


def added(a: int, b: int) -> int:
    """The checksum of two disjoint sets of elements together, from those of each.

    A checksum is two sums modulo 2**32, in the lower and the upper half of 64 bits.
    """
    return (a + b) % _HALF | ((a >> 32) + (b >> 32)) % _HALF << 32
