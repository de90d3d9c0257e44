"""Tensors that a live model computed from weights and keeps outside its parameters and buffers are refused by name."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from xfer.engines.asleep import LeftAlone
from xfer.engines.copies import Copies, attributes
from xfer.engines.live import LiveStorages
from xfer.errors import Unsupported


class Layer(nn.Module):
    """As vLLM's, with constants and with attributes that wait for the first forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.sinks = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(3))
        self.kv_cache, self.scratch = torch.tensor([]), torch.zeros(2)
        self.gain, self.steps, self.scales = torch.ones(1), torch.arange(5), {"a": [torch.full((3,), 2.0)]}
        self.merged, self.by_shape, self.rows, self.pair, self.nested = None, {}, [], (), {"a": [None]}
        self.impl = type("Impl", (), {})()
        self.impl.sinks, self.impl.workspace, self.impl.slopes = self.sinks, None, torch.arange(4.0)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


def built(keep=()):
    net = Model()
    with torch.device("meta"):
        twin = Model()

    def caches():
        return [m.kv_cache.untyped_storage()._cdata for m in net.layers]

    return net, Copies([("", net)], attributes([("", twin)]), keep=keep, exempt=caches)


def harmless(layer: Layer) -> None:
    """What engines do to their modules and no refit could make wrong."""
    layer.kv_cache = torch.ones(8, 4)
    layer.impl.view_of_cache = layer.kv_cache[:2].view(torch.int32).view(torch.float32)
    layer.merged = layer.weight.t()[1:]  # a view: a refit writes it, too
    layer.pair = (layer.table[:1], None)
    layer.impl.workspace = torch.zeros(8, dtype=torch.uint8)
    layer.rows.append(3)
    layer.scratch = torch.zeros(5)
    layer.count = 1
    layer.empty = torch.empty(0)


MADE = {
    "merged": lambda m: setattr(m, "merged", m.weight.t().contiguous()),
    "new": lambda m: setattr(m, "new", m.weight.float() * 2),
    "by_shape['x']": lambda m: m.by_shape.update(x=m.weight.clone()),
    "rows[0]": lambda m: m.rows.append(m.weight.clone()),
    "pair[1]": lambda m: setattr(m, "pair", (None, m.weight.clone())),
    "nested['a'][0]": lambda m: m.nested["a"].__setitem__(0, m.weight.clone()),
    "impl.workspace": lambda m: setattr(m.impl, "workspace", m.weight.clone()),
    "impl.new": lambda m: setattr(m.impl, "new", m.weight.clone()),
    "impl.sinks": lambda m: setattr(m.impl, "sinks", m.sinks.data.double()),
}


@pytest.mark.parametrize("name", MADE)
def test_a_copy_is_refused_when_it_is_there_and_when_it_comes_later_unless_kept(name):
    net, copies = built()
    copies.look()
    copies.check()
    MADE[name](net.layers[1])
    for ask in (copies.check, copies.look, copies.check):
        with pytest.raises(Unsupported) as error:
            ask()
        assert [v.split(": ")[0] for v in error.value.violations[:-1]] == [f"layers.1.{name}"]
        assert "keep=" in error.value.violations[-1]
    kept, copies = built(keep=["layers.1.*"])
    copies.look()
    MADE[name](kept.layers[1])
    copies.check()
    MADE[name](kept.layers[0])
    with pytest.raises(Unsupported):
        copies.check()


def test_what_is_no_copy_is_left_alone_and_looked_at_once():
    net, copies = built()
    copies.look()
    for layer in net.layers:
        harmless(layer)
    copies.check()
    assert copies._watch.same()
    seen = [weakref.ref(layer.kv_cache) for layer in net.layers]
    for layer in net.layers:  # it may be freed although it was seen
        del layer.impl.view_of_cache
        layer.kv_cache = torch.tensor([])
    gc.collect()
    assert [ref() for ref in seen] == [None] * 2
    copies.check()


def test_wrappers_hold_adapters_and_what_they_wrap_is_named_as_before():
    net, twin = Model(1), Model(1)
    inner = net.layers[0]
    wrapper = net.layers[0] = nn.Module()
    wrapper.base_layer, wrapper.lora_a_stacked = inner, (torch.ones(3),)
    wraps = lambda m: "base_layer" if hasattr(m, "base_layer") else ""  # noqa: E731
    copies = Copies([("draft.", net)], attributes([("draft.", twin)]), wraps=wraps)
    copies.look()
    inner.merged = inner.weight.t().contiguous()
    with pytest.raises(Unsupported, match=r"draft\.layers\.0\.merged: "):
        copies.check()


def watched(change=lambda layer: None):
    """A layer, changed before the engine joins, and the check that runs before each refit."""
    net, copies = built(keep=["*.late"])
    change(net.layers[0])
    copies.look()
    live = LiveStorages(net)
    alone = LeftAlone(live, (), copies.constants())
    return net.layers[0], lambda: alone.check(live)


@pytest.mark.parametrize("name", ["gain", "scales['a'][0]", "impl.slopes", "steps", "late"])
def test_a_constant_outside_parameters_and_buffers_that_a_sleep_took_is_named(name):
    """After sleep(level=2) its memory holds anything, although no code wrote it. `late`: made after loading, and in keep=."""
    layer, check = watched(lambda layer: setattr(layer, "late", torch.ones(2)))
    check()
    eval(f"layer.{name}").data.fill_(77)  # as the memory behind it changes: torch does not count it
    with pytest.raises(Unsupported, match="level 2") as lost:
        check()
    named, what_to_do = lost.value.violations
    assert named == f"layers.0.{name}: a plain attribute" and "level 1" in what_to_do


def test_what_a_forward_writes_replaces_or_makes_is_no_constant():
    @torch.inference_mode()
    def warm_up(layer: Layer) -> None:
        layer.scratch[:1] = 4

    layer, check = watched(warm_up)
    layer.scratch.data.fill_(5)
    with torch.inference_mode():
        layer.gain.mul_(3)
        layer.steps = torch.arange(9)
    layer.kv_cache = torch.ones(8)
    layer.gain.data.fill_(6)
    gc.collect()
    check()
