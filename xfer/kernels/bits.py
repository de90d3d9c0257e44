"""Many tensors copied by few calls, bit for bit. Not here: copies that change a dtype or a layout (torch_impl.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: what carries its bits untouched."""


def copy_bits(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Each of `tensors` into its place of the same shape and dtype, in a few calls.

    As integers: on GPUs this copy of torch's computes floats, even into their own dtype, and makes every NaN the same one.
    """
    by_size: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for a, b in zip(into, tensors, strict=True):
        size = b.element_size()
        if size not in INTEGERS:  # complex numbers of 16 bytes
            a.copy_(b, non_blocking=True)
            continue
        lists = by_size.setdefault(size, ([], []))
        lists[0].append(a.view(INTEGERS[size]))
        lists[1].append(b.detach().view(INTEGERS[size]))
    for ours, theirs in by_size.values():
        torch._foreach_copy_(ours, theirs, non_blocking=True)


GRANULE = 32
"""Bytes for which one bit says whether they changed (marks.py). A GPU reads another one in sectors of 32 bytes. If 1 % of the elements of
a bf16 tensor change, anywhere, 15 % of its granules have changed; of granules of 128 bytes it would be 47 %."""
WORD = 32 * GRANULE
"""Bytes of a storage for which one word has the bits."""
