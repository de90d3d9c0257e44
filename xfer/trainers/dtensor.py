"""Trainers whose parameters carry checkpoint names: FSDP2, HSDP and tensor-parallel modules (DTensors), replicated ones
(DDP, one process), and plain tensors whose layout the caller declares.

Layouts are stated, not traced: the mesh and placements of a DTensor give the part of the checkpoint tensor that it holds,
`Declared` gives it for a plain tensor, and a plain tensor without a declaration holds all of it. `rename` maps a
parameter's name to the checkpoint's. Give a fused parameter as views, one per checkpoint tensor. Tensors that the export
computes need a traced adapter instead (see megatron.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import is_
from typing import TYPE_CHECKING, Union

import torch

from xfer.errors import LayoutError, RebindError, Unsupported, XferError
from xfer.kernels.cuda_driver import unmapped
from xfer.mesh.mesh_info import MeshInfo
from xfer.mesh.placement import Placement, Replicate, from_dtensor, from_torch
from xfer.mesh.slices import local_shape
from xfer.pending import drain_over, known
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
    """The checkpoint tensor that a plain local tensor is a part of.

    Attributes:
        shape: Elements per dim of the whole tensor.
        mesh: A MeshInfo or DeviceMesh over torch's global ranks (over the trainers' ranks without torch.distributed).
        placements: xfer's or torch's placements, one per axis of `mesh`.
    """

    shape: Sequence[int]
    mesh: MeshInfo | DeviceMesh
    placements: Sequence[Union[Placement, TorchPlacement]]  # noqa: UP007 (see mesh/placement.py)


def checkpoint_name(parameter: str) -> str:
    """Return a parameter's name without the parts that DDP, torch.compile, activation checkpointing and FSDP add."""
    parts = [p for p in parameter.split(".") if p not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts)


