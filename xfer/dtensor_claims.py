"""Claims: what each rank says about a transfer of one tensor. Together they give two layouts, or an error.

No process group and no tensor is used here. Every rank runs this on the same claims, so every rank gets the same
layouts or the same error. Not here: how a rank makes its claim, and how claims travel (dtensor.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from xfer.errors import LayoutError, PlanMismatch, ProtocolError
from xfer.mesh.mesh_info import MeshInfo, MeshRecord
from xfer.mesh.placement import Interleaved, Placement, PlacementRecord, Replicate, Segmented, checked
from xfer.mesh.slices import local_shape

Ints = tuple[int, ...]
SOURCE, DESTINATION = 0, 1
SIDES = ("source", "destination")


class Local(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A local tensor in its storage.

    Attributes:
        shape: Elements per dim.
        dtype: Name in torch, e.g. "bfloat16".
        strides: Bytes per dim.
        offset: Bytes from the beginning of the storage to the first element.
        storage: Bytes of the whole storage.
        device: Type of device only: "cpu", "cuda".
    """

    shape: Ints
    dtype: str
    strides: Ints
    offset: int
    storage: int
    device: str


class Side(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's description of the source or of the destination. A field that the rank does not know is None.

    Attributes:
        mesh: Mesh, in ranks of the group.
        placements: One per mesh axis.
        shape: Shape of the whole tensor.
        local: The rank's own part; None on ranks outside the mesh.
    """

    mesh: MeshRecord | None = None
    placements: tuple[PlacementRecord, ...] | None = None
    shape: Ints | None = None
    local: Local | None = None


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a rank says about a transfer.

    Attributes:
        rank: Rank in the group.
        host: Name of the host; sources on the destination's host are preferred.
        narrow: Whether a cast may lose bits.
        peer: Whether destinations may read sources' memory themselves; None: where that is usual for the device.
        sides: Source and destination.
        error: The error that the rank met while it described its sides (`XferError.to_wire`); it describes none then.
    """

    rank: int
    host: str
    narrow: bool = False
    peer: bool | None = None
    sides: tuple[Side, Side] = (Side(), Side())
    error: tuple[str, str, tuple[str, ...], str] | None = None


@dataclass(frozen=True)
class Layout:
    """The source or the destination, as all ranks see it.

    Attributes:
        mesh: Mesh, in ranks of the group.
        placements: One per mesh axis.
        locals: (rank, local tensor) of every rank in the mesh, by rank ascending.
    """

    mesh: MeshInfo
    placements: tuple[Placement, ...]
    locals: tuple[tuple[int, Local], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(r for r, _ in self.locals)


def layouts(claims: Sequence[Claim]) -> tuple[Layout, Layout, Ints]:
    """Combine the claims of all ranks.

    Args:
        claims: One per rank of the group, by rank; none with an error.

    Returns:
        Source, destination, and the shape of the whole tensor.

    Raises:
        PlanMismatch: Ranks say different things of one side, or of `narrow` or `peer`; with all differences.
        LayoutError: The sides do not fit their meshes, their tensors or each other; with all violations.
    """
    different = _different("narrow", [(c.rank, c.narrow) for c in claims])
    different += _different("peer", [(c.rank, c.peer) for c in claims])
    for i, what in enumerate(SIDES):
        for part in ("mesh", "placements", "shape"):
            different += _different(f"the {what}'s {part}", _said(claims, i, part))
    if different:
        raise PlanMismatch("ranks describe different transfers", different)

    wrong: list[str] = []
    found: list[Layout] = []
    shapes: dict[str, Ints] = {}
    for i, what in enumerate(SIDES):
        meshes, placed, shape_said = (_said(claims, i, part) for part in ("mesh", "placements", "shape"))
        if not meshes or not placed:
            wrong.append(f"{what}: no rank gave mesh and placements, or a DTensor")
            continue
        mesh = MeshInfo.from_record(meshes[0][1])
        absent = _absent(what, mesh, [c.sides[i].local for c in claims])
        wrong += absent
        if absent:
            continue
        locals_ = tuple((r, claims[r].sides[i].local) for r in sorted(mesh.ranks.ravel().tolist()))
        layout = Layout(mesh, tuple(p.placement() for p in placed[0][1]), locals_)
        shapes[what] = shape_said[0][1] if shape_said else _global_shape(layout)
        found.append(layout)
        try:
            wrong += _misfits(what, layout, shapes[what])
        except LayoutError as e:
            wrong += e.violations or (e.message,)
    if len(set(shapes.values())) > 1:
        wrong.append(f"the tensors differ: {' but '.join(f'the {w} is {list(s)}' for w, s in shapes.items())}")
    kinds = _different("device", [(r, local.device) for layout in found for r, local in layout.locals])
    wrong += [f"{line}; all tensors of a transfer must be on one kind of device" for line in kinds]
    if wrong:
        raise LayoutError("this transfer cannot be made", wrong)
    return found[SOURCE], found[DESTINATION], shapes[SIDES[SOURCE]]


def _said(claims: Sequence[Claim], side: int, part: str) -> list[tuple[int, Any]]:
    """(rank, value) of every rank that knows `part` (an attribute of Side) of a side."""
    return [(c.rank, v) for c in claims if (v := getattr(c.sides[side], part)) is not None]


def _different(what: str, said: list[tuple[int, object]]) -> list[str]:
    """One line if not all ranks say the same, else none."""
    by_value: dict[bytes, tuple[object, list[int]]] = {}
    for rank, value in said:
        by_value.setdefault(msgspec.msgpack.encode(value), (value, []))[1].append(rank)
    if len(by_value) < 2:
        return []
    return [f"{what}: {'; '.join(f'ranks {ranks} say {_text(value)}' for value, ranks in by_value.values())}"]


def _text(value: object) -> str:
    try:
        if isinstance(value, MeshRecord):
            return repr(MeshInfo.from_record(value))
        if isinstance(value, tuple) and value and isinstance(value[0], PlacementRecord):
            return str([p.placement() for p in value])
    except LayoutError as e:
        return f"an invalid description ({e.message})"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _absent(what: str, mesh: MeshInfo, locals_: Sequence[Local | None]) -> list[str]:
    """Ranks in the mesh without a tensor, ranks outside it with one, and ranks of the mesh that the group does not have."""
    wrong = [
        f"{what}: the mesh has rank {r}, the group has ranks 0..{len(locals_) - 1}"
        for r in mesh.ranks.ravel()
        if not 0 <= r < len(locals_)
    ]
    for rank, local in enumerate(locals_):
        if rank in mesh and local is None:
            wrong.append(f"{what}: rank {rank} is in the mesh and passed no tensor")
        if rank not in mesh and local is not None:
            wrong.append(f"{what}: rank {rank} passed a tensor and is not in the mesh")
    return wrong


def _misfits(what: str, layout: Layout, shape: Ints) -> list[str]:
    """Local tensors whose shape is not the one that the layout gives their rank. LayoutError if placements do not fit `shape`."""
    placements = checked(shape, layout.mesh, layout.placements, what)
    wrong = []
    for rank, local in layout.locals:
        want = local_shape(shape, layout.mesh, placements, rank)
        if want is None:  # `_absent` reports a rank outside the mesh
            continue
        if local.shape != want and (math.prod(local.shape) > 0 or math.prod(want) > 0):
            wrong.append(
                f"{what}: rank {rank} passed {list(local.shape)}, expected {list(want)}: "
                f"its part of {list(shape)} under {placements}"
            )
    return wrong


def _global_shape(layout: Layout) -> Ints:
    """The global shape that local shapes add up to. `_misfits` reports those that contradict the layout."""
    shape_of = {rank: local.shape for rank, local in layout.locals}
    dims = max(map(len, shape_of.values()))
    out = []
    for d in range(dims):
        cuts = [i for i, p in enumerate(layout.placements) if not isinstance(p, Replicate) and p.dim in (d, d - dims)]
        fused = [p for i in cuts if isinstance(p := layout.placements[i], (Segmented, Interleaved))]
        if fused:
            out.append(sum(fused[0].segments))
            continue
        line = layout.mesh.ranks[tuple(slice(None) if i in cuts else 0 for i in range(layout.mesh.ndim))]
        out.append(sum(s[d] for r in line.ravel() if len(s := shape_of[int(r)]) == dims))
    return tuple(out)


_claim = msgspec.msgpack.Decoder(Claim)  # made once: making one takes longer than decoding with it


def decode(rank: int, data: bytes) -> Claim:
    """The claim that `rank` sent. ProtocolError if the bytes are no claim, or one of another rank."""
    try:
        claim = _claim.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"rank {rank} sent no claim: {e}") from None
    if claim.rank != rank:
        raise ProtocolError(f"rank {rank} calls itself rank {claim.rank}")
    return claim
