"""`xferdtensor`: moves one tensor from any mesh and placements to any other, in the ranks of a torch process group.

Every rank describes the sides that it knows: mesh, placements, its local tensors. All ranks hear all descriptions,
compute the same plan with the planner of refits, and compare its digest. Then they open routes as a refit does
(transport/routes.py) and run the plan: on CUDA a destination maps the sources' memory and reads it, NCCL carries what
cannot be mapped; gloo carries CPU tensors. A call whose layouts and tensors were seen before only moves bytes.
Not here: the rules that descriptions have to follow (dtensor_claims.py); how ranks meet (dtensor_exchange.py); what they keep
between calls (dtensor_routes.py); models, engines, versions, commits.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Union

import msgspec
import numpy as np
import torch

from xfer.dtensor_claims import DESTINATION, SIDES, SOURCE, Claim, Layout, Local, Side, decode, layouts
from xfer.dtensor_exchange import digest
from xfer.dtensor_routes import HEAD, GroupState, place_of, state_of
from xfer.errors import LayoutError, PlanMismatch, Unsupported, XferError, from_wire
from xfer.mesh.mesh_info import MeshInfo
from xfer.mesh.placement import Placement, PlacementRecord, from_dtensor, from_torch
from xfer.plan.program import ROW, Program
from xfer.trace.declared import declared_fragments
from xfer.trace.fragment import Root, TensorSpec
from xfer.transport.group import wait_for_stream
from xfer.transport.p2p import STEP_BYTES, WAVE_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

    from xfer.plan.subplan import SubPlan
    from xfer.trace.fragment import Fragment

Ints = tuple[int, ...]
Mesh = Union["MeshInfo", "DeviceMesh", None]
Placements = Union[Sequence[Union[Placement, "TorchPlacement"]], None]  # noqa: UP007 (see mesh/placement.py)
NAME = "tensor"


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
    peer: bool | None = None,
    timeout: float = 300.0,
) -> None:
    """Fills `dst_tensor` of every destination rank with its part of the tensor that the source ranks hold.

    Collective over all ranks of `group`, also those that are in neither mesh. Ranks in meshes are ranks of that group,
    from 0. The two meshes may be equal, overlap or share no rank, and may differ in every way. A rank copies locally
    what it holds of both sides. When the call returns, this rank's destination is complete, and no other rank reads
    this rank's source any more.

    Ranks meet by small all-gathers: through memory where all are on one host and may read each other's, else over `group`
    (on the CPU where the group can do that, else on the GPU). The bytes of the tensor do not travel over `group`: on
    CUDA a destination maps the source's memory (CUDA IPC) and reads it, and what cannot be mapped goes over a NCCL
    communicator of xfer's own, which the ranks open at the group's store when they first need it. CPU tensors go over a
    gloo group of xfer's own. All tensors of a call lie on one kind of device.

    Kept between calls, for each group: a link, and the routes of the last 1,024 combinations of layouts (meshes,
    placements, shapes, dtypes, strides) and, on CUDA, source storages. The first call with a combination plans and
    opens routes, which takes milliseconds (a second if it opens a link); later ones exchange 40 bytes and move the
    tensor. A destination may lie elsewhere in every call. CUDA forbids freeing memory that another process has mapped,
    so routes hold such a source until some calls after its last other reference is gone. They hold nothing else of the
    caller. `forget` closes all of it.

    Args:
        src_tensor: This rank's local tensor of the source, or a DTensor; None on ranks outside `src_mesh`. Any strides.
            Up to 6 dims, any dtype of `xfer.plan.program.DTYPES`.
        src_mesh: Mesh of the source: a MeshInfo in ranks of `group`, or a DeviceMesh. None with a DTensor; then ranks
            outside the mesh may pass None too.
        src_placements: One placement per mesh axis, of xfer or of torch. None with a DTensor.
        dst_tensor: As `src_tensor`, for the destination; written in place. It may not overlap itself, nor the source
            of the same process.
        dst_mesh: As `src_mesh`.
        dst_placements: As `src_placements`.
        group: Process group; the default group when None.
        global_shape: Shape of the whole tensor. None: the local shapes add up to it.
        narrow: Allows a cast that loses bits (float32 to bfloat16). Other casts follow the dtype of `dst_tensor`.
        peer: Whether destinations may read sources' memory themselves. None: on CUDA only. On the CPU they need a
            kernel that allows `process_vm_readv`.
        timeout: Seconds for the whole call.

    Raises:
        LayoutError: Layouts and tensors do not fit; with all violations.
        PlanMismatch: Ranks describe different transfers, or compute different plans.
        CoverageError: The transfer needs a cast that `narrow` does not allow.
        Unsupported: Pending sums, tensor subclasses, more than 6 dims; or no route for some bytes: NCCL refuses ranks
            that share a GPU.
        PeerLost: Another rank failed or died while bytes moved; destinations hold a mix of old and new.
        DeadlineExceeded: `timeout` passed. If ranks did not meet, `group` has a collective under way that never ends.

        The first four are raised on all ranks, before any byte moves, and the group can be used again. After an error
        the next call opens routes anew.
    """
    state, deadline = state_of(group), time.monotonic() + timeout
    given = (src_tensor, src_mesh, src_placements), (dst_tensor, dst_mesh, dst_placements)
    failure: Exception | None = None
    src = dst = None
    source = 0, 0
    try:
        (one, src), (other, dst) = (
            _describe(what, *g, global_shape, state.ranks.group) for what, g in zip(SIDES, given)
        )
        _refuse_pair(src, dst)
        claim = Claim(state.rank, socket.gethostname(), bool(narrow), peer, (one, other))
        if src is not None and (src.is_cuda if peer is None else peer):
            source = place_of(src)
            if src.is_cuda and not torch.cuda.current_stream(src.device).query():  # other ranks read it from now on
                wait_for_stream(src.device, deadline, state.labels[state.rank])
    except Exception as e:  # tell the others before raising: they wait for this rank
        failure = e
        told = e if isinstance(e, XferError) else XferError(f"{type(e).__name__}: {e}")
        claim = Claim(state.rank, socket.gethostname(), error=told.to_wire())
    device = next((t.device for t in (dst, src) if t is not None), torch.device("cpu"))
    key = b""
    try:
        key = state.meet(claim, source, deadline)
        move = _agree(claim, failure, state, deadline) if key not in state.routes else None
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if move is not None:
                state.open_routes(key, move.program, move.device, move.peer, src, deadline)
            if dst is not None and not dst.is_inference():
                torch.autograd.graph.increment_version(dst)  # routes write its memory behind autograd's back
            state.run(key, src, dst, deadline)
    except BaseException as e:
        state.fail(key, e, src, dst)
        raise


def forget(group: ProcessGroup | None = None, *, timeout: float = 300.0) -> None:
    """Closes all that `xferdtensor` keeps for a group: plans, routes, mapped memory, the link.

    Collective over `group`. When it returns, no rank has memory of another one mapped.

    Args:
        group: Process group; the default group when None.
        timeout: Seconds.

    Raises:
        DeadlineExceeded: Not all ranks of the group came in time.
    """
    state = state_of(group)
    state.drop()
    state.exchange(bytes(HEAD.size), time.monotonic() + timeout)


# ---- what one rank says


def _describe(
    what: str,
    tensor: torch.Tensor | DTensor | None,
    mesh: Mesh,
    placements: Placements,
    shape: Sequence[int] | None,
    group: ProcessGroup,
) -> tuple[Side, torch.Tensor | None]:
    """This rank's description of one side, and its local tensor. LayoutError, Unsupported if the tensor cannot be moved."""
    from torch.distributed.tensor import DTensor

    found_mesh: MeshInfo | None
    found: Placements
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
        # torch makes DTensors on ranks outside their mesh too; they hold nothing there.
        shape, tensor = tuple(tensor.shape), _settled(tensor) if group.rank() in found_mesh else None
    else:
        if (mesh is None) != (placements is None):
            raise LayoutError(f"{what}: give mesh and placements together, or neither (with a DTensor)")
        found_mesh = None if mesh is None else _mesh(mesh, group)
        found = placements
    record = None if found_mesh is None else found_mesh.to_record()
    kinds = None if found is None else _records(tuple(found))
    if tensor is None:
        return Side(record, kinds, shape), None
    if what == SIDES[SOURCE] and _overlaps_itself(tensor):
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)  # an expanded tensor: write it out
    return Side(record, kinds, shape, _local(what, tensor)), tensor.detach()


