"""Rows of replicas: which replica takes its weights from which, when it may begin, and whom a failure takes along.

With `connect(relay=True)` replicas whose plans are equal stand in a row, by their numbers: the first pulls from the trainers,
each other one from the one before it, worker by worker, so that each byte leaves the trainers once. A replica still has a plan, an
attempt and a decision of its own. What ties it to the one before: it begins when that one has, unless that takes longer than
`TOGETHER_S`, and while it moves it falls with it. Before that it goes on behind another one, or by itself. A worker that cannot
read from the one before it reads from the trainers, and is tied to nobody.

The row is as it is at each refit: routes of a replica that is to stand behind another one than last time are opened anew then.
Runs on the hub's brain thread. Not here: how bytes are handed on (transport/relay_place.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xfer.errors import PeerLost, XferError
from xfer.session import messages as m
from xfer.session.bounds import TOGETHER_S

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


def before(hub: Hub, replica: Replica) -> Replica | None:
    """Whom this replica is to stand behind, as things are: the nearest of a lower number with an equal plan and open routes."""
    if not hub.options.relay:
        return None
    for r in _earlier(hub, replica):
        if r.state == "ready" and not _reopens(r) and r.digest == replica.digest and len(r.hands) == r.size:
            return r
    return None


def place(replica: Replica | None) -> tuple[int, int] | None:
    """What `Replica.before` says of those who stand behind this one."""
    return (replica.index, replica.epoch) if replica is not None else None


def out_of_place(hub: Hub, replica: Replica) -> bool:
    """Whether it stands behind another one than it should by now, and so has to open its routes again."""
    return replica.before != place(before(hub, replica))


def _reopens(r: Replica) -> bool:
    return r.stale or r.relink or r.reopen


def _earlier(hub: Hub, replica: Replica) -> Iterator[Replica]:
    """Replicas of lower numbers, the nearest first, that can still be stood behind: in an attempt, those that hold its version,
    or are about to without having been waited for too long."""
    attempt = hub.attempt
    for i, r in sorted(hub.replicas.items(), reverse=True):
        if i >= replica.index or r.controller is None:
            continue
        if attempt is not None and i in attempt.runs and replica.index in attempt.runs:
            run, behind = attempt.runs[i], attempt.runs[replica.index]
            if run.error is not None:
                continue
            opens = len(run.armed) == r.size and r.state in (
                "planning",
                "linking",
            )  # it has a deadline of its own for that
            if run.state == "arming" and not opens and (r.unsettled or _waited(attempt, behind) >= TOGETHER_S):
                continue
            if run.state != "arming" and run.epoch != r.epoch:  # another engine by now, which was not refitted
                continue
        yield r


# ---- in an attempt


def held_up_by(attempt: Attempt, run: Run) -> Run | None:
    """The one whose turn it is, where this one may not open its routes yet (it might stand behind that one), or not begin."""
    if not attempt.hub.options.relay:
        return None
    for r in _earlier(attempt.hub, run.replica):
        other = attempt.runs[r.index]
        known = not (r.stale or run.replica.stale) and r.state in ("linking", "ready")
        if known and r.digest != run.replica.digest:
            continue  # of another layout
        opens = _reopens(r) or out_of_place(attempt.hub, r)  # it finds its own place first
        if other.state == "arming" and (r.state in ("planning", "linking") or r.state == "ready" and opens):
            return other
        if other.state != "arming" and r.state == "ready" and not _reopens(r) and len(r.hands) == r.size:
            return None  # to be stood behind as it is
    return None


def may_begin(attempt: Attempt, run: Run) -> bool:
    """Whether those whom this replica reads from have begun."""
    return not run.replica.follows or attempt.runs[run.replica.before[0]].state != "arming"


def ahead(attempt: Attempt, run: Run) -> Run | None:
    """For telling: the one that keeps this one, all of whose workers are armed, from beginning."""
    if len(run.armed) < run.replica.size or not attempt.hub.options.relay:
        return None
    if not may_begin(attempt, run):
        return attempt.runs[run.replica.before[0]]
    return held_up_by(attempt, run)


def look_again(attempt: Attempt, run: Run) -> None:
    """This one waits for another: not for ever."""
    if not run.waits and _waited(attempt, run) < TOGETHER_S:
        run.waits = True
        attempt.hub.at(
            max(attempt.ready_at, run.armed_at) + TOGETHER_S,
            lambda: attempt.hub.attempt is attempt and attempt.advance(),
        )


def _waited(attempt: Attempt, run: Run) -> float:
    """Seconds since this replica could have begun by itself."""
    ready = attempt.ready_at and run.armed_at
    return time.monotonic() - max(attempt.ready_at, run.armed_at) if ready else 0.0


def tells(attempt: Attempt, run: Run) -> bool:
    """Whether some replica reads from this one in this attempt, or may yet."""
    r = run.replica
    return attempt.hub.options.relay and any(
        i > r.index and other.error is None and other.replica.digest == r.digest for i, other in attempt.runs.items()
    )


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
        if r.before is not None and r.before[0] == replica.index and r.state in ("linking", "ready"):
            hub.planning.unmap(r)


def _behind(run: Run, other: Run) -> bool:
    r = other.replica
    return bool(r.follows) and r.before == place(run.replica)


def _tell(attempt: Attempt, run: Run, worker: int, part: int) -> None:
    client = run.replica.workers.get(worker)
    if client is not None:
        client.send(m.Brought(run.replica.index, attempt.number, part))
