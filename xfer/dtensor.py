"""`xferdtensor`: moves one tensor from any mesh and placements to any other, over a torch ProcessGroup. The tensor-level call.

Every rank says what it knows (its meshes, placements, local tensors), all hear it, all compute the same plan with the planner
that refits use, agree on its digest, and run it over point-to-point messages. A layout that was seen before costs one small
collective before the bytes move. Not here: anything about models, engines, versions or commits.
"""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import msgspec
import numpy as np
import torch

from xfer.errors import DeadlineExceeded, LayoutError, PlanMismatch, ProtocolError, Unsupported, XferError, from_wire
from xfer.mesh.mesh_info import MeshInfo, MeshRecord
from xfer.mesh.placement import Placement, PlacementRecord, Replicate, checked, from_torch
from xfer.mesh.slices import local_shape
from xfer.plan.program import ROW, Program
from xfer.trace.declared import declared_fragments
from xfer.trace.fragment import Root, TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

    from xfer.plan.subplan import SubPlan
    from xfer.trace.fragment import Fragment

Ints = tuple[int, ...]
Mesh = Union["MeshInfo", "DeviceMesh", None]
Placements = Union[Sequence[Union[Placement, "TorchPlacement"]], None]
SOURCE, TAKER = 0, 1
SIDES = ("source", "destination")
NAME = "tensor"
CACHED_LAYOUTS = 64
MAX_CLAIM_BYTES = 64 << 20


def xferdtensor(
    src_tensor: torch.Tensor | DTensor | None,
    src_mesh: Mesh,
    src_placements: Placements,
    dst_tensor: torch.Tensor | DTensor | None,
    dst_mesh: Mesh,
    dst_placements: Placements,
    group: ProcessGroup | None = None,
    *,
    global_shape: Sequence[int] | None = None,
    narrow: bool = False,
    timeout: float = 300.0,
) -> None:
    """Fills every destination rank's `dst_tensor` with its part of the tensor that the source ranks hold. In place.

    Collective over `group` (default: the default group); the ranks in meshes are ranks of that group, from 0. The meshes
    may be equal, overlap, or share no rank, and differ in every way. Each rank passes its local tensor for each side that
    it is in and None for a side that it is not in. Local tensors may have any strides; destinations may not overlap
    themselves, nor any source of the same process. Where a rank is in both meshes, what it already holds is copied locally.

    A mesh is a MeshInfo or a DeviceMesh (whose global ranks are translated to the group's), placements are xfer's or torch's,
    mixed at will. With a DTensor as tensor they may be None: on all ranks that are not in it, too. `global_shape` may be
    left out when local shapes tell it, which they do. `narrow` allows a cast that loses bits (float32 to bfloat16).

    Raises on *all* ranks of the group, before anything moves: LayoutError (all violations) when layouts and tensors do not
    fit, PlanMismatch when ranks describe different transfers, Unsupported (pending sums, tensor subclasses); and
    DeadlineExceeded after `timeout` seconds.
    """
    group = group if group is not None else torch.distributed.group.WORLD
    deadline = time.monotonic() + timeout
    me, world = group.rank(), group.size()
    locals_: list[torch.Tensor | None] = [None, None]
    try:
        sides = []
        for i, (tensor, mesh, placements) in enumerate(
            ((src_tensor, src_mesh, src_placements), (dst_tensor, dst_mesh, dst_placements))
        ):
            side, locals_[i] = _describe(SIDES[i], tensor, mesh, placements, global_shape, group)
            sides.append(side)
        _refuse_overlap(*locals_)
        claim = Claim(me, world, socket.gethostname(), bool(narrow), tuple(sides))
    except XferError as e:
        # Told to the others instead of raised at once: they would wait for this rank.
        claim = Claim(me, world, socket.gethostname(), error=e.to_wire())
    move = _agree(claim, group, deadline)
    _run(move, group, locals_, deadline)


# ---- what one rank says


