"""Canonical boxes of senders x canonical boxes of takers -> pieces, with everybody who could send each piece.

Boxes that several senders hold are cut until any two are equal or disjoint: the *atoms*, each with its set of
holders. A piece is the intersection of an atom and a wanted box. Ranks with equal inventories count once here (a
*class* of ranks). Not here: which holder sends (balance.py), what is missing (coverage.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from xfer.mesh.box import Box
from xfer.plan.program import MAX_DIMS
from xfer.plan.table import FragmentTable

FEW = 256
"""Comparisons of boxes of one tensor up to which all such tensors are compared together; for more, one broadcast per tensor
is cheaper, as it skips the dims that all boxes span."""
AT_ONCE = 1 << 20
"""Comparisons of boxes made together, which bounds their memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Fragment tables of several classes of ranks, one below the other. Class c has rows first[c]:first[c + 1]."""

    table: FragmentTable
    first: np.ndarray  # int64 [classes + 1]

    @classmethod
    def of(cls, tables: Sequence[FragmentTable]) -> Stack:
        first = np.concatenate([[0], np.cumsum([len(t) for t in tables])]).astype(np.int64)
        return cls(
            FragmentTable(*(np.concatenate([getattr(t, n) for t in tables]) for n in FragmentTable.__slots__)), first
        )

    def class_of_row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Disjoint source boxes, sorted by (tensor, box). Atom a is held by the classes `signatures[signature[a]]`,
    ascending, in the stack rows hold_row[hold_first[a]:hold_first[a + 1]], one per class.
    """

    tensor: np.ndarray  # int32 [A]
    origin: np.ndarray  # int64 [A, MAX_DIMS]
    extent: np.ndarray  # int64 [A, MAX_DIMS]
    signature: np.ndarray  # int32 [A]
    hold_first: np.ndarray  # int64 [A + 1]
    hold_row: np.ndarray  # int64
    signatures: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Intersections of atom `atom[p]` with row `want[p]` of the takers' stack, sorted by (want, atom)."""

    atom: np.ndarray  # int64 [P]
    want: np.ndarray  # int64 [P]
    origin: np.ndarray  # int64 [P, MAX_DIMS]
    extent: np.ndarray  # int64 [P, MAX_DIMS]


def find_atoms(sources: Stack) -> Atoms:
    t = sources.table
    cls = sources.class_of_row()
    order = np.lexsort([np.arange(len(t)), cls, *t.extent.T[::-1], *t.origin.T[::-1], t.tensor])
    tensor, origin, extent, cls = t.tensor[order], t.origin[order], t.extent[order], cls[order]
    same_box = (
        (np.diff(tensor) == 0) & (np.diff(origin, axis=0) == 0).all(axis=1) & (np.diff(extent, axis=0) == 0).all(axis=1)
    )
    # One class may hold a box in two storages (a copy). Its first one serves.
    keep = np.concatenate([[True], ~(same_box & (np.diff(cls) == 0))]) if len(t) else np.zeros(0, bool)
    fresh = np.concatenate([[True], ~same_box])[keep] if len(t) else keep
    order, cls = order[keep], cls[keep]
    first = np.flatnonzero(fresh)
    bounds = np.append(first, len(order))
    tensor, origin, extent = (c[keep][first] for c in (tensor, origin, extent))

    clashing = _clashing(tensor, origin, extent)
    if not clashing.any():
        return _atoms(tensor, origin, extent, bounds, order, cls)
    return _atomised(clashing, tensor, origin, extent, bounds, order, cls)


