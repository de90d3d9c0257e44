"""The choice of sources as a linear programme for HiGHS, and random fabrics: the judge of plan/flow.py.

The programme is written from demands and paths alone, over all replicas, with every link of every path in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from xfer.plan.balance import Demand, SourceShare
from xfer.plan.fabric import Fabric, Host, Nic, Site
from xfer.plan.flow import Flow

UNIT = 512
G = 10**9


def least_busiest(site: Site, demands: Sequence[Demand]) -> float:
    """Seconds of the busiest link when sources are chosen as well as they can be."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    links, trainers = site.fabric.links, np.array(site.trainers)
    width = np.array([len(d.holders) for d in demands])
    holder = np.concatenate([d.holders for d in demands]).astype(np.int64)
    demand = np.repeat(np.arange(len(demands)), width)
    worker = np.array([d.destination for d in demands])[demand] - len(trainers)
    path = np.concatenate([links.paths(trainers[holder], np.array(r)[worker]) for r in site.replicas])
    column = np.arange(len(path))
    on = path >= 0
    cost = 1e6 * UNIT / links.rate[path[on]]  # in microseconds, so that tolerances of the solver are small ones
    below = coo_matrix(
        (np.append(cost, -np.ones(len(links))),
         (np.append(path[on], np.arange(len(links))),
          np.append(np.repeat(column, on.sum(axis=1)), np.full(len(links), len(path))))),
        shape=(len(links), len(path) + 1),
    )  # fmt: skip
    which = np.concatenate([demand + i * len(demands) for i in range(len(site.replicas))])
    equal = coo_matrix((np.ones(len(path)), (which, column)), shape=(which[-1] + 1, len(path) + 1))
    units = np.tile([d.units for d in demands], len(site.replicas))
    goal = np.zeros(len(path) + 1)
    goal[-1] = 1
    return linprog(goal, below, np.zeros(len(links)), equal, units, method="highs").fun / 1e6


def seconds(site: Site, demands: Sequence[Demand], shares: Sequence[Sequence[SourceShare]]) -> np.ndarray:
    """float64 [links]: what `shares` (one list per replica) put on each link."""
    links, load = site.fabric.links, np.zeros(len(site.fabric.links), np.int64)
    for gpus, mine in zip(site.replicas, shares, strict=True):
        source = np.array([site.trainers[s.source] for s in mine], np.int64)
        destination = np.array([gpus[demands[s.demand].destination - len(site.trainers)] for s in mine], np.int64)
        load += links.loads(source, destination, np.array([s.end - s.begin for s in mine], np.int64) * UNIT)
    return links.seconds(load)


def divided(demands: Sequence[Demand], shares: Sequence[SourceShare]) -> bool:
    """Whether the shares divide each demand once and wholly, among its holders."""
    for i, d in enumerate(demands):
        mine = [s for s in shares if s.demand == i]
        ends = [0, *(s.end for s in mine)]
        if [s.begin for s in mine] != ends[:-1] or ends[-1] != d.units:
            return False
        if not all(s.source in d.holders and s.begin < s.end for s in mine):
            return False
    return True


@st.composite
def fabrics(draw) -> Fabric:
    hosts = []
    for h in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 6))
        gpus = draw(st.permutations(range(n)))
        k, m = draw(st.integers(1, min(2, n))), draw(st.integers(1, n))
        nics = [
            Nic(tuple(range(n))[i::m], draw(st.sampled_from([12, 25, 50])) * G, draw(st.integers(0, 2)))
            for i in range(m)
        ]
        hosts.append(
            Host(
                f"h{h}", tuple(tuple(sorted(gpus[i::k])) for i in range(k)), draw(st.sampled_from([100, 400])) * G,
                tuple(nics), draw(st.sampled_from([20, 60])) * G, draw(st.sampled_from([0, 1000])) * G,
            )
        )  # fmt: skip
    return Fabric(tuple(hosts), draw(st.sampled_from([0, 30, 100])) * G, draw(st.sampled_from(["nvlink", "spine"])))


@st.composite
def sites(draw) -> Site:
    """Trainers and replicas of one size anywhere, perhaps on the same GPUs."""
    fabric = draw(fabrics())
    every = st.permutations(range(fabric.gpus))
    trainers = draw(st.integers(1, fabric.gpus))
    workers = draw(st.integers(1, min(4, fabric.gpus)))
    replicas = draw(st.integers(1, fabric.gpus // workers))
    at = draw(every)
    return Site(
        fabric,
        tuple(draw(every)[:trainers]),
        tuple(tuple(at[i * workers : (i + 1) * workers]) for i in range(replicas)),
    )


@st.composite
def problems(draw) -> tuple[Site, list[Demand]]:
    """A site, and what each worker of a replica wants of which holders."""
    site = draw(sites())
    n = len(site.trainers)
    demands = []
    for _ in range(draw(st.integers(1, 8))):
        holders = tuple(sorted(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))))
        units = draw(st.one_of(st.integers(1, 2000), st.integers(1000, 100_000), st.integers(1000, 100_000)))
        destinations = draw(st.lists(st.integers(0, len(site.replicas[0]) - 1), min_size=1, unique=True))
        demands += [Demand(holders, n + t, units) for t in sorted(destinations)]
    return site, demands


def all_shares(site: Site, demands: list[Demand]):
    flow = Flow(demands, np.array(site.trainers), np.array(site.replicas), site.fabric.links, UNIT)
    return [flow.shares(r) for r in range(len(site.replicas))]


def fixed_choice() -> str:
    """Shares of a few problems whose numbers divide badly."""
    out = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        rates = dict(nvlink=396_123_456_789, nic=48_333_333_331, spine=97_777_777_777)
        fabric = Fabric.uniform(6, 8, **rates, cross_rail="spine")
        at = rng.permutation(48).tolist()
        site = Site(fabric, tuple(at[:24]), tuple(tuple(at[24 + 8 * r : 32 + 8 * r]) for r in range(3)))
        holders = [tuple(sorted(rng.choice(24, n, replace=False).tolist())) for n in rng.integers(1, 24, 40)]
        demands = [Demand(h, 24 + int(rng.integers(8)), int(rng.integers(1e6))) for h in holders]
        out.append([(s.demand, s.source, s.begin) for shares in all_shares(site, demands) for s in shares])
    return str(out)
