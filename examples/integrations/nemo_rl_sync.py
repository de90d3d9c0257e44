"""NeMo-RL's `WeightSynchronizer` with xfer behind it, at toy size, on CPUs: two FSDP2 ranks refit two `AsyncLLM`s.

    python -m examples.integrations.nemo_rl_sync --work .nemo_rl

Ray, vLLM and xfer are in one environment. NeMo-RL is on no package index and asks for CUDA, so its `Policy` and `VllmGeneration` are
replaced by `Group`: the actors of ray_async.py behind the few attributes that the synchronizer reads. After each sync both engines'
bytes are compared with a new vLLM that loads what the trainers hold.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.integrations import nemo_rl_interface
from examples.integrations.ray_async import Engine, Trainer, compare, every, start_actors
from examples.integrations.toy_trainer import ray_of_toys

CONFIG = {"backend": "vllm", "colocated": {"enabled": False}}


class PolicyWorker(Trainer):
    """Has the attributes of NeMo-RL's DTensor policy worker that hold its weights."""

    cpu_offload = lora_enabled = False

    def start(self, *args: Any) -> None:
        nemo_rl_interface.install()
        super().start(*args)
        self.model = self.toy.module


class GenerationWorker(Engine):
    """Has the attribute of NeMo-RL's asynchronous vLLM worker that holds its engine, `llm`."""

    async def start(self, folder: str) -> None:
        nemo_rl_interface.install()
        await super().start(folder)


@dataclass
class Group:
    """NeMo-RL's policy or generation, and its worker group. Each engine has one worker here."""

    workers: list[Any]
    cfg: dict[str, Any] = field(default_factory=lambda: CONFIG)

    @property
    def worker_group(self) -> Group:
        return self

    @property
    def dp_size(self) -> int:
        return len(self.workers)

    def get_dp_leader_worker_idx(self, shard: int) -> int:
        return shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".nemo_rl"))
    parser.add_argument("--syncs", type=int, default=2)
    args = parser.parse_args()
    work = args.work.absolute()
    nemo_rl_interface.install()
    from xfer.integrations.nemo_rl import XferWeightSynchronizer

    with ray_of_toys():
        trainers, engines, _ = start_actors(work / "model", PolicyWorker, GenerationWorker)
        synchronizer = XferWeightSynchronizer(Group(trainers), Group(engines))
        synchronizer.init_communicator()
        for step in range(args.syncs):
            metrics = synchronizer.sync_weights()
            compare(trainers, engines, work / f"step{step}", f"sync {step + 1}")
            sampled = every(engines, "generate", f"check{step}")
            print(f"sync {step + 1}: {metrics['xfer/bytes']:.0f} bytes; sampled {sampled[0]}", flush=True)
            every(trainers, "train")
        synchronizer.shutdown()
        every(engines, "shut_down")


if __name__ == "__main__":
    main()
