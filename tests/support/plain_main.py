"""One rank of a light trainer for functional tests: DTensors under checkpoint names, no framework; commands are `Rank`'s methods.

The weights of a seed are those of `toy.write_checkpoint` with that seed, so what an engine must hold is known without
xfer.
"""

import os
import time
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import xfer
from examples.common import toy
from tests.support.connect import flat_connect
from tests.support.proc import emit, methods, obey
from xfer.errors import RebindError, XferError
from xfer.trace.slots import local as held
from xfer.trainers.dtensor import TensorTrainer


def placement(name: str, shape: tuple[int, ...]):
    """Matrices by rows, the head by columns, vectors whole on every rank."""
    return Replicate() if len(shape) == 1 else Shard(1) if name == "lm_head.weight" else Shard(0)


def peft_name(name: str) -> str:
    """What PEFT calls a checkpoint's tensor in a model whose query projections have adapters."""
    return "base_model.model." + name.replace(".q_proj.weight", ".q_proj.base_layer.weight")


def plain_name(name: str) -> str:
    """The checkpoint's name of a tensor of such a model; adapters have none and keep theirs."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


class Weights:
    """This rank's parts of all tensors of a config. `leave`, `extra`, `fp32`: names to miss, to make up, to widen. `peft`: under
    PEFT's names and with adapters. `trains`: globs of what requires grad. `drifted`: ranks whose norms differ."""

    def __init__(self, config: dict, leave=(), extra=(), fp32=(), peft=False, trains=(), drifted=()):
        self.config, self.leave, self.extra, self.fp32 = config, leave, extra, fp32
        self.name = peft_name if peft else str
        if peft:
            at = [n.removesuffix(".weight") for n, *_ in toy.specs(config) if n.endswith(".q_proj.weight")]
            self.extra = [f"{n}.lora_{x}.default.weight" for n in at for x in "AB"]
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.parameters: dict[str, DTensor] = {}
        self.replaced = 0
        for name, full in self.full(0).items():
            where = placement(name, full.shape)
            local = self._local(full, where)
            self.parameters[self.name(name)] = DTensor.from_local(
                local.clone(), self.mesh, [where], run_check=False, shape=full.shape, stride=full.stride()
            ).requires_grad_(any(fnmatch(name, x) for x in trains))
        if dist.get_rank() in drifted:
            self.step(["*norm.weight"])

    def full(self, seed: int) -> dict[str, torch.Tensor]:
        out = toy.tensors(self.config, seed)
        wide = toy.tensors({**self.config, "torch_dtype": "float32"}, seed) if self.fp32 else {}
        out |= {n: wide[n] for n in self.fp32}
        return {n: t for n, t in out.items() if n not in self.leave} | {
            n: torch.zeros(8, 8, dtype=torch.bfloat16) for n in self.extra
        }

    def _local(self, full: torch.Tensor, where) -> torch.Tensor:
        if not isinstance(where, Shard):
            return full
        parts = full.chunk(dist.get_world_size(), where.dim)
        return parts[dist.get_rank()].contiguous()

    def set(self, seed: int) -> None:
        for name, full in self.full(seed).items():
            held(self.parameters[self.name(name)]).copy_(self._local(full, placement(name, full.shape)))

    def step(self, names: list[str]) -> None:
        """Other values in what these globs name, on this rank."""
        for name, p in self.parameters.items():
            if any(fnmatch(plain_name(name), x) for x in names):
                held(p).add_(1)

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
            self.parameters[name] = DTensor.from_local(
                new, self.mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            local.fill_(float("nan"))  # whoever still reads the old storage sends this


class Trainer(TensorTrainer):
    fail = ""

    def drain(self) -> None:
        if self.fail:
            raise RebindError(self.fail, where=f"trainer {self.rank}")
        super().drain()


class Rank:
    weights = source = session = None

    def build(self, rank: int, world: int, port: int, **weights) -> None:
        self._close()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        self.weights = Weights(**weights)
        emit("built")

    def connect(self, otherwise: dict | None = None, rank: int | None = None, world: int | None = None, **how) -> None:
        """otherwise: options with which it connects at once if the first connection is refused, as users write it."""
        self.source = Trainer(lambda w=self.weights: w.parameters, rename=plain_name, rank=rank, world=world)
        options, failed = {"trainer": self.source, "token": os.environ["XFER_TOKEN"], **how}, ""
        try:
            self.session = flat_connect(**options)
        except XferError as e:
            if otherwise is None:
                raise
            failed = type(e).__name__
            self.session = flat_connect(**{**options, **otherwise})
        emit("connected", plan=self.session.explain(), failed=failed)

    def set(self, seed: int) -> None:
        self.weights.set(seed)
        emit("set")

    def step(self, names: list[str]) -> None:
        self.weights.step(names)
        emit("stepped")

    def sleep(self, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        emit("slept", began=began, ended=time.monotonic())

    def replace(self, how: str) -> None:
        self.weights.replace(how)
        emit("replaced")

    def fail(self, text: str) -> None:
        self.source.fail = text
        emit("will fail" if text else "will not fail")

    def refit(self, **how) -> None:
        began = time.monotonic()
        r = xfer.nccl_xfer_refit(self.session, **how)
        emit(
            "refitted", version=r.version, verified=r.verified, seconds=time.monotonic() - began, sent=r.bytes_sent,
            committed=[o.committed for o in r.outcomes], serving=[o.serving for o in r.outcomes], text=str(r.outcomes),
            errors=[f"{type(o.error).__name__}: {o.error}" if o.error else "" for o in r.outcomes],
            per_worker=[list(o.bytes_per_worker) for o in r.outcomes],
        )  # fmt: skip

    def close(self) -> None:
        self._close()
        emit("closed")

    def _close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session = None


if __name__ == "__main__":
    obey(*methods(Rank()))