class TensorTrainer:
    """Source adapter for `xfer.connect`: one trainer rank whose parameters have checkpoint names.

    A tensor counts as trained if it has `requires_grad`. If connect's `drop=` names all of these, refits would change nothing
    and connect refuses. A checkpoint tensor has the dtype in which the trainer holds it. If that is wider than the engine's
    (fp32 masters of a bf16 model), `xfer.Direct(narrow=...)` must allow the cast.

    Args:
        parameters: A module, of which parameters and persistent buffers are taken, tied ones once under their first name. Or
            a callable that returns {name: tensor or DTensor}; it is called anew each time, so that replaced tensors are
            noticed. It may return new tensor objects over the same bytes (views, `state_dict()`), which do not count as
            moved. It is called before gathers of a layer-wise optimizer are finished, to find the gathers, and again after.
            Of an FSDP2 model it returns shards: `reshard()` its modules first, as `state_dict()` does. The next step does not
            write tensors that a forward has left whole.
        declared: Layouts of plain tensors, by checkpoint name. Other plain tensors are whole on every rank.
        rename: Maps a name in `parameters` to the checkpoint's.
        rank, world: Default: torch.distributed's; 0 and 1 without it.
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
        self._me = d.get_rank() if live else self.rank  # this rank in meshes, which use torch's ranks
        self._given: dict[str, torch.Tensor | None] = {}
        self._names: set[str] = set()  # given names when the layout was read
        self._slots: Slots | None = None
        self._specs: list[object] = []
        self._device: torch.device | None = None  # when the layout was first read
        for _ in self._walk():  # raises if names clash
            pass
        self.let_go()

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors when their layout was first read; before that, their present one."""
        if self._device is not None:
            return self._device
        found = device_of(t for s in self._walk() if (t := local(s.get())) is not None)
        self.let_go()
        return found

    def stream(self) -> TensorStream:
        """Return the source of the packed route, which assembles whole checkpoint tensors from shards."""
        from xfer.packed.tensors import TensorStream

        return TensorStream(self)

    def drain(self) -> None:
        """`finish_gathers`, then wait for the device."""
        self.finish_gathers()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_gathers(self) -> None:
        """Reshard modules and finish gathers before further work on the current stream.

        FSDP2 leaves whole parameters in a module that ran without a backward, and in a root after its forward, but the optimizer
        writes shards. Gathers of a layer-wise optimizer over these tensors are finished too.
        """
        if self._module is not None:
            from torch.distributed.fsdp import FSDPModule

            for module in self._module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        drain_over(self._tensors())

    def finishes_alone(self) -> bool:
        """Whether `finish_gathers` waits for no other rank: no layer-wise optimizer has announced gathers."""
        return not known()

    def read(self) -> TrainerLayout:
        """Read the layout. Errors list every violation of this rank.

        Raises:
            LayoutError: A tensor does not match its layout.
            Unsupported: A tensor is a pending sum or hides its bytes.
            RebindError: Tensors have no bytes, lie in paused memory, or are on another device.
        """
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
        """Return "same", "moved" or "changed"; see participants.trainer.Source. Raise RebindError and Unsupported as `read` does."""
        if self._slots is None or not self._has_all():
            return "changed"
        try:
            state = self._slots.check()
        except RebindError:
            if any(slot.get() is None for slot in self._slots.slots):
                return "changed"  # the model has fewer tensors; if others have no bytes, `read` says so
            raise
        if state == "moved":  # places alone do not tell that these are other kinds of tensors
            self._refuse_hidden(self._slots.slots)
        return state if self._has_specs(state == "same") else "changed"

    def begin_check(self) -> Callable[[], bool] | None:
        """See participants.trainer.Source."""
        if self._slots is None or not self._has_all():
            return None
        rest = self._slots.begin_check()
        return rest if rest is not None and self._has_specs(True) else None

    def rebind(self) -> Mapping[str, torch.Tensor]:
        """Return root name -> flat uint8 view of the storage at its present address, after `check` returned "moved"."""
        if self._slots is None:
            raise RebindError("rebind() before read()")
        if self._get is not None and not self._given:  # they were let go of
            self._refresh()
        return self._slots.bind().tensors

    def let_go(self) -> None:
        """Drop the tensors that the callable returned, since the trainer may be about to free their memory."""
        self._given.clear()

    # ---- details

    def _has_all(self) -> bool:
        """Call the callable, if there is one. Returns whether it gave the names that the layout has."""
        self._refresh()
        return self._given.keys() == self._names

    def _has_specs(self, same: bool) -> bool:
        """Whether DTensors are the same parts of the whole. They may be others although their local tensors are the same.

        Args:
            same: The tensors are the same objects, so that none has become a DTensor.
        """
        return same and not any(self._specs) or self._slots is not None and self._specs == _specs(self._slots.slots)

    def _refresh(self) -> None:
        """Call the callable, if there is one.

        A new tensor object at the same place does not replace the old one, so that slots do not count it as moved. The old object
        has kept its memory alive, so the address cannot belong to new memory.
        """
        if self._get is None:
            return
        now = dict(self._get())  # before the old ones go: the callable may read them
        if now.keys() == self._given.keys() and all(map(is_, map(now.get, self._given), self._given.values())):
            return
        for name, t in now.items():
            old = self._given.get(name)
            if old is not t and old is not None and t is not None and _same_place(old, t):
                now[name] = old
        self._given.clear()
        self._given.update(now)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Local tensors of this process. They do not come from slots, since another thread may drop those."""
        given = (s.get() for s in self._walk()) if self._get is None else self._get().values()
        yield from (local(t) for t in given if t is not None)

    def _walk(self) -> Iterator[Slot]:
        """Slots by checkpoint name. Raises LayoutError if two tensors would get one name."""
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
            if t is None:
                continue
            if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided:
                if t.is_neg() or t.is_conj():
                    bad.append(f"{slot.name}: is a lazy negation or conjugate of its bytes; give it resolved")
                continue
            bad.append(
                f"{slot.name}: is a {type(t).__name__} ({t.layout}), its bytes are not its values; give it plain"
            )
        if bad:
            raise Unsupported(f"trainer {self.rank}: tensors that cannot be read", bad)

    def _fragments(self, slot: Slot, place: SlotPlace) -> tuple[TensorSpec, tuple[Fragment, ...]]:
        from torch.distributed.tensor import DTensor

        tensor, declared = slot.tensor(), self._declared.get(slot.name)
        placements: tuple[Placement, ...]
        if isinstance(tensor, DTensor):
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
        if want is not None and want != place.shape and (held or prod(want) > 0):
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
    """Whether two tensors are the same bytes in the same form and the same part of a DTensor."""
    a, b = local(old), local(new)
    return (
        type(old) is type(new)
        and type(a) is type(b)
        and type(a) in (torch.Tensor, torch.nn.Parameter)
        and (a.dtype, a.layout, a.device) == (b.dtype, b.layout, b.device)
        and a.layout == torch.strided
        and (a.is_neg(), a.is_conj()) == (b.is_neg(), b.is_conj())
        and a.is_set_to(b)
        and a.data_ptr() == b.data_ptr()
        and getattr(old, "_spec", None) == getattr(new, "_spec", None)
    )


def _specs(slots: Sequence[Slot]) -> list[object | None]:
    """torch's spec (mesh, placements, global shape) of each DTensor; None for any other tensor. It runs in every refit,
    so it makes no Python call per slot."""
    return [getattr(s.table.get(s.key), "_spec", None) for s in slots]
