"""Predictions follow their formula: between the floor of the links and lockstep, and exact where a case can be done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.links import G, fabrics
from tests.support.plan_worlds import dense, destination, quick, source, worlds
from xfer.plan.fabric import Fabric, Site
from xfer.plan.planner import PlanOptions, plan_replica, plan_replicas
from xfer.plan.predict import Costs, predict
from xfer.plan.program import Op, row_wire_bytes
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, TensorSpec

FREE = Costs(0.0, 0.0)


@given(worlds(), st.data())
@quick
def test_links_carry_the_bytes_of_all_rows_and_time_lies_between_floor_and_lockstep(world, data):
    trainers, workers = len(world.trainers), len(world.workers)
    fabric = data.draw(fabrics().filter(lambda f: f.gpus >= max(trainers, 2 * workers)))
    every = st.permutations(range(fabric.gpus))
    at = data.draw(every)
    site = Site(fabric, tuple(data.draw(every)[:trainers]), (tuple(at[:workers]), tuple(at[workers : 2 * workers])))
    options = [replace(world.options, hosts=(), site=site, replica=r) for r in range(2)]
    plans = [plan_replica(world.catalog, world.sources(), world.destinations(), o) for o in options]
    p = predict(plans, site, costs=FREE)

    want = np.zeros(len(fabric.links), np.int64)
    hosts = np.zeros_like(p.host_bytes)
    for r, plan in enumerate(plans):
        gpu = site.gpus(r)
        for rows in plan.rows():
            rows = rows[rows["op"] != Op.FILL]
            src, dst, n = gpu[rows["src"]], gpu[rows["dst"]], row_wire_bytes(rows)
            want += fabric.links.loads(src, dst, n)
            np.add.at(hosts, (fabric.links.host[src], fabric.links.host[dst]), n)
    assert np.array_equal(p.link_bytes, want) and np.array_equal(p.host_bytes, hosts)
    assert p.nbytes == hosts.sum() == sum(plan.summary.nbytes for plan in plans)
    assert p.wave_bytes.sum() == p.nbytes - p.pulled_bytes
    assert p.floor_s == pytest.approx(max(fabric.links.seconds(want), default=0.0))
    copies = (p.nbytes / rate if (rate := min((h.local for h in fabric.hosts if h.local), default=0)) else 0.0) * 4
    assert max(p.pull_s, p.wire_s) <= p.transfer_s * (1 + 1e-9)
    assert p.transfer_s <= p.pull_s + p.lockstep_s + copies + p.fill_s + 1e-12
    assert p.floor_s <= (p.pull_s + p.lockstep_s) * (1 + 1e-9)
    assert (p.wave_span[:, 0] <= p.wave_span[:, 1]).all() and dict(p.phases())["wire"] == p.wire_s
    assert sum(b.nbytes for b in p.busiest(len(want))) == want.sum()


def job(rows: int, trainers: int, workers: int, pad: int = 0):
    """Worker w wants rows of one tensor that all trainers hold."""
    shape = (workers * rows, 1024)
    catalog = Catalog((TensorSpec("t", shape, "bfloat16"),))
    fills = [Fill("w", rows * 2048, (pad, 1024), (2048, 2), "bfloat16", b"\0\0")] if pad else []

    def part(w):
        return [Fragment("t", (w * rows, 0), (rows, 1024), "w", 0, (2048, 2), "bfloat16")]

    held = [dense("t", shape, "bfloat16")], {"w": 2048 * shape[0]}
    destinations = [destination(catalog, part(w), {"w": (rows + pad) * 2048}, w, fills=fills) for w in range(workers)]
    return catalog, [source(catalog, *held, r) for r in range(trainers)], destinations


@pytest.mark.parametrize("local", [1 << 32, 0])
def test_one_pair_between_hosts_by_hand(local):
    """8 MiB in messages of 1 MiB over one NIC: packed ahead, unpacked behind, the rest in a row. Copies are free without a rate."""
    catalog, sources, destinations = job(4096, 1, 1, pad=1024)
    fabric = Fabric.uniform(2, 1, nvlink=400 * G, nic=1 << 30, local=local)
    site = Site(fabric, (0,), ((1,),))
    options = PlanOptions(bucket_bytes=1 << 20, site=site)
    p = predict([plan_replica(catalog, sources, destinations, options)], site, costs=Costs(1e-3, 5e-3))
    one, copy, fill = 2**20 / 2**30, *((n / local if local else 0.0) for n in (1 << 20, 2 << 20))
    assert p.floor_s == pytest.approx(8 * one) == pytest.approx(p.lockstep_s)
    assert (p.pull_s, p.pulled_bytes, p.nbytes) == (0.0, 0, 8 << 20)
    assert p.pack_s == pytest.approx(copy) and p.wire_s == pytest.approx(8 * (one + 1e-3))
    assert p.unpack_s == pytest.approx(copy) and p.fill_s == pytest.approx(fill)
    assert p.transfer_s == pytest.approx(5e-3 + copy + 8 * (one + 1e-3) + copy + fill)
    assert [b.nbytes for b in p.busiest()] == [8 << 20] * 2


def test_a_rank_takes_one_message_after_another():
    catalog, sources, destinations = job(4096, 4, 1)
    site = Site(Fabric.uniform(5, 1, nvlink=400 * G, nic=400 * G), (0, 1, 2, 3), ((4,),))
    plans = [plan_replica(catalog, sources, destinations, PlanOptions(site=site))]
    assert predict(plans, site, costs=Costs(1e-3, 0.0)).wire_s == pytest.approx(4e-3)


def test_inside_an_island_bytes_are_pulled_at_the_port_rate_and_nothing_is_packed():
    catalog, sources, destinations = job(4096, 2, 2)
    fabric = Fabric.uniform(1, 4, nvlink=1 << 30, nic=0, local=1 << 20)
    site = Site(fabric, (0, 1), ((2, 3),))
    p = predict([plan_replica(catalog, sources, destinations, PlanOptions(site=site))], site, costs=FREE)
    assert p.pulled_bytes == p.nbytes == 16 << 20 and p.wire_s == p.pack_s == p.unpack_s == 0
    assert p.transfer_s == p.pull_s == p.floor_s == pytest.approx((8 << 20) / 2**30)


def test_replicas_share_the_sources_nics():
    catalog, sources, destinations = job(4096, 1, 1)
    fabric = Fabric.uniform(5, 1, nvlink=400 * G, nic=1 << 30)
    site = Site(fabric, (0,), ((1,), (2,), (3,), (4,)))
    plans = [plan_replica(catalog, sources, destinations, PlanOptions(site=site, replica=r)) for r in range(4)]
    alone, together = predict(plans[:1], site, costs=FREE), predict(plans, site, costs=FREE)
    assert together.floor_s == pytest.approx(4 * alone.floor_s)
    assert together.transfer_s == pytest.approx(4 * alone.transfer_s)
    some = predict(plans[1:3], site, replicas=[1, 2], costs=FREE)
    assert some.transfer_s == pytest.approx(2 * alone.transfer_s)
    with pytest.raises(ValueError, match="replica 0"):
        predict(plans[:1], Site(fabric, (0, 1), ((2,),)))


def test_a_relay_ring_brings_a_replica_into_each_host_once_through_all_its_cards_and_ends_some_parts_later():
    """Five replicas of two workers on two hosts of six GPUs, in turns; 8 MiB to each worker in messages of 1 MiB."""
    catalog, sources, destinations = job(4096, 2, 2)
    fabric = Fabric.uniform(3, 6, nvlink=1 << 32, nic=1 << 30)
    site = Site(fabric, (0, 1), ((6, 7), (12, 13), (8, 9), (14, 15), (10, 11)))
    assert site.together(range(5)) == [[0, 2, 4], [1, 3]] * 2 + [[0, 2, 4]]
    plans = plan_replicas(catalog, sources, destinations, site, bucket_bytes=1 << 20, relay=True)
    assert plans[0] is plans[2] is plans[4] and plans[1] is plans[3]
    p, first = predict(plans, site, costs=FREE, relay=True), predict(plans[:2], site, replicas=[0, 1], costs=FREE)
    assert p.host_bytes.tolist() == [[0, 16 << 20, 16 << 20], [0, 32 << 20, 0], [0, 0, 16 << 20]]
    assert (p.nbytes, p.pulled_bytes) == (80 << 20, 48 << 20)
    came = {n: b for n, b in zip(p.links.names, p.link_bytes.tolist()) if "NIC" in n and n.endswith(" in") and b}
    thirds, halves = ([b for n, b in came.items() if n.startswith(f"host{h}")] for h in (1, 2))
    assert thirds == pytest.approx([(8 << 20) / 3] * 6, abs=1) and halves == [4 << 20] * 4
    assert first.floor_s == pytest.approx((16 << 20) / 2**30), "the cards of the trainers' rails alone"
    assert p.floor_s == pytest.approx((8 / 3 + 4) * 2**20 / 2**30), "all cards of the trainers' host"
    assert p.relay_s == pytest.approx(2 * 2**20 / 2**32)
    assert p.transfer_s == pytest.approx(p.floor_s + p.relay_s)


def test_replicas_on_the_trainers_host_form_a_chain_whose_members_end_one_part_after_the_other():
    catalog, sources, destinations = job(4096, 2, 2)
    site = Site(Fabric.uniform(1, 8, nvlink=1 << 32, nic=1 << 30), (0, 1), ((2, 3), (4, 5), (6, 7)))
    plans = plan_replicas(catalog, sources, destinations, site, bucket_bytes=1 << 20, relay=True)
    p, first = predict(plans, site, costs=FREE, relay=True), predict(plans[:1], site, replicas=[0], costs=FREE)
    assert (p.nbytes, p.pulled_bytes) == (48 << 20, 48 << 20)
    assert p.relay_s == pytest.approx(2 * 2**20 / 2**32)
    assert p.transfer_s == pytest.approx(first.transfer_s + p.relay_s)
