"""Choice of sources: divides the bytes of each (set of holders, destination) among the holders, over all tensors at
once.

All amounts are whole *units* (granules of the plan), so all arithmetic is on integers and equal on every rank. This
module divides amounts; the planner knows the bytes of a unit.

The load of a source is the sum of the units that it sends. Filling one set's units into its lowest holders
("water-filling", given all other loads) is the exact minimum over that set alone. Rounds over all sets until nothing
moves decrease the sum of squared loads, whose minimum also has the least possible maximum. Nested sets, the usual case,
are done after the first round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 256
"""Most rounds over the sets. A chain of sets that overlap pairwise needs many; every round ends in a valid division."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`units` of granules that `destination` needs and that each of `holders` (ascending ranks) could send, at `cost` a
    unit.
    """

    holders: tuple[int, ...]
    destination: int
    units: int
    cost: int = 1


@dataclass(frozen=True, slots=True)
class SourceShare:
    """Units `begin <= u < end` of demand number `demand` are sent by `source`."""

    demand: int
    source: int
    begin: int
    end: int


def balance(demands: Sequence[Demand], sources: int) -> list[SourceShare]:
    """Shares, sorted by (demand, begin), that divide each demand completely. The same input gives the same shares."""
    pools: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    for i, d in enumerate(demands):
        if d.units > 0:
            pools[d.holders, d.cost].append(i)
    # Small sets first: a holder that has no choice must be filled before those that have one.
    keys = sorted(pools, key=lambda k: (len(k[0]), k))
    total = {k: sum(demands[i].units for i in pools[k]) for k in keys}
    amount = _divide(keys, total, sources)
    out = []
    for key in keys:
        out += hand_out(
            key[0],
            amount[key],
            [(i, demands[i].units) for i in sorted(pools[key], key=lambda i: (demands[i].destination, i))],
        )
    return sorted(out, key=lambda s: (s.demand, s.begin))


def nearest(holders: tuple[int, ...], destination: int, hosts: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """(the holders on the destination's host, False), or (all holders, True) when none is there; `hosts` empty: all are
    near.
    """
    if not hosts:
        return holders, False
    near = tuple(h for h in holders if hosts[h] == hosts[destination])
    return (near, False) if near else (holders, True)


def _divide(
    keys: list[tuple[tuple[int, ...], int]], total: dict, sources: int
) -> dict[tuple[tuple[int, ...], int], np.ndarray]:
    """Units that each holder of each set sends, int64 [holders]."""
    load = np.zeros(sources, np.int64)
    members = {k: np.array(k[0], np.int64) for k in keys}
    amount = {}
    for k in keys:
        amount[k] = _fill(load[members[k]], total[k], k[1])
        load[members[k]] += amount[k] * k[1]
    free = [k for k in keys if len(k[0]) > 1]
    for _ in range(ROUNDS):
        moved = False
        for k in free:
            rest = load[members[k]] - amount[k] * k[1]
            new = _fill(rest, total[k], k[1])
            if _peak(rest + new * k[1]) < _peak(load[members[k]]):  # strictly better, or rounds could go in circles
                load[members[k]], amount[k], moved = rest + new * k[1], new, True
        if not moved:
            break
    return amount


def _peak(load: np.ndarray) -> tuple[int, ...]:
    return tuple(np.sort(load)[::-1].tolist())


def _fill(load: np.ndarray, units: int, cost: int) -> np.ndarray:
    """Units for each holder so that the highest load after it is least, then the second highest, and so on."""
    order = np.argsort(load, kind="stable")
    low = load[order]
    below = np.arange(1, len(low) + 1)
    level = (units * cost + np.cumsum(low)) // below  # with the k lowest filled evenly
    k = int(np.flatnonzero(level >= low)[-1]) + 1
    out = np.zeros(len(load), np.int64)
    out[order[:k]] = np.maximum(0, (level[k - 1] - low[:k]) // cost)
    for _ in range(units - int(out.sum())):  # what rounding left: fewer than two units a holder
        out[np.argmin(load + out * cost)] += 1
    return out


def hand_out(holders: Sequence[int], amount: np.ndarray, destinations: list[tuple[int, int]]) -> list[SourceShare]:
    """Destinations in order take from holders in order: few sources a destination, and few destinations a source."""
    out = []
    at, left = 0, int(amount[0]) if len(amount) else 0
    for demand, units in destinations:
        done = 0
        while done < units:
            while not left:
                at += 1
                left = int(amount[at])
            n = min(units - done, left)
            out.append(SourceShare(demand, holders[at], done, done + n))
            done, left = done + n, left - n
    return out
