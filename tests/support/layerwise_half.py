"""Rank 0 of two under a layer-wise optimizer, in a process of its own: what rank 1 would send is made up when it is waited for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from xfer.layerwise import LayerWiseOptimizer, ParamGroup
from xfer.layerwise.gather import Peers


class Work:
    def __init__(self, wire: Wire, theirs: list[torch.Tensor]):
        self._wire, self._theirs = wire, theirs

    def wait(self) -> None:
        if self._wire.fails is not None:
            raise self._wire.fails
        for t in self._theirs:
            t.view(torch.float32).fill_(self._wire.value)


class Twice(dist.HashStore):
    """A store that counts for two ranks."""

    def add(self, key: str, amount: int) -> int:
        return super().add(key, 2 * amount)


class Wire:
    """Stands for xfer.layerwise.wire.Wire, over a store in which rank 1 says the same as rank 0. value: every element of rank 1's
    parameters. fails: an error that a wait for them raises instead."""

    rank, size, device, lost, deadline_s = 0, 2, torch.device("cpu"), None, 20.0

    def __init__(self):
        self.value, self.fails, self.open = 0.0, None, True
        self.store = Twice()

    def broadcasts(self, moves, what) -> list[Work]:
        return [Work(self, [t for owner, t in moves if owner != self.rank])]

    def all_reduce(self, tensor: torch.Tensor) -> None: ...

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None:
        self.open = False


class Half(LayerWiseOptimizer):
    """SGD over an fp32 module, if nothing else is given, a parameter a bucket. `others`: names of what rank 1 owns."""

    def __init__(self, net: nn.Module, groups: list[ParamGroup] | None = None, **options):
        if groups is None:
            groups = [ParamGroup(list(net.parameters()), torch.optim.SGD, {"lr": 0.1})]
        super().__init__(net, groups, **{"bucket_bytes": 1, "reduce": "done", **options})
        self.others = [n for n, _ in self._trained if not self.owns(n)]

    def _meet(self, process_group, group_of, like) -> dict[str, Peers]:
        self.wire = Wire()
        self._peers.append(Peers("dense", self.wire, (0, 1), 0))
        return {name: self._peers[0] for name, _ in self._trained}

    def train(self, value: float) -> None:
        """One step, after which what rank 1 owns is to be `value` everywhere, and is not here yet."""
        self.drain()
        self.wire.value = value
        self.zero_grad()
        self.modules[0](torch.ones(2, 4)).sum().backward()
        self.step()


def layers(n: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(n)))


def values(net: nn.Module, names: list[str]) -> list[float]:
    """The first element of each of these parameters."""
    found = dict(net.named_parameters())
    return [found[n].detach()[0, 0].item() for n in names]
