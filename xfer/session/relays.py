"""Rows of replicas: which replica takes its weights from which, when it may begin, and whom a failure takes along.

With `connect(relay=True)` replicas whose plans are equal stand in a row, by their numbers: the first pulls from the trainers,
each other one from the one before it, worker by worker, so that each byte leaves the trainers once. A replica still has a plan, an
attempt and a decision of its own. What ties it to the one before: it cannot begin before that one may, and while it
moves it falls with it. Before that it goes on behind another one, or by itself. A worker that cannot read from the one
before it reads from the trainers, and is tied to nobody.

Runs on the hub's brain thread. Not here: how bytes are handed on (transport/relay_place.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xfer.errors import PeerLost, XferError
from xfer.session import messages as m

if TYPE_CHECKING:
    from xfer.session.attempt import Attempt
    from xfer.session.hub import Hub
    from xfer.session.roster import Replica
    from xfer.session.run import Run

ALL_PARTS = (1 << 31) - 1


def turn(roll: bytes, replicas: int) -> int:
    """Which replica those of this roll (its hexadecimal digest) count as where senders take turns: for equal plans, the
    same for all replicas of one layout on the same hosts, however they come and go."""
    return int(roll, 16) % replicas


def pending(hub: Hub, replica: Replica) -> bool:
    """Whether a replica of a lower number is about to open its routes anew: whoever stands behind it waits for that."""
    if not hub.options.relay:
        return False
    runs = hub.attempt.runs if hub.attempt is not None else {}
    return any(
        r.state in ("planning", "linking") or r.state == "ready" and (r.stale or r.relink or r.reopen)
        for r in _earlier(hub, replica)
        if r.index not in runs or runs[r.index].state == "arming"  # else not in this attempt
    )


def before(hub: Hub, replica: Replica) -> Replica | None:
    """Whom this replica is to stand behind, as things are: the nearest of a lower number with an equal plan and open routes."""
    if not hub.options.relay:
        return None
    for r in reversed(_earlier(hub, replica)):
        if r.state == "ready" and r.digest == replica.digest and len(r.hands) == r.size == replica.size:
            return r
    return None


def place(replica: Replica | None) -> tuple[int, int] | None:
    """What `Replica.before` says of those who stand behind this one."""
    return (replica.index, replica.epoch) if replica is not None else None


def _earlier(hub: Hub, replica: Replica) -> list[Replica]:
    """Replicas of lower numbers that have not failed in this attempt."""
    runs = hub.attempt.runs if hub.attempt is not None else {}
    return [
        r
        for i, r in sorted(hub.replicas.items())
        if i < replica.index and r.controller is not None and (i not in runs or runs[i].error is None)
    ]


# ---- in an attempt


def may_begin(attempt: Attempt, run: Run) -> bool:
    """Whether those whom this replica reads from have begun."""
    return not run.replica.follows or attempt.runs[run.replica.before[0]].state != "arming"


def is_read(attempt: Attempt, run: Run) -> bool:
    """Whether some replica reads from this one in this attempt."""
    return any(_behind(run, other) for other in attempt.runs.values())


def began(attempt: Attempt, run: Run) -> None:
    """This replica was told to go: it hears which parts are there already."""
    if run.replica.follows:
        ahead = attempt.runs[run.replica.before[0]]
        for w in run.replica.follows:
            if w in ahead.brought:
                _tell(attempt, run, w, ahead.brought[w])


def brought(attempt: Attempt, run: Run, worker: int, part: int) -> None:
    """A worker has all parts up to this one."""
    run.brought[worker] = max(part, run.brought.get(worker, -1))
    for other in attempt.runs.values():
        if other.state == "moving" and _behind(run, other) and worker in other.replica.follows:
            _tell(attempt, other, worker, part)


def fallen(attempt: Attempt, run: Run, error: XferError) -> None:
    """Whoever reads from this one, and has not heard that all parts are there, will not have a whole version."""
    for other in attempt.runs.values():
        if other.state == "moving" and _behind(run, other):
            if any(run.brought.get(w) != ALL_PARTS for w in other.replica.follows):
                attempt.abort(other, PeerLost(
                    f"replica {other.replica.index} takes its weights from replica {run.replica.index}, which failed",
                    [str(error), "the next refit takes them from another one, or from the trainers"],
                ))  # fmt: skip


def left(hub: Hub, replica: Replica) -> None:
    """A replica is gone. Those behind it unmap its memory, which stays taken as long as they do not."""
    for r in hub.replicas.values():
        if r.before is not None and r.before[0] == replica.index and r.state == "ready":
            r.reopen = True
            hub.broadcast(r.workers.values(), m.CloseRoutes(r.index))


def _behind(run: Run, other: Run) -> bool:
    r = other.replica
    return bool(r.follows) and r.before == place(run.replica)


def _tell(attempt: Attempt, run: Run, worker: int, part: int) -> None:
    client = run.replica.workers.get(worker)
    if client is not None:
        client.send(m.Brought(run.replica.index, attempt.number, part))
