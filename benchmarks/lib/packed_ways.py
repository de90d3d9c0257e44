"""How the ranks of benchmarks.packed_gpu gather whole tensors out of Megatron's layout, and how they load them.

GatheredStream gathers one Megatron parameter at a time, whole on every rank, as Megatron-Bridge exports it. PartsSource
describes the same layout as fragments, as a traced trainer does. No Megatron runs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist

from benchmarks.lib.layouts import Layout, Model
from xfer import kernels
from xfer.packed import places
from xfer.packed.lockstep import Lockstep
from xfer.packed.plan import GatherGroup, TaskSize
from xfer.packed.source import Assembly
from xfer.packed.wire import PackedMessage
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.traced import Traced, TrainerLayout
from xfer.trainers.bridge_stream import ROUND_BYTES
from xfer.transport.group import Link

ITEM = 2  # bf16
_FUSED = ((re.compile(r"\.[qkv]_proj\."), ".qkv."), (re.compile(r"\.(gate|up)_proj\."), ".fc1."))


def typed(storage: torch.Tensor, f: Fragment, start: int = 0) -> torch.Tensor:
    """bf16 [f.extent]: a view of a fragment in `storage`, the bytes of its root from byte `start` on."""
    strides = [s // ITEM for s in f.strides]
    flat = storage.view(torch.bfloat16)
    return flat.as_strided(f.extent, strides, flat.storage_offset() + (f.offset - start) // ITEM)


@dataclass(frozen=True)
class Task:
    """One Megatron parameter: bytes [start, start + nbytes) of storage `root` on every rank.

    held: the fragments of each tensor with the ranks that hold them. alike: all ranks hold the same values, so that
    nothing is gathered.
    """

    root: str
    start: int
    nbytes: int
    held: dict[TensorSpec, list[tuple[int, Fragment]]]
    alike: bool


def tasks_of(m: Model, layouts: list[Layout]) -> list[Task]:
    specs = {s.name: s for s in m.specs()}

    def parameter(f: Fragment) -> str:
        name = f.tensor
        for pattern, fused in _FUSED:
            name = pattern.sub(fused, name)
        return name

    per_rank = [[list(g) for _, g in groupby(x.fragments, parameter)] for x in layouts]
    out = []
    for groups in zip(*per_rank, strict=True):
        start = min(f.offset for g in groups for f in g)
        end = max(f.offset + prod(f.extent) * ITEM for g in groups for f in g)
        boxes = [[(f.tensor, f.origin, f.extent) for f in g] for g in groups]
        alike = all(b == boxes[0] for b in boxes)
        held: dict[TensorSpec, list[tuple[int, Fragment]]] = {}
        for rank, g in enumerate(groups[:1] if alike else groups):
            for f in g:
                held.setdefault(specs[f.tensor], []).append((rank, f))
        out.append(Task(groups[0][0].root, start, end - start, held, alike))
    return out


class GatheredStream:
    """An xfer.packed.source.WeightStream. together: the all-gathers of a round of tasks run as one, as BridgeStream runs them."""

    def __init__(
        self, rank: int, world: int, tasks: list[Task], roots: Mapping[str, torch.Tensor], device, together: bool = True
    ):
        self.rank, self.world, self.device, self.together = rank, world, device, together
        self.tasks, self.roots = tasks, roots

    def drain(self) -> None:
        pass

    def read(self) -> tuple[TensorSpec, ...]:
        return tuple(s for t in self.tasks for s in t.held)

    def check(self) -> str:
        return "same"

    def build(self, assembly: Assembly) -> tuple[TaskSize, ...]:
        return tuple(TaskSize(i, tuple(t.held)) for i, t in enumerate(self.tasks))

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        tasks = [self.tasks[i] for i in group.positions]
        if not self.together:
            for t in tasks:
                yield from self.export(t)
            return
        while tasks:
            some, size = [], 0
            while tasks and (not some or size + tasks[0].nbytes * self.world <= ROUND_BYTES):
                some.append(tasks.pop(0))
                size += some[-1].nbytes * self.world
            for found in Lockstep(self.device).run([lambda t=t: list(self.export(t)) for t in some]):
                yield from found

    def export(self, task: Task) -> Iterator[tuple[str, torch.Tensor]]:
        mine = self.roots[task.root][task.start : task.start + task.nbytes]
        slots = [mine]
        if not task.alike:
            slots = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(slots, mine)
        for spec, held in task.held.items():
            if len(held) == 1:
                rank, f = held[0]
                found = typed(slots[rank], f, task.start)
                yield spec.name, found.clone() if task.alike else found
                continue
            whole = torch.empty(spec.shape, dtype=torch.bfloat16, device=self.device)
            for rank, f in held:
                whole[f.index].copy_(typed(slots[rank], f, task.start))
            yield spec.name, whole


class PartsSource:
    """The same layout for TensorStream: ranks send their parts to trainer 0, the only rank with whole tensors."""

    def __init__(self, rank: int, world: int, m: Model, layout: Layout, roots: Mapping[str, torch.Tensor], device):
        self.rank, self.world, self.device = rank, world, device
        self._layout = TrainerLayout(Traced(tuple(m.specs()), tuple(layout.fragments)), (), roots)

    def drain(self) -> None:
        pass

    def read(self) -> TrainerLayout:
        return self._layout

    def check(self) -> str:
        return "same"

    def rebind(self) -> Mapping[str, torch.Tensor]:
        return self._layout.tensors


# ---- loaders


class Slices:
    """A loader of (name, tensor) pairs: a slice and a copy per place of a tensor, as engines' own loaders do."""

    def __init__(self, layout: Layout, roots: Mapping[str, torch.Tensor]):
        self._into: dict[str, list[tuple[torch.Tensor, tuple[slice, ...]]]] = {}
        for f in layout.fragments:
            if all(f.extent):
                self._into.setdefault(f.tensor, []).append((typed(roots[f.root], f), f.index))

    def load(self, pairs) -> None:
        for name, tensor in pairs:
            for mine, index in self._into[name]:
                mine.copy_(tensor[index])


