"""Megatron-Core models of any rank of a job, built by Megatron-Bridge in one process without a GPU and without peers.

    AutoBridge = import_bridge()
    with rank_of(parallel, rank):
        bridge = AutoBridge.from_hf_config(config)
        chunks = chunks_of(bridge, parallel)

Megatron's own group arithmetic places the ranks, on torch's fake process group. The models have the layout of
those on GPUs and cannot run: see gpu_packages.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from xfer.errors import LayoutError
from xfer.mesh.parallel import TrainerParallel, place_of
from xfer.trainers import gpu_packages

CPU = torch.device("cpu")


@functools.cache
def import_bridge() -> type:
    """Returns `megatron.bridge.AutoBridge`. Must come before any other import of Megatron in this process."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron-Core compiles small functions when it is imported
    gpu_packages.declare()
    from megatron.bridge import AutoBridge

    return AutoBridge


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has the family of this config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config.get("model_type", "") in CONFIG_MAPPING_NAMES


def make_known(config: Mapping[str, Any]) -> None:
    """Lets AutoConfig read the config of a family that the installed transformers does not have.

    The code of such a family comes with its checkpoints. Bridge only reads the name of the config's class, so none of
    that code is needed. Does nothing for a known family.

    Args:
        config: contents of a Hugging Face config.json.
    """
    from transformers import AutoConfig, PretrainedConfig

    if not is_known(config) and config.get("architectures"):
        kind, model = config["model_type"], config["architectures"][0]
        fields = {"model_type": kind, "auto_map": {"AutoModelForCausalLM": f"modeling_{kind}.{model}"}}
        AutoConfig.register(kind, type(f"{kind}_config", (PretrainedConfig,), fields), exist_ok=True)


def write_no_parameter() -> None:
    """Makes torch's initialisers leave their tensor alone, for the life of this process.

    Memory that is allocated and never written costs address space only, so a rank of any size fits.
    """
    for name, fill in list(vars(torch.nn.init).items()):
        if name.endswith("_") and not name.startswith("_") and callable(fill):
            setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)


@contextlib.contextmanager
def rank_of(parallel: TrainerParallel, rank: int) -> Iterator[None]:
    """Inside, this process is `rank` of that job, and models are built on the CPU. Nothing can communicate.

    Raises:
        LayoutError: Megatron places the rank otherwise than xfer's meshes do.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=parallel.world, store=FakeStore())
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(ps.destroy_model_parallel)
        sizes = {**_sizes(parallel), "context_parallel_size": parallel.cp}
        ps.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        place = {
            "pp": ps.get_pipeline_model_parallel_rank(),
            "tp": ps.get_tensor_model_parallel_rank(),
            "ep": ps.get_expert_model_parallel_rank(),
            "etp": ps.get_expert_tensor_parallel_rank(),
        }
        if place != (ours := place_of(parallel, rank)):
            raise LayoutError(f"trainer {rank}: Megatron places it at {place}, xfer's mesh at {ours}")
        # Layers allocate on this device, and a finished model is moved to it. No random number is drawn.
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: CPU))
        # The last of several stages moves its copy of a tied embedding separately.
        for kind in (torch.nn.Module, torch.Tensor):
            stack.enter_context(mock.patch.object(kind, "cuda", lambda moved, device=None: moved))
        stack.enter_context(mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()))
        yield


def _sizes(parallel: TrainerParallel) -> dict[str, int | None]:
    return dict(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )


def make_provider(bridge, parallel: TrainerParallel, fields: Mapping[str, object] = {}):
    """Bridge's model provider for that job, with every feature off that needs a GPU when a model is built.

    Context parallelism cuts no parameter, so the provider has none.

    Args:
        bridge: an AutoBridge.
        fields: set on the provider last, e.g. the number of layers of the last stage.

    Raises:
        Exception: any error of Megatron's own check of the configuration.
    """
    # Megatron leaves the attention backend of one model in the environment, and then refuses a model with another one.
    for name in [n for n in os.environ if n.startswith("NVTE_")]:
        del os.environ[name]
    provider = bridge.to_megatron_provider(load_weights=False)
    given = dict(
        _sizes(parallel),
        sequence_parallel=bool(provider.num_moe_experts) and parallel.tp > 1,  # as Megatron demands
        pipeline_dtype=provider.params_dtype,
        moe_grouped_gemm=bool(provider.num_moe_experts),
        moe_token_dispatcher_type="allgather",  # the only one that allocates nothing on a GPU
        moe_shared_expert_overlap=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
    )
    for name, value in {**given, **fields}.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


def check(bridge, parallel: TrainerParallel, fields: Mapping[str, object] = {}) -> None:
    """Raises Megatron's error if it refuses this configuration, before a rank is built."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    with rank_of(parallel, 0):
        provider = make_provider(bridge, parallel, fields)
        get_num_layers_to_build(provider, 0 if parallel.vpp else None, 0)


def chunks_of(bridge, parallel: TrainerParallel, fields: Mapping[str, object] = {}) -> list[torch.nn.Module]:
    """Model chunks of the rank that this process is inside `rank_of`, one per virtual stage; memory uninitialised."""
    provider = make_provider(bridge, parallel, fields)
    bf16 = provider.params_dtype == torch.bfloat16
    return provider.provide_distributed_model(ddp_config=None, wrap_with_ddp=False, bf16=bf16)
