"""One trainer rank on a GPU; does what the test says on standard input, each command answered by one line.

    {"do": "plain", "config", "rank", "world", "port"}      DTensors under checkpoint names, cut as `cut` says;
                                                            with "experts", those are dealt out whole; with "pausable",
                                                            all in memory that can be paused
    {"do": "megatron", "folder", "layout", …}               real Megatron-Core through Bridge (RANK, WORLD_SIZE, … set)
    {"do": "connect", …} {"do": "set", "seed"} {"do": "step"} {"do": "refit", "times", …} {"do": "move"} {"do": "offload"}
    {"do": "pause"} {"do": "resume"}
    {"do": "remake", "give_back"} {"do": "export", "folder"} {"do": "memory", "gpu"} {"do": "watch"} {"do": "unwatch"}
    {"do": "profile"} {"do": "unprofile", "path"} {"do": "close"}

Which GPU: XFER_GPU (an index). Values of a seed are made on the device (gpu_values.py), so that both sides can make
models of any size without a checkpoint.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path

import torch

from tests.support.connect import flat_connect

DEVICE = torch.device("cuda", int(os.environ.get("XFER_GPU", "0")))
torch.cuda.set_device(DEVICE)

import torch.distributed as dist  # noqa: E402

from tests.support.gpu_profile import Profile  # noqa: E402
from tests.support.gpu_values import names, value  # noqa: E402
from tests.support.gpu_watch import Watch  # noqa: E402
from tests.support.paused_memory import Pausable  # noqa: E402
from tests.support.proc import commands, emit  # noqa: E402
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
    memory of its own that can be paused."""

    def __init__(
        self, config: dict, rank: int, world: int, port: int, experts=False, backend: str = "gloo", pausable=False
    ):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        if not dist.is_initialized():
            dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        self.config, self.rank, self.world, self.experts = config, rank, world, experts
        torch.zeros(1, device=DEVICE)  # or the mesh chooses a device by rank
        self.mesh = init_device_mesh(
            "cuda", (world,)
        )  # nothing of DTensor's communicates here, so the group may be gloo's
        self.memory: list[Pausable] | None = [] if pausable else None
        self.parameters = self.own_experts(names(config)) if experts else {}
        for name, shape, dtype in names(config):
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
            held(p).copy_(self.local(value(name, tuple(p.shape), p.dtype, seed, DEVICE), name))
        torch.cuda.synchronize()

    def export(self, folder: str) -> None:
        """These weights as a checkpoint; rank 0 writes it."""
        from safetensors.torch import save_file

        if self.rank:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        whole = {n: value(n, s, d, self.seed, DEVICE).cpu() for n, s, d in names(self.config)}
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
    def __init__(self, folder: str, layout: dict):
        from examples.common.train_loop import Trainer

        if not dist.is_initialized():
            dist.init_process_group("nccl")
        self.trainer = Trainer(folder, **layout)

    def step(self) -> float:
        return self.trainer.step()

    def export(self, folder: str) -> None:
        self.trainer.export(folder)

    def source(self, export: bool = False):
        """`export`: for the packed route, as where a trace cannot tell what is exported: by Bridge's own export."""
        from xfer.trainers.bridge_stream import BridgeStream
        from xfer.trainers.megatron import MegatronTrainer

        trainer = MegatronTrainer(self.trainer.chunks, self.trainer.bridge)
        return BridgeStream(trainer) if export else trainer


def memory(gpu: int | None = None) -> dict:
    """Bytes: of the device beside torch's allocator, allocated by it, and free. `gpu`: another one than this rank's own."""
    device = DEVICE if gpu is None else torch.device("cuda", gpu)
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return dict(beside=total - free - reserved, allocated=allocated, free=free)


def told(r, began: float) -> dict:
    return dict(
        version=r.version, committed=[o.committed for o in r.outcomes], verified=r.verified, scalars=r.flatten(""),
        routes=r.routes(), extra=r.extra_bytes, seconds=time.monotonic() - began,
        phases=[dict(o.phases) for o in r.outcomes], errors=[str(o.error or "") for o in r.outcomes],
    )  # fmt: skip


def main() -> None:
    import xfer

    model = refit = None
    watch, profiled = Watch(DEVICE), Profile(DEVICE)
    emit("up")
    for c in commands():
        do = c.pop("do")
        began = time.monotonic()
        try:
            if do in ("plain", "megatron"):
                model = None
                torch.cuda.empty_cache()
                model = (Plain if do == "plain" else Megatron)(**c)
                emit("built")
            elif do == "connect":
                refit = flat_connect(
                    trainer=model.source(c.pop("export", False)),
                    cache_dir=None,
                    **{"token": os.environ["XFER_TOKEN"], "deadline_s": 120.0, **c},
                )
                emit("connected", plan=refit.explain(), seconds=time.monotonic() - began)
            elif do == "set":
                model.set(c["seed"])
                emit("set")
            elif do == "step":
                emit("stepped", loss=model.step())
            elif do == "export":
                model.export(c["folder"])
                emit("exported")
            elif do == "move":
                model.move()
                emit("moved")
            elif do == "offload":
                refit.release()
                emit(
                    "offloaded", back=model.offload(), bytes=sum(p.to_local().nbytes for p in model.parameters.values())
                )
            elif do == "pause":
                for x in model.memory:
                    x.pause()
                emit("paused")
            elif do == "resume":
                for x in model.memory:
                    x.resume()
                emit("resumed")
            elif do == "remake":
                if c["give_back"]:
                    refit.release()
                emit("remade", same=model.remake(**c), of=len(model.parameters))
            elif do == "refit":
                times = c.pop("times", 1)
                pause = c.pop("pause", 0.0)
                reports = []
                for _ in range(times):
                    time.sleep(pause)
                    began = time.monotonic()
                    reports.append(told(xfer.nccl_xfer_refit(refit, **c), began))
                emit("refitted", reports=reports, plan=refit.explain(), **reports[-1])
            elif do == "memory":
                emit("memory", **memory(**c))
            elif do == "watch":
                watch.begin()
                emit("watching")
            elif do == "unwatch":
                emit("watched", **watch.end())
            elif do == "profile":
                profiled.begin()
                emit("profiling")
            elif do == "unprofile":
                emit("profiled", **profiled.end(c["path"]))
            elif do == "close":
                if refit is not None:
                    refit.close()
                refit = None
                emit("closed")
        except Exception as e:
            traceback.print_exc()
            emit("raised", type=type(e).__name__, text=str(e), seconds=time.monotonic() - began,
                 drained=getattr(e, "drained", True))  # fmt: skip


if __name__ == "__main__":
    main()
