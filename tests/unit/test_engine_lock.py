"""A refit writes the scratch of a lock, never its live storage, also after the layout was read anew or storages moved."""

from __future__ import annotations

import torch

from xfer.engines.layout import EngineLayout, read_layout
from xfer.engines.live import LiveStorages
from xfer.engines.lock import Lock, candidates, kept, rebound
from xfer.trace.fragment import TensorSpec
from xfer.trace.loader import trace_loader


class Model(torch.nn.Module):
    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(8, device=device), requires_grad=False)
        self.linear = torch.nn.Parameter(torch.ones(8, 4, device=device), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            getattr(self, name).copy_(weight)


def read(model: Model, live: LiveStorages) -> EngineLayout:
    twin = Model("meta")
    traced = trace_loader(twin, [TensorSpec("linear", (8, 4), "float32"), TensorSpec("norm", (8,), "float32")])
    return read_layout(live, LiveStorages(twin), traced, device=torch.device("cpu"))


def test_a_lock_stays_bound_to_its_scratch_when_its_layout_is_read_or_bound_anew():
    model = Model()
    live = LiveStorages(model)
    (slot,) = candidates(read(model, live), live)
    lock = Lock(slot, live.tensors[slot.root])
    lock.engage()
    for _ in range(2):
        again = LiveStorages(model)
        same, layout = kept(lock, read(model, again), again)
        assert same is lock
        for table in (layout.tensors, rebound(lock, layout, again)):
            assert table["norm"] is lock.scratch and table["linear"] is again.tensors["linear"]
        assert model.norm.isnan().all() and not lock.scratch.view(torch.float32).isnan().any()
        model.norm = torch.nn.Parameter(torch.ones(8), requires_grad=False)  # it moves, and is locked there
    lock.scratch.view(torch.float32).fill_(3.0)
    lock.moved_to(LiveStorages(model).tensors["norm"])
    lock.release()
    assert (model.norm == 3.0).all()