class Rows:
    """A loader that is planned for all messages and copies each in one launch. made: the number of tables bound so far."""

    def __init__(
        self, layout: Layout, storages: Sequence[torch.Tensor], messages: Sequence[PackedMessage], programs: int | None
    ):
        self.made = 0
        self._storages, self._messages, self._programs = storages, messages, programs
        self._number = {r.name: i for i, r in enumerate(layout.roots())}
        self._held: dict[str, list[places.HeldBox]] = {}
        for f in layout.fragments:
            self._held.setdefault(f.tensor, []).append(places.HeldBox((f.origin, f.extent, f.steps), {0: f}))
        self._bound: dict[tuple[int, int], kernels.BoundRows] = {}
        self._latest: dict[int, kernels.BoundRows] = {}

    def bind(self, number: int, data: torch.Tensor) -> kernels.BoundRows:
        """Bind the table of message `number` to its bytes `data`."""
        key = number, data.data_ptr()
        known = self._latest.get(number)
        if key not in self._bound and hasattr(known, "_bases"):
            # A new mapping may have another address. Only the short list of bases holds addresses, so reuse the table.
            moved = copy.copy(known)
            moved._left, moved._held = moved._bases([data]), (*self._storages, data)
            self._bound[key] = moved
        if key not in self._bound:
            found = places.pieces(self._messages[number], self._held, 0)
            rows = places.table([p.copy(self._number[p.fragment.root]) for p in found])
            for field in ("root", "offset", "strides"):  # swap sides: copy out of the message
                there = rows[f"src_{field}"].copy()
                rows[f"src_{field}"] = rows[f"dst_{field}"]
                rows[f"dst_{field}"] = there
            self._bound[key] = kernels.bind(rows, self._storages, "local", src_roots=[data], programs=self._programs)
            self._latest[number] = self._bound[key]
            self.made += 1
        return self._bound[key]

    def load(self, number: int, data: torch.Tensor) -> None:
        self.bind(number, data).copy()


# ---- vLLM's own packing, where vLLM can be imported


class OnStream:
    """The communicator that vLLM's packing expects: the current stream waits for a broadcast, the host does not."""

    def __init__(self, link: Link):
        self._group = link._group()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


def vllm_packed() -> tuple[Callable, Callable]:
    """vLLM's (producer, consumer) of packed broadcasts. Raises ImportError if this vLLM has none."""
    from vllm.distributed.weight_transfer import packed_tensor as it

    for kind in ("packed_nccl_broadcast", "packed_broadcast"):
        if hasattr(it, f"{kind}_producer"):
            return getattr(it, f"{kind}_producer"), getattr(it, f"{kind}_consumer")
    raise ImportError("this vLLM has no packed broadcast under a known name")
