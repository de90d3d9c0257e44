"""Texts about a job for people: `xfer status`, log lines, and the lines of timeout errors. Nothing here changes the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.state import ReplicaPhase

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.state import Replica

SHOWN = 8
"""Runs of numbers, or rejected processes, that are listed."""


def here(co: Coordinator) -> str:
    o, ready = co.options, sum(r.phase is ReplicaPhase.READY for r in co.replicas.values())
    return f"{len(co.trainers)} of {o.trainers} trainers have joined, {ready} of {o.replicas} replicas are ready"


def waited_for(co: Coordinator) -> list[str]:
    """List what a refit, or the beginning of the job, waits for: one short line each."""
    if co.refit is not None:
        return co.refit.waiting_for()
    o, out = co.options, []
    if away := [i for i in range(o.trainers) if i not in co.trainers]:
        out.append(f"{_named('trainer', away)}: not connected; has xfer.connect() been called there?")
    if silent := [i for i in range(o.trainers) if i in co.trainers and i not in co.specs]:
        out.append(f"{_named('trainer', silent)}: reading the layout of its model")
    if away := [r.index for r in co.replicas.values() if r.phase is ReplicaPhase.ABSENT]:
        out.append(f"{_named('replica', away)}: not connected; has xfer.serve() been called there?")
    for r in co.replicas.values():
        if r.phase in (ReplicaPhase.FAILED, ReplicaPhase.LOST) and r.error is not None:
            out.append(f"replica {r.index}: {r.error.line()}"[:250])
        elif r.phase is ReplicaPhase.JOINING:
            if away := [w for w in range(r.size) if w not in r.workers]:
                out.append(f"replica {r.index} {_named('worker', away)}: not connected; is its engine still starting?")
            elif co.catalog is not None and (silent := [w for w in range(r.size) if w not in r.inventories]):
                out.append(f"replica {r.index} {_named('worker', silent)}: reading the layout of its model")
        elif r.phase.opening:
            out.append(awaited_ranks(r))
    return out


def awaited_ranks(r: Replica) -> str:
    """Say which ranks have not answered while a plan or a link is made for this replica."""
    ranks: dict[str, list[int]] = {}
    for c in sorted(r.pending, key=lambda c: (c.hello.role, c.hello.replica, c.hello.index)):
        kind = "trainer" if c.hello.role == "trainer" else f"replica {c.hello.replica} worker"
        ranks.setdefault(kind, []).append(c.hello.index)
    waits = " and ".join(_named(kind, numbers) for kind, numbers in ranks.items())
    reach = "; can they reach each other? `xfer doctor` tests it" if r.phase is ReplicaPhase.LINKING else ""
    return f"replica {r.index} is {r.phase.value} and waits for {waits}{reach}"


def _named(kind: str, numbers: list[int]) -> str:
    """Shorten a list: "trainer 3", "trainers 1 to 3, 7", "workers 0, 2, 4 and 93 more"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], n]
        else:
            runs.append([n])
    shown = ", ".join(" to ".join(map(str, run)) for run in runs[:SHOWN])
    more = sum(run[-1] - run[0] + 1 for run in runs[SHOWN:])
    return f"{kind}{'s' * (len(numbers) > 1)} {shown}{f' and {more} more' if more else ''}"


def status(co: Coordinator) -> m.StatusReply:
    parties = []
    for c in sorted(co.clients, key=lambda c: c.label):
        if c.hello.role == "observer":
            continue
        p = c.progress
        phase = co.refit.phase_of(c) if co.refit else "idle"
        parties.append(
            m.PartyStatus(c.label, c.hello.host, phase, *((p.wave, p.bytes_done, p.bytes_planned) if p else ()))
        )
    state = "; ".join(
        f"replica {r.index}: {r.phase.value}{' (dirty)' if r.dirty else ''} {'' if r.version is None else f'version {r.version}'}".strip()
        + (f", first weights from {r.first.source}" if r.first is not None else "")
        for r in co.replicas.values()
    )
    return m.StatusReply(
        co.refit.number if co.refit else 0,
        state,
        tuple(w[:256] for w in waited_for(co)),
        tuple(parties),
        tuple((r.index, r.version) for r in co.replicas.values() if r.version is not None),
    )


class Rejected:
    """Rejected connections, listed in timeout errors: a missing rank is often a rejected one.

    Connections that said hello are kept by rank. Those that could not prove the token are only counted: they may be anybody.
    """

    def __init__(self) -> None:
        self._refused: dict[tuple[str, int, int], str] = {}  # (role, index, replica) -> the last reason
        self._unproven, self._last = 0, ""

    def unproven(self, host: str) -> None:
        self._unproven, self._last = self._unproven + 1, host

    def refused(self, h: m.Hello, why: Sequence[str]) -> None:
        key = h.role, h.index, h.replica
        self._refused.pop(key, None)
        self._refused[key] = "; ".join(why)
        while len(self._refused) > SHOWN:
            del self._refused[next(iter(self._refused))]

    def lines(self) -> list[str]:
        """One line per rejected rank, and one for all callers with another token."""
        out = [f"rejected: {why}" for why in self._refused.values()]
        if self._unproven:
            callers = "a caller" if self._unproven == 1 else f"{self._unproven} callers"
            out.append(
                f"rejected: {callers} with another token, last from {self._last}: is token= the same everywhere?"
            )
        return out
