"""One engine worker on the direct route: its live storages are written in place, locked while bytes move, and summed afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.direct.donor import Donor
from xfer.direct.early import FIRST, EarlySums, first_storages, whole_storages
from xfer.direct.plane import DirectPlane
from xfer.errors import VerificationError
from xfer.kernels.checksum import Constants, Sums
from xfer.participants.worker import Adapter, Weights
from xfer.plan.inventory import footprint_rows
from xfer.plan.part import PlanPart
from xfer.plan.table import padded_shapes
from xfer.rendezvous.client import RendezvousClient, host_identity
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec
from xfer.transport.routes import Routed

SAMPLED, SAMPLE_WORDS = 8, 1024
"""Storages, and words of 8 bytes of each, by which a worker sees that its weights are others than a refit left."""


class BoundWeights(Weights, Protocol):
    """The live weights of one worker, as this route uses them."""

    def check(self, quick: bool = False) -> str: ...

    def rebind(self) -> Mapping[str, torch.Tensor]: ...

    def run_recipes(self) -> None: ...


class LayoutReader(Adapter, Protocol):
    """An engine framework's adapter, as this route uses it; see `engines/vllm_layout.py` for vLLM's."""

    @property
    def weights(self) -> BoundWeights: ...

    def read(self, catalog: Catalog):
        """Read the layout of the live weights: an `EngineLayout` (engines/layout.py)."""


class DirectWorker:
    """Implements `WorkerSide` (participants/worker.py), and `Storages` for its plane.

    Args:
        adapter: The adapter of the engine's framework.
        party: Client of the rendezvous.
        replica: The engine's replica number.
        index: Rank of this worker in its replica.
    """

    role = "worker"

    def __init__(self, adapter: LayoutReader, party: RendezvousClient, replica: int, index: int):
        self._adapter, self._weights = adapter, adapter.weights
        self.device, self.index, self.inventory = adapter.weights.device, index, b""
        self.catalog: Catalog  # set by `read`
        self._party, self._replica = party, replica
        self._names: list[str] = []
        self._roots: list[torch.Tensor] = []
        self._binding = 0
        self._sums: Sums | None = None  # of these storages; bound at first use
        self._constants: tuple[PlanPart, Constants] | None = None  # of this plan; bound at first use
        self._base = 0  # the last refit by changes, if its bytes came to these storages
        self._samples: list[torch.Tensor] = []  # views of some words of the largest storages
        self._left = torch.empty(0)  # what it left there
        self._early: tuple[Routed, EarlySums | None] | None = None  # of these routes; bound at first use

    # ---- for the session

    def read(self, catalog: Catalog) -> tuple[TensorSpec, ...]:
        self.catalog, layout = catalog, self._adapter.read(catalog)
        if missing := set(layout.derived) - set(catalog.specs):
            return tuple(sorted(missing))
        made = layout.inventory(catalog, self.index, host_identity())
        self.inventory = self._party.shelf.offer(made)
        self._names, self._rows = [r.name for r in made.roots], footprint_rows(made)
        self._bind(layout.tensors)
        return ()

    def check(self, quick: bool = False) -> str:
        return self._weights.check(quick)

    def rebind(self) -> None:
        """Bind the storages again if they moved. Equal addresses mean equal storages, because this object keeps the old ones alive."""
        tensors = self._weights.rebind()
        if [tensors[n].data_ptr() for n in self._names] != [r.data_ptr() for r in self._roots]:
            self._bind(tensors)

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._roots, self._sums, self._constants, self._early = [tensors[n] for n in self._names], None, None, None
        self._base = 0
        self._samples = [_words(r) for r in sorted(self._roots, key=len)[-SAMPLED:]]
        self._binding += 1

    def base(self) -> int:
        """Samples tell whether something else has written since, or the engine has slept and lost its weights."""
        if self._base:
            now = self._sample()
            self._weights.synchronize()
            if not torch.equal(now, self._left):
                self._base = 0
        return self._base

    def _sample(self) -> torch.Tensor:
        """Begin to copy the samples to the host, where a comparison launches nothing. They are there when the device is idle."""
        return torch.cat(self._samples).to("cpu", non_blocking=True)

    def plane(self, joint_rank: int) -> DirectPlane:
        return DirectPlane(self._party, self, self._replica, joint_rank)

    def giving_plane(self, replica: int) -> DirectPlane:
        return DirectPlane(self._party, Donor(self), replica, self.index)

    # ---- for its plane

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        return self._binding, self._roots

    def opened(self, replica: int, plan: PlanPart, generation: int) -> None:
        """Do nothing: a worker sums after its bytes have arrived, so it loads no kernel beside NCCL's."""

    def marks(self, plan: str) -> None:
        """Do nothing: others pull all bytes from a worker."""

    def remembered(self, attempt: int, plan: str) -> None:
        """Do nothing: a worker sends nothing."""

    def as_bound(self) -> bool:
        return self.check() == "same"

    def before(self) -> None:
        self._weights.engage_lock()  # on a stream that the transfer waits for; the device was idle when this worker was armed

    def gate(self, go: m.Go, plan: PlanPart, routed: Routed) -> EarlySums | None:
        if self._early is not None and self._early[0] is not routed:
            self._early = None  # otherwise it would keep the buffers of closed routes
        if routed.pull is not None and routed.scratch is None and go.verify and self._early is None:
            rest = routed.program.rows
            others = rest[rest["dst"] == plan.program.rank]
            within = routed.place is None and routed.near
            if routed.place is None:
                part, first = 0, first_storages(routed.pulled, others, 1.0 if within else FIRST)
            else:
                part, first = whole_storages(routed.place.rows, others)
            shapes = padded_shapes(self.catalog)
            early = EarlySums(self._rows, self._roots, shapes, first, part, within) if len(first) else None
            self._early = routed, early
        return self._early[1] if go.verify and self._early is not None else None

    def after(self, go: m.Go, plan: PlanPart) -> tuple[tuple[m.Checksum, ...], bytes]:
        # Sums come first: they cover the bytes that the trainers sent, before the loader's arithmetic changes scratch storages.
        out: tuple[m.Checksum, ...] = ()
        if go.verify:
            value = self._sum() ^ int(faults.wants("worker", self.index, "checksum"))
            out = (m.Checksum.of(self.index, value),)
            if self._constants is None or self._constants[0] is not plan:
                self._constants = plan, Constants(plan.program.rows, self._roots)
            if wrong := self._constants[1].wrong():
                raise VerificationError(
                    f"{wrong} constants (vocabulary padding) differ from those that the loader writes"
                )
        self._weights.run_recipes()
        if go.bases:
            self._left = self._sample()  # the wait for it is that for the device
        self._weights.synchronize()
        self._base = go.attempt if go.bases else 0
        return out, b""

    def _sum(self) -> int:
        early = self._early[1] if self._early is not None else None
        if early is not None:
            return early.value()
        if self._sums is None:
            self._sums = Sums.of_one(self._rows, self._roots, "dst", padded_shapes(self.catalog))
        return self._sums.values()[0]


def _words(root: torch.Tensor) -> torch.Tensor:
    """Return a view of some words of a storage, uint8 [words, 8]."""
    count = min(SAMPLE_WORDS, root.numel() // 8)
    step = max(8, root.numel() // max(1, count))
    return root[: count * step].view(count, step)[:, :8]