@lru_cache(256)
def _records(placements: tuple[Placement | TorchPlacement, ...]) -> tuple[PlacementRecord, ...]:
    return tuple(PlacementRecord.of(p) for p in from_torch(placements))


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
        offset=int(tensor.storage_offset()) * item,
        storage=tensor.untyped_storage().nbytes(),
        device=tensor.device.type,
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may name one element. Also true of some interleaved strides under which none do."""
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
    """`mesh` in ranks of `group`. A MeshInfo is written in those already, a DeviceMesh in global ranks."""
    return mesh if isinstance(mesh, MeshInfo) else _in_group(MeshInfo.from_device_mesh(mesh), group)


def _in_group(mesh: MeshInfo, group: ProcessGroup) -> MeshInfo:
    """`mesh`, given in global ranks, in ranks of `group`."""
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


def _refuse_pair(src: torch.Tensor | None, dst: torch.Tensor | None) -> None:
    """Source and destination of one process lie on one device and share no bytes: rows run in no particular order.

    Compares addresses, since two storages may be of one memory (`from_numpy`).
    """
    if src is None or dst is None or src.device.type != dst.device.type:  # all ranks compare types of device
        return
    if src.device != dst.device:
        raise LayoutError(
            f"the source of this rank is on {src.device}, its destination on {dst.device}: use one device"
        )
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


# ---- what all ranks compute


@dataclass(frozen=True)
class Move:
    """One rank's share of an agreed transfer. It holds no tensor, no address and no group.

    Attributes:
        digest: 16 bytes, equal on all ranks.
        program: Rows that this rank sends and receives, in ranks of the group.
        device: Type of device of all local tensors: "cpu" or "cuda".
        peer: Whether destinations may read sources' memory themselves.
    """

    digest: bytes
    program: Program
    device: str
    peer: bool


def _agree(claim: Claim, failure: Exception | None, state: GroupState, deadline: float) -> Move:
    """This rank's share of the plan that all ranks have. Raises `failure`, or the same kind of error on every rank."""
    claims = [
        decode(rank, data) for rank, data in enumerate(state.ranks.gather(msgspec.msgpack.encode(claim), deadline))
    ]
    if failure is not None:
        raise failure
    _raise_told(claims)

    # From here on all ranks compute the same from the same input; the next exchange proves that they did.
    digest = bytes(16)
    try:
        move = _plan(claims, claim.rank)
        digest = move.digest
    except Exception as e:
        failure = e
    digests = state.exchange(digest, deadline)
    if failure is not None:
        raise failure
    if any(d != digest for d in digests):
        lines = [
            f"rank {r}: {d.hex() if any(d) else 'could not plan, see its own error'}" for r, d in enumerate(digests)
        ]
        raise PlanMismatch(
            "ranks computed different plans from the same descriptions: do all run the same xfer?", lines
        )
    return move


