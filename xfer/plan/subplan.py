"""Sub-plans: all transfers from the trainers to one replica, held compactly and expanded to rows rank by rank.

A sub-plan keeps *streams*, not rows. The piece stream has every piece of every class of destinations, one behind
the other; a share is an interval of it with its source and destination. The shares of one pair, in row order, are
that pair's stream; a message is an interval of that. Every rank holds the same tables and expands only the rows it
takes part in, so both ends of a message derive the same rows, and the digest over the tables covers the rows of all
ranks.

Bytes that several workers of a host need from other hosts may be *common*: one of these workers is their destination, and
the others get copies of the share from it. Rows of copies follow from those of the share: what a worker receives in a
wave it sends on `LAG` waves later.

This module has the tables and their expansion. planner.py makes them; part.py has the part that a rank keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np

from xfer.plan import columns as col
from xfer.plan.explain import PlanSummary, explain
from xfer.plan.intersect import Stack, cut_range
from xfer.plan.program import ITEM, LAG, MAX_DIMS, ROW, Op, Program, row_wire_bytes
from xfer.plan.table import FragmentTable
from xfer.sources import digest_of

CODE = ("mesh", "trace", "plan")
PLANNER = digest_of(*CODE)
"""Digest of the planning code, part of every digest and cache key: each rank expands rows with its own code, and equal
tables do not prove equal code."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Everything from which rows are computed. Byte positions in streams are int64. A class is a set of ranks with equal
    inventories.
    """

    source_class: np.ndarray  # int32 [trainers]
    destination_class: np.ndarray  # int32 [workers]
    fill_class: np.ndarray  # int32 [F], sorted
    fill_rows: np.ndarray  # ROW [F], `dst` not yet set
    atom_origin: np.ndarray  # int64 [A, MAX_DIMS]
    atom_extent: np.ndarray
    atom_signature: np.ndarray  # int32 [A]
    hold_first: np.ndarray  # int64 [A + 1]
    hold_row: np.ndarray  # int64, rows of the source stack
    place: np.ndarray  # int32 [signatures, source classes], place of a class among an atom's holders, -1: holds none
    piece_atom: np.ndarray  # int64 [P]
    piece_want: np.ndarray  # int64 [P], rows of the destination stack
    piece_start: np.ndarray  # int64 [P], position in the piece stream
    share_src: np.ndarray  # int32 [S], joint ranks; sorted by (src, dst, begin)
    share_dst: np.ndarray  # int32 [S]
    share_common: np.ndarray  # int32 [S], number from 1 of a share that its destination hands on, else 0
    share_begin: np.ndarray  # int64 [S], position in the piece stream
    share_end: np.ndarray  # int64 [S]
    copy_share: np.ndarray  # int64 [C], a share that its destination hands on; sorted
    copy_dst: np.ndarray  # int32 [C], to which worker
    copy_begin: np.ndarray  # int64 [C], where the same bytes begin in the piece stream, as that worker wants them
    pair_src: np.ndarray  # int32 [pairs], sorted by (src, dst, common)
    pair_dst: np.ndarray  # int32 [pairs]
    pair_common: np.ndarray  # bool [pairs], whether its shares are handed on: such shares have a stream of their own
    message_first: np.ndarray  # int64 [pairs + 1]
    message_wave: np.ndarray  # int32 [M]
    message_begin: np.ndarray  # int64 [M], position in the pair's stream
    pair_turn: np.ndarray  # int32 [pairs], place in the destination's round of sources


_NAMES = tuple(f.name for f in fields(Tables))


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
    destinations: Stack
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
        mine = (t.share_src == rank) | (t.share_dst == rank)
        copies = np.flatnonzero((t.share_dst[t.copy_share] == rank) | (t.copy_dst == rank))
        via = np.isin(t.share_dst, t.share_dst[t.copy_share[copies]]) & (t.share_common > 0)
        rows, piece = self._expand(np.flatnonzero(mine | via))
        tables = [self._fills(rank), rows[(rows["src"] == rank) | (rows["dst"] == rank)]]
        if len(copies):
            both = _joined([tables[1], self._handed_on(rows, piece, copies)])
            tables[1] = both.take(np.lexsort((both["wire"], both["dst"], both["src"], both["wave"])))
        return Program(rank, self.waves, _joined(tables))

    def rows(self) -> Iterator[np.ndarray]:
        """The rows of all ranks, each exactly once: one table per destination, fills first. Nothing is kept between two
        tables.
        """
        for rank in self.ranks[self.trainers :]:
            rows = self.program(rank).rows
            yield rows[rows["dst"] == rank]

    def handed_on(self, rank: int) -> np.ndarray:
        """The workers that get a copy of a share that trainer `rank` sends to another worker.
        int32 [n, 2]: (`common` of the share's rows, joint rank of the worker)."""
        t = self.tables
        mine = t.share_src[t.copy_share] == rank
        return np.stack([t.share_common[t.copy_share[mine]], t.copy_dst[mine]], axis=1).astype(np.int32)

    def shared(self, rank: int) -> np.ndarray:
        """The boxes of trainer `rank` that go to some worker and that other trainers hold too.

        Rows of dtype ROW. Source and destination are that rank's own storage, so a checksum of either side covers the bits
        that lie there. `dst` is the number of the set of trainers that hold the box, equal on all of them: all members of
        a set have the same elements of a tensor. Empty for a worker.
        """
        t, held = self.tables, self.sources.table
        if rank not in range(self.trainers):
            return np.zeros(0, ROW)
        cls, ranks_of = t.source_class[rank], np.bincount(t.source_class, minlength=t.place.shape[1])
        several = ((t.place >= 0) @ ranks_of > 1) & (t.place[:, cls] >= 0)
        taken = np.zeros(len(t.atom_signature), bool)
        taken[t.piece_atom] = True
        atom = np.flatnonzero(taken & several[t.atom_signature])
        row = t.hold_row[t.hold_first[atom] + t.place[t.atom_signature[atom], cls]]
        out = np.zeros(len(atom), ROW)
        out["op"], out["tensor"], out["src"], out["dst"] = Op.COPY, held.tensor[row], rank, t.atom_signature[atom]
        out["origin"], out["extent"] = t.atom_origin[atom], t.atom_extent[atom]
        inside = ((out["origin"] - held.origin[row]) * held.strides[row]).sum(axis=1)
        for side in ("src", "dst"):
            out[f"{side}_dtype"], out[f"{side}_root"] = held.dtype[row], held.root[row]
            out[f"{side}_offset"], out[f"{side}_strides"] = held.offset[row] + inside, held.strides[row]
        return _settle(out)

    def explain(self) -> str:
        return explain(self.summary, self.digest)

    # ---- expansion

    def _fills(self, rank: int) -> np.ndarray:
        if rank < self.trainers or not len(self.tables.fill_rows):
            return np.zeros(0, ROW)
        rows = self.tables.fill_rows[
            self.tables.fill_class == self.tables.destination_class[rank - self.trainers]
        ].copy()
        rows["dst"] = rank
        return rows

    def _expand(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the given shares, which must be all shares of their pairs, sorted by (wave, src, dst, wire); and the piece of each."""
        if not len(shares):
            return np.zeros(0, ROW), shares
        rows, piece = self._share_rows(shares)
        rows, row = self._pair_streams(rows)
        return _settle(rows), piece[row]

    def _handed_on(self, rows: np.ndarray, piece: np.ndarray, copies: np.ndarray) -> np.ndarray:
        """Rows of the copies `copies` (indices of `copy_share`). rows: the rows of their shares; piece: the piece of each row."""
        t, want = self.tables, self.destinations.table
        by_number = np.argsort(rows["common"], kind="stable")
        number, share = rows["common"][by_number], t.copy_share[copies]
        low, high = (np.searchsorted(number, t.share_common[share], side) for side in ("left", "right"))
        copy, at = spans(low, high)
        row = by_number[at]
        shift = np.searchsorted(t.piece_start, t.copy_begin[copies], "right")
        shift -= np.searchsorted(t.piece_start, t.share_begin[share], "right")
        wanted = t.piece_want[piece[row] + shift[copy]]
        out = rows.take(row)
        for column in ("dtype", "root", "offset", "strides"):
            out[f"src_{column}"] = out[f"dst_{column}"]
        out["src"], out["dst"], out["op"], out["turn"] = out["dst"], t.copy_dst[copies][copy], Op.COPY, 0
        out["common"] *= -1
        out["dst_root"], out["dst_strides"] = want.root[wanted], want.strides[wanted]
        out["dst_offset"] = want.offset[wanted]
        out["dst_offset"] += ((out["origin"] - want.origin[wanted]) * want.strides[wanted]).sum(axis=1)
        out["wave"] += LAG
        return _settle(_in_messages(out.take(np.lexsort((_falling(out), out["dst"], out["src"], out["wave"])))))

    def _share_rows(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pieces in the shares' intervals, cut where an interval begins or ends inside one, and the number of each piece.
        `wave` and `wire` are not yet set.
        """
        t, want, source = self.tables, self.destinations.table, self.sources.table
        begin, end = t.share_begin[shares], t.share_end[shares]
        low, high = np.searchsorted(t.piece_start, begin, "right") - 1, np.searchsorted(t.piece_start, end, "left")
        share, piece = spans(low, high)
        atom, row = t.piece_atom[piece], t.piece_want[piece]
        src = t.share_src[shares][share]
        held = t.hold_row[t.hold_first[atom] + t.place[t.atom_signature[atom], t.source_class[src]]]

        want_origin, atom_origin = want.origin[row], t.atom_origin[atom]
        origin = np.maximum(atom_origin, want_origin)
        extent = np.minimum(atom_origin + t.atom_extent[atom], want_origin + want.extent[row]) - origin
        src_dtype, dst_dtype = source.dtype[held], want.dtype[row]
        item = np.minimum(ITEM[src_dtype], ITEM[dst_dtype])
        nbytes = extent.prod(axis=1) * item

        out = np.zeros(len(piece), ROW)
        out["tensor"], out["src"], out["dst"] = want.tensor[row], src, t.share_dst[shares][share]
        out["common"] = t.share_common[shares][share]
        out["op"] = np.where(src_dtype == dst_dtype, np.uint8(Op.COPY), np.uint8(Op.CAST))
        out["origin"], out["extent"] = origin, extent
        for side, stack, at, dtype, from_ in (
            ("src", source, held, src_dtype, source.origin[held]), ("dst", want, row, dst_dtype, want_origin),
        ):  # fmt: skip
            strides = stack.strides[at]
            out[f"{side}_dtype"], out[f"{side}_root"], out[f"{side}_strides"] = dtype, stack.root[at], strides
            out[f"{side}_offset"] = stack.offset[at] + ((origin - from_) * strides).sum(axis=1)

        lo = np.maximum(0, begin[share] - t.piece_start[piece])
        hi = np.minimum(nbytes, end[share] - t.piece_start[piece])
        split = np.flatnonzero((lo > 0) | (hi < nbytes))
        if not len(split):
            return out, piece
        parts, number = cut_rows(out, split, lo[split] // item[split], hi[split] // item[split])
        whole = np.delete(np.arange(len(out)), split)
        return _joined([out.take(whole), parts]), piece[np.concatenate([whole, split[number]])]

    def _pair_streams(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Puts the rows of each pair in stream order, cuts them at messages, and sets `wave` and `wire`. Sorted by
        (wave, src, dst, wire); and the number of the row that each was cut from."""
        t, nbytes = self.tables, row_wire_bytes(rows)
        # By falling alignment of sizes: every row then starts at a multiple of its own alignment, with no padding.
        # Rows as large as a message go before others, so that the messages in them need no packing.
        align = np.minimum(nbytes & -nbytes, self.align_bytes)
        pair = pair_key(rows["src"], rows["dst"], rows["common"] > 0)
        order = np.lexsort(
            (rows["dst_offset"], rows["dst_root"], rows["tensor"], nbytes < self.message_bytes, -align, pair)
        )
        pair, nbytes = pair[order], nbytes[order]
        end = np.cumsum(nbytes)
        start = end - nbytes
        heads = np.flatnonzero(np.concatenate([[True], pair[1:] != pair[:-1]]))

        pairs = np.searchsorted(pair_key(t.pair_src, t.pair_dst, t.pair_common), pair[heads])
        nth, message = spans(t.message_first[pairs], t.message_first[pairs + 1])
        # Where each message begins, with all pairs one behind the other.
        edge = start[heads][nth] + t.message_begin[message]
        first, last = np.searchsorted(edge, start, "right") - 1, np.searchsorted(edge, end, "left") - 1

        # A row that lies in several messages is one part in each: `cut` says where part k of row `of[k]` begins and ends.
        parts = last - first + 1
        of, into = spans(first, last + 1)
        begin = np.maximum(start[of], edge[into])
        split = np.flatnonzero(parts[of] > 1)
        rows, at, source = rows.take(order), start - edge[first], order
        if len(split):
            stop = np.minimum(end[of[split]], np.append(edge, end[-1])[into[split] + 1])
            item, row = _wire_items(rows)[of[split]], of[split]
            cut, number = cut_rows(rows, row, (begin[split] - start[row]) // item, (stop - start[row]) // item)
            size = row_wire_bytes(cut)
            inside = np.cumsum(size) - size
            inside -= inside[np.flatnonzero(np.diff(number, prepend=-1))][
                number
            ]  # in the part that the row was cut from
            whole = np.flatnonzero(parts == 1)
            rows = _joined([rows.take(whole), cut])
            at = np.concatenate([at[whole], (begin - edge[into])[split][number] + inside])
            source = order[np.concatenate([whole, row[number]])]
            into = np.concatenate([first[whole], into[split][number]])
        wave, common = t.message_wave[message[into]], rows["common"] > 0
        pair = pair_key(rows["src"], rows["dst"], common)
        # A message with common bytes is in the order in which its destination hands them on.
        shared = np.isin(pair | 1, pair_key(t.pair_src, t.pair_dst, t.pair_common)[t.pair_common])
        order = np.lexsort((at, common, _falling(rows) * shared, rows["dst"], rows["src"], wave))
        rows = rows.take(order)
        rows["wave"] = wave[order]
        rows = _in_messages(rows)
        rows["turn"] = t.pair_turn[np.searchsorted(pair_key(t.pair_src, t.pair_dst, t.pair_common), pair[order])]
        return rows, source[order]

    # ---- identity

    def _compute_digest(self) -> str:
        parts: list[bytes | str | np.ndarray] = [f"sub-plan {PLANNER}", self.key]
        parts.append(f"{self.trainers} {self.workers} {self.waves} {self.message_bytes} {self.align_bytes}")
        arrays = list(self._arrays())
        parts.append(" ".join(f"{'rows' if a.dtype.names else a.dtype.str} {a.shape}" for a in arrays))
        return col.digest([*parts, *arrays])

    def _arrays(self) -> Iterator[np.ndarray]:
        """Boxes and strides without the dims that are padding in all of them."""
        t = self.tables
        dims = MAX_DIMS - max(s.table.dims() for s in (self.sources, self.destinations))
        for name in _NAMES:
            column = getattr(t, name)
            yield column[:, dims:] if name in ("atom_origin", "atom_extent") else column
        for stack in (self.sources, self.destinations):
            yield stack.first
            for name in FragmentTable.__slots__:
                column = getattr(stack.table, name)
                yield column if column.ndim == 1 else column[:, dims:]


def cut_rows(rows: np.ndarray, which: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements begin[k]..end[k] of row which[k], in its row-major order, as rows in that order; and the k of each."""
    origin, extent, number = [], [], []
    boxes = zip(rows["origin"][which].tolist(), rows["extent"][which].tolist(), begin.tolist(), end.tolist())
    for k, box in enumerate(boxes):
        for o, e in cut_range(*box):
            origin.append(o)
            extent.append(e)
            number.append(k)
    at = np.array(number, np.int64)
    out = rows.take(which[at])
    wide = np.array(origin, np.int64).reshape(-1, MAX_DIMS)
    shift = wide - out["origin"]
    out["origin"], out["extent"] = wide, np.array(extent, np.int64).reshape(-1, MAX_DIMS)
    for side in ("src", "dst"):
        out[f"{side}_offset"] += (shift * out[f"{side}_strides"]).sum(axis=1)
    return out, at


def _joined(tables: list[np.ndarray]) -> np.ndarray:
    """One table below the other. As plain bytes: numpy compares the fields of a structured dtype with themselves
    for every array it joins."""
    raw = np.dtype((np.void, ROW.itemsize))
    return np.concatenate([t.view(raw) for t in tables]).view(ROW)


def _settle(rows: np.ndarray) -> np.ndarray:
    """Strides of dims of extent 1 are 0, so that equal rows have equal bytes however they were cut."""
    for side in ("src_strides", "dst_strides"):
        rows[side] *= rows["extent"] != 1
    return rows


def _falling(rows: np.ndarray) -> np.ndarray:
    """A sort key of rows: falling alignment of their sizes, so that each row begins at a multiple of its alignment."""
    nbytes = row_wire_bytes(rows)
    return -(nbytes & -nbytes)


def _in_messages(rows: np.ndarray) -> np.ndarray:
    """Sets `wire` of rows that are in order: in each message one lies behind the other."""
    nbytes = row_wire_bytes(rows)
    message = np.stack([rows["wave"], rows["src"], rows["dst"]])
    begin, heads = nbytes.cumsum() - nbytes, np.flatnonzero((np.diff(message, prepend=-1) != 0).any(axis=0))
    rows["wire"] = begin - np.repeat(begin[heads], np.diff(heads, append=len(rows)))
    return rows


def _wire_items(rows: np.ndarray) -> np.ndarray:
    return np.minimum(ITEM[rows["src_dtype"]], ITEM[rows["dst_dtype"]])


def pair_key(src: np.ndarray, dst: np.ndarray, common: np.ndarray) -> np.ndarray:
    """One int64 per pair of joint ranks, which sorts by (src, dst, common)."""
    return src.astype(np.int64) << 32 | dst.astype(np.int64) << 1 | common


def spans(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers low[i] <= n < high[i] of all spans, one span behind the other: i and n of each."""
    count = high - low
    span = np.repeat(np.arange(len(low)), count)
    return span, np.arange(len(span)) - np.repeat(np.cumsum(count) - count - low, count)
