"""One rank of a real Megatron-Core trainer for functional tests; commands are `Rank`'s methods."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from examples.common import megatron_cpu
from tests.support import trainer_rank
from tests.support.proc import emit, methods, obey

megatron_cpu.install()
dist.init_process_group("gloo")

import xfer  # noqa: E402
from examples.common.train_loop import Trainer  # noqa: E402


class OfMbridge(Trainer):
    """The same training of a model that mbridge builds, loads and exports."""

    @staticmethod
    def build(folder: str, *, ddp: dict, **_) -> tuple[object, list[torch.nn.Module]]:
        from mbridge import AutoBridge
        from mbridge.core import util
        from megatron.core.enums import ModelType
        from transformers import AutoConfig

        from examples.common import te_twin

        te_twin.install()
        # mbridge 0.15.1 was written for Megatron-Core 0.16, which had one kind of model more, and for transformers 4.
        util.ModelType = SimpleNamespace(encoder_or_decoder=ModelType.encoder_or_decoder, encoder_and_decoder=None)
        config = AutoConfig.from_pretrained(folder)
        if not hasattr(config, "rope_theta"):
            config.rope_theta = config.rope_parameters["rope_theta"]
        bridge = AutoBridge.from_config(config)
        how = dict(wrap_with_ddp=True, ddp_config=ddp, use_cpu_initialization=True, data_parallel_random_init=False)
        return bridge, bridge.get_model(weight_path=folder, **how)

    def _exported(self, keep: bool) -> dict[str, torch.Tensor]:
        self.settle()
        with torch.no_grad():
            return {n: t.detach().clone().contiguous() for n, t in self.bridge.export_weights(self.chunks) if keep}


class Rank(trainer_rank.Rank):
    def build(self, folder: str, layout: dict, mbridge: bool = False) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = (OfMbridge if mbridge else Trainer)(folder, **layout)
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
