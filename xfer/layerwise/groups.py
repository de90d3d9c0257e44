"""Groups of parameters as a user gives them to a layer-wise optimizer, and the parameters that a rank owns. See optimizer.py for the
step.
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

    Attributes:
        params: The parameters.
        optimizer: A torch optimizer class, or a function that makes an optimizer from a list of one parameter group and `options`.
            If it has an attribute `targets`, that is first called with (fp32 master, parameter) for each parameter with a master.
            If it has an attribute `refuses`, that is called with a list of (name, parameter), on every rank and before anything
            else, and returns one line for each parameter that it cannot update. Only owners make the optimizer, which is too late
            for such an error.
        options: Keyword arguments of `optimizer`.
        cost: Cost of an update, by which owners are balanced: "newton_schulz" for Muon, "elementwise" for Adam and similar ones,
            "bytes" to balance memory (then in all groups), or a function of a parameter's shape.
    """

    params: Iterable[torch.nn.Parameter]
    optimizer: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost | Callable[[Sequence[int]], float] = "elementwise"


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """A parameter that this rank steps. `target`: the tensor that the inner optimizer updates, the parameter itself or its fp32 master.
    `group`: index of its ParamGroup."""

    name: str
    param: torch.nn.Parameter
    target: torch.nn.Parameter
    group: int


def named(modules: Sequence[torch.nn.Module]) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of each parameter once, under its first name: dotted, without wrappers' "module.", and prefixed with the
    number of the module if there are several."""
    seen: set[int] = set()
    for i, module in enumerate(modules):
        for name, p in module.named_parameters():
            if id(p) not in seen:
                seen.add(id(p))
                yield (bare(name) if len(modules) == 1 else f"{i}:{bare(name)}"), p


@dataclass(frozen=True, slots=True)
class Trains:
    """The trained parameters, by id.

    params: name -> parameter. grouped: parameters of each group of the inner optimizers. stepped: the groups of the inner optimizers.
    seen: the groups that users see.
    """

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
        """Raises a LayoutError that lists all differences between the parameters that were given to owners and those of now."""
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
                "param_groups: groups were added or replaced, which has no effect; change values in the groups that were there"
            )
        raise LayoutError(
            "the trained parameters have changed since owners were chosen",
            [f"{line}; close() this optimizer and build a new one, on all ranks" for line in sorted(bad)],
            where=who,
        )
