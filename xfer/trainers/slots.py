"""Where a module tree keeps its tensors, and whether they are still there. Knows torch modules, no training framework.

A *slot* is a place in the tree: a module and an attribute name. Frameworks swap what lies in it (`param.data = …`, a new
Parameter, buffers replaced by `module.bfloat16()`, storages resized to nothing by an offload), so a refit re-reads slots, never
objects that it kept. Nothing here holds a parameter or its storage alive, apart from the bindings that `Slots.bind` returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from xfer.errors import RebindError
from xfer.trace.fragment import Ints, Root


@dataclass(frozen=True, slots=True)
class Slot:
    """`name` is unique in the process: "chunk index:dotted name"."""

    name: str
    module: torch.nn.Module
    attr: str
    is_buffer: bool

    def get(self) -> torch.Tensor | None:
        """What lies there now."""
        return (self.module._buffers if self.is_buffer else self.module._parameters).get(self.attr)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot's tensor lies: `offset` and `strides` in bytes from the start of storage `root`."""

    root: str
    offset: int
    shape: Ints
    strides: Ints
    dtype: str


@dataclass(frozen=True, slots=True)
class Binding:
    """`places` by slot name, `roots` in the order of `tensors`; each tensor is flat uint8 over a whole storage (a view)."""

    places: dict[str, Place]
    roots: tuple[Root, ...]
    tensors: dict[str, torch.Tensor]


def walk(chunks: Sequence[torch.nn.Module]) -> Iterator[Slot]:
    """Every parameter and persistent buffer, each object once, in the order of the modules. Wrappers' "module." is dropped."""
    seen: set[int] = set()
    for i, chunk in enumerate(chunks):
        for path, module in chunk.named_modules():
            while path == "module" or path.startswith("module."):
                path = path[len("module.") :]
            for table, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for attr, tensor in table.items():
                    if tensor is None or id(tensor) in seen or (is_buffer and attr in module._non_persistent_buffers_set):
                        continue
                    seen.add(id(tensor))
                    yield Slot(f"{i}:{path}.{attr}" if path else f"{i}:{attr}", module, attr, is_buffer)


class Slots:
    """A fixed set of slots of some module trees, and what was in them when `bind` was last called."""

    def __init__(self, trees: Sequence[torch.nn.Module], slots: Iterable[Slot]):
        self.slots = tuple(slots)
        self._last: Binding | None = None
        self._seen: list[tuple] = []
        self._storages: dict[str, tuple[int, int]] = {}  # root -> (address, bytes)
        self._device: dict[str, torch.device] = {}
        # A module replaced in the tree leaves its slots behind, intact and dead: so the edges are compared as well. Weak
        # references, because a replaced layer must be freed although a plan still knows it.
        self._edges = [
            (weakref.ref(module), tuple(weakref.ref(child) for child in module._modules.values() if child is not None))
            for tree in trees
            for module in tree.modules()
        ]

    def bind(self) -> Binding:
        """Read every slot. LayoutError-free: RebindError when a tensor is missing, has no bytes or left its device."""
        self._refuse_absent()
        places: dict[str, Place] = {}
        names: dict[int, str] = {}
        roots: list[Root] = []
        tensors: dict[str, torch.Tensor] = {}
        seen = []
        with torch.no_grad():
            for slot in self.slots:
                t = slot.get()
                storage = t.untyped_storage()
                root = names.get(storage._cdata)
                if root is None:
                    root = names[storage._cdata] = slot.name
                    roots.append(Root(root, storage.nbytes()))
                    tensors[root] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
                size = t.element_size()
                strides = tuple(s * size for s in t.stride())
                dtype = str(t.dtype).removeprefix("torch.")
                places[slot.name] = Place(root, t.storage_offset() * size, tuple(t.shape), strides, dtype)
                seen.append((slot, weakref.ref(t), t.data_ptr(), t.dtype, t.shape, t.stride()))
                self._device[slot.name] = t.device
        self._seen = seen
        self._storages = {r.name: (tensors[r.name].data_ptr(), r.nbytes) for r in roots}
        self._last = Binding(places, tuple(roots), tensors)
        bound, self._last = self._last, Binding(places, tuple(roots), {})  # keep no storage alive
        return bound

    def check(self) -> str:
        """"same": every address that `bind` returned still holds. "moved": same layout, other addresses: `bind` again.
        "changed": another layout (or another module tree): read the layout again.

        RebindError lists the slots whose tensor is gone, has lost its bytes or lies on another device.
        """
        if self._last is None:
            return "changed"
        if self._same():
            return "same"
        for ref, children in self._edges:
            module = ref()
            if module is None:
                return "changed"
            now = [c for c in module._modules.values() if c is not None]
            if len(now) != len(children) or any(c() is not n for c, n in zip(children, now)):
                return "changed"
        self._refuse_absent()
        old, device = self._last, dict(self._device)
        new = self.bind()
        if (new.places, new.roots) == (old.places, old.roots):
            return "moved"
        self._last, self._device = old, device
        return "changed"

    def _same(self) -> bool:
        for slot, ref, address, dtype, shape, strides in self._seen:
            t = slot.get()
            if (
                t is None
                or t is not ref()
                or t.data_ptr() != address
                or t.dtype != dtype
                or t.shape != shape
                or t.stride() != strides
            ):
                return False
        for slot, *_ in self._seen:
            if slot.name in self._storages:
                storage = slot.get().untyped_storage()
                if (storage.data_ptr(), storage.nbytes()) != self._storages[slot.name]:
                    return False
        return all(
            (module := ref()) is not None
            and len(module._modules) >= len(children)
            and all(c() is n for c, n in zip(children, (m for m in module._modules.values() if m is not None)))
            for ref, children in self._edges
        )

    def _refuse_absent(self) -> None:
        bad = []
        for slot in self.slots:
            t = slot.get()
            if t is None:
                bad.append(f"{slot.name}: no longer in its module")
            elif t.device.type == "meta" or (t.numel() and not t.untyped_storage().nbytes()):
                bad.append(f"{slot.name}: has no bytes (offloaded?): bring the parameters back before the refit")
            elif self._device.get(slot.name, t.device) != t.device:
                bad.append(
                    f"{slot.name}: moved from {self._device[slot.name]} to {t.device}: bring it back before the refit"
                )
        if bad:
            raise RebindError("parameters cannot be read where they were", bad)
