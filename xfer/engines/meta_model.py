"""Builds vLLM's own model class on meta, for tracing: in a live worker, or for any rank of any layout in one process.

In a worker the process groups are real, and `make_meta_model(vllm_config)` is enough. Elsewhere `fake_rank` runs vLLM's
own group arithmetic with groups that know their members and cannot communicate. vLLM is imported when a function is
called.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from xfer.errors import Unsupported
from xfer.trace.loader import PACKED
from xfer.trace.watch import PythonData, Watch, framework_line

if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors

    class VllmModel(torch.nn.Module):
        """The methods of a vLLM model class that xfer calls beside those of a module."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None: ...

        def make_empty_intermediate_tensors(
            self, batch_size: int, dtype: torch.dtype, device: torch.device
        ) -> IntermediateTensors: ...


def make_config(hf_config: str | Mapping, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: bool = False, **extra: Any):
    """Return the VllmConfig of an engine, without weights or tokenizer.

    Args:
        hf_config: A folder with config.json, or its contents.
        tp, pp, dp: Sizes of the parallel groups.
        ep: Whether experts are parallel.
        **extra: Further EngineArgs.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    if not isinstance(hf_config, str):
        folder = tempfile.mkdtemp(prefix="xfer-config-")  # not removed: vLLM reads it again later
        (Path(folder) / "config.json").write_text(json.dumps(dict(hf_config)))
        hf_config = folder
    options = dict(
        model=hf_config,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        enable_expert_parallel=ep,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        distributed_executor_backend="mp",
        disable_log_stats=True,
    )
    # vLLM inspects a model class in a subprocess, to keep CUDA uninitialised in this one. That costs seconds per family and is
    # not needed here.
    here = mock.patch.object(registry, "_run_in_subprocess", lambda look: look())
    with here, mock.patch.dict("os.environ", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1"):
        return EngineArgs(**{**options, **extra}).create_engine_config()


def make_meta_model(vllm_config, watch: Watch | None = None) -> VllmModel:
    """Return the model that vLLM would serve on this rank, with every parameter on meta. Groups must be set.

    Args:
        vllm_config: The engine's configuration.
        watch: Records the constants that the constructor computes; `trace_loader` takes it as `built`.
    """
    return make_model(vllm_config, "meta", watch=watch)


def make_meta_drafter(vllm_config, watch: Watch | None = None) -> VllmModel:
    """Return the drafter that vLLM would load beside that model, built with the drafter's model config as vLLM's proposers do."""
    spec = vllm_config.speculative_config
    if spec.moe_backend is not None:
        from vllm.config.utils import replace

        vllm_config = copy.copy(vllm_config)
        vllm_config.kernel_config = replace(vllm_config.kernel_config, moe_backend=spec.moe_backend)
    return make_model(vllm_config, "meta", spec.draft_model_config, watch)


def make_model(vllm_config, device: str, model_config=None, watch: Watch | None = None) -> VllmModel:
    """Return the same model as `make_meta_model` on any device, uninitialised. It leaves a live model untouched.

    Raises:
        Unsupported: The class cannot be built on meta. It names the line of vLLM.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    compilation = config.compilation_config = copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context = {}  # layers register here by name, and vLLM refuses a second one of that name
    if hasattr(compilation, "static_all_moe_layers"):
        compilation.static_all_moe_layers = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config, check_compile=False))
        stack.enter_context(set_default_torch_dtype((model_config or config.model_config).dtype))
        if device == "meta":
            stack.enter_context(PythonData())
            stack.enter_context(watch or Watch())
        stack.enter_context(torch.device(device))
        stack.enter_context(_registries_kept())
        # This cache is global: the next real model of the process would get meta tensors from it.
        stack.enter_context(mock.patch.object(rotary_embedding, "_ROPE_DICT", {}))
        try:
            model = initialize_model(config, **({} if model_config is None else {"model_config": model_config}))
        except Exception as e:
            if device != "meta":
                raise
            raise Unsupported(
                "vLLM's model class cannot be built on meta tensors, so its layout cannot be read",
                [f"{framework_line(e)}: {type(e).__name__}: {e}", PACKED],
            ) from e
    if device == "meta":
        _all_to_meta(model)
    ids = [id(module) for module in model.modules()]
    _forget_missing_layers(ids)
    weakref.finalize(model, _forget_missing_layers, ids).atexit = False
    return model


def _forget_missing_layers(ids: Iterable[int]) -> None:
    """Remove the entries of `ids` from vLLM's cache of the layers that other pipeline stages hold. Its keys are ids of modules,
    and an id is used again: the next model with that id would not load the layers that a dead one lacked."""
    from vllm.model_executor.models import utils

    missing = getattr(utils, "_model_to_pp_missing_layer_names", {})
    for number in ids:
        missing.pop(number, None)


