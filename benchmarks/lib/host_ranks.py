"""The processes of benchmarks.hosts: ranks with declared layouts of scaled models, and raw gloo streams between them.

A storage's bits of version v are a hash of tensor and position, xor a number of v: every rank can tell them alone. Of a version
`some(v, share)` only about half of that share of the elements are changed, other ones in each version, so that about `share` of them
differ between two of these.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks.lib import layouts
from benchmarks.lib.layouts import Layout, Model, View
from tests.support.host_world import HostWorld
from tests.support.hosts import Cluster
from tests.support.world import TOKEN, ToySource, ToyTaker, trainer_session
from tests.support.world_processes import _controller, _serve_trainer, _worker
from xfer.coordinator.state import Replica
from xfer.engines.layout import EngineLayout
from xfer.mesh.parallel import EngineParallel, TrainerParallel
from xfer.plan import planner
from xfer.plan.fabric import Site
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Span
from xfer.trace.traced import Traced, TrainerLayout

SIZES = {
    "qwen3-4b": dict(hidden_size=256, intermediate_size=1024, head_dim=16, vocab_size=4096),
    "qwen3-30b-a3b": dict(hidden_size=256, moe_intermediate_size=128, head_dim=16, num_experts=32, vocab_size=4096),
}
"""Sizes of the scaled models; heads, groups and what else decides how a layer is cut are the real ones."""
RAW_S = 120.0
"""Longest time of raw streams."""


@dataclass(frozen=True)
class Mapping:
    """A mapping of layouts.SHAPES with a scaled model of `depth` layers."""

    name: str
    depth: int

    @property
    def of(self) -> TrainerParallel:
        return TrainerParallel(**layouts.SHAPES[self.name][1])

    @property
    def workers(self) -> int:
        return layouts.SHAPES[self.name][2]

    @property
    def replicas(self) -> int:
        return layouts.SHAPES[self.name][3]

    @property
    def ranks(self) -> int:
        return self.of.world + self.workers * self.replicas

    @functools.cached_property
    def model(self) -> Model:
        config = layouts.SHAPES[self.name][0]
        return Model.named(config, num_hidden_layers=self.depth, **SIZES[config])

    @functools.cached_property
    def catalog(self) -> Catalog:
        return self.model.catalog()

    def scale(self) -> float:
        """Bytes of the real model for one of the scaled one."""
        real = Model.named(layouts.SHAPES[self.name][0])
        return nbytes(real.catalog()) / nbytes(self.catalog)

    def trainer(self, rank: int) -> Layout:
        return layouts.trainer(self.model, self.of, rank)

    def engine(self, rank: int) -> Layout:
        return layouts.engine(self.model, EngineParallel(tp=self.workers), rank)


def nbytes(catalog: Catalog) -> int:
    """Of a checkpoint in bf16."""
    return sum(2 * torch.Size(s.shape).numel() for s in catalog.specs)


_PARTS = 1_000_000


def some(number: int, share: float) -> int:
    """The version `number` in which only some elements are changed."""
    return round(share * 10_000) * _PARTS + number


class Bits:
    """Storages of a layout, and what they hold in each version."""

    def __init__(self, mapping: Mapping, layout: Layout):
        roots = layout.roots()
        self.base = {r.name: torch.zeros(r.nbytes, dtype=torch.uint8) for r in roots}
        specs = {s.name: (i, s) for i, s in enumerate(mapping.catalog.specs)}
        View(layout, [self.base[r.name] for r in roots]).write(specs, torch.device("cpu"))
        self.live = {n: torch.zeros_like(t) for n, t in self.base.items()}

    def of(self, root: str, version: int) -> torch.Tensor:
        """int16."""
        base, (parts, number) = self.base[root].view(torch.int16), divmod(version, _PARTS)
        other = base ^ (number * 0x2545 % 0x7FFF)
        if not parts:
            return other
        chosen = (base.to(torch.int32) * 40503 + number * 7919) & 0xFFFF < parts / 20_000 * 0x10000
        return torch.where(chosen, other, base)


class DeclaredSource(ToySource):
    """Trainer rank `rank` of a mapping."""

    def __init__(self, mapping: Mapping, rank: int):
        self.rank, self.world, self.fail, self.drained = rank, mapping.of.world, None, 0
        self._layout, self._specs = mapping.trainer(rank), mapping.catalog.specs
        self._bits = Bits(mapping, self._layout)

    def set(self, version: int) -> None:
        for n, t in self._bits.live.items():
            t.view(torch.int16).copy_(self._bits.of(n, version))

    def read(self) -> TrainerLayout:
        return TrainerLayout(
            Traced(self._specs, tuple(self._layout.fragments)), tuple(self._layout.roots()), self._bits.live
        )

    def check(self) -> str:
        return "same"


class DeclaredTaker(ToyTaker):
    """Worker `rank` of a replica of a mapping. The last norm is the lock."""

    LOCK = "model.norm.weight"

    def __init__(self, mapping: Mapping, rank: int, world: int):
        self.rank, self.world = rank, world
        self._layout, self._specs = mapping.engine(rank), mapping.catalog.specs
        self._bits = Bits(mapping, self._layout)
        self.live = {**self._bits.live, "norm": self._bits.live[self.LOCK].view(torch.bfloat16)}
        self.spare = torch.zeros_like(self.live["norm"])
        self.locked, self.began_with = False, "whole"

    def read(self, catalog: Catalog) -> EngineLayout:
        tensors = self._bits.live | {self.LOCK: self.spare.view(torch.uint8)}
        roots = tuple(self._layout.roots())
        traced = Traced(self._specs, tuple(self._layout.fragments), reads=tuple(s.name for s in self._specs))
        return EngineLayout(roots, tensors, traced, tuple(Span(r.name, 0, r.nbytes) for r in roots), (), ())

    def check(self, quick: bool = False) -> str:
        return "same"

    def choose_lock(self) -> str:
        return self.LOCK

    def wrong(self, version: int) -> list[str]:
        bits = self._bits
        return [n for n, t in bits.live.items() if not torch.equal(t.view(torch.int16), bits.of(n, version))]


class Streams:
    """Raw gloo messages among all ranks."""

    pg: torch.distributed.ProcessGroup

    def open(self, rank: int, world: int, address: str, port: int) -> None:
        from torch.distributed import ProcessGroupGloo, TCPStore

        store = TCPStore(address, port, world, rank == 0, timedelta(seconds=RAW_S))
        self.rank, self.pg = rank, ProcessGroupGloo(store, rank, world, timedelta(seconds=RAW_S))

    def stream(self, messages: list[tuple[int, int, int]]) -> float:
        """Sends all messages (source, destination, bytes) at once; seconds until all have come, on this rank's clock."""
        mine = [m for m in messages if self.rank in m[:2] and m[2]]
        data = [torch.zeros(n, dtype=torch.uint8) for _, _, n in mine]
        self.pg.barrier().wait()
        began = time.perf_counter()
        works = [self.pg.recv([t], s, s) for (s, d, _), t in zip(mine, data) if d == self.rank]
        works += [self.pg.send([t], d, s) for (s, d, _), t in zip(mine, data) if s == self.rank]
        for w in works:
            w.wait()
        self.pg.barrier().wait()
        return time.perf_counter() - began


