"""One trainer rank on the direct route: its storages in place, their layout, and checksums of their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from xfer import faults
from xfer.coordinator import messages as m
from xfer.direct import holders
from xfer.direct.native import Native
from xfer.direct.plane import DirectPlane
from xfer.direct.quantized import Quantized
from xfer.direct.remembered import Remembered
from xfer.direct.sums import SourceSums
from xfer.direct.unsent import Unsent
from xfer.kernels.marks import ByteRange
from xfer.participants.data_plane import News, PartialBlocks
from xfer.plan.cache import PlanCache
from xfer.plan.inventory import Inventory, trainer_inventory
from xfer.plan.part import PlanPart
from xfer.plan.table import padded_shapes
from xfer.rendezvous.client import RendezvousClient, host_identity
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment
from xfer.trace.traced import TrainerLayout
from xfer.transport.routes import Routed


class DirectTrainer:
    """Implements `TrainerSide`, and `Storages` for its planes.

    Args:
        party: Client of the rendezvous.
        index: This trainer rank.
        device: Where its storages lie.
        cache_dir: Directory where plans are kept between runs. None: they are not kept.
        drop: Globs of checkpoint tensors that no engine takes.
    """

    role = "trainer"

    def __init__(
        self, party: RendezvousClient, index: int, device: torch.device, cache_dir: str | None, drop: Sequence[str]
    ):
        self.index, self.device, self.inventory = index, device, b""
        self.catalog: Catalog  # set by `read`
        self._party, self._drop = party, tuple(drop)
        self._cache = PlanCache(cache_dir) if cache_dir else None
        self._unsent = Unsent(drop)
        self._made: Inventory | None = None
        self._native: Native | None = None
        self._quantized = self._quantizing(Catalog(()))
        self._names: list[str] = []
        self._roots: list[torch.Tensor] = []
        self._binding = 0
        self._sums = SourceSums(index, [], [])
        self._last = Remembered()
        self._kept: list[list[torch.Tensor]] = []  # storages that other ranks may still read
        self._planes: dict[int, DirectPlane] = {}

    # ---- for the session

    def read(self, catalog: Catalog, layout: TrainerLayout) -> None:
        native = Native(catalog, layout, f"trainer {self.index}")
        quantized = self._quantizing(catalog, native.rest)
        self.catalog, self._native, self._quantized = catalog, native, quantized
        made = trainer_inventory(
            catalog,
            rank=self.index,
            host=host_identity(),
            roots=(*layout.roots, *quantized.roots),
            fragments=(*layout.traced.fragments, *native.fragments, *quantized.fragments),
            recipes=(r.digest() for r in layout.traced.recipes),
        )
        self._made, self.inventory = made, self._party.shelf.offer(made)
        self._names = [r.name for r in made.roots]
        self._last.forget()
        self._unsent.expect(layout.trained)
        self.rebind(layout.tensors)

    def _quantizing(self, catalog: Catalog, held: Sequence[Fragment] = ()) -> Quantized:
        return Quantized(catalog, held, self.device, f"trainer {self.index}")

    def forget_layout(self) -> None:
        self._made, self._native, self._names, self.inventory = None, None, [], b""
        self._last.forget()
        self._quantized = self._quantizing(Catalog(()))
        self.rebind({})

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._sums.end()
        tensors = self._quantized.bind(tensors)
        self._roots = [tensors[name] for name in self._names]
        self._last.moved(self._roots)
        self._binding += 1  # after `_roots`: a lane must never read old storages with a newer number
        self._sums = SourceSums(self.index, self._roots, padded_shapes(self.catalog) if self._names else [])

    def plane(self, replica: int) -> DirectPlane:
        plane = self._planes[replica] = DirectPlane(self._party, self, replica, self.index, self._cache)
        return plane

    def wait_still(self, seconds: float) -> bool:
        return True

    def measure(self, until: float) -> PartialBlocks | None:
        return self._quantized.measure(until)

    def quantize(self, largest: bytes = b"") -> None:
        self._quantized.run(largest)

    @property
    def scratch_bytes(self) -> int:
        return self._quantized.nbytes + self._last.nbytes

    @property
    def rules(self) -> tuple[str, ...]:
        return (*(self._native.rules if self._native else ()), *self._quantized.rules)

    def explain(self) -> str:
        native = self._native.explain() if self._native else ""
        return "\n".join(filter(None, (native, self._quantized.explain())))

    def news(self, committed: bool) -> News:
        """Until the first commit, hash a sample of the bytes, to be compared with other ranks (holders.py). Also report whether the
        sent tensors have changed since the last refit, and which changed tensors are not sent (unsent.py)."""
        if self._made is None or not self._roots:
            return News()
        sample = b"" if committed else holders.sample(self.catalog, self._made, self._roots, self._drop)
        return News(sample, *self._unsent.look(self.catalog, self._made, self._roots))

    def begin_sums(self, attempt: int, idle: Iterable[int]) -> None:
        parts = {r: plane.part for r, plane in list(self._planes.items()) if plane.part is not None}
        self._sums.begin({r: parts[r] for r in idle if r in parts}, attempt)

    def compare(self) -> None:
        self._last.compare(self._roots)

    def remember(self, attempt: int) -> None:
        """If destinations pull, also make room for marks, which they map when routes are opened again for the next refit."""
        planes = list(self._planes.values())
        pulled, sends = any(plane.read_by_others for plane in planes), any(plane.sends for plane in planes)
        if not pulled and not sends:
            self._last.forget()
            return
        plans = {part.digest: part.program.rows for plane in planes if (part := plane.part) is not None}
        if self._last.keep(attempt, self._roots, plans, pulled=pulled, sends=sends):
            self._binding += 1

    def warn(self, lines: Sequence[str]) -> tuple[str, ...]:
        return tuple(lines)

    def keep_alive(self) -> None:
        self._kept.append(self._roots)

    def let_go_kept(self) -> None:
        self._kept.clear()

    def release(self) -> None:
        self._sums.end()
        self._quantized.release()
        self._last.forget()
        self._roots = []
        self._sums = SourceSums(self.index, [], [])

    def close(self) -> None:
        self._sums.end()
        self._last.forget()
        self._roots, self._sums = [], SourceSums(self.index, [], [])

    # ---- for its planes

    def roots(self) -> tuple[int, Sequence[torch.Tensor]]:
        return self._binding, self._roots

    def opened(self, replica: int, plan: PlanPart, generation: int) -> None:
        """Bind the checksums, even if no refit verifies: loading their kernels later, beside another replica's NCCL kernels, would
        block. Storages that have been replaced meanwhile are left out, because the plan may not fit the new ones."""
        sums = self._sums
        if generation == self._binding:
            sums.bind(replica, plan)

    def marks(self, plan: str) -> torch.Tensor | None:
        return self._last.marks_for(plan)

    def remembered(self, attempt: int, plan: str) -> tuple[Sequence[torch.Tensor], Sequence[ByteRange]] | None:
        return self._last.whole(attempt, plan)

    def as_bound(self) -> bool:
        return True  # it stages nothing

    def before(self) -> None:
        pass

    def gate(self, go: m.Go, plan: PlanPart, routed: Routed) -> None:
        """Do nothing: a trainer does not pull."""

    def after(self, go: m.Go, plan: PlanPart) -> tuple[tuple[m.Checksum, ...], bytes]:
        if not go.verify:
            return (), b""
        out = []
        for worker, value in enumerate(self._sums.values(go.replicas[0], plan, go.attempt)):
            value ^= int(faults.wants("trainer", self.index, "checksum"))
            out.append(m.Checksum.of(worker, value))
        return tuple(out), self._sums.shared(go.replicas[0], plan, go.attempt)