@contextlib.contextmanager
def _registries_kept() -> Iterator[None]:
    """Restore the global dicts of vLLM's modules in which layers register, so that ops of the live model still find its layers
    by name (HpcRopeNorm)."""
    before = [(registry, dict(registry)) for registry in _registries()]
    try:
        yield
    finally:
        for registry, was in before:
            for name in [n for n in registry if n not in was]:
                del registry[name]
            registry.update({n: x for n, x in was.items() if registry.get(n) is not x})


def _registries() -> Iterator[dict]:
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and module is not None:
            yield from (
                value
                for key, value in list(vars(module).items())
                if type(value) is dict
                and key != "__builtins__"  # every module has it, and it is longer than all others together
                and any(isinstance(x, torch.nn.Module) for x in list(value.values()))
            )


def _all_to_meta(model: torch.nn.Module) -> None:
    """Move the few parameters to meta for which the Transformers backend sets a device. They keep class and attributes."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p.device.type != "meta":
                q = torch.nn.Parameter(p.data.to("meta"), requires_grad=False)
                q.__class__, q.__dict__ = p.__class__, dict(p.__dict__)
                module._parameters[name] = q


# ---- one process plays a rank ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_rank(vllm_config, rank: int) -> Iterator[None]:
    """Make this process `rank` of the layout: vLLM's order DP x PP x TP, TP fastest. Groups cannot communicate.

    vLLM's own `initialize_model_parallel` runs and only the construction of a group is replaced, so the rank order is vLLM's.
    The state of vLLM's module is restored afterwards. Do not use this while vLLM's groups are live.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    world = parallel.world_size_across_dp
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of a world of {world}")
    names = [n for n, v in vars(parallel_state).items() if _is_group_slot(n, v, parallel_state)]
    saved = {n: getattr(parallel_state, n) for n in names}
    answers = {"is_initialized": True, "get_world_size": world, "get_rank": rank, "get_backend": "gloo"}

    def make_group(group_ranks: list[list[int]], *args: Any, group_name: str = "", **kwargs: Any):
        return _group(group_ranks, rank, group_name)

    with contextlib.ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(mock.patch.object(torch.distributed, name, lambda *a, _v=value, **k: _v))
        stack.enter_context(mock.patch.object(parallel_state, "init_model_parallel_group", make_group))
        stack.enter_context(set_current_vllm_config(vllm_config, check_compile=False))
        parallel.rank, parallel.data_parallel_rank = rank % parallel.world_size, rank // parallel.world_size
        if hasattr(parallel, "data_parallel_index"):
            parallel.data_parallel_index = parallel.data_parallel_rank
        try:
            for n in names:
                setattr(parallel_state, n, None)
            parallel_state._WORLD = _group([list(range(world))], rank, "world")
            parallel_state._NODE_COUNT = 1
            parallel_state.initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
            yield
        finally:
            for n, v in saved.items():
                setattr(parallel_state, n, v)


def _is_group_slot(name: str, value: object, parallel_state: Any) -> bool:
    """Whether a module global holds a group, such as _TP (annotated `GroupCoordinator | None`), or the node count."""
    kind = str(getattr(parallel_state, "__annotations__", {}).get(name, ""))
    return name == "_NODE_COUNT" or (name.startswith("_") and "GroupCoordinator" in kind and not callable(value))


def _group(group_ranks: list[list[int]], rank: int, name: str):
    """A GroupCoordinator that knows its members. Anything that would communicate raises."""
    from vllm.distributed.parallel_state import GroupCoordinator

    class Members(GroupCoordinator):
        def __init__(self) -> None:
            self.rank = self.local_rank = rank
            self.unique_name, self.group_ranks = f"fake_{name}", group_ranks
            self.ranks = next(r for r in group_ranks if rank in r)
            self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)
            size, me = self.world_size, self.rank_in_group
            self.cpu_group = self.device_group = SimpleNamespace(size=lambda: size, rank=lambda: me)
            self.device_communicator = self.mq_broadcaster = None
            self.device, self.torch_distributed_backend = torch.device("cpu"), "gloo"
            self.use_custom_op_call = self.use_device_communicator = self.use_cpu_custom_send_recv = False

        def __getattr__(self, attr: str) -> Any:
            raise NotImplementedError(f"group {name!r} of a simulated rank has no {attr}: nothing may communicate here")

        def destroy(self) -> None:
            pass

    return Members()
