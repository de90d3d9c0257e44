"""Trainers whose weights are paused: their addresses stay and there is no memory behind them, so a read ends the process. The driver's
answers are made up here; a real pool that sleeps is in tests/functional/test_gpu_paused.py."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from xfer.errors import RebindError
from xfer.kernels import cuda_driver
from xfer.kernels.cuda_driver import Allocation, DriverError, unmapped
from xfer.trace.slots import Slots, walk
from xfer.trainers import megatron
from xfer.trainers.megatron import MegatronTrainer


class Driver:
    """Allocations of 100 bytes from 0 on. `paused`: those without memory; `plain`: those of cudaMalloc."""

    def __init__(self, monkeypatch):
        self.paused, self.plain, self.asked = set(), set(), []
        monkeypatch.setattr(cuda_driver, "allocation", self.allocation)
        monkeypatch.setattr(cuda_driver, "mapped", self.mapped)

    def allocation(self, address: int) -> Allocation:
        if address // 100 in self.paused:
            error = DriverError.__new__(DriverError)
            error.code = 1
            raise error
        return Allocation(address // 100 * 100, 100, address // 100, address // 100 in self.plain)

    def mapped(self, address: int) -> bool:
        self.asked.append(address // 100)
        return address // 100 not in self.paused


def at(address: int, cuda: bool = True, numel: int = 4):
    return SimpleNamespace(is_cuda=cuda, numel=lambda: numel, data_ptr=lambda: address)


def test_the_driver_is_asked_once_for_each_allocation_that_can_be_taken_away(monkeypatch):
    driver = Driver(monkeypatch)
    driver.plain = {3}
    ask = unmapped([at(10), at(110), at(50), at(310), at(120), at(20, cuda=False), at(999, numel=0)])
    assert ask() == [] and sorted(driver.asked) == [0, 1]
    driver.paused = {1}
    assert ask() == [1, 4]
    driver.paused = {0, 1, 3}
    assert ask() == [0, 1, 2, 4]
    ask = unmapped([at(10), at(50), at(210)])  # paused when it is made
    assert ask() == [0, 1]
    driver.paused = set()
    assert ask() == []


def test_another_error_of_the_driver_is_not_taken_for_paused_memory(monkeypatch):
    driver = Mock()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    driver.cuPointerGetAttribute.return_value, driver.cuGetErrorName.return_value = 1, 0
    assert not cuda_driver.mapped(8)
    driver.cuPointerGetAttribute.return_value = 700
    with pytest.raises(DriverError):
        cuda_driver.mapped(8)


class Pool(list):
    """Stands for the driver where `Slots` asks it: storages that are paused, by number, of the last that were asked for."""

    def __call__(self, tensors):
        return lambda: [i for i in self if i < len(tensors)]


def test_slots_refuse_paused_memory_when_bound_and_at_each_check():
    pool, tree = Pool(), nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    slots = Slots([tree], walk([tree]), unmapped=pool)
    slots.bind()
    assert slots.check() == "same"
    pool[:] = [1, 2, 3, 4]
    for look in (slots.check, slots.bind):
        with pytest.raises(RebindError, match="no memory behind") as e:
            look()
        (line,) = e.value.violations
        assert line.startswith("4 of 6 storages, such as that of 0:0.bias, 0:1.weight, 0:1.bias: paused")
        assert "Resume" in line
    tree[0].weight.data = torch.zeros(2, 2)  # moved, and others are paused still
    with pytest.raises(RebindError, match="no memory behind"):
        slots.check()
    pool.clear()
    assert slots.check() == "moved"


def test_megatron_begins_no_gather_into_paused_weights(monkeypatch):
    pool, begun = Pool(), []
    monkeypatch.setattr(megatron, "unmapped", pool)
    chunk = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def group(part: nn.Linear, dispatched: bool):
        bucket = SimpleNamespace(param_data=torch.zeros(6), params_list=list(part.parameters()))
        return SimpleNamespace(
            param_gather_dispatched=dispatched, buckets=[bucket], start_param_sync=lambda: begun.append(1),
            finish_param_sync=lambda **_: None,
        )  # fmt: skip

    vars(chunk).update(
        bucket_groups=[group(chunk[0], True), group(chunk[1], False)], expert_parallel_bucket_groups=[],
        ddp_config=SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True),
    )  # fmt: skip
    trainer = MegatronTrainer.__new__(MegatronTrainer)
    trainer.chunks, trainer.rank = [chunk], 2
    pool.append(0)
    with pytest.raises(RebindError, match="trainer 2: parameters have to be gathered") as e:
        trainer.finish_gathers()
    assert "0:1.weight, 0:1.bias" in str(e.value) and not begun
    pool.clear()
    trainer.finish_gathers()
    assert begun == [1]
