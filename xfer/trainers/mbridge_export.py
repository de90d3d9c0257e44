"""Traces the export of mbridge (ISEEKYAN/mbridge, which verl and slime use by default) for one rank alone, without peers.

`Bridge.export_weights` walks over the parameters of all pipeline stages, broadcasts each from its stage, gathers it over EP and TP, and
yields checkpoint tensors. Object collectives are answered with this rank's objects and tensor collectives symbolically
(xfer.trace.collectives), so only this rank's parameters are walked. mbridge reads parameters from the model, so it gets a view of
the model whose parameters are meta twins. Written for mbridge 0.15.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from xfer.errors import LayoutError, XferError
from xfer.trace.collectives import objects_stay_home
from xfer.trace.export import ExportWatch, twin
from xfer.trace.fragment import TensorSpec
from xfer.trace.slots import Slot
from xfer.trace.traced import Traced
from xfer.trainers.bridge_export import read_headers


def is_mbridge(bridge: object) -> bool:
    """Whether this is a bridge of mbridge, also one of a family that the user has registered there."""
    return any(c.__module__.split(".")[0] == "mbridge" for c in type(bridge).__mro__)


class _OnTwins:
    """A model as mbridge's export reads it: its parameters are twins, everything else is its own."""

    def __init__(self, model: torch.nn.Module, twins: Mapping[int, torch.Tensor]):
        self._model, self._twins = model, twins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._twins[id(p)]) for name, p in self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        return {name: self._twins.get(id(t), t) for name, t in self._model.state_dict(keep_vars=True).items()}


def follow(bridge: Any, chunks: Sequence[torch.nn.Module], slots: Iterable[Slot], rank: int) -> Traced:
    """Return the trace of this rank's part of the export, by slot.

    Args:
        bridge: mbridge's bridge of the model.
        chunks: The model's chunks, one per virtual stage.
        slots: Their parameters and buffers.
        rank: Number of this trainer, for errors.

    Raises:
        LayoutError: The export raises, cannot be followed, computes a tensor, or leaves a trained parameter out.
    """
    from megatron.core.utils import unwrap_model

    slots = list(slots)
    twins = {id(slot.get()): twin(slot.tensor()) for slot in slots}
    trained = {slot.name for slot in slots if slot.tensor().requires_grad}
    watch = ExportWatch({slot.name: twins[id(slot.get())] for slot in slots})
    views = [_OnTwins(unwrap_model(chunk), twins) for chunk in chunks]
    with objects_stay_home(), watch:
        try:
            for name, tensor in bridge.export_weights(views):
                watch.note_export(name, tensor)
        except XferError:
            raise
        except Exception as e:  # mbridge raises anything: NotImplementedError for a parameter that it does not know
            raise LayoutError(f"trainer {rank}: mbridge cannot export this model", [f"{type(e).__name__}: {e}"]) from e
    traced = watch.result()
    bad = [f"{r.target}: is computed ({', '.join(r.ops)})" for r in traced.recipes]
    bad += [f"{name}: no exported tensor holds it" for name in traced.unread if name in trained]
    if bad:
        raise LayoutError(f"trainer {rank}: mbridge's export of these cannot be followed", bad)
    return traced


def checkpoint_specs(bridge: Any) -> dict[str, TensorSpec]:
    """Return the specs of the checkpoint from which the bridge has loaded, by its headers; none if it has loaded nothing."""
    source = bridge.safetensor_io
    return read_headers(Path(source.hf_dir), source.index) if source is not None else {}
