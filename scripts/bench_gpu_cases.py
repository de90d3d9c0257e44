"""Not a command. Which models, layouts and GPUs scripts/bench_gpu.py knows. What is measured of each is there."""

from __future__ import annotations

from dataclasses import dataclass

from bench_shapes import Parallel


@dataclass(frozen=True)
class Case:
    """Trainers first, then takers: `takers / tp` replicas. `gpus`: of each rank; None: that rank takes no part.

    relay: every taker is a replica, and they hand what one trainer gives from one to the next.
    """

    model: str
    trainers: Parallel
    tp: int
    takers: int
    gpus: tuple[int | None, ...]
    relay: bool = False

    def __str__(self) -> str:
        replicas = self.takers // self.tp
        return f"{self.trainers} on {self.trainers.ranks} -> TP{self.tp}" + (f" x {replicas}" if replicas > 1 else "")


def _apart(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


CASES = {
    "4b": Case("4b", Parallel.all_ways(2), 2, 2, _apart(4)),
    "30b": Case("30b", Parallel.all_ways(2), 2, 2, _apart(4)),
    "replicas": Case("30b", Parallel.all_ways(2), 1, 2, _apart(4)),
    "colocated": Case("30b", Parallel.all_ways(4), 4, 4, (*_apart(4), *_apart(4))),
    "relay": Case("30b", Parallel(1), 1, 3, _apart(4), relay=True),
    # For two GPUs: one trainer and the first of two takers; or both trainers on one GPU and both takers on the other.
    "4b-pair": Case("4b", Parallel(1), 2, 2, (0, 1, None)),
    "30b-pair": Case("30b", Parallel(1), 2, 2, (0, 1, None)),
    "30b-stacked": Case("30b", Parallel.all_ways(2), 2, 2, (0, 0, 1, 1)),
    "30b-colocated2": Case("30b", Parallel.all_ways(2), 2, 2, (0, 1, 0, 1)),
    # For eight.
    "30b-4+4": Case("30b", Parallel.all_ways(4), 4, 4, _apart(8)),
    "30b-ep2tp2": Case("30b", Parallel(4, tp=2, ep=2, etp=2), 2, 4, _apart(8)),
    "30b-ep4": Case("30b", Parallel(4, ep=4), 2, 4, _apart(8)),
    "30b-pp2ep2": Case("30b", Parallel(4, ep=2, pp=2), 4, 4, _apart(8)),
    "235b": Case("235b", Parallel.all_ways(4), 4, 4, _apart(8)),
    "relay7": Case("30b", Parallel(1), 1, 7, _apart(8), relay=True),
    "colocated8": Case("30b", Parallel(8, tp=4, ep=8), 8, 8, (*_apart(8), *_apart(8))),
}
DEFAULT = {
    8: ("30b-4+4", "30b-ep2tp2", "30b-ep4", "30b-pp2ep2", "235b", "relay7", "colocated8"),
    4: ("4b", "30b", "replicas", "colocated", "relay"),
    1: ("4b-pair", "30b-pair", "30b-stacked", "30b-colocated2"),
}
"""Cases by the least number of GPUs that they are for."""


def usable(names: list[str] | None, gpus: int) -> list[str]:
    """Of the names, or the default for so many GPUs, what can be run on them."""
    names = names or DEFAULT[max((n for n in DEFAULT if n <= gpus), default=1)]
    return [n for n in names if max(g for g in CASES[n].gpus if g is not None) < gpus]
