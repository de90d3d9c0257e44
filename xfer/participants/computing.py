"""What a trainer computes before it is ready (merged adapters), together with other trainer ranks where it must.

A collective that one rank does not join holds the others for ever, and one that is left alone pairs with the next, of
other data. So ranks that are about to gather from each other meet first, at the rendezvous: each says that it is there
and what it will gather, and none begins before all have. A rank that gives up says so in one step with looking whether
all are there: either all go on, or none does. One that stops after they met holds the others inside a collective; so all
this runs aside, and the caller waits by his deadline. Not here: what is computed and gathered, and why (trainers/computed.py).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch

from xfer.coordinator.deadlines import SILENCE_S, STOP_GRACE_S
from xfer.errors import DeadlineExceeded, PlanMismatch, XferError
from xfer.participants.drain import Aside
from xfer.plan.inventory import SCRATCH
from xfer.rendezvous.store import RendezvousStore

if TYPE_CHECKING:
    from xfer.participants.trainer import Computes, Source
    from xfer.rendezvous.client import RendezvousClient
    from xfer.trace.traced import TrainerLayout

_GONE = 1 << 20
"""More than any group has ranks: a count from which this was taken, however often, is never full again, and still tells
by its remainder how many have come."""
_LEFT = "left: "
"""Begins what a rank that gave up says to the others of its meeting; what differs begins otherwise."""


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
    begun: Callable[[Aside[bool]], None],
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

    aside = Aside(work, source.device, party.label, "what the export computes could not be brought up to date", begun)
    # Who waits at the rendezvous gives up at `until`, asks the coordinator who has not come, and says so: it is not what goes on.
    if not aside.wait(until + SILENCE_S, over, STOP_GRACE_S):
        raise Unfinished
    if not aside.result:
        raise Over
    return time.perf_counter() - began


class Over(Exception):
    """The attempt has ended meanwhile; its outcome tells why."""


class Unfinished(Exception):
    """What was begun goes on: it reads parameters and writes scratch."""


class Meeting:
    """One attempt's. `store`: under a prefix of this attempt; `over`: whether the attempt has ended.

    Ranks may meet more than once, since several process groups may have the same ones (tensor-parallel ones of experts and of
    all else); they do so in one order, so a number tells the meetings apart.
    """

    def __init__(self, store: Callable[..., RendezvousStore], me: int, until: float, over: Callable[[], bool]):
        self._plain, self._waiting = store(), store(cancelled=over)
        self._me, self._until, self._over = me, until, over
        self._met: Counter[tuple[int, ...]] = Counter()

    def __call__(self, ranks: tuple[int, ...], digest: str) -> None:
        """Returns when all `ranks` have called with this `digest`. DeadlineExceeded names who has not; PlanMismatch,
        on all of them, when digests differ; Over."""
        self._met[ranks] += 1
        at = hashlib.blake2b(repr((ranks, self._met[ranks])).encode(), digest_size=8).hexdigest()
        count, go, said = f"{at}/n", f"{at}/go", [f"{at}/d{r}" for r in ranks]
        self._plain.set(f"{at}/d{self._me}", digest)
        if self._plain.add(count, 1) == len(ranks):
            theirs = {r: self._plain.get(k).decode() for r, k in zip(ranks, said, strict=True)}
            self._plain.set(go, "" if len(set(theirs.values())) == 1 else repr(theirs))
        else:
            self._wait(count, go, ranks, said)
        why = self._plain.get(go).decode()
        if why.startswith(_LEFT):
            # It may have heard of the attempt's end a moment before this rank looks, which has heard of that by now: the
            # coordinator tells all of an outcome before it takes in what any of them makes of it.
            raise self._given_up([why.removeprefix(_LEFT)])
        if why:
            raise PlanMismatch("trainer ranks would gather different tensors from each other; nothing was moved", [why])

    def _wait(self, count: str, go: str, ranks: tuple[int, ...], said: list[str]) -> None:
        try:
            self._waiting.wait([go], timedelta(seconds=max(0.0, self._until - time.monotonic())))
        except XferError:
            if self._plain.add(count, -_GONE) % _GONE >= len(ranks):
                return  # all have come, and the last one says so; or the first to leave does, if that was before
            missing = [f"trainer {r}" for r, k in zip(ranks, said, strict=True) if not self._plain.check([k])]
            self._plain.set(go, f"{_LEFT}trainer {self._me} has given up waiting for {', '.join(missing)}")
            raise self._given_up([f"waiting for {who}" for who in missing]) from None

    def _given_up(self, why: list[str]) -> Exception:
        if self._over():
            return Over()
        return DeadlineExceeded("trainer ranks compute exported tensors together, and not all have come", why)
