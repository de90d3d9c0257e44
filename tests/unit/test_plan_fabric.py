"""Sources chosen over links: as good as the linear programme, never worse than without links, the same on every rank. Fabrics: the links
of a path, and the file that describes them. Predictions: between the floor of the links and lockstep.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import plan_predictions
from benchmarks.lib.layouts import FP8_ROWS, ROWS, Model
from tests.support.examples import EXAMPLES
from tests.support.links import (
    UNIT,
    G,
    all_shares,
    divided,
    fixed_choice,
    least_busiest,
    problems,
    seconds,
    sites,
)
from tests.support.plan_worlds import dense, destination, placed, source, worlds
from tests.support.plan_worlds import quick as few
from xfer.errors import XferError
from xfer.mesh.parallel import TrainerParallel
from xfer.plan.balance import Demand, balance
from xfer.plan.draft import make_draft
from xfer.plan.fabric import Fabric, Host, Nic, Site
from xfer.plan.fabric_file import parse, read_site, read_toml
from xfer.plan.planner import Drafts, PlanOptions, SubPlan, plan_replicas
from xfer.plan.predict import Costs, predict
from xfer.plan.program import Op, row_wire_bytes
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, TensorSpec

quick = settings(few, max_examples=EXAMPLES // 4 + 1)


# ---- the choice


@given(problems())
@quick
def test_each_demand_is_divided_once_and_the_busiest_link_is_as_good_as_the_linear_programme(problem):
    """And no busier than by a balance that does not know the links; a site read from bytes leads to the same choice."""
    pytest.importorskip("scipy.optimize")
    site, demands = problem
    shares = all_shares(site, demands)
    assert all(divided(demands, s) for s in shares)
    back = Site.from_bytes(site.to_bytes())
    assert back == site and back.to_bytes() == site.to_bytes() and all_shares(back, demands) == shares
    got = seconds(site, demands, shares).max()
    # Whole units: rounding may cost each demand of each replica a unit on a link.
    slow = site.fabric.links.rate[site.fabric.links.rate > 0].min(initial=G)
    assert got <= least_busiest(site, demands) * 1.02 + 2 * len(demands) * len(site.replicas) * UNIT / slow
    blind = [balance(demands, len(site.trainers))] * len(site.replicas)
    assert got <= seconds(site, demands, blind).max()


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(20_000, 90_000), min_size=1, max_size=4), st.data())
@quick
def test_no_replica_of_the_trainer_idles(hosts, gpus, units, data):
    """Trainers that all hold everything, and destinations to which all of them are equally far: equal work for all."""
    replicas, per = data.draw(st.integers(1, 3)), max(gpus, len(units))
    fabric = Fabric.uniform(hosts + replicas, per, nvlink=400 * G, nic=50 * G, cross_rail="spine")
    trainers = tuple(h * per + g for h in range(hosts) for g in range(gpus))
    workers = (tuple(range((hosts + r) * per, (hosts + r) * per + len(units))) for r in range(replicas))
    site = Site(fabric, trainers, tuple(workers))
    demands = [Demand(tuple(range(len(trainers))), len(trainers) + w, u) for w, u in enumerate(units)]
    for shares in all_shares(site, demands):
        out = np.zeros(len(trainers), np.int64)
        for s in shares:
            out[s.source] += s.end - s.begin
        assert out.max() <= out.min() * 1.01 + len(demands)


def test_the_choice_does_not_depend_on_the_vector_instructions_of_a_machine():
    """A second process computes the same shares with all of numpy's run-time dispatch switched off."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    used = [f for f in __cpu_dispatch__ if __cpu_features__.get(f)]
    if not used:
        pytest.skip("numpy has only its base instructions here")
    code = "from tests.support.links import fixed_choice; print(fixed_choice())"
    how = dict(cwd=Path(__file__).resolve().parents[2], env={**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(used)})
    other = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120, **how).strip()
    assert other == fixed_choice() and len(other) > 1000


