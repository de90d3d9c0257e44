"""What `xfer status` shows: connected processes, what each does, and what is waited for. Reads the coordinator, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xfer.session import messages as m

if TYPE_CHECKING:
    from xfer.coordinator.coordinator import Coordinator


def status(co: Coordinator) -> m.StatusReply:
    parties = []
    for c in sorted(co.clients, key=lambda c: c.label):
        if c.hello is None or c.hello.role == "observer":
            continue
        p = c.progress
        phase = co.refit.phase_of(c) if co.refit else "idle"
        parties.append(
            m.PartyStatus(c.label, c.hello.host, phase, *((p.wave, p.bytes_done, p.bytes_planned) if p else ()))
        )
    replicas = co.replicas.values()
    state = "; ".join(
        f"replica {r.index}: {r.phase.value}{' (dirty)' if r.dirty else ''} {r.version and 'version ' + r.version}".strip()
        for r in replicas
    )
    if co.refit:
        waiting = co.refit.waiting_for()
    else:
        opening = [r for r in replicas if r.phase.opening]
        waiting = [f"{c.label}: {r.phase.value}" for r in opening for c in sorted(r.pending, key=lambda c: c.label)]
    return m.StatusReply(
        co.refit.number if co.refit else 0,
        state,
        tuple(waiting),
        tuple(parties),
        tuple((r.index, r.version) for r in replicas if r.version),
    )
