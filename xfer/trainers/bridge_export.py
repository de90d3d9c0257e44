"""Megatron-Bridge's own export, run for one rank alone: conversion tasks built anew, answered without any peer.

Bridge exports a parameter by collectives: objects over PP (types, specs, QKV's config), a broadcast over PP, gathers
over TP and EP. A rank that traces only the parameters it owns needs none of them: it is the PP source of each, and
knows all objects. So object collectives are answered with what this rank knows, tensor collectives symbolically (both
in xfer.trace.collectives). Which fragments follow from an export: megatron.py. What its operators mean: xfer.trace.

Adapters (LoRA) are merged by Bridge while it exports: it has tasks of its own for their factors, which it builds inside
the export from the live modules. Here those tasks too are given twins.

Tasks are never kept. Bridge's tasks hold Parameter objects and PP caches that go stale without a word when a framework
replaces a parameter or a dtype; new tasks cost a fraction of a second, and only when the layout is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from unittest import mock

import torch

from xfer.errors import LayoutError, RebindError


class CheckpointNames(dict):
    """Stands for the checkpoint: all that Bridge asks of it while exporting is the names and the config.

    A dict (the values mean nothing) because Bridge asks `in` once per parameter, which on its own list takes seconds.
    """

    def __init__(self, names: Iterable[str], config: object):
        super().__init__(dict.fromkeys(names))
        self.source = self.state = self
        self.config = config

    def get_all_keys(self) -> CheckpointNames:
        return self


def model_bridge_of(bridge):
    """The converter of an AutoBridge's family, new at each call, given the config as Bridge's own dispatch gives it."""
    made = bridge._model_bridge
    made.hf_config = hf_config(bridge)
    return made


def hf_config(bridge):
    """What the AutoBridge was made from, or the config in it."""
    return getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)


def process_groups() -> list[object]:
    """What Bridge's mappings take from Megatron when they are made, and what a trace of an export has of them. RebindError while there
    are none: frameworks destroy them to free what NCCL holds."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        raise RebindError(
            "Megatron's process groups are not there", ["initialize_model_parallel() on all ranks before the refit"]
        )
    return [
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    ]


def owned_tasks(model_bridge, chunks: Sequence[torch.nn.Module], names: CheckpointNames) -> list:
    """New conversion tasks of the parameters and persistent buffers that this rank holds. Call inside
    `xfer.trace.collectives.objects_stay_home()`."""
    forget_names(model_bridge)
    try:
        tasks = model_bridge.build_conversion_tasks(names, list(chunks))
        return [t for t in tasks if t is not None and t.param_weight is not None]
    finally:
        forget_names(model_bridge)  # it now knows this rank's names only


def forget_names(model_bridge) -> None:
    """Bridge keeps the names of parameters and adapters of all stages for as long as it lives."""
    for cache in ("_cached_param_names", "_cached_param_objects_adapter"):
        vars(model_bridge).pop(cache, None)


AdapterTasks = dict[str, list]
"""Bridge's adapter tasks by the name of the module that they belong to."""


def owned_adapters(model_bridge, chunks: Sequence[torch.nn.Module]) -> AdapterTasks:
    """New tasks of the adapters that this rank holds; none where the model has none. Call as `owned_tasks`."""
    if not hasattr(model_bridge, "build_adapter_conversion_tasks"):  # Bridge before it knew adapters
        return {}
    forget_names(model_bridge)
    try:
        return model_bridge.build_adapter_conversion_tasks(list(chunks))
    finally:
        forget_names(model_bridge)


def factor_tasks(adapters: AdapterTasks) -> list:
    """The conversion tasks of the adapters' factors, in a fixed order."""
    return [t for tasks in adapters.values() for a in tasks for t in (a.linear_in_task, a.linear_out_task)]


class Scales:
    """The two numbers of each adapter of this rank by which Bridge scales a merge, as they were when tasks were built: tasks and
    recipes have them as constants."""

    def __init__(self, chunks: Sequence[torch.nn.Module] = (), adapters: AdapterTasks | None = None):
        inner = {id(t.megatron_module) for t in factor_tasks(adapters or {})}
        modules = (m for chunk in chunks for m in chunk.modules()) if inner else ()
        outer = {id(m): m for m in modules if any(id(c) in inner for c in m.children())}
        self._was = [(m, m.alpha, m.dim) for m in outer.values()]

    def hold(self) -> bool:
        return all((m.alpha, m.dim) == (alpha, dim) for m, alpha, dim in self._was)


def with_factors(adapters: AdapterTasks, weights: Iterable[torch.Tensor]) -> AdapterTasks:
    """The same tasks with other weights, given in the order of `factor_tasks`."""
    given = iter(weights)

    def task(t):
        return dataclasses.replace(t, param_weight=next(given))

    return {
        name: [
            dataclasses.replace(a, linear_in_task=task(a.linear_in_task), linear_out_task=task(a.linear_out_task))
            for a in tasks
        ]
        for name, tasks in adapters.items()
    }


class Cursor(list):
    """A task list that remembers which of its tasks is running: what Bridge yields meanwhile is that task's."""

    at = -1

    def __iter__(self):
        for at, task in enumerate(super().__iter__()):
            self.at = at
            yield task

    @property
    def running(self):
        return self[self.at]


class BridgeExport:
    """Iterates (task, checkpoint tensor name, tensor) over `stream_weights_megatron_to_hf` (so that the families' hooks
    run) with each task's weight replaced by `weights[i]`, and adapters as `adapters` has them. A task that raises is
    noted in `failed` (global parameter name -> what it raised) and skipped, so that in the end all the names that
    cannot be exported are known, not the first."""

    def __init__(
        self,
        model_bridge,
        chunks,
        names: CheckpointNames,
        tasks: Sequence,
        weights: Sequence[torch.Tensor],
        adapters: AdapterTasks,
    ):
        self._adapters = adapters
        self.failed: dict[str, str] = {}
        self._bridge, self._chunks, self._names = model_bridge, list(chunks), names
        self._tasks = [dataclasses.replace(t, param_weight=w) for t, w in zip(tasks, weights, strict=True)]

    def __iter__(self):
        if hasattr(self._bridge, "build_adapter_conversion_tasks"):
            # Bridge asks itself for these tasks in the middle of the export; on this one object, it is answered.
            with mock.patch.object(self._bridge, "build_adapter_conversion_tasks", lambda chunks: self._adapters):
                yield from self._stream()
        else:
            yield from self._stream()

    def _stream(self):
        todo = self._tasks
        while todo:
            cursor = Cursor(todo)
            try:
                stream = self._bridge.stream_weights_megatron_to_hf(
                    self._chunks, self._names, cpu=False, show_progress=False, conversion_tasks=cursor
                )
                for name, tensor in stream:
                    yield cursor.running, name, tensor
            except GeneratorExit:
                raise
            except Exception as e:  # Bridge raises anything: ValueError, AssertionError, int('')
                if cursor.at < 0:  # not a task's fault: skipping tasks would not help
                    raise LayoutError(f"Bridge cannot export this model: {type(e).__name__}: {e}") from e
                self.failed[cursor.running.global_param_name] = f"{type(e).__name__}: {e}"
            todo = todo[cursor.at + 1 :]
