"""Rolling refits: which replicas of one refit are out of service at the same time, with `refit(at_once=k)`.

A replica has its turn from `Arm`, which pauses its engine, until its controller says what the engine serves. No more than k have
theirs at the same time; the next one by number begins when one of them ends. A replica that is joining, or is still coming back
from an earlier refit, takes no turn yet, and others go first.

A turn has a deadline of its own: the time left is shared equally among the turns left. A replica that is late, because its engine
hangs, leaves the refit then, as it would at the refit's deadline, and the next one begins. No engine is paused before all trainers
are ready, so a turn is a transfer and the engine's own calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from xfer.coordinator.commit import Phase

if TYPE_CHECKING:
    from xfer.coordinator.commit import ReplicaRefit
    from xfer.coordinator.refit import Transfer


class Rolling:
    """The turns of one refit.

    Args:
        at_once: Most replicas that have their turn at the same time; 0: all, without deadlines of their own.
    """

    def __init__(self, refit: Transfer, at_once: int):
        self.at_once, self._refit = at_once, refit
        self._late: set[ReplicaRefit] = set()  # their turns have ended, although they may still be out of service

    def waits(self, part: ReplicaRefit) -> bool:
        """Whether this replica waits until another one's turn ends."""
        taken = [p for p in self._refit.parts.values() if p.told and not p.over and p not in self._late]
        return bool(self.at_once) and part.phase is Phase.ARMING and not part.told and len(taken) >= self.at_once

    def may_begin(self, part: ReplicaRefit) -> bool:
        """Whether the replica may be told to pause its engine."""
        return not self.at_once or self._refit.all_ready and not self.waits(part)

    def now(self, waiting: Iterable[ReplicaRefit]) -> list[ReplicaRefit]:
        """Return those of these replicas that do not wait for their turn."""
        return [p for p in waiting if not self.waits(p)]

    def began(self, part: ReplicaRefit) -> None:
        """A replica was told to pause its engine: its turn begins."""
        if not self.at_once:
            return
        refit, co = self._refit, self._refit.coordinator
        left = 1 + sum(p.phase in (Phase.STAGING, Phase.ARMING) and not p.told for p in refit.parts.values())
        seconds = max(0.0, refit.until - co.now) / math.ceil(left / self.at_once)
        co.at(co.now + seconds, lambda: self._end(part, seconds), of=refit)

    def _end(self, part: ReplicaRefit, seconds: float) -> None:
        refit = self._refit
        if part.over or refit.coordinator.now >= refit.until:
            return  # the refit's own deadline says what it waited for
        self._late.add(part)
        if part.phase in (Phase.ARMING, Phase.MOVING):
            late = part.late(f"replica {part.replica.index} was not done when its turn of {seconds:.1f} s ended")
            refit.coordinator.fail(part, late)
        refit.arm_all()
