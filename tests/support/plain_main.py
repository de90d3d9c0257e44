"""One rank of a light trainer for functional tests: DTensors under checkpoint names, no framework; commands are `Rank`'s methods. The
weights of a seed are those of `toy.write_checkpoint` with that seed, or of the checkpoint in a folder.
"""

from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from examples.common import toy
from tests.support import trainer_rank
from tests.support.proc import emit, methods, obey
from xfer.trace.slots import local as held
from xfer.trainers.dtensor import TensorTrainer


def placement(name: str, shape: tuple[int, ...]):
    """Cut matrices by rows and the head by columns, unevenly where need be; each rank has whole vectors."""
    return Replicate() if len(shape) < 2 else Shard(1) if name == "lm_head.weight" else Shard(0)


class Weights:
    """This rank's parts of all tensors of a config, or of a checkpoint in a folder, whose seeds are folders. `leave`: globs of names to
    leave out; `extra`, `fp32`: names to add, to widen."""

    def __init__(self, config: dict | None = None, folder: str = "", leave=(), extra=(), fp32=()):
        self.config, self.leave, self.extra, self.fp32 = config, leave, extra, fp32
        self.hold(folder or 0)

    def hold(self, seed) -> None:
        self.mesh, self.parameters, self.replaced = init_device_mesh("cpu", (dist.get_world_size(),)), {}, 0
        for name, full in self.full(seed).items():
            where = placement(name, full.shape)
            self.parameters[name] = self._dtensor(self._local(full, where).clone(), where, full)

    def _dtensor(self, local: torch.Tensor, where, full: torch.Tensor) -> DTensor:
        like = dict(shape=full.shape, stride=full.stride())
        return DTensor.from_local(local, self.mesh, [where], run_check=False, **like)

    def full(self, seed) -> dict[str, torch.Tensor]:
        if self.config is None:
            with safe_open(f"{seed}/model.safetensors", "pt") as f:
                out = {n: f.get_tensor(n) for n in f.keys()}
        else:
            out = toy.tensors(self.config, seed)
            wide = toy.tensors({**self.config, "torch_dtype": "float32"}, seed) if self.fp32 else {}
            out |= {n: wide[n] for n in self.fp32}
        kept = {n: t for n, t in out.items() if not any(fnmatchcase(n, p) for p in self.leave)}
        return kept | {n: torch.zeros(8, 8, dtype=torch.bfloat16) for n in self.extra}

    def _local(self, full: torch.Tensor, where) -> torch.Tensor:
        if not isinstance(where, Shard):
            return full
        parts, rank = full.chunk(dist.get_world_size(), where.dim), dist.get_rank()
        return (parts[rank] if rank < len(parts) else full.narrow(where.dim, 0, 0)).contiguous()

    def set(self, seed) -> None:
        for name, full in self.full(seed).items():
            held(self.parameters[name]).copy_(self._local(full, placement(name, full.shape)))

    def replace(self, how: str) -> None:
        """New storages for some parameters: at other addresses ("moved"), or with other strides too ("changed")."""
        self.replaced += 1
        for name in list(self.parameters)[::7]:
            p = self.parameters[name]
            local = p.to_local()
            if how == "moved":
                new = local.clone()
            else:
                wide = local.shape[-1] + 2 + self.replaced  # never the same twice
                new = torch.zeros(*local.shape[:-1], wide, dtype=local.dtype)[..., : local.shape[-1]]
                new.copy_(local)
            self.parameters[name] = self._dtensor(new, p.placements[0], p)
            local.fill_(float("nan"))  # a trainer that still read the old storage would send this


class Rank(trainer_rank.Rank):
    def build(self, rank: int, world: int, port: int, address: str = "127.0.0.1", **weights) -> None:
        if self.session is not None:
            self.session.close()
        self.session = None
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world)
        self.trainer = Weights(**weights)
        emit("built")

    def source(self) -> TensorTrainer:
        return TensorTrainer(lambda w=self.trainer: w.parameters)

    def set(self, seed) -> None:
        self.trainer.set(seed)

    def replace(self, how: str) -> None:
        self.trainer.replace(how)
        emit("replaced")


if __name__ == "__main__":
    obey(*methods(Rank()))
