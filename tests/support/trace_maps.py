"""Fragments element by element: slow and obvious, to compare two descriptions of the same bytes. Needs no torch."""

from collections import Counter
from collections.abc import Iterable
from math import prod

import numpy as np

from xfer.trace.fragment import Fragment


def addresses(offset: int, extent: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Byte address of every element of a strided region, row-major, flat."""
    out = np.array([offset], np.int64)
    for n, s in zip(extent, strides):
        out = (out[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
    return out


def places(offset: int, extent, strides, item: int) -> np.ndarray:
    """Byte positions of a region, int64 [elements in row-major order, item]."""
    return addresses(offset, extent, strides)[:, None] + np.arange(item)


def element_map(fragments: Iterable[Fragment]) -> Counter:
    """How often (tensor, index, root, byte, dtype) is said: equal counters mean equal maps, however they are cut."""
    out: Counter = Counter()
    for f in fragments:
        at = addresses(f.offset, f.extent, f.strides)
        steps = np.array(f.steps or (1,) * len(f.extent), np.int64)
        index = np.indices(f.extent).reshape(len(f.extent), prod(f.extent)).T * steps + np.array(f.origin, np.int64)
        out.update((f.tensor, tuple(i), f.root, a, f.dtype) for i, a in zip(index.tolist(), at.tolist()))
    return out
