"""Do trainer ranks that hold one box of a tensor hold the same bytes in it? Each rank hashes its own; the coordinator compares
(coordinator/holders.py).

Senders are chosen per taker, so copies that have drifted apart reach the workers of one engine as different weights, and a
checksum of what was sent cannot see it. Two digests, neither of which moves a byte of a tensor:

- `SharedSums`, with `verify=True`: every byte of the boxes that several trainers hold and some worker takes. The plan has cut boxes
  that overlap, so that trainers which hold different cuts of one tensor are compared too.
- `sample`, until the first commit of a session: some elements of every box, compared before a byte moves. There may be no plan by
  then, so only equal boxes are compared. Not when a session connects: weights may be loaded or gathered after that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from xfer.coordinator.exports import HELD
from xfer.kernels.checksum import Sums
from xfer.kernels.torch_impl import Space
from xfer.plan import columns as col
from xfer.plan.inventory import Inventory
from xfer.plan.options import sent
from xfer.plan.program import ITEM, MAX_DIMS
from xfer.trace.catalog import Catalog

SAMPLE = 1024
"""Elements of a box that a sample looks at, at most. They lie evenly in every dim."""


class SharedSums:
    """Checksums of what this rank shares with others. rows: see `SubPlan.shared`; other arguments: as of `Sums`."""

    def __init__(self, rows: np.ndarray, roots: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]):
        keys, slot = np.unique(np.stack([rows["tensor"], rows["dst"]], axis=1), axis=0, return_inverse=True)
        self._held = np.zeros(len(keys), HELD)
        self._held["tensor"], self._held["boxes"] = keys.T
        self.sums = Sums(rows, slot.reshape(-1), len(keys), roots, "src", shapes)

    def told(self, values: Sequence[int]) -> bytes:
        """Entries (HELD) for the values of `sums`."""
        held = self._held.copy()
        held["digest"] = np.array(values, np.uint64)
        return held.tobytes()


def sample(catalog: Catalog, inventory: Inventory, roots: Sequence[torch.Tensor], drop: Sequence[str]) -> bytes:
    """Entries (HELD) for some elements of each box of this trainer, except of tensors that `drop` names: no engine takes those.

    The same bytes give the same entry, whatever their strides. One synchronization with the device.
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
        h.update(np.ascontiguousarray(a))
    return int.from_bytes(h.digest(), "little")


def _spread(space: Space, item: int, offset: int, extent: np.ndarray, strides: np.ndarray) -> torch.Tensor:
    """Flat uint8: at most SAMPLE elements of `item` bytes of a box, in canonical order."""
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
