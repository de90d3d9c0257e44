"""Megatron-Bridge's own export, run for one rank alone: conversion tasks built anew, answered without any peer.

Bridge exports a parameter by collectives: objects over PP (types, specs, QKV's config), a broadcast over PP, gathers over TP and
EP. A rank that traces only the parameters it owns needs none of them: it is the PP source of each, and knows all objects.
So object collectives are answered with what this rank knows, tensor collectives symbolically (both in xfer.trace.collectives).
Which fragments follow from an export: megatron.py. What its operators mean: xfer.trace.

Tasks are never kept. Bridge's tasks hold Parameter objects and PP caches that go stale without a word when a framework
replaces a parameter or a dtype; new tasks cost a fraction of a second, and only when the layout is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch


class CheckpointNames(dict):
    """Stands for the checkpoint: all that Bridge asks of it while exporting is the names.

    A dict (the values mean nothing) because Bridge asks `in` once per parameter, which on its own list takes seconds.
    """

    def __init__(self, names: Iterable[str]):
        super().__init__(dict.fromkeys(names))
        self.source = self.state = self

    def get_all_keys(self) -> CheckpointNames:
        return self


def owned_tasks(model_bridge, chunks: Sequence[torch.nn.Module], names: CheckpointNames) -> list:
    """New conversion tasks of the parameters and persistent buffers that this rank holds. Call inside
    `xfer.trace.collectives.objects_stay_home()`."""
    vars(model_bridge).pop("_cached_param_names", None)
    try:
        tasks = model_bridge.build_conversion_tasks(names, list(chunks))
        return [t for t in tasks if t is not None and t.param_weight is not None]
    finally:
        vars(model_bridge).pop("_cached_param_names", None)  # it now knows this rank's names only


class _Cursor(list):
    """A task list that remembers which of its tasks is running."""

    at = -1

    def __iter__(self):
        for self.at, task in enumerate(list.__iter__(self)):
            yield task


class Export:
    """Iterates (task, checkpoint tensor name, tensor) over `stream_weights_megatron_to_hf` (so that the families' hooks run)
    with each task's weight replaced by `weights[i]`. A task that raises is noted in `failed` and skipped, so that all the
    names that cannot be exported are known in the end, not the first."""

    def __init__(self, model_bridge, chunks, names: CheckpointNames, tasks: Sequence, weights: Sequence[torch.Tensor]):
        self.failed: list[str] = []
        self._bridge, self._chunks, self._names = model_bridge, list(chunks), names
        self._tasks = [dataclasses.replace(t, param_weight=w) for t, w in zip(tasks, weights, strict=True)]

    def __iter__(self):
        todo = self._tasks
        while todo:
            running = _Cursor(todo)
            try:
                stream = self._bridge.stream_weights_megatron_to_hf(
                    self._chunks, self._names, cpu=False, show_progress=False, conversion_tasks=running
                )
                for name, tensor in stream:
                    yield todo[running.at], name, tensor
            except GeneratorExit:
                raise
            except Exception as e:  # Bridge raises anything: ValueError, AssertionError, int('')
                self.failed.append(f"{todo[running.at].global_param_name}: {type(e).__name__}: {e}")
            todo = todo[running.at + 1 :] if running.at >= 0 else []
