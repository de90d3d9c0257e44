"""Traces taken from a stream, and applied to real tensors slowly and obviously.

No plan, no transport: one side's fragments, full checkpoint tensors and that side's storages, all in this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from xfer.trace.export import ExportWatch
from xfer.trace.fragment import Fragment
from xfer.trace.traced import Traced, byte_region


def storage_bytes(t: torch.Tensor) -> torch.Tensor:
    """The whole storage of `t` as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def place(f: Fragment, root: torch.Tensor, base: int = 0) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the fragment's region of the storage, and the dims whose strides are negative, which torch does not have."""
    offset, strides = f.offset + base, list(f.strides)
    for d, (n, s) in enumerate(zip(f.extent, f.strides)):
        if s < 0:
            offset, strides[d] = offset + (n - 1) * s, -s
    flipped = tuple(d for d, s in enumerate(f.strides) if s < 0)
    return byte_region(root, offset, f.extent, tuple(strides), f.dtype), flipped


def load(traced: Traced, tensors: Mapping[str, torch.Tensor], roots: Mapping[str, torch.Tensor]) -> None:
    """Engine side: write fragments, fills and recipes from full checkpoint `tensors` into the storages of `roots`."""
    for f in traced.fragments:
        region, flipped = place(f, roots[f.root])
        region.copy_(tensors[f.tensor][f.index].flip(flipped))
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
        region, flipped = place(f, root, int(root.storage_offset()) * root.element_size())
        tensors[f.tensor][f.index].copy_(region.flip(flipped))
    for r in traced.recipes:
        r.apply(lambda name: roots[name], tensors)


@torch.no_grad()
def trace_export(watch: ExportWatch, stream: Iterable[tuple[str, torch.Tensor]]) -> Traced:
    """Run `stream` to its end inside `watch`, noting every (name, tensor), and return what this rank holds.

    If the stream raises, that is one more error beside the others, and LayoutError carries them all.
    """
    try:
        with watch:
            for name, tensor in stream:
                watch.note_export(name, tensor)
    except Exception as e:
        watch.errors.append(f"the export raised {type(e).__name__}: {e}")
    return watch.result()
