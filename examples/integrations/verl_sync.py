"""verl's own sync of weights by the checkpoint engine `xfer`, at toy size, on CPUs: two FSDP2 ranks refit a vLLM server.

    python -m examples.integrations.verl_sync --work .verl

verl 0.9.1, Ray, vLLM and xfer are in one environment. `CheckpointEngineManager`, the rollout's workers, the vLLM server and the
worker groups are verl's own; Ray is told of GPUs that do not exist. verl's FSDP engine needs CUDA, so the trainers' is replaced by
`CpuEngine`. After each sync the server's bytes are compared with a new vLLM that loads what the trainers hold.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
from pathlib import Path

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import get_rollout_replica_class

from examples.integrations.exact import ENGINE, ON_CPU, checksums, held, require_equal
from examples.integrations.toy_model import write_model

RANKS = 2
BACKEND = CheckpointEngineConfig(backend="xfer", custom_backend_module="xfer.integrations.verl")


class CpuEngine:
    """As much of verl's FSDP engine as a sync of weights uses, with FSDP2 on gloo."""

    is_param_offload_enabled = False

    def __init__(self, folder: str):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in self.module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-2)

    def get_per_tensor_param(self):
        return ((name, p.full_tensor()) for name, p in self.module.named_parameters()), None

    def train(self) -> None:
        tokens = torch.randint(3, 100, (2, 16))
        self.module(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Actor(ActorRolloutRefWorker):
    """verl's actor, whose calls of the checkpoint engine are inherited, around a `CpuEngine`."""

    def __init__(self, folder: str):
        Worker.__init__(self)
        torch.distributed.init_process_group("gloo")
        self.engine, self.actor = CpuEngine(folder), self
        from verl.utils.import_utils import import_external_libs

        import_external_libs(BACKEND.custom_backend_module)
        master = torch.distributed.get_rank() == 0
        self.checkpoint_engine = CheckpointEngineRegistry.new(BACKEND.backend, bucket_size=1 << 20, is_master=master)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self) -> None:
        self.engine.train()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: str) -> None:
        """Write the weights as a bf16 checkpoint."""
        whole = {name: p.to(torch.bfloat16) for name, p in self.engine.get_per_tensor_param()[0]}
        if torch.distributed.get_rank() == 0:
            self.engine.module.save_pretrained(folder, state_dict=whole)


async def run(work: Path, syncs: int) -> None:
    folder = work / "model"
    write_model(folder)
    rollout = RolloutConfig(
        name="vllm", tensor_model_parallel_size=1, load_format="dummy", enforce_eager=True, max_model_len=ENGINE["max_model_len"],
        prompt_length=32, response_length=32, max_num_seqs=8, max_num_batched_tokens=128, enable_sleep_mode=False,
        free_cache_engine=False, checkpoint_engine=BACKEND,
        engine_kwargs={"vllm": {
            "weight_transfer_config": {"backend": "xfer"}, "block_size": ENGINE["block_size"],
            "num_gpu_blocks_override": ENGINE["num_gpu_blocks_override"],
        }},
    )  # fmt: skip
    model = HFModelConfig(path=str(folder))
    pool = RayResourcePool([RANKS], max_colocate_count=1)
    actors = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Actor), folder=str(folder)), device_name="cuda")
    replica = get_rollout_replica_class("vllm")(replica_rank=0, config=rollout, model_config=model, gpus_per_node=1)
    await replica.init_standalone()
    await replica.server_handle.__ray_call__.remote(pause_as_vllm_024)
    manager = CheckpointEngineManager(BACKEND, actors, [replica])
    for step in range(syncs):
        await manager.update_weights(global_steps=step)
        sums = held(f"http://{replica.server_address}")
        actors.save(str(work / f"step{step}"))
        require_equal(sums, checksums(work / f"step{step}"), f"sync {step + 1}")
        output = await replica.server_handle.generate.remote([3, 4, 5], {"max_tokens": 4}, f"request{step}")
        print(f"sync {step + 1}: sampled {output.token_ids} at step {output.extra_fields['global_steps']}", flush=True)
        actors.train()


def pause_as_vllm_024(server) -> None:
    """Runs in verl's server actor: give vLLM's pause the argument that verl 0.9.1 passes, and that later vLLMs call `mode`."""
    pause = server.engine.pause_generation

    async def translated(*, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
        await pause(mode="wait" if wait_for_inflight_requests else "abort", clear_cache=clear_cache)

    if "mode" in inspect.signature(pause).parameters:
        server.engine.pause_generation = translated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".verl"))
    parser.add_argument("--syncs", type=int, default=2)
    args = parser.parse_args()
    # Ray hands out GPUs that no host has, so that nothing finds one.
    os.environ.update(ON_CPU, CUDA_VISIBLE_DEVICES=",".join(str(900 + i) for i in range(RANKS + 1)))
    given = {
        **ON_CPU,
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    ray.init(address="local", include_dashboard=False, num_cpus=16, num_gpus=RANKS + 1, runtime_env={"env_vars": given})
    try:
        asyncio.run(run(args.work.absolute(), args.syncs))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
