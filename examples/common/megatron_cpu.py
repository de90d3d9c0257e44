"""Megatron-Core 0.16 and Megatron-Bridge 0.3 on a machine without a GPU, over gloo. For tests and demos only.

    megatron_cpu.install()                   # before the first megatron import; does nothing where CUDA exists
    AutoBridge = megatron_cpu.import_bridge()
    with megatron_cpu.parallel(tp=2, pp=2): ...

`install` changes the process for good (torch.cuda, device arguments, some torch.distributed calls), so it belongs in a
process of its own. Each patch below says what breaks without it. What is *not* here: stand-ins for TransformerEngine's
modules (te_twin.py), models and training (train_loop.py).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from examples.common.gloo_end import settle_at_exit
from examples.common.gloo_threads import few_threads

CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Patch this process so that megatron.core imports, builds, trains and communicates on the CPU. Idempotent."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if any(name.partition(".")[2].startswith("core") for name in sys.modules if name.startswith("megatron.")):
        raise RuntimeError("megatron_cpu.install() must run before the first megatron.core import")
    _installed = True
    # megatron.core.jit compiles small functions at import; there is no compiler to wait for here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|apex).*")
    _patch_cuda()
    few_threads()
    _patch_distributed()
    _CudaMeansCpu().__enter__()  # stays on for the life of the process
    _patch_megatron()
    settle_at_exit()


# -- devices ----------------------------------------------------------------------------------------------------------


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda…"` becomes the CPU, `.cuda()` the identity, pinned memory just memory.

    `Tensor.type()` answers "torch.cuda.FloatTensor": clip_grads.py and the optimizers compare with that string.
    """

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and any(_is_cuda(a) for a in args[1:]):
            args = tuple(CPU if _is_cuda(a) else a for a in args)
        return func(*args, **kwargs)


