"""A module tree seen as storages: which named tensor lies where, what moved since, and which bytes a set of writes covers.

Plain torch; nothing of vLLM, of canonical tensors or of plans. The engine side reads two trees with it, the live model and
its twin on the meta device, and compares them (layout.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xfer.errors import RebindError, Unsupported
from xfer.trace.fragment import Fill, Fragment, Root

Ints = tuple[int, ...]
Intervals = np.ndarray
"""int64 [N, 2]: disjoint byte ranges [start, stop) in rising order, no two of them touching."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One name in the tree. `root`: the storage's name, "" when it has no bytes; `offset` in bytes, strides in elements."""

    name: str
    is_parameter: bool
    root: str
    offset: int
    shape: Ints
    strides: Ints
    dtype: torch.dtype

    def bytes(self) -> Intervals:
        """Exactly the bytes of its elements."""
        item = self.dtype.itemsize
        return union([runs(self.offset, self.shape, tuple(s * item for s in self.strides), item)])

    def described(self) -> str:
        contiguous = "" if self.bytes_dense() else f" strides {self.strides}"
        return f"{tuple(self.shape)}{contiguous} {str(self.dtype).removeprefix('torch.')}"

    def bytes_dense(self) -> bool:
        return torch.empty(0, device="meta").as_strided(self.shape, self.strides).is_contiguous()


class Storages:
    """A snapshot of all parameters and buffers of `model`, ties and duplicate names included, by the storage they lie in.

    `slots`: by name, in the order of the tree. `roots`: sorted by name; a storage is called after the first name found in
    it. `tensors`: root name -> flat uint8 tensor over the whole storage. It keeps the storage alive, so an address in it
    cannot come to mean another tensor behind our back.

    Raises Unsupported for tensors that hide their storage (wrapper subclasses), naming all.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._watch: list[tuple[dict, str, _Seen]] = []
        self._sizes: list[tuple[dict, int]] = []
        slots: dict[str, Slot] = {}
        storages: dict[int, tuple[str, torch.UntypedStorage]] = {}
        hidden: list[str] = []
        visited: set[int] = set()
        for prefix, module in model.named_modules(remove_duplicate=False):
            for is_parameter, owner in ((True, module._parameters), (False, module._buffers)):
                for key, tensor in owner.items():
                    if tensor is None:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    if is_traceable_wrapper_subclass(tensor):
                        hidden.append(f"{name}: {type(tensor).__name__}")
                        continue
                    storage = tensor.untyped_storage()
                    root = ""
                    if storage.nbytes():
                        root = storages.setdefault(storage._cdata, (name, storage))[0]
                    offset = tensor.storage_offset() * tensor.element_size()
                    slots[name] = Slot(name, is_parameter, root, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)
                    if id(owner) not in visited:
                        self._watch.append((owner, key, _Seen.of(tensor)))
            if id(module) not in visited:
                visited.add(id(module._parameters))
                visited.add(id(module._buffers))
                visited.add(id(module))
                self._sizes += [(d, len(d)) for d in (module._parameters, module._buffers, module._modules)]
        if hidden:
            raise Unsupported("tensors whose bytes cannot be read from outside", hidden)
        self.slots: Mapping[str, Slot] = slots
        ordered = sorted(storages.values(), key=lambda item: item[0])
        self.roots = tuple(Root(name, storage.nbytes()) for name, storage in ordered)
        self.tensors = {name: _flat(storage) for name, storage in ordered}

    def in_root(self, root: str) -> list[Slot]:
        return [s for s in self.slots.values() if s.root == root]

    def check(self) -> Literal["same", "moved", "changed"]:
        """Compare the tree with this snapshot, without walking it while nothing happened.

        "moved": every name is still there with shape, dtype and place within its storage, but some storage is another one.
        """
        if all(seen.holds(owner.get(key)) for owner, key, seen in self._watch):
            if all(len(owner) == n for owner, n in self._sizes):
                return "same"
        now = Storages(self._model)
        if dict(now.slots) != dict(self.slots) or now.roots != self.roots:
            return "changed"
        return "moved"

    def rebound(self) -> Storages:
        """A snapshot of the same layout at its present addresses; RebindError, naming what differs, if it is another one."""
        now = Storages(self._model)
        lines = [f"{n}: gone" for n in self.slots.keys() - now.slots.keys()]
        lines += [f"{n}: new" for n in now.slots.keys() - self.slots.keys()]
        for name in self.slots.keys() & now.slots.keys():
            was, now_is = self.slots[name], now.slots[name]
            if was != now_is:
                lines.append(
                    f"{name}: was {was.described()} at byte {was.offset} of {was.root or 'nothing'}, "
                    f"now {now_is.described()} at byte {now_is.offset} of {now_is.root or 'nothing'}"
                )
        lines += [f"{a.name}: {a.nbytes} bytes, now {b.nbytes}" for a, b in zip(self.roots, now.roots) if a != b and not lines]
        if lines:
            raise RebindError("the model's layout changed since it was read; it has to be planned again", sorted(lines))
        return now


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a cached slot held, in the terms that are cheapest to compare."""

    pointer: int
    nbytes: int
    shape: torch.Size
    strides: Ints
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> _Seen:
        return cls(_pointer(t), t.untyped_storage().nbytes(), t.shape, t.stride(), t.dtype)

    def holds(self, t: torch.Tensor | None) -> bool:
        return t is not None and self == _Seen.of(t)


