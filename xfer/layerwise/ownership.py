"""Gives each parameter an owner, by a pure function of names, shapes and costs that has the same result on every rank.

`assign` gives each parameter of a data-parallel group to one rank of the group; `cut` puts parameters into buckets. Neither uses
tensors, process groups or a framework. See gather.py for the gathers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from xfer.errors import LayoutError

NEWTON_SCHULZ_STEPS = 5

FLOPS_PER_BYTE = 200
"""Cost of moving a byte of device memory, in floating-point operations: about the ratio of the two rates of an H100 in bf16. It only
matters where matrices and elementwise updates are balanced against each other."""


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter of a group. `cost`: cost of its update, in a unit that all items share. `nbytes`: its size on a rank."""

    name: str
    nbytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner of every parameter of one group of `size` ranks.

    owner: (name, rank within the group), sorted by name. cost, nbytes: sums over the parameters of each rank.
    """

    size: int
    owner: tuple[tuple[str, int], ...]
    cost: tuple[float, ...]
    nbytes: tuple[int, ...]

    def of(self, rank: int) -> tuple[str, ...]:
        """Names that `rank` owns, sorted."""
        return tuple(name for name, r in self.owner if r == rank)

    def digest(self) -> bytes:
        """32 bytes; equal on two ranks if and only if all owners are equal."""
        text = "\n".join([str(self.size), *(f"{r} {name}" for name, r in self.owner)])
        return hashlib.sha256(text.encode()).digest()


def assign(items: Iterable[Item], size: int, *, memory_cap: int | None = None) -> Ownership:
    """Gives items to ranks, the costliest first, each to the rank with the least cost so far.

    Items of equal cost are ordered by bytes, then by name, and ranks of equal cost by owned bytes, then by number. So the order of
    `items` does not matter. A rank may own nothing. Without `memory_cap`, no rank's cost exceeds the mean by more than one item.

    Args:
        items: The parameters of one group.
        size: Number of ranks of the group.
        memory_cap: Most bytes that one rank may own.

    Raises:
        LayoutError: Lists the parameters for which no rank has room, and names that occur twice.
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
                f"{item.name}: {item.nbytes} bytes, and every rank owns at least {least} of {memory_cap} allowed ones; "
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
    """Cuts consecutive parameters of these sizes in bytes into buckets. A bucket ends as soon as it has `bucket_bytes`."""
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
    """Cost of an update like Adam's, which reads and writes some 16 bytes per element and computes little."""
    return 16.0 * FLOPS_PER_BYTE * prod(shape)


def newton_schulz_cost(shape: Sequence[int]) -> float:
    """Cost of Muon's update: the floating-point operations of its Newton-Schulz steps, cubic in the short side, and the traffic of an
    elementwise update. Dims before the last two are a batch of matrices; a tensor of fewer than two dims has no such steps."""
    if len(shape) < 2:
        return elementwise_cost(shape)
    *batch, a, b = shape
    short, long = min(a, b), max(a, b)
    step = 2.0 * (2.0 * short * short * long + short**3)  # X X^T and (…) X over the long side, the square between them
    return NEWTON_SCHULZ_STEPS * prod(batch) * step + elementwise_cost(shape)


def bytes_cost(nbytes: int) -> float:
    """Cost that balances memory instead of time."""
    return float(nbytes)
