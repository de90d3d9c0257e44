"""Trainers whose parameters carry checkpoint names: FSDP2, HSDP and tensor-parallel modules (DTensors), replicated ones
(DDP, one process), and plain tensors whose layout the caller declares.

Layouts are stated, not traced: a DTensor says by its mesh and placements which box of the checkpoint's tensor it holds,
`Declared` says it for a plain tensor, and a plain tensor that nobody speaks for holds all of it. `rename` turns a
parameter's name into the checkpoint's where they differ. A fused parameter is given as views of it, one per checkpoint
tensor; what the checkpoint computes needs a traced adapter instead (see megatron.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Union

import torch

from xfer.errors import LayoutError, RebindError, Unsupported, XferError
from xfer.kernels.cuda_driver import unmapped
from xfer.mesh.mesh_info import MeshInfo
from xfer.mesh.placement import Placement, Replicate, from_dtensor, from_torch
from xfer.mesh.slices import local_shape
from xfer.pending import drain_over
from xfer.trace.declared import declared_fragments
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.slots import Slot, SlotPlace, Slots, device_of, local, refuse_elsewhere, tensors_of
from xfer.trace.traced import Traced, TrainerLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

    from xfer.packed.tensors import TensorStream

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes under which torch.compile, activation checkpointing and FSDP keep the module that they wrap."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What a plain local tensor is part of: a tensor of `shape` (in elements), cut by one placement per axis of `mesh`.

    mesh: a MeshInfo or DeviceMesh over torch's global ranks (the trainer's own where torch.distributed is not in use).
    placements: xfer's or torch's.
    """

    shape: Sequence[int]
    mesh: MeshInfo | DeviceMesh
    placements: Sequence[Union[Placement, TorchPlacement]]  # noqa: UP007 (see mesh/placement.py)


def checkpoint_name(parameter: str) -> str:
    """A parameter's dotted name without what DDP, torch.compile, activation checkpointing and FSDP put into it."""
    parts = [p for p in parameter.split(".") if p not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts)