def _pointer(t: torch.Tensor) -> int:
    # A meta tensor has no address; its storage object serves as one.
    return t.untyped_storage()._cdata if t.is_meta else t.data_ptr()


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- sets of bytes


def runs(offset: int, extent: Ints, strides: Ints, item: int) -> Intervals:
    """The bytes of a strided region as ranges, in no particular order and possibly touching. Strides in bytes, any sign."""
    if not all(extent):
        return np.empty((0, 2), np.int64)
    offset += sum((n - 1) * s for n, s in zip(extent, strides) if s < 0)
    length, outer = item, []
    for step, n in sorted((abs(s), n) for s, n in zip(strides, extent) if n > 1):
        if step == length and not outer:
            length *= n
        else:
            outer.append((step, n))
    starts = np.array([offset], np.int64)
    for step, n in outer:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * step).ravel()
    return np.stack([starts, starts + length], axis=1)


def union(parts: Iterable[Intervals]) -> Intervals:
    parts = [p for p in parts if len(p)]
    if not parts:
        return np.empty((0, 2), np.int64)
    ranges = np.concatenate(parts)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    first = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] > reach[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(ranges) - 1]])
    return np.stack([ranges[first, 0], reach[last]], axis=1)


def common(a: Intervals, b: Intervals) -> Intervals:
    """Bytes in both."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if low < high:
            out.append((low, high))
        if a[i, 1] <= b[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(out, np.int64).reshape(-1, 2)


def without(a: Intervals, b: Intervals) -> Intervals:
    """Bytes in `a` but not in `b`."""
    if not len(a) or not len(b):
        return a
    edges = np.concatenate([[np.iinfo(np.int64).min], b.ravel(), [np.iinfo(np.int64).max]]).reshape(-1, 2)
    return common(a, edges[edges[:, 0] < edges[:, 1]])


def size(a: Intervals) -> int:
    return int((a[:, 1] - a[:, 0]).sum())


def written(fragments: Iterable[Fragment], fills: Iterable[Fill], itemsize: Mapping[str, int]) -> dict[str, Intervals]:
    """Bytes that fragments and fills write, by root."""
    parts: dict[str, list[Intervals]] = {}
    for item in (*fragments, *fills):
        parts.setdefault(item.root, []).append(runs(item.offset, item.extent, item.strides, itemsize[item.dtype]))
    return {root: union(p) for root, p in parts.items()}


def pieces(a: Intervals) -> Iterator[tuple[int, int]]:
    for start, stop in a.tolist():
        yield start, stop
