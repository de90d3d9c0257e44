"""What `xfer status` is told: who is connected, who is doing what, who is waited for. Reads the hub's state, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xfer.session import messages as m

if TYPE_CHECKING:
    from xfer.session.hub import Hub


def status(hub: Hub) -> m.StatusReply:
    parties = []
    for c in sorted(hub.clients, key=lambda c: c.label):
        if c.hello is None or c.hello.role == "observer":
            continue
        p = c.progress
        phase = hub.attempt.phase_of(c) if hub.attempt else "idle"
        parties.append(
            m.PartyStatus(c.label, c.hello.host, phase, *((p.wave, p.bytes_done, p.bytes_planned) if p else ()))
        )
    state = "; ".join(
        f"replica {r.index}: {r.state}{' (dirty)' if r.dirty else ''} {'' if r.version is None else f'version {r.version}'}".strip()
        for r in hub.replicas.values()
    )
    waiting = (
        hub.attempt.waiting_for()
        if hub.attempt
        else [
            f"{c.label}: {r.state}"
            for r in hub.replicas.values()
            for c in sorted(r.pending, key=lambda c: c.label)
            if r.state in ("planning", "linking")
        ]
    )
    return m.StatusReply(
        hub.attempt.number if hub.attempt else 0,
        state,
        tuple(waiting),
        tuple(parties),
        tuple((r.index, r.version) for r in hub.replicas.values() if r.version is not None),
    )
