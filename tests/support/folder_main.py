"""One rank of a trainer whose weights are those of a checkpoint on disk, for tests of engines of any family.

    {"do": "build", "folder", "rank", "world", "port", "leave"}   {"do": "connect", "rendezvous", …}
    {"do": "load", "folder"}   {"do": "refit", …}   {"do": "close"}

Matrices are DTensors cut by rows over the ranks, unevenly where need be; vectors are whole on each. `leave`: globs of the
tensors that this trainer does not have.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import xfer
from tests.support.connect import flat_connect
from tests.support.proc import emit, obey
from xfer.trainers.dtensor import TensorTrainer


def tensors(folder: str, leave: list[str]) -> dict[str, torch.Tensor]:
    with safe_open(f"{folder}/model.safetensors", "pt") as f:
        return {n: f.get_tensor(n) for n in f.keys() if not any(fnmatchcase(n, p) for p in leave)}


class Rank:
    link: xfer.Session | None = None

    def build(self, folder: str, rank: int, world: int, port: int, leave: list[str]) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
        self.leave = leave
        self.parameters = {
            name: DTensor.from_local(
                self.local(full).clone(), mesh, [Shard(0) if full.dim() > 1 else Replicate()], run_check=False,
                shape=full.shape, stride=full.stride(),
            )
            for name, full in tensors(folder, leave).items()
        }  # fmt: skip
        emit("built")

    @staticmethod
    def local(full: torch.Tensor) -> torch.Tensor:
        if full.dim() < 2:
            return full
        parts = full.chunk(dist.get_world_size())
        return parts[dist.get_rank()] if dist.get_rank() < len(parts) else full[:0]

    def connect(self, **more) -> None:
        source = TensorTrainer(lambda: self.parameters)
        self.link = flat_connect(trainer=source, token=os.environ["XFER_TOKEN"], **more)
        emit("connected", plan=self.link.explain())

    def load(self, folder: str) -> None:
        for name, full in tensors(folder, self.leave).items():
            self.parameters[name].to_local().copy_(self.local(full))
        emit("loaded")

    def refit(self, **more) -> None:
        r = xfer.nccl_xfer_refit(self.link, **more)
        emit("refitted", version=r.version, verified=r.verified, committed=[o.committed for o in r.outcomes])

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None
        emit("closed")


if __name__ == "__main__":
    r = Rank()
    obey(r.build, r.connect, r.load, r.refit, r.close)
