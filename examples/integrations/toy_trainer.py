"""What the examples with Ray share: the toy as FSDP2 trains it on CPUs, and a Ray that is told of GPUs that do not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch

from examples.integrations.exact import ON_CPU


class ToyTrainer:
    """One FSDP2 rank over gloo. torch's process group exists already.

    Args:
        folder: The checkpoint. It is trained in fp32.
    """

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

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather each parameter in turn. Every rank calls it."""
        return ((name, p.full_tensor()) for name, p in self.module.named_parameters())

    def train(self) -> None:
        tokens = torch.randint(3, 100, (2, 16))
        self.module(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: str) -> None:
        """Write the weights as a bf16 checkpoint, to compare with. Every rank calls it."""
        whole = {name: p.to(torch.bfloat16) for name, p in self.whole()}
        if torch.distributed.get_rank() == 0:
            self.module.save_pretrained(folder, state_dict=whole)


def join_ranks(rank: int, world: int, host: str, port: int) -> None:
    """Make torch's process group in an actor."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR=host, MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")


@contextmanager
def ray_of_toys(*, gpus: int = 0, cpus: int = 16) -> Iterator[None]:
    """A local Ray with the environment of engines on CPUs, which ends with the block.

    Args:
        gpus: GPUs that Ray hands out, though no host has them, to frameworks that ask for some. Nothing finds one.
        cpus: CPUs that Ray hands out.
    """
    os.environ.update(ON_CPU, CUDA_VISIBLE_DEVICES=",".join(str(900 + i) for i in range(gpus)))
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**ON_CPU, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    environment = {"env_vars": given}
    ray.init(address="local", include_dashboard=False, num_cpus=cpus, num_gpus=gpus, runtime_env=environment)
    try:
        yield
    finally:
        ray.shutdown()
