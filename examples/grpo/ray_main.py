"""The loop with Ray actors: trainer ranks and the rollout in one placement group, each side in its own Python.

    python -m examples.grpo.ray_main --engine-python .venvs/engine/bin/python --steps 20

Run it with the trainers' Python, from this repository. A cluster that RAY_ADDRESS names, or that runs here, is used as it is.
Prompts, samples and rewards travel by Ray's calls; weights never do: around every refit the driver asks Ray's own count of what its object
store has taken, and it must not have grown.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from examples.grpo import model
from examples.grpo.gate import Gate, Row
from examples.grpo.samples import Sample, require_version
from examples.grpo.task import SortDigits

WAIT_S = 900.0


class TrainerRank:
    """One rank. Megatron is imported where the actor runs, not in the driver."""

    def __init__(self, rank: int, world: int):
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
        from examples.grpo import stand_ins

        stand_ins.install()

    def address(self) -> tuple[str, int, int]:
        """Of this rank's host, with two free ports: torch's and the rendezvous'."""
        from examples.common.ports import free_port

        return ray.util.get_node_ip_address(), free_port(), free_port()

    def connect(self, folder: str, layout: dict, address: tuple[str, int, int], token: str) -> None:
        import torch.distributed as dist

        import xfer
        from examples.grpo.policy import Policy

        host, port, rendezvous = address
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.tp, self.trainer = layout["tp"], Policy(folder, lr=5e-3, bucket_size=50_000, **layout)
        source = xfer.MegatronTrainer(self.trainer.chunks, self.trainer.bridge)
        self.link = xfer.connect(trainer=source, rendezvous=f"tcp://{host}:{rendezvous}", token=token)

    def refit(self, version: int) -> float:
        """Seconds."""
        import xfer

        return xfer.nccl_xfer_refit(self.link, version=version).seconds

    def step(self, groups: list[list[dict]], rewards: list[list[float]]):
        from examples.grpo import grpo

        read = [[Sample.read(s) for s in g] for g in groups]
        return grpo.step(self.trainer, grpo.pack(read, torch.tensor(rewards), self.tp))

    def close(self) -> None:
        self.link.close()


class RolloutActor:
    def __init__(self, folder: str, tp: int, address: tuple[str, int, int], token: str):
        import xfer
        from examples.grpo import rollout

        llm = rollout.start(folder, tp=tp, dtype="float32", max_samples=256)
        url = f"tcp://{address[0]}:{address[2]}"
        self.rollout = rollout.Rollout(llm, lambda: xfer.serve(llm, rendezvous=url, token=token))

    def sample(self, prompts: list[list[int]], n: int, tokens: int, seed: int) -> list[list[dict]]:
        return self.rollout.sample(prompts, n, tokens, seed)["groups"]


