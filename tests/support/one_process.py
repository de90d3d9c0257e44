"""A whole refit in one process: the inventories and storages of every rank of a world, and their programs run on them.

Ranks whose inventories are equal are one *class* and are traced and stored once. Nothing is simulated but the wire: plans, programs and
kernels are those of a real refit, and each rank's program is expanded for that rank alone. Inventories come from
one_process_megatron.py and one_process_vllm.py, which need environments of their own, so `Trainers` travels between them as a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
    """All trainer ranks of a world.

    classes      one inventory per class of equal ranks
    class_of     class of each trainer rank
    weights      per version of the weights, per class, its storages
    """

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

    def save(self, path: str | Path) -> None:
        """One safetensors file; needs that package."""
        from safetensors.torch import save_file

        out = {"catalog": _bytes(self.catalog.to_bytes()), "class_of": torch.tensor(self.class_of, dtype=torch.int32)}
        for c, inventory in enumerate(self.classes):
            out[f"inventory.{c}"] = _bytes(inventory.to_bytes())
        for v, version in enumerate(self.weights):
            for c, storages in enumerate(version):
                out |= {f"weights.{v}.{c}.{i}": s for i, s in enumerate(storages)}
        save_file(out, str(path))

    @classmethod
    def load(cls, path: str | Path) -> Trainers:
        from safetensors.torch import load_file

        held = load_file(str(path))
        class_of = tuple(held["class_of"].tolist())
        classes = tuple(Inventory.from_bytes(_raw(held[f"inventory.{c}"])) for c in range(max(class_of) + 1))
        versions = 1 + max(int(name.split(".")[1]) for name in held if name.startswith("weights."))
        weights = tuple(
            tuple(tuple(held[f"weights.{v}.{c}.{i}"] for i in range(len(inv.roots))) for c, inv in enumerate(classes))
            for v in range(versions)
        )
        return cls(Catalog.from_bytes(_raw(held["catalog"])), classes, class_of, weights)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _raw(t: torch.Tensor) -> bytes:
    return t.numpy().tobytes()


class Job:
    """The programs of all ranks of one sub-plan, expanded rank by rank, each as that rank would."""

    def __init__(self, plan: SubPlan):
        self.plan = plan
        self.programs: tuple[Program, ...] = tuple(plan.program(rank) for rank in plan.ranks)

    def run(self, sources: Sequence[Storages], destinations: Sequence[Storages]) -> int:
        """One refit from `sources` (per trainer rank) into `destinations` (per worker). Returns the bytes on the wire. The two ends of each
        message must derive the same rows from the plan."""
        wires: dict[tuple[int, int, int], tuple[torch.Tensor, bytes]] = {}
        moved = 0
        for rank, roots in enumerate(sources):
            messages = list(self.programs[rank].sends())
            rows, places = _one_buffer(messages)
            if not messages:
                continue
            bound = bind(rows, roots, "src")
            wire = torch.zeros(bound.nbytes, dtype=torch.uint8)
            bound.pack(wire)
            for m, at in zip(messages, places):
                wires[m.wave, m.src, m.dst] = wire[at : at + m.nbytes], m.rows.tobytes()
                moved += m.nbytes
        for worker, roots in enumerate(destinations):
            program = self.programs[self.plan.trainers + worker]
            messages = list(program.receives())
            rows, places = _one_buffer(messages)
            fills = program.rows[program.rows["op"] == Op.FILL]
            bound = bind(np.concatenate([rows, fills]), roots, "dst")
            wire = torch.zeros(bound.nbytes, dtype=torch.uint8)
            for m, at in zip(messages, places):
                sent, rows_sent = wires.pop((m.wave, m.src, m.dst))
                assert rows_sent == m.rows.tobytes(), f"wave {m.wave}, {m.src} to {m.dst}: the two ends know other rows"
                wire[at : at + m.nbytes] = sent
            bound.unpack(wire)
            bound.fill()
        assert not wires, f"sent, and not received: {sorted(wires)}"
        return moved


def _one_buffer(messages: Sequence) -> tuple[np.ndarray, list[int]]:
    """The rows of all messages of one rank as if they went through one buffer, and where in it each message begins."""
    parts, places, at = [np.zeros(0, ROW)], [], 0
    for m in messages:
        rows = m.rows.copy()
        rows["wire"] += at
        parts.append(rows)
        places.append(at)
        at += -(-m.nbytes // 64) * 64  # elements keep the alignment that the planner gave them
    return np.concatenate(parts), places


def random_weights(specs: Iterable[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """Full checkpoint tensors. Each depends on its name and `seed` only, so every process can make them.

    Values are bfloat16's even where the dtype is wider: a trainer may hold such a tensor in bfloat16, and then this is
    all that a refit can be asked to bring over. Those of vectors lie on a grid around 1: a trainer may hold a norm's
    weight less 1, and then its export is the checkpoint again. Odd seeds give matrices of twice the size, so that scales
    which are powers of two are others.
    """
    out = {}
    for s in specs:
        key = hashlib.blake2b(f"{seed}:{s.name}".encode(), digest_size=7).digest()
        g = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        vector = len(s.shape) == 1
        x = (
            torch.randint(64, 256, s.shape, generator=g) / 128
            if vector
            else torch.randn(s.shape, generator=g) * 2 ** (seed % 2)
        )
        out[s.name] = x.to(torch.bfloat16).to(getattr(torch, s.dtype))
    return out
