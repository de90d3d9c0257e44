"""Moving the rows of a program between live storages and wire buffers: pack, unpack, local copy, fill.

Every transport calls `bind` once per set of rows and then only the bound object's methods. Which implementation runs
depends on the device of the storages; a row means the same in all of them. Checksums are in `checksum.py`. Not here:
which rows there are (plan/), when and to whom bytes travel (transport/).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["BoundRows", "Side", "bind"]

Side = Literal["src", "dst", "local"]
"""The end of the rows that lies in this process: the source's, the destination's, or both."""


class BoundRows(Protocol):
    """Rows bound to storages. All Python work per row is done at binding; the calls below only launch copies.

    A wire buffer is a flat uint8 tensor; a row's bytes begin at its `wire` column. A bound object keeps views of every
    buffer that it was called with, so callers pass the same few buffers again and again.
    """

    nbytes: int
    """Length that a wire buffer needs: end of the last row."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes that this object holds beside buffers: scratch for casts of values that are not aligned to their own size, which
        no usual plan has, and on GPUs the kernels' tables of tiles."""

    def prepare(self, buffer: torch.Tensor) -> None:
        """Builds the views of `buffer` now instead of in the first call with it."""

    def pack(self, buffer: torch.Tensor) -> None:
        """side "src": storage -> buffer, converted to the wire dtype."""

    def unpack(self, buffer: torch.Tensor) -> None:
        """side "dst": buffer -> storage, converted from the wire dtype."""

    def copy(self) -> None:
        """side "local": storage -> storage."""

    def fill(self) -> None:
        """side "dst" or "local": sets the destination of every FILL row. The other calls skip FILL rows."""


def bind(
    rows: np.ndarray,
    roots: Sequence[torch.Tensor],
    side: Side,
    *,
    src_roots: Sequence[torch.Tensor] | None = None,
    programs: int | None = None,
) -> BoundRows:
    """Binds `rows` (dtype ROW) to storages.

    `roots[i]` is a flat uint8 tensor over the whole of storage i of this rank's inventory. For side "local" they are
    the destination's, and `src_roots` the source's when the two inventories differ (default: the same list). LayoutError
    lists every row that reaches outside its storage or names a storage that is not there. programs: most programs of a
    kernel that a call may launch, for copies that run beside other kernels; default: all that the GPU can use.
    """
    some = roots if len(roots) else (src_roots or ())
    if len(some) and some[0].is_cuda and find_spec("triton") is not None:
        from xfer.kernels.triton_impl import TritonRows

        return TritonRows(rows, roots, side, roots if src_roots is None else src_roots, programs=programs)
    # torch's own strided copies are right on every device; on CUDA they cost a launch per row.
    from xfer.kernels.torch_impl import TorchRows

    return TorchRows(rows, roots, side, roots if src_roots is None else src_roots)
