"""One rank of a Megatron-Core trainer with FP8 parameters of the real TransformerEngine on a CPU; commands are `Rank`'s methods. There is
no forward pass without a GPU, so a step has random gradients; te_kernels.py stands in for kernels."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from examples.common import megatron_cpu
from tests.support import fp8_export, te_kernels, trainer_rank
from tests.support.one_process_megatron import build_without_gpu
from tests.support.proc import emit, methods, obey

megatron_cpu.install()
build_without_gpu()
dist.init_process_group("gloo")

import xfer  # noqa: E402
from examples.common.train_loop import Trainer  # noqa: E402

te_kernels.install()
te_kernels.gather_one_by_one()
FP8 = dict(fp8="e4m3", fp8_recipe="blockwise", fp8_param=True, ddp=dict(fp8_param_gather=True), lr=1e-2)


class Rank(trainer_rank.Rank):
    def build(self, folder: str, layout: dict) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = Trainer(folder, **FP8, **layout)
        found = {type(p).__name__ for chunk in self.trainer.chunks for p in chunk.parameters()}
        assert "Float8BlockwiseQTensor" in found, found
        emit("built")

    def source(self) -> xfer.MegatronTrainer:
        return xfer.MegatronTrainer(self.trainer.chunks, self.trainer.bridge)

    def step(self) -> None:
        """With equal gradients at equal places of all ranks, so replicas of a parameter stay equal. Parameters are gathered later."""
        noise = torch.Generator().manual_seed(self.trainer.steps)
        for chunk in self.trainer.chunks:
            chunk.zero_grad_buffer()
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.normal_(generator=noise)
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.start_grad_sync()
                group.finish_grad_sync()
        updated, _, _ = self.trainer.optimizer.step()
        assert updated
        self.trainer.steps += 1
        emit("stepped")

    def export(self, folder: str) -> None:
        """The bytes that Bridge exports; as served, since they are in FP8 already."""
        tensors = fp8_export.checkpoint(self.trainer)
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True)
            (Path(folder) / "config.json").write_text((self.trainer.folder / "config.json").read_text())
            save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        dist.barrier()
        emit("exported")


if __name__ == "__main__":
    obey(*methods(Rank()))
