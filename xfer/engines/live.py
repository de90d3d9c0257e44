"""The storages of a module tree: the place of each named tensor, storages that moved, and the bytes that writes cover.

This module uses plain torch: no vLLM, no checkpoint tensors and no plans. The engine side reads two trees with
it, the live model and its twin on the meta device, and compares them (layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xfer.errors import RebindError, Unsupported
from xfer.mesh.box import row_major
from xfer.plan import intervals
from xfer.plan.program import ITEMSIZE
from xfer.trace.fragment import Fill, Fragment
from xfer.trace.slots import Slot, Slots

Ints = tuple[int, ...]
Ranges = tuple[np.ndarray, np.ndarray]
"""int64 [N] starts and stops of byte ranges, in rising order, with gaps between them, as in plan/intervals.py."""
NONE: Ranges = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """One named tensor of the tree.

    Attributes:
        name: Its name.
        is_parameter: Whether it is a parameter; otherwise it is a buffer.
        root: Name of its storage; "" if it has no bytes.
        offset: Bytes from the beginning of the storage.
        shape: Elements per dim.
        strides: Bytes per dim.
        dtype: Its dtype.
    """

    name: str
    is_parameter: bool
    root: str
    offset: int
    shape: Ints
    strides: Ints
    dtype: torch.dtype

    def bytes(self) -> Ranges:
        """Return the bytes of its elements, without gaps between them."""
        return covered([(self.offset, self.shape, self.strides, self.dtype.itemsize)], self.name)

    def described(self) -> str:
        """Return shape, strides (in elements, if not row-major) and dtype as text."""
        strides = tuple(s // self.dtype.itemsize for s in self.strides)
        plain = all(n == 1 or s == p for n, s, p in zip(self.shape, strides, row_major(self.shape), strict=True))
        return f"{self.shape}{'' if plain else f' strides {strides}'} {str(self.dtype).removeprefix('torch.')}"


DRAFT = "draft."
"""Prefix of the names of a drafter's tensors. A drafter is a second model beside the one that is served."""


