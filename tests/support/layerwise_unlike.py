"""Ranks of a layer-wise job that are not alike: in models, groups, options or the memory of parameters, where they have to be; in
buffers, where they may be.
"""

from __future__ import annotations

import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import layerwise_model as lm
from tests.support.layerwise_half import layers
from xfer.errors import PlanMismatch, StaleWeights
from xfer.layerwise import LayerWiseOptimizer, ParamGroup, checkpoint
from xfer.trainers.dtensor import TensorTrainer


def different_ranks():
    """The first line of what each difference of rank 0 from the others raises, by what differs."""
    return {
        what: _refused(what)
        for what in ("model", "groups", "kind", "bucket_bytes", "rehome", "view", "strides", "reduce", "clip")
    }


def _refused(what: str) -> str:
    first, options = dist.get_rank() == 0, {}
    net = layers(5 if what == "model" and first else 4)
    params, sgd = list(net.parameters()), torch.optim.SGD
    kinds = [sgd, torch.optim.ASGD if what == "kind" and first else sgd]
    cut = 3 if what == "groups" and first else 2
    if what == "view" and first:
        net[1].seen = net[1].weight.detach()
    if what == "strides" and first:
        net[1].weight.data = net[1].weight.detach().t().contiguous().t()
    if what == "bucket_bytes":
        options = {"bucket_bytes": 1 if first else 1 << 20}
    elif what == "rehome":
        options = {"rehome": not first}
    elif what == "reduce":
        options = {"reduce": "done" if first else "to_owners"}
    elif what == "clip":
        options = {"clip_grad": 1.0 if first else None}
    groups = [ParamGroup(p, kind, {"lr": 0.1}) for p, kind in zip((params[:cut], params[cut:]), kinds)]
    at = [p.data_ptr() for p in params]
    try:
        LayerWiseOptimizer(net, groups, deadline_s=30.0, **options)
    except PlanMismatch as e:
        assert [p.data_ptr() for p in params] == at, "refused when it was moved already"
        return str(e).splitlines()[0]
    raise AssertionError(f"{what}: nobody noticed")


def buffers_of_their_own():
    """Each rank has its own running statistics, of its own data. Saved are those of rank 0, all of them, as DDP would spread them."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), nn.BatchNorm1d(4))))
    ddp = DistributedDataParallel(net)
    o = LayerWiseOptimizer(ddp, [ParamGroup(net.parameters(), torch.optim.SGD, {"lr": 0.1})])
    torch.manual_seed(1 + dist.get_rank())
    ddp(torch.randn(8, 4)).square().sum().backward()
    o.step()
    before = _bytes(net)
    checkpoint.save(o, folder[0])
    checkpoint.load(o, folder[0])
    o.close()
    return [before, _bytes(net), lm.digest(net)]


class _Broken:
    """An adapter that fails on rank 1 only."""

    def __init__(self, net: nn.Module):
        self._base = TensorTrainer(net)

    def read(self):
        if dist.get_rank() == 1:
            raise RuntimeError("this adapter is broken")
        return self._base.read()


def fails_on_one_rank():
    """What each rank hears of a checkpoint that rank 1 alone cannot save or load, and after how many seconds; then whole ones."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    net, seen = layers(4), {}
    o = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), torch.optim.SGD, {"lr": 0.1})])
    for how in (checkpoint.save, checkpoint.load):
        for what in ("gather", "adapter"):
            if what == "gather" and dist.get_rank() == 1:
                o.gather.broken = StaleWeights("a step broke off", ["memory ran out"])
            began = time.monotonic()
            try:
                how(o, folder[0], _Broken(net) if what == "adapter" else None)
            except Exception as e:
                seen[f"{how.__name__} {what}"] = [type(e).__name__, str(e), time.monotonic() - began]
            o.gather.broken = None
        checkpoint.save(o, folder[0])
    checkpoint.load(o, folder[0])
    o.close()
    return seen


def _bytes(net: nn.Module) -> list[float]:
    return torch.cat([b.flatten().float() for b in net.buffers()]).tolist()
