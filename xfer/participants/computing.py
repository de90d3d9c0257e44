"""Computes exported tensors before a trainer rank is ready (merged adapters), together with other trainer ranks if needed.

Before ranks gather from each other they agree at the rendezvous on what they gather (xfer/agreement.py): either all of them
continue, or none does. A rank that stops after the agreement blocks the others inside a collective, so all this is a background
call with a deadline. What is computed and gathered, and why: trainers/computed.py.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch

from xfer.agreement import Agreement
from xfer.background import BackgroundCall
from xfer.coordinator.deadlines import SILENCE_S, STOP_GRACE_S
from xfer.errors import DeadlineExceeded, PlanMismatch, XferError
from xfer.plan.inventory import SCRATCH
from xfer.rendezvous.store import RendezvousStore

if TYPE_CHECKING:
    from xfer.participants.trainer import Computes, Source
    from xfer.rendezvous.client import RendezvousClient
    from xfer.trace.traced import Traced, TrainerLayout


def scratch_bytes(layout: TrainerLayout) -> int:
    """Bytes of a layout's computed tensors on this rank. They are allocated as long as the layout is used."""
    return sum(r.nbytes for r in layout.roots if r.name.startswith(SCRATCH))


def explain(layout: TrainerLayout, who: str) -> str:
    """One line for a person to read; empty if nothing is computed. `who`: label of this rank."""
    recipes = layout.traced.recipes
    if not recipes:
        return ""
    ops = sorted({op for r in recipes for op in r.ops})
    return (
        f"{who} computes {len(recipes)} parts of exported tensors before each refit, into "
        f"{scratch_bytes(layout):,} bytes of scratch: {', '.join(ops)}"
    )


def compute(
    source: Source,
    traced: Traced,
    party: RendezvousClient,
    attempt: int,
    until: float,
    over: Callable[[], bool],
    begun: Callable[[BackgroundCall[bool]], None],
) -> float:
    """Update the computed tensors, in scratch.

    Args:
        source: The trainer's adapter; a `Computes` if its layout has recipes or gathers.
        traced: That of the layout in use. Not the layout, which has this rank's storages: an error that a caller keeps has this frame.
        party: This rank's connection.
        attempt: Number of the refit attempt.
        until: A time.monotonic() value.
        over: Whether the attempt has ended.
        begun: Is given the background call before it starts: the call may outlast this function, also after an interrupt.

    Returns:
        Seconds.

    Raises:
        Over: The attempt has ended.
        Unfinished: The background call still runs at `until`.
        DeadlineExceeded, PlanMismatch: See `Meeting`.
    """
    if not traced.recipes and not traced.gathers:
        return 0.0
    began = time.perf_counter()

    def store(cancelled: Callable[[], bool] = lambda: False) -> RendezvousStore:
        left = max(1.0, until - time.monotonic())
        return RendezvousStore(party.questions, f"x{attempt}/", left, cancelled)

    def work() -> bool:
        try:
            cast("Computes", source).compute(Meeting(store, source.rank, until, over))
        except Over:
            return False
        if source.device.type == "cuda":  # only this stream: others may have the trainer's next step
            torch.cuda.current_stream(source.device).synchronize()
        return True

    failure = "what the export computes could not be brought up to date"
    call = BackgroundCall(work, source.device, party.label, failure, begun)
    # A rank that waits at the rendezvous gives up at `until` and then asks the coordinator which ranks are missing.
    if not call.wait(until + SILENCE_S, over, STOP_GRACE_S):
        raise Unfinished
    if not call.result:
        raise Over
    return time.perf_counter() - began


class Over(Exception):
    """The attempt has ended; its outcome says why."""


class Unfinished(Exception):
    """The computation still runs: it reads parameters and writes scratch."""


class Meeting:
    """Agreements of one attempt.

    The same ranks may agree more than once, since several process groups may have the same ranks (the tensor-parallel groups of
    experts and of the other layers). All ranks do so in the same order, so a number identifies each agreement.

    Args:
        store: Makes a store under a prefix of this attempt; its waits end when `cancelled` returns True.
        me: This rank.
        until: A time.monotonic() value.
        over: Whether the attempt has ended.
    """

    def __init__(self, store: Callable[..., RendezvousStore], me: int, until: float, over: Callable[[], bool]):
        self._store, self._waiting = store(), store(cancelled=over)
        self._me, self._until, self._over = me, until, over
        self._met: Counter[tuple[int, ...]] = Counter()

    def __call__(self, ranks: tuple[int, ...], digest: str) -> None:
        """Return on all `ranks` once all have called with this `digest`, or raise on all of them.

        Raises:
            DeadlineExceeded: Some ranks have not called; it names them.
            PlanMismatch: The digests differ.
            Over: The attempt has ended.
        """
        self._met[ranks] += 1
        at = hashlib.blake2b(repr((ranks, self._met[ranks])).encode(), digest_size=8).hexdigest()
        hashed = hashlib.blake2b(digest.encode(), digest_size=16).hexdigest()
        try:
            Agreement(self._store, at, self._me, ranks, "trainer {}".format, self._appears).meet(self._until, hashed)
        except DeadlineExceeded as e:
            # Another rank may have received the end of the attempt just before this one. This rank has it by now: the
            # coordinator sends the outcome to all ranks before it reads their answers.
            if self._over():
                raise Over from None
            raise DeadlineExceeded(
                "trainer ranks compute exported tensors together, and not all have come", e.violations
            ) from None
        except PlanMismatch as e:
            raise PlanMismatch(
                "trainer ranks would gather different tensors from each other; nothing was moved", e.violations
            ) from None

    def _appears(self, store: object, key: str, until: float, over: object) -> bool:
        try:
            self._waiting.wait([key], timedelta(seconds=max(0.0, until - time.monotonic())))
        except XferError:  # also once the attempt is over
            return False
        return True
