"""From pairs of strided regions to fragments: boxes of a checkpoint tensor with one storage stride per dim.

A region that is no box (heads interleaved in the storage, a flattened range that ends inside a row) becomes several
boxes. Neighbours are merged again along any dim whose address arithmetic agrees. Integers only, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from xfer.errors import LayoutError
from xfer.mesh.box import row_major
from xfer.trace.fragment import Fragment, Ints, TensorSpec
from xfer.trace.view import Region, coalesce

MAX_BOXES = 1 << 16
"""A region that falls apart into more boxes than this is refused by name: a plan of single elements is no plan."""
FEW = 16
"""So many boxes are as good as one that skips elements."""


def boxes(
    spec: TensorSpec, checkpoint: Region, storage: Region, root: str, dtype: str, *, plain: bool = False
) -> list[Fragment]:
    """Fragments that together say: element i of `checkpoint` (elements of `spec`) lies at element i of `storage`
    (bytes).

    The regions have one shape. A box that skips elements of the tensor has `steps`, unless the result is to be `plain`.
    LayoutError when the region leaves the tensor, or takes more than `MAX_BOXES` boxes.
    """
    if not checkpoint.size:
        return []
    out: list[Fragment] = []
    todo = [(checkpoint, storage)]
    while todo:
        c, s = todo.pop()
        found = _as_boxes(spec, c, s, root, dtype, plain)
        if found is not None:
            out += found
        else:
            todo += _split(spec.shape, c, s)
        if len(out) + len(todo) > MAX_BOXES:
            raise LayoutError(
                f"{spec.name}{list(spec.shape)}: a region of {checkpoint.size} elements is not a few boxes"
            )
    return merge(out) if len(out) > 1 else out


def _as_boxes(spec: TensorSpec, c: Region, s: Region, root: str, dtype: str, plain: bool) -> list[Fragment] | None:
    """The boxes, when each dim of the region is whole digits of the tensor's dims; else None."""
    try:
        found = _placed(spec.shape, c, s.strides, plain)
    except LayoutError as e:
        raise LayoutError(f"{spec.name}{list(spec.shape)}: {e.message}") from None
    if found is None:
        return None
    return [Fragment(spec.name, o, extent, root, s.offset + at, st, dtype, skips) for o, extent, at, st, skips in found]


Placed = tuple[Ints, Ints, int, Ints, Ints]
"""Origin and extent of a box, where it begins and with which strides, and its steps: a fragment without its names."""


@lru_cache(maxsize=2048)
def _placed(shape: Ints, c: Region, strides_of: Ints, plain: bool) -> tuple[Placed, ...] | None:
    """`_as_boxes` by geometry alone, storage (`strides_of`) counted from 0: thousands of experts share one shape."""
    row = row_major(shape)
    digits: list[list[tuple[int, int, int]]] = [[] for _ in shape]  # per dim: (count, step, storage stride)
    outer: list[list[tuple[int, int, int]]] = []  # dims that are enumerated: (dim, its shift, storage shift)
    dims = list(zip(*coalesce(c.shape, c.strides, strides_of)))
    for n, step, stride in dims:
        if step == 0:  # one element at several places
            outer.append([(0, 0, i * stride) for i in range(n)])
            continue
        while n > 1:  # a run may go over several dims, innermost first
            k = next((k for k in range(len(shape)) if row[k] <= step and shape[k] > 1), None)
            if k is None or step % row[k]:
                return None
            q = step // row[k]
            room = n
            if k > 0 and n * q > shape[k]:
                room = shape[k] // q
                if room < 2 or shape[k] % q or n % room:
                    return None
            digits[k].append((room, q, stride))
            n, step, stride = n // room, step * room, stride * room
    origin, rest = [], c.offset
    for r, n in zip(row, shape):
        q, rest = divmod(rest, r) if n > 1 else (0, rest)
        origin.append(q)
    if rest:
        raise LayoutError(f"offset {c.offset} is not in the tensor")
    extent, strides, steps = [], [], []
    for k, ds in enumerate(digits):
        size, stride, skip = 1, 0, 1
        for n, step, st in sorted(ds, key=lambda d: d[1]):
            if size == 1 and (step == 1 or (n > FEW and not plain)):
                size, stride, skip = n, st, step
            elif size > 1 and step == size * skip and st == stride * size:
                size *= n
            else:
                outer.append([(k, i * step, i * st) for i in range(n)])
        extent.append(size)
        strides.append(stride)
        steps.append(skip)
    reach = [o + (n - 1) * q + 1 for o, n, q in zip(origin, extent, steps)]
    for choices in outer:
        if choices and reach:  # a tensor of no dims has one element, wherever it goes
            reach[choices[-1][0]] += choices[-1][1]
    if any(r > n for r, n in zip(reach, shape)):
        return None  # runs over the edge of a dim: not a box from here
    out = []
    count = prod(map(len, outer))
    if count > MAX_BOXES:
        raise LayoutError(f"a region of {c.size} elements is {count} boxes")
    skips = tuple(steps) if max(steps, default=1) > 1 else ()
    for choice in product(*outer):
        o, at = list(origin), 0
        for k, d, st in choice:
            if o:
                o[k] += d
            at += st
        out.append((tuple(o), tuple(extent), at, tuple(strides), skips))
    return tuple(out)


