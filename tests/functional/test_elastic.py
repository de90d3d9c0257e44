"""Replicas come and go while training goes on: `replicas=` is the most that may come, `min_replicas=` the fewest that a refit needs."""

from __future__ import annotations

import time

import pytest
import torch

import xfer
from examples.common.ports import free_port
from tests.functional.test_extending import Trained
from tests.support.tiny_engine import Engine
from xfer.errors import EngineLost

TOKEN = "token of the elastic job"
SOON_S = 5.0
"""A refit that waited for an absent replica would take its deadline, which is six times as long."""


class Job:
    """One trainer with room for some replicas. Parameters of version v are all v."""

    def __init__(self, replicas: int = 3):
        self.at, self.trained, self.version = f"tcp://127.0.0.1:{free_port()}", Trained(), 0
        self.engines: dict[int, tuple[Engine, xfer.Controller]] = {}
        how = dict(replicas=replicas, deadline_s=6 * SOON_S, wait=False, route=xfer.Direct(cache_dir=None))
        self.session = xfer.connect(xfer.TensorTrainer(self.trained), self.at, TOKEN, **how)

    def joins(self, replica: int, engine: Engine | None = None) -> None:
        engine = engine or Engine()
        for p in (p for a in engine.adapters for p in a.model.parameters()):
            torch.nn.init.normal_(p.data)
        controller = xfer.serve(engine, self.at, TOKEN, replica=replica, deadline_s=6 * SOON_S)
        controller.wait_ready()
        self.engines[replica] = engine, controller

    def leaves(self, replica: int) -> Engine:
        engine, controller = self.engines.pop(replica)
        controller.close()
        for s in engine.sessions:
            s.close()
        return engine

    def refits(self, times: int = 1, min_replicas: int = 0) -> xfer.RefitReport:
        for _ in range(times):
            self.version += 1
            with torch.no_grad():
                for p in self.trained.parameters():
                    p.fill_(self.version)
            began = time.monotonic()
            report = self.session.refit(version=self.version, min_replicas=min_replicas)
            assert time.monotonic() - began < SOON_S
            assert {o.replica for o in report.outcomes if o.committed} == {*self.engines}
            for engine, controller in self.engines.values():
                controller.wait_version(self.version)
                assert holds(engine) == {self.version}
        return report

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        for r in list(self.engines):
            self.leaves(r)
        self.session.close()


def holds(engine: Engine) -> set[float]:
    """All values in a replica's parameters."""
    return {v for a in engine.adapters for p in a.model.parameters() for v in p.unique().tolist()}


@pytest.fixture
def job():
    with Job() as made:
        yield made


def test_replicas_come_and_go_during_refits_and_each_serves_whole_versions(job):
    """None, which a job asks for if it trains on without; one, three and two during ten refits."""
    assert job.refits(2).committed == 0
    with pytest.raises(EngineLost, match="0 of 3 replicas committed, 1 wanted"):
        job.refits(min_replicas=1)
    job.version -= 1  # a call that raised uses no label up
    job.joins(0)
    job.refits(3, min_replicas=1)
    job.joins(1)
    job.joins(2)
    assert job.refits(4, min_replicas=1).committed == 3
    left = job.leaves(1)
    job.refits(3, min_replicas=1)
    assert job.version == 12 and holds(left) == {9}, "it keeps the last version that it had, whole"
    job.joins(1)
    assert job.refits().committed == 3, "its number is free for another engine"


def test_a_joiner_is_served_by_another_engine_while_the_trainer_is_inside_a_step(job):
    job.joins(0)
    job.refits(2)
    with torch.no_grad():  # as an optimizer does in a step; the trainer calls nothing from here on
        for p in job.trained.parameters():
            p.fill_(99.0)
    for replica, workers in ((1, 2), (2, 1)):  # also one of another layout
        job.joins(replica, Engine(workers))
        engine, controller = job.engines[replica]
        assert controller.wait_version(timeout_s=SOON_S) == 2
        assert holds(engine) == {2} and controller.error is None
    assert job.refits(2).committed == 3
