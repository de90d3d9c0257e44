"""The part of a sub-plan that knows no replica: pieces, proof and order of the streams, from a catalog and inventories.

Replicas with the same layout share a draft. Their sub-plans differ only in the sources (planner.py) and the waves
(schedule.py). Pure and deterministic, as the planner, which spends nearly all of its time here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from xfer.errors import LayoutError, Unsupported
from xfer.plan.balance import nearest
from xfer.plan.coverage import ByteClasses, Class, prove
from xfer.plan.explain import Casts
from xfer.plan.intersect import Atoms, Pieces, Stack, find_atoms, intersect
from xfer.plan.inventory import Inventory
from xfer.plan.options import PlanOptions, matches
from xfer.plan.program import DTYPE_CODE, DTYPES, ITEM, ITEMSIZE, MAX_DIMS, ROW, Op
from xfer.plan.table import padded_shapes

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog


@dataclass(frozen=True, slots=True, eq=False)
class PieceStream:
    """All pieces of all classes of destinations, one behind the other, and the groups they form: equal class of
    destinations on one host, equal set of useful holders, equal set of classes on that host that need these pieces.

    `group_common`: numbers such sets of several destinations that get the pieces from other hosts; else -1. Groups of one number and
    the same holders have the same pieces in the same order.
    """

    atom: np.ndarray  # int64 [P]
    want: np.ndarray  # int64 [P], rows of the destinations' stack
    nbytes: np.ndarray  # int64 [P]
    start: np.ndarray  # int64 [P], bytes
    group_first: np.ndarray  # int64 [G + 1], in pieces
    group_holders: list[tuple[int, ...]]
    group_cost: list[int]
    group_destinations: list[tuple[int, ...]]  # joint ranks
    group_common: list[int]


@dataclass(frozen=True, slots=True)
class Facts:
    """The part of a summary that does not depend on who sends."""

    tensors: int
    largest_piece: int
    fills: int
    direct: int
    staged: int
    classes: tuple[ByteClasses, ...]  # per worker
    casts: tuple[Casts, ...]
    kept: tuple[tuple[str, int], ...]
    dropped: tuple[str, ...]
    broadcast_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Classes are of ranks with equal inventories, numbered by first appearance; tables as in subplan.Tables."""

    trainers: int
    workers: int
    sources: Stack
    destinations: Stack
    source_class: np.ndarray  # int32 [trainers]
    destination_class: np.ndarray  # int32 [workers]
    fill_class: np.ndarray
    fill_rows: np.ndarray
    atoms: Atoms
    place: np.ndarray
    stream: PieceStream
    facts: Facts


def make_draft(
    catalog: Catalog, sources: Sequence[Inventory], destinations: Sequence[Inventory], options: PlanOptions
) -> Draft:
    """Make the draft for all replicas of one layout. Arguments and errors: see planner.plan_replica."""
    _check(catalog, sources, destinations, options)
    src_cls, src_inv = _classes(sources)
    dst_cls, dst_inv = _classes(destinations)
    T = len(sources)
    src, dst = Stack.of([i.table for i in src_inv]), Stack.of([i.table for i in dst_inv])
    _check_tables(catalog, src_inv, src, dst_inv, dst)
    held = _source_dtypes(catalog, src, src_cls)
    atoms = find_atoms(src)
    pieces = intersect(atoms, dst)
    groups = [Class(inv, tuple((np.flatnonzero(dst_cls == c) + T).tolist())) for c, inv in enumerate(dst_inv)]
    byte_classes = prove(catalog, held, groups, dst, pieces, options)
    stream = _stream(atoms, pieces, dst, held, src_cls, dst_cls, T, options)
    fill_class, fill_rows = _fill_rows(dst_inv)
    place = np.full((len(atoms.signatures), len(src_inv)), -1, np.int32)
    for s, members in enumerate(atoms.signatures):
        place[s, list(members)] = np.arange(len(members))
    facts = _facts(catalog, stream, dst, dst_cls, dst_inv, held, byte_classes, options)
    return Draft(T, len(destinations), src, dst, src_cls, dst_cls, fill_class, fill_rows, atoms, place, stream, facts)


# ---- input


def _check(
    catalog: Catalog, sources: Sequence[Inventory], destinations: Sequence[Inventory], options: PlanOptions
) -> None:
    bad = []
    digest = catalog.digest()
    for side, items in (("trainer", sources), ("engine", destinations)):
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
    if options.hosts and len(options.hosts) != len(sources) + len(destinations):
        bad.append(
            f"hosts: {len(options.hosts)} given for {len(sources) + len(destinations)} joint ranks (trainers first)"
        )
    if bad:
        raise LayoutError("the inventories do not make a plan", bad)


