"""Choice of sources when the links between ranks are known: the time of the busiest link is made as short as possible.

`balance.py` evens out the bytes of the sources. Here each (holder, destination) is a path over links with rates, and
the time of the busiest link is minimized, then that of the others. A sub-plan is chosen *as if every replica had this
layout* and were refitted at the same time, each on its own GPUs. Trainers serve all replicas at once, so a choice for
one replica alone would take all bytes from its nearest sources and leave nothing of that link to others. Inventories of
other replicas are not read.

The problem is the linear programme

    least T  so that  for each link l:  sum over (demand d, holder h with l on its path) x[d, h] * cost[l]  <=  T
                      for each d:       sum over h of x[d, h] = units of d,  x >= 0

It is solved by soft water-filling: a path is as busy as a high-power mean of its links, and each demand moves units
from its busier paths to its less busy ones in proportion, until the dual bound says that the busiest link is within
`GAP` of the least possible. The powers rise as it goes; the fixed point for power P is the minimum of the sum of
(time of link)^(P+1).

All ranks must compute the same shares, so only +, -, *, / and square roots of float64 are used, element by element or
added up in the order of an index. Their results have the same bits on every IEEE machine; those of BLAS, exp and numpy's
sums do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xfer.plan.balance import Demand, SourceShare, balance, hand_out
from xfer.plan.fabric import MAX_PATH, Links

GAP = 1.002
"""Busiest link over the dual bound at which the search ends."""
STEPS = ((2, 24), (4, 40), (6, 80), (8, 1200))
"""(log2 of the power, most steps at it)."""
CRUMB = 1 / 4096
"""A path that carries less than this of its demand carries none: a message for it would cost more than it saves."""


class Flow:
    """The choice for all replicas of one layout.

    demands: of one replica; destinations are joint ranks. sources: int [trainers], GPU of each. workers: int [replicas,
    workers of one], GPUs. unit: bytes of a unit. The same input gives the same shares. The busiest link, over all
    replicas, is never busier than with `balance`, which knows no links.
    """

    def __init__(
        self, demands: Sequence[Demand], sources: np.ndarray, workers: np.ndarray, links: Links, unit: int
    ) -> None:
        self._demands = demands
        self._problem = p = _problem(demands, sources, workers, links, unit)
        self._amount = _whole(p, _solve(p))
        blind = balance(demands, len(sources))
        worse = _busiest(p, self._amount, links, unit) > _busiest_of(blind, demands, sources, workers, links, unit)
        self._blind = blind if worse else None

    def shares(self, replica: int) -> list[SourceShare]:
        """Shares of one row of `workers`, sorted by (demand, begin); they divide each demand completely."""
        if self._blind is not None:
            return self._blind
        p, out = self._problem, []
        for g, group in enumerate(p.groups):
            mine = self._amount[p.first[g] : p.first[g + 1], replica].tolist()
            holders = [h for members in group.holders for h in members]
            part = [n for units, members in zip(mine, group.holders) for n in _split(units, np.ones(len(members)))]
            destinations = [(i, self._demands[i].units) for i in group.members(replica)]
            out += hand_out(holders, np.array(part, np.int64), destinations)
        return sorted(out, key=lambda s: (s.demand, s.begin))


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Demands with one set of holders and the same choice of links: one decision."""

    units: tuple[int, ...]  # per replica
    holders: tuple[tuple[int, ...], ...]  # of each column
    demands: np.ndarray  # all demands with these holders, in hand-out order
    inside: np.ndarray  # bool [replicas, demands]: which of them

    def members(self, replica: int) -> list[int]:
        return self.demands[self.inside[replica]].tolist()


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """Columns are the paths to choose from, those of group g from first[g] to first[g + 1]."""

    groups: list[_Group]
    first: np.ndarray  # int64 [groups + 1]
    path: np.ndarray  # int64 [columns, MAX_PATH]; the number of links stands for none
    cost: np.ndarray  # float64 [links + 1], seconds a unit; 0 for none
    base: np.ndarray  # int64 [links + 1], units that go there in any case