class LiveStorages:
    """A snapshot of all parameters and buffers of a model by storage, ties and duplicate names included.

    Args:
        model: The model.
        draft: Its drafter. The drafter's tensors follow the model's.
        wraps: Returns the name of the child that a module only wraps ("base_layer" of an adapter's layer), or "". The
            child's tensors get the names that they had before they were wrapped.

    Attributes:
        slots: Tensors by name, in the order of the tree.
        by_root: Tensors of each storage.
        roots: Storages, sorted by name. The name of a storage is the first name found in it.
        tensors: Root name -> flat uint8 tensor over the whole storage. It keeps the storage alive, so that its address
            cannot be reused for another tensor.

    Raises:
        Unsupported: Tensors hide their storage (wrapper subclasses). It names all of them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        draft: torch.nn.Module | None = None,
        wraps: Callable[[torch.nn.Module], str] = lambda module: "",
    ):
        self._again = lambda: LiveStorages(model, draft=draft, wraps=wraps)
        found = [*_all(model, wraps), *(() if draft is None else _all(draft, wraps, DRAFT))]
        hidden = [f"{s.name}: {type(s.get()).__name__}" for s in found if is_traceable_wrapper_subclass(s.get())]
        if hidden:
            raise Unsupported("tensors whose bytes cannot be read from outside", hidden)
        self._watch = Slots([model] if draft is None else [model, draft], found, empty=True)
        bound = self._watch.bind()
        self.slots: Mapping[str, LiveSlot] = {
            s.name: LiveSlot(
                s.name, isinstance(s.get(), torch.nn.Parameter), p.root, p.offset, p.shape, p.strides, s.get().dtype
            )
            for s, p in zip(found, bound.places.values(), strict=True)
        }
        self.by_root: Mapping[str, list[LiveSlot]] = {root.name: [] for root in bound.roots}
        for slot in self.slots.values():
            if slot.root:
                self.by_root[slot.root].append(slot)
        self.roots = tuple(sorted(bound.roots, key=lambda root: root.name))
        self.tensors = {root.name: bound.tensors[root.name] for root in self.roots}

    def check(self, quick: bool = False) -> Literal["same", "moved", "changed"]:
        """Compare the tree with this snapshot.

        Args:
            quick: See `Slots.check`.

        Returns:
            "same"; "moved": each name has the same shape, dtype and place in its storage, but some storage is new; "changed".
        """
        try:
            return self._watch.check(quick)
        except RebindError:  # tensors are missing or on another device; `rebound` names them
            return "changed"

    def rebound(self) -> LiveStorages:
        """Return a snapshot of the same layout at its present addresses.

        Raises:
            RebindError: The layout has changed. It names each difference.
        """
        now = self._again()
        lines = [f"{n}: gone" for n in self.slots.keys() - now.slots.keys()]
        lines += [f"{n}: new" for n in now.slots.keys() - self.slots.keys()]
        for name in self.slots.keys() & now.slots.keys():
            was, now_is = self.slots[name], now.slots[name]
            if was != now_is:
                lines.append(
                    f"{name}: was {was.described()} at byte {was.offset} of {was.root or 'nothing'}, "
                    f"now {now_is.described()} at byte {now_is.offset} of {now_is.root or 'nothing'}"
                )
        if not lines:  # the storages have the same names, but one may have another size
            for a, b in zip(self.roots, now.roots, strict=True):
                lines += [f"{a.name}: a storage of {a.nbytes} bytes, now {b.nbytes}"] if a != b else []
        if lines:
            raise RebindError("the model's layout changed since it was read; it has to be planned again", sorted(lines))
        return now


def _all(model: torch.nn.Module, wraps: Callable[[torch.nn.Module], str], prefix: str = "") -> Iterator[Slot]:
    for path, module, _ in modules(model, wraps):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield Slot(prefix + (f"{path}.{key}" if path else key), table, key)


def modules(
    model: torch.nn.Module, wraps: Callable[[torch.nn.Module], str] = lambda module: ""
) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """Yield (path, module, whether it only wraps another) of each module. A wrapped module has the path of its wrapper."""
    shown, wrapped = {"": ""}, {"": wraps(model)}  # by path: the path to show, and the child that is wrapped
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            parent, _, child = path.rpartition(".")
            up = shown[parent]
            shown[path] = up if child == wrapped[parent] else f"{up}.{child}" if up else child
            wrapped[path] = wraps(module)
        yield shown[path], module, bool(wrapped[path])


# ---- sets of bytes


def covered(regions: Iterable[tuple[int, Ints, Ints, int]], storage: str) -> Ranges:
    """Return the bytes that strided regions of one storage cover.

    Args:
        regions: (offset in bytes, extent in elements, strides in bytes, bytes of an element).
        storage: Name of the storage, for the error.

    Raises:
        Unsupported: The regions are too scattered to list their bytes.
    """
    regions = [r for r in regions if all(r[1])]
    if not regions:
        return NONE
    dims = max(len(extent) for _, extent, _, _ in regions)
    pad = [dims - len(extent) for _, extent, _, _ in regions]
    runs = intervals.runs(
        np.array([offset for offset, _, _, _ in regions], np.int64),
        np.array([(1,) * n + tuple(extent) for n, (_, extent, _, _) in zip(pad, regions, strict=True)], np.int64),
        np.array([(0,) * n + tuple(strides) for n, (_, _, strides, _) in zip(pad, regions, strict=True)], np.int64),
        np.array([item for _, _, _, item in regions], np.int64),
        lambda _: storage,
    )
    return intervals.union(runs.start, runs.stop)


def union(parts: Iterable[Ranges]) -> Ranges:
    parts = [NONE, *parts]
    return intervals.union(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))


def common(a: Ranges, b: Ranges) -> Ranges:
    return intervals.difference(a, intervals.difference(a, b))


def pairs(a: Ranges) -> list[tuple[int, int]]:
    return list(zip(a[0].tolist(), a[1].tolist(), strict=True))


def written(fragments: Iterable[Fragment], fills: Iterable[Fill]) -> dict[str, Ranges]:
    """Return the bytes that fragments and fills write, by root."""
    regions: dict[str, list[tuple[int, Ints, Ints, int]]] = {}
    both: Iterable[Fragment | Fill] = (*fragments, *fills)
    for x in both:
        regions.setdefault(x.root, []).append((x.offset, x.extent, x.strides, ITEMSIZE[x.dtype]))
    return {root: covered(r, root) for root, r in regions.items()}
