"""Placements: what one mesh axis does to one tensor, as plain values, and their translation from and to torch's.

`Shard`, `Replicate` and `StridedShard` mean exactly what torch's DTensor placements mean, uneven splits included.
`Segmented` and `Interleaved` say what DTensor cannot: fused tensors (`[gate; up]`, `[q; k; v]`) whose parts are cut
each for itself, in either of the two orders that frameworks store them in. Not here: the arithmetic (slices.py).

One placement per mesh axis, in mesh order. Several axes may cut one dim: each cuts what the axes before it left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Union

import msgspec

from xfer.errors import LayoutError, Unsupported
from xfer.mesh.box import Ints
from xfer.mesh.mesh_info import MeshInfo

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The dim is cut in consecutive chunks, as torch.chunk does: 10 over 4 is 3 3 3 1, 3 over 4 is 1 1 1 0."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """torch's `_StridedShard`: the dim is chunked in `split_factor` parts, each part is chunked over the axis.

    A rank holds its chunk of every part. With the size of a later axis that also cuts the dim as `split_factor`, this
    is "the later axis cuts first": the order of FSDP2 over tensor parallelism.
    """

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Segmented:
    """The dim is the concatenation of `segments` (sizes); each is chunked over the axis by itself.

    The local tensor is the concatenation of the rank's chunks: `[gate; up]` or `[q; k; v]` under tensor parallelism.
    `copies[i]` neighbouring ranks share one chunk of segment i (default 1 for all): KV heads replicated where there are
    more ranks than heads. The axis size must be a multiple of each.
    """

    dim: int
    segments: Ints
    copies: Ints = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "copies", tuple(self.copies))


@dataclass(frozen=True, slots=True)
class Interleaved:
    """The global dim is the concatenation of `segments` (sizes), but the local tensor stores it group by group.

    Each segment is cut in `groups` equal parts, group g is part g of every segment, and groups are chunked over the
    axis. Megatron's `linear_qkv` seen from `[q; k; v]`: their sizes are the segments, groups is the number of KV heads.
    """

    dim: int
    segments: Ints
    groups: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))


Placement = Union[Replicate, Shard, StridedShard, Segmented, Interleaved]  # noqa: UP007 (evaluated at run time on 3.10 too)
KINDS = (Replicate, Shard, StridedShard, Segmented, Interleaved)


class PlacementRecord(msgspec.Struct, frozen=True, array_like=True):
    """The plain form of a placement, for control messages."""

    kind: str
    fields: dict[str, int | tuple[int, ...]]

    @classmethod
    def of(cls, placement: Placement) -> PlacementRecord:
        return cls(type(placement).__name__, asdict(placement))

    def placement(self) -> Placement:
        """LayoutError when this is no placement (records come over a socket)."""
        kinds: dict[str, type[Placement]] = {k.__name__: k for k in KINDS}
        if self.kind not in kinds:
            raise LayoutError(f"no placement is called {self.kind!r}: known are {list(kinds)}")
        try:
            return msgspec.convert(self.fields, kinds[self.kind])
        except msgspec.ValidationError as e:
            raise LayoutError(f"a {self.kind} placement with fields {self.fields}: {e}") from None


def checked(
    shape: Sequence[int], mesh: MeshInfo, placements: Sequence[Placement], name: str = "tensor"
) -> tuple[Placement, ...]:
    """`placements` with negative dims resolved, after checking that they can describe a tensor of `shape` on `mesh`.

    Raises LayoutError with every violation; `name` is how the tensor is called in them.
    """
    wrong: list[str] = []
    out: list[Placement] = []
    if len(placements) != mesh.ndim:
        wrong.append(f"{name}: {len(placements)} placements for the {mesh.ndim} axes {mesh.axes}: give one per axis")
    wrong += [
        f"{name}: dim {d} of the global shape {tuple(shape)} is no size" for d, n in enumerate(shape) if _no_size(n)
    ]
    for axis, size, p in zip(mesh.axes, mesh.sizes, placements):
        where = f"{name}: axis {axis!r}: {p}"
        if not isinstance(p, KINDS):
            wrong.append(f"{where} is not a placement of xfer: translate torch's with from_torch()")
            continue
        if isinstance(p, Replicate):
            out.append(p)
            continue
        odd = [f"{f} is {v!r}" for f, v in _fields(p) if not isinstance(v, Integral)]
        if odd:
            wrong.append(f"{where}: {', '.join(odd)}: must be integers")
            continue
        if not -len(shape) <= p.dim < len(shape):
            wrong.append(f"{where}: the tensor of shape {tuple(shape)} has no dim {p.dim}")
            continue
        p = replace(p, dim=p.dim % len(shape))
        out.append(p)
        wrong += [f"{where}: {w}" for w in _faults(p, shape[p.dim], size)]
    if wrong:
        raise LayoutError(f"{name} cannot be placed so on {mesh!r}", wrong)
    return tuple(out)


def _no_size(n: object) -> bool:
    return not isinstance(n, Integral) or n < 0


def _fields(p: Placement) -> Iterator[tuple[str, object]]:
    """Name and value of every number in `p`."""
    for name in p.__slots__:
        value = getattr(p, name)
        yield from ((name, v) for v in (value if isinstance(value, tuple) else (value,)))


def _faults(p: Placement, n: int, size: int) -> list[str]:
    """Faults of `p` on a dim of global size `n` over an axis of `size` ranks."""
    wrong: list[str] = []
    if isinstance(p, StridedShard) and p.split_factor < 1:
        wrong.append(f"split_factor is {p.split_factor}, must be >= 1")
    if isinstance(p, (Segmented, Interleaved)):
        if any(s < 0 for s in p.segments) or sum(p.segments) != n:
            wrong.append(
                f"segments {p.segments} must be sizes that add up to the dim's {n}; they add up to {sum(p.segments)}"
            )
    if isinstance(p, Segmented) and p.copies:
        if len(p.copies) != len(p.segments):
            wrong.append(f"{len(p.copies)} copies for {len(p.segments)} segments: give one per segment, or none")
        wrong += [f"copies {c} does not divide the axis size {size}" for c in p.copies if c < 1 or size % c]
    if isinstance(p, Interleaved):
        if p.groups < 1:
            wrong.append(f"groups is {p.groups}, must be >= 1")
        else:
            wrong += [f"segment {s} is not a multiple of the {p.groups} groups" for s in p.segments if s % p.groups]
    return wrong


def from_torch(placements: Iterable[Placement | TorchPlacement]) -> tuple[Placement, ...]:
    """torch's DTensor placements as xfer's. xfer's own pass through, so that a caller may mix them.

    Raises Unsupported naming each one that is a pending reduction (`Partial` and its kin) or unknown.
    """
    from torch.distributed.tensor import placement_types as torch_types

    out: list[Placement] = []
    wrong: list[str] = []
    for i, p in enumerate(placements):
        if isinstance(p, KINDS):
            out.append(p)
        elif isinstance(p, torch_types._StridedShard):  # before Shard: older torch derives one from the other
            out.append(StridedShard(p.dim, int(p.split_factor)))
        elif isinstance(p, torch_types.Shard):
            out.append(Shard(p.dim))
        elif isinstance(p, torch_types.Replicate):
            out.append(Replicate())
        elif isinstance(p, torch_types.Partial):
            wrong.append(f"axis {i}: {p!r} is a sum not yet formed, no rank holds the value: redistribute it first")
        else:
            wrong.append(f"axis {i}: {type(p).__name__} {p!r} has no meaning here")
    if wrong:
        raise Unsupported("these placements do not say where values lie", wrong)
    return tuple(out)


def from_dtensor(tensor: DTensor) -> tuple[MeshInfo, tuple[Placement, ...]]:
    """Mesh (in global ranks) and placements of a DTensor.

    Newer torch may keep the order in which axes cut a dim beside the placements; the mesh then comes with its axes in
    that order, since here the order of axes is the order of cuts. Raises Unsupported as from_torch.
    """
    mesh, placements = MeshInfo.from_device_mesh(tensor.device_mesh), from_torch(tensor.placements)
    order = getattr(tensor._spec, "shard_order", None) or ()  # None where strided shards say it
    if all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order):
        return mesh, placements
    axes = [a for entry in order for a in entry.mesh_dims]
    axes += [a for a in range(mesh.ndim) if a not in axes]
    return mesh.transpose(mesh.axes[a] for a in axes), tuple(placements[a] for a in axes)
