"""Megatron-Core trainers of the packed route whose export only moves bytes.

A trace of Megatron-Bridge's export gives, for every exported tensor, the place of its elements in this rank's storages,
or shows that they are computed. If no rank computes any, messages are assembled from these places (packed/tensors.py)
and a refit does not run Bridge. If one rank does (merged adapters, conversions of values), Bridge exports on all ranks
(bridge_stream.py). The tensors are the same, bit for bit. megatron.py has the tracing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from xfer.errors import LayoutError, RebindError, Unsupported
from xfer.packed import agree
from xfer.packed.buffer import Buffers
from xfer.packed.plan import BucketPlan, GatherGroup, TaskSize
from xfer.packed.source import Assembly
from xfer.packed.tensors import TensorStream
from xfer.packed.wire import PackedMessage
from xfer.trace.collectives import objects_stay_home
from xfer.trace.fragment import TensorSpec
from xfer.trace.slots import Slots, refuse_elsewhere, walk
from xfer.trace.traced import Traced, TrainerLayout
from xfer.trainers.bridge_export import factor_tasks, model_bridge_of, owned_adapters, owned_tasks
from xfer.trainers.bridge_stream import BridgeStream
from xfer.trainers.megatron import MegatronTrainer, _canonical, _relocate, _trained


class TracedParameters:
    """One rank's parameters as Bridge exports them, in the exported dtypes; see packed.tensors.FragmentSource.

    Attributes:
        state: Result of the next `check`. The owner of this object sets it.
    """

    def __init__(self, trainer: MegatronTrainer):
        self.trainer, self.state = trainer, "changed"
        self.rank, self.world, self.device = trainer.rank, trainer.world, trainer.device
        self._slots: Slots | None = None

    def drain(self) -> None:
        self.trainer.drain()

    def read(self) -> TrainerLayout:
        """Read the layout. Raises LayoutError or Unsupported that names tensors if the export does more than move bytes."""
        t = self.trainer
        bridge, (names, _) = model_bridge_of(t.bridge), t._checkpoint()
        slot_of = {id(slot.get()): slot for slot in walk(t.chunks)}
        with torch.no_grad(), objects_stay_home():
            tasks = owned_tasks(bridge, t.chunks, names)
            adapters = owned_adapters(bridge, t.chunks)
            factors = factor_tasks(adapters)
            seen = t._follow(bridge, names, tasks, adapters, slot_of)
        traced = _canonical(seen.result(self.rank), {}, t._rows(seen.vocab), self.rank)
        _refuse_computed(traced)
        self._slots = Slots(t.chunks, [slot_of[id(x.param_weight)] for x in (*tasks, *factors)])
        bound = self._slots.bind()
        try:
            refuse_elsewhere(self._slots.slots, self.device, f"trainer {self.rank}")
        except RebindError as e:  # Bridge's own export may still work
            raise LayoutError(e.message, e.violations) from e
        self.state = "same"
        trained = _trained(traced, self._slots.slots)
        return TrainerLayout(_relocate(traced, bound), bound.roots, bound.tensors, trained)

    def check(self) -> str:
        return self.state

    def rebind(self) -> Mapping[str, torch.Tensor]:
        if self._slots is None:
            raise RebindError("rebind() before read()")
        self.state = "same"
        return self._slots.bind().tensors


def _refuse_computed(traced: Traced) -> None:
    dtypes = {s.name: s.dtype for s in traced.specs}
    bad = [f"{r.target}: is computed ({', '.join(r.ops)})" for r in traced.recipes]
    bad += [f"{c.tensor}: is converted, {' to '.join(c.dtypes)}" for c in traced.casts]
    bad += sorted({f"{f.tensor}: is held as {f.dtype}" for f in traced.fragments if f.dtype != dtypes[f.tensor]})
    if bad:
        raise Unsupported("exported tensors that are more than bytes of parameters", bad)


class TracedStream:
    """A stream that assembles messages from storages if all ranks can; see packed.source.WritingStream.

    Attributes:
        why: The reason why this rank needs Bridge's export; "" if it does not.
        writes: Whether messages are assembled from storages, since the last `build`. Equal on all ranks.
    """

    whole_everywhere = True
    """Without a session every rank gets whole tensors, as from Bridge's own export."""

    def __init__(self, trainer: MegatronTrainer):
        self.export, self._source = BridgeStream(trainer), TracedParameters(trainer)
        self.parts = TensorStream(self._source)
        self.rank, self.world, self.device = trainer.rank, trainer.world, trainer.device
        self.why, self.writes = "nothing was read yet", False

    @property
    def pulls(self) -> bool:
        return self.parts.pulls

    @property
    def trained(self) -> frozenset[str]:
        return self.parts.trained

    def drain(self) -> None:
        self.export.drain()

    def read(self) -> tuple[TensorSpec, ...]:
        specs, self.why = self.export.read(), ""
        try:
            traced = self.parts.read()
        except (LayoutError, Unsupported) as e:
            self.why = f"{e}"
            self.parts.forget()
            return specs
        if some := sorted(s.name for s in {*traced} - {*specs}):
            self.why = f"the trace and the export have different tensors: {some[:8]}"
        self.parts.expect(specs)  # another rank must hold the tensors of which this rank holds nothing (experts)
        return specs

    def check(self) -> str:
        """Return the state of the export, whose parameters are the same. `parts` has tensors to check only if it writes."""
        state = self.export.check()
        if state == "changed" or self.why:
            return state
        if not self.writes:
            if state == "moved":
                self.parts.forget()
            return state
        self._source.state = state
        return self.parts.check()

    def forget(self) -> None:
        self.parts.forget()

    # ---- with all ranks

    def build(self, assembly: Assembly) -> tuple[TaskSize, ...]:
        self.writes = not agree.any_rank(bool(self.why), b"", self.device)
        if self.writes:
            try:
                return self.parts.build(assembly)
            except LayoutError:  # on all ranks: together they do not hold every tensor whole
                self.writes = False
        self.parts.forget()
        return self.export.build(assembly)

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor | None]]:
        return (self.parts if self.writes else self.export).tensors(group)

    def prepare(self, plan: BucketPlan, buffers: Buffers | None) -> None:
        self.parts.prepare(plan, buffers)

    def place(self, message: PackedMessage, data: torch.Tensor | None) -> None:
        self.parts.place(message, data)
