"""Ray without an RL framework: two FSDP2 ranks refit two `AsyncLLM`s, each an actor in one placement group, at toy size, on CPUs.

    python -m examples.integrations.ray_async --work .ray

Ray, vLLM and xfer are in one environment. The actors of `Trainer` and `Engine` are what a job on GPUs would copy, with `num_gpus=1`
per bundle. Each engine goes on generating while it is refitted. After each refit both engines' bytes are compared with a new vLLM
that loads what the trainers hold.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from examples.common.ports import free_port
from examples.integrations.exact import ENGINE, checksums, require_equal
from examples.integrations.toy_model import write_model
from examples.integrations.toy_trainer import ToyTrainer, join_ranks, ray_of_toys
from xfer.integrations.common import ANY_CAST, Invitation, make_invitation

RANKS, REPLICAS = 2, 2
WAIT_S = 600.0


class Trainer:
    """One rank."""

    def invitation(self) -> Invitation:
        return make_invitation(ray.util.get_node_ip_address())

    def start(self, folder: str, rank: int, port: int, invitation: Invitation) -> None:
        join_ranks(rank, RANKS, invitation.rendezvous.split("/")[2].rsplit(":", 1)[0], port)
        self.toy, self.invited = ToyTrainer(folder), invitation

    def connect(self, replicas: int) -> None:
        import xfer

        source = xfer.TensorTrainer(self.toy.module)
        invitation = self.invited
        self.session = xfer.connect(source, invitation.rendezvous, invitation.token, replicas=replicas, route=ANY_CAST)

    def refit(self) -> int:
        return self.session.refit().bytes_sent

    def train(self) -> None:
        self.toy.train()

    def save(self, folder: str) -> None:
        self.toy.save(folder)

    def close(self) -> None:
        self.session.close()


class Engine:
    """An engine. Its methods are coroutines, so that Ray runs it in the event loop that `AsyncLLM` needs."""

    async def start(self, folder: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=folder, load_format="dummy", dtype="bfloat16", weight_transfer_config={"backend": "xfer"}, **ENGINE
        )
        self.llm = AsyncLLM.from_engine_args(args)

    async def serve(self, invitation: Invitation, replica: int) -> None:
        import xfer

        self.controller = xfer.serve(self.llm, invitation.rendezvous, invitation.token, replica=replica)

    async def generate(self, request: str, tokens: int = 8) -> list[int]:
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        async for output in self.llm.generate({"prompt_token_ids": [3, 4, 5]}, asked, request):
            found = list(output.outputs[0].token_ids)
        return found

    async def checksums(self) -> dict[str, str]:
        return (await self.llm.collective_rpc("compute_weight_checksums"))[0]

    async def shut_down(self) -> None:
        self.llm.shutdown()

    async def close(self) -> None:
        await asyncio.to_thread(self.controller.close)


def every(actors: list[Any], method: str, *args: Any) -> list[Any]:
    """Call a method of all actors at once."""
    return ray.get([getattr(a, method).remote(*args) for a in actors], timeout=WAIT_S)


def start_actors(
    folder: Path, trainer: type = Trainer, engine: type = Engine
) -> tuple[list[Any], list[Any], Invitation]:
    """Write the toy, and start trainers and engines on it in one placement group.

    Returns:
        The actors of the trainers and of the engines, and where they will meet.
    """
    write_model(folder)
    group = placement_group([{"CPU": 1}] * (RANKS + REPLICAS), strategy="PACK")
    ray.get(group.ready(), timeout=WAIT_S)

    def actor(kind: type, index: int) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return ray.remote(kind).options(num_cpus=1, scheduling_strategy=place).remote()

    trainers = [actor(trainer, i) for i in range(RANKS)]
    engines = [actor(engine, RANKS + i) for i in range(REPLICAS)]
    invitation = ray.get(trainers[0].invitation.remote(), timeout=WAIT_S)
    port = free_port()
    waits = [t.start.remote(str(folder), i, port, invitation) for i, t in enumerate(trainers)]
    ray.get([*waits, *(e.start.remote(str(folder)) for e in engines)], timeout=WAIT_S)
    return trainers, engines, invitation


def compare(trainers: list[Any], engines: list[Any], folder: Path, label: str) -> None:
    """Raise unless each engine holds what the trainers hold, bit for bit."""
    every(trainers, "save", str(folder))
    wanted = checksums(folder)
    for i, found in enumerate(every(engines, "checksums")):
        require_equal(found, wanted, f"{label}, replica {i}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".ray"))
    parser.add_argument("--refits", type=int, default=2)
    args = parser.parse_args()
    work = args.work.absolute()
    with ray_of_toys():
        trainers, engines, invitation = start_actors(work / "model")
        ray.get([e.serve.remote(invitation, i) for i, e in enumerate(engines)], timeout=WAIT_S)
        every(trainers, "connect", len(engines))
        for step in range(args.refits):
            running = [e.generate.remote(f"request{step}", 64) for e in engines] if step else []
            moved = sum(every(trainers, "refit"))
            compare(trainers, engines, work / f"step{step}", f"refit {step + 1}")
            ray.get(running, timeout=WAIT_S)
            same = every(engines, "generate", f"check{step}")
            if any(tokens != same[0] for tokens in same):
                raise RuntimeError(f"refit {step + 1}: replicas answer {same}")
            print(f"refit {step + 1}: {moved} bytes; sampled {same[0]}", flush=True)
            every(trainers, "train")
        every(trainers, "close")
        every(engines, "close")
        every(engines, "shut_down")


if __name__ == "__main__":
    main()
