"""What a trainer's export computes instead of only moving (a merged LoRA): run again before each refit, into scratch.

The recipes were read from the framework's own export (xfer.trace), so they are its own operators on its own parameters,
in its order and dtypes; the planner then sees ordinary fragments, which happen to lie in scratch. Ranks that computed
something together (factors cut over tensor-parallel ranks) gather again what they gathered then, and nothing more: a
rank computes only the elements that it answers for (trace/owned.py). Plain torch; no framework is known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from xfer.errors import LayoutError, Unsupported
from xfer.plan.inventory import SCRATCH
from xfer.trace.boxes import boxes
from xfer.trace.expr import Gathered, evaluate, peers_needed
from xfer.trace.fragment import Root
from xfer.trace.traced import Recipe, Traced
from xfer.trace.view import Region, contiguous

ALIGN = 512
"""Each computed piece begins at a multiple of this many bytes, like torch's own allocations."""

Gather = Callable[[object, torch.Tensor], Sequence[torch.Tensor]]
"""(process group, what this rank gives: flat uint8) -> what each rank of the group gave, in its order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The gathers of one process group that a recipe of some rank may need the results of, each once, in order."""

    group: object
    gathers: tuple[Gathered, ...]
    needed: tuple[int, ...]  # by this rank, positions in `gathers`

    def digest(self) -> str:
        """Equal on all ranks of the group, or they must not gather: they would wait for each other, or mix tensors."""
        return hashlib.blake2b("\n\n".join(g.text() for g in self.gathers).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _RecipeStep:
    recipe: Recipe
    offset: int
    nbytes: int


class Computed:
    """`traced.recipes` of one rank, with the storage that their results go to.

    limit: most bytes of scratch, None for any number; Unsupported, with the bytes needed, beyond it. `nbytes` are held
    for good; while it runs, also `gathered_bytes` and what the operators of one recipe allocate (for a merge about
    three times the largest merged tensor). `fragments`: the results as part of canonical tensors, in `root`.
    """

    def __init__(self, traced: Traced, device: torch.device, limit: int | None = None):
        self.traced, self._device = traced, device
        specs = {s.name: s for s in traced.specs}
        self._steps: list[_RecipeStep] = []
        self.nbytes = 0
        name, fragments = SCRATCH + "computed", []
        for r in traced.recipes:
            item = getattr(torch, r.dtype).itemsize
            size = prod(r.shape) * item
            self._steps.append(_RecipeStep(r, self.nbytes, size))
            where = Region(r.offset // item, r.shape, tuple(s // item for s in r.strides))
            lies = contiguous(r.shape).scaled(item).shifted(self.nbytes)
            fragments += boxes(specs[r.target], where, lies, name, r.dtype)
            self.nbytes += -(-size // ALIGN) * ALIGN
        self.fragments = tuple(fragments)
        self.exchanges, self._key = _exchanges(traced)
        needed = [x.gathers[i] for x in self.exchanges for i in x.needed]
        self.gathered_bytes = sum(g.mine.view.size * g.mine.dtype.itemsize * g.size for g in needed)
        if limit is not None and self.nbytes + self.gathered_bytes > limit:
            raise Unsupported(
                f"{len(traced.recipes)} parts of exported tensors are computed, which takes "
                f"{self.nbytes + self.gathered_bytes} bytes of scratch on this rank; {limit} are allowed",
                ["allow more, or train merged weights instead of adapters"],
            )
        self.root = Root(name, self.nbytes)
        self.storage = torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def run(self, parameter: Callable[[str], torch.Tensor], gather: Gather) -> None:
        """Compute everything from the parameters' present values. `parameter`: source name -> live tensor.

        Collective over the groups of `exchanges`, in their order, whatever this rank needs itself: another may need
        what it has. LayoutError, on all ranks of a group, if one of them has to give what it does not have.
        """
        slots: dict[str, list[torch.Tensor]] = {}
        for x in self.exchanges:
            for i in self._wanted(x, gather):
                g = x.gathers[i]
                mine = evaluate(g.mine, parameter, self._device).contiguous().reshape(-1)
                slots[self._key[id(g)]] = [t.view(g.mine.dtype) for t in gather(x.group, mine.view(torch.uint8))]
        for step in self._steps:
            value = step.recipe.evaluate(parameter, lambda g: slots[self._key[id(g)]])
            to = self.storage[step.offset : step.offset + step.nbytes].view(value.dtype)
            to.view(value.shape).copy_(value)

    def _wanted(self, x: Exchange, gather: Gather) -> list[int]:
        """Which gathers some rank of the group needs; few ranks know that of each other."""
        mine = torch.zeros(2, len(x.gathers), dtype=torch.uint8)  # whether I need it; whether I cannot give it
        mine[0, list(x.needed)] = 1
        mine[1] = torch.tensor([any(peers_needed(g.mine)) for g in x.gathers])
        every = torch.stack([t.cpu() for t in gather(x.group, mine.reshape(-1).to(self._device))]).view(-1, *mine.shape)
        needed, lacking = every[:, 0].any(0), every[:, 1].any(0)
        bad = torch.nonzero(needed & lacking).flatten().tolist()
        if bad:
            raise LayoutError(
                "exported tensors are computed from what was gathered in two steps, which cannot be done again",
                [x.gathers[i].text().splitlines()[0][:200] for i in bad],
            )
        return torch.nonzero(needed).flatten().tolist()


def _exchanges(traced: Traced) -> tuple[tuple[Exchange, ...], dict[int, str]]:
    """The gathers by group, equal ones once (all experts of a layer share their adapter), and the key of each."""
    groups: dict[str, object] = {}
    first: dict[str, dict[str, Gathered]] = {}
    key: dict[int, str] = {}
    for g in traced.gathers:
        if g.size == 1:
            continue  # all of it was this rank's
        group = getattr(g.group, "group_name", "")
        text = key[id(g)] = f"{group}\n{g.text()}"
        groups.setdefault(group, g.group)
        first.setdefault(group, {}).setdefault(text, g)
    needed = {key[id(g)] for r in traced.recipes for g in r.peers}
    return tuple(
        Exchange(groups[name], tuple(by.values()), tuple(i for i, k in enumerate(by) if k in needed))
        for name, by in first.items()
    ), key
