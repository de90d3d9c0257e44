"""Slots: the places of a module tree that hold tensors, the storages behind them, and a check that both are
unchanged. Knows torch modules and no framework; both sides read their live models with it.

A *slot* is a place in the tree: a table of a module and a key in it. Frameworks swap what lies in it (`param.data =
…`, a new Parameter, buffers replaced by `module.bfloat16()`, storages resized to nothing by an offload), so a refit
re-reads slots, never objects that it kept. Nothing here holds what lies in a slot alive, apart from the bindings
that `Slots.bind` returns.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, gt, is_, is_not
from typing import Literal, overload

import torch

from xfer.errors import RebindError
from xfer.trace.fragment import Ints, Root


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """`table[key]`, in a module's parameters or buffers or in a dict that its owner keeps up to date. `name`: unique
    among the slots that are read together."""

    name: str
    table: Mapping[str, torch.Tensor | None]
    key: str

    def get(self) -> torch.Tensor | None:
        """The current tensor, or None."""
        return self.table.get(self.key)

    def tensor(self) -> torch.Tensor:
        """The current tensor. RebindError if there is none."""
        found = self.table.get(self.key)
        if found is None:
            raise RebindError("a tensor has gone", [f"{self.name}: no longer in its module"])
        return found


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """The place of a slot's tensor: `offset` and `strides` in bytes from the start of storage `root`."""

    root: str
    offset: int
    shape: Ints
    strides: Ints
    dtype: str


@dataclass(frozen=True, slots=True)
class Binding:
    """`places` by slot name, `roots` in the order of `tensors`; each tensor is flat uint8 over a whole storage (a
    view)."""

    places: dict[str, SlotPlace]
    roots: tuple[Root, ...]
    tensors: dict[str, torch.Tensor]


def walk(chunks: Sequence[torch.nn.Module]) -> Iterator[Slot]:
    """Every parameter and persistent buffer, each object once, in the order of the modules; "chunk index:dotted name"
    without the "module." of wrappers."""
    seen: set[int] = set()
    for i, chunk in enumerate(chunks):
        for path, table, key in tensors_of(chunk, seen):
            path = bare(path)
            yield Slot(f"{i}:{path}.{key}" if path else f"{i}:{key}", table, key)


def tensors_of(tree: torch.nn.Module, seen: set[int]) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
    """(path of the module, its table, key) of every parameter and persistent buffer whose id is not in `seen`, which
    grows."""
    for path, module in tree.named_modules():
        for table, transient in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) not in seen and key not in transient:
                    seen.add(id(tensor))
                    yield path, table, key


