"""The fence stands at the beginning of each step of an optimizer, before any weight changes. Megatron-Core's optimizers:
tests/support/megatron_worker.py; the layer-wise one for its models: tests/functional/test_layerwise_megatron.py."""

from types import SimpleNamespace

import pytest
import torch

from xfer.api import fence_before
from xfer.errors import Unsupported
from xfer.layerwise import LayerWiseOptimizer, ParamGroup

SGD = torch.optim.SGD


def of_torch(p):
    optimizer = SGD([p], lr=1.0)
    return optimizer, [optimizer] * 2


def layer_wise(p):
    optimizer = LayerWiseOptimizer(torch.nn.ParameterList([p]), [ParamGroup([p], SGD, {"lr": 1.0})])
    return optimizer, [optimizer] * 2


def with_a_hook_that_was_there_first(p):
    """torchtitan updates the biases of routers in such a hook."""
    optimizer, steps = of_torch(p)
    optimizer.register_step_pre_hook(lambda *_: setattr(p, "data", p.data + 1))
    return optimizer, steps


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class alone, which hands on its calls."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


def inside_of_others(p):
    """As Megatron-Core's, which has one in `optimizer` for each of several, and perhaps none."""
    one, other = SGD([p], lr=1.0), SGD([p], lr=1.0)
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=o) for o in (Wrapper(one), other, None)]), [
        one,
        other,
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("made", [of_torch, layer_wise, with_a_hook_that_was_there_first, inside_of_others])
def test_the_fence_comes_once_before_each_step_changes_a_weight(made):
    p, seen = torch.nn.Parameter(torch.ones(4)), []
    optimizer, steps = made(p)
    fence_before(optimizer, lambda: seen.append(p.tolist()))
    for step in steps:
        before = p.tolist()
        p.grad = torch.full((4,), 3.0)
        step.step()
        assert seen == [before] and seen.pop() != p.tolist()


def test_what_no_fence_can_stand_before_is_refused(monkeypatch):
    fence_before(SimpleNamespace(chained_optimizers=[]), pytest.fail)
    with pytest.raises(Unsupported, match="session.fence"):
        fence_before(object(), lambda: None)
    optimizer, _ = of_torch(torch.nn.Parameter(torch.ones(4)))
    fence_before(optimizer, lambda: None)
    optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unsupported, match=r"CUDA graph[^$]*optimizer_cuda_graph"):
        hooks = optimizer._optimizer_step_pre_hooks.values()  # a graph would repeat the step without the fence
        [hook(optimizer, (), {}) for hook in hooks]
