"""One engine worker as a source: another replica reads its first weights from the storages that this worker's engine serves from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.direct.sums import SourceSums
from xfer.errors import Unsupported
from xfer.plan.part import PlanPart
from xfer.plan.table import padded_shapes
from xfer.trace.catalog import Catalog
from xfer.transport.routes import Routed

if TYPE_CHECKING:
    from xfer.direct.worker import DirectWorker


class Donor:
    """Implements `Storages` (plane.py) for the lane of the replica that reads.

    The storages are those that the last refit bound. They hold its bytes, even if the engine uses other storages by now.

    Args:
        worker: This worker's own side.
    """

    role = "donor"

    def __init__(self, worker: DirectWorker):
        self._worker, self.index, self.device = worker, worker.index, worker.device
        self._sums: tuple[int, SourceSums] | None = None  # of this binding

    @property
    def catalog(self) -> Catalog:
        return self._worker.catalog

    @property
    def inventory(self) -> bytes:
        return self._worker.inventory

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        """As `Storages.roots`.

        Raises:
            Unsupported: vLLM's sleep mode may take this memory away, whoever reads it.
        """
        generation, roots = self._worker.roots()
        if self.device.type == "cuda":
            from xfer.kernels.cuda_driver import allocation

            if not all(allocation(t.data_ptr()).exportable for t in roots if t.numel()):
                raise Unsupported(
                    "the weights of this engine lie in virtual memory (sleep mode), so it gives none to other replicas"
                )
        return generation, roots

    def opened(self, replica: int, plan: PlanPart, generation: int) -> None:
        """Bind the sums, for the reason that trainers have (trainer.py)."""
        self._bound(generation).bind(replica, plan)

    def marks(self, plan: str) -> None:
        """Do nothing: others pull all its bytes."""

    def remembered(self, attempt: int, plan: str) -> None:
        """Do nothing: it sends no changes."""

    def as_bound(self) -> bool:
        return True  # a donor does not look at its storages

    def before(self) -> None:
        """Do nothing: it is only read."""

    def gate(self, go: m.Go, plan: PlanPart, routed: Routed) -> None:
        """Do nothing: it does not pull."""

    def after(self, go: m.Go, plan: PlanPart) -> tuple[tuple[m.Checksum, ...], bytes]:
        """Sum the bytes that were read, if the refit that brought them was verified."""
        if not go.verify:
            return (), b""
        sums = self._bound(self._worker.roots()[0])
        flip = int(faults.wants("donor", self.index, "checksum"))
        values = sums.values(go.replicas[0], plan, go.attempt)
        return tuple(m.Checksum.of(i, value ^ flip) for i, value in enumerate(values)), b""

    def _bound(self, generation: int) -> SourceSums:
        if self._sums is None or self._sums[0] != generation:
            roots = self._worker.roots()[1]
            self._sums = generation, SourceSums(self.index, roots, padded_shapes(self.catalog))
        return self._sums[1]
