"""Checksums of what a trainer rank owes its replicas, over one binding of its storages. A new binding gets a new object.

Where the device works by itself they begin before the rank is ready, while engines still pause: on a GPU that trainer and engine
share, a sum beside the pull would take memory's rate from it. Not here: what a checksum is (kernels/checksum.py), a taker's own
(early.py, worker.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xfer.kernels.checksum import Sums
from xfer.plan.part import Part


class SourceSums:
    """index: this trainer rank. roots: its storages, flat uint8. shapes[t]: shape of canonical tensor t.

    `begin` is called by the thread that refits, `bind` and `values` by a replica's lane; the two take turns, since a lane that is not
    idle is left out. `end` by who gives up the storages, when no lane works with them.
    """

    def __init__(self, index: int, roots: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]):
        self._index, self._roots, self._shapes = index, roots, shapes
        self._bound: dict[int, tuple[Part, Sums]] = {}
        self._begun: dict[int, tuple[int, Sums, torch.cuda.Event]] = {}  # by replica: the attempt, and when it will have ended

    @property
    def replicas(self) -> set[int]:
        """Whose sums are bound."""
        return set(self._bound)

    def bind(self, replica: int, plan: Part) -> Sums:
        """One reading for all workers of a replica. All Python per row, and all loading of kernels, happens here, once per plan."""
        held = self._bound.get(replica)
        if held is None or held[0] is not plan:
            rows = plan.program.rows
            rows = rows[rows["src"] == self._index]
            worker = rows["dst"].astype(np.int64) - plan.trainers
            held = self._bound[replica] = plan, Sums(rows, worker, plan.workers, self._roots, "src", self._shapes)
        return held[1]

    def begin(self, replica: int, plan: Part, attempt: int) -> None:
        """Begins to read for `attempt`, on the current stream, and waits for nothing; nothing must write the storages until its
        `values`. Only what is bound already begins: binding takes long."""
        plan_of, sums = self._bound.get(replica, (None, None))
        if plan_of is not plan or not self._roots or not self._roots[0].is_cuda:
            return
        stream = torch.cuda.current_stream(self._roots[0].device)
        if (old := self._begun.pop(replica, None)) is not None:
            stream.wait_event(old[2])  # of an attempt that never asked: both write the same words
        sums.begin()
        self._begun[replica] = attempt, sums, stream.record_event()

    def values(self, replica: int, plan: Part, attempt: int) -> list[int]:
        """By worker, 0 <= c < 2**64: what `begin` began for this attempt, or read now."""
        sums = self.bind(replica, plan)
        begun = self._begun.pop(replica, None)
        if begun is not None:
            torch.cuda.current_stream(self._roots[0].device).wait_event(begun[2])
            if begun[:2] == (attempt, sums):
                return sums.ended()
        return sums.values()

    def end(self) -> None:
        """Waits until nothing reads the storages for a sum any more."""
        for _, _, event in list(self._begun.values()):
            event.synchronize()
        self._begun = {}