def _split(shape: Ints, c: Region, s: Region) -> list[tuple[Region, Region]]:
    """The region in two or more parts: cut at the edges of rows where it runs over one, else element by element."""
    dims = list(zip(*coalesce(c.shape, c.strides, s.strides)))
    if not dims:
        raise LayoutError(f"a region outside of shape {list(shape)}")
    for i, (n, step, _) in enumerate(dims):
        for r, size in zip(row_major(shape), shape):
            width = r * size  # addresses from one row of this dim to the next
            if size == 1 or not r <= step < width or width % step:
                continue
            head = -(-(-c.offset % width) // step)  # steps to the first edge
            body = (n - head) // (width // step) * (width // step)
            cuts = sorted({0, head, head + body, n})
            if 0 <= head <= n and len(cuts) > 2:
                return [_slice(dims, c, s, i, lo, hi) for lo, hi in zip(cuts, cuts[1:])]
    i = min(range(len(dims)), key=lambda i: dims[i][0])
    return [_slice(dims, c, s, i, k, k + 1) for k in range(dims[i][0])]


def _slice(
    dims: Sequence[tuple[int, int, int]], c: Region, s: Region, i: int, lo: int, hi: int
) -> tuple[Region, Region]:
    shape, a, b = (tuple(x) for x in zip(*dims))
    cut = (*shape[:i], hi - lo, *shape[i + 1 :])
    return Region(c.offset + lo * a[i], cut, a), Region(s.offset + lo * b[i], cut, b)


# ---- sets of fragments ----------------------------------------------------------------------------------------------


def merge(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Join neighbours along any one dim while tensor, root, dtype, the other dims and the address arithmetic agree.

    The map from element to byte stays exactly the same. Order of the result: by tensor and origin within
    one join, otherwise unspecified but deterministic for a given input set. Fragments with steps stay as they are.
    """
    fragments = list(fragments)
    stepped = sorted((f for f in fragments if f.steps), key=lambda f: (f.tensor, f.root, f.origin, f.offset))
    rows = [(f.tensor, f.root, f.dtype, f.origin, f.extent, f.strides, f.offset) for f in fragments if not f.steps]
    rows.sort()
    count = -1
    while count != len(rows):
        count = len(rows)
        for k in range(max((len(r[3]) for r in rows), default=0)):
            rows = _merge_dim(rows, k)
    return [Fragment(t, o, e, root, at, s, dt) for t, root, dt, o, e, s, at in rows] + stepped


def _merge_dim(rows: list[tuple], k: int) -> list[tuple]:
    groups: dict[tuple, list[tuple]] = {}
    out = []
    for r in rows:
        t, root, dt, o, e, s, _ = r
        if k >= len(o):
            out.append(r)
        else:
            groups.setdefault((t, root, dt, o[:k], o[k + 1 :], e[:k], e[k + 1 :], s[:k], s[k + 1 :]), []).append(r)
    for key, group in groups.items():
        if len(group) == 1:
            out += group
            continue
        t, root, dt, o0, o1, e0, e1, s0, s1 = key
        group.sort(key=lambda r: (r[3][k], r[6]))
        lo: int | None = None
        size = step = at = 0  # of the run that begins at `lo`
        for r in group:
            o, e, s, offset = r[3][k], r[4][k], r[5][k], r[6]
            if lo is not None and lo + size == o:
                by = step if size > 1 else (offset - at if e == 1 else s)
                if offset == at + by * size and (e == 1 or s == by):
                    size, step = size + e, by
                    continue
            if lo is not None:
                out.append((t, root, dt, (*o0, lo, *o1), (*e0, size, *e1), (*s0, step, *s1), at))
            lo, size, step, at = o, e, s, offset
        out.append((t, root, dt, (*o0, lo, *o1), (*e0, size, *e1), (*s0, step, *s1), at))
    return out


def refined(f: Fragment, shape: Ints, dims: Ints) -> list[Fragment]:
    """`f`, a fragment of a tensor of `shape`, as boxes without steps of the same tensor seen with `dims`."""
    if not f.steps and dims == shape:
        return [f]
    steps = f.steps or (1,) * len(shape)
    row = row_major(shape)
    checkpoint = Region(sum(o * r for o, r in zip(f.origin, row)), f.extent, tuple(q * r for q, r in zip(steps, row)))
    storage = Region(f.offset, f.extent, f.strides)
    return boxes(TensorSpec(f.tensor, dims, f.dtype), checkpoint, storage, f.root, f.dtype, plain=True)


def split_of(shape: Ints, fragments: Iterable[Fragment]) -> Ints:
    """A split of `shape`: dims in which `fragments` of one tensor become boxes without steps. A dim of which every q-th
    index is held becomes two: the group of q, and the place in it. A dim whose steps do not divide one another stays whole.
    () if no dim is split, or more than `MAX_DIMS` would come of it.
    """
    factors = [{q for f in fragments if f.steps and (q := f.steps[k]) > 1} for k in range(len(shape))]
    if not any(factors):
        return ()
    out: list[int] = []
    for n, qs in zip(shape, factors):
        chain = [1, *sorted(qs), n]
        if any(b % a for a, b in zip(chain, chain[1:])):
            chain = [1, n]  # steps that do not divide one another, or the dim: one box per element it is
        out += [b // a for a, b in zip(chain, chain[1:])][::-1]
    return tuple(out) if tuple(out) != tuple(shape) and len(out) <= MAX_DIMS else ()


MAX_DIMS = 5
"""Most dims of a split tensor: one fewer than programs have, for the experts' dim."""


def relocate(fragments: Iterable[Fragment], places: Mapping[str, tuple[str, int]]) -> list[Fragment]:
    """The same fragments, relative to storages instead of to parameters, neighbours merged anew.

    `places`: parameter name -> (root name, byte offset of the parameter's first element in that root's storage).
    LayoutError lists every root that has no place.
    """
    fragments = list(fragments)
    lost = sorted({f.root for f in fragments} - set(places))
    if lost:
        raise LayoutError("parameters without a storage", (f"{n}: traced, but not in the live model" for n in lost))
    out = []
    for f in fragments:
        root, base = places[f.root]
        out.append(Fragment(f.tensor, f.origin, f.extent, root, base + f.offset, f.strides, f.dtype, f.steps))
    return merge(out)
