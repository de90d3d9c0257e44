"""Does training reach the engines? A refit that sends none of what trains commits, and changes nothing.

- `refuse_untrained`: no tensor that requires grad is sent at all. That is an error as soon as all ranks have told what they export.
- `Silence`, and `Unsent` (participants/unsent.py): some of them are sent, but what is sent has the same bytes as in the refit before, while
  tensors that are
  not sent have changed. After two such refits in a row there is one warning.

What trains is what the adapter gives with `requires_grad` set. What is not sent is what `drop=` names, since engines never take that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from xfer.coordinator import messages as m
from xfer.errors import CoverageError
from xfer.plan.options import matches

logger = logging.getLogger("xfer")
NAMED = 3
"""Tensors that an error or a warning names."""
TWICE = 2
ADVICE = (
    "merge adapters and give the merged weights under the checkpoint's names, or do not name in drop= what trains; if only frozen "
    "weights are to be sent, give the adapter no tensor that requires grad"
)


def refuse_untrained(trained: Iterable[str], drop: Sequence[str]) -> None:
    """CoverageError when there are tensors that require grad, on any trainer, and `drop` names all of them."""
    names = sorted(trained)
    if names and all(matches(n, tuple(drop)) for n in names):
        raise CoverageError(
            "refits would send nothing that trains",
            [
                f"{len(names)} tensors require grad, such as {', '.join(names[:NAMED])}: drop= names all of them; {ADVICE}"
            ],
        )


class Silence:
    """The coordinator's half: how many refits in a row have sent nothing new."""

    def __init__(self) -> None:
        self._times = 0

    def take(self, ready: Iterable[m.Ready]) -> None:
        """What all trainers said on entry of one refit. Warns once."""
        ready = list(ready)
        names = sorted({n for r in ready for n in r.unsent})
        if any(r.sends for r in ready):
            self._times = min(0, self._times)
        elif names and self._times >= 0:
            self._times += 1
        if self._times == TWICE:
            self._times = -1  # said for good
            logger.warning(
                "xfer: two refits in a row sent the weights that the engines already have, although training goes on: tensors that "
                "require grad have changed and are not sent, such as %s (drop=); %s",
                ", ".join(names[:NAMED]),
                ADVICE,
            )