class TensorTrainer:
    """Source adapter for `xfer.connect`: one trainer rank, and how its tensors lie.

    parameters: a module, whose parameters and persistent buffers are taken, tied ones once and under their first name;
    or a callable that returns {name: tensor or DTensor} afresh at every call, so that replaced tensors are seen. It may make
    other tensor objects over the same bytes each time (views, `state_dict()`): those have not moved. It is called
    before gathers of a layer-wise optimizer are finished, which says what it reads, and again after.
    declared: layouts of plain tensors, by checkpoint name; those of DTensors are known, all others are whole on every
    rank. rename: from a name in `parameters` to the checkpoint's. rank, world: default torch.distributed's, 0 and 1
    without it.

    What trains is what has `requires_grad`: if all of that is named by connect's `drop=`, refits would change nothing and connect refuses.

    A checkpoint tensor gets the dtype that the trainer holds it in. Where that is wider than the engine's (fp32 masters
    of a bf16 model) `xfer.Direct(narrow=...)` must allow the cast.
    """

    reads_together = False

    def __init__(
        self,
        parameters: torch.nn.Module | Callable[[], Mapping[str, torch.Tensor]],
        *,
        declared: Mapping[str, Declared] | None = None,
        rename: Callable[[str], str] = checkpoint_name,
        rank: int | None = None,
        world: int | None = None,
    ):
        if not (isinstance(parameters, torch.nn.Module) or callable(parameters)):
            raise Unsupported(
                f"TensorTrainer(parameters): parameters is a {type(parameters).__name__}",
                ["give a module, or a callable that returns {name: tensor} at each call"],
            )
        self._module = parameters if isinstance(parameters, torch.nn.Module) else None
        self._get = None if self._module is not None else parameters
        self._declared, self._rename = dict(declared or {}), rename
        d = torch.distributed
        live = d.is_available() and d.is_initialized()
        self.rank = rank if rank is not None else d.get_rank() if live else 0
        self.world = world if world is not None else d.get_world_size() if live else 1
        self._me = d.get_rank() if live else self.rank  # in meshes, which know nothing of a rank given here
        self._given: dict[str, torch.Tensor | None] = {}
        self._names: set[str] = set()  # of what was given when the layout was read
        self._slots: Slots | None = None
        self._specs: list[object] = []
        self._device: torch.device | None = None  # when the layout was first read
        for _ in self._walk():  # of names that clash the caller hears now
            pass
        self.let_go()

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors were when their layout was first read; before that, where they are."""
        if self._device is not None:
            return self._device
        found = device_of(t for s in self._walk() if (t := local(s.get())) is not None)
        self.let_go()
        return found

    def stream(self) -> TensorStream:
        """For the packed route: whole checkpoint tensors, put together from shards."""
        from xfer.packed.tensors import TensorStream

        return TensorStream(self)

    def drain(self) -> None:
        """`finish_gathers`, then wait for the device."""
        self.finish_gathers()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_gathers(self) -> None:
        """Back to shards: FSDP2 leaves whole parameters in a module that ran without a backward, and in a root after its
        forward; the optimizer writes shards. Gathers of a layer-wise optimizer over these tensors are finished, for what the
        current stream does next."""
        if self._module is not None:
            from torch.distributed.fsdp import FSDPModule

            for module in self._module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        drain_over(self._tensors())

    def read(self) -> TrainerLayout:
        """Raises, with every violation of this rank: LayoutError where a tensor is not what its layout says, Unsupported
        for pending sums and for tensors that hide their bytes, RebindError for tensors without bytes, whose memory is paused, or on
        another device."""
        device, found = self.device, list(self._walk())
        self._refuse_hidden(found)
        slots = Slots([self._module] if self._module is not None else [], found, unmapped=unmapped)
        bound = slots.bind()
        refuse_elsewhere(found, device, f"trainer {self.rank}")
        specs: list[TensorSpec] = []
        fragments: list[Fragment] = []
        wrong: list[str] = []
        kind: type[XferError] = LayoutError
        unknown = self._declared.keys() - {s.name for s in found}
        wrong += [f"{name}: a layout is declared for it, but there is no such tensor" for name in sorted(unknown)]
        for slot in found:
            place = bound.places[slot.name]
            try:
                spec, parts = self._fragments(slot, place)
            except (LayoutError, Unsupported) as e:
                wrong += [f"{slot.name}: {line}" for line in e.violations or (e.message,)]
                kind = Unsupported if isinstance(e, Unsupported) else kind
                continue
            specs.append(spec)
            fragments += parts
        if wrong:
            raise kind(f"trainer {self.rank}: it cannot be told where these tensors lie", wrong)
        self._slots, self._specs, self._names, self._device = slots, _specs(found), set(self._given), device
        trained = frozenset(s.name for s in found if s.tensor().requires_grad)
        return TrainerLayout(Traced(tuple(sorted(specs)), tuple(fragments)), bound.roots, bound.tensors, trained)

    def check(self) -> str:
        """ "same", "moved" or "changed"; see session.trainer.Source. RebindError as `read`."""
        if self._slots is None:
            return "changed"
        if self._get is not None:
            self._refresh()
            if self._given.keys() != self._names:
                return "changed"
        try:
            state = self._slots.check()
        except RebindError:
            if any(slot.get() is None for slot in self._slots.slots):
                return "changed"  # the model has fewer tensors; if others have no bytes, `read` says so
            raise
        # A DTensor's own part may be as before although it is another part now.
        return state if self._specs == _specs(self._slots.slots) else "changed"

    def rebind(self) -> Mapping[str, torch.Tensor]:
        """Root name -> flat uint8 view of the storage at today's address; only after `check` said "moved"."""
        if self._slots is None:
            raise RebindError("rebind() before read()")
        if self._get is not None and not self._given:  # they were let go of
            self._refresh()
        return self._slots.bind().tensors

    def let_go(self) -> None:
        """Hold nothing that a callable gave: it may lie in memory that the trainer is about to free. The next look asks anew."""
        self._given.clear()

    # ---- details

    def _refresh(self) -> None:
        """What is given anew for the same place changes nothing: the old object stays, by which slots tell that nothing moved. It
        held its memory meanwhile, so this is no other memory at an old address."""
        now = dict(self._get())  # before the old ones go: the callable may read them
        for name, t in now.items():
            old = self._given.get(name)
            if old is not t and old is not None and t is not None and _same_place(old, t):
                now[name] = old
        self._given.clear()
        self._given.update(now)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Of this process. Not those in slots, which another thread may let go of."""
        given = (s.get() for s in self._walk()) if self._get is None else self._get().values()
        yield from (local(t) for t in given if t is not None)

    def _walk(self) -> Iterator[Slot]:
        """Slots by checkpoint name. LayoutError when two tensors would get one name."""
        if self._module is not None:
            named = [(f"{at}.{key}" if at else key, table, key) for at, table, key in tensors_of(self._module, set())]
        else:
            self._refresh()
            named = [(key, self._given, key) for key in self._given]
        by_name: dict[str, str] = {}
        twice = []
        for full, _, _ in named:
            name = self._rename(full)
            if by_name.setdefault(name, full) != full:
                twice.append(f"{name}: {by_name[name]} and {full}")
        if twice:
            raise LayoutError(f"trainer {self.rank}: rename gives several tensors one name", twice)
        for full, table, key in named:
            yield Slot(self._rename(full), table, key)

    def _refuse_hidden(self, slots: Sequence[Slot]) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        bad = [
            f"{path or 'the module'}: FSDP1 flattens parameters before it cuts them; use fully_shard (FSDP2)"
            for path, module in (self._module.named_modules() if self._module is not None else ())
            if isinstance(module, FullyShardedDataParallel)
        ]
        for slot in slots:
            t = local(slot.get())
            if t is None or (type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided):
                continue
            bad.append(
                f"{slot.name}: is a {type(t).__name__} ({t.layout}), its bytes are not its values; give it plain"
            )
        if bad:
            raise Unsupported(f"trainer {self.rank}: tensors that cannot be read", bad)

    def _fragments(self, slot: Slot, place: SlotPlace) -> tuple[TensorSpec, tuple[Fragment, ...]]:
        tensor, declared = slot.tensor(), self._declared.get(slot.name)
        placements: tuple[Placement, ...]
        if _specs([slot])[0] is not None:
            if declared is not None:
                raise LayoutError("a layout is declared for it, but it is a DTensor, which has its own")
            shape, (mesh, placements) = tuple(tensor.shape), from_dtensor(tensor)
        elif declared is not None:
            given = declared.mesh
            mesh = given if isinstance(given, MeshInfo) else MeshInfo.from_device_mesh(given)
            shape, placements = tuple(declared.shape), from_torch(declared.placements)
        else:
            shape, mesh, placements = place.shape, MeshInfo.line("whole", [self._me]), (Replicate(),)
        want = local_shape(shape, mesh, placements, self._me, slot.name)
        held = prod(place.shape) > 0
        if want is None and held:
            raise LayoutError(f"rank {self._me} holds {place.shape} and is not in {mesh!r}")
        if want is not None and want != place.shape and (held or prod(want)):
            raise LayoutError(
                f"rank {self._me} holds {place.shape}, expected {want} of {shape}: {placements} on {mesh!r}"
            )
        spec = TensorSpec(slot.name, shape, place.dtype)
        if not held:
            return spec, ()
        return spec, declared_fragments(
            slot.name, shape, place.dtype, mesh, placements, self._me, place.root, place.strides, place.offset
        )


def _same_place(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors are the same bytes in the same form, part of the same whole."""
    a, b = local(old), local(new)
    return (
        type(old) is type(new)
        and type(a) is type(b)
        and type(a) in (torch.Tensor, torch.nn.Parameter)
        and (a.dtype, a.layout, a.device) == (b.dtype, b.layout, b.device)
        and a.layout == torch.strided
        and a.is_set_to(b)
        and a.data_ptr() == b.data_ptr()
        and getattr(old, "_spec", None) == getattr(new, "_spec", None)
    )


def _specs(slots: Sequence[Slot]) -> list[object | None]:
    """Mesh, placements and global shape of each DTensor, in torch's own word for them; None for any other tensor. Without a
    call of Python for each slot: it runs in every refit."""
    return [getattr(s.table.get(s.key), "_spec", None) for s in slots]
