"""One rank of a real Megatron-Core trainer for functional tests; commands are `Rank`'s methods."""

import torch.distributed as dist

from examples.common import megatron_cpu
from tests.support import trainer_rank
from tests.support.proc import emit, methods, obey

megatron_cpu.install()
dist.init_process_group("gloo")

import xfer  # noqa: E402
from examples.common.train_loop import Trainer  # noqa: E402


class Rank(trainer_rank.Rank):
    def build(self, folder: str, layout: dict) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = Trainer(folder, **layout)
        emit("built")

    def source(self) -> xfer.MegatronTrainer:
        return xfer.MegatronTrainer(self.trainer.chunks, self.trainer.bridge)


if __name__ == "__main__":
    obey(*methods(Rank()))