def _problem(demands: Sequence[Demand], sources: np.ndarray, workers: np.ndarray, links: Links, unit: int) -> _Problem:
    base = np.zeros(len(links) + 1, np.int64)
    pools: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, d in enumerate(demands):
        if d.units > 0:
            pools[d.holders].append(i)
    groups: list[_Group] = []
    paths: list[np.ndarray] = []
    replicas = len(workers)
    for holders, members in sorted(pools.items()):
        members.sort(key=lambda i: (demands[i].destination, i))
        units = np.array([demands[i].units for i in members], np.int64)
        at = np.array([demands[i].destination for i in members]) - len(sources)
        gpu = workers[:, at].reshape(-1)  # [replicas * members]
        path = links.paths(sources[list(holders)][None, :], gpu[:, None])
        path[path < 0] = len(links)
        fixed = (path == path[:, :1]).all(axis=1)  # [replicas * members, MAX_PATH]: on the path of every source
        np.add.at(base, np.where(fixed, path[:, 0], len(links)), np.tile(units, replicas)[:, None])
        path = np.where(fixed[:, None, :], len(links), path)
        kinds, kind = np.unique(path.reshape(len(gpu), -1), axis=0, return_inverse=True)
        kind = kind.reshape(replicas, len(members))
        for k, row in enumerate(kinds):
            columns, column = np.unique(row.reshape(-1, MAX_PATH), axis=0, return_inverse=True)
            column = column.reshape(-1)
            inside = kind == k
            split = [tuple(h for h, c in zip(holders, column.tolist()) if c == n) for n in range(len(columns))]
            units_of = tuple((units * inside).sum(axis=1).tolist())
            groups.append(_Group(units_of, tuple(split), np.array(members), inside))
            paths.append(columns)
    base[-1] = 0
    cost = np.zeros(len(links) + 1)
    cost[:-1] = np.where(links.rate > 0, unit / np.maximum(links.rate, 1), 0.0)
    first = np.concatenate([[0], np.cumsum([len(p) for p in paths])]).astype(np.int64)
    return _Problem(groups, first, np.concatenate([np.zeros((0, MAX_PATH), np.int64), *paths]), cost, base)


def _solve(p: _Problem) -> np.ndarray:
    """Units of each column, float64 [columns]."""
    width = np.diff(p.first)
    group = np.repeat(np.arange(len(width)), width)
    units = np.array([sum(g.units) for g in p.groups], np.float64)
    x = (units / np.maximum(width, 1))[group]
    choice = width > 1
    if not choice.any():
        return x
    cost, base = p.cost[p.path], p.base * p.cost
    weight = cost / cost.max()
    links = len(p.cost)
    least_x = x * 2.0**-60
    best, least, bound = x, np.inf, 0.0
    for power, steps in STEPS:
        for step in range(steps):
            time = base + np.bincount(p.path.reshape(-1), (x[:, None] * cost).reshape(-1), links)
            busiest = float(time.max())
            if busiest == 0:
                return x  # no link is ever the limit
            if busiest <= least * (1 + 1e-6):  # of equal ones take the later one: its other links are more even
                best, least = x, min(least, busiest)
            if step % 8 == 7:
                bound = max(bound, _bound(p, time, base, cost, group, units, power))
            if power == STEPS[-1][0] and step >= 16 and least <= GAP * bound:
                return best
            busy = _mean(time[p.path], weight, power, busiest)
            x = x / busy
            x = np.maximum(x * (units / np.bincount(group, x, len(units)))[group], least_x)
    return best


