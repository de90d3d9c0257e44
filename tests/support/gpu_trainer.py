"""One trainer rank on a GPU (XFER_GPU: its index), plain or Megatron; commands are `Rank`'s methods. Values of a seed are made on the
device (toy.tensor), so that both sides can make models of any size without a checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

DEVICE = torch.device("cuda", int(os.environ.get("XFER_GPU", "0")))
torch.cuda.set_device(DEVICE)

import torch.distributed as dist  # noqa: E402

from benchmarks.lib.gpu_profile import Profile  # noqa: E402
from examples.common import toy  # noqa: E402
from tests.support import checkpoints, fp8_export, trainer_rank  # noqa: E402
from tests.support.gpu_watch import Watch  # noqa: E402
from tests.support.paused_memory import Pausable  # noqa: E402
from tests.support.proc import emit, methods, obey  # noqa: E402
from xfer.trace.slots import local as held  # noqa: E402


def cut(name: str, shape: tuple[int, ...]):
    """By rows, the head and what comes after an activation by columns, vectors whole: as tensor parallelism does."""
    from torch.distributed.tensor import Replicate, Shard

    if len(shape) == 1 or name.endswith("mlp.gate.weight"):
        return Replicate()
    return Shard(1) if name.rsplit(".", 2)[-2] in ("o_proj", "down_proj", "lm_head") else Shard(0)


def expert(name: str) -> int | None:
    """Which one a tensor is of."""
    parts = name.split(".")
    return int(parts[parts.index("experts") + 1]) if "experts" in parts[:-1] else None


class Plain:
    """This rank's parts of all tensors of a config, each in a storage of its own. experts: every rank holds as many experts,
    whole, as neighbours in one storage, and nothing of the others: expert parallelism beside tensor parallelism. pausable: each in
    memory of its own that can be paused. leave: tensors whose names begin so are those of nobody."""

    def __init__(
        self, config: dict, rank: int, world: int, port: int, address: str = "127.0.0.1", experts=False,
        backend: str = "gloo", pausable=False, leave: str = "",
    ):  # fmt: skip
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        if not dist.is_initialized():
            dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world)
        self.config, self.rank, self.world, self.experts = config, rank, world, experts
        torch.zeros(1, device=DEVICE)  # or the mesh chooses a device by rank
        # Nothing of DTensor's communicates here, so the group may be gloo's.
        self.mesh = init_device_mesh("cuda", (world,))
        self.memory: list[Pausable] | None = [] if pausable else None
        self.changes = 0
        some = [x for x in checkpoints.shapes(config) if not leave or not x[0].startswith(leave)]
        self.parameters = self.own_experts(some) if experts else {}
        for name, shape, dtype in some:
            if experts and expert(name) is not None:
                continue
            local = self.local(torch.empty(shape, dtype=dtype, device="meta"), name)
            self.parameters[name] = DTensor.from_local(
                self.new(local.shape, dtype), self.mesh, [cut(name, shape)], run_check=False,
                shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(),
            )  # fmt: skip

    def new(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if self.memory is None:
            return torch.empty(shape, dtype=dtype, device=DEVICE)
        nbytes = shape.numel() * dtype.itemsize
        self.memory.append(Pausable(nbytes, DEVICE))
        return self.memory[-1].tensor[:nbytes].view(dtype).view(shape)

    def own_experts(self, some) -> dict[str, torch.Tensor]:
        dealt = [(name, shape, dtype) for name, shape, dtype in some if expert(name) is not None]
        count = 1 + max(expert(name) for name, *_ in dealt)
        mine = [x for x in dealt if expert(x[0]) * self.world // count == self.rank]
        sizes = [-(-torch.Size(shape).numel() * dtype.itemsize // 256) * 256 for _, shape, dtype in mine]
        parts = torch.empty(sum(sizes), dtype=torch.uint8, device=DEVICE).split(sizes)
        return {
            name: part[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for part, (name, shape, dtype) in zip(parts, mine)
        }

    def local(self, full: torch.Tensor, name: str) -> torch.Tensor:
        if self.experts and expert(name) is not None:
            return full
        where = cut(name, tuple(full.shape))
        return full.chunk(self.world, where.dim)[self.rank] if hasattr(where, "dim") else full

    def set(self, seed: int) -> None:
        self.seed = seed
        for name, p in self.parameters.items():
            held(p).copy_(self.local(toy.tensor(name, tuple(p.shape), p.dtype, seed, DEVICE), name))
        torch.cuda.synchronize()

    def change(self, share: float) -> None:
        """The lowest bit of this share of the elements, anywhere; of copies on other ranks the same ones."""
        self.changes += 1
        for name, p in self.parameters.items():
            bits = held(p).view(-1).view(torch.int16)
            seed = torch.Generator(DEVICE).manual_seed(self.changes * 1_000_003 + sum(map(ord, name)))
            at = torch.randint(len(bits), (max(1, int(share * len(bits))),), generator=seed, device=DEVICE).unique()
            bits[at] ^= 1
        torch.cuda.synchronize()

    def export(self, folder: str) -> None:
        """These weights as a checkpoint; rank 0 writes it."""
        from safetensors.torch import save_file

        if self.rank:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        whole = {n: toy.tensor(n, s, d, self.seed, DEVICE).cpu() for n, s, d in checkpoints.shapes(self.config)}
        save_file(whole, f"{folder}/model.safetensors", metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(self.config))

    def move(self, every: int = 5) -> None:
        """Other storages for some parameters; who still reads the old ones gets NaN."""
        from torch.distributed.tensor import DTensor

        for name in list(self.parameters)[::every]:
            p = self.parameters[name]
            old = p.to_local()
            self.parameters[name] = DTensor.from_local(
                old.clone(), self.mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            old.fill_(float("nan"))
        torch.cuda.synchronize()

    def offload(self) -> int:
        """To the host and back, giving the device's memory to others in between. Returns the bytes that came back."""
        before = torch.cuda.mem_get_info(DEVICE)[0]
        kept = {}
        for name, p in self.parameters.items():
            local = p.to_local()
            kept[name] = local.cpu()
            local.untyped_storage().resize_(0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        back = torch.cuda.mem_get_info(DEVICE)[0] - before
        for name, p in self.parameters.items():
            local = p.to_local()
            local.untyped_storage().resize_(local.numel() * local.element_size())
            local.copy_(kept[name])
        torch.cuda.synchronize()
        return back

    def remake(self, give_back: bool) -> int:
        """Other memory under all parameters, at the old addresses where that can be had: in between it was the device's
        again, or only torch's. Values are lost. Returns how many lie where they lay."""
        mine = [p.to_local() for p in self.parameters.values()]
        was = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in mine]
        if give_back:
            for t in mine:
                t.untyped_storage().resize_(0)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        for t, (_, nbytes) in zip(mine, was):
            t.untyped_storage().resize_(0)
            t.untyped_storage().resize_(nbytes)
        return sum(t.data_ptr() == address for t, (address, _) in zip(mine, was))

    def source(self, export: bool = False):
        from xfer.trainers.dtensor import TensorTrainer

        return TensorTrainer(lambda: self.parameters)


