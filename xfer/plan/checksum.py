"""Checksums as numbers: two sums modulo 2**32, in the lower and the upper half of 64 bits. Numbers are ints, or arrays of uint64 with
a checksum per element.

Every place that adds checksums uses `added`: sums over rows (kernels/checksum.py), messages of the packed route
(packed/buffer.py), and the coordinator, which adds what all trainers sent to a worker.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

_HALF = 1 << 32

Number = TypeVar("Number", int, np.ndarray)


def joined(low: Number, high: Number) -> Number:
    """The checksum, 0 <= c < 2**64, whose two sums are these modulo 2**32."""
    return low % _HALF | high % _HALF << 32


def added(a: Number, b: Number) -> Number:
    """The checksum of two disjoint sets of elements together, from the checksum of each."""
    return joined(a + b, (a >> 32) + (b >> 32))
