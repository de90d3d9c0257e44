"""Which refits trainers have called, by number: what is prepared, what runs, what became of those that are over, and the
labels that versions get. One at a time runs; how it goes is attempt.py.

Runs on the hub's brain thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xfer.errors import ProtocolError, XferError
from xfer.session import messages as m
from xfer.session.attempt import Attempt

if TYPE_CHECKING:
    from xfer.session.hub import Hub
    from xfer.session.roster import Client

REMEMBERED = 64
"""Outcomes that are kept for trainers that come late to a refit that is over."""


class Calls:
    def __init__(self, hub: Hub):
        self.hub = hub
        self.finished: dict[int, m.Outcome] = {}
        self._prepared = self._label = self._ended = 0

    def failed_early(self, attempt: int, error: XferError) -> None:
        """A trainer raised before anyone entered: everyone who enters that attempt gets the same error; connecting ones now."""
        if attempt:
            self.finished[attempt] = m.Outcome(attempt, "", (), m.WireError.of(error, "rendezvous"))
        else:
            self.hub.fail_everything(error)

    def had(self, version: str) -> None:
        """Some engine has had this version: no later one gets its number."""
        if version.isdecimal() and len(version) < 19:
            self._label = max(self._label, int(version))

    def next_label(self) -> str:
        return str(self._label + 1)

    def on_Prepare(self, client: Client, msg: m.Prepare) -> None:
        number = msg.attempt
        while number in self.finished and self.finished[number].void:
            number += 1  # it has been prepared before, in vain
        if number in self.finished:
            return
        if self.hub.attempt is None:
            self.begin(number, self.hub.options.deadline_s, True)
        elif self.hub.attempt.abandoned or number > self.hub.attempt.number:
            self._prepared = max(number, self.hub.attempt.number + 1)  # what is being settled goes first

    def on_Enter(self, client: Client, msg: m.Enter) -> None:
        if msg.attempt in self.finished:
            client.send(self.finished[msg.attempt])
            return
        if self.hub.attempt is not None and self.hub.attempt.number != msg.attempt:
            late = ProtocolError(
                f"{client.label} entered attempt {msg.attempt} while attempt {self.hub.attempt.number} is running",
                ["every trainer rank must call nccl_xfer_refit() the same number of times"],
            )
            refused = m.Outcome(msg.attempt, msg.version, (), m.WireError.of(late, "rendezvous"))
            if msg.attempt > self.hub.attempt.number:  # used up, also for ranks that come to it later: they would wait for this one
                self.finished[msg.attempt] = refused
            client.send(refused)
            return
        if self.hub.failure is not None:
            client.send(m.Outcome(msg.attempt, msg.version, (), m.WireError.of(self.hub.failure, "rendezvous")))
            return
        self.begin(msg.attempt, msg.deadline_s)
        if not self.hub.attempt.abandoned:  # else its outcome, which comes soon, sends the caller on
            self.hub.attempt.enter(client, msg)

    def on_Ready(self, client: Client, msg: m.Ready) -> None:
        self.hub.take_changes(client, msg, msg.specs)
        if self.hub.attempt is not None and self.hub.attempt.number == msg.attempt:
            self.hub.attempt.ready(client, msg)

    def begin(self, number: int, deadline_s: float, prepared: bool = False) -> None:
        if self.hub.attempt is None:
            self.hub.attempt = Attempt(self.hub, number, deadline_s, prepared)
            self.hub.attempt.start()

    def end(self, outcome: m.Outcome) -> None:
        """Called by the attempt, once, when every replica has settled."""
        self.hub.timers.drop(self.hub.attempt)
        self.hub.attempt = None
        self.finished[outcome.attempt] = outcome
        # Where trainers met in the one before. In this one somebody may still ask whether all go on, and must do as they did.
        self.hub.store.forget(f"x{self._ended}/")
        self._ended = outcome.attempt
        for old in [k for k in self.finished if k < outcome.attempt - REMEMBERED]:
            del self.finished[old]
        self.hub.broadcast(self.hub.trainers.values(), outcome)
        for r in self.hub.replicas.values():
            self.hub.plan_if_complete(r)  # one that joins, and whose plan was of what this attempt found changed
        if self._prepared > outcome.attempt:
            self.begin(self._prepared, self.hub.options.deadline_s, True)
        self._prepared = 0