class _Stream:
    """Everything on the CPU happens in program order, so a stream or an event has nothing to wait for."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_, **__):
        pass

    def _nothing(self, *_):
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event=None):
        return event or _Stream()

    def query(self):
        return True

    def elapsed_time(self, _):
        return 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _patch_cuda() -> None:
    cuda, stream = torch.cuda, _Stream()

    @contextlib.contextmanager
    def use_stream(_=None):
        yield

    # A lambda of its own for each name: Dynamo refuses to start when two of torch's names share a function.
    cuda.current_device = lambda: CPU  # callers pass it on as `device=` or compare it with `tensor.device`
    cuda.device_count = lambda: 1
    cuda.current_stream = lambda *_: stream
    cuda.default_stream = lambda *_: stream
    cuda.stream, cuda.Stream, cuda.Event = use_stream, _Stream, type("_Event", (_Stream,), {})
    for name in ("set_device", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_: None)
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *_: (0, 0)
    # One generator, the CPU's: Megatron's RNG tracker then forks CPU state.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.nn.Module.cuda = lambda self, device=None: self


# -- torch.distributed ------------------------------------------------------------------------------------------------


def _patch_distributed() -> None:
    init, new_group = dist.init_process_group, dist.new_group
    all_gather, scatter, all_to_all_single = dist.all_gather, dist.scatter, dist.all_to_all_single

    def init_gloo(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return init(backend if backend == "fake" else "gloo", *args, **kwargs)

    def new_gloo_group(*args, backend=None, pg_options=None, **kwargs):  # NCCL's options mean nothing to gloo
        backend = "fake" if dist.get_backend() == "fake" else "gloo" if backend in (None, "nccl") else backend
        return new_group(*args, backend=backend, **kwargs)

    def all_gather_uneven(tensor_list, tensor, group=None, async_op=False):
        """gloo wants equal sizes: pad to the largest, gather, cut back."""
        if len({t.shape for t in tensor_list}) == 1:
            return all_gather(tensor_list, tensor.contiguous(), group=group, async_op=async_op)
        mine = tensor.new_zeros(max(t.numel() for t in tensor_list))
        mine[: tensor.numel()] = tensor.reshape(-1)
        got = [torch.empty_like(mine) for _ in tensor_list]
        work = all_gather(got, mine, group=group, async_op=async_op)

        def end():
            if async_op:
                work.wait()
            for dst, src in zip(tensor_list, got):
                dst.copy_(src[: dst.numel()].view(dst.shape))

        return types.SimpleNamespace(wait=end) if async_op else end()

    def scatter_contiguous(tensor, scatter_list=None, src=None, group=None, async_op=False, **kwargs):
        """Bridge scatters `torch.chunk(w, n, dim=1)` views, for which gloo sends wrong bytes without an error."""
        if scatter_list is not None:
            scatter_list = [t.contiguous() for t in scatter_list]
        return scatter(tensor, scatter_list, src=src, group=group, async_op=async_op, **kwargs)

    def all_to_all_sizes(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        """The token dispatcher turns split sizes into lists only when they are on a GPU; c10d wants a sequence of
        int."""
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return all_to_all_single(output, input.contiguous(), *sizes, group=group, async_op=async_op)

    dist.init_process_group, dist.new_group = init_gloo, new_gloo_group
    dist.all_gather, dist.scatter, dist.all_to_all_single = all_gather_uneven, scatter_contiguous, all_to_all_sizes


# -- megatron.core ----------------------------------------------------------------------------------------------------


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # These set state through torch.cuda's lazy-call queue, which never runs without a device.
    rng._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    name_te_kernels()

    # WrappedTorchNorm refuses sequence parallel, which Megatron demands of MoE with tp > 1. All that sequence parallel
    # needs from a norm is this mark: finalize_model_grads then sums the weight's gradient over TP.
    def norm(cls, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False, normalization=""):
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for p in made.parameters():
            p.sequence_parallel = config.sequence_parallel
        return made

    WrappedTorchNorm.__new__ = staticmethod(norm)


def import_bridge():
    """`megatron.bridge.AutoBridge`. Shows empty TransformerEngine and triton modules while Bridge is imported, if
    missing.

    Bridge imports both at the top of modules whose contents are never called here (peft/lora_layers.py, Mamba).
    Megatron-Core is imported first and the stand-ins are taken away again, so that nothing else believes in them.
    """
    import megatron.core.extensions.transformer_engine
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    stand_ins = _stand_ins()
    sys.modules.update(stand_ins)
    try:
        from megatron.bridge import AutoBridge
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
    return AutoBridge


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def name_te_kernels() -> None:
    """Without TransformerEngine moe_utils never binds names that the router later compares with None, on GPUs as well."""
    from megatron.core.transformer.moe import moe_utils

    for name in ("te_general_gemm", "fused_permute", "fused_unpermute", "fused_sort_chunks_by_index"):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def _stand_ins() -> dict[str, types.ModuleType]:
    def decorator(*args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else (lambda f: f)

    class Permissive(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return decorator

    def module(name: str, kind=types.ModuleType) -> types.ModuleType:
        made = kind(name)
        made.__spec__, made.__path__, made.__version__ = importlib.machinery.ModuleSpec(name, None), [], "0.0.0"
        return made

    found: dict[str, types.ModuleType] = {}
    if not has_transformer_engine():
        te, pytorch = module("transformer_engine"), module("transformer_engine.pytorch")
        te.pytorch = pytorch
        for name in ("Linear", "LayerNormLinear", "GroupedLinear"):
            setattr(pytorch, name, type(name, (torch.nn.Module,), {}))
        pytorch.ops = types.SimpleNamespace(Sequential=type("Sequential", (torch.nn.Module,), {}))
        found |= {m.__name__: m for m in (te, pytorch)}
    if importlib.util.find_spec("triton") is None:
        triton, lang = module("triton", Permissive), module("triton.language", Permissive)
        triton.language = lang
        lang.constexpr = type("constexpr", (), {"__init__": lambda self, value=None: None})
        lang.tensor = type("tensor", (), {})
        found |= {m.__name__: m for m in (triton, lang)}
    return found


# -- worlds -----------------------------------------------------------------------------------------------------------


def init_world() -> tuple[int, int]:
    """The gloo (or NCCL, where CUDA exists) world of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Returns (rank,
    size)."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size()


@contextlib.contextmanager
def parallel(
    tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None, cp: int = 1, seed: int = 1234
) -> Iterator[None]:
    """Megatron's process groups for one layout on the world that exists; gone again afterwards, so layouts can follow
    each other in one launch (imports cost more than any toy case)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    try:
        model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def fake_world(rank: int, world: int, **layout) -> Iterator[None]:
    """This one process plays `rank` of a trainer of `world` ranks: torch's fake process group, Megatron's own group
    arithmetic, no peers. Whatever would really communicate gives garbage; building and tracing models does not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with parallel(**layout):
            yield
    finally:
        dist.destroy_process_group()
