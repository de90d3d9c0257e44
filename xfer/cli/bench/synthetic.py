"""Storages with the layout of a real rank and made-up bytes: adapters of a trainer and of an engine worker without a framework.

Layouts are inventories that `xfer plan` has traced. The value of each element follows from its place in the checkpoint tensor and a
seed, so that an engine worker can compare every element with what the trainers must have sent, without having seen it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import torch

from xfer.coordinator.messages import Holds, Label
from xfer.engines.layout import EngineLayout
from xfer.errors import Unsupported
from xfer.packed.tensors import TensorStream
from xfer.plan.inventory import Inventory
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, TensorSpec
from xfer.trace.traced import Traced, TrainerLayout, byte_region

CHUNK = 1 << 22
"""Elements that are computed at once."""
UNTOUCHED = 0x5A
"""Every byte of an engine before its first refit, and of what refits leave alone after it."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def grouped(catalog: Catalog) -> Catalog:
    """The catalog in which the tensors of plans (experts of a layer in one) are the checkpoint's own."""
    return Catalog(tuple(TensorSpec(t.name, t.shape, t.dtype) for t in catalog.tensors))


class Layout:
    """The storages of one rank.

    Args:
        catalog: The catalog of `inventory`.
        inventory: Layout of the rank, of either side.
        device: Where the storages are.
    """

    def __init__(self, catalog: Catalog, inventory: Inventory, device: torch.device):
        self.device, self.inventory = device, inventory
        self.specs = {s.name: s for s in grouped(catalog).specs}
        self.number = {name: i for i, name in enumerate(self.specs)}
        self.fragments = tuple(inventory.table.fragments(catalog, inventory.roots))
        if backward := [f"{f.tensor} in {f.root}" for f in self.fragments if min(f.strides, default=0) < 0]:
            raise Unsupported("layouts with negative strides cannot be benchmarked", backward)
        self.reads = tuple(
            sorted({catalog.grouped(catalog.specs[i].name)[0] for a, b in inventory.reads for i in range(a, b)})
        )
        self.tensors = {
            r.name: torch.full((r.nbytes,), UNTOUCHED, dtype=torch.uint8, device=device) for r in inventory.roots
        }

    def region(self, f: Fragment | Fill) -> torch.Tensor:
        """The elements of a fragment, as integers of their size."""
        kind = _INTEGERS[getattr(torch, f.dtype).itemsize]
        return byte_region(self.tensors[f.root], f.offset, f.extent, f.strides, str(kind).removeprefix("torch."))

    def constant(self, fill: Fill) -> int:
        return int(torch.frombuffer(bytearray(fill.bits), dtype=self.region(fill).dtype)[0])

    def parts(self, seed: int) -> Iterator[tuple[Fragment, torch.Tensor, torch.Tensor]]:
        """Yield each fragment in parts: the fragment, live elements, and the values that they must have, both as integers."""
        for f in self.fragments:
            spec, live = self.specs[f.tensor], self.region(f)
            step = max(1, CHUNK // max(1, prod(f.extent[1:])))
            for first in range(0, f.extent[0] if f.extent else 1, step):
                part = live[first : first + step] if f.extent else live
                origin = (f.origin[0] + first, *f.origin[1:]) if f.extent else ()
                value = _values(spec, origin, tuple(part.shape), seed * 1_000_003 + self.number[f.tensor], self.device)
                yield f, part, value.to(getattr(torch, f.dtype)).view(part.dtype)


def _values(
    spec: TensorSpec, origin: tuple[int, ...], extent: tuple[int, ...], seed: int, device: torch.device
) -> torch.Tensor:
    """Values of a box of a tensor: a hash (splitmix64's multipliers) of seed and place, finite for floats of 16 bits and more."""
    place = torch.full(extent, seed * 7_919, dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(extent))):
        at = torch.arange(origin[dim], origin[dim] + extent[dim], device=device) * stride
        place += at.view(-1, *(1 for _ in extent[dim + 1 :]))
        stride *= spec.shape[dim]
    kind = getattr(torch, spec.dtype)
    bits = 8 * kind.itemsize
    for multiplier, shift in ((0x1F58476D1CE4E5B9, 27), (0x14D049BB133111EB, 31)):
        place *= multiplier
        place ^= (place >> shift) & ((1 << (64 - shift)) - 1)
    if kind is torch.bool:
        return (place & 1).to(torch.bool)
    if bits < 64:
        place &= (1 << bits) - 1
        if kind.is_floating_point and bits >= 16:
            # Without the exponent's highest bit it is neither infinite nor NaN, so that casts are defined.
            place &= ~(1 << (bits - 2))
        place -= (place >> (bits - 1)) << bits
    return place.to(_INTEGERS[kind.itemsize]).view(kind)


