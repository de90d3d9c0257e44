"""A refit writes the scratch of a lock, never its live storage, also after the layout was read anew or storages moved."""

from __future__ import annotations

import torch

from xfer.engines.layout import EngineLayout, read_layout
from xfer.engines.live import LiveStorages
from xfer.engines.weights import LiveWeights
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
    weights = LiveWeights(torch.device("cpu"), lambda: [model.norm * 2])
    weights.bind(read(model, live), live)
    assert weights.choose_lock() == "norm" and weights.holds == "whole" and (model.norm == 1.0).all()
    weights.engage_lock()
    scratch = weights.rebind()["norm"]
    assert weights.holds == "mix"
    for _ in range(2):
        again = LiveStorages(model)
        layout = weights.bind(read(model, again), again)
        assert weights.choose_lock() == "norm", "without a forward, which would answer NaN"
        for table in (layout.tensors, weights.tensors, weights.rebind()):
            assert table["norm"] is scratch and table["linear"].data_ptr() == model.linear.data_ptr()
        assert model.norm.isnan().all() and not scratch.view(torch.float32).isnan().any()
        model.norm = torch.nn.Parameter(torch.ones(8), requires_grad=False)  # it moves, and is locked there
    scratch.view(torch.float32).fill_(3.0)
    assert weights.check() == "moved"
    weights.rebind()
    assert weights.check() == "same"
    weights.release_lock()
    assert (model.norm == 3.0).all() and weights.holds == "whole"
