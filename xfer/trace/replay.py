"""Traces applied to real tensors, slowly and obviously: for tests, for a golden path, for seeing that a trace is right.

No plan, no transport: one side's fragments, full checkpoint tensors and that side's storages, all in this process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from xfer.trace.fragment import Fragment, Ints
from xfer.trace.traced import Traced


def storage_bytes(t: torch.Tensor) -> torch.Tensor:
    """The whole storage of `t` as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def byte_region(t: torch.Tensor, offset: int, shape: Ints, strides: Ints, dtype: str) -> torch.Tensor:
    """A strided region of the storage of `t`; offset and strides in bytes, whole elements of `dtype`. Strides >= 0."""
    kind = getattr(torch, dtype)
    size = kind.itemsize
    if offset % size or any(s % size for n, s in zip(shape, strides) if n > 1):
        raise ValueError(f"region at byte {offset} with strides {strides} is not made of whole {dtype} elements")
    flat = torch.empty(0, dtype=kind, device=t.device).set_(t.untyped_storage())
    return flat.as_strided(shape, tuple(s // size for s in strides), offset // size)


def _region(f: Fragment, root: torch.Tensor, base: int = 0) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The fragment's region of the storage, and the dims in which it runs against the box (torch has no strides <
    0).
    """
    offset, strides = f.offset + base, list(f.strides)
    for d, (n, s) in enumerate(zip(f.extent, f.strides)):
        if s < 0:
            offset, strides[d] = offset + (n - 1) * s, -s
    flipped = tuple(d for d, s in enumerate(f.strides) if s < 0)
    return byte_region(root, offset, f.extent, tuple(strides), f.dtype), flipped


def _box(f: Fragment, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[f.index]


def load(traced: Traced, tensors: Mapping[str, torch.Tensor], roots: Mapping[str, torch.Tensor]) -> None:
    """Engine side: write fragments, fills and recipes from full checkpoint `tensors` into the storages of `roots`."""
    for f in traced.fragments:
        region, flipped = _region(f, roots[f.root])
        region.copy_(_box(f, tensors[f.tensor]).flip(flipped))
    for x in traced.fills:
        value = torch.frombuffer(bytearray(x.bits), dtype=getattr(torch, x.dtype)).reshape(())
        byte_region(roots[x.root], x.offset, x.extent, x.strides, x.dtype).copy_(value)
    for r in traced.recipes:
        r.apply(lambda name: tensors[name], roots)


def export(traced: Traced, roots: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Trainer side: write what this rank holds into the full checkpoint `tensors`.

    Offsets of fragments count from each root tensor's own first element, wherever in its storage that is.
    """
    for f in traced.fragments:
        root = roots[f.root]
        region, flipped = _region(f, root, root.storage_offset() * root.element_size())
        _box(f, tensors[f.tensor]).copy_(region.flip(flipped))
    for r in traced.recipes:
        r.apply(lambda name: roots[name], tensors)
