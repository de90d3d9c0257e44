"""Runs Megatron-Bridge's own export for one rank alone, without peers.

Bridge exports a parameter by collectives: objects over PP (types, specs, QKV's config), a broadcast over PP, gathers
over TP and EP. A rank that traces only its own parameters needs none of them: it is the PP source of each and knows all
objects. Object collectives are therefore answered with this rank's objects, and tensor collectives symbolically (both
in xfer.trace.collectives). megatron.py derives fragments from an export, xfer.trace follows its operators.

Bridge merges adapters (LoRA) while it exports. It builds tasks for their factors inside the export, from the live
modules; here these tasks get twins too.

Tasks are never kept. Bridge's tasks hold Parameter objects and PP caches, which become stale unnoticed when a framework
replaces a parameter or a dtype. New tasks cost a fraction of a second, and only when the layout is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol, cast
from unittest import mock

import torch
import torch.distributed as dist

from xfer.errors import LayoutError, RebindError
from xfer.trace.fragment import TensorSpec

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER = 100 << 20


class CheckpointNames(dict):
    """The checkpoint's names and config, which is all that an export reads of a checkpoint.

    It is a dict with meaningless values, since Bridge uses `in` once per parameter, which takes seconds on its own list.
    """

    def __init__(self, names: Iterable[str], config: object):
        super().__init__(dict.fromkeys(names))
        self.source = self.state = self
        self.config = config

    def get_all_keys(self) -> CheckpointNames:
        return self

    def has_glob(self, pattern: str) -> bool:
        return any(fnmatch(name, pattern) for name in self)


def read_headers(folder: Path, files: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the specs of a checkpoint's tensors, from the headers of its safetensors files, without those in missing files.

    Tensors in a dtype that trainers do not hold (a quantized checkpoint) are left out; the export then decides.

    Args:
        folder: The checkpoint.
        files: Tensor name -> file name.

    Raises:
        LayoutError: A file is no safetensors file.
    """
    specs: dict[str, TensorSpec] = {}
    for file in sorted(set(files.values())):
        path = folder / file
        if not path.is_file():
            continue
        for name, entry in _header(path).items():
            if name in files and entry.get("dtype") in _DTYPES:
                specs[name] = TensorSpec(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    return specs


def _header(path: Path) -> dict[str, dict]:
    try:
        with path.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if size > min(_MAX_HEADER, path.stat().st_size):
                raise ValueError(f"header of {size} bytes")
            header = json.loads(f.read(size))
        return {k: v for k, v in header.items() if k != "__metadata__"}
    except (ValueError, OSError) as e:
        raise LayoutError(f"cannot read the safetensors header of {path}: {e}") from e


class ModelBridge(Protocol):
    """Bridge's converter of one model family, as far as an export uses it."""

    def build_conversion_tasks(self, hf_pretrained: CheckpointNames, megatron_model: list[torch.nn.Module]) -> list: ...

    def stream_weights_megatron_to_hf(
        self,
        megatron_model: list[torch.nn.Module],
        hf_pretrained: CheckpointNames,
        *,
        cpu: bool,
        show_progress: bool,
        conversion_tasks: list,
    ) -> Iterable[tuple[str, torch.Tensor]]: ...


def model_bridge_of(bridge) -> ModelBridge:
    """Return a new converter of an AutoBridge's family, with the config that Bridge's own dispatch sets."""
    made = bridge._model_bridge
    made.hf_config = hf_config(bridge)
    return made


def hf_config(bridge):
    """Return the config of an AutoBridge, which was made from a config or from a checkpoint."""
    return getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)


def process_groups(chunks: Sequence[torch.nn.Module]) -> list[object]:
    """Return the groups over which Bridge's mappings of this model communicate.

    From 0.6 on Bridge asks the model for its groups, and before that Megatron-Core's `parallel_state`. A model may have groups
    of its own and leave `parallel_state` as it is; its experts are not cut over a group that it does not have.

    Raises:
        RebindError: There are none, or the model has groups that are destroyed. Frameworks destroy them to free NCCL's memory.
    """
    from megatron.bridge.models.conversion import model_bridge
    from megatron.core import parallel_state

    of_model = getattr(model_bridge, "_get_pg_collection_from_model", lambda chunks: None)(list(chunks))
    found = [getattr(of_model, name, None) for name in ("pp", "tp", "ep", "expt_tp")]
    if gone := [g for g in found if g is not None and not _registered(g)]:
        raise RebindError(
            f"{len(gone)} process groups of the model are destroyed",
            [
                "initialize_model_parallel() on all ranks before the refit, and give the model's pg_collection the new groups"
            ],
        )
    if all(found) or all(found[:2]) and not parallel_state.is_initialized():
        return found
    if not parallel_state.is_initialized():
        raise RebindError(
            "Megatron's process groups are not there", ["initialize_model_parallel() on all ranks before the refit"]
        )
    mine = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    return [a or b for a, b in zip(found, mine, strict=True)]


