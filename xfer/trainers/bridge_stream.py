"""Megatron-Core trainers of the packed route: Megatron-Bridge's own export, a bucket of conversion tasks at a time.

Bridge's tasks and mappings keep parameter objects, dtypes and shapes of all pipeline stages, and nothing clears them.
After a framework replaces a parameter, changes a dtype or offloads, kept tasks export wrong weights unnoticed. They are
therefore kept only while nothing has changed: `check` compares every parameter object, address, dtype, shape, stride, the
module tree and Megatron's process groups with those at `build`, which makes new tasks on all ranks.

The tensors of each task are read on twins without bytes (bridge_export.py), so buckets can be planned before an export.
Not here: the tasks of a bucket (packed/plan.py), the copying (packed/buffer.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from operator import is_
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

from xfer.errors import LayoutError, PlanMismatch, RebindError, Unsupported
from xfer.kernels.cuda_driver import unmapped
from xfer.packed import agree
from xfer.packed.buffer import dtype_name
from xfer.packed.lockstep import Lockstep
from xfer.packed.plan import GatherGroup, TaskSize, units
from xfer.packed.source import Assembly
from xfer.packed.wire import nbytes_of
from xfer.trace.collectives import objects_stay_home
from xfer.trace.export import ExportWatch, twin
from xfer.trace.fragment import TensorSpec
from xfer.trace.slots import Slot, Slots, walk
from xfer.trainers.block_scaled import is_scaled
from xfer.trainers.bridge_export import (
    BridgeExport,
    ModelBridge,
    Scales,
    adapter_tasks,
    factor_tasks,
    forget_names,
    model_bridge_of,
    owned_adapters,
    owned_tasks,
    process_groups,
    with_factors,
)
from xfer.trainers.megatron import MegatronTrainer, _Followed

_Row = tuple[str, list[int], str, bool]
"""A tensor: name, shape, dtype, and whether Bridge may give more rows of it, which Megatron has padded."""
_Task = tuple[int, list[_Row], str | None]
"""Number of a task, its tensors and its key."""
_tasks = msgspec.msgpack.Decoder(list[_Task])


class BridgeStream:
    """A stream of the tensors that Bridge exports, whole on every rank; see packed.source.WeightStream.

    The collectives of a group's tasks are run as a few large ones (lockstep.py). Bridge itself runs them one by one.
    """

    def __init__(self, trainer: MegatronTrainer):
        self.trainer = trainer
        self.rank, self.world, self.device = trainer.rank, trainer.world, trainer.device
        self._slots: Slots | None = None
        self._scales = Scales()
        self._exports: dict[str, tuple[TensorSpec, ...]] = {}  # by the task's global parameter name, of owned tasks
        self._keys: dict[str, str] = {}  # by the same name: tasks with equal ones are exported in one call
        self._rows: dict[str, int] = {}  # of tensors whose first dim is the vocabulary, padded by Megatron
        self._model_bridge: ModelBridge | None = None
        self._tasks: list = []
        self._adapters: dict[str, list] = {}
        self._groups: list[object] = []  # that mappings of these tasks hold
        self.collectives = 0  # of the framework, in the last group

    def drain(self) -> None:
        self.trainer.drain()

    # ---- what is exported, by this rank alone

    def read(self) -> tuple[TensorSpec, ...]:
        t = self.trainer
        t._refuse_unsupported()
        bridge, (names, _) = model_bridge_of(t.bridge), t._checkpoint()
        slot_of = {id(slot.get()): slot for slot in walk(t.chunks)}
        _refuse_empty(slot_of.values())
        _refuse_fp8(slot_of.values())
        with torch.no_grad(), objects_stay_home():
            tasks = owned_tasks(bridge, t.chunks, names)
            adapters = owned_adapters(bridge, t.chunks)
            factors = factor_tasks(adapters)
            t._refuse_unmapped([*tasks, *factors], slot_of)
            twins = [twin(x.param_weight) for x in (*tasks, *factors)]
            watch = ExportWatch(
                {slot_of[id(x.param_weight)].name: w for x, w in zip((*tasks, *factors), twins, strict=True)}
            )
            theirs = with_factors(adapters, twins[len(tasks) :])
            export = BridgeExport(bridge, t.chunks, names, tasks, twins[: len(tasks)], theirs)
            found: dict[str, dict[str, TensorSpec]] = {}
            seen, merged = _Followed(t.chunks), _Merged(watch, tasks, slot_of)
            with watch:
                for task, name, tensor in export:
                    merged.look(task, name, tensor)
                    if seen.admits(task, name):
                        spec = TensorSpec(name, tuple(tensor.shape), dtype_name(tensor))
                        found.setdefault(task.global_param_name, {})[name] = spec
        if export.failed:
            why = [f"{name}: {what}" for name, what in sorted(export.failed.items())]
            raise LayoutError(f"trainer {self.rank}: what Bridge exports for these cannot be told without bytes", why)
        self._keys = merged.keys()
        self._rows = t._rows(seen.vocab)
        self._exports = {task: tuple(self._cut(s) for s in specs.values()) for task, specs in found.items()}
        self._slots = Slots(t.chunks, [slot_of[id(x.param_weight)] for x in (*tasks, *factors)], unmapped=unmapped)
        self._slots.bind()
        self._scales = Scales(t.chunks, adapters)
        return tuple(s for specs in self._exports.values() for s in specs)

    def _cut(self, spec: TensorSpec) -> TensorSpec:
        rows = self._rows.get(spec.name)
        return spec if rows is None else TensorSpec(spec.name, (min(rows, spec.shape[0]), *spec.shape[1:]), spec.dtype)

    def check(self) -> str:
        if self._slots is None:
            return "changed"
        _refuse_empty(self._slots.slots)
        # May raise, so it comes before a move is noted here: the next check would return "same".
        now = process_groups(self.trainer.chunks) if self._groups else []
        state = self._slots.check()
        if state == "moved":
            self._slots.bind()  # from here on this is what later checks compare with
        groups, self._groups = self._groups, now
        if state == "same" and not all(map(is_, groups, now)):
            state = "moved"  # old ones may have been destroyed, and kept tasks would fail in every refit
        return state if self._scales.hold() else "changed"

    # ---- with all ranks

    def build(self, assembly: Assembly) -> tuple[TaskSize, ...]:
        return self._merged(agree.of_all_ranks(self._rebuilt, _tasks, self.device))

    def _rebuilt(self) -> list[_Task]:
        """Build new tasks and return this rank's with their tensors. Collective: Bridge gathers the names of all stages."""
        t = self.trainer
        bridge, (names, _) = model_bridge_of(t.bridge), t._checkpoint()
        forget_names(bridge)
        self._groups = process_groups(t.chunks)  # before mappings read them, so that a later change is noticed
        self._tasks = bridge.build_conversion_tasks(names, list(t.chunks))
        self._adapters = adapter_tasks(bridge, t.chunks)
        self._model_bridge, self._names = bridge, names
        mine: list[_Task] = []
        for position, task in enumerate(self._tasks):
            if task is not None and task.param_weight is not None:
                specs = self._exports.get(task.global_param_name, ())
                rows = [(s.name, list(s.shape), s.dtype, s.name in self._rows) for s in specs]
                mine.append((position, rows, _key(task) or self._keys.get(task.global_param_name)))
        return mine

    def _merged(self, said: list[list[_Task]]) -> tuple[TaskSize, ...]:
        """Merge the tasks of all ranks. Raises PlanMismatch on all ranks if they differ."""
        tasks: dict[int, tuple[int, list[_Row], str | None]] = {}
        bad: list[str] = []
        for rank, theirs in enumerate(said):
            for position, exported, key in theirs:
                first, known, _ = tasks.setdefault(position, (rank, exported, key))
                if known != exported:
                    bad.append(f"task {position}: trainer {first} exports {known}, trainer {rank} exports {exported}")
        if bad:
            raise PlanMismatch("trainer ranks would export different tensors for the same task", bad)
        out = tuple(
            TaskSize(position, tuple(TensorSpec(n, tuple(shape), dtype) for n, shape, dtype, _ in exported), key)
            for position, (_, exported, key) in sorted(tasks.items())
        )
        self._wanted = {n: shape[0] for _, exported, _ in tasks.values() for n, shape, _, padded in exported if padded}
        self._by_position = {task.position: task for task in out}
        return out

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        known = self._adapters
        with mock.patch.object(self._model_bridge, "build_adapter_conversion_tasks", lambda _: known, create=True):
            names = {s.name for s in group.tensors}
            for name, tensor in self._in_lockstep(group) if dist.is_initialized() else self._exported(group.positions):
                if name not in names:
                    continue  # a tied head, which is the embedding a second time
                rows = self._wanted.get(name)
                yield name, tensor[:rows] if rows is not None and tensor.shape[0] > rows else tensor

    def _in_lockstep(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor]]:
        """Export in rounds of a bounded size, since all tensors of a round exist at once beside their buffers."""
        self.collectives = 0
        for some in _rounds(self._by_position[i] for i in group.positions):
            lockstep = Lockstep(self.device)
            found = lockstep.run([partial(self._unit, unit) for unit in some])
            self.collectives += lockstep.collectives
            for tensors in found:
                yield from tensors

    def _unit(self, tasks: list[TaskSize]) -> list[tuple[str, torch.Tensor]]:
        return list(self._exported(task.position for task in tasks))

    def _exported(self, positions: Iterable[int]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._model_bridge is None:
            raise RebindError("tensors() before build()")
        stream = self._model_bridge.stream_weights_megatron_to_hf(
            list(self.trainer.chunks),
            self._names,
            cpu=False,
            show_progress=False,
            conversion_tasks=[self._tasks[i] for i in positions],
        )
        return ((name, tensor.detach()) for name, tensor in stream)


def _refuse_empty(slots: Iterable[Slot]) -> None:
    """Raise RebindError that names parameters without bytes, which an offloader has emptied.

    Bridge would export them as tensors without elements on their own stage, and as uninitialised memory on all others.
    """
    bad = [
        f"{slot.name}: has no bytes (offloaded?): bring the parameters back before the refit"
        for slot in slots
        if (t := slot.get()) is not None and not t.numel()
    ]
    if bad:
        raise RebindError("parameters cannot be read where they were", bad)


def _refuse_fp8(slots: Iterable[Slot]) -> None:
    """Raise Unsupported that names parameters in FP8: messages have whole tensors in the checkpoint's dtype."""
    if bad := [f"{slot.name}: is a {type(slot.tensor()).__name__}" for slot in slots if is_scaled(slot.get())]:
        why = "the packed route does not read weights in FP8; take route=xfer.Direct() and engines in block FP8, or train in bf16"
        raise Unsupported(why, bad)


ROUND_BYTES = 64 << 20


def _rounds(tasks: Iterable[TaskSize]) -> Iterator[list[list[TaskSize]]]:
    """Group units of tasks by rounds of about ROUND_BYTES."""
    some: list[list[TaskSize]] = []
    used = 0
    for unit in units(tasks):
        size = sum(nbytes_of(t) for task in unit for t in task.tensors)
        if some and used + size > ROUND_BYTES:
            yield some
            some, used = [], 0
        some.append(unit)
        used += size
    if some:
        yield some


class _Merged:
    """Finds tasks whose parameters are exported in one tensor, such as experts that the checkpoint fuses.

    Bridge yields such a tensor when it has seen the last of its tasks. The export is followed only after a task that yielded
    nothing, so reading stays cheap for all other models.
    """

    def __init__(self, watch: ExportWatch, tasks: list, slot_of: dict[int, Slot]):
        self._watch = watch
        self._tasks = {slot_of[id(t.param_weight)].name: t.global_param_name for t in tasks}
        self._order = {t.global_param_name: i for i, t in enumerate(tasks)}
        self._gave: set[str] = set()

    def look(self, task, name: str, tensor: torch.Tensor) -> None:
        self._gave.add(task.global_param_name)
        if len(self._gave) <= self._order[task.global_param_name]:
            self._watch.note_export(name, tensor)

    def keys(self) -> dict[str, str]:
        """Return the common key of such tasks by global parameter name. Other tasks have none."""
        traced = self._watch.result(strict=False)
        of: dict[str, set[str]] = {}
        for f in traced.fragments:
            of.setdefault(f.tensor, set()).add(self._tasks.get(f.root, ""))
        for recipe in traced.recipes:
            of.setdefault(recipe.target, set()).update(self._tasks.get(s, "") for s in recipe.sources)
        return {task: name for name, some in of.items() if len(some) > 1 for task in some if task}


def _key(task) -> str | None:
    """The key of tasks that Bridge must export in one call: it yields fused experts after the last of their tasks."""
    if not getattr(task.mapping, "is_grouped_export", False):
        return None
    return str(getattr(task.mapping, "group_key", task.global_param_name))