@overload
def local(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def local(tensor: torch.Tensor | None) -> torch.Tensor | None: ...
def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The local part of a DTensor; any other tensor itself. By attribute, since `to_local()` makes
    another object at every call."""
    return getattr(tensor, "_local_tensor", tensor)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The first GPU among theirs, else that of the first. Of none, where this process computes: a rank that holds
    nothing belongs to its job all the same."""
    first = None
    for t in tensors:
        if t.device.type == "cuda":
            return t.device
        first = first or t.device
    if first is not None:
        return first
    d = torch.distributed
    if torch.cuda.is_initialized() or d.is_available() and d.is_initialized() and "nccl" in str(d.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def refuse_elsewhere(slots: Iterable[Slot], device: torch.device, who: str) -> None:
    """RebindError, naming each slot whose bytes are not on `device`: what reads them there takes their addresses
    for its own."""
    tensors = ((slot.name, local(slot.get())) for slot in slots)
    bad = [
        f"{name}: lies on {t.device}; bring it to {device}"
        for name, t in tensors
        if t is not None and t.device != device and t.untyped_storage().nbytes()
    ]
    if bad:
        why = f"{who}: its weights are read on {device}, and not all are there; for another device make the adapter and connect anew"
        raise RebindError(why, bad)


def bare(path: str) -> str:
    """A dotted path without the "module." of wrappers."""
    while path == "module" or path.startswith("module."):
        path = path[len("module.") :]
    return path


class Slots:
    """A fixed set of slots of some module trees, and what lay in them when `bind` was last called.

    Keeps modules and their tables, but no tensor: a replaced parameter must be freed although a plan still knows it
    (one of a replaced layer is, when this is). `empty`: tensors without bytes and on the meta device are read too;
    those without bytes lie in root "". `unmapped`: takes flat tensors over storages and returns a function, which returns the numbers
    of those without memory behind their addresses (kernels/cuda_driver.py). `bind` and `check` call it and refuse such storages.
    """

    def __init__(
        self,
        trees: Sequence[torch.nn.Module],
        slots: Iterable[Slot],
        *,
        empty: bool = False,
        unmapped: Callable[[Sequence[torch.Tensor]], Callable[[], Sequence[int]]] = lambda tensors: tuple,
    ):
        self.slots, self._empty, self._unmapped = tuple(slots), empty, unmapped
        self.by_name = {slot.name: slot for slot in self.slots}
        self._known: _SlotReading | None = None
        # A module that was replaced in the tree leaves its slots behind, unchanged and unused. So the edges of the tree are compared
        # as well, in flat lists: at every refit a model's objects are no longer in caches, and each of them costs time.
        modules = [module for tree in trees for module in tree.modules()]
        self._vars = [vars(module) for module in modules]
        self._dicts = {name: [own[name] for own in self._vars] for name in ("_modules", "_parameters", "_buffers")}
        self._edges = self._dicts["_modules"]
        self._edge_counts = [*map(len, self._edges)]
        self._parents = [edges for edges in self._edges if edges]
        self._children = [*_all_values(self._parents)]
        self._tables = [*self._dicts["_parameters"], *self._dicts["_buffers"]]
        own = {id(table) for table in self._tables}
        self._others = [*{id(s.table): s.table for s in self.slots if id(s.table) not in own}.values()]
        self._ids: list[int] = []  # of all that lies in the tables
        self._table_counts = [*map(len, self._tables)]
        self._unfilled, self._tied = _seats_without_slots(modules)

    def bind(self) -> Binding:
        """Read every slot. RebindError lists those that are empty, have no bytes, or left the device they were on,
        and storages whose memory was given back while their addresses are kept."""
        binding, self._known = self._read()
        self._ids = self._objects()
        return binding

    def check(self, quick: bool = False) -> Literal["same", "moved", "changed"]:
        """ "same": every address that `bind` returned still holds. "moved": same layout, other addresses: `bind` again.
        "changed": another layout, or another module tree: the layout has to be read again.

        RebindError as `bind`. Costs a microsecond or two a slot.

        Args:
            quick: Say "same" if `begin_check` finds nothing. The caller looks again, whole, before it relies on the rest.
        """
        rest = self.begin_check()
        if rest is not None and (quick or rest()):
            return "same"
        known = self._known
        with _plain():
            if known is None or not self._tree_is_same():
                return "changed"
            if known.holds():  # what lies in tables, but in no slot, may be another object each time
                known.refuse_unmapped()
                return "same"
        binding, _ = self._read()
        return "moved" if (binding.places, binding.roots) == (known.places, known.roots) else "changed"

    def begin_check(self) -> Callable[[], bool] | None:
        """Look whether the modules and tensors in the tables are the same objects at the same addresses.

        Returns:
            None if they are not. Else a function for the rest of the check, callable on any thread before the next `bind`. It returns
            whether no table of a module was replaced, and no tensor got another shape, strides or dtype in its place. Later changes
            of the tables' contents do not matter.

        Raises:
            RebindError: There is no memory behind some storages.
        """
        known = self._known
        with _plain():
            # One call of the interpreter visits all tables, and so loads few cold bytes into caches. A replaced tensor is
            # noticed even if the new one has its id, because the weak reference to it is dead.
            if known is None or self._objects() != self._ids or not known.is_there():
                return None
        known.refuse_unmapped()
        return partial(self._rest_is_same, known)

    def _objects(self) -> list[int]:
        return [*map(id, gc.get_referents(*self._edges, *self._tables, *self._others))]

    def _rest_is_same(self, known: _SlotReading) -> bool:
        with _plain():
            return self._tables_in_place() and known.is_laid_out()

    def _tables_in_place(self) -> bool:
        return all(all(map(is_, map(dict.get, self._vars, repeat(name)), kept)) for name, kept in self._dicts.items())

    def _tree_is_same(self) -> bool:
        """Whether the modules and tables are the same, checked without a Python call per module. Missing tensors are named
        when they are read."""
        return (
            self._tables_in_place()
            and [*map(len, self._edges)] == self._edge_counts
            and all(map(is_, _all_values(self._parents), self._children))
            and not any(map(gt, map(len, self._tables), self._table_counts))
            and all(map(is_, map(dict.get, *self._unfilled), repeat(None)))
            and all(map(is_, map(dict.get, *self._tied[:2]), map(dict.get, *self._tied[2:])))
        )

    def _read(self) -> tuple[Binding, _SlotReading]:
        self._refuse_absent()
        places: dict[str, SlotPlace] = {}
        names: dict[int, str] = {}  # storage -> root, which is called after the first slot found in it
        roots: list[Root] = []
        tensors: dict[str, torch.Tensor] = {}
        contents: list[tuple] = []
        devices: dict[str, torch.device] = {}
        for slot in self.slots:
            t = local(slot.tensor())
            storage = t.untyped_storage()
            root = names.get(storage._cdata) if storage.nbytes() else ""
            if root is None:
                root = names[storage._cdata] = slot.name
                roots.append(Root(root, storage.nbytes()))
                tensors[root] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
            size = t.element_size()
            strides = tuple(s * size for s in t.stride())
            dtype = str(t.dtype).removeprefix("torch.")
            places[slot.name] = SlotPlace(root, int(t.storage_offset()) * size, tuple(t.shape), strides, dtype)
            part = t is not slot.table[slot.key]
            contents.append((slot.table, slot.key, weakref.ref(t), part, *(of(t) for of in _LAID_OUT)))
            devices[slot.name] = t.device
        columns = [[row[i] for row in contents] for i in range(4 + len(_LAID_OUT))]
        reading = _SlotReading(places, tuple(roots), columns, devices, self._unmapped(tuple(tensors.values())))
        reading.refuse_unmapped()
        return Binding(places, tuple(roots), tensors), reading

    def _refuse_absent(self) -> None:
        was_on, was = (self._known.devices, self._known.places) if self._known else ({}, {})
        bad = []
        for slot in self.slots:
            whole = slot.get()
            t = local(whole)
            if whole is None or t is None:
                bad.append(f"{slot.name}: no longer in its module")
            elif not self._empty and (
                t.device.type == "meta"
                or (t.numel() and not t.untyped_storage().nbytes())
                # Offloaders also set `data` to an empty tensor. A part of a DTensor may well have none in another layout.
                or (not whole.numel() and slot.name in was and 0 not in was[slot.name].shape)
            ):
                bad.append(f"{slot.name}: has no bytes (offloaded?): bring the parameters back before the refit")
            elif was_on.get(slot.name, t.device) != t.device:
                bad.append(f"{slot.name}: moved from {was_on[slot.name]} to {t.device}: bring it back before the refit")
        if bad:
            raise RebindError("parameters cannot be read where they were", bad)


@dataclass(frozen=True, slots=True)
class _SlotReading:
    """Result of one `bind`. `contents`: columns with one entry per slot: table, key, weak tensor, whether that is the local part of the
    DTensor in the table, then one column for each of `_LAID_OUT`. `devices`: by slot name. `unmapped`: returns the numbers of roots
    that have no memory behind them now."""

    places: dict[str, SlotPlace]
    roots: tuple[Root, ...]
    contents: list[list]
    devices: dict[str, torch.device]
    unmapped: Callable[[], Sequence[int]]

    def refuse_unmapped(self) -> None:
        if gone := self.unmapped():
            names = [self.roots[i].name for i in gone]
            some = f"{len(names)} of {len(self.roots)} storages, such as that of {', '.join(names[:3])}"
            raise RebindError(
                "there is no memory behind parameters",
                [f"{some}: paused (torch_memory_saver, a pool that sleeps)? Resume the weights before xfer reads them"],
            )

    def holds(self) -> bool:
        """Whether every slot still has its tensor, at the same address and with the same layout. The address alone is not enough: freed
        memory comes back at the same address, even for another dtype (a router bias that becomes fp32)."""
        tables, keys, refs, parts, *_ = self.contents
        for ref, inside, part in zip(refs, map(dict.get, tables, keys), parts):
            t = ref()
            if t is None or (getattr(inside, "_local_tensor", None) if part else inside) is not t:
                return False
        return self.is_there() and self.is_laid_out()

    def is_there(self) -> bool:
        """Whether each tensor exists, at its address. In the tables it checks DTensors only: each must have the same local tensor."""
        tables, keys, refs, parts, addresses, *_ = self.contents
        tensors = [ref() for ref in refs]
        whole = map(dict.get, compress(tables, parts), compress(keys, parts))
        return (
            all(map(is_not, tensors, repeat(None)))
            and [*map(_T.data_ptr, tensors)] == addresses
            and all(map(is_, map(getattr, whole, repeat("_local_tensor"), repeat(None)), compress(tensors, parts)))
        )

    def is_laid_out(self) -> bool:
        """Whether each tensor exists and has its layout, at any address. Both checks run in every refit, so they go column by column,
        without a Python call per tensor."""
        tensors = [ref() for ref in self.contents[2]]
        return (
            all(map(is_not, tensors, repeat(None)))
            and [[*map(of, tensors)] for of in _LAID_OUT[1:]] == self.contents[5:]
        )


def _seats_without_slots(modules: Iterable[torch.nn.Module]) -> tuple[tuple[list, list], tuple[list, list, list, list]]:
    """Places without a slot in which a tensor may appear: (tables, keys) that hold None, and (tables, keys, tables,
    keys) that hold what an earlier place does. The one is filled, the other's tie is broken, and it is another
    layout."""
    first: dict[int, tuple[dict, str]] = {}
    unfilled: tuple[list, list] = ([], [])
    tied: tuple[list, list, list, list] = ([], [], [], [])
    for module in modules:
        for table, transient in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for key, tensor in table.items():
                if key in transient:
                    continue
                seats: tuple[list, ...] = unfilled
                seat: tuple[object, ...] = table, key
                if tensor is not None:
                    earlier, name = first.setdefault(id(tensor), (table, key))
                    if earlier is table and name == key:
                        continue
                    seats, seat = tied, (table, key, earlier, name)
                for column, x in zip(seats, seat):
                    column.append(x)
    return unfilled, tied


def _all_values(tables: Iterable[dict]) -> Iterator:
    return chain.from_iterable(map(dict.values, tables))


_T = torch.Tensor
_LAID_OUT = (_T.data_ptr, _T.storage_offset, attrgetter("dtype"), _T.size, _T.stride)
"""Properties of a tensor that are all equal as long as it lies in the same place of the same storage. A resize changes the address."""
_plain = torch._C.DisableTorchFunctionSubclass
"""Inside, a subclass's `__torch_function__` is not asked. vLLM's parameters have one, in Python, and each attribute
that is looked at would go through it, while the engine waits."""
