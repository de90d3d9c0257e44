"""Refits of a model that a layer-wise optimizer trains: from the owners of parameters, or from all ranks after a drain.

`LayerWiseTrainer` wraps the adapter of the framework (MegatronTrainer, TensorTrainer), which reads layouts. It decides
which fragments are offered as sources and what has to finish first. xfer.layerwise chooses the owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from xfer.errors import LayoutError, StaleWeights, Unsupported, XferError
from xfer.pending import left_alone
from xfer.trace.fragment import Fragment
from xfer.trace.slots import local
from xfer.trace.traced import Traced, TrainerLayout

if TYPE_CHECKING:
    from xfer.layerwise import LayerWise
    from xfer.participants.trainer import Source

    class Base(Source, Protocol):
        def finish_gathers(self) -> None:
            """Do the same as `drain` without the wait for the device, before further work on the current stream."""


Meet = Callable[[tuple[int, ...], str], None]


class LayerWiseTrainer:
    """Source adapter for `xfer.connect` over the framework's own adapter.

    Args:
        base: The framework's adapter.
        optimizer: The layer-wise optimizer over the same modules, built before.
        sources: "owners" or "all". With "owners", only its owner offers a trained parameter (per tensor-parallel part and
            pipeline stage). Nothing is gathered first, so call `nccl_xfer_refit` right after `step()`: the trainer's own
            gather runs at the same time, since both read only the owners' bytes. Every rank offers tensors without an owner
            (frozen parameters, buffers), which were written on the caller's stream or earlier. With "all", the gather is
            finished first and every rank is a source.

    Raises:
        Unsupported: With "owners", if `base` cannot finish gathers without a wait for the device. `read` raises it if one
            tensor spans parameters of several owners, or if tensors are computed while exporting (adapters) or by a callable
            of `base` (copies in another dtype): these need all their inputs on this rank and have no known owner.
    """

    def __init__(self, base: Base, optimizer: LayerWise, sources: Literal["owners", "all"] = "owners"):
        if sources not in ("owners", "all"):
            raise LayoutError(f'sources={sources!r}; "owners" and "all" exist')
        if sources == "owners" and not hasattr(base, "finish_gathers"):
            raise Unsupported(
                f"trainer {base.rank}: {type(base).__name__} can only wait for the whole device, and so for the gather",
                [
                    'give it finish_gathers(), which is its drain() without that wait, or use LayerWiseTrainer(…, sources="all")'
                ],
            )
        self.base, self.optimizer, self.sources = base, optimizer, sources
        self.rank, self.world = base.rank, base.world
        self.reads_together = base.reads_together
        self._kept: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.base.device

    def drain(self) -> None:
        """Wait until this rank's sources may be read.

        With "all", finish the gather, collectively, and wait for the device. With "owners", wait for the writes of the last step
        and for the current stream only, since the gather's copies may still run on the device.
        """
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
        """Return the base's layout; with "owners", without the fragments of parameters that other ranks own."""
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
        fragments = self._offered(traced, _Owners(layout.tensors, self.optimizer))
        used = {f.root for f in fragments}
        roots = tuple(r for r in layout.roots if r.name in used)
        self._kept = tuple(r.name for r in roots)
        tensors = {n: layout.tensors[n] for n in self._kept}
        return replace(layout, traced=replace(traced, fragments=fragments), roots=roots, tensors=tensors)

    def _offered(self, traced: Traced, owners: _Owners) -> tuple[Fragment, ...]:
        """The fragments that no other rank owns."""
        of = [owners.of(f) for f in traced.fragments]
        bad = dict.fromkeys(f.tensor for f, met in zip(traced.fragments, of, strict=True) if len(met) > 1)
        if bad:
            raise Unsupported(
                f"trainer {self.rank}: tensors that span parameters of several owners: no rank has the last step of all of them",
                [f'{name}: give one view per parameter, or use LayerWiseTrainer(…, sources="all")' for name in bad],
            )
        return tuple(f for f, met in zip(traced.fragments, of, strict=True) if all(mine for mine, _, _ in met))

    def _refuse_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # named_buffers(), since `buffers` of Megatron's DDP are not the module's buffers.
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

    def begin_check(self) -> Callable[[], bool] | None:
        return self.base.begin_check() if hasattr(self.base, "begin_check") else None

    def rebind(self) -> Mapping[str, torch.Tensor]:
        tensors = self.base.rebind()
        return tensors if self.sources == "all" else {n: tensors[n] for n in self._kept}

    def let_go(self) -> None:
        if hasattr(self.base, "let_go"):
            self.base.let_go()

    def fence_before(self, fence: Callable[[], object]) -> None:
        if hasattr(self.base, "fence_before"):
            self.base.fence_before(fence)

    def compute(self, meet: Meet = lambda ranks, digest: None) -> None:
        if not hasattr(self.base, "compute"):
            raise Unsupported(
                f"trainer {self.rank}: {type(self.base).__name__} reads tensors that are computed and has no compute()"
            )
        self.base.compute(meet)


