"""GRPO with a refit after every optimizer step. Runs on every trainer rank:

    torchrun --nproc-per-node 4 -m examples.grpo.train --model FOLDER --rendezvous tcp://10.0.0.1:29600 --rollout http://10.0.0.2:8000

examples/grpo/run.sh starts this and the rollout on one machine. The lines that xfer needs are marked.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from xfer.testing import megatron_cpu

megatron_cpu.install()  # Megatron without a GPU; where there is one this does nothing

import xfer  # noqa: E402
from examples.grpo import grpo  # noqa: E402
from examples.grpo.client import RolloutClient  # noqa: E402
from examples.grpo.gate import Gate, Row  # noqa: E402
from examples.grpo.samples import require_version  # noqa: E402
from examples.grpo.task import SortDigits  # noqa: E402
from xfer.testing.train_loop import Trainer  # noqa: E402


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint to start from")
    parser.add_argument("--rendezvous", required=True, help="tcp://HOST:PORT; trainer rank 0 listens there")
    parser.add_argument("--rollout", required=True, action="append", help="URL of a rollout; once per replica")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--etp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--answers", type=int, default=16, help="answers to each prompt: the group")
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--verify", action="store_true", help="compare checksums before each version is committed")
    parser.add_argument("--gate", type=float, default=1.05, help="largest mean(exp|logprob difference|)")
    parser.add_argument("--curve", type=Path, help="append one line of JSON a step to this file")
    return parser


def main() -> None:
    args = arguments().parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    task, gate, token = SortDigits(args.digits), Gate(args.gate, args.curve), os.environ["XFER_TOKEN"]
    chief = dist.get_rank() == 0
    rollout = RolloutClient(args.rollout, token) if chief else None
    with Trainer(args.model, tp=args.tp, pp=args.pp, ep=args.ep, etp=args.etp, lr=args.lr) as trainer:
        refit = xfer.connect(  # xfer
            trainer=xfer.MegatronTrainer(trainer.chunks, trainer.bridge),  # xfer
            rendezvous=args.rendezvous, token=token, replicas=len(args.rollout),  # xfer
        )  # xfer  # fmt: skip
        report = xfer.nccl_xfer_refit(refit, version=0, verify=args.verify)  # xfer: the engines started without weights
        for step in range(args.steps):
            began = time.monotonic()
            batch, reward = None, 0.0
            if chief:
                groups = rollout.sample(task.prompts(step, args.prompts), n=args.answers, tokens=args.digits, seed=step)
                # `step`, not what the report says: a refit that somebody left out must show.
                require_version((s for g in groups for s in g), str(step))
                rewards = torch.tensor([[task.reward(list(s.prompt), list(s.tokens)) for s in g] for g in groups])
                batch, reward = grpo.pack(groups, rewards, args.tp), rewards.mean().item()
            seen = grpo.step(trainer, grpo.shared(batch, task.prompt_tokens))
            report = xfer.nccl_xfer_refit(refit, version=step + 1, verify=args.verify)  # xfer
            if chief:
                row = Row(
                    step, str(step), reward, seen.error, seen.kl, seen.worst, report.seconds, time.monotonic() - began
                )
                gate.keep(row)
                print(line(row), flush=True)
            gate.judge(step, seen)
        refit.close()  # xfer


def line(r: Row) -> str:
    return (
        f"step {r.step:4d}  reward {r.reward:.3f} {'#' * round(40 * r.reward):40s}  mean(exp|d|) - 1 {r.error - 1:.2e}  "
        f"KL {r.kl:.1e}  refit {1000 * r.refit_s:.0f} of {1000 * r.step_s:.0f} ms"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