def _check_tables(
    catalog: Catalog, src_inv: Sequence[Inventory], src: Stack, dst_inv: Sequence[Inventory], dst: Stack
) -> None:
    shapes, bad = padded_shapes(catalog), []
    for inventories, stack in ((src_inv, src), (dst_inv, dst)):
        sizes = [i.root_sizes() for i in inventories]
        first = np.cumsum([0, *map(len, sizes)])[:-1]
        size = np.concatenate(sizes)[stack.table.root + np.repeat(first, np.diff(stack.first))]
        if any(odd.any() for odd in stack.table.unfit(shapes, size)):
            bad += [f"{i.who}: {line}" for i in inventories for line in i.table.misfits(catalog, i.roots, shapes)]
    if bad:
        raise LayoutError("the inventories do not make a plan", bad)
    if len(shapes) and not shapes[:, -1].all():
        wide = sorted(
            f"{s.name}: {len(s.shape)} dims, at most {MAX_DIMS} are supported"
            for s in catalog.tensors
            if len(s.shape) > MAX_DIMS
        )
        if wide:
            raise Unsupported("tensors that cannot be planned", wide)


def _classes(items: Sequence[Inventory]) -> tuple[np.ndarray, list[Inventory]]:
    """Class number of each rank, and one inventory per class, numbered by first appearance."""
    seen: dict[str, int] = {}
    number = [seen.setdefault(i.digest(), len(seen)) for i in items]
    return np.array(number, np.int32), [items[number.index(c)] for c in range(len(seen))]


def _source_dtypes(catalog: Catalog, src: Stack, src_cls: np.ndarray) -> np.ndarray:
    """The trainers' dtype of each tensor, int [tensors] of wire codes, -1: not held. One dtype per tensor, or
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


# ---- streams


def _stream(
    atoms: Atoms,
    pieces: Pieces,
    dst: Stack,
    held: np.ndarray,
    src_cls: np.ndarray,
    dst_cls: np.ndarray,
    trainers: int,
    options: PlanOptions,
) -> PieceStream:
    hosts = () if options.site is not None else options.host_numbers()  # with a site all holders are candidates
    where = options.host_numbers() if options.relay else hosts
    ranks_of = [tuple(np.flatnonzero(src_cls == c).tolist()) for c in range(int(src_cls.max(initial=-1)) + 1)]
    holders_of = [tuple(sorted(r for c in members for r in ranks_of[c])) for members in atoms.signatures]
    destinations_of: dict[tuple[int, int], list[int]] = defaultdict(list)  # (class, host) -> joint ranks
    for w, c in enumerate(dst_cls.tolist()):
        destinations_of[c, where[trainers + w] if where else 0].append(trainers + w)

    item = np.minimum(ITEM[held[dst.table.tensor[pieces.want]]], ITEM[dst.table.dtype[pieces.want]])
    nbytes = pieces.extent.prod(axis=1) * item
    align = np.minimum(nbytes & -nbytes, options.align_bytes)
    piece_class = dst.class_of_row()[pieces.want]
    sets: dict[tuple[tuple[int, ...], bool], int] = {}
    parts: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    for (c, _), destinations in sorted(destinations_of.items()):
        mine = np.flatnonzero(piece_class == c)
        near = [sets.setdefault(nearest(h, destinations[0], hosts), len(sets)) for h in holders_of]
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
    chosen = list(sets)
    blocks = [tuple(t) for _, t in sorted(destinations_of.items())]
    common, place = np.full(len(piece), -1), pieces.want[piece]
    if options.relay and where:
        at = np.array([where[b[0]] for b in blocks])[block]
        # A worker hands on the bytes of its storage, so their number must be equal to that on the wire.
        whole = nbytes[piece] == pieces.extent[piece].prod(axis=1) * ITEM[dst.table.dtype[place]]
        far = np.array([[where[b[0]] not in {where[h] for h in holders} for holders, _ in chosen] for b in blocks])
        some = np.flatnonzero(whole & far.reshape(len(blocks), -1)[block, holder_set])
        columns = pieces.atom[piece], *pieces.origin[piece].T, *pieces.extent[piece].T, dst.table.dtype[place]
        common[some], number = _common([c[some] for c in (at, *columns)], block[some], list(map(len, blocks)))
        place[some] = np.where(common[some] < 0, place[some], number)
    order = np.lexsort(
        (pieces.atom[piece], place, nbytes[piece] < options.message_bytes, -align[piece], common, holder_set, block)
    )
    piece, block, holder_set, common = (x[order] for x in (piece, block, holder_set, common))
    fresh = np.any([np.diff(x, prepend=-2) != 0 for x in (block, holder_set, common)], axis=0)
    heads = np.flatnonzero(fresh)
    return PieceStream(
        pieces.atom[piece], pieces.want[piece], nbytes[piece], np.cumsum(nbytes[piece]) - nbytes[piece],
        np.append(heads, len(piece)), [chosen[h][0] for h in holder_set[heads]],
        [options.remote_cost if chosen[h][1] else 1 for h in holder_set[heads]],
        [blocks[b] for b in block[heads]], common[heads].tolist(),
    )  # fmt: skip


def _common(columns: Sequence[np.ndarray], block: np.ndarray, members: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Find pieces that several destinations need.

    Args:
        columns: Per piece, values that are equal for equal pieces on one host.
        block: Per piece, the number of the block of destinations that needs it.
        members: Destinations of each block.

    Returns:
        Per piece, the number of the set of blocks that need it (-1 if only one destination does), and a number that is the same for equal
        pieces in all of these blocks.
    """
    if not len(block):
        return block, block
    order = np.lexsort((block, *columns))
    block = block[order]
    fresh = np.any([np.diff(c[order], prepend=-1) != 0 for c in columns], axis=0)
    # A block can need a piece more than once: its first one is the same as the first one of others, and so on.
    head = np.flatnonzero(fresh | (np.diff(block, prepend=-1) != 0))
    nth = np.arange(len(block)) - np.repeat(head, np.diff(head, append=len(block)))
    again = np.lexsort((block, nth, np.cumsum(fresh)))
    order, block, nth = order[again], block[again], nth[again]
    head = np.flatnonzero(fresh | (np.diff(nth, prepend=-1) != 0))
    sets: dict[tuple[int, ...], int] = {}
    found, needed = [], block.tolist()
    for a, b in zip(head.tolist(), [*head.tolist()[1:], len(block)]):
        some = tuple(needed[a:b])
        several = sum(members[i] for i in some) > 1
        found.append(sets.setdefault(some, len(sets)) if several else -1)
    which = np.empty((2, len(block)), np.int64)
    which[:, order] = np.repeat([found, head], np.diff(head, append=len(block)), axis=1)
    return which[0], which[1]


