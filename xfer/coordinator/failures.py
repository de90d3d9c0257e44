"""A process reports that it failed: what ends because of it, and which processes are told.

The scope follows from the sender and from what it was doing:

    a trainer, about no replica      the refit that it names, or, while it connects, the job
    a trainer, about a replica       that replica's plan, link or part in the refit
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
    error, trainer, refit = msg.error.error(), client.hello.role == "trainer", co.refit
    whole = trainer and msg.replica not in co.replicas  # it concerns no single replica
    if _too_late(co, msg, whole):
        return
    if trainer and refit is not None and msg.attempt > refit.number:
        return co.refits.failed_early(msg.attempt, error)
    if whole and refit is not None:
        refit.called = True
    named = msg.replica if trainer else client.hello.replica
    targets = list(co.replicas.values()) if whole else [co.replicas[named]]
    if not whole and _ended_before(co, targets[0], msg, error, trainer):
        return
    if refit is not None and msg.attempt == refit.number:
        for r in targets:
            refit.because(r, error)
        if co.refit is not refit:
            return  # it had waited for nothing else
    joining = [r for r in targets if r.phase in (ReplicaPhase.JOINING, ReplicaPhase.READY)]
    if not whole and targets[0].phase.opening:
        co.planning.failed(targets[0], error)
    concerned = refit is not None and any(refit.concerns(r) for r in targets)
    if not trainer and not msg.attempt:  # in a refit, it is the replica's part in that which failed
        for r in joining:
            _cannot_join(co, client, r, error, concerned)
    if concerned:
        refit.fail(error, None if whole else targets, by=client)
    elif whole and msg.attempt:
        co.refits.failed_early(msg.attempt, error)
    elif whole:
        co.fail_job(error)
    elif trainer and not msg.attempt and targets[0].controller is None:  # its process was to control this replica
        targets[0].error = error


def _too_late(co: Coordinator, msg: m.Failed, whole: bool) -> bool:
    """Whether it is about a refit that is over, whose outcome has been told."""
    if whole and msg.attempt in co.refits.finished:
        return True
    present = co.refit.number if co.refit is not None else max(co.refits.finished, default=0) + 1
    return 0 < msg.attempt < present


def _ended_before(co: Coordinator, replica: Replica, msg: m.Failed, error: XferError, trainer: bool) -> bool:
    """Whether it is about a plan or a link that is gone already, or that can simply be made again."""
    if not msg.epoch:
        return False
    if msg.epoch != replica.epoch or not msg.attempt and not replica.phase.opening:
        return True  # several ranks report the same rank that is gone
    linking = replica.phase is ReplicaPhase.LINKING
    if trainer and linking and isinstance(error, PlanMismatch) and not (co.refit and co.refit.has_told(replica)):
        co.planning.postpone(replica, error)  # the trainer's layout changed while this replica joined
        return True
    return False


def _cannot_join(co: Coordinator, client: Client, r: Replica, error: XferError, concerned: bool) -> None:
    """A process of this replica gave up while joining or, after the plan, a worker could not get its lock.

    `concerned`: a refit waits for the replica; its outcome tells the trainers.
    """
    joining, said = r.phase is ReplicaPhase.JOINING, m.Failed(m.WireError.of(error, "rendezvous"), replica=r.index)
    r.phase, r.error = ReplicaPhase.FAILED, error
    # Workers of a replica that is ready are past joining: they would take this for the end of a later refit.
    co.broadcast((c for c in r.processes() if c is not client and (joining or c is r.controller)), said)
    if not concerned:
        co.broadcast(co.trainers.values(), said)
