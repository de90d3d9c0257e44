"""Relay chains: which replica reads its weights from which other one, when it may begin, and which replicas a failure takes along.

With `connect(relay=True)`, replicas whose plans are equal stand in a chain, ordered by their numbers. The first one pulls
from the trainers, each other one from the replica before it, worker by worker, so that each byte leaves the trainers once.
Each replica still has a plan, a part in the refit and a decision of its own. It begins after the replica before it,
unless that takes longer than `TOGETHER_S`, and it fails with that one while both are moving. A worker that cannot read
from the replica before it reads from the trainers and depends on no replica.

The chain is built anew in each refit: a replica that is to stand behind another one than last time opens its routes again.
How bytes are handed on is in transport/relay_place.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import TOGETHER_S
from xfer.coordinator.state import ReplicaPhase
from xfer.errors import PeerLost, XferError

if TYPE_CHECKING:
    from xfer.coordinator.commit import ReplicaRefit
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.refit import Refit
    from xfer.coordinator.state import Replica

ALL_PARTS = (1 << 31) - 1


def turn(roll: bytes, replicas: int) -> int:
    """Which replica's turn those of this roll (its hexadecimal digest) take when senders are chosen.

    It is equal for equal plans: the same for all replicas of one layout on the same hosts, however they come and go.
    """
    return int(roll, 16) % replicas


def before(co: Coordinator, replica: Replica) -> Replica | None:
    """The replica that this one stands behind now: the nearest of a lower number with an equal plan and open routes."""
    if not co.options.relay:
        return None
    for r in _earlier(co, replica):
        if _open(r) and r.digest == replica.digest:
            return r
    return None


def place(replica: Replica | None) -> tuple[int, int] | None:
    """The value of `Replica.before` for replicas that stand behind this one."""
    return (replica.index, replica.epoch) if replica is not None else None


def out_of_place(co: Coordinator, replica: Replica) -> bool:
    """Whether it stands behind another replica than it should by now, and so has to open its routes again."""
    return replica.before != place(before(co, replica))


def _reopens(r: Replica) -> bool:
    return r.stale or r.relink or r.reopen


def _open(r: Replica) -> bool:
    """Whether another replica can stand behind it as it is."""
    return r.phase is ReplicaPhase.READY and not _reopens(r) and len(r.hands) == r.size


def _earlier(co: Coordinator, replica: Replica) -> Iterator[Replica]:
    """Replicas of lower numbers that this one may stand behind, the nearest first.

    In a refit these are replicas that hold its version, or are about to and have not been waited for too long.
    """
    refit = co.refit
    for i, r in sorted(co.replicas.items(), reverse=True):
        if i >= replica.index or r.controller is None:
            continue
        if refit is not None and i in refit.parts and replica.index in refit.parts:
            part, behind = refit.parts[i], refit.parts[replica.index]
            if part.error is not None:
                continue
            opens = len(part.armed) == r.size and r.phase.opening  # it has a deadline of its own for that
            if part.arming and not opens and (r.unsettled or _waited(refit, behind) >= TOGETHER_S):
                continue
            if not part.arming and part.epoch != r.epoch:  # another engine by now, which was not refitted
                continue
        yield r


# ---- in a refit


def held_up_by(refit: Refit, part: ReplicaRefit) -> ReplicaRefit | None:
    """The replica for which this one has to wait before it opens its routes or begins, since it might stand behind that one."""
    if not refit.coordinator.options.relay:
        return None
    for r in _earlier(refit.coordinator, part.replica):
        other = refit.parts[r.index]
        known = not (r.stale or part.replica.stale) and r.phase in (ReplicaPhase.LINKING, ReplicaPhase.READY)
        if known and r.digest != part.replica.digest:
            continue  # it has another layout
        opens = _reopens(r) or out_of_place(refit.coordinator, r)  # it finds its own place first
        if other.arming and (r.phase.opening or r.phase is ReplicaPhase.READY and opens):
            return other
        if not other.arming and _open(r):
            return None
    return None


def may_begin(refit: Refit, part: ReplicaRefit) -> bool:
    """Whether the replica that this one reads from has begun."""
    return not part.replica.follows or not refit.parts[part.replica.before[0]].arming


def ahead(refit: Refit, part: ReplicaRefit) -> ReplicaRefit | None:
    """For reports: the replica that keeps this one, all of whose workers are armed, from beginning."""
    if len(part.armed) < part.replica.size or not refit.coordinator.options.relay:
        return None
    if not may_begin(refit, part):
        return refit.parts[part.replica.before[0]]
    return held_up_by(refit, part)


def look_again(refit: Refit, part: ReplicaRefit) -> None:
    """This replica waits for another one: `TOGETHER_S` at most."""
    if not part.waits and _waited(refit, part) < TOGETHER_S:
        part.waits = True
        refit.coordinator.at(max(refit.ready_at, part.armed_at) + TOGETHER_S, refit.advance)


def _waited(refit: Refit, part: ReplicaRefit) -> float:
    """Seconds since this replica could have begun by itself."""
    ready = refit.ready_at and part.armed_at
    return refit.coordinator.now - max(refit.ready_at, part.armed_at) if ready else 0.0


def tells(refit: Refit, part: ReplicaRefit) -> bool:
    """Whether some replica reads from this one in this refit, or may yet."""
    r = part.replica
    return refit.coordinator.options.relay and any(
        i > r.index and other.error is None and other.replica.digest == r.digest for i, other in refit.parts.items()
    )


def began(refit: Refit, part: ReplicaRefit) -> None:
    """This replica was told to go: tell it which parts are complete already in the replica before it."""
    if part.replica.follows:
        ahead = refit.parts[part.replica.before[0]]
        for w in part.replica.follows:
            if w in ahead.brought:
                _tell(refit, part, w, ahead.brought[w])


def brought(refit: Refit, part: ReplicaRefit, worker: int, last: int) -> None:
    """A worker has all parts of its pull up to `last`."""
    part.brought[worker] = max(last, part.brought.get(worker, -1))
    for other in refit.parts.values():
        if other.moving and _behind(part, other) and worker in other.replica.follows:
            _tell(refit, other, worker, last)


def fallen(refit: Refit, part: ReplicaRefit, error: XferError) -> None:
    """A replica failed. One that reads from it, and was not told that all parts are complete, cannot get a whole version."""
    for other in refit.parts.values():
        if other.moving and _behind(part, other):
            if any(part.brought.get(w) != ALL_PARTS for w in other.replica.follows):
                other.fail(
                    PeerLost(
                        f"replica {other.replica.index} takes its weights from replica {part.replica.index}, which failed",
                        [str(error), "the next refit takes them from another one, or from the trainers"],
                    )
                )


def left(co: Coordinator, replica: Replica) -> None:
    """A replica is gone. Replicas behind it unmap its memory, which is not freed before."""
    for r in co.replicas.values():
        if r.before is not None and r.before[0] == replica.index:
            if r.phase in (ReplicaPhase.LINKING, ReplicaPhase.READY):
                co.planning.unmap(r)


def _behind(part: ReplicaRefit, other: ReplicaRefit) -> bool:
    r = other.replica
    return bool(r.follows) and r.before == place(part.replica)


def _tell(refit: Refit, part: ReplicaRefit, worker: int, last: int) -> None:
    client = part.replica.workers.get(worker)
    if client is not None:
        client.send(m.Brought(part.replica.index, refit.number, last))