def intersect(atoms: Atoms, wanted: Stack) -> Pieces:
    """Every common element of an atom and a wanted box, once per wanted box."""
    w = wanted.table
    by_tensor = np.argsort(w.tensor, kind="stable")
    names, start = np.unique(w.tensor[by_tensor], return_index=True)
    stop = np.append(start[1:], len(by_tensor))
    low, high = np.searchsorted(atoms.tensor, names, "left"), np.searchsorted(atoms.tensor, names, "right")
    hits_a, hits_w = [], []
    a_end, w_end = atoms.origin + atoms.extent, w.origin + w.extent
    few = (high - low) * (stop - start) <= FEW
    wants = by_tensor[np.repeat(few, stop - start)]
    for want, atom in _all_pairs(wants, *_of_rows(few, stop - start, high - low, low)):
        meet = _meeting(atoms.origin, a_end, atom, w.origin, w_end, want)
        hits_w.append(want[meet])
        hits_a.append(atom[meet])
    for i in np.flatnonzero(~few):
        rows = by_tensor[start[i] : stop[i]]
        a = slice(low[i], high[i])
        step = max(1, (1 << 22) // max(1, high[i] - low[i]))  # bounds the memory of one comparison
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            meet = np.ones((len(part), high[i] - low[i]), bool)
            for d in range(MAX_DIMS):
                ao, ae = atoms.origin[a, d], a_end[a, d]
                if (
                    len(ao)
                    and (ao[0] == ao).all()
                    and (ae[0] == ae).all()
                    and ao[0] <= w.origin[part, d].min()
                    and ae[0] >= w_end[part, d].max()
                ):
                    continue  # all atoms span this dim: nothing to compare
                meet &= (ao < w_end[part, d][:, None]) & (w.origin[part, d][:, None] < ae)
            p, q = np.nonzero(meet)
            hits_w.append(part[p])
            hits_a.append(q + low[i])
    want = np.concatenate(hits_w) if hits_w else np.zeros(0, np.int64)
    atom = np.concatenate(hits_a) if hits_a else np.zeros(0, np.int64)
    order = np.lexsort((atom, want))
    want, atom = want[order], atom[order]
    origin = np.maximum(atoms.origin[atom], w.origin[want])
    extent = np.minimum(a_end[atom], w_end[want]) - origin
    return Pieces(atom, want, origin, extent)


def _of_rows(some: np.ndarray, rows: np.ndarray, *values: np.ndarray) -> Iterator[np.ndarray]:
    """Values per tensor as values per row, of the tensors in `some` (bool); `rows`: how many rows each has."""
    return (np.repeat(v[some], rows[some]) for v in values)


def _all_pairs(rows: np.ndarray, many: np.ndarray, first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(row, partner) of each `rows[i]` with first[i] ... first[i] + many[i] - 1, in portions of about AT_ONCE pairs."""
    cuts = np.flatnonzero(np.diff(np.cumsum(many) // AT_ONCE, prepend=0)) if len(many) else []
    for portion in np.split(np.arange(len(rows)), cuts):
        n = many[portion]
        at = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        yield np.repeat(rows[portion], n), np.repeat(first[portion], n) + at


def _meeting(
    a_origin: np.ndarray, a_end: np.ndarray, a: np.ndarray, b_origin: np.ndarray, b_end: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Whether box a[p] shares an element with box b[p]. bool [P]."""
    meet = np.ones(len(a), bool)
    for d in range(MAX_DIMS):
        unused = all((o[:, d] == 0).all() and (e[:, d] == 1).all() for o, e in ((a_origin, a_end), (b_origin, b_end)))
        if not unused:
            meet &= (a_origin[a, d] < b_end[b, d]) & (b_origin[b, d] < a_end[a, d])
    return meet


def missing(pieces: Pieces, wanted: Stack) -> list[tuple[int, list[Box]]]:
    """(row of the takers' stack, the boxes of it that no sender holds), for rows that are not wholly held."""
    got = np.zeros(len(wanted.table), np.int64)
    np.add.at(got, pieces.want, pieces.extent.prod(axis=1))
    out = []
    for row in np.flatnonzero(got != wanted.table.extent.prod(axis=1)):
        mine = slice(*np.searchsorted(pieces.want, [row, row + 1]))
        left = [_box(wanted.table.origin[row], wanted.table.extent[row])]
        for o, e in zip(pieces.origin[mine], pieces.extent[mine]):
            hole = _box(o, e)
            left = [part for box in left for part in _without(box, hole)]
        out.append((int(row), left))
    return out


def cut_box(origin: Sequence[int], extent: Sequence[int], begin: int, end: int) -> list[Box]:
    """Elements begin..end of a box, counted in row-major order, as boxes in that order: at most 2 D - 1 of them."""
    out: list[Box] = []

    def walk(o: tuple[int, ...], e: tuple[int, ...], d: int, lo: int, hi: int) -> None:
        size = prod(e[d:])
        if lo >= hi:
            return
        if lo == 0 and hi == size:
            out.append(Box(o, e))
            return
        while e[d] == 1:
            d += 1
        inner = size // e[d]
        (first, skip), (last, rest) = divmod(lo, inner), divmod(hi, inner)

        def slab(i: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            return (*o[:d], o[d] + i, *o[d + 1 :]), (*e[:d], n, *e[d + 1 :])

        if first == last:
            walk(*slab(first, 1), d + 1, skip, rest)
            return
        if skip:
            walk(*slab(first, 1), d + 1, skip, inner)
            first += 1
        if last > first:
            out.append(Box(*slab(first, last - first)))
        walk(*slab(last, 1), d + 1, 0, rest)

    walk(tuple(int(v) for v in origin), tuple(int(v) for v in extent), 0, begin, end)
    return out


def _clashing(tensor: np.ndarray, origin: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Which of the distinct boxes share an element with another box of their tensor. bool [N]."""
    out = np.zeros(len(tensor), bool)
    names, start, count = np.unique(tensor, return_index=True, return_counts=True)
    end = origin + extent
    few = (count > 1) & (count * count <= FEW)
    for a, b in _all_pairs(np.flatnonzero(np.repeat(few, count)), *_of_rows(few, count, count, start)):
        meet = _meeting(origin, end, a, origin, end, b)
        out |= np.bincount(a[meet], minlength=len(tensor)) > 1  # a box always meets itself
    for s, n in zip(start[(count > 1) & ~few], count[(count > 1) & ~few]):
        mine = slice(s, s + n)
        varies = [
            d for d in range(MAX_DIMS) if (origin[mine, d] != origin[s, d]).any() or (end[mine, d] != end[s, d]).any()
        ]
        step = max(1, (1 << 22) // n)
        for at in range(s, s + n, step):
            part = slice(at, min(at + step, s + n))
            meet = np.ones((part.stop - at, n), bool)
            for d in varies:
                meet &= (origin[part, d][:, None] < end[mine, d]) & (origin[mine, d] < end[part, d][:, None])
            out[part] |= meet.sum(axis=1) > 1  # a box always meets itself
    return out


def _atoms(
    tensor: np.ndarray, origin: np.ndarray, extent: np.ndarray, bounds: np.ndarray, rows: np.ndarray, cls: np.ndarray
) -> Atoms:
    numbers: dict[tuple[int, ...], int] = {}
    holders, cuts = cls.tolist(), bounds.tolist()
    signature = [numbers.setdefault(tuple(holders[a:b]), len(numbers)) for a, b in zip(cuts, cuts[1:])]
    return Atoms(
        tensor,
        origin,
        extent,
        np.array(signature, np.int32),
        bounds.astype(np.int64),
        rows.astype(np.int64),
        tuple(numbers),
    )


def _atomised(
    clashing: np.ndarray,
    tensor: np.ndarray,
    origin: np.ndarray,
    extent: np.ndarray,
    bounds: np.ndarray,
    rows: np.ndarray,
    cls: np.ndarray,
) -> Atoms:
    """Cuts the clashing boxes against each other; the others are atoms already. Plain Python: layouts in which senders
    replicate a tensor *and* cut it differently are rare and small."""
    done: list[tuple[int, Box, dict[int, int]]] = []
    for i in np.flatnonzero(~clashing):
        done.append((int(tensor[i]), _box(origin[i], extent[i]), _holders(i, bounds, rows, cls)))
    hard = np.flatnonzero(clashing)
    for t in np.unique(tensor[hard]):
        atoms: list[tuple[Box, dict[int, int]]] = []
        for i in hard[tensor[hard] == t]:
            todo, mine, after = [_box(origin[i], extent[i])], _holders(i, bounds, rows, cls), []
            for box, held in atoms:
                common = [c for c in (part.intersect(box) for part in todo) if c]
                rest = [box]
                for c in common:
                    after.append((c, {**mine, **held}))  # a class that holds both keeps its earlier row
                    rest = [r for part in rest for r in _without(part, c)]
                    todo = [r for part in todo for r in _without(part, c)]
                after += [(r, held) for r in rest]
            atoms = after + [(part, mine) for part in todo]
        done += [(int(t), box, held) for box, held in atoms]
    done.sort(key=lambda a: (a[0], a[1]))
    entries = [sorted(held.items()) for _, _, held in done]
    flat = np.array([e for held in entries for e in held], np.int64).reshape(-1, 2)
    return _atoms(
        np.array([t for t, _, _ in done], np.int32),
        *(np.array([getattr(b, side) for _, b, _ in done], np.int64) for side in ("origin", "extent")),
        np.concatenate([[0], np.cumsum([len(e) for e in entries])]), flat[:, 1], flat[:, 0],
    )  # fmt: skip


def _holders(i: int, bounds: np.ndarray, rows: np.ndarray, cls: np.ndarray) -> dict[int, int]:
    part = slice(bounds[i], bounds[i + 1])
    return dict(zip(cls[part].tolist(), rows[part].tolist()))


def _box(origin: np.ndarray, extent: np.ndarray) -> Box:
    return Box(tuple(origin.tolist()), tuple(extent.tolist()))


def _without(box: Box, hole: Box) -> list[Box]:
    common = box.intersect(hole)
    return list(box.subtract(common)) if common else [box]
