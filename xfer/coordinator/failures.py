"""A process reports that it failed: what ends because of it, and which processes are told.

The scope follows from the sender and its message:

    a trainer, about no replica      the refit that it names, or, while it connects, the job
    a trainer, about a replica       the plan, the link or the part in the refit of that replica
    a worker or a controller         its own replica: its joining, its plan, or its part in the refit
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.state import ReplicaPhase
from xfer.errors import PlanMismatch, XferError

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.state import Client, Replica


def heard(co: Coordinator, client: Client, msg: m.Failed) -> None:
    """Handle a report of failure."""
    error, trainer, refit = msg.error.error(), client.hello.role == "trainer", co.refit
    whole = trainer and msg.replica not in co.replicas  # it concerns no single replica
    if _too_late(co, msg, whole):
        return
    if trainer and refit is not None and msg.attempt > refit.number:
        return co.refits.refuse(msg.attempt, error)
    if whole:
        return _whole(co, client, msg, error)
    replica = co.replicas[msg.replica if client.hello.role in ("trainer", "worker") else client.hello.replica]
    first = replica.first
    if (first is None and not trainer and client.hello.replica != replica.index) or (
        first is not None and first.heard(client, msg, error)
    ):
        return  # it is about a first copy, perhaps one that is over
    if _ended_before(co, replica, msg, error, trainer) or _explained(co, msg, error, [replica]):
        return
    joining = replica.phase in (ReplicaPhase.JOINING, ReplicaPhase.READY)
    if replica.phase.opening or not trainer and not msg.attempt and joining:
        co.fail(replica, error, by=client)
    elif refit is not None and refit.concerns(replica):
        co.fail(refit.parts[replica.index], error, by=client)
    elif trainer and not msg.attempt and replica.controller is None:  # its process was to control this replica
        replica.error = error


def _whole(co: Coordinator, client: Client, msg: m.Failed, error: XferError) -> None:
    """A trainer failed for all replicas: the refit ends, or, while it connects, the job."""
    refit, replicas = co.refit, list(co.replicas.values())
    if refit is not None:
        refit.called = True
    if _explained(co, msg, error, replicas):
        return
    if refit is not None and any(refit.concerns(r) for r in replicas):
        co.fail(refit, error, by=client)
    elif msg.attempt:
        co.refits.refuse(msg.attempt, error)
    else:
        co.fail(co, error)


def _explained(co: Coordinator, msg: m.Failed, error: XferError, replicas: list[Replica]) -> bool:
    """Take the error as the reason why connections closed. Returns whether the refit waited for nothing else and has ended."""
    refit = co.refit
    if refit is None or msg.attempt != refit.number:
        return False
    # A replica that fell with another one waits for the same reason, until the same time (relays.py).
    waited = {refit.parts[r.index].why_until for r in replicas} - {0.0}
    for part in [p for p in refit.parts.values() if p.why_until in waited]:
        part.because(error)
        refit.finish_if_over()
    return co.refit is not refit


def _too_late(co: Coordinator, msg: m.Failed, whole: bool) -> bool:
    """Whether the report is about a refit that is over, and whose outcome trainers have been told."""
    if whole and msg.attempt in co.refits.finished:
        return True
    present = co.refit.number if co.refit is not None else max(co.refits.finished, default=0) + 1
    return 0 < msg.attempt < present


def _ended_before(co: Coordinator, replica: Replica, msg: m.Failed, error: XferError, trainer: bool) -> bool:
    """Whether the report is about a plan or a link that is gone already, or that can simply be made again."""
    if not msg.epoch:
        return False
    if msg.epoch != replica.epoch or not msg.attempt and not replica.phase.opening:
        return True  # several ranks report the same lost rank
    if replica.phase is ReplicaPhase.PLANNING and replica.stale:
        return True  # layouts have changed since, perhaps with the catalog: another plan is made once all are here
    outdated = replica.phase is ReplicaPhase.LINKING and isinstance(error, PlanMismatch)
    if outdated and (trainer or replica.stale) and not (co.refit and co.refit.has_told(replica)):
        co.planning.postpone(replica, error)  # a layout changed while this replica joined
        return True
    return outdated and replica.stale