_streams = Streams()
_far, _rings = planner._far, Replica.rings


def first_fit(on: bool) -> None:
    """Whether this process plans from now on as between ranks of one host."""
    planner._far = (lambda *_: None) if on else _far


def no_rings(on: bool) -> None:
    """Whether this process's coordinator lets replicas form chains only, from now on."""
    Replica.rings = property(lambda _: False) if on else _rings


def open_streams(**where) -> None:
    _streams.open(**where)


def stream(messages: list[tuple[int, int, int]]) -> float:
    return _streams.stream(messages)


COMMANDS = {"open_streams": open_streams, "stream": stream, "first_fit": first_fit, "no_rings": no_rings}
"""Of all ranks."""


def _trainer(mapping: Mapping, conn, rank: int, world: int, env: dict) -> None:
    os.environ.update(env)
    source = DeclaredSource(mapping, rank)

    def made(rendezvous: str, site: bytes, **args):
        return trainer_session(source, rendezvous, TOKEN, fabric=Site.from_bytes(site) if site else None, **args)

    _serve_trainer(conn, made, set=source.set, **COMMANDS)


class MappingWorld(HostWorld):
    """The ranks of a mapping on a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, mapping: Mapping, deadline_s: float):
        take = functools.partial(DeclaredTaker, mapping)
        worker = functools.partial(_worker, make=take, **COMMANDS)
        self.mains = (functools.partial(_trainer, mapping), worker, _controller)
        super().__init__(
            cluster, folder, trainers=mapping.of.world, workers=mapping.workers, replicas=mapping.replicas,
            deadline_s=deadline_s,
        )  # fmt: skip

    def on_ranks(self, name: str, each: Sequence[dict] = (), **args) -> list:
        """The answers of all trainers and workers to a command. each: further arguments of each rank."""
        ranks = [*self.trainers, *(x for r in self.replicas for x in r.workers)]
        for i, p in enumerate(ranks):
            p.say(name, **args, **(each[i] if each else {}))
        answers = [p.answer(RAW_S) for p in ranks]
        if bad := [a for a in answers if a["kind"] != "done"]:
            raise RuntimeError(str(bad[0]))
        return [a["value"] for a in answers]

    def wrong(self, version: int) -> int:
        """Workers that do not hold exactly this version."""
        held = [x.value("holds", versions=[version])["whole"] for r in self.replicas for x in r.workers]
        return sum(h != [version] for h in held)
