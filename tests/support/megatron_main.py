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

    def printed(self, lines: str, folder: str, out: str, steps: int) -> dict:
        """Run the lines that a page prints for the trainer, then write the weights that it has."""
        self.trainer, logged = Trainer(folder, tp=dist.get_world_size()), []
        theirs = dict(
            model_chunks=self.trainer.chunks, bridge=self.trainer.bridge, batches=range(steps), log=logged.append
        )
        exec(lines, theirs | {"train_step": lambda batch: self.trainer.step()})
        self.trainer.export(out)
        return dict(logged=logged)

    def source(self) -> xfer.MegatronTrainer:
        return xfer.MegatronTrainer(self.trainer.chunks, self.trainer.bridge)


if __name__ == "__main__":
    obey(*methods(Rank()))
