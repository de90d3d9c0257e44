"""GRPO with a refit after every optimizer step. Runs on every trainer rank:

    torchrun --nproc-per-node 4 -m examples.grpo.train --model FOLDER --rendezvous tcp://10.0.0.1:29600 --rollout http://10.0.0.2:8000

examples/grpo/run.sh starts this and the rollout on one machine, with stand-ins (stand_ins.py) for what it lacks. The lines that xfer
needs are marked. Your model stands in policy.py, your task in task.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import xfer
from examples.grpo import grpo
from examples.grpo.client import RolloutClient, ServeClient
from examples.grpo.gate import Gate, Row
from examples.grpo.policy import Policy
from examples.grpo.replicas import Replicas, wait_healthy
from examples.grpo.samples import require_version
from examples.grpo.task import SortDigits

BUCKETS = {True: 40_000_000, False: 50_000}
"""Parameters in one bucket of gradients, with a GPU and without: a small model on a CPU has several buckets, too."""


def field(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint to start from")
    parser.add_argument("--rendezvous", required=True, help="tcp://HOST:PORT; trainer rank 0 listens there")
    parser.add_argument("--rollout", default=[], action="append", help="URL of a rollout.py; once per replica")
    parser.add_argument("--serve", default=[], action="append", help="URL of a `vllm serve`; once per replica")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--etp", type=int, default=1)
    parser.add_argument(
        "--provider", default=[], action="append", type=field, metavar="FIELD=NUMBER",
        help="a field of Bridge's model provider, e.g. num_layers_in_last_pipeline_stage=3; may come again",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--answers", type=int, default=16, help="answers to each prompt: the group")
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each data-parallel rank and step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--verify", action="store_true", help="compare checksums before each version is committed")
    parser.add_argument("--delta", action="store_true", help="send what changed, and count it")
    parser.add_argument("--gate", type=float, default=1.05, help="largest mean(exp|logprob difference|)")
    parser.add_argument("--save", type=Path, help="folder for checkpoints; a run that finds one there goes on from it")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--curve", type=Path, help="append one line of JSON a step to this file")
    return parser


def main() -> None:
    args = arguments().parse_args()
    if bool(args.rollout) == bool(args.serve):
        sys.exit("give --rollout or --serve, and not both")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ranks = grpo.data_parallel(dist.get_world_size(), args.tp, args.pp)
    grpo.refuse_uneven(args.prompts * args.answers, ranks, args.micro_batches)
    task, gate, token = SortDigits(args.digits), Gate(args.gate, args.curve), os.environ["XFER_TOKEN"]
    chief, urls = dist.get_rank() == 0, args.rollout or args.serve
    rollout = (RolloutClient if args.rollout else ServeClient)(urls, token)
    start, model = latest(args.save) or (0, args.model)

    def version(step: int) -> str:  # the same step of another start has other weights, and another name
        return f"{step}@{start}" if start else str(step)

    layout = dict(tp=args.tp, pp=args.pp, ep=args.ep, etp=args.etp)
    more = {"lr": args.lr, "bucket_size": BUCKETS[torch.cuda.is_available()], **dict(args.provider)}
    with Policy(model, **layout, **more) as trainer:
        if chief:
            wait_healthy(args.serve)
        session = xfer.connect(  # xfer
            trainer=xfer.MegatronTrainer(trainer.chunks, trainer.bridge),  # xfer
            rendezvous=args.rendezvous, token=token, replicas=len(urls), engines=args.serve,  # xfer
        )  # xfer  # fmt: skip
        replicas = Replicas(args.serve, session.controllers, args.rendezvous, token) if chief and args.serve else None
        if replicas is not None:
            rollout.version_of = lambda i: replicas.controllers[i].version
        # Engines begin without weights, or with those of an earlier start.
        how = {"verify": args.verify, "delta": "auto" if args.delta else None}  # xfer
        report = xfer.nccl_xfer_refit(session, version=version(start), **how)  # xfer
        replica_bytes, moved, whole = report.bytes // max(1, report.committed), 0, 0
        changes = Changes(trainer.chunks) if args.delta else None
        for step in range(start, args.steps):
            began = time.monotonic()
            batch, reward = None, 0.0
            if chief:
                serving = [o.replica for o in report.outcomes if o.committed]
                groups = rollout.sample(
                    task.prompts(step, args.prompts), n=args.answers, tokens=args.digits, seed=step, replicas=serving
                )
                # The step's own count, not the report's: a refit that somebody left out must show.
                require_version((s for g in groups for s in g), version(step))
                rewards = torch.tensor([[task.reward(list(s.prompt), list(s.tokens)) for s in g] for g in groups])
                batch, reward = grpo.pack(groups, rewards, args.tp), rewards.mean().item()
            seen = grpo.step(trainer, grpo.shared(batch, task.prompt_tokens), micro_batches=args.micro_batches)
            if changes is not None:
                changes.count()
            if replicas is not None:
                replicas.rejoin()
            report = xfer.nccl_xfer_refit(session, version=version(step + 1), min_replicas=1, **how)  # xfer
            moved, whole = moved + report.bytes, whole + report.committed * replica_bytes
            if chief:
                seconds = (report.seconds, time.monotonic() - began, report.transfer_s, report.outage_s)
                row = Row(step, version(step), reward, seen.error, seen.kl, seen.worst, *seconds)
                gate.keep(row)
                print(line(row, report), flush=True)
            gate.judge(step, seen)
            if args.save is not None and (step + 1) % args.save_every == 0:
                save(trainer, args.save, step + 1)
        if replicas is not None:
            replicas.close()
        session.close()  # xfer
    if chief and whole:
        print(f"refits moved {moved:,} of {whole:,} bytes ({moved / whole:.1%})")
        if changes is not None:
            print("elements that a step changed: " + " ".join(f"{share:.2%}" for share in changes.shares))


class Changes:
    """Counts the elements that steps change, by copies of the weights. `shares`: of all elements of all ranks, a step each."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._now = [p.detach() for chunk in chunks for p in chunk.parameters()]
        self._before = [p.clone() for p in self._now]
        self.shares: list[float] = []

    def count(self) -> None:
        changed = sum((now != before).sum() for now, before in zip(self._now, self._before))
        counts = torch.stack([changed, torch.tensor(sum(p.numel() for p in self._now), device=changed.device)])
        dist.all_reduce(counts)
        self.shares.append((counts[0] / counts[1]).item())
        for before, now in zip(self._before, self._now):
            before.copy_(now)


def save(trainer: Policy, folder: Path, step: int) -> None:
    """Weights as a Hugging Face checkpoint. Adam's moments are not kept here; use Megatron's checkpoints for them."""
    trainer.export(folder / f"step-{step}")
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(str(step))
        os.replace(folder / "latest.new", folder / "latest")


def latest(folder: Path | None) -> tuple[int, Path] | None:
    if folder is None or not (folder / "latest").exists():
        return None
    step = int((folder / "latest").read_text())
    return step, folder / f"step-{step}"


def line(r: Row, report: xfer.RefitReport) -> str:
    away = len(report.outcomes) - report.committed
    return (
        f"step {r.step:4d}  reward {r.reward:.3f} {'#' * round(40 * r.reward):40s}  mean(exp|d|) - 1 {r.error - 1:.2e}  "
        f"KL {r.kl:.1e}  refit {1000 * r.refit_s:.0f} of {1000 * r.step_s:.0f} ms"
        + (f"  {away} replicas away" if away else "")
    )


if __name__ == "__main__":
    main()
