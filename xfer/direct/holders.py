"""Digests that show whether trainer ranks hold the same bytes in the same box of a tensor. Each rank hashes its own copy; the coordinator
compares the digests (plan/holders.py).

The plan chooses a source per destination. If copies have drifted apart, the workers of one engine receive different weights, and a
checksum of the bytes sent does not detect it. There are two digests, and neither moves a byte of a tensor:

- `SharedSums`, with `verify=True`, covers every byte of the boxes that several trainers hold and some worker receives. The plan cuts
  boxes that overlap, so trainers that hold different cuts of one tensor are compared too.
- `sample`, until the first commit of a session, covers some elements of every box and is compared before a byte moves. At that time
  there may be no plan, so only equal boxes are compared. It does not run when a session connects, because weights may be loaded or
  gathered after that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from xfer.kernels.checksum import Sums
from xfer.kernels.torch_impl import Space
from xfer.plan import columns as col
from xfer.plan.holders import HELD
from xfer.plan.inventory import Inventory
from xfer.plan.options import sent
from xfer.plan.program import ITEM, MAX_DIMS
from xfer.trace.catalog import Catalog

SAMPLE = 1024
"""Most elements of a box that a sample reads. They are spread evenly over every dim."""


class SharedSums:
    """Checksums of the boxes that this rank and other trainers hold.

    Args:
        rows: See `SubPlan.shared`.
        roots: This rank's storages, flat uint8.
        shapes: shapes[t] is the shape of checkpoint tensor t.
    """

    def __init__(self, rows: np.ndarray, roots: Sequence[torch.Tensor], shapes: np.ndarray | Sequence[Sequence[int]]):
        keys, slot = np.unique(np.stack([rows["tensor"], rows["dst"]], axis=1), axis=0, return_inverse=True)
        self._held = np.zeros(len(keys), HELD)
        self._held["tensor"], self._held["boxes"] = keys.T
        self.sums = Sums(rows, slot.reshape(-1), len(keys), roots, "src", shapes)

    def told(self, values: Sequence[int]) -> bytes:
        """Return the entries (HELD, encoded) for the values of `sums`."""
        held = self._held.copy()
        held["digest"] = np.array(values, np.uint64)
        return held.tobytes()


def sample(catalog: Catalog, inventory: Inventory, roots: Sequence[torch.Tensor], drop: Sequence[str]) -> bytes:
    """Hash some elements of each box of this trainer. The same bytes give the same entry, whatever their strides.

    Synchronizes once with the device.

    Args:
        catalog: The session's checkpoint tensors.
        inventory: This trainer's layout.
        roots: Its storages, flat uint8.
        drop: Globs of checkpoint tensors that no engine takes. They are left out.

    Returns:
        Entries (HELD, encoded).
    """
    t, spaces, taken = inventory.table, [Space(r) for r in roots], sent(catalog, drop)
    runs = [slice(a, a + n) for a, n in zip(*(c.tolist() for c in col.runs(t.tensor))) if taken[t.tensor[a]]]
    if not runs:
        return b""
    parts, ends = [], []
    for run in runs:
        for root, dtype, *place in zip(
            t.root[run], t.dtype[run], t.offset[run].tolist(), t.extent[run], t.strides[run]
        ):
            parts.append(_spread(spaces[root], ITEM[dtype], *place))
        ends.append(sum(p.numel() for p in parts[-(run.stop - run.start) :]))
    seen = np.split(torch.cat(parts).cpu().numpy(), np.cumsum(ends)[:-1])
    boxes = [_digest(t.dtype[run], t.origin[run], t.extent[run]) for run in runs]
    return np.array([(t.tensor[run.start], b, _digest(s)) for run, b, s in zip(runs, boxes, seen)], HELD).tobytes()


def _digest(*arrays: np.ndarray) -> int:
    h = hashlib.blake2b(digest_size=8)
    for a in arrays:
        h.update(a.tobytes())
    return int.from_bytes(h.digest(), "little")


def _spread(space: Space, item: int, offset: int, extent: np.ndarray, strides: np.ndarray) -> torch.Tensor:
    """Return at most SAMPLE elements of a box, in the order of the checkpoint tensor, as flat uint8. `item`: bytes of an element."""
    left, some, steps = SAMPLE, [1] * MAX_DIMS, [1] * MAX_DIMS
    for k, d in enumerate(np.argsort(extent, kind="stable").tolist()):
        n = int(extent[d])
        most = max(1, int(left ** (1 / (MAX_DIMS - k)) + 1e-9))
        steps[d] = -(-n // most)
        some[d] = -(-n // steps[d])
        left //= some[d]
    reach = [s * q for s, q in zip(strides.tolist(), steps)]
    back = [d for d in range(MAX_DIMS) if reach[d] < 0 and some[d] > 1]
    low = offset + sum((some[d] - 1) * reach[d] for d in back)
    apart = [abs(s) if n > 1 else 0 for s, n in zip(reach, some)]
    return space.view(torch.uint8, low, [*some, item], [*apart, 1]).flip(back).reshape(-1)
