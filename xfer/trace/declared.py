"""Declared layouts -> fragments: the closed-form twin of tracing, for DTensor trainers, `xferdtensor` and simulation.

Not here: what a placement means (mesh/slices.py), and layouts read by tracing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xfer.errors import LayoutError
from xfer.mesh.box import row_major
from xfer.mesh.mesh_info import MeshInfo
from xfer.mesh.placement import Placement
from xfer.mesh.slices import local_layout
from xfer.trace.fragment import Fragment


def declared_fragments(
    name: str,
    global_shape: Sequence[int],
    dtype: str,
    mesh: MeshInfo,
    placements: Sequence[Placement],
    rank: int,
    root: str,
    local_strides_bytes: Sequence[int] | None = None,
    offset: int = 0,
) -> tuple[Fragment, ...]:
    """The boxes of tensor `name` that `rank` holds, and where; () when it is not in `mesh` or its shard is empty.

    `root` is the storage that holds the local tensor, `offset` the byte of its first element there,
    `local_strides_bytes` its strides (default: contiguous). LayoutError, with all violations, when the placements do
    not fit.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise LayoutError(f"{name}: {dtype!r} is no dtype of torch {torch.__version__}")
    layout = local_layout(global_shape, mesh, placements, rank, name)
    if layout is None:
        return ()
    if local_strides_bytes is None:
        local_strides_bytes = tuple(s * kind.itemsize for s in row_major(layout.shape))
    if len(local_strides_bytes) != len(layout.shape):
        raise LayoutError(
            f"{name}: rank {rank}: {len(local_strides_bytes)} strides for a tensor of shape {layout.shape}"
        )
    return tuple(
        Fragment(
            tensor=name,
            origin=b.box.origin,
            extent=b.box.extent,
            root=root,
            offset=offset + sum(i * s for i, s in zip(b.at, local_strides_bytes)),
            strides=tuple(s if e > 1 else 0 for s, e in zip(local_strides_bytes, b.box.extent)),
            dtype=dtype,
        )
        for b in layout.boxes
    )