def _fill_rows(inventories: Sequence[Inventory]) -> tuple[np.ndarray, np.ndarray]:
    cls, rows = [], []
    for c, inv in enumerate(inventories):
        number = inv.root_numbers() if inv.fills else {}
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
    return np.array(cls, np.int32), np.array(rows, ROW).reshape(-1) if rows else np.zeros(0, ROW)


# ---- numbers


def _facts(
    catalog: Catalog,
    stream: PieceStream,
    dst: Stack,
    dst_cls: np.ndarray,
    dst_inv: Sequence[Inventory],
    held: np.ndarray,
    byte_classes: Sequence[ByteClasses],
    options: PlanOptions,
) -> Facts:
    # Pieces that a class of destinations shares (in one block per host) count once per destination.
    times = np.repeat([len(t) for t in stream.group_destinations], np.diff(stream.group_first)).astype(np.int64)
    scratch = np.array([i.scratch_roots() for i in dst_inv], np.int64)
    staged = 0
    if (scratch[:, 0] < scratch[:, 1]).any():
        first, end = np.repeat(scratch, np.diff(dst.first), axis=0)[stream.want].T
        root = dst.table.root[stream.want]
        staged = int(times[(root >= first) & (root < end)].sum())
    tensor, code = dst.table.tensor[stream.want], dst.table.dtype[stream.want]
    cast = np.flatnonzero(held[tensor] != code)
    casts = []
    if len(cast):
        kinds, kind = np.unique(held[tensor[cast]] * len(DTYPES) + code[cast], return_inverse=True)
        for k, (a, b) in enumerate(zip(*divmod(kinds, len(DTYPES)))):
            mine = cast[kind.reshape(-1) == k]
            names = np.unique(tensor[mine])
            example = catalog.tensors[names[0]].name
            casts.append(Casts(DTYPES[a], DTYPES[b], len(names), int(times[mine].sum()), example))
    workers = np.bincount(dst_cls, minlength=len(dst_inv)).tolist()
    reasons: dict[str, int] = defaultdict(int)
    for inv, n in zip(dst_inv, workers):
        for kept in inv.kept:
            reasons[kept.reason] += n * (kept.stop - kept.start)
    sizes = padded_shapes(catalog).prod(axis=1).tolist()
    return Facts(
        tensors=len(catalog.tensors),
        largest_piece=int(stream.nbytes.max(initial=0)),
        fills=sum(n * len(i.fills) for i, n in zip(dst_inv, workers)),
        direct=int(times.sum()) - staged,
        staged=staged,
        classes=tuple(byte_classes[c] for c in dst_cls.tolist()),
        casts=tuple(casts),
        kept=tuple(sorted(reasons.items())),
        dropped=tuple(s.name for s in catalog.specs if matches(s.name, options.drop)) if options.drop else (),
        broadcast_bytes=sum(map(mul, sizes, (0 if s.of else ITEMSIZE[s.dtype] for s in catalog.tensors)))
        * len(dst_cls),
    )
