"""One rank of a real Megatron-Core trainer for functional tests; does what the test says on standard input (proc.obey)."""

import os

import torch.distributed as dist

from examples.common import megatron_cpu
from tests.support.connect import flat_connect
from tests.support.proc import emit, obey

megatron_cpu.install()
dist.init_process_group("gloo")

import xfer  # noqa: E402
from examples.common.train_loop import Trainer  # noqa: E402


class Rank:
    trainer: Trainer | None = None
    link: xfer.Session | None = None

    def build(self, folder: str, layout: dict) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = Trainer(folder, **layout)
        emit("built")

    def connect(self, **more) -> None:
        source = xfer.MegatronTrainer(self.trainer.chunks, self.trainer.bridge)
        self.link = flat_connect(trainer=source, token=os.environ["XFER_TOKEN"], **more)
        emit("connected", plan=self.link.explain() if dist.get_rank() == 0 else "")

    def step(self) -> None:
        emit("stepped", loss=self.trainer.step())

    def refit(self, **more) -> None:
        r = xfer.nccl_xfer_refit(self.link, **more)
        emit(
            "refitted",
            version=r.version,
            committed=r.committed,
            verified=r.verified,
            bytes=r.bytes,
            seconds=r.seconds,
            per_worker=[list(o.bytes_per_worker) for o in r.outcomes],
            routes=[[x.route for x in o.routes] for o in r.outcomes],
        )

    def export(self, folder: str) -> None:
        self.trainer.export(folder)
        emit("exported")

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None
        emit("closed")


if __name__ == "__main__":
    rank = Rank()
    obey(rank.build, rank.connect, rank.step, rank.refit, rank.export, rank.close)
