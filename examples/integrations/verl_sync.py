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

from examples.integrations.exact import ENGINE, checksums, held, require_equal
from examples.integrations.toy_model import write_model
from examples.integrations.toy_trainer import ToyTrainer, ray_of_toys

RANKS = 2
BACKEND = CheckpointEngineConfig(backend="xfer", custom_backend_module="xfer.integrations.verl")


class CpuEngine(ToyTrainer):
    """As much of verl's FSDP engine as a sync of weights uses."""

    is_param_offload_enabled = False

    def get_per_tensor_param(self):
        return self.whole(), None


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
        self.engine.save(folder)


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
    with ray_of_toys(gpus=RANKS + 1):
        asyncio.run(run(args.work.absolute(), args.syncs))


if __name__ == "__main__":
    main()
