"""What a layer-wise optimizer is told of parameters, and what it says of those that a rank owns. No step and no gather: see
optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

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
