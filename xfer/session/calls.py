"""Which refits trainers have called, by number: what is prepared, what runs, what became of those that are over, and the
labels that versions get. One at a time runs; how it goes is attempt.py. A call that comes while the one before is undone waits for that.

Runs on the hub's brain thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError, XferError
from xfer.session import messages as m
from xfer.session.attempt import Attempt
from xfer.session.wire import Label

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
        # What trainers have said of calls that wait for the running attempt's end, as it came, and when.
        self._waiting: list[tuple[Client, m.Enter | m.Ready, float]] = []

    def failed_early(self, attempt: int, error: XferError) -> None:
        """A trainer raised before anything of that attempt began: everyone who has entered it or does gets the same error;
        connecting ones now."""
        if not attempt:
            return self.hub.fail_everything(error)
        outcome = m.Outcome(attempt, None, (), m.WireError.of(error, "rendezvous"))
        if self.hub.attempt is not None and self.hub.attempt.number == attempt:
            return self.end(outcome)  # no replica is there, so nothing of it is to be undone
        self._use_up(outcome)

    def _use_up(self, outcome: m.Outcome) -> None:
        """An attempt that has not begun and never will: for those who wait for it, and for those who come later."""
        self.finished[outcome.attempt] = outcome
        waiting, self._waiting = self._waiting, []
        for client, msg, came in waiting:
            if msg.attempt != outcome.attempt:
                self._waiting.append((client, msg, came))
            elif isinstance(msg, m.Enter):
                self.hub.timers.drop(msg)
                client.send(outcome)

    def had(self, version: Label) -> None:
        """Some engine has had this version: no later one gets its number. A text of digits counts: engines keep labels as text."""
        text = str(version)
        if text.isdecimal() and len(text) < 19:
            self._label = max(self._label, int(text))

    def next_label(self) -> int:
        return self._label + 1

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
        self._enter(client, msg, time.monotonic())

    def _enter(self, client: Client, msg: m.Enter, came: float) -> None:
        running = self.hub.attempt
        if msg.attempt in self.finished:
            client.send(self.finished[msg.attempt])
            return
        if self.hub.failure is not None:
            client.send(m.Outcome(msg.attempt, msg.version, (), m.WireError.of(self.hub.failure, "rendezvous")))
            return
        if running is not None and running.number > msg.attempt:
            late = ProtocolError(
                f"{client.label} entered attempt {msg.attempt}, which was over long before attempt {running.number} began",
                ["every trainer rank must call nccl_xfer_refit() the same number of times"],
            )
            client.send(m.Outcome(msg.attempt, msg.version, (), m.WireError.of(late, "rendezvous")))
            return
        if running is not None and running.number < msg.attempt:
            self._wait(client, msg, came)
            return
        left = msg.deadline_s - (time.monotonic() - came)
        if running is None and left <= 0:
            outcome = self._too_late(msg)
            self._use_up(outcome)
            client.send(outcome)
            return
        self.begin(msg.attempt, left)
        if not self.hub.attempt.abandoned:  # else its outcome, which comes soon, sends the caller on
            self.hub.attempt.enter(client, msg)

    def _wait(self, client: Client, msg: m.Enter, came: float) -> None:
        """Until all of the running attempt is undone: a rank that calls again has left it by itself (it gave up on a hub that was
        silent, or was interrupted), so what is not decided of that ends now. Other ranks may hear of that end first and then call;
        they find this one's call waiting, or begun."""
        running = self.hub.attempt
        self._waiting.append((client, msg, came))
        self.hub.at(came + msg.deadline_s, lambda: self._give_up(msg), of=msg)
        running.called = True
        running.failed(
            client,
            None,
            PeerLost(f"{client.label} has left attempt {running.number}: it has called nccl_xfer_refit() anew since"),
        )

    def _give_up(self, msg: m.Enter) -> None:
        if any(x is msg for _, x, _ in self._waiting):  # else it began a moment ago
            self._use_up(self._too_late(msg))

    def _too_late(self, msg: m.Enter) -> m.Outcome:
        before = self.hub.attempt
        error = DeadlineExceeded(
            f"this refit could not begin by its deadline of {msg.deadline_s:.1f} s: the one before was still being undone",
            [f"waiting for {w}" for w in before.waiting_for()] if before is not None else [],
        )
        return m.Outcome(msg.attempt, msg.version, (), m.WireError.of(error, "rendezvous"))

    def on_Ready(self, client: Client, msg: m.Ready) -> None:
        self.hub.take_changes(client, msg, msg.specs)
        self._ready(client, msg, time.monotonic())

    def _ready(self, client: Client, msg: m.Ready, came: float) -> None:
        running = self.hub.attempt
        if running is None or msg.attempt in self.finished:
            return
        if running.number == msg.attempt:
            running.ready(client, msg)
        elif running.number < msg.attempt:
            self._waiting.append((client, msg, came))

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
        prepared, self._prepared = self._prepared, 0
        self._go_on()
        if prepared > outcome.attempt and prepared not in self.finished:
            self.begin(prepared, self.hub.options.deadline_s, True)

    def _go_on(self) -> None:
        """With the calls that have waited; what is further ahead than the one that begins now waits again."""
        waiting, self._waiting = self._waiting, []
        for client, msg, came in waiting:
            self.hub.timers.drop(msg)
            if client not in self.hub.trainers.values():
                continue  # gone, and nothing is refitted any more
            if isinstance(msg, m.Enter):
                self._enter(client, msg, came)
            else:
                self._ready(client, msg, came)
