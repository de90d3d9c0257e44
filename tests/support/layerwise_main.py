"""One rank of plain torch training under a layer-wise optimizer; does what the test says on standard input (proc.obey)."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support import layerwise_model as lm
from tests.support.proc import emit, obey
from xfer.layerwise import LayerWiseOptimizer

MODELS = {"plain": lm.Transformer, "mixed": lm.MixedTransformer}


def train(how: str, steps: int, model: str = "plain", ddp: bool = True, **options) -> None:
    """how: "owners" (LayerWiseOptimizer), "everywhere" (every rank steps everything) or "one" (one process, all data)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = MODELS[model]()
    module = DistributedDataParallel(net) if ddp and how != "one" else net
    if how == "owners":
        optimizer = LayerWiseOptimizer(
            module, lm.groups(net), **{"bucket_bytes": 20_000, "deadline_s": 60.0, **options}
        )
        optimizers = [optimizer]
    else:
        optimizers = lm.everywhere(net)
    losses, stale = [], 0
    for step in range(steps):
        if how == "one":
            loss = torch.stack([lm.loss_of(module, lm.batch(step, r)) for r in range(size)]).mean()
        else:
            loss = lm.loss_of(module, lm.batch(step, rank))
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()
        if how == "owners":
            stale += not optimizer.gather.settled
        total = loss.detach().double()
        if how != "one":
            dist.all_reduce(total)
            total /= size
        losses.append(total.item())
    more = {}
    if how == "owners":
        optimizer.drain()
        s = optimizer.gather.stats
        more = dict(
            buckets=len(optimizer.gather.buckets),
            stale=stale,
            owned=[len(t.of(rank)) for t in optimizer.ownership.values()],
            received=s.received,
            lacked=s.lacked,
            unexpected=s.unexpected,
            order=[b.index for b in optimizer.gather.order],
        )
        optimizer.close()
    values = torch.cat([p.detach().double().flatten() for p in net.parameters()]) if how in ("one", "owners") else None
    if how == "one":
        train.one = values
    elif values is not None and getattr(train, "one", None) is not None and model == "plain":
        more["distance"] = ((values - train.one).norm() / train.one.norm()).item()
    emit("trained", losses=losses, digest=lm.digest(net), **more)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("GLOO_SECONDS", "120"))))
    obey(train)


if __name__ == "__main__":
    main()