def planned_row(name: str):
    """Draft of a published mapping at its true parallel shape, with fewer layers; its number of replicas."""
    config, sizes, workers, replicas = ROWS[name]
    of = TrainerParallel(**sizes)
    layers = 2 if of.pp == 1 else of.pp + 1  # uneven stages
    m = Model.named(config, num_hidden_layers=layers)
    if m.experts:  # as many as EP ranks: more of them are more of the same
        m = replace(m, dense_layers=min(m.dense_layers, 1), experts=of.ep)
    return make_draft(*plan_predictions.ranks(m, of, workers), PlanOptions()), replicas


def demands_of(draft) -> list[Demand]:
    s = draft.stream
    ends = np.append(s.start, int(s.nbytes.sum()))
    groups = zip(s.group_first[:-1].tolist(), s.group_first[1:].tolist(), s.group_holders, s.group_destinations)
    return [Demand(h, t, -(-int(ends[b] - ends[a]) // UNIT)) for a, b, h, destinations in groups for t in destinations]


LONG = pytest.mark.slow  # HiGHS alone takes ten seconds
MAPPINGS = [pytest.param(r, marks=LONG if r.startswith(("235B", "Deep")) else ()) for r in ROWS if r[:2] != "1T"]


@pytest.mark.parametrize("cross", ["nvlink", "spine", "narrow spine"])
@pytest.mark.parametrize("row", MAPPINGS)
def test_published_mappings_on_hosts_of_eight(row, cross):
    """Within 2 % of the optimum, and not above the blind balance, on 400 Gb/s NICs and an NVLink of 396 GB/s."""
    pytest.importorskip("scipy.optimize")
    draft, replicas = planned_row(row)
    hosts = [-(-draft.trainers // 8), -(-draft.workers * replicas // 8)]
    more = {"nvlink": {}, "spine": {"cross_rail": "spine"}}.get(cross)
    narrow = {"cross_rail": "spine", "spine": sum(hosts) * 48_500_000_000 // 4}  # a quarter of its hosts' NICs
    fabric = Fabric.uniform(sum(hosts), nvlink=396 * G, nic=48_500_000_000, **(narrow if more is None else more))
    site, demands = Site.packed(fabric, draft.trainers, replicas, draft.workers), demands_of(draft)
    got = seconds(site, demands, all_shares(site, demands)).max()
    assert got <= 1.02 * least_busiest(site, demands)
    assert got <= seconds(site, demands, [balance(demands, draft.trainers)] * replicas).max()


# ---- in a plan


@given(worlds(), st.data())
@few
def test_plans_of_one_draft_are_the_plans_made_alone(world, data):
    blind = world.options
    site = data.draw(placed(world, 1))
    other = replace(world.options, replica=data.draw(st.integers(0, len(site.replicas) - 1)))
    drafts, inputs = Drafts(), (world.catalog, world.sources(), world.destinations())
    for options in (blind, replace(blind, rotation=blind.rotation + 1), other, world.options):
        shared, alone = drafts.plan(*inputs, options), world.plan(options)
        assert (shared.key, shared.digest, shared.summary) == (alone.key, alone.digest, alone.summary)


# ---- fabrics

TWO = Fabric(
    (
        Host("a", ((0, 1), (2, 3)), 400 * G, (Nic((0, 1), 50 * G, 0), Nic((2, 3), 50 * G, 1)), 60 * G, 1000 * G),
        Host("b", ((0, 1, 2, 3),), 400 * G, (Nic((0, 1), 50 * G, 0), Nic((2, 3), 50 * G, 1))),
    ),
    spine=200 * G,
)


@pytest.mark.parametrize(
    "src,dst,nvlink,spine",
    [
        (0, 0, "a GPU 0 memory", None),
        (4, 4, "", None),  # no rate is given for it
        (0, 1, "a GPU 0 out, a GPU 1 in", None),
        (0, 2, "a island 0 out, a island 1 in", None),
        (4, 7, "b GPU 0 out, b GPU 3 in", None),
        (0, 5, "a NIC of GPU 0,1 (rail 0) out, b NIC of GPU 0,1 (rail 0) in", None),
        # No GPU of rail 1 in the source's island: over the spine in any case.
        (0, 6, "a NIC of GPU 0,1 (rail 0) out, b NIC of GPU 2,3 (rail 1) in, rail 0 up, rail 1 down", None),
        (5, 3, "b NIC of GPU 2,3 (rail 1) out, a NIC of GPU 2,3 (rail 1) in, b GPU 1 out, b GPU 2 in",
         "b NIC of GPU 0,1 (rail 0) out, a NIC of GPU 2,3 (rail 1) in, rail 0 up, rail 1 down"),
    ],
)  # fmt: skip
def test_the_links_of_a_path(src, dst, nvlink, spine):
    for mode, want in (("nvlink", nvlink), ("spine", nvlink if spine is None else spine)):
        links = replace(TWO, cross_rail=mode).links
        assert ", ".join(links.names[i] for i in links.paths(src, dst) if i >= 0) == want


def test_many_hosts_islands_rails_and_doubles_are_checked_in_seconds():
    """In CPU seconds of this process. A check of quadratic cost takes minutes here."""
    many, began = 20_000, time.process_time()
    hosts = parse({"host": [{"count": many, "gpus": 1, "nvlink": 1e11, "nic": 1e10}]})[0]
    rails = Fabric((Host("a", (tuple(range(many)),), G, tuple(Nic((g,), G, g) for g in range(many))),))
    assert hosts.links.relay_gpu.shape == (many, 1) and rails.links.relay_gpu.tolist() == [list(range(many))]
    twice = (*range(many),) * 2
    with pytest.raises(XferError, match="several trainers"):
        Site(rails, twice, ())
    with pytest.raises(XferError, match=r"must be in exactly one NIC .*not so: GPUs 0, 1, .* more\n\(XF100\)$"):
        Fabric((Host("a", (tuple(range(many)),), G, (Nic(twice, G),)),))
    assert time.process_time() - began < 10


@given(sites(), st.data())
@quick
def test_every_byte_of_a_transfer_is_on_each_link_of_its_path(site, data):
    links, gpus = site.fabric.links, st.integers(0, site.fabric.gpus - 1)
    rows = data.draw(st.lists(st.tuples(gpus, gpus, st.integers(1, 10**12)), min_size=1, max_size=6))
    load = links.loads(*(np.array(c) for c in zip(*rows)))
    want = np.zeros(len(links), np.int64)
    for s, d, n in rows:
        for link in links.paths(s, d):
            want[link] += n * (link >= 0)
    assert np.array_equal(load, want)
    assert np.allclose(links.seconds(load)[links.rate > 0], load[links.rate > 0] / links.rate[links.rate > 0])
    assert len(links.names) == len(links.rate) == len(set(links.names))


def test_what_is_wrong_with_a_fabric_is_told_at_once():
    hosts = Host("a", ((0, 1), (1,)), 0, (Nic((0,), 0), Nic((0, 7), 5, -1))), Host("a", ((0,), (1,)), 1)
    with pytest.raises(XferError) as e:
        Fabric(hosts, spine=-1, cross_rail="air")
    assert len(e.value.violations) == 11, e.value
    for name in ("\ud800", 3):
        with pytest.raises(XferError, match="fabric") as e:
            replace(TWO, hosts=(replace(TWO.hosts[0], name=name), TWO.hosts[1]))
        assert "has a UTF-8 form is needed" in e.value.violations[0]
    a = TWO.hosts[0]
    for odd in (np.int64(0), 0.0, "0", False, None):  # a site is sent to other ranks, which numpy's numbers cannot be
        for what, made in {
            "trainers": lambda odd=odd: Site(TWO, (odd,), ((1,),)),
            "workers": lambda odd=odd: Site(TWO, (0,), ((odd,),)),
            "islands": lambda odd=odd: Fabric((replace(a, islands=((odd, 1), (2, 3))),)),
            "NIC": lambda odd=odd: Fabric((replace(a, nics=(Nic((odd, 1), G), Nic((2, 3), G))),)),
            "rail": lambda odd=odd: Fabric((replace(a, nics=(Nic((0, 1), G, odd), Nic((2, 3), G))),)),
        }.items():
            with pytest.raises(XferError) as e:
                made()
            assert any(what in v and ("int is needed" in v or "an integer from" in v) for v in e.value.violations)
    with pytest.raises(XferError) as e:
        Site(TWO, (0, 0, 99), ((1, 2), (2,), ()))
    assert [v.split()[0] for v in e.value.violations] == ["trainers", "several", "several", "replica"]


# ---- the file

FILE = """
cross_rail = "spine"
[[host]]
names = ["a"]
gpus = 4
islands = [[0, 1], [2, 3]]
nvlink = 400e9
bridge = 60e9
local = 1_000_000_000_000
nics = [{gpus = [0, 1], rate = 50e9, rail = 0}, {gpus = [2, 3], rate = 50e9, rail = 1}]
[[host]]
count = 2
nvlink = 396e9
nic = 48.5e9
[ranks]
trainers = ["a"]
replicas = [["host1:0-3"], ["host1:4,5,6-7"], ["host2:0-1", "host2:2-3"]]
"""


def test_a_fabric_is_read_from_toml_and_json(tmp_path):
    (tmp_path / "f.toml").write_text(FILE)
    (tmp_path / "f.json").write_text(json.dumps(read_toml(FILE)))
    site = read_site(tmp_path / "f.toml")
    assert site == read_site(tmp_path / "f.json")
    assert site.fabric.hosts[0] == TWO.hosts[0] and site.fabric.cross_rail == "spine"
    uniform = Fabric.uniform(2, nvlink=396 * G, nic=48_500_000_000).hosts
    assert site.fabric.hosts[1:] == tuple(replace(h, name=n) for h, n in zip(uniform, ("host1", "host2")))
    assert site.trainers == (0, 1, 2, 3)
    assert site.replicas == ((4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    alone = {k: v for k, v in read_toml(FILE).items() if k != "ranks"}
    assert parse(alone) == (site.fabric, None)
    for text, match in (("{", "x.json"), ("[1]", "unknown key"), (json.dumps(alone), "ranks")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(XferError, match=match):
            read_site(tmp_path / "x.json")
    with pytest.raises(XferError, match="no.json"):
        read_site(tmp_path / "no.json")


HOST = {"names": ["a"], "gpus": 2, "nvlink": 4e11, "nic": 5e10}


@pytest.mark.parametrize(
    "data,words",
    [
        ({}, ["no [[host]]"]),
        ({"host": 3, "spin": 1}, ["host: a list", "unknown key 'spin'"]),
        ({"host": [HOST, HOST]}, ["host 'a' is there 2 times"]),
        ({"host": [{**HOST, "count": 2, "nvlink": "fast"}]}, ["one of the two", "'fast'"]),
        ({"host": [{**HOST, "names": ["a:1"], "gpus": 0, "bridge": -1}]}, ["names", "gpus: 0", "-1"]),
        ({"host": [{**HOST, "islands": [[0], "x"], "nics": [{"gpus": [0], "rate": True, "port": 1}]}]},
         ["islands[1]", "have 1 GPUs", "nic and", ]),
        ({"host": [{"names": ["a"], "gpus": 1, "nvlink": 0, "nics": [{"rate": True, "port": 1, "rail": -1}]}]},
         ["unknown key 'port'", "gpus: None", "rate: True", "rail: -1"]),
        ({"host": [{"names": ["a"], "gpus": 1, "nvlink": 0, "nics": [{"gpus": [], "rate": 1}]}]}, ["a NIC (rail 0) of no GPU"]),
        ({"host": [HOST], "ranks": {"trainers": ["b", "a:2", "a:1-0", "a:x"], "replicas": "a", "engines": []}},
         ["no such host", "'a:2'", "'a:1-0'", "'a:x'", "replicas: 'a'", "unknown key 'engines'"]),
        ({"host": [HOST], "ranks": {"trainers": ["a:", "a:0-1-1", "a:0-1--", "a:-1", "a:0,", "a:\u0660"], "replicas": []}},
         ["'a:'", "'a:0-1-1'", "'a:0-1--'", "'a:-1'", "'a:0,'", "'a:\u0660': GPUs of a are 0..1"]),
        ({"host": [HOST], "ranks": {"trainers": [1], "replicas": [["a"], "a"]}}, ["trainers: [1]", "replicas[1]"]),
        ({"host": [HOST], "ranks": []}, ["ranks: a table"]),
        ({"host": [HOST], "cross_rail": "air", "spine": None}, ["'air'", "spine: None"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_at_once(data, words):
    with pytest.raises(XferError) as e:
        parse(data, "f.toml")
    text = str(e.value)
    assert "f.toml" in text and len(e.value.violations) >= len(words)
    for w in words:
        assert w in text, (w, text)


# ---- predictions

FREE = Costs(0.0, 0.0)


@given(worlds(), st.data())
@few
def test_links_carry_the_bytes_of_all_rows_and_time_lies_between_floor_and_lockstep(world, data):
    site = data.draw(placed(world, 2))
    fabric, site = site.fabric, replace(site, replicas=site.replicas[:2])
    plans = [world.plan(replace(world.options, hosts=(), site=site, replica=r)) for r in range(2)]
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


def planned(site: Site, *, pad: int = 0, bucket_bytes: int = 240 << 20, relay: bool = False) -> list[SubPlan]:
    """Each worker of a replica wants 8 MiB of one tensor, which all trainers hold, and fills `pad` rows."""
    rows, workers = 4096, len(site.replicas[0])
    shape = (workers * rows, 1024)
    catalog = Catalog((TensorSpec("t", shape, "bfloat16"),))
    fills = [Fill("w", rows * 2048, (pad, 1024), (2048, 2), "bfloat16", b"\0\0")] if pad else []
    held = [dense("t", shape, "bfloat16")], {"w": 2048 * shape[0]}
    parts = [[Fragment("t", (w * rows, 0), (rows, 1024), "w", 0, (2048, 2), "bfloat16")] for w in range(workers)]
    destinations = [destination(catalog, f, {"w": (rows + pad) * 2048}, w, fills=fills) for w, f in enumerate(parts)]
    sources = [source(catalog, *held, r) for r in range(len(site.trainers))]
    return plan_replicas(catalog, sources, destinations, site, bucket_bytes=bucket_bytes, relay=relay)


@pytest.mark.parametrize("local", [1 << 32, 0])
def test_one_pair_between_hosts_by_hand(local):
    """8 MiB in messages of 1 MiB over one NIC: packed ahead, unpacked behind, the rest in a row. Copies are free without a rate."""
    fabric = Fabric.uniform(2, 1, nvlink=400 * G, nic=1 << 30, local=local)
    site = Site(fabric, (0,), ((1,),))
    plans = planned(site, pad=1024, bucket_bytes=1 << 20)
    p = predict(plans, site, costs=Costs(1e-3, 5e-3))
    one, copy, fill = 2**20 / 2**30, *((n / local if local else 0.0) for n in (1 << 20, 2 << 20))
    assert p.floor_s == pytest.approx(8 * one) == pytest.approx(p.lockstep_s)
    assert (p.pull_s, p.pulled_bytes, p.nbytes) == (0.0, 0, 8 << 20)
    assert p.pack_s == pytest.approx(copy) and p.wire_s == pytest.approx(8 * (one + 1e-3))
    assert p.unpack_s == pytest.approx(copy) and p.fill_s == pytest.approx(fill)
    assert p.transfer_s == pytest.approx(5e-3 + copy + 8 * (one + 1e-3) + copy + fill)
    assert [b.nbytes for b in p.busiest()] == [8 << 20] * 2
    with pytest.raises(ValueError, match="replica 0"):
        predict(plans, Site(fabric, (0, 1), ((1,),)))


def test_a_rank_takes_one_message_after_another():
    site = Site(Fabric.uniform(5, 1, nvlink=400 * G, nic=400 * G), (0, 1, 2, 3), ((4,),))
    assert predict(planned(site), site, costs=Costs(1e-3, 0.0)).wire_s == pytest.approx(4e-3)


def test_inside_an_island_bytes_are_pulled_at_the_port_rate_and_nothing_is_packed():
    site = Site(Fabric.uniform(1, 4, nvlink=1 << 30, nic=0, local=1 << 20), (0, 1), ((2, 3),))
    p = predict(planned(site), site, costs=FREE)
    assert p.pulled_bytes == p.nbytes == 16 << 20 and p.wire_s == p.pack_s == p.unpack_s == 0
    assert p.transfer_s == p.pull_s == p.floor_s == pytest.approx((8 << 20) / 2**30)


def test_a_relay_ring_brings_a_replica_into_each_host_once_through_all_its_cards_and_ends_some_parts_later():
    """Five replicas of two workers on two hosts of six GPUs, in turns; 8 MiB to each worker in messages of 1 MiB."""
    fabric = Fabric.uniform(3, 6, nvlink=1 << 32, nic=1 << 30)
    site = Site(fabric, (0, 1), ((6, 7), (12, 13), (8, 9), (14, 15), (10, 11)))
    assert site.together(range(5)) == [[0, 2, 4], [1, 3]] * 2 + [[0, 2, 4]]
    plans = planned(site, bucket_bytes=1 << 20, relay=True)
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
    site = Site(Fabric.uniform(1, 8, nvlink=1 << 32, nic=1 << 30), (0, 1), ((2, 3), (4, 5), (6, 7)))
    plans = planned(site, bucket_bytes=1 << 20, relay=True)
    p, first = predict(plans, site, costs=FREE, relay=True), predict(plans[:1], site, replicas=[0], costs=FREE)
    assert (p.nbytes, p.pulled_bytes) == (48 << 20, 48 << 20)
    assert p.relay_s == pytest.approx(2 * 2**20 / 2**32)
    assert p.transfer_s == pytest.approx(first.transfer_s + p.relay_s)


@pytest.mark.parametrize("name", [pytest.param(r, marks=[pytest.mark.slow] * r.startswith("30B")) for r in FP8_ROWS])
def test_engines_in_block_fp8_take_a_byte_of_each_weight_and_a_float_of_each_block(name):
    """Within 1 %: workers of a replica share no matrix, but each has all norms and routers. The floor is what a worker takes, over its
    NIC of 48.5 GB/s."""
    config, _, workers, replicas = FP8_ROWS[name]
    expected = 0
    for spec in Model.named(config).specs():
        blocks = prod(-(-n // 128) for n in spec.shape)
        in_fp8 = len(spec.shape) == 2 and not spec.name.endswith(("embed_tokens.weight", "lm_head.weight"))
        expected += prod(spec.shape) + 4 * blocks if in_fp8 else 2 * prod(spec.shape)
    (report,) = plan_predictions.reports(name, plan_predictions.BUCKETS[:1])
    assert abs(report.nbytes / (replicas * expected) - 1) < 0.01
    takes = {("qwen3-4b", 1): 4.413e9, ("qwen3-4b", 4): 1.103e9, ("qwen3-30b-a3b", 2): 15.59e9}[config, workers]
    assert abs(report.most_in.nbytes / takes - 1) < 0.01 and abs(report.floor_s / (takes / 48.5e9) - 1) < 0.01
    assert report.floor_s < report.transfer_s < 1.4 * report.floor_s