def _registered(group: object) -> bool:
    """Whether torch.distributed knows the group. It forgets those that are destroyed."""
    try:
        dist.get_rank(cast(dist.ProcessGroup, group))
    except ValueError:
        return False
    return True


def owned_tasks(model_bridge, chunks: Sequence[torch.nn.Module], names: CheckpointNames) -> list:
    """Return new conversion tasks of this rank's parameters and persistent buffers.

    A last stage with an MTP layer has a copy of the embedding, which Bridge exports from the first stage: no task of its own.
    Call it inside `xfer.trace.collectives.objects_stay_home()`.
    """
    forget_names(model_bridge)
    try:
        tasks = model_bridge.build_conversion_tasks(names, list(chunks))
        # Bridge 0.6 has this method.
        is_copy = getattr(model_bridge, "_should_skip_mtp_duplicate_embedding_export", lambda task, chunks: False)
        return [t for t in tasks if t is not None and t.param_weight is not None and not is_copy(t, list(chunks))]
    finally:
        forget_names(model_bridge)  # its cache has only this rank's names now


def forget_names(model_bridge) -> None:
    """Clear Bridge's cache of the names of parameters and adapters of all stages, which it keeps for good."""
    for cache in ("_cached_param_names", "_cached_param_objects_adapter"):
        vars(model_bridge).pop(cache, None)


AdapterTasks = dict[str, list]
"""Bridge's adapter tasks by the name of the module that they belong to."""


def owned_adapters(model_bridge, chunks: Sequence[torch.nn.Module]) -> AdapterTasks:
    """Return new tasks of this rank's adapters, if there are any. Call it as `owned_tasks`."""
    forget_names(model_bridge)
    try:
        return adapter_tasks(model_bridge, chunks)
    finally:
        forget_names(model_bridge)


def adapter_tasks(model_bridge, chunks: Sequence[torch.nn.Module]) -> AdapterTasks:
    """Return new tasks of all ranks' adapters. Collective.

    An older Bridge has none. A newer one needs `parallel_state` for them, whatever groups the model has; without it there are no
    tasks, and adapters count as parameters that Bridge does not export.
    """
    from megatron.core import parallel_state

    make = getattr(model_bridge, "build_adapter_conversion_tasks", None)
    return {} if make is None or not parallel_state.is_initialized() else make(list(chunks))


def factor_tasks(adapters: AdapterTasks) -> list:
    """Return the conversion tasks of the adapters' factors, in a fixed order."""
    return [t for tasks in adapters.values() for a in tasks for t in (a.linear_in_task, a.linear_out_task)]


class Scales:
    """The two numbers per adapter of this rank by which Bridge scales a merge. Tasks and recipes contain them as constants."""

    def __init__(self, chunks: Sequence[torch.nn.Module] = (), adapters: AdapterTasks | None = None):
        inner = {id(t.megatron_module) for t in factor_tasks(adapters or {})}
        modules = (m for chunk in chunks for m in chunk.modules()) if inner else ()
        outer = {id(m): m for m in modules if any(id(c) in inner for c in m.children())}
        self._was = [(m, m.alpha, m.dim) for m in outer.values()]

    def hold(self) -> bool:
        """Return whether the numbers are unchanged."""
        return all((m.alpha, m.dim) == (alpha, dim) for m, alpha, dim in self._was)


def with_factors(adapters: AdapterTasks, weights: Iterable[torch.Tensor]) -> AdapterTasks:
    """Return the same tasks with other weights, in the order of `factor_tasks`."""
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
    """A list of tasks that records the running one, to which the tensor belongs that Bridge yields."""

    at = -1

    def __iter__(self):
        for at, task in enumerate(super().__iter__()):
            self.at = at
            yield task

    @property
    def running(self):
        return self[self.at]


class BridgeExport:
    """Iterates over an export as (task, name of the checkpoint tensor, tensor).

    It runs `stream_weights_megatron_to_hf`, so that the hooks of a model family run, with each task's weight replaced by
    `weights[i]` and with the adapters of `adapters`. A task that raises is skipped, so that all names that cannot be
    exported are found.

    Attributes:
        failed: Global parameter name -> error.
    """

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
            # Bridge builds these tasks in the middle of the export. Replace that method on this object.
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
                if cursor.at < 0:  # no task was running, so skipping tasks would not help
                    raise LayoutError(f"Bridge cannot export this model: {type(e).__name__}: {e}") from e
                self.failed[cursor.running.global_param_name] = f"{type(e).__name__}: {e}"
            todo = todo[cursor.at + 1 :]
