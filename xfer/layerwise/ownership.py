"""Who owns which parameter: a pure function of names, shapes and costs, the same on every rank.

`assign` gives each parameter of one data-parallel group to one rank of it; `cut` puts parameters into buckets. Neither
knows a tensor, a process group or a framework. What is gathered when, and how, is in gather.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from xfer.errors import LayoutError

NEWTON_SCHULZ_STEPS = 5

FLOPS_PER_BYTE = 200
"""What moving a byte of device memory costs beside a multiplication: about the ratio of the two rates of an H100 in bf16. Only
relative costs matter, and only where matrices and elementwise updates are weighed against each other."""


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter of a group. `cost`: of its update, in any unit that all items share. `nbytes`: as it lies on a rank."""

    name: str
    nbytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner of every parameter of one group of `size` ranks.

    owner: (name, rank within the group), sorted by name. cost, nbytes: what each rank owns, by rank.
    """

    size: int
    owner: tuple[tuple[str, int], ...]
    cost: tuple[float, ...]
    nbytes: tuple[int, ...]

    def of(self, rank: int) -> tuple[str, ...]:
        """Names that `rank` owns, sorted."""
        return tuple(name for name, r in self.owner if r == rank)

    def digest(self) -> bytes:
        """32 bytes; equal on two ranks if and only if every owner is."""
        text = "\n".join([str(self.size), *(f"{r} {name}" for name, r in self.owner)])
        return hashlib.sha256(text.encode()).digest()


def assign(items: Iterable[Item], size: int, *, memory_cap: int | None = None) -> Ownership:
    """Costliest first, each to the rank that has least so far: no rank has more than the mean and one item.

    Equal costs go by bytes, then by name, and equal ranks by owned bytes, then by number, so the order in which items
    come does not matter. A rank may own nothing.

    memory_cap: most bytes that one rank may own. LayoutError lists the parameters for which no rank has room, and names
    that come twice.
    """
    if size < 1:
        raise LayoutError(f"a group of {size} ranks cannot own parameters")
    rows = sorted(items, key=lambda i: (-i.cost, -i.nbytes, i.name))
    cost, nbytes, owner, wrong = [0.0] * size, [0] * size, {}, []
    for item in rows:
        if item.name in owner:
            wrong.append(f"{item.name}: named twice in one group; give every parameter its own name")
            continue
        room = [r for r in range(size) if memory_cap is None or nbytes[r] + item.nbytes <= memory_cap]
        if not room:
            least = min(nbytes)
            wrong.append(
                f"{item.name}: {item.nbytes} bytes, and every rank owns at least {least} of the {memory_cap} it may; "
                "raise memory_cap or use more ranks"
            )
            continue
        best = min(room, key=lambda r: (cost[r], nbytes[r], r))
        owner[item.name] = best
        cost[best] += item.cost
        nbytes[best] += item.nbytes
    if wrong:
        raise LayoutError("parameters cannot be given to owners", wrong)
    return Ownership(size, tuple(sorted(owner.items())), tuple(cost), tuple(nbytes))


def cut(sizes: Sequence[int], bucket_bytes: int) -> list[range]:
    """Consecutive parameters of these bytes as buckets: one is closed as soon as it has `bucket_bytes`."""
    if bucket_bytes < 1:
        raise LayoutError(f"bucket_bytes is {bucket_bytes}; a bucket has at least one byte")
    out, first, filled = [], 0, 0
    for i, n in enumerate(sizes):
        filled += n
        if filled >= bucket_bytes:
            out.append(range(first, i + 1))
            first, filled = i + 1, 0
    if first < len(sizes):
        out.append(range(first, len(sizes)))
    return out


# ---- costs


def elementwise_cost(shape: Sequence[int]) -> float:
    """Of an update like Adam's: it reads and writes some 16 bytes per element and hardly computes."""
    return 16.0 * FLOPS_PER_BYTE * prod(shape)


def newton_schulz_cost(shape: Sequence[int]) -> float:
    """Of Muon's update: floating-point operations of its Newton-Schulz steps, cubic in the short side, and the traffic of an
    elementwise update. Leading dims of more than two are a batch of matrices; fewer than two have no such steps."""
    if len(shape) < 2:
        return elementwise_cost(shape)
    *batch, a, b = shape
    short, long = min(a, b), max(a, b)
    step = 2.0 * (2.0 * short * short * long + short**3)  # X X^T and (…) X over the long side, the square between them
    return NEWTON_SCHULZ_STEPS * prod(batch) * step + elementwise_cost(shape)


def bytes_cost(nbytes: int) -> float:
    """For balancing memory and not time."""
    return float(nbytes)
