"""The engines of a one-process world: every worker of a vLLM replica, of vLLM's own model class with real storage. A refit must leave in
it what its own `load_weights` leaves in a second model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tests.support.one_process import Storages
from xfer.engines.layout import EngineLayout, run_recipes
from xfer.engines.live import LiveStorages as Tree
from xfer.engines.meta_model import make_model
from xfer.engines.vllm_layout import EngineModel
from xfer.engines.vllm_ranks import rank_of
from xfer.mesh.parallel import EngineParallel, place_of
from xfer.plan.inventory import Inventory
from xfer.trace.catalog import Catalog

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Worker:
    """`storages`: in the order of the inventory's roots; `truth`: per version, what vLLM's loader leaves in them (zeros for scratch)."""

    inventory: Inventory
    layout: EngineLayout
    storages: Storages
    truth: tuple[Storages, ...]

    @property
    def judged(self) -> dict[str, torch.Tensor]:
        """Whether a refit must write each byte, by live storage: all bytes of parameters and buffers but kept ones. bool."""
        out = {r.name: torch.zeros(r.nbytes, dtype=torch.bool) for r in self.inventory.roots}
        for spans, value in ((self.layout.footprint, True), (self.layout.kept, False)):
            for s in spans:
                out[s.root][s.start : s.stop] = value
        return out

    def scramble(self, seed: int) -> None:
        """Fill every byte that a refit must write with noise, so that a byte that it leaves out is noticed."""
        for i, (root, storage) in enumerate(zip(self.inventory.roots, self.storages)):
            noise = torch.Generator().manual_seed(seed * 1_000_003 + i)
            new = torch.empty_like(storage).random_(0, 256, generator=noise)
            storage.copy_(torch.where(self.judged[root.name], new, storage))

    def finish(self) -> None:
        """Run the recipes, after all bytes have come."""
        run_recipes(self.layout, dict(zip((r.name for r in self.inventory.roots), self.storages)))

    def wrong(self, version: int) -> list[str]:
        """Storages that differ from those that vLLM's loader filled, with the number of wrong bytes and the first one."""
        bad = []
        for root, got, want in zip(self.inventory.roots, self.storages, self.truth[version]):
            where = torch.nonzero((got != want) & self.judged[root.name]).flatten()
            if len(where):
                what = f"{len(where)} bytes of {root.nbytes}, first {int(where[0])}"
                bad.append(f"{root.name} of {self.inventory.who}: {what}")
        return bad


def workers(
    folder: str | Path,
    parallel: EngineParallel,
    catalog: Catalog,
    versions: Sequence[Mapping[str, torch.Tensor]],
    **options: object,
) -> list[Worker]:
    """All workers of one replica in vLLM's order. `versions`: full checkpoint tensors. `options`: EngineArgs."""
    made: dict[tuple[int, ...], Worker] = {}
    out = []
    for rank in range(parallel.world):
        place = tuple(place_of(parallel, rank).values())
        if place not in made:
            made[place] = worker(folder, parallel, rank, catalog, versions, **options)
        first = made[place]
        mine = first.storages if first.inventory.rank == rank else tuple(s.clone() for s in first.storages)
        out.append(replace(first, inventory=replace(first.inventory, rank=rank), storages=mine))
    return out


def worker(
    folder: str | Path,
    parallel: EngineParallel,
    rank: int,
    catalog: Catalog,
    versions: Sequence[Mapping[str, torch.Tensor]],
    **options: object,
) -> Worker:
    with rank_of(folder, parallel, rank, **options) as config:
        live, reference = make_model(config, "cpu"), make_model(config, "cpu")
        layout = EngineModel(config, live, CPU).read(catalog)
        inventory = layout.inventory(catalog, rank)
        truth = []
        for tensors in versions:
            with torch.no_grad():
                for p in reference.parameters():
                    p.fill_(7.0)
            reference.load_weights((n, t.clone()) for n, t in tensors.items())
            tree = Tree(reference).tensors
            empty = {r.name: torch.zeros(r.nbytes, dtype=torch.uint8) for r in inventory.roots}
            truth.append(tuple(tree.get(r.name, empty[r.name]).clone() for r in inventory.roots))
    return Worker(inventory, layout, tuple(layout.tensors[r.name] for r in inventory.roots), tuple(truth))
