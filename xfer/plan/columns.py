"""Columns on the wire and on disk: numpy arrays of a known dtype and width as bytes, with every length checked on the
way in.

This module codes arrays and checks limits. inventory.py and subplan.py know what the columns mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from xfer.errors import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

MAX_BYTES = 1 << 30
"""Largest encoded inventory or plan that is looked at. (A DeepSeek-V3 inventory of one rank is below 1 MiB.)"""

MAX_VALUE = 1 << 48
"""Bound on every size, offset, stride and element count read from outside, so that no later int64 arithmetic can
overflow.
"""


def pack(array: np.ndarray, dtype: DTypeLike) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def unpack(raw: bytes | memoryview, dtype: DTypeLike, rows: int, width: int = 0, *, what: str = "column") -> np.ndarray:
    """A read-only array of `rows` entries (of `width` numbers each when width > 0). ProtocolError when the length is
    another.

    Nothing is allocated: the array is a view of `raw`.
    """
    kind = np.dtype(dtype)
    expected = rows * max(width, 1) * kind.itemsize
    if rows < 0 or len(raw) != expected:
        raise ProtocolError(f"{what}: {len(raw)} bytes where {rows} rows of {dtype} x {max(width, 1)} take {expected}")
    flat = np.frombuffer(raw, kind)
    return flat.reshape(rows, width) if width else flat


def in_range(array: np.ndarray, low: int, high: int, what: str) -> None:
    """ProtocolError unless low <= every value < high."""
    if array.size and (int(array.min()) < low or int(array.max()) >= high):
        raise ProtocolError(
            f"{what}: values from {int(array.min())} to {int(array.max())} where {low} <= value < {high} holds"
        )


def runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First index and length of each run of equal neighbours; int64 [runs] each."""
    n = len(values)
    if not n:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    edge = np.empty(n + 1, bool)
    edge[0] = edge[n] = True
    np.not_equal(values[1:], values[:-1], out=edge[1:n])
    at = edge.nonzero()[0]
    return at[:-1], at[1:] - at[:-1]


def size_checked(data: bytes | memoryview, what: str) -> bytes | memoryview:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"{what}: {type(data).__name__} where bytes were expected")
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"{what}: {len(data)} bytes, more than {MAX_BYTES}")
    return data if isinstance(data, memoryview) and data.readonly else bytes(data)


def digest(parts: Iterable[bytes | memoryview | str | np.ndarray]) -> str:
    """blake2b-128 over the parts, each with its length in front: moving a byte from one part to the next changes the
    digest.
    """
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, str):
            part = part.encode()
        elif isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).data  # hashed where it lies
        h.update((part.nbytes if isinstance(part, memoryview) else len(part)).to_bytes(8, "little"))
        h.update(part)
    return h.hexdigest()
