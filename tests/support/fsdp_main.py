"""One rank of a real PyTorch trainer for functional tests: transformers' model under FSDP2, HSDP or tensor parallelism
with FSDP2 over it, with AdamW. Commands are `Rank`'s methods.
"""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import xfer
from tests.support import trainer_rank
from tests.support.memory import forget_peak, grown
from tests.support.proc import emit, methods, obey

TP_PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"model.layers.*.self_attn.{x}_proj": ColwiseParallel() for x in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    # Each rank norms its own heads with one weight, whose gradients have to be summed.
    **{f"model.layers.*.self_attn.{x}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for x in "qk"},
    **{f"model.layers.*.mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


class Trainer:
    def __init__(self, folder: str, scheme: str, dtype: str):
        from transformers import AutoModelForCausalLM

        self.folder, self.steps = Path(folder), 0
        self.model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=getattr(torch, dtype))
        self.model.train()
        self._cut(scheme, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def _cut(self, scheme: str, dtype: str) -> None:
        world, over_tp = dist.get_world_size(), scheme == "fsdp over tp"
        axes = {"hsdp": ("copies", "shards"), "fsdp over tp": ("dp", "tp")}.get(scheme)
        mesh = init_device_mesh("cpu", (2, world // 2) if axes else (world,), mesh_dim_names=axes)
        if over_tp:
            parallelize_module(self.model, mesh["tp"], TP_PLAN)
            mesh = mesh["dp"]
        self.batch_rank = dist.get_rank() // (2 if over_tp else 1)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = {"mp_policy": mixed} if dtype == "float32" else {}
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(self.model, mesh=mesh, **policy)

    def loss(self) -> torch.Tensor:
        g = torch.Generator().manual_seed(1000 * self.steps + self.batch_rank)
        tokens = torch.randint(0, self.model.config.vocab_size, (2, 12), generator=g)
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def step(self) -> float:
        self.steps += 1
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> int:
        """A forward without a backward: FSDP2 leaves the root's parameters whole. How many."""
        self.loss()
        return sum(not isinstance(p, DTensor) for p in self.model.parameters())

    def export(self, folder: str) -> None:
        """The whole checkpoint, gathered by torch itself, as a Hugging Face folder. Collective."""
        from safetensors.torch import save_file

        full = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            if self.model.config.tie_word_embeddings:
                full.pop("lm_head.weight", None)
            Path(folder).mkdir()
            shutil.copy(self.folder / "config.json", folder)
            full = {n: t.contiguous() for n, t in full.items()}
            save_file(full, f"{folder}/model.safetensors", metadata={"format": "pt"})
        dist.barrier()

    def shards(self) -> list[list]:
        """Name, local shape and placements of every parameter, by which the test checks its own case."""
        found = self.model.named_parameters()
        return [[n, list(p._local_tensor.shape), [str(x) for x in p.placements]] for n, p in found]


class Rank(trainer_rank.Rank):
    def build(self, **how) -> None:
        self.trainer = Trainer(**how)
        emit("built")

    def shards(self) -> None:
        emit("cut", shards=self.trainer.shards())

    def source(self) -> xfer.TensorTrainer:
        return xfer.TensorTrainer(self.trainer.model)

    def evaluate(self) -> None:
        emit("evaluated", whole=self.trainer.evaluate())

    def refit(self, **options) -> None:
        before = forget_peak()
        emit("refitted", **self.refitted(**options), grown=grown(before))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    obey(*methods(Rank()))
