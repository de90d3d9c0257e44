"""The small world of world.py on the packed route: trainers that export whole tensors, engines that load them. Ranks are threads of one
process, so the trainers' collective is a barrier of threads. `Knobs` lets a test break one rank or one worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from tests.support.world import ToyEngine, ToySource, ToyTaker, World
from xfer.engines.vllm_loader import PackedModel
from xfer.errors import LayoutError
from xfer.packed import agree
from xfer.packed.buffer import dtype_name
from xfer.packed.plan import GatherGroup, TaskSize
from xfer.packed.source import PackedSource
from xfer.routes import Packed
from xfer.trace.fragment import TensorSpec

DTYPES = {"norm": torch.float32}
"""Of tensors that are not bf16."""


class Meeting:
    """`agree.largest` for ranks that are threads."""

    def __init__(self, ranks: int):
        self._barrier, self._lock, self._said = threading.Barrier(ranks, timeout=60), threading.Lock(), []
        self.rounds = 0

    def largest(self, numbers: list[int], device) -> list[int]:
        with self._lock:
            self._said.append(numbers)
        self._barrier.wait()
        out = [max(column) for column in zip(*self._said, strict=True)]
        if self._barrier.wait() == 0:
            self._said, self.rounds = [], self.rounds + 1
        self._barrier.wait()
        return out


@dataclass
class Knobs:
    """`exported(name, tensor)`: what the stream gives instead. `loaded(worker, name, tensor)`: called before a worker loads it."""

    exported: Callable | None = None
    loaded: Callable | None = None


class ToyStream:
    """Rank's half; see xfer.packed.source.WeightStream. Every tensor is exported whole on all ranks, as Bridge does."""

    def __init__(self, source: ToySource, knobs: Knobs):
        self.source, self.knobs = source, knobs
        self.rank, self.world, self.device = source.rank, source.world, source.device
        self.version, self.state, self.builds = 0, "same", 0

    def drain(self) -> None:
        self.source.drain()

    def read(self) -> tuple[TensorSpec, ...]:
        kinds = {n: dtype_name(torch.empty(0, dtype=DTYPES.get(n, torch.bfloat16))) for n in self.source.shapes}
        return tuple(TensorSpec(n, tuple(s), kinds[n]) for n, s in self.source.shapes.items())

    def check(self) -> str:
        state, self.state = self.state, "same"
        return state

    def build(self, assembly) -> tuple[TaskSize, ...]:
        self.builds += 1
        return tuple(TaskSize(i, (s,)) for i, s in enumerate(self.read()))

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in group.tensors:
            t = ToySource.value(spec.name, spec.shape, self.version).to(getattr(torch, spec.dtype))
            yield self.knobs.exported(spec.name, t) if self.knobs.exported else (spec.name, t)


class PackedTaker(ToyTaker):
    """Loads whole tensors into its columns, by the real `PackedModel.load` around `load_weights`."""

    def __init__(self, rank: int, world: int, shapes, knobs: Knobs):
        super().__init__(rank, world, shapes)
        self.knobs, self.given = knobs, {}
        model = PackedModel(SimpleNamespace(weights=self, model=self))
        model._dropped, model._inside = set(), contextlib.nullcontext  # without vLLM's configuration
        self.load = model.load

    def loader(self) -> PackedTaker:
        return self

    def accept(self, catalog) -> None:
        wrong = sorted({s.name for s in catalog.specs} ^ self.shapes.keys())
        if wrong:
            raise LayoutError("families that do not match", wrong)

    def check(self, quick: bool = False) -> str:
        return "same"

    def begin(self, specs) -> None:
        self.given = {}

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            if self.knobs.loaded:
                self.knobs.loaded(self.rank, name, tensor)
            self.given[name] = tensor.dtype
            if tensor.dim() > 1:
                c = self.shapes[name][1] // self.world
                part = tensor[:, self.rank * c : (self.rank + 1) * c]
                self.live[name][: part.shape[0]].copy_(part)
                if name == "embed":
                    self.live[name][part.shape[0] :].zero_()
            else:
                self.live[name].copy_(tensor)
            tensor.zero_()  # as some loaders do; no other worker may lose its bytes by it

    def finish(self) -> None:
        self.spare.copy_(self.live["norm"])
        self.live["norm"].fill_(float("nan"))

    def abandon(self) -> None:
        self.engage_lock()


@dataclass
class PackedWorld(World):
    """`limit`: bytes of a bucket."""

    limit: int = 1024
    colocated: bool = False
    knobs: Knobs = field(default_factory=Knobs)

    def connect(self) -> PackedWorld:
        self.meeting = Meeting(self.trainers)
        self._real = agree.largest, agree.alone
        agree.largest, agree.alone = self.meeting.largest, lambda: self.trainers == 1
        self.toys = [ToySource(i, self.trainers, self.shapes) for i in range(self.trainers)]
        self.streams = [ToyStream(s, self.knobs) for s in self.toys]
        self.sources = [PackedSource(s, self.limit, self.colocated) for s in self.streams]
        self.engines = [ToyEngine(self.workers, self.shapes) for _ in range(self.replicas)]
        for e in self.engines:
            e.takers = [PackedTaker(i, self.workers, self.shapes, self.knobs) for i in range(self.workers)]
        return super().connect()

    def route(self, i: int) -> Packed:
        return Packed(bucket_bytes=self.limit, colocated=self.sources[i].colocated)

    def refit(self, weights: int | None = None, ranks=None, **kw) -> list:
        if weights is not None:
            for s in self.streams:
                s.version = weights
        return super().refit(None, ranks, **kw)

    def close(self) -> None:
        super().close()
        agree.largest, agree.alone = self._real