class Megatron:
    """`layout`: of Trainer; `task`: fields of its task that are not the usual ones."""

    def __init__(self, folder: str, layout: dict, task: dict | None = None):
        from examples.common.train_loop import Trainer

        if not dist.is_initialized():
            dist.init_process_group("nccl")
        self.trainer = Trainer(folder, **layout)
        self.trainer.task = replace(self.trainer.task, **(task or {}))
        self.optimizer, self.step, self.export = self.trainer.optimizer, self.trainer.step, self.trainer.export

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {f"{i}:{n}": p for i, chunk in enumerate(self.trainer.chunks) for n, p in chunk.named_parameters()}

    def export_fp8(self, folder: str) -> None:
        """What is held in FP8 as a checkpoint in block FP8, written by rank 0."""
        from safetensors.torch import save_file

        tensors = fp8_export.checkpoint(self.trainer)
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        dist.barrier()

    def source(self, export: bool = False):
        """`export`: for the packed route, as where a trace cannot tell what is exported: by Bridge's own export."""
        from xfer.trainers.bridge_stream import BridgeStream
        from xfer.trainers.megatron import MegatronTrainer

        trainer = MegatronTrainer(self.trainer.chunks, self.trainer.bridge)
        return BridgeStream(trainer) if export else trainer


class Rank(trainer_rank.Rank):
    export_whole = False

    def __init__(self):
        self._watch, self._profile = Watch(DEVICE), Profile(DEVICE)

    def plain(self, **how) -> None:
        """DTensors under checkpoint names; see `Plain`."""
        self._build(Plain, how)

    def megatron(self, **how) -> None:
        """Real Megatron-Core through Bridge, in a world that RANK, WORLD_SIZE, … describe."""
        self._build(Megatron, how)

    def _build(self, kind: type, how: dict) -> None:
        self.trainer = None
        torch.cuda.empty_cache()
        self.trainer = kind(**how)
        emit("built", kinds=sorted({type(p).__name__ for p in self.trainer.parameters.values()}))

    def source(self):
        return self.trainer.source(self.export_whole)

    def connect(self, export: bool = False, **how) -> None:
        self.export_whole = export
        super().connect(**{"deadline_s": 120.0, **how})

    def export_fp8(self, folder: str) -> None:
        self.trainer.export_fp8(folder)
        emit("exported")

    def set(self, seed: int) -> None:
        self.trainer.set(seed)

    def move(self) -> None:
        self.trainer.move()
        emit("moved")

    def offload(self) -> None:
        self.session.release()
        nbytes = sum(p.to_local().nbytes for p in self.trainer.parameters.values())
        emit("offloaded", back=self.trainer.offload(), bytes=nbytes)

    def pause(self) -> None:
        for x in self.trainer.memory:
            x.pause()
        emit("paused")

    def resume(self) -> None:
        for x in self.trainer.memory:
            x.resume()
        emit("resumed")

    def remake(self, give_back: bool) -> None:
        if give_back:
            self.session.release()
        emit("remade", same=self.trainer.remake(give_back), of=len(self.trainer.parameters))

    def change(self, share: float) -> None:
        self.trainer.change(share)
        emit("changed")

    def refit(self, times: int = 1, pause: float = 0.0, change: float = 0.0, **how) -> None:
        """times: refits, each after `pause` seconds and a change of this share of the elements; the reports of all, and the last one's
        fields."""
        reports = []
        for _ in range(times):
            time.sleep(pause)
            if change:
                self.trainer.change(change)
            reports.append(self.refitted(**how))
        plan = "" if self._watch.on else self.session.explain()  # which has a line for some tensors
        emit("refitted", reports=reports, plan=plan, **reports[-1])

    def memory(self, gpu: int | None = None) -> None:
        """Bytes: of the device beside torch's allocator, allocated by it, and free. `gpu`: another one than this rank's own."""
        device = DEVICE if gpu is None else torch.device("cuda", gpu)
        free, total = torch.cuda.mem_get_info(device)
        beside = total - free - torch.cuda.memory_reserved(device)
        emit("memory", beside=beside, allocated=torch.cuda.memory_allocated(device), free=free)

    def watch(self) -> None:
        self._watch.begin()
        emit("watching")

    def unwatch(self) -> None:
        emit("watched", **self._watch.end())

    def profile(self) -> None:
        self._profile.begin()
        emit("profiling")

    def unprofile(self, path: str) -> None:
        emit("profiled", **self._profile.end(path))


if __name__ == "__main__":
    obey(*methods(Rank()))
