"""vLLM's own model class built on meta, for tracing: in a live worker, or for any rank of any layout in one process.

In a worker the process groups are real and `make_meta_model(vllm_config)` is all. Elsewhere `fake_rank` lets vLLM's
own group arithmetic run with groups that know who is in them and cannot communicate. vLLM is imported when a
function is called.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from xfer.errors import Unsupported
from xfer.trace.loader import PACKED
from xfer.trace.watch import PythonData, Watch, framework_line


def make_config(hf_config: str | Mapping, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: bool = False, **extra: Any):
    """The VllmConfig that an engine would have: no weights and no tokenizer are looked for.

    `hf_config`: a folder with config.json, or its contents. `extra`: further EngineArgs.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    if not isinstance(hf_config, str):
        folder = tempfile.mkdtemp(prefix="xfer-config-")  # vLLM reads it again later, so it stays
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
    # vLLM looks at a model class in a process of its own, so that CUDA stays untouched in this one; here that costs
    # seconds per family and protects nothing.
    here = mock.patch.object(registry, "_run_in_subprocess", lambda look: look())
    with here, mock.patch.dict("os.environ", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1"):
        return EngineArgs(**{**options, **extra}).create_engine_config()


def make_meta_model(vllm_config, watch: Watch | None = None) -> torch.nn.Module:
    """The model that vLLM would serve under `vllm_config` on this rank, every parameter on meta. Groups must be set.

    `watch`: notes the constants that the constructor computes; `trace_loader` takes it as `built`.
    """
    return make_model(vllm_config, "meta", watch=watch)


def make_meta_drafter(vllm_config, watch: Watch | None = None) -> torch.nn.Module:
    """The drafter that vLLM would load beside that model: as its own proposers do, with the drafter's model config."""
    spec = vllm_config.speculative_config
    if spec.moe_backend is not None:
        from vllm.config.utils import replace

        vllm_config = copy.copy(vllm_config)
        vllm_config.kernel_config = replace(vllm_config.kernel_config, moe_backend=spec.moe_backend)
    return make_model(vllm_config, "meta", spec.draft_model_config, watch)


def make_model(vllm_config, device: str, model_config=None, watch: Watch | None = None) -> torch.nn.Module:
    """As `make_meta_model`, on any device; uninitialised storage. A model that is already live is left untouched.

    Unsupported, naming the line of vLLM, when a class cannot be built on meta.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    compilation = config.compilation_config = copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context = {}  # layers register here by name, and a second one of that name is refused
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
        # A cache of the process: tensors on meta would be served to its next real model.
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
    return model


@contextlib.contextmanager
def _registries_kept() -> Iterator[None]:
    """Dicts of vLLM's modules in which layers put themselves when they are built, so that an op of the live model finds them by name
    (HpcRopeNorm): afterwards they hold what they held."""
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
                for value in list(vars(module).values())
                if type(value) is dict and any(isinstance(x, torch.nn.Module) for x in list(value.values()))
            )


def _all_to_meta(model: torch.nn.Module) -> None:
    """The Transformers backend names a device for a few of its parameters; they keep class and loader attributes."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p.device.type != "meta":
                q = torch.nn.Parameter(p.data.to("meta"), requires_grad=False)
                q.__class__, q.__dict__ = p.__class__, dict(p.__dict__)
                module._parameters[name] = q


# ---- one process plays a rank ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_rank(vllm_config, rank: int) -> Iterator[None]:
    """Inside, this process is `rank` of the layout: vLLM's order DP x PP x TP, TP fastest. Nothing can communicate.

    vLLM's `initialize_model_parallel` runs itself, only the construction of a group is replaced, so that rank order is
    vLLM's. Module state is put back afterwards; not for use where vLLM's groups are live.
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
    """Module globals such as _TP: annotated `GroupCoordinator | None`, or the node count that goes with them."""
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
