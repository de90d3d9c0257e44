"""docs/extending.md is true: an engine in one file that edits nothing of xfer is refitted, and a route is found by its name."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import xfer
from examples.common.ports import free_port
from tests.support.tiny_engine import HIDDEN, WIDTH, Engine
from xfer import routes
from xfer.errors import Unsupported, XferError

TOKEN = "token of the tiny engine"


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, WIDTH, False), nn.Linear(HIDDEN, WIDTH, False)
        self.down = nn.Linear(WIDTH, HIDDEN, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.norm.weight
        return self.down(self.gate(x) * self.up(x))


@contextmanager
def job(trained: nn.Module, engine: Engine):
    """Its workers reach the rendezvous by another name than its controller."""
    port = free_port()
    at, theirs = f"tcp://127.0.0.1:{port}", f"tcp://localhost:{port}"
    for a in engine.adapters:
        nn.init.ones_(a.model.norm), nn.init.normal_(a.model.fused), nn.init.normal_(a.model.down)
    controller = xfer.serve(engine, at, TOKEN, engine_rendezvous=theirs, deadline_s=30.0)
    route = xfer.Direct(cache_dir=None)
    with xfer.connect(xfer.TensorTrainer(trained), at, TOKEN, deadline_s=30.0, route=route) as session, controller:
        yield session, controller
    assert engine.init_info["rendezvous"] == theirs


def test_an_engine_in_one_file_computes_what_its_trainer_does_and_is_paused_after_a_refit_that_broke_until_the_next(
    monkeypatch,
):
    trained, engine = Trained(), Engine()
    with job(trained, engine) as (session, controller):
        for version in (1, 2):
            with torch.no_grad():
                for p in trained.parameters():
                    p.normal_()
            report = session.refit(verify=True)
            assert report.committed == 1 and report.version == version and report.verified
            x = torch.randn(4, HIDDEN)
            torch.testing.assert_close(sum(a.model(x) for a in engine.adapters), trained(x), rtol=1e-3, atol=1e-2)
            halves = [a.model.fused[: WIDTH // 2] for a in engine.adapters]
            assert torch.equal(torch.cat(halves), trained.gate.weight), "bit for bit"
        monkeypatch.setenv("XFER_FAULT", "worker:0:wave:raise")
        with pytest.raises(XferError, match="injected fault"):
            session.refit()
        assert controller.torn and any(a.model.norm.isnan().all() for a in engine.adapters)
        monkeypatch.delenv("XFER_FAULT")
        assert session.refit(verify=True).committed == 1 and not controller.torn
        assert [a.weights.holds for a in engine.adapters] == ["whole", "whole"]


def test_a_route_of_another_package_is_found_by_its_entry_point(monkeypatch):
    class Point:
        name, value = "tubes", "tests.functional.test_extending:Tubes"

    monkeypatch.setattr(routes, "entry_points", lambda group: [Point] if group == "xfer.routes" else [])
    assert isinstance(routes.worker_side("tubes", "adapter", None, 0, 1), Tubes)
    with pytest.raises(Unsupported, match="'pipes', which is not installed here") as caught:
        routes.worker_side("pipes", "adapter", None, 0, 1)
    assert caught.value.violations == ("routes in this environment: direct, packed, tubes",)


class Tubes:
    def __init__(self, adapter, client, replica, index):
        assert (adapter, client, replica, index) == ("adapter", None, 0, 1)
