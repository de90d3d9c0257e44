"""Two equal models on the same data, one under owners and one stepped everywhere: whatever is done to the first must leave it
equal to the second."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support import layerwise_model as lm
from xfer.layerwise import LayerWiseOptimizer


class Pair:
    """Two equal models on the same data: `net` under owners, `truth` stepped everywhere."""

    def __init__(self, **options):
        self.net, self.truth = lm.Transformer(), lm.Transformer()
        self.ddp = [DistributedDataParallel(n) for n in (self.net, self.truth)]
        options = {"bucket_bytes": 20_000, "deadline_s": 60.0, **options}
        self.owners = LayerWiseOptimizer(self.ddp[0], lm.groups(self.net), **options)
        self.everywhere = lm.everywhere(self.truth)
        self.number = 0

    def backward(self) -> None:
        tokens = lm.batch(self.number, dist.get_rank())
        self.number += 1
        for ddp, optimizers in zip(self.ddp, ([self.owners], self.everywhere)):
            for o in optimizers:
                o.zero_grad()
            lm.loss_of(ddp, tokens).backward()

    def step(self) -> None:
        for o in (self.owners, *self.everywhere):
            o.step()

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.backward()
            self.step()

    def same(self) -> None:
        """Every byte of every parameter, after a drain. Says which differ."""
        self.owners.drain()
        pairs = zip(self.net.named_parameters(), self.truth.parameters())
        bad = [n for (n, a), b in pairs if not torch.equal(a, b)]
        if bad:
            raise AssertionError(f"rank {dist.get_rank()}: {bad} are not what they should be")

    def stale(self) -> list[str]:
        """Names of parameters that are not here yet."""
        pairs = zip(self.net.named_parameters(), self.truth.parameters())
        return [n for (n, a), b in pairs if not torch.equal(a, b)]
