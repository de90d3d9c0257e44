"""One rank of the example's trainer, step by step as a test says on standard input; the steps are the example's own.

{"do": "build", "folder", "layout"}   {"do": "connect", "rendezvous", "url"}   {"do": "refit", "version", "verify"}
{"do": "step", "number", "version"}   {"do": "fault", "name", "args"}   {"do": "close"}
"""

import os

import torch
import torch.distributed as dist

from examples.common import megatron_cpu
from tests.support.connect import flat_connect
from tests.support.proc import PATIENCE, emit, obey

megatron_cpu.install()
dist.init_process_group("gloo")

import xfer  # noqa: E402
from examples.common.train_loop import Trainer  # noqa: E402
from examples.grpo import grpo  # noqa: E402
from examples.grpo.client import RolloutClient  # noqa: E402
from examples.grpo.samples import require_version  # noqa: E402
from examples.grpo.task import SortDigits  # noqa: E402
from xfer.errors import XferError  # noqa: E402

TASK = SortDigits()
CHIEF = dist.get_rank() == 0


class Rank:
    def build(self, folder: str, layout: dict) -> None:
        self.trainer = Trainer(folder, lr=5e-3, **layout)
        self.multiple = layout.get("tp", 1)
        emit("built")

    def connect(self, rendezvous: str, url: str) -> None:
        token = os.environ["XFER_TOKEN"]
        self.client = RolloutClient([url], token, deadline_s=300 * PATIENCE)
        source = xfer.MegatronTrainer(self.trainer.chunks, self.trainer.bridge)
        self.link = flat_connect(trainer=source, rendezvous=rendezvous, token=token, deadline_s=300 * PATIENCE)
        emit("connected")

    def refit(self, **more) -> None:
        report = xfer.nccl_xfer_refit(self.link, **more)
        emit("refitted", version=report.version, verified=report.verified)

    def step(self, number: int, version: int) -> None:
        """Sample, train. `wrong`: what the check of versions says, which must be nothing in a clean step."""
        batch, wrong = None, ""
        if CHIEF:
            groups = self.client.sample(TASK.prompts(number, 16), n=8, tokens=TASK.digits, seed=number)
            try:
                require_version((s for g in groups for s in g), str(version))
            except XferError as e:
                wrong = str(e)
            rewards = torch.tensor([[TASK.reward(list(s.prompt), list(s.tokens)) for s in g] for g in groups])
            batch = grpo.pack(groups, rewards, self.multiple)
        seen = grpo.step(self.trainer, grpo.shared(batch, TASK.prompt_tokens))
        emit("stepped", error=seen.error, kl=seen.kl, worst=seen.worst, tokens=seen.tokens, wrong=wrong)

    def fault(self, name: str, args: list) -> None:
        found = self.client.post(self.client.urls[0], "/fault", {"name": name, "args": args})["found"] if CHIEF else []
        emit("faulty", found=found)

    def close(self) -> None:
        self.link.close()
        emit("closed")


if __name__ == "__main__":
    rank = Rank()
    obey(rank.build, rank.connect, rank.refit, rank.step, rank.fault, rank.close)
