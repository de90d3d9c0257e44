"""Programs: one rank's work in a refit, as flat tables. Relocatable: they contain no address, process or object.

A program is the unit that is hashed, cached, sent, simulated and run. Its rows say *what* moves (checkpoint tensor
and box), *from where to where* (rank, storage number, byte offset, byte strides) and *when* (wave, byte offset in
the message). A rank keeps a binding table, storage number -> flat byte tensor, beside it; rebinding never touches
the program.

This module has the columns of the table, and its view by message. Not here: the choice of rows (balance.py), the moving
of bytes (transport/, kernels/).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

MAX_DIMS = 6
"""Most dims of a row, with the experts' dim. The planner refuses tensors of more dims (`Unsupported`)."""

DTYPES: tuple[str, ...] = (
    "bfloat16", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool",
    "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "float8_e8m0fnu",
)  # fmt: skip
"""Wire codes of dtypes: the index in this tuple. Append only: codes are in digests and caches."""

DTYPE_CODE = {name: i for i, name in enumerate(DTYPES)}
ITEMSIZE = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e8m0fnu": 1,
}  # fmt: skip
ITEM = np.array([ITEMSIZE[n] for n in DTYPES], np.int64)
"""Bytes of one element by dtype code."""


LAG = 2
"""Number of waves after which a worker sends on the common bytes that it received. While it sends, it still receives the wave before."""


class Op(IntEnum):
    COPY = 0  # same dtype on both sides
    CAST = 1  # the value is converted; the wire carries the narrower of the two dtypes
    FILL = 2  # no source: `fill` holds the element's bits


_D = MAX_DIMS
ROW = np.dtype(
    [
        ("tensor", "<i4"),  # index in the catalog; -1 for fills
        ("op", "u1"),
        ("src_dtype", "u1"),
        ("dst_dtype", "u1"),
        ("route", "u1"),  # 0; ranks choose the route of a row when they open routes (transport/routes.py)
        ("src", "<i4"),  # joint rank of the source; -1 for fills
        ("src_root", "<i4"),  # index in the source's inventory roots
        ("dst", "<i4"),
        ("dst_root", "<i4"),
        ("wave", "<i4"),
        ("turn", "<i4"),  # place of `src` in the destination's round of sources; destinations begin with different ones
        # Number > 0 of bytes that the destination hands on to workers of its host; < 0: of a copy of them; else 0.
        ("common", "<i8"),
        ("wire", "<i8"),  # byte offset in message (src, dst, wave)
        ("src_offset", "<i8"),  # bytes
        ("dst_offset", "<i8"),
        ("fill", "<u8"),  # little-endian bits of one element, zero-extended
        ("origin", "<i8", (_D,)),  # box of the checkpoint tensor, padded in front with origin 0 / extent 1
        ("extent", "<i8", (_D,)),
        ("src_strides", "<i8", (_D,)),  # bytes per dim of the box
        ("dst_strides", "<i8", (_D,)),
    ]
)


def wire_dtype(src: str, dst: str) -> str:
    """The dtype on the wire: the narrower of the two, so that a narrowing cast halves the bytes and a widening one
    adds none.

    Equal sizes (float16 <-> bfloat16) travel as the source's and are converted by the destination.
    """
    return dst if ITEMSIZE[dst] < ITEMSIZE[src] else src


@dataclass(frozen=True, slots=True)
class WaveMessage:
    """All rows of one (source, destination, wave): one contiguous run of `nbytes` wire bytes, rows in wire order."""

    wave: int
    src: int
    dst: int
    nbytes: int
    rows: np.ndarray  # of dtype ROW; a view, not a copy


@dataclass(frozen=True, slots=True)
class Program:
    """The rows that one joint rank takes part in, sorted by (wave, src, dst, wire); fills first (wave 0, src -1).

    `waves` is the same on every rank of the sub-plan: ranks step through wave numbers together even where they have
    no row.
    """

    rank: int
    waves: int
    rows: np.ndarray

    def sends(self) -> Iterator[WaveMessage]:
        return _messages(self.rows[(self.rows["src"] == self.rank) & (self.rows["dst"] != self.rank)])

    def receives(self) -> Iterator[WaveMessage]:
        return _messages(
            self.rows[(self.rows["dst"] == self.rank) & (self.rows["src"] != self.rank) & (self.rows["op"] != Op.FILL)]
        )

    def local(self) -> np.ndarray:
        """Rows whose source and destination are this same rank (a colocated or one-process world)."""
        return self.rows[(self.rows["src"] == self.rank) & (self.rows["dst"] == self.rank)]

    def fills(self) -> np.ndarray:
        return self.rows[(self.rows["op"] == Op.FILL) & (self.rows["dst"] == self.rank)]

    def digest(self) -> str:
        return hashlib.blake2b(np.ascontiguousarray(self.rows).tobytes(), digest_size=16).hexdigest()


def row_wire_bytes(rows: np.ndarray) -> np.ndarray:
    """Wire bytes of each row (int64 array); zero for fills."""
    item = np.minimum(ITEM[rows["src_dtype"]], ITEM[rows["dst_dtype"]])
    return np.where(rows["op"] == Op.FILL, 0, rows["extent"].prod(axis=1) * item)


def in_turn(rows: np.ndarray, sources: set[int]) -> list[int]:
    """The sources in the order in which the plan lets the destination of these rows turn to them."""
    turn = dict(zip(rows["src"].tolist(), rows["turn"].tolist()))
    return sorted(sources, key=lambda a: (turn.get(a, 0), a))


def _messages(rows: np.ndarray) -> Iterator[WaveMessage]:
    if not len(rows):
        return
    key = np.stack([rows["wave"], rows["src"], rows["dst"]], axis=1)
    cuts = np.flatnonzero((np.diff(key, axis=0) != 0).any(axis=1)) + 1
    nbytes = row_wire_bytes(rows)
    for lo, hi in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)]):
        part = rows[lo:hi]
        end = int((part["wire"] + nbytes[lo:hi]).max())
        yield WaveMessage(int(part["wave"][0]), int(part["src"][0]), int(part["dst"][0]), end, part)
