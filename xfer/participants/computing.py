"""What a trainer computes before it is ready (merged adapters), together with other trainer ranks where it must.

Ranks that are about to gather from each other agree first (xfer/agreement.py), at the rendezvous and on what they will gather:
either all of them go on, or none does. A rank that stops after they met blocks the others inside a collective, so all this is a
background call with a deadline. What is computed and gathered, and why: trainers/computed.py.
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
    from xfer.trace.traced import TrainerLayout


def scratch_bytes(layout: TrainerLayout) -> int:
    """What the results of a trainer's recipes take on this rank, for as long as the layout lasts."""
    return sum(r.nbytes for r in layout.roots if r.name.startswith(SCRATCH))


def explain(layout: TrainerLayout, who: str) -> str:
    """One line for people, "" where nothing is computed."""
    recipes = layout.traced.recipes
    ops = sorted({op for r in recipes for op in r.ops})
    return recipes and (
        f"{who} computes {len(recipes)} parts of exported tensors before each refit, into "
        f"{scratch_bytes(layout):,} bytes of scratch: {', '.join(ops)}"
    )


def compute(
    source: Source,
    layout: TrainerLayout,
    party: RendezvousClient,
    attempt: int,
    until: float,
    over: Callable[[], bool],
    begun: Callable[[BackgroundCall[bool]], None],
) -> float:
    """Bring what the export computes up to date, in scratch. Returns seconds. Raises as `Meeting`; Unfinished at `until`.

    begun: is given what runs before it does: whatever ends the wait for it, an interruption too, it may go on.
    """
    if not layout.traced.recipes and not layout.traced.gathers:
        return 0.0
    began = time.perf_counter()

    def store(cancelled: Callable[[], bool] = lambda: False) -> RendezvousStore:
        left = max(1.0, until - time.monotonic())
        return RendezvousStore(party.channel, party.replies, f"x{attempt}/", left, cancelled)

    def work() -> bool:
        try:
            cast("Computes", source).compute(Meeting(store, source.rank, until, over))
        except Over:
            return False
        if source.device.type == "cuda":
            torch.cuda.synchronize(source.device)
        return True

    failure = "what the export computes could not be brought up to date"
    call = BackgroundCall(work, source.device, party.label, failure, begun)
    # A rank that waits at the rendezvous gives up at `until` and then asks the coordinator who has not come: that takes a little longer.
    if not call.wait(until + SILENCE_S, over, STOP_GRACE_S):
        raise Unfinished
    if not call.result:
        raise Over
    return time.perf_counter() - began


class Over(Exception):
    """The attempt has ended meanwhile; its outcome tells why."""


class Unfinished(Exception):
    """What was begun goes on: it reads parameters and writes scratch."""


class Meeting:
    """Meetings of one attempt.

    Ranks may meet more than once, since several process groups may have the same ranks (tensor-parallel ones of experts and of
    all else). They do so in one order, so a number tells the meetings apart.

    Args:
        store: Makes a store under a prefix of this attempt; `cancelled` is asked while it waits.
        me: This rank.
        until: A time.monotonic() value.
        over: Whether the attempt has ended.
    """

    def __init__(self, store: Callable[..., RendezvousStore], me: int, until: float, over: Callable[[], bool]):
        self._store, self._waiting = store(), store(cancelled=over)
        self._me, self._until, self._over = me, until, over
        self._met: Counter[tuple[int, ...]] = Counter()

    def __call__(self, ranks: tuple[int, ...], digest: str) -> None:
        """Returns on all `ranks` once all have called with this `digest`, or raises on all of them.

        Raises:
            DeadlineExceeded: Names the ranks that have not come. PlanMismatch: Digests differ. Over: The attempt has ended.
        """
        self._met[ranks] += 1
        at = hashlib.blake2b(repr((ranks, self._met[ranks])).encode(), digest_size=8).hexdigest()
        hashed = hashlib.blake2b(digest.encode(), digest_size=16).hexdigest()
        try:
            Agreement(self._store, at, self._me, ranks, "trainer {}".format, self._appears).meet(self._until, hashed)
        except DeadlineExceeded as e:
            # Another rank may have heard of the end of the attempt a moment before this one looks. This one has heard of it by now: the
            # coordinator tells all ranks the outcome before it reads their answers.
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
