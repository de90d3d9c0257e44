"""Fragments as columns: the form in which they are sorted, checked, hashed, sent and intersected.

This module has the table, and its conversion from and to Fragment objects. inventory.py has the rest of a rank's
inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xfer.errors import LayoutError, Unsupported
from xfer.plan.program import DTYPE_CODE, DTYPES, ITEM, MAX_DIMS
from xfer.trace.fragment import Fragment, Root

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog


@dataclass(frozen=True, slots=True, eq=False)
class FragmentTable:
    """Fragments as columns, in one order (tensor, box, storage position), so that equal sets are equal tables.

    Boxes and strides have MAX_DIMS columns; a tensor of fewer dims is padded in front with origin 0, extent 1, stride
    0.
    """

    tensor: np.ndarray  # int32 [N], index in catalog.tensors
    root: np.ndarray  # int32 [N], index in the inventory's roots
    dtype: np.ndarray  # uint8 [N], wire code
    offset: np.ndarray  # int64 [N], bytes
    origin: np.ndarray  # int64 [N, MAX_DIMS], elements
    extent: np.ndarray  # int64 [N, MAX_DIMS], elements
    strides: np.ndarray  # int64 [N, MAX_DIMS], bytes; 0 where the extent is 1

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def build(cls, fragments: Iterable[Fragment], catalog: Catalog, roots: Sequence[Root]) -> FragmentTable:
        """Fragments of the catalog's grouped tensors -> columns; fragments without elements are left out.

        Raises Unsupported (too many dims, unknown dtype) and LayoutError (unknown names, boxes outside their tensor,
        bytes outside their storage), each naming every offender.
        """
        fragments = [f for f in fragments if all(f.extent)]
        number = {r.name: i for i, r in enumerate(roots)}
        _refuse_unsupported(fragments)
        bad = [f"{f.tensor}: not in the catalog" for f in fragments if f.tensor not in catalog.index]
        bad += [
            f"{f.tensor}: lies in storage {f.root}, which is not among the roots"
            for f in fragments
            if f.root not in number
        ]
        for f in fragments:
            shape = catalog.tensors[catalog.index[f.tensor]].shape if f.tensor in catalog.index else None
            if shape is not None and not len(f.origin) == len(f.extent) == len(f.strides) == len(shape):
                bad.append(
                    f"{f.tensor}: origin {f.origin}, extent {f.extent}, strides {f.strides} do not fit shape {shape}"
                )
        if bad:
            raise LayoutError("fragments do not fit the catalog", sorted(set(bad)))
        pad = [MAX_DIMS - len(f.origin) for f in fragments]
        table = cls(
            np.array([catalog.index[f.tensor] for f in fragments], np.int32),
            np.array([number[f.root] for f in fragments], np.int32),
            np.array([DTYPE_CODE[f.dtype] for f in fragments], np.uint8),
            np.array([f.offset for f in fragments], np.int64),
            _wide([(0,) * p + tuple(f.origin) for p, f in zip(pad, fragments)]),
            _wide([(1,) * p + tuple(f.extent) for p, f in zip(pad, fragments)]),
            _wide(
                [
                    (0,) * p + tuple(s if n > 1 else 0 for s, n in zip(f.strides, f.extent))
                    for p, f in zip(pad, fragments)
                ]
            ),
        ).sorted()
        bad = list(table.misfits(catalog, roots))
        if bad:
            raise LayoutError("fragments lie outside their tensor or their storage", bad)
        return table

    def dims(self) -> int:
        """Number of columns of boxes and strides that are used; the columns before them are padding in every row."""
        used = np.flatnonzero(((self.extent != 1) | (self.origin != 0)).any(axis=0))
        return MAX_DIMS - int(used[0]) if len(used) else 0

    def sorted(self) -> FragmentTable:
        keys = [
            self.dtype,
            *self.strides.T[::-1],
            self.offset,
            self.root,
            *self.extent.T[::-1],
            *self.origin.T[::-1],
            self.tensor,
        ]
        return self.take(np.lexsort(keys))

    def take(self, rows: np.ndarray) -> FragmentTable:
        return FragmentTable(*(getattr(self, name).take(rows, axis=0) for name in self.__slots__))

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """First and one-past-last byte of each fragment in its storage, int64 [N]."""
        reach = (self.extent - 1) * self.strides
        low = self.offset + np.minimum(reach, 0).sum(axis=1)
        return low, self.offset + np.maximum(reach, 0).sum(axis=1) + ITEM[self.dtype]

    def misfits(self, catalog: Catalog, roots: Sequence[Root], shapes: np.ndarray | None = None) -> Iterator[str]:
        """One line per fragment whose box is not inside its tensor or whose bytes are not inside its storage.

        `shapes`: padded_shapes(catalog), for callers that check many tables.
        """
        if not len(self):
            return
        size = np.array([r.nbytes for r in roots] or [0], np.int64)[self.root]
        foreign, outside, beyond = self.unfit(padded_shapes(catalog) if shapes is None else shapes, size)
        for i in np.flatnonzero(foreign):
            yield f"fragment {i}: tensor number {self.tensor[i]} of {len(catalog.tensors)} in the catalog"
        for i in np.flatnonzero(outside):
            spec = catalog.tensors[self.tensor[i]]
            box = box_text(self.origin[i], self.extent[i], len(spec.shape))
            yield f"{spec.name}: box {box} outside shape {spec.shape}"
        low, high = self.bounds()
        for i in np.flatnonzero(beyond):
            name = roots[self.root[i]].name
            yield f"{name}: bytes {low[i]}..{high[i]} of a fragment outside a storage of {size[i]} bytes"

    def unfit(self, shapes: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Whether each fragment is of no tensor, has a box outside its tensor, or has bytes outside its storage of
        `size` bytes (int64 [N]). bool [N] each.

        `shapes`: padded_shapes(catalog).
        """
        foreign = self.tensor >= len(shapes)
        some = foreign.any()
        shape = shapes[np.where(foreign, 0, self.tensor) if some else self.tensor] if len(shapes) else self.origin
        outside = ((self.origin < 0) | (self.origin + self.extent > shape)).any(axis=1)
        low, high = self.bounds()
        return foreign, outside & ~foreign if some else outside, (low < 0) | (high > size)

    def fragments(self, catalog: Catalog, roots: Sequence[Root]) -> Iterator[Fragment]:
        """The rows as objects again, in table order."""
        for i in range(len(self)):
            spec = catalog.tensors[self.tensor[i]]
            cut = slice(MAX_DIMS - len(spec.shape), None)
            origin, extent, strides = (tuple(c[i, cut].tolist()) for c in (self.origin, self.extent, self.strides))
            yield Fragment(
                spec.name, origin, extent, roots[self.root[i]].name, int(self.offset[i]), strides, DTYPES[self.dtype[i]]
            )


