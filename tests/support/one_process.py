"""A whole refit in one process: the inventories and storages of every rank of a world, and their programs run on them. Nothing is
simulated but the wire. Ranks of equal inventories are one *class*, traced and stored once. Inventories come from one_process_megatron.py
and one_process_vllm.py, which need environments of their own, so `Trainers` travels between them as a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from xfer.kernels import bind
from xfer.plan.inventory import Inventory
from xfer.plan.program import ROW, Op, Program
from xfer.plan.subplan import SubPlan
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec

Storages = tuple[torch.Tensor, ...]
"""Flat uint8 tensors over whole storages, in the order of an inventory's roots."""


@dataclass(frozen=True, slots=True, eq=False)
class Trainers:
    """All trainer ranks of a world: one inventory per class of equal ranks, the class of each rank, and per version of the weights, per
    class, its storages."""

    catalog: Catalog
    classes: tuple[Inventory, ...]
    class_of: tuple[int, ...]
    weights: tuple[tuple[Storages, ...], ...]

    def inventories(self) -> list[Inventory]:
        """One per rank, as `plan_replica` wants them."""
        return [replace(self.classes[c], rank=r) for r, c in enumerate(self.class_of)]

    def storages(self, version: int) -> list[Storages]:
        """One per rank; ranks of a class share theirs."""
        return [self.weights[version][c] for c in self.class_of]

    def save(self, path: str) -> None:
        plain = [i.to_bytes() for i in self.classes]
        torch.save((self.catalog.to_bytes(), plain, self.class_of, self.weights), path)

    @classmethod
    def load(cls, path: str) -> Trainers:
        catalog, classes, class_of, weights = torch.load(path, weights_only=False)
        return cls(Catalog.from_bytes(catalog), tuple(map(Inventory.from_bytes, classes)), class_of, weights)


class Job:
    """The programs of all ranks of one sub-plan, expanded rank by rank, each as that rank would."""

    def __init__(self, plan: SubPlan):
        self.plan = plan
        self.programs: tuple[Program, ...] = tuple(plan.program(rank) for rank in plan.ranks)

    def run(self, sources: Sequence[Storages], destinations: Sequence[Storages]) -> int:
        """One refit from `sources` (per trainer rank) into `destinations` (per worker). Returns the bytes on the wire. The two ends of each
        message must derive the same rows from the plan."""
        wires: dict[tuple[int, int, int], tuple[torch.Tensor, bytes]] = {}
        for rank, roots in enumerate(sources):
            messages, bound, wire, places = _one_buffer(list(self.programs[rank].sends()), roots, "src")
            bound.pack(wire)
            for m, at in zip(messages, places):
                wires[m.wave, m.src, m.dst] = wire[at : at + m.nbytes], m.rows.tobytes()
        moved = sum(sent.nbytes for sent, _ in wires.values())
        for worker, roots in enumerate(destinations):
            program = self.programs[self.plan.trainers + worker]
            fills = program.rows[program.rows["op"] == Op.FILL]
            messages, bound, wire, places = _one_buffer(list(program.receives()), roots, "dst", fills)
            for m, at in zip(messages, places):
                sent, rows_sent = wires.pop((m.wave, m.src, m.dst))
                assert rows_sent == m.rows.tobytes(), f"wave {m.wave}, {m.src} to {m.dst}: the two ends know other rows"
                wire[at : at + m.nbytes] = sent
            bound.unpack(wire)
            bound.fill()
        assert not wires, f"sent, and not received: {sorted(wires)}"
        return moved


def _one_buffer(messages: list, roots: Storages, side: str, *more: np.ndarray) -> tuple:
    """The messages of one rank, their rows (and `more`) bound as if all went through one buffer, that buffer, and where in it each
    message begins."""
    parts, places, at = [np.zeros(0, ROW)], [], 0
    for m in messages:
        parts.append(m.rows.copy())
        parts[-1]["wire"] += at
        places.append(at)
        at += -(-m.nbytes // 64) * 64  # elements keep the alignment that the planner gave them
    bound = bind(np.concatenate([*parts, *more]), roots, side)
    return messages, bound, torch.zeros(bound.nbytes, dtype=torch.uint8), places


def random_weights(specs: Iterable[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """Full checkpoint tensors. Each depends on its name and `seed` only, so every process can make them. All are values of bfloat16, in
    which a trainer may hold a wider tensor. Vectors lie on a grid around 1: a trainer may hold a norm's weight less 1, and then its export
    is the checkpoint again. Odd seeds give matrices of twice the size, so that scales which are powers of two are others."""
    out = {}
    for s in specs:
        key = hashlib.blake2b(f"{seed}:{s.name}".encode(), digest_size=7).digest()
        g = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        if len(s.shape) == 1:
            x = torch.randint(64, 256, s.shape, generator=g) / 128
        else:
            x = torch.randn(s.shape, generator=g) * 2 ** (seed % 2)
        out[s.name] = x.to(torch.bfloat16).to(getattr(torch, s.dtype))
    return out