class _Synthetic:
    """The common part of both sides' adapters: storages here never move, and layouts never change."""

    def __init__(self, layout: Layout):
        self.layout, self.device = layout, layout.device

    def check(self, quick: bool = False) -> str:
        return "same"

    def rebind(self) -> Mapping[str, torch.Tensor]:
        return self.layout.tensors

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class SyntheticTrainer(_Synthetic):
    """Implements `Source` (participants/trainer.py)."""

    reads_together = False
    drain = _Synthetic.synchronize

    def __init__(self, layout: Layout, world: int):
        super().__init__(layout)
        self.rank, self.world = layout.inventory.rank, world

    def train(self, seed: int) -> None:
        """Write new values everywhere."""
        for _, part, value in self.layout.parts(seed):
            part.copy_(value)
        self.drain()

    def read(self) -> TrainerLayout:
        own = self.layout
        names = {f.tensor for f in own.fragments}
        specs = tuple(s for s in own.specs.values() if s.name in names)
        return TrainerLayout(Traced(specs, own.fragments), own.inventory.roots, own.tensors)

    def stream(self) -> TensorStream:
        """For the packed route."""
        return TensorStream(self)


class SyntheticWorker(_Synthetic):
    """Implements `LayoutReader` and `BoundWeights` of the direct route, and `Loader` of the packed one. There is no forward to lock."""

    drop: tuple[str, ...] = ()
    version: Label = None
    holds: Holds = "whole"
    paused = False

    def __init__(self, layout: Layout):
        super().__init__(layout)
        self._by_tensor: dict[str, list[Fragment]] = {}
        for f in layout.fragments:
            self._by_tensor.setdefault(f.tensor, []).append(f)

    def wrong(self, seed: int) -> dict[str, int]:
        """Number of wrong elements by tensor: values, constants, and bytes that a refit must leave alone."""
        own, bad = self.layout, Counter[str]()
        for f, part, value in own.parts(seed):
            bad[f.tensor] += int((part != value).sum())
        for fill in own.inventory.fills:
            bad[f"{fill.root}: constants"] += int((own.region(fill) != own.constant(fill)).sum())
        for kept in own.inventory.kept:
            bad[f"{kept.root}: kept"] += int((own.tensors[kept.root][kept.start : kept.stop] != UNTOUCHED).sum())
        return dict(+bad)

    def read(self, catalog: Catalog) -> EngineLayout:
        own, i = self.layout, self.layout.inventory
        traced = Traced(tuple(own.specs.values()), own.fragments, i.fills, reads=own.reads)
        return EngineLayout(i.roots, own.tensors, traced, i.footprint, i.kept, i.staged)

    @property
    def weights(self) -> SyntheticWorker:
        return self

    def choose_lock(self) -> str:
        return "nothing: there is no model here"

    def _nothing(self, *_: object) -> None: ...

    engage_lock = release_lock = run_recipes = _nothing

    # ---- the packed route

    def loader(self) -> SyntheticWorker:
        return self

    def begin(self, specs: object) -> None:
        for fill in self.layout.inventory.fills:
            self.layout.region(fill).fill_(self.layout.constant(fill))

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, t in tensors:
            for f in self._by_tensor.get(name, ()):
                live = self.layout.region(f)
                live.copy_(t[f.index].to(getattr(torch, f.dtype)).view(live.dtype))

    accept = finish = abandon = _nothing