class _Owners:
    """Owners of bytes, by address. Parameters share no bytes (`shares.overlapping`)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], optimizer: LayerWise):
        self._base = {name: t.data_ptr() for name, t in tensors.items()}
        spans = []
        for name, p in optimizer.named:
            if name in optimizer.owner and p.numel():
                reach = sum((n - 1) * s for n, s in zip(p.shape, p.stride())) + 1
                peers, owner = optimizer.owner[name]
                who = (optimizer.owns(name), id(peers), owner)
                spans.append((p.data_ptr(), p.data_ptr() + reach * p.element_size(), who))
        spans.sort(key=lambda span: span[0])
        self._starts, self._ends = np.array([[s, e] for s, e, _ in spans], np.int64).reshape(-1, 2).T
        self._who = [who for _, _, who in spans]

    def of(self, f: Fragment) -> set[tuple[bool, int, int]]:
        """Return the owners of a fragment's bytes as (whether it is this rank, its peers, the rank among them).

        The set is empty for bytes without an owner, which are equal on all ranks.
        """
        size = getattr(torch, f.dtype).itemsize
        first = self._base[f.root] + f.offset
        reach = [(e - 1) * s for e, s in zip(f.extent, f.strides)]
        low, high = first + sum(r for r in reach if r < 0), first + sum(r for r in reach if r > 0) + size
        met = self._between(np.array([low]), np.array([high]))
        if met and not self._in_one(low, high):  # an owner's bytes may lie between the fragment's elements
            starts, length = _runs(f, low, size)
            met = self._between(starts, starts + length)
        return met

    def _in_one(self, low: int, high: int) -> bool:
        """Whether all of these bytes lie in one parameter that has an owner."""
        i = int(np.searchsorted(self._ends, low, "right"))
        return bool(self._starts[i] <= low and high <= self._ends[i])

    def _between(self, starts: np.ndarray, ends: np.ndarray) -> set[tuple[bool, int, int]]:
        """Owners of bytes in any of these runs."""
        first, last = np.searchsorted(self._ends, starts, "right"), np.searchsorted(self._starts, ends, "left")
        pairs = np.unique(np.stack([first, last]), axis=1).T
        return {self._who[i] for a, b in pairs.tolist() for i in range(a, b)}


def _runs(f: Fragment, low: int, size: int) -> tuple[np.ndarray, int]:
    """The starts of a fragment's runs of bytes, and the length of each run."""
    starts, length = np.array([low], np.int64), size
    for stride, extent in sorted(zip(map(abs, f.strides), f.extent)):
        if len(starts) == 1 and stride == length:
            length *= extent
        elif extent > 1:
            starts = (starts[:, None] + stride * np.arange(extent)).ravel()
    return starts, length
