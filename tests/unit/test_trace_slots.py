"""Slots, with storages held and not: `check` tells parameters that moved from those that changed in shape, device or ties."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from xfer.errors import RebindError
from xfer.trace.slots import Slots, walk


class Watched(nn.Parameter):
    """As vLLM's parameters, whose class has Python of its own; a look is taken in every refit, while the engine waits."""

    asked: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def retied(tree: nn.Module, to: torch.Tensor) -> None:
    tree[2].weight = tree[1].weight = nn.Parameter(to)


CHANGES = [
    (lambda tree: None, "same"),
    (lambda tree: setattr(tree[0].weight, "data", tree[0].weight.detach().clone()), "moved"),
    (lambda tree: setattr(tree[0], "weight", nn.Parameter(torch.ones(3, 3))), "moved"),
    (lambda tree: setattr(tree[0], "weight", nn.Parameter(torch.ones(3, 4))), "changed"),
    (lambda tree: setattr(tree[0], "weight", nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16))), "changed"),
    (lambda tree: tree.__setitem__(0, nn.Linear(3, 3)), "changed"),
    (lambda tree: setattr(tree[0], "weight", nn.Parameter(torch.empty(3, 3, device="meta"))), "another device"),
    (lambda tree: tree.register_parameter("unloaded", nn.Parameter(torch.empty(2, 3, device="meta"))), "moved"),
    (lambda tree: tree.register_parameter("unloaded", nn.Parameter(torch.empty(3, 2, device="meta"))), "changed"),
    (lambda tree: tree.register_parameter("unloaded", nn.Parameter(torch.ones(2, 3))), "another device"),
    (lambda tree: setattr(tree[2], "bias", nn.Parameter(torch.ones(3))), "changed"),
    (lambda tree: setattr(tree, "scale", torch.ones(3)), "changed"),
    (lambda tree: setattr(tree, "cache", torch.ones(3)), "same"),
    (lambda tree: setattr(tree[2], "weight", nn.Parameter(torch.ones(3, 3))), "changed"),
    (lambda tree: setattr(tree[1], "weight", nn.Parameter(torch.ones(3, 3))), "changed"),
    *((lambda tree, at=at: setattr(tree[at], "weight", nn.Parameter(torch.ones(3, 3))), "changed") for at in (4, 6, 8)),
    (lambda tree: retied(tree, torch.ones(3, 3)), "moved"),
    (lambda tree: retied(tree, torch.ones(3, 4)), "changed"),
    (lambda tree: tree[0].weight.untyped_storage().resize_(1 << 16), "changed"),
]
UNSEEN = [
    (lambda tree: setattr(tree[0].weight, "data", tree[0].weight.data.view(torch.int32)), "changed"),
    (lambda tree: setattr(tree[0].weight, "data", tree[0].weight.data.t()), "changed"),
    (lambda tree: setattr(tree[0], "_parameters", dict(tree[0]._parameters)), "changed"),
    (lambda tree: setattr(tree, "_modules", {**tree._modules, "0": nn.Linear(3, 3)}), "changed"),
]
"""What a quick look does not see: a whole one follows."""


def looked_at():
    """A tree, and slots and the binding of it."""
    tree = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    tree[2].weight = tree[1].weight
    # Ties of modules whose tables are equal as dicts are, or cannot be compared.
    for make in (nn.Embedding, nn.Linear, partial(nn.Linear, bias=False)):
        tree.extend([make(3, 3), make(3, 3)])
        tree[-1].weight = tree[-2].weight
    tree[0].weight = Watched(tree[0].weight.data, requires_grad=False)
    tree.register_buffer("scale", None)
    tree.register_buffer("cache", None, persistent=False)
    tree.register_parameter("unloaded", nn.Parameter(torch.empty(2, 3, device="meta")))
    slots = Slots([tree], walk([tree]), empty=True)
    return tree, slots, slots.bind()


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize("change, state", [*CHANGES, *UNSEEN])
def test_a_look_tells_what_has_changed_and_a_quick_one_sees_other_objects_and_addresses(change, state, quick):
    tree, slots, kept = looked_at()
    Watched.asked.clear()
    assert slots.check() == "same" and slots.check(quick=True) == "same" and not Watched.asked
    change(tree)
    try:
        seen = slots.check(quick)
    except RebindError:
        seen = "another device"
    assert seen == ("same" if quick and (change, state) in UNSEEN else state)
    assert kept.tensors  # as its owner keeps it


def model() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.BatchNorm1d(4)})


def test_slots_keep_nothing_alive():
    m = model()
    slots = Slots([m], walk([m]))
    slots.bind()
    dead = weakref.ref(m["a"].weight)
    m["a"].weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert dead() is None
    layer = weakref.ref(m["b"])
    m["b"] = nn.BatchNorm1d(4)
    gc.collect()
    assert slots.check() == "changed"
    del slots
    gc.collect()
    assert layer() is None


def test_every_way_of_losing_a_tensor_is_listed_at_once():
    m = model()
    slots = Slots([m], walk([m]))
    slots.bind()
    m["a"].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    m["a"].bias.untyped_storage().resize_(0)
    del m["b"]._buffers["running_mean"]
    with pytest.raises(RebindError) as e:
        slots.check()
    assert len(e.value.violations) == 3


@pytest.mark.parametrize("quick", [False, True])
def test_a_tensor_with_the_id_of_a_freed_one_is_seen(quick):
    """At the same address, too: only the weak reference tells. CPython often gives the next object the place of a freed one."""
    tree = nn.Linear(4, 4, bias=False)
    slots = Slots([tree], walk([tree]))
    kept = slots.bind()
    other = kept.tensors["0:weight"].view(torch.int32).view(4, 4)
    assert slots.check(quick) == "same"
    was, made = id(tree.weight), []
    del tree.weight
    while id(new := nn.Parameter(other, requires_grad=False)) != was:
        made.append(new)
        assert len(made) < 1000, "no object came to the place of the freed one"
    tree.weight = new
    assert slots.check(quick) == "changed"
