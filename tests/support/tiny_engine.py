"""A whole engine of another framework in one file, as docs/extending.md describes it. Two workers hold an MLP split by columns, `gate`
and `up` fused in one parameter. Nothing here says where a byte goes: the model's own `load_weights` is traced."""

from __future__ import annotations

import threading

import torch
from torch import nn

from xfer.engines.layout import read_layout
from xfer.engines.live import LiveStorages
from xfer.engines.weights import LiveWeights
from xfer.participants.worker import WorkerSession
from xfer.routes import worker_side
from xfer.trace.loader import trace_loader

HIDDEN, WIDTH, CPU = 16, 32, torch.device("cpu")


class Model(nn.Module):
    def __init__(self, rank: int, world: int):
        super().__init__()
        self.rank, self.part = rank, WIDTH // world
        self.norm = nn.Parameter(torch.zeros(HIDDEN))
        self.fused = nn.Parameter(torch.zeros(2 * self.part, HIDDEN))
        self.down = nn.Parameter(torch.zeros(HIDDEN, self.part))

    def load_weights(self, tensors) -> None:
        mine = slice(self.rank * self.part, (self.rank + 1) * self.part)
        for name, t in tensors:
            if name == "down.weight":
                self.down.copy_(t[:, mine])
            elif name == "norm.weight":
                self.norm.copy_(t)
            else:
                self.fused.view(2, self.part, HIDDEN)[int(name == "up.weight")].copy_(t[mine])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.fused @ (x * self.norm).T).chunk(2)
        return (self.down @ (gate * up)).T


class Adapter:  # ---- the worker's half
    drop = ()

    def __init__(self, rank: int, world: int):
        self.model, self.rank, self.world = Model(rank, world), rank, world
        self.weights = LiveWeights(CPU, lambda: [self.model(torch.ones(4, HIDDEN))])

    def read(self, catalog):
        with torch.device("meta"):
            twin = Model(self.rank, self.world)
        live = LiveStorages(self.model)
        layout = read_layout(live, LiveStorages(twin), trace_loader(twin, catalog.specs), device=CPU)
        return self.weights.bind(layout, live)


class Engine:  # ---- the controller's half: vLLM's names of the calls, for xfer.serve
    def __init__(self, workers: int = 2):
        self.adapters, self.sessions = [Adapter(i, workers) for i in range(workers)], []

    def get_world_size(self) -> int:
        return len(self.adapters)

    def init_weight_transfer_engine(self, request) -> None:
        i = self.init_info = request["init_info"]
        where = (i["replica"], len(self.adapters), i["rendezvous"], i["token"], i["deadline_s"])
        self.sessions = [
            WorkerSession(a, worker_side, where[0], rank, *where[1:]) for rank, a in enumerate(self.adapters)
        ]
        self._on_all(lambda s: s.join())

    def update_weights(self, request) -> None:
        i = request["update_info"]
        self._on_all(lambda s: s.receive(i["attempt"], i["deadline_s"]))

    def start_weight_update(self) -> None:
        pass

    finish_weight_update = pause_generation = resume_generation = reset_prefix_cache = start_weight_update

    def _on_all(self, call) -> None:
        threads = [threading.Thread(target=call, args=(s,)) for s in self.sessions]
        [t.start() for t in threads]
        [t.join() for t in threads]
