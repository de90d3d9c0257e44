"""Blocks of FP8 matrices of which several trainers have parts: all of them quantize by the largest value of the whole block.

    trainer        measures its parts                                  -> Measured
    coordinator    all trainers have measured, or have no such block   -> Reply to each, with the largest values

A trainer without a part of such a block sends nothing, and without such blocks there are no messages. Trainers need not know which
trainers have the rest of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from xfer.coordinator import messages as m
from xfer.errors import ProtocolError

if TYPE_CHECKING:
    from xfer.coordinator.refit import Refit
    from xfer.coordinator.state import Client

_BITS = np.dtype("<u4")


class SharedBlocks:
    """The measured blocks of the trainers in one refit, and the trainers that wait for the largest values.

    Attributes:
        used: Whether some trainer has measured. If exports have changed, all trainers have to measure again by a new catalog.
    """

    def __init__(self, refit: Refit):
        self._refit = refit
        self._waiting: dict[Client, m.Measured] = {}
        self.used = False

    @property
    def waiting(self) -> set[int]:
        """The trainers that have measured and wait for others."""
        return {c.hello.index for c in self._waiting}

    def measured(self, client: Client, msg: m.Measured) -> None:
        """Note that a trainer has measured.

        Raises:
            ProtocolError: The message does not have one value for each block, or names a block that the catalog does not have.
        """
        co = self._refit.coordinator
        if msg.generation == co.generation and co.catalog is not None:
            blocks, count = np.frombuffer(msg.blocks, _BITS), co.catalog.blocks[1]
            if len(msg.blocks) != len(msg.largest) or int(blocks.max(initial=0)) >= count:
                raise ProtocolError(f"{client.label} measured other blocks than the {count} of the catalog")
        self._waiting[client], self.used = msg, True
        if msg.generation != co.generation:
            self._answer([client])  # a newer catalog is on its way to it, by which it measures again
        self.agree()

    def agree(self) -> None:
        """Answer the trainers that wait, if nobody else has a part to measure. Called whenever that may have changed."""
        co, refit = self._refit.coordinator, self._refit
        if not self._waiting or len(self._waiting) + len(refit.drained) < co.options.trainers:
            return
        # A trainer that is ready has read this catalog, or is about to measure by it.
        here = self.waiting
        if len(here | (refit.drained.keys() & co.trainer_inventories.keys())) == co.options.trainers:
            self._answer([*self._waiting])
        elif len(here | refit.drained.keys()) == co.options.trainers and co.respecified:
            self.measure_again()  # by the catalog that follows, once trainers whose exports changed are ready, too

    def measure_again(self) -> None:
        """Answer each trainer that waits by its own values alone: it is about to measure by another catalog."""
        for client in [*self._waiting]:
            self._answer([client])

    def _answer(self, clients: list[Client]) -> None:
        """Answer these, by what they have measured together."""
        told = [self._waiting.pop(c) for c in clients]
        for client, x, most in zip(clients, told, largest(told)):
            client.send(m.Reply(x.call, most))


def largest(told: Sequence[m.Measured]) -> list[bytes]:
    """Return for each of these the largest values, over all of them, of its blocks."""
    blocks = [np.frombuffer(x.blocks, _BITS) for x in told]
    most = np.zeros(1 + max((int(b.max(initial=0)) for b in blocks), default=0), _BITS)
    for at, x in zip(blocks, told):
        most[at] = np.maximum(most[at], np.frombuffer(x.largest, _BITS))  # of floats >= 0; NaN has the largest bits
    return [most[at].tobytes() for at in blocks]
