"""Trainers whose tensors' places are known (FSDP2, HSDP, DTensors, plain modules) in the packed route: each rank gives rank 0
the parts that it holds, one message per bucket and rank, and nobody but rank 0 ever sees a whole tensor.

What a framework's own `full_tensor()` does per parameter on every rank is one exchange per bucket here. It works for any
source whose `read` tells fragments (trainers/dtensor.py); parts that several ranks hold come from the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from xfer.errors import LayoutError, PlanMismatch
from xfer.packed import agree
from xfer.packed.buffer import flat_bytes
from xfer.packed.plan import Group, TaskSize
from xfer.plan.program import ITEMSIZE
from xfer.trace.fragment import Fragment, TensorSpec

_Box = tuple[list[int], list[int], list[int], str]
"""Origin, extent, steps and the dtype in which a rank holds it."""


class FragmentSource(Protocol):
    """The part of session.trainer.Source that is used here."""

    rank: int
    world: int
    device: torch.device

    def drain(self) -> None: ...
    def read(self): ...
    def check(self) -> str: ...
    def rebind(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Held:
    """One box of a tensor, and the rank that sends it."""

    rank: int
    fragment: Fragment

    @property
    def nbytes(self) -> int:
        return prod(self.fragment.extent) * ITEMSIZE[self.fragment.dtype]


class TensorStream:
    """See source.Stream."""

    def __init__(self, source: FragmentSource):
        self.source = source
        self.rank, self.world, self.device = source.rank, source.world, source.device
        self._specs: dict[str, TensorSpec] = {}
        self._mine: dict[str, list[Fragment]] = {}
        self._roots: Mapping[str, torch.Tensor] = {}
        self._held: dict[str, list[_Held]] = {}
        self._came: dict[int, torch.Tensor] = {}  # rank 0: by rank, what it sent of the last group
        self._known: dict[int, tuple[Group, list]] = {}  # by the group's id: its parts where they lie or arrive
        self.collectives = 0

    def drain(self) -> None:
        self.source.drain()

    def read(self) -> tuple[TensorSpec, ...]:
        layout = self.source.read()
        self._specs = {s.name: TensorSpec(s.name, s.shape, s.dtype) for s in layout.traced.specs}
        self._mine = {}
        for f in layout.traced.fragments:
            self._mine.setdefault(f.tensor, []).append(f)
        self._roots, self._known = layout.tensors, {}
        return tuple(self._specs.values())

    def check(self) -> str:
        state = self.source.check()
        if state == "moved":
            self._roots, self._known = self.source.rebind(), {}
        return state

    # ---- with all ranks

    def build(self) -> tuple[TaskSize, ...]:
        self._known, self._came = {}, {}
        kind = dict[str, tuple[tuple[list[int], str], list[_Box]]]
        said = agree.of_all_ranks(self._own, kind, self.device)
        bad, specs, held = [], {}, {}
        for rank, theirs in enumerate(said):
            for name, ((shape, dtype), boxes) in theirs.items():
                spec = specs.setdefault(name, TensorSpec(name, tuple(shape), dtype))
                if (spec.shape, spec.dtype) != (tuple(shape), dtype):
                    bad.append(f"{name}: trainer {rank} has {dtype}{shape}, another {spec.dtype}{list(spec.shape)}")
                known = held.setdefault(name, {})
                for i, (origin, extent, steps, own) in enumerate(boxes):
                    box = (tuple(origin), tuple(extent), tuple(steps))
                    f = self._mine[name][i] if rank == self.rank else Fragment(name, *box[:2], "", 0, (), own, box[2])
                    known.setdefault(box, _Held(rank, f))
        if bad:
            raise PlanMismatch("trainer ranks hold different tensors under the same name", bad)
        self._held = {name: list(boxes.values()) for name, boxes in held.items()}
        for name, spec in specs.items():
            there = sum(prod(h.fragment.extent) for h in self._held[name])
            if there < prod(spec.shape):
                bad.append(f"{name}: all ranks together hold {there} of its {prod(spec.shape)} elements")
        if bad:
            raise LayoutError("tensors that no rank holds whole, nor all together", bad)
        return tuple(TaskSize(i, (specs[name],)) for i, name in enumerate(sorted(specs)))

    def _own(self) -> dict[str, tuple[tuple[list[int], str], list[_Box]]]:
        mine = {name: (self._told(name), [_box(f) for f in found]) for name, found in self._mine.items()}
        return mine | {name: (self._told(name), []) for name in self._specs.keys() - mine.keys()}

    def _told(self, name: str) -> tuple[list[int], str]:
        spec = self._specs[name]
        return list(spec.shape), spec.dtype

    def tensors(self, group: Group) -> Iterator[tuple[str, torch.Tensor]]:
        parts = iter(self._exchanged(group))
        for spec in group.tensors:
            if self.rank:
                yield spec.name, None
                continue
            held = self._held[spec.name]
            if len(held) == 1 and held[0].fragment.extent == spec.shape and held[0].fragment.dtype == spec.dtype:
                yield spec.name, next(parts)
                continue
            whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
            for h in held:
                whole[h.fragment.index] = next(parts).to(whole.dtype)
            yield spec.name, whole

    def _exchanged(self, group: Group) -> list[torch.Tensor]:
        """On rank 0 all parts of the group's tensors, in their order. One message from each other rank that holds some.
        Parts are views that are kept from one gather to the next; those that came hold until the next group comes."""
        order = [h for spec in group.tensors for h in self._held[spec.name]]
        if self.rank:
            mine = self._kept(group, lambda: [_Mine(self._roots, h) for h in order if h.rank == self.rank])
            self.collectives = int(bool(mine))
            if mine:
                _run([dist.P2POp(dist.isend, torch.cat([x.flat() for x in mine]), 0)])
            return []
        sizes: dict[int, int] = {}
        for h in order:
            if h.rank:
                sizes[h.rank] = sizes.get(h.rank, 0) + h.nbytes
        for r, n in sizes.items():
            if r not in self._came or self._came[r].numel() < n:
                self._known, self._came[r] = {}, torch.empty(0)  # views hold the old one
                self._came[r] = torch.empty(n, dtype=torch.uint8, device=self.device)
        self.collectives = len(sizes)
        _run([dist.P2POp(dist.irecv, self._came[r][:n], r) for r, n in sizes.items()])
        return [x.now() for x in self._kept(group, lambda: self._arrived(order))]

    def _arrived(self, order: list[_Held]) -> list[_Mine | _Came]:
        at, parts = dict.fromkeys(self._came, 0), []
        for h in order:
            if h.rank == 0:
                parts.append(_Mine(self._roots, h))
                continue
            parts.append(_Came(self._came[h.rank][at[h.rank] : at[h.rank] + h.nbytes], h.fragment))
            at[h.rank] += h.nbytes
        return parts

    def _kept(self, group: Group, make: Callable[[], list]) -> list:
        known = self._known.get(id(group))
        if known is None or known[0] is not group:
            known = self._known[id(group)] = (group, make())
        return known[1]


class _Mine:
    """A part where this rank has it. Its view is made once, where it is one; `flat` as contiguous bytes."""

    __slots__ = ("root", "fragment", "view", "bytes")

    def __init__(self, roots: Mapping[str, torch.Tensor], h: _Held):
        self.root, self.fragment = roots[h.fragment.root], h.fragment
        self.view = _view(self.root, h.fragment) if min(h.fragment.strides, default=0) >= 0 else None
        self.bytes = flat_bytes(self.view) if self.view is not None and self.view.is_contiguous() else None

    def now(self) -> torch.Tensor:
        return self.view if self.view is not None else _view(self.root, self.fragment)

    def flat(self) -> torch.Tensor:
        return self.bytes if self.bytes is not None else flat_bytes(self.now())


class _Came:
    """A part where it arrives: `piece` is bytes of a buffer that is used again."""

    __slots__ = ("piece", "fragment", "view")

    def __init__(self, piece: torch.Tensor, fragment: Fragment):
        self.piece, self.fragment, dtype = piece, fragment, getattr(torch, fragment.dtype)
        self.view = None if piece.storage_offset() % dtype.itemsize else piece.view(dtype).view(fragment.extent)

    def now(self) -> torch.Tensor:
        if self.view is not None:
            return self.view
        return self.piece.clone().view(getattr(torch, self.fragment.dtype)).view(self.fragment.extent)


def _run(ops: list) -> None:
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def _box(f: Fragment) -> _Box:
    return list(f.origin), list(f.extent), list(f.steps), f.dtype


def _view(root: torch.Tensor, f: Fragment) -> torch.Tensor:
    """The fragment's elements where they lie; a copy where strides run backwards, which torch cannot express."""
    item, offset = ITEMSIZE[f.dtype], f.offset
    back = [d for d, s in enumerate(f.strides) if s < 0]
    for d in back:
        offset += (f.extent[d] - 1) * f.strides[d]
    typed = root[: root.numel() // item * item].view(getattr(torch, f.dtype))
    view = typed.as_strided(f.extent, [abs(s) // item for s in f.strides], offset // item)
    return view.flip(back) if back else view
