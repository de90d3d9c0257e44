"""From a catalog and inventories to a sub-plan: check, intersect, prove coverage, balance, schedule. Pure and
deterministic.

Equal inputs give equal sub-plans on every rank and in every run: nothing here reads a clock, an address, a hash seed
or the order of a dict. The tables themselves are subplan.py's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from xfer.errors import LayoutError, Unsupported
from xfer.plan import columns as col
from xfer.plan.balance import Demand, balance, nearest
from xfer.plan.coverage import ByteClasses, Class, prove
from xfer.plan.explain import Casts, PlanSummary
from xfer.plan.intersect import Atoms, Pieces, Stack, find_atoms, intersect
from xfer.plan.inventory import SCRATCH, Inventory
from xfer.plan.options import PlanOptions, matches
from xfer.plan.program import DTYPE_CODE, DTYPES, ITEMSIZE, MAX_DIMS, ROW, Op
from xfer.plan.schedule import Schedule, schedule
from xfer.plan.subplan import PLANNER, SubPlan, Tables
from xfer.plan.table import ITEM

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

__all__ = ["PlanOptions", "PlanSummary", "SubPlan", "plan_key", "plan_replica"]


def plan_key(catalog: Catalog, sources: Sequence[Inventory], takers: Sequence[Inventory], options: PlanOptions) -> str:
    """Digest of everything a plan depends on."""
    parts = [f"plan of version {PLANNER}", catalog.digest(), options.to_bytes()]
    for side in (sources, takers):
        parts += [str(len(side)), *(i.digest() for i in side)]
    return col.digest(parts)


def plan_replica(
    catalog: Catalog, sources: Sequence[Inventory], takers: Sequence[Inventory], options: PlanOptions | None = None
) -> SubPlan:
    """The sub-plan that refits one replica.

    `sources`: inventories of trainers 0..T-1 in rank order; `takers`: of engine workers 0..W-1. Raises LayoutError
    (inventories that do not fit the catalog or each other), CoverageError (a refit would not be whole), Unsupported
    (too many dims).
    """
    options = options or PlanOptions()
    _check(catalog, sources, takers, options)
    src_cls, src_inv = _classes(sources)
    dst_cls, dst_inv = _classes(takers)
    T = len(sources)
    src, dst = Stack.of([i.table for i in src_inv]), Stack.of([i.table for i in dst_inv])
    held = _source_dtypes(catalog, src, src_cls)
    atoms = find_atoms(src)
    pieces = intersect(atoms, dst)
    groups = [Class(inv, tuple((np.flatnonzero(dst_cls == c) + T).tolist())) for c, inv in enumerate(dst_inv)]
    byte_classes = prove(catalog, held, groups, dst, pieces, options)

    item = (
        np.minimum(ITEM[held[dst.table.tensor[pieces.want]]], ITEM[dst.table.dtype[pieces.want]])
        if len(pieces.want)
        else np.zeros(0, np.int64)
    )
    stream = _stream(atoms, pieces, dst, item, src_cls, dst_cls, T, options)
    shares = _shares(stream, T, len(takers), dst_cls, options)
    pair_src, pair_dst, pair_bytes = _pairs(shares)
    when = schedule(
        pair_src, pair_dst, pair_bytes, message=options.message_bytes, per_rank=options.wave_bytes,
        unit=options.align_bytes, rotation=options.rotation,
    )  # fmt: skip
    fill_class, fill_rows = _fill_rows(dst_inv)
    place = np.full((len(atoms.signatures), len(src_inv)), -1, np.int32)
    for s, members in enumerate(atoms.signatures):
        place[s, list(members)] = np.arange(len(members))
    tables = Tables(
        src_cls, src.first, dst_cls, dst.first, fill_class, fill_rows,
        atoms.origin, atoms.extent, atoms.signature, atoms.hold_first, atoms.hold_row, place,
        stream.atom, stream.want, stream.start, shares.src, shares.dst, shares.begin, shares.end,
        pair_src, pair_dst, when.first, when.wave, when.begin,
    )  # fmt: skip
    waves = max(when.waves, int(len(fill_rows) > 0))
    inputs = _Inputs(catalog, takers, options, T, dst, dst_cls, dst_inv, held)
    summary = _summary(inputs, stream, shares, (pair_src, pair_dst, pair_bytes), when, waves, byte_classes)
    key = plan_key(catalog, sources, takers, options)
    return SubPlan(key, T, len(takers), waves, options.message_bytes, options.align_bytes, src, dst, tables, summary)


# ---- input


def _check(catalog: Catalog, sources: Sequence[Inventory], takers: Sequence[Inventory], options: PlanOptions) -> None:
    bad = []
    digest = catalog.digest()
    for side, items in (("trainer", sources), ("engine", takers)):
        if not items:
            bad.append(f"no {side} inventory at all")
        for i, inv in enumerate(items):
            if inv.side != side or inv.rank != i:
                bad.append(f"inventory {i} of the {side}s is that of {inv.who}; give all ranks of a side in order")
            if inv.catalog != digest:
                bad.append(
                    f"{inv.who}: its inventory numbers tensors by catalog {inv.catalog[:12]}, "
                    f"this plan by {digest[:12]}; rebuild it"
                )
    if options.hosts and len(options.hosts) != len(sources) + len(takers):
        bad.append(f"hosts: {len(options.hosts)} given for {len(sources) + len(takers)} joint ranks (trainers first)")
    if not bad:
        seen = {}
        for inv in (*sources, *takers):
            if seen.setdefault(inv.digest(), inv) is inv:
                bad += [f"{inv.who}: {line}" for line in inv.table.misfits(catalog, inv.roots)]
    if bad:
        raise LayoutError("the inventories do not make a plan", bad)
    wide = sorted(
        {
            f"{s.name}: {len(s.shape)} dims, at most {MAX_DIMS} are supported"
            for s in catalog.tensors
            if len(s.shape) > MAX_DIMS
        }
    )
    if wide:
        raise Unsupported("tensors that cannot be planned", wide)


def _classes(items: Sequence[Inventory]) -> tuple[np.ndarray, list[Inventory]]:
    """Class number of each rank, and one inventory per class, numbered by first appearance."""
    seen: dict[str, int] = {}
    number = [seen.setdefault(i.digest(), len(seen)) for i in items]
    return np.array(number, np.int32), [items[number.index(c)] for c in range(len(seen))]


def _source_dtypes(catalog: Catalog, src: Stack, src_cls: np.ndarray) -> np.ndarray:
    """What the trainers hold of each tensor, as int [tensors] of wire codes, -1: nothing. One dtype per tensor, or
    LayoutError.
    """
    out = np.full(len(catalog.tensors), -1, np.int64)
    out[src.table.tensor] = src.table.dtype
    odd = np.flatnonzero(out[src.table.tensor] != src.table.dtype)
    if len(odd):
        cls = src.class_of_row()
        found = defaultdict(set)
        for t in np.unique(src.table.tensor[odd]):
            for row in np.flatnonzero(src.table.tensor == t):
                found[int(t)].add((DTYPES[src.table.dtype[row]], int(np.flatnonzero(src_cls == cls[row])[0])))
        lines = [
            f"{catalog.tensors[t].name}: " + ", ".join(f"{d} in trainer {r}" for d, r in sorted(v))
            for t, v in sorted(found.items())
        ]
        raise LayoutError("trainers hold one tensor in several dtypes; replicas must be equal bit for bit", lines)
    return out


# ---- streams and shares


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Pieces in stream order, and the groups they form: equal class of takers on one host, equal set of useful
    holders.
    """

    atom: np.ndarray
    want: np.ndarray
    nbytes: np.ndarray
    start: np.ndarray  # int64 [P]
    group_first: np.ndarray  # int64 [G + 1], in pieces
    group_holders: list[tuple[int, ...]]
    group_cost: list[int]
    group_takers: list[tuple[int, ...]]  # joint ranks