def _mean(time: np.ndarray, weight: np.ndarray, power: int, busiest: float) -> np.ndarray:
    """(sum over the links of a path of weight * time^P)^(1/P) with P = 2^power; float64 [columns]."""
    top = np.maximum(np.maximum(time[:, 0], time[:, 1]), np.maximum(time[:, 2], time[:, 3]))
    top = np.maximum(top, busiest * 1e-6)  # a path without links is free, but not beyond all measure
    ratio = np.maximum(time / top[:, None], 0.125)  # so that no power of it leaves the range of normal numbers
    for _ in range(power):
        ratio = ratio * ratio
    ratio = ratio * weight
    mean = ((ratio[:, 0] + ratio[:, 1]) + ratio[:, 2]) + ratio[:, 3]
    mean = np.maximum(mean, 1e-300)
    for _ in range(power):
        mean = np.sqrt(mean)
    return top * mean


def _bound(
    p: _Problem, time: np.ndarray, base: np.ndarray, cost: np.ndarray, group: np.ndarray, units: np.ndarray, power: int
) -> float:
    """A lower bound on the time of the busiest link of any division (the dual of the programme, at prices from these times)."""
    price = np.maximum(time / time.max(), 0.125)
    for _ in range(power):
        price = price * price
    price[-1] = 0.0
    along = price[p.path] * cost
    least = np.full(len(units), np.inf)
    np.minimum.at(least, group, ((along[:, 0] + along[:, 1]) + along[:, 2]) + along[:, 3])
    return float((np.cumsum(price * base)[-1] + np.cumsum(units * least)[-1]) / np.cumsum(price)[-1])


def _whole(p: _Problem, x: np.ndarray) -> np.ndarray:
    """Whole units that each replica takes along each column, int64 [columns, replicas]; crumbs go to larger columns.

    All replicas take in the same proportions, so that each is served evenly also when the others do not come.
    """
    out = [np.zeros((0, len(p.groups[0].units) if p.groups else 1), np.int64)]
    for g, group in enumerate(p.groups):
        part = x[p.first[g] : p.first[g + 1]]
        part = np.where(part < sum(group.units) * CRUMB, 0.0, part) if len(part) > 1 else part
        out.append(np.array([_split(n, part) for n in group.units], np.int64).T)
    return np.concatenate(out)


def _split(units: int, parts: np.ndarray) -> list[int]:
    """`units` in proportion to `parts`, whole, by largest remainders (the first of equal ones)."""
    if not len(parts):
        return []
    total = float(np.cumsum(parts)[-1])
    exact = parts * (units / total) if total > 0 else np.full(len(parts), units / len(parts))
    low = np.minimum(np.floor(exact), units).astype(np.int64)
    order = np.argsort(low - exact, kind="stable")
    rest = units - int(low.sum())
    while rest > 0:
        low[order[:rest]] += 1
        rest -= min(rest, len(order))
    while rest < 0:  # only when a sum of floats came out a little high
        k = int(low.argmax())
        low[k], rest = low[k] - 1, rest + 1
    return low.tolist()


def _busiest(p: _Problem, amount: np.ndarray, links: Links, unit: int) -> float:
    """Seconds of the busiest link when every replica is served by these amounts."""
    load = p.base.copy()
    np.add.at(load, p.path, amount.sum(axis=1)[:, None])
    return float(links.seconds(load[:-1] * unit).max(initial=0.0))


def _busiest_of(
    shares: Sequence[SourceShare],
    demands: Sequence[Demand],
    sources: np.ndarray,
    workers: np.ndarray,
    links: Links,
    unit: int,
) -> float:
    """Seconds of the busiest link when every replica is served by these shares."""
    source = sources[np.array([s.source for s in shares], np.int64)]
    destination = np.array([demands[s.demand].destination for s in shares], np.int64) - len(sources)
    units = np.array([s.end - s.begin for s in shares], np.int64)
    load = links.loads(np.tile(source, len(workers)), workers[:, destination].reshape(-1), np.tile(units, len(workers)))
    return float(links.seconds(load * unit).max(initial=0.0))
