"""A warm refit calls no Python function per tensor: not in the session, not in the transport, not in the look at storages. Calls are
counted in all threads; workers read the trainers' memory themselves as on GPUs. What GPUs allocate and wait for: test_gpu_warm.py.
"""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.calls import calls_of, in_new_threads
from tests.support.fake_group import one_rank
from tests.support.world import SHAPES, World, good, right
from tests.unit.test_trainer_block_scaled import parameter
from xfer.engines.copies import Copies, attributes
from xfer.trace.slots import Slots, walk
from xfer.trainers import block_scaled
from xfer.trainers.dtensor import TensorTrainer


def of_a_refit(tensors: int) -> int:
    """Fewest calls of three warm refits."""
    with in_new_threads() as calls:
        shapes = SHAPES | {f"layers.{i}.w": (24, 12) for i in range(tensors)}
        with World(trainers=2, host_pull=True, shapes=shapes, bucket_bytes=1 << 22) as w:
            w.commits(1)
            seen = []
            for version in range(2, 5):
                for s in w.sources:
                    s.set(version)
                calls.count, calls.on = 0, True
                results = w.refit(verify=False)
                calls.on = False
                good(results)
                right(w, version)
                seen.append(calls.count)
    return min(seen)


def test_a_warm_refit_of_many_tensors_makes_no_more_calls_than_one_of_few():
    few, many = of_a_refit(8), of_a_refit(208)
    print(f"{few} calls for 8 tensors, {many} for 208")
    assert many < few + 100, (few, many)


def slots(tree: nn.Module, quick: bool = False):
    found = Slots([tree], walk([tree]))
    kept = found.bind()
    assert kept.tensors
    return lambda: (kept, found.check(quick))[1]


def trainer(source):
    made = TensorTrainer(source, rank=0, world=1)
    made.read()
    return made.check


def named(tree: nn.Module):
    given = dict(tree.named_parameters())
    return trainer(lambda: given)


def sharded(tree: nn.Module):
    mesh = init_device_mesh("cpu", (1,))
    for layer in tree:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return trainer(tree)


def scaled(tree: nn.Module):
    for layer in tree:
        layer._parameters["weight"] = parameter()
    found = list(walk([tree]))
    looked, seats = Slots([tree], chain.from_iterable(map(block_scaled.slots_of, found))), block_scaled.Seats(found)
    kept = looked.bind()
    return lambda: (kept, seats.hold() and looked.check())[1]


def copies(tree: nn.Module):
    for layer in tree:
        layer.gain, layer.rows, layer.nested = torch.ones(1), [None], {"a": [torch.ones(1)]}
    found = Copies([("", tree)], attributes([("", tree)]))
    found.look()
    return lambda: found.check() or "same"


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(slots, id="storages"),
        pytest.param(lambda tree: slots(tree, quick=True), id="storages, quickly"),
        pytest.param(trainer, id="a trainer's module"),
        pytest.param(named, id="a trainer's named tensors"),
        pytest.param(sharded, id="a trainer's DTensors"),
        pytest.param(scaled, id="parameters in FP8"),
        pytest.param(copies, id="plain attributes"),
    ],
)
def test_a_look_at_many_layers_makes_no_more_calls_than_one_at_few(made):
    def calls(layers: int) -> int:
        state, count = calls_of(made(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))))
        assert state == "same"
        return count

    with one_rank(0, 1):
        assert calls(200) == calls(2)
