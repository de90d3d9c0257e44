"""The fence stands at the beginning of each step of an optimizer, before any weight changes. Megatron-Core's optimizers:
tests/support/megatron_worker.py; the layer-wise one for its models: tests/functional/test_layerwise_megatron.py."""

from __future__ import annotations

import pytest
import torch

from xfer.api import fence_before
from xfer.errors import Unsupported
from xfer.layerwise import LayerWiseOptimizer, ParamGroup

SGD = torch.optim.SGD


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layer_wise", [False, True])
def test_the_fence_comes_before_a_step_changes_a_weight(layer_wise):
    net = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4))])
    (p,), seen = net, []
    optimizer = LayerWiseOptimizer(net, [ParamGroup([p], SGD, {"lr": 1.0})]) if layer_wise else SGD([p], lr=1.0)
    fence_before(optimizer, lambda: seen.append(p.tolist()))
    for _ in range(2):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [[1.0] * 4, [0.0] * 4] and p.tolist() == [-1.0] * 4


def test_an_optimizer_of_another_kind_is_refused():
    with pytest.raises(Unsupported, match="session.fence"):
        fence_before(object(), lambda: None)
