"""The fence stands at the beginning of each step of an optimizer, before any weight changes. Megatron-Core's optimizers:
tests/support/megatron_worker.py; the layer-wise one for its models: tests/functional/test_layerwise_megatron.py."""

from types import SimpleNamespace

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


def test_the_fence_comes_before_hooks_that_were_there_first():
    """torchtitan updates the biases of routers in such a hook."""
    p, seen = torch.nn.Parameter(torch.ones(4)), []
    optimizer = SGD([p], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: setattr(p, "data", p.data + 1))
    fence_before(optimizer, lambda: seen.append(p.tolist()))
    optimizer.step()
    assert seen == [[1.0] * 4] and p.tolist() == [2.0] * 4


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class alone, which hands on its calls."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


def chained(*optimizers):
    """As Megatron-Core's, of which `optimizer` is for a single one."""
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=o) for o in optimizers])


def test_the_fence_stands_before_each_optimizer_inside_of_others():
    p = torch.nn.Parameter(torch.ones(4))
    one, other, seen = SGD([p], lr=1.0), SGD([p], lr=1.0), []
    fence_before(chained(Wrapper(one), other, None), lambda: seen.append(p.tolist()))
    fence_before(chained(), pytest.fail)
    p.sum().backward()
    one.step()
    other.step()
    assert seen == [[1.0] * 4, [0.0] * 4]


def test_a_step_that_a_cuda_graph_would_repeat_without_the_fence_is_refused(monkeypatch):
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = SGD([p], lr=1.0)
    fence_before(optimizer, lambda: None)
    optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unsupported, match=r"CUDA graph[^$]*optimizer_cuda_graph"):
        hooks = optimizer._optimizer_step_pre_hooks.values()
        [hook(optimizer, (), {}) for hook in hooks]


def test_an_optimizer_of_another_kind_is_refused():
    with pytest.raises(Unsupported, match="session.fence"):
        fence_before(object(), lambda: None)