def box_text(origin: Sequence[int], extent: Sequence[int], dims: int) -> str:
    """ "[0:4, 8:16]": the last `dims` columns of a padded box."""
    pairs = list(zip(origin, extent))[MAX_DIMS - dims :] if len(origin) == MAX_DIMS else list(zip(origin, extent))
    return "[" + ", ".join(f"{int(o)}:{int(o) + int(e)}" for o, e in pairs) + "]"


def _refuse_unsupported(fragments: Sequence[Fragment]) -> None:
    bad = {
        f"{f.tensor}: {len(f.extent)} dims, at most {MAX_DIMS} are supported"
        for f in fragments
        if len(f.extent) > MAX_DIMS
    }
    bad |= {f"{f.tensor}: dtype {f.dtype} has no wire code" for f in fragments if f.dtype not in DTYPE_CODE}
    if bad:
        raise Unsupported("tensors that cannot be planned", sorted(bad))


_SHAPES: dict[str, np.ndarray] = {}
"""Digest of a catalog -> its padded shapes. A process uses few catalogs."""


def padded_shapes(catalog: Catalog) -> np.ndarray:
    """Shapes of catalog.tensors, int64 [tensors, MAX_DIMS], padded in front with 1; read-only. All 0 for a tensor
    of too many dims.
    """
    found = _SHAPES.get(catalog.digest())
    if found is None:
        dims = [tuple(t.shape) for t in catalog.tensors]
        found = _wide([(1,) * (MAX_DIMS - len(s)) + s if len(s) <= MAX_DIMS else (0,) * MAX_DIMS for s in dims])
        found.setflags(write=False)
        if len(_SHAPES) >= 4:
            _SHAPES.clear()
        _SHAPES[catalog.digest()] = found
    return found


def _wide(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(len(rows), MAX_DIMS)
