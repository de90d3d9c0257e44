"""The engines of a one-process world: every worker of a vLLM replica, one after the other, in this process.

Each is vLLM's own model class with real storage, built by vLLM's own group arithmetic; its layout is what a live worker
would publish (EngineModel), and what a refit must leave in it is what its own `load_weights` leaves in a second model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from xfer.engines import vllm_cpu
from xfer.engines.layout import EngineLayout, run_recipes
from xfer.engines.live import Storages as Tree
from xfer.engines.meta_model import fake_rank, make_config, make_model
from xfer.engines.vllm_layout import EngineModel
from xfer.mesh.parallel import EngineParallel
from xfer.plan.inventory import Inventory, engine_inventory
from xfer.testing.world import Storages, first_difference
from xfer.trace.catalog import Catalog

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Worker:
    """One engine worker. `storages`: live ones and scratch, in the order of the inventory's roots; `truth`: per version
    of the weights, what vLLM's own loader leaves in them (zeros for scratch)."""

    inventory: Inventory
    layout: EngineLayout
    storages: Storages
    truth: tuple[Storages, ...]

    @property
    def judged(self) -> dict[str, torch.Tensor]:
        """Which bytes of each live storage a refit answers for: all that a parameter or buffer has and that is not
        kept."""
        out = {r.name: torch.zeros(r.nbytes, dtype=torch.bool) for r in self.inventory.roots}
        for spans, value in ((self.layout.footprint, True), (self.layout.kept, False)):
            for s in spans:
                out[s.root][s.start : s.stop] = value
        return out

    def scramble(self, seed: int, storages: Storages | None = None) -> None:
        """Noise in every byte that a refit answers for, so that whatever it leaves out shows."""
        for i, (root, storage) in enumerate(zip(self.inventory.roots, storages or self.storages)):
            noise = torch.Generator().manual_seed(seed * 1_000_003 + i)
            new = torch.empty_like(storage).random_(0, 256, generator=noise)
            storage.copy_(torch.where(self.judged[root.name], new, storage))

    def finish(self, storages: Storages | None = None) -> None:
        """After the wire: what the loader computes."""
        names = (r.name for r in self.inventory.roots)
        run_recipes(self.layout, dict(zip(names, storages or self.storages)))

    def wrong(self, version: int, storages: Storages | None = None) -> list[str]:
        """Storages that differ from what vLLM's loader leaves."""
        return first_difference(self.inventory, storages or self.storages, self.truth[version], self.judged)


def workers(
    folder: str | Path,
    parallel: EngineParallel,
    catalog: Catalog,
    versions: Sequence[Mapping[str, torch.Tensor]],
    **options: object,
) -> list[Worker]:
    """All workers of one replica, ranks in vLLM's order; ranks that hold the same share layout and truth.

    `versions`: full checkpoint tensors. `options`: EngineArgs.
    """
    made: dict[tuple[int, ...], Worker] = {}
    out = []
    for rank in range(parallel.world):
        place = _place(parallel, rank)
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
        inventory = inventory_of(catalog, layout, rank)
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


@contextmanager
def rank_of(
    hf_config: str | Path | Mapping, parallel: EngineParallel, rank: int, **options: object
) -> Iterator[object]:
    """The VllmConfig of one rank, inside vLLM's groups as that rank sees them. `hf_config`: a folder, or its config."""
    vllm_cpu.install()
    _build_ungated_experts()
    _build_sparse_attention()
    hf_config = hf_config if isinstance(hf_config, Mapping) else str(hf_config)
    config = make_config(hf_config, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp, ep=parallel.ep, **options)
    with fake_rank(config, rank):
        yield config


@functools.cache
def _build_ungated_experts() -> None:
    """vLLM has no CPU kernel for experts without a gate, and says so when it builds them. They are never run here, and
    the layout of their weights is the same on all platforms."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts._supports_no_act_and_mul = staticmethod(lambda: True)
    CPUUnquantizedExperts._supports_activation = staticmethod(lambda activation: True)
    check = FusedMoEConfig.__post_init__

    def checked(self) -> None:
        try:
            check(self)
        except NotImplementedError:  # the last thing that it looks at
            if self.is_act_and_mul:
                raise

    FusedMoEConfig.__post_init__ = checked


@functools.cache
def _build_sparse_attention() -> None:
    """vLLM has no sparse attention for the CPU (DeepSeek-V3.2, GLM-5), and says so when it builds such a layer. It is never
    run here, and which attention runs changes no weight's layout."""
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.get_attn_backend_cls.__func__

    def chosen(cls, selected_backend, attn_selector_config, **more):
        return choose(cls, selected_backend, attn_selector_config._replace(use_sparse=False), **more)

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def inventory_of(catalog: Catalog, layout: EngineLayout, rank: int) -> Inventory:
    """As a worker's session publishes it."""
    return engine_inventory(
        catalog,
        rank=rank,
        host="",
        roots=layout.roots,
        fragments=layout.traced.fragments,
        fills=layout.traced.fills,
        footprint=layout.footprint,
        kept=layout.kept,
        staged=layout.staged,
        reads=layout.traced.reads,
    )


def _place(parallel: EngineParallel, rank: int) -> tuple[int, ...]:
    dense, expert = parallel.dense(), parallel.expert()
    at = {a: int(i) for m in (dense, expert) for a, i in zip(m.axes, m.coordinate(rank))}
    return tuple(at[a] for a in ("pp", "tp", "ep", "etp"))