class Local(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A local tensor in its storage: sizes in elements, the rest in bytes."""

    shape: Ints
    dtype: str
    strides: Ints
    offset: int
    storage: int


class Side(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank knows of one side; None for what it does not."""

    mesh: MeshRecord | None = None
    placements: tuple[PlacementRecord, ...] | None = None
    shape: Ints | None = None  # global
    local: Local | None = None


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a rank says about a transfer, or the error that kept it from saying it."""

    rank: int
    world: int
    host: str
    narrow: bool = False
    sides: tuple[Side, Side] = (Side(), Side())
    error: tuple[str, str, tuple[str, ...], str] | None = None


def _describe(
    what: str,
    tensor: torch.Tensor | DTensor | None,
    mesh: Mesh,
    placements: Placements,
    shape: Sequence[int] | None,
    group: ProcessGroup,
) -> tuple[Side, torch.Tensor | None]:
    from torch.distributed.tensor import DTensor

    shape = None if shape is None else tuple(int(n) for n in shape)
    if isinstance(tensor, DTensor):
        found_mesh, found = _of_dtensor(tensor, group)
        if mesh is not None and _mesh(mesh, group) != _mesh(tensor.device_mesh, group):
            raise LayoutError(f"the {what} is a DTensor on another mesh than the one given: pass None as mesh")
        if placements is not None and from_torch(placements) != from_torch(tensor.placements):
            raise LayoutError(f"the {what} is a DTensor with other placements than those given: pass None as placements")
        if shape not in (None, tuple(tensor.shape)):
            raise LayoutError(f"the {what} is a DTensor of shape {tuple(tensor.shape)}, global_shape says {shape}")
        shape, tensor = tuple(tensor.shape), _settled(tensor)
    else:
        if (mesh is None) != (placements is None):
            raise LayoutError(f"{what}: give mesh and placements together, or neither (with a DTensor)")
        found_mesh = None if mesh is None else _mesh(mesh, group)
        found = None if placements is None else from_torch(placements)
    record = None if found_mesh is None else found_mesh.to_record()
    kinds = None if found is None else tuple(PlacementRecord.of(p) for p in found)
    if tensor is None:
        return Side(record, kinds, shape), None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"{type(tensor).__name__} with layout {tensor.layout} on {tensor.device}"
        raise Unsupported(f"the local {what} is a {kind}: only plain strided tensors with storage have bytes to move")
    if tensor.is_neg() or tensor.is_conj():
        raise Unsupported(f"the local {what} is a lazy negation or conjugate: its storage holds other values; call .resolve_neg()")
    item = tensor.element_size()
    local = Local(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        strides=tuple(s * item for s in tensor.stride()),
        offset=tensor.storage_offset() * item,
        storage=tensor.untyped_storage().nbytes(),
    )
    return Side(record, kinds, shape, local), tensor.detach()


def _of_dtensor(tensor: DTensor, group: ProcessGroup) -> tuple[MeshInfo, tuple[Placement, ...]]:
    """Mesh and placements of a DTensor, the mesh's axes in the order in which they cut each dim."""
    mesh, placements = _mesh(tensor.device_mesh, group), from_torch(tensor.placements)
    order = getattr(tensor._spec, "shard_order", None) or ()  # torch >= 2.10; None where the placements tell it
    axes = [a for entry in order for a in entry.mesh_dims]
    axes += [a for a in range(mesh.ndim) if a not in axes]
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        return mesh.transpose(mesh.axes[a] for a in axes), tuple(placements[a] for a in axes)
    return mesh, placements


def _settled(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, after any collective that still writes it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _mesh(mesh: MeshInfo | DeviceMesh, group: ProcessGroup) -> MeshInfo:
    """In ranks of `group`."""
    if isinstance(mesh, MeshInfo):
        return mesh
    found = MeshInfo.from_device_mesh(mesh)
    if group is torch.distributed.group.WORLD:
        return found
    try:
        ranks = torch.distributed.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        raise Unsupported("a DeviceMesh has ranks of this process's own world, the group is not of it: pass a MeshInfo") from None
    number = {g: i for i, g in enumerate(ranks)}
    missing = [f"rank {r} of {found!r} is not in the group of ranks {ranks}" for r in found.ranks.ravel() if r not in number]
    if missing:
        raise LayoutError("a mesh leaves the group", missing)
    return MeshInfo(found.axes, np.vectorize(number.__getitem__, otypes=[np.int64])(found.ranks))


def _refuse_overlap(src: torch.Tensor | None, dst: torch.Tensor | None) -> None:
    """Rows run in no particular order, so a destination must not share bytes with the source of the same process."""
    if src is None or dst is None or src.untyped_storage().data_ptr() != dst.untyped_storage().data_ptr():
        return
    (a, b), (c, d) = _reach(src), _reach(dst)
    if max(a, c) < min(b, d):
        raise LayoutError("source and destination share memory on this rank: give the destination memory of its own")


def _reach(t: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte of a tensor in its storage."""
    if not t.numel():
        return 0, 0
    start = t.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return start * t.element_size(), (last + 1) * t.element_size()


# ---- what all ranks make of it


@dataclass(frozen=True)
class Layout:
    """One side as all ranks see it. `locals` has the local tensor of every rank in the mesh, by rank ascending."""

    mesh: MeshInfo
    placements: tuple[Placement, ...]
    locals: tuple[tuple[int, Local], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(r for r, _ in self.locals)


@dataclass(frozen=True)
class Move:
    """One rank's share of an agreed transfer. It holds no tensor and no group, so it can be kept."""

    digest: bytes
    program: Program


def _agree(claim: Claim, group: ProcessGroup, deadline: float) -> Move:
    """The same plan on every rank, or the same kind of error on every rank."""
    said = msgspec.msgpack.encode(claim)
    known = _KEPT.get(said) if claim.error is None else None
    heads = _exchange(group, (known.digest if known else _NONE) + len(said).to_bytes(8, "little"), deadline)
    if known and all(h[:16] == known.digest for h in heads):
        return known
    sizes = [int.from_bytes(h[16:], "little") for h in heads]
    if max(sizes) > MAX_CLAIM_BYTES:
        raise ProtocolError(f"a rank describes its side in {max(sizes)} bytes, at most {MAX_CLAIM_BYTES} are read")
    padded = _exchange(group, said.ljust(max(sizes), b"\0"), deadline)
    claims = [_decode(rank, data[:n]) for rank, (data, n) in enumerate(zip(padded, sizes))]
    _raise_told(claims, claim.rank)

    # From here on all ranks compute the same from the same input; the second exchange proves that they did.
    failure: Exception | None = None
    digest = _NONE
    try:
        move = _plan(claims, claim.rank)
        digest = move.digest
    except Exception as e:
        failure = e
    heads = _exchange(group, digest, deadline)
    if failure is not None:
        raise failure
    if any(h != digest for h in heads):
        lines = [f"rank {r}: {h.hex() if h != _NONE else 'could not plan, see its own error'}" for r, h in enumerate(heads)]
        raise PlanMismatch("ranks computed different plans from the same descriptions: do all run the same xfer?", lines)
    _KEPT.put(said, move)
    return move


def _raise_told(claims: Sequence[Claim], me: int) -> None:
    told = [(c.rank, from_wire(*c.error)) for c in claims if c.error is not None]
    for rank, error in told:
        if rank == me:
            raise error
    if told:
        kind = type(told[0][1])
        raise kind("other ranks could not take part", [f"rank {r}: {line}" for r, e in told for line in str(e).splitlines()])


def _plan(claims: Sequence[Claim], me: int) -> Move:
    from xfer.plan.inventory import engine_inventory, trainer_inventory
    from xfer.plan.planner import PlanOptions, plan_replica
    from xfer.trace.catalog import Catalog

    source, taker, shape = _layouts(claims)
    spec = TensorSpec(NAME, shape, source.locals[0][1].dtype)
    ranks = np.array([*source.ranks, *taker.ranks])
    identity = hashlib.blake2b(msgspec.msgpack.encode((source.ranks, taker.ranks, shape)), digest_size=16)
    if not math.prod(shape):
        return Move(identity.digest(), Program(me, 0, np.zeros(0, ROW)))
    catalog = Catalog((spec,))
    fragments = [
        [_fragments(spec, layout, rank, local) for rank, local in layout.locals] for layout in (source, taker)
    ]
    sources = [
        trainer_inventory(catalog, rank=i, host=claims[rank].host, roots=[Root(NAME, local.storage)], fragments=f)
        for i, ((rank, local), f) in enumerate(zip(source.locals, fragments[SOURCE]))
    ]
    # No footprint: a destination may be a view with foreign bytes between its own. That every element of it is written,
    # and written once, follows from the boxes of the layout and from the planner's proof about fragments.
    takers = [
        engine_inventory(
            catalog, rank=i, host=claims[rank].host, roots=[Root(NAME, local.storage)], fragments=f, footprint=()
        )
        for i, ((rank, local), f) in enumerate(zip(taker.locals, fragments[TAKER]))
    ]
    # A process that holds what it wants should take it from itself, which is worth more than to prefer its host.
    overlap = set(source.ranks) & set(taker.ranks)
    hosts = tuple(int(r) if overlap else claims[r].host for r in ranks)
    plan = plan_replica(catalog, sources, takers, PlanOptions(hosts=hosts, narrow=(NAME,) if claims[0].narrow else ()))
    identity.update(plan.digest.encode())
    return Move(identity.digest(), _program(plan, source.ranks, taker.ranks, me))


def _fragments(spec: TensorSpec, layout: Layout, rank: int, local: Local) -> tuple[Fragment, ...]:
    if not math.prod(local.shape):
        return ()
    return declared_fragments(
        spec.name, spec.shape, local.dtype, layout.mesh, layout.placements, rank, NAME, local.strides, local.offset
    )


def _program(plan: SubPlan, sources: Ints, takers: Ints, me: int) -> Program:
    """The rows that rank `me` of the group takes part in, as sender, as taker, or both, numbered by ranks of the group."""
    parts = []
    joint = sources.index(me) if me in sources else -1
    if joint >= 0:
        parts.append(plan.program(joint).rows)
    if me in takers:
        rows = plan.program(len(sources) + takers.index(me)).rows
        parts.append(rows[rows["src"] != joint])  # what it sends to itself is among its sends already
    rows = np.concatenate(parts) if parts else np.zeros(0, ROW)
    number = np.array([*sources, *takers], np.int32)
    rows["src"], rows["dst"] = number[rows["src"]], number[rows["dst"]]
    return Program(me, plan.waves, rows[np.lexsort((rows["wire"], rows["dst"], rows["src"], rows["wave"]))])


# ---- checking what was said


def _layouts(claims: Sequence[Claim]) -> tuple[Layout, Layout, Ints]:
    """Both sides and the global shape; PlanMismatch or LayoutError, with all violations, that are equal on all ranks."""
    different = _different("narrow", [(c.rank, c.narrow) for c in claims])
    different += _different("the size of the group", [(c.rank, c.world) for c in claims])
    for i, what in enumerate(SIDES):
        for part in ("mesh", "placements", "shape"):
            said = [(c.rank, getattr(c.sides[i], part)) for c in claims]
            different += _different(f"the {what}'s {part}", [(r, v) for r, v in said if v is not None])
    if different:
        raise PlanMismatch("ranks describe different transfers", different)

    wrong: list[str] = []
    layouts: list[Layout] = []
    shapes: dict[str, Ints] = {}
    for i, what in enumerate(SIDES):
        known = {p: next((v for c in claims if (v := getattr(c.sides[i], p)) is not None), None) for p in Side.__struct_fields__}
        if known["mesh"] is None or known["placements"] is None:
            wrong.append(f"{what}: no rank gave mesh and placements, or a DTensor")
            continue
        mesh, placements = MeshInfo.from_record(known["mesh"]), tuple(p.placement() for p in known["placements"])
        found = _locals(what, mesh, [c.sides[i].local for c in claims])
        wrong += found
        if found:
            continue
        layout = Layout(mesh, placements, tuple((int(r), claims[r].sides[i].local) for r in sorted(mesh.ranks.ravel())))
        shape = known["shape"] if known["shape"] is not None else _global_shape(layout)
        try:
            wrong += _misfits(what, layout, shape)
        except LayoutError as e:
            wrong += e.violations or (e.message,)
        layouts.append(layout)
        shapes[what] = shape
    if len(set(shapes.values())) > 1:
        wrong.append(f"the tensors differ: {' but '.join(f'the {w} is {list(s)}' for w, s in shapes.items())}")
    if wrong:
        raise LayoutError("this transfer cannot be made", wrong)
    return layouts[SOURCE], layouts[TAKER], shapes[SIDES[SOURCE]]


def _different(what: str, said: list[tuple[int, object]]) -> list[str]:
    by_value: dict[bytes, tuple[object, list[int]]] = {}
    for rank, value in said:
        by_value.setdefault(msgspec.msgpack.encode(value), (value, []))[1].append(rank)
    if len(by_value) < 2:
        return []
    return [f"{what}: {'; '.join(f'ranks {ranks} say {value}' for value, ranks in by_value.values())}"]


def _locals(what: str, mesh: MeshInfo, locals_: Sequence[Local | None]) -> list[str]:
    """Whether just the ranks in the mesh brought a tensor."""
    wrong = [f"{what}: the mesh has rank {r}, the group has ranks 0..{len(locals_) - 1}" for r in mesh.ranks.ravel() if not 0 <= r < len(locals_)]
    for rank, local in enumerate(locals_):
        if rank in mesh and local is None:
            wrong.append(f"{what}: rank {rank} is in the mesh and passed no tensor")
        if rank not in mesh and local is not None:
            wrong.append(f"{what}: rank {rank} passed a tensor and is not in the mesh")
    return wrong


def _misfits(what: str, layout: Layout, shape: Ints) -> list[str]:
    """Local tensors that are not of the shape that the layout gives their rank. LayoutError when the layout itself is wrong."""
    placements = checked(shape, layout.mesh, layout.placements, what)
    wrong = []
    for rank, local in layout.locals:
        want = local_shape(shape, layout.mesh, placements, rank)
        if local.shape != want and (math.prod(local.shape) or math.prod(want)):
            wrong.append(f"{what}: rank {rank} passed {list(local.shape)}; of {list(shape)} it holds {list(want)} under {placements}")
    return wrong


def _global_shape(layout: Layout) -> Ints:
    """The global shape that local shapes add up to. A guess where they contradict the layout, which _misfits then tells."""
    shape_of = {rank: local.shape for rank, local in layout.locals}
    dims = max(map(len, shape_of.values()))
    out = []
    for d in range(dims):
        cuts = [i for i, p in enumerate(layout.placements) if not isinstance(p, Replicate) and p.dim in (d, d - dims)]
        fused = [layout.placements[i].segments for i in cuts if hasattr(layout.placements[i], "segments")]
        if fused:
            out.append(sum(fused[0]))
            continue
        line = layout.mesh.ranks[tuple(slice(None) if i in cuts else 0 for i in range(layout.mesh.ndim))]
        out.append(sum(s[d] for r in line.ravel() if len(s := shape_of[int(r)]) == dims))
    return tuple(out)


def _decode(rank: int, data: bytes) -> Claim:
    try:
        claim = msgspec.msgpack.decode(data, type=Claim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"rank {rank} sent what is no description of a transfer: {e}") from None
    if claim.rank != rank:
        raise ProtocolError(f"rank {rank} calls itself rank {claim.rank}")
    return claim


# ---- exchange


def _exchange(group: ProcessGroup, data: bytes, deadline: float) -> list[bytes]:
    """What every rank says, by rank; all must say equally many bytes. DeadlineExceeded when some do not come."""
    device = _meeting_device(group)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    work = group.allgather([everyone], [mine])
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise DeadlineExceeded("not all ranks of the group entered xferdtensor in time", where=f"rank {group.rank()}")
        time.sleep(2e-5)
    work.wait()
    return [bytes(t.cpu().numpy()) for t in everyone]


def _meeting_device(group: ProcessGroup) -> torch.device:
    """Where small collectives of this group can run: on the CPU if the group can do that."""
    kinds = {d.type for d in group._device_types}
    return torch.device("cpu") if "cpu" in kinds or not kinds else torch.device(kinds.pop(), torch.accelerator.current_device_index())


class _Kept:
    """The moves used last, by what this rank said. A wrong hit is impossible: all ranks compare digests before they run one."""

    def __init__(self, most: int):
        self.most = most
        self.moves: OrderedDict[bytes, Move] = OrderedDict()

    def get(self, said: bytes) -> Move | None:
        move = self.moves.get(said)
        if move is not None:
            self.moves.move_to_end(said)
        return move

    def put(self, said: bytes, move: Move) -> None:
        self.moves[said] = move
        self.moves.move_to_end(said)
        while len(self.moves) > self.most:
            self.moves.popitem(last=False)


_NONE = bytes(16)
_KEPT = _Kept(CACHED_LAYOUTS)
