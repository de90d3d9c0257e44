"""Sub-plans: all transfers from the trainers to one replica, held compactly and expanded to rows rank by rank.

A sub-plan keeps *streams*, not rows. The piece stream has every piece of every class of takers, one behind the other;
a share is an interval of it with its sender and taker. The shares of one pair, in row order, are that pair's stream;
a message is an interval of that. Every rank holds the same tables and expands only the rows it takes part in, so both
ends of a message derive the same rows, and the digest over the tables covers the rows of all ranks.

Here live the tables and their expansion. How they come about is planner.py's, what a rank keeps of them part.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np

from xfer.plan import columns as col
from xfer.plan.explain import PlanSummary, explain
from xfer.plan.intersect import Stack, cut_box
from xfer.plan.program import ITEM, MAX_DIMS, ROW, Op, Program
from xfer.plan.table import FragmentTable

PLANNER = 2
"""Version of the planner: raised whenever the same inputs may give other rows. In every digest and cache key."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Everything that rows follow from. Byte positions in streams are int64; classes are of ranks with equal
    inventories.
    """

    source_class: np.ndarray  # int32 [trainers]
    source_first: np.ndarray  # int64 [source classes + 1], rows of the source stack
    taker_class: np.ndarray  # int32 [workers]
    taker_first: np.ndarray  # int64 [taker classes + 1]
    fill_class: np.ndarray  # int32 [F], sorted
    fill_rows: np.ndarray  # ROW [F], `dst` not yet set
    atom_origin: np.ndarray  # int64 [A, MAX_DIMS]
    atom_extent: np.ndarray
    atom_signature: np.ndarray  # int32 [A]
    hold_first: np.ndarray  # int64 [A + 1]
    hold_row: np.ndarray  # int64, rows of the source stack
    place: np.ndarray  # int32 [signatures, source classes], place of a class among an atom's holders, -1: holds none
    piece_atom: np.ndarray  # int64 [P]
    piece_want: np.ndarray  # int64 [P], rows of the taker stack
    piece_start: np.ndarray  # int64 [P], position in the piece stream
    share_src: np.ndarray  # int32 [S], joint ranks; sorted by (src, dst, begin)
    share_dst: np.ndarray  # int32 [S]
    share_begin: np.ndarray  # int64 [S], position in the piece stream
    share_end: np.ndarray  # int64 [S]
    pair_src: np.ndarray  # int32 [pairs], sorted by (src, dst)
    pair_dst: np.ndarray  # int32 [pairs]
    message_first: np.ndarray  # int64 [pairs + 1]
    message_wave: np.ndarray  # int32 [M]
    message_begin: np.ndarray  # int64 [M], position in the pair's stream


@dataclass(frozen=True, slots=True, eq=False)
class SubPlan:
    """`program(rank)` for any joint rank. `key` identifies the inputs, `digest` the plan; both are the same on every
    rank.
    """

    key: str
    trainers: int
    workers: int
    waves: int
    message_bytes: int
    align_bytes: int
    sources: Stack
    takers: Stack
    tables: Tables
    summary: PlanSummary
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self._compute_digest())

    @property
    def ranks(self) -> range:
        return range(self.trainers + self.workers)

    def program(self, rank: int) -> Program:
        """Rows of one joint rank. ValueError for a rank that is not in the plan."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank}: this plan has joint ranks 0..{len(self.ranks) - 1}")
        t = self.tables
        rows = self._expand(np.flatnonzero((t.share_src == rank) | (t.share_dst == rank)))
        return Program(rank, self.waves, np.concatenate([self._fills(rank), rows]))

    def rows(self) -> Iterator[np.ndarray]:
        """The rows of all ranks, each exactly once: one table per taker, fills first. Nothing is kept between two
        tables.
        """
        for rank in self.ranks[self.trainers :]:
            yield np.concatenate([self._fills(rank), self._expand(np.flatnonzero(self.tables.share_dst == rank))])

    def explain(self) -> str:
        return explain(self.summary, self.digest)

    # ---- expansion

    def _fills(self, rank: int) -> np.ndarray:
        if rank < self.trainers:
            return np.zeros(0, ROW)
        rows = self.tables.fill_rows[self.tables.fill_class == self.tables.taker_class[rank - self.trainers]].copy()
        rows["dst"] = rank
        return rows

    def _expand(self, shares: np.ndarray) -> np.ndarray:
        """Rows of the given shares, which must be all shares of their pairs; sorted by (wave, src, dst, wire)."""
        if not len(shares):
            return np.zeros(0, ROW)
        rows = self._pair_streams(self._share_rows(shares))
        return rows[np.lexsort((rows["wire"], rows["dst"], rows["src"], rows["wave"]))]

    def _share_rows(self, shares: np.ndarray) -> np.ndarray:
        """Pieces in the shares' intervals, cut where an interval begins or ends inside one. `wave`, `wire` not yet
        set.
        """
        t, want = self.tables, self.takers.table
        begin, end = t.share_begin[shares], t.share_end[shares]
        low, high = np.searchsorted(t.piece_start, begin, "right") - 1, np.searchsorted(t.piece_start, end, "left")
        count = high - low
        share = np.repeat(np.arange(len(shares)), count)
        piece = np.arange(len(share)) - np.repeat(np.cumsum(count) - count - low, count)
        atom, row = t.piece_atom[piece], t.piece_want[piece]

        out = np.zeros(len(piece), ROW)
        origin = np.maximum(t.atom_origin[atom], want.origin[row])
        out["origin"], out["extent"] = (
            origin,
            np.minimum(t.atom_origin[atom] + t.atom_extent[atom], want.origin[row] + want.extent[row]) - origin,
        )
        out["src"], out["dst"] = t.share_src[shares][share], t.share_dst[shares][share]
        held = t.hold_row[t.hold_first[atom] + t.place[t.atom_signature[atom], t.source_class[out["src"]]]]
        out["tensor"] = want.tensor[row]
        for side, stack, at in (("src", self.sources.table, held), ("dst", want, row)):
            out[f"{side}_dtype"], out[f"{side}_root"] = stack.dtype[at], stack.root[at]
            out[f"{side}_strides"] = stack.strides[at]
            out[f"{side}_offset"] = stack.offset[at] + ((origin - stack.origin[at]) * stack.strides[at]).sum(axis=1)
        out["op"] = np.where(out["src_dtype"] == out["dst_dtype"], Op.COPY, Op.CAST)

        item, nbytes = _wire_items(out), _wire_bytes(out)
        lo = np.maximum(0, begin[share] - t.piece_start[piece])
        hi = np.minimum(nbytes, end[share] - t.piece_start[piece])
        split = np.flatnonzero((lo > 0) | (hi < nbytes))
        parts = [cut_row(out[i], int(lo[i] // item[i]), int(hi[i] // item[i])) for i in split]
        return _settle(_together(out, split, parts))

    def _pair_streams(self, rows: np.ndarray) -> np.ndarray:
        """Puts the rows of each pair in stream order, cuts them at messages, and sets `wave` and `wire`."""
        t = self.tables
        nbytes = _wire_bytes(rows)
        # By falling alignment of sizes: every row then starts at a multiple of its own alignment, with no padding.
        # Rows as large as a message go before others, so that the messages in them need no packing.
        align = np.minimum(nbytes & -nbytes, self.align_bytes)
        order = np.lexsort(
            (
                rows["dst_offset"],
                rows["dst_root"],
                rows["tensor"],
                nbytes < self.message_bytes,
                -align,
                rows["dst"],
                rows["src"],
            )
        )
        rows, nbytes = rows[order], nbytes[order]
        start = np.cumsum(nbytes) - nbytes
        fresh = np.concatenate([[True], (rows["src"][1:] != rows["src"][:-1]) | (rows["dst"][1:] != rows["dst"][:-1])])
        heads = np.flatnonzero(fresh)

        pairs = np.searchsorted(_pair_key(t.pair_src, t.pair_dst), _pair_key(rows["src"][heads], rows["dst"][heads]))
        count = t.message_first[pairs + 1] - t.message_first[pairs]
        nth = np.repeat(np.arange(len(pairs)), count)
        message = np.arange(len(nth)) - np.repeat(np.cumsum(count) - count - t.message_first[pairs], count)
        edge = (
            start[heads][nth] + t.message_begin[message]
        )  # where each message begins, with all pairs one behind the other
        first, last = np.searchsorted(edge, start, "right") - 1, np.searchsorted(edge, start + nbytes, "left") - 1

        item, parts, at = _wire_items(rows), [], []
        split = np.flatnonzero(first != last)
        for i in split:
            cuts = [int(start[i]), *edge[first[i] + 1 : last[i] + 1].tolist(), int(start[i] + nbytes[i])]
            for m, lo, hi in zip(range(first[i], last[i] + 1), cuts, cuts[1:]):
                part = cut_row(rows[i], (lo - cuts[0]) // int(item[i]), (hi - cuts[0]) // int(item[i]))
                size = _wire_bytes(part)
                part["wire"] = lo - edge[m] + np.cumsum(size) - size
                parts.append(part)
                at += [m] * len(part)
        rows["wire"] = start - edge[first]
        out = _together(rows, split, parts)
        out["wave"] = t.message_wave[message[np.concatenate([np.delete(first, split), np.array(at, np.int64)])]]
        return _settle(out)

    # ---- identity

    def _compute_digest(self) -> str:
        parts: list[bytes | str | np.ndarray] = [f"sub-plan {PLANNER}", self.key]
        parts.append(f"{self.trainers} {self.workers} {self.waves} {self.message_bytes} {self.align_bytes}")
        for _, array in self._arrays():
            parts += [f"{array.dtype.str} {array.shape}" if array.dtype != ROW else f"rows {array.shape}", array]
        return col.digest(parts)

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for f in fields(Tables):
            yield f.name, getattr(self.tables, f.name)
        for stack in (self.sources, self.takers):
            for name in FragmentTable.__slots__:
                yield name, getattr(stack.table, name)


def cut_row(row: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Elements begin..end of a row, in its row-major order, as rows in that order."""
    boxes = cut_box(row["origin"].tolist(), row["extent"].tolist(), begin, end)
    out = np.repeat(row, len(boxes))
    out["origin"], out["extent"] = (
        np.array([getattr(b, n) for b in boxes], np.int64).reshape(-1, MAX_DIMS) for n in ("origin", "extent")
    )
    shift = out["origin"] - row["origin"]
    for side in ("src", "dst"):
        out[f"{side}_offset"] += (shift * row[f"{side}_strides"]).sum(axis=1)
    return out


def _together(rows: np.ndarray, without: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """`rows` but those numbered in `without`, then all parts. As plain bytes: numpy compares the fields of a structured
    dtype with themselves for every array it joins."""
    raw = np.dtype((np.void, ROW.itemsize))
    return np.concatenate([np.delete(rows, without).view(raw), *(p.view(raw) for p in parts)]).view(ROW)


def _settle(rows: np.ndarray) -> np.ndarray:
    """Strides of dims of extent 1 are 0, so that equal rows have equal bytes however they were cut."""
    for side in ("src_strides", "dst_strides"):
        rows[side] = np.where(rows["extent"] == 1, 0, rows[side])
    return rows


def _wire_items(rows: np.ndarray) -> np.ndarray:
    return np.minimum(ITEM[rows["src_dtype"]], ITEM[rows["dst_dtype"]])


def _wire_bytes(rows: np.ndarray) -> np.ndarray:
    return rows["extent"].prod(axis=1) * _wire_items(rows)


def _pair_key(src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    return src.astype(np.int64) << 32 | dst
