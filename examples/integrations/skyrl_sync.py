"""SkyRL's own sync of weights by xfer's transfer strategy, at toy size, on CPUs: two FSDP2 policy workers refit a `vllm serve`.

    python -m examples.integrations.skyrl_sync --work .skyrl

SkyRL 0.3.0, Ray, vLLM and xfer are in one environment. The sync of the policy workers, their weight extractor and the client of the
server are SkyRL's own. SkyRL builds models for CUDA only, so the workers' model is that of toy_trainer.py, and the server is started
here, as SkyRL takes servers that it has not started (`external_server_urls`). After each sync the server's bytes are compared with
a new vLLM that loads what the workers hold.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from examples.common.ports import free_port
from examples.integrations.exact import checksums, held, require_equal, start_server
from examples.integrations.skyrl_imports import importable
from examples.integrations.toy_model import write_model
from examples.integrations.toy_trainer import ToyTrainer, join_ranks, ray_of_toys

RANKS = 2
WAIT_S = 600.0


class Policy:
    """An actor with one policy worker of SkyRL in it."""

    async def start(self, folder: str, rank: int, port: int) -> None:
        with importable():
            from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
            from skyrl.train.config import TrainerConfig

            from xfer.integrations.skyrl import RefitByXfer

        class XferPolicyWorker(RefitByXfer, FSDPPolicyWorkerBase):
            def __init__(self, toy: ToyTrainer):
                """What SkyRL's constructor and `init_model` would set, without CUDA."""
                self.cfg, self.model = TrainerConfig(), SimpleNamespace(model=toy.module)
                self.cfg.placement.colocate_all = False
                self._is_lora = self._is_multimodal_lm_only = False

        join_ranks(rank, RANKS, "127.0.0.1", port)
        self.toy = ToyTrainer(folder)
        self.worker = XferPolicyWorker(self.toy)

    async def call(self, method: str, client: Any, config: Any) -> None:
        """Call one of the worker's methods that syncs weights."""
        await getattr(self.worker, method)(client, config)

    async def train(self) -> None:
        self.toy.train()

    async def save(self, folder: str) -> None:
        self.toy.save(folder)

    async def close(self) -> None:
        await asyncio.to_thread(self.worker._weight_transfer_sender.teardown)


async def run(folder: Path, url: str, work: Path, syncs: int) -> None:
    """The part of SkyRL's dispatcher that syncs weights: pause, every worker's broadcast, resume."""
    with importable():
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
        from skyrl.train.config import InferenceEngineConfig

    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], model_name=str(folder), data_parallel_size=1)
    config = InferenceEngineConfig()
    workers = [ray.remote(Policy).options(num_cpus=1).remote() for _ in range(RANKS)]

    def every(method: str, *args: Any) -> None:
        ray.get([getattr(w, method).remote(*args) for w in workers], timeout=WAIT_S)

    port = free_port()
    ray.get([w.start.remote(str(folder), i, port) for i, w in enumerate(workers)], timeout=WAIT_S)
    await asyncio.to_thread(every, "call", "init_weight_sync_state", client, config)
    for step in range(syncs):
        await client.pause_generation()
        try:
            await asyncio.to_thread(every, "call", "broadcast_to_inference_engines", client, config)
        finally:
            await client.resume_generation()
        sums = held(url)
        every("save", str(work / f"step{step}"))
        require_equal(sums, checksums(work / f"step{step}"), f"sync {step + 1}")
        every("train")
    every("close")
    await client.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".skyrl"))
    parser.add_argument("--syncs", type=int, default=2)
    args = parser.parse_args()
    work, port = args.work.absolute(), free_port()
    folder = work / "model"
    write_model(folder)
    with start_server(folder, port) as url, ray_of_toys():
        asyncio.run(run(folder, url, work, args.syncs))


if __name__ == "__main__":
    main()