def _raise_told(claims: Sequence[Claim]) -> None:
    """Raises what other ranks raised, as the kind of the first of them."""
    told = [(c.rank, from_wire(*c.error)) for c in claims if c.error is not None]
    if told:
        lines = [f"rank {rank}: {line}" for rank, e in told for line in (e.message, *e.violations)]
        raise type(told[0][1])("other ranks cannot take part in this transfer", lines)


def _plan(claims: Sequence[Claim], me: int) -> Move:
    from xfer.plan.inventory import engine_inventory, trainer_inventory
    from xfer.plan.planner import PlanOptions, plan_replica
    from xfer.trace.catalog import Catalog

    source, destination, shape = layouts(claims)
    spec = TensorSpec(NAME, shape, source.locals[0][1].dtype)
    device, peer = source.locals[0][1].device, claims[0].peer
    peer = device == "cuda" if peer is None else peer
    identity = digest(msgspec.msgpack.encode((source.ranks, destination.ranks, shape)))
    if not math.prod(shape):
        return Move(identity, Program(me, 0, np.zeros(0, ROW)), device, peer)
    catalog = Catalog((spec,))
    fragments = [
        [_fragments(spec, layout, rank, local) for rank, local in layout.locals] for layout in (source, destination)
    ]
    held = [
        trainer_inventory(catalog, rank=i, host=claims[rank].host, roots=[Root(NAME, local.storage)], fragments=f)
        for i, ((rank, local), f) in enumerate(zip(source.locals, fragments[SOURCE]))
    ]
    # No footprint: a destination may be a view with foreign bytes between its own. The boxes of the layout and the
    # planner's proof about fragments show that every element of it is written, and written once.
    wanted = [
        engine_inventory(
            catalog, rank=i, host=claims[rank].host, roots=[Root(NAME, local.storage)], fragments=f, footprint=()
        )
        for i, ((rank, local), f) in enumerate(zip(destination.locals, fragments[DESTINATION]))
    ]
    # A process that holds what it needs copies it locally; that is worth more than a source on its host.
    overlap = set(source.ranks) & set(destination.ranks)
    hosts = tuple(r if overlap else claims[r].host for r in (*source.ranks, *destination.ranks))
    options = PlanOptions(hosts=hosts, narrow=(NAME,) if claims[0].narrow else ())
    if device == "cuda":
        options = replace(options, bucket_bytes=STEP_BYTES[device], wave_bytes=WAVE_BYTES[device])
    plan = plan_replica(catalog, held, wanted, options)
    program = _program(plan, source.ranks, destination.ranks, me)
    return Move(digest(identity, plan.digest.encode()), program, device, peer)


def _fragments(spec: TensorSpec, layout: Layout, rank: int, local: Local) -> tuple[Fragment, ...]:
    if not math.prod(local.shape):
        return ()
    return declared_fragments(
        spec.name, spec.shape, local.dtype, layout.mesh, layout.placements, rank, NAME, local.strides, local.offset
    )


def _program(plan: SubPlan, sources: Ints, destinations: Ints, me: int) -> Program:
    """The rows that rank `me` of the group sends, receives, or both, with ranks of the group in their columns."""
    parts = []
    joint = sources.index(me) if me in sources else -1
    if joint >= 0:
        parts.append(plan.program(joint).rows)
    if me in destinations:
        rows = plan.program(len(sources) + destinations.index(me)).rows
        parts.append(rows[rows["src"] != joint])  # rows to itself are among its sends already
    rows = np.concatenate(parts) if parts else np.zeros(0, ROW)
    number = np.array([*sources, *destinations], np.int32)
    rows["src"], rows["dst"] = number[rows["src"]], number[rows["dst"]]
    return Program(me, plan.waves, rows[np.lexsort((rows["wire"], rows["dst"], rows["src"], rows["wave"]))])
