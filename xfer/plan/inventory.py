"""Inventories: everything that the planner knows of one rank, that is, the storage and the place of each of its boxes
of checkpoint tensors.

This module has the inventory around the table of fragments, its digest and its wire form. It contains no address and no
plan: a rank publishes it once, and ranks with equal digests (data-parallel replicas) publish one for all of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from math import prod
from operator import ge
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from xfer.errors import LayoutError, ProtocolError, Unsupported
from xfer.plan import columns as col
from xfer.plan.program import DTYPE_CODE, DTYPES, ITEM, ITEMSIZE, MAX_DIMS, ROW, Op
from xfer.plan.table import FragmentTable
from xfer.trace.fragment import Fill, Fragment, Root, Span

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

VERSION = 3
_DIGEST = re.compile("[0-9a-f]{32}")
SCRATCH = "scratch/"
"""Prefix of the names of roots that hold inputs of recipes. They are ordinary roots, but no part of the live model."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes `start <= b < stop` of a storage that a refit leaves as they are, and the reason."""

    root: str
    start: int
    stop: int
    reason: str


@dataclass(slots=True)
class _Memo:
    """Cached results of an inventory's methods; shared by equal ranks."""

    content: bytes = b""
    digest: str = ""
    numbers: dict[str, int] = field(default_factory=dict)
    sizes: np.ndarray | None = None
    spans: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """All that one rank holds (trainer) or wants and has (engine).

    `rank` counts within the side. `rank` and `host` are not in the digest. `roots` are sorted by name: a row's root
    number, and the place in the binding table, is the position in this tuple.
    """

    catalog: str  # digest of the catalog whose numbers are used
    side: str  # "trainer" | "engine"
    rank: int
    host: str
    roots: tuple[Root, ...]
    table: FragmentTable
    fills: tuple[Fill, ...] = ()
    footprint: tuple[Span, ...] = ()  # one span per live parameter or buffer; spans may overlap where two share bytes
    kept: tuple[Kept, ...] = ()
    staged: tuple[Span, ...] = ()  # bytes that recipes write after the wire
    reads: tuple[
        tuple[int, int], ...
    ] = ()  # runs (first, end) of the catalog's checkpoint tensors that the loader took
    recipes: str = ""  # digest of what this rank computes before the wire (trainer) or after it (engine); "": nothing
    _memo: _Memo = field(default_factory=_Memo, init=False, repr=False)

    @property
    def who(self) -> str:
        return f"trainer {self.rank}" if self.side == "trainer" else f"engine worker {self.rank}"

    def content(self) -> bytes:
        """Everything that affects a plan, in its one encoding. Equal for equal ranks."""
        if not self._memo.content:
            self._memo.content = _encode_content(self)
        return self._memo.content

    def digest(self) -> str:
        if not self._memo.digest:
            self._memo.digest = col.digest([self.content()])
        return self._memo.digest

    def at(self, rank: int, host: str = "") -> Inventory:
        """The same layout as that of another rank of this side."""
        out = replace(self, rank=rank, host=host)
        object.__setattr__(out, "_memo", self._memo)
        return out

    def root_numbers(self) -> dict[str, int]:
        """Name of a root -> its place in `roots`."""
        if not self._memo.numbers:
            self._memo.numbers = {r.name: i for i, r in enumerate(self.roots)}
        return self._memo.numbers

    def root_sizes(self) -> np.ndarray:
        """Bytes of each root, int64 [roots]."""
        if self._memo.sizes is None:
            self._memo.sizes = np.array([r.nbytes for r in self.roots], np.int64)
        return self._memo.sizes

    def spans(self, what: Literal["footprint", "kept", "staged"]) -> np.ndarray:
        """Root number, first byte and byte after the last of each, int64 [3, N]. KeyError for a storage that is
        none of the roots."""
        if what not in self._memo.spans:
            number = self.root_numbers()
            rows = [(number[s.root], s.start, s.stop) for s in getattr(self, what)]
            self._memo.spans[what] = np.array(rows, np.int64).reshape(-1, 3).T
        return self._memo.spans[what]

    def scratch_roots(self) -> tuple[int, int]:
        """The roots of scratch: roots[first:end], since roots are sorted by name."""
        end = SCRATCH[:-1] + chr(ord(SCRATCH[-1]) + 1)
        first, stop = (bisect_left(self.roots, name, key=lambda r: r.name) for name in (SCRATCH, end))
        return first, stop

    def as_source(self) -> Inventory:
        """The part of this worker's inventory that another replica may read, as a trainer's inventory of the same rank. Inputs of
        recipes are left out, since they may have changed after a refit wrote them."""
        first, end = self.scratch_roots()
        live = np.flatnonzero((self.table.root < first) | (self.table.root >= end))
        return Inventory(self.catalog, "trainer", self.rank, self.host, self.roots, self.table.take(live))

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(_Envelope(self.rank, self.host, self.content()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Inventory:
        """ProtocolError for anything that `to_bytes` cannot have written. Costs at most a small multiple of
        len(data).
        """
        try:
            env = _envelope.decode(col.size_checked(data, "inventory"))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise ProtocolError(f"inventory: {e}") from e
        return _decode(env)

    @classmethod
    def from_content(cls, content: bytes) -> Inventory:
        """Decode `content` as the inventory of rank 0. ProtocolError as `from_bytes`."""
        return _decode(_Envelope(0, "", bytes(col.size_checked(content, "inventory"))))


def footprint_rows(inventory: Inventory) -> np.ndarray:
    """The fragments of a rank in the columns of a program: one row of dtype ROW per fragment, with its box and its
    place on the destination's side; the source's side is empty. Checksums of a worker enumerate these and not its
    program, so that they see bytes that no plan covers.
    """
    t = inventory.table
    rows = np.zeros(len(t), ROW)
    rows["op"] = Op.COPY
    rows["tensor"], rows["dst_root"], rows["dst_offset"] = t.tensor, t.root, t.offset
    rows["src_dtype"] = rows["dst_dtype"] = t.dtype
    rows["origin"], rows["extent"], rows["dst_strides"] = t.origin, t.extent, t.strides
    rows["src"], rows["dst"] = -1, inventory.rank
    return rows


def trainer_inventory(
    catalog: Catalog,
    *,
    rank: int,
    host: str,
    roots: Iterable[Root],
    fragments: Iterable[Fragment],
    recipes: Iterable[str] = (),
) -> Inventory:
    """A trainer's inventory. `fragments` have checkpoint names; they are grouped and merged here. `recipes`: digests of the
    recipes that fill the scratch among `roots`, in the order in which they run. Raises LayoutError and Unsupported as
    FragmentTable.build.
    """
    ordered = _ordered(roots)
    table = FragmentTable.build(catalog.lift(tuple(fragments)), catalog, ordered)
    return Inventory(catalog.digest(), "trainer", rank, host, ordered, table, recipes=_one_digest(recipes))


def engine_inventory(
    catalog: Catalog,
    *,
    rank: int,
    host: str,
    roots: Iterable[Root],
    fragments: Iterable[Fragment],
    fills: Iterable[Fill] = (),
    footprint: Iterable[Span],
    kept: Iterable[Kept] = (),
    staged: Iterable[Span] = (),
    reads: Iterable[str] = (),
    recipes: Iterable[str] = (),
) -> Inventory:
    """A worker's inventory; see trainer_inventory. `recipes`: digests of the recipes that run on scratch after the wire.
    `footprint`: one span per live parameter and buffer, with all its bytes. `reads`: names of checkpoint tensors, or of
    groups of them, that the loader read; names that no catalog has are ignored.
    """
    ordered = _ordered(roots)
    table = FragmentTable.build(catalog.lift(tuple(fragments)), catalog, ordered)
    inv = Inventory(
        catalog.digest(), "engine", rank, host, ordered, table,
        tuple(sorted((f for f in fills if all(f.extent)), key=_fill_key)),
        tuple(sorted(footprint, key=_span_key)), tuple(sorted(kept, key=lambda k: (*_span_key(k), k.reason))),
        tuple(sorted(staged, key=_span_key)), _runs(catalog, reads), _one_digest(recipes),
    )  # fmt: skip
    odd = {
        f"{f.root}: fill of dtype {f.dtype} with {len(f.extent)} dims"
        for f in inv.fills
        if f.dtype not in DTYPE_CODE or len(f.extent) > MAX_DIMS
    }
    if odd:
        raise Unsupported("fills that cannot be planned", sorted(odd))
    bad = list(_misfits(inv))
    if bad:
        raise LayoutError("fragments, fills or spans do not fit their storage", bad)
    return inv


# ---- wire form


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    rank: int
    host: str
    content: bytes


class _Spans(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    count: int
    root: bytes
    start: bytes
    stop: bytes


class _FillWire(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    root: int
    offset: int
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    bits: bytes


class _Content(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    version: int
    catalog: str
    side: str
    root_names: list[str]
    root_bytes: bytes
    count: int
    dims: int  # columns of box and strides that are sent; the ones in front are all padding
    columns: Annotated[tuple[bytes, ...], msgspec.Meta(min_length=7, max_length=7)]  # as _WIRE says
    fills: list[_FillWire]
    footprint: _Spans
    kept: _Spans
    reasons: list[str]
    staged: _Spans
    reads: bytes  # int32 pairs
    recipes: str


# Made here, once: msgspec describes a class when it is first decoded, and two threads that do so at once crash.
_envelope, _content = msgspec.msgpack.Decoder(_Envelope), msgspec.msgpack.Decoder(_Content)

_WIRE = ("<i4", "<i4", "<u1", "<i8", "<i8", "<i8", "<i8")


def _encode_content(inv: Inventory) -> bytes:
    t, number = inv.table, inv.root_numbers()
    dims = t.dims()
    arrays = (t.tensor, t.root, t.dtype, t.offset, *(c[:, MAX_DIMS - dims :] for c in (t.origin, t.extent, t.strides)))

    def spans(what: Literal["footprint", "kept", "staged"]) -> _Spans:
        columns = inv.spans(what)
        return _Spans(columns.shape[1], *(col.pack(c, d) for c, d in zip(columns, ("<i4", "<i8", "<i8"))))

    fills = [
        _FillWire(number[f.root], f.offset, tuple(f.extent), tuple(f.strides), DTYPE_CODE[f.dtype], f.bits)
        for f in inv.fills
    ]
    return msgspec.msgpack.encode(
        _Content(
            VERSION, inv.catalog, inv.side, [r.name for r in inv.roots], col.pack(inv.root_sizes(), "<i8"), len(t), dims,
            tuple(col.pack(a, d) for a, d in zip(arrays, _WIRE)), fills, spans("footprint"), spans("kept"),
            [k.reason for k in inv.kept], spans("staged"),
            col.pack(np.array(inv.reads, np.int64).reshape(-1), "<i4"), inv.recipes,
        )
    )  # fmt: skip


def _decode(env: _Envelope) -> Inventory:
    try:
        body = _content.decode(env.content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"inventory: {e}") from e
    if body.version != VERSION:
        raise ProtocolError(f"inventory: version {body.version}, this side speaks {VERSION}")
    if body.side not in ("trainer", "engine"):
        raise ProtocolError(f"inventory: side {body.side!r}")
    if not 0 <= env.rank < 1 << 24 or not 0 <= body.dims <= MAX_DIMS:
        raise ProtocolError(f"inventory: rank {env.rank}, {body.dims} dims")
    if body.recipes and not _DIGEST.fullmatch(body.recipes):
        raise ProtocolError("inventory: a digest of recipes that is none")
    if any(map(ge, body.root_names, body.root_names[1:])):
        raise ProtocolError("inventory: root names are not sorted and distinct")
    size = col.unpack(body.root_bytes, "<i8", len(body.root_names), what="root sizes")
    col.in_range(size, 0, col.MAX_VALUE, "root sizes")
    roots = tuple(map(Root, body.root_names, size.tolist()))
    table = _decode_table(body, size)
    spans = [_decode_spans(s, len(roots)) for s in (body.footprint, body.kept, body.staged)]
    footprint, kept, staged = (
        zip(map(body.root_names.__getitem__, root), start, stop) for root, start, stop in (s.tolist() for s in spans)
    )
    if len(body.reasons) != spans[1].shape[1]:
        raise ProtocolError(f"inventory: {len(body.reasons)} reasons for {spans[1].shape[1]} kept spans")
    fills = tuple(_decode_fill(f, roots) for f in body.fills)
    inv = Inventory(
        body.catalog, body.side, env.rank, env.host, roots, table, fills, tuple(starmap(Span, footprint)),
        tuple(Kept(*s, r) for s, r in zip(kept, body.reasons)), tuple(starmap(Span, staged)), _decode_runs(body.reads),
        body.recipes,
    )  # fmt: skip
    inv._memo.spans.update(zip(("footprint", "kept", "staged"), spans))
    inv._memo.sizes = size
    bad = list(_misfits(inv))
    if bad:
        raise ProtocolError("inventory: fragments, fills or spans do not fit their storage", bad)
    # One encoding per content, or equal ranks would not have equal digests. Columns are as long as they must be, so that
    # what is left to be written in two ways are msgpack's numbers and columns of nothing but padding.
    if table.dims() != body.dims or msgspec.msgpack.encode(body) != env.content:
        raise ProtocolError("inventory: not in canonical form")
    inv._memo.content = env.content
    return inv


def _decode_table(body: _Content, size: np.ndarray) -> FragmentTable:
    n, names = body.count, ("tensor", "root", "dtype", "offset", "origin", "extent", "strides")
    width = (0, 0, 0, 0, body.dims, body.dims, body.dims)
    if body.dims == 0 and any(body.columns[4:]):
        raise ProtocolError("inventory: box columns where none were announced")
    raw = [
        np.zeros((n, 0), np.int64)
        if i > 3 and w == 0 and 0 <= n <= len(body.columns[0])
        else col.unpack(b, d, n, w, what=name)
        for i, (b, d, w, name) in enumerate(zip(body.columns, _WIRE, width, names))
    ]
    for array, least, limit, name in zip(
        raw, (0, 0, 0, -col.MAX_VALUE, 0, 1, -col.MAX_VALUE),
        (2**31, len(size), len(DTYPES), col.MAX_VALUE, col.MAX_VALUE, col.MAX_VALUE, col.MAX_VALUE), names,
    ):  # fmt: skip
        col.in_range(array, least, limit, name)
    extent, strides = raw[5:]
    # In floats first: hostile extents and strides must not wrap around int64 and come out as something harmless.
    reach = ((extent - 1.0) * np.abs(strides.astype(float))).sum(axis=1)
    if (extent.astype(float).prod(axis=1) >= col.MAX_VALUE).any() or (reach >= col.MAX_VALUE).any():
        raise ProtocolError("inventory: a fragment has more elements or a longer reach than any storage")
    if ((extent == 1) & (strides != 0)).any():
        raise ProtocolError("inventory: a dim of extent 1 has a stride")
    boxes = [np.full((n, MAX_DIMS), v, np.int64) for v in (0, 1, 0)]
    for wide, narrow in zip(boxes, raw[4:]):
        wide[:, MAX_DIMS - body.dims :] = narrow
    table = FragmentTable(raw[0], raw[1], raw[2], raw[3], *boxes)
    low, high = table.bounds()
    if len(table) and ((low < 0) | (high > size[table.root])).any():
        raise ProtocolError("inventory: a fragment lies outside its storage")
    return table


def _decode_spans(wire: _Spans, roots: int) -> np.ndarray:
    """As Inventory.spans."""
    columns = [
        col.unpack(b, d, wire.count, what="spans")
        for b, d in ((wire.root, "<i4"), (wire.start, "<i8"), (wire.stop, "<i8"))
    ]
    col.in_range(columns[0], 0, roots, "span roots")
    return np.array(columns, np.int64)


def _decode_fill(f: _FillWire, roots: Sequence[Root]) -> Fill:
    if (
        not 0 <= f.root < len(roots)
        or not 0 <= f.dtype < len(DTYPES)
        or len(f.extent) > MAX_DIMS
        or len(f.extent) != len(f.strides)
    ):
        raise ProtocolError(f"inventory: malformed fill {f}")
    if not all(1 <= e < col.MAX_VALUE for e in f.extent) or not all(
        abs(v) < col.MAX_VALUE for v in (f.offset, *f.strides)
    ):
        raise ProtocolError("inventory: a fill has impossible extents or strides")
    return Fill(roots[f.root].name, f.offset, f.extent, f.strides, DTYPES[f.dtype], f.bits)


def _decode_runs(raw: bytes) -> tuple[tuple[int, int], ...]:
    ends = col.unpack(raw, "<i4", len(raw) // 8 * 2, what="reads")
    if len(ends) and (ends[0] < 0 or (np.diff(ends) <= 0).any()):
        raise ProtocolError("inventory: runs of read tensors are not ascending and apart")
    return tuple(zip(ends[::2].tolist(), ends[1::2].tolist()))


# ---- small checks


def _misfits(inv: Inventory) -> Iterator[str]:
    room, known = inv.root_sizes(), inv._memo.spans  # what was decoded has its columns already, and its storages exist
    named: dict[Literal["footprint", "kept", "staged"], Sequence[Span] | Sequence[Kept]] = {
        "footprint": inv.footprint, "kept": inv.kept, "staged": inv.staged
    }  # fmt: skip
    for what, items in named.items():
        strange = [s for s in items if s.root not in inv.root_numbers()] if what not in known else []
        yield from (f"{s.root}: {what} bytes {s.start}..{s.stop} outside a storage of None bytes" for s in strange)
        if items and not strange:
            root, start, stop = inv.spans(what)
            for i in np.flatnonzero((start < 0) | (start > stop) | (stop > room[root])).tolist():
                s = items[i]
                yield f"{s.root}: {what} bytes {s.start}..{s.stop} outside a storage of {room[root[i]]} bytes"
    size = {r.name: r.nbytes for r in inv.roots} if inv.fills else {}
    if inv.side == "engine" and len(inv.table):  # stride 0 is fine where bytes are read, not where they are written
        t = inv.table
        for i in np.flatnonzero(t.extent.prod(axis=1) * ITEM[t.dtype] > room[t.root]).tolist():
            yield f"{inv.roots[t.root[i]].name}: a fragment of more elements than its storage has room for"
    for f in inv.fills:
        reach = [(n - 1) * s for n, s in zip(f.extent, f.strides)]  # Python ints: no overflow
        low, high = (
            f.offset + sum(min(r, 0) for r in reach),
            f.offset + sum(max(r, 0) for r in reach) + ITEMSIZE[f.dtype],
        )
        if not 0 <= low <= high <= size.get(f.root, -1):
            yield f"{f.root}: fill of bytes {low}..{high} outside a storage of {size.get(f.root)} bytes"
        if prod(f.extent) * ITEMSIZE[f.dtype] > size.get(f.root, -1):
            yield f"{f.root}: fill of {prod(f.extent)} elements, more than its storage has room for"
        if len(f.bits) != ITEMSIZE[f.dtype]:
            yield f"{f.root}: fill with {len(f.bits)} bytes as the value of one {f.dtype}"


def _runs(catalog: Catalog, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Positions in catalog.specs as runs: the engine reads nearly all of them, and there are tens of thousands."""
    names = set(names)
    group = {n for n in names if n in catalog.index}
    taken = np.array([s.name in names or catalog.grouped(s.name)[0] in group for s in catalog.specs] or [False])
    edge = np.flatnonzero(np.diff(np.concatenate([[False], taken, [False]])))
    return tuple(zip(edge[::2].tolist(), edge[1::2].tolist()))


def _one_digest(recipes: Iterable[str]) -> str:
    each = list(recipes)
    return col.digest(each) if each else ""


def _ordered(roots: Iterable[Root]) -> tuple[Root, ...]:
    out = tuple(sorted(roots, key=lambda r: r.name))
    twice = sorted({a.name for a, b in zip(out, out[1:]) if a.name == b.name})
    if twice:
        raise LayoutError(
            "two storages have one name",
            [f"{n}: name storages by the first parameter or buffer in them" for n in twice],
        )
    return out


def _fill_key(f: Fill) -> tuple:
    return f.root, f.offset, f.extent, f.strides, f.dtype, f.bits


def _span_key(s: Span | Kept) -> tuple[str, int, int]:
    return s.root, s.start, s.stop