def _stream(
    atoms: Atoms,
    pieces: Pieces,
    dst: Stack,
    item: np.ndarray,
    src_cls: np.ndarray,
    dst_cls: np.ndarray,
    trainers: int,
    options: PlanOptions,
) -> _Stream:
    hosts = options.host_numbers()
    ranks_of = [tuple(np.flatnonzero(src_cls == c).tolist()) for c in range(int(src_cls.max(initial=-1)) + 1)]
    holders_of = [tuple(sorted(r for c in members for r in ranks_of[c])) for members in atoms.signatures]
    takers_of: dict[tuple[int, int], list[int]] = defaultdict(list)  # (class, host) -> joint ranks
    for w, c in enumerate(dst_cls.tolist()):
        takers_of[c, hosts[trainers + w] if hosts else 0].append(trainers + w)

    nbytes = pieces.extent.prod(axis=1) * item
    align = np.minimum(nbytes & -nbytes, options.align_bytes)
    piece_class = dst.class_of_row()[pieces.want]
    sets: dict[tuple[tuple[int, ...], bool], int] = {}
    parts, keys = [], []
    for (c, _), takers in sorted(takers_of.items()):
        mine = np.flatnonzero(piece_class == c)
        near = [sets.setdefault(nearest(h, takers[0], hosts), len(sets)) for h in holders_of]
        parts.append(mine)
        keys.append(
            np.stack(
                [
                    np.full(len(mine), len(keys)),
                    np.array(near, np.int64)[atoms.signature[pieces.atom[mine]]] if len(mine) else mine,
                ]
            )
        )
    piece = np.concatenate(parts)
    block, holder_set = np.concatenate(keys, axis=1)
    order = np.lexsort(
        (
            pieces.atom[piece],
            pieces.want[piece],
            nbytes[piece] < options.message_bytes,
            -align[piece],
            holder_set,
            block,
        )
    )
    piece, block, holder_set = piece[order], block[order], holder_set[order]
    fresh = (
        np.concatenate([[True], (np.diff(block) != 0) | (np.diff(holder_set) != 0)])
        if len(piece)
        else np.zeros(0, bool)
    )
    heads = np.flatnonzero(fresh)
    chosen = list(sets)
    blocks = [tuple(t) for _, t in sorted(takers_of.items())]
    return _Stream(
        pieces.atom[piece], pieces.want[piece], nbytes[piece], np.cumsum(nbytes[piece]) - nbytes[piece],
        np.append(heads, len(piece)), [chosen[h][0] for h in holder_set[heads]],
        [options.remote_cost if chosen[h][1] else 1 for h in holder_set[heads]],
        [blocks[b] for b in block[heads]],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    src: np.ndarray
    dst: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def _shares(stream: _Stream, trainers: int, workers: int, dst_cls: np.ndarray, options: PlanOptions) -> _Shares:
    unit = options.align_bytes
    ends = np.append(stream.start, int(stream.nbytes.sum()))
    demands, base = [], []
    for g, (a, b) in enumerate(zip(stream.group_first[:-1], stream.group_first[1:])):
        begin, end = int(ends[a]), int(ends[b])
        for taker in stream.group_takers[g]:
            demands.append(Demand(stream.group_holders[g], taker, -(-(end - begin) // unit), stream.group_cost[g]))
            base.append((begin, end))
    shares = balance(demands, trainers)
    rows = [
        (
            s.sender,
            demands[s.demand].taker,
            base[s.demand][0] + s.begin * unit,
            min(base[s.demand][1], base[s.demand][0] + s.end * unit),
        )
        for s in shares
    ]
    columns = np.array(sorted(rows), np.int64).reshape(-1, 4)
    return _Shares(
        columns[:, 0].astype(np.int32), columns[:, 1].astype(np.int32), columns[:, 2].copy(), columns[:, 3].copy()
    )


def _pairs(shares: _Shares) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct (src, dst) and their bytes; shares come sorted by them."""
    if not len(shares.src):
        return shares.src, shares.dst, shares.begin
    fresh = np.concatenate([[True], (np.diff(shares.src) != 0) | (np.diff(shares.dst) != 0)])
    heads = np.flatnonzero(fresh)
    return shares.src[heads], shares.dst[heads], np.add.reduceat(shares.end - shares.begin, heads)


def _fill_rows(inventories: Sequence[Inventory]) -> tuple[np.ndarray, np.ndarray]:
    cls, rows = [], []
    for c, inv in enumerate(inventories):
        number = {r.name: i for i, r in enumerate(inv.roots)}
        for f in inv.fills:
            row = np.zeros((), ROW)
            pad = MAX_DIMS - len(f.extent)
            row["tensor"], row["op"], row["src"] = -1, Op.FILL, -1
            row["src_dtype"] = row["dst_dtype"] = DTYPE_CODE[f.dtype]
            row["dst_root"], row["dst_offset"], row["fill"] = number[f.root], f.offset, int.from_bytes(f.bits, "little")
            row["extent"] = (1,) * pad + tuple(f.extent)
            row["dst_strides"] = (0,) * pad + tuple(s if n > 1 else 0 for s, n in zip(f.strides, f.extent))
            cls.append(c)
            rows.append(row)
    return np.array(cls, np.int32), np.array(rows, ROW).reshape(-1)


# ---- numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    catalog: Catalog
    takers: Sequence[Inventory]
    options: PlanOptions
    trainers: int
    dst: Stack
    dst_cls: np.ndarray  # class of each worker
    dst_inv: Sequence[Inventory]  # one per class
    held: np.ndarray  # wire code of the trainers' dtype, per tensor


def _summary(
    of: _Inputs,
    stream: _Stream,
    shares: _Shares,
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray],
    when: Schedule,
    waves: int,
    byte_classes: Sequence[ByteClasses],
) -> PlanSummary:
    (pair_src, pair_dst, pair_bytes), trainers, held = pairs, of.trainers, of.held
    ranks = trainers + len(of.takers)
    moved = np.zeros((2, ranks), np.int64)
    np.add.at(moved[0], pair_src, pair_bytes)
    np.add.at(moved[1], pair_dst, pair_bytes)
    parts = np.searchsorted(stream.start, shares.end, "left") - np.searchsorted(stream.start, shares.begin, "right") + 1
    count = np.zeros((2, ranks), np.int64)
    np.add.at(count[0], shares.src, parts)
    np.add.at(count[1], shares.dst, parts)
    hosts = of.options.host_numbers()
    remote = sum(
        n
        for s, d, n in zip(pair_src.tolist(), pair_dst.tolist(), pair_bytes.tolist())
        if hosts and hosts[s] != hosts[d]
    )

    # Pieces that a class of takers shares (in one block per host) count once per taker.
    times = np.repeat([len(t) for t in stream.group_takers], np.diff(stream.group_first)).astype(np.int64)
    scratch = np.concatenate(
        [
            np.array([r.name.startswith(SCRATCH) for r in i.roots], bool)[i.table.root]
            if len(i.table)
            else np.zeros(0, bool)
            for i in of.dst_inv
        ]
    )
    in_scratch = scratch[stream.want]
    tensor, code = of.dst.table.tensor[stream.want], of.dst.table.dtype[stream.want]
    found: dict[tuple[int, int], tuple[set[int], int]] = {}
    for i in np.flatnonzero(held[tensor] != code):
        names, n = found.get((int(held[tensor[i]]), int(code[i])), (set(), 0))
        names.add(int(tensor[i]))
        found[int(held[tensor[i]]), int(code[i])] = names, n + int(times[i])
    casts = tuple(
        Casts(DTYPES[a], DTYPES[b], len(t), n, of.catalog.tensors[min(t)].name)
        for (a, b), (t, n) in sorted(found.items())
    )
    reasons: dict[str, int] = defaultdict(int)
    for inv in of.takers:
        for k in inv.kept:
            reasons[k.reason] += k.stop - k.start
    ends = np.concatenate([when.begin[1:], [0]])
    ends[when.first[1:] - 1] = pair_bytes
    return PlanSummary(
        trainers=trainers,
        workers=len(of.takers),
        waves=waves,
        messages=len(when.wave),
        tensors=len(of.catalog.tensors),
        bytes_out=tuple(moved[0, :trainers].tolist()),
        bytes_in=tuple(moved[1, trainers:].tolist()),
        pieces_out=tuple(count[0, :trainers].tolist()),
        pieces_in=tuple(count[1, trainers:].tolist()),
        largest_piece=int(stream.nbytes.max(initial=0)),
        largest_message=int((ends - when.begin).max(initial=0)),
        remote_bytes=remote,
        fills=sum(len(i.fills) for i in of.takers),
        direct=int(times[~in_scratch].sum()),
        staged=int(times[in_scratch].sum()),
        classes=tuple(byte_classes[c] for c in of.dst_cls.tolist()),
        casts=casts,
        kept=tuple(sorted(reasons.items())),
        dropped=tuple(s.name for s in of.catalog.specs if matches(s.name, of.options.drop)),
        broadcast_bytes=sum(prod(s.shape) * ITEMSIZE[s.dtype] for s in of.catalog.tensors) * len(of.takers),
    )
