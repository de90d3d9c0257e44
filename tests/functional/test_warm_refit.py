"""A warm refit does nothing in Python per tensor: not in the session, not in the transport, not in the look at storages.

Function calls are counted in all threads of trainers, hub, controller and workers, over memory that takers read by themselves,
which is the way on GPUs. What GPUs allocate and wait for: test_gpu_warm.py.
"""

from __future__ import annotations

import gc
import sys
import threading

import pytest
from torch import nn

from tests.support.world import SHAPES, World
from xfer.trace.slots import Slots, walk
from xfer.trainers.dtensor import TensorTrainer


class Calls:
    """Of Python functions, while `on`."""

    def __init__(self):
        self.on, self.count = False, 0

    def __call__(self, frame, event, arg) -> None:
        if self.on and event == "call":
            self.count += 1


def of_a_refit(tensors: int) -> int:
    """Fewest calls of three warm refits."""
    calls = Calls()
    threading.setprofile(calls)
    try:
        shapes = SHAPES | {f"layers.{i}.w": (24, 12) for i in range(tensors)}
        with World(trainers=2, host_pull=True, shapes=shapes, bucket_bytes=1 << 22) as w:
            assert all(not isinstance(r, BaseException) for r in w.refit(1))
            seen = []
            for k in range(3):
                for s in w.sources:
                    s.set(2 + k)
                calls.count, calls.on = 0, True
                results = w.refit(verify=False)
                calls.on = False
                assert all(not isinstance(r, BaseException) for r in results), results
                assert not any(t.wrong(2 + k) for e in w.engines for t in e.takers)
                seen.append(calls.count)
    finally:
        threading.setprofile(None)
    return min(seen)


def test_a_warm_refit_of_many_tensors_makes_no_more_calls_than_one_of_few():
    few, many = of_a_refit(8), of_a_refit(208)
    print(f"{few} calls for 8 tensors, {many} for 208")
    assert many < few + 100, (few, many)


def of_a_look(look) -> int:
    """Calls that `look` makes, which is to find everything where it was."""
    calls = Calls()
    gc.collect()  # finalizers of what other tests left are no part of it
    calls.on = True
    sys.setprofile(calls)
    try:
        state = look()
    finally:
        sys.setprofile(None)
    assert state == "same"
    return calls.count


@pytest.mark.parametrize("hold", [False, True])
def test_a_look_at_many_storages_makes_no_more_calls_than_one_at_few(hold):
    def of(layers: int) -> int:
        tree = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        slots = Slots([tree], walk([tree]), hold=hold)
        kept = slots.bind()
        assert kept.tensors
        return of_a_look(slots.check)

    assert of(200) == of(2)


@pytest.mark.parametrize("as_module", [False, True])
def test_a_trainer_of_many_tensors_looks_at_them_without_a_call_for_each(as_module):
    """Of a module or given by name; on GPUs it cost two calls a tensor."""

    def of(layers: int) -> int:
        tree = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        given = dict(tree.named_parameters())
        trainer = TensorTrainer(tree if as_module else lambda: given, rank=0, world=1)
        trainer.read()
        return of_a_look(trainer.check)

    assert of(200) == of(2)
