"""What the hub makes of a `Failed`: whom the error concerns, what ends by it, and who is told.

Runs on the hub's brain thread. How a plan, a link or an attempt ends is planning.py's and attempt.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xfer.errors import PlanMismatch, XferError
from xfer.session import messages as m

if TYPE_CHECKING:
    from xfer.session.hub import Hub
    from xfer.session.roster import Client, Replica


def heard(hub: Hub, client: Client, msg: m.Failed) -> None:
    error, trainer, attempt = msg.error.error(), client.hello.role == "trainer", hub.attempt
    if trainer and msg.replica < 0 and msg.attempt in hub.calls.finished:
        return
    if msg.attempt and msg.attempt < (
        attempt.number if attempt is not None else max(hub.calls.finished, default=0) + 1
    ):
        return  # of an attempt that is over: its outcome has been told
    if attempt is not None and msg.attempt > attempt.number and trainer:
        return hub.calls.failed_early(msg.attempt, error)
    if attempt is not None and trainer and msg.replica < 0:
        attempt.called = True
    targets = [hub.replicas[msg.replica]] if msg.replica in hub.replicas else list(hub.replicas.values())
    if not trainer:
        targets = [hub.replicas[client.hello.replica]]
    if msg.epoch and len(targets) == 1 and _left(targets[0], msg):
        return
    if msg.epoch and trainer and isinstance(error, PlanMismatch) and targets[0].state == "linking":
        if attempt is None or not attempt.has_told(targets[0]):
            return hub.planning.postpone(targets[0], error)  # its layout changed while this one joined
    if attempt is not None and msg.attempt == attempt.number:
        for r in targets:
            attempt.because(r, error)
        if hub.attempt is not attempt:
            return  # it had waited for nothing else
    joining = [r for r in targets if r.state in ("joining", "ready")]
    for r in targets:
        if r.state in ("planning", "linking") and (msg.replica >= 0 or not trainer):  # else it concerns the attempt
            hub.planning.failed(r, error)
    concerned = attempt is not None and any(attempt.concerns(r) for r in targets)
    if not trainer and not msg.attempt:  # in an attempt, its replica's part in that is what failed
        for r in joining:
            _cannot_join(hub, client, r, error, concerned)
    if concerned:
        attempt.failed(client, targets if msg.replica >= 0 or not trainer else None, error)
    elif trainer and msg.replica < 0:
        hub.calls.failed_early(msg.attempt, error)
    elif trainer and not msg.attempt:  # its process was to control this replica and cannot
        for r in targets:
            r.error = error if r.controller is None else r.error


def _left(replica: Replica, msg: m.Failed) -> bool:
    """Whether what failed is a plan or link that nobody goes by any more: several ranks say the same of one that is gone."""
    return msg.epoch != replica.epoch or not msg.attempt and replica.state not in ("planning", "linking")


def _cannot_join(hub: Hub, client: Client, r: Replica, error: XferError, concerned: bool) -> None:
    """A process of this replica gave up: in the middle of joining, or (ready) a worker could not get its lock after the plan.
    `concerned`: an attempt waits for it, whose outcome tells trainers."""
    joining, said = r.state == "joining", m.Failed(m.WireError.of(error, "rendezvous"), replica=r.index)
    r.state, r.error = "failed", error
    # Once it is ready, workers are past joining: they would take this for the end of a later refit.
    hub.broadcast((c for c in r.processes() if c is not client and (joining or c is r.controller)), said)
    if not concerned:
        hub.broadcast(hub.trainers.values(), said)
