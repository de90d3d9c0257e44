"""Boxes of sources x boxes of destinations -> pieces, with all holders of each piece.

Boxes that several sources hold are cut until any two are equal or disjoint: the *atoms*, each with its set of
holders. A piece is the intersection of an atom and a wanted box. Ranks with equal inventories count once here (a
*class* of ranks). Not here: which holder sends (balance.py), what is missing (coverage.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from xfer.mesh.box import Box
from xfer.plan import columns as col
from xfer.plan.program import MAX_DIMS
from xfer.plan.table import FragmentTable

FEW = 256
"""Comparisons of boxes of one tensor up to which all such tensors are compared together; for more, one broadcast
per tensor is cheaper, as it skips the dims that all boxes span."""
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
        return np.arange(len(self.first) - 1).repeat(self.first[1:] - self.first[:-1])


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
    """Intersections of atom `atom[p]` with row `want[p]` of the destinations' stack, sorted by (want, atom)."""

    atom: np.ndarray  # int64 [P]
    want: np.ndarray  # int64 [P]
    origin: np.ndarray  # int64 [P, MAX_DIMS]
    extent: np.ndarray  # int64 [P, MAX_DIMS]


def find_atoms(sources: Stack) -> Atoms:
    t = sources.table
    cls = sources.class_of_row()
    columns = [t.tensor, *_varying(t.origin), *_varying(t.extent)]
    order = np.lexsort(columns[::-1])  # stable: rows of one box stay in the order of classes, and of rows in a class
    cls, same_box = cls[order], np.ones(max(0, len(t) - 1), bool)
    for c in columns:
        sorted_ = c[order]
        same_box &= sorted_[1:] == sorted_[:-1]
    # One class may hold a box in two storages (a copy). Its first one serves.
    again = same_box & (cls[1:] == cls[:-1])
    if again.any():
        keep = np.concatenate([[True], ~again])
        order, cls, same_box = order[keep], cls[keep], same_box[keep[1:]]
    first = np.flatnonzero(np.concatenate([[True], ~same_box])[: len(order)])
    bounds = np.append(first, len(order))
    tensor, origin, extent = (c[order[first]] for c in (t.tensor, t.origin, t.extent))

    clashing = _clashing(tensor, origin, extent)
    if not clashing.any():
        return _atoms(tensor, origin, extent, bounds, order, cls)
    return _atomised(clashing, tensor, origin, extent, bounds, order, cls)


