"""Refits of a model that a layer-wise optimizer trains: straight from the owners, or from everybody after a drain.

`LayerWiseTrainer` wraps the adapter of the framework (MegatronTrainer, TensorTrainer) and only decides which of the
fragments that it reads are offered as sources, and what has to be finished first. Layouts are read there, owners are
chosen in xfer.layerwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from xfer.errors import LayoutError, StaleWeights, Unsupported, XferError
from xfer.trace.fragment import Fragment
from xfer.trace.slots import local
from xfer.trace.traced import TrainerLayout
from xfer.trainers.pending import left_alone

if TYPE_CHECKING:
    from xfer.layerwise import LayerWiseOptimizer
    from xfer.session.trainer import Source

    class Base(Source, Protocol):
        def finish_gathers(self) -> None:
            """What `drain` does, without the wait for the device: for what the current stream does next."""


Meet = Callable[[tuple[int, ...], str], None]


class LayerWiseTrainer:
    """Source adapter for `xfer.connect`: `base` is the framework's own, `optimizer` the layer-wise one over the same
    modules, built before.

    sources: "owners" offers each trained parameter on its owner only (per tensor-parallel part and pipeline stage, as always).
    Nothing is gathered first, so call `nccl_xfer_refit` right after `step()`: bytes of other ranks are not read, and
    the trainer's own gather runs at the same time, since both only read what owners have. What has no owner (frozen
    parameters, buffers) is offered by every rank; it was written on the stream that the caller is on, or before. "all"
    finishes the gather first, and then every rank is a source.

    Unsupported with "owners" where `base` cannot finish gathers without a wait for the device, where tensors are computed while
    exporting (adapters), or by a callable of `base` (copies in another dtype): those need all their inputs here, and nothing
    says who owns them.
    """

    def __init__(self, base: Base, optimizer: LayerWiseOptimizer, sources: Literal["owners", "all"] = "owners"):
        if sources not in ("owners", "all"):
            raise LayoutError(f'sources={sources!r}; "owners" and "all" exist')
        if sources == "owners" and not hasattr(base, "finish_gathers"):
            raise Unsupported(
                f"trainer {base.rank}: {type(base).__name__} can only wait for the whole device, and so for the gather",
                ['give it finish_gathers(), which is its drain() without that wait, or use LayerWiseTrainer(…, sources="all")'],
            )
        self.base, self.optimizer, self.sources = base, optimizer, sources
        self.rank, self.world, self.device = base.rank, base.world, base.device
        self.reads_together = base.reads_together
        self._kept: tuple[str, ...] = ()

    def drain(self) -> None:
        """ "all": finish the gather, collectively, and wait for the device. "owners": wait for the last step's own writes, and for the
        current stream; never for the device, where the gather's copies may be under way."""
        if self.sources == "all":
            self.optimizer.drain(to_write=False)
            with left_alone(self.optimizer.hooks):
                return self.base.drain()
        with left_alone(self.optimizer.hooks):
            self.base.finish_gathers()
        try:
            self.optimizer.wait_for_owned()
        except XferError as e:
            raise StaleWeights(
                f"trainer {self.rank}: the last gather failed, so this trainer cannot go on from these weights",
                ["build the model and the optimizer anew and load a checkpoint", *e.violations],
            ) from e
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def read(self) -> TrainerLayout:
        """As the base's; with "owners" without the fragments of parameters that other ranks own."""
        layout = self.base.read()
        if self.sources == "all":
            return layout
        traced = layout.traced
        if traced.recipes or traced.gathers:
            raise Unsupported(
                f"trainer {self.rank}: tensors are computed while exporting, from parameters that are elsewhere",
                ['use LayerWiseTrainer(…, sources="all")'],
            )
        self._refuse_copies(layout.tensors)
        ours = _Others(layout.tensors, self.optimizer)
        fragments = tuple(f for f in traced.fragments if not ours.has(f))
        used = {f.root for f in fragments}
        roots = tuple(r for r in layout.roots if r.name in used)
        self._kept = tuple(r.name for r in roots)
        return TrainerLayout(replace(traced, fragments=fragments), roots, {n: layout.tensors[n] for n in self._kept})

    def _refuse_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # By name: `buffers` of Megatron's DDP are its own, not a module's.
        held = (t for m in self.optimizer.modules for _, t in (*m.named_parameters(), *m.named_buffers()))
        memory = {local(t).untyped_storage().data_ptr() for t in held}
        bad = [name for name, t in tensors.items() if t.untyped_storage().data_ptr() not in memory]
        if bad:
            raise Unsupported(
                f"trainer {self.rank}: tensors lie in no parameter or buffer of the optimizer's modules: nothing says who owns them",
                [
                    f'{name}: give the parameter itself or a view of it, or use LayerWiseTrainer(…, sources="all")'
                    for name in bad
                ],
            )

    def check(self) -> str:
        return self.base.check()

    def rebind(self) -> Mapping[str, torch.Tensor]:
        tensors = self.base.rebind()
        return tensors if self.sources == "all" else {n: tensors[n] for n in self._kept}

    def let_go(self) -> None:
        if hasattr(self.base, "let_go"):
            self.base.let_go()

    def compute(self, meet: Meet = lambda ranks, digest: None) -> None:
        self.base.compute(meet)


class _Others:
    """The bytes that other ranks own, by address."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], optimizer: LayerWiseOptimizer):
        self._base = {name: t.data_ptr() for name, t in tensors.items()}
        spans = []
        for name, p in optimizer.named:
            if name in optimizer.owner and not optimizer.owns(name) and p.numel():
                reach = sum((n - 1) * s for n, s in zip(p.shape, p.stride())) + 1
                spans.append((p.data_ptr(), p.data_ptr() + reach * p.element_size()))
        spans.sort()
        self._starts, self._ends = [s for s, _ in spans], [e for _, e in spans]

    def has(self, f: Fragment) -> bool:
        """Whether the fragment's first element lies in a parameter of another owner; the others lie there with it."""
        at = self._base[f.root] + f.offset
        i = bisect_right(self._starts, at) - 1
        return i >= 0 and at < self._ends[i]
