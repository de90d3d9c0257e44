"""Finds fragments by Megatron-Bridge's real conversion, for tasks whose export cannot be followed symbolically.

All ranks take part once, at connect. Parameters are replaced by digits of their own element numbers, Bridge exports them
by its real collectives, and the result is decoded. This is exact for conversions that move elements. Conversions that
compute are detected, since each digit travels with its complement, and refused. The cost is one real export of the
probed tasks per digit, in their own dtype and size.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist

from xfer.packed.agree import of_all_ranks
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.probe import NOT_MOVED, Digits, export_fragments
from xfer.trace.slots import Slot
from xfer.trainers.bridge_export import CheckpointNames, Cursor, forget_names

_positions = msgspec.msgpack.Decoder(list[int])
_sizes = msgspec.msgpack.Decoder(tuple[list[str], int])


@dataclass
class Probed:
    """The result of a probe: `fragments` relative to slots, `specs` as exported, one line in `errors` per tensor that is not
    moved."""

    fragments: list[Fragment] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)  # of this rank's probed tasks
    tasks: dict[str, object] = field(default_factory=dict)  # exported name -> the task that gave it


def probe_export(
    model_bridge,
    chunks: Sequence[torch.nn.Module],
    names: CheckpointNames,
    slot_of: Mapping[int, Slot],
    failing: Collection[str] | None,
    device: torch.device,
) -> Probed:
    """Probe tasks. Collective over the world.

    Task lists have the same positions on all ranks. A position is probed on all ranks if some rank fails there.

    Args:
        model_bridge: Bridge's converter.
        chunks: This rank's model.
        names: Names of the checkpoint's tensors.
        slot_of: Slots by id of the parameter.
        failing: Global parameter names that this rank cannot follow; None: all tasks of all ranks.
        device: A device from which the world's backend gathers.
    """
    forget_names(model_bridge)
    tasks = model_bridge.build_conversion_tasks(names, list(chunks))
    wanted = [i for i, t in enumerate(tasks) if t is not None and (failing is None or t.global_param_name in failing)]
    positions = sorted(set().union(*of_all_ranks(lambda: wanted, _positions, device)))
    out = Probed()
    if not positions:
        return out
    mine = {i: tasks[i].param_weight for i in positions if tasks[i] is not None and tasks[i].param_weight is not None}
    digits = _agree(list(mine.values()), len(positions), device)
    base = dist.get_rank() * len(positions)
    roots = {}
    for j, i in enumerate(positions):
        if i in mine:
            slot = slot_of[id(mine[i])]
            out.slots.append(slot)
            roots[base + j] = (slot.name, _dtype(mine[i]))

    passes: dict[str, list[torch.Tensor]] = defaultdict(list)
    numbered = {i: digits.digits(base + j, mine[i].shape, mine[i].dtype) for j, i in enumerate(positions) if i in mine}
    for k in range(digits.passes):
        batch = Cursor(
            dataclasses.replace(tasks[i], param_weight=numbered[i][k].to(mine[i].device) if i in mine else None)
            for i in positions
            if tasks[i] is not None
        )
        stream = model_bridge.stream_weights_megatron_to_hf(
            list(chunks), names, cpu=False, show_progress=False, conversion_tasks=batch
        )
        for name, tensor in stream:
            passes[name].append(tensor.detach().cpu().clone())  # what Bridge yields may be the very input
            out.tasks[name] = batch.running
    for name, tensors in passes.items():
        spec = TensorSpec(name, tuple(tensors[0].shape), _dtype(tensors[0]))
        ids = digits.recombine(tensors)
        lost = int((ids == NOT_MOVED).sum())
        if lost:
            out.errors.append(f"{name}: {lost} elements are computed or rounded on their way, not moved")
            continue
        found = export_fragments(spec, ids, roots)
        if found:
            out.specs.append(spec)
            out.fragments += found
    return out


def _agree(weights: Sequence[torch.Tensor], positions: int, device: torch.device) -> Digits:
    """Return digits that fit the parameters of all ranks, equal on all of them."""
    kinds = sorted({_dtype(w) for w in weights})
    largest = max((w.numel() for w in weights), default=1)
    every = of_all_ranks(lambda: (kinds, largest), _sizes, device)
    specs = [TensorSpec("", (largest,), kind) for kinds, largest in every for kind in kinds]
    fit = Digits.fit(specs)
    need = fit.offset_bits + (dist.get_world_size() * positions).bit_length()
    return dataclasses.replace(fit, count=-(-need // fit.bits))


def _dtype(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
