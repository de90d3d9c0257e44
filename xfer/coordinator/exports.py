"""Checks that training reaches the engines. `refuse_untrained` and `Silence` find a refit that commits but changes nothing in them:

- No tensor that requires grad is sent at all. That is an error as soon as all ranks have told what they export.
- Some are sent, but with the same bytes as in the refit before, while tensors that are not sent have changed
  (direct/unsent.py finds out). After two such refits in a row there is one warning.

A tensor trains if the adapter gives it with `requires_grad` set. It is not sent if `drop=` names it, since engines never
take such tensors.
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
"""Refits in a row that send nothing new before there is a warning."""
UNSENT_ADVICE = (
    "merge adapters and give the merged weights under the checkpoint's names, or do not name in drop= what trains; if only frozen "
    "weights are to be sent, give the adapter no tensor that requires grad"
)


def refuse_untrained(trained: Iterable[str], drop: Sequence[str]) -> None:
    """Check that some tensor that trains is sent.

    Args:
        trained: names of the tensors that require grad, of all trainers.

    Raises:
        CoverageError: there are such tensors, and `drop` names all of them.
    """
    names = sorted(trained)
    if names and all(matches(n, tuple(drop)) for n in names):
        some = f"{len(names)} tensors require grad, such as {', '.join(names[:NAMED])}"
        raise CoverageError(
            "refits would send nothing that trains", [f"{some}: drop= names all of them; {UNSENT_ADVICE}"]
        )


class Silence:
    """Counts the refits in a row that sent nothing new, and warns once."""

    def __init__(self) -> None:
        self._times = 0

    def take(self, ready: Iterable[m.Ready]) -> None:
        """Take what all trainers said on entry of one refit."""
        ready = list(ready)
        names = sorted({n for r in ready for n in r.unsent})
        if any(r.sends for r in ready):
            self._times = min(0, self._times)
        elif names and self._times >= 0:
            self._times += 1
        if self._times == TWICE:
            self._times = -1  # never warn again
            logger.warning(
                "xfer: two refits in a row sent the weights that the engines already have, although training goes on: tensors that "
                "require grad have changed and are not sent, such as %s (drop=); %s",
                ", ".join(names[:NAMED]),
                UNSENT_ADVICE,
            )
