"""What a layer-wise optimizer is told of parameters, and what it says of those that a rank owns. No step and no gather: see
optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from xfer.errors import LayoutError
from xfer.trace.slots import bare

Cost = Literal["newton_schulz", "elementwise", "bytes"]


@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """Parameters that one kind of optimizer updates.

    optimizer: a torch optimizer class, or anything that makes one of a list of one parameter group and `options`; its
    attribute `targets`, if it has one, is first called with (fp32 master, parameter) for each that has a master. `refuses`, if it
    has that one, is called with (name, parameter) of all, on every rank and before anything else, and says what it cannot update, a
    line each: making the optimizer is the owners' alone, and too late to refuse. cost: of
    an update, by which owners are balanced: "newton_schulz" for Muon, "elementwise" for Adam and the like, "bytes" to
    balance memory (then give it to all groups), or a function of a parameter's shape.
    """

    params: Iterable[torch.nn.Parameter]
    optimizer: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost | Callable[[Sequence[int]], float] = "elementwise"


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """A parameter that this rank steps. `target`: what the inner optimizer sees, the parameter itself or its fp32 master.
    `group`: index of its ParamGroup."""

    name: str
    param: torch.nn.Parameter
    target: torch.nn.Parameter
    group: int


def named(modules: Sequence[torch.nn.Module]) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """(canonical name, parameter), each parameter once, under its first name: dotted, without wrappers' "module.", and with
    the number of the module before it if there are several."""
    seen: set[int] = set()
    for i, module in enumerate(modules):
        for name, p in module.named_parameters():
            if id(p) not in seen:
                seen.add(id(p))
                yield (bare(name) if len(modules) == 1 else f"{i}:{bare(name)}"), p


@dataclass(frozen=True, slots=True)
class Trains:
    """What is trained, by ids: parameters by name, parameters by group of every inner optimizer, and the groups themselves as inner
    optimizers have them and as users see them."""

    params: dict[str, int]
    grouped: list[list[int]]
    stepped: list[int]
    seen: list[int]

    @classmethod
    def now(
        cls, modules: Sequence[torch.nn.Module], inner: Sequence[torch.optim.Optimizer], seen: Sequence[dict]
    ) -> Trains:
        groups = [g for o in inner for g in o.param_groups]
        return cls(
            {name: id(p) for name, p in named(modules) if p.requires_grad},
            [[id(p) for p in g["params"]] for g in groups],
            [id(g) for g in groups],
            [id(g) for g in seen],
        )

    def refuse_other(self, now: Trains, who: str) -> None:
        """Is everything still as it was given to owners? LayoutError with all that is not."""
        if now == self:
            return
        was, is_ = self.params, now.params
        bad = [f"{n}: was trained and is now frozen or gone" for n in was.keys() - is_.keys()]
        bad += [f"{n}: is trained now and has no owner" for n in is_.keys() - was.keys()]
        bad += [f"{n}: is another Parameter object now" for n in was.keys() & is_.keys() if was[n] != is_[n]]
        if now.grouped != self.grouped:
            bad.append("param_groups: parameters were added, removed or moved between groups")
        elif now.stepped != self.stepped or now.seen != self.seen:
            bad.append(
                "param_groups: groups were added or replaced, and nothing would read them; change what is in those there are"
            )
        raise LayoutError(
            "what is trained has changed since owners were chosen",
            [f"{line}; close() this optimizer and build a new one, on all ranks" for line in sorted(bad)],
            where=who,
        )
