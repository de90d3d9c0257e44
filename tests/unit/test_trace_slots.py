"""Slots whose owner holds the storages: what a look tells of parameters that moved, shrank, or went to the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xfer.errors import RebindError
from xfer.trace.slots import Slots, walk


def looked(change) -> str:
    tree = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tree.register_parameter("unloaded", nn.Parameter(torch.empty(2, 3, device="meta")))
    slots = Slots([tree], walk([tree]), empty=True, hold=True)
    kept = slots.bind()
    change(tree)
    try:
        state = slots.check()
    except RebindError:
        state = "another device"
    assert kept.tensors  # as its owner keeps it
    return state


def replaced(tree: nn.Module, to: torch.Tensor) -> None:
    tree[0].weight = nn.Parameter(to)


@pytest.mark.parametrize(
    "change, state",
    [
        (lambda tree: None, "same"),
        (lambda tree: setattr(tree[0].weight, "data", tree[0].weight.detach().clone()), "moved"),
        (lambda tree: replaced(tree, torch.ones(3, 3)), "moved"),
        (lambda tree: replaced(tree, torch.ones(3, 4)), "changed"),
        (lambda tree: replaced(tree, torch.ones(3, 3, dtype=torch.bfloat16)), "changed"),
        (lambda tree: setattr(tree[0], "_parameters", dict(tree[0]._parameters)), "changed"),
        (lambda tree: setattr(tree, "_modules", {**tree._modules, "0": nn.Linear(3, 3)}), "changed"),
        (lambda tree: tree.__setitem__(0, nn.Linear(3, 3)), "changed"),
        (lambda tree: replaced(tree, torch.empty(3, 3, device="meta")), "another device"),
        (lambda tree: tree.register_parameter("unloaded", nn.Parameter(torch.empty(2, 3, device="meta"))), "same"),
        (lambda tree: tree.register_parameter("unloaded", nn.Parameter(torch.empty(3, 2, device="meta"))), "changed"),
        (lambda tree: tree.register_parameter("unloaded", nn.Parameter(torch.ones(2, 3))), "another device"),
    ],
)
def test_a_look_tells_what_has_changed(change, state):
    assert looked(change) == state
