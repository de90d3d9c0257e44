"""Checksums as numbers: two sums modulo 2**32, in the lower and the upper half of 64 bits.

Every place that adds checksums uses `added`: sums over rows (kernels/checksum.py), messages of the packed route
(packed/buffer.py), and the coordinator, which adds what all trainers sent to a worker.
"""

from __future__ import annotations

_HALF = 1 << 32


def joined(low: int, high: int) -> int:
    """The checksum, 0 <= c < 2**64, whose two sums are these modulo 2**32."""
    return low % _HALF | high % _HALF << 32


def added(a: int, b: int) -> int:
    """The checksum of two disjoint sets of elements together, from the checksum of each."""
    return joined(a + b, (a >> 32) + (b >> 32))
