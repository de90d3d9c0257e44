"""Layouts in a whole session: real coordinator, channels, planner and gloo; how often each layout travels, and plans over a fabric."""

from __future__ import annotations

import pytest

from examples.common.ports import free_port
from tests.support.world import TOKEN, ToySource, World, trainer_session
from xfer.errors import HandshakeError, LayoutError, XferError
from xfer.plan.fabric import Fabric, Site

G = 10**9


class OnFabric(World):
    """Every trainer is given `site`, or its own of `sites`."""

    site: Site | None = None
    sites: tuple[Site | None, ...] = ()

    def _connect_one(self, i: int):
        site = self.sites[i] if self.sites else self.site
        s = trainer_session(
            self.sources[i], self.rendezvous, TOKEN, replicas=self.replicas, deadline_s=self.deadline_s,
            bucket_bytes=self.bucket_bytes, drop=(), narrow=(), cache_dir=self.cache_dir, fabric=site,
        )  # fmt: skip
        self.sessions[i] = s
        s.open(True)


class Replicated(ToySource):
    """Rank r of 4 holds what rank r // 2 of 2 would: data-parallel pairs."""

    def __init__(self, rank: int, shapes):
        self.place = rank // 2
        super().__init__(rank, 4, shapes)

    def rows(self, n: int) -> tuple[int, int]:
        return self.place * n // 2, (self.place + 1) * n // 2


def relay(world: World):
    return world.sessions[0]._server.coordinator.planning.layouts


def good(world: World, version: int) -> bool:
    assert all(not isinstance(r, BaseException) for r in world.refit(version))
    return all(t.wrong(version) == [] for e in world.engines for t in e.takers)


def digests(world: World) -> set[str]:
    plans = [lane.plane.part for s in world.sessions for lane in s._party.lanes.values()]
    plans += [w._lane_.plane.part for e in world.engines for w in e.sessions]
    return {p.digest for p in plans}


def test_a_layout_is_published_once_per_class_and_not_at_all_with_a_plan_in_the_cache(tmp_path):
    def world() -> World:
        w = World(trainers=4, workers=2, replicas=2, cache_dir=str(tmp_path))
        w.sources = [Replicated(i, w.shapes) for i in range(4)]
        return w

    with world() as w:
        # Two classes of trainers, two of workers, whatever the number of ranks and replicas.
        assert len(relay(w)._known) == 4 and not relay(w)._waiting
        first = relay(w).received
        assert good(w, 1) and good(w, 2)
        assert relay(w).received == first  # a warm refit publishes nothing
        plans = digests(w)
    with world() as w:
        # Workers keep no cache of their own and still ask; trainers do not.
        assert all(not s._party.shelf._layouts for s in w.sessions)
        assert all(len(x._party.shelf._layouts) == 2 for e in w.engines for x in e.sessions)
        assert digests(w) == plans and good(w, 1)


def test_senders_over_a_fabric_refit_bit_for_bit_and_the_digest_knows_the_fabric():
    fabric = Fabric.uniform(3, 4, nvlink=400 * G, nic=50 * G, cross_rail="spine", spine=60 * G)
    with World(trainers=2, workers=2, replicas=2) as w:
        plain = digests(w)
    w = OnFabric(trainers=2, workers=2, replicas=2)
    w.site = Site(fabric, (0, 1), ((4, 5), (2, 10)))
    with w:
        placed = digests(w)
        # One plan per replica, the same on all ranks; without a fabric replicas differ in where they start only.
        assert len(plain) == len(placed) == 2 and not plain & placed
        assert good(w, 1) and good(w, 2)


def test_a_fabric_that_places_other_ranks_is_an_error_on_every_rank():
    fabric = Fabric.uniform(2, 8, nvlink=400 * G, nic=50 * G)
    w = OnFabric(trainers=2, workers=2, deadline_s=15.0)
    w.site = Site(fabric, (0, 1), ((8, 9, 10),))
    with pytest.raises(LayoutError, match="3 workers of replica 0; there are 2 and 2"):
        w.connect()


def test_trainers_with_different_fabrics_do_not_meet():
    one, other = (Site(Fabric.uniform(2, 8, nvlink=400 * G, nic=n * G), (0, 1), ((8, 9),)) for n in (50, 25))
    w = OnFabric(trainers=2, workers=2, deadline_s=10.0)
    w.sites = (one, other)
    with pytest.raises((HandshakeError, XferError), match="fabric is"):
        w.connect()


def test_connect_checks_the_fabric_before_it_opens_anything(tmp_path):
    import json

    from tests.support.connect import flat_connect

    path = tmp_path / "fabric.json"
    host = {"names": ["a"], "gpus": 4, "nvlink": 4e11, "nic": 5e10}
    path.write_text(json.dumps({"host": [host], "ranks": {"trainers": ["a:0-1"], "replicas": [["a:2"]]}}))
    call = dict(rendezvous=f"tcp://127.0.0.1:{free_port()}", token=TOKEN, trainer=ToySource(0, 1))
    with pytest.raises(XferError, match="places 2 trainers and 1 replicas; this job has 1 and 1"):
        flat_connect(fabric=path, **call)
    path.write_text(json.dumps({"host": [{**host, "nic": "fast"}]}))
    with pytest.raises(XferError) as e:
        flat_connect(fabric=path, deadline_s=-1, **call)
    assert len(e.value.violations) == 3  # the deadline, the file, and what is wrong in it
