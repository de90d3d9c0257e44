"""Checksums of a verified refit that begin while bytes still move, so that verification costs less time.

The pull has two parts. The first part fills most storages, and their sums run while the second part arrives. Only storages that
nothing but the pull writes take part. Where replicas hand bytes on (transport/relay_place.py) the pull already has parts: storages
that are whole once most parts have arrived are summed while the other parts arrive. On a CPU (test doubles pull there) the sums run
between the parts. Where all sources lie on the worker's own GPU, the copying kernel sums what it writes (kernels/summed_copies.py).
kernels/checksum.py defines the checksum; transport/peer.py runs the pull and calls the gate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xfer.kernels.checksum import Sums
from xfer.plan.checksum import added
from xfer.plan.program import Op, row_wire_bytes

FIRST = 0.75
"""Share of the pulled bytes in the first part. A sum takes less than a sixth of the time of a pull of the same bytes, so it ends before
the second part has arrived."""


def first_storages(pulled: np.ndarray, others: np.ndarray, share: float = FIRST) -> np.ndarray:
    """Choose the storages that are pulled first: the largest ones that nothing but `pulled` writes.

    Args:
        pulled: Rows (dtype ROW) that this rank pulls.
        others: All other rows with this rank as destination.
        share: Share of the pulled bytes that the result may hold, 0 to 1.

    Returns:
        Storage numbers, int64, ascending.
    """
    nbytes, root = row_wire_bytes(pulled), pulled["dst_root"].astype(np.int64)
    total = np.zeros(int(root.max(initial=-1)) + 1, np.int64)
    np.add.at(total, root, nbytes)
    mixed = set(_written(others).tolist())
    out, left = [], share * total.sum()
    for r in np.argsort(-total, kind="stable").tolist():
        if r not in mixed and 0 < total[r] <= left:
            out.append(r)
            left -= total[r]
    return np.array(sorted(out), np.int64)


def whole_storages(pulled: np.ndarray, others: np.ndarray) -> tuple[int, np.ndarray]:
    """Find the storages that are whole once the share FIRST of the bytes has arrived. A row's part is its `wave`.

    Args:
        pulled: Rows (dtype ROW) that this rank pulls in parts.
        others: All other rows with this rank as destination.

    Returns:
        The part that completes the share, at most the last but one, and the numbers (int64, ascending) of the storages that only
        `pulled` writes, and not after this part. With a single part: 0 and no storages.
    """
    waves, which = np.unique(pulled["wave"], return_inverse=True)
    here = np.cumsum(np.bincount(which, row_wire_bytes(pulled), len(waves)))
    if len(waves) < 2 or not here[-1]:
        return 0, np.empty(0, np.int64)
    part = int(waves[min(np.searchsorted(here, FIRST * here[-1]), len(waves) - 2)])
    later = pulled["dst_root"][pulled["wave"] > part]
    mixed = np.concatenate([later, _written(others)])
    return part, np.setdiff1d(pulled["dst_root"], mixed).astype(np.int64)


def _written(rows: np.ndarray) -> np.ndarray:
    """Return the destination storage of each row. Fills are left out: they bring no bytes, and no checksum counts them."""
    return rows["dst_root"][rows["op"] != Op.FILL]


class EarlySums:
    """Gate of a pull: begins the sums of the storages `first` when the part that completes them has arrived.

    Args:
        rows: All destination rows that the checksum counts, as for `Sums` with side "dst".
        roots: This rank's storages, flat uint8.
        shapes: shapes[t] is the shape of checkpoint tensor t.
        first: Numbers of the storages that are summed early.
        part: Part after which `first` is whole: 0 for a pull in two parts, any part where replicas hand bytes on.
        within: The kernel that pulls `first` may take over their sums.
    """

    def __init__(
        self,
        rows: np.ndarray,
        roots: Sequence[torch.Tensor],
        shapes: np.ndarray | Sequence[Sequence[int]],
        first: np.ndarray,
        part: int = 0,
        within: bool = False,
    ):
        early = np.isin(rows["dst_root"], first)
        self.first, self._part = first, part
        self._first = Sums.of_one(rows[early], roots, "dst", shapes, lent=within)
        self._rest = Sums.of_one(rows[~early], roots, "dst", shapes)
        self.within = self._first if within else None
        self._stream = torch.cuda.Stream(roots[0].device) if roots[0].is_cuda else None
        self._known = 0  # on a CPU: the sum of `first`

    def parts(self, pulled: np.ndarray) -> np.ndarray:
        """Return a copy of the rows with the part of each row as its `wave`: 0 for `first`, else 1."""
        out = pulled.copy()
        out["wave"] = ~np.isin(out["dst_root"], self.first)
        return out

    def value(self) -> int:
        """Return the checksum of all rows, as `Sums.values`. Called when all bytes have arrived."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._rest.begin()
        early = self._known if self._stream is None else self._first.ended()[0]
        return added(early, self._rest.ended()[0])

    # ---- the gate

    def before(self, wave: int, stream: torch.cuda.Stream | None) -> None:
        pass

    def after(self, wave: int, stream: torch.cuda.Stream | None) -> None:
        if wave != self._part:
            return
        if self._stream is None:
            self._known = self._first.values()[0]
        else:
            self._stream.wait_stream(stream or torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                self._first.begin()

    def poll(self) -> None:
        pass

    def open(self) -> None:
        pass