def intersect(atoms: Atoms, wanted: Stack) -> Pieces:
    """Every common element of an atom and a wanted box, once per wanted box."""
    w = wanted.table
    by_tensor = np.argsort(w.tensor, kind="stable")
    names = w.tensor[by_tensor]
    start, rows = col.runs(names)
    stop, names = start + rows, names[start]
    low, high = np.searchsorted(atoms.tensor, names, "left"), np.searchsorted(atoms.tensor, names, "right")
    hits_a, hits_w = [], []
    a_end, w_end = atoms.origin + atoms.extent, w.origin + w.extent
    few = (high - low) * rows <= FEW
    wants = by_tensor[np.repeat(few, rows)]
    dims = np.flatnonzero(_spread(atoms.origin, atoms.extent) | _spread(w.origin, w.extent)).tolist()
    for want, atom in _all_pairs(wants, *_of_rows(few, rows, high - low, low)):
        meet = _meeting(atoms.origin, a_end, atom, w.origin, w_end, want, dims)
        hits_w.append(want[meet])
        hits_a.append(atom[meet])
    for i in np.flatnonzero(~few):
        rows = by_tensor[start[i] : stop[i]]
        a = slice(low[i], high[i])
        step = max(1, (1 << 22) // max(1, high[i] - low[i]))  # bounds the memory of one comparison
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            meet = np.ones((len(part), high[i] - low[i]), bool)
            for d in dims:
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
    order = np.argsort(want * len(atoms.tensor) + atom)  # each pair comes once
    want, atom = want[order], atom[order]
    origin = np.maximum(atoms.origin[atom], w.origin[want])
    extent = np.minimum(a_end[atom], w_end[want]) - origin
    return Pieces(atom, want, origin, extent)


def _of_rows(some: np.ndarray, rows: np.ndarray, *values: np.ndarray) -> Iterator[np.ndarray]:
    """Values per tensor as values per row, of the tensors in `some` (bool); `rows`: how many rows each has."""
    many = rows[some]
    return (v[some].repeat(many) for v in values)


def _all_pairs(rows: np.ndarray, many: np.ndarray, first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(row, partner) of each `rows[i]` with first[i] ... first[i] + many[i] - 1, in portions of about AT_ONCE pairs."""
    until = many.cumsum()
    cuts = np.flatnonzero(np.diff(until // AT_ONCE, prepend=0)).tolist() if len(many) and until[-1] >= AT_ONCE else []
    for a, b in zip([0, *cuts], [*cuts, len(rows)]):
        n = many[a:b]
        before = until[a:b] - n
        at = np.arange(n.sum()) + (first[a:b] - before + (before[0] if len(n) else 0)).repeat(n)
        yield rows[a:b].repeat(n), at


def _spread(origin: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """The dims in which some box is not the one element 0. bool [MAX_DIMS]."""
    return ((origin != 0) | (extent != 1)).any(axis=0)


def _varying(columns: np.ndarray) -> list[np.ndarray]:
    """The columns whose values are not all equal."""
    return [columns[:, d] for d in np.flatnonzero((columns[1:] != columns[:-1]).any(axis=0))]


def _meeting(
    a_origin: np.ndarray, a_end: np.ndarray, a: np.ndarray, b_origin: np.ndarray, b_end: np.ndarray, b: np.ndarray,
    dims: Sequence[int],
) -> np.ndarray:  # fmt: skip
    """Whether box a[p] shares an element with box b[p], which in dims not in `dims` are the one element 0. bool [P]."""
    meet = np.ones(len(a), bool)
    for d in dims:
        meet &= (a_origin[a, d] < b_end[b, d]) & (b_origin[b, d] < a_end[a, d])
    return meet


def missing(pieces: Pieces, wanted: Stack) -> list[tuple[int, list[Box]]]:
    """(row of the destinations' stack, the boxes of it that no source holds), for rows that are not wholly held."""
    # Pieces are sorted by what is wanted, so that what each row got lies between two of these.
    sums = np.concatenate([[0], np.cumsum(pieces.extent.prod(axis=1))])
    ends = np.searchsorted(pieces.want, np.arange(len(wanted.table) + 1))
    got = np.diff(sums[ends])
    out = []
    for row in np.flatnonzero(got != wanted.table.extent.prod(axis=1)):
        mine = slice(*np.searchsorted(pieces.want, [row, row + 1]))
        left = [_box(wanted.table.origin[row], wanted.table.extent[row])]
        for o, e in zip(pieces.origin[mine], pieces.extent[mine]):
            hole = _box(o, e)
            left = [part for box in left for part in box.without(hole)]
        out.append((int(row), left))
    return out


def cut_range(origin: list[int], extent: list[int], begin: int, end: int) -> list[tuple[list[int], list[int]]]:
    """Elements begin..end of a box, counted in row-major order, as boxes (origin, extent) in that order: at most 2
    D - 1 of them. In plain lists, which are faster for the thousands of cuts of a plan."""
    out: list[tuple[list[int], list[int]]] = []

    def walk(o: list[int], e: list[int], d: int, size: int, lo: int, hi: int) -> None:
        """lo..hi of the `size` elements in dims d and above; before d all extents are 1."""
        if lo >= hi:
            return
        if hi - lo == size:
            out.append((o, e))
            return
        while e[d] == 1:
            d += 1
        inner = size // e[d]

        def slab(i: int, n: int) -> tuple[list[int], list[int]]:
            return [*o[:d], o[d] + i, *o[d + 1 :]], [*e[:d], n, *e[d + 1 :]]

        (first, skip), (last, rest) = divmod(lo, inner), divmod(hi, inner)
        if first == last:
            walk(*slab(first, 1), d + 1, inner, skip, rest)
            return
        if skip:
            walk(*slab(first, 1), d + 1, inner, skip, inner)
            first += 1
        if last > first:
            out.append(slab(first, last - first))
        if rest:
            walk(*slab(last, 1), d + 1, inner, 0, rest)

    walk(origin, extent, 0, prod(extent), begin, end)
    return out


def _clashing(tensor: np.ndarray, origin: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Whether each of the distinct boxes shares an element with another box of its tensor. bool [N]."""
    out = np.zeros(len(tensor), bool)
    start, count = col.runs(tensor)
    end, dims = origin + extent, np.flatnonzero(_spread(origin, extent)).tolist()
    few = (count > 1) & (count * count <= FEW)
    for a, b in _all_pairs(np.flatnonzero(np.repeat(few, count)), *_of_rows(few, count, count, start)):
        meet = _meeting(origin, end, a, origin, end, b, dims)
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
    signature, signatures = _signatures(cls, bounds)
    return Atoms(tensor, origin, extent, signature, bounds.astype(np.int64), rows.astype(np.int64), signatures)


def _signatures(cls: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Number of each set cls[bounds[i]:bounds[i + 1]] among the distinct sets (int32), and these sets, by first
    appearance."""
    if len(bounds) < 2:
        return np.zeros(0, np.int32), ()
    if int(cls.max()) < 63:  # a set is an integer
        sets = np.bitwise_or.reduceat(np.int64(1) << cls, bounds[:-1])
        _, first, kind = np.unique(sets, return_index=True, return_inverse=True)
        by_first = np.argsort(first)
        number = np.empty(len(first), np.int32)
        number[by_first] = np.arange(len(first))
        some = first[by_first]
        holders = (tuple(cls[a:b].tolist()) for a, b in zip(bounds[some].tolist(), bounds[some + 1].tolist()))
        return number[kind.reshape(-1)], tuple(holders)
    numbers: dict[tuple[int, ...], int] = {}
    holders, cuts = cls.tolist(), bounds.tolist()
    signature = [numbers.setdefault(tuple(holders[a:b]), len(numbers)) for a, b in zip(cuts, cuts[1:])]
    return np.array(signature, np.int32), tuple(numbers)


def _atomised(
    clashing: np.ndarray,
    tensor: np.ndarray,
    origin: np.ndarray,
    extent: np.ndarray,
    bounds: np.ndarray,
    rows: np.ndarray,
    cls: np.ndarray,
) -> Atoms:
    """Cuts the clashing boxes against each other; the others are atoms already. Plain Python: layouts in which sources
    replicate a tensor *and* cut it differently are rare and small."""
    done: list[tuple[int, Box, dict[int, int]]] = []
    for i in np.flatnonzero(~clashing).tolist():
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
                    rest = [r for part in rest for r in part.without(c)]
                    todo = [r for part in todo for r in part.without(c)]
                after += [(r, held) for r in rest]
            atoms = after + [(part, mine) for part in todo]
        done += [(int(t), box, held) for box, held in atoms]
    done.sort(key=lambda a: (a[0], a[1]))
    entries = [sorted(held.items()) for _, _, held in done]
    flat = np.array([e for held in entries for e in held], np.int64).reshape(-1, 2)
    return _atoms(
        np.array([t for t, _, _ in done], np.int32),
        np.array([b.origin for _, b, _ in done], np.int64), np.array([b.extent for _, b, _ in done], np.int64),
        np.concatenate([[0], np.cumsum([len(e) for e in entries])]), flat[:, 1], flat[:, 0],
    )  # fmt: skip


def _holders(i: int, bounds: np.ndarray, rows: np.ndarray, cls: np.ndarray) -> dict[int, int]:
    part = slice(bounds[i], bounds[i + 1])
    return dict(zip(cls[part].tolist(), rows[part].tolist()))


def _box(origin: np.ndarray, extent: np.ndarray) -> Box:
    return Box(tuple(origin.tolist()), tuple(extent.tolist()))
