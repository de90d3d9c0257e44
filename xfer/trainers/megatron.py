"""The Megatron-Core side of a refit: which box of which checkpoint tensor lies where in this rank's live storages.

`MegatronTrainer` is what `xfer.connect` talks to on each trainer rank. It reads the layout by running Megatron-Bridge's own
export on meta twins (bridge_export.py, xfer.trace), checks cheaply that storages are where they were (slots.py), and finishes
parameter gathers in flight before a refit may read. It moves no bytes and copies no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from xfer.errors import LayoutError, RebindError, Unsupported, XferError
from xfer.trace.fragment import Fragment, Root, TensorSpec
from xfer.trace.traced import Traced
from xfer.trainers.bridge_export import CheckpointNames, Export, alone, owned_tasks, twin
from xfer.trainers.hf_index import read_headers
from xfer.trainers.slots import Binding, Slot, Slots, walk


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank holds.

    `traced.fragments` are relocated: `root` is a storage (named after the first slot in it, "chunk:parameter"), offsets count
    from the storage's first byte. `tensors` maps a root's name to a flat uint8 view of the whole live storage.
    """

    traced: Traced
    roots: tuple[Root, ...]
    tensors: Mapping[str, torch.Tensor]


class MegatronTrainer:
    """One trainer rank: `model_chunks` (one per virtual pipeline stage, wrapped or not) and the AutoBridge they belong to.

    `hf_names`: names of the checkpoint's tensors, needed only when the bridge was made from a config without a checkpoint.
    `probe`: let a parameter whose export cannot be followed symbolically be probed with the real conversion. Probing is
    collective: give it on every rank or on none.

    Canonical shapes and dtypes are the checkpoint's, read from its safetensors headers; without them, those of the exported
    tensors, cut to the config's vocab_size where the vocabulary is padded. A fragment carries the live parameter's own dtype:
    a trainer in fp32 for a bf16 checkpoint is a cast in the plan, and an fp32 router bias stays fp32.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        bridge,
        *,
        hf_names: Iterable[str] | None = None,
        probe: bool = False,
    ):
        self.chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        self.bridge = bridge
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = next(p.device for chunk in self.chunks for p in chunk.parameters())
        self._hf_names = None if hf_names is None else tuple(hf_names)
        self._probe = probe
        self._slots: Slots | None = None

    # -- before bytes move --------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Finish every parameter gather of this rank, then wait for the device. Collective over data-parallel groups when the
        distributed optimizer overlaps its gathers; call it after `optimizer.step()`, on all ranks.

        With `overlap_param_gather`, `step()` only updates this rank's shard: other shards arrive in pre-hooks of the next
        forward. Here each bucket group is brought to just the state that those hooks leave, so they find nothing to do: not
        dispatched yet -> dispatched and waited for; in flight -> waited for; done -> nothing (a second refit is free).
        Dispatching all before waiting for the first lets the gathers overlap each other.
        """
        groups = [g for chunk in self.chunks for g in _bucket_groups(chunk)]
        for group in groups:
            if not group.param_gather_dispatched:
                group.start_param_sync()
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- layout -------------------------------------------------------------------------------------------------------

    def read(self) -> Layout:
        """Trace this rank's half of the map, alone: no collective, no byte of a parameter (except with `probe`).

        Unsupported or LayoutError, listing every violation of this rank, before anything has moved.
        """
        self._refuse_unsupported()
        model_bridge = self.bridge._model_bridge
        names, index = self._checkpoint()
        slot_of = {id(slot.get()): slot for slot in walk(self.chunks)}
        with alone(), torch.no_grad():
            tasks = owned_tasks(model_bridge, self.chunks, names)
            self._refuse_unmapped(tasks, slot_of)
            slots = [slot_of[id(t.param_weight)] for t in tasks]
            twins = [twin(t.param_weight) for t in tasks]
            traced = self._trace(model_bridge, names, index, tasks, slots, twins)
        self._slots = Slots(self.chunks, slots)
        bound = self._slots.bind()
        return Layout(_relocate(traced, bound), bound.roots, bound.tensors)

    def check(self) -> str:
        """Is every storage where `read` or `rebind` found it? "same", "moved" (call `rebind`) or "changed" (call `read`).

        RebindError lists parameters without bytes, or on another device. Cheap enough to run while bytes move.
        """
        return self._slots.check() if self._slots else "changed"

    def rebind(self) -> Mapping[str, torch.Tensor]:
        """Root name -> flat uint8 view of the storage, at today's addresses. Only after `check` said "same" or "moved"."""
        if self._slots is None:
            raise RebindError("rebind() before read()")
        return self._slots.bind().tensors