def stored_bytes() -> int:
    """What the object store of the driver's node has taken since it began."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return stats.cumulative_created_bytes


def refuse_another_version(python: str) -> None:
    """Ray sends the code of actors as bytecode. Another version of Python crashes on it, when the actor is made."""
    ask = "import sys; print(*sys.version_info[:2], sep='.')"
    theirs = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    mine = ".".join(map(str, sys.version_info[:2]))
    if theirs != mine:
        raise SystemExit(
            f"Ray runs one version of Python: this one is {mine}, {python} is {theirs}. Make both environments with one version "
            "(TRAINER=0.16.1 scripts/setup.sh makes both with 3.11), or start the loop without Ray: examples/grpo/run.sh"
        )


def start_ray(cpus: int) -> None:
    """Joins the cluster that RAY_ADDRESS names or that runs here, with what it has; else starts one of that many CPUs."""
    if os.environ.get("RAY_ADDRESS") != "local":
        try:
            ray.init(address="auto")
            return
        except ConnectionError:
            if os.environ.get("RAY_ADDRESS"):
                raise
    ray.init(address="local", include_dashboard=False, num_cpus=cpus)


def variables(gpus: bool) -> dict[str, str]:
    """Of every actor. This repository comes first where they look for modules."""
    path = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)}
    if not gpus:
        given |= {"TORCHDYNAMO_DISABLE": "1", "XFER_CPU_RESIDENT": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        given |= {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--work", type=Path, default=Path(".grpo/ray"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--engine-tp", type=int, default=2)
    args = parser.parse_args()
    refuse_another_version(args.engine_python)
    args.work.mkdir(parents=True, exist_ok=True)
    folder, curve = str((args.work / "model").absolute()), args.work / "curve.jsonl"
    curve.unlink(missing_ok=True)
    model.write("dense", folder)
    gpu = {"GPU": 1} if torch.cuda.is_available() else {}
    start_ray(args.ranks + args.engine_tp)
    try:
        loop(args, folder, curve, gpu, variables(bool(gpu)))
    finally:
        ray.shutdown()


def loop(args: argparse.Namespace, folder: str, curve: Path, gpu: dict, variables: dict) -> None:
    task, gate, token = SortDigits(), Gate(1.05, curve), secrets.token_hex(16)
    bundles = [{"CPU": 1, **gpu}] * args.ranks + [{"CPU": args.engine_tp, **({"GPU": args.engine_tp} if gpu else {})}]
    group = placement_group(bundles, strategy="PACK")
    ray.get(group.ready(), timeout=WAIT_S)

    def actor(kind, index: int, python: str, *what):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        environment = {"py_executable": os.path.abspath(python), "env_vars": variables}
        asked = dict(num_cpus=bundles[index]["CPU"], num_gpus=bundles[index].get("GPU", 0))
        return ray.remote(kind).options(scheduling_strategy=place, runtime_env=environment, **asked).remote(*what)

    def every(method: str, *what):
        return ray.get([getattr(t, method).remote(*what) for t in trainers], timeout=WAIT_S)

    trainers = [actor(TrainerRank, r, sys.executable, r, args.ranks) for r in range(args.ranks)]
    address = ray.get(trainers[0].address.remote(), timeout=WAIT_S)
    rollout = actor(RolloutActor, args.ranks, args.engine_python, folder, args.engine_tp, address, token)
    every("connect", folder, dict(tp=args.tp, pp=1), address, token)

    def refit(version: int) -> float:
        before = stored_bytes()
        seconds = max(every("refit", version))
        if (grown := stored_bytes() - before) != 0:
            raise RuntimeError(
                f"during a refit {grown} bytes came into this node's object store: weights must not go that way, and "
                "what other jobs of this cluster put there cannot be told from them"
            )
        return seconds

    before = stored_bytes()
    probe = ray.put(bytes(1 << 20))
    if stored_bytes() - before < 1 << 20:
        raise RuntimeError("this Ray does not count what its object store takes, so nothing would be proven")
    del probe
    refit(0)
    refits = 1
    for step in range(args.steps):
        began = time.monotonic()
        groups = ray.get(rollout.sample.remote(task.prompts(step, 16), 16, task.digits, step), timeout=WAIT_S)
        samples = [[Sample.read(s) for s in g] for g in groups]
        require_version((s for g in samples for s in g), str(step))
        rewards = [[task.reward(list(s.prompt), list(s.tokens)) for s in g] for g in samples]
        seen = every("step", groups, rewards)[0]
        seconds, refits = refit(step + 1), refits + 1
        mean = torch.tensor(rewards).mean().item()
        gate.keep(Row(step, str(step), mean, seen.error, seen.kl, seen.worst, seconds, time.monotonic() - began))
        print(f"step {step:4d}  reward {mean:.3f}  mean(exp|d|) - 1 {seen.error - 1:.2e}  KL {seen.kl:.1e}", flush=True)
        gate.judge(step, seen)
    print(f"{refits} refits put 0 bytes into Ray's object store", flush=True)
    every("close")


if __name__ == "__main__":
    main()
