"""MeshInfo: which rank sits where on a grid of named axes. A value, not a communicator: no process group is behind it.

A torch DeviceMesh can only describe ranks of the calling process's own world; a MeshInfo can describe any integers, so
that both sides of a transfer (two worlds, or a simulated thousand ranks) can be written down in one process.
Not here: how parallelism sizes become a mesh (parallel.py), what an axis does to a tensor (placement.py, slices.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from xfer.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


MAX_RANK = int(np.iinfo(np.int64).max)
"""Tables are int64."""


class MeshRecord(msgspec.Struct, frozen=True):
    """The plain form of a MeshInfo, for control messages: `ranks` is the table in row-major order."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """`ranks[c0, c1, …]` is the rank at coordinate (c0, c1, …); `axes` names the table's axes, slowest first.

    `ranks` may be anything numpy makes an integer array of; it is copied and frozen. Two meshes are equal when names
    and tables are. Raises LayoutError with every fault of the description at once.
    """

    axes: tuple[str, ...]
    ranks: np.ndarray

    def __post_init__(self) -> None:
        try:
            axes, table = tuple(self.axes), np.asarray(self.ranks)
        except (TypeError, ValueError) as e:
            raise LayoutError(f"the rank table is ragged, or the axes are no sequence of names: {e}") from None
        wrong: list[str] = []
        integers = np.issubdtype(table.dtype, np.integer)
        if not integers and table.size:
            wrong.append(f"ranks must be integers of 64 bits, got an array of {table.dtype}")
        if table.ndim != len(axes):
            wrong.append(
                f"{len(axes)} axis names {axes} for a rank table of shape {table.shape}: give one name per dim"
            )
        if table.size == 0:
            wrong.append(f"the rank table of shape {table.shape} is empty: every axis needs size >= 1")
        wrong += [f"axis name {a!r} must be a non-empty string" for a in axes if not (isinstance(a, str) and a)]
        names = Counter(a for a in axes if isinstance(a, str))
        wrong += [f"axis name {a!r} appears {n} times" for a, n in names.items() if n > 1]
        if integers:
            seen, counts = np.unique(table, return_counts=True)
            wrong += [f"rank {r} appears {n} times, may appear once" for r, n in zip(seen, counts) if n > 1]
            wrong += [f"rank {r} does not fit 64 bits" for r in seen[seen > MAX_RANK]]
        if wrong:
            raise LayoutError("this is not a mesh", wrong)
        table = np.array(table, np.int64, order="C")
        table.setflags(write=False)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "ranks", table)

    # ---- value semantics

    @cached_property
    def _key(self) -> tuple:
        return self.axes, self.ranks.shape, self.ranks.tobytes()

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, MeshInfo) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        sizes = " ".join(f"{a}={s}" for a, s in zip(self.axes, self.sizes))
        flat = self.ranks.ravel()
        run = len(flat) > 1 and bool((np.diff(flat) == 1).all())
        return f"MeshInfo({sizes}; {f'{flat[0]}..{flat[-1]}' if run else self.ranks.tolist()})"

    # ---- reading

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.ranks.shape

    @property
    def ndim(self) -> int:
        return self.ranks.ndim

    def size(self, axis: str | None = None) -> int:
        """Ranks along `axis`, or of the whole mesh."""
        return self.ranks.size if axis is None else self.sizes[self.index(axis)]

    def index(self, axis: str) -> int:
        """Position of `axis` in `axes`. LayoutError when there is no such axis."""
        if axis not in self.axes:
            raise LayoutError(f"no axis {axis!r} in {self!r}: its axes are {self.axes}")
        return self.axes.index(axis)

    def __contains__(self, rank: int) -> bool:
        return self.coordinate(rank) is not None

    @cached_property
    def _coordinate(self) -> dict[int, tuple[int, ...]]:
        return {int(r): tuple(map(int, c)) for c, r in np.ndenumerate(self.ranks)}

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Coordinate of one rank, or None when it is not in the mesh."""
        return self._coordinate.get(int(rank))

    def groups(self, axes: Iterable[str]) -> np.ndarray:
        """All groups of ranks that differ in `axes` only: int64 array [groups, ranks of a group].

        Within a group the first of `axes` is the slowest; groups are ordered by their remaining coordinates.
        """
        axes = tuple(axes)
        twice = [a for i, a in enumerate(axes) if a in axes[:i]]
        if twice:
            raise LayoutError(f"groups along {axes}: {twice} given twice; name each axis once")
        inner = [self.index(a) for a in axes]
        outer = [d for d in range(self.ndim) if d not in inner]
        width = math.prod(self.sizes[d] for d in inner)
        return self.ranks.transpose(*outer, *inner).reshape(-1, width)

    # ---- other meshes from this one

    def transpose(self, axes: Iterable[str]) -> MeshInfo:
        """The same ranks with the axes in another order (which is the order in which they cut a tensor)."""
        axes = tuple(axes)
        if len(axes) != self.ndim or any(a not in axes for a in self.axes):
            raise LayoutError(f"{axes} is no order of the axes {self.axes}")
        return MeshInfo(axes, self.ranks.transpose([self.index(a) for a in axes]))

    # ---- to and from other forms

    @classmethod
    def line(cls, axis: str, ranks: Iterable[int]) -> MeshInfo:
        """A mesh of one axis."""
        return cls((axis,), np.array([*ranks]))

    @classmethod
    def grid(cls, **sizes: int) -> MeshInfo:
        """Consecutive ranks from 0, the last axis fastest: `MeshInfo.grid(dp=2, tp=4)`."""
        bad = [f"axis {a!r} has size {n!r}" for a, n in sizes.items() if type(n) is not int or n < 1]
        if bad:
            raise LayoutError("sizes of a mesh must be integers >= 1", bad)
        return cls(tuple(sizes), np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())))

    def to_record(self) -> MeshRecord:
        return MeshRecord(self.axes, self.sizes, tuple(self.ranks.ravel().tolist()))

    @classmethod
    def from_record(cls, record: MeshRecord) -> MeshInfo:
        """Raises LayoutError when the record's sizes do not fit its ranks (records come over a socket)."""
        if any(s < 0 for s in record.sizes) or math.prod(record.sizes) != len(record.ranks):
            raise LayoutError(f"a mesh of sizes {record.sizes} cannot hold {len(record.ranks)} ranks")
        try:
            table = np.array(record.ranks, np.int64).reshape(record.sizes)
        except OverflowError:
            raise LayoutError("a rank does not fit 64 bits") from None
        return cls(record.axes, table)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> MeshInfo:
        """The ranks of a torch DeviceMesh. Axes that it does not name are called axis0, axis1, …"""
        names = mesh.mesh_dim_names or (f"axis{d}" for d in range(mesh.mesh.ndim))
        return cls(tuple(names), mesh.mesh.cpu().numpy())
