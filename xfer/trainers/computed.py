"""Tensors that a trainer's export computes (a merged LoRA). They are computed again in scratch before each refit.

The recipes come from a trace of the framework's own export (xfer.trace): its own operators on its own parameters, in its
order and dtypes. For the planner they are ordinary fragments in scratch. If the export gathered something (factors cut
over tensor-parallel ranks), the ranks gather the same again and nothing more; a rank computes only the elements that it
owns (trace/owned.py). This module uses plain torch and knows no framework.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from xfer.errors import LayoutError, Unsupported
from xfer.plan.inventory import SCRATCH
from xfer.trace.boxes import boxes
from xfer.trace.expr import Gathered, evaluate, peers_needed
from xfer.trace.fragment import Root
from xfer.trace.traced import Recipe, Traced
from xfer.trace.view import Region, contiguous

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALIGN = 512
"""Each computed piece begins at a multiple of this many bytes, like torch's own allocations."""

Gather = Callable[["ProcessGroup", torch.Tensor], Sequence[torch.Tensor]]
"""(process group, bytes of this rank: flat uint8) -> bytes of each rank of the group, in its order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The gathers of one process group that recipes may need, each once, in order."""

    group: ProcessGroup
    gathers: tuple[Gathered, ...]
    needed: tuple[int, ...]  # by this rank, positions in `gathers`

    def digest(self) -> str:
        """Return a digest of the gathers. If it differs between ranks, they must not gather: they would block or mix tensors."""
        return hashlib.blake2b("\n\n".join(g.text() for g in self.gathers).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _RecipeStep:
    recipe: Recipe
    offset: int
    nbytes: int


class Computed:
    """The recipes of one rank and the storage of their results.

    Args:
        traced: The trace with the recipes.
        device: Where to allocate the storage.
        limit: Most bytes of scratch; None: no limit.

    Attributes:
        nbytes: Bytes of the storage, held for good. While it runs, it also needs `gathered_bytes` and the memory that the
            operators of one recipe allocate (for a merge about three times the largest merged tensor).
        fragments: The results as parts of checkpoint tensors, in `root`.

    Raises:
        Unsupported: More scratch than `limit` is needed. It tells how much.
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
                ["allow more (MegatronTrainer(scratch_bytes=...)), or train merged weights instead of adapters"],
            )
        self.root = Root(name, self.nbytes)
        self.storage = torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def run(self, parameter: Callable[[str], torch.Tensor], gather: Gather) -> None:
        """Compute everything from the parameters' present values.

        Collective over the groups of `exchanges`, in their order, even if this rank needs nothing, since another rank may need
        its bytes.

        Args:
            parameter: Source name -> live tensor.
            gather: See Gather.

        Raises:
            LayoutError: A rank needs bytes that another rank cannot compute alone. All ranks of the group raise it.
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
        """The gathers that some rank of the group needs. Ranks have to exchange this."""
        # Row 0: this rank needs it. Row 1: this rank cannot compute its part.
        mine = torch.zeros(2, len(x.gathers), dtype=torch.uint8)
        mine[0, list(x.needed)] = 1
        mine[1] = torch.tensor([any(peers_needed(g.mine)) for g in x.gathers])
        every = torch.stack([t.cpu() for t in gather(x.group, mine.reshape(-1).to(self._device))]).view(-1, *mine.shape)
        needed, lacking = every[:, 0].any(0), every[:, 1].any(0)
        bad = torch.nonzero(needed & lacking).flatten().tolist()
        if bad:
            raise LayoutError(
                "exported tensors are computed from a gather of gathered tensors, which xfer cannot compute again",
                [x.gathers[i].text().splitlines()[0][:200] for i in bad],
            )
        return torch.nonzero(needed).flatten().tolist()


def _exchanges(traced: Traced) -> tuple[tuple[Exchange, ...], dict[int, str]]:
    """Return the gathers by group, without duplicates (all experts of a layer share their adapter), and the key of each."""
    groups: dict[str, ProcessGroup] = {}
    first: dict[str, dict[str, Gathered]] = {}
    key: dict[int, str] = {}
    for g in traced.gathers:
        if g.size == 1:
            continue  # a group of one rank has nothing to gather
        group = getattr(g.group, "group_name", "")
        text = key[id(g)] = f"{group}\n{g.text()}"
        groups.setdefault(group, g.group)
        first.setdefault(group, {}).setdefault(text, g)
    needed = {key[id(g)] for r in traced.recipes for g in r.peers}
    return tuple(
        Exchange(groups[name], tuple(by.values()), tuple(i for i, k in enumerate(by) if k in needed))
        for name, by in first.items()
    ), key
