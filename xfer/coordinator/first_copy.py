"""The first weights of a replica that joins come from another replica, the donor, if no refit runs. The trainers take no part in it:
they may be inside a step.

The donor's workers take the place of the trainers in the joiner's domain. They plan, open a link and say what they have sent as
trainers do, on a thread beside the engine, which goes on serving. The joiner arms, commits or aborts as in a refit
(commit.py). It commits the version of its donor. Then it is planned with the trainers, and takes part in the next refit.

What holds:

- The donor is the replica with the newest version of this session. It serves that version, whole.
- A refit writes no donor while a copy of it can still be committed: when all trainers are ready, every copy that is not
  decided is aborted, and its joiner takes the version of that refit. So trainers wait for no copy. A reader that has been aborted
  may still read a donor that is written by now: its bytes are never committed.
- A copy is tried once for each time that a replica joins. If there is no donor, or the donor cannot give all that the joiner
  needs, dies or is late, the trainers bring the weights in their next refit, as they do without donors.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.commit import ReplicaRefit
from xfer.coordinator.refit import Owed, Transfer
from xfer.coordinator.state import ReplicaPhase, broadcast
from xfer.errors import DeadlineExceeded, XferError

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.state import Client, Replica

logger = logging.getLogger("xfer")


def begin(co: Coordinator, joiner: Replica) -> None:
    """Choose a donor for a replica whose layouts are known, if there is one. Its plan is then made with the donor's workers."""
    donor = _donor(co, joiner)
    if donor is not None:
        joiner.tried, joiner.first = True, FirstCopy(co, joiner, donor)
        donor.gave_to.add(joiner.index)
        co.copies[joiner.first.number] = joiner.first


def _donor(co: Coordinator, joiner: Replica) -> Replica | None:
    if not co.options.first_copies or joiner.tried or co.refit is not None or co.failure is not None:
        return None
    whole = [
        r for r in co.replicas.values()
        if r is not joiner and r.complete and r.first is None and r.committed
        and r.version is not None and not r.dirty and not r.unsettled
    ]  # fmt: skip
    newest = max((r.committed for r in whole), default=0)
    read = [c.donor for c in co.copies.values()]
    some = [r for r in whole if r.committed == newest]
    return min(some, key=lambda r: (r.inventories != joiner.inventories, read.count(r), r.index), default=None)


class FirstCopy(Transfer):
    """The first copy of one replica. `parts` has the joiner's part, once its processes have joined. Nothing is staged: the joiner has no
    weights to serve meanwhile."""

    def __init__(self, co: Coordinator, joiner: Replica, donor: Replica):
        co.copied += 1
        super().__init__(co, m.FIRST_COPIES + co.copied, Owed(donor.size, co.options.replicas, joiner.index))
        self.joiner, self.donor = joiner, donor
        self.version, self.verify, self.order = donor.version, donor.verified, donor.committed
        self.source = f"replica {donor.index}"
        self.armed_s, self.ready_at = co.options.deadline_s, co.now

    @property
    def sources(self) -> list[Client]:
        return [self.donor.workers[i] for i in sorted(self.donor.workers)]

    # ---- going forward

    def linked(self) -> None:
        """Begin the copy: the link is open, and the joiner's processes have been told."""
        if not self.parts:
            self.parts[self.joiner.index] = ReplicaRefit(self, self.joiner)
            self.began = self.coordinator.now
            self.until = self.began + self.armed_s
            self.coordinator.at(self.until, self._late, of=self)
            self.arm_all()
        self.advance()

    def arm(self, replica: Replica) -> None:
        self.parts[replica.index].arm()

    def advance(self) -> None:
        for part in self.parts.values():
            if part.able():
                part.begin()
                self.owed.begin([self.joiner])
                broadcast(self.sources, self.go([part]))

    def handle(self, client: Client, msg: m.Armed | m.PartReady | m.Done | m.Committed | m.Stopped | m.Settled) -> None:
        """See `Transfer`. Ranks that are none of this copy have the same numbers."""
        if client in (*self.sources, *self.joiner.processes()):
            super().handle(client, msg)

    def _late(self) -> None:
        waiting = [f"waiting for {w}" for part in self.parts.values() for w in part.own_waiting_for()]
        late = f"the first copy of replica {self.joiner.index} ended at its deadline of {self.armed_s:.1f} s"
        self.coordinator.fail(self, DeadlineExceeded(late, waiting))

    # ---- the end

    def heard(self, client: Client, msg: m.Failed, error: XferError) -> bool:
        """Handle a failure in the domain. Returns False if the joiner cannot join at all; then this copy is over."""
        stale = msg.epoch not in (0, self.joiner.epoch) or msg.attempt not in (0, self.number)
        if stale or client.hello.role == "trainer":
            return True
        own = client.hello.replica == self.joiner.index
        if own and not msg.attempt and not msg.epoch:
            self._close()
            return False
        # After the decision only the joiner's own failures count.
        self.coordinator.fail(self, error, by=client if own else None)
        return True

    def end(self, error: XferError, by: Client | None = None, gone: bool = False) -> None:
        super().end(error, by, gone)
        if not self.parts:
            self.coordinator.stop_ranks(self.joiner, error)
            self._over(error)

    def moved_on(self, part: ReplicaRefit) -> None:
        if part.over:
            self.coordinator.soon(self.finish_if_over)

    def finish_if_over(self) -> None:
        for part in self.parts.values():
            if part.over:
                self._over(part.error)

    def _over(self, error: XferError | None) -> None:
        """End the copy. The joiner then takes its weights from the trainers."""
        r, co = self.joiner, self.coordinator
        if not self._close():
            return
        if error is None:
            logger.info(
                "xfer: replica %d has its first weights, version %r, from %s", r.index, self.version, self.source
            )
        if r.phase is ReplicaPhase.LOST:
            return
        if error is not None:
            why = f"xfer: replica {r.index} gets its first weights from the trainers in their next refit, not from {self.source}"
            logger.info("%s: %s", why, error.line())
        r.phase, r.error = ReplicaPhase.READY if r.joined else ReplicaPhase.JOINING, None
        r.relink = r.stale = True
        if co.failure is None and co.can_plan(r):
            co.planning.plan(r)
        if co.refit is not None:
            co.refit.arm(r)
            co.refit.advance()

    def _close(self) -> bool:
        """Release the donor. Returns False if it was released before."""
        r, co = self.joiner, self.coordinator
        if r.first is not self:
            return False
        r.first = None
        del co.copies[self.number]
        co.timers.drop(self)
        broadcast([*self.sources, *r.workers.values()], m.CloseRoutes(r.index, link=True))
        return True
