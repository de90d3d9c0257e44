"""`xferdtensor`: moves one tensor from any mesh and placements to any other, over a torch ProcessGroup.

Every rank says what it knows (meshes, placements, its local tensors), all hear it, all compute the same plan with
the planner that refits use, agree on its digest, and run it over point-to-point messages. A layout seen before costs
one small collective before the bytes move. Not here: what follows from what ranks say (dtensor_claims.py), and
anything about models, engines, versions or commits.
"""

from __future__ import annotations

import hashlib
import math
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import msgspec
import numpy as np
import torch

from xfer.dtensor_claims import SIDES, SOURCE, TAKER, Claim, Layout, Local, Side, decode, layouts
from xfer.errors import DeadlineExceeded, LayoutError, PlanMismatch, ProtocolError, Unsupported, XferError, from_wire
from xfer.mesh.mesh_info import MeshInfo
from xfer.mesh.placement import Placement, PlacementRecord, from_dtensor, from_torch
from xfer.plan.program import ROW, Program
from xfer.trace.declared import declared_fragments
from xfer.trace.fragment import Root, TensorSpec
from xfer.transport.group import GlooLink

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

    from xfer.plan.subplan import SubPlan
    from xfer.trace.fragment import Fragment
    from xfer.transport.group import Link, Outgoing, Pending

