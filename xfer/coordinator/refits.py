"""The queue of refits by number: prepared, running, finished. One runs at a time (refit.py).

A call that comes while the refit before it is still being undone waits here. Labels of versions are given here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.messages import Label
from xfer.coordinator.refit import Refit
from xfer.coordinator.state import broadcast
from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError, XferError

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.state import Client

REMEMBERED = 64
"""Outcomes that are kept for trainers that call late for a refit that is over."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A trainer's message about a refit that cannot begin yet, and the time when it came."""

    client: Client
    message: m.Enter | m.Measured | m.Ready
    came: float


class RefitQueue:
    """All refits of the session. See the module."""

    def __init__(self, coordinator: Coordinator):
        self.coordinator = coordinator
        self.finished: dict[int, m.Outcome] = {}
        self._prepared = self._label = self._ended = 0
        self._waiting: list[_Waiting] = []
        self.arm_after = 0.0  # seconds from the first call of a refit to Arm, as the refit before would have had it

    # ---- labels

    def had(self, version: Label) -> None:
        """Note a version that some engine has had, so that no later one gets its number.

        A text of digits counts as a number, since engines keep labels as text.
        """
        text = str(version)
        if text.isdecimal() and len(text) < 19:
            self._label = max(self._label, int(text))

    def next_label(self) -> int:
        return self._label + 1

    # ---- calls

    def prepare(self, msg: m.Prepare) -> None:
        """Arm the engines for a refit that no rank has called yet."""
        number, running = msg.attempt, self.coordinator.refit
        while number in self.finished and self.finished[number].void:
            number += 1  # it was prepared before and nobody called in time
        if number in self.finished:
            return
        if running is None:
            self._begin(number, self.coordinator.options.deadline_s)
        elif running.abandoned or number > running.number:
            self._prepared = max(number, running.number + 1)  # after the one that is being settled

    def enter(self, client: Client, msg: m.Enter, came: float | None = None) -> None:
        """A trainer calls. `came`: when its message came, if that was before the present event."""
        co, running = self.coordinator, self.coordinator.refit
        came = co.now if came is None else came
        if msg.attempt in self.finished:
            return client.send(self.finished[msg.attempt])
        if co.failure is not None:
            return client.send(_refused(msg, co.failure))
        if running is not None and running.number > msg.attempt:
            late = ProtocolError(
                f"{client.label} entered refit {msg.attempt}, which was over long before refit {running.number} began",
                ["every trainer rank must call nccl_xfer_refit() the same number of times"],
            )
            return client.send(_refused(msg, late))
        if running is not None and running.number < msg.attempt:
            return self._wait(client, msg, came, running)
        left = msg.asked.deadline_s - (co.now - came)
        if running is None and left <= 0:
            outcome = self._too_late(msg)
            self.use_up(outcome)
            return client.send(outcome)
        self._begin(msg.attempt, left, msg.asked)
        # If nobody called in time, the refit's outcome is about to come, and the trainer calls again.
        if co.refit is not None and not co.refit.abandoned:
            co.refit.enter(client, msg)

    def _wait(self, client: Client, msg: m.Enter, came: float, running: Refit) -> None:
        """Keep a call until the running refit is undone.

        A rank that calls again has left the running refit by itself: it gave up on a silent coordinator, or was
        interrupted. So every replica that is not decided in that refit ends now. Ranks that hear of that end first and
        then call find this call waiting, or begun.
        """
        co = self.coordinator
        self._waiting.append(_Waiting(client, msg, came))
        co.at(came + msg.asked.deadline_s, lambda: self._expire(msg), of=msg)
        running.called = True
        left = f"{client.label} has left refit {running.number}: it has called nccl_xfer_refit() again since"
        co.fail(running, PeerLost(left), by=client)

    def _expire(self, msg: m.Enter) -> None:
        if any(w.message is msg for w in self._waiting):  # else its refit has begun at this same moment
            self.use_up(self._too_late(msg))

    def _too_late(self, msg: m.Enter) -> m.Outcome:
        before = self.coordinator.refit
        error = DeadlineExceeded(
            f"this refit could not begin by its deadline of {msg.asked.deadline_s:.1f} s: the one before was still being undone",
            [f"waiting for {w}" for w in before.waiting_for()] if before is not None else [],
        )
        return _refused(msg, error)

    def told(self, client: Client, msg: m.Ready | m.Measured) -> None:
        """A trainer that has called is ready, or has measured."""
        running = self.coordinator.refit
        if running is None or msg.attempt in self.finished:
            return
        if running.number == msg.attempt:
            running.ready(client, msg) if isinstance(msg, m.Ready) else running.measured(client, msg)
        elif running.number < msg.attempt:
            self._waiting.append(_Waiting(client, msg, self.coordinator.now))

    def refuse(self, number: int, error: XferError) -> None:
        """A trainer raised before refit `number` began. Every rank that has entered it, or does later, gets the same error."""
        outcome = m.Outcome(number, None, (), m.WireError.of(error))
        running = self.coordinator.refit
        if running is not None and running.number == number:
            return self.end(outcome)  # no replica takes part, so nothing has to be undone
        self.use_up(outcome)

    # ---- beginnings and ends

    def _begin(self, number: int, deadline_s: float, asked: m.Arguments | None = None) -> None:
        co = self.coordinator
        if co.refit is None:
            co.refit = Refit(co, number, deadline_s, asked)
            co.refit.start()

    def use_up(self, outcome: m.Outcome) -> None:
        """A refit has not begun and never will: tell trainers that wait for it, and keep its outcome for those that call later."""
        self.finished[outcome.attempt] = outcome
        waiting, self._waiting = self._waiting, []
        for w in waiting:
            if w.message.attempt != outcome.attempt:
                self._waiting.append(w)
            elif isinstance(w.message, m.Enter):
                self.coordinator.timers.drop(w.message)
                w.client.send(outcome)

    def end(self, outcome: m.Outcome) -> None:
        """The running refit is over. It calls this once, when every replica has settled."""
        co = self.coordinator
        co.timers.drop(co.refit)
        if co.refit is not None:
            self.arm_after = co.refit.arm_after()
        co.refit = None
        self.finished[outcome.attempt] = outcome
        # Keys under which trainers met in the refit before. Those of this one may still be asked for.
        co.store.forget(f"x{self._ended}/")
        self._ended = outcome.attempt
        for old in [k for k in self.finished if k < outcome.attempt - REMEMBERED]:
            del self.finished[old]
        broadcast(co.trainers.values(), outcome)
        co.plan_complete()  # a replica that joins, if this refit found that layouts have changed
        prepared, self._prepared = self._prepared, 0
        self._go_on()
        if prepared > outcome.attempt and prepared not in self.finished:
            self._begin(prepared, co.options.deadline_s)

    def _go_on(self) -> None:
        """Take up the calls that have waited. A call for a later refit than the one that begins now waits again."""
        waiting, self._waiting = self._waiting, []
        for w in waiting:
            self.coordinator.timers.drop(w.message)
            if w.client not in self.coordinator.trainers.values():
                continue  # the trainer is gone, and no later refit can succeed
            if isinstance(w.message, m.Enter):
                self.enter(w.client, w.message, w.came)
            else:
                self.told(w.client, w.message)


def _refused(msg: m.Enter, error: XferError) -> m.Outcome:
    return m.Outcome(msg.attempt, msg.asked.version, (), m.WireError.of(error))
