"""Relay chains: which replica reads its weights from which other one, when it begins, and which replicas fail with it.

With `connect(relay=True)`, replicas with equal plans whose workers are on the same hosts form a chain, ordered by their
numbers. The first one takes its bytes from the trainers, by reads or messages, each other one reads them from the replica
before it, worker by worker. So each byte leaves the trainers once for each chain, and enters each host once. Each
replica still has its own plan, its own part in the refit and its own decision. It begins after the replica before it,
unless that takes longer than `TOGETHER_S`, and it fails with that one while both are moving. A worker that cannot read
from the replica before it takes its bytes from the trainers and depends on no replica.

The chain is built again in each refit: a replica that gets another place in it opens its routes again.
transport/relay_place.py hands the bytes on.
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
    """Return the turn of replicas with this roll (a hexadecimal digest) when sources are chosen.

    It depends on the roll only, so it is equal for all replicas of one layout on the same hosts, and they get equal plans.
    """
    return int(roll, 16) % replicas


def before(co: Coordinator, replica: Replica) -> Replica | None:
    """Return the replica that this one stands behind: the nearest of a lower number in the same chain, with open routes."""
    if not co.options.relay:
        return None
    for r in _earlier(co, replica):
        if _open(r) and _same_chain(r, replica):
            return r
    return None


def place(replica: Replica | None) -> tuple[int, int] | None:
    """Return the value of `Replica.before` for replicas that stand behind this one."""
    return (replica.index, replica.epoch) if replica is not None else None


def out_of_place(co: Coordinator, replica: Replica) -> bool:
    """Whether the replica has another place in the chain than it should, and so has to open its routes again."""
    return replica.before != place(before(co, replica))


def _same_chain(a: Replica, b: Replica) -> bool:
    """Whether they can stand in one chain. Plans of replicas on different hosts may be equal."""
    return a.digest == b.digest and a.roll == b.roll


def _reopens(r: Replica) -> bool:
    return r.stale or r.relink or r.reopen


def _open(r: Replica) -> bool:
    """Whether another replica can stand behind this one now."""
    return r.phase is ReplicaPhase.READY and not _reopens(r) and len(r.hands) == r.size


def _earlier(co: Coordinator, replica: Replica) -> Iterator[Replica]:
    """Yield the replicas of lower numbers that this one may stand behind, the nearest first.

    In a refit these are replicas that hold its version, or will soon and have not been waited for too long.
    """
    refit = co.refit
    for i, r in sorted(co.replicas.items(), reverse=True):
        if i >= replica.index or r.controller is None:
            continue
        if refit is not None and i in refit.parts and replica.index in refit.parts:
            part, behind = refit.parts[i], refit.parts[replica.index]
            if part.error is not None:
                continue
            opens = len(part.armed) == r.size and r.phase.opening  # that has a deadline of its own
            if part.arming and not opens and (r.unsettled or _waited(refit, behind) >= TOGETHER_S):
                continue
            if not part.arming and part.epoch != r.epoch:  # another engine by now, without this version
                continue
        yield r


# ---- in a refit


def held_up_by(refit: Refit, part: ReplicaRefit) -> ReplicaRefit | None:
    """Return the replica that this one waits for before it opens its routes or begins, since it might stand behind it."""
    if not refit.coordinator.options.relay:
        return None
    for r in _earlier(refit.coordinator, part.replica):
        other = refit.parts[r.index]
        known = not (r.stale or part.replica.stale) and r.phase in (ReplicaPhase.LINKING, ReplicaPhase.READY)
        if known and not _same_chain(r, part.replica):
            continue
        opens = _reopens(r) or out_of_place(refit.coordinator, r)  # that one gets its own place first
        if other.arming and (r.phase.opening or r.phase is ReplicaPhase.READY and opens):
            return other
        if not other.arming and _open(r):
            return None
    return None


def _before(refit: Refit, part: ReplicaRefit) -> ReplicaRefit | None:
    """The replica that this one reads from; None if it reads from trainers only."""
    before = part.replica.before
    return refit.parts[before[0]] if part.replica.follows and before is not None else None


def may_begin(refit: Refit, part: ReplicaRefit) -> bool:
    """Whether the replica that this one reads from has begun."""
    before = _before(refit, part)
    return before is None or not before.arming


def ahead(refit: Refit, part: ReplicaRefit) -> ReplicaRefit | None:
    """For reports: return the replica that keeps this one from beginning although all of its workers are armed."""
    if len(part.armed) < part.replica.size or not refit.coordinator.options.relay:
        return None
    before = _before(refit, part)
    return before if before is not None and before.arming else held_up_by(refit, part)


def look_again(refit: Refit, part: ReplicaRefit) -> None:
    """Set a timer, since this replica waits for another one `TOGETHER_S` at most."""
    if not part.waits and _waited(refit, part) < TOGETHER_S:
        part.waits = True
        refit.coordinator.at(max(refit.ready_at, part.armed_at) + TOGETHER_S, refit.advance)


def _waited(refit: Refit, part: ReplicaRefit) -> float:
    """Return the seconds since this replica could have begun by itself."""
    ready = refit.ready_at and part.armed_at
    return refit.coordinator.now - max(refit.ready_at, part.armed_at) if ready else 0.0


def tells(refit: Refit, part: ReplicaRefit) -> bool:
    """Whether some replica reads from this one in this refit, or may yet."""
    r = part.replica
    return refit.coordinator.options.relay and any(
        i > r.index and other.error is None and _same_chain(other.replica, r) for i, other in refit.parts.items()
    )


def began(refit: Refit, part: ReplicaRefit) -> None:
    """This replica was told to go: tell it which parts are ready in the replica before it."""
    ahead = _before(refit, part)
    if ahead is not None:
        for w in part.replica.follows:
            if w in ahead.ready_parts:
                _tell(refit, part, w, ahead.ready_parts[w])


def part_ready(refit: Refit, part: ReplicaRefit, worker: int, last: int) -> None:
    """A worker has all parts up to `last`: tell the worker that reads from it."""
    part.ready_parts[worker] = max(last, part.ready_parts.get(worker, -1))
    if not refit.coordinator.options.relay:
        return
    for other in refit.parts.values():
        if other.moving and _behind(part, other) and worker in other.replica.follows:
            _tell(refit, other, worker, last)


def fallen(refit: Refit, part: ReplicaRefit, error: XferError) -> None:
    """A replica failed. A replica that reads from it cannot get a whole version, unless all parts are ready."""
    if not refit.coordinator.options.relay:
        return
    for other in refit.parts.values():
        if other.moving and _behind(part, other):
            if any(part.ready_parts.get(w) != ALL_PARTS for w in other.replica.follows):
                other.fail(
                    PeerLost(
                        f"replica {other.replica.index} takes its weights from replica {part.replica.index}, which failed",
                        [str(error), "the next refit takes them from another one, or from the trainers"],
                    )
                )


def left(co: Coordinator, replica: Replica) -> None:
    """A replica is gone. Replicas behind it unmap its memory, which is not freed before that."""
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
        client.send(m.PartReady(part.replica.index, refit.number, last))
