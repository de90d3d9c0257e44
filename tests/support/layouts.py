"""A trainer's layout read back from its storages, to be held against what Bridge exports. Knows no Megatron."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.support.replay import place
from xfer.trace.fragment import Fragment
from xfer.trace.slots import bare
from xfer.trace.traced import Traced, TrainerLayout


def region(flat: torch.Tensor, f: Fragment) -> torch.Tensor:
    """A fragment's elements in a flat storage: a view, or a copy where a stride is negative."""
    view, flipped = place(f, flat)
    return view.flip(flipped) if flipped else view


def paint(traced: Traced) -> dict[str, torch.Tensor]:
    """Per checkpoint tensor int64 [shape]: the root and the byte at which each element begins, -1 where another rank holds it. Two
    layouts that say the same in other boxes paint the same."""
    out = {s.name: torch.full(s.shape, -1, dtype=torch.int64) for s in traced.specs}
    roots = {name: i for i, name in enumerate(sorted({f.root for f in traced.fragments}))}
    for f in traced.fragments:
        at = torch.full(f.extent, (roots[f.root] << 40) + f.offset, dtype=torch.int64)
        for d, (n, s) in enumerate(zip(f.extent, f.strides)):
            at += (torch.arange(n) * s).view([n if k == d else 1 for k in range(len(f.extent))])
        out[f.tensor][f.index] = at
    return out


def differing(one: Traced, other: Traced) -> list[str]:
    """Tensors of which two traces say different things."""
    a, b = paint(one), paint(other)
    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n]))


def by_parameter(chunks: Iterable[torch.nn.Module], layout: TrainerLayout) -> dict[str, list]:
    """Per live parameter its shape, its dtype and what fragments say of it, wherever it lies in its storage."""
    root_at = {t.data_ptr(): root for root, t in layout.tensors.items()}
    out = {}
    for i, chunk in enumerate(chunks):
        for name, t in chunk.state_dict(keep_vars=True).items():
            root = root_at.get(t.untyped_storage().data_ptr()) if isinstance(t, torch.Tensor) else None
            if root is None:
                continue
            start = t.storage_offset() * t.element_size()
            inside = range(start, start + t.numel() * t.element_size())
            parts = [
                (f.tensor, f.origin, f.extent, f.offset - start, f.strides)
                for f in layout.traced.fragments
                if f.root == root and f.offset in inside
            ]
            out[f"{i}:{bare(name)}"] = [list(t.shape), str(t.dtype), sorted(parts)]
    return out


TIED = " (tied copy)"


def left_out(chunks: Iterable[torch.nn.Module], layout: TrainerLayout) -> list[str]:
    """Names of live tensors with a byte that is not in exactly one fragment, without those that recipes read. From the modules alone.

    A last stage's copy of the embedding, which the first stage exports, is marked as such, as Megatron-Core marks it.
    """
    painted = {root: torch.zeros(t.numel(), dtype=torch.int8) for root, t in layout.tensors.items()}
    for f in layout.traced.fragments:
        offset = f.offset + sum((n - 1) * s for n, s in zip(f.extent, f.strides) if s < 0)
        item = getattr(torch, f.dtype).itemsize
        painted[f.root].as_strided((*f.extent, item), (*map(abs, f.strides), 1), offset).add_(1)
    by_address = {t.data_ptr(): painted[root] for root, t in layout.tensors.items()}
    read = {s for r in layout.traced.recipes for s in r.sources}
    bad = []
    for i, chunk in enumerate(chunks):
        for name, t in chunk.state_dict(keep_vars=True).items():
            if not isinstance(t, torch.Tensor) or not t.is_floating_point() or f"{i}:{bare(name)}" in read:
                continue
            counts = by_address.get(t.untyped_storage().data_ptr())
            start = t.storage_offset() * t.element_size()
            if counts is None or not bool((counts[start : start + t.numel() * t.element_size()] == 1).all()):
                bad.append(bare(name) + TIED * getattr(t, "shared", False))
    return bad