Ints = tuple[int, ...]
Mesh = Union["MeshInfo", "DeviceMesh", None]
Placements = Union[Sequence[Union[Placement, "TorchPlacement"]], None]  # noqa: UP007 (see mesh/placement.py)
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

    Collective over `group` (default: the default group); the ranks in meshes are ranks of that group, from 0. The
    meshes may be equal, overlap, or share no rank, and differ in every way. Each rank passes its local tensor for each
    side that it is in and None for a side that it is not in. Local tensors may have any strides; a destination may not
    overlap itself, nor the source of the same process. What a rank of both meshes already holds is copied locally.

    A mesh is a MeshInfo or a DeviceMesh (whose global ranks are translated to the group's); placements are xfer's or
    torch's, mixed at will. Where the ranks of a side pass DTensors, that side's mesh and placements may be None, on
    ranks that are not in it too. `global_shape` may be left out: local shapes add up to it. dtypes are those of the
    tensors; `narrow` allows a cast that loses bits (float32 to bfloat16).

    Raises on *all* ranks of the group, before anything moves: LayoutError (all violations) when layouts and tensors do
    not fit, PlanMismatch when ranks describe different transfers, CoverageError for a cast that was not asked for,
    Unsupported (pending sums, tensor subclasses, more than 6 dims); and DeadlineExceeded after `timeout` seconds, after
    which the group should not be used again.
    """
    group = group if group is not None else torch.distributed.group.WORLD
    deadline = time.monotonic() + timeout
    me, world = group.rank(), group.size()
    given = (src_tensor, src_mesh, src_placements), (dst_tensor, dst_mesh, dst_placements)
    failure: Exception | None = None
    try:
        (source, src), (taker, dst) = (_describe(what, *g, global_shape, group) for what, g in zip(SIDES, given))
        _refuse_overlap(src, dst)
        claim = Claim(me, world, socket.gethostname(), bool(narrow), (source, taker))
    except Exception as e:  # told to the others before it is raised: they would wait for this rank
        failure = e
        told = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}")
        claim = Claim(me, world, socket.gethostname(), error=told.to_wire())
    move = _agree(claim, failure, group, deadline)
    _run(move, group, (src, dst), deadline)


# ---- what one rank says


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
        found_mesh, found = from_dtensor(tensor)
        found_mesh = _in_group(found_mesh, group)
        if mesh is not None and _mesh(mesh, group) != _mesh(tensor.device_mesh, group):
            raise LayoutError(f"the {what} is a DTensor on another mesh than the one given: pass None as mesh")
        if placements is not None and from_torch(placements) != from_torch(tensor.placements):
            raise LayoutError(
                f"the {what} is a DTensor with other placements than those given: pass None as placements"
            )
        if shape not in (None, tuple(tensor.shape)):
            raise LayoutError(f"the {what} is a DTensor of shape {tuple(tensor.shape)}, global_shape says {shape}")
        # torch hands out DTensors on ranks outside their mesh too; what they hold there is nothing.
        shape, tensor = tuple(tensor.shape), _settled(tensor) if group.rank() in found_mesh else None
    else:
        if (mesh is None) != (placements is None):
            raise LayoutError(f"{what}: give mesh and placements together, or neither (with a DTensor)")
        found_mesh = None if mesh is None else _mesh(mesh, group)
        found = None if placements is None else from_torch(placements)
    record = None if found_mesh is None else found_mesh.to_record()
    kinds = None if found is None else tuple(PlacementRecord.of(p) for p in found)
    if tensor is None:
        return Side(record, kinds, shape), None
    if what == SIDES[SOURCE] and _overlaps_itself(tensor):
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)  # an expanded tensor: write it out
    return Side(record, kinds, shape, _local(what, tensor)), tensor.detach()


def _local(what: str, tensor: torch.Tensor) -> Local:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"{type(tensor).__name__} with layout {tensor.layout} on {tensor.device}"
        raise Unsupported(f"the local {what} is a {kind}: only plain strided tensors with storage have bytes to move")
    if tensor.is_neg() or tensor.is_conj():
        raise Unsupported(
            f"the local {what} is a lazy negation or conjugate, its storage holds other values: resolve it"
        )
    if _overlaps_itself(tensor):
        raise LayoutError(
            f"the local {what} overlaps itself (strides {tensor.stride()}): it must have a byte per element"
        )
    item = tensor.element_size()
    return Local(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        strides=tuple(s * item for s in tensor.stride()),
        offset=tensor.storage_offset() * item,
        storage=tensor.untyped_storage().nbytes(),
        device=tensor.device.type,
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may mean one element. Says yes, too, to comb-like interleavings that nobody makes by hand."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _settled(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, after any collective that still writes it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _mesh(mesh: MeshInfo | DeviceMesh, group: ProcessGroup) -> MeshInfo:
    """In ranks of `group`, which a MeshInfo has from the caller."""
    return mesh if isinstance(mesh, MeshInfo) else _in_group(MeshInfo.from_device_mesh(mesh), group)


def _in_group(mesh: MeshInfo, group: ProcessGroup) -> MeshInfo:
    """`mesh`, of global ranks, in ranks of `group`."""
    if group is torch.distributed.group.WORLD:
        return mesh
    try:
        ranks = torch.distributed.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        raise Unsupported(
            "a DeviceMesh has ranks of this process's own world, the group is not of it: pass a MeshInfo"
        ) from None
    number = {g: i for i, g in enumerate(ranks)}
    missing = [
        f"rank {r} of {mesh!r} is not in the group of ranks {ranks}" for r in mesh.ranks.ravel() if r not in number
    ]
    if missing:
        raise LayoutError("a mesh leaves the group", missing)
    return MeshInfo(mesh.axes, np.vectorize(number.__getitem__, otypes=[np.int64])(mesh.ranks))


def _refuse_overlap(src: torch.Tensor | None, dst: torch.Tensor | None) -> None:
    """Rows run in no particular order, so a destination must not share bytes with the source of the same process. By
    addresses: two storages may be of one memory (`from_numpy`)."""
    if src is None or dst is None or src.device != dst.device:
        return
    (a, b), (c, d) = _reach(src), _reach(dst)
    if max(a, c) < min(b, d):
        raise LayoutError(
            "source and destination share memory on this rank: give the destination memory of its own",
            ["from first to last byte: columns of one tensor count as shared, though they have no element in common"],
        )


def _reach(t: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and the one past its last."""
    if not t.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


# ---- what all ranks make of it


@dataclass(frozen=True)
class Move:
    """One rank's share of an agreed transfer. It holds no tensor and no group, so it can be kept."""

    digest: bytes
    program: Program
    device: str  # type of device of all local tensors


def _agree(claim: Claim, failure: Exception | None, group: ProcessGroup, deadline: float) -> Move:
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
    claims = [decode(rank, data[:n]) for rank, (data, n) in enumerate(zip(padded, sizes))]
    if failure is not None:
        raise failure
    _raise_told(claims)

    # From here on all ranks compute the same from the same input; the last exchange proves that they did.
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
        lines = [
            f"rank {r}: {h.hex() if h != _NONE else 'could not plan, see its own error'}" for r, h in enumerate(heads)
        ]
        raise PlanMismatch(
            "ranks computed different plans from the same descriptions: do all run the same xfer?", lines
        )
    _KEPT.put(said, move)
    return move


def _raise_told(claims: Sequence[Claim]) -> None:
    """Raises what other ranks raised, as the kind of the first of them."""
    told = [(c.rank, from_wire(*c.error)) for c in claims if c.error is not None]
    if told:
        lines = [f"rank {rank}: {line.strip(' -')}" for rank, e in told for line in str(e).splitlines()]
        raise type(told[0][1])("other ranks cannot take part in this transfer", lines)


def _plan(claims: Sequence[Claim], me: int) -> Move:
    from xfer.plan.inventory import engine_inventory, trainer_inventory
    from xfer.plan.planner import PlanOptions, plan_replica
    from xfer.trace.catalog import Catalog

    source, taker, shape = layouts(claims)
    spec = TensorSpec(NAME, shape, source.locals[0][1].dtype)
    device = source.locals[0][1].device
    ranks = np.array([*source.ranks, *taker.ranks])
    identity = hashlib.blake2b(msgspec.msgpack.encode((source.ranks, taker.ranks, shape)), digest_size=16)
    if not math.prod(shape):
        return Move(identity.digest(), Program(me, 0, np.zeros(0, ROW)), device)
    catalog = Catalog((spec,))
    fragments = [[_fragments(spec, layout, rank, local) for rank, local in layout.locals] for layout in (source, taker)]
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
    return Move(identity.digest(), _program(plan, source.ranks, taker.ranks, me), device)


def _fragments(spec: TensorSpec, layout: Layout, rank: int, local: Local) -> tuple[Fragment, ...]:
    if not math.prod(local.shape):
        return ()
    return declared_fragments(
        spec.name, spec.shape, local.dtype, layout.mesh, layout.placements, rank, NAME, local.strides, local.offset
    )


def _program(plan: SubPlan, sources: Ints, takers: Ints, me: int) -> Program:
    """The rows that rank `me` of the group sends, takes, or both, with ranks of the group in their columns."""
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


def _run(move: Move, group: ProcessGroup, tensors: Sequence[torch.Tensor | None], deadline: float) -> None:
    """Moves the bytes. Bound anew for each call: nothing kept between calls may keep the caller's tensors alive."""
    from xfer.transport.p2p import P2P

    source, taker = ([] if t is None else [_bytes_under(t)] for t in tensors)
    P2P(_link(group, move.device), move.program, taker, src_roots=source).run(deadline)


def _bytes_under(t: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as flat uint8."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


# ---- over the caller's group


def _link(group: ProcessGroup, device: str) -> Link:
    """A link of the transport over a group that belongs to somebody else."""
    if device != "cpu":
        raise Unsupported(f"tensors on {device}: only CPU tensors can be moved over a group of the caller's so far")
    if "cpu" not in {d.type for d in group._device_types}:
        raise Unsupported("CPU tensors need a group with a CPU backend (gloo)")
    return _BorrowedGloo(group)


class _BorrowedGloo(GlooLink):
    """Point-to-point messages of the caller's gloo group, on tags that a caller is unlikely to use at the same time."""

    FIRST_TAG = 1 << 24

    def __init__(self, group: ProcessGroup):
        self.rank, self.size, self.device = group.rank(), group.size(), torch.device("cpu")
        self.labels = tuple(f"rank {r}" for r in range(self.size))
        self._aborted, self._lock = threading.Event(), threading.Lock()
        self._pg = group._get_backend(self.device)

    def post(self, receives: Sequence[Outgoing], sends: Sequence[Outgoing]) -> tuple[list[Pending], list[Pending]]:
        return super().post(*([(t, peer, tag + self.FIRST_TAG) for t, peer, tag in some] for some in (receives, sends)))


def _exchange(group: ProcessGroup, data: bytes, deadline: float) -> list[bytes]:
    """What every rank says, by rank; all must say equally many bytes. DeadlineExceeded when some do not come."""
    device = _meeting_device(group)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    work = group.allgather([everyone], [mine])
    pause = 1e-5
    while not work.is_completed():
        if time.monotonic() > deadline:
            where = f"rank {group.rank()}"
            raise DeadlineExceeded("not all ranks of the group entered xferdtensor in time", where=where)
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)  # soon for peers that are there, cheap for peers that are late
    work.wait()
    return [bytes(t.cpu().numpy()) for t in everyone]


def _meeting_device(group: ProcessGroup) -> torch.device:
    """Where small collectives of this group can run: on the CPU if the group can do that."""
    kinds = {d.type for d in group._device_types}
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds.pop())


class _Kept:
    """The moves used last, by what this rank said. No hit can be wrong: ranks compare digests before they run one."""

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
