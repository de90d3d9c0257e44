"""One rank of plain torch parameters under a layer-wise optimizer; does what the test says (proc.obey). All ranks lie on GPU XFER_GPU,
as hosts of their own to NCCL, which refuses two ranks of one host there. Without a GPU: on the CPU, over gloo.

The model that refits are of has the parameters of a checkpoint and no forward: an optimizer makes its parameters what their
gradients are, so those of a seed (toy.tensor) are there after one step. Checkpoints are of a small network that learns.
"""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta

from tests.support.connect import flat_connect

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or two runs differ by the order in which cuBLAS adds

import torch

from tests.support.gpu_job import nccl_host

RANK = int(os.environ["RANK"])
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    os.environ.update(nccl_host(f"host{RANK}"))
    DEVICE = torch.device("cuda", int(os.environ.get("XFER_GPU", "0")))
    torch.cuda.set_device(DEVICE)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from examples.common import toy  # noqa: E402
from tests.support.proc import emit, obey  # noqa: E402
from xfer.layerwise import LayerWiseOptimizer, Muon, ParamGroup, checkpoint  # noqa: E402

DEADLINE_S = 60.0


class Becomes(torch.optim.Optimizer):
    """Every parameter becomes its gradient."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(p.grad)


def tree(config: dict) -> nn.Module:
    """A module with the parameters of the checkpoint of a config, under their names."""
    root = nn.Module()
    for name, shape, dtype in toy.specs(config):
        *path, key = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.register_parameter(key, nn.Parameter(torch.zeros(shape, dtype=dtype, device=DEVICE)))
    return root


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


class Rank:
    net = optimizer = link = None
    cycles = 0.0

    # ---- refits

    def build(self, config: dict, **options) -> None:
        self.net = tree(config)
        self.optimizer = LayerWiseOptimizer(
            self.net,
            [ParamGroup(list(self.net.parameters()), Becomes, cost="bytes")],
            **{"reduce": "done", "bucket_bytes": 200_000, "deadline_s": DEADLINE_S, **options},
        )
        if DEVICE.type == "cuda":
            torch.cuda._sleep(1000)  # loaded now
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(200_000_000)
            ended.record()
            ended.synchronize()
            self.cycles = 200_000_000 / (began.elapsed_time(ended) / 1e3)
        gather = self.optimizer.gather
        emit("built", buckets=len(gather.buckets), pulled=len(gather.pulls), owned=len(self.optimizer.owned))

    def connect(self, sources: str = "owners", **where) -> None:
        from xfer.trainers.dtensor import TensorTrainer
        from xfer.trainers.layerwise import LayerWiseTrainer

        source = LayerWiseTrainer(TensorTrainer(self.net), self.optimizer, sources)
        self.link = flat_connect(trainer=source, token=os.environ["XFER_TOKEN"], **{"deadline_s": 120.0, **where})
        emit("connected", plan=self.link.explain())

    def step(self, seed: int, hold_s: float = 0.0) -> None:
        """hold_s: for about so long the copies of this rank's gather do not begin."""
        for name, p in self.optimizer.named:
            p.grad = toy.tensor(name, tuple(p.shape), p.dtype, seed, DEVICE)
        streams = {pulls.stream for pulls in self.optimizer.gather.pulls.values()} - {None}
        for stream in streams if hold_s else ():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(hold_s * self.cycles))
        self.optimizer.step()
        self.optimizer.zero_grad()
        emit("stepped", coming=self._coming())

    def _coming(self) -> int:
        """Buckets whose copies have not ended."""
        works = [w for b in self.optimizer.gather.buckets for w in b.works]
        events = [e for e in (getattr(w, "_event", None) for w in works) if e is not None]
        return sum(not e.query() for e in events)

    def refit(self, **how) -> None:
        import xfer

        began = time.monotonic()
        r = xfer.nccl_xfer_refit(self.link, **how)
        emit(
            "refitted", coming=self._coming(), states=[b.state.value for b in self.optimizer.gather.buckets],
            seconds=time.monotonic() - began, version=r.version, verified=r.verified, routes=r.routes(),
            committed=[o.committed for o in r.outcomes], scalars=r.flatten(""), sent=r.bytes_sent,
        )  # fmt: skip

    def drained(self, seed: int) -> None:
        """After a drain: names of parameters that are not those of the seed."""
        self.optimizer.drain()
        pairs = [(n, p, toy.tensor(n, tuple(p.shape), p.dtype, seed, DEVICE)) for n, p in self.optimizer.named]
        emit(
            "drained", wrong=[n for n, p, want in pairs if not torch.equal(bits(p), bits(want))], coming=self._coming()
        )

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.optimizer.close()
        self.link = self.optimizer = None
        emit("closed")

    # ---- checkpoints

    def checkpointed(self, folder: str, how: dict, dtype: str) -> None:
        """Train, save in the midst of a gather, go on; load that into another model, go on as well. how: options of Adam."""
        torch.use_deterministic_algorithms(True)
        digests, losses, devices = [], [], []
        for seed in (3, 5):
            net = small(seed, getattr(torch, dtype))
            o = LayerWiseOptimizer(net, small_groups(net, how), bucket_bytes=4096, deadline_s=DEADLINE_S)
            learn(net, o, range(3) if seed == 3 else range(90, 91))
            if seed == 3:
                checkpoint.save(o, folder)
            else:
                checkpoint.load(o, folder)
            losses.append(learn(net, o, range(3, 6)))
            digests.append(digest(net, o))
            devices.append(where(o))
            o.close()
        emit("gone on", digests=digests, losses=losses, devices=devices)


def small(seed: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [32, 64, 64, 64, 8]
    layers = [x for a, b in zip(sizes, sizes[1:]) for x in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(DEVICE, dtype)


def small_groups(net: nn.Sequential, how: dict) -> list[ParamGroup]:
    matrices = [net[2].weight]
    rest = [p for p in net.parameters() if p is not net[2].weight]
    return [
        ParamGroup(matrices, Muon, {"lr": 0.02}, cost="newton_schulz"),
        ParamGroup(rest, torch.optim.Adam, {"lr": 0.01, **how}),
    ]


def learn(net: nn.Sequential, o: LayerWiseOptimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        g = torch.Generator().manual_seed(1000 * number + RANK)
        x = torch.randn(16, 32, generator=g).to(DEVICE, net[0].weight.dtype)
        o.zero_grad()
        loss = (net(x).float() - x[:, :8].float()).square().mean()
        loss.backward()
        o.step()
        losses.append(loss.item())
    return losses


def digest(net: nn.Module, o: LayerWiseOptimizer) -> str:
    o.drain()
    h = hashlib.sha256()
    for p in net.parameters():
        h.update(bits(p).cpu().numpy().tobytes())
    return h.hexdigest()


def where(o: LayerWiseOptimizer) -> list[str]:
    """Kinds of devices on which Adam's counts of steps lie."""
    states = [o.inner[x.group].state[x.target] for x in o.owned]
    return sorted({s["step"].device.type for s in states if "step" in s})


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    r = Rank()
    obey(r.build, r.connect, r.step, r.refit, r.drained, r.close, r.checkpointed)
    os._exit(0)  # NCCL's and gloo's threads would wait for peers that are gone


if __name__ == "__main__":
    main()
