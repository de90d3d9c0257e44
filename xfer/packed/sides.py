"""Trainer ranks and workers on the packed route. Whole tensors are read and loaded, so addresses of storages do not matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from xfer.packed.feed import Pump
from xfer.packed.plane import Loader, PackedPlane
from xfer.packed.source import PackedSource
from xfer.participants.data_plane import News
from xfer.rendezvous.client import RendezvousClient
from xfer.trace.catalog import Catalog
from xfer.trace.traced import TrainerLayout


class Loads(Protocol):
    """The part of an engine framework's adapter that this route uses."""

    device: torch.device

    def loader(self) -> Loader: ...


class PackedTrainer:
    """Implements `TrainerSide`. No storage is read in place, so there is nothing to bind, to keep alive or to sum ahead."""

    role = "trainer"

    def __init__(self, source: PackedSource, party: RendezvousClient):
        self.index, self.device, self.inventory = source.rank, source.device, b""
        self.catalog: Catalog  # set by `read`
        self._party, self.pump = party, Pump(source, party.label)
        self._replicas: set[int] = set()

    def read(self, catalog: Catalog, layout: TrainerLayout) -> None:
        self.catalog, self.inventory = catalog, catalog.digest().encode()

    def forget_layout(self) -> None:
        self.inventory = b""

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pass

    def plane(self, replica: int) -> PackedPlane:
        self._replicas.add(replica)
        return PackedPlane(self._party, self, replica, pump=self.pump)

    def counts_buffers(self, replica: int) -> bool:
        return replica == min(self._replicas)

    def wait_still(self, seconds: float) -> bool:
        return self.pump.wait_over(seconds)

    def news(self, committed: bool) -> News:
        return News()

    def begin_sums(self, attempt: int, idle: Iterable[int]) -> None:
        pass

    def warn(self, lines: Sequence[str]) -> tuple[str, ...]:
        return self.pump.with_gather(lines)

    def keep_alive(self) -> None:
        pass

    def let_go_kept(self) -> None:
        pass

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class PackedWorker:
    """Implements `WorkerSide` (participants/worker.py)."""

    role = "worker"

    def __init__(self, adapter: Loads, party: RendezvousClient, replica: int, index: int):
        self.model = self.loader = adapter.loader()
        self.device, self.index, self.inventory = adapter.device, index, b""
        self.catalog: Catalog  # set by `read`
        self._party, self._replica = party, replica

    def read(self, catalog: Catalog) -> None:
        self.loader.accept(catalog)
        self.catalog, self.inventory = catalog, catalog.digest().encode()

    def rebind(self) -> None:
        pass

    def plane(self, joint_rank: int) -> PackedPlane:
        return PackedPlane(self._party, self, self._replica, loader=self.loader)

    def counts_buffers(self, replica: int) -> bool:
        return True
