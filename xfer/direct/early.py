"""Checksums of a verified refit that begin while bytes still move: most storages are pulled first, and summed while the rest is.

Only where a pull brings all that a storage gets. In a row of replicas (transport/relay_place.py) a pull has its parts already: there
what is whole when most parts are here is summed while the others come. On a CPU (tests' doubles pull so) sums are taken between the
parts. Where all lies on the worker's own GPU, the kernel that copies sums what it has just written (kernels/summed_copies.py). What a
checksum is: kernels/checksum.py; what pulls and calls this between its parts: transport/peer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xfer.kernels.checksum import Sums
from xfer.plan.checksum import added
from xfer.plan.program import Op, row_wire_bytes

FIRST = 0.75
"""Of the pulled bytes. Sums take less than a sixth of the time of a pull of the same bytes, so they have ended when the rest is here."""


def first_storages(pulled: np.ndarray, others: np.ndarray, share: float = FIRST) -> np.ndarray:
    """Numbers of this rank's storages to be pulled first (int64, rising): the largest, up to that share of the bytes, of those that
    nothing but `pulled` writes; both are rows of this rank (dtype ROW)."""
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
    """Of rows that are pulled in parts (their waves): the part with which FIRST of the bytes are here, at the latest the last but
    one, and numbers of the storages (int64, rising) that nothing writes after it and nothing but `pulled` at all. None for one
    part."""
    waves, which = np.unique(pulled["wave"], return_inverse=True)
    here = np.cumsum(np.bincount(which, row_wire_bytes(pulled), len(waves)))
    if len(waves) < 2 or not here[-1]:
        return 0, np.empty(0, np.int64)
    part = int(waves[min(np.searchsorted(here, FIRST * here[-1]), len(waves) - 2)])
    later = pulled["dst_root"][pulled["wave"] > part]
    mixed = np.concatenate([later, _written(others)])
    return part, np.setdiff1d(pulled["dst_root"], mixed).astype(np.int64)


def _written(rows: np.ndarray) -> np.ndarray:
    """The storage that each row brings bytes to. Fills bring none, and no checksum counts them."""
    return rows["dst_root"][rows["op"] != Op.FILL]


class EarlySums:
    """The gate of a pull in two parts, wave 0 and 1, or what is told of the parts of a row, where `part` says with which of them the
    storages `first` are whole. rows: all destination rows that count, as for `Sums` with side "dst". within: the kernel that pulls
    `first` may take over their sums."""

    def __init__(
        self,
        rows: np.ndarray,
        roots: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[int]],
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
        self._known = 0  # without a stream: the sum of the first

    def parts(self, pulled: np.ndarray) -> np.ndarray:
        """The rows with the part that they belong to as their wave."""
        out = pulled.copy()
        out["wave"] = ~np.isin(out["dst_root"], self.first)
        return out

    def value(self) -> int:
        """Once everything is here. As `Sums.values`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._rest.begin()
        early = self._known if self._stream is None else self._first.ended()[0]
        return added(early, self._rest.ended()[0])

    # ---- the gate

    def before(self, wave: int, stream: torch.cuda.Stream) -> None:
        pass

    def after(self, wave: int, stream: torch.cuda.Stream) -> None:
        if wave != self._part:
            return
        if self._stream is None:
            self._known = self._first.values()[0]
        else:
            self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                self._first.begin()

    def poll(self) -> None:
        pass

    def open(self) -> None:
        pass
