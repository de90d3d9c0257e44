"""Proof, before anything moves, that a refit of one replica is whole: every byte of the engine has one class and one
writer.

Classes: *written* (a fragment's byte, from the wire), *filled* (a constant), *staged* (written by a recipe after
the wire), *kept* (left alone, for a stated reason). A byte that several parameters share counts once; the number of such
bytes is *aliased*. One CoverageError has all violations of all destinations; shapes that do not fit were refused before
this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from xfer.errors import CoverageError
from xfer.plan import intervals as iv
from xfer.plan.intersect import Pieces, Stack, missing
from xfer.plan.inventory import Inventory
from xfer.plan.options import PlanOptions, matches, written
from xfer.plan.program import DTYPES, ITEM, ITEMSIZE, MAX_DIMS
from xfer.plan.table import box_text
from xfer.trace.derived import VALUES

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

WRITTEN, FILLED, STAGED, KEPT = range(4)
_CLASS = ("written", "filled", "staged", "kept")
NAMED = 16
"""Byte ranges with two claims for which the claimants are looked up and named; further ones are listed without names.
"""


@dataclass(frozen=True, slots=True)
class ByteClasses:
    """Bytes of one destination. `footprint` = written + filled + staged + kept, each byte counted once."""

    footprint: int
    written: int
    filled: int
    staged: int
    kept: int
    aliased: int  # bytes that more than one live parameter or buffer names
    scratch: int  # written to scratch storage, besides the footprint
    outside: int  # written to bytes of live storages that no live parameter or buffer names


@dataclass(frozen=True, slots=True)
class Class:
    """A class of destinations with equal inventories: one of them, and the joint ranks of all."""

    inventory: Inventory
    ranks: tuple[int, ...]

    @property
    def who(self) -> str:
        more = f" and {len(self.ranks) - 1} like it" if len(self.ranks) > 1 else ""
        return f"rank {self.ranks[0]} ({self.inventory.who}){more}"


def prove(
    catalog: Catalog,
    source_dtype: np.ndarray,
    destinations: Sequence[Class],
    wanted: Stack,
    pieces: Pieces,
    options: PlanOptions,
) -> list[ByteClasses]:
    """Byte classes per class of destinations, or CoverageError with every violation.

    source_dtype: int [tensors], wire code of the sources' dtype, -1 where no trainer holds the tensor.
    """
    bad = list(_unheld(catalog, destinations, wanted, pieces))
    bad += _untaken(catalog, destinations, options)
    bad += _casts(catalog, source_dtype, wanted, destinations, options)
    classes = []
    for destination in destinations:
        found, counts = _footprint(catalog, destination)
        bad += found
        classes.append(counts)
    if bad:
        raise CoverageError(
            f"this plan would not refit the replica wholly ({len(bad)} violations); nothing was moved", bad
        )
    return classes


def _unheld(catalog: Catalog, destinations: Sequence[Class], wanted: Stack, pieces: Pieces) -> Iterator[str]:
    holes = missing(pieces, wanted)
    if not holes:
        return
    cls = wanted.class_of_row()
    found: dict[tuple[int, str], list[str]] = defaultdict(list)
    for row, boxes in holes:
        t = int(wanted.table.tensor[row])
        dims = len(catalog.tensors[t].shape)
        text = ", ".join(box_text(b.origin, b.extent, dims) for b in boxes[:4]) + (
            f" and {len(boxes) - 4} more boxes" if len(boxes) > 4 else ""
        )
        found[t, text].append(destinations[cls[row]].who)
    for (t, text), who in sorted(found.items()):
        spec = catalog.tensors[t]
        yield (
            f"{spec.name} {text} of shape {spec.shape}: wanted by {_some(who)}, held by no trainer; "
            "let the trainer that owns it export it (was a pipeline stage or an expert rank left out?)"
        )


def _untaken(catalog: Catalog, destinations: Sequence[Class], options: PlanOptions) -> Iterator[str]:
    read = np.zeros(len(catalog.specs), bool)
    for first, end in {run for t in destinations for run in t.inventory.reads}:
        read[first:end] = True
    if read.all():
        return
    taken = _taken(catalog, destinations)
    unread = []
    for spec in (catalog.specs[i] for i in np.flatnonzero(~read)):
        if spec.of or not all(spec.shape) or matches(spec.name, options.drop):
            continue  # a derived tensor is for engines that ask for it, and `read` has the one that it is derived from
        group, member = catalog.grouped(spec.name)
        ranges = taken.get(catalog.index[group], ())
        if (member is None and ranges) or any(a <= member < b for a, b in ranges if member is not None):
            continue
        unread.append(spec.name)
    argument = written("drop", unread, [s.name for s in catalog.specs])
    for name in unread:
        yield (
            f"{name}: trained, but no engine worker of this replica reads it; "
            f"if the engine has no such weights, pass {argument}"
        )


def _taken(catalog: Catalog, destinations: Sequence[Class]) -> dict[int, set[tuple[int, int]]]:
    """Ranges of dim 0 that workers want of each checkpoint tensor; in a group of experts, these are experts."""
    out: dict[int, set[tuple[int, int]]] = defaultdict(set)
    dims = np.array([len(s.shape) for s in catalog.tensors] or [0])
    for t in destinations:
        table = t.inventory.table
        lead = np.minimum(MAX_DIMS - dims[table.tensor], MAX_DIMS - 1)
        rows = np.arange(len(table))
        low, n = table.origin[rows, lead], table.extent[rows, lead]
        for tensor, a, b in zip(table.tensor.tolist(), low.tolist(), (low + n).tolist()):
            out[tensor].add((a, b))
    return out


def _casts(
    catalog: Catalog, source_dtype: np.ndarray, wanted: Stack, destinations: Sequence[Class], options: PlanOptions
) -> Iterator[str]:
    held = source_dtype[wanted.table.tensor]
    different = np.flatnonzero((held != wanted.table.dtype) & (held >= 0))
    if not len(different):
        return
    cls = wanted.class_of_row()
    seen: dict[tuple[int, int], list[str]] = defaultdict(list)
    for row in different:
        seen[int(wanted.table.tensor[row]), int(wanted.table.dtype[row])].append(destinations[cls[row]].who)
    lossy: list[tuple[str, str]] = []
    for (t, code), who in sorted(seen.items()):
        spec, src, dst = catalog.tensors[t], DTYPES[source_dtype[t]], DTYPES[code]
        wish = cast_kind(src, dst)
        # A tensor that is trained wider than the checkpoint may lose the bits beyond the checkpoint's dtype.
        enough = cast_kind(spec.dtype, dst) in ("equal", "widening")
        if wish == "widening" or (wish == "narrowing" and (enough or _asked(spec.name, catalog, options))):
            continue
        if wish == "refused":
            advice = (
                "serve it in block FP8 too (vLLM's quantization_config, and not among its ignored_layers), or train it in bf16"
                if src == VALUES
                else "give the engine the checkpoint's dtype"
            )
            yield f"{spec.name}: {src} in the trainer, {dst} in {_some(who)}: no such conversion; {advice}"
        else:
            both = "in the checkpoint and in the trainer"
            there = f"{src} {both}" if src == spec.dtype else f"{src} in the trainer, {spec.dtype} in the checkpoint"
            lossy.append((spec.name, f"{there}, {dst} in {_some(who)}: loses bits"))
    argument = written("narrow", [name for name, _ in lossy], catalog.index)
    for name, said in lossy:
        yield f"{name}: {said}; have the engine keep it wide, or if that is meant pass {argument}"


def cast_kind(src: str, dst: str) -> str:
    """ "equal" | "widening" (every value survives) | "narrowing" (rounds) | "refused"."""
    if src == dst:
        return "equal"
    real = {"float16": 0, "bfloat16": 0, "float32": 1, "float64": 2}
    if src in real and dst in real:
        return "widening" if real[src] < real[dst] else "narrowing"
    signed, unsigned = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")
    for family in (signed, unsigned):
        if src in family and dst in family and ITEMSIZE[src] < ITEMSIZE[dst]:
            return "widening"
    return "refused"


def _asked(name: str, catalog: Catalog, options: PlanOptions) -> bool:
    """Whether `narrow` names a grouped tensor, by its own name or by all checkpoint names in it."""
    if matches(name, options.narrow):
        return True
    return all(matches(member, options.narrow) for member in catalog.members(name))


def _footprint(catalog: Catalog, destination: Class) -> tuple[list[str], ByteClasses]:
    """Violations of one class of destinations, and its counts."""
    inv = destination.inventory
    # One address space for all storages, with a gap between them: one sort then serves all.
    after = np.cumsum(inv.root_sizes() + 1)
    base = after - inv.root_sizes() - 1

    def spans(what: Literal["footprint", "kept", "staged"]) -> iv.Bytes:
        root, start, stop = inv.spans(what)
        at = base[root]
        return iv.Bytes(at + start, at + stop, np.arange(len(root)))

    def constants_in(root: str) -> Callable[[int], str]:
        return lambda _: f"{destination.who}: constants in {root}"

    t = inv.table
    number = inv.root_numbers() if inv.fills else {}
    fills = []
    for f in inv.fills:
        region = np.array([f.offset]), np.array([f.extent]), np.array([f.strides]), np.array([ITEMSIZE[f.dtype]])
        fills.append(iv.runs(*region, constants_in(f.root)))
    starts = base[t.root] + t.offset if len(t) else t.offset
    written = iv.runs(
        *(starts, t.extent, t.strides, ITEM[t.dtype]),
        lambda i: f"{destination.who}: {catalog.tensors[int(t.tensor[i])].name}",
    )
    claims = (
        written,
        iv.Bytes.concat(
            [
                iv.Bytes(b.start + base[number[f.root]], b.stop + base[number[f.root]], np.full(len(b), i))
                for i, (f, b) in enumerate(zip(inv.fills, fills))
            ]
        ),
        spans("staged"),
        spans("kept"),
    )
    every, named = iv.Bytes.concat(list(claims)), spans("footprint")
    live = iv.union(named.start, named.stop)
    aliased = int((named.stop - named.start).sum()) - iv.size(live)

    bad: list[str] = []
    twice = iv.overlaps(every)
    covered = iv.union(every.start, every.stop)
    if not len(twice) and all(map(np.array_equal, covered, live)):
        # The usual case: the claims are apart, and all together they are the live bytes.
        n_written, n_filled, n_staged, n_kept = (int((c.stop - c.start).sum()) for c in claims)
        return bad, ByteClasses(iv.size(live), n_written, n_filled, n_staged, n_kept, aliased, 0, 0)
    where = _Where(inv, base)
    if len(twice):
        for i, (a, b) in enumerate(zip(*iv.union(twice.start, twice.stop))):
            who = (
                [f"{_CLASS[c]} by {n}" for c, n in _claimants(catalog, inv, claims, where, a, b)]
                if i < NAMED
                else ["as above"]
            )
            bad.append(
                f"{where(a, b)}: claimed more than once in {destination.who}: {_some(who)}; "
                "one byte has one writer and one class"
            )
    stale = iv.difference(live, covered)
    sent = set(where.roots(np.concatenate([claims[WRITTEN].start, claims[STAGED].start])).tolist())
    for a, b, root in zip(*stale, where.roots(stale[0]).tolist()):
        bad.append(
            f"{where(a, b)}: {b - a} bytes would stay stale in {destination.who}: "
            "no fragment, fill or recipe writes them; "
            + (
                "trainers send other bytes of this storage: send these too"
                if root in sent
                else "trace the loader that writes them, or name them in keep= if they must not change"
            )
        )
    in_live = []
    for c in claims:
        u = iv.union(c.start, c.stop)
        in_live.append(iv.size(u) - iv.size(iv.difference(u, live)))
    wrote = iv.Bytes.concat([claims[WRITTEN], claims[FILLED], claims[STAGED]])
    stray = iv.difference(iv.union(wrote.start, wrote.stop), live)
    first, end = inv.scratch_roots()
    roots = where.roots(stray[0])
    in_scratch = int((stray[1] - stray[0])[(roots >= first) & (roots < end)].sum())
    n_written, n_filled, n_staged, n_kept = in_live
    elsewhere = iv.size(stray) - in_scratch
    return bad, ByteClasses(iv.size(live), n_written, n_filled, n_staged, n_kept, aliased, in_scratch, elsewhere)


class _Where:
    """Addresses of the one address space -> names for people."""

    def __init__(self, inv: Inventory, base: np.ndarray):
        self.inv, self.base = inv, base

    def roots(self, at: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.base, at, "right") - 1

    def __call__(self, start: int, stop: int) -> str:
        r = int(self.roots(np.array([start]))[0])
        return f"{self.inv.roots[r].name} bytes {int(start - self.base[r])}..{int(stop - self.base[r])}"


def _claimants(
    catalog: Catalog, inv: Inventory, claims: Sequence[iv.Bytes], where: _Where, a: int, b: int
) -> list[tuple[int, str]]:
    """The claimants of bytes a..b. Slow and exact: only errors need them."""
    t, out = inv.table, []
    for i in range(len(t)):
        row = t.take(np.array([i]))
        runs = iv.runs(where.base[row.root] + row.offset, row.extent, row.strides, ITEM[row.dtype])
        hits = int(((runs.start < b) & (runs.stop > a)).sum())
        name = catalog.tensors[row.tensor[0]].name
        out += [
            (WRITTEN, f"{name} {box_text(row.origin[0], row.extent[0], len(catalog.tensors[row.tensor[0]].shape))}")
        ] * min(hits, 2)
    for c, label in ((FILLED, "fill"), (STAGED, "recipe"), (KEPT, "keep")):
        for owner in claims[c].owner[(claims[c].start < b) & (claims[c].stop > a)].tolist():
            out.append((c, inv.kept[owner].reason if c == KEPT else f"{label} {owner}"))
    return out


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
